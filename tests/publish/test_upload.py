"""What is uploaded: which files next to a checkpoint, and what a publisher says when weights differ."""

import json
import os
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from deltawire import Checkpoint, Delta, Publisher, digest, open_store
from deltawire.errors import ChainError, ObjectMissing, SnapshotMismatch
from deltawire.format.container import Container
from deltawire.format.parts import merge
from deltawire.publish import upload
from deltawire.publish.alone import Alone
from deltawire.publish.changes import advanced, box_digests, encode_changes
from deltawire.publish.history import History
from deltawire.publish.leader import Committed, Leader, Task, add_up
from deltawire.publish.recheck import _mismatch
from deltawire.publish.settings import Settings
from deltawire.publish.sources import WholeSource
from deltawire.publish.upload import (
    MOST_FILES,
    anchor_folder,
    check_count,
    check_files,
    delta_names,
    is_worth_sending,
    put_files,
)
from deltawire.publish.worker import Worker
from deltawire.run.keys import read_object_key
from deltawire.run.manifest import MOST_OBJECTS
from deltawire.run.run import Run
from deltawire.tensors.digest import Digest
from deltawire.tensors.weights import Viewed
from deltawire.workers import SERIAL
from support.chains import copy_of, fresh_url, make_weights, step
from support.waiting import PATIENCE

LIMIT = 64 << 20


@pytest.mark.parametrize(
    ("name", "num_bytes", "expected"),
    [
        ("config.json", 10, True), ("tokenizer.model", LIMIT, True), ("tokenizer.model", LIMIT + 1, False),
        ("model.bin", 10, False), ("other.safetensors", 10, False), ("weights.gguf", 10, False), ("a b.txt", 0, False),
    ],
)  # fmt: skip
def test_files_next_to_a_checkpoint(tmp_path, name, num_bytes, expected):
    file = tmp_path / name
    file.touch()
    os.truncate(file, num_bytes)
    assert is_worth_sending(file) == expected


def test_a_folder_is_not_sent(tmp_path):
    (tmp_path / "folder").mkdir()
    assert not is_worth_sending(tmp_path / "folder")
    assert not is_worth_sending(tmp_path / "missing")


def test_what_a_publisher_says_when_weights_differ():
    own, tied = _mismatch("a", "a"), _mismatch("head", "embed")
    assert isinstance(own, SnapshotMismatch)
    assert (own.fields, tied.fields) == ({"tensor": "a"}, {"tensor": "head"})
    assert own.message == (
        "the weights of a at the trainer are not those that would be published: they changed while publish ran, or "
        "are listed as frozen but change, or the publisher's snapshot is damaged. Nothing was committed; create a new "
        "publisher to continue"
    )
    assert tied.message == (
        "the weights of head at the trainer are not those that would be published: it is published as embed, since "
        "the two seemed to be tied, but has other weights. Nothing was committed; create a new publisher to continue"
    )


def test_what_headers_say():
    """An anchor's metadata and a delta's header, as they lie in the store."""
    shared = np.arange(6, dtype=np.float32)
    url, weights = fresh_url(), {"embed": shared, "head": shared, "norm": np.ones(2, np.float32)}
    with Publisher(url, weights, run="r") as publisher:
        for name in ("norm", "embed"):
            publisher.publish().wait(PATIENCE)
            weights[name][0] += 1
        publisher.publish().wait(PATIENCE)
        run = publisher.run
    store = open_store(url)
    (anchor,) = [each for each in run.manifest(0).hop.objects if each.file.endswith(".safetensors")]
    data = store.get(anchor.key)
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert metadata["format"] == "pt"
    assert (metadata["deltawire.run"], metadata["deltawire.version"]) == ("r", "0")
    assert metadata["deltawire.digest"] == str(run.manifest(0).digest)
    assert metadata["deltawire.total"] == "8"
    deltas = [Delta.from_bytes(store.get(run.manifest(version).hop.objects[0].key)) for version in (1, 2)]
    assert [delta.info.tied for delta in deltas] == [{}, {"head": "embed"}]
    assert [delta.info.num_elements for delta in deltas] == [8, 8]


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{}")
    return file


def test_extra_files_that_an_anchor_can_hold(config, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "MOST_FILES", 2)
    other, third = tmp_path / "b.txt", tmp_path / "c.txt"
    other.touch()
    third.touch()
    assert check_files([str(config), other]) == [config, other]
    assert check_files([]) == []
    with pytest.raises(ValueError, match=r"^3 extra files are too many: list at most 2$"):
        check_files([config, other, third])


def test_extra_files_that_an_anchor_cannot_hold(config, tmp_path):
    for name in ("a b.txt", "deltawire.json", "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").touch()
    missing = tmp_path / "missing"
    letters = "a name may have ASCII letters, digits, '_', '.', '+' and '-', and is not deltawire.json"
    own = "cannot be uploaded, since an anchor has its own file of that name: leave it out of files="
    for files, kind, message in (
        (config, TypeError, f"files must be a list of paths: pass ['{config}']"),
        (str(config), TypeError, f"files must be a list of paths: pass ['{config}']"),
        ([config, missing], ObjectMissing, f"{missing}, to upload with the weights, does not exist: check files="),
        ([folder], ValueError,
         f"{folder} is not a file, so it cannot be uploaded with the weights: list files one by one"),
        ([tmp_path / "a b.txt"], ValueError, f"{tmp_path / 'a b.txt'} cannot be uploaded, rename it: {letters}"),
        ([tmp_path / "deltawire.json"], ValueError,
         f"{tmp_path / 'deltawire.json'} cannot be uploaded, rename it: {letters}"),
        ([tmp_path / "model.safetensors"], ValueError, f"{tmp_path / 'model.safetensors'} {own}"),
        ([tmp_path / "model.safetensors.index.json"], ValueError,
         f"{tmp_path / 'model.safetensors.index.json'} {own}"),
        ([config, folder / "config.json"], ValueError,
         "two files are called config.json, and an anchor is one folder: rename one"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            check_files(files)
        assert getattr(caught.value, "message", str(caught.value)) == message
        if kind is ObjectMissing:
            assert caught.value.fields == {"path": str(missing)}


def test_keys_are_never_used_twice():
    assert len({anchor_folder(7) for _ in range(9)}) == len({delta_names(7, 3, 1)[0] for _ in range(9)}) == 9
    assert read_object_key(anchor_folder(7) + "model.safetensors")[:2] == (7, None)
    names = delta_names(7, 3, 2)
    assert [read_object_key(f"deltas/{name}")[:2] for name in names] == [(7, 3), (7, 3)]
    assert names[0].removesuffix("-00001-of-00002.safetensors") == names[1].removesuffix("-00002-of-00002.safetensors")
    for make in (anchor_folder, lambda version: delta_names(version, 0, 1)):
        with pytest.raises(ValueError, match="version 100000000 cannot be written"):
            make(100_000_000)
    most = MOST_OBJECTS - MOST_FILES
    assert check_count(most) == len(delta_names(1, 0, most)) == most
    for count in (check_count, lambda number: delta_names(1, 0, number)):
        with pytest.raises(ValueError, match=rf"^{most + 1} files are more than a manifest can hold: choose a larger"):
            count(most + 1)


@pytest.fixture
def staged():
    """A history of two versions, with ties; the weights of both."""
    weights = make_weights()
    history = History(weights, 0, tied={"head": "embed", "tail": "scale"})
    states = [copy_of(weights)]
    step(weights, np.random.default_rng(0))
    weights["scale"].bits[:] = states[0]["scale"]
    history.stage(1, weights, SERIAL)
    return history, [*states, copy_of(weights)]


def test_digests_move_with_the_changes(staged):
    history, _ = staged
    before, after = (box_digests(history, version, SERIAL) for version in (0, 1))
    entries, gains = encode_changes(history, 0, 1, ["coo", "gap"], SERIAL)
    assert [entry.name for entry in entries] == list(gains) == ["embed", "layer.weight", "norm"]
    assert {entry.encoding for entry in entries} <= {"coo", "gap"}
    assert advanced(before, gains) == after
    assert advanced(before, {}) == before
    assert encode_changes(history, 1, 1, ["gap"], SERIAL) == ([], {})


def test_what_is_encoded_already_is_taken_as_it_is(staged):
    """A history on a device encodes there."""
    history, _ = staged
    entries, gains = encode_changes(history, 0, 1, ["gap"], SERIAL)
    (norm,) = [entry for entry in entries if entry.name == "norm"]
    asked = []

    def prepared(base, version):
        asked.append((base, version))
        return {"norm": (norm.encoded, Digest(7, 8))}

    history.prepared = prepared
    again, gained = encode_changes(history, 0, 1, ["gap"], SERIAL)
    assert asked == [(0, 1)]
    assert gained == {**gains, "norm": Digest(7, 8)}
    found = again[[entry.name for entry in again].index("norm")]
    assert (found.name, found.dtype, found.box, found.encoding) == (norm.name, norm.dtype, norm.box, norm.encoding)
    assert found.arrays is norm.arrays


def leading(store, max_file_bytes=1 << 30):
    """A leader whose worker has staged two versions, with ties; tasks for a delta and two anchors; the weights."""
    weights, run, alone, versions, states = make_weights(), Run(store), Alone(), [], []
    run.start("r")
    settings = Settings(["gap", "coo"], 0, None, (), None, "host", None, 0, max_file_bytes, 1)
    worker = Worker(WholeSource(weights, None, {"head": "embed", "tail": "scale"}, ()), run.store, alone, settings)
    for version in range(2):
        states.append(copy_of(weights))
        worker.stage(anchor=False)
        model, state = add_up([worker.measure(version + 1)])
        assert state == digest(weights)
        versions.append(Committed(version, version + 1, state))
        step(weights, np.random.default_rng(0))
        weights["scale"].bits[:] = states[0]["scale"]
    tasks = [Task(versions[1], versions[0], model), *(Task(version, None, model) for version in versions)]
    return Leader(run, alone, worker, settings, list), tasks, states


def test_a_delta_in_several_files():
    for max_file_bytes, num_files in ((1, 3), (1 << 30, 1)):
        store = open_store(fresh_url())
        leader, (task, *_), _ = leading(store, max_file_bytes)
        hop = leader.write_hop(task)
        old, new = task.base.digest, task.target.digest
        assert (hop.version, hop.base, hop.digest, hop.base_digest) == (1, 0, new, old)
        assert list(hop.encodings) == sorted(hop.encodings)
        assert len(hop.objects) == num_files
        for each in hop.objects:
            data = store.get(each.key)
            name, size, sha = f"deltas/{each.file}", len(data), sha256(data).hexdigest()
            assert (each.key, each.num_bytes, each.sha256) == (name, size, sha)
        info, entries = merge([Container(store.get(each.key)) for each in hop.objects])
        assert [entry.name for entry in entries] == ["embed", "layer.weight", "norm"]
        assert (info.run, info.base_version, info.version, info.base_digest, info.digest) == ("r", 0, 1, old, new)
        assert info.num_changed == hop.num_changed == sum(entry.num_changed for entry in entries) > 0
        assert (info.num_elements, info.tied) == (task.model.num_elements, {"head": "embed"})
        assert sum(hop.encodings.values()) == len(entries)


def test_an_anchor_in_several_files(config, tmp_path):
    store = open_store(tmp_path / "store")
    extra = put_files(store, 1, [config])
    assert [(each.file, each.num_bytes) for each in extra] == [("config.json", 2)]
    assert store.get(extra[0].key) == b"{}"
    for version, max_file_bytes, num_files in ((0, 1 << 30, 2), (1, 10_000, 4)):
        leader, tasks, states = leading(store, max_file_bytes)
        leader.hops.extra_files = extra
        state = tasks[1 + version].target.digest
        hop = leader.write_hop(tasks[1 + version])
        assert (hop.version, hop.base, hop.digest, hop.base_digest) == (version, None, state, None)
        assert (hop.num_changed, hop.encodings) == (tasks[0].model.num_elements, {"dense": 4})
        assert len(hop.objects) == num_files
        assert hop.objects[-1] == extra[0]
        assert len({each.key.rpartition("/")[0] for each in hop.objects[:-1]}) == 1
        folder = tmp_path / "store" / hop.objects[0].key.rpartition("/")[0]
        anchor = Checkpoint(folder)
        assert digest(anchor) == state
        assert all(np.array_equal(Viewed(anchor)[name].bits, states[version][name]) for name in states[version])


def test_an_anchor_of_more_files_than_a_manifest_lists(monkeypatch):
    monkeypatch.setattr(upload, "MOST_OBJECTS", MOST_FILES + 3)
    store = open_store(fresh_url())
    leader, tasks, _ = leading(store, 1)
    with pytest.raises(ValueError, match="4 files are more than a manifest can hold: choose a larger max_file_bytes"):
        leader.write_hop(tasks[1])
    assert list(store.list("anchors/")) == []


def test_an_extra_hop_that_leads_elsewhere_is_not_written():
    store = open_store(fresh_url())
    leader, tasks, _ = leading(store)
    for task in tasks:
        with pytest.raises(ChainError, match="would lead to different weights"):
            leader.write_hop(replace(task, target=replace(task.target, digest=Digest(1, 2))))
    assert [*store.list("anchors/"), *store.list("deltas/")] == []
