"""Weights in memory as a target: what is refused, in which words, and which tensors are written."""

import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica, digest
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.follow.comparison import differing_names
from deltawire.follow.target import MemoryTarget, new_tensor
from deltawire.run.run import Run
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from support.chains import fresh_url
from support.waiting import PATIENCE

RUN = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}


def published(weights, **options):
    url = fresh_url()
    with Publisher(url, weights, **options) as publisher:
        publisher.publish().wait(PATIENCE)
    return url


REFUSED = {
    "too few": (
        {"a": np.zeros((2, 3), np.float32)},
        UnknownParameter,
        "the run has b, which the target does not have",
        {"tensor": "b"},
    ),
    "too many": (
        {**{name: np.zeros_like(array) for name, array in RUN.items()}, "c": np.zeros(1, np.float32)},
        UnknownParameter,
        "the target has c, which the run does not have, so that it would never be updated: "
        "publish it too, or pass a mapping without it",
        {"tensor": "c"},
    ),
    "another shape": (
        {"a": np.zeros((3, 2), np.float32), "b": np.zeros(4, np.float32)},
        ShapeMismatch,
        "a is F32 [3, 2] at the target, and F32 [2, 3] in the run",
        {"tensor": "a", "expected": "('F32', (2, 3))", "actual": "('F32', (3, 2))"},
    ),
    "another dtype": (
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)},
        ShapeMismatch,
        "b is F16 [4] at the target, and F32 [4] in the run",
        {"tensor": "b", "expected": "('F32', (4,))", "actual": "('F16', (4,))"},
    ),
    "bits": (
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int32)},
        ShapeMismatch,
        'b is I32 [4] at the target, and F32 [4] in the run: pass dtype="F32" if these integers are its bits',
        {"tensor": "b", "expected": "('F32', (4,))", "actual": "('I32', (4,))"},
    ),
    "other integers": (
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint16)},
        ShapeMismatch,
        "b is U16 [4] at the target, and F32 [4] in the run",
        {"tensor": "b", "expected": "('F32', (4,))", "actual": "('U16', (4,))"},
    ),
}


@pytest.mark.parametrize(("target", "kind", "message", "fields"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_is_said_by_name(target, kind, message, fields):
    before = {name: array.copy() for name, array in target.items()}
    with Replica(published(RUN), target, heartbeat_seconds=None) as replica:
        with pytest.raises(kind) as caught:
            replica.pull()
        assert replica.target.state() is None
    assert (caught.value.message, caught.value.fields) == (message, fields)
    assert all(np.array_equal(target[name], before[name]) for name in target)


@pytest.mark.parametrize("anchor", [False, True])
def test_every_copy_of_a_tied_tensor_is_written(anchor):
    """The run ties two names; the target has a tensor for each, or for one of them."""
    weight = torch.randn(40)
    url, weights = fresh_url(), {"embed": weight, "head": weight}
    both = {"embed": torch.zeros(40), "head": torch.zeros(40)}
    one = {"embed": torch.zeros(40)}
    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        with Replica(url, both, heartbeat_seconds=None) as first, Replica(url, one, heartbeat_seconds=None) as second:
            for _ in range(2):
                first.pull()
                second.pull()
                for copy in (both["embed"], both["head"], one["embed"]):
                    assert torch.equal(copy, weight)
                weight[3] += 1
                publisher.publish(anchor=anchor).wait(PATIENCE)


def test_no_version_is_told_while_weights_are_in_between():
    url = published(RUN)
    target = {name: np.zeros_like(array) for name, array in RUN.items()}
    with Replica(url, target, heartbeat_seconds=None) as replica:
        replica.pull()
        changed = {**RUN, "b": np.full(4, 2, np.float32)}
        with Publisher(url, changed, base=RUN) as publisher:
            publisher.publish().wait(PATIENCE)
        target["b"].flags.writeable = False
        with pytest.raises(ValueError, match="b"):
            replica.pull()
        assert replica.target.state().version == 0
        target["b"].flags.writeable = True
        replica.pull()
        assert np.array_equal(target["b"], changed["b"])


def test_weights_are_compared_with_a_version():
    weights = {"a": np.arange(6, dtype=np.float32), "b": np.ones(4, np.float32)}
    run = Run(published(weights))
    seen = []
    own = {"a": weights["a"].copy(), "b": weights["b"].copy()}
    assert differing_names(run, 0, own, threads=1, progress=lambda *arguments: seen.append(arguments)) == {}
    assert seen
    own["a"][:2] = 9
    assert differing_names(run, 0, own) == {"a": 2}
    assert differing_names(run, 0, {"a": own["a"], "c": np.zeros((2, 3), np.float32)}) == {"a": 2, "b": 4, "c": 6}
    assert differing_names(run, 0, {"a": weights["a"].reshape(2, 3), "b": weights["b"]}) == {"a": 6}
    assert differing_names(run, 0, {"a": weights["a"].view(np.int32), "b": weights["b"]}) == {"a": 6}


def test_tensors_that_fill_a_dictionary(monkeypatch):
    """Of torch where it is imported, else of numpy, else of ml_dtypes, else a plain `Tensor`."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "ml_dtypes", ml_dtypes)
    plain = new_tensor("a", DTYPES["F32"], (2, 3))
    assert (type(plain), plain.dtype, plain.shape) == (np.ndarray, np.float32, (2, 3))
    half = new_tensor("a", DTYPES["BF16"], (4,))
    assert (type(half), half.dtype, half.shape) == (np.ndarray, ml_dtypes.bfloat16, (4,))
    assert new_tensor("a", DTYPES["F32"], (0, 3)).shape == (0, 3)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    bits = new_tensor("a", DTYPES["BF16"], (4,))
    assert (type(bits), bits.dtype.name, bits.shape, len(bits.bits)) == (Tensor, "BF16", (4,), 4)
    monkeypatch.setitem(sys.modules, "torch", torch)
    for dtype, kind in (("BF16", torch.bfloat16), ("F32", torch.float32), ("BOOL", torch.bool)):
        found = new_tensor("a", DTYPES[dtype], (2, 0))
        assert (found.dtype, found.shape) == (kind, (2, 0))
        assert new_tensor("a", DTYPES[dtype], (2, 3)).shape == (2, 3)


def test_the_digest_of_a_target():
    bits = np.arange(4, dtype=np.uint16)
    target = MemoryTarget({"a": bits, "b": bits}, dtype="BF16")
    own = {"a": Tensor(DTYPES["BF16"], (4,), bits)}
    assert target.digest({"b": "a"}) == digest(own)
    assert target.digest({}) == digest({**own, "b": own["a"]})
    assert MemoryTarget({"a": bits, "b": bits + 1}, dtype="BF16").digest({"b": "a"}) is None, "it is not tied"
    assert MemoryTarget({}).digest({}) is None
    assert MemoryTarget({"a": bits}).state() is None
    untouched = MemoryTarget({"a": bits})
    untouched.refresh()
    assert untouched.state() is None
