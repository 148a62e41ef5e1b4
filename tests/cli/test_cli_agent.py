"""The commands attach and status, as a user types them."""

import itertools
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from deltawire.cli import attach, main
from deltawire.cli.watch import MOST_REFUSALS, Screen
from deltawire.engines.agent import Agent
from deltawire.errors import EngineRejected, EngineUnavailable
from deltawire.run.run import Run
from support import ROOT
from support.agents import Server, Trainer, bits
from support.chains import make_run
from support.waiting import PATIENCE, eventually


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@contextmanager
def program(*arguments, before="", **options):
    """A command in a process of its own, and what is to be done there before."""
    code = f"import sys\nsys.path[:0] = {sys.path!r}\n{before}\nfrom deltawire.cli import main\nmain()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **(pipes | options)) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def program_in_terminal(*arguments, **options):
    """The same, and a function that reads what it draws until something is there."""
    leader, follower = pty.openpty()
    seen = b""

    def read_until(text):
        nonlocal seen
        while text not in seen:
            assert select.select([leader], [], [], PATIENCE)[0], seen
            seen += os.read(leader, 65536)
        return seen

    with program(*arguments, stdout=follower, **options) as process:
        os.close(follower)
        yield process, read_until
    os.close(leader)


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "run")


@pytest.fixture
def trainer(url):
    made = Trainer(url, run="demo")
    with made.publisher:
        yield made


@pytest.fixture
def server(monkeypatch):
    """What attach takes for the server, of either kind."""
    made = Server()
    monkeypatch.setattr(attach, "make_engine", lambda *_, **__: made)
    return made


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000", "htp://127.0.0.1:8000", "http:8000", ""])
@pytest.mark.parametrize("command", ["attach", "prove"])
def test_what_is_no_url_of_a_server(tmp_path, command, url):
    """It never answers, so nobody should wait for it."""
    store = ["--from", tmp_path] if command == "attach" else []
    result = run(command, "--engine", "vllm", "--url", url, *store)
    assert result.exit_code == 2
    assert f"{url!r} is not a server's URL, such as http://127.0.0.1:8000" in result.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"])
def test_the_url_that_clients_of_openai_take(tmp_path, url):
    result = run("attach", "--engine", "vllm", "--url", url, "--from", tmp_path)
    assert result.exit_code == 2
    assert "'http://127.0.0.1:8000/v1' is where the server's API for clients is: leave out /v1" in result.stderr


@pytest.mark.process
def test_prove_without_a_server():
    """Nothing that is said on runs applies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = run("prove", "--engine", "vllm", "--url", url)
    assert result.exit_code == 1
    assert f"error: {url} does not answer" in result.stderr
    assert "hint" not in result.stderr


def attached(url, *arguments):
    return run("attach", "--engine", "vllm", "--url", "http://server", "--from", url, "--poll", 0.05, *arguments)


def test_attach_follows_until_a_version(url, trainer, server, tmp_path):
    def train():
        for version in range(3):
            eventually(lambda: server.engine.state is not None and server.engine.state.version == version)  # noqa: B023
            trainer.step()

    thread = threading.Thread(target=train)
    thread.start()
    result = attached(url, "--until", 3, "--format", "json", "--mirror", tmp_path / "mirror", "--name", "one")
    thread.join()
    assert result.exit_code == 0, result.output
    updates = [json.loads(line) for line in result.stdout.splitlines()]
    assert [update["version"] for update in updates] == [0, 1, 2, 3]
    assert [update["anchor"] for update in updates] == [True, False, False, False]
    assert updates[3]["pause_seconds"] > 0
    assert updates[3]["digest"] == str(trainer.publisher.run.manifest(3).digest)
    assert bits(server.model) == bits(trainer.model)
    again = attached(url, "--until", 3, "--mirror", tmp_path / "mirror")
    assert (again.exit_code, again.stdout) == (0, "")  # it is there already
    trainer.step()
    line = attached(url, "--until", 4, "--mirror", tmp_path / "mirror").stdout
    assert line.startswith("version 4 (from 3), lag 0,")
    assert " ms, faults 0" in line


def test_who_waits_for_a_version_does_not_wait_for_a_server_that_refuses_it(url, trainer, server):
    server.failing["bind"] = EngineRejected("a parameter that the run does not fill")
    trainer.step()
    result = attached(url, "--until", 1)
    assert result.exit_code == 1
    assert "version 1 was refused 5 times: giving up" in result.stderr
    assert result.stderr.endswith("error: a parameter that the run does not fill\n"), "no hint on what to publish"
    del server.failing["bind"]
    server.failing["status"] = EngineRejected("another kind of server")
    result = attached(url, "--until", 1)
    assert "the server has refused 5 times: giving up" in result.stderr
    assert result.stderr.endswith("error: another kind of server\n")


def test_who_waits_for_a_version_waits_for_a_server_that_is_away(url, trainer, server):
    server.go_away()
    tries = itertools.count()
    # One that refuses now and then is still waited for, and so is one that does not answer for long.
    errors = [EngineUnavailable("a server does not answer"), EngineRejected("not now")]

    def status():
        number = next(tries)
        if number > 2 * MOST_REFUSALS:
            server.failing.clear()
            return server.engine.status()
        raise errors[number % 5 == 4]

    del server.failing["status"]
    server.status = status
    result = attached(url, "--until", 0, "--poll", 0.01)
    assert result.exit_code == 0, result.output
    assert next(tries) > 2 * MOST_REFUSALS


def test_the_table_shows_the_pause(url, trainer, server):
    with Agent(server, url) as agent:
        screen = Screen(agent.replica, "vllm at http://server")
        assert "waiting" in screen.text()
        for _ in range(2):
            screen.pulled(agent.replica.pull())
            trainer.step()
    head, header, _, *rows = screen.text().splitlines()
    assert head.startswith("version 1  current  faults 0  vllm at http://server")
    names = ["version", "from", "lag", "changed", "bytes", "fetch", "decode", "apply", "pause", "ago"]
    assert header.split() == names
    assert max(map(len, rows)) < 80
    assert rows[0].split()[:3] == ["0", "anchor", "0"]
    assert rows[1].split()[:4] == ["1", "0", "0", "12"]
    assert " ms " in rows[1]


def test_a_long_fault_is_shown_whole(url, trainer, server, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    said = "the server refuses the update, for a reason " + "that has many words " * 5 + "and says what to do"
    server.failing["bind"] = EngineRejected(said)
    with Agent(server, url, poll_seconds=0.05) as agent, agent.running():
        eventually(lambda: agent.replica.error, "the refusal")
        *_, first, second, last = Screen(agent.replica, "a server").text().splitlines()
    assert " ".join((first, second, last)) == f"last fault: {said}"
    assert len(first) < 60


@pytest.mark.process
def test_attach_on_a_terminal_ends_on_a_signal(url, trainer):
    with program_in_terminal(
        "attach", "--engine", "vllm", "--url", "http://server", "--from", url, "--poll", 0.05, "--listen", 0,
        before="from deltawire.cli import attach\nfrom support.agents import Server\n"
        "attach.make_engine = lambda *_, **__: Server()",
        env={**os.environ, "DELTAWIRE_TOKEN": "s3cret"},
    ) as (process, read_until):  # fmt: skip
        address = process.stderr.readline().split()[-1]
        written = read_until(b"version 0  current")
        answer = httpx.post(f"http://{address}/nudge", headers={"Authorization": "Bearer s3cret"})
        assert answer.status_code == 202
        assert httpx.get(f"http://{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""
    assert b"\x1b[" in written
    assert b"pause" in written
    assert "0 replicas" in run("status", url).stdout


@pytest.mark.process
def test_attach_waits_for_a_server_that_is_not_there(url, trainer):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = ["attach", "--engine", "vllm", "--url", f"http://127.0.0.1:{port}", "--from", url, "--listen", 0]
    with program(*command) as process:
        address = process.stderr.readline().split()[-1]
        assert process.stderr.readline().startswith(f"fault: http://127.0.0.1:{port} does not answer")
        answer = httpx.get(f"http://{address}/health")
        assert (answer.status_code, answer.json()["error"]) == (503, "EngineUnavailable")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (0, "")
        # It may just be trying again.
        assert err in ("", "stopping after this pull; press Ctrl-C again to stop at once\n")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_attach_names_a_server_that_never_answers_and_does_not_wait_for_it_to_end(url, trainer, kind):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with program("attach", "--engine", kind, "--url", address, "--from", url) as process:
            assert process.stderr.readline() == f"waiting for {kind} at {address}, which does not answer\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE) == ("", "")
            assert process.returncode == 0


def test_attach_says_what_is_wrong(url, trainer, server, tmp_path, monkeypatch):
    monkeypatch.delenv("DELTAWIRE_TOKEN", raising=False)
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for arguments, code, text in [
            (["--mode", "patch"], 2, "--engine sglang"),
            (["--engine", "sglang", "--mode", "disk"], 2, "needs --mirror"),
            (["--listen", ":9100"], 2, "HOST:PORT"),
            (["--listen", "127.0.0.1:99999"], 2, "HOST:PORT"),
            (["--listen", "9" * 5000], 2, "HOST:PORT"),
            (["--listen", port], 1, f"cannot listen on 127.0.0.1 port {port}"),
            (["--token-file", tmp_path / "none"], 2, "only works with --listen"),
            (["--listen", 0, "--token-file", tmp_path / "none"], 2, "No such file"),
            (["--listen", 0, "--token-file", tmp_path / "empty"], 2, "is empty"),
            (["--api-key-env", "NO_SUCH_KEY"], 2, "name of an environment variable"),
            (["--name", "../x"], 2, "name"),
        ]:
            result = attached(url, *arguments)
            assert result.exit_code == code, (arguments, result.output)
            assert text in result.stderr, arguments


def test_attach_takes_the_token_from_a_file(url, trainer, server, tmp_path, monkeypatch):
    monkeypatch.setenv("DELTAWIRE_TOKEN", "other")
    (tmp_path / "token").write_text("s3cret\n")
    assert attach.token_of(tmp_path / "token") == "s3cret"
    assert attach.token_of(None) == "other"
    assert attach.host_and_port("[::1]:80") == ("::1", 80)
    assert attach.host_and_port("9100") == ("127.0.0.1", 9100)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_have_the_options_of_the_command(tmp_path, kind):
    pytest.importorskip("httpx")
    engine = attach.make_engine(
        kind, "http://127.0.0.1:9/", mode="patch", shared_folder=tmp_path, running_requests="recompute", api_key="key"
    )
    assert (engine.kind, engine.address) == (kind, "http://127.0.0.1:9")
    engine.close()


def beat(url, name, age_seconds=0.0, **status):
    """What a replica would have written some time ago."""
    path, written = Path(url, "replicas", f"{name}.json"), Path(url, "written")
    path.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps({"name": name, "run": "demo", "version": None, "error": None, **status}))
    os.utime(written, times=(time.time() - age_seconds,) * 2)
    written.replace(path)


@pytest.fixture
def fleet(url):
    """A run at version 4 and seven replicas."""
    make_run(5, url)
    vllm = {"kind": "vllm", "address": "http://host:8000"}
    beat(url, "good", version=4, engine=vllm, pause_seconds=0.0123)
    beat(url, "late", version=1)
    beat(url, "long-pull", age_seconds=300, version=1, using=["1 -> 4"])
    beat(url, "bad", version=3, engine={**vllm, "kind": "v\x1b[2Jllm"}, error="http://host:8000 does not answer\n!")
    beat(url, "away", age_seconds=300, version=4, error="old news")
    beat(url, "odd", version="4", pause_seconds=float("nan"), engine=7, error={"a": 1})
    Path(url, "replicas", "broken.json").write_text("{")
    return url


def test_status_as_json(fleet):
    result = run("status", fleet, "--format", "json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["run"], data["version"], data["step"], data["metadata"]) == ("demo", 4, None, {})
    assert 0 <= data["age_seconds"] < 600
    sizes = [file.stat().st_size for file in Path(fleet).rglob("*") if file.is_file()]
    assert (data["store"]["objects"], data["store"]["bytes"]) == (len(sizes), sum(sizes))
    rows = {row["name"]: row for row in data["replicas"]}
    assert list(rows) == ["bad", "broken", "odd", "away", "long-pull", "late", "good"]  # who needs help comes first
    assert {name: row["health"] for name, row in rows.items()} == {
        "away": "silent", "bad": "fault", "broken": "fault", "odd": "fault", "good": "ok", "late": "behind",
        "long-pull": "updating",
    }  # fmt: skip
    good = rows["good"]
    assert (good["engine"], good["lag"], good["pause_seconds"]) == ("vllm", 0, 0.0123)
    assert (rows["late"]["lag"], rows["late"]["engine"], rows["late"]["pause_seconds"]) == (3, None, None)
    assert (rows["odd"]["version"], rows["odd"]["lag"], rows["odd"]["pause_seconds"]) == (None, None, None)
    assert {health: number for health, number in data["summary"].items() if number} == {
        "replicas": 7, "ok": 1, "behind": 1, "updating": 1, "silent": 1, "fault": 3,
    }  # fmt: skip


def test_status_as_a_table(fleet):
    text = run("status", fleet).stdout
    lines = text.splitlines()
    assert lines[0].startswith("run demo: version 4, ")
    assert lines[1].startswith("in store: ")
    assert lines[2] == "7 replicas: 1 ok, 1 behind, 1 updating, 1 silent, 3 fault"
    assert lines[4].split() == ["replica", "engine", "version", "lag", "pause", "last", "seen", "health"]
    assert any(re.fullmatch(r"good +vllm +4 +0 +12\.3 ms +\d+ s +ok", line) for line in lines)
    assert "silent: no heartbeat for 5 min" in text
    assert "fault: http://host:8000 does not answer !" in text
    assert "\x1b" not in text


def test_status_of_an_agent_that_is_running(url, trainer, server):
    trainer.publisher.publish(step=70, metadata={"reward": 0.5}).wait(PATIENCE)
    assert "0 replicas" in run("status", url).stdout
    with Agent(server, url, name="one", poll_seconds=0.05) as agent, agent.running():
        agent.wait(1, PATIENCE)
        row = eventually(lambda: [row for row in status_of(url)["replicas"] if row["version"] == 1])[0]
        assert (row["name"], row["engine"], row["lag"], row["health"]) == ("one", "torch", 0, "ok")
        assert re.search(r'version 1, step 70, \d+ s ago, \{"reward": 0.5\}', run("status", url).stdout)


def status_of(url):
    return json.loads(run("status", url, "--format", "json").stdout)


def test_status_without_a_run_or_a_version(url, tmp_path):
    result = run("status", url)
    assert result.exit_code == 1
    assert "hint: start it with: deltawire publish" in result.stderr
    Run(url).start("demo")
    beat(url, "early")
    assert "no version yet\nin store: " in run("status", url).stdout
    assert "\n1 replica: 1 ok" in run("status", url).stdout
    assert status_of(url)["version"] is None


@pytest.mark.process
def test_status_goes_on_and_prints_what_changes(fleet):
    with program("status", fleet, "--watch", "--poll", 0.05, "--format", "json") as process:
        first = json.loads(process.stdout.readline())
        assert first["summary"]["behind"] == 1
        beat(fleet, "late", version=4)
        second = json.loads(process.stdout.readline())
        assert (second["summary"]["behind"], second["summary"]["ok"]) == (0, 2)
        os.remove(os.path.join(fleet, "replicas", "good.json"))
        assert json.loads(process.stdout.readline())["summary"]["replicas"] == 6
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.process
def test_status_draws_in_place_on_a_terminal(fleet):
    with program_in_terminal("status", fleet, "-w", "--poll", 0.05) as (process, read_until):
        read_until(b"7 replicas")
        beat(fleet, "new", version=4)
        written = read_until(b"8 replicas")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""
    assert b"\x1b[13A\r" in written  # up, over what was there


GUIDE = (ROOT / "docs" / "guides" / "agent.md").read_text()


def test_the_example_of_the_guide_runs(capsys):
    example, nudges = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(nudges, "agent.md", "exec"), {})
    exec(compile(example, "agent.md", "exec"), {})
    assert re.match(r"version 0, current, port \d+", capsys.readouterr().out)


@pytest.mark.process
def test_the_commands_of_the_guide_are_commands(url, trainer, server, tmp_path):
    lines = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("deltawire ")]
    commands += [line.split()[2:] for line in GUIDE.splitlines() if line.startswith("ExecStart=")]
    (tmp_path / "token.txt").write_text("s3cret\n")
    assert len(commands) == 5
    for name, *arguments in commands:
        with main.make_context("deltawire", [name]) as program:
            main.commands[name].make_context(name, arguments, parent=program)
    with Agent(server, url, port=0, token="s3cret", poll_seconds=0.05) as agent, agent.running():
        agent.wait(0, PATIENCE)
        for line in (line for line in lines if line.startswith("curl ")):
            command = line.replace("curl ", "curl -sSf ").replace("9100", str(agent.port))
            subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE)
