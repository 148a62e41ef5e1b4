"""Reads and writes the elements of pieces on a GPU.

In addition to the weights it holds the indices, old and new bits of what is staged: 8 bytes per bf16 change.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deltawire.engines.layout import Piece
from deltawire.engines.memory import Item, Memory, Written, grid
from deltawire.engines.staged import PieceChange
from deltawire.kernels.gpu.live import Launch
from deltawire.kernels.gpu.sums import SIGNED, Runs, box_sum, signed
from deltawire.tensors.digest import Digest, TensorKey

# Of a piece that is not contiguous so many elements are gathered at a time.
GATHERED = 1 << 24


class DeviceChange(NamedTuple):
    """A change of a piece, in one block of device memory."""

    index: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


class DeviceMemory(Memory):
    def __init__(self, storages: Mapping[str, torch.Tensor]) -> None:
        self._bits = {name: flat.view(SIGNED[flat.itemsize]) for name, flat in storages.items()}
        self._device = next(iter(storages.values())).device
        self._is_gpu: bool = self._device.type == "cuda"
        self._ready: tuple[Sequence[Item], list[tuple[list[int], Launch]]] | None = None

    def drop(self) -> None:
        self._ready = None

    def take(self, change: PieceChange) -> DeviceChange:
        # Wide elements first, so that all of them stay aligned.
        parts = sorted((change.index, change.old, change.new), key=lambda each: -each.itemsize)
        packed = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, pin_memory=self._is_gpu)
        ends = np.cumsum([part.nbytes for part in parts]).tolist()
        np.concatenate([part.view(np.uint8) for part in parts], out=packed.numpy())
        cut = {
            id(part): piece.view(SIGNED[part.itemsize])
            for part, piece in zip(parts, packed.to(self._device, non_blocking=True).tensor_split(ends), strict=False)
        }
        return DeviceChange(*(cut[id(part)] for part in (change.index, change.old, change.new)))

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        flat = self._bits[piece.storage]
        sums = torch.zeros(2, dtype=torch.int64, device=self._device)
        for part in _stretches(piece):
            length, stride = (part.num_elements,) * 2 if part.is_one_run else (part.columns, part.stride)
            sums += box_sum(grid(flat, part), int(key.seed), Runs(length, stride, part.start))
        return _digest(sums.tolist())

    def count_strange(self, items: Sequence[Item]) -> list[int]:
        return [unexpected for unexpected, _, _ in self._run(items, writes=False)]

    def put(self, items: Sequence[Item], undo: bool) -> list[Written]:
        if self._is_gpu:
            # Work that is queued on any stream finishes with the old weights.
            torch.cuda.synchronize(self._device)
        return [Written(unexpected, _digest(sums)) for unexpected, *sums in self._run(items, writes=True, undo=undo)]

    def _run(self, items: Sequence[Item], *, writes: bool, undo: bool = False) -> list[list[int]]:
        """One launch for each element size, and one wait for all of them."""
        if self._ready is None or self._ready[0] is not items:
            self._ready = items, self._launches(items)
        found: list[list[int]] = [[] for _ in items]
        results = [launch.run(writes=writes, undo=undo) for _, launch in self._ready[1]]
        rows = torch.cat(results).tolist() if results else []
        for number, row in zip((i for numbers, _ in self._ready[1] for i in numbers), rows, strict=True):
            found[number] = row
        return found

    def _launches(self, items: Sequence[Item]) -> list[tuple[list[int], Launch]]:
        numbers: dict[int, list[int]] = {}
        for i, item in enumerate(items):
            numbers.setdefault(item.change.old.itemsize, []).append(i)
        return [
            (own, Launch([self._row(items[i]) for i in own], itemsize, self._device))
            for itemsize, own in numbers.items()
        ]

    def _row(self, item: Item) -> tuple[int, ...]:
        piece, key, change = item
        addresses = (each.data_ptr() for each in (self._bits[piece.storage], *change))
        return (
            *addresses,
            len(change.index),
            piece.columns,
            piece.start,
            piece.stride,
            *piece.place,
            signed(int(key.seed)),
        )


def _stretches(piece: Piece) -> Iterator[Piece]:
    """The piece itself if it is contiguous in its storage; else some rows at a time."""
    offset, row_step, column_step = piece.place
    rows = max(GATHERED // piece.columns, 1)
    if (row_step, column_step) == (piece.columns, 1):
        rows = piece.rows
    for row in range(0, piece.rows, rows):
        yield Piece(
            piece.tensor, piece.storage, min(rows, piece.rows - row), piece.columns,
            piece.start + row * piece.stride, piece.stride, (offset + row * row_step, row_step, column_step),
        )  # fmt: skip


def _digest(sums: Sequence[int]) -> Digest:
    low, high = (word % (1 << 64) for word in sums)
    return Digest(low, high)
