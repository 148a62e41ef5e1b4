"""Reads and writes the elements of pieces on a GPU, and decodes deltas against them there.

In addition to the weights it holds the indices, old and new bits of what is staged: 8 bytes per bf16 change.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deltawire.codec import CONTEXT, GAP
from deltawire.codec.tiled import MOST_TILE_LOG2, check_status, stream_edges
from deltawire.engines.layout import Piece
from deltawire.engines.memory import HostMemory, Item, Memory, Written, grid, make_room
from deltawire.engines.staged import PieceChange
from deltawire.errors import CorruptObject
from deltawire.format.patches import encode_box
from deltawire.format.wire import Entry
from deltawire.kernels.gpu.decode import Box as EncodedBox
from deltawire.kernels.gpu.decode import decode_boxes, is_decodable, tile_tables, upload
from deltawire.kernels.gpu.live import RESULTS, Launch
from deltawire.kernels.gpu.sums import SIGNED, Runs, box_sum, signed
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, TensorKey, from_sums, tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import SERIAL, in_turns

# Of a piece that is not contiguous so many elements are gathered at a time.
GATHERED = 1 << 24
# So many elements are decoded at a time, and a share of them, which bounds the memory that it takes.
DECODED, DECODED_SHARE, LEAST_DECODED = 1 << 29, 1 / 8, 1 << 25
# Of tensors that are held in part so many changes are decoded at a time: most of them may be another process's.
DIVIDED = 1 << 26
# For each change an index, old and new bits; and what else it takes to decode some.
PER_CHANGE, BESIDES = 8, 1 << 24


class DeviceChange(NamedTuple):
    """A change of a piece: where its indices, old and new bits are. There may be tens of thousands, so these are no
    tensors: all of them together would be made, and let go of, without a turn for the thread that serves.
    """

    indices: int
    old: int
    new: int
    length: int
    itemsize: int
    kept: Any
    """What has the memory."""


class DeviceMemory(Memory):
    def __init__(self, storages: Mapping[str, torch.Tensor]) -> None:
        self._bits = {name: flat.view(SIGNED[flat.itemsize]) for name, flat in storages.items()}
        self._device = next(iter(storages.values())).device
        self._is_gpu: bool = self._device.type == "cuda"
        self._ready: tuple[Sequence[Item], npt.NDArray[np.int64], list[Launch]] | None = None
        self._written: tuple[npt.NDArray[np.int64], list[Written]] | None = None
        """What a device found the last time, as numbers and as objects."""

    def drop(self) -> None:
        self._ready = self._written = None

    def take(self, changes: Sequence[tuple[PieceChange, Piece]]) -> list[DeviceChange]:
        """All of them in one copy, however many there are: the thread that serves wants the interpreter, too."""
        arrays = [each for change, _ in changes for each in (change.index, change.old, change.new)]
        # Wide elements first, so that all of them stay aligned.
        order = sorted(range(len(arrays)), key=lambda i: -arrays[i].itemsize)
        packed = torch.empty(sum(each.nbytes for each in arrays), dtype=torch.uint8, pin_memory=self._is_gpu)
        np.concatenate([np.empty(0, np.uint8), *(arrays[i].view(np.uint8) for i in order)], out=packed.numpy())
        there = packed.to(self._device, non_blocking=True)
        ends = accumulate((arrays[i].nbytes for i in order), initial=there.data_ptr())
        at = dict(zip(order, ends, strict=False))
        return [
            DeviceChange(at[3 * i], at[3 * i + 1], at[3 * i + 2], len(change.index), change.old.itemsize, there)
            for i, (change, _) in enumerate(changes)
        ]

    def decode(self, entries: Sequence[tuple[Entry, Piece]]) -> list[DeviceChange]:
        changes: dict[int, DeviceChange] = {}
        here: list[int] = []
        others: dict[int, list[int]] = {}
        for i, (entry, piece) in enumerate(in_turns(entries)):
            is_run = piece.num_elements == prod(entry.box.full) or len(entry.box.runs()[0]) == 1
            if entry.encoding in (GAP.name, CONTEXT.name) and is_decodable(entry.dtype) and is_run:
                here.append(i)
            else:
                others.setdefault(entry.dtype.itemsize, []).append(i)
        if here:
            changes |= zip(here, self._decode([entries[i] for i in here]), strict=True)
        for numbers in others.values():
            changes |= zip(numbers, self._decode_on_host([entries[i] for i in numbers]), strict=True)
        return [changes[i] for i in range(len(entries))]

    def _decode(self, entries: Sequence[tuple[Entry, Piece]]) -> list[DeviceChange]:
        """There may be tens of thousands, and the thread that serves wants the interpreter, too."""
        payloads = [entry.arrays[entry.encoding] for entry, _ in entries]
        sizes = [entry.box.num_elements for entry, _ in entries]
        tables, arrays = tile_tables(payloads, sizes, MOST_TILE_LOG2)
        num_changed = sum(entry.num_changed for entry, _ in entries)
        make_room(sum(map(len, arrays)) + PER_CHANGE * num_changed + BESIDES, self._device)
        words = upload(arrays, self._device)
        changes: dict[int, DeviceChange] = {}
        batches: dict[tuple[str, str, int, int], list[int]] = {}
        boxes: list[EncodedBox] = []
        gathered: list[torch.Tensor] = []
        num_divided = 0
        for i, ((entry, piece), table) in enumerate(in_turns(zip(entries, tables, strict=True))):
            if table is None:
                stream_edges(payloads[i], sizes[i])
                raise CorruptObject(f"{entry.name}: its payload is malformed")
            part = 0
            if piece.num_elements == prod(entry.box.full):
                address = self._address(entry, piece, gathered)
                boxes.append(EncodedBox(table.rows, address, sizes[i], entry.num_changed))
            else:
                boxes.append(self._divided(entry, piece, table.rows))
                num_divided += entry.num_changed
                part = 1 + num_divided // DIVIDED
            # Those with tiles of about one size go together: all of them get as much memory as the largest.
            batches.setdefault((entry.dtype.name, entry.encoding, table.largest.bit_length(), part), []).append(i)
        for (dtype, encoding, _, part), numbers in batches.items():
            near = self._bits[entries[numbers[0]][1].storage]
            own = [boxes[i] for i in numbers]
            share = int(DECODED_SHARE * sum(box.num_elements for box in own))
            most = min(max(share, LEAST_DECODED), DECODED)
            statuses, counts, found = decode_boxes(words, own, near, DTYPES[dtype], encoding == CONTEXT.name, most)
            every, old, new = (each.data_ptr() for each in found)
            starts = accumulate(counts, initial=0)
            for i, status, start, count in in_turns(zip(numbers, statuses, starts, counts, strict=False)):
                entry = entries[i][0]
                try:
                    check_status(status)
                except CorruptObject as error:
                    raise CorruptObject(f"{entry.name}: {error.message}", tensor=entry.name) from None
                index, kept = every + found[0].itemsize * start, found
                if not part and not entry.box.is_whole:
                    positions = _in_tensor(entry.box, found[0][start : start + count])
                    index, kept = positions.data_ptr(), (positions, *found)
                size = found[1].itemsize
                changes[i] = DeviceChange(index, old + size * start, new + size * start, count, size, kept)
        return [changes[i] for i in range(len(entries))]

    def _address(self, entry: Entry, piece: Piece, gathered: list[torch.Tensor]) -> int:
        """Where an entry's old bits begin. If they do not lie in sequence they are copied, and kept in `gathered`."""
        flat = self._bits[piece.storage]
        offset, *steps = piece.place
        address: int = flat.data_ptr() + flat.itemsize * offset
        if steps != [piece.columns, 1] or not entry.box.is_whole:
            gathered.append(grid(flat, piece).view(entry.box.full)[entry.box.slices].contiguous())
            address = gathered[-1].data_ptr()
        return address

    def _divided(self, entry: Entry, piece: Piece, tiles: npt.NDArray[np.int64]) -> EncodedBox:
        """An entry for a piece with a part of the tensor's elements. Its box is of one stretch of the tensor."""
        starts, _ = entry.box.runs()
        grid = piece.start - int(starts[0]), piece.stride, piece.rows, piece.columns, *piece.place
        return EncodedBox(tiles, self._bits[piece.storage].data_ptr(), piece.num_elements, entry.num_changed, grid)

    def _decode_on_host(self, entries: Sequence[tuple[Entry, Piece]]) -> list[DeviceChange]:
        """For small tensors of one element size, and those that changed nearly everywhere: many in one copy."""
        found: list[DeviceChange] = []
        ends = accumulate(piece.num_elements for _, piece in entries)
        for _, some in groupby(zip(ends, entries, strict=True), lambda each: each[0] // GATHERED):
            own = [each for _, each in some]
            grids = [grid(self._bits[piece.storage], piece) for _, piece in own]
            joined = (grids[0] if len(grids) == 1 else torch.cat(grids)).to("cpu", copy=True)
            starts = accumulate((piece.num_elements for _, piece in own), initial=0)
            there = [replace(piece, storage="", place=(start, piece.columns, 1))
                     for start, (_, piece) in zip(starts, own, strict=False)]  # fmt: skip
            host = HostMemory({"": joined}, SERIAL)
            changes = host.decode([(entry, piece) for (entry, _), piece in zip(own, there, strict=True)])
            found += self.take([(change, piece) for change, (_, piece) in zip(changes, own, strict=True)])
        return found

    def digest(self, piece: Piece, key: TensorKey) -> Digest:
        flat = self._bits[piece.storage]
        sums = torch.zeros(2, dtype=torch.int64, device=self._device)
        for part in _stretches(piece):
            length, stride = (part.num_elements,) * 2 if part.is_one_run else (part.columns, part.stride)
            sums += box_sum(grid(flat, part), int(key.seed), Runs(length, stride, part.start))
        return from_sums(sums.tolist())

    def put(self, items: Sequence[Item], *, undo: bool = False, writes: bool = True) -> list[Written]:
        if self._is_gpu and writes:
            # Work that is queued on any stream finishes with the old weights.
            torch.cuda.synchronize(self._device)
        found = self._run(items, writes, undo)
        # As a rule a write does what was computed before it, and there may be tens of thousands of pieces.
        if self._written is None or not np.array_equal(found, self._written[0]):
            self._written = found, [Written(each[0], from_sums(each[1:])) for each in in_turns(found.tolist())]
        return self._written[1]

    def _run(self, items: Sequence[Item], writes: bool, undo: bool) -> npt.NDArray[np.int64]:
        """One launch for each element size, and one wait for all of them. A row for each item."""
        if self._ready is None or self._ready[0] is not items:
            sizes: dict[int, list[int]] = {}
            for i, item in enumerate(in_turns(items)):
                sizes.setdefault(item.change.itemsize, []).append(i)
            launches = [
                Launch([self._row(items[i]) for i in in_turns(own)], size, self._device) for size, own in sizes.items()
            ]
            self._ready = items, np.array([i for own in sizes.values() for i in own], np.int64), launches
        found = np.empty((len(items), RESULTS.value), np.int64)
        results = [launch.run(writes=writes, undo=undo) for launch in self._ready[2]]
        if results:
            found[self._ready[1]] = torch.cat(results).cpu().numpy()
        return found

    def _row(self, item: Item) -> tuple[int, ...]:
        _, piece, key, change = item
        live, places = self._bits[piece.storage].data_ptr(), (piece.columns, piece.start, piece.stride, *piece.place)
        return live, change.indices, change.old, change.new, change.length, *places, signed(int(key.seed))


def warm_up_decoding(device: torch.device, dtypes: Collection[str]) -> None:
    """Compile and load what updates of weights of these dtypes need, before anybody is served."""
    from deltawire.kernels.cpu import warmup

    # Of small tensors, and of dtypes that are not decoded on a GPU.
    warmup.warm_up(sorted({8 * DTYPES[name].itemsize for name in dtypes}))
    size = 3000
    flat = np.arange(size, dtype=np.uint16) * 5
    # The same elements twice: where GPUs like to read, and where a tensor behind an odd one begins.
    storage = np.concatenate([flat, flat[:1], flat]).view(np.int16)
    piece, odd = (Piece("", "", 1, size, 0, size, (offset, size, 1)) for offset in (0, size + 1))
    half = size // 2
    halves = [Piece("", "", 1, half, start, half, (start, half, 1)) for start in (0, half)]
    for dtype in (DTYPES[name] for name in dtypes if is_decodable(DTYPES[name])):
        key = tensor_key("", dtype, (size,))
        memory = DeviceMemory({"": torch.from_numpy(storage).to(device)})
        before = memory.digest(piece, key)
        for encoding, pieces in (
            (GAP.name, [piece]),
            (GAP.name, halves),
            (CONTEXT.name, [piece]),
            (CONTEXT.name, [odd]),
        ):
            new = np.where(flat % 19 == 0, flat + 3, flat)
            entry, gain = encode_box("", dtype, flat, new, Box.whole((size,)), [encoding])
            decoded = memory.decode([(entry, each) for each in pieces] if entry else [])
            items = [Item(0, each, key, change) for each, change in zip(pieces, decoded, strict=True)]
            found = [memory.put(items, writes=False), memory.put(items), memory.put(items, undo=True)]
            memory.drop()
            is_right = sum((each.gain for each in found[0]), Digest()) == gain and found[1] == found[0]
            if not is_right or sum((memory.digest(each, key) for each in pieces), Digest()) != before:
                raise RuntimeError("the kernels for this GPU give wrong results")
    for dtype in (DTYPES[name] for name in dtypes if not is_decodable(DTYPES[name])):
        key = tensor_key("", dtype, (size,))
        memory = DeviceMemory({"": torch.zeros(size, dtype=SIGNED[dtype.itemsize], device=device)})
        memory.warm_up(piece, key, dtype.unsigned)
        memory.digest(piece, key)


def _in_tensor(box: Box, positions: torch.Tensor) -> torch.Tensor:
    """Positions in a box as positions in its tensor."""
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
