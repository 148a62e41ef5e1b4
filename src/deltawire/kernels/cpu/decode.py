"""From a tile's stream of bits and its old weights to positions and new bits.

The stream comes from outside. Every count is held against the number of bits that are really there before memory is
taken for it, and every position against the tile; a status says what was wrong.
"""

from typing import Any

import numpy as np
from numba import uint64

from deltawire.kernels.cpu.bitstream import (
    LAST,
    ONE,
    SIX,
    ZERO,
    add_golomb_remainders,
    add_rice_remainders,
    get,
    get_quotients,
)
from deltawire.kernels.cpu.blocks import NEVER, NUM_CLASSES, element_class, ranked_positions
from deltawire.kernels.cpu.compiled import kernel, part
from deltawire.kernels.cpu.groups import (
    INVERTED,
    MEMBERS,
    MOST_HEADER_BITS,
    OTHERS,
    PARAMETER,
    START,
    STOP,
    gaps_to_members,
    get_header,
    is_lengths,
    new_streams,
)
from deltawire.kernels.cpu.simd import prefetch, trailing_zeros
from deltawire.kernels.cpu.steps import take_step

OK, TRUNCATED, TOO_MANY, OUT_OF_RANGE, LEFT_OVER = range(5)
SEEN, CURSOR, WANTED = range(3)
AHEAD = np.uint64(48)


@kernel
def stream_words(stream: Any, num_bytes: Any) -> Any:
    """The first bytes of a stream as 64-bit words and two spare ones, so that no read needs to look for the end."""
    words = np.zeros((num_bytes + 7) // 8 + 2, np.uint64)
    into = words.view(np.uint8)
    for i in range(num_bytes):
        into[i] = stream[i]
    return words


@kernel
def count_changes(stream: Any, num_elements: Any, contextual: Any) -> Any:
    """A status and how many changes a tile's header speaks of."""
    num_classes = NUM_CLASSES if contextual else 1
    streams = new_streams(num_classes)
    end = uint64(8 * stream.size)
    words = stream_words(stream, min(stream.size, MOST_HEADER_BITS // 8 + 1))
    _, length_bits, at, found = get_header(words, end, streams)
    if not found:
        return TRUNCATED, ZERO
    count = ZERO
    for row in range(2 * num_classes, streams.shape[0]):
        count += streams[row, MEMBERS]
    if count > uint64(num_elements):
        return TOO_MANY, ZERO
    if count == ZERO:
        return LEFT_OVER, ZERO
    # A change takes a sign bit and a code at least a quotient bit.
    needed = at + count + length_bits + streams[-1, STOP]
    for row in range(streams.shape[0]):
        if not is_lengths(streams, row):
            needed += streams[row, PARAMETER] * (streams[row, STOP] - streams[row, START])
    return (OK, count) if needed <= end else (TRUNCATED, ZERO)


@kernel
def decode_tile(
    stream: Any, old: Any, width: Any, shift: Any, mask: Any, signed: Any, contextual: Any,
    positions: Any, bits: Any,
) -> Any:  # fmt: skip
    """Write the changed positions and the new bits there; a status.

    `count_changes` has found the header sound, and the outputs have the length that it gave.
    """
    end = uint64(8 * stream.size)
    words = stream_words(stream, stream.size)
    num_classes = NUM_CLASSES if contextual else 1
    streams = new_streams(num_classes)
    first, length_bits, sign_at, _ = get_header(words, end, streams)
    if first > uint64(mask):
        return OUT_OF_RANGE
    step_streams, position_streams = streams[: 2 * num_classes], streams[2 * num_classes :]
    count = uint64(bits.size)
    at = sign_at + count
    quotient_at = at + length_bits
    for row in range(streams.shape[0]):
        if not is_lengths(streams, row):
            quotient_at += streams[row, PARAMETER] * (streams[row, STOP] - streams[row, START])
    num_step_codes = position_streams[0, START]

    one_pass = not contextual and not position_streams[0, INVERTED]
    values = np.empty(num_step_codes if one_pass else streams[-1, STOP], np.uint64)
    at, quotient_at, found = _read_steps(words, at, quotient_at, end, step_streams, length_bits, values)
    if not found:
        return TRUNCATED
    longer = np.empty(num_step_codes, np.uint32)
    progress = np.zeros((3, num_classes), np.uint64)
    if not _begin_steps(step_streams, values, count, uint64(width), longer, progress):
        return OUT_OF_RANGE
    steps = (step_streams, values, longer, progress)
    layout = (uint64(width), uint64(shift), uint64(mask), first, signed)

    if one_pass:
        k = position_streams[0, PARAMETER]
        status, quotient_at = _one_pass(words, sign_at, at, quotient_at, end, k, old, positions, steps, layout, bits)
        if status != OK:
            return status
    else:
        quotient_at, found = _read_positions(words, at, quotient_at, end, position_streams, values)
        if not found:
            return TRUNCATED
        members = np.empty(count, np.uint32)
        start = np.zeros(num_classes + 1, np.int64)
        for c in range(num_classes):
            start[c + 1] = start[c] + np.int64(position_streams[c, MEMBERS])
            if not gaps_to_members(values, position_streams[c], uint64(old.size), members[start[c] : start[c + 1]]):
                return OUT_OF_RANGE
        population = np.full(1, uint64(old.size))
        if contextual:
            dtype = old.dtype.type
            members, population = ranked_positions(old, members, start, dtype(shift), dtype(mask), dtype(first))
        if uint64(members.size) != count or not _universes_fit(position_streams, population):
            return OUT_OF_RANGE
        for i in range(members.size):
            positions[i] = members[i]
        _take_steps(words, sign_at, old, positions, steps, layout, bits)
    if end - quotient_at >= uint64(8) or get(words, quotient_at, end - quotient_at):
        return LEFT_OVER
    if not _lengths_used(step_streams, progress) or not _universes_fit(step_streams[::2], progress[SEEN]):
        return OUT_OF_RANGE
    return OK


@part
def _one_pass(
    words: Any, sign_at: Any, at: Any, quotient_at: Any, end: Any, k: Any, old: Any, positions: Any, steps: Any,
    layout: Any, bits: Any,
) -> Any:  # fmt: skip
    """Read the positions of a single plain group and take its steps; a status and the position behind the quotients.

    The old values lie far apart in memory, so each is asked for AHEAD changes before it is needed.
    """
    _, values, longer, progress = steps
    width, _, _, _, signed = layout
    count = uint64(bits.size)
    cursor, wanted = progress[CURSOR, 0], progress[WANTED, 0]
    most = ~ZERO >> k
    place = ZERO
    index = quotient_at >> SIX
    word = words[index] & (~ZERO << (quotient_at & LAST)) if quotient_at < end else ZERO
    for i in range(ZERO, count + AHEAD):
        if i < count:
            while word == ZERO:
                index += ONE
                if index << SIX >= end:
                    return TRUNCATED, quotient_at
                word = words[index]
            one = (index << SIX) + uint64(trailing_zeros(word))
            word &= word - ONE
            quotient = one - quotient_at
            if one >= end or quotient > most:
                return TRUNCATED, quotient_at
            gap = (quotient << k) | get(words, at, k)
            quotient_at = one + ONE
            at += k
            if gap >= uint64(old.size) - place:
                return OUT_OF_RANGE, quotient_at
            place += gap
            positions[i] = place
            prefetch(old, np.intp(place))
            place += ONE
        if i >= AHEAD:
            j = i - AHEAD
            extra = ZERO
            if j == wanted:
                extra = values[cursor] + ONE
                cursor += ONE
                wanted = uint64(longer[cursor]) if cursor < uint64(longer.size) else NEVER
            sign = sign_at + j
            down = (words[sign >> SIX] >> (sign & LAST)) & ONE
            bits[j] = take_step(uint64(old[uint64(positions[j])]), down, extra, width, signed)
    progress[CURSOR, 0], progress[SEEN, 0] = cursor, count
    return OK, quotient_at


@part
def _read_steps(words: Any, at: Any, quotient_at: Any, end: Any, streams: Any, length_bits: Any, values: Any) -> Any:
    """Read the codes of step groups and lengths; the positions behind them, and whether all were there.

    The remainders of the lengths must take just the bits that the header states, so that those of the gaps lie where it
    says and inside the stream.
    """
    for row in range(streams.shape[0]):
        start, stop, k = streams[row, START], streams[row, STOP], streams[row, PARAMETER]
        lengths = row % 2 == 1
        most = LAST - k if lengths else ~ZERO >> k
        quotient_at, found = get_quotients(words, quotient_at, end, most, values, start, stop)
        if not found:
            return at, quotient_at, False
        if lengths:
            behind, found = add_golomb_remainders(words, at, at + length_bits, values, start, stop, k)
            if not found:
                return at, quotient_at, False
            length_bits -= behind - at
            at = behind
        else:
            at = add_rice_remainders(words, at, values, start, stop, k)
    return at, quotient_at, length_bits == ZERO


@part
def _read_positions(words: Any, at: Any, quotient_at: Any, end: Any, streams: Any, values: Any) -> Any:
    """Read the codes of position groups; the position behind their quotients, and whether all were there."""
    for row in range(streams.shape[0]):
        start, stop, k = streams[row, START], streams[row, STOP], streams[row, PARAMETER]
        quotient_at, found = get_quotients(words, quotient_at, end, ~ZERO >> k, values, start, stop)
        if not found:
            return quotient_at, False
        at = add_rice_remainders(words, at, values, start, stop, k)
    return quotient_at, True


@part
def _begin_steps(streams: Any, values: Any, count: Any, width: Any, longer: Any, progress: Any) -> Any:
    """List the changes longer than one step: entry i of `longer` goes with length i of `values`."""
    most = ONE << (width - ONE)
    for k in range(progress.shape[1]):
        start, stop = streams[2 * k + 1, START], streams[2 * k + 1, STOP]
        for i in range(start, stop):
            if values[i] > most - uint64(2):
                return False
        if not gaps_to_members(values, streams[2 * k], count, longer[start:stop]):
            return False
        progress[CURSOR, k] = start
        progress[WANTED, k] = uint64(longer[start]) if start < stop else NEVER
    return True


@part
def _take_steps(words: Any, sign_at: Any, old: Any, positions: Any, steps: Any, layout: Any, bits: Any) -> Any:
    """Write the new bits of all changes, in order."""
    streams, values, longer, progress = steps
    width, shift, mask, first, signed = layout
    contextual = progress.shape[1] > 1
    for i in range(ZERO, uint64(bits.size)):
        value = uint64(old[uint64(positions[i])])
        k = element_class(value, shift, mask, first) if contextual else ZERO
        extra = ZERO
        if progress[SEEN, k] == progress[WANTED, k]:
            cursor = progress[CURSOR, k]
            extra = values[cursor] + ONE
            cursor += ONE
            progress[CURSOR, k] = cursor
            progress[WANTED, k] = uint64(longer[cursor]) if cursor < streams[k + k + ONE, STOP] else NEVER
        progress[SEEN, k] += ONE
        at = sign_at + i
        down = (words[at >> SIX] >> (at & LAST)) & ONE
        bits[i] = take_step(value, down, extra, width, signed)


@part
def _lengths_used(streams: Any, progress: Any) -> Any:
    """Whether every class had as many changes as its step group spoke of."""
    for k in range(progress.shape[1]):
        if progress[CURSOR, k] != streams[2 * k + 1, STOP]:
            return False
    return True


@part
def _universes_fit(groups: Any, sizes: Any) -> Any:
    """Whether inverted groups spoke of universes of the right size."""
    for k in range(sizes.size):
        if groups[k, INVERTED] and groups[k, MEMBERS] + groups[k, OTHERS] != sizes[k]:
            return False
    return True


@kernel
def longer_steps(stream: Any, contextual: Any) -> Any:
    """A status and the lengths of all changes longer than one step, without the old weights.

    `count_changes` has found the header sound.
    """
    end = uint64(8 * stream.size)
    words = stream_words(stream, stream.size)
    num_classes = NUM_CLASSES if contextual else 1
    streams = new_streams(num_classes)
    _, length_bits, at, _ = get_header(words, end, streams)
    quotient_at = at + length_bits
    for row in range(streams.shape[0]):
        if row >= 2 * num_classes:
            quotient_at += streams[row, MEMBERS]
            at += streams[row, MEMBERS]
        if not is_lengths(streams, row):
            quotient_at += streams[row, PARAMETER] * (streams[row, STOP] - streams[row, START])
    values = np.empty(streams[2 * num_classes, START], np.uint64)
    _, _, found = _read_steps(words, at, quotient_at, end, streams[: 2 * num_classes], length_bits, values)
    lengths = np.empty(values.size, np.uint64)
    num_lengths = 0
    for row in range(1, 2 * num_classes, 2):
        for i in range(streams[row, START], streams[row, STOP]):
            lengths[num_lengths] = values[i] + uint64(2)
            num_lengths += 1
    return OK if found else TRUNCATED, lengths[:num_lengths]
