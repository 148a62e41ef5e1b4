"""Finds what changed between weights and their snapshot, keeps the old bits, and moves the snapshot, in one pass.

Weights are taken where they lie, as blocks of 4096 elements of two bytes (or four, cast to bfloat16 on the way), from
any number of tensors at once: a table has the address of each block. The snapshot is one flat array in which every tensor
starts at a whole block. It is compared four elements at a time, as 64-bit words, which is what a GPU needs to keep up with
its memory.

A block takes room for its changed words from a pool by one atomic addition, and keeps where it starts. From there they are
listed in the order of blocks. A block that finds no room stays as it was, so that a later look finds the same changes.
"""

import triton
import triton.language as tl

BLOCK = 4096
ELEMENTS = tl.constexpr(BLOCK)
WORDS = tl.constexpr(BLOCK // 4)

# A kept word is its place in the block and, above that, one bit for each of its four elements that changed.
PLACE_BITS = tl.constexpr(10)


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
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
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
def changed_lanes(difference):
    """One bit for each of the four 16-bit lanes of a word that is not 0."""
    low, high = difference.to(tl.int32), (difference >> 32).to(tl.int32)
    first = tl.where((low & 0xFFFF) != 0, 1, 0) | tl.where((low & -0x10000) != 0, 2, 0)
    return first | tl.where((high & 0xFFFF) != 0, 4, 0) | tl.where((high & -0x10000) != 0, 8, 0)


@triton.jit
def num_lanes(lanes):
    """How many of four bits are set."""
    pairs = (lanes & 5) + ((lanes >> 1) & 5)
    return (pairs & 3) + (pairs >> 2)


@triton.jit
def find_changes(
    blocks, addresses, lengths, snapshot, taken, pool, places, words, starts, num_words, num_changes,
    CAST: tl.constexpr, POOLS: tl.constexpr,
):  # fmt: skip
    """For the blocks of a list: changed words to a pool, new bits to the snapshot, and how many words and elements.

    There are `POOLS` pools of `pool` places, since one counter for all would be what everything waits for. `taken` counts
    the places of each; it goes on where a block finds no room and stays as it was.
    """
    program = tl.program_id(0)
    block = tl.load(blocks + program).to(tl.int64)
    new = block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    index = tl.arange(0, WORDS)
    here = snapshot + block * WORDS
    old = tl.load(here + index)
    changed = new != old
    lanes = changed_lanes(new ^ old)
    order = tl.cumsum(changed.to(tl.int32), 0)
    count = tl.max(order, 0)
    own = program % POOLS
    start = tl.atomic_add(taken + own, count, sem="relaxed")
    fits = start + count <= pool
    start = own.to(tl.int64) * pool + start
    write = changed & fits
    tl.store((places + start) + (order - 1), (index | (lanes << PLACE_BITS)).to(tl.int16), mask=write)
    tl.store((words + start) + (order - 1), old, mask=write)
    tl.store(here + index, new, mask=write)
    tl.store(starts + program, start)
    tl.store(num_words + program, tl.where(fits, count, 0))
    tl.store(num_changes + program, tl.where(fits, tl.sum(num_lanes(lanes), 0), 0))


@triton.jit
def count_changes(blocks, addresses, lengths, snapshot, counts, CAST: tl.constexpr):
    """Add up how many words and elements of some blocks differ; nothing is changed."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    new = block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    lanes = changed_lanes(new ^ tl.load(snapshot + block * WORDS + tl.arange(0, WORDS)))
    tl.atomic_add(counts, tl.sum((lanes != 0).to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(num_lanes(lanes).to(tl.int64), 0), sem="relaxed")


@triton.jit
def take_all(blocks, addresses, lengths, snapshot, CAST: tl.constexpr):
    """Copy blocks of weights to the snapshot."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    new = block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    tl.store(snapshot + block * WORDS + tl.arange(0, WORDS), new)


@triton.jit
def list_changes(
    blocks, snapshot, places, words, starts, num_words, ends, num_changes, begins, changes, room, SLOTS: tl.constexpr
):
    """From changed words in the pools to changed elements, in the order of blocks: old bits above the place in the block.

    `ends` are the sums of `num_changes`; those of all blocks go on from `begins[0]`. A block for which `changes` has no
    room gets its old words back.
    """
    program = tl.program_id(0)
    start = tl.load(starts + program)
    count = tl.load(num_words + program)
    end = tl.load(begins) + tl.load(ends + program)
    tl.store(begins + 1 + program, end)
    at = end - tl.load(num_changes + program)
    fits = end <= room
    here = snapshot + tl.load(blocks + program).to(tl.int64) * WORDS
    for slot in range(0, count, SLOTS):
        each = slot + tl.arange(0, SLOTS)
        live = each < count
        place = tl.load(places + start + each, mask=live, other=0).to(tl.int32)
        word = tl.load(words + start + each, mask=live, other=0)
        index = place & (WORDS - 1)
        tl.store(here + index, word, mask=live & (fits == 0))
        lanes = place >> PLACE_BITS
        found = num_lanes(lanes)
        behind = tl.cumsum(found, 0)
        out = behind - found
        for lane in tl.static_range(4):
            changed = (((lanes >> lane) & 1) != 0) & fits
            old = (word >> (16 * lane)).to(tl.int32) << 16
            tl.store((changes + at) + out, old | (index * 4 + lane), mask=changed)
            out += changed.to(tl.int32)
        at += tl.max(behind, 0)
