"""What people see at a terminal: colours, tables that fit, hints, dry runs, completion. Each on a real one, a pty."""

import fcntl
import json
import logging
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
from click.testing import CliRunner

from deltawire import Replica, diff, terminal
from deltawire.cli import main
from deltawire.run.run import Run
from deltawire.store import open_store
from deltawire.terminal import Tinted, table
from support.chains import make_run
from support.waiting import PATIENCE


def at_a_terminal(*arguments, columns=100, **environment):
    """What a command writes to a terminal of so many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire.cli", *map(str, arguments)], stdin=follower, stdout=follower, stderr=follower,
        env={**clean, "TERM": "xterm", **environment},
    )  # fmt: skip
    os.close(follower)
    found = b""
    # Reading fails once the last writer has closed it.
    while True:
        try:
            found += os.read(leader, 1 << 16)
        except OSError:
            break
    os.close(leader)
    assert process.wait(PATIENCE) == 0, found
    return found.decode().replace("\r\n", "\n")


@pytest.fixture
def folder(tmp_path):
    """A run with a replica that is well, one that is behind, and one with a fault and a long name."""
    make_run(6, str(tmp_path / "run"))
    store = open_store(str(tmp_path / "run"))
    told = {"well": {"version": 5}, "late": {"version": 1}, "x" * 90: {"version": 5, "error": "no room " * 20}}
    for name, fields in told.items():
        store.put(f"replicas/{name}.json", json.dumps({"time": time.time(), **fields}).encode())
    return tmp_path / "run"


def widest(text):
    """The longest line of the tables; sentences wrap."""
    return max(len(line) for line in text.splitlines() if "  " in line)


@pytest.mark.process
def test_health_has_a_colour_and_tables_fit(folder):
    text = at_a_terminal("status", folder)
    assert "\x1b[32mok\x1b[0m" in text
    assert "\x1b[33mbehind\x1b[0m" in text
    assert "\x1b[31mfault: no room" in text
    bare = re.sub(r"\x1b\[\d+m", "", text)
    assert widest(bare) < 100
    assert "…" in bare
    assert "\x1b" not in at_a_terminal("status", folder, NO_COLOR="1")
    narrow = at_a_terminal("ls", folder, columns=80, NO_COLOR="1")
    assert widest(narrow) < 80
    piped = CliRunner().invoke(main, ["status", str(folder)]).stdout
    assert "\x1b" not in piped
    assert "x" * 90 in piped, "programs get everything"


def test_a_table_without_a_terminal_is_as_wide_as_it_needs():
    assert table(["a", "b"], [["x" * 200, Tinted("ok", "green")]]).splitlines()[2].startswith("x" * 200)
    hostile = table(["a"], [["\x02red spoofed\x03\x1b[31m"]])
    assert "\x1b" not in hostile
    assert "\x02" not in hostile


@pytest.mark.process
def test_a_table_that_is_too_wide_is_continued_below(tmp_path):
    old = {f"model.layers.{n}.self_attn.q_proj.weight": np.arange(300_000, dtype=np.uint16) for n in range(2)}
    diff(old, {name: array + 1 for name, array in old.items()}, dtype="BF16").save(tmp_path / "delta")
    text = at_a_terminal("inspect", tmp_path / "delta", "--quiet", columns=80)
    tables = text.split("\n\n")[1:]
    assert widest("\n".join(tables)) < 80
    assert all(each.startswith("tensor") and each.count("model.layers.") == 2 for each in tables), text
    heads = [word for each in tables for word in each.splitlines()[0].split("  ") if word.strip()]
    assert [word.strip() for word in heads if word.strip() != "tensor"] == [
        "encoding", "dtype", "shape", "changed", "density", "bytes", "B/change",
        "1 step", "2", "3-4", "5-8", ">8 steps",
    ]  # fmt: skip


@pytest.mark.process
def test_hints_name_the_next_command(tmp_path):
    make_run(2, str(tmp_path / "run"))
    assert f"next: start a replica with: deltawire watch {tmp_path / 'run'}" in at_a_terminal(
        "status", tmp_path / "run"
    )
    pulled = at_a_terminal("pull", tmp_path / "run", "--to", tmp_path / "mirror", columns=400)
    assert f"next: keep it current with: deltawire watch {tmp_path / 'run'} --to {tmp_path / 'mirror'}" in pulled
    assert "next:" not in at_a_terminal("pull", tmp_path / "run", "--to", tmp_path / "mirror", "--quiet")
    (tmp_path / "run").rename(tmp_path / "my run")
    pulled = at_a_terminal("pull", tmp_path / "my run", "--to", tmp_path / "my mirror", columns=400)
    assert f"deltawire watch '{tmp_path / 'my run'}' --to '{tmp_path / 'my mirror'}'" in pulled
    missing = CliRunner().invoke(main, ["ls", "no run"])
    assert missing.stderr.endswith("deltawire publish CHECKPOINT --to 'no run'\n")


@pytest.mark.process
def test_what_is_logged_has_a_line_of_its_own(tmp_path):
    drawn = at_a_terminal("warmup", "--bits", 8, NUMBA_CACHE_DIR=str(tmp_path))
    assert re.search(r"  0%\r\x1b\[Kdeltawire: compiling kernels .*\n\r", drawn)


@pytest.mark.process
@pytest.mark.parametrize("more", [(), ("--params", "1t", "--sites", 5, "--replicas", 1000, "--joins-per-day", 20)])
def test_an_estimate_fits_80_columns(more):
    text = at_a_terminal("estimate", "--params", "8b", "--quiet", *more, columns=80)
    assert "…" not in text
    assert widest(text) < 80


@pytest.mark.process
def test_an_estimate_shows_how_far_it_is():
    assert "estimate  [" in at_a_terminal("estimate", "--params", "8b")
    assert "estimate  [" not in at_a_terminal("estimate", "--params", "8b", "--quiet")


@pytest.mark.process
def test_a_command_that_is_ended_removes_its_temporary_files(tmp_path):
    command = [sys.executable, "-m", "deltawire.cli", "hello"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("trainer ") for line in process.stderr)
        assert list(tmp_path.iterdir())
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def told(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments), "--format", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def files(folder):
    return {str(each.relative_to(folder)): each.stat().st_mtime_ns for each in folder.rglob("*") if each.is_file()}


def test_a_dry_run_says_what_would_happen_and_writes_nothing(tmp_path):
    url = tmp_path / "run"
    make_run(6, str(url), skips=())
    with Replica(str(url), tmp_path / "old") as replica:
        replica.pull(4)
    with Replica(str(url), tmp_path / "new") as replica:
        replica.pull(5)
    before = files(tmp_path)
    fresh = told("publish", tmp_path / "new", "--to", tmp_path / "elsewhere", "--dry-run")
    assert (fresh["version"], fresh["kind"], fresh["dry_run"]) == (0, "anchor", True)
    assert fresh["run"] is None  # its id is made when it is published
    arguments = ["publish", str(tmp_path / "new"), "--to", str(tmp_path / "elsewhere"), "--dry-run"]
    assert "would be  0 of a new run\n" in CliRunner().invoke(main, arguments).stdout
    named = told("publish", tmp_path / "new", "--to", tmp_path / "elsewhere", "--dry-run", "--run", "mine")
    assert named["run"] == "mine"
    again = told("publish", tmp_path / "new", "--to", url, "--dry-run", "--step", 9)
    assert (again["version"], again["changed"], again["step"]) == (6, 0, 9)
    route = told("pull", url, "--to", tmp_path / "old", "--dry-run")
    assert (route["have"], route["want"], len(route["hops"])) == (4, 5, 1)
    assert told("pull", url, "--to", tmp_path / "none", "--dry-run")["have"] is None
    assert told("gc", url, "--dry-run", "--keep-anchors", 1)["removed"] is False
    assert told("compact", url, "--dry-run")["would_add"] == [{"version": 4, "base": 0}]
    assert files(tmp_path) == before
    assert not (tmp_path / "elsewhere").exists()

    # As it then is.
    told("publish", tmp_path / "old", "--to", tmp_path / "other")
    planned = told("publish", tmp_path / "new", "--to", tmp_path / "other", "--dry-run")
    done = told("publish", tmp_path / "new", "--to", tmp_path / "other")
    same = ("run", "version", "kind", "changed", "digest", "bytes")
    assert [planned[key] for key in same] == [done[key] for key in same]
    assert Run(str(tmp_path / "other")).versions() == [0, 1]
    assert [(hop["version"], hop["base"]) for hop in told("compact", url)["added"]] == [(4, 0)]


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(tmp_path, shell):
    script = CliRunner().invoke(main, ["completion", shell]).stdout
    assert "_DELTAWIRE_COMPLETE" in script
    assert told("completion", shell)["script"].strip() == script.strip()
    if shutil.which(shell) is None:
        return
    (tmp_path / "script").write_text(script)
    checked = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    if shell == "bash":
        # The function that bash calls, for a word that was begun.
        asked = f". {tmp_path}/script; COMP_WORDS=(deltawire stat); COMP_CWORD=1; _deltawire_completion deltawire"
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        found = subprocess.run(
            ["bash", "-c", f'{asked}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True,
            env={**os.environ, "PATH": path},
        )  # fmt: skip
        assert found.stdout.split() == ["status"], found.stderr


def test_a_drawing_is_not_shifted_by_what_is_printed_meanwhile(monkeypatch):
    seen = []
    monkeypatch.setattr("click.echo", lambda text, **_: seen.append(text))
    monkeypatch.setattr(terminal, "is_terminal", lambda _: True)
    drawing = terminal.Drawing()
    drawing.draw("one\ntwo")
    drawing.draw("one\ntwo")
    assert seen.pop().startswith("\x1b[2A\rone")
    terminal.Notices().emit(logging.makeLogRecord({"msg": "a warning"}))
    drawing.draw("one\ntwo")
    assert seen.pop().startswith("\rone"), "below the warning, and not over it"
    drawing.draw("one\ntwo")
    assert seen.pop().startswith("\x1b[2A\rone")
