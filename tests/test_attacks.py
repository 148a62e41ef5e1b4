"""What others may try: secrets that must not be shown, text that takes over a terminal, runs that take another's place,
pages that ask under names of their own.
"""

import json
import os
import pty
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from deltawire import Publisher, Replica
from deltawire.cli import main
from deltawire.engines.agent import Agent, _application
from deltawire.engines.server import Server
from deltawire.errors import CorruptObject, ObjectMissing, RunMismatch
from deltawire.hosts import answered_hosts
from deltawire.redact import redacted
from deltawire.run import run as run_module
from deltawire.run.run import Run
from deltawire.run.signing import generate_key, public_key_of, signer, verifier
from deltawire.store import open_store
from deltawire.terminal import plain
from support.chains import Hooked, copy_of, fresh_url, make_run, make_weights, same, step
from support.waiting import eventually

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\nok: verified\r\x9b31m"


def run(*arguments, **options):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key.pem"
    generate_key(path)
    return path


def assert_keeps(secret, result):
    assert result.exit_code != 0
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    for start in range(0, len(secret) - 12, 4):
        assert secret[start : start + 12] not in result.output + result.stderr


# Secrets


@pytest.mark.parametrize("as_file", [True, False])
def test_a_private_key_as_the_public_one_is_not_shown(tmp_path, key, as_file):
    pem = key.read_text()
    url, _ = make_run(1, str(tmp_path / "run"))
    for command in (["ls", url], ["pull", url, "--to", tmp_path / "mirror"], ["verify", url], ["gc", url, "--plan"]):
        result = run(*command, "--public-key", key if as_file else pem)
        assert_keeps(pem.splitlines()[1], result)
        assert "private key" in result.stderr
    with pytest.raises(ValueError, match="private key") as caught:
        verifier(str(key) if as_file else pem)
    assert pem.splitlines()[1][:12] not in str(caught.value)


@pytest.mark.parametrize("given", [SECRET, "x" * 5000, "abc\0", "é" * 64, "g" * 64])
def test_what_is_no_public_key_is_not_shown(given):
    with pytest.raises(ValueError, match="expected 64 hexadecimal digits") as caught:
        verifier(given)
    assert given[:12] not in str(caught.value)


def test_a_file_that_holds_a_public_key_is_read(tmp_path, key):
    (tmp_path / "public").write_text(public_key_of(key) + "\n")
    assert verifier(str(tmp_path / "public"))(signer(key)(b"text"), b"text")


def test_a_key_in_the_place_of_its_file_is_not_shown(tmp_path, key):
    body = "".join(key.read_text().splitlines()[1:-1])
    for given in (key.read_text(), body):
        with pytest.raises(ValueError, match="path of a key file") as caught:
            signer(given)
        assert body[:12] not in str(caught.value)
        assert_keeps(body, run("publish", tmp_path, "--to", tmp_path / "run", "--sign-key", given))


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIAEXAMPLE:{SECRET}@bucket/run",
        f"https://user:{SECRET}@host/run",
        f"az://container/run?sig={SECRET}",
        f"hf://buckets/me/{SECRET}?token={SECRET}",
        f"nothing://host/?token={SECRET}",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url, tmp_path):
    with pytest.raises(ValueError, match="password or a query") as caught:
        open_store(url)
    if "hf://" not in url:
        assert SECRET[:12] not in str(caught.value)
        for command in (
            ["ls", url],
            ["pull", url, "--to", tmp_path / "mirror"],
            ["watch", url, "--to", tmp_path / "m"],
        ):
            assert_keeps(SECRET, run(*command))
    assert f"token={SECRET}" not in str(caught.value)


def test_secrets_of_servers_are_not_shown(tmp_path, monkeypatch):
    attach = ["attach", "--engine", "vllm", "--url", "http://127.0.0.1:1", "--from", tmp_path / "run"]
    assert_keeps(SECRET, run(*attach, "--api-key-env", SECRET))
    assert_keeps(SECRET, run(*attach, "--listen", 0, "--token-file", SECRET))
    monkeypatch.setenv("KEY", f"{SECRET}\n{SECRET}")
    assert_keeps(SECRET, run(*attach, "--api-key-env", "KEY"))
    with pytest.raises(ValueError, match="API key") as caught:
        Server("http://127.0.0.1:1", f"{SECRET}\n", 1.0)
    assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match="not a server's URL") as caught:
        Server(f"http://user:{SECRET}@127.0.0.1:1", None, 1.0)  # whose slash has to be written as %2F
    assert SECRET[:12] not in str(caught.value)
    assert Server("http://user:word@127.0.0.1:1", None, 1.0).url == "http://***@127.0.0.1:1"


def test_what_is_redacted_and_what_is_not():
    assert (
        redacted("abfss://container@account.dfs.core.windows.net/x")
        == "abfss://container@account.dfs.core.windows.net/x"
    )
    assert redacted("http://127.0.0.1:8000/a and s3://bucket/run") == "http://127.0.0.1:8000/a and s3://bucket/run"
    assert redacted(f"Illegal header value b'Bearer {SECRET}'") == "Illegal header value b'Bearer ***'"
    assert redacted(f"GET https://host/key?X-Amz-Signature={SECRET} failed") == "GET https://host/key?*** failed"
    assert SECRET not in redacted(f"-----BEGIN PRIVATE KEY-----\n{SECRET}")


# Terminals


@pytest.fixture
def hostile(tmp_path):
    """A run whose names, metadata, heartbeats and damage are full of escapes."""
    url, weights = str(tmp_path / "run"), make_weights(shapes={f"a{ESCAPES}": (8, 8), "b": (8,)})
    with Publisher(url, weights, run="run", anchors=None) as publisher:
        for number in range(3):
            publisher.publish(metadata={f"note{ESCAPES}": ESCAPES}).wait()
            step(weights, np.random.default_rng(number))
    told = {"version": 1, "error": ESCAPES, "engine": {"kind": ESCAPES, "address": ESCAPES}, "host": ESCAPES}
    open_store(url).put("replicas/one.json", json.dumps(told).encode())
    return url


def assert_plain(text):
    assert not [each for each in text if not each.isprintable() and each != "\n"]
    assert "ok: verified" not in text.splitlines()


def test_nothing_that_others_wrote_moves_a_cursor(hostile, tmp_path):
    delta = next((Path(hostile) / "deltas").iterdir())
    commands = [
        ["ls", hostile], ["info", hostile], ["status", hostile], ["route", hostile], ["verify", hostile],
        ["pull", hostile, "--to", tmp_path / "mirror"], ["inspect", delta], ["verify", delta],
        ["watch", hostile, "--to", tmp_path / "watched", "--until", 2, "--poll", 0.01],
        ["export", hostile, "--to", tmp_path / "out"], ["gc", hostile, "--plan"], ["compact", hostile],
        ["publish", tmp_path / "mirror", "--to", hostile],
        ["publish", tmp_path / "mirror", "--to", hostile, "--run", "x"],
        ["export", hostile, "--to", tmp_path / "trl", "--layout", "trl"],
    ]  # fmt: skip
    for command in commands:
        result = run(*command)
        assert result.output.strip(), command
        assert not isinstance(result.exception, Exception), (command, result.exception)
        assert_plain(result.stdout)
        assert_plain(result.stderr)


def test_errors_move_no_cursor_either(hostile, tmp_path):
    make_run(1, str(tmp_path / "other"))
    assert run("pull", tmp_path / "other", "--to", tmp_path / "mirror").exit_code == 0
    for command in (
        ["pull", hostile, "--to", tmp_path / "mirror"],
        ["pull", hostile, "--to", tmp_path / "x", "--run", "y"],
    ):
        result = run(*command)
        assert result.exit_code == 3
        assert "run" in result.stderr
        assert_plain(result.stderr)


def test_json_is_exact(hostile):
    found = json.loads(run("ls", hostile, "--format", "json").stdout)
    assert found["run"] == "run"
    assert found["replicas"][0]["error"] == ESCAPES
    status = json.loads(run("status", hostile, "--format", "json").stdout)
    assert status["metadata"] == {f"note{ESCAPES}": ESCAPES}
    assert status["replicas"][0]["engine"] == ESCAPES


def test_drawings_on_a_terminal_hold_only_their_own_escapes(hostile, tmp_path):
    leader, follower = pty.openpty()
    arguments = ["watch", hostile, "--to", str(tmp_path / "mirror"), "--until", "2", "--poll", "0.01"]
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire.cli", *arguments], stdout=follower, stderr=follower, stdin=follower
    )
    os.close(follower)
    written = b""
    try:
        while data := os.read(leader, 65536):
            written += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(leader)
    assert process.wait() == 0
    for forbidden in (b"\x1b]", b"\x1b[2J", b"\x07", b"\xc2\x9b"):
        assert forbidden not in written


def test_text_is_cleaned_to_one_line():
    assert plain("a\x1b[31m\tb\r\nc\u2028d\x7f") == "a [31m b  c d "
    assert plain("Ärger ▁▇ 漢字") == "Ärger ▁▇ 漢字"


# Another run in the place of the one that is followed


@pytest.fixture
def swapped(tmp_path, key):
    """A store whose run is replaced by another of the same writer; what its versions hold."""
    url, public = str(tmp_path / "store"), public_key_of(key)

    def swap():
        store = open_store(url)
        store.delete([stat.key for stat in store.list()])
        weights = make_weights(seed=5)
        with Publisher(url, weights, run="second", sign_with=key) as publisher:
            for _ in range(4):
                publisher.publish().wait()
        return copy_of(weights)

    first, _ = make_run(2, url, sign_with=key)
    return first, public, swap


def test_a_mirror_stays_with_its_run(swapped, tmp_path):
    url, public, swap = swapped
    mirror = tmp_path / "mirror"
    assert run("pull", url, "--to", mirror, "--public-key", public).exit_code == 0
    before = {file.name: file.read_bytes() for file in mirror.iterdir() if file.is_file()}
    second = swap()
    for command in ("pull", "watch"):
        result = run(command, url, "--to", mirror, "--public-key", public)
        assert result.exit_code == 3
        assert "version 1 of run demo" in result.stderr
        assert "--run second" in result.stderr
        assert "another folder" in result.stderr
    assert run("route", url, "--to", mirror).exit_code == 3
    assert {file.name: file.read_bytes() for file in mirror.iterdir() if file.is_file()} == before
    assert run("pull", url, "--to", mirror, "--public-key", public, "--run", "second").exit_code == 0
    with Replica(url, mirror, public_key=public) as replica:
        assert replica.version == 3
        assert same(replica.target.weights(), second)


def test_another_run_than_the_one_that_was_named_is_refused_before_anything_is_fetched(swapped, tmp_path):
    url, public, _ = swapped
    attach = ["attach", "--engine", "vllm", "--url", "http://127.0.0.1:1", "--from", url]
    for command in (["pull", url, "--to", tmp_path / "new"], ["watch", url, "--to", tmp_path / "new"], attach):
        result = run(*command, "--public-key", public, "--run", "second")
        assert result.exit_code == 3
        assert "holds run demo, not second" in result.stderr
    assert not (tmp_path / "new").exists()
    weights = {}
    with Replica(url, weights, run="second") as replica, pytest.raises(RunMismatch, match="holds run demo, not second"):
        replica.pull()
    assert not weights
    with Replica(url, weights, run="demo") as replica:
        assert replica.pull().version == 1


def test_weights_in_memory_stay_with_their_run(swapped):
    url, public, swap = swapped
    with Replica(url, {}, public_key=public, heartbeat_seconds=None) as replica:
        replica.pull()
        held = copy_of(replica.target.weights())
        swap()
        with pytest.raises(RunMismatch, match="held run demo, and now holds run second"):
            replica.pull()
        with (
            Replica(url, replica.target, heartbeat_seconds=None) as other,
            pytest.raises(RunMismatch, match="of run demo"),
        ):
            other.pull()
        assert same(replica.target.weights(), held)
        assert replica.version == 1


@contextmanager
def emptied(monkeypatch, by_name):
    """A store from which everything was deleted, and a replica of the run that was there."""
    url, _ = make_run(4)
    store = open_store(url)
    asked = Hooked(url)
    asked.listable = not by_name
    with Replica(asked, {}, heartbeat_seconds=None) as replica:
        replica.pull()
        store.delete([stat.key for stat in store.list()])
        monkeypatch.setattr(run_module, "HINT_SECONDS", 0.0)
        replica.run._hint_due = 0.0
        yield url, replica
        assert replica.version == 3


@pytest.mark.parametrize("by_name", [False, True])
def test_a_replica_notices_a_run_that_is_gone_or_replaced_by_a_shorter_one(by_name, monkeypatch):
    """The trainer was started over in an emptied store: the next version of the old run does not come."""
    with emptied(monkeypatch, by_name) as (url, replica):
        for _ in range(2):
            with pytest.raises(ObjectMissing, match="which held run demo, holds no run any more"):
                replica.pull()
        with Publisher(url, make_weights(), run="second") as publisher:
            publisher.publish().wait()
        for _ in range(2):
            with pytest.raises(RunMismatch, match="held run demo, and now holds run second"):
                replica.pull()


@pytest.mark.parametrize("num_versions", [2, 4])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_run_that_was_started_again_under_its_id_is_another_one(by_name, num_versions, monkeypatch):
    """Shorter, or as long: the version that the replica has is listed, and is another."""
    with emptied(monkeypatch, by_name) as (url, replica):
        make_run(num_versions, url)
        for _ in range(2):
            with pytest.raises(RunMismatch, match="held run demo, and now holds another run of that id"):
                replica.pull()


@pytest.mark.parametrize("num_versions", [2, 4, 6])
def test_a_mirror_of_a_run_that_was_started_again_under_its_id_gets_the_new_weights(num_versions, tmp_path):
    """Shorter, as long and longer than the earlier run: a number of a version alone does not say which weights."""
    url, _ = make_run(4)
    store = open_store(url)
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        replica.pull()
    store.delete([stat.key for stat in store.list()])
    weights = make_weights(seed=1)
    with Publisher(url, weights, run="demo") as publisher:
        for number in range(num_versions):
            weights["norm"].bits[number] ^= 1
            publisher.publish().wait()
    with (
        Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica,
        replica.watching(poll_seconds=0.01),
    ):
        eventually(lambda: replica.last_pull, "a pull", seconds=60)
        assert replica.version == num_versions - 1
        assert same(replica.target.weights(), copy_of(weights))


def test_a_run_that_only_a_manifest_claims_to_be_is_damage():
    url, _ = make_run(2)
    with Publisher(fresh_url(), make_weights(), run="other") as publisher:
        publisher.publish().wait()
        forged = publisher.run.store.get("manifests/00000000.json")
    open_store(url).put("manifests/00000000.json", forged)
    with pytest.raises(CorruptObject, match="of run other"):
        Run(url).manifest(0)


def test_options_that_a_run_has_already_are_refused():
    url, _ = make_run(1)
    with pytest.raises(ValueError, match="pass them to Run"):
        Replica(Run(url), {}, run="demo")


# Options that would be ignored


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["pull", "{url}", "--to", "x", "--layout", "trl", "--public-key", "0"], "--public-key only works with"),
        (["pull", "{url}", "--to", "x", "--layout", "trl", "--run", "demo"], "--run only works with"),
        (["status", "{url}", "--poll", "1"], "--poll only works with --watch"),
        (["gc", "{url}", "--plan", "--yes"], "--yes only works with"),
        (["dashboard", "{url}", "--after", "1"], "--after only works with --format json"),
        (["dashboard", "{url}", "--format", "json", "--port", "1"], "--port only works with the page"),
        (["explain", "-o", "x.html", "--port", "1"], "--port only works with"),
        (["attach", "--engine", "vllm", "--url", "http://x", "--from", "{url}", "--allow-host", "a"], "with --listen"),
    ],
)  # fmt: skip
def test_no_option_is_ignored_in_silence(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, _ = make_run(1, str(tmp_path / "run"))
    result = run(*(each.format(url=url) for each in arguments))
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
    assert sorted(os.listdir(tmp_path)) == ["run"]


# Pages from elsewhere


def test_the_agent_answers_to_its_own_names_only():
    import httpx
    import torch

    from deltawire.engines.torch import TorchEngine

    url, _ = make_run(1)
    options = {"port": 0, "heartbeat_seconds": None}
    with Agent(TorchEngine(torch.nn.Linear(2, 2)), url, **options, allowed_hosts=["agent.example"]) as agent:
        at = f"http://127.0.0.1:{agent.port}"
        for host in (
            "attacker.example",
            f"attacker.example:{agent.port}",
            "127.0.0.1.attacker.example",
            "",
            "localhost@x",
        ):
            for path in ("/status", "/health", "/metrics"):
                assert httpx.get(at + path, headers={"host": host}).status_code == 400, host
            assert httpx.post(f"{at}/nudge", headers={"host": host}).status_code == 400, host
        for host in (f"127.0.0.1:{agent.port}", "localhost", "LOCALHOST:1", "[::1]:9", "agent.example:80"):
            assert httpx.get(f"{at}/status", headers={"host": host}).status_code == 200, host


def test_which_names_are_answered():
    assert "attacker.example" not in answered_hosts("127.0.0.1")
    assert answered_hosts("127.0.0.2") == answered_hosts("localhost") == answered_hosts("127.0.0.1")
    assert answered_hosts("0.0.0.0") == answered_hosts("::") == ["*"]  # nobody knows what it is called
    assert "*" not in answered_hosts("0.0.0.0", ["agent.example"])
    assert {"10.0.0.5", "localhost", "*.example"} <= set(answered_hosts("10.0.0.5", ["*.example"]))
    for bad in ("", "a*b", "http://x", "host:80", "*."):
        with pytest.raises(ValueError, match="not a host name"):
            answered_hosts("127.0.0.1", [bad])
    with pytest.raises(TypeError, match="a list of names"):
        _application(None, None, answered_hosts("127.0.0.1", "name"))
