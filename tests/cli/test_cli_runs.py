"""The commands on runs, as a user types them, against folders: output as text and JSON, and what they leave behind."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from deltawire import Checkpoint, open_store, save_anchor
from deltawire.cli import runs
from deltawire.run.run import Run
from deltawire.terminal import handling_signals
from support.command_line import bits, program, run, told
from support.waiting import eventually


def test_publish_starts_with_an_anchor_and_goes_on_with_deltas(tmp_path, steps):
    url = tmp_path / "run"
    metadata = ["--metadata", "reward=0.5", "--metadata", "note=first"]
    first = told("publish", steps / "step-0", "--to", url, "--run", "demo", "--step", 100, *metadata)
    assert (first["run"], first["version"], first["kind"], first["step"]) == ("demo", 0, "anchor", 100)
    second = told("publish", steps / "step-1", "--to", url)
    assert (second["version"], second["kind"], second["base"]) == (1, "delta", 0)
    assert 0 < second["changed"] < 2000
    assert second["ratio"] > 20
    files = [file.stat().st_size for file in url.rglob("*") if file.is_file()]
    assert first["all_bytes"] + second["all_bytes"] == sum(files)
    assert second["bytes"] < second["all_bytes"]
    text = run("publish", steps / "step-2", "--to", url, "--base", steps / "step-1").stdout
    assert "2 of run demo" in text
    assert "times smaller than all weights" in text
    assert told("publish", steps / "step-3", "--to", url, "--anchor")["kind"] == "anchor"
    info = told("info", url, "--version", "0")["version"]
    assert info["metadata"] == {"reward": 0.5, "note": "first"}


def test_a_publish_that_is_interrupted_publishes_nothing(tmp_path, store, steps, monkeypatch):
    """Closing its publisher would commit the version."""
    kind, waiting, wait_for = type(open_store(store)), [], runs.wait_for
    put = kind.put

    def interrupted(self, key, data):
        if key.startswith("deltas/"):
            eventually(lambda: waiting, "the command to wait")
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            eventually(lambda: waiting[0].is_stopped, "the command to notice")
        put(self, key, data)

    monkeypatch.setattr(kind, "put", interrupted)
    monkeypatch.setattr(runs, "wait_for", lambda publication, own: (waiting.append(own), wait_for(publication, own)))
    # A program that runs the tests may have another one.
    with handling_signals(signal.default_int_handler):
        result = run("publish", steps / "step-6", "--to", store)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "publishing version 6 failed: it was interrupted" in result.stderr
    assert "Aborted!" in result.stderr
    assert Run(store).latest() == 5


def test_publish_takes_a_mirror_as_the_base(tmp_path, store, steps):
    run("pull", store, "--to", tmp_path / "mirror")
    assert told("publish", steps / "step-6", "--to", store, "--base", tmp_path / "mirror")["kind"] == "delta"
    told("pull", store, "--to", tmp_path / "mirror")
    assert bits(tmp_path / "mirror") == bits(steps / "step-6")


def test_publish_refuses_what_would_not_be_a_delta(tmp_path, store, steps):
    before = sorted(store.rglob("*"))
    result = run("publish", steps / "step-6", "--to", store, "--base", steps / "step-2")
    assert result.exit_code == 3
    assert "does not hold version 5 of run demo" in result.stderr
    assert "hint: " in result.stderr
    result = run("publish", steps / "step-6", "--to", store, "--run", "other", "--base", steps / "step-5")
    assert result.exit_code == 1
    assert "holds run demo, not other" in result.stderr
    save_anchor({"c": np.zeros(5, np.float32)}, tmp_path / "other")
    result = run("publish", tmp_path / "other", "--to", store)
    assert result.exit_code == 1
    assert "--anchor" in result.stderr
    assert sorted(store.rglob("*")) == before


def test_publish_in_parts_and_in_another_encoding(tmp_path, steps):
    url = tmp_path / "run"
    first = told("publish", steps / "step-0", "--to", url, "--max-file-bytes", 200)
    assert first["objects"] == 4  # two shards, their index, and config.json
    second = told("publish", steps / "step-1", "--to", url, "--encoding", "dense", "--max-file-bytes", 200)
    assert second["objects"] == 2
    assert set(second["encodings"]) == {"dense"}
    told("pull", url, "--to", tmp_path / "mirror")
    assert bits(tmp_path / "mirror") == bits(steps / "step-1")


def test_pull_brings_a_folder_to_any_version(tmp_path, store, steps):
    folder = tmp_path / "mirror"
    first = told("pull", store, "--to", folder, "--version", 1)
    assert (first["version"], first["anchor"], first["lag"]) == (1, True, 4)
    assert bits(folder) == bits(steps / "step-1")
    assert (folder / "config.json").read_text() == (steps / "step-1" / "config.json").read_text()
    text = run("pull", store, "--to", folder).stdout
    assert "5 of run demo, from version 1" in text
    assert bits(folder) == bits(steps / "step-5")
    again = told("pull", store, "--to", folder)
    assert (again["objects"], again["bytes"], again["lag"]) == (0, 0, 0)
    assert "already there" in run("pull", store, "--to", folder).stdout
    assert run("verify", folder).exit_code == 0


def test_a_pulled_folder_loads_with_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    for number in range(2):
        model.save_pretrained(tmp_path / f"step-{number}")
        assert run("publish", tmp_path / f"step-{number}", "--to", tmp_path / "run").exit_code == 0
        told("pull", tmp_path / "run", "--to", tmp_path / "mirror")
        loaded = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "mirror", dtype=torch.bfloat16)
        expected = model.state_dict()
        assert loaded.state_dict().keys() == expected.keys()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)


def test_ls(tmp_path, store):
    data = told("ls", store)
    assert [row["version"] for row in data["versions"]] == list(range(6))
    assert [row["step"] for row in data["versions"]] == [0, 10, 20, 30, 40, 50]
    assert data["versions"][0]["kind"] == "anchor"
    assert data["versions"][5]["base"] == 4
    assert 0.01 < data["versions"][5]["density"] < 0.03
    assert data["replicas"] == []
    sizes = {str(file.relative_to(store)): file.stat().st_size for file in store.rglob("*") if file.is_file()}
    assert (data["store"]["objects"], data["store"]["bytes"]) == (len(sizes), sum(sizes.values()))
    assert {kind: each["objects"] for kind, each in data["store"]["kinds"].items()} == {
        "deltas": 5, "skip deltas": 0, "anchors": 2, "documents": len(sizes) - 7,
    }  # fmt: skip
    told("compact", store, "--anchor")
    (store / "replicas").mkdir(exist_ok=True)
    (store / "replicas" / "far.json").write_text(json.dumps({"name": "far", "version": 2, "error": None}))
    data = told("ls", store, "--limit", 2)
    assert (data["num_versions"], [row["version"] for row in data["versions"]]) == (6, [4, 5])
    assert data["versions"][0]["skip_deltas_from"] == [0]
    assert data["versions"][1]["further_anchor"]
    for row in data["versions"]:
        start = f"{row['version']:08}"
        own = [file for where in ("manifests", "deltas", "anchors") for file in store.glob(f"{where}/{start}*")]
        own += [file for folder in own if folder.is_dir() for file in folder.iterdir()]
        assert row["bytes"] < row["all_bytes"] == sum(file.stat().st_size for file in own if file.is_file())
    assert sum(each["bytes"] for each in data["store"]["kinds"].values()) == data["store"]["bytes"]
    assert data["store"] == {key: told("info", store)["run"][key] for key in data["store"]}
    assert (data["replicas"][0]["name"], data["replicas"][0]["lag"]) == ("far", 3)
    text = run("ls", store, "--limit", 2).stdout
    assert "showing the last 2" in text
    assert "from 0" in text
    assert "far" in text
    assert re.search(r"^in store: \S+ kB in \d+ objects: deltas \S+ k?B, skip deltas \S+ k?B, anchors ", text, re.M)


def test_info(store, steps):
    data = told("info", store)
    assert (data["run"]["id"], data["run"]["versions"], data["run"]["anchors"], data["run"]["signed"]) == (
        "demo", 6, 1, False,
    )  # fmt: skip
    version = data["version"]
    assert version["digest"] == json.loads(run("verify", steps / "step-5", "--format", "json").stdout)["digest"]
    assert [hop["version"] for hop in version["route"]["hops"]] == list(range(6))
    for each in version["hop"]["objects"]:
        assert (store / each["key"]).stat().st_size == each["bytes"]
    text = run("info", store, "--version", 0).stdout
    assert "kind       anchor" in text
    assert "anchors/00000000-" in text


def test_plan_fetches_nothing(tmp_path, store):
    from_nothing = told("route", store)
    assert from_nothing["have"] is None
    assert from_nothing["hops"][0]["base"] is None
    data = told("route", store, "--from", 3)
    assert [hop["base"] for hop in data["hops"]] == [3, 4]
    assert sum(each["bytes"] for each in data["objects"]) == data["bytes"]
    run("pull", store, "--to", tmp_path / "mirror", "--version", 3)
    assert told("route", store, "--to", tmp_path / "mirror") == data
    assert told("route", store, "--to", tmp_path / "new") == from_nothing
    save_anchor({"w": np.zeros(4, np.float16)}, tmp_path / "of-no-run")
    assert told("route", store, "--to", tmp_path / "of-no-run") == from_nothing
    assert "delta from 4" in run("route", store, "--from", 4).stdout
    assert "nothing to fetch" in run("route", store, "--from", 5).stdout
    assert run("route", store, "--from", 5, "--to", tmp_path).exit_code == 2
    assert not (tmp_path / "new").exists()


def test_compact_adds_what_the_chain_lacks(tmp_path, store, steps):
    assert [(row["version"], row["base"]) for row in told("compact", store)["added"]] == [(4, 0)]
    assert "nothing to add" in run("compact", store).stdout
    assert told("compact", store, "--anchor", "--dry-run")["would_add"] == [{"version": 5, "base": None}]
    assert [(row["version"], row["base"]) for row in told("compact", store, "--anchor")["added"]] == [(5, None)]
    assert told("compact", store, "--anchor", "--dry-run")["would_add"] == told("compact", store, "--anchor")["added"]
    assert len(list(store.glob("anchors/00000005-*"))) == 1
    assert told("route", store, "--version", 4)["want"] == 4
    assert told("verify", store)["num_skips"] == 1
    told("pull", store, "--to", tmp_path / "mirror")
    assert bits(tmp_path / "mirror") == bits(steps / "step-5")


def test_gc_shows_and_then_removes(store):
    told("compact", store, "--anchor")
    planned = told("gc", store, "--keep-anchors", 1, "--plan")
    assert planned["removals"]
    assert not planned["removed"]
    assert all((store / removal["key"]).exists() for removal in planned["removals"])
    assert "would remove" in run("gc", store, "--keep-anchors", 1, "--plan").stdout
    refused = run("gc", store, "--keep-anchors", 1)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    done = told("gc", store, "--keep-anchors", 1, "--yes")
    assert done["removals"] == planned["removals"]
    assert not any((store / removal["key"]).exists() for removal in planned["removals"])
    assert told("verify", store)["ok"]
    assert told("gc", store, "--keep-anchors", 1)["removals"] == []


def test_export_writes_a_checkpoint_that_says_its_version(tmp_path, store, steps):
    data = told("export", store, "--to", tmp_path / "out", "--version", 2)
    assert data["version"] == 2
    assert bits(tmp_path / "out") == bits(steps / "step-2")
    assert (tmp_path / "out" / "config.json").exists()
    assert Checkpoint(tmp_path / "out").version == 2
    assert run("export", store, "--to", tmp_path / "one.safetensors").exit_code == 0
    assert bits(tmp_path / "one.safetensors") == bits(steps / "step-5")
    assert told("verify", tmp_path / "one.safetensors")["stated_digest"]
    result = run("export", store, "--to", tmp_path / "out")
    assert result.exit_code == 1
    assert "already exists" in result.stderr
    assert Checkpoint(tmp_path / "out").version == 2


def test_the_layout_of_trl_and_back(tmp_path, store, steps):
    assert len(told("export", store, "--to", tmp_path / "trl", "--layout", "trl")["keys"]) == 6
    data = told("pull", tmp_path / "trl", "--to", tmp_path / "back", "--layout", "trl", "--version", 3)
    assert data["step"] == 3
    assert bits(tmp_path / "back") == bits(steps / "step-3")


def test_verify_looks_at_the_whole_run(store):
    data = told("verify", store)
    assert data["ok"]
    assert (data["num_versions"], data["num_proven"], data["num_anchors"], data["num_deltas"]) == (6, 6, 1, 5)
    assert "every hash" in run("verify", store).stdout
    assert told("verify", f"file://{store}", "--shallow")["num_proven"] == 0
    assert told("verify", store, "--version", 2)["num_versions"] == 3
    assert run("verify", store, "--digest", "0" * 32).exit_code == 2
    (store / "deltas" / "00000009-from-00000008-abcdef.safetensors").write_bytes(b"given up")
    data = told("verify", store)
    assert (data["ok"], data["num_orphans"], data["orphan_bytes"]) == (True, 1, 8)


def test_a_signed_run(tmp_path, steps):
    key, url = tmp_path / "key.pem", tmp_path / "run"
    public = told("keygen", "-o", key)["public_key"]
    assert len(public) == 64
    assert key.stat().st_mode & 0o77 == 0
    assert run("keygen", "-o", key).exit_code == 1
    for number in range(5):
        assert run("publish", steps / f"step-{number}", "--to", url, "--sign-key", key).exit_code == 0
    assert run("compact", url, "--sign-key", key).exit_code == 0
    assert told("info", url)["run"]["signed"]
    (tmp_path / "key.pub").write_text(public + "\n")
    for given in (public, tmp_path / "key.pub"):
        assert told("pull", url, "--to", tmp_path / "mirror", "--public-key", given)["version"] == 4
    assert told("verify", url, "--public-key", public)["ok"]
    assert "checked" in run("verify", url, "--public-key", public).stdout


def publish_all(url, steps, numbers):
    for number in numbers:
        base = steps / f"step-{number - 1}"
        assert run("publish", steps / f"step-{number}", "--to", url, "--base", base).exit_code == 0


@pytest.mark.process
def test_watch_follows_a_run_until_a_version(tmp_path, steps):
    url, folder = tmp_path / "run", tmp_path / "mirror"
    watching = program("watch", url, "--to", folder, "--poll", 0.05, "--until", 3, "--format", "json", "--name", "w")
    assert "waiting for a run" in watching.stderr.readline()
    assert run("publish", steps / "step-0", "--to", url).exit_code == 0
    first = json.loads(watching.stdout.readline())
    assert (first["version"], first["anchor"]) == (0, True)
    publish_all(url, steps, [1, 2, 3])
    out, err = watching.communicate(timeout=180)
    assert watching.returncode == 0, err
    pulls = [json.loads(line) for line in out.splitlines()]
    assert pulls[-1]["version"] == 3
    assert pulls[-1]["lag"] == 0
    assert bits(folder) == bits(steps / "step-3")
    assert told("ls", url)["replicas"] == []


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_ends_cleanly_on_a_signal(tmp_path, store, number):
    watching = program("watch", store, "--to", tmp_path / "mirror", "--poll", 30)
    line = watching.stdout.readline()
    assert "version 5 (anchor), lag 0" in line
    assert len(told("ls", store)["replicas"]) == 1
    watching.send_signal(number)
    out, err = watching.communicate(timeout=180)
    assert (watching.returncode, out, err) == (0, "", "")
    assert told("ls", store)["replicas"] == []
    assert run("verify", tmp_path / "mirror").exit_code == 0


@pytest.mark.process
@pytest.mark.parametrize("form", ["text", "json"])
def test_watch_ends_when_nobody_takes_its_output(tmp_path, store, form):
    with program("watch", store, "--to", tmp_path / "mirror", "--poll", 0.05, "--format", form) as watching:
        watching.stdout.close()
        try:
            assert (watching.wait(timeout=180), watching.stderr.read()) == (1, "")
        finally:
            watching.kill()
    assert told("ls", store)["replicas"] == []
    with Path("/dev/full").open("w") as full:
        arguments = ("watch", store, "--to", tmp_path / "other", "--poll", 0.05, "--format", form)
        command = [sys.executable, "-m", "deltawire.cli", *map(str, arguments)]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180)
    assert (result.returncode, result.stderr.splitlines()[0]) == (1, "error: the disk is full")


def in_terminal(*arguments):
    """What a command writes to a terminal, and its exit code."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "deltawire.cli", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower)
    os.close(follower)
    written = b""
    try:
        while data := os.read(leader, 65536):
            written += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(leader)
    return written.decode(), process.wait()


@pytest.mark.process
def test_terminals_see_tables_and_progress(tmp_path, store):
    written, code = in_terminal("watch", store, "--to", tmp_path / "mirror", "--poll", 0.05, "--until", 5)
    assert code == 0
    assert "version 5  current" in written
    assert "\x1b[" in written
    written, code = in_terminal("pull", store, "--to", tmp_path / "other")
    assert code == 0
    assert "[########################]" in written
    written, code = in_terminal("pull", store, "--to", tmp_path / "quiet", "--quiet")
    assert "\x1b[" not in written


@pytest.mark.process
def test_run_commands_stay_light():
    heavy = {"numpy", "numba", "obstore", "torch"}
    code = f"import sys\nfrom deltawire.cli import main\nprint({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_ages_are_in_one_unit():
    from deltawire.terminal import age_text

    assert [age_text(seconds) for seconds in (0.2, 119, 120, 7200, 86400 * 3)] == [
        "0 s",
        "119 s",
        "2 min",
        "2 h",
        "3 d",
    ]


def test_a_path_can_be_a_url(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told("ls", "run")["run"] == told("ls", f"file://{store}")["run"] == "demo"
    assert Path("run/run.json").exists()
    assert time.time() - told("info", "run")["run"]["created"] < 600
