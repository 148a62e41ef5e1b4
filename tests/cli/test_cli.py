"""The commands as a user runs them: output, exit codes, errors that say what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from deltawire import Checkpoint, save_anchor
from deltawire.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    old = {"a.weight": rng.integers(0, 1 << 16, (300, 200), np.uint16), "b": rng.integers(0, 1 << 16, 50, np.uint16)}
    new = {name: array + (rng.random(array.shape) < 0.02).astype(np.uint16) for name, array in old.items()}
    new["b"][7] ^= 0x700
    save_anchor(old, tmp_path / "old", run="run-1", version=7, dtype="BF16")
    save_anchor(new, tmp_path / "new", run="run-1", version=8, dtype="BF16")
    return tmp_path


@pytest.fixture
def delta(folder):
    assert run("diff", folder / "old", folder / "new", "-o", folder / "d.safetensors").exit_code == 0
    return folder / "d.safetensors"


def test_diff_takes_run_and_version_from_the_checkpoint(folder):
    result = run("diff", folder / "old", folder / "new", "-o", folder / "d.safetensors", "--format", "json")
    data = json.loads(result.stdout)
    assert (data["run"], data["base_version"], data["version"]) == ("run-1", 7, 8)
    assert data["total"] == 60_050
    assert 0 < data["changed"] < 3000
    assert data["bytes"] > 0


@pytest.mark.parametrize("end", ["", ".safetensors"])
def test_a_checkpoint_without_tensors(tmp_path, end):
    save_anchor({}, tmp_path / "empty")
    assert run("diff", tmp_path / "empty", tmp_path / "empty", "-o", tmp_path / "d.safetensors").exit_code == 0
    result = run("apply", tmp_path / "empty", tmp_path / "d.safetensors", "-o", tmp_path / f"out{end}")
    assert result.exit_code == 0, result.stderr
    assert len(Checkpoint(tmp_path / f"out{end}")) == 0


def test_an_output_that_is_a_folder_is_named(folder):
    (folder / "out").mkdir()
    before = set(folder.iterdir())
    result = run("diff", folder / "old", folder / "new", "-o", folder / "out")
    assert (result.exit_code, result.stderr) == (1, f"error: {folder / 'out'}: Is a directory\n")
    assert set(folder.iterdir()) == before


def test_apply_rebuilds_the_new_checkpoint(folder, delta):
    result = run("apply", folder / "old", delta, "-o", folder / "rebuilt")
    assert result.exit_code == 0, result.stderr
    assert "version  8" in result.stdout
    rebuilt, new = Checkpoint(folder / "rebuilt"), Checkpoint(folder / "new")
    assert all(rebuilt[name].bits.tobytes() == new[name].bits.tobytes() for name in new)


def test_inspect_shows_every_tensor(delta):
    data = json.loads(run("inspect", delta, "--format", "json").stdout)
    rows = {row["name"]: row for row in data["tensors"]}
    row = rows["a.weight"]
    assert row["steps"]["1"] == row["changed"] == sum(row["steps"].values())
    assert row["bytes"] == pytest.approx(row["bytes_per_change"] * row["changed"])
    text = run("inspect", delta, "--sort", "bytes", "--limit", "1").stdout
    assert "a.weight" in text
    assert "... and 1 more" in text
    assert "B/change" in text


def test_verify(folder, delta):
    assert "every weight" in run("verify", folder / "old").stdout
    assert "structure" in run("verify", delta).stdout
    assert "every bit" in run("verify", delta, "--base", folder / "old").stdout
    state = json.loads(run("verify", folder / "new", "--format", "json").stdout)["digest"]
    assert run("verify", delta, "--digest", state).exit_code == 0
    assert run("verify", delta, "--digest", "0" * 32).exit_code == 3


def test_mismatch_exits_with_3_and_says_what_next(folder, delta):
    result = run("apply", folder / "new", delta, "-o", folder / "x")
    assert result.exit_code == 3
    assert "not the weights of version 7" in result.stderr
    assert "hint: " in result.stderr
    assert not (folder / "x").exists()
    assert run("verify", delta, "--base", folder / "new").exit_code == 3


def test_failures_exit_with_1(folder, delta):
    result = run("inspect", folder / "nothing.safetensors")
    assert result.exit_code == 1
    assert "does not exist" in result.stderr
    delta.write_bytes(delta.read_bytes()[:-1])
    assert run("verify", delta).exit_code == 1
    assert run("inspect", delta).exit_code == 1
    result = run("diff", folder / "old", folder / "new", "-o", folder / "no" / "such" / "d.safetensors")
    assert result.exit_code == 1
    assert "No such file" in result.stderr
    assert run("inspect", folder / "old" / "model.safetensors").exit_code == 1


@pytest.mark.parametrize("command", ["inspect", "apply"])
def test_a_folder_is_no_delta(folder, command):
    base, output = ([], []) if command == "inspect" else ([folder / "new"], ["-o", folder / "x"])
    result = run(command, *base, folder / "old", *output)
    assert result.exit_code == 1
    assert f"error: {folder / 'old'} is a folder, not a delta" in result.stderr


@pytest.mark.parametrize("output", ["d.safetensors", "folder"])
@pytest.mark.parametrize("command", ["diff", "apply"])
def test_errors_name_what_was_asked_for(folder, delta, command, output):
    """Not the temporary file that is written first."""
    asked = folder / "no" / output
    given = (folder / "old", folder / "new") if command == "diff" else (folder / "old", delta)
    result = run(command, *given, "-o", asked)
    assert (result.exit_code, result.stderr) == (1, f"error: {asked}: No such file or directory\n")
    taken = folder / "taken.safetensors"
    taken.mkdir()
    result = run(command, *given, "-o", taken)
    assert (result.exit_code, result.stderr) == (1, f"error: {taken}: Is a directory\n")


@pytest.mark.process
@pytest.mark.parametrize("form", ["text", "json"])
def test_output_that_nobody_takes(form):
    command = [sys.executable, "-m", "deltawire.cli", "estimate", "--params", "8b", "--format", form]
    reader, writer = os.pipe()
    os.close(reader)
    piped = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (piped.returncode, piped.stderr) == (1, "")
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["completion", "bash"], ["--help"], ["--version"], ["publish", "--help"]])
def test_output_to_a_full_disk(arguments):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "deltawire.cli", *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: the disk is full\nhint: free some space, then run the same command again\n"


def test_usage_exits_with_2(folder, delta):
    assert run("diff", folder / "old").exit_code == 2
    assert run("diff", folder / "old", folder / "new", "-o", "x", "--encoding", "zip").exit_code == 2
    assert run("verify", folder / "old", "--digest", "nope").exit_code == 2
    assert run("verify", folder / "old", "--base", folder / "old").exit_code == 2
    assert run("diff", folder / "old", folder / "new", "-o", folder / "x", "--version", "3").exit_code == 2


def test_a_traceback_only_when_asked(folder, monkeypatch):
    monkeypatch.setenv("DELTAWIRE_DEBUG", "1")
    assert run("inspect", folder / "nothing").exception.__class__.__name__ == "ObjectMissing"


def test_damaged_bits_exit_with_3(folder, delta):
    assert run("diff", folder / "old", folder / "new", "-o", delta, "--encoding", "dense").exit_code == 0
    data = bytearray(delta.read_bytes())
    data[-3] ^= 1
    delta.write_bytes(data)
    assert run("verify", delta, "--base", folder / "old").exit_code == 3
    assert run("apply", folder / "old", delta, "-o", folder / "x").exit_code == 3


@pytest.mark.process
def test_as_a_program(folder):
    """The installed script, in a process of its own; nothing on stderr when that is no terminal."""
    command = [sys.executable, "-m", "deltawire.cli", "verify", str(folder / "old"), "--format", "json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["checked"] == "every weight"
    assert result.stderr == ""
