"""From ranks in classes to positions, on a GPU: the inverse of counting ranks.

Every element of a tile is looked at once, to count classes: in subs of 64 elements, which keep a byte for each class,
and in blocks of 16 subs, whose counts are added up over the tile. A change is then found by a search among the blocks,
a look at the 16 counts of its class there, and a look at 64 elements.

The changes come class by class, and leave in the order of positions: a bitmap of the tile has a bit set for each, and
the bits before it are its number.
"""

import triton
import triton.language as tl

from deltawire.kernels.gpu.streams import (
    CHANGE,
    CHANGES,
    CODE,
    FACTS,
    FIELDS,
    FIRST,
    FIRST_CHANGE,
    FIRST_CODE,
    INVERTED,
    MEMBERS,
    NUM_CODES,
    OUT_OF_RANGE,
    TILE_FIELDS,
    TILE_SIZE,
    TILE_START,
    inverted_member,
    popcount,
    report,
)

CLASSES = tl.constexpr(16)
WORD = tl.constexpr(4)
SUB_WORDS = tl.constexpr(16)
SUBS = tl.constexpr(16)
BLOCK_LOG2 = tl.constexpr(10)
BLOCK = tl.constexpr(1 << 10)
# A tile has at most 2^24 elements.
NUMBER_SHIFT = tl.constexpr(24)
MOST_BLOCKS = tl.constexpr(1 << 14)
BITMAP_WORD = tl.constexpr(64)
BLOCK_BITMAP_WORDS = tl.constexpr(16)

# The same in each of the four elements of a word.
EACH = tl.constexpr(0x0001000100010001)
TOPS = tl.constexpr(0x8000800080008000)
LOW_NIBBLES = tl.constexpr(0x0F0F0F0F)
LOW_BYTES = tl.constexpr(0x00FF00FF)

# A block has four rows of counters for its subs, with four classes each: the even ones from 0 to 6, the odd ones from 1
# to 7, and the same from 8 on.
COUNTS = tl.constexpr(4)
BLOCK_COUNTS = tl.constexpr(4 * 16)


@triton.jit
def load_words(old, start, index, size, live, ALIGNED: tl.constexpr):
    """Words of four elements of a tile, unsigned; what lies behind its end is 0."""
    if ALIGNED and size % WORD == 0:
        words = (old + tl.multiple_of(start, 8)).to(tl.pointer_type(tl.uint64))
        value = tl.load(words + index, mask=live & (index * WORD < size), other=0)
    else:
        value = index.to(tl.uint64) * 0
        for element in range(WORD):
            at = index * WORD + (WORD - 1 - element)
            bits = tl.load(old + start + at, mask=live & (at < size), other=0)
            value = (value << 16) | bits.to(tl.uint16, bitcast=True).to(tl.uint64)
    return value


@triton.jit
def class_counter(bits, first, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """A one in the counter, of sixteen with four bits each, of the class of one element."""
    # The exponent stays where it is; its distance from the first one then moves to where it is four times the class.
    above = tl.maximum((bits & (MASK << SHIFT)) - (first << SHIFT), 0)
    place = tl.minimum(above, (CLASSES - 1) << SHIFT) >> (SHIFT - 2)
    return tl.full(bits.shape, 1, tl.uint64) << place.to(tl.uint64)


@triton.jit
def count_eight(word, first, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Counters of four bits, for classes 0 to 7 and 8 to 15, over the eight elements of pairs of words."""
    low = tl.zeros(word.shape, tl.int32)
    high = tl.zeros(word.shape, tl.int32)
    for half in tl.static_range(2):
        bits = (word >> (32 * half)).to(tl.int32)
        one, two = class_counter(bits, first, SHIFT, MASK), class_counter(bits, first, SHIFT + 16, MASK)
        low += one.to(tl.int32) + two.to(tl.int32)
        high += (one >> 32).to(tl.int32) + (two >> 32).to(tl.int32)
    return tl.sum(low, 1), tl.sum(high, 1)


@triton.jit(do_not_specialize=["first_tile", "tile_blocks"])
def count_classes(
    old, tiles, facts, first_tile, counts, tile_blocks,
    SHIFT: tl.constexpr, MASK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """For each sub the elements of each class. Zeros behind the end of the tile count too, in class 0.

    A thread reads half a sub, so that hardly any sums cross threads.
    """
    programs = tl.cdiv(tile_blocks, BLOCKS)
    index = tl.program_id(0) // programs
    block = (tl.program_id(0) % programs) * BLOCKS
    tile = (first_tile + index).to(tl.int64)
    size = tl.load(tiles + tile * TILE_FIELDS + TILE_SIZE).to(tl.int32)
    if (block * BLOCK < size) & (tl.load(facts + tile * FACTS + CHANGES) > 0):
        start = tl.load(tiles + tile * TILE_FIELDS + TILE_START)
        first = tl.load(facts + tile * FACTS + FIRST).to(tl.int32)
        half = tl.arange(0, BLOCKS * SUBS * 2)[:, None]
        at = block * (BLOCK // WORD) + half * (SUB_WORDS // 2) + tl.arange(0, 2)[None, :]
        if ALIGNED and (block + BLOCKS) * BLOCK <= size:
            words = (old + tl.multiple_of(start, 8)).to(tl.pointer_type(tl.uint64)) + at
            word0, word1, word2, word3 = tl.load(words), tl.load(words + 2), tl.load(words + 4), tl.load(words + 6)
        else:
            word0 = load_words(old, start, at, size, at >= 0, ALIGNED)
            word1 = load_words(old, start, at + 2, size, at >= 0, ALIGNED)
            word2 = load_words(old, start, at + 4, size, at >= 0, ALIGNED)
            word3 = load_words(old, start, at + 6, size, at >= 0, ALIGNED)
        low0, high0 = count_eight(word0, first, SHIFT, MASK)
        low1, high1 = count_eight(word1, first, SHIFT, MASK)
        low2, high2 = count_eight(word2, first, SHIFT, MASK)
        low3, high3 = count_eight(word3, first, SHIFT, MASK)
        sub = tl.arange(0, BLOCKS * SUBS)
        out = counts + (index.to(tl.int64) * tile_blocks + block) * BLOCK_COUNTS
        out += sub // SUBS * BLOCK_COUNTS + sub % SUBS
        there = block + sub // SUBS < tile_blocks
        store_bytes(out, low0, low1, low2, low3, 0, there)
        store_bytes(out + SUBS, low0, low1, low2, low3, 4, there)
        store_bytes(out + 2 * SUBS, high0, high1, high2, high3, 0, there)
        store_bytes(out + 3 * SUBS, high0, high1, high2, high3, 4, there)


@triton.jit
def store_bytes(out, a, b, c, d, shift: tl.constexpr, there):
    """Add every other counter of four bits, and those of both halves of a sub, to counters of eight."""
    half = ((a >> shift) & LOW_NIBBLES) + ((b >> shift) & LOW_NIBBLES)
    half += ((c >> shift) & LOW_NIBBLES) + ((d >> shift) & LOW_NIBBLES)
    tl.store(out, tl.sum(tl.reshape(half, (out.shape[0], 2)), 1), mask=there)


@triton.jit(do_not_specialize=["first_tile", "tile_blocks"])
def add_up_blocks(
    tiles, rows, facts, statuses, first_tile, counts, before, populations, tile_blocks, VECTOR: tl.constexpr
):
    """For each class and block the elements in earlier blocks of the tile; and the class's population.

    A program has the four classes of a row of counters, and scans each by itself.
    """
    index = tl.program_id(0) // COUNTS
    kind = tl.program_id(0) % COUNTS
    tile = (first_tile + index).to(tl.int64)
    if tl.load(facts + tile * FACTS + CHANGES) > 0:
        size = tl.load(tiles + tile * TILE_FIELDS + TILE_SIZE).to(tl.int32)
        num_blocks = tl.cdiv(size, BLOCK)
        number = (kind >> 1) * 8 + (kind & 1)
        table = counts + index.to(tl.int64) * tile_blocks * BLOCK_COUNTS + kind * SUBS
        out = before + (index.to(tl.int64) * CLASSES + number) * tile_blocks
        step = 2 * tile_blocks
        total0, total1, total2, total3 = 0, 0, 0, 0
        for block in range(0, tile_blocks, VECTOR):
            each = block + tl.arange(0, VECTOR)
            subs = table + each[:, None] * BLOCK_COUNTS + tl.arange(0, SUBS)[None, :]
            words = tl.load(subs, mask=(each < num_blocks)[:, None], other=0)
            even, odd = tl.sum(words & LOW_BYTES, 1), tl.sum((words >> 8) & LOW_BYTES, 1)
            total0 = add_up(out + each, even & 0xFFFF, total0, each < tile_blocks)
            total1 = add_up(out + step + each, odd & 0xFFFF, total1, each < tile_blocks)
            total2 = add_up(out + 2 * step + each, even >> 16, total2, each < tile_blocks)
            total3 = add_up(out + 3 * step + each, odd >> 16, total3, each < tile_blocks)
        populations += index * CLASSES
        groups = rows + (tile * 3 * CLASSES + 2 * CLASSES) * FIELDS
        # Zeros behind the end of the tile were counted too.
        missing = tl.where(kind == 0, num_blocks * BLOCK - size, 0)
        settle(populations, groups, number, total0 - missing, statuses, tile)
        settle(populations, groups, number + 2, total1, statuses, tile)
        settle(populations, groups, number + 4, total2, statuses, tile)
        settle(populations, groups, number + 6, total3, statuses, tile)


@triton.jit
def add_up(out, count, total, live):
    """Store the sums of the counts before each; the sum of all."""
    tl.store(out, total + tl.cumsum(count, 0) - count, mask=live)
    return total + tl.sum(count, 0)


@triton.jit
def settle(populations, groups, number, population, statuses, tile):
    """Store a class's population, and hold an inverted group against it."""
    tl.store(populations + number, population)
    group = groups + number * FIELDS
    universe = tl.load(group + MEMBERS) + tl.load(group + NUM_CODES)
    report(statuses, tile, (tl.load(group + INVERTED) == 1) & (universe != population), OUT_OF_RANGE)


@triton.jit
def in_class(word, low, high, EXPONENT: tl.constexpr):
    """The top bit of each element of a word whose exponent lies from `low` to `high`, in all four elements."""
    exponent = word & (EXPONENT * EACH)
    return ((exponent | TOPS) - low) & ((high | TOPS) - exponent) & TOPS


@triton.jit(do_not_specialize=["first_tile", "first_change", "first_code", "tile_blocks", "programs"])
def find_blocks(
    rows, facts, statuses, first_tile, first_change, first_code, places, before, populations, blocks, tile_blocks,
    programs, VECTOR: tl.constexpr,
):  # fmt: skip
    """For each change, by class: its class, block, and rank within the block, in one number; or -1 where it is not."""
    index = tl.program_id(0) // programs
    tile = (first_tile + index).to(tl.int64)
    fact = facts + tile * FACTS
    num_changes = tl.load(fact + CHANGES).to(tl.int32)
    change = (tl.program_id(0) % programs) * VECTOR + tl.arange(0, VECTOR)
    if (tl.program_id(0) % programs) * VECTOR < num_changes:
        live = change < num_changes
        groups = rows + (tile * 3 * CLASSES + 2 * CLASSES) * FIELDS
        number = change * 0
        for each in tl.static_range(1, CLASSES):
            number += (change >= tl.load(groups + each * FIELDS + CHANGE)).to(tl.int32)
        group = groups + number * FIELDS
        member = change - tl.load(group + CHANGE).to(tl.int32)
        group_places = places + (tl.load(fact + FIRST_CODE) - first_code) + tl.load(group + CODE)
        inverted = tl.load(group + INVERTED) == 1
        rank = tl.load(group_places + member, mask=live & (inverted == 0), other=0)
        if tl.max(inverted.to(tl.int32), 0) > 0:
            others = tl.where(inverted, tl.load(group + NUM_CODES), 0).to(tl.int32)
            most_others = tl.max(others, 0)
            rank = tl.where(inverted, inverted_member(group_places, others, most_others, member, live & inverted), rank)
        there = rank < tl.load(populations + index * CLASSES + number)
        report(statuses, tile, tl.max((live & (there == 0)).to(tl.int32), 0) > 0, OUT_OF_RANGE)
        block = rank * 0
        row = before + (index.to(tl.int64) * CLASSES + number) * tile_blocks
        stride = tile_blocks >> 1
        while stride > 0:
            block += tl.where(tl.load(row + block + stride, mask=live & there, other=0) <= rank, stride, 0)
            stride = stride >> 1
        rest = rank - tl.load(row + block, mask=live & there, other=0)
        where = (number << NUMBER_SHIFT) | (block << BLOCK_LOG2) | rest
        out = tl.load(fact + FIRST_CHANGE) - first_change + change
        tl.store(blocks + out, tl.where(there, where, -1), mask=live)


@triton.jit(do_not_specialize=["first_tile", "first_change", "tile_blocks", "programs"])
def locate(
    old, tiles, facts, first_tile, first_change, counts, blocks, found, found_old, bitmap, tile_blocks, programs,
    SHIFT: tl.constexpr, MASK: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """From what `find_blocks` found to the position in the tile, the old bits there, and a bit in the bitmap."""
    index = (tl.program_id(0) // programs).to(tl.int64)
    tile = first_tile + index
    fact = facts + tile * FACTS
    num_changes = tl.load(fact + CHANGES).to(tl.int32)
    change = (tl.program_id(0) % programs) * VECTOR + tl.arange(0, VECTOR)
    if (tl.program_id(0) % programs) * VECTOR < num_changes:
        out = tl.load(fact + FIRST_CHANGE) - first_change + change
        where = tl.load(blocks + out, mask=change < num_changes, other=-1)
        live = where >= 0
        number = (where >> NUMBER_SHIFT) & (CLASSES - 1)
        block = tl.where(live, (where >> BLOCK_LOG2) & (MOST_BLOCKS - 1), 0)
        rest = where & (BLOCK - 1)

        sixteen = tl.arange(0, SUBS)[None, :]
        kind = (number >> 3) * 2 + (number & 1)
        row = counts + (index * tile_blocks + block) * BLOCK_COUNTS + kind * SUBS
        count = tl.load(row[:, None] + sixteen, mask=live[:, None], other=0)
        sub, skipped = passed_over((count >> (((number & 7) >> 1) * 8)[:, None]) & 0xFF, rest)
        rest -= skipped

        size = tl.load(tiles + tile * TILE_FIELDS + TILE_SIZE).to(tl.int32)
        start = tl.load(tiles + tile * TILE_FIELDS + TILE_START)
        exponent = tl.load(fact + FIRST).to(tl.int32) + number
        low = (tl.where(number == 0, 0, exponent) << SHIFT).to(tl.uint64) * EACH
        high = (tl.where(number == CLASSES - 1, MASK, exponent) << SHIFT).to(tl.uint64) * EACH
        at = (block * SUBS + sub) * SUB_WORDS
        words = load_words(old, start, at[:, None] + sixteen, size, live[:, None], ALIGNED)
        ones = in_class(words, low[:, None], high[:, None], MASK << SHIFT) >> 15
        halves = ones + (ones >> 32)
        word, skipped = passed_over((halves + (halves >> 16)).to(tl.int32) & 7, rest)
        rest -= skipped

        at += word
        bits = load_words(old, start, at, size, live, ALIGNED)
        marks = in_class(bits, low, high, MASK << SHIFT)
        one = ((marks >> 15) & 1).to(tl.int32)
        two = one + ((marks >> 31) & 1).to(tl.int32)
        three = two + ((marks >> 47) & 1).to(tl.int32)
        element = (one <= rest).to(tl.int32) + (two <= rest).to(tl.int32) + (three <= rest).to(tl.int32)
        position = at * WORD + element
        tl.store(found + out, tl.where(live, position, -1), mask=change < num_changes)
        tl.store(found_old + out, (bits >> (16 * element).to(tl.uint64)).to(tl.int16), mask=live)
        mark = tl.full((VECTOR,), 1, tl.int64) << (position % BITMAP_WORD).to(tl.int64)
        tile_bitmap = bitmap + index * tile_blocks * BLOCK_BITMAP_WORDS
        tl.atomic_or(tile_bitmap + position // BITMAP_WORD, mark, mask=live, sem="relaxed")


@triton.jit
def passed_over(count, rank):
    """How many of 16 parts lie before the one that has an element of given rank, and how many elements they have."""
    passed = tl.cumsum(count, 1) <= rank[:, None]
    both = tl.sum(tl.where(passed, count + (1 << 16), 0), 1)
    return tl.minimum(both >> 16, SUBS - 1), both & 0xFFFF


@triton.jit(do_not_specialize=["first_tile", "num_words"])
def number_changes(facts, first_tile, bitmap, numbers, num_words, VECTOR: tl.constexpr):
    """For each word of a tile's bitmap the bits that are set in earlier ones."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(facts + (first_tile + index) * FACTS + CHANGES) > 0:
        total = 0
        for at in range(0, num_words, VECTOR):
            each = at + tl.arange(0, VECTOR)
            count = popcount_long(tl.load(bitmap + index * num_words + each, mask=each < num_words, other=0))
            tl.store(numbers + index * num_words + each, total + tl.cumsum(count, 0) - count, mask=each < num_words)
            total += tl.sum(count, 0)


@triton.jit
def popcount_long(word):
    return popcount(word.to(tl.int32)) + popcount((word >> 32).to(tl.int32))


@triton.jit
def number_of(bitmap, numbers, position, live):
    """The number of a change among those of its tile, in the order of positions."""
    at = position // BITMAP_WORD
    earlier = (tl.full(position.shape, 1, tl.int64) << (position % BITMAP_WORD).to(tl.int64)) - 1
    word = tl.load(bitmap + at, mask=live, other=0)
    return tl.load(numbers + at, mask=live, other=0) + popcount_long(word & earlier)
