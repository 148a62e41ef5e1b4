"""From changed elements to steps, and for `context` to ranks: an element's place among those of its class in its tile.

One program goes through the changes of a block, with a single warp, which then never waits for another. Only the ranks
need a look at every element: a pass counts them by class, 64 at a time, in counters of four, then eight, then sixteen
bits that share 64-bit words. Within those 64 they are counted for the changed elements alone.

Ranks are over old weights, but the snapshot has the new ones already. So it is the classes of new bits that are
counted, and the changes before an element, which are known by both their classes, make up for the difference.
"""

import triton
import triton.language as tl

from deltawire.kernels.gpu.compare import ELEMENTS
from deltawire.kernels.gpu.digest import gain

CLASSES = tl.constexpr(16)

# A row of the table of tiles.
FIRST_BLOCK, SIZE, START, SEED, RUN_LENGTH, RUN_STRIDE, RUN_OFFSET = (tl.constexpr(i) for i in range(7))
FIELDS = tl.constexpr(7)

SUB = tl.constexpr(64)
SUB_WORDS = tl.constexpr(16)
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
def tile_of(tiles, block_tiles, first_block, program):
    """Of the block of a program: itself, its tile, and how many elements of the tile lie before it."""
    block = (first_block + program).to(tl.int64)
    tile = tl.load(block_tiles + program)
    return block, tile, (block - tl.load(tiles + tile * FIELDS + FIRST_BLOCK)) * ELEMENTS


@triton.jit
def survey(
    tiles, block_tiles, first_block, begins, origin, starts, changes, snapshot, steps, members, exponents, digests,
    SHIFT: tl.constexpr, MASK: tl.constexpr, SLOTS: tl.constexpr, COUNT_EXPONENTS: tl.constexpr,
):  # fmt: skip
    """For each change of a block its step and its place in the tile; for the tile exponents and the digest's gain."""
    program = tl.program_id(0)
    block, tile, before = tile_of(tiles, block_tiles, first_block, program)
    begin, end = tl.load(begins + block), tl.load(begins + block + 1)
    if end > begin:
        row = tiles + tile * FIELDS
        seed = tl.load(row + SEED).to(tl.uint64, bitcast=True)
        run_length, run_stride = tl.load(row + RUN_LENGTH), tl.load(row + RUN_STRIDE)
        run_offset = tl.load(row + RUN_OFFSET)
        start = tl.load(row + START) + before
        base = snapshot + block * ELEMENTS
        bins = tl.arange(0, MASK + 1)
        histogram = tl.zeros((MASK + 1,), tl.int32)
        low = tl.zeros((SLOTS,), tl.uint64)
        high = tl.zeros((SLOTS,), tl.uint64)
        changes += tl.load(starts + block)
        steps += begin - origin
        members += begin - origin
        for slot in range(0, (end - begin).to(tl.int32), SLOTS):
            each = slot + tl.arange(0, SLOTS)
            live = each < end - begin
            change = tl.load(changes + each, mask=live, other=0)
            place, old = change & (ELEMENTS - 1), (change >> 16) & 0xFFFF
            new = tl.load(base + place, mask=live, other=0).to(tl.int32) & 0xFFFF
            tl.store(steps + each, (place_on_line(new) - place_on_line(old)).to(tl.int16), mask=live)
            tl.store(members + each, before.to(tl.int32) + place, mask=live)
            if COUNT_EXPONENTS:
                histogram += tl.histogram((old >> SHIFT) & MASK, MASK + 1, mask=live)
            element = start + place
            position = element + run_offset
            if run_length != run_stride:
                position = element // run_length * run_stride + run_offset + element % run_length
            add_low, add_high = gain(seed, position, old.to(tl.uint64), new.to(tl.uint64), live)
            low += add_low
            high += add_high
        if COUNT_EXPONENTS:
            tl.atomic_add(exponents + tile * (MASK + 1) + bins, histogram, mask=histogram > 0, sem="relaxed")
        tl.atomic_add(digests + 2 * tile, tl.sum(low, 0).to(tl.int64, bitcast=True), sem="relaxed")
        tl.atomic_add(digests + 2 * tile + 1, tl.sum(high, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def choose_first(exponents, firsts, MASK: tl.constexpr):
    """The exponent of class 0, so that all but 1/256 of the changes lie in the 16 classes from there, or below."""
    tile = tl.program_id(0)
    bins = tl.arange(0, MASK + 1)
    counts = tl.load(exponents + tile * (MASK + 1) + bins)
    total = tl.sum(counts, 0)
    above = total - tl.cumsum(counts, 0) + counts
    top = tl.max(tl.where(above.to(tl.int64) * 256 > total, bins, 0), 0)
    tl.store(firsts + tile, tl.maximum(top - (CLASSES - 1), 0))


@triton.jit
def replicate(bits):
    """A 16-bit pattern in each lane of a word."""
    pair = bits.to(tl.int64) | (bits.to(tl.int64) << 16)
    return pair | (pair << 32)


@triton.jit
def count_classes(
    block_tiles, first_block, firsts, begins, starts, changes, snapshot, counters, totals,
    SHIFT: tl.constexpr, MASK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """How many elements of a block have each class: by new bits before each 64 of them; by old bits, in all.

    Above the latter, how many of them changed.
    """
    program = tl.program_id(0)
    block = (first_block + program).to(tl.int64)
    first = tl.load(firsts + tl.load(block_tiles + program))
    base = snapshot + block * ELEMENTS
    wide = base.to(tl.pointer_type(tl.int64))
    # A thread reads half of 64 elements, a pair of words at a time, so that hardly any sums cross threads.
    at = tl.arange(0, 2 * SUBS)[:, None] * (SUB_WORDS // 2) + tl.arange(0, 2)[None, :]
    even = tl.zeros((2 * SUBS,), tl.int64)
    odd = tl.zeros((2 * SUBS,), tl.int64)
    for pair in tl.static_range(SUB_WORDS // 4):
        words = tl.load(wide + at + 2 * pair)
        fours = tl.zeros((2 * SUBS, 2), tl.int64)
        for element in tl.static_range(4):
            # Four times the exponent, so that it is a place in a word of sixteen counters.
            exponent = (words >> (16 * element + SHIFT - 2)).to(tl.int32) & (4 * MASK)
            place = tl.minimum(tl.maximum(exponent - 4 * first, 0), 4 * (CLASSES - 1))
            fours += tl.full((2 * SUBS, 2), 1, tl.int64) << place.to(tl.int64)
        eights = tl.sum(fours, 1)
        even += eights & 0x0F0F0F0F0F0F0F0F
        odd += (eights >> 4) & 0x0F0F0F0F0F0F0F0F
    even = tl.sum(tl.reshape(even, (SUBS, 2)), 1)
    odd = tl.sum(tl.reshape(odd, (SUBS, 2)), 1)
    # Four words of counters of sixteen bits: word w has the classes w modulo 4.
    low = 0x00FF00FF00FF00FF
    word0, word1, word2, word3 = even & low, odd & low, (even >> 8) & low, (odd >> 8) & low
    out = counters + program.to(tl.int64) * 4 * SUBS + tl.arange(0, SUBS)
    tl.store(out, tl.cumsum(word0, 0) - word0)
    tl.store(out + SUBS, tl.cumsum(word1, 0) - word1)
    tl.store(out + 2 * SUBS, tl.cumsum(word2, 0) - word2)
    tl.store(out + 3 * SUBS, tl.cumsum(word3, 0) - word3)
    classes = tl.arange(0, CLASSES)
    even = tl.where((classes & 2) == 0, tl.sum(word0, 0), tl.sum(word2, 0))
    odd = tl.where((classes & 2) == 0, tl.sum(word1, 0), tl.sum(word3, 0))
    total = (tl.where((classes & 1) == 0, even, odd) >> (16 * (classes >> 2)).to(tl.int64)) & 0xFFFF
    count = (tl.load(begins + block + 1) - tl.load(begins + block)).to(tl.int32)
    changes += tl.load(starts + block)
    for slot in range(0, count, SLOTS):
        each = slot + tl.arange(0, SLOTS)
        live = each < count
        change = tl.load(changes + each, mask=live, other=0)
        new = tl.load(base + (change & (ELEMENTS - 1)), mask=live, other=0).to(tl.int32) & 0xFFFF
        group = class_of((change >> 16) & 0xFFFF, first, SHIFT, MASK)
        total += tl.histogram(group, CLASSES, mask=live).to(tl.int64) << 32
        new_group = class_of(new, first, SHIFT, MASK)
        moved = live & (group != new_group)
        if tl.max(moved.to(tl.int32), 0) > 0:
            total += tl.histogram(group, CLASSES, mask=moved) - tl.histogram(new_group, CLASSES, mask=moved)
    tl.store(totals + program * CLASSES + classes, total)


@triton.jit
def count_before(group, live):
    """For each change how many before it have its class; at most 128 changes, in counters of eight bits."""
    shift = (8 * (group & 7)).to(tl.int64)
    one = live.to(tl.int64) << shift
    low, high = tl.where(group < 8, one, 0), tl.where(group < 8, 0, one)
    counters = tl.where(group < 8, tl.cumsum(low, 0), tl.cumsum(high, 0)) - one
    return (counters >> shift).to(tl.int32) & 0xFF


@triton.jit
def rank_changes(
    tiles, block_tiles, first_block, firsts, begins, origin, starts, changes, steps, snapshot, counters, totals,
    num_members, members, sorted_steps, SHIFT: tl.constexpr, MASK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """For each change of a block its rank among the elements of its class in the tile; ranks and steps by class."""
    program = tl.program_id(0)
    block = (first_block + program).to(tl.int64)
    begin, end = tl.load(begins + block), tl.load(begins + block + 1)
    if end > begin:
        tile = tl.load(block_tiles + program)
        first = tl.load(firsts + tile)
        base = snapshot + block * ELEMENTS
        wide = base.to(tl.pointer_type(tl.int64))
        counters += program.to(tl.int64) * 4 * SUBS
        classes = tl.arange(0, CLASSES)
        counts = tl.load(num_members + tile * CLASSES + classes)
        before = tl.load(totals + program * CLASSES + classes)
        # For each class: where its next change goes; and how many elements there are before the block, and moved since.
        to_class = tl.cumsum(counts, 0) - counts + (before >> 32).to(tl.int32)
        rank_in_class = before.to(tl.int32)
        out = tl.load(begins + tl.load(tiles + tile * FIELDS + FIRST_BLOCK)) - origin
        members += out
        sorted_steps += out
        changes += tl.load(starts + block)
        steps += begin - origin
        count = (end - begin).to(tl.int32)
        near = tl.arange(0, SUB_WORDS)[None, :]
        lane = tl.arange(0, SLOTS)
        for slot in range(0, count, SLOTS):
            live = slot + lane < count
            change = tl.load(changes + slot + lane, mask=live, other=0)
            place, old = change & (ELEMENTS - 1), (change >> 16) & 0xFFFF
            new = tl.load(base + place, mask=live, other=0).to(tl.int32) & 0xFFFF
            group = class_of(old, first, SHIFT, MASK)
            new_group = class_of(new, first, SHIFT, MASK)
            sub = place // SUB
            counter = tl.load(counters + (group & 3) * SUBS + sub, mask=live, other=0)
            rank = (counter >> (16 * (group >> 2)).to(tl.int64)).to(tl.int32) & 0xFFFF
            rank += tl.gather(rank_in_class, group, 0)
            # The elements of its class before it among these 64: patterns without sign from `least` to `most`.
            least = tl.where(group > 0, (first + group) << SHIFT, 0)
            most = tl.where(group < CLASSES - 1, (first + group) << SHIFT, MASK << SHIFT)
            least, most = replicate(0x8000 - least), replicate(0x8000 + most)
            around = tl.load(wide + (sub * SUB_WORDS)[:, None] + near, mask=live[:, None], other=0)
            around &= replicate(tl.full((1, 1), MASK << SHIFT, tl.int32))
            same = (around + least[:, None]) & (most[:, None] - around)
            # One bit for each element, of those before its own.
            own = (place & (SUB - 1)) >> 2
            partial = (tl.full((SLOTS,), 1, tl.int64) << (16 * (place & 3)).to(tl.int64)) - 1
            keep = tl.where(near < own[:, None], -1, tl.where(near == own[:, None], partial[:, None], 0))
            found = tl.sum(((same & keep) >> 15) & 0x0001000100010001, 1)
            found = found + (found >> 32)
            rank += (found + (found >> 16)).to(tl.int32) & 0xFFFF
            moved = live & (group != new_group)
            if tl.max(moved.to(tl.int32), 0) > 0:
                # Changes from one class to another: those before were counted in their new ones.
                earlier = (lane[None, :] < lane[:, None]) & moved[None, :]
                from_here = (earlier & (group[None, :] == group[:, None])).to(tl.int32)
                to_here = (earlier & (new_group[None, :] == group[:, None])).to(tl.int32)
                rank += tl.sum(from_here - to_here, 1)
                rank_in_class += tl.histogram(group, CLASSES, mask=moved) - tl.histogram(new_group, CLASSES, mask=moved)
            to = tl.gather(to_class, group, 0) + count_before(group, live)
            tl.store(members + to, rank, mask=live)
            tl.store(sorted_steps + to, tl.load(steps + slot + lane, mask=live, other=0), mask=live)
            if slot + SLOTS < count:
                to_class += tl.histogram(group, CLASSES, mask=live)


@triton.jit
def add_up_blocks(tiles, first_block, totals, populations, num_members, ROWS: tl.constexpr):
    """Turn the totals of a tile's blocks into those of the blocks before each; and the tile's own."""
    tile = tl.program_id(0)
    block = tl.load(tiles + tile * FIELDS + FIRST_BLOCK) - first_block
    size = tl.load(tiles + tile * FIELDS + SIZE)
    num_blocks = tl.cdiv(size, ELEMENTS)
    classes = tl.arange(0, CLASSES)
    so_far = tl.zeros((CLASSES,), tl.int64)
    for row in range(0, num_blocks, ROWS):
        each = row + tl.arange(0, ROWS)[:, None]
        here = totals + (block + each) * CLASSES + classes[None, :]
        counts = tl.load(here, mask=each < num_blocks, other=0)
        tl.store(here, so_far[None, :] + tl.cumsum(counts, 0) - counts, mask=each < num_blocks)
        so_far += tl.sum(counts, 0)
    # The zeros behind the end of a tensor were counted too, in class 0.
    missing = tl.where(classes == 0, num_blocks * ELEMENTS - size, 0)
    tl.store(populations + tile * CLASSES + classes, ((so_far & 0xFFFFFFFF) - missing).to(tl.int32))
    tl.store(num_members + tile * CLASSES + classes, (so_far >> 32).to(tl.int32))
