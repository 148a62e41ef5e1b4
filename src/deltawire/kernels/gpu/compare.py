"""Finds what changed between weights and their snapshot, keeps the old bits, and moves the snapshot, in one pass.

Weights are taken where they lie, as blocks of 4096 elements of two bytes (or four, cast on the way), from any number of
tensors at once: a table has the address of each block. The snapshot is one flat array in which every tensor starts at a
whole block. It is compared four elements at a time, as 64-bit words, which is what a GPU needs to keep up with its memory.

A block takes room for its changes from a pool by one atomic addition, and keeps where they start. A change is one number:
the old bits above the place in the block. A block that finds no room stays as it was, so that a later look finds the same.
"""

import triton
import triton.language as tl

BLOCK = 4096
ELEMENTS = tl.constexpr(BLOCK)
WORDS = tl.constexpr(BLOCK // 4)


@triton.jit
def block_words(address, length, CAST: tl.constexpr):
    """A block of weights as words of four 16-bit patterns; what lies behind the end of the tensor is 0."""
    index = tl.arange(0, WORDS)
    if CAST is not None:
        lane = tl.arange(0, 4)[None, :]
        at = index[:, None] * 4 + lane
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        if length == ELEMENTS:
            values = tl.load(weights + at)
        else:
            values = tl.load(weights + at, mask=at < length, other=0.0)
        bits = values.to(CAST).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        words = tl.sum(bits << (16 * lane), 1)
    else:
        weights = address.to(tl.pointer_type(tl.int64))
        if length == ELEMENTS:
            words = tl.load(weights + index)
        else:
            # The last block of a tensor need not end with a whole word.
            words = tl.load(weights + index, mask=index < length // 4, other=0)
            last = tl.zeros((), tl.int64)
            for lane in tl.static_range(3):
                at = length // 4 * 4 + lane
                bits = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=at < length, other=0).to(tl.int64)
                last |= (bits & 0xFFFF) << (16 * lane)
            words = tl.where(index == length // 4, last, words)
    return words


@triton.jit
def lane_changed(difference, lane: tl.constexpr):
    """Whether one of the four elements of a word differs."""
    return ((difference >> (16 * lane)).to(tl.int32) & 0xFFFF) != 0


# A word for each lane: with wider loads all that is stored at scattered places would have to change lanes first.
@triton.jit(do_not_specialize_on_alignment=["snapshot"])
def find_changes(
    first_block, addresses, lengths, snapshot, taken, pool, changes, starts, counts,
    CAST: tl.constexpr, POOLS: tl.constexpr,
):  # fmt: skip
    """Blocks from a first one on: their changes to a pool, new bits to the snapshot; where they start, how many they are.

    There are `POOLS` pools of `pool` places, since one counter for all would be what everything waits for. `taken` counts
    the places of each; it goes on where a block finds no room.
    """
    program = tl.program_id(0)
    block = first_block + program
    index = tl.arange(0, WORDS)
    here = snapshot + block.to(tl.int64) * WORDS
    old = tl.load(here + index)
    new = block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    difference = new ^ old
    found = tl.zeros((WORDS,), tl.int32)
    for lane in tl.static_range(4):
        found += lane_changed(difference, lane).to(tl.int32)
    behind = tl.cumsum(found, 0)
    count = tl.max(behind, 0)
    own = program % POOLS
    start = tl.atomic_add(taken + own, count, sem="relaxed")
    fits = start + count <= pool
    start = own.to(tl.int64) * pool + start
    to = behind - found
    for lane in tl.static_range(4):
        changed = lane_changed(difference, lane)
        bits = (old >> (16 * lane)).to(tl.int32) << 16
        tl.store((changes + start) + to, bits | (4 * index + lane), mask=changed & fits)
        to += changed.to(tl.int32)
    tl.store(here + index, new, mask=(difference != 0) & fits)
    tl.store(starts + block, start)
    tl.store(counts + block, tl.where(fits, count, 0))


@triton.jit
def count_changes(first_block, stride, addresses, lengths, snapshot, total, CAST: tl.constexpr):
    """Add up how many elements of every so many blocks differ; nothing is changed."""
    block = first_block + tl.program_id(0) * stride
    old = tl.load(snapshot + block.to(tl.int64) * WORDS + tl.arange(0, WORDS))
    difference = old ^ block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    found = tl.zeros((WORDS,), tl.int64)
    for lane in tl.static_range(4):
        found += lane_changed(difference, lane).to(tl.int64)
    tl.atomic_add(total, tl.sum(found, 0), sem="relaxed")


@triton.jit
def take_all(first_block, addresses, lengths, snapshot, CAST: tl.constexpr):
    """Copy blocks of weights to the snapshot."""
    block = first_block + tl.program_id(0)
    new = block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    tl.store(snapshot + block.to(tl.int64) * WORDS + tl.arange(0, WORDS), new)
