"""Where the streams of tiles lie in many payloads, which a device then decodes together."""

from typing import Any

import numpy as np
from numba import int64

from deltawire.kernels.cpu.compiled import kernel, part

HEAD_BYTES = 4
SIZE_BYTES = 4
FIELDS = 5


@part
def _stream_bytes(data: Any, at: Any) -> Any:
    return int64(data[at]) | int64(data[at + 1]) << 8 | int64(data[at + 2]) << 16 | int64(data[at + 3]) << 24


@kernel
def find_tiles(data: Any, starts: Any, ends: Any, sizes: Any, most_log2: Any) -> Any:
    """The tiles with changes in untrusted payloads for so many elements each, which lie in `data`.

    For each payload how many, -1 if it is malformed, and the size of the largest; for each tile its first element, its
    size, where its stream begins and ends in `data`, in bits, and its first element again.
    """
    counts, largest = np.full(starts.size, -1, np.int64), np.ones(starts.size, np.int64)
    total = 0
    for i in range(starts.size):
        begin, end = starts[i], ends[i]
        if end - begin < HEAD_BYTES or data[begin] > most_log2:
            continue
        if data[begin + 1] or data[begin + 2] or data[begin + 3]:
            continue
        tile = int64(1) << int64(data[begin])
        num_tiles = (sizes[i] + tile - 1) // tile
        stream = begin + HEAD_BYTES + SIZE_BYTES * num_tiles
        if stream > end:
            continue
        count = 0
        for k in range(num_tiles):
            length = _stream_bytes(data, begin + HEAD_BYTES + SIZE_BYTES * k)
            stream += length
            if length:
                count += 1
                largest[i] = max(largest[i], min(tile, sizes[i] - k * tile))
        if stream == end:
            counts[i] = count
            total += count
    rows = np.empty((total, FIELDS), np.int64)
    row = 0
    for i in range(starts.size):
        if counts[i] < 0:
            continue
        begin = starts[i]
        tile = int64(1) << int64(data[begin])
        num_tiles = (sizes[i] + tile - 1) // tile
        stream = begin + HEAD_BYTES + SIZE_BYTES * num_tiles
        for k in range(num_tiles):
            length = _stream_bytes(data, begin + HEAD_BYTES + SIZE_BYTES * k)
            if length:
                rows[row, 0] = rows[row, 4] = k * tile
                rows[row, 1] = min(tile, sizes[i] - k * tile)
                rows[row, 2], rows[row, 3] = 8 * stream, 8 * (stream + length)
                row += 1
            stream += length
    return counts, largest, rows
