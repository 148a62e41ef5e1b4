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
from deltawire.kernels.gpu.positions import LOW_BYTES, LOW_NIBBLES, count_eight
from deltawire.kernels.gpu.sums import gain

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
def choose_first(
    tiles, begins, starts, changes, firsts,
    SHIFT: tl.constexpr, MASK: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The exponent of class 0, so that all but 1/256 of the changes lie in the 16 classes from there, or below."""
    tile = tl.program_id(0)
    first_block, begin, end = tile_changes(tiles, begins, tile)
    num_blocks = tl.cdiv(tl.load(tiles + tile * FIELDS + SIZE), ELEMENTS)
    bins = tl.arange(0, MASK + 1)
    counts = tl.zeros((MASK + 1,), tl.int32)
    for number in range(0, num_blocks, BLOCKS):
        here = number + tl.arange(0, BLOCKS)[:, None]
        there = here < num_blocks
        block = first_block + here
        num_changes = tl.load(begins + block + 1, mask=there, other=0) - tl.load(begins + block, mask=there, other=0)
        start = tl.load(starts + block, mask=there, other=0)
        for slot in range(0, tl.max(num_changes).to(tl.int32), SLOTS):
            each = slot + tl.arange(0, SLOTS)[None, :]
            live = each < num_changes
            exponent = (tl.load(changes + start + each, mask=live, other=0) >> (16 + SHIFT)) & MASK
            size: tl.constexpr = BLOCKS * SLOTS
            counts += tl.histogram(tl.reshape(exponent, (size,)), MASK + 1, mask=tl.reshape(live, (size,)))
    above = (end - begin) - tl.cumsum(counts, 0) + counts
    top = tl.max(tl.where(above * 256 > end - begin, bins, 0), 0)
    tl.store(firsts + tile, tl.maximum(top - (CLASSES - 1), 0))


@triton.jit(do_not_specialize=["first_block", "origin"])
def survey(
    tiles, block_tiles, first_block, begins, origin, starts, changes, snapshot, firsts, steps, members, totals, digests,
    SHIFT: tl.constexpr, MASK: tl.constexpr, SLOTS: tl.constexpr, BY_CLASS: tl.constexpr,
):  # fmt: skip
    """For each change of a block its step and its place in the tile; for the tile what the digest gains.

    By class, for the block: above, how many elements changed; below, how many came from there less those that went.
    """
    program = tl.program_id(0)
    block, tile, before = tile_of(tiles, block_tiles, first_block, program)
    begin, end, first_change = tl.load(begins + block), tl.load(begins + block + 1), tl.load(starts + block)
    row = tiles + tile * FIELDS
    seed = tl.load(row + SEED).to(tl.uint64, bitcast=True)
    run_length, run_stride = tl.load(row + RUN_LENGTH), tl.load(row + RUN_STRIDE)
    run_offset = tl.load(row + RUN_OFFSET)
    start = tl.load(row + START) + before
    base = snapshot + block * ELEMENTS
    count = (end - begin).to(tl.int32)
    low = tl.zeros((SLOTS,), tl.uint64)
    high = tl.zeros((SLOTS,), tl.uint64)
    if BY_CLASS:
        first = tl.load(firsts + tile)
        total = tl.zeros((CLASSES,), tl.int64)
    changes += first_change
    steps += begin - origin
    members += begin - origin
    for slot in range(0, count, SLOTS):
        each = slot + tl.arange(0, SLOTS)
        live = each < count
        change = tl.load(changes + each, mask=live, other=0)
        place, old = change & (ELEMENTS - 1), (change >> 16) & 0xFFFF
        new = tl.load(base + place, mask=live, other=0).to(tl.int32) & 0xFFFF
        tl.store(steps + each, (place_on_line(new) - place_on_line(old)).to(tl.int16), mask=live)
        tl.store(members + each, before.to(tl.int32) + place, mask=live)
        if BY_CLASS:
            group, new_group = class_of(old, first, SHIFT, MASK), class_of(new, first, SHIFT, MASK)
            total += tl.histogram(group, CLASSES, mask=live).to(tl.int64) << 32
            moved = live & (group != new_group)
            if tl.max(moved.to(tl.int32), 0) > 0:
                total += tl.histogram(group, CLASSES, mask=moved) - tl.histogram(new_group, CLASSES, mask=moved)
        element = start + place
        position = element + run_offset
        if run_length != run_stride:
            position = element // run_length * run_stride + run_offset + element % run_length
        add_low, add_high = gain(seed, position, old.to(tl.uint64), new.to(tl.uint64), live)
        low += add_low
        high += add_high
    if BY_CLASS:
        tl.store(totals + program * CLASSES + tl.arange(0, CLASSES), total)
    if count > 0:
        tl.atomic_add(digests + 2 * tile, tl.sum(low, 0).to(tl.int64, bitcast=True), sem="relaxed")
        tl.atomic_add(digests + 2 * tile + 1, tl.sum(high, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def replicate(bits):
    """A 16-bit pattern in each lane of a word."""
    pair = bits.to(tl.int64) | (bits.to(tl.int64) << 16)
    return pair | (pair << 32)


@triton.jit
def in_bytes(a, b, c, d, shift: tl.constexpr):
    """Every other counter of four bits, of half a sub each, to counters of eight bits of whole ones."""
    half = ((a >> shift) & LOW_NIBBLES) + ((b >> shift) & LOW_NIBBLES)
    half += ((c >> shift) & LOW_NIBBLES) + ((d >> shift) & LOW_NIBBLES)
    return tl.sum(tl.reshape(half, (SUBS, 2)), 1)


@triton.jit
def in_sixteens(low, high, shift: tl.constexpr):
    """Every other counter of eight bits, of low and high classes, to four of sixteen bits."""
    return ((low >> shift) & LOW_BYTES).to(tl.int64) | (((high >> shift) & LOW_BYTES).to(tl.int64) << 32)


@triton.jit(do_not_specialize=["first_block"])
def count_classes(
    block_tiles, first_block, firsts, snapshot, counters, SHIFT: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """How many elements of a block have each class by new bits, up to and with each 64 of them.

    For each 64 there are four words of counters of sixteen bits: word w has the classes w modulo 4.
    """
    program = tl.program_id(0)
    block = (first_block + program).to(tl.int64)
    # A thread reads half of 64 elements, a pair of words at a time, so that hardly any sums cross threads.
    at = tl.arange(0, 2 * SUBS)[:, None] * (SUB_WORDS // 2) + tl.arange(0, 2)[None, :]
    words = (snapshot + block * ELEMENTS).to(tl.pointer_type(tl.uint64)) + at
    word0, word1, word2, word3 = tl.load(words), tl.load(words + 2), tl.load(words + 4), tl.load(words + 6)
    first = tl.load(firsts + tl.load(block_tiles + program))
    low0, high0 = count_eight(word0, first, SHIFT, MASK)
    low1, high1 = count_eight(word1, first, SHIFT, MASK)
    low2, high2 = count_eight(word2, first, SHIFT, MASK)
    low3, high3 = count_eight(word3, first, SHIFT, MASK)
    low_even, low_odd = in_bytes(low0, low1, low2, low3, 0), in_bytes(low0, low1, low2, low3, 4)
    high_even, high_odd = in_bytes(high0, high1, high2, high3, 0), in_bytes(high0, high1, high2, high3, 4)
    even = tl.join(in_sixteens(low_even, high_even, 0), in_sixteens(low_even, high_even, 8))
    odd = tl.join(in_sixteens(low_odd, high_odd, 0), in_sixteens(low_odd, high_odd, 8))
    counts = tl.reshape(tl.join(even, odd), (SUBS, 4))
    out = counters + program.to(tl.int64) * 4 * SUBS
    tl.store(out + tl.arange(0, SUBS)[:, None] * 4 + tl.arange(0, 4)[None, :], tl.cumsum(counts, 0))


@triton.jit
def count_before(group, live):
    """For each change how many before it have its class; at most 128 changes, in counters of eight bits."""
    shift = (8 * (group & 7)).to(tl.int64)
    one = live.to(tl.int64) << shift
    low, high = tl.where(group < 8, one, 0), tl.where(group < 8, 0, one)
    counters = tl.where(group < 8, tl.cumsum(low, 0), tl.cumsum(high, 0)) - one
    return (counters >> shift).to(tl.int32) & 0xFF


@triton.jit
def counter_of(words, group):
    """A class's counter, from the word that has it."""
    return (words >> (16 * (group >> 2)).to(tl.int64)).to(tl.int32) & 0xFFFF


@triton.jit(do_not_specialize=["first_block", "origin"])
def rank_changes(
    tiles, block_tiles, first_block, firsts, begins, origin, starts, changes, steps, snapshot, counters, totals,
    num_members, members, sorted_steps, SHIFT: tl.constexpr, MASK: tl.constexpr, SLOTS: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    """For each change of a block its rank among the elements of its class in the tile; ranks and steps by class."""
    program = tl.program_id(0)
    block = (first_block + program).to(tl.int64)
    begin, end, first_change = tl.load(begins + block), tl.load(begins + block + 1), tl.load(starts + block)
    tile = tl.load(block_tiles + program)
    classes = tl.arange(0, CLASSES)
    before = tl.load(totals + program * CLASSES + classes)
    count = (end - begin).to(tl.int32)
    if count > 0:
        changes += first_change
        lane = tl.arange(0, SLOTS)
        change = tl.load(changes + lane, mask=lane < count, other=0)
        first = tl.load(firsts + tile)
        base = snapshot + block * ELEMENTS
        wide = base.to(tl.pointer_type(tl.int64))
        counters += program.to(tl.int64) * 4 * SUBS
        counts = tl.load(num_members + tile * CLASSES + classes)
        # For each class: where its next change goes; and how many elements there are before the block, and moved since.
        to_class = tl.cumsum(counts, 0) - counts + (before >> 32).to(tl.int32)
        rank_in_class = before.to(tl.int32)
        out = tl.load(begins + tl.load(tiles + tile * FIELDS + FIRST_BLOCK)) - origin
        members += out
        sorted_steps += out
        steps += begin - origin
        near = tl.arange(0, NEAR)[None, :]
        exponents = replicate(tl.full((1, 1), MASK << SHIFT, tl.int32))
        for slot in range(0, count, SLOTS):
            live = slot + lane < count
            # The next ones are on their way while these are ranked.
            following = tl.load(changes + slot + SLOTS + lane, mask=slot + SLOTS + lane < count, other=0)
            step = tl.load(steps + slot + lane, mask=live, other=0)
            place, old = change & (ELEMENTS - 1), (change >> 16) & 0xFFFF
            new = tl.load(base + place, mask=live, other=0).to(tl.int32) & 0xFFFF
            group = class_of(old, first, SHIFT, MASK)
            new_group = class_of(new, first, SHIFT, MASK)
            sub = place // SUB
            counter = tl.load(counters + (sub - 1) * 4 + (group & 3), mask=live & (sub > 0), other=0)
            rank = counter_of(counter, group) + tl.gather(rank_in_class, group, 0)
            # The elements of its class before it among these 64: patterns without sign from `least` to `most`.
            least = tl.where(group > 0, (first + group) << SHIFT, 0)
            most = tl.where(group < CLASSES - 1, (first + group) << SHIFT, MASK << SHIFT)
            least, most = replicate(0x8000 - least), replicate(0x8000 + most)
            own = (place & (SUB - 1)) >> 2
            partial = (tl.full((SLOTS,), 1, tl.int64) << (16 * (place & 3)).to(tl.int64)) - 1
            found = tl.zeros((SLOTS, NEAR), tl.int64)
            for at in tl.static_range(0, SUB_WORDS, NEAR):
                around = tl.load(wide + (sub * SUB_WORDS)[:, None] + (at + near), mask=live[:, None], other=0)
                around &= exponents
                same = (around + least[:, None]) & (most[:, None] - around)
                # One bit for each element, of those before its own.
                keep = tl.where(at + near < own[:, None], -1, tl.where(at + near == own[:, None], partial[:, None], 0))
                found += ((same & keep) >> 15) & 0x0001000100010001
            found = tl.sum(found, 1)
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
            tl.store(sorted_steps + to, step, mask=live)
            change = following
            if slot + SLOTS < count:
                to_class += tl.histogram(group, CLASSES, mask=live)


@triton.jit(do_not_specialize=["first_block"])
def add_up_blocks(tiles, first_block, counters, totals, populations, num_members, ROWS: tl.constexpr):
    """Turn the totals of a tile's blocks into those of the blocks before each, with all elements; the tile's own."""
    tile = tl.program_id(0)
    block = tl.load(tiles + tile * FIELDS + FIRST_BLOCK) - first_block
    size = tl.load(tiles + tile * FIELDS + SIZE)
    num_blocks = tl.cdiv(size, ELEMENTS)
    classes = tl.arange(0, CLASSES)
    so_far = tl.zeros((CLASSES,), tl.int64)
    for row in range(0, num_blocks, ROWS):
        each = row + tl.arange(0, ROWS)[:, None]
        here = totals + (block + each) * CLASSES + classes[None, :]
        last = counters + ((block + each) * SUBS + SUBS - 1) * 4 + (classes & 3)[None, :]
        elements = counter_of(tl.load(last, mask=each < num_blocks, other=0), classes[None, :])
        counts = tl.load(here, mask=each < num_blocks, other=0) + elements
        tl.store(here, so_far[None, :] + tl.cumsum(counts, 0) - counts, mask=each < num_blocks)
        so_far += tl.sum(counts, 0)
    # The zeros behind the end of a tensor were counted too, in class 0.
    missing = tl.where(classes == 0, num_blocks * ELEMENTS - size, 0)
    tl.store(populations + tile * CLASSES + classes, ((so_far & 0xFFFFFFFF) - missing).to(tl.int32))
    tl.store(num_members + tile * CLASSES + classes, (so_far >> 32).to(tl.int32))
