"""Reads and writes the elements of pieces on a GPU, and decodes deltas against them there.

In addition to the weights it holds the indices, old and new bits of what is staged: 8 bytes per bf16 change.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deltawire.codec import CONTEXT, GAP
from deltawire.codec.tiled import check_status, read_tiles
from deltawire.engines.layout import Piece
from deltawire.engines.memory import HostMemory, Item, Memory, Written, grid
from deltawire.engines.staged import PieceChange
from deltawire.errors import CorruptObject
from deltawire.format.patches import encode_box
from deltawire.format.wire import Entry
from deltawire.kernels.gpu.decode import decode, is_decodable, tile_table
from deltawire.kernels.gpu.live import Launch
from deltawire.kernels.gpu.sums import SIGNED, Runs, box_sum, signed
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, TensorKey, tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import SERIAL

# Of a piece that is not contiguous so many elements are gathered at a time.
GATHERED = 1 << 24
# So many elements are decoded at a time, which bounds the memory that it takes.
DECODED = 1 << 27


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
        self._statuses: list[tuple[str, torch.Tensor]] = []
        """What the decoding of each tensor says, on the device."""

    def drop(self) -> None:
        self._ready = None
        self._statuses.clear()

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

    def decode(self, entry: Entry, piece: Piece) -> DeviceChange:
        flat = self._bits[piece.storage]
        if entry.encoding not in (GAP.name, CONTEXT.name) or not is_decodable(entry.dtype):
            # Small tensors, and those that changed nearly everywhere.
            whole = Piece(piece.tensor, "", piece.rows, piece.columns, 0, piece.stride, (0, piece.columns, 1))
            return self.take(HostMemory({"": grid(flat, piece).cpu()}, SERIAL).decode(entry, whole))
        old = grid(flat, piece)
        if not entry.box.is_whole:
            old = old.view(entry.box.full)[entry.box.slices].contiguous().view(-1)
        payload = entry.arrays[entry.encoding]
        tiles = tile_table(read_tiles(payload, len(old)), len(payload))
        decoded = decode(
            torch.from_numpy(np.require(payload, requirements="W")), tiles, old, entry.dtype,
            entry.encoding == CONTEXT.name, DECODED, entry.num_changed,
        )  # fmt: skip
        self._statuses.append((entry.name, decoded.statuses))
        return DeviceChange(_in_tensor(entry.box, decoded.positions), decoded.old, decoded.new)

    def check_decoded(self) -> None:
        names = [name for name, statuses in self._statuses for _ in range(len(statuses))]
        found = torch.cat([statuses for _, statuses in self._statuses]).tolist() if names else []
        self._statuses.clear()
        for name, status in zip(names, found, strict=True):
            try:
                check_status(status)
            except CorruptObject as error:
                raise CorruptObject(f"{name}: {error.message}", tensor=name) from None

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        flat = self._bits[piece.storage]
        sums = torch.zeros(2, dtype=torch.int64, device=self._device)
        for part in _stretches(piece):
            length, stride = (part.num_elements,) * 2 if part.is_one_run else (part.columns, part.stride)
            sums += box_sum(grid(flat, part), int(key.seed), Runs(length, stride, part.start))
        return _digest(sums.tolist())

    def put(self, items: Sequence[Item], *, undo: bool = False, writes: bool = True) -> list[Written]:
        if self._is_gpu and writes:
            # Work that is queued on any stream finishes with the old weights.
            torch.cuda.synchronize(self._device)
        return [Written(unexpected, _digest(sums)) for unexpected, *sums in self._run(items, writes, undo)]

    def _run(self, items: Sequence[Item], writes: bool, undo: bool) -> list[list[int]]:
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
        _, piece, key, change = item
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


def warm_up_decoding(device: torch.device) -> None:
    """Compile and load what updates need, before anybody is served: for the dtypes that weights usually have."""
    size = 3000
    for kind in ("BF16", "F16"):
        dtype, key = DTYPES[kind], tensor_key("", DTYPES[kind], (size,))
        flat = np.arange(size + 8, dtype=np.uint16) * 5
        # A tensor that begins at an odd place of its storage takes other code.
        for first in (0, 1):
            memory = DeviceMemory({"": torch.from_numpy(flat.view(np.int16)).to(device)})
            piece = Piece("", "", 1, size, 0, size, (first, size, 1))
            old = flat[first : first + size]
            new = np.where(old % 19 == 0, old + 3, old)
            before = memory.digest(piece, key)
            for encoding in (GAP.name, CONTEXT.name):
                entry, gain = encode_box("", dtype, old, new, Box.whole((size,)), [encoding])
                if entry is None:
                    continue
                items = [Item(0, piece, key, memory.decode(entry, piece))]
                memory.check_decoded()
                found = [memory.put(items, writes=False), memory.put(items), memory.put(items, undo=True)]
                memory.drop()
                if found[0] != [Written(0, gain)] or found[1] != found[0] or memory.digest(piece, key) != before:
                    raise RuntimeError("the kernels for this GPU give wrong results")
    for itemsize in (1, 4, 8):
        memory = DeviceMemory({"": torch.zeros(64, dtype=SIGNED[itemsize], device=device)})
        piece, key = Piece("", "", 1, 64, 0, 64, (0, 64, 1)), tensor_key("", DTYPES["F32"], (64,))
        memory.warm_up(piece, key, np.dtype(f"u{itemsize}").type)
        memory.digest(piece, key)


def _in_tensor(box: Box, positions: torch.Tensor) -> torch.Tensor:
    """Positions in a box as positions in its tensor."""
    if box.is_whole:
        return positions
    starts, length = box.runs()
    begins = torch.from_numpy(starts).to(positions.device)
    return (begins[positions // length] + positions % length).to(torch.int32)


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
