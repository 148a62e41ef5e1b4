"""Where the tiles of many payloads are, against what reads one payload at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.codec.tiled import MOST_TILE_LOG2, stream_edges
from deltawire.errors import CorruptObject
from deltawire.kernels.gpu.decode import tile_tables


@st.composite
def payloads(draw):
    """A payload and its number of elements: sound, or with something cut off, added or replaced."""
    num_elements, log2 = draw(st.integers(1, 100)), draw(st.integers(2, 8) | st.integers(0, MOST_TILE_LOG2 + 1))
    num_tiles = -(-num_elements >> log2)
    sizes = draw(st.lists(st.integers(0, 9), min_size=num_tiles, max_size=num_tiles))
    head, streams = np.array([log2, 0, 0, 0], np.uint8), np.arange(sum(sizes), dtype=np.uint8)
    payload = np.concatenate([head, np.array(sizes, "<u4").view(np.uint8), streams])
    if draw(st.booleans()):
        return payload, num_elements
    payload = np.append(
        payload[: len(payload) - draw(st.integers(0, 3))], np.full(draw(st.integers(0, 3)), 7, np.uint8)
    )
    for place, bits in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=2)):
        payload[place % len(payload)] ^= bits
    return payload, num_elements


def reference(payload, num_elements):
    size, edges = stream_edges(payload, num_elements)
    starts = size * np.arange(len(edges) - 1)
    rows = np.stack([starts, np.minimum(size, num_elements - starts), 8 * edges[:-1], 8 * edges[1:], starts], 1)
    return rows[edges[:-1] < edges[1:]]


@given(st.lists(payloads(), min_size=1, max_size=5), st.booleans(), st.integers(0, 60))
def test_tables_of_payloads_in_one_file_and_in_many_arrays(cases, together, apart):
    arrays = [payload for payload, _ in cases]
    sizes = [size for _, size in cases]
    if together:
        file = np.concatenate([np.append(np.zeros(apart, np.uint8), each) for each in arrays])
        ends = np.cumsum([apart + len(each) for each in arrays])
        # Not in the order of the file, as those of one encoding.
        arrays = [file[end - len(each) : end] for each, end in zip(arrays, ends, strict=True)][::-1]
        sizes.reverse()
    tables, parts = tile_tables(arrays, sizes, MOST_TILE_LOG2)
    uploaded = np.concatenate(parts)
    for payload, size, table in zip(arrays, sizes, tables, strict=True):
        if table is None:
            with pytest.raises(CorruptObject):
                stream_edges(payload, size)
            continue
        wanted = reference(payload, size)
        assert table.rows[:, [0, 1, 4]].tolist() == wanted[:, [0, 1, 4]].tolist()
        assert table.largest == wanted[:, 1].max(initial=1)
        for (_, _, begin, end, _), (_, _, first, last, _) in zip(table.rows, wanted, strict=True):
            assert uploaded[begin // 8 : end // 8].tolist() == payload[first // 8 : last // 8].tolist()
