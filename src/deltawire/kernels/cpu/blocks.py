"""Blocks of 64 elements: which changed, and what class each is in. The last block of an array may be shorter."""

from typing import Any

import numpy as np
from numba import njit, uint64

from deltawire.kernels.cpu.compiled import kernel, part
from deltawire.kernels.cpu.simd import (
    BLOCK,
    advance_classes,
    changed_mask,
    class_planes,
    nth_bit,
    popcount,
    put_lane,
    trailing_zeros,
)

NUM_CLASSES = 16
STRETCH = 64 * BLOCK
ONE = np.uint64(1)
NEVER = ~np.uint64(0)


@njit(inline="always")
def element_class(bits: Any, shift: Any, mask: Any, first: Any) -> Any:
    """The class of one element; `class_planes` is the same for 64."""
    exponent = (uint64(bits) >> uint64(shift)) & uint64(mask)
    above = exponent - uint64(first) if exponent > uint64(first) else uint64(0)
    return min(above, uint64(NUM_CLASSES - 1))


@njit(inline="always")
def block_changed(old: Any, new: Any, index: Any) -> Any:
    if index + BLOCK <= old.size:
        return changed_mask(old, new, index)
    word = uint64(0)
    for j in range(old.size - index):
        if old[index + j] != new[index + j]:
            word |= ONE << uint64(j)
    return word


@njit(inline="always")
def block_planes(old: Any, index: Any, shift: Any, mask: Any, first: Any) -> Any:
    """Four class planes and a plane of the elements that exist."""
    if index + BLOCK <= old.size:
        a, b, c, d = class_planes(old, index, shift, mask, first)
        return a, b, c, d, ~uint64(0)
    a = b = c = d = alive = uint64(0)
    for j in range(old.size - index):
        k = uint64(element_class(old[index + j], shift, mask, first))
        at = uint64(j)
        a |= (k & ONE) << at
        b |= ((k >> ONE) & ONE) << at
        c |= ((k >> uint64(2)) & ONE) << at
        d |= ((k >> uint64(3)) & ONE) << at
        alive |= ONE << at
    return a, b, c, d, alive


@kernel
def count_changed(old: Any, new: Any) -> Any:
    """How many elements differ."""
    total = 0
    for index in range(0, old.size, BLOCK):
        total += popcount(block_changed(old, new, index))
    return total


@kernel
def changed_positions(old: Any, new: Any) -> Any:
    """The positions that differ, ascending. One pass: the array grows as it fills."""
    positions = np.empty(STRETCH + old.size // 32, np.uint32)
    found = 0
    for start in range(0, old.size, STRETCH):
        if found + STRETCH > positions.size:
            larger = np.empty(2 * positions.size, np.uint32)
            for i in range(found):
                larger[i] = positions[i]
            positions = larger
        found += _changed_in_stretch(old, new, start, positions[found:])
    return positions[:found]


@part
def _changed_in_stretch(old: Any, new: Any, start: Any, positions: Any) -> Any:
    """Write the positions that differ in one stretch; how many.

    Two are written for every block, whether it has as many or not, and overwritten by the next one: how many changes a
    block has cannot be guessed, and a wrong guess costs more.
    """
    found = uint64(0)
    for index in range(start, min(start + STRETCH, old.size), BLOCK):
        word = block_changed(old, new, index)
        count = uint64(popcount(word))
        base = np.uint32(index)
        for i in range(uint64(0), max(count, uint64(2))):
            positions[found + i] = base + np.uint32(trailing_zeros(word))
            word &= word - ONE
        found += count
    return found


@njit(inline="always")
def with_class(planes: Any, at: Any, k: Any) -> Any:
    """Class planes with element `at` in class k."""
    a, b, c, d, alive = planes
    others = ~(ONE << at)
    a = a & others | (k & ONE) << at
    b = b & others | (k >> ONE & ONE) << at
    c = c & others | (k >> uint64(2) & ONE) << at
    d = d & others | (k >> uint64(3) & ONE) << at
    return a, b, c, d, alive


@kernel
def class_ranks(bits: Any, positions: Any, before: Any, after: Any, shift: Any, mask: Any, first: Any) -> Any:
    """For each position its class and its rank among the elements of that class; and each class's population.

    `bits` may have the bits before or after at each of the positions; those before count.
    """
    classes = np.empty(positions.size, np.uint8)
    ranks = np.empty(positions.size, np.uint32)
    moved = np.empty(positions.size + 1, np.uint32)
    num_moved = 0
    for i in range(positions.size):
        classes[i] = element_class(before[i], shift, mask, first)
        moved[num_moved] = i
        num_moved += element_class(after[i], shift, mask, first) != classes[i]
    masks = np.empty(NUM_CLASSES, np.uint64)
    seen = np.zeros(NUM_CLASSES, np.uint64)
    at = put_back = 0
    for index in range(0, bits.size, BLOCK):
        planes = block_planes(bits, index, shift, mask, first)
        while put_back < num_moved and positions[moved[put_back]] < index + BLOCK:
            i = moved[put_back]
            planes = with_class(planes, uint64(positions[i]) - uint64(index), uint64(classes[i]))
            put_back += 1
        advance_classes(planes, masks, seen, seen)
        while at < positions.size and positions[at] < index + BLOCK:
            from_here = ~uint64(0) << (uint64(positions[at]) - uint64(index))
            k = classes[at]
            ranks[at] = seen[k] - uint64(popcount(masks[k] & from_here))
            at += 1
    return classes, ranks, seen


@kernel
def ranked_positions(old: Any, ranks: Any, start: Any, shift: Any, mask: Any, first: Any) -> Any:
    """The positions, ascending, of the elements with given ranks in their class, and each class's population.

    The ranks of class k, ascending, are ranks[start[k]:start[k + 1]]. A rank that is not there is left out.
    """
    positions = np.empty(ranks.size, np.uint32)
    masks = np.empty(NUM_CLASSES, np.uint64)
    seen = np.zeros(NUM_CLASSES, np.uint64)
    cursor = start[:-1].copy()
    wanted = np.empty(NUM_CLASSES, np.uint64)
    for k in range(NUM_CLASSES):
        wanted[k] = uint64(ranks[cursor[k]]) if cursor[k] < start[k + 1] else NEVER
    found = 0
    for index in range(0, old.size, BLOCK):
        hits = advance_classes(block_planes(old, index, shift, mask, first), masks, seen, wanted)
        changed = uint64(0)
        while hits:
            k = trailing_zeros(hits)
            hits &= hits - ONE
            word, want, behind = masks[k], wanted[k], seen[k]
            before = behind - uint64(popcount(word))
            at, end = cursor[k], start[k + 1]
            while want < behind:
                changed |= nth_bit(word, want - before)
                at += 1
                want = uint64(ranks[at]) if at < end else NEVER
            cursor[k] = at
            put_lane(wanted, uint64(k), want)
        while changed:
            positions[found] = index + trailing_zeros(changed)
            found += 1
            changed &= changed - ONE
    return positions[:found], seen
