"""Several deltas in a row, onto weights that stay as they are."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from deltawire import diff, digest
from deltawire.errors import BaseMismatch, BrokenChain, CorruptObject, DigestMismatch, ShapeMismatch, UnknownParameter
from deltawire.format.delta import Delta
from deltawire.format.patches import encode_box
from deltawire.format.replay import Replay, _advance
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from deltawire.workers import SERIAL
from support.chains import copy_of, make_weights, step


@pytest.fixture
def steps():
    """Weights at four versions, and the deltas between them."""
    rng, weights = np.random.default_rng(0), make_weights()
    versions = []
    for _ in range(4):
        versions.append({name: replace(tensor, bits=tensor.bits.copy()) for name, tensor in weights.items()})
        step(weights, rng, density=0.01)
    deltas = [
        diff(old, new, run="r", base_version=number, version=number + 1)
        for number, (old, new) in enumerate(pairwise(versions))
    ]
    return versions, deltas


def test_patches_of_several_deltas_hold_just_what_changed(steps):
    versions, deltas = steps
    before = copy_of(versions[0])
    patches = Replay(versions[0], deltas, SERIAL).patches(digest(versions[0]))
    assert [patch.name for patch in patches] == sorted(versions[0])
    for patch in patches:
        old, new = versions[0][patch.name].bits, versions[3][patch.name].bits
        assert np.array_equal(old, before[patch.name])
        assert patch.dtype == "BF16"
        if len(old) > 5:
            assert set(np.flatnonzero(old != new)) <= set(patch.positions.tolist())
            assert len(patch.positions) < 0.05 * len(old) + 5
            assert np.all(np.diff(patch.positions) > 0)
        written = old.copy()
        written[patch.where] = patch.bits
        assert np.array_equal(written, new)


def test_a_dense_change_is_a_whole_tensor(steps):
    versions, deltas = steps
    dense = {name: replace(tensor, bits=tensor.bits + np.uint16(1)) for name, tensor in versions[3].items()}
    deltas = [*deltas, diff(versions[3], dense, run="r", base_version=3, version=4)]
    for patch in Replay(versions[0], deltas, SERIAL).patches(digest(versions[0])):
        assert isinstance(patch.where, slice)
        assert np.array_equal(patch.bits, dense[patch.name].bits)


def test_a_dense_change_stays_one_when_a_sparse_one_follows(steps):
    versions, _ = steps
    dense = {name: replace(tensor, bits=tensor.bits + np.uint16(1)) for name, tensor in versions[0].items()}
    last = {name: replace(tensor, bits=tensor.bits.copy()) for name, tensor in dense.items()}
    last["embed"].bits[7] += 1
    deltas = [diff(versions[0], dense, run="r"), diff(dense, last, run="r", base_version=1, version=2)]
    for patch in Replay(versions[0], deltas, SERIAL).patches(digest(versions[0])):
        assert np.array_equal(patch.bits, last[patch.name].bits)


def test_progress_is_reported_for_each_tensor(steps):
    versions, deltas = steps
    seen = []
    replay = Replay(versions[0], deltas, SERIAL, lambda name, count: seen.append((name, count)))
    replay.patches(digest(versions[0]))
    assert dict(seen) == {name: len(tensor.bits) for name, tensor in versions[0].items()}
    seen.clear()
    replay.verify(digest(versions[3]))
    assert dict(seen) == {name: len(tensor.bits) for name, tensor in versions[0].items()}


def test_nothing_to_do(steps):
    versions, _ = steps
    replay = Replay(versions[0], [], SERIAL)
    assert replay.patches(Digest(1, 2)) == []
    replay.verify(digest(versions[0]))
    replay.verify(digest(versions[0]))
    with pytest.raises(DigestMismatch) as caught:
        replay.verify(Digest(1, 2))
    assert caught.value.fields == {"expected": str(Digest(1, 2)), "actual": str(digest(versions[0]))}
    assert caught.value.message == f"the weights have digest {digest(versions[0])}, not {Digest(1, 2)}"


def test_deltas_that_do_not_follow_each_other(steps):
    versions, deltas = steps
    with pytest.raises(BrokenChain) as caught:
        Replay(versions[0], [deltas[0], deltas[2]], SERIAL)
    assert caught.value.message == "the delta to version 3 does not start where the one to 1 ends"
    assert caught.value.fields == {"version": 3}
    with pytest.raises(BaseMismatch):
        Replay(versions[1], deltas, SERIAL).patches(digest(versions[1]))
    with pytest.raises(BaseMismatch):
        Replay(versions[1], deltas, SERIAL).verify(digest(versions[3]))


def test_what_turns_other_weights_into_these(steps):
    versions, deltas = steps
    replay, expected = Replay(versions[0], deltas, SERIAL), digest(versions[3])
    patches = replay.patches_from(versions[1], expected, 0.5)
    assert {patch.name for patch in patches} == {
        name for name in versions[1] if not np.array_equal(versions[1][name].bits, versions[3][name].bits)
    }
    for patch in patches:
        assert (patch.dtype, patch.box) == ("BF16", Box.whole(versions[1][patch.name].shape))
        bits = versions[1][patch.name].bits.copy()
        assert np.array_equal(patch.positions, np.flatnonzero(bits != versions[3][patch.name].bits))
        bits[patch.where] = patch.bits
        assert np.array_equal(bits, versions[3][patch.name].bits)
    num_changed = sum(len(patch.bits) for patch in patches)
    total = sum(len(tensor.bits) for tensor in versions[1].values())
    assert replay.patches_from(versions[1], expected, num_changed / total) is not None
    assert replay.patches_from(versions[1], expected, (num_changed - 1) / total) is None
    assert replay.patches_from({"embed": versions[1]["embed"]}, expected, 0.5) is None
    with pytest.raises(DigestMismatch):
        replay.patches_from(versions[1], Digest(1, 2), 0.5)
    assert replay.patches_from(versions[3], expected, 0.5) == []


def changed(weights, where):
    return {name: replace(tensor, bits=np.where(where(tensor.bits), tensor.bits ^ 1, tensor.bits))
            for name, tensor in weights.items()}  # fmt: skip


def some(bits):
    return np.arange(len(bits)) % 50 == 3


def most(bits):
    return np.arange(len(bits)) % 50 != 3


@pytest.mark.parametrize("kinds", [(some, most), (most, some), (most, most), (most, some, some)])
def test_after_a_dense_change_no_positions_are_listed(kinds):
    """They would take four times the space of the weights."""
    states = [{"w": make_weights()["embed"]}]
    for kind in kinds:
        states.append(changed(states[-1], kind))
    encodings = ["dense" if kind is most else "gap" for kind in kinds]
    deltas = [diff(old, new, run="r", base_version=number, version=number + 1, encoding=encodings[number])
              for number, (old, new) in enumerate(pairwise(states))]  # fmt: skip
    bits, touched, gain = _advance(states[0]["w"], [delta.entries for delta in deltas], SERIAL)
    assert touched is None
    assert np.array_equal(bits, states[-1]["w"].bits)
    assert digest(states[0]) + gain == digest(states[-1])
    (patch,) = Replay(states[0], deltas, SERIAL).patches(digest(states[0]))
    assert (patch.name, patch.dtype, patch.where) == ("w", "BF16", slice(None))
    assert np.array_equal(patch.bits, bits)


@pytest.mark.parametrize(("num_changed", "is_whole"), [(20, False), (21, True)])
def test_positions_are_listed_up_to_a_fifth(num_changed, is_whole):
    states = [{"w": Tensor(DTYPES["BF16"], (10, 10), np.zeros(100, np.uint16))}]
    for stretch in (slice(0, 5), slice(3, num_changed)):
        states.append({"w": replace(states[-1]["w"], bits=states[-1]["w"].bits.copy())})
        states[-1]["w"].bits[stretch] += 1
    deltas = [diff(old, new, run="r", base_version=number, version=number + 1, encoding="coo")
              for number, (old, new) in enumerate(pairwise(states))]  # fmt: skip
    (patch,) = Replay(states[0], deltas, SERIAL).patches(digest(states[0]))
    assert (patch.name, patch.dtype, patch.box) == ("w", "BF16", Box.whole((10, 10)))
    assert patch.positions.tolist() == list(range(100 if is_whole else num_changed))
    assert isinstance(patch.where, slice) == is_whole
    assert patch.bits.tolist() == states[2]["w"].bits[: len(patch.positions)].tolist()


def test_all_boxes_of_a_delta_are_decoded_against_the_weights_before_it(steps):
    """Each rank of a trainer sends its part of a tensor."""
    versions, deltas = steps
    name = "layer.weight"

    def in_boxes(number):
        entries = [entry for entry in deltas[number].entries if entry.name != name]
        for box in (Box((64, 64), (start, 0), (32, 64)) for start in (0, 32)):
            old, new = (
                versions[each][name].bits.reshape(64, 64)[box.slices].reshape(-1) for each in (number, number + 1)
            )
            entries.append(encode_box(name, DTYPES["BF16"], old, new, box, ["context"])[0])
        return Delta(deltas[number].info, entries)

    first, second = in_boxes(0), in_boxes(1)
    for chain, last in (([first], 1), ([first, second], 2), ([first, *deltas[1:]], 3)):
        patches = Replay(versions[0], chain, SERIAL).patches(digest(versions[0]))
        (patch,) = [each for each in patches if each.name == name]
        written = versions[0][name].bits.copy()
        written[patch.where] = patch.bits
        assert np.array_equal(written, versions[last][name].bits)
        Replay(versions[0], chain, SERIAL).verify(digest(versions[last]))


def corrupted(delta):
    """The delta with zeros for the stream of its first tensor."""
    entry = delta.entries[0]
    arrays = {part: np.zeros_like(array) for part, array in entry.arrays.items()}
    return Delta(delta.info, [replace(entry, arrays=arrays), *delta.entries[1:]])


def test_what_cannot_be_decoded_is_blamed_on_the_base_where_that_is_another(steps):
    versions, deltas = steps
    first = diff(versions[0], versions[1], run="r", encoding="context")
    name = first.entries[0].name
    other = {**versions[0], name: replace(versions[0][name], bits=np.zeros_like(versions[0][name].bits))}
    with pytest.raises(BaseMismatch) as caught:
        Replay(other, [first, *deltas[1:]], SERIAL).bits_of(name)
    assert (caught.value.expected, caught.value.actual) == (str(digest(versions[0])), str(digest(other)))
    with pytest.raises(CorruptObject):
        Replay(versions[0], [corrupted(first)], SERIAL).bits_of(name)


def test_deltas_for_other_weights_are_refused_at_once(steps):
    versions, deltas = steps
    without = {name: tensor for name, tensor in versions[0].items() if name != "norm"}
    with pytest.raises(UnknownParameter, match="the delta changes norm, which the weights do not have"):
        Replay(without, deltas, SERIAL)
    with pytest.raises(ShapeMismatch, match=r"norm is BF16 \[8, 8\], the delta was made for BF16 \[64\]"):
        Replay({**versions[0], "norm": replace(versions[0]["norm"], shape=(8, 8))}, deltas, SERIAL)
