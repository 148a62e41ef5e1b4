"""Changes written into weights where they are served: checked against what is there, and summed up for the digest."""

from typing import Any

import numpy as np
from numba import njit, uint64

from deltawire.kernels.cpu.compiled import kernel
from deltawire.kernels.cpu.simd import prefetch
from deltawire.kernels.cpu.sums import mix

# How many changes ahead memory is asked for: more than a core can wait for at once without its second cache.
AHEAD = 96


@njit(inline="always")
def _place(element: Any, columns: Any, offset: Any, row_step: Any, column_step: Any) -> Any:
    row = element // columns
    return offset + row * row_step + (element - row * columns) * column_step


@kernel
def put(
    live: Any, index: Any, old: Any, new: Any, columns: Any, source: Any, place: Any, seed: Any, writes: Any
) -> Any:
    """Write new bits where the old ones are, or the new ones already; how many others there were, which stay, and
    what the digest's two sums gain. Without `writes` only those numbers.

    Element i of the grid is the tensor's element at `source` and the storage's at `place`: an offset, a step for each
    row and, in the storage, for each column.
    """
    offset, row_step, column_step = place
    start, stride = source
    unexpected = 0
    low = high = uint64(0)
    for i in range(index.size):
        if i + AHEAD < index.size:
            prefetch(live, np.intp(_place(np.int64(index[i + AHEAD]), columns, offset, row_step, column_step)))
        element = np.int64(index[i])
        where = _place(element, columns, offset, row_step, column_step)
        bits = live[where]
        if bits != old[i] and bits != new[i]:
            unexpected += 1
            continue
        position = uint64(_place(element, columns, start, stride, 1))
        a, b = mix(seed, position, uint64(new[i]))
        c, d = mix(seed, position, uint64(bits))
        low += a - c
        high += b - d
        if writes:
            live[where] = new[i]
    return unexpected, low, high


@kernel
def gather(bits: Any, positions: Any, out: Any) -> Any:
    """The elements at some positions; whether these ascend and are all there, else it ends before the first that does
    not.
    """
    last = np.int64(0)
    for i in range(positions.size):
        if i + AHEAD < positions.size:
            prefetch(bits, np.intp(positions[i + AHEAD]))
        at = positions[i]
        if at < last or at >= bits.size:
            return False
        out[i] = bits[at]
        last = at
    return True


@kernel
def divide(
    positions: Any, old: Any, new: Any, grid: Any, strips: Any, spans: Any, index: Any, before: Any, after: Any
) -> None:
    """Give the changes of a tensor, which ascend, to pieces that lie side by side in its rows: their numbers in the
    piece, their old and their new bits, those of strip k from `spans[k, 0]` to `spans[k, 1]`. Where there is one row
    only the numbers, since the bits are at the same places already.

    `grid` is where the first row begins, the length of a row, and how many there are. A strip is where it begins in a
    row and how many columns it has; the last one is none, at the end of the row.
    """
    start, stride, rows = grid
    count = positions.size
    for k in range(strips.shape[0]):
        spans[k, 0] = spans[k, 1] = k * count if rows > 1 else 0
    i = row = strip = np.int64(0)
    while i < count and row < rows:
        columns = strips[strip, 1]
        first = start + row * stride + strips[strip, 0]
        while i < count and positions[i] < first:
            i += 1
        to = spans[strip, 1]
        if rows == 1:
            to = spans[strip, 0] = i
        shift = row * columns - first
        while i < count and positions[i] < first + columns:
            index[uint64(to)] = positions[i] + shift
            if rows > 1:
                before[uint64(to)] = old[i]
                after[uint64(to)] = new[i]
            to += 1
            i += 1
        spans[strip, 1] = to
        strip += 1
        if strip == strips.shape[0] and i < count:
            strip = np.int64(0)
            # Rows without changes are passed over by a division.
            row = (positions[i] - start) // stride
