"""Weights in memory as a target: what is refused, in which words, and which tensors are written."""

import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica, digest
from deltawire.errors import DigestMismatch, NotEnoughMemory, ShapeMismatch, UnknownParameter
from deltawire.follow.comparison import differing_names
from deltawire.follow.target import MemoryTarget, Target, new_tensor
from deltawire.format.patches import Patch
from deltawire.format.replay import Replay
from deltawire.run.run import Run
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor, spec
from deltawire.workers import SERIAL
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
        "the run has b, which the target does not have: add it, or pass an empty dictionary, which is filled",
        {"tensor": "b"},
    ),
    "too many": (
        {**{name: np.zeros_like(array) for name, array in RUN.items()}, "c": np.zeros(1, np.float32)},
        UnknownParameter,
        "the target has c, which the run does not have, so it would never be updated: "
        "publish it too, or pass a mapping without it",
        {"tensor": "c"},
    ),
    "another shape": (
        {"a": np.zeros((3, 2), np.float32), "b": np.zeros(4, np.float32)},
        ShapeMismatch,
        "a is F32 [3, 2] at the target, but F32 [2, 3] in the run: check that both have the same model, or pass an "
        "empty dictionary, which is filled",
        {"tensor": "a", "expected": "('F32', (2, 3))", "actual": "('F32', (3, 2))"},
    ),
    "another dtype": (
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)},
        ShapeMismatch,
        "b is F16 [4] at the target, but F32 [4] in the run: cast it to the run's dtype first, or pass an empty "
        "dictionary, which is filled",
        {"tensor": "b", "expected": "('F32', (4,))", "actual": "('F16', (4,))"},
    ),
    "bits": (
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int32)},
        ShapeMismatch,
        'b is I32 [4] at the target, but F32 [4] in the run: pass dtype="F32" if these integers are its bits',
        {"tensor": "b", "expected": "('F32', (4,))", "actual": "('I32', (4,))"},
    ),
    "unsigned bits": (
        {"a": np.zeros((2, 3), np.uint32), "b": np.zeros(4, np.float32)},
        ShapeMismatch,
        'a is U32 [2, 3] at the target, but F32 [2, 3] in the run: pass dtype="F32" if these integers are its bits',
        {"tensor": "a", "expected": "('F32', (2, 3))", "actual": "('U32', (2, 3))"},
    ),
    "other integers": (
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint16)},
        ShapeMismatch,
        "b is U16 [4] at the target, but F32 [4] in the run: cast it to the run's dtype first, or pass an empty "
        "dictionary, which is filled",
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
    for name in ("a", "c"):
        with pytest.raises(TypeError, match=f"^{name}: expected a numpy array"):
            differing_names(run, 0, {**weights, name: 3.0})
    with pytest.raises(ValueError, match="threads must be at least 1"):
        differing_names(run, 0, weights, threads=0)


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


def loaded(target, weights, tied=None, version=0):
    """The target after it has loaded these weights as an anchor."""
    tied = tied or {}
    target.load(Replay(weights, [], SERIAL), WeightVersion("r", version, digest(weights)), [], tied)
    return target


def test_a_tie_is_judged_by_what_bits_mean():
    """One name has the bits as integers, the other as what they mean; with `dtype` they are the same."""
    bits = np.arange(4, dtype=np.uint16)
    weights = {"a": bits, "b": bits.copy().view(ml_dtypes.bfloat16)}
    own = {"a": Tensor(DTYPES["BF16"], (4,), bits)}
    assert MemoryTarget(weights, dtype={"a": "BF16"}).digest({"b": "a"}) == digest(own)
    assert MemoryTarget(weights).digest({"b": "a"}) is None
    assert MemoryTarget(weights, dtype="BF16").weights()["a"].dtype.name == "BF16"


def test_a_dictionary_keeps_the_tensors_that_stay_as_they_were():
    one, two = np.ones(3, np.float32), np.ones((2, 2), np.float32)
    weights, made = {}, []

    def make(name, dtype, shape):
        made.append((name, dtype.name, shape))
        return np.zeros(shape, dtype.unsigned).view(np.float32)

    target = loaded(MemoryTarget(weights, make=make), {"a": one, "b": two}, {"head": "a"})
    assert made == [("a", "F32", (3,)), ("b", "F32", (2, 2))]
    first = dict(weights)
    assert first["head"] is first["a"]
    made.clear()
    loaded(target, {"a": one + 1, "b": two.reshape(4), "head": one}, version=1)
    assert made == [("b", "F32", (4,)), ("head", "F32", (3,))], "of another shape; no longer another's memory"
    assert weights["a"] is first["a"]
    assert {name: weights[name].tolist() for name in weights} == {"a": [2] * 3, "b": [1] * 4, "head": [1] * 3}
    made.clear()
    loaded(target, {"head": one}, version=2)
    assert (made, list(weights)) == ([], ["head"])


def test_ties_and_the_meaning_of_bits_are_remembered_from_load_to_load():
    """Integers that stand for bf16, in a dictionary where two names have one tensor."""
    weights = {}
    target = MemoryTarget(weights, dtype="BF16", make=lambda name, dtype, shape: np.zeros(shape, dtype.unsigned))
    anchor = {"a": Tensor(DTYPES["BF16"], (3,), np.ones(3, np.uint16))}
    loaded(target, anchor, {"head": "a"})
    first, state = weights["a"], WeightVersion("r", 1, Digest(1, 2))
    patch = Patch("a", "BF16", Box.whole((3,)), np.array([5], np.uint16), np.array([1]))
    target.apply([patch], target.state(), state, {"head": "a"})
    assert target.state() == state
    assert weights["a"].tolist() == weights["head"].tolist() == [1, 5, 1]
    loaded(target, {**anchor, "head": anchor["a"]}, version=2)
    assert weights["a"] is first
    assert weights["head"] is not first
    own = {"a": np.zeros(3, np.uint16)}
    own["head"] = own["a"]
    loaded(MemoryTarget(own, dtype="BF16"), anchor, {"head": "a"})
    assert own["head"].tolist() == [1, 1, 1]


def test_a_dictionary_is_filled_with_plain_tensors_without_ties():
    weights = {}
    loaded(MemoryTarget(weights), {"a": np.ones(3, np.float32)}, {"head": "a"})
    assert list(weights) == ["a"]
    assert (weights["a"].dtype.name, weights["a"].shape) == ("F32", (3,))


def test_a_target_is_asked_again_for_its_weights():
    """A function may return other tensors; a mapping that had some is never given more."""
    current = {"a": np.zeros(3, np.float32)}
    target = loaded(MemoryTarget(lambda: current), {"a": np.ones(3, np.float32)})
    assert np.array_equal(current["a"], np.ones(3))
    target.refresh()
    assert target.state().version == 0
    old = weakref.ref(current["a"])
    current = {"a": np.zeros(3, np.float32)}
    target.refresh()
    assert target.state() is None
    assert old() is None, "what is no longer in use is let go"
    with pytest.raises(UnknownParameter, match="the run has b, which the target does not have"):
        loaded(target, {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)})


def copy_bias(module):
    module._register_state_dict_hook(lambda _, found, *__: found.update({"bias": found["bias"].clone()}))


def test_a_module_whose_state_dict_has_copies_is_refused():
    """What is written there would be lost, and the module would compute with other weights than the version's."""
    url, trained, served, later = fresh_url(), *(torch.nn.Linear(3, 2) for _ in range(3))
    copy_bias(served)
    with Publisher(url, trained, dtype="F32") as publisher:
        publisher.publish().wait(PATIENCE)
        with Replica(url, served) as replica, Replica(url, later) as second:
            with pytest.raises(ValueError, match="bias: the target returns a new copy on each access"):
                replica.pull()
            second.pull()
            copy_bias(later)
            with torch.no_grad():
                trained.bias.add_(1)
            publisher.publish().wait(PATIENCE)
            with pytest.raises(ValueError, match="bias: the target returns a new copy on each access"):
                second.pull()
            assert (replica.version, second.version) == (None, None)


def test_a_patch_that_fails_leaves_no_version():
    base, weights = {"a": np.zeros(3, np.float32)}, {"a": np.ones(3, np.float32)}
    target = loaded(MemoryTarget(weights), base)
    state = WeightVersion("r", 1, Digest(1, 2))
    wrong = Patch("a", "F32", Box.whole((3,)), np.ones(1, np.uint32), np.array([7]))
    with pytest.raises(IndexError):
        target.apply([wrong], target.state(), state, {})
    assert target.state() is None


class Fading(dict):
    """Weights that can be read a few times."""

    def __init__(self, weights, num_reads):
        super().__init__(weights)
        self._left = num_reads

    def __getitem__(self, name):
        self._left -= 1
        if self._left < 0:
            raise OSError("gone")
        return super().__getitem__(name)


def test_an_anchor_that_fails_half_way_leaves_no_version():
    anchor = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
    weights = {name: np.zeros_like(array) for name, array in anchor.items()}
    target = loaded(MemoryTarget(weights), anchor)
    for array in anchor.values():
        array += 1
    state = WeightVersion("r", 1, digest(anchor))
    # It is read once for its specs, once to be verified, and then to be written.
    with pytest.raises(OSError, match="gone"):
        target.load(Replay(Fading(anchor, 5), [], SERIAL), state, [], {})
    assert target.state() is None
    assert [array.tolist() for array in weights.values()] == [[2] * 3, [1] * 3]
    with pytest.raises(DigestMismatch):
        target.load(Replay(anchor, [], SERIAL), WeightVersion("r", 1, Digest(1, 2)), [], {})
    assert [array.tolist() for array in weights.values()] == [[2] * 3, [1] * 3], "verified before it is written"


def test_a_target_that_says_no_more_than_it_must():
    class Least(Target):
        def state(self):
            return WeightVersion("r", 3, Digest(1, 2))

    least = Least()
    assert (least.served(), least.refresh(), least.about()) == (least.state(), None, {})


def test_a_tensor_for_which_there_is_no_room_is_named():
    with pytest.raises(NotEnoughMemory, match=r"w takes 140,737,488,355,328 bytes"):
        new_tensor("w", DTYPES["F32"], (1 << 45,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_tensors_are_of_the_dtype(dtype):
    made = {"w": new_tensor("w", DTYPES[dtype], (2, 3))}
    assert spec(made, "w") == (dtype, (2, 3))


def test_ties_are_compared_too():
    shared, url = np.arange(4, dtype=np.float32), fresh_url()
    weights = {"embed": shared, "head": shared, "norm": np.ones(2, np.float32)}
    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        old = {name: array.copy() for name, array in weights.items()}
        shared[1] = 9
        publisher.publish().wait(PATIENCE)
    run = Run(url)
    assert differing_names(run, 1, weights) == {}
    assert differing_names(run, 1, old) == {"embed": 1, "head": 1}
    assert differing_names(run, 0, old) == {}
    assert differing_names(run, 1, {**weights, "head": old["head"]}) == {"head": 1}
    assert differing_names(run, 1, {"embed": shared, "norm": old["norm"]}) == {}, "a tied name may be absent"
    assert differing_names(run, 1, {"head": shared, "norm": old["norm"]}) == {"embed": 4}
