"""What lies in a store or a checkpoint folder and should not: huge files, pipes, strange names. Nothing hangs."""

import os
import resource
import socket

import numpy as np
import pytest
from click.testing import CliRunner

import deltawire
from deltawire import Replica
from deltawire.cli import main
from deltawire.errors import CorruptObject, DeltawireError, LimitExceeded, ObjectMissing
from deltawire.format.checkpoint import Checkpoint, save_anchor
from deltawire.maintain.audit import audit
from deltawire.maintain.gc import plan_gc
from deltawire.run.heartbeat import read_heartbeats
from deltawire.run.keys import manifest_key
from deltawire.run.manifest import MOST_BYTES
from deltawire.run.run import Run
from deltawire.store import open_store
from support.chains import make_run, pulled
from support.command_line import told

# Bounded reads

WEIGHTS = {"w": np.arange(6, dtype=np.float32), "v": np.ones(2, np.float32)}


def test_a_huge_manifest_takes_no_memory(tmp_path):
    url, _ = make_run(2, tmp_path / "run")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (tmp_path / "run" / manifest_key(2)).open("wb") as file:
        file.truncate(3_000_000_000)
    with pytest.raises(LimitExceeded, match="3000000000 bytes"):
        pulled(url)
    assert [problem.error for problem in audit(Run(url)).problems] == ["LimitExceeded"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_documents_beyond_their_limit_are_not_read(tmp_path):
    url, _ = make_run(2, tmp_path / "run")
    for key, size in (("run.json", MOST_BYTES + 1), ("replicas/one.json", 1 << 20)):
        path = tmp_path / "run" / key
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
    with pytest.raises(LimitExceeded):
        _ = Run(url).id
    (tmp_path / "run" / "run.json").unlink()
    assert not Run(url).exists()
    assert read_heartbeats(Run(url)) == []


def test_huge_files_of_a_mirror_and_a_checkpoint(tmp_path):
    url, _ = make_run(1)
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        replica.pull()
    with (tmp_path / "mirror" / "deltawire.json").open("wb") as file:
        file.truncate(3_000_000_000)
    with pytest.raises(CorruptObject, match=r"deltawire\.json"):
        Checkpoint(tmp_path / "mirror")
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        replica.pull()
    (tmp_path / "folder").mkdir()
    with (tmp_path / "folder" / "model.safetensors.index.json").open("wb") as file:
        file.truncate(3_000_000_000)
    with pytest.raises(CorruptObject, match="weight_map"):
        Checkpoint(tmp_path / "folder")


def test_heartbeats_that_say_odd_things():
    url, _ = make_run(1)
    # Numbers that no float can hold, and that have a sum which no float can hold.
    huge = b'{"pause_seconds": 1%s}' % (b"0" * 400)
    many = b'{"last_pull": {"fetch_seconds": 1e308, "decode_seconds": 1e308, "apply_seconds": 1e308}}'
    said = b'{"error": true, "version": []}', b"[]", b"{", b'{"version": 1e400}', huge, many
    for number, text in enumerate(said):
        open_store(url).put(f"replicas/{number}.json", text)
    rows = told("ls", url)["replicas"]
    assert [row["error"] for row in rows] == ["True", *[None] * 5]
    assert {row["pause_seconds"] for row in rows} == {row["pull_seconds"] for row in rows} == {None}
    assert CliRunner().invoke(main, ["ls", url], catch_exceptions=False).exit_code == 0


# Regular files


def odd(path, kind):
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "loop"])
def test_only_regular_files_of_a_store_are_read(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, states = make_run(3, tmp_path / "run", anchors=None, skips=())
    (tmp_path / "run" / "replicas").mkdir(exist_ok=True)
    for key in ("manifests/00000003.json", "manifests/00000001.anchor.json", "replicas/one.json", "deltas/odd"):
        odd(tmp_path / "run" / key, kind)
    found = pulled(url)
    assert all(np.array_equal(found[name].bits, bits) for name, bits in states[-1].items())
    assert told("ls", url)["num_versions"] == 3
    assert audit(Run(url)).ok
    assert plan_gc(Run(url)).removals == ()
    delta = Run(url).manifest(2).hop.objects[0].key
    odd(tmp_path / "run" / delta, kind)
    with pytest.raises(ObjectMissing):
        pulled(url)
    odd(tmp_path / "run" / "run.json", kind)
    with pytest.raises((ObjectMissing, DeltawireError)):
        pulled(url)


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_only_regular_files_of_a_checkpoint_are_read(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_anchor(WEIGHTS, tmp_path / "real")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(tmp_path / "real" / "model.safetensors")
    odd(tmp_path / "linked" / "other.safetensors", kind)
    odd(tmp_path / "linked" / "x.safetensors.index.json", kind)
    odd(tmp_path / "linked" / "deltawire.json", kind)
    assert set(Checkpoint(tmp_path / "linked")) == set(WEIGHTS)
    odd(tmp_path / "linked" / "model.safetensors", kind)
    (tmp_path / "linked" / "other.safetensors").unlink() if kind != "folder" else None
    with pytest.raises(ObjectMissing, match="no safetensors file"):
        Checkpoint(tmp_path / "linked")
    (tmp_path / "indexed").mkdir()
    (tmp_path / "indexed" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    odd(tmp_path / "indexed" / "a.safetensors", kind)
    for path in (tmp_path / "indexed", tmp_path / "indexed" / "a.safetensors"):
        with pytest.raises(ObjectMissing):
            Checkpoint(path)
    with pytest.raises(ObjectMissing):
        deltawire.Delta.load(tmp_path / "indexed" / "a.safetensors")


# Keys

ARABIC = str.maketrans("0123456789", "".join(chr(0x660 + digit) for digit in range(10)))
STRANGE = [
    "manifests/" + "00000009.json".translate(ARABIC),
    "manifests/00000009.from-" + "00000001.json".translate(ARABIC),
    "manifests/00000009.json.bak",
    "manifests/00000009.json/x",
    "manifests/+0000009.json",
    "manifests/0000_009.json",
    "manifests/ 0000009.json",
    "manifests/000000009.json",
    "deltas/" + "00000009-from-00000001-ab.safetensors".translate(ARABIC),
    "deltas/00000009-from-00000001-ab-" + "00001-of-00002.safetensors".translate(ARABIC),
    "anchors/" + "00000009-ab/model.safetensors".translate(ARABIC),
    "anchors/00000009-ab/a b",
    "replicas/ä.json",
    "replicas/.json",
    "replicas/a b.json",
    "replicas/x/y.json",
]
ONLY_ON_DISKS = [
    "manifests/\x1b[31m00000009.json", "manifests/00000009.json\n", "deltas/a\\b", "manifests/\udcff", "replicas/\x07",
]  # fmt: skip


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_strange_keys_are_nobodys(where, tmp_path):
    url, states = make_run(3, None if where == "memory" else tmp_path / "run")
    clean = told("ls", url), audit(Run(url)), plan_gc(Run(url), keep_anchors=1, grace_seconds=-1)
    manifest = open_store(url).get(manifest_key(1))
    for key in STRANGE:
        open_store(url).put(key, manifest)
    for key in ONLY_ON_DISKS if where == "folder" else []:
        path = tmp_path / "run" / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(manifest)
    found = pulled(url)
    assert all(np.array_equal(found[name].bits, bits) for name, bits in states[-1].items())
    found, report, plan = told("ls", url), audit(Run(url)), plan_gc(Run(url), keep_anchors=1, grace_seconds=-1)
    assert [row["version"] for row in found["versions"]] == [row["version"] for row in clean[0]["versions"]]
    assert found["replicas"] == []
    assert (report.problems, report.num_versions) == ((), clean[1].num_versions)
    assert plan.removals == clean[2].removals
