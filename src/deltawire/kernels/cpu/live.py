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
def pick_rows(
    positions: Any, old: Any, new: Any, columns: Any, start: Any, stride: Any, index: Any, before: Any, after: Any
) -> Any:
    """Which of a tensor's positions, ascending and none before `start`, lie in the first columns of rows: their numbers
    in that grid, with their old and new bits; how many. The last three arrays have room for one more than all.
    """
    count = 0
    row = begin = np.int64(0)
    for i in range(positions.size):
        behind = positions[i] - start - begin
        # Rows are found by a division, but only where one is left.
        if behind >= stride:
            steps = behind // stride
            row += steps
            begin += steps * stride
            behind -= steps * stride
        # Written in any case, so that nothing depends on a guess.
        index[count] = row * columns + behind
        before[count] = old[i]
        after[count] = new[i]
        count += behind < columns
    return count
