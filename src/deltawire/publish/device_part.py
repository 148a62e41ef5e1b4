"""The tensors of one device: their snapshot in an arena, and its encoding on the device."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from deltawire.codec import CONTEXT, GAP, smallest_encoding
from deltawire.codec.encoding import Encoded
from deltawire.codec.tiled import HEAD_BYTES, tile_log2_for
from deltawire.kernels.gpu import encode as kernels
from deltawire.kernels.gpu.arena import Arena, Begun, Pieces, Sample
from deltawire.kernels.gpu.compare import BLOCK
from deltawire.kernels.gpu.fetch import Fetch
from deltawire.kernels.gpu.sums import Runs, box_sum, signed
from deltawire.publish.history import Prepared
from deltawire.publish.memory import Memory
from deltawire.publish.records import CHUNK, CHUNK_LOG2, PackedVersion
from deltawire.publish.sources import ModuleWeights
from deltawire.tensors.boxes import Box, Shape
from deltawire.tensors.digest import Digest, from_sums, tensor_key
from deltawire.tensors.dtypes import Bits, DType
from deltawire.tensors.weights import torch_view
from deltawire.workers import Pool

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}

# How much is encoded at a time: a share of all changes and of all blocks, and the least that is worth a launch.
SHARE = 16
LEAST_CHANGES, LEAST_BLOCKS = 1 << 22, 1 << 15

# Tensors of at most so many elements are read all at once: one copy for each would be dominated by its latency.
SMALL = 1 << 14

Numbers = npt.NDArray[np.int64]


class Chunks(NamedTuple):
    """Chunks, or the tiles that they are split into: the tensor of each, and its row, as in kernels/gpu/ranks.py."""

    tensors: Numbers
    rows: Numbers

    @property
    def first_blocks(self) -> Numbers:
        return self.rows[:, 0]

    @property
    def sizes(self) -> Numbers:
        return self.rows[:, 1]

    @property
    def starts(self) -> Numbers:
        return self.rows[:, 2]

    def split(self, log2: Numbers) -> "Chunks":
        num_tiles = -(-self.sizes >> log2)
        whole = np.repeat(np.arange(len(num_tiles)), num_tiles)
        at = (np.arange(len(whole)) - (np.cumsum(num_tiles) - num_tiles)[whole]) << log2[whole]
        tiles = Chunks(self.tensors[whole], self.rows[whole])
        tiles.first_blocks[:] += at // BLOCK
        tiles.sizes[:] = np.minimum(tiles.sizes - at, 1 << log2[whole])
        tiles.starts[:] += at
        return tiles

    def by_tensor(self) -> Iterator[tuple[int, slice]]:
        edges = [0, *(np.flatnonzero(np.diff(self.tensors)) + 1).tolist(), len(self.tensors)]
        for first, last in pairwise(edges):
            yield int(self.tensors[first]), slice(first, last)


@dataclass(slots=True)
class Streams:
    """The streams of one tensor's tiles, in order, and their sizes: of some tiles at a time."""

    tile_log2: int
    sizes: list[Numbers] = field(default_factory=list)
    pieces: list[Bits] = field(default_factory=list)

    def payload(self) -> Bits:
        head = np.array([self.tile_log2, 0, 0, 0], np.uint8)
        return np.concatenate([head, np.concatenate(self.sizes).astype("<u4").view(np.uint8), *self.pieces])

    @property
    def num_bytes(self) -> int:
        return HEAD_BYTES + 4 * sum(map(len, self.sizes)) + self._stream_bytes

    @property
    def _stream_bytes(self) -> int:
        return sum(int(some.sum()) for some in self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether all streams were written, and not only measured."""
        return sum(map(len, self.pieces)) == self._stream_bytes


class Written(NamedTuple):
    """Streams of some chunks that a device writes, and that are on their way to the host."""

    chunks: Chunks
    num_changed: Numbers
    split: Chunks
    """The tiles of the chunks."""
    used: Sequence[str]
    """The encodings that were written; after them come the reverse streams."""
    edges: Sequence[Numbers]
    """For each of these where its streams begin and end."""
    bytes: Fetch | None


class Held(NamedTuple):
    """Where a tensor is in an arena, and where its box is in the whole tensor."""

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
        self._came_on: dict[int, Any] = {}
        """The streams on which weights came that are looked at together: one by one, that may be another than later."""
        with self._between_steps():
            self._arena = Arena([tensor.numel() for tensor in tensors], DTYPES[dtype.name], self._device)
            self._arena.point_at(tensors)
            self._arena.take_all()
            if self._stream is not None:
                # Compiles what a comparison needs, so that the first one does not wait for that.
                self._arena.begin(self._arena.sample())
        self._join()
        self._arena.let_go()
        self.settle()
        self.held = {
            name: Held(
                dtype, int(tensor_key(name, dtype, boxes[name].full).seed), first, tensor.numel(),
                cast(Runs, single_stride(boxes[name])),
            )
            for name, tensor, first in zip(names, tensors, self._arena.first_blocks, strict=True)
        }  # fmt: skip
        rows = [(each.first_block, each.num_elements, 0, signed(each.seed), *each.runs) for each in self.held.values()]
        # All chunks follow each other without a gap.
        self._chunks = Chunks(np.arange(len(names)), np.array(rows, np.int64)).split(np.full(len(names), CHUNK_LOG2))
        edges = np.append(self._chunks.first_blocks, self._arena.num_blocks)
        self._chunk_edges = torch.from_numpy(edges).to(self._device)
        self._small: dict[str, Bits] | None = None
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._pieces: Pieces | None = None
        self._begun: Begun | None = None
        """What was looked at since the last end."""
        self._waiting: dict[str, torch.Tensor] = {}
        """What is looked at together at the end."""
        self._sampled: Sample | None = None

    def _alone(self) -> AbstractContextManager[Any]:
        """The stream of this snapshot, so that training goes on in parallel."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """The same, after the work that is queued on the trainer's stream, and before what is queued there later."""
        if self._stream is None:
            yield
            return
        trainer = torch.cuda.current_stream(self._device)
        for each in {trainer, *self._came_on.values()}:
            self._stream.wait_stream(each)
        self._came_on.clear()
        with self._alone():
            yield
        trainer.wait_stream(self._stream)

    def _join(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def look(self, weights: ModuleWeights, memory: Memory) -> None:
        """Move the snapshot to some weights: to all by the end, to a tensor that comes alone at once.

        That is, before the trainer's stream goes on. Of tensors that come alone, copies of small ones and those with
        memory of their own are looked at together.
        """
        mine, is_alone = [name for name in weights if name in self.held], len(weights) == 1
        self._small = None
        for name in mine:
            tensor = weights.tensor(name)
            if is_alone and len(self.names) == 1:
                with self._between_steps():
                    self._arena.point_at([tensor])
                    self._begun = self._arena.begin(self._arena.sample())
                self._let_go([tensor])
                continue
            is_own = not is_alone or memory.is_own(name, tensor)
            if is_own or self.held[name].num_elements <= SMALL:
                self._waiting[name] = tensor if is_own else tensor.clone()
                self._note_stream()
                continue
            with self._between_steps():
                self._look(self._numbers[name], [tensor])

    def _note_stream(self) -> None:
        """Note the stream on which a tensor has come. For each of many, so by its number, which is quickly known."""
        if self._stream is not None:
            number = torch._C._cuda_getCurrentRawStream(self._device.index)
            if number not in self._came_on:
                self._came_on[number] = torch.cuda.current_stream(self._device)

    def sample(self) -> None:
        """All have come. Where they are looked at together, the device begins to look at some of them."""
        if len(self._waiting) == len(self.names):
            tensors = [self._waiting[name] for name in self.names]
            with self._between_steps():
                self._arena.point_at(tensors)
                self._sampled = self._arena.sample()
            # While the device looks.
            self._let_go(tensors)

    def await_sample(self) -> None:
        if self._sampled is not None:
            self._sampled.wait()

    def _look(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        self._pieces = self._pieces or Pieces(self._arena)
        self._pieces.look(first, tensors)
        self._let_go(tensors)

    def _let_go(self, tensors: Sequence[torch.Tensor]) -> None:
        """If these are freed, their memory is not given to others before the device has looked at them."""
        for tensor in tensors:
            if self._stream is not None and tensor.device == self._device:
                tensor.record_stream(self._stream)

    def end(self) -> Begun:
        """What all looks find, which may be under way; the weights may change on the trainer's stream from here on."""
        waiting, sampled = self._waiting, self._sampled
        self._waiting, self._sampled = {}, None
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun
        with self._between_steps():
            if sampled is not None:
                return self._arena.begin(sampled)
            in_order = sorted((self._numbers[name], tensor) for name, tensor in waiting.items())
            for _, some in groupby(enumerate(in_order), lambda each: each[1][0] - each[0]):
                numbered = [each for _, each in some]
                self._look(numbered[0][0], [tensor for _, tensor in numbered])
            found, self._pieces = (self._pieces or Pieces(self._arena)).end(), None
            return found

    def settle(self) -> None:
        """What all looks have found is kept."""
        self._arena.is_ahead = False

    @property
    def is_lost(self) -> bool:
        """Whether the snapshot has moved, and cannot be put back: nobody has what was found."""
        return self._arena.is_ahead

    def has_all(self, begun: Begun) -> bool:
        """Whether there was room for all changes that looks have found; waits for their end."""
        return self._arena.has_all(begun)

    def give_up(self) -> None:
        """Undo what was found since the last end."""
        self._small, self._waiting, self._sampled = None, {}, None
        self._came_on.clear()
        self._arena.let_go()
        if self._pieces is not None or self._begun is not None:
            self.put_back(self.end().record)

    def put_back(self, record: kernels.Record) -> None:
        self._small = None
        with self._alone():
            self._arena.put_back(record)
        self._join()
        self.settle()

    def copy_of(self, name: str, shape: Shape) -> torch.Tensor:
        """A copy of a tensor, as it was last seen."""
        if name in self._waiting:
            return self._waiting[name]
        copy = self._kept(name).clone().view(DTYPES[self.held[name].dtype.name]).view(shape)
        if self._stream is not None:
            # Before the snapshot goes back.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return copy

    def _kept(self, name: str) -> torch.Tensor:
        held = self.held[name]
        return self._arena.snapshot[held.first_block * BLOCK :][: held.num_elements]

    def read(self, name: str, stretch: slice) -> Bits:
        if self.held[name].num_elements <= SMALL:
            return self._read_small()[name][stretch]
        with self._alone():
            return torch_view(self._kept(name)[stretch])

    def _read_small(self) -> dict[str, Bits]:
        """All small tensors, until the snapshot moves."""
        if self._small is None:
            sizes = {name: held.num_elements for name, held in self.held.items() if held.num_elements <= SMALL}
            with self._alone():
                bits = torch_view(torch.cat([self._kept(name) for name in sizes]))
            ends = np.cumsum([*sizes.values()])
            self._small = dict(zip(sizes, np.split(bits, ends[:-1]), strict=True))
        return self._small

    def write(self, name: str, stretch: slice, bits: Bits) -> None:
        self._small = None
        with self._alone():
            self._kept(name)[stretch] = torch.from_numpy(bits.view(np.int16)).to(self._device)
        self._join()

    def digest(self, name: str) -> Digest:
        held = self.held[name]
        with self._alone():
            return from_sums(box_sum(self._kept(name), held.seed, held.runs).tolist())

    def num_changed(self, record: kernels.Record) -> dict[str, Numbers]:
        """The number of changes in each chunk, for each tensor."""
        with self._alone():
            counts = np.diff(record.begins[self._chunk_edges].cpu().numpy())
        return {self.names[tensor]: counts[stretch] for tensor, stretch in self._chunks.by_tensor()}

    @property
    def num_blocks(self) -> int:
        return self._arena.num_blocks

    def encode(
        self, record: kernels.Record, counts: Mapping[str, Numbers], allowed: list[str], reverse: PackedVersion,
        share: float = 1 / SHARE,
    ) -> dict[str, Prepared]:  # fmt: skip
        """Encode a record, such a share of it at a time: return the delta, and add the reverse streams to `reverse`."""
        encoder = kernels.Encoder(self._arena.snapshot, record, self._layout)
        totals = {name: int(count.sum()) for name, count in counts.items()}
        log2 = [min(tile_log2_for(totals[name], self.held[name].num_elements), CHUNK_LOG2) for name in self.names]
        batch = _Batch(encoder, self._device, np.array(log2), allowed)
        num_changed = np.concatenate([counts[name] for name in self.names])
        origins = np.cumsum(num_changed) - num_changed
        # Files are written in parallel to the rest.
        with self._alone(), Pool(1) as writer:
            kept, coming = [], deque[Written]()
            for some in chain(self._batches(num_changed, share), [None]):
                if some is not None:
                    chunks = Chunks(self._chunks.tensors[some], self._chunks.rows[some])
                    coming.append(batch.encode(chunks, num_changed[some], int(origins[some.start])))
                # What the device has written before the last has come by now.
                if len(coming) > 1 or some is None:
                    written = coming.popleft()
                    kept.append(writer.submit(self._keep, written, batch.arrived(written), reverse))
        for each in kept:
            each.result()
        prepared = {}
        for tensor, name in enumerate(self.names):
            if not totals[name]:
                continue
            held, streams = self.held[name], {each: batch.streams[each][tensor] for each in batch.streams}
            found = {each: streams[each].num_bytes for each in streams if each in allowed}
            best = smallest_encoding(found, held.num_elements, totals[name], held.dtype, allowed)
            # Anything else is encoded on the host; it is small, or nearly everything.
            if best in streams and streams[best].is_whole:
                encoded = Encoded(best, totals[name], {best: streams[best].payload()})
                prepared[name] = encoded, batch.gains[tensor]
        return prepared

    def _batches(self, num_changed: Numbers, share: float) -> Iterator[slice]:
        """Slices of the chunks. Chunks without changes are included."""
        most_changes = max(int(num_changed.sum() * share), LEAST_CHANGES)
        most_blocks = max(int(self._arena.num_blocks * share), LEAST_BLOCKS)
        num_blocks = -(-self._chunks.sizes // BLOCK)
        first = blocks = changes = 0
        for i, more in enumerate(zip(num_blocks.tolist(), num_changed.tolist(), strict=True)):
            blocks, changes = blocks + more[0], changes + more[1]
            if i > first and (changes > most_changes or blocks > most_blocks):
                yield slice(first, i)
                first, (blocks, changes) = i, more
        yield slice(first, len(num_changed))

    def _keep(self, written: Written, host: Bits, reverse: PackedVersion) -> None:
        """Keep the reverse streams, one for each chunk."""
        if written.edges:
            numbers = (written.chunks.starts // CHUNK).tolist()
            keys = [(self.names[tensor], each) for tensor, each in zip(written.chunks.tensors, numbers, strict=True)]
            reverse.add_all(keys, host, written.edges[-1], written.num_changed)


class _Batch:
    """Encodes some chunks at a time, and collects the results by tensor."""

    def __init__(self, encoder: kernels.Encoder, device: Any, log2: Numbers, allowed: list[str]) -> None:
        self._encoder, self._device, self._log2 = encoder, device, log2
        self._contextual = CONTEXT.name in allowed
        self._allowed = [each for each in (CONTEXT.name, GAP.name) if each in allowed]
        encodings = [GAP.name, CONTEXT.name] if self._contextual else [GAP.name]
        self.streams = {each: [Streams(int(size)) for size in log2] for each in encodings}
        self.gains = [Digest()] * len(log2)

    def encode(self, chunks: Chunks, num_changed: Numbers, origin: int) -> Written:
        """What the device begins to write."""
        split, num_changes = chunks.split(self._log2[chunks.tensors]), int(num_changed.sum())
        if num_changes == 0:
            for tensor, some in split.by_tensor():
                for streams in self.streams.values():
                    streams[tensor].sizes.append(np.zeros(some.stop - some.start, np.int64))
            return Written(chunks, num_changed, split, [], [], None)
        tiles = kernels.tile_table(split.rows, origin, num_changes, self._device)
        surveyed = self._encoder.survey(tiles, self._contextual)
        rows = {GAP.name: self._encoder.gap_rows(tiles, surveyed)}
        if self._contextual:
            rows[CONTEXT.name] = self._encoder.context_rows(tiles, surveyed)
        back = tiles, surveyed, rows[GAP.name]
        if len(split.rows) != len(chunks.rows):
            whole = kernels.tile_table(chunks.rows, origin, num_changes, self._device)
            back = whole, (found := self._encoder.survey(whole, False)), self._encoder.gap_rows(whole, found)
        # One wait for all numbers, and one for all streams: each is long if others use the device.
        numbers = [surveyed.digests.view(-1), *(each.sizes for each in rows.values()), back[2].sizes]
        gains, *lengths = np.split(torch.cat(numbers).cpu().numpy(), np.cumsum([*map(len, numbers)])[:-1])
        sizes = dict(zip(rows, lengths, strict=False))
        for tensor, some in split.by_tensor():
            self.gains[tensor] += from_sums(gains.reshape(-1, 2)[some].sum(0))
            for each, streams in self.streams.items():
                streams[tensor].sizes.append(sizes[each][some])
        # Streams of the encoding that is the smaller one for each tensor here: mostly that is the same for all.
        best = {
            tensor: min(self._allowed, key=lambda each: int(sizes[each][some].sum()))
            for tensor, some in split.by_tensor()
            if self._allowed
        }
        used = [each for each in self._allowed if each in best.values()]
        wanted = [(sizes[each], (tiles, surveyed, rows[each])) for each in used]
        return Written(chunks, num_changed, split, used, *self._write([*wanted, (lengths[-1], back)]))

    def arrived(self, written: Written) -> Bits:
        """All bytes, once they have come."""
        if written.bytes is None:
            return np.empty(0, np.uint8)
        host: Bits = written.bytes.wait().numpy().view(np.uint8)
        for each, edges in zip(written.used, written.edges, strict=False):
            for tensor, some in written.split.by_tensor():
                self.streams[each][tensor].pieces.append(host[edges[some.start] : edges[some.stop]])
        return host

    def _write(
        self, wanted: Sequence[tuple[Numbers, tuple[kernels.Tiles, kernels.Surveyed, kernels.Rows]]]
    ) -> tuple[list[Numbers], Fetch]:
        """Streams of several kinds, of known sizes: where those of each begin and end. The last ones are reverse."""
        edges = np.cumsum(np.concatenate([[0], *(sizes for sizes, _ in wanted)]))
        out = torch.zeros(int(edges[-1]) // 4 + 3, dtype=torch.int32, device=self._device)
        offsets = torch.from_numpy(edges).to(self._device, non_blocking=True)
        first, found = 0, []
        for number, (sizes, (tiles, surveyed, rows)) in enumerate(wanted, 1):
            self._encoder.write(tiles, surveyed, rows, offsets[first:], out, number == len(wanted))
            found.append(edges[first : first + len(sizes) + 1])
            first += len(sizes)
        return found, Fetch(out)


def single_stride(box: Box) -> Runs | None:
    """A box as runs of elements at equal distances; None if it is not that."""
    starts, length = box.runs()
    if len(starts) == 0:
        return None
    strides = np.unique(np.diff(starts))
    if len(strides) > 1:
        return None
    return Runs(length, int(strides[0]) if len(strides) else length, int(starts[0]))
