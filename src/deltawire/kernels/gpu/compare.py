"""Finds what changed between weights and their snapshot, keeps the old bits, and moves the snapshot, in one pass.

Weights are taken where they lie, as blocks of 4096 elements of two bytes (or four, cast to bfloat16 on the way), from
any number of tensors at once: a table has the address of each block. The snapshot is one flat array in which every tensor
starts at a whole block. It is compared four elements at a time, as 64-bit words, which is what a GPU needs to keep up with
its memory.

A block that has changes takes room for its changed words from a pool by one atomic addition, and keeps where it starts.
A block that finds no room changes nothing and says so; it is looked at again when the pool is free.
"""

import triton
import triton.language as tl

BLOCK = 4096
ELEMENTS = tl.constexpr(BLOCK)
WORDS = tl.constexpr(BLOCK // 4)

# What `starts` says of a block that found no room in the pool.
NO_ROOM = -1

# A kept word is its place in the block and, above that, one bit for each of its four elements that changed.
PLACE_BITS = tl.constexpr(10)


@triton.jit
def _block_words(address, length, CAST: tl.constexpr):
    """A block of weights as words of four 16-bit patterns; what lies behind the end of the tensor is 0."""
    index = tl.arange(0, WORDS)
    if CAST is not None:
        lane = tl.arange(0, 4)[None, :]
        at = index[:, None] * 4 + lane
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=at < length, other=0.0)
        bits = values.to(CAST).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        words = tl.sum(bits << (16 * lane), 1)
    elif length == ELEMENTS:
        words = tl.load(address.to(tl.pointer_type(tl.int64)) + index)
    else:
        # The last block of a tensor need not end with a whole word.
        lane = tl.arange(0, 4)[None, :]
        at = index[:, None] * 4 + lane
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=at < length, other=0).to(tl.int64) & 0xFFFF
        words = tl.sum(bits << (16 * lane), 1)
    return words


@triton.jit
def _changed_lanes(difference):
    """One bit for each of the four 16-bit lanes of a word that is not 0."""
    low = 0x7FFF7FFF7FFF7FFF
    marks = (((difference & low) + low) | difference) & ~low
    # The marks lie at bits 15, 31, 47 and 63; a multiplication would bring them together, shifts of constants are cheaper.
    return (((marks >> 15) & 1) | ((marks >> 30) & 2) | ((marks >> 45) & 4) | ((marks >> 60) & 8)).to(tl.int32)


@triton.jit
def find_changes(
    blocks, addresses, lengths, snapshot, cursor, capacity,
    places, words, starts, num_words, num_changes, CAST: tl.constexpr,
):  # fmt: skip
    """For the blocks of a list: changed words to the pool, new bits to the snapshot, and how many of each."""
    program = tl.program_id(0)
    block = tl.load(blocks + program).to(tl.int64)
    new = _block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    index = tl.arange(0, WORDS)
    here = snapshot + block * WORDS + index
    old = tl.load(here)
    changed = new != old
    rank = tl.cumsum(changed.to(tl.int32), 0)
    count = tl.max(rank, 0)
    start = tl.atomic_add(cursor, count.to(tl.int64), sem="relaxed")
    fits = start + count <= capacity
    lanes = _changed_lanes(new ^ old)
    write = changed & fits
    at = start + rank - 1
    tl.store(places + at, (index | (lanes << PLACE_BITS)).to(tl.int16), mask=write)
    tl.store(words + at, old, mask=write)
    tl.store(here, new, mask=write)
    pairs = (lanes & 5) + ((lanes >> 1) & 5)
    tl.store(starts + program, tl.where(fits, start, -1))
    tl.store(num_words + program, tl.where(fits, count, 0))
    tl.store(num_changes + program, tl.where(fits, tl.sum((pairs & 3) + (pairs >> 2), 0), 0))


@triton.jit
def count_changes(
    blocks, addresses, lengths, snapshot, num_words, num_changes, CAST: tl.constexpr
):
    """How many words and elements of some blocks differ; nothing is changed."""
    program = tl.program_id(0)
    block = tl.load(blocks + program).to(tl.int64)
    new = _block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    old = tl.load(snapshot + block * WORDS + tl.arange(0, WORDS))
    lanes = _changed_lanes(new ^ old)
    pairs = (lanes & 5) + ((lanes >> 1) & 5)
    tl.store(num_words + program, tl.sum((lanes != 0).to(tl.int32), 0))
    tl.store(num_changes + program, tl.sum((pairs & 3) + (pairs >> 2), 0))


@triton.jit
def take_all(blocks, addresses, lengths, snapshot, CAST: tl.constexpr):
    """Copy blocks of weights to the snapshot."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    new = _block_words(tl.load(addresses + block), tl.load(lengths + block), CAST)
    tl.store(snapshot + block * WORDS + tl.arange(0, WORDS), new)


@triton.jit
def list_changes(
    blocks, ordinals, places, words, starts, num_words, ends, num_changes,
    first, positions, olds, CHUNK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """From changed words in the pool to changed elements, in the order of blocks: position in the chunk, old bits.

    Block `i` of the list writes behind `first + ends[i] - num_changes[i]`.
    """
    program = tl.program_id(0)
    start = tl.load(starts + program)
    count = tl.load(num_words + program)
    ordinal = tl.load(ordinals + tl.load(blocks + program)).to(tl.int64)
    base = ((ordinal * ELEMENTS) & (CHUNK - 1)).to(tl.int32)
    at = tl.load(first) + tl.load(ends + program) - tl.load(num_changes + program)
    for slot in range(0, count, SLOTS):
        each = slot + tl.arange(0, SLOTS)
        live = each < count
        place = tl.load(places + start + each, mask=live, other=0).to(tl.int32)
        word = tl.load(words + start + each, mask=live, other=0)
        lanes = place >> PLACE_BITS
        pairs = (lanes & 5) + ((lanes >> 1) & 5)
        found = (pairs & 3) + (pairs >> 2)
        behind = tl.cumsum(found, 0)
        element = base + (place & (WORDS - 1)) * 4
        out = at + behind - found
        for lane in tl.static_range(4):
            changed = ((lanes >> lane) & 1) != 0
            tl.store(positions + out, element + lane, mask=changed)
            tl.store(olds + out, (word >> (16 * lane)).to(tl.int16), mask=changed)
            out += changed.to(tl.int64)
        at += tl.max(behind, 0)
