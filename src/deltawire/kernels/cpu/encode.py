"""From two tiles to a stream of bits. docs/format.md specifies the stream."""

from typing import Any

import numpy as np
from numba import uint64

from deltawire.kernels.cpu.bitstream import (
    LAST,
    ONE,
    SIX,
    ZERO,
    golomb_parameter,
    golomb_remainder_bits,
    put_golomb,
    put_rice,
    rice_parameter,
    rice_quotient_bits,
)
from deltawire.kernels.cpu.blocks import NUM_CLASSES, class_ranks
from deltawire.kernels.cpu.compiled import kernel, part
from deltawire.kernels.cpu.groups import (
    MEMBERS,
    MOST_HEADER_BITS,
    PARAMETER,
    START,
    STOP,
    is_lengths,
    members_to_gaps,
    new_streams,
    put_header,
)
from deltawire.kernels.cpu.steps import steps_between

# For a stream that is not contextual.
NOT_RANKED = 0, np.empty(0, np.uint8), np.empty(0, np.uint32), np.empty(0, np.uint64)


@kernel
def rank_changes(bits: Any, positions: Any, before: Any, after: Any, shift: Any, mask: Any) -> Any:
    """What a contextual stream needs of the whole tile, which may have the bits before or after at each change: the
    first exponent, the class and the rank of each change, and each class's population.
    """
    first = first_exponent(before, shift, mask)
    dtype = bits.dtype.type
    classes, ranks, populations = class_ranks(bits, positions, before, after, dtype(shift), dtype(mask), dtype(first))
    return first, classes, ranks, populations


@kernel
def encode_tile(
    size: Any, positions: Any, before: Any, after: Any, width: Any, signed: Any, ranked: Any, both: Any
) -> Any:
    """The words of a tile's stream and its length in bits; and the same of a `gap` stream, whose words are only written
    for `both`, and where it is not longer.

    `positions` are those that differ among `size`, at least one, with the bits before and after at each. The stream is
    contextual if they are `ranked`, and otherwise a `gap` stream itself.
    """
    first, classes, ranks, populations = ranked
    contextual = populations.size > 0
    downwards, extra = steps_between(before, after, uint64(width), signed)
    whole = np.array([0, positions.size])
    population = np.full(1, uint64(size))
    gap_words, gap_bits = _write(positions, extra, whole, population, ZERO, downwards, not contextual)
    if not contextual:
        return gap_words, gap_bits, gap_words, gap_bits
    ranks, sorted_extra, start = _by_class(classes, ranks, extra)
    words, num_bits = _write(ranks, sorted_extra, start, populations, uint64(first), downwards, contextual)
    if both and gap_bits <= num_bits:
        gap_words, _ = _write(positions, extra, whole, population, ZERO, downwards, contextual)
    return words, num_bits, gap_words, gap_bits


@kernel
def first_exponent(before: Any, shift: Any, mask: Any) -> Any:
    """The exponent of class 0, so that all but 1/256 of the changes lie in the 16 classes from there or below."""
    histogram = np.zeros(np.int64(mask) + 1, np.int64)
    for i in range(before.size):
        histogram[(uint64(before[i]) >> uint64(shift)) & uint64(mask)] += 1
    top = np.int64(mask)
    above = histogram[top]
    while top > 0 and above * 256 <= before.size:
        top -= 1
        above += histogram[top]
    return max(top - (NUM_CLASSES - 1), 0)


@part
def _by_class(classes: Any, ranks: Any, extra: Any) -> Any:
    """Ranks and lengths sorted by class, in the order of positions within each, and where each class starts."""
    start = np.zeros(NUM_CLASSES + 1, np.int64)
    for i in range(classes.size):
        start[classes[i] + 1] += 1
    for k in range(NUM_CLASSES):
        start[k + 1] += start[k]
    free = start.copy()
    sorted_ranks, sorted_extra = np.empty_like(ranks), np.empty_like(extra)
    for i in range(classes.size):
        at = free[classes[i]]
        free[classes[i]] = at + 1
        sorted_ranks[at] = ranks[i]
        sorted_extra[at] = extra[i]
    return sorted_ranks, sorted_extra, start


@kernel
def _write(ranks: Any, extra: Any, start: Any, population: Any, first: Any, downwards: Any, write: Any) -> Any:
    """The stream for changes in classes, and its length in bits; with `write` off the length alone is right.

    Class k has changes start[k]:start[k + 1], among `population[k]` elements.
    """
    num_classes = population.size
    num_longer = 0
    for i in range(extra.size):
        num_longer += extra[i] != ZERO
    streams = new_streams(num_classes)
    values = np.empty(extra.size + 2 * num_longer, np.uint64)
    longer = np.empty(num_longer, np.uint32)
    at = ZERO
    for k in range(num_classes):
        at = _step_streams(extra[start[k] : start[k + 1]], streams[2 * k : 2 * k + 2], longer, values, at)
    for k in range(num_classes):
        at = members_to_gaps(ranks[start[k] : start[k + 1]], population[k], streams[2 * num_classes + k], values, at)

    remainder_bits = quotient_bits = length_bits = ZERO
    for row in range(streams.shape[0]):
        stream = streams[row]
        begin, end = stream[START], stream[STOP]
        if is_lengths(streams, row):
            k = golomb_parameter(values, begin, end)
            bits = golomb_remainder_bits(values, begin, end, k)
            length_bits += bits
            quotient_bits += bits - k * (end - begin) + (end - begin)
        else:
            k = rice_parameter(values, begin, end)
            bits = k * (end - begin)
            quotient_bits += rice_quotient_bits(values, begin, end, k)
        stream[PARAMETER] = k
        remainder_bits += bits
    body_bits = uint64(extra.size) + remainder_bits + quotient_bits
    words = np.zeros(((body_bits if write else ZERO) + uint64(MOST_HEADER_BITS) >> SIX) + uint64(2), np.uint64)
    at = put_header(words, streams, first, length_bits)
    num_bits = at + body_bits
    if not write:
        return words, num_bits

    for i in range(downwards.size):
        words[at >> SIX] |= uint64(downwards[i]) << (at & LAST)
        at += ONE
    quotient_at = at + remainder_bits
    for row in range(streams.shape[0]):
        begin, end, k = streams[row, START], streams[row, STOP], streams[row, PARAMETER]
        if is_lengths(streams, row):
            at, quotient_at = put_golomb(words, at, quotient_at, values, begin, end, k)
        else:
            at, quotient_at = put_rice(words, at, quotient_at, values, begin, end, k)
    return words, num_bits


@part
def _step_streams(extra: Any, streams: Any, longer: Any, values: Any, at: Any) -> Any:
    """One class's changes that are longer than one step: which, and by how much."""
    num_longer = 0
    for i in range(extra.size):
        if extra[i]:
            longer[num_longer] = i
            num_longer += 1
    at = members_to_gaps(longer[:num_longer], uint64(extra.size), streams[0], values, at)
    lengths = streams[1]
    lengths[MEMBERS] = uint64(num_longer)
    lengths[START] = at
    for i in range(num_longer):
        values[at] = extra[longer[i]] - ONE
        at += ONE
    lengths[STOP] = at
    return at
