"""What the commands on runs say when something is wrong: one clear message, the right exit code, nothing changed."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from deltawire.maintain.audit import audit
from deltawire.run.run import Run
from support.chains import seal, unsealed
from support.command_line import bits, program, run, told
from support.waiting import PATIENCE

WRONG_KEY = "5866666666666666666666666666666666666666666666666666666666666666"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def delta(store, name):
    (path,) = (store / "deltas").glob(f"{name}-*.safetensors")
    return path


def says(result, code, *words):
    """One message and perhaps a hint, no traceback, nothing on stdout."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") + result.stderr.count("Error: ") == 1
    return result


URL_COMMANDS = [
    ["pull", "URL", "--to", "DIR"],
    ["watch", "URL", "--to", "DIR"],
    ["ls", "URL"],
    ["status", "URL"],
    ["info", "URL"],
    ["route", "URL"],
    ["verify", "URL"],
    ["gc", "URL"],
    ["compact", "URL"],
    ["export", "URL", "--to", "DIR"],
]


def filled(command, url, folder):
    return [{"URL": url, "DIR": folder}.get(word, word) for word in command]


@pytest.mark.parametrize("command", URL_COMMANDS, ids=lambda command: command[0])
def test_bad_url(command, tmp_path):
    says(run(*filled(command, "ftp://host/run", tmp_path / "out")), 2, "is not a store", "s3://bucket/prefix")
    says(run(*filled(command, "http://[host/run", tmp_path / "out")), 2, "'http://[host/run' is not a URL")
    says(run(*filled(command, tmp_path / ("a" * 300), tmp_path / "out")), 1, "a" * 200)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [each for each in URL_COMMANDS if each[0] != "watch"], ids=lambda each: each[0])
def test_missing_run(command, tmp_path):
    url = f"file://{tmp_path}/nothing"
    says(
        run(*filled(command, url, tmp_path / "out")), 1, "there is no run at", "hint: start it with: deltawire publish"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_missing_credentials(tmp_path):
    """An empty environment: refused in seconds, with the names of what is missing."""
    started = time.monotonic()
    command = [sys.executable, "-m", "deltawire.cli", "pull", "s3://no-such-bucket-of-ours/run", "--to", tmp_path / "m"]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert "AWS_ACCESS_KEY_ID" in result.stderr
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert time.monotonic() - started < 60
    assert not (tmp_path / "m").exists()


def test_missing_version(tmp_path, store):
    says(run("pull", store, "--to", tmp_path / "m", "--version", 99), 1, "version 99 does not exist", "deltawire ls")
    says(run("verify", store, "--version", 99), 1, "version 99 does not exist")
    assert not (tmp_path / "m").exists()


def test_missing_checkpoint(tmp_path, store):
    says(run("publish", tmp_path / "none", "--to", store), 1, "does not exist")
    says(run("publish", tmp_path, "--to", tmp_path / "new"), 1, "is not a checkpoint")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["publish", "no.txt", "--to", "STORE"], 1, "safetensors file: it has 2 bytes\nhint: fetch or create"),
    (["publish", "step-6", "--to", "STORE", "--as", "fp8_per_block"], 1, "there is nothing to quantize\n"),
    (["publish", "step-6", "--to", "new", "--base", "nothing"], 1, "it has no model.safetensors: check base=\n"),
    (["publish", "step-6", "--to", "memory:x"], 2, "other processes cannot see this store; use a folder or a bucket\n"),
    (["publish", "step-6", "--to", "Memory:x"], 2, "other processes cannot see this store; use a folder or a bucket\n"),
    (["demo", "--store", "memory:x"], 2, "--store memory:x: other processes cannot see this store; use a folder or a "),
    (["demo", "--store", "ftp://x"], 2, "'ftp://x' is not a store"),
    (["pull", "STORE", "--to", "m", "--layout", "trl"], 1, "as TRL's layout has: check the URL\n"),
    (["export", "STORE", "--to", "m", "--layout", "trl", "--version", 9], 1, "or was removed\nhint: list the versions"),
])  # fmt: skip
def test_hints_are_about_what_is_wrong(tmp_path, store, steps, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.txt").write_text("no")
    (tmp_path / "step-6").symlink_to(steps / "step-6")
    result = says(run(*[store if each == "STORE" else each for each in arguments]), code, said)
    assert result.stderr.count("hint: ") == said.count("hint: ")


@pytest.mark.parametrize("command", [
    ["pull", "STORE", "--to", ""], ["export", "STORE", "--to", ""], ["diff", "A", "B", "-o", ""], ["keygen", "-o", ""],
    ["publish", "", "--to", "STORE"], ["publish", "A", "--to", "STORE", "--sign-key", ""], ["inspect", ""],
    ["demo", "--folder", ""], ["estimate", "--config", ""], ["explain", "-o", ""],
])  # fmt: skip
def test_an_empty_path_is_none(tmp_path, store, steps, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    given = {"STORE": store, "A": steps / "step-0", "B": steps / "step-1"}
    says(run(*[given.get(word, word) for word in command]), 2, "the path is empty: name a file or folder")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("command", [
    ["pull", "STORE", "--to", "URL"], ["watch", "STORE", "--to", "URL", "--until", 0],
    ["export", "STORE", "--to", "URL"],
    ["diff", "A", "B", "-o", "URL"], ["keygen", "-o", "URL"], ["publish", "URL", "--to", "STORE"], ["inspect", "URL"],
])  # fmt: skip
def test_a_url_is_no_path(tmp_path, store, steps, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    given = {"STORE": store, "URL": "s3://bucket/out", "A": steps / "step-0", "B": steps / "step-1"}
    says(run(*[given.get(word, word) for word in command]), 2, "s3://bucket/out is a URL, but this must be a file or")
    assert not (tmp_path / "s3:").exists()


def test_a_folder_that_cannot_be_read(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    if os.access(locked, os.R_OK):
        pytest.skip("this user may read everything")
    says(run("verify", locked), 1, f"error: {locked}: Permission denied")
    locked.chmod(0o700)


def test_nobody_is_told_to_publish_to_a_web_server(tmp_path, web_server):
    url = f"http://127.0.0.1:{web_server.port}/nothing"
    result = says(run("pull", url, "--to", tmp_path / "m"), 1, f"there is no run at {url}")
    assert "hint: " not in result.stderr


def test_a_damaged_checkpoint(tmp_path, store):
    (tmp_path / "damaged.safetensors").write_text("x")
    for command in (["publish", tmp_path / "damaged.safetensors", "--to", store],
                    ["pull", store, "--to", tmp_path / "m", "--base", tmp_path / "damaged.safetensors"]):  # fmt: skip
        said = says(run(*command), 1, "damaged.safetensors", "fetch or create the file again")
        assert "deltawire verify" not in said.stderr, "the store is not what is damaged"


def test_usage(tmp_path, store, steps):
    assert run("publish", steps / "step-0").exit_code == 2
    assert run("publish", steps / "step-0", "--to", store, "--metadata", "nothing").exit_code == 2
    assert run("pull", store, "--to", tmp_path / "m", "--public-key", "abc").exit_code == 2
    assert run("verify", steps / "step-0", "--shallow").exit_code == 2
    assert run("watch", store, "--to", tmp_path / "m", "--poll", 0).exit_code == 2


@pytest.fixture
def signed(tmp_path, steps):
    """A signed run with two versions, and its key."""
    public = told("keygen", "-o", tmp_path / "key.pem")["public_key"]
    for number in range(2):
        told("publish", steps / f"step-{number}", "--to", tmp_path / "signed", "--sign-key", tmp_path / "key.pem")
    return tmp_path / "signed", public


def test_wrong_key(tmp_path, signed, steps):
    url, public = signed
    folder = tmp_path / "m"
    says(run("pull", url, "--to", folder, "--public-key", WRONG_KEY), 3, "not signed with the given key", "hint: ")
    assert not folder.exists()
    told("pull", url, "--to", folder, "--public-key", public, "--version", 0)
    for command in ("pull", "watch"):
        says(run(command, url, "--to", folder, "--public-key", WRONG_KEY), 3, "not signed with the given key")
    assert told("verify", folder)["digest"] == told("info", url, "--version", 0)["version"]["digest"]
    result = run("verify", url, "--public-key", WRONG_KEY)
    assert result.exit_code == 3
    assert "SignatureMismatch" in result.stdout
    told("keygen", "-o", tmp_path / "other.pem")
    result = run("publish", steps / "step-2", "--to", url, "--sign-key", tmp_path / "other.pem")
    says(result, 3, "not signed with the given key", "--sign-key")


def test_what_writes_to_a_signed_run_needs_its_key(signed, steps):
    url, public = signed
    for command in (["publish", steps / "step-2", "--to", url], ["compact", url, "--anchor"]):
        says(run(*command), 3, "holds a signed run", "--sign-key")
    assert told("verify", url, "--public-key", public)["num_versions"] == 2


def test_unsigned_run_with_a_key(tmp_path, store, signed):
    says(run("pull", store, "--to", tmp_path / "m", "--public-key", signed[1]), 3, "is not signed", "hint: ")
    assert not (tmp_path / "m").exists()
    assert run("verify", store, "--public-key", signed[1]).exit_code == 3


def test_a_version_that_was_slipped_into_a_signed_run(tmp_path, signed, store):
    url, public = signed
    told("pull", url, "--to", tmp_path / "m", "--public-key", public)
    shutil.copy(store / "manifests" / "00000002.json", url / "manifests")
    says(run("pull", url, "--to", tmp_path / "m", "--public-key", public), 3, "is not signed")
    assert json.loads((tmp_path / "m" / "deltawire.json").read_text())["version"] == 1
    found = audit(Run(url, public_key=public))
    assert [(problem.where, problem.error) for problem in found.problems] == [
        ("manifests/00000002.json", "SignatureMismatch")
    ]


def test_a_damaged_object_without_another_route(tmp_path, store, steps):
    folder = tmp_path / "m"
    told("pull", store, "--to", folder, "--version", 2)
    flip(delta(store, "00000004-from-00000003"))
    says(run("pull", store, "--to", folder), 1, "has SHA-256", "deltawire verify")
    assert bits(folder) == bits(steps / "step-2")
    assert run("verify", folder).exit_code == 0
    assert told("pull", store, "--to", folder, "--version", 3)["version"] == 3
    result = run("verify", store)
    assert result.exit_code == 3
    assert "damaged" in result.stdout
    assert "00000004-from-00000003" in result.stdout
    data = json.loads(run("verify", store, "--format", "json").stdout)
    assert not data["ok"]
    assert [(each["version"], each["error"]) for each in data["problems"]] == [(4, "CorruptObject"), (4, "BrokenChain")]
    assert data["problems"][1]["where"] == "version 4 to 5"
    assert data["num_proven"] == 4
    assert run("verify", store, "--shallow").exit_code == 0
    assert told("verify", store, "--version", 3)["ok"]
    says(run("export", store, "--to", tmp_path / "out"), 1, "has SHA-256")
    assert not (tmp_path / "out").exists()


def test_a_damaged_object_with_another_route(tmp_path, store, steps):
    folder = tmp_path / "m"
    told("compact", store)
    flip(delta(store, "00000002-from-00000001"))
    result = run("pull", store, "--to", folder)
    assert result.exit_code == 0, result.output
    assert "took another route" in result.stderr
    assert bits(folder) == bits(steps / "step-5")
    data = json.loads(run("verify", store, "--format", "json").stdout)
    assert [each["error"] for each in data["problems"]] == ["CorruptObject", "BrokenChain"]
    assert data["problems"][1]["where"] == "version 2 to 3"
    assert data["num_proven"] == 3  # 0, 1 and 5, which the skip delta leads to


def test_verify_finds_what_is_missing_or_short(store):
    delta(store, "00000001-from-00000000").unlink()
    path = delta(store, "00000005-from-00000004")
    path.write_bytes(path.read_bytes()[:-1])
    for options in ((), ("--shallow",)):
        result = run("verify", store, *options, "--format", "json")
        assert result.exit_code == 3
        found = {(each["version"], each["error"]) for each in json.loads(result.stdout)["problems"]}
        assert found == {(1, "ObjectMissing"), (5, "CorruptObject"), (1, "BrokenChain")}


def test_verify_finds_damaged_documents(store):
    told("compact", store)
    (store / "manifests" / "00000003.json").write_text("{")
    manifest = unsealed((store / "manifests" / "00000004.from-00000000.json").read_bytes())
    manifest["hop"]["digest"] = "0" * 32
    (store / "manifests" / "00000004.from-00000000.json").write_bytes(seal(manifest))
    (store / "run.json").chmod(0o644)
    found = {(each.where, each.error) for each in audit(Run(store)).problems}
    assert ("manifests/00000003.json", "CorruptObject") in found
    assert ("manifests/00000004.json", "DigestMismatch") in found
    (store / "run.json").write_text("[]")
    (problem,) = audit(Run(store)).problems
    assert (problem.where, problem.error) == ("run.json", "CorruptObject")


def test_verify_finds_weights_that_are_not_what_was_stated(store):
    """Every hash is right, and yet a delta leads elsewhere: someone has written both."""
    path = store / "manifests" / "00000005.json"
    manifest = unsealed(path.read_bytes())
    path.write_bytes(seal(json.loads(json.dumps(manifest).replace(manifest["digest"], "1" * 32))))
    errors = {(each.version, each.error) for each in audit(Run(store)).problems}
    assert (5, "CorruptObject") in errors
    assert audit(Run(store), deep=False).ok


def test_verify_says_when_there_is_no_anchor(store):
    told("compact", store, "--anchor")
    told("gc", store, "--keep-anchors", 1, "--yes")
    for document in (store / "manifests").glob("*.anchor.json"):
        document.unlink()
    assert "MissingAnchor" in {each.error for each in audit(Run(store)).problems}


def test_an_audit_of_an_empty_run(tmp_path):
    run_there = Run(tmp_path / "run")
    run_there.start("empty")
    found = audit(run_there)
    assert (found.ok, found.run, found.num_versions) == (True, "empty", 0)
    assert told("ls", tmp_path / "run")["versions"] == []
    assert "none yet" in run("info", tmp_path / "run").stdout
    says(run("pull", tmp_path / "run", "--to", tmp_path / "m"), 1, "has no version yet")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 kB: a model fits once, and not twice."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk, num_free_pages=0):
    """Leave only so many pages of a disk; the file to remove."""
    taken = disk / "other"
    taken.write_bytes(b"x" * (shutil.disk_usage(disk).free - 4096 * num_free_pages))
    return taken


@pytest.mark.process
def test_full_disk(store, steps, small_disk):
    """With a little more room each time, so that every write is the one that fails, at one time or another."""
    folder = small_disk / "m"
    told("pull", store, "--to", folder, "--version", 2)
    failures = 0
    for num_free_pages in range(60):
        taken = fill(small_disk, num_free_pages)
        result = run("pull", store, "--to", folder)
        taken.unlink()
        if result.exit_code == 0:
            break
        failures += 1
        says(result, 1, "the disk is full", "hint: free some space")
        assert told("verify", folder)["digest"] == told("info", store, "--version", 2)["version"]["digest"]
        assert bits(folder) == bits(steps / "step-2")
    assert failures > 3
    assert bits(folder) == bits(steps / "step-5")


@pytest.mark.process
def test_watch_goes_on_when_the_disk_has_room_again(store, steps, small_disk):
    folder = small_disk / "m"
    told("pull", store, "--to", folder, "--version", 2)
    taken = fill(small_disk)
    watching = program("watch", store, "--to", folder, "--poll", 0.05, "--until", 5)
    assert "fault: " in (line := watching.stderr.readline())
    assert "the disk is full" in line
    taken.unlink()
    _, err = watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 0, err
    assert bits(folder) == bits(steps / "step-5")


@pytest.mark.process
def test_full_disk_at_an_anchor(store, steps, small_disk):
    (small_disk / "other").write_bytes(b"x" * (200 << 10))
    says(run("pull", store, "--to", small_disk / "m"), 1, "the disk is full")
    says(run("export", store, "--to", small_disk / "e"), 1, "the disk is full")
    assert not (small_disk / "e").exists()
    (small_disk / "other").unlink()
    told("pull", store, "--to", small_disk / "m")
    assert bits(small_disk / "m") == bits(steps / "step-5")


@pytest.mark.process
def test_publish_to_a_full_disk(steps, small_disk):
    told("publish", steps / "step-0", "--to", small_disk / "run")
    fill(small_disk)
    says(run("publish", steps / "step-1", "--to", small_disk / "run"), 1, "the disk is full", "hint: ")
    (small_disk / "other").unlink()
    assert told("publish", steps / "step-1", "--to", small_disk / "run")["version"] == 1
    assert told("verify", small_disk / "run")["ok"]


def test_a_folder_that_is_not_a_mirror(store, steps):
    before = sorted(steps.iterdir())
    says(run("pull", store, "--to", steps / "step-0"), 1, "is not empty and not a mirror")
    assert sorted(steps.iterdir()) == before


def test_a_fenced_publisher(tmp_path, store, steps, monkeypatch):
    """Another writer commits between our upload and our commit."""
    from deltawire.run.run import Run as Chain

    commit = Chain.commit

    def late(self, data, manifest):
        monkeypatch.setattr(Chain, "commit", commit)
        told("publish", steps / "step-6", "--to", store, "--base", steps / "step-5")
        commit(self, data, manifest)

    monkeypatch.setattr(Chain, "commit", late)
    result = run("publish", steps / "step-6", "--to", store, "--base", steps / "step-5")
    says(result, 1, "another writer has published version 6", "hint: ")
    assert told("verify", store)["ok"]
