"""What a publisher takes, a reader takes; what a reader would refuse is refused at once, and nothing is written."""

import json
import os
from enum import Enum, IntEnum

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deltawire
from deltawire import Publisher, Replica
from deltawire.errors import CorruptObject
from deltawire.format.checkpoint import Checkpoint, save_anchor
from deltawire.maintain.audit import audit
from deltawire.run.keys import MOST_VERSION, manifest_key
from deltawire.run.plain import MOST_DEPTH, MOST_METADATA_BYTES
from deltawire.run.run import Run
from deltawire.store import open_store
from support.chains import fresh_url, make_run, make_weights, pulled, seal, unsealed
from support.command_line import told
from support.waiting import PATIENCE

WEIGHTS = {"w": np.arange(6, dtype=np.float32), "v": np.ones(2, np.float32)}


def looped():
    metadata = {}
    metadata["self"] = metadata
    return metadata


def nested(depth):
    return {} if depth == 0 else {"a": nested(depth - 1)}


# What publish takes, and what it becomes


class Stage(IntEnum):
    TRAIN = 4


class Kind(str, Enum):  # noqa: UP042 - as older programs write it
    FULL = "full"


@pytest.mark.parametrize(
    ("given_step", "expected"),
    [
        (None, None), (3, 3), (-1, -1), (np.int64(3), 3), (np.uint8(3), 3), (np.array(3), 3), (np.array([3]), 3),
        (torch.tensor(3), 3), (torch.tensor([3], dtype=torch.int32), 3), (Stage.TRAIN, 4),
    ],
)  # fmt: skip
def test_steps_are_the_numbers_they_are(given_step, expected):
    url = fresh_url()
    with Publisher(url, WEIGHTS) as publisher:
        assert publisher.publish(step=given_step).wait(PATIENCE).step == expected
    step = Run(url).manifest(0).step
    assert step == expected
    assert type(step) in (int, type(None))


@pytest.mark.parametrize(
    "step", [1.5, 3.0, True, np.True_, "12", b"1", np.float32(3), torch.tensor(1.5), np.arange(2), 1 << 63, [1], 1j]
)
def test_steps_that_are_no_whole_numbers(step):
    with Publisher(fresh_url(), WEIGHTS) as publisher:
        with pytest.raises((TypeError, ValueError), match="step"):
            publisher.publish(step=step)
        assert publisher.run.versions() == []
        publisher.publish(step=1).wait(PATIENCE)


def test_metadata_of_numpy_and_torch():
    url, nested_list = fresh_url(), [1, 2]
    given_metadata = {
        "loss": np.float32(1.5), "n": np.int64(2), "t": torch.tensor(2.5), "b": np.bool_(True), "one": np.ones(1),
        "half": torch.ones((), dtype=torch.bfloat16), "small": ml_dtypes.bfloat16(0.5), "long": np.longdouble(0.25),
        "text": np.str_("a"), "kind": Kind.FULL, "stage": Stage.TRAIN, "tuple": (1, None), "list": nested_list,
        "ü": "ü",
    }  # fmt: skip
    expected = {
        "loss": 1.5, "n": 2, "t": 2.5, "b": True, "one": 1.0, "half": 1.0, "small": 0.5, "long": 0.25, "text": "a",
        "kind": "full", "stage": 4, "tuple": [1, None], "list": [1, 2], "ü": "ü",
    }  # fmt: skip
    with Publisher(url, WEIGHTS) as publisher:
        publisher.publish(metadata=given_metadata)
        nested_list.append(3)  # the caller's own, once publish has returned
    read = Run(url).manifest(0).metadata
    assert read == expected
    assert [type(value) for value in read.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({1: "a", "1": "b"}, "the key 1"),
        ({"a": {None: 1}}, "key None"),
        ({"loss": float("nan")}, "JSON cannot represent"),
        ({"loss": np.float32("inf")}, "JSON cannot represent"),
        ({"a": [1, {"b": torch.tensor(float("nan"))}]}, r"metadata\['a'\]\[1\]\['b'\]"),
        ({"grad": np.arange(3)}, "tolist"),
        ({"grad": torch.ones(2, 2)}, "tolist"),
        ({"none": np.empty(0)}, "tolist"),
        ({"meta": torch.ones((), device="meta")}, "without a value"),
        ({"when": np.datetime64("2026-01-01")}, "JSON cannot represent"),
        ({"z": np.complex64(1j)}, "JSON cannot represent"),
        ({"object": object()}, "JSON cannot represent"),
        ({"bytes": b"a"}, "JSON cannot represent"),
        ({"set": {1}}, "JSON cannot represent"),
        ({"big": 1 << 64}, "64 bits"),
        ({"text": "\ud800"}, "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        ({"a": "x" * MOST_METADATA_BYTES}, "store it elsewhere"),
        (nested(MOST_DEPTH + 1), "deep"),
        (looped(), "contains itself"),
        ([("a", 1)], "a mapping"),
        ("text", "a mapping"),
    ],
)
def test_metadata_that_no_reader_would_take(metadata, match):
    """Committed once, they made the whole run unreadable."""
    with Publisher(fresh_url(), WEIGHTS) as publisher:
        with pytest.raises((TypeError, ValueError), match=match):
            publisher.publish(metadata=metadata)
        assert publisher.run.versions() == []
        publisher.publish(metadata={"ok": nested(MOST_DEPTH - 1)}).wait(PATIENCE)
    assert pulled(publisher.run.store).keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    "name", ["__metadata__", "deltawire.version", "a\ud800", 3, None, ("a",)], ids=["reserved", "own", *"0123"]
)
def test_names_that_no_file_can_hold(name, tmp_path):
    weights = {name: np.ones(2, np.float32)}
    for use in (
        lambda: Publisher(fresh_url(), weights),
        lambda: deltawire.diff(weights, weights),
        lambda: save_anchor(weights, tmp_path / "anchor"),
    ):
        with pytest.raises((TypeError, ValueError), match="name"):
            use()
    later = dict(WEIGHTS)
    with Publisher(fresh_url(), later) as publisher:
        publisher.publish().wait(PATIENCE)
        later.update(weights)
        with pytest.raises((TypeError, ValueError), match="name"):
            publisher.publish(anchor=True)
        assert publisher.run.versions() == [0]


@pytest.mark.parametrize("run", ["", "x" * 257, "a\x1b[31m", "a\nb", "\ud800"])
def test_run_ids_that_no_reader_would_take(run, tmp_path):
    with pytest.raises(ValueError, match="no reader would accept"):
        Publisher(tmp_path / "run", WEIGHTS, run=run)
    assert not (tmp_path / "run").exists()


def test_files_that_an_anchor_cannot_hold(tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("config.json", "my config.json", "ü.txt", "model.safetensors", "deltawire.json", "other/config.json"):
        (tmp_path / name).write_text("{}")
    os.mkfifo(tmp_path / "pipe.txt")
    for names, match in (
        (["config.json", "other/config.json"], "two files"),
        (["my config.json"], "name"),
        (["ü.txt"], "name"),
        (["model.safetensors"], "its own file"),
        (["deltawire.json"], "name"),
        (["pipe.txt"], "not a file"),
        (["other"], "not a file"),
    ):
        with pytest.raises(ValueError, match=match):
            Publisher(fresh_url(), WEIGHTS, files=[tmp_path / name for name in names])
    url = fresh_url()
    with Publisher(url, WEIGHTS, files=[tmp_path / "config.json"]) as publisher:
        publisher.publish()
    assert Run(url).manifest(0).hop.extra_files[0].file == "config.json"


def test_files_beside_a_checkpoint_that_no_document_could_name_stay_there(tmp_path):
    save_anchor(WEIGHTS, tmp_path / "checkpoint")
    for name in ("config.json", "my notes.txt", "ü.txt"):
        (tmp_path / "checkpoint" / name).write_text("{}")
    os.mkfifo(tmp_path / "checkpoint" / "pipe.txt")
    url = fresh_url()
    with Publisher(url, Checkpoint(tmp_path / "checkpoint")) as publisher:
        publisher.publish()
    assert [each.file for each in Run(url).manifest(0).hop.extra_files] == ["config.json"]
    assert pulled(url).keys() == WEIGHTS.keys()


def test_versions_end(monkeypatch):
    with Publisher(fresh_url(), WEIGHTS) as publisher:
        publisher.publish().wait(PATIENCE)
        publisher.version = MOST_VERSION
        with pytest.raises(ValueError, match="start a new run"):
            publisher.publish()


def test_more_files_than_a_manifest_holds():
    """Found out before the first is uploaded."""
    weights = {f"w{number}": np.full(1, number % 256, np.uint8) for number in range(10_001)}
    with Publisher(fresh_url(), weights, max_file_bytes=1, skips=(), anchors=None) as publisher:
        with pytest.raises(ValueError, match="larger max_file_bytes"):
            publisher.publish().wait(PATIENCE)
        assert [stat.key for stat in publisher.run.store.list("anchors/")] == []


def test_more_ties_than_a_manifest_holds():
    tied = {f"{number:06}{'x' * 200}": "w" for number in range(20_000)}
    with pytest.raises(ValueError, match="tied names take"):
        Publisher(fresh_url(), WEIGHTS, tied=tied)


def test_a_long_path_is_left_out_of_manifests(monkeypatch):
    """Readers find their way by listing; with it the manifest would be too large for them."""
    monkeypatch.setattr("deltawire.publish.upkeep.MOST_OBJECTS", 3)
    url, states = make_run(8, anchors=None, skips=())
    assert [len(Run(url).manifest(version).route) for version in range(8)] == [0, 1, 2, 3, 0, 0, 0, 0]
    found = pulled(url)
    assert all(np.array_equal(found[name].bits, bits) for name, bits in states[-1].items())


# Ties


def test_chains_of_ties_are_resolved():
    url, weights = fresh_url(), {**WEIGHTS, "a": WEIGHTS["w"], "b": WEIGHTS["w"]}
    with Publisher(url, weights, tied={"a": "b", "b": "w"}) as publisher:
        publisher.publish()
    assert Run(url).manifest(0).tied == {"a": "w", "b": "w"}
    target = {name: np.zeros_like(array) for name, array in weights.items()}
    with Replica(url, target, heartbeat_seconds=None) as replica:
        replica.pull()
    assert all(np.array_equal(target[name], weights[name]) for name in weights)
    assert deltawire.diff(weights, {**weights, "w": weights["w"] + 1}, tied={"a": "b", "b": "w"}).tied == {
        "a": "w",
        "b": "w",
    }


@pytest.mark.parametrize("tied", [{"w": "w"}, {"w": "v", "v": "w"}, {"a": "b", "b": "c", "c": "b"}, {"a": "unknown"},
                                  {"a": "__metadata__"}, {1: "w"}, {"a": None}])  # fmt: skip
def test_ties_that_lead_nowhere_are_refused(tied, tmp_path):
    for use in (
        lambda: Publisher(fresh_url(), WEIGHTS, tied=tied),
        lambda: deltawire.diff(WEIGHTS, WEIGHTS, tied=tied),
        lambda: save_anchor(WEIGHTS, tmp_path / "anchor", tied=tied),
    ):
        with pytest.raises((TypeError, ValueError)):
            use()
    assert not (tmp_path / "anchor").exists()


def forge(url, version, change):
    """Rewrite a manifest, as someone would who can compute its SHA-256."""
    store = open_store(url)
    fields = unsealed(store.get(manifest_key(version)))
    change(fields)
    store.put(manifest_key(version), seal(fields))


# The last three contradict the tensors only.
FORGED_TIES = [
    {"norm": "scale", "scale": "norm"}, {"norm": "norm"}, {"other": "norm", "norm": "scale"}, {"norm": "scale"},
    {"other": "unknown"}, {"norm": "unknown"},
]  # fmt: skip


@pytest.mark.parametrize("tied", FORGED_TIES)
@pytest.mark.parametrize("from_nothing", [True, False])
def test_forged_ties_change_nothing(tied, from_nothing):
    url, _ = make_run(3)
    target = {} if from_nothing else dict(make_weights())
    with Replica(url, target, heartbeat_seconds=None) as replica:
        if not from_nothing:
            replica.pull(1)
        forge(url, 2, lambda fields: fields.update(tied=tied))
        before = {name: tensor.bits.copy() for name, tensor in target.items()}
        with pytest.raises(CorruptObject, match="tied"):
            replica.pull()
        assert {name: tensor.bits.tobytes() for name, tensor in target.items()} == {
            name: bits.tobytes() for name, bits in before.items()
        }
    problem = audit(Run(url)).problems[0]
    assert (problem.version, problem.error) == (2, "CorruptObject")


@pytest.mark.parametrize("tied", ['{"w":"w"}', '{"a":"b","b":"v"}', '{"a":"b","b":"a"}', '{"a":"__metadata__"}', "[]",
                                  '{"a":1}', '{"a":"b","a":"v"}'])  # fmt: skip
def test_forged_ties_of_an_anchor_and_a_delta(tied, tmp_path):
    save_anchor(WEIGHTS, tmp_path / "a.safetensors", tied={"t": "w"})
    changed = {**WEIGHTS, "w": WEIGHTS["w"] + 1}
    data = {
        "anchor": (tmp_path / "a.safetensors").read_bytes(),
        "delta": deltawire.diff(WEIGHTS, changed, tied={"t": "w"}).to_bytes(),
    }
    for kind, was in data.items():
        length = int.from_bytes(was[:8], "little")
        header = json.loads(was[8 : 8 + length])
        assert header["__metadata__"]["deltawire.tied"] == '{"t":"w"}'
        header["__metadata__"]["deltawire.tied"] = tied
        text = json.dumps(header).encode()
        path = tmp_path / f"{kind}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + was[8 + length :])
        with pytest.raises(CorruptObject, match="tied"):
            _ = Checkpoint(path).tied if kind == "anchor" else deltawire.Delta.load(path)


def test_a_delta_ties_only_what_it_changes():
    delta = deltawire.diff(WEIGHTS, {**WEIGHTS, "w": WEIGHTS["w"] + 1}, tied={"t": "w"})
    for tied in ({"t": "v"}, {"w": "v"}):
        object.__setattr__(delta.info, "tied", tied)
        with pytest.raises(CorruptObject, match=r"tied to"):
            deltawire.Delta.from_bytes(delta.to_bytes())


# Whatever is accepted can be read

TEXT = st.text(max_size=8)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.integers(-100, 100).map(np.int64),
    st.floats(width=32).map(np.float32),
    st.integers(0, 9).map(torch.tensor),
    st.booleans().map(np.bool_),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, st.binary(max_size=2), st.just(np.arange(2))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.one_of(TEXT, st.integers(0, 2)), inner, max_size=3),
    ),
    max_leaves=8,
)
NAMES = st.one_of(
    st.text(st.characters(), max_size=6),
    st.sampled_from(
        ["w", "w.indices", "w.values", "w.dense", "__metadata__", "deltawire.run", "format", "", "a\x1b", "\n"]
    ),
)


def as_read(value):
    """What JSON makes of what was given."""
    if isinstance(value, dict):
        return {key: as_read(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_read(each) for each in value]
    return value.item() if hasattr(value, "item") else value


def end_of(name, tied):
    while name in tied:
        name = tied[name]
    return name


@settings(max_examples=60)
@given(
    names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    tied=st.dictionaries(NAMES, NAMES, max_size=2),
    step=st.one_of(st.none(), NUMBERS),
    metadata=st.one_of(st.none(), st.dictionaries(TEXT, VALUES, max_size=3)),
    run=st.one_of(st.none(), st.text(max_size=10)),
    encoding=st.sampled_from(["auto", "coo", "gap", "context", "dense"]),
)
def test_whatever_publish_accepts_readers_accept(names, tied, step, metadata, run, encoding):
    url = fresh_url()
    weights = {name: np.arange(number, number + 9, dtype=np.float32) for number, name in enumerate(names)}
    committed = 0
    try:
        with Publisher(url, weights, run=run, tied=tied, encoding=encoding, skips=(), anchors=None) as publisher:
            for _ in range(2):
                publisher.publish(step=step, metadata=metadata).wait(PATIENCE)
                committed += 1
                weights[names[0]][3] += 1
            weights[names[0]][3] -= 1
    except (TypeError, ValueError):
        # Refused at once: either nothing was written, or a run without versions.
        assert committed == 0
        assert list(open_store(url).list("manifests/")) == []
        return
    manifest = Run(url).manifest(1)
    assert manifest.metadata == as_read(metadata or {})
    assert manifest.step == (None if step is None else int(step))
    assert run is None or manifest.run == run
    found = pulled(url)
    # Tied names arrive too; two that are given different weights were refused.
    assert {name: tensor.bits.tobytes() for name, tensor in found.items()} == {
        name: weights[end_of(name, tied)].tobytes() for name in {*weights, *tied}
    }
    assert told("ls", url)["num_versions"] == 2
    report = audit(Run(url))
    assert (report.ok, report.num_proven) == (True, 2)
