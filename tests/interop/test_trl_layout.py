"""The layout of TRL's buckets: what is exported, what is read, what is refused."""

import json
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

from deltawire import Checkpoint, Publisher, Replica, open_store
from deltawire.errors import (
    BrokenChain,
    Conflict,
    CorruptObject,
    LimitExceeded,
    MissingAnchor,
    ObjectMissing,
    ShapeMismatch,
    SignatureMismatch,
    UnknownParameter,
    UnsupportedFormat,
)
from deltawire.format.container import header_bytes
from deltawire.interop.trl import TrlBucket, export_trl, pull_trl
from deltawire.interop.trl_files import check_carried
from deltawire.run.run import Run
from support.trl_layout import bits, info, steps, write_anchor, write_delta

# Writing


def test_every_version_survives_the_round_trip(trl_run, tmp_path):
    seen = []
    keys = export_trl(trl_run[0], tmp_path / "bucket", progress=lambda *at: seen.append(at))
    assert keys == ["anchors/step_000000.safetensors", *(f"deltas/step_{step:06}.safetensors" for step in range(1, 6))]
    assert seen == [(done, 6) for done in range(1, 7)]
    bucket = TrlBucket(tmp_path / "bucket")
    assert [f"{each.kind}s/step_{each.step:06}.safetensors" for each in bucket.steps()] == keys
    for version, expected in enumerate(trl_run[1]):
        pulled = {}
        with Replica(trl_run[0].store, pulled) as replica:
            replica.pull(version)
        assert bits(bucket.load(version)) == bits(pulled) == expected
    assert bits(bucket.load()) == trl_run[1][-1]


def test_export_of_a_part_with_further_anchors(trl_run, tmp_path):
    keys = export_trl(trl_run[0], f"memory:{tmp_path}", first=1, last=4, anchor_every=2)
    assert keys == [
        f"{kind}s/step_{step:06}.safetensors"
        for kind, step in (("anchor", 1), ("delta", 2), ("delta", 3), ("anchor", 3), ("delta", 4))
    ]
    bucket = TrlBucket(f"memory:{tmp_path}")
    for version in range(1, 5):
        assert bits(bucket.load(version)) == trl_run[1][version]
    # Either will do to go on from, also when the other is gone.
    for key in ("anchors/step_000003.safetensors", "deltas/step_000003.safetensors"):
        was = bucket.store.get(key)
        bucket.store.delete([key])
        assert bits(bucket.load(4)) == trl_run[1][4]
        bucket.store.put(key, was)


def test_files_open_with_safetensors_and_a_small_reader(trl_run, tmp_path):
    export_trl(trl_run[0], tmp_path)
    with safe_open(tmp_path / "anchors/step_000000.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for step in range(1, 6):
        with safe_open(tmp_path / f"deltas/step_{step:06}.safetensors", framework="pt") as file:
            for name in json.loads(file.metadata()["changed_params"]):
                indices, values = file.get_tensor(f"{name}.indices"), file.get_tensor(f"{name}.values")
                assert indices.dtype == torch.int32
                # As bytes, since index_copy_ does not know fp8.
                flat = weights[name].view(-1).view(torch.uint8).view(-1, values.element_size())
                flat.index_copy_(0, indices.long(), values.view(torch.uint8).view(-1, values.element_size()))
        assert bits(weights) == trl_run[1][step]


def test_bf16_by_index_copy_and_the_metadata(tmp_path):
    weights = {"w": torch.randn(50, 4).to(torch.bfloat16), "still": torch.ones(3, dtype=torch.bfloat16)}
    with Publisher(f"memory:{tmp_path}", weights) as publisher:
        publisher.publish()
        weights["w"][3, 1] = weights["w"][0, 0] = 9.0
        publisher.publish()
    export_trl(publisher.run, tmp_path)
    with safe_open(tmp_path / "anchors/step_000000.safetensors", framework="pt") as file:
        w = file.get_tensor("w")
        assert file.metadata()["sparse"] == "False"
    with safe_open(tmp_path / "deltas/step_000001.safetensors", framework="pt") as file:
        w.view(-1).index_copy_(0, file.get_tensor("w.indices").long(), file.get_tensor("w.values"))
        assert file.metadata() == {
            "format": "sparse_weight_patch", "version": "1", "sparse": "True", "model_version": "1",
            "num_changed_params": "1", "total_changed_elements": "2", "total_elements": "200", "sparsity": "0.99",
            "changed_params": '["w"]',
        }  # fmt: skip
    assert torch.equal(w, weights["w"])


def test_tied_names_are_left_out(tmp_path):
    shared = torch.ones(4, dtype=torch.bfloat16)
    with Publisher(f"memory:{tmp_path}", {"embed": shared, "head": shared}) as publisher:
        publisher.publish()
        shared[2] = 5.0
        publisher.publish()
    export_trl(publisher.run, tmp_path)
    assert bits(TrlBucket(tmp_path).load()) == bits({"embed": shared})


def test_a_run_whose_anchor_changes_a_shape_is_refused(tmp_path):
    weights = {"a": torch.ones(4), "b": torch.ones(2)}
    with Publisher(f"memory:{tmp_path}", lambda: weights) as publisher:
        publisher.publish()
        weights = {"a": torch.ones(4)}
        publisher.publish(anchor=True)
    with pytest.raises(ShapeMismatch, match="version 1 adds, drops or reshapes b"):
        export_trl(publisher.run, tmp_path / "bucket")
    assert export_trl(publisher.run, tmp_path / "rest", first=1) == ["anchors/step_000001.safetensors"]


def test_what_int32_positions_cannot_reach_is_refused():
    check_carried({"w": ("BF16", (1 << 16, (1 << 15) - 1))}, deltas=True)
    check_carried({"w": ("BF16", (1 << 16, 1 << 15))}, deltas=False)
    with pytest.raises(LimitExceeded, match="w has 2147483648 elements"):
        check_carried({"w": ("BF16", (1 << 16, 1 << 15))}, deltas=True)


def test_a_dtype_that_readers_may_not_know_is_refused(tmp_path):
    with Publisher(f"memory:{tmp_path}", {"scale": np.zeros(3, np.uint8)}, dtype="F8_E8M0") as publisher:
        publisher.publish()
    with pytest.raises(UnsupportedFormat, match="scale is F8_E8M0"):
        export_trl(publisher.run, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_export_refuses_a_place_that_is_taken(trl_run, tmp_path):
    export_trl(trl_run[0], tmp_path / "bucket", last=2)
    with pytest.raises(Conflict, match="step_000001"):
        export_trl(trl_run[0], tmp_path / "bucket", first=1)
    with pytest.raises(ValueError, match="holds the run itself"):
        export_trl(trl_run[0], tmp_path / "run")
    export_trl(trl_run[0], tmp_path / "bucket", first=3)
    assert bits(TrlBucket(tmp_path / "bucket").load()) == trl_run[1][-1]


def test_export_refuses_versions_that_are_not_there(trl_run, tmp_path):
    with pytest.raises(ValueError, match="no versions from 4 to 2"):
        export_trl(trl_run[0], tmp_path / "bucket", first=4, last=2)
    with pytest.raises(ValueError, match="anchor_every"):
        export_trl(trl_run[0], tmp_path / "bucket", anchor_every=0)
    with pytest.raises(BrokenChain, match="version 6 does not exist"):
        export_trl(trl_run[0], tmp_path / "bucket", last=9)
    trl_run[0].store.delete(["manifests/00000002.json"])
    with pytest.raises(BrokenChain, match="version 2 does not exist or was removed"):
        export_trl(trl_run[0], tmp_path / "bucket")
    Run(f"memory:{tmp_path}").start("new")
    with pytest.raises(ObjectMissing, match="no version yet"):
        export_trl(Run(f"memory:{tmp_path}"), tmp_path / "bucket")


def test_export_checks_the_signatures_of_the_run_it_was_given(trl_run, tmp_path):
    with pytest.raises(SignatureMismatch):
        export_trl(Run(trl_run[0].store, public_key="00" * 32), tmp_path / "bucket", first=0, last=1)


# Reading what TRL's branches have written


@pytest.mark.parametrize("encoding", [None, "raw", "gap_delta"])
def test_reads_deltas_of_all_branches(tmp_path, encoding):
    weights = steps(4)
    write_anchor(tmp_path, 1, weights[0])
    for step in (2, 3, 4):
        tensors = write_delta(tmp_path, step, weights[step - 2], weights[step - 1], encoding)
        if encoding == "gap_delta":
            assert (tensors["near.idx"].dtype, tensors["far.idx"].dtype) == (torch.uint16, torch.uint32)
    for step in (1, 2, 3, 4):
        assert bits(TrlBucket(tmp_path).load(step)) == bits(weights[step - 1])


def test_full_anchors_are_where_reading_starts(tmp_path):
    weights = steps(4)
    write_anchor(tmp_path, 1, weights[0])
    write_anchor(tmp_path, 3, weights[2])
    write_delta(tmp_path, 4, weights[2], weights[3])
    # Step 2 is not there, nor is it needed.
    assert bits(TrlBucket(tmp_path).load()) == bits(weights[3])
    with pytest.raises(BrokenChain, match="step 2 is missing"):
        TrlBucket(tmp_path).load(2)


def test_partial_anchors_are_laid_over_what_was_before(tmp_path):
    weights = steps(5)
    # In step 3 only one tensor changes, and the anchor has no other.
    weights[2]["near"] = weights[1]["near"].clone()
    write_anchor(tmp_path, 1, weights[0])
    write_delta(tmp_path, 2, weights[0], weights[1])
    write_anchor(tmp_path, 3, {"far": weights[2]["far"]})
    write_delta(tmp_path, 4, weights[2], weights[3])
    assert bits(TrlBucket(tmp_path).load(3)) == bits(weights[2])
    assert bits(TrlBucket(tmp_path).load(4)) == bits(weights[3])
    write_anchor(tmp_path, 5, weights[4])
    (tmp_path / "deltas/step_000002.safetensors").unlink()
    assert bits(TrlBucket(tmp_path).load(5)) == bits(weights[4])
    with pytest.raises(BrokenChain, match="step 2 is missing"):
        TrlBucket(tmp_path).load(4)


def test_whole_tensors_among_the_deltas(tmp_path):
    weights = steps(2)
    write_anchor(tmp_path, 1, weights[0])
    write_anchor(tmp_path, 2, weights[1])
    (tmp_path / "deltas").mkdir()
    (tmp_path / "anchors/step_000002.safetensors").rename(tmp_path / "deltas/step_000002.safetensors")
    assert bits(TrlBucket(tmp_path).load()) == bits(weights[1])


def test_early_forms_of_empty_deltas_and_anchors(tmp_path):
    weights = steps(1)[0]
    write_anchor(tmp_path, 1, weights, format="anchor_checkpoint")
    (tmp_path / "deltas").mkdir()
    metadata = {"format": "sparse_weight_patch", "version": "1", "model_version": "2", "changed_params": "[]"}
    save_file(
        {"__empty_delta__": torch.zeros(1, dtype=torch.int32)}, tmp_path / "deltas/step_000002.safetensors", metadata
    )
    assert bits(TrlBucket(tmp_path).load()) == bits(weights)


def test_files_larger_than_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr("deltawire.store.transfer.PART_BYTES", 1000)
    weights = steps(1)[0]
    write_anchor(tmp_path, 1, weights)
    assert bits(TrlBucket(tmp_path).load()) == bits(weights)


def test_pull_writes_a_checkpoint(tmp_path):
    weights = steps(2)
    write_anchor(tmp_path / "bucket", 1, weights[0])
    write_delta(tmp_path / "bucket", 2, *weights)
    assert pull_trl(tmp_path / "bucket", tmp_path / "new/here") == 2
    assert bits(Checkpoint(tmp_path / "new/here")) == bits(weights[1])
    assert Checkpoint(tmp_path / "new/here").version == 2
    assert pull_trl(str(tmp_path / "bucket"), tmp_path / "old", step=1) == 1
    assert bits(Checkpoint(tmp_path / "old")) == bits(weights[0])


def test_pull_refuses_a_place_before_it_fetches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_anchor(tmp_path / "bucket", 1, steps(1)[0])
    monkeypatch.setattr(TrlBucket, "load", lambda *_: pytest.fail("fetched"))
    with pytest.raises(Conflict, match="already exists"):
        pull_trl(tmp_path / "bucket", tmp_path / "bucket")
    with pytest.raises(ValueError, match="is a URL"):
        pull_trl(tmp_path / "bucket", "s3://bucket/folder")
    assert [path.name for path in tmp_path.iterdir()] == ["bucket"]


# What is refused


def test_missing_anchor(tmp_path):
    with pytest.raises(MissingAnchor, match="check the URL"):
        TrlBucket(tmp_path).load()
    write_delta(tmp_path, 2, *steps(2))
    with pytest.raises(MissingAnchor, match="no anchor at step 2"):
        TrlBucket(tmp_path).load()
    write_anchor(tmp_path, 3, steps(1)[0])
    with pytest.raises(MissingAnchor, match="no anchor at step 2"):
        TrlBucket(tmp_path).load(2)


def test_broken_chain(tmp_path):
    write_anchor(tmp_path, 1, steps(1)[0])
    write_delta(tmp_path, 999_999_999, *steps(2))
    with pytest.raises(BrokenChain, match="step 2 is missing"):
        TrlBucket(tmp_path).load()


def test_other_files_are_ignored(tmp_path):
    weights = steps(1)[0]
    write_anchor(tmp_path, 1, weights)
    for name in ("step_2.safetensors", "step_0000002.safetensors", "step_000002.safetensors.tmp", "notes.txt"):
        (tmp_path / "anchors" / name).write_bytes(b"?")
    assert [each.step for each in TrlBucket(tmp_path).steps()] == [1]


def test_unknown_parameter(tmp_path):
    weights = steps(2)
    write_anchor(tmp_path, 1, {"near": weights[0]["near"]})
    write_delta(tmp_path, 2, *weights)
    with pytest.raises(UnknownParameter, match="changes far") as caught:
        TrlBucket(tmp_path).load()
    assert caught.value.tensor == "far"


ANCHOR = {"w": torch.zeros(10, dtype=torch.bfloat16)}


def refused(error, match, tensors, anchor=ANCHOR, **stated):
    """What a bucket with an anchor and this delta says."""
    store = open_store("memory:refused")
    metadata = info(2, True, ["w"], 2) | stated
    store.put("anchors/step_000001.safetensors", save(anchor, info(1, False, anchor, 0)))
    store.put("deltas/step_000002.safetensors", save(tensors, metadata))
    with pytest.raises(error, match=match):
        TrlBucket(store).load()


def sparse(indices, dtype=torch.int32, values=torch.bfloat16, names=("w.indices", "w.values")):
    return dict(zip(names, (torch.tensor(indices, dtype=dtype), torch.ones(len(indices), dtype=values)), strict=True))


V2 = ("w.idx", "w.val")


@pytest.mark.parametrize("indices", [[3, 10], [-1, 3], [5, 4], [4, 4], [-(2**31), 2**31 - 1]])
def test_impossible_positions(indices):
    refused(CorruptObject, "positions of w", sparse(indices))
    refused(CorruptObject, "positions of w", sparse(indices, names=V2), encoding="raw")


def test_impossible_gaps():
    refused(CorruptObject, "positions of w", sparse([4, 5], torch.uint16, names=V2), encoding="gap_delta")
    refused(CorruptObject, "positions of w", sparse([2**32 - 1] * 2, torch.uint32, names=V2), encoding="gap_delta")


def test_impossible_forms():
    refused(CorruptObject, "values of w are F32", sparse([1, 2], values=torch.float32))
    refused(CorruptObject, "positions of w are I64", sparse([1, 2], torch.int64))
    refused(CorruptObject, "positions of w are I32", sparse([1, 2], names=V2), encoding="gap_delta")
    refused(CorruptObject, "positions of w are U16", sparse([1, 2], torch.uint16, names=V2), encoding="raw")
    refused(CorruptObject, "w has positions", sparse([1, 2]) | {"w.values": torch.ones(3, dtype=torch.bfloat16)})
    square = {name: tensor.view(1, 2) for name, tensor in sparse([1, 2]).items()}
    refused(CorruptObject, "w has positions", square)
    refused(CorruptObject, "not pairs .* w.values", {"w.indices": torch.tensor([1, 2], dtype=torch.int32)})
    refused(CorruptObject, "not pairs .* w.idx", sparse([1, 2], names=V2))
    refused(CorruptObject, "not pairs .* more", sparse([1, 2]) | {"more": torch.ones(1)})


def test_headers_that_contradict():
    refused(CorruptObject, "total_changed_elements is 2, but 1", sparse([1]))
    refused(CorruptObject, "num_changed_params is 5, but 1", sparse([1, 2]), num_changed_params="5")
    refused(CorruptObject, "it is version 7", sparse([1, 2]), model_version="7")
    refused(CorruptObject, "sparse='yes'", sparse([1, 2]), sparse="yes")
    for names in ('["v"]', "[", "3", "[1, null]", "[[", "null", '["w", "w"]'):
        refused(CorruptObject, "changed_params", sparse([1, 2]), changed_params=names)
    refused(CorruptObject, "and had another spec before", {"w": torch.zeros(11, dtype=torch.bfloat16)}, sparse="False")
    refused(UnsupportedFormat, "format 'other'", sparse([1, 2]), format="other")
    refused(UnsupportedFormat, "version '2'", sparse([1, 2]), version="2")


def test_an_anchor_that_says_it_is_sparse():
    store = open_store("memory:sparse-anchor")
    store.put("anchors/step_000001.safetensors", save(sparse([1, 2]), info(1, True, ["w"], 2)))
    with pytest.raises(CorruptObject, match="sparse='True'"):
        TrlBucket(store).load()


def test_encodings_that_are_not_read():
    refused(UnsupportedFormat, "NVIDIA's library.*'gap_delta'", sparse([1, 2], names=V2), encoding="nvcomp_cascaded")
    refused(UnsupportedFormat, "encoding 'zip'", sparse([1, 2], names=V2), encoding="zip")


@pytest.mark.parametrize("kind", ["anchors/step_000001.safetensors", "deltas/step_000002.safetensors"])
def test_truncated_files(tmp_path, kind):
    write_anchor(tmp_path, 1, {"w": torch.zeros(50)})
    write_delta(tmp_path, 2, {"w": torch.zeros(50, dtype=torch.bfloat16)}, {"w": torch.ones(50, dtype=torch.bfloat16)})
    whole = (tmp_path / kind).read_bytes()
    assert TrlBucket(tmp_path).load()
    for length in [0, 3, 8, *range(9, len(whole), 13), len(whole) - 1]:
        (tmp_path / kind).write_bytes(whole[:length])
        with pytest.raises(CorruptObject):
            TrlBucket(tmp_path).load()
    (tmp_path / kind).write_bytes(b"\xff" * 8 + whole[8:])
    with pytest.raises(LimitExceeded):
        TrlBucket(tmp_path).load()


def test_damaged_headers_never_crash_or_write_elsewhere(tmp_path):
    """Any byte of a delta's header changed: it is read as something that it can be, or refused by name."""
    write_anchor(tmp_path, 1, {"w": torch.zeros(50)})
    write_delta(tmp_path, 2, {"w": torch.zeros(50, dtype=torch.bfloat16)}, {"w": torch.ones(50, dtype=torch.bfloat16)})
    file = tmp_path / "deltas/step_000002.safetensors"
    whole = bytearray(file.read_bytes())
    for at in range(8, len(whole) - 300, 3):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 7
        file.write_bytes(damaged)
        with suppress(CorruptObject, UnsupportedFormat, UnknownParameter):
            assert [tensor.shape for tensor in TrlBucket(tmp_path).load().values()] == [(50,)]


def test_a_delta_without_tensors_is_a_step(tmp_path):
    weights = steps(1)[0]
    write_anchor(tmp_path, 1, weights)
    (tmp_path / "deltas").mkdir()
    (tmp_path / "deltas/step_000002.safetensors").write_bytes(header_bytes({}, info(2, True, [], 0)))
    assert bits(TrlBucket(tmp_path).load(2)) == bits(weights)
