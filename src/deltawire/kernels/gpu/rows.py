"""From ranks and steps to the streams of bits that docs/format.md specifies, bit for bit as kernels/cpu/encode.py.

A tile's codes lie in rows: for each class the gaps of its step group, its lengths, and the gaps of its position group.
One program lists and measures the rows of a class; then one program writes a row. Gap rows are kept as the ascending
numbers between which the gaps lie. Bits are put into zeroed memory by atomic or, so that neighbours may share a word.

`context` has 16 classes, and members and steps are sorted by class; `gap` has one, whose members are positions.
"""

import triton
import triton.language as tl

from deltawire.kernels.gpu.ranks import FIELDS, SIZE, tile_changes

# A row of the table of rows.
MEMBERS, OTHERS, INVERTED, CODES, PARAMETER, HEADER_BITS, REMAINDER_BITS, QUOTIENT_BITS = (
    tl.constexpr(i) for i in range(8)
)
ROW_FIELDS = tl.constexpr(8)
FIRST_BITS = tl.constexpr(11)
COUNT_BITS = tl.constexpr(5)
PARAMETER_BITS = tl.constexpr(6)
# Enough halvings for any number of changes in a tile.
HALVINGS = tl.constexpr(25)


@triton.jit
def bit_length(value):
    """Of numbers below 2^53."""
    exponent = (value.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
    return tl.maximum(exponent, 0)


@triton.jit
def short_bit_length(value):
    """Of numbers below 2^24."""
    exponent = (value.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.maximum(exponent, 0)


@triton.jit
def count_bits(value):
    """How many bits a count takes in a header."""
    return COUNT_BITS + tl.maximum(bit_length(value) - 1, 0)


@triton.jit
def extra_of(step):
    """A step's length less one; the same for the step back."""
    step = step & 0xFFFF
    return tl.where(step < 0x8000, step, 0x10000 - step) - 1


@triton.jit
def put(out, bit, value, mask):
    """Put values below 2^32 at bits of the output, where it is still zero."""
    wide = value.to(tl.int64) << (bit & 31)
    low, high = wide.to(tl.int32), (wide >> 32).to(tl.int32)
    word = out + (bit >> 5)
    tl.atomic_or(word, low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(word + 1, high, mask=mask & (high != 0), sem="relaxed")


@triton.jit
def put_one(out, bit, mask):
    tl.atomic_or(out + (bit >> 5), (1 << (bit & 31)).to(tl.int32), mask=mask, sem="relaxed")


@triton.jit
def put_count(out, bit, value, mask):
    length = bit_length(value)
    put(out, bit, length, mask)
    rest = tl.maximum(length - 1, 0)
    put(out, bit + COUNT_BITS, value.to(tl.int64) - ((value > 0).to(tl.int64) << rest), mask)


@triton.jit
def class_changes(num_members, tile, begin, end, origin, group, C: tl.constexpr):
    """Where the changes of a class lie in what is sorted by class, and how many they are."""
    start = begin - origin
    count = end - begin
    if C > 1:
        classes = tl.arange(0, C)
        counts = tl.load(num_members + tile * C + classes).to(tl.int64)
        start += tl.sum(tl.where(classes < group, counts, 0), 0)
        count = tl.sum(tl.where(classes == group, counts, 0), 0)
    return start, count


@triton.jit
def rice_parameter(last, codes):
    """From the last of the ascending numbers and how many there are: the sum of the gaps is what lies between them."""
    total = (last + 1 - codes).to(tl.int64)
    return tl.where(codes > 0, bit_length(total * 35 // (64 * tl.maximum(codes, 1).to(tl.int64))), 0).to(tl.int32)


@triton.jit
def describe_row(row, members, others, inverted, codes, parameter, remainder_bits, quotient_bits):
    """One group's row of the table."""
    header = count_bits(members) + tl.where(members > 0, 1 + PARAMETER_BITS, 0)
    header += tl.where(inverted, count_bits(others), 0)
    tl.store(row + MEMBERS, members.to(tl.int32))
    tl.store(row + OTHERS, others.to(tl.int32))
    tl.store(row + INVERTED, inverted.to(tl.int32))
    tl.store(row + CODES, codes.to(tl.int32))
    tl.store(row + PARAMETER, parameter.to(tl.int32))
    tl.store(row + HEADER_BITS, header.to(tl.int32))
    tl.store(row + REMAINDER_BITS, remainder_bits.to(tl.int32))
    tl.store(row + QUOTIENT_BITS, quotient_bits.to(tl.int32))


@triton.jit
def gaps_before(numbers, index, codes):
    """The gaps before some of the ascending numbers."""
    live = index < codes
    number = tl.load(numbers + index, mask=live, other=0)
    before = tl.load(numbers + index - 1, mask=live & (index > 0), other=-1)
    return tl.where(live, number - before - 1, 0)


@triton.jit
def rice_quotient_bits(numbers, codes, parameter, VECTOR: tl.constexpr):
    lane = tl.arange(0, VECTOR)
    bits = tl.zeros((VECTOR,), tl.int32)
    for i in range(0, codes, VECTOR):
        bits += gaps_before(numbers, i + lane, codes) >> parameter
    return tl.sum(bits.to(tl.int64), 0) + codes


@triton.jit(do_not_specialize=["origin"])
def make_rows(
    tiles, begins, origin, members, steps, num_members, populations, values, rows,
    C: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """List the codes of a class, and describe its three rows.

    A class with n changes has 2 n places in `values`: the first n for its step group and lengths, which never need more
    together, and then its position group.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    _block, begin, end = tile_changes(tiles, begins, tile)
    start, count = class_changes(num_members, tile, begin, end, origin, group, C)
    lane = tl.arange(0, VECTOR)
    longer = tl.zeros((VECTOR,), tl.int32)
    for i in range(0, count, VECTOR):
        step = tl.load(steps + start + i + lane, mask=i + lane < count, other=1).to(tl.int32)
        longer += (extra_of(step) > 0).to(tl.int32)
    num_longer = tl.sum(longer, 0).to(tl.int64)
    inverted = num_longer > count - num_longer
    step_codes = tl.where(inverted, count - num_longer, num_longer)
    step_values = values + 2 * start
    length_values = step_values + step_codes
    position_values = step_values + count

    listed, lengths = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    length_bits = tl.zeros((VECTOR,), tl.int32)
    last = tl.full((), -1, tl.int64)
    for i in range(0, count, VECTOR):
        live = i + lane < count
        extra = extra_of(tl.load(steps + start + i + lane, mask=live, other=1).to(tl.int32))
        is_longer = extra > 0
        listing = live & (is_longer != inverted)
        order = tl.cumsum(listing.to(tl.int32), 0)
        tl.store(step_values + listed + order - 1, (i + lane).to(tl.int32), mask=listing)
        listed += tl.max(order, 0)
        last = tl.maximum(last, tl.max(tl.where(listing, i + lane, -1), 0))
        order = tl.cumsum(is_longer.to(tl.int32), 0)
        tl.store(length_values + lengths + order - 1, extra - 1, mask=is_longer)
        lengths += tl.max(order, 0)
        length_bits += tl.where(is_longer, short_bit_length(extra - 1), 0)
    step_parameter = rice_parameter(last, step_codes)
    length_parameter = (tl.sum(length_bits.to(tl.int64), 0) // tl.maximum(num_longer, 1)).to(tl.int32)

    population = tl.load(tiles + tile * FIELDS + SIZE)
    source = members + start
    if C > 1:
        population = tl.load(populations + tile * C + group).to(tl.int64)
    spared = count > population - count
    position_codes = tl.where(spared, population - count, count)
    if spared:
        # Other number v comes after as many members as have no more than v others before them.
        for i in range(0, position_codes, VECTOR):
            other = i + lane
            low = tl.zeros((VECTOR,), tl.int32)
            high = tl.zeros((VECTOR,), tl.int32) + count.to(tl.int32)
            for _halving in range(HALVINGS):
                middle = (low + high) // 2
                searching = low < high
                others_before = tl.load(source + middle, mask=searching, other=0) - middle
                low = tl.where(searching & (others_before <= other), middle + 1, low)
                high = tl.where(searching & (others_before > other), middle, high)
            tl.store(position_values + other, (other + low).to(tl.int32), mask=other < position_codes)
    else:
        for i in range(0, count, VECTOR):
            live = i + lane < count
            tl.store(position_values + i + lane, tl.load(source + i + lane, mask=live, other=0), mask=live)
    # What the other threads of the program have listed is read from here on.
    tl.debug_barrier()
    last = tl.load(position_values + position_codes - 1, mask=position_codes > 0, other=-1)
    position_parameter = rice_parameter(last, position_codes)

    row = rows + (tile * 3 * C + 2 * group) * ROW_FIELDS
    quotient_bits = rice_quotient_bits(step_values, step_codes, step_parameter, VECTOR)
    describe_row(
        row, num_longer, count - num_longer, inverted, step_codes, step_parameter, step_parameter * step_codes,
        quotient_bits,
    )  # fmt: skip
    bits = tl.zeros((VECTOR,), tl.int32)
    for i in range(0, num_longer, VECTOR):
        live = i + lane < num_longer
        value = tl.load(length_values + i + lane, mask=live, other=0) + (1 << length_parameter)
        bits += tl.where(live, short_bit_length(value) - 1, 0)
    remainder_bits = tl.sum(bits.to(tl.int64), 0)
    row += ROW_FIELDS
    describe_row(
        row, num_longer, num_longer * 0, num_longer < 0, num_longer, length_parameter, remainder_bits,
        remainder_bits - length_parameter * num_longer + num_longer,
    )  # fmt: skip
    tl.store(row + HEADER_BITS, tl.where(num_longer > 0, PARAMETER_BITS, 0).to(tl.int32))
    row = rows + (tile * 3 * C + 2 * C + group) * ROW_FIELDS
    quotient_bits = rice_quotient_bits(position_values, position_codes, position_parameter, VECTOR)
    describe_row(
        row, count, population - count, spared, position_codes, position_parameter,
        position_parameter * position_codes, quotient_bits,
    )  # fmt: skip


@triton.jit
def load_rows(rows, tile, field: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    """One field of all rows of a tile."""
    row = tl.arange(0, ROWS)
    return tl.load(rows + (tile * 3 * C + row) * ROW_FIELDS + field, mask=row < 3 * C, other=0).to(tl.int64)


@triton.jit
def head_bits(rows, tile, C: tl.constexpr, ROWS: tl.constexpr):
    """Bits of a tile's header, and of the remainders of its lengths."""
    row = tl.arange(0, ROWS)
    is_lengths = (row < 2 * C) & (row % 2 == 1)
    length_bits = tl.sum(tl.where(is_lengths, load_rows(rows, tile, REMAINDER_BITS, C, ROWS), 0), 0)
    header = tl.sum(load_rows(rows, tile, HEADER_BITS, C, ROWS), 0) + count_bits(length_bits)
    if C > 1:
        header += FIRST_BITS
    return header, length_bits


@triton.jit
def measure(tiles, begins, rows, sizes, C: tl.constexpr, ROWS: tl.constexpr):
    """How many bytes a tile's stream takes; none where nothing changed."""
    tile = tl.program_id(0)
    _block, begin, end = tile_changes(tiles, begins, tile)
    header, _length_bits = head_bits(rows, tile, C, ROWS)
    bits = header + (end - begin)
    bits += tl.sum(load_rows(rows, tile, REMAINDER_BITS, C, ROWS), 0)
    bits += tl.sum(load_rows(rows, tile, QUOTIENT_BITS, C, ROWS), 0)
    tl.store(sizes + tile, tl.where(end > begin, (bits + 7) // 8, 0))


@triton.jit(do_not_specialize=["origin"], do_not_specialize_on_alignment=["offsets"])
def write(
    tiles, begins, origin, steps, firsts, num_members, values, rows, offsets, out,
    REVERSE: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write one row of a tile's stream at its offset in bytes; the program behind the last row writes header and signs.

    `steps` are in the order of positions. `REVERSE` writes the stream that leads back.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    _block, begin, end = tile_changes(tiles, begins, tile)
    if end > begin:
        header, length_bits = head_bits(rows, tile, C, ROWS)
        at = tl.load(offsets + tile) * 8
        remainder_bits = load_rows(rows, tile, REMAINDER_BITS, C, ROWS)
        quotient_bits = load_rows(rows, tile, QUOTIENT_BITS, C, ROWS)
        each = tl.arange(0, ROWS)
        remainder_at = at + header + (end - begin) + tl.sum(tl.where(each < row, remainder_bits, 0), 0)
        quotient_at = at + header + (end - begin) + tl.sum(remainder_bits, 0)
        quotient_at += tl.sum(tl.where(each < row, quotient_bits, 0), 0)
        if row == 3 * C:
            write_header(tile, at, firsts, rows, length_bits, header, out, C, ROWS)
            write_signs(steps + (begin - origin), end - begin, at + header, out, REVERSE, VECTOR)
        else:
            table = rows + (tile * 3 * C + row) * ROW_FIELDS
            codes, parameter = tl.load(table + CODES), tl.load(table + PARAMETER)
            group = tl.where(row < 2 * C, row // 2, row - 2 * C)
            start, count = class_changes(num_members, tile, begin, end, origin, group, C)
            if row >= 2 * C:
                write_gaps(values + 2 * start + count, codes, parameter, remainder_at, quotient_at, out, VECTOR)
            elif row % 2 == 0:
                write_gaps(values + 2 * start, codes, parameter, remainder_at, quotient_at, out, VECTOR)
            else:
                start = 2 * start + tl.load(table - ROW_FIELDS + CODES)
                write_lengths(values + start, codes, parameter, remainder_at, quotient_at, out, VECTOR)


@triton.jit
def write_header(tile, at, firsts, rows, length_bits, header, out, C: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    bits = load_rows(rows, tile, HEADER_BITS, C, ROWS)
    members, others = load_rows(rows, tile, MEMBERS, C, ROWS), load_rows(rows, tile, OTHERS, C, ROWS)
    inverted = load_rows(rows, tile, INVERTED, C, ROWS)
    bit = at + tl.cumsum(bits, 0) - bits
    if C > 1:
        bit += FIRST_BITS
        put(out, at + row, tl.load(firsts + tile) + row * 0, row == 0)
    is_group = (row < 3 * C) & ((row >= 2 * C) | (row % 2 == 0))
    put_count(out, bit, members, is_group)
    behind = bit + tl.where(is_group, count_bits(members), 0)
    put(out, behind, inverted, is_group & (members > 0))
    behind += tl.where(is_group & (members > 0), 1, 0)
    put_count(out, behind, others, inverted > 0)
    behind += tl.where(inverted > 0, count_bits(others), 0)
    put(out, behind, load_rows(rows, tile, PARAMETER, C, ROWS), (row < 3 * C) & (members > 0))
    put_count(out, at + header - count_bits(length_bits) + row, length_bits + row * 0, row == 0)


@triton.jit
def write_signs(steps, count, bit, out, REVERSE: tl.constexpr, VECTOR: tl.constexpr):
    lane = tl.arange(0, 32)[None, :]
    word = tl.arange(0, VECTOR // 32)
    for i in range(0, count, VECTOR):
        index = i + word[:, None] * 32 + lane
        step = tl.load(steps + index, mask=index < count, other=0).to(tl.int32)
        if REVERSE:
            step = -step
        signs = tl.sum(((step >> 15) & 1).to(tl.int64) << lane, 1)
        put(out, bit + i + word * 32, signs, signs != 0)


@triton.jit
def write_gaps(numbers, codes, parameter, remainder_at, quotient_at, out, VECTOR: tl.constexpr):
    lane = tl.arange(0, VECTOR)
    for i in range(0, codes, VECTOR):
        live = i + lane < codes
        gap = gaps_before(numbers, i + lane, codes)
        put(out, remainder_at + (i + lane) * parameter, gap & ((1 << parameter) - 1), live)
        ends = tl.cumsum(tl.where(live, (gap >> parameter) + 1, 0), 0)
        put_one(out, quotient_at + ends - 1, live)
        quotient_at += tl.max(ends, 0)


@triton.jit
def write_lengths(values, codes, parameter, remainder_at, quotient_at, out, VECTOR: tl.constexpr):
    lane = tl.arange(0, VECTOR)
    for i in range(0, codes, VECTOR):
        live = i + lane < codes
        value = tl.load(values + i + lane, mask=live, other=0) + (1 << parameter)
        bits = tl.where(live, short_bit_length(value) - 1, 0)
        behind = tl.cumsum(bits, 0)
        put(out, remainder_at + behind - bits, value - (1 << bits), live)
        remainder_at += tl.max(behind, 0)
        ends = tl.cumsum(tl.where(live, bits - parameter + 1, 0), 0)
        put_one(out, quotient_at + ends - 1, live)
        quotient_at += tl.max(ends, 0)
