"""The snapshot of the last published weights, and the old bits that lead back to earlier versions.

A snapshot moves forward as versions are staged; for each version the bits that it replaced are kept, so that any recent
version can be read while the snapshot is already ahead: to encode it, to write it as an anchor, to encode a skip delta,
or a delta from the version before one that could not be committed. Bits are kept in chunks: as arrays while a version
is being published, then as short reverse streams in an unnamed file.

Readers take no lock. A chunk's old bits are recorded before the snapshot changes, and a reader looks for them after it
has copied the chunk: even if it caught a half-staged version, writing all old bits back gives a consistent chunk. When
a record was removed or replaced meanwhile, the reader starts again. Whoever only scans the newest version reads the
snapshot itself, and scans a copy if another version was staged meanwhile.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.codec.encoding import Encoded, Result
from deltawire.codec.tiled import kernel_layout, stream_of
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.publish.records import CHUNK, ChunkChange, ChunkKey, KeptVersion, PackedVersion, Record, StagedVersion
from deltawire.publish.sources import ModuleWeights, unknown_name, wait_for
from deltawire.publish.streams import Stream
from deltawire.tensors.boxes import Box, Shape
from deltawire.tensors.digest import Digest, box_digest, tensor_key
from deltawire.tensors.dtypes import Bits, DType, no_room
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import Tensor, Tensors, spec
from deltawire.workers import Workers

# The encoded change of a tensor, and what it adds to the digest.
Prepared = tuple[Encoded, Digest]


class History:
    """A snapshot of weights at `version`, of each tensor all or one of the `boxes`, and records that lead back."""

    def __init__(
        self, weights: Tensors | Stream, version: int, *, tied: Ties | None = None, scratch: Path | None = None
    ) -> None:
        self.tied = dict(tied or {})
        """Names that share the weights of others."""
        self.boxes: dict[str, Box] = {}
        self.specs: dict[str, tuple[DType, Shape]] = {}
        """Dtypes and shapes of whole tensors."""
        self._snapshot: dict[str, Bits] = {}
        for some in weights.each(self) if isinstance(weights, Stream) else [weights]:
            self._begin(some)
        self._records: dict[int, Record] = {}
        self._kept: KeptVersion | None = None
        self._scratch = scratch
        # A new object before a record is removed or replaced, so that readers notice.
        self._epoch = object()
        self.oldest = self.version = version

    def _begin(self, weights: Tensors) -> None:
        for name, tensor in weights.items():
            self.boxes[name] = getattr(weights, "boxes", {}).get(name) or Box.whole(tensor.shape)
            self.specs[name] = tensor.dtype, self.boxes[name].full
            self._snapshot[name] = self._first_bits(name, tensor)

    def _first_bits(self, name: str, tensor: Tensor) -> Bits:
        try:
            return np.array(tensor.bits[:])
        except MemoryError:
            raise no_room(f"the snapshot of {name}", tensor.bits.nbytes) from None

    @property
    def place(self) -> str:
        return "host"

    @property
    def num_elements(self) -> int:
        return sum(map(len, self._snapshot.values()))

    def num_elements_of(self, name: str) -> int:
        return len(self._snapshot[name])

    def stage(
        self, version: int, weights: Tensors | Stream, workers: Workers, fixed: Collection[str] = ()
    ) -> StagedVersion:
        """Move the snapshot to new weights, as the next version, and record the old bits. `fixed` is not compared."""
        if not isinstance(weights, Stream):
            self._check_names(weights)
            self._check(weights)
        record = self._records[version] = StagedVersion()
        try:
            if isinstance(weights, Stream):
                for some in weights.each(self):
                    self._check(some)
                    self._move(record, some, workers, fixed)
                self._check_names(weights.names)
            else:
                self._move(record, weights, workers, fixed)
        except BaseException as error:
            if isinstance(weights, Stream) and weights.once and isinstance(error, UnknownParameter | ShapeMismatch):
                done = weights.names.keys() - weights.fixed - weights.tied.keys()
                weights.put_back([(name, self.copy_of(name)) for name in done])
            self._undo(version)
            raise
        self.version = version
        return record

    def _move(self, record: StagedVersion, weights: Tensors, workers: Workers, fixed: Collection[str]) -> None:
        """Compare some tensors, record their old bits, and move the snapshot to the new ones."""

        def stage_tensor(name: str, workers: Workers) -> None:
            from deltawire.kernels.cpu.blocks import changed_positions
            from deltawire.kernels.cpu.elements import elements_at, put_elements

            bits, fresh = self._snapshot[name], weights[name].bits

            def stage_chunk(index: int) -> None:
                part = slice(index * CHUNK, (index + 1) * CHUNK)
                old, new = bits[part], fresh[part]
                positions = changed_positions(old, new)
                if len(positions) == 0:
                    return
                if 2 * len(positions) < len(old):
                    where, after = positions.copy(), elements_at(new, positions)
                    before = elements_at(old, positions)
                    record.changes[name, index] = ChunkChange(where, before, after, len(positions))
                    put_elements(old, where, after)
                else:
                    record.changes[name, index] = ChunkChange(None, old.copy(), None, len(positions))
                    old[:] = new

            workers.map(stage_chunk, range(-(-len(bits) // CHUNK)))

        names = [name for name in weights if name not in fixed]
        if isinstance(weights, ModuleWeights):
            wait_for(map(weights.tensor, names))
        for _ in workers.spread(names, lambda name: len(self._snapshot[name]), stage_tensor):
            pass

    def copy_of(self, name: str) -> Any:
        """A copy of a tensor's snapshot, which a history can be given."""
        dtype, shape = self.specs[name]
        return Tensor(dtype, shape, self._snapshot[name].copy())

    def roll_back(self, version: int) -> None:
        """Undo everything that was staged from this version on."""
        for last in sorted((each for each in list(self._records) if each >= version), reverse=True):
            self._undo(last)
        self.version = max([*self._records, self.oldest])

    def _undo(self, version: int) -> None:
        record = self._records[version]
        for name, index in self._chunks(record.num_changed):
            self._revert_chunk(record, name, index)
        self._epoch = object()
        del self._records[version]

    def _revert_chunk(self, record: Record, name: str, index: int) -> None:
        bits = self._snapshot[name][index * CHUNK : (index + 1) * CHUNK]
        record.revert((name, index), bits, self.specs[name][0])

    def pack(self, version: int, workers: Workers) -> None:
        staged = self._records[version]
        if not isinstance(staged, StagedVersion):
            return
        packed = self._packed(staged, version, workers)
        self._epoch = object()
        self._records[version] = packed

    def pack_until(self, version: int, workers: Workers) -> None:
        """Pack the old bits of all versions up to this one, but not of one that is being staged."""
        for each in [each for each in list(self._records) if each <= min(version, self.version)]:
            self.pack(each, workers)

    def _packed(self, staged: StagedVersion, version: int, workers: Workers) -> PackedVersion:
        from deltawire.kernels.cpu.encode import NOT_RANKED, encode_tile

        packed = PackedVersion(staged.num_changed, self._scratch)

        def pack_chunk(key: ChunkKey) -> None:
            name, index = key
            change, dtype = staged.changes[key], self.specs[name][0]
            if change.new is None:
                packed.add(key, change.old, change.num_changed, is_raw=True)
                return
            size = min(len(self._snapshot[name]) - index * CHUNK, CHUNK)
            where, old, new = change.positions, change.old, change.new
            width, _, _, signed = kernel_layout(dtype)
            words, num_bits, *_ = encode_tile(size, where, new, old, width, signed, NOT_RANKED, False)
            stream = stream_of(words, num_bits)
            is_raw = stream.nbytes >= size * dtype.itemsize
            packed.add(key, self._before(key, change, version) if is_raw else stream, change.num_changed, is_raw=is_raw)

        workers.map_sized(pack_chunk, list(staged.changes), lambda key: len(self._snapshot[key[0]]))
        return packed

    def _before(self, key: ChunkKey, change: ChunkChange, version: int) -> Bits:
        bits = self._chunk(*key, version)
        change.revert(bits)
        return bits

    def forget(self, version: int) -> None:
        """Drop all records up to this version, which becomes the oldest that can be read, but for one that is kept."""
        kept = self._kept
        for each in [each for each in list(self._records) if each <= version]:
            record = self._records.pop(each)
            if kept is not None and each > kept.version:
                kept.num_changed.update(record.num_changed)
        self.oldest = max(self.oldest, version)

    def keep(self, version: int) -> None:
        """Keep all bits of a version in a file, instead of those of the one before: it can be read from now on."""
        sizes = {name: len(bits) * bits.dtype.itemsize for name, bits in self._snapshot.items()}
        kept = KeptVersion(version, sum(sizes.values()), self._scratch)
        for name in sizes:
            chunks = range(-(-len(self._snapshot[name]) // CHUNK))
            kept.add(name, (self._chunk(name, index, version) for index in chunks))
        self._kept = kept

    def has(self, version: int) -> bool:
        """Whether a version can be read."""
        return version >= self.oldest or (self._kept is not None and self._kept.version == version)

    def changed_since(self, base: int, version: int) -> dict[str, int]:
        """The tensors that changed after `base`, up to `version`, and an upper bound of their changed elements."""
        dropped = self._kept.num_changed if self._kept is not None and base < self.oldest else {}
        counts = {name: min(count, len(self._snapshot[name])) for name, count in dropped.items()}
        for record in self._between(base, version):
            for name, count in record.num_changed.items():
                counts[name] = min(counts.get(name, 0) + count, len(self._snapshot[name]))
        return counts

    def compared(self, base: int, version: int) -> StagedVersion | None:
        """The changes between two versions, if one comparison has found them."""
        found = self._between(base, version)
        is_one = base >= self.oldest and len(found) == 1
        return found[0] if is_one and isinstance(found[0], StagedVersion) else None

    def _between(self, base: int, version: int) -> list[Record]:
        return [record for each, record in list(self._records.items()) if base < each <= version]

    def check_complete(self, version: int) -> None:
        """Raise NotEnoughMemory if not all changes of the newest version were found."""

    def prepared(self, base: int, version: int) -> Mapping[str, Prepared]:
        """The tensors whose changes from `base` to `version` are encoded already."""
        return {}

    def digest_of(self, name: str, version: int, workers: Workers) -> Digest:
        """The contribution of the held box of a tensor to the digest of a version."""
        key = tensor_key(name, *self.specs[name])
        return box_digest(key, self.boxes[name], self.at(name, version), workers)

    def at(self, name: str, version: int) -> "TensorAt":
        """A tensor as it was at a version."""
        if not self.has(version):
            raise ValueError(f"version {version} is no longer kept: the oldest that can be read is {self.oldest}")
        bits = self._snapshot[name]
        return TensorAt(lambda index: self._chunk(name, index, version), len(bits), bits.dtype)

    def _chunk(self, name: str, index: int, version: int) -> Bits:
        kept = self._kept
        if kept is not None and kept.version == version:
            length = min(len(self._snapshot[name]) - index * CHUNK, CHUNK)
            return kept.chunk(name, index, length, self._snapshot[name].dtype)
        bits, records = self._take_chunk(name, index)
        for each in sorted((each for each in records if each > version), reverse=True):
            records[each].revert((name, index), bits, self.specs[name][0])
        return bits

    def scan(self, name: str, version: int, stretch: slice, work: Callable[[Bits], Result]) -> Result:
        """What `work` makes of a stretch of a tensor at a version: of the snapshot itself, unless it moves on."""
        epoch = self._epoch
        if not self._has_moved(version):
            found = work(self._snapshot[name][stretch])
            if not self._has_moved(version) and epoch is self._epoch:
                return found
        return work(self.at(name, version)[stretch])

    def _has_moved(self, version: int) -> bool:
        return any(each > version for each in list(self._records))

    def _take_chunk(self, name: str, index: int) -> tuple[Bits, dict[int, Record]]:
        """A copy of a chunk of the snapshot, and the records that go with it."""
        while True:
            epoch = self._epoch
            bits = self._snapshot[name][index * CHUNK : (index + 1) * CHUNK].copy()
            records = dict(self._records)
            if epoch is self._epoch:
                return bits, records

    def _chunks(self, names: Iterable[str]) -> list[ChunkKey]:
        return [(name, i) for name in list(names) for i in range(-(-len(self._snapshot[name]) // CHUNK))]

    def _check_names(self, names: Collection[str]) -> None:
        if missing := self.specs.keys() - set(names):
            raise unknown_name(min(missing), "no longer")

    def _check(self, weights: Tensors) -> None:
        if unknown := [name for name in weights if name not in self.specs]:
            raise unknown_name(min(unknown), "not")
        boxes: Mapping[str, Box] = getattr(weights, "boxes", {})
        for name in weights:
            (dtype, shape), now = self.specs[name], spec(weights, name)
            box, box_now = self.boxes[name], boxes.get(name)
            if (dtype.name, shape) == now and (box.is_whole if box_now is None else box == box_now):
                continue
            expected, actual = f"{dtype.name} {list(shape)}", f"{now[0]} {list(now[1])}"
            box_now = box_now or Box.whole(now[1])
            if not (box.is_whole and box_now.is_whole) and box != box_now:
                expected, actual = f"{expected} {box.place}", f"{actual} {box_now.place}"
            problem = f"{name} was {expected} and is now {actual}: call publish(anchor=True) to start over"
            raise ShapeMismatch(problem, tensor=name, expected=expected, actual=actual)


class TensorAt:
    """One tensor's bits at a version, read a chunk at a time; the last few chunks are kept."""

    MOST_KEPT = 2

    def __init__(self, make: Callable[[int], Bits], length: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._make, self._length, self._dtype = make, length, dtype
        self._kept: OrderedDict[int, Bits] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return self._dtype

    @property
    def nbytes(self) -> int:
        return self._length * self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, stretch: slice, /) -> Bits:
        start, stop, _ = stretch.indices(self._length)
        first, last = start // CHUNK, max(stop - 1, start) // CHUNK
        if start >= stop:
            return np.empty(0, self._dtype)
        if first == last:
            return self._chunk(first)[start - first * CHUNK : stop - first * CHUNK]
        whole = np.empty(stop - start, self._dtype)
        for index in range(first, last + 1):
            at, end = max(index * CHUNK, start), min((index + 1) * CHUNK, stop)
            # A caller that reads this much reads it once, so nothing of it is kept.
            whole[at - start : end - start] = self._make(index)[at - index * CHUNK : end - index * CHUNK]
        return whole

    def _chunk(self, index: int) -> Bits:
        with self._lock:
            bits = self._kept.get(index)
            if bits is None:
                bits = self._kept[index] = self._make(index)
                if len(self._kept) > self.MOST_KEPT:
                    self._kept.popitem(last=False)
            return bits
