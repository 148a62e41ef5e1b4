"""Reads and writes the elements of pieces, in host memory or on a device."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from deltawire.engines.layout import Piece
from deltawire.engines.staged import PieceChange
from deltawire.errors import EngineRejected
from deltawire.tensors.digest import Digest, TensorKey, runs_digest
from deltawire.tensors.weights import torch_view
from deltawire.workers import Workers


class Item(NamedTuple):
    """A change of a piece, as `take` returned it."""

    piece: Piece
    key: TensorKey
    change: Any


class Written(NamedTuple):
    """The result of a write: the number of elements with unexpected bits, left as they were, and the digest's gain."""

    num_strange: int
    gain: Digest


class Memory(Protocol):
    """The storages of one process."""

    def warm_up(self, piece: Piece, key: TensorKey, unsigned: Any) -> None:
        """Compile what `put` needs for a dtype, so that it does not happen in a pause."""
        nothing = np.empty(0, unsigned)
        self.put([Item(piece, key, self.take(PieceChange(0, np.empty(0, np.uint32), nothing, nothing)))], undo=False)
        self.drop()

    def drop(self) -> None:
        """Release what was prepared for the last changes."""
        return

    def take(self, change: PieceChange) -> Any:
        """Copy a change to the device of the storages."""

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        """The contribution of a piece to its tensor's digest."""

    def count_strange(self, items: Sequence[Item]) -> list[int]:
        """For each change, the number of elements that have neither their old bits nor their new ones."""

    def put(self, items: Sequence[Item], undo: bool) -> list[Written]:
        """Write the new bits (or the old ones to `undo`) to all elements that have either of them."""


def memory_of(storages: Mapping[str, torch.Tensor], workers: Workers) -> Memory:
    devices = {flat.device for flat in storages.values()}
    if len(devices) > 1:
        raise EngineRejected(f"the weights are on several devices: {', '.join(sorted(map(str, devices)))}")
    if not devices or next(iter(devices)).type == "cpu":
        return HostMemory(storages, workers)
    from deltawire.engines.device_memory import DeviceMemory

    found: Memory = DeviceMemory(storages)
    return found


class HostMemory(Memory):
    def __init__(self, storages: Mapping[str, torch.Tensor], workers: Workers) -> None:
        self._storages, self._workers = storages, workers
        self._bits = {name: torch_view(flat) for name, flat in storages.items()}

    def take(self, change: PieceChange) -> PieceChange:
        # Kernels are compiled for writable arrays; for others they would be compiled again, in the pause.
        index, old, new = (
            np.require(each, requirements=("C", "A", "W")) for each in (change.index, change.old, change.new)
        )
        return PieceChange(change.number, index, old, new)

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        starts = piece.start + piece.stride * np.arange(piece.rows, dtype=np.int64)
        length = piece.columns
        if piece.is_one_run:
            starts, length = starts[:1], piece.num_elements
        bits = torch_view(grid(self._storages[piece.storage], piece))
        return runs_digest(key, starts, length, bits, self._workers)

    def count_strange(self, items: Sequence[Item]) -> list[int]:
        from deltawire.kernels.cpu import live

        def one(item: Item) -> int:
            piece, _, change = item
            bits = self._bits[piece.storage]
            return int(live.count_strange(bits, change.index, change.old, change.new, piece.columns, piece.place))

        return self._workers.map(one, items)

    def put(self, items: Sequence[Item], undo: bool) -> list[Written]:
        from deltawire.kernels.cpu import live

        def one(item: Item) -> Written:
            piece, key, change = item
            old, new = (change.new, change.old) if undo else (change.old, change.new)
            unexpected, low, high = live.put(
                self._bits[piece.storage], change.index, old, new, piece.columns,
                (piece.start, piece.stride), piece.place, key.seed,
            )  # fmt: skip
            return Written(int(unexpected), Digest(int(low), int(high)))

        return self._workers.map(one, items)


def grid(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece's elements as a flat tensor; a view of the storage if they are contiguous."""
    offset, *steps = piece.place
    return torch.as_strided(flat, (piece.rows, piece.columns), steps, offset).contiguous().view(-1)
