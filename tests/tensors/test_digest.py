"""The digest: one value whatever the path, and another one for any other state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltawire
from deltawire import Box, Digest
from deltawire.errors import CorruptObject
from deltawire.tensors.digest import box_digest, change_digest, tensor_digest, tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from deltawire.workers import Workers
from support.patterns import dtypes, pairs

BF16 = DTYPES["BF16"]
MASK = (1 << 64) - 1


def slow_mix(seed, position, bits):
    x = (seed + position * 0x9E3779B97F4A7C15 + bits * 0xD6E8FEB86659FD93) & MASK
    x ^= x >> 32
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 29
    low = x * 0x94D049BB133111EB & MASK
    high = x * 0xA0761D6478BD642F & MASK
    high = (high ^ high >> 31) * 0xE7037ED1A0B428DB & MASK
    return low ^ low >> 32, high ^ high >> 33


@given(st.data(), dtypes)
def test_incremental_equals_full(data, dtype):
    old, new = data.draw(pairs(dtype))
    key = tensor_key("w", dtype, old.shape)
    positions = np.flatnonzero(old != new)
    before, after = (tensor_digest("w", Tensor(dtype, old.shape, bits)) for bits in (old, new))
    assert before + change_digest(key, positions, old[positions], new[positions]) == after


@given(st.data(), dtypes)
def test_full_equals_the_definition(data, dtype):
    bits, _ = data.draw(pairs(dtype, 50))
    key = tensor_key("w", dtype, bits.shape)
    expected = key.constant
    for position, value in enumerate(bits):
        expected += Digest(*slow_mix(int(key.seed), position, int(value)))
    assert tensor_digest("w", Tensor(dtype, bits.shape, bits)) == expected


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.data())
def test_boxes_add_up(a, b, c, data):
    shape = (a, b, c)
    bits = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16)
    key = tensor_key("w", BF16, shape)
    cuts = [data.draw(st.integers(0, size)) for size in shape]
    total = Digest()
    for corner in np.ndindex(2, 2, 2):
        offset = tuple(cut if side else 0 for side, cut in zip(corner, cuts, strict=True))
        sizes = tuple(size - cut if side else cut for side, cut, size in zip(corner, cuts, shape, strict=True))
        box = Box(shape, offset, sizes)
        total += box_digest(key, box, np.ascontiguousarray(bits[box.slices]).reshape(-1))
    assert total == box_digest(key, Box.whole(shape), bits.reshape(-1))


def test_any_number_of_threads():
    weights = {"a": np.random.default_rng(0).integers(0, 1 << 16, (3, 1_234_567), np.uint16)}
    results = {deltawire.digest(weights, dtype="BF16", threads=threads) for threads in (1, 2, 5)}
    assert len(results) == 1
    key = tensor_key("a", BF16, (3, 1_234_567))
    box = Box((3, 1_234_567), (1, 7), (2, 1_234_560))
    part = np.ascontiguousarray(weights["a"][box.slices]).reshape(-1)
    with Workers(3) as workers:
        assert box_digest(key, box, part, workers) == box_digest(key, box, part)


def test_value_of_the_specification():
    """Literal, so that no machine and no release may disagree."""
    weights = {"w": np.arange(6, dtype=np.uint16).reshape(2, 3), "scalar": np.float32(1.5).reshape(())}
    assert str(deltawire.digest(weights, dtype={"w": "BF16"})) == "a6615d32ef824cfa130f27ce12afe1a7"


def test_name_shape_dtype_and_place_count():
    base = np.arange(12, dtype=np.uint16)
    digests = [
        deltawire.digest({"w": base}),
        deltawire.digest({"v": base}),
        deltawire.digest({"w": base.reshape(3, 4)}),
        deltawire.digest({"w": base}, dtype="BF16"),
        deltawire.digest({"w": base[::-1].copy()}),
        deltawire.digest({"w": base, "empty": np.empty(0, np.uint16)}),
        deltawire.digest({}),
    ]
    assert len(set(digests)) == len(digests)


def test_tied_names_are_left_out():
    base = np.arange(12, dtype=np.uint16)
    tied = deltawire.digest({"w": base, "head": base}, tied={"head": "w"})
    assert tied == deltawire.digest({"w": base})


@given(st.integers(0, MASK), st.integers(0, MASK))
def test_text_and_back(low, high):
    assert Digest.parse(str(Digest(low, high))) == Digest(low, high)
    assert repr(Digest(low, high)) == f"Digest({Digest(low, high)})"


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, " " * 32])
def test_text_that_is_no_digest(text):
    with pytest.raises(CorruptObject, match="not a digest"):
        Digest.parse(text)
