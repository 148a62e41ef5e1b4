"""The tensors of one device: their snapshot in an arena, and what is encoded from it there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from deltawire.boxes import Box
from deltawire.codec import CONTEXT, GAP, Encoded, smallest_encoding
from deltawire.codec.tiled import HEAD_BYTES, tile_log2_for
from deltawire.dtypes import Bits, DType
from deltawire.history import CHUNK, CHUNK_LOG2, Prepared, Settled
from deltawire.kernels.gpu import encode as kernels
from deltawire.kernels.gpu.arena import Arena
from deltawire.kernels.gpu.compare import BLOCK
from deltawire.kernels.gpu.digest import Runs, box_sum
from deltawire.sources import ModuleWeights
from deltawire.state import Digest, tensor_key
from deltawire.weights import torch_view

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}

# How much is encoded at a time: shares of all changes and of all blocks, and the least that is worth a launch.
SHARE = 24
LEAST_CHANGES, LEAST_BLOCKS = 1 << 20, 1 << 13


class Row(NamedTuple):
    """A tile: what the kernels know of it, as in kernels/gpu/ranks.py, and whose it is."""

    name: str
    number: int
    fields: tuple[int, ...]
    num_changed: int

    @property
    def num_blocks(self) -> int:
        return -(-self.fields[1] // BLOCK)


@dataclass(slots=True)
class Streams:
    """The streams of one tensor's tiles, as they come."""

    tile_log2: int
    sizes: list[int] = field(default_factory=list)
    pieces: list[Bits] = field(default_factory=list)

    def payload(self) -> Bits:
        head = np.array([self.tile_log2, 0, 0, 0], np.uint8)
        return np.concatenate([head, np.array(self.sizes, "<u4").view(np.uint8), *self.pieces])

    @property
    def num_bytes(self) -> int:
        return HEAD_BYTES + 4 * len(self.sizes) + sum(self.sizes)


class Held(NamedTuple):
    """Where a tensor lies in an arena, and in its whole."""

    dtype: DType
    seed: int
    first_block: int
    num_elements: int
    runs: Runs


class Part:
    """The tensors of one device."""

    def __init__(self, weights: ModuleWeights, boxes: Mapping[str, Box], names: Sequence[str]) -> None:
        tensors = [weights.tensor(name) for name in names]
        self.names, self._device = list(names), tensors[0].device
        dtype = weights.dtype_of(names[0])
        self._layout = kernels.Layout(dtype.exponent_shift, dtype.exponent_mask)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with self._after_training():
            self._arena = Arena([tensor.numel() for tensor in tensors], DTYPES[dtype.name], self._device)
            self._arena.point_at(tensors)
            self._arena.take_all()
        self._join()
        self.held = {
            name: Held(
                dtype, int(tensor_key(name, dtype, boxes[name].full).seed), first, tensor.numel(),
                cast(Runs, single_stride(boxes[name])),
            )
            for name, tensor, first in zip(names, tensors, self._arena.first_blocks, strict=True)
        }  # fmt: skip

    def _alone(self) -> AbstractContextManager[Any]:
        """The stream on which everything here happens, so that training goes on beside it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _after_training(self) -> AbstractContextManager[Any]:
        """The same, after what the trainer's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._alone()

    def _join(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def stage(self, weights: ModuleWeights) -> kernels.Record:
        """Move the snapshot to the weights, and return when they may change again."""
        with self._after_training():
            self._arena.point_at([weights.tensor(name) for name in self.names])
            record = self._arena.find()
        self._join()
        return record

    def put_back(self, record: kernels.Record) -> None:
        with self._alone():
            self._arena.put_back(record)
        self._join()

    def read(self, name: str, stretch: slice) -> Bits:
        held = self.held[name]
        start, stop, _ = stretch.indices(held.num_elements)
        first = held.first_block * BLOCK
        with self._alone():
            return torch_view(self._arena.snapshot[first + start : first + stop])

    def write(self, name: str, stretch: slice, bits: Bits) -> None:
        held = self.held[name]
        start, stop, _ = stretch.indices(held.num_elements)
        first = held.first_block * BLOCK
        with self._alone():
            self._arena.snapshot[first + start : first + stop] = torch.from_numpy(bits.view(np.int16)).to(self._device)
        self._join()

    def digest(self, name: str) -> Digest:
        """What the snapshot of a tensor contributes to the digest."""
        held = self.held[name]
        first = held.first_block * BLOCK
        with self._alone():
            bits = self._arena.snapshot[first : first + held.num_elements]
            return as_digest(box_sum(bits, held.seed, held.runs).cpu().numpy())

    def num_changed(self, record: kernels.Record) -> dict[str, npt.NDArray[np.int64]]:
        """For each tensor how many changes each of its chunks has."""
        per_chunk = CHUNK // BLOCK
        ends = {name: held.first_block + -(-held.num_elements // BLOCK) for name, held in self.held.items()}
        edges = [
            np.minimum(np.arange(held.first_block, ends[name] + per_chunk, per_chunk), ends[name])
            for name, held in self.held.items()
        ]
        with self._alone():
            begins = record.begins[torch.from_numpy(np.concatenate(edges)).to(self._device)].cpu().numpy()
        parts = np.split(begins, np.cumsum([len(each) for each in edges])[:-1])
        return {name: np.diff(part) for name, part in zip(self.held, parts, strict=True)}

    def encode(
        self, record: kernels.Record, counts: Mapping[str, npt.NDArray[np.int64]], allowed: list[str], way_back: Settled
    ) -> dict[str, Prepared]:
        """The delta that a record stands for, and the way back."""
        encoder = kernels.Encoder(self._arena.snapshot, record, self._layout)
        totals = {name: int(count.sum()) for name, count in counts.items()}
        log2 = {
            name: min(tile_log2_for(total, self.held[name].num_elements), CHUNK_LOG2) for name, total in totals.items()
        }
        sizes = {name: {GAP.name: Streams(log2[name]), CONTEXT.name: Streams(log2[name])} for name in totals}
        gains = dict.fromkeys(totals, Digest())
        with self._alone():
            for chunks in self._batches(counts):
                self._encode_batch(encoder, record, chunks, log2, allowed, sizes, gains, way_back)
        prepared = {}
        for name in [name for name, total in totals.items() if total]:
            held, streams = self.held[name], sizes[name]
            tiled = CONTEXT.name if CONTEXT.name in allowed else GAP.name
            found = {each: streams[each].num_bytes for each in (GAP.name, CONTEXT.name) if streams[each].sizes}
            best = smallest_encoding(
                {each: size for each, size in found.items() if each in allowed}, held.num_elements, totals[name],
                held.dtype, allowed,
            )  # fmt: skip
            # Anything else is for the host to make; it is small, or nearly everything.
            if best == tiled:
                encoded = Encoded(best, totals[name], {best: streams[best].payload()})
                prepared[name] = Prepared(encoded, gains[name])
        return prepared

    def _batches(self, counts: Mapping[str, npt.NDArray[np.int64]]) -> Iterator[list[Row]]:
        """Chunks, as tiles, some at a time. They follow each other without a hole, so some may have no changes."""
        most_changes = max(sum(int(count.sum()) for count in counts.values()) // SHARE, LEAST_CHANGES)
        most_blocks = max(self._arena.num_blocks // SHARE, LEAST_BLOCKS)
        batch: list[Row] = []
        num_changes = num_blocks = 0
        for name in self.names:
            for row in self._rows(name, counts[name]):
                num_changes += row.num_changed
                num_blocks += row.num_blocks
                if batch and (num_changes > most_changes or num_blocks > most_blocks):
                    yield batch
                    batch, num_changes, num_blocks = [], row.num_changed, row.num_blocks
                batch.append(row)
        yield batch

    def _rows(self, name: str, counts: npt.NDArray[np.int64]) -> Iterator[Row]:
        held = self.held[name]
        seed = int(np.uint64(held.seed).view(np.int64))
        for index, count in enumerate(counts):
            start = index * CHUNK
            size = min(CHUNK, held.num_elements - start)
            yield Row(
                name, index, (held.first_block + start // BLOCK, size, start, seed, *held.runs), int(count)
            )  # fmt: skip

    def _encode_batch(
        self, encoder: kernels.Encoder, record: kernels.Record, chunks: list[Row], log2: Mapping[str, int],
        allowed: list[str], sizes: Mapping[str, Mapping[str, Streams]], gains: dict[str, Digest], way_back: Settled,
    ) -> None:  # fmt: skip
        as_tiles = [tile for chunk in chunks for tile in self._split(chunk, log2[chunk.name])]
        first, last = chunks[0].fields[0], chunks[-1].fields[0] + chunks[-1].num_blocks
        origin, end = record.begins[[first, last]].tolist()
        if origin == end:
            for row in as_tiles:
                for streams in sizes[row.name].values():
                    streams.sizes.append(0)
            return

        def table(rows: list[Row]) -> kernels.Tiles:
            fields = np.array([row.fields for row in rows], np.int64)
            return kernels.tile_table(fields, origin, end - origin, self._device)

        contextual = CONTEXT.name in allowed
        tiles = table(as_tiles)
        surveyed = encoder.survey(tiles, contextual)
        for row, gain in zip(as_tiles, surveyed.digests.cpu().numpy(), strict=True):
            gains[row.name] += as_digest(gain)
        gap = encoder.gap_rows(tiles, surveyed)
        if GAP.name in allowed:
            wanted = not contextual
            self._take(encoder, tiles, as_tiles, surveyed, gap, sizes, GAP.name, wanted)
        if contextual:
            rows = encoder.context_rows(tiles, surveyed)
            self._take(encoder, tiles, as_tiles, surveyed, rows, sizes, CONTEXT.name, True)
            del rows
        if len(as_tiles) != len(chunks):
            tiles = table(chunks)
            surveyed = encoder.survey(tiles, False)
            gap = encoder.gap_rows(tiles, surveyed)
        for row, stream in zip(chunks, self._written(encoder, tiles, surveyed, gap, True), strict=True):
            if len(stream):
                way_back.add((row.name, row.number), stream, row.num_changed, is_raw=False)

    def _split(self, chunk: Row, log2: int) -> Iterator[Row]:
        block, size, start, *rest = chunk.fields
        for at in range(0, size, 1 << log2):
            fields = (block + at // BLOCK, min(1 << log2, size - at), start + at, *rest)
            yield Row(chunk.name, (start + at) >> log2, fields, 0)

    def _take(
        self, encoder: kernels.Encoder, tiles: kernels.Tiles, rows: list[Row], surveyed: kernels.Surveyed,
        measured: kernels.Rows, sizes: Mapping[str, Mapping[str, Streams]], encoding: str, wanted: bool,
    ) -> None:  # fmt: skip
        """Note the sizes of some tiles' streams, and the streams where they are wanted."""
        lengths = measured.sizes.cpu().tolist()
        written = self._written(encoder, tiles, surveyed, measured, False) if wanted else None
        for i, row in enumerate(rows):
            streams = sizes[row.name][encoding]
            streams.sizes.append(lengths[i])
            if written is not None:
                streams.pieces.append(written[i])

    def _written(
        self, encoder: kernels.Encoder, tiles: kernels.Tiles, surveyed: kernels.Surveyed, rows: kernels.Rows, back: bool
    ) -> list[Bits]:
        """Streams, on the host; `back` for those that lead back."""
        ends = np.cumsum(rows.sizes.cpu().numpy())
        offsets = torch.from_numpy(np.concatenate([[0], ends[:-1]])).to(self._device)
        out = torch.zeros(int(ends[-1]) // 4 + 3, dtype=torch.int32, device=self._device)
        encoder.write(tiles, surveyed, rows, offsets, out, back)
        host = torch_view(out).view(np.uint8)
        return np.split(host[: ends[-1]], ends[:-1])


def single_stride(box: Box) -> Runs | None:
    """A box as runs of elements at equal distances, where it is that."""
    starts, length = box.runs()
    if len(starts) == 0:
        return None
    strides = np.unique(np.diff(starts))
    if len(strides) > 1:
        return None
    return Runs(length, int(strides[0]) if len(strides) else length, int(starts[0]))


def as_digest(sums: npt.NDArray[np.int64]) -> Digest:
    low, high = sums.reshape(2).view(np.uint64)
    return Digest(int(low), int(high))
