"""Reads and writes the elements of pieces, in host memory or on a device, and decodes deltas against them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from deltawire.engines.layout import Piece, cuts
from deltawire.engines.staged import PieceChange, changed_elements
from deltawire.errors import EngineRejected
from deltawire.format.patches import decode_entry
from deltawire.format.wire import Entry
from deltawire.tensors.digest import Digest, TensorKey, from_sums, runs_digest
from deltawire.tensors.weights import Tensor, torch_view
from deltawire.workers import SMALL, Workers

# Threads that change host memory while a device serves. More of them, or several for tensors that take a millisecond
# each, would take the interpreter from the one that serves.
BESIDE = 4


class Item(NamedTuple):
    """A change of a piece, as `take` or `decode` returned it."""

    number: int
    """The number of the piece."""
    piece: Piece
    key: TensorKey
    change: Any


class Written(NamedTuple):
    """The result of a write: the number of elements with unexpected bits, left as they were, and the digest's gain."""

    num_unexpected: int
    gain: Digest


class Memory(Protocol):
    """The storages of one process."""

    def part(self, piece: Piece) -> "Memory":
        """What has a piece, where storages are on several devices."""
        return self

    def warm_up(self, piece: Piece, key: TensorKey, unsigned: Any) -> None:
        """Compile what `put` needs for a dtype, so that it does not happen in a pause."""
        nothing = np.empty(0, unsigned)
        (change,) = self.take([(PieceChange(0, np.empty(0, np.uint32), nothing, nothing), piece)])
        for writes in (False, True):
            self.put([Item(0, piece, key, change)], writes=writes)
        self.drop()

    def drop(self) -> None:
        """Release what was prepared for the last changes."""
        return

    def take(self, changes: Sequence[tuple[PieceChange, Piece]]) -> list[Any]:
        """Copy changes of pieces to the device of their storages."""

    def decode(self, entries: Sequence[tuple[Entry, Piece]]) -> list[Any]:
        """The changes that entries of a delta make to pieces, which have all elements of their tensors or, where the
        entry's encoding allows it, some.
        """

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        """The contribution of a piece to its tensor's digest."""

    def put(self, items: Sequence[Item], *, undo: bool = False, writes: bool = True) -> list[Written]:
        """Write the new bits (or the old ones to `undo`) to all elements that have either of them.

        Without `writes` nothing is written, and the results are what they would be.
        """


def memory_of(storages: Mapping[str, torch.Tensor], workers: Workers) -> Memory:
    devices = {flat.device for flat in storages.values()}
    if sorted(device.type for device in devices) == ["cpu", "cuda"]:
        return SplitMemory(storages, workers)
    if len(devices) > 1:
        raise EngineRejected(f"the weights are on several devices: {', '.join(sorted(map(str, devices)))}")
    if not devices or next(iter(devices)).type == "cpu":
        return HostMemory(storages, workers)
    from deltawire.engines.device_memory import DeviceMemory

    found: Memory = DeviceMemory(storages)
    return found


class HostMemory(Memory):
    """`workers` compute digests; they also decode and write changes, if these are not left to `updating`."""

    def __init__(
        self, storages: Mapping[str, torch.Tensor], workers: Workers, updating: Workers | None = None
    ) -> None:  # fmt: skip
        self._storages, self._workers, self._updating = storages, workers, updating or workers
        self._bits = {name: torch_view(flat) for name, flat in storages.items()}

    def take(self, changes: Sequence[tuple[PieceChange, Piece]]) -> list[PieceChange]:
        return [_writable(change) for change, _ in changes]

    def decode(self, entries: Sequence[tuple[Entry, Piece]]) -> list[PieceChange]:
        groups = [list(own) for _, own in groupby(entries, lambda pair: id(pair[0]))]
        found = self._updating.spread(groups, lambda pairs: pairs[0][0].box.num_elements, self._decode)
        return [change for _, changes in found for change in changes]

    def _decode(self, pairs: Sequence[tuple[Entry, Piece]], workers: Workers) -> list[PieceChange]:
        """The changes that one entry makes to some pieces."""
        (entry, first), *_ = pairs
        if first.num_elements != prod(entry.box.full):
            return self._decode_parts(entry, [piece for _, piece in pairs], workers)
        found = []
        for _, piece in pairs:
            old = Tensor(entry.dtype, entry.box.full, torch_view(grid(self._storages[piece.storage], piece)))
            _, *changed = changed_elements(decode_entry(entry, old, workers), old.bits)
            found.append(_writable(PieceChange(0, *changed)))
        return found

    def _decode_parts(self, entry: Entry, pieces: Sequence[Piece], workers: Workers) -> list[PieceChange]:
        """The same for pieces with a part of the tensor's elements each."""
        # Elements that are not here are unknown, and do not affect the result for those that are.
        bits = np.zeros(prod(entry.box.full), entry.dtype.unsigned)
        for piece in pieces:
            strides = bits.itemsize * piece.stride, bits.itemsize
            rows = as_strided(bits[piece.start :], (piece.rows, piece.columns), strides)
            rows[:] = torch_view(grid(self._storages[piece.storage], piece)).reshape(rows.shape)
        changed = changed_elements(decode_entry(entry, Tensor(entry.dtype, entry.box.full, bits), workers), bits)
        holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for number, piece in enumerate(pieces):
            holders.setdefault((piece.tensor, *piece.source), []).append((0, number))
        found = [PieceChange(0, np.empty(0, np.uint32), bits[:0].copy(), bits[:0].copy())] * len(pieces)
        for cut in cuts(holders)[entry.name]:
            for own, *arrays in cut.divide(*changed):
                for _, number in own:
                    found[number] = _writable(PieceChange(0, *arrays))
        return found

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        starts = piece.start + piece.stride * np.arange(piece.rows, dtype=np.int64)
        length = piece.columns
        if piece.is_one_run:
            starts, length = starts[:1], piece.num_elements
        bits = torch_view(grid(self._storages[piece.storage], piece))
        return runs_digest(key, starts, length, bits, self._workers)

    def put(self, items: Sequence[Item], *, undo: bool = False, writes: bool = True) -> list[Written]:
        from deltawire.kernels.cpu import live

        def one(item: Item) -> Written:
            _, piece, key, change = item
            old, new = (change.new, change.old) if undo else (change.old, change.new)
            unexpected, *sums = live.put(
                self._bits[piece.storage], change.index, old, new, piece.columns,
                (piece.start, piece.stride), piece.place, key.seed, writes,
            )  # fmt: skip
            return Written(int(unexpected), from_sums(sums))

        return self._updating.map(one, items)


class SplitMemory(Memory):
    """Storages in host memory and on a device, which serves while the former are changed."""

    def __init__(self, storages: Mapping[str, torch.Tensor], workers: Workers) -> None:
        self._is_host = {name: flat.device.type == "cpu" for name, flat in storages.items()}
        near, far = ({name: storages[name] for name, own in self._is_host.items() if own == kind}
                     for kind in (True, False))  # fmt: skip
        updating = Workers(min(workers.threads, BESIDE), tiny=SMALL)
        self._parts = {False: memory_of(far, workers), True: HostMemory(near, workers, updating)}
        self._split: tuple[Sequence[Item], dict[bool, list[Item]]] | None = None

    def part(self, piece: Piece) -> Memory:
        return self._parts[self._is_host[piece.storage]]

    def take(self, changes: Sequence[tuple[PieceChange, Piece]]) -> list[Any]:
        return self._each("take", changes)

    def drop(self) -> None:
        self._split = None
        for part in self._parts.values():
            part.drop()

    def decode(self, entries: Sequence[tuple[Entry, Piece]]) -> list[Any]:
        return self._each("decode", entries)

    def _each(self, method: str, pairs: Sequence[tuple[Any, Piece]]) -> list[Any]:
        """Of something and a piece each, by the part that has the piece."""
        found = {
            kind: iter(getattr(part, method)([each for each in pairs if self._is_host[each[1].storage] == kind]))
            for kind, part in self._parts.items()
        }
        return [next(found[self._is_host[piece.storage]]) for _, piece in pairs]

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        return self.part(piece).digest(piece, key)

    def put(self, items: Sequence[Item], *, undo: bool = False, writes: bool = True) -> list[Written]:
        if self._split is None or self._split[0] is not items:
            # Kept, so that what a device has prepared for them is found again.
            own = {kind: [each for each in items if self._is_host[each.piece.storage] == kind] for kind in self._parts}
            self._split = items, own
        put = {kind: self._parts[kind].put(own, undo=undo, writes=writes) for kind, own in self._split[1].items()}
        if not all(put.values()):
            # As with codes on a device: then nothing is done for each item, while requests are held.
            return next(filter(None, put.values()), [])
        found = {kind: iter(written) for kind, written in put.items()}
        return [next(found[self._is_host[item.piece.storage]]) for item in items]


def make_room(num_bytes: int, device: torch.device) -> None:
    """Take memory for what comes next at once. In a pool of its own each array would be asked of the driver by itself,
    and be given back so in the end, and each time whoever uses the device waits.
    """
    if device.type == "cuda":
        # What a header says of its payload may be wrong.
        with suppress(torch.OutOfMemoryError):
            torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _writable(change: PieceChange) -> PieceChange:
    # Kernels are compiled for writable arrays; for others they would be compiled again, in the pause.
    parts = change.index, change.old, change.new
    return PieceChange(change.number, *(np.require(each, requirements=("C", "A", "W")) for each in parts))


def grid(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece's elements as a flat tensor; a view of the storage if they are contiguous."""
    offset, *steps = piece.place
    return torch.as_strided(flat, (piece.rows, piece.columns), steps, offset).contiguous().view(-1)
