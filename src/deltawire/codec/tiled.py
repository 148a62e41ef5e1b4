"""`gap` and `context`: Rice-coded distances between changes, and the size of each change in steps.

`gap` measures distances over all elements and needs the old bits at the changed positions only. `context`, the
smallest, measures them within classes of equal exponent, where changes are equally likely, and scans the old bits of
the whole box.

Both split the box into tiles, for parallel work and so that a reader can decode a part of it. A payload is

    u8   tile_log2      a tile is 2^tile_log2 consecutive elements; the last one has the rest
    u8   0, 0, 0
    u32  size           of each tile's stream in bytes, little-endian; 0 where nothing changed
    ...  the tiles' streams, one after the other

The streams are specified in docs/format.md.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deltawire.codec.encoding import Arrays, Decoded, Encoded, Known, Watch, changes
from deltawire.errors import CorruptObject
from deltawire.tensors.dtypes import Bits, DType, Elements
from deltawire.workers import Workers

HEAD_BYTES = 4
LEAST_TILE_LOG2, MOST_TILE_LOG2 = 16, 24
CHANGES_PER_TILE = 16384
MOST_USUAL_BYTES = 1 << 17
# A payload is encoded as `context` and as `gap` at once where that takes less than this part of the tensor's memory.
MOST_GAPS = 8
NOTHING = np.empty(0, np.uint8)


class Tiled:
    """`gap`, or with `contextual` the encoding `context`."""

    def __init__(self, name: str, contextual: bool) -> None:
        self.name = name
        self.contextual = self.needs_mirror = contextual

    def parts(self, dtype: DType, num_elements: int) -> dict[str, str]:
        return {self.name: "U8"}

    def encode(self, old: Elements, new: Elements, dtype: DType, workers: Workers, known: Known | None) -> Arrays:
        payload = encode_payload(old, new, dtype, self.contextual, workers, known=known).payload
        return {} if payload is None else {self.name: payload}

    def decode(self, encoded: Encoded, old: Bits | None, num_elements: int, dtype: DType, workers: Workers) -> Decoded:
        from deltawire.kernels.cpu.decode import decode_tile

        if old is None:
            raise ValueError(f"a {self.name} patch can only be decoded against the old weights: pass them")
        num_changed, layout = encoded.num_changed, kernel_layout(dtype)
        tiles, counts = sound_tiles(encoded.arrays[self.name], len(old), num_changed, self.contextual)
        positions, bits = np.empty(num_changed, np.int64), np.empty(num_changed, old.dtype)
        ends = np.cumsum(counts, dtype=np.int64)

        def decode(i: int) -> int:
            tile, out = tiles[i], slice(ends[i] - counts[i], ends[i])
            before = old[tile.start : tile.stop]
            status = decode_tile(tile.stream, before, *layout, self.contextual, positions[out], bits[out])
            positions[out] += tile.start
            return int(status)

        for status in workers.map(decode, range(len(tiles))):
            check_status(status)
        return positions, bits


class Tile(NamedTuple):
    """The elements of a tile, and its stream in the payload."""

    start: int
    stop: int
    stream: Bits


class Payload(NamedTuple):
    payload: Bits | None
    """None if it exceeds the limit, also when encoded as `gap`."""
    num_changed: int
    gap_bytes: int
    """The size of the payload when encoded as `gap`."""
    gap: Bits | None
    """That payload, if no tile of it is larger."""


def tile_log2_for(num_changed: int, num_elements: int) -> int:
    """A tile size with 16,000 to 32,000 changes per tile: headers are negligible, and there are tiles for all cores."""
    log2 = LEAST_TILE_LOG2
    while log2 < MOST_TILE_LOG2 and num_changed << log2 < CHANGES_PER_TILE * num_elements:
        log2 += 1
    return log2


def sampled_tile_log2(old: Elements, new: Elements, workers: Workers) -> int:
    """Like `tile_log2_for`, with the density estimated from 1/16 of the box, so that it is not read twice."""
    from deltawire.kernels.cpu.blocks import count_changed

    stretch = 1 << LEAST_TILE_LOG2
    starts = range(0, len(old), 16 * stretch)
    counts = workers.map(lambda at: int(count_changed(old[at : at + stretch], new[at : at + stretch])), starts)
    return tile_log2_for(sum(counts), sum(min(stretch, len(old) - at) for at in starts))


def encode_payload(
    old: Elements, new: Elements, dtype: DType, contextual: bool, workers: Workers, watch: Watch | None = None,
    limit_bytes: int | None = None, tile_log2: int | None = None, known: Known | None = None,
) -> Payload:  # fmt: skip
    """Encode tile by tile. A payload that exceeds the limit is abandoned early, so that it never fills the memory."""
    from deltawire.kernels.cpu.encode import NOT_RANKED, encode_tile, rank_changes

    log2 = sampled_tile_log2(old, new, workers) if tile_log2 is None else tile_log2
    size = 1 << log2
    width, shift, mask, signed = kernel_layout(dtype)

    def encode(start: int) -> tuple[int, Bits, int, Bits | None]:
        stop = min(start + size, len(old))
        positions, before, after = changes(old, new, start, stop, known)
        if watch is not None and len(positions):
            watch(start, positions, before, after)
        if len(positions) == 0 or over_limit:
            return len(positions), NOTHING, 0, NOTHING

        def rank(bits: Bits) -> Any:
            return rank_changes(bits, positions, before, after, shift, mask)

        ranked = NOT_RANKED
        if contextual:
            ranked = rank(old[start:stop]) if known is None else known.scan(start, stop, rank)
        both = contextual and gaps is not None
        words, num_bits, gap_words, gap_bits = encode_tile(
            stop - start, positions, before, after, width, signed, ranked, both
        )
        as_gap = stream_of(gap_words, gap_bits) if both and gap_bits <= num_bits else None
        return len(positions), stream_of(words, num_bits), (int(gap_bits) + 7) // 8, as_gap

    starts = range(0, len(old), size)
    sizes = np.zeros(len(starts), "<u4")
    end = gap_bytes = HEAD_BYTES + sizes.nbytes
    # The payload may be nearly as large as the tensor, so streams are copied into it in batches of about 1/16 of the
    # tensor. The memory allocated here is only backed by pages as it is filled.
    payload = np.empty(end + old.nbytes + old.nbytes // 4, np.uint8)
    gaps: list[Bits] | None = []
    num_changed = 0
    over_limit = False
    batch = max(old.nbytes // 16 // MOST_USUAL_BYTES, 8 * workers.threads if workers.threads > 1 else 1)
    for first in range(0, len(starts), batch):
        for i, tile in enumerate(workers.map(encode, starts[first : first + batch]), first):
            count, stream, num_gap_bytes, as_gap = tile
            num_changed += count
            sizes[i] = len(stream)
            gap_bytes += num_gap_bytes
            # Few, or they would take as much memory again.
            if as_gap is None or MOST_GAPS * gap_bytes > old.nbytes:
                gaps = None
            elif gaps is not None:
                gaps.append(as_gap)
            if end + len(stream) > len(payload):
                payload = np.concatenate([payload, np.empty(len(payload) // 4 + len(stream), np.uint8)])
            payload[end : end + len(stream)] = stream
            end += len(stream)
        over_limit = limit_bytes is not None and min(end, gap_bytes) > limit_bytes
    payload[: HEAD_BYTES + sizes.nbytes] = head_of(log2, sizes)
    payload = payload[:end].copy() if 16 * end < len(payload) else payload[:end]
    gap = None
    if contextual and gaps is not None:
        gap = np.concatenate([head_of(log2, np.array([*map(len, gaps)], "<u4")), *gaps])
    return Payload(None if over_limit else payload, num_changed, gap_bytes, gap)


def head_of(log2: int, sizes: npt.NDArray[np.uint32]) -> Bits:
    return np.concatenate([np.array([log2, 0, 0, 0], np.uint8), sizes.view(np.uint8)])


def stream_of(words: npt.NDArray[np.uint64], num_bits: int) -> Bits:
    return words.view(np.uint8)[: (int(num_bits) + 7) // 8]


def stream_edges(payload: Bits, num_elements: int) -> tuple[int, npt.NDArray[np.int64]]:
    """The size of a tile, and where the stream of each begins in an untrusted payload, and the last one ends."""
    if len(payload) < HEAD_BYTES or payload[1:HEAD_BYTES].any() or payload[0] > MOST_TILE_LOG2:
        raise CorruptObject("a payload does not start with its tile size")
    size = 1 << int(payload[0])
    num_tiles = -(-num_elements // size)
    streams = HEAD_BYTES + 4 * num_tiles
    if len(payload) < streams:
        raise CorruptObject(f"a payload of {len(payload)} bytes is too short for {num_tiles} tiles")
    sizes = payload[HEAD_BYTES:streams].view("<u4")
    edges = np.cumsum(np.concatenate([[streams], sizes]), dtype=np.int64)
    if int(edges[-1]) != len(payload):
        raise CorruptObject("a payload's tiles do not add up to its size")
    return size, edges


def read_tiles(payload: Bits, num_elements: int) -> list[Tile]:
    """The tiles that have changes, from an untrusted payload."""
    size, edges = stream_edges(payload, num_elements)
    return [
        Tile(i * size, min((i + 1) * size, num_elements), payload[start:stop])
        for i, (start, stop) in enumerate(pairwise(edges.tolist()))
        if start < stop
    ]


def sound_tiles(payload: Bits, num_elements: int, num_changed: int, contextual: bool) -> tuple[list[Tile], list[int]]:
    """The tiles that have changes, with the number of each, after checking that their headers are valid and add up."""
    from deltawire.kernels.cpu.decode import count_changes

    tiles = read_tiles(payload, num_elements)
    counts = []
    for tile in tiles:
        status, count = count_changes(tile.stream, tile.stop - tile.start, contextual)
        check_status(status)
        counts.append(int(count))
    if sum(counts) != num_changed:
        raise CorruptObject(f"the tiles hold {sum(counts)} changes, the header says {num_changed}")
    return tiles, counts


def check_gaps(encoded: Encoded, num_elements: int, dtype: DType) -> None:
    """CorruptObject if `gap` cannot be decoded. Weights of 0 do, since only the new bits depend on the old ones."""
    from deltawire.kernels.cpu.decode import decode_tile

    num_changed, layout = encoded.num_changed, kernel_layout(dtype)
    for tile, count in zip(*sound_tiles(encoded.arrays["gap"], num_elements, num_changed, False), strict=True):
        old = np.zeros(tile.stop - tile.start, dtype.unsigned)
        positions, bits = np.empty(count, np.int64), np.empty(count, old.dtype)
        check_status(decode_tile(tile.stream, old, *layout, False, positions, bits))


def step_lengths(payload: Bits, num_elements: int, num_changed: int, contextual: bool) -> npt.NDArray[np.uint64]:
    """The lengths of all changes longer than one step, read from the payload without the old weights."""
    from deltawire.kernels.cpu.decode import longer_steps

    lengths = [np.empty(0, np.uint64)]
    for tile in sound_tiles(payload, num_elements, num_changed, contextual)[0]:
        status, longer = longer_steps(tile.stream, contextual)
        check_status(status)
        lengths.append(longer)
    return np.concatenate(lengths)


def kernel_layout(dtype: DType) -> tuple[int, int, int, bool]:
    return 8 * dtype.itemsize, dtype.exponent_shift, dtype.exponent_mask, dtype.sign_magnitude


def check_status(status: int) -> None:
    from deltawire.kernels.cpu import decode

    problems = {
        decode.TRUNCATED: "a tile's stream ends too early",
        decode.TOO_MANY: "a tile states more changes than it can hold",
        decode.OUT_OF_RANGE: "a tile has a position out of range, or was made for other weights",
        decode.LEFT_OVER: "a tile's stream has bits left over",
    }
    if status != decode.OK:
        raise CorruptObject(problems[status])
