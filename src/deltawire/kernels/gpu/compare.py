"""Finds what changed between weights and their snapshot, keeps the old bits, and moves the snapshot.

Weights are taken where they lie, as blocks of 4096 elements of two bytes (or four, cast on the way), from any number of
tensors at once: a table has the address of each block. The snapshot is one flat array in which every tensor starts at a
whole block. It is compared four elements at a time, as 64-bit words, which is what a GPU needs to keep up with its
memory.

A block takes room for its changes from a pool by one atomic addition, and keeps where they start. A change is one
number: the old bits above the place in the block. A block that finds no room stays as it was, so that a later look
finds the same.
"""

import triton
import triton.language as tl

BLOCK = 4096
ELEMENTS = tl.constexpr(BLOCK)
WORDS = tl.constexpr(BLOCK // 4)


# What a NaN becomes on a GPU, whatever its sign and payload.
NAN = tl.constexpr(0x7FFF)


@triton.jit
def cast_bits(values, CAST: tl.constexpr):
    """The bits of float32 numbers in a dtype of two bytes, rounded to the nearest, ties to even, as torch does."""
    if tl.bfloat16 == CAST:
        # In integers, since Triton's interpreter cuts off where a GPU rounds.
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, NAN, rounded)
    return values.to(CAST).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def block_words(address, length, index, CAST: tl.constexpr):
    """Words of a block of weights, four 16-bit patterns each; what lies behind the end of the tensor is 0."""
    if CAST is not None:
        lane = tl.arange(0, 4)[None, :]
        at = index[:, None] * 4 + lane
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        # Two ways: a mask would keep the loads from being wide.
        if length == ELEMENTS:  # noqa: SIM108
            values = tl.load(weights + at)
        else:
            values = tl.load(weights + at, mask=at < length, other=0.0)
        bits = cast_bits(values, CAST).to(tl.int64) & 0xFFFF
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
def changed_lanes(difference):
    """One bit for each of the four elements of a word that differ."""
    low, high = difference.to(tl.int32), (difference >> 32).to(tl.int32)
    first = tl.where((low & 0xFFFF) != 0, 1, 0) | tl.where((low & -0x10000) != 0, 2, 0)
    return first | tl.where((high & 0xFFFF) != 0, 4, 0) | tl.where((high & -0x10000) != 0, 8, 0)


@triton.jit
def num_lanes(lanes):
    """How many of four bits are set."""
    pairs = (lanes & 5) + ((lanes >> 1) & 5)
    return (pairs & 3) + (pairs >> 2)


@triton.jit
def num_changed(difference):
    """How many elements differ in some words."""
    low_bits = 0x7FFF7FFF7FFF7FFF
    tops = ((difference & low_bits) + low_bits) | difference
    # Four sums at once, each below 2^16.
    sums = tl.sum((tops >> 15) & 0x0001000100010001, 0)
    sums += sums >> 32
    return ((sums + (sums >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit
def order_of(changed, ROWS: tl.constexpr):
    """How many changed words there are up to each, and in all.

    Each thread has `ROWS` of the words, and their counters share a number, so that a single scan serves all.
    """
    bits: tl.constexpr = 64 // ROWS
    row = tl.arange(0, ROWS)[:, None]
    shift = (bits * row).to(tl.int64)
    ones = tl.sum(tl.reshape(changed, (ROWS, WORDS // ROWS)).to(tl.int64) << shift, 0)
    totals = tl.sum(ones, 0)
    order = ((tl.cumsum(ones, 0)[None, :] >> shift) & ((1 << bits) - 1)).to(tl.int32)
    count = 0
    for each in tl.static_range(ROWS):
        order += tl.where(row == each, count, 0)
        count += ((totals >> (bits * each)) & ((1 << bits) - 1)).to(tl.int32)
    return tl.reshape(order, (WORDS,)), count


# A word for each lane: with wider loads all that is stored at scattered places would have to change lanes first.
@triton.jit(do_not_specialize=["first_block", "pool", "num_pools"])
def find_changes(
    first_block, addresses, lengths, snapshot, taken, pool, changes, starts, begins, num_pools,
    CAST: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Blocks from a first one on: their changes to a pool, new bits to the snapshot; where they start, how many.

    There are `num_pools` pools of `pool` places, which the blocks take in turns. `taken` counts the places of each; it
    goes on where a block finds no room, which then says that it has no changes.
    """
    program = tl.program_id(0)
    block = first_block + program
    index = tl.arange(0, WORDS)
    here = snapshot + block.to(tl.int64) * WORDS
    before = tl.load(here + index)
    address, length = tl.load(addresses + block), tl.load(lengths + block)
    difference = before ^ block_words(address, length, index, CAST)
    changed = difference != 0
    count = num_changed(difference)
    order, num_words = order_of(changed, ROWS)
    own = program % num_pools
    start = tl.atomic_add(taken + own, count, sem="relaxed")
    fits = start + count <= pool
    start = own.to(tl.int64) * pool + start
    tl.store(starts + block, start)
    # Once they are added up, these say how many come before each block.
    tl.store(begins + block + 1, tl.where(fits, count, 0))
    if fits:
        # First the changed words, at the end of the room: since each has a change, no change comes behind its word.
        changes += start
        listed = changes + (count - num_words)
        tl.store((listed - 1) + order, index, mask=changed)
        tl.debug_barrier()
        for slot in range(0, num_words, SLOTS):
            each = slot + tl.arange(0, SLOTS)
            live = each < num_words
            at = tl.load(listed + each, mask=live, other=0)
            old = tl.load(here + at)
            new = block_words(address, length, at, CAST)
            lanes = tl.where(live, changed_lanes(old ^ new), 0)
            found = num_lanes(lanes)
            behind = tl.cumsum(found, 0)
            to = behind - found
            # All threads have read their words before one of them is written over.
            tl.debug_barrier()
            for lane in tl.static_range(4):
                is_changed = ((lanes >> lane) & 1) != 0
                bits = (old >> (16 * lane)).to(tl.int32) << 16
                tl.store(changes + to, bits | (4 * at + lane), mask=is_changed)
                to += is_changed.to(tl.int32)
            changes += tl.max(behind, 0)
            tl.store(here + at, new, mask=live)


@triton.jit(do_not_specialize=["first_block", "stride", "num_pools"])
def count_changes(first_block, stride, addresses, lengths, snapshot, counts, num_pools, CAST: tl.constexpr):
    """Add up how many elements of every so many blocks differ, in a counter for each pool; nothing is changed."""
    program = tl.program_id(0)
    block = first_block + program * stride
    index = tl.arange(0, WORDS)
    old = tl.load(snapshot + block.to(tl.int64) * WORDS + index)
    difference = old ^ block_words(tl.load(addresses + block), tl.load(lengths + block), index, CAST)
    tl.atomic_add(counts + program % num_pools, num_changed(difference), sem="relaxed")


@triton.jit(do_not_specialize=["first_block"])
def take_all(first_block, addresses, lengths, snapshot, CAST: tl.constexpr):
    """Copy blocks of weights to the snapshot."""
    block = first_block + tl.program_id(0)
    index = tl.arange(0, WORDS)
    new = block_words(tl.load(addresses + block), tl.load(lengths + block), index, CAST)
    tl.store(snapshot + block.to(tl.int64) * WORDS + index, new)


@triton.jit
def put_back(begins, starts, changes, snapshot, SLOTS: tl.constexpr):
    """Give the blocks their old bits back."""
    block = tl.program_id(0).to(tl.int64)
    count = (tl.load(begins + block + 1) - tl.load(begins + block)).to(tl.int32)
    changes += tl.load(starts + block)
    for slot in range(0, count, SLOTS):
        each = slot + tl.arange(0, SLOTS)
        change = tl.load(changes + each, mask=each < count, other=0)
        here = snapshot + block * ELEMENTS + (change & (ELEMENTS - 1))
        tl.store(here, (change >> 16).to(tl.int16), mask=each < count)
