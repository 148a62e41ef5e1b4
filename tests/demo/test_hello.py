"""The first command that anybody runs, for real: processes, a kill, equal weights, and what it all took.

What it says to people is in test_docs.py, with the page that shows it.
"""

import json

import pytest
from click.testing import CliRunner

from deltawire import Checkpoint, Replica
from deltawire.cli import main
from deltawire_demo.hello import FULL_BYTES, Hello, hash_of


@pytest.mark.process
def test_what_it_says_is_what_lies_in_the_store(tmp_path):
    url = tmp_path / "run"
    result = CliRunner().invoke(main, ["hello", "--to", str(url), "--steps", "8", "--format", "json", "--quiet"])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    data = json.loads(result.stdout)
    assert data["ok"]
    assert 2 <= data["killed_at"] <= 7
    assert data["back_from"] in (data["killed_at"], data["killed_at"] + 1)
    assert data["uploaded_bytes"] == sum(file.stat().st_size for file in url.rglob("*") if file.is_file())
    assert FULL_BYTES < data["uploaded_bytes"] < data["all_bytes"] / 4 == 2 * FULL_BYTES
    assert len(data["step_bytes"]) == 7
    assert max(data["step_bytes"]) < FULL_BYTES / 100
    with Replica(url, tmp_path / "mirror") as replica:
        assert replica.pull().version == 7
    held = Checkpoint(tmp_path / "mirror")
    assert set(data["sha256"].values()) == {hash_of(held[name].bits for name in sorted(held))}
    again = CliRunner().invoke(main, ["hello", "--to", str(url)])
    assert again.exit_code == 2
    assert "the store is not empty" in again.stderr


@pytest.mark.process
def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["hello", "--to", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert f"process ended with status 1: file://{tmp_path}/file: " in result.stderr
    assert "Traceback" not in result.stderr


def test_weights_that_differ_are_not_ok():
    hello = Hello("run", 8, sha256={"trainer": "a", "memory": "a", "folder": "b"})
    assert not hello.ok
    hello.sha256["folder"] = "a"
    assert hello.ok
    del hello.sha256["folder"]
    assert not hello.ok


@pytest.mark.parametrize(("url", "words"), [("memory://x", "other processes"), ("nothing://x", "is not a store")])
def test_a_store_that_cannot_be_used(url, words):
    result = CliRunner().invoke(main, ["hello", "--to", url])
    assert result.exit_code == 2
    assert words in result.stderr
