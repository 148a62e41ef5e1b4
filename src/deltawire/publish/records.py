"""What versions have changed, so that earlier ones can be read: in arrays, packed in a file, or all bits of one."""

import mmap
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from deltawire.codec.encoding import Changes, Offsets
from deltawire.codec.tiled import check_status, kernel_layout
from deltawire.format.container import raw
from deltawire.tensors.dtypes import Bits, DType

CHUNK_LOG2 = 20
CHUNK = 1 << CHUNK_LOG2

# A tensor's name and a chunk's number in it.
ChunkKey = tuple[str, int]

Edges = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkChange:
    """What a version changed in one chunk: where, and the bits before and after; or, where that is nearly everything,
    all old bits of the chunk.
    """

    positions: Offsets | None
    old: Bits
    new: Bits | None
    num_changed: int

    def revert(self, bits: Bits) -> None:
        """Turn the chunk's bits into those before the version."""
        from deltawire.kernels.cpu.elements import put_elements

        if self.positions is None:
            bits[:] = self.old
        else:
            put_elements(bits, self.positions, self.old)


class Record(Protocol):
    """The old bits that turn a version back into the one before it."""

    @property
    def num_changed(self) -> Mapping[str, int]:
        """The number of changed elements of each tensor that changed."""

    def revert(self, key: ChunkKey, bits: Bits, dtype: DType) -> None:
        """Turn a chunk's bits into those before the version."""


class StagedVersion:
    """The changes of a version that is being published, kept in memory."""

    def __init__(self) -> None:
        self.changes: dict[ChunkKey, ChunkChange] = {}

    @property
    def num_changed(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for (name, _), change in list(self.changes.items()):
            counts[name] += change.num_changed
        return counts

    def changes_in(self, name: str, dtype: np.dtype[np.unsignedinteger], start: int, stop: int) -> Changes | None:
        """The changes in a range of a tensor, from its start; None if their positions were not kept."""
        found: list[Changes] = []
        for index in range(start // CHUNK, -(-stop // CHUNK)):
            change, at = self.changes.get((name, index)), index * CHUNK
            if change is None:
                continue
            where, old, new = change.positions, change.old, change.new
            if where is None or new is None:
                return None
            if start > at or stop - at <= where[-1]:
                first, last = np.searchsorted(where, np.array([max(start - at, 0), stop - at], np.uint32))
                where, old, new = where[first:last], old[first:last], new[first:last]
            found.append((where if at == start else (where + np.int64(at - start)).astype(np.uint32), old, new))
        if len(found) == 1:
            return found[0]
        nothing = np.empty(0, np.uint32), np.empty(0, dtype), np.empty(0, dtype)
        where, old, new = map(np.concatenate, zip(*found, strict=True)) if found else nothing
        return where, old, new

    def revert(self, key: ChunkKey, bits: Bits, dtype: DType) -> None:
        change = self.changes.get(key)
        if change is not None:
            change.revert(bits)


class _Stream(NamedTuple):
    start: int
    num_bytes: int
    num_changed: int
    is_raw: bool


class PackedVersion:
    """The changes of a version that was committed: reverse `gap` streams in a file, or the old bits where shorter."""

    def __init__(self, num_changed: Mapping[str, int], folder: Path | None) -> None:
        self.num_changed = num_changed
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, _close, self._file)
        self._streams: dict[ChunkKey, _Stream] = {}
        self._lock = threading.Lock()

    def add(self, key: ChunkKey, stream: Bits, num_changed: int, *, is_raw: bool) -> None:
        """Keep a chunk's stream or, raw, all its old bits."""
        self._streams[key] = _Stream(self._write(stream), stream.nbytes, num_changed, is_raw)

    def add_all(self, keys: Sequence[ChunkKey], bits: Bits, edges: Edges, num_changed: Edges) -> None:
        """Keep the streams of many chunks, which lie one behind the other between these edges, in one piece: a thread
        would give up the interpreter with each.
        """
        offset = self._write(bits[edges[0] : edges[-1]]) - int(edges[0])
        every = zip(keys, pairwise(edges.tolist()), num_changed.tolist(), strict=True)
        self._streams |= {key: _Stream(offset + start, stop - start, count, False)
                          for key, (start, stop), count in every if count}  # fmt: skip

    def _write(self, bits: Bits) -> int:
        with self._lock:
            start = self._file.seek(0, 2)
            self._file.write(raw(bits))
            # Now, while the bits are still in memory: the disk may be full.
            self._file.flush()
        return start

    def revert(self, key: ChunkKey, bits: Bits, dtype: DType) -> None:
        from deltawire.kernels.cpu.decode import decode_tile

        place = self._streams.get(key)
        if place is None:
            return
        with self._lock:
            self._file.seek(place.start)
            # Writable, since kernels are compiled again for arrays that are not.
            stream = np.frombuffer(bytearray(self._file.read(place.num_bytes)), np.uint8)
        if place.is_raw:
            bits[:] = stream.view(bits.dtype)
            return
        positions, old = np.empty(place.num_changed, np.int64), np.empty(place.num_changed, bits.dtype)
        check_status(int(decode_tile(stream, bits, *kernel_layout(dtype), False, positions, old)))
        bits[positions] = old


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # what a full disk did not take
        file.close()


class KeptVersion:
    """All bits of one version in an unnamed file, to encode deltas from it when its records are long gone."""

    def __init__(self, version: int, num_bytes: int, folder: Path | None) -> None:
        self.version = version
        self.num_changed: Counter[str] = Counter()
        """The changes since this version whose records were dropped; an upper bound for each tensor."""
        self._starts: dict[str, int] = {}
        self._num_bytes = 0
        with tempfile.TemporaryFile(dir=folder) as file:
            # Room is taken now: writing to a map on a full disk would end the process.
            os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))
            self._map = mmap.mmap(file.fileno(), max(num_bytes, 1))

    def add(self, name: str, pieces: Iterable[Bits]) -> None:
        self._starts[name] = self._num_bytes
        for piece in pieces:
            self._map[self._num_bytes : self._num_bytes + piece.nbytes] = raw(piece)
            self._num_bytes += piece.nbytes

    def chunk(self, name: str, index: int, length: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
        return np.frombuffer(self._map, dtype, length, self._starts[name] + index * CHUNK * dtype.itemsize).copy()
