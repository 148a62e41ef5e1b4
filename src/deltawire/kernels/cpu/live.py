"""Changes written into weights where they are served: checked against what is there, and summed up for the digest."""

from typing import Any

import numpy as np
from numba import njit, uint64

from deltawire.kernels.cpu.compiled import kernel
from deltawire.kernels.cpu.simd import prefetch
from deltawire.kernels.cpu.sums import mix

# How many changes ahead memory is asked for.
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
def gather(bits: Any, positions: Any, numbers: Any, out: Any) -> Any:
    """The elements at some positions, and 32 bits of these, as far as they ascend and are there; whether all are."""
    last = np.int64(0)
    for i in range(positions.size):
        if i + AHEAD < positions.size:
            prefetch(bits, np.intp(positions[i + AHEAD]))
        at = positions[i]
        if at < last or at >= bits.size:
            return False
        numbers[i] = at
        out[i] = bits[at]
        last = at
    return True


@kernel
def divide(
    positions: Any, old: Any, new: Any, edges: Any, stride: Any, ends: Any, index: Any, before: Any, after: Any
) -> None:
    """Give the changes of a tensor, which ascend, to pieces that lie side by side in its rows: their numbers in the
    piece, their old and their new bits, those of piece k from where `ends[k]` is to where it is then. There is room for
    one more in each.

    `edges` are where the pieces begin and end in the first row; no change comes before the first of them.
    """
    start, num_pieces = edges[0, 0], edges.shape[0]
    row = begin = k = to = shift = end = np.int64(0)
    upto = np.int64(-1)
    for i in range(positions.size):
        at = positions[i]
        if at >= upto:
            # Another piece; rows are found by a division, but only where one is left.
            if upto >= 0:
                ends[k] = to
            steps = (at - begin - start) // stride if at - begin - start >= stride else 0
            row += steps
            begin += steps * stride
            k = np.int64(0) if steps else k
            while k + 1 < num_pieces and at - begin >= edges[k + 1, 0]:
                k += 1
            to, end = ends[k], begin + edges[k, 1]
            shift = row * (edges[k, 1] - edges[k, 0]) - edges[k, 0] - begin
            upto = begin + (edges[k + 1, 0] if k + 1 < num_pieces else start + stride)
        # Written in any case, so that nothing depends on a guess.
        index[uint64(to)] = at + shift
        before[uint64(to)] = old[i]
        after[uint64(to)] = new[i]
        to += at < end
    if positions.size:
        ends[k] = to
