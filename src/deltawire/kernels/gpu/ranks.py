"""From changed elements to steps, and for `context` to ranks: an element's place among those of its class in its tile.

The changes of a tile lie together, in the order of positions. One program goes through a tile; only the ranks need a look
at every element, by one program for each block: it counts the block's elements by class, 64 at a time, in counters of four,
then eight, then sixteen bits that share 64-bit words, and then counts within those 64 for the changed elements alone.

Ranks are over old weights, but the snapshot has the new ones already. So it is the classes of new bits that are counted, and the
changes before an element, which are known by both their classes, make up for the difference.
"""

import triton
import triton.language as tl

from deltawire.kernels.gpu.compare import ELEMENTS
from deltawire.kernels.gpu.digest import mix

CLASSES = tl.constexpr(16)

# A row of the table of tiles.
FIRST_BLOCK, SIZE, START, SEED, RUN_LENGTH, RUN_STRIDE, RUN_OFFSET = (tl.constexpr(i) for i in range(7))
FIELDS = tl.constexpr(7)

SUB = tl.constexpr(64)
SUBS = tl.constexpr(ELEMENTS.value // 64)


@triton.jit
def tile_changes(tiles, begins, tile):
    """A tile's first block, and where its changes begin and end."""
    block = tl.load(tiles + tile * FIELDS + FIRST_BLOCK)
    num_blocks = tl.cdiv(tl.load(tiles + tile * FIELDS + SIZE), ELEMENTS)
    return block, tl.load(begins + block), tl.load(begins + block + num_blocks)


@triton.jit
def place_on_line(bits):
    """The place of a 16-bit pattern with sign and magnitude on the line of all patterns."""
    return tl.where(bits < 0x8000, bits + 0x8000, 0xFFFF - bits)


@triton.jit
def class_of(bits, first, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return tl.minimum(tl.maximum(((bits >> SHIFT) & MASK) - first, 0), CLASSES - 1)


@triton.jit
def survey(
    tiles, begins, origin, positions, olds, snapshot,
    steps, firsts, digests,
    SHIFT: tl.constexpr, MASK: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """For each change of a tile its step; for the tile its first exponent and what its digest gains."""
    tile = tl.program_id(0)
    block, begin, end = tile_changes(tiles, begins, tile)
    row = tiles + tile * FIELDS
    start = tl.load(row + START)
    seed = tl.load(row + SEED).to(tl.uint64, bitcast=True)
    run_length, run_stride, run_offset = tl.load(row + RUN_LENGTH), tl.load(row + RUN_STRIDE), tl.load(row + RUN_OFFSET)
    chunk = start - (start & (CHUNK - 1))
    first_element = block * ELEMENTS - (start & (CHUNK - 1))
    lane = tl.arange(0, VECTOR)
    exponents = tl.arange(0, MASK + 1)
    histogram = tl.zeros((MASK + 1,), tl.int32)
    low = tl.zeros((VECTOR,), tl.uint64)
    high = tl.zeros((VECTOR,), tl.uint64)
    for at in range(begin, end, VECTOR):
        live = at + lane < end
        position = tl.load(positions + at + lane, mask=live, other=0).to(tl.int64)
        old = tl.load(olds + at + lane, mask=live, other=0).to(tl.int32) & 0xFFFF
        new = tl.load(snapshot + first_element + position, mask=live, other=0).to(tl.int32) & 0xFFFF
        tl.store(steps + (at - origin) + lane, (place_on_line(new) - place_on_line(old)).to(tl.int16), mask=live)
        histogram += tl.histogram((old >> SHIFT) & MASK, MASK + 1, mask=live)
        element = chunk + position
        absolute = element + run_offset
        if run_length != run_stride:
            absolute = element // run_length * run_stride + run_offset + element % run_length
        absolute = absolute.to(tl.uint64)
        low_old, high_old = mix(seed, absolute, old.to(tl.uint64))
        low_new, high_new = mix(seed, absolute, new.to(tl.uint64))
        low += tl.where(live, low_new - low_old, 0)
        high += tl.where(live, high_new - high_old, 0)
    tl.store(digests + 2 * tile, tl.sum(low, 0).to(tl.int64, bitcast=True))
    tl.store(digests + 2 * tile + 1, tl.sum(high, 0).to(tl.int64, bitcast=True))
    # All but 1/256 of the changes lie in the 16 classes from `first` on, or below.
    above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
    top = tl.max(tl.where(above.to(tl.int64) * 256 > end - begin, exponents, 0), 0)
    tl.store(firsts + tile, tl.maximum(top - (CLASSES - 1), 0))


@triton.jit
def rank_in_blocks(
    block_tiles, first_block, firsts, begins, origin, positions, olds, snapshot,
    ranks, totals, SHIFT: tl.constexpr, MASK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """For each change how many elements before it in its block have its class; and each block's totals.

    Both count the classes of new bits.
    """
    program = tl.program_id(0)
    block = (first_block + program).to(tl.int64)
    begin, end = tl.load(begins + block), tl.load(begins + block + 1)
    first = tl.load(firsts + tl.load(block_tiles + program))
    base = snapshot + block * ELEMENTS
    at = tl.arange(0, SUBS)[:, None] * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
    words = tl.load(base.to(tl.pointer_type(tl.int64)) + at)
    fours = tl.zeros((SUBS, SUB // 4), tl.int64)
    one = tl.full((SUBS, SUB // 4), 1, tl.int64)
    for element in tl.static_range(4):
        exponent = (words >> (16 * element + SHIFT)).to(tl.int32) & MASK
        nibble = 4 * tl.minimum(tl.maximum(exponent - first, 0), CLASSES - 1)
        fours += one << nibble.to(tl.int64)
    eights = tl.sum(tl.reshape(fours, (SUBS, SUB // 8, 2)), 2)
    even = tl.sum(eights & 0x0F0F0F0F0F0F0F0F, 1)
    odd = tl.sum((eights >> 4) & 0x0F0F0F0F0F0F0F0F, 1)
    # Four words of four counters: word w has the classes that are w modulo 4.
    word0, word2 = even & 0x00FF00FF00FF00FF, (even >> 8) & 0x00FF00FF00FF00FF
    word1, word3 = odd & 0x00FF00FF00FF00FF, (odd >> 8) & 0x00FF00FF00FF00FF
    before0, before1 = tl.cumsum(word0, 0) - word0, tl.cumsum(word1, 0) - word1
    before2, before3 = tl.cumsum(word2, 0) - word2, tl.cumsum(word3, 0) - word3
    field = tl.arange(0, 4)
    out = totals + program * CLASSES + 4 * field
    tl.store(out, ((tl.sum(word0, 0) >> (16 * field)) & 0xFFFF).to(tl.int32))
    tl.store(out + 1, ((tl.sum(word1, 0) >> (16 * field)) & 0xFFFF).to(tl.int32))
    tl.store(out + 2, ((tl.sum(word2, 0) >> (16 * field)) & 0xFFFF).to(tl.int32))
    tl.store(out + 3, ((tl.sum(word3, 0) >> (16 * field)) & 0xFFFF).to(tl.int32))
    near = tl.arange(0, SUB)[None, :]
    for slot in range(begin, end, SLOTS):
        each = slot + tl.arange(0, SLOTS)
        live = each < end
        place = tl.load(positions + each, mask=live, other=0) & (ELEMENTS - 1)
        own = class_of(tl.load(olds + each, mask=live, other=0).to(tl.int32) & 0xFFFF, first, SHIFT, MASK)
        sub = place // SUB
        even_word = tl.where((own & 2) == 0, tl.gather(before0, sub, 0), tl.gather(before2, sub, 0))
        odd_word = tl.where((own & 2) == 0, tl.gather(before1, sub, 0), tl.gather(before3, sub, 0))
        counters = tl.where((own & 1) == 0, even_word, odd_word)
        rank = (counters >> (16 * (own >> 2)).to(tl.int64)).to(tl.int32) & 0xFFFF
        there = base + (sub * SUB)[:, None] + near
        bits = tl.load(there, mask=live[:, None], other=0).to(tl.int32) & 0xFFFF
        same = (class_of(bits, first, SHIFT, MASK) == own[:, None]) & (near < (place & (SUB - 1))[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
        tl.store(ranks + (each - origin), rank.to(tl.int16), mask=live)


@triton.jit
def add_up_blocks(tiles, first_block, totals, populations, ROWS: tl.constexpr):
    """Turn the totals of a tile's blocks into those of the blocks before each; and the tile's own."""
    tile = tl.program_id(0)
    block = tl.load(tiles + tile * FIELDS + FIRST_BLOCK) - first_block
    num_blocks = tl.cdiv(tl.load(tiles + tile * FIELDS + SIZE), ELEMENTS)
    classes = tl.arange(0, CLASSES)
    so_far = tl.zeros((CLASSES,), tl.int32)
    for row in range(0, num_blocks, ROWS):
        each = row + tl.arange(0, ROWS)[:, None]
        here = totals + (block + each) * CLASSES + classes[None, :]
        counts = tl.load(here, mask=each < num_blocks, other=0)
        tl.store(here, so_far[None, :] + tl.cumsum(counts, 0) - counts, mask=each < num_blocks)
        so_far += tl.sum(counts, 0)
    # The zeros behind the end of a tensor were counted too, in class 0.
    missing = num_blocks * ELEMENTS - tl.load(tiles + tile * FIELDS + SIZE)
    tl.store(populations + tile * CLASSES + classes, so_far - tl.where(classes == 0, missing, 0).to(tl.int32))


@triton.jit
def sort_by_class(
    tiles, first_block, begins, origin, positions, olds, snapshot, steps,
    firsts, ranks, totals, populations, members, sorted_steps, num_members,
    SHIFT: tl.constexpr, MASK: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Ranks and steps of a tile's changes, by class; how many changes each has; populations of old bits."""
    tile = tl.program_id(0)
    block, begin, end = tile_changes(tiles, begins, tile)
    start = tl.load(tiles + tile * FIELDS + START) & (CHUNK - 1)
    first = tl.load(firsts + tile)
    lane = tl.arange(0, VECTOR)
    classes = tl.arange(0, CLASSES)
    # How many changes each class has, by old bits and (above) by new ones.
    counts = tl.zeros((CLASSES,), tl.int64)
    for at in range(begin, end, VECTOR):
        live = at + lane < end
        old = tl.load(olds + at + lane, mask=live, other=0).to(tl.int32) & 0xFFFF
        step = tl.load(steps + (at - origin) + lane, mask=live, other=0).to(tl.int32)
        counts += tl.sum(_by_class(old, step, live, first, classes, SHIFT, MASK).to(tl.int64), 0)
    num_old = (counts & 0xFFFFFFFF).to(tl.int32)
    num_new = (counts >> 32).to(tl.int32)
    tl.store(num_members + tile * CLASSES + classes, num_old)
    population = populations + tile * CLASSES + classes
    tl.store(population, tl.load(population) + num_old - num_new)
    begin_of_class = tl.cumsum(num_old, 0) - num_old
    so_far = tl.zeros((CLASSES,), tl.int64)
    for at in range(begin, end, VECTOR):
        live = at + lane < end
        place = tl.load(positions + at + lane, mask=live, other=0) - start.to(tl.int32)
        old = tl.load(olds + at + lane, mask=live, other=0).to(tl.int32) & 0xFFFF
        step = tl.load(steps + (at - origin) + lane, mask=live, other=0).to(tl.int32)
        own = class_of(old, first, SHIFT, MASK)
        ones = _by_class(old, step, live, first, classes, SHIFT, MASK).to(tl.int64)
        before = tl.cumsum(ones, 0) - ones + so_far[None, :]
        so_far += tl.sum(ones, 0)
        is_own = own[:, None] == classes[None, :]
        mine = tl.sum(tl.where(is_own, before, 0), 1)
        index = (mine & 0xFFFFFFFF).to(tl.int32)
        elsewhere = (mine >> 32).to(tl.int32)
        to = (begin - origin) + tl.sum(tl.where(is_own, begin_of_class[None, :], 0), 1) + index
        here = (block - first_block) + place // ELEMENTS
        rank = tl.load(totals + here * CLASSES + own, mask=live, other=0)
        rank += tl.load(ranks + (at - origin) + lane, mask=live, other=0).to(tl.int32)
        tl.store(members + to, rank + index - elsewhere, mask=live)
        tl.store(sorted_steps + to, step.to(tl.int16), mask=live)


@triton.jit
def _by_class(old, step, live, first, classes, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """For each change and class: 1 where its old bits have the class, and 2^32 where its new bits have."""
    place = (place_on_line(old) + step) & 0xFFFF
    new = tl.where(place >= 0x8000, place - 0x8000, 0xFFFF - place)
    by_old = (class_of(old, first, SHIFT, MASK)[:, None] == classes[None, :]) & live[:, None]
    by_new = (class_of(new, first, SHIFT, MASK)[:, None] == classes[None, :]) & live[:, None]
    return by_old.to(tl.int64) + (by_new.to(tl.int64) << 32)
