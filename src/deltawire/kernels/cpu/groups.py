"""The groups of a tile: what its header says, and how members of a universe turn into gaps and back.

A tile sorts its elements in classes: 16 by exponent for `context`, a single one for `gap`. Each class has a step group,
which says which of its changes are longer than one step, with a stream of lengths that says by how much; and a position
group, which says which of its elements changed. A group picks members out of a universe. Where more than half are
members, it codes the others instead.

A table of streams holds one row a stream, in the order of the codes: step group and lengths of each class, then the
position group of each class.
"""

from typing import Any

import numpy as np
from numba import njit, uint64

from deltawire.kernels.cpu.bitstream import ONE, PARAMETER_BITS, ZERO, get, get_count, put, put_count
from deltawire.kernels.cpu.compiled import kernel, part

MEMBERS, INVERTED, OTHERS, START, STOP, PARAMETER = range(6)
FIRST_BITS = np.uint64(11)

# At most: the first exponent and the bits of lengths; a group has two counts, a flag and a parameter; lengths have one.
MOST_HEADER_BITS = 11 + 35 + 16 * (2 * (2 * 35 + 1 + 6) + 6)


@njit(inline="always")
def new_streams(num_classes: Any) -> Any:
    return np.zeros((3 * num_classes, 6), np.uint64)


@njit(inline="always")
def is_lengths(streams: Any, row: Any) -> Any:
    return 3 * row < 2 * streams.shape[0] and row % 2 == 1


@part
def put_header(words: Any, streams: Any, first: Any, length_bits: Any) -> Any:
    """Write a tile's header; the position behind it."""
    at = put(words, ZERO, uint64(first), FIRST_BITS) if streams.shape[0] > 3 else ZERO
    for row in range(streams.shape[0]):
        stream = streams[row]
        if not is_lengths(streams, row):
            at = put_count(words, at, stream[MEMBERS])
            if stream[MEMBERS]:
                at = put(words, at, stream[INVERTED], ONE)
            if stream[INVERTED]:
                at = put_count(words, at, stream[OTHERS])
        if stream[MEMBERS]:
            at = put(words, at, stream[PARAMETER], PARAMETER_BITS)
    return put_count(words, at, length_bits)


@kernel
def get_header(words: Any, end: Any, streams: Any) -> Any:
    """Fill the table; the first exponent, the bits of lengths, the position behind, and whether it was all there."""
    at = first = num_codes = ZERO
    if streams.shape[0] > 3:
        first = get(words, at, FIRST_BITS)
        at = FIRST_BITS
    for row in range(streams.shape[0]):
        stream = streams[row]
        if is_lengths(streams, row):
            stream[MEMBERS] = streams[row - 1, MEMBERS]
        else:
            stream[MEMBERS], at, found = get_count(words, at, end)
            if found and stream[MEMBERS] and at < end:
                stream[INVERTED] = get(words, at, ONE)
                at += ONE
            if found and stream[INVERTED]:
                stream[OTHERS], at, found = get_count(words, at, end)
            if not found:
                return first, ZERO, at, False
        if stream[MEMBERS]:
            if at + PARAMETER_BITS > end:
                return first, ZERO, at, False
            stream[PARAMETER] = get(words, at, PARAMETER_BITS)
            at += PARAMETER_BITS
        stream[START] = num_codes
        num_codes += stream[OTHERS] if stream[INVERTED] else stream[MEMBERS]
        stream[STOP] = num_codes
    length_bits, at, found = get_count(words, at, end)
    return first, length_bits, at, found


@kernel
def members_to_gaps(members: Any, universe: Any, stream: Any, values: Any, at: Any) -> Any:
    """Write a group's gaps to `values` from `at` on and fill its row; where they end."""
    num_members = uint64(members.size)
    stream[MEMBERS] = num_members
    stream[OTHERS] = uint64(universe) - num_members
    stream[INVERTED] = uint64(num_members > stream[OTHERS])
    stream[START] = at
    expected = ZERO
    if not stream[INVERTED]:
        for i in range(members.size):
            member = uint64(members[i])
            values[at] = member - expected
            at += ONE
            expected = member + ONE
    else:
        # An other's gap is the run of members before it.
        run = ZERO
        for i in range(members.size + 1):
            member = uint64(members[i]) if i < members.size else uint64(universe)
            for _ in range(member - expected):
                values[at] = run
                at += ONE
                run = ZERO
            run += ONE
            expected = member + ONE
    stream[STOP] = at
    return at


@part
def gaps_to_members(values: Any, stream: Any, limit: Any, members: Any) -> Any:
    """Write a group's members, ascending; whether they fit a universe of at most `limit` elements."""
    at = place = ZERO
    if not stream[INVERTED]:
        for i in range(stream[START], stream[STOP]):
            gap = values[i]
            if gap >= uint64(limit) - place:
                return False
            place += gap
            members[at] = place
            at += ONE
            place += ONE
        return True
    universe = stream[MEMBERS] + stream[OTHERS]
    if universe > uint64(limit):
        return False
    for i in range(stream[START], stream[STOP] + ONE):
        if place > universe:
            return False
        run = values[i] if i < stream[STOP] else universe - place
        if run > universe - place or run > stream[MEMBERS] - at:
            return False
        for _ in range(run):
            members[at] = place
            at += ONE
            place += ONE
        place += ONE
    return at == stream[MEMBERS]
