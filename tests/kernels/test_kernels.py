"""Each kernel against a plain numpy version of the same thing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.kernels.cpu import bitstream
from deltawire.kernels.cpu.blocks import changed_positions, class_ranks, count_changed, ranked_positions
from deltawire.kernels.cpu.decode import count_changes, decode_tile
from deltawire.kernels.cpu.elements import elements_at, put_elements
from deltawire.kernels.cpu.encode import NOT_RANKED, encode_tile, first_exponent, rank_changes
from deltawire.kernels.cpu.steps import steps_between
from deltawire.tensors.dtypes import DTYPES
from support.patterns import dtypes, pairs

FLOATS = [dtype for dtype in DTYPES.values() if dtype.exponent_mask]


def classes_of(bits, dtype, first):
    exponent = (bits.astype(object) >> dtype.exponent_shift) & dtype.exponent_mask
    return np.clip((exponent - first).astype(np.int64), 0, 15)


@given(st.data(), dtypes)
def test_changed_positions(data, dtype):
    old, new = data.draw(pairs(dtype))
    expected = np.flatnonzero(old != new)
    assert changed_positions(old, new).tolist() == expected.tolist()
    assert count_changed(old, new) == len(expected)


@given(st.data(), st.sampled_from(FLOATS))
def test_ranks_lead_back_to_positions(data, dtype):
    old, new = data.draw(pairs(dtype))
    positions = changed_positions(old, new)
    first = data.draw(st.integers(0, dtype.exponent_mask))
    layout = [dtype.unsigned.type(value) for value in (dtype.exponent_shift, dtype.exponent_mask, first)]
    before, after = old[positions], new[positions]
    classes, ranks, population = class_ranks(old, positions, before, after, *layout)
    either = np.where(np.random.default_rng(len(old)).random(len(old)) < 0.5, old, new)
    for bits in (new, either):
        found = class_ranks(bits, positions, before, after, *layout)
        assert all(map(np.array_equal, found, (classes, ranks, population)))
    expected = classes_of(old, dtype, first)
    assert population.tolist() == np.bincount(expected, minlength=16).tolist()
    assert classes.tolist() == expected[positions].tolist()
    for position, k, rank in zip(positions, classes, ranks, strict=True):
        assert rank == (expected[:position] == k).sum()
    order = np.argsort(classes, kind="stable")
    start = np.concatenate([[0], np.cumsum(np.bincount(classes, minlength=16))])
    found, counted = ranked_positions(old, ranks[order], start, *layout)
    assert found.tolist() == positions.tolist()
    assert counted.tolist() == population.tolist()


def test_ranks_that_do_not_exist_are_not_found():
    old = np.zeros(100, np.uint16)
    start = np.array([0, 1] + [1] * 15)
    layout = np.uint16(7), np.uint16(255), np.uint16(0)
    assert ranked_positions(old, np.array([99], np.uint32), start, *layout)[0].tolist() == [99]
    assert ranked_positions(old, np.array([100], np.uint32), start, *layout)[0].size == 0


def place(bits, dtype):
    width = 8 * dtype.itemsize
    if not dtype.sign_magnitude:
        return int(bits)
    return int(bits) + (1 << width - 1) if int(bits) < 1 << width - 1 else (1 << width) - 1 - int(bits)


@given(st.data(), dtypes)
def test_steps(data, dtype):
    old, new = data.draw(pairs(dtype, 200))
    positions = changed_positions(old, new)
    width = 8 * dtype.itemsize
    downwards, extra = steps_between(old[positions], new[positions], np.uint64(width), dtype.sign_magnitude)
    for position, down, more in zip(positions, downwards, extra, strict=True):
        step = (place(new[position], dtype) - place(old[position], dtype)) % (1 << width)
        assert bool(down) == (step >= 1 << width - 1)
        assert int(more) + 1 == ((1 << width) - step if down else step)


def test_one_step_of_bf16_is_one_unit_in_the_last_place():
    """-0.0 lies one step below 0.0, and the largest finite value one below infinity."""
    old = np.array([0x0000, 0x3F80, 0x8001, 0x7F7F], np.uint16)
    new = np.array([0x8000, 0x3F81, 0x8000, 0x7F80], np.uint16)
    downwards, extra = steps_between(old, new, np.uint64(16), True)
    assert extra.tolist() == [0, 0, 0, 0]
    assert downwards.tolist() == [1, 0, 0, 0]


@given(st.data(), dtypes)
def test_elements_at_positions(data, dtype):
    old, new = data.draw(pairs(dtype, 200))
    positions = changed_positions(old, new)
    for where in (positions, positions.astype(np.int64)):
        assert np.array_equal(elements_at(old, where), old[where])
    before = old.copy()
    put_elements(old, positions, elements_at(new, positions))
    assert np.array_equal(old, new)
    for outside in (-1, len(old)):
        with pytest.raises(IndexError):
            elements_at(old, np.array([outside]))
        with pytest.raises(IndexError):
            put_elements(old, np.array([outside]), before[:1])


def test_first_exponent_leaves_few_changes_above():
    bits = np.array([100 << 7] * 1000 + [140 << 7] * 3, np.uint16)
    assert first_exponent(bits, 7, 255) == 85
    assert first_exponent(bits[990:], 7, 255) == 125
    assert first_exponent(bits[:5], 0, 0) == 0


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 63)), max_size=50))
def test_bits_come_back(pieces):
    words = np.zeros(sum(count for _, count in pieces) // 64 + 2, np.uint64)
    at = np.uint64(0)
    for value, count in pieces:
        at = PUT(words, at, np.uint64(value & (1 << count) - 1), np.uint64(count))
    at = np.uint64(0)
    for value, count in pieces:
        assert GET(words, at, np.uint64(count)) == value & (1 << count) - 1
        at += np.uint64(count)


PUT, GET = bitstream.put, bitstream.get


def encode(old, new, contextual):
    positions = changed_positions(old, new)
    change = positions, old[positions], new[positions]
    ranked = rank_changes(old, *change, 7, 255) if contextual else NOT_RANKED
    words, num_bits, *_ = encode_tile(len(old), *change, 16, True, ranked, False)
    return words.view(np.uint8)[: (int(num_bits) + 7) // 8]


def encoded_tile(contextual):
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, 5000, np.uint16)
    new = old.copy()
    changed = rng.random(5000) < 0.05
    new[changed] += rng.integers(1, 9, int(changed.sum()), np.uint16)
    return old, encode(old, new, contextual)


@pytest.mark.parametrize("contextual", [False, True])
def test_a_stream_cut_anywhere_is_an_error(contextual):
    old, stream = encoded_tile(contextual)
    for kept in range(len(stream)):
        cut = stream[:kept]
        status, count = count_changes(cut, len(old), contextual)
        if status == 0:
            positions, bits = np.empty(int(count), np.int64), np.empty(int(count), np.uint16)
            status = decode_tile(cut, old, 16, 7, 255, True, contextual, positions, bits)
        assert status != 0, kept


@pytest.mark.parametrize("contextual", [False, True])
def test_an_inverted_group_states_the_size_of_its_universe(contextual):
    """Nearly all changed: the stream of a shorter tile does not pass for that of a longer one."""
    old = np.full(1000, 0x3F80, np.uint16)
    new = old + (np.arange(1000) % 10 != 0).astype(np.uint16)
    stream = encode(old, new, contextual)
    for extra, expected in ((0, True), (1, False)):
        longer = np.concatenate([old, old[:extra]])
        status, count = count_changes(stream, len(longer), contextual)
        assert (status, count) == (0, 900)
        positions, bits = np.empty(900, np.int64), np.empty(900, np.uint16)
        assert (decode_tile(stream, longer, 16, 7, 255, True, contextual, positions, bits) == 0) == expected
