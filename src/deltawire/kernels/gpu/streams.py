"""A payload's bits on a GPU: headers, quotients, members of groups, and lengths of steps.

A payload is an array of 32-bit words with some spare ones; positions in it count bits from its start. The tile table
and what is found in the headers are arrays of 64-bit numbers with one row a tile, or one row a stream of a tile, in the
order of docs/format.md: step group and lengths of each class, then the position group of each class.

Quotients are one vector of bits for each tile: code i ends with the one-bit number i. So a first pass lists where the
one-bits are, and then every code is read by itself.

The payload comes from outside. A header is held against the number of bits that are really there; after that no number
is used as an index before it has been cut to its range, and the status of the tile says that something was wrong.
"""

import triton
import triton.language as tl

OK, TRUNCATED, TOO_MANY, OUT_OF_RANGE, LEFT_OVER = (tl.constexpr(status) for status in range(5))

# A tile in the table: its first element and their number, and the bits of its stream.
TILE_START, TILE_SIZE, TILE_BITS, TILE_END, TILE_ORIGIN = (tl.constexpr(field) for field in range(5))
TILE_FIELDS = tl.constexpr(5)

# What a header says of a tile; and how many changes and codes the tiles before it have.
CHANGES, CODES, FIRST, SIGNS, LENGTH_BITS, QUOTIENTS, FIRST_CHANGE, FIRST_CODE = (tl.constexpr(i) for i in range(8))
FACTS = tl.constexpr(8)

# And of one of its streams. Remainders count from the first one, without those of lengths.
MEMBERS, INVERTED, CODE, NUM_CODES, PARAMETER, REMAINDERS, CHANGE = (tl.constexpr(field) for field in range(7))
FIELDS = tl.constexpr(7)

COUNT_BITS, PARAMETER_BITS, FIRST_BITS = tl.constexpr(5), tl.constexpr(6), tl.constexpr(11)
MOST_PLACE = tl.constexpr(1 << 24)
MOST_REMAINDER_BITS = tl.constexpr(63)
LONGEST_STEP = tl.constexpr(1 << 15)
MOST_QUOTIENT_BITS = tl.constexpr((1 << 31) - 64)


@triton.jit
def popcount(word):
    """The one-bits of 32-bit words."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return ((eights * 0x01010101) >> 24) & 0xFF


@triton.jit
def get(words, at, num_bits, live):
    """At most 32 bits from each position, or 0 where it is not live."""
    word = words + (at >> 5)
    low = tl.load(word, mask=live, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(word + 1, mask=live, other=0).to(tl.int64) << 32
    one = at * 0 + 1
    return ((low | high) >> (at & 31)) & ((one << num_bits) - 1)


@triton.jit
def get_long(words, num_words, at, num_bits, live):
    """At most 63 bits, unsigned, from each position, wherever it is."""
    index = at >> 5
    live = live & (index >= 0) & (index + 2 < num_words)
    shift = (at & 31).to(tl.uint64)
    low = tl.load(words + index, mask=live, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    middle = tl.load(words + index + 1, mask=live, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    # Few remainders reach into a third word.
    live = live & ((at & 31) + num_bits > 64)
    high = tl.load(words + index + 2, mask=live, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    value = ((low | (middle << 32)) >> shift) | ((high << 1) << (63 - shift))
    return value & ((tl.full(value.shape, 1, tl.uint64) << num_bits.to(tl.uint64)) - 1)


@triton.jit
def get_count(words, at, end, live):
    """A count, the position behind it, and whether it was there."""
    found = live & (at + COUNT_BITS <= end)
    length = get(words, at, COUNT_BITS, found)
    more = tl.maximum(length - 1, 0)
    behind = at + COUNT_BITS + more
    found = found & (behind <= end)
    value = (tl.full(at.shape, 1, tl.int64) << more) | get(words, at + COUNT_BITS, more, found)
    return tl.where(found & (length > 0), value, 0), tl.where(found, behind, at), found


@triton.jit
def get_parameter(words, at, end, found, members):
    """The parameter of codes, if there are members; the position behind it, and whether all was there."""
    some = found & (members > 0)
    found = found & ((members == 0) | (at + PARAMETER_BITS <= end))
    parameter = get(words, at, PARAMETER_BITS, some & found)
    return parameter, at + tl.where(some & found, PARAMETER_BITS, 0), found


@triton.jit
def get_group(words, at, end, found):
    """A group's members, if it is inverted, its codes and their parameter; the position behind, and if it was there."""
    members, at, found = get_count(words, at, end, found)
    has_flag = found & (members > 0) & (at < end)
    inverted = get(words, at, 1, has_flag)
    at += has_flag.to(tl.int64)
    others, at, found_others = get_count(words, at, end, found & (inverted == 1))
    found = found & (found_others | (inverted == 0))
    parameter, at, found = get_parameter(words, at, end, found, members)
    return members, inverted, tl.where(inverted == 1, others, members), parameter, at, found


@triton.jit(do_not_specialize=["num_tiles"])
def read_headers(
    words, tiles, num_tiles, rows, facts, statuses,
    MASK: tl.constexpr, CLASSES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Fill the tables, one lane a tile. A tile whose header is not sound has no changes and no codes."""
    tile = tl.program_id(0).to(tl.int64) * VECTOR + tl.arange(0, VECTOR)
    live = tile < num_tiles
    entry = tiles + tile * TILE_FIELDS
    at = tl.load(entry + TILE_BITS, mask=live, other=0)
    end = tl.load(entry + TILE_END, mask=live, other=0)
    size = tl.load(entry + TILE_SIZE, mask=live, other=0)
    row = rows + tile * (3 * CLASSES * FIELDS)
    found = live
    first = tl.zeros((VECTOR,), tl.int64)
    if CLASSES > 1:
        first = get(words, at, FIRST_BITS, live)
        at += FIRST_BITS
    codes = tl.zeros((VECTOR,), tl.int64)
    remainder_bits = tl.zeros((VECTOR,), tl.int64)
    for _ in range(CLASSES):
        members, inverted, num_codes, parameter, at, found = get_group(words, at, end, found)
        put_row(row, live, members, inverted, codes, num_codes, parameter, remainder_bits, codes)
        codes += num_codes
        remainder_bits += parameter * num_codes
        parameter, at, found = get_parameter(words, at, end, found, members)
        put_row(row + FIELDS, live, members, inverted * 0, codes, members, parameter, remainder_bits, codes)
        codes += members
        row += 2 * FIELDS
    changes = tl.zeros((VECTOR,), tl.int64)
    for _ in range(CLASSES):
        members, inverted, num_codes, parameter, at, found = get_group(words, at, end, found)
        put_row(row, live, members, inverted, codes, num_codes, parameter, remainder_bits, changes)
        codes += num_codes
        remainder_bits += parameter * num_codes
        changes += members
        row += FIELDS
    length_bits, at, found = get_count(words, at, end, found)
    # A change takes a sign bit, and a code at least a quotient bit.
    quotients = at + changes + length_bits + remainder_bits
    status = tl.where((first > MASK) | (end - quotients > MOST_QUOTIENT_BITS), OUT_OF_RANGE, OK)
    status = tl.where(changes > size, TOO_MANY, status)
    status = tl.where(changes == 0, LEFT_OVER, status)
    status = tl.where(found & (quotients + codes <= end), status, TRUNCATED)
    sound = status == OK
    tl.store(statuses + tile, status, mask=live)
    fact = facts + tile * FACTS
    tl.store(fact + CHANGES, tl.where(sound, changes, 0), mask=live)
    tl.store(fact + CODES, tl.where(sound, codes, 0), mask=live)
    tl.store(fact + FIRST, tl.where(sound, first, 0), mask=live)
    tl.store(fact + SIGNS, at, mask=live)
    tl.store(fact + LENGTH_BITS, length_bits, mask=live)
    tl.store(fact + QUOTIENTS, tl.where(sound, quotients, end), mask=live)


@triton.jit
def put_row(
    row, live, members, inverted, code, num_codes, parameter, remainders,
    change,
):  # fmt: skip
    tl.store(row + MEMBERS, members, mask=live)
    tl.store(row + INVERTED, inverted, mask=live)
    tl.store(row + CODE, code, mask=live)
    tl.store(row + NUM_CODES, num_codes, mask=live)
    tl.store(row + PARAMETER, parameter, mask=live)
    tl.store(row + REMAINDERS, remainders, mask=live)
    tl.store(row + CHANGE, change, mask=live)


@triton.jit
def report(statuses, tile, bad, status: tl.constexpr):
    tl.atomic_max(statuses + tile, status, mask=bad, sem="relaxed")


@triton.jit(do_not_specialize=["first_tile", "first_code"])
def find_ones(words, tiles, facts, statuses, first_tile, first_code, ones, VECTOR: tl.constexpr):
    """Where the one-bits of a tile's quotients are, counted from the first quotient."""
    tile = (first_tile + tl.program_id(0)).to(tl.int64)
    fact = facts + tile * FACTS
    num_codes = tl.load(fact + CODES)
    begin = tl.load(fact + QUOTIENTS)
    end = tl.load(tiles + tile * TILE_FIELDS + TILE_END)
    out = ones + (tl.load(fact + FIRST_CODE) - first_code)
    skip = (begin & 31).to(tl.int32)
    num_bits = (end - begin).to(tl.int32)
    num_words = (skip + num_bits + 31) >> 5
    found = 0
    for index in range(0, num_words, VECTOR):
        each = index + tl.arange(0, VECTOR)
        word = tl.load(words + (begin >> 5) + each, mask=each < num_words, other=0)
        place = each * 32 - skip
        left = num_bits - place
        word = word & tl.where(each == 0, -1 << skip, -1)
        word = word & tl.where(left < 32, (1 << tl.minimum(tl.maximum(left, 0), 31)) - 1, -1)
        count = popcount(word)
        behind = tl.cumsum(count, 0)
        at = found + behind - count
        found += tl.sum(count, 0)
        for bit in tl.static_range(32):
            one = (word >> bit) & 1
            tl.store(out + at, place + bit, mask=(one == 1) & (at < num_codes))
            at += one
    report(statuses, tile, found < num_codes, TRUNCATED)
    # Behind the last code there are fewer than 8 bits, so that the last byte has its one-bit.
    long = num_bits >= 8
    report(statuses, tile, (found > num_codes) | (long & (get(words, end - 8, 8, long) == 0)), LEFT_OVER)


@triton.jit
def quotients(ones, code, live):
    one = tl.load(ones + code, mask=live, other=0)
    return one - tl.load(ones + code - 1, mask=live & (code > 0), other=-1) - 1


@triton.jit
def lengths_before(ones, rows, class_number, CLASSES: tl.constexpr):
    """How many bits the remainders of the lengths of earlier classes take; and those of all classes."""
    each = tl.arange(0, CLASSES)
    row = rows + (2 * each + 1) * FIELDS
    code, num_codes, parameter = tl.load(row + CODE), tl.load(row + NUM_CODES), tl.load(row + PARAMETER)
    some = num_codes > 0
    begin = tl.load(ones + code - 1, mask=some & (code > 0), other=-1)
    last = tl.load(ones + code + num_codes - 1, mask=some, other=0)
    bits = tl.where(some, (last - begin).to(tl.int64) + (parameter - 1) * num_codes, 0)
    return tl.sum(tl.where(each < class_number, bits, 0), 0), tl.sum(bits, 0)


@triton.jit(do_not_specialize=["num_words", "first_tile", "first_code"])
def find_members(
    words, num_words, tiles, rows, facts, statuses, first_tile, first_code,
    ones, places, CLASSES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """For each code of a group its member's place, or in an inverted group how many members come before that other."""
    tile = (first_tile + tl.program_id(0) // (2 * CLASSES)).to(tl.int64)
    group = tl.program_id(0) % (2 * CLASSES)
    fact = facts + tile * FACTS
    if tl.load(fact + CHANGES) > 0:
        table = rows + tile * (3 * CLASSES * FIELDS)
        is_steps = group < CLASSES
        class_number = group % CLASSES
        row = table + tl.where(is_steps, 2 * group, CLASSES + group) * FIELDS
        members, inverted, num_codes = tl.load(row + MEMBERS), tl.load(row + INVERTED), tl.load(row + NUM_CODES)
        if members > 0:
            first = tl.load(fact + FIRST_CODE) - first_code
            code, parameter = tl.load(row + CODE), tl.load(row + PARAMETER)
            earlier, _ = lengths_before(ones + first, table, class_number, CLASSES)
            at = tl.load(fact + SIGNS) + tl.load(fact + CHANGES) + tl.load(row + REMAINDERS)
            at += tl.where(is_steps, earlier, tl.load(fact + LENGTH_BITS))
            size = tl.load(tiles + tile * TILE_FIELDS + TILE_SIZE)
            universe = tl.where(is_steps, tl.load(table + (2 * CLASSES + class_number) * FIELDS + MEMBERS), size)
            # The universe of a position group in one of several classes is the class's population, checked later.
            exact = is_steps | (CLASSES == 1)
            total = members + num_codes
            bad = (inverted == 1) & ((total > universe) | (exact & (total != universe)))
            most = tl.where(inverted == 1, members, universe - 1).to(tl.int32)
            most_quotient = (parameter * 0 + MOST_PLACE) >> tl.minimum(parameter, 31)
            own = (1 - inverted).to(tl.int32)
            place = 0
            for index in range(0, num_codes.to(tl.int32), VECTOR):
                each = index + tl.arange(0, VECTOR)
                live = each < num_codes
                quotient = quotients(ones + first, code + each, live)
                bits = (parameter + each * 0).to(tl.int64)
                remainder = get_long(words, num_words, at + each * parameter, bits, live)
                large = remainder > MOST_PLACE
                large = large | (quotient < 0) | (quotient > most_quotient)
                gap = (quotient.to(tl.int64) << parameter) | remainder.to(tl.int64)
                gap = tl.where(large | (gap > MOST_PLACE), MOST_PLACE, gap).to(tl.int32)
                behind = place + tl.cumsum(tl.where(live, gap + own, 0), 0)
                here = behind - own
                # The first place that is too large is found before the sum of the following ones can overflow.
                bad = bad | (tl.max((live & ((here > most) | large)).to(tl.int32), 0) > 0)
                tl.store(places + first + code + each, tl.maximum(tl.minimum(here, most), 0), mask=live)
                total = place + tl.sum(tl.where(live, gap + own, 0).to(tl.int64), 0)
                place = tl.minimum(total, MOST_PLACE + 1).to(tl.int32)
            report(statuses, tile, bad, OUT_OF_RANGE)


@triton.jit
def inverted_member(places, num_others, most_others, number, live):
    """Members of inverted groups by their number: each comes behind as many others as have at most that many before."""
    low = number * 0
    high = low + num_others
    while most_others > 0:
        unsure = live & (low < high)
        middle = (low + high) >> 1
        passed = unsure & (tl.load(places + middle, mask=unsure, other=0) <= number)
        high = tl.where(unsure & (passed == 0), middle, high)
        low = tl.where(passed, middle + 1, low)
        most_others = most_others >> 1
    return number + low


@triton.jit(do_not_specialize=["num_words", "first_tile", "first_change", "first_code"])
def find_lengths(
    words, num_words, rows, facts, statuses, first_tile, first_change,
    first_code, ones, places, extras, CLASSES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """For each change longer than one step, by class and in the order of positions there: by how much it is longer."""
    tile = (first_tile + tl.program_id(0) // CLASSES).to(tl.int64)
    class_number = tl.program_id(0) % CLASSES
    fact = facts + tile * FACTS
    table = rows + tile * (3 * CLASSES * FIELDS)
    group = table + 2 * class_number * FIELDS
    row = group + FIELDS
    num_codes = tl.load(row + NUM_CODES)
    if (tl.load(fact + CHANGES) > 0) & ((num_codes > 0) | (class_number == 0)):
        first = tl.load(fact + FIRST_CODE) - first_code
        earlier, total = lengths_before(ones + first, table, class_number, CLASSES)
        report(statuses, tile, total != tl.load(fact + LENGTH_BITS), TRUNCATED)
        code, parameter = tl.load(row + CODE), tl.load(row + PARAMETER)
        inverted, group_places = tl.load(group + INVERTED), places + first + tl.load(group + CODE)
        changes = table + (2 * CLASSES + class_number) * FIELDS
        num_changes = tl.load(changes + MEMBERS)
        out = extras + (tl.load(fact + FIRST_CHANGE) - first_change) + tl.load(changes + CHANGE)
        at = tl.load(fact + SIGNS) + tl.load(fact + CHANGES) + tl.load(row + REMAINDERS) + earlier
        bad = num_codes < 0
        for index in range(0, num_codes.to(tl.int32), VECTOR):
            each = index + tl.arange(0, VECTOR)
            live = each < num_codes
            quotient = quotients(ones + first, code + each, live)
            wrong = (quotient < 0) | (quotient + parameter > MOST_REMAINDER_BITS)
            bits = tl.where(wrong, 0, quotient + parameter).to(tl.int64)
            bits = tl.where(live, bits, 0)
            behind = at + tl.cumsum(bits, 0)
            value = (tl.full((VECTOR,), 1, tl.uint64) << bits.to(tl.uint64)) - (1 << parameter).to(tl.uint64)
            value += get_long(words, num_words, behind - bits, bits, live)
            wrong = wrong | (value > LONGEST_STEP - 2)
            if inverted == 1:
                others = tl.load(group + NUM_CODES).to(tl.int32)
                number = inverted_member(group_places, others, others, each, live)
            else:
                number = tl.load(group_places + each, mask=live, other=0)
            wrong = wrong | (number >= num_changes)
            bad = bad | (tl.max((live & wrong).to(tl.int32), 0) > 0)
            tl.store(out + number, (value + 1).to(tl.int16), mask=live & (wrong == 0))
            at += tl.sum(bits, 0)
        report(statuses, tile, bad, OUT_OF_RANGE)
