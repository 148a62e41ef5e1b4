"""From a payload and old weights, both on a GPU, to changed positions and new bits.

A payload is decoded some tiles at a time, so that the memory that it takes beside its results stays bounded. The host
waits once, for what the headers say, to know how much memory that is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from numpy.lib.stride_tricks import as_strided

from deltawire.errors import CorruptObject
from deltawire.kernels.cpu.tiles import find_tiles
from deltawire.kernels.gpu import positions as place
from deltawire.kernels.gpu import streams
from deltawire.kernels.gpu.fetch import Fetch
from deltawire.kernels.gpu.positions import BLOCK_BITMAP_WORDS, number_of
from deltawire.kernels.gpu.streams import (
    CHANGES,
    CODE,
    CODES,
    FACTS,
    FIELDS,
    FIRST_CHANGE,
    FIRST_CODE,
    INVERTED,
    NUM_CODES,
    SIGNS,
    TILE_BITS,
    TILE_END,
    TILE_FIELDS,
    TILE_ORIGIN,
    TILE_SIZE,
    TILE_START,
    get,
    inverted_member,
)
from deltawire.workers import in_turns

if TYPE_CHECKING:
    from deltawire.tensors.dtypes import DType

MOST_ELEMENTS = 1 << 29
HEADERS = 32

# How much each program takes, and its warps, as measured on an H200.
ONES = {"VECTOR": 512, "num_warps": 16}
GROUPS = {"VECTOR": 512, "num_warps": 4}
LENGTHS = {"VECTOR": 256, "num_warps": 4}
COUNT = {"BLOCKS": 2, "num_warps": 2}
ADD = {"VECTOR": 256, "num_warps": 4}
SEARCH = {"VECTOR": 256, "num_warps": 4}
LOCATE = {"VECTOR": 32, "num_warps": 1, "maxnreg": 64}
NUMBER = {"VECTOR": 4096, "num_warps": 16}
TAKE = {"VECTOR": 256, "num_warps": 4}

WORD_BYTES = 4
# A row of `grids`, for each tile: which elements of its box are there, as rows and columns, and where they lie.
GRID_START, GRID_STRIDE, GRID_ROWS, GRID_COLUMNS, GRID_OFFSET, GRID_ROW_STEP, GRID_COLUMN_STEP = (
    tl.constexpr(i) for i in range(7)
)
GRID_FIELDS = tl.constexpr(7)

# A remainder is read from three words.
SPARE_WORDS = 4
# Positions of so many elements, which begin at 0, fit 32 bits with a sign.
MOST_INT32 = 1 << 31
BLOCK = place.BLOCK.value
BITMAP_WORDS = place.BLOCK_BITMAP_WORDS.value


Numbers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The changes of a box, ascending, and a status for each tile; they are right where all of these are OK."""

    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    statuses: torch.Tensor
    before: Numbers
    """How many changes the tiles before each have, and all have."""


@triton.jit
def take_step(bits, down, length):
    """New bits, of 16 with sign and magnitude, from old ones and a step."""
    line = tl.where(bits < 0x8000, bits + 0x8000, 0xFFFF - bits)
    line = (line + tl.where(down == 1, -length, length)) & 0xFFFF
    return tl.where(line >= 0x8000, line - 0x8000, 0xFFFF - line)


@triton.jit(do_not_specialize=["first_tile", "first_change", "first_code", "tile_blocks", "programs"])
def take_steps(
    words, old, tiles, rows, facts, first_tile, first_change, first_code,
    places, extras, found, found_old, bitmap, numbers,
    positions, olds, news, grids, tile_blocks, programs, CLASSES: tl.constexpr, DIVIDED: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Positions in the box, old and new bits of a tile's changes, in the order of positions; with `DIVIDED` numbers in
    the tile's grid, -1 for what lies outside of it.
    """
    index = (tl.program_id(0) // programs).to(tl.int64)
    tile = first_tile + index
    fact = facts + tile * FACTS
    num_changes = tl.load(fact + CHANGES).to(tl.int32)
    start = (tl.program_id(0) % programs) * VECTOR
    if start < num_changes:
        change = start + tl.arange(0, VECTOR)
        live = change < num_changes
        tile_change = tl.load(fact + FIRST_CHANGE)
        here = tile_change - first_change + change
        tile_start = tl.load(tiles + tile * TILE_FIELDS + TILE_START)
        origin = tl.load(tiles + tile * TILE_FIELDS + TILE_ORIGIN)
        if CLASSES > 1:
            position = tl.load(found + here, mask=live, other=-1)
            live = live & (position >= 0)
            before = tl.load(found_old + here, mask=live, other=0)
            tile_words = index * tile_blocks * BLOCK_BITMAP_WORDS
            number = number_of(bitmap + tile_words, numbers + tile_words, position, live)
            element = origin + position
        else:
            group = rows + (3 * tile + 2) * FIELDS
            group_places = places + (tl.load(fact + FIRST_CODE) - first_code) + tl.load(group + CODE)
            if tl.load(group + INVERTED) == 1:
                others = tl.load(group + NUM_CODES).to(tl.int32)
                position = inverted_member(group_places, others, others, change, live)
            else:
                position = tl.load(group_places + change, mask=live, other=0)
            live = live & (position < tl.load(tiles + tile * TILE_FIELDS + TILE_SIZE))
            number = change
            if DIVIDED:
                grid = grids + tile * GRID_FIELDS
                at = origin + position - tl.load(grid + GRID_START)
                stride, columns = tl.load(grid + GRID_STRIDE), tl.load(grid + GRID_COLUMNS)
                row = at // stride
                column = at - row * stride
                held = live & (at >= 0) & (row < tl.load(grid + GRID_ROWS)) & (column < columns)
                place = row * tl.load(grid + GRID_ROW_STEP) + column * tl.load(grid + GRID_COLUMN_STEP)
                before = tl.load(old + tl.load(grid + GRID_OFFSET) + place, mask=held, other=0)
                element = tl.where(held, row * columns + column, -1)
            else:
                before = tl.load(old + tile_start + position, mask=live, other=0)
                element = origin + position
        length = tl.load(extras + here, mask=live, other=0).to(tl.int32) + 1
        down = get(words, tl.load(fact + SIGNS) + number, 1, live)
        after = take_step(before.to(tl.int32) & 0xFFFF, down, length)
        out = tile_change + number
        tl.store(positions + out, element, mask=live)
        tl.store(olds + out, before, mask=live)
        tl.store(news + out, after.to(tl.int16), mask=live)


class Table(NamedTuple):
    """The tiles of a payload that have changes, as `decode` takes them."""

    rows: Numbers
    """Where a tile begins in the old weights, its size, where its stream begins and ends in what is uploaded, in bits,
    and its first position.
    """
    largest: int
    """The size of the largest."""


def tile_tables(
    payloads: Sequence[Bits], sizes: Sequence[int], most_log2: int
) -> tuple[list[Table | None], list[Bits]]:
    """The tables of untrusted payloads for so many elements each, None for one that is malformed, and the arrays in
    which the payloads lie one behind the other, for `upload`.
    """
    tables: list[Table | None] = [None] * len(payloads)
    arrays: list[Bits] = []
    origin = 0
    for own, array, starts in _laid_out(payloads):
        ends = starts + [len(payloads[i]) for i in own]
        counts, largest, rows = find_tiles(array, starts, ends, np.array([sizes[i] for i in own], np.int64), most_log2)
        rows[:, TILE_BITS.value : TILE_END.value + 1] += 8 * origin
        edges = np.cumsum(np.maximum(counts, 0))
        for i, count, last, size in zip(own, counts.tolist(), edges.tolist(), largest.tolist(), strict=True):
            tables[i] = Table(rows[last - count : last], size) if count >= 0 else None
        arrays.append(array)
        origin += len(array)
    return tables, arrays


def _laid_out(payloads: Sequence[Bits]) -> Iterator[tuple[list[int], Bits, Numbers]]:
    """Some payloads, an array that has all of these, and where each begins. Those of a file lie together already, so
    that there is nothing to do for each of them.
    """
    owners: dict[int, list[int]] = {}
    for i, payload in enumerate(payloads):
        owners.setdefault(id(payload if payload.base is None else payload.base), []).append(i)
    others: list[int] = []
    for own in owners.values():
        starts = np.array([payloads[i].__array_interface__["data"][0] for i in own], np.int64)
        ends = starts + [len(payloads[i]) for i in own]
        first, num_bytes = int(starts.argmin()), int(ends.max() - starts.min())
        if len(own) > 1 and num_bytes <= 2 * int((ends - starts).sum()):
            yield own, as_strided(payloads[own[first]], (num_bytes,), (1,)), starts - starts[first]
        else:
            others += own
    if others:
        ends = np.cumsum([len(payloads[i]) for i in others])
        yield others, np.concatenate([payloads[i] for i in others]), np.append(0, ends[:-1])


def upload(arrays: Sequence[Bits], device: Any) -> torch.Tensor:
    """Arrays one behind the other on a device, as words."""
    num_bytes = sum(map(len, arrays))
    words = torch.empty(num_bytes // WORD_BYTES + SPARE_WORDS, dtype=torch.int32, device=device)
    ends = accumulate(map(len, arrays), initial=0)
    for array, start in zip(arrays, ends, strict=False):
        words.view(torch.uint8)[start : start + len(array)].copy_(torch.from_numpy(array), non_blocking=True)
    return words


def is_decodable(dtype: "DType") -> bool:
    """Whether there are kernels for a dtype: 16-bit floats with sign and magnitude."""
    return (dtype.itemsize, dtype.sign_magnitude) == (2, True)


class Box(NamedTuple):
    """A box to decode: its tile table, the address of its old bits on the device, how many elements it has, and how
    many changes there should be.

    Where only a part of its elements is there, `grid` says which, and where from that address on: as the fields of
    `grids`. Then `num_elements` is of that part.
    """

    tiles: Numbers
    address: int
    num_elements: int
    num_changed: int
    grid: tuple[int, ...] | None = None


def decode_boxes(
    words: torch.Tensor, boxes: Sequence[Box], near: torch.Tensor, dtype: "DType", contextual: bool,
    most_elements: int = MOST_ELEMENTS,
) -> tuple[list[int], list[int], tuple[torch.Tensor, ...]]:  # fmt: skip
    """The worst status of each of many boxes of one encoding, how many changes it has, and the positions, old and new
    bits of all of them, box after box; with as many launches as for one.

    Old bits are addressed from `near`, any tensor of 16-bit elements on the device. Torch is called for all boxes
    together: next to a thread that serves, each call may have to wait for the interpreter. All boxes have a grid, or
    none; with grids, which only `gap` can have, positions are numbers in these, and other changes are left out.
    """
    places = [(box.address - near.data_ptr()) // 2 for box in boxes]
    num_tiles = [len(box.tiles) for box in boxes]
    table = np.concatenate([box.tiles for box in boxes])
    table[:, TILE_START.value] += np.repeat(places, num_tiles)
    most_positions = max(box.num_elements for box in boxes)
    own = [box.grid for box in boxes if box.grid is not None]
    grids = np.repeat(np.array(own, np.int64), num_tiles, 0) if own else None
    if grids is not None:
        grids[:, GRID_OFFSET.value] += np.repeat(places, num_tiles)
    decoded = decode(words, table, near, dtype, contextual, most_elements, most_positions, grids)
    counts = np.diff(decoded.before[np.cumsum([0, *num_tiles])]).tolist()
    for box, count in zip(boxes, counts, strict=True):
        if count != box.num_changed:
            raise CorruptObject(f"the tiles hold {count} changes, the header says {box.num_changed}")
    statuses = np.maximum.reduceat(decoded.statuses.cpu().numpy(), np.cumsum([0, *num_tiles[:-1]])).tolist()
    found: tuple[torch.Tensor, ...] = decoded.positions, decoded.old, decoded.new
    if grids is not None:
        held = torch.nonzero(decoded.positions >= 0).squeeze(1)
        ends = torch.searchsorted(held, torch.tensor(counts, device=held.device).cumsum(0)).tolist()
        counts = np.diff([0, *ends]).tolist()
        found = tuple(each[held] for each in found)
    return statuses, counts, found


def decode(
    words: torch.Tensor, tiles: Numbers, old: torch.Tensor, dtype: "DType", contextual: bool,
    most_elements: int = MOST_ELEMENTS, most_positions: int | None = None, grids: Numbers | None = None,
) -> Decoded:  # fmt: skip
    """The changes of a box of 16-bit floats, from the payload of `gap` or `context`, in `words`, and the old bits.

    `tiles` is its tile table, on the host. At most `most_elements` elements, or one
    tile, are worked on at a time. With `grids`, one for each tile, positions are numbers in these, or -1.
    """
    if not is_decodable(dtype):
        raise ValueError(f"only 16-bit floats can be decoded on a GPU, not {dtype.name}")
    most_positions = len(old) if most_positions is None else most_positions
    batch = _Batch(words, tiles, old.view(torch.int16), dtype, contextual, most_positions, grids)
    step = max(most_elements // (batch.tile_blocks * BLOCK), 1)
    for first in in_turns(range(0, len(tiles), step)):
        batch.decode(first, min(first + step, len(tiles)))
    return batch.decoded


class _Batch:
    """A payload on its way: its words, the tables of its tiles, and its changes as far as they are known."""

    def __init__(
        self, words: torch.Tensor, tiles: Numbers, old: torch.Tensor, dtype: "DType", contextual: bool,
        most_positions: int, grids: Numbers | None,
    ) -> None:  # fmt: skip
        self.words, self.old, self.device, self._most_positions = words, old, old.device, most_positions
        self.classes = place.CLASSES.value if contextual else 1
        largest = int(tiles[:, TILE_SIZE.value].max(initial=1))
        self.tile_blocks = triton.next_power_of_2(triton.cdiv(largest, BLOCK))
        aligned = old.data_ptr() % 16 == 0 and not (tiles[:, TILE_START.value] % 8).any()
        self.layout = {"SHIFT": dtype.exponent_shift, "MASK": dtype.exponent_mask, "ALIGNED": bool(aligned)}
        self.tiles = torch.from_numpy(tiles).to(self.device, non_blocking=True)
        self.grids = None if grids is None else torch.from_numpy(grids).to(self.device, non_blocking=True)
        self._read_headers()

    def _new(self, size: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind, device=self.device)

    def _read_headers(self) -> None:
        num_tiles = len(self.tiles)
        self.rows = self._new(num_tiles * 3 * self.classes * FIELDS.value, torch.int64)
        self.facts = self._new(num_tiles * FACTS.value, torch.int64).reshape(num_tiles, FACTS.value)
        self.statuses = self._new(num_tiles, torch.int32)
        if num_tiles:
            streams.read_headers[(triton.cdiv(num_tiles, HEADERS),)](
                self.words, self.tiles, num_tiles, self.rows, self.facts, self.statuses,
                MASK=self.layout["MASK"], CLASSES=self.classes, VECTOR=HEADERS, num_warps=1,
            )  # fmt: skip
        counts = self.facts[:, CHANGES.value : CODES.value + 1]
        self._counts = Fetch(counts)

    @cached_property
    def before(self) -> npt.NDArray[np.int64]:
        """How many changes and codes the tiles before each have, and all have. The first time the host waits."""
        counts = self._counts.wait()
        before = torch.zeros((len(counts) + 1, 2), dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=before[1:])
        self.facts[:, FIRST_CHANGE.value : FIRST_CODE.value + 1] = before[:-1].to(self.device, non_blocking=True)
        return before.numpy()

    @cached_property
    def decoded(self) -> Decoded:
        total = int(self.before[-1, 0])
        positions = self._new(total, torch.int32 if self._most_positions <= MOST_INT32 else torch.int64)
        olds, news = self._new(total, torch.int16), self._new(total, torch.int16)
        return Decoded(positions, olds, news, self.statuses, self.before[:, 0])

    def decode(self, first: int, last: int) -> None:
        """Decode some tiles."""
        num_tiles = last - first
        # The device has something to do while the host waits for the headers, and for long enough to stay ahead then.
        counted = self._count(first, num_tiles) if self.classes > 1 else ()
        first_change, first_code = map(int, self.before[first])
        num_changes, num_codes = map(int, self.before[last] - self.before[first])
        if num_changes == 0:
            return
        most = int(np.diff(self.before[first : last + 1, 0]).max())
        ones, places = self._new(num_codes, torch.int32), self._new(num_codes, torch.int32)
        extras = self._new(num_changes, torch.int16).zero_()
        tables = (self.tiles, self.rows, self.facts)
        streams.find_ones[(num_tiles,)](
            self.words, self.tiles, self.facts, self.statuses, first, first_code, ones, **ONES
        )
        streams.find_members[(num_tiles * 2 * self.classes,)](
            self.words, len(self.words), *tables, self.statuses, first, first_code, ones, places,
            CLASSES=self.classes, **GROUPS,
        )  # fmt: skip
        streams.find_lengths[(num_tiles * self.classes,)](
            self.words, len(self.words), self.rows, self.facts, self.statuses, first, first_change, first_code, ones,
            places, extras, CLASSES=self.classes, **LENGTHS,
        )  # fmt: skip
        found = (places,) * 4
        if self.classes > 1:
            found = self._locate(first, num_tiles, num_changes, most, first_change, first_code, places, *counted)
        programs = triton.cdiv(most, TAKE["VECTOR"])
        result = self.decoded
        take_steps[(num_tiles * programs,)](
            self.words, self.old, *tables, first, first_change, first_code, places, extras, *found,
            result.positions, result.old, result.new, self.tiles if self.grids is None else self.grids,
            self.tile_blocks, programs, CLASSES=self.classes, DIVIDED=self.grids is not None, **TAKE,
        )  # fmt: skip

    def _count(self, first: int, num_tiles: int) -> tuple[torch.Tensor, ...]:
        """For `context`: classes by sub, by block, and by tile."""
        num_blocks = num_tiles * self.tile_blocks
        counts = self._new(num_blocks * place.BLOCK_COUNTS.value, torch.int32)
        before = self._new(num_blocks * self.classes, torch.int32)
        populations = self._new(num_tiles * self.classes, torch.int32)
        place.count_classes[(num_tiles * triton.cdiv(self.tile_blocks, COUNT["BLOCKS"]),)](
            self.old, self.tiles, self.facts, first, counts, self.tile_blocks, **COUNT, **self.layout
        )
        place.add_up_blocks[(num_tiles * place.COUNTS.value,)](
            self.tiles, self.rows, self.facts, self.statuses, first, counts, before, populations, self.tile_blocks,
            **ADD,
        )  # fmt: skip
        return counts, before, populations

    def _locate(
        self, first: int, num_tiles: int, num_changes: int, most: int, first_change: int, first_code: int,
        places: torch.Tensor, counts: torch.Tensor, before: torch.Tensor, populations: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """For `context`: positions and old bits by class, a bitmap of the changes, and their numbers by its words."""
        num_blocks = num_tiles * self.tile_blocks
        bitmap = self._new(num_blocks * BITMAP_WORDS, torch.int64).zero_()
        numbers = self._new(num_blocks * BITMAP_WORDS, torch.int32)
        blocks, found = self._new(num_changes, torch.int32), self._new(num_changes, torch.int32)
        found_old = self._new(num_changes, torch.int16)
        programs = triton.cdiv(most, SEARCH["VECTOR"])
        place.find_blocks[(num_tiles * programs,)](
            self.rows, self.facts, self.statuses, first, first_change, first_code, places, before, populations, blocks,
            self.tile_blocks, programs, **SEARCH,
        )  # fmt: skip
        programs = triton.cdiv(most, LOCATE["VECTOR"])
        place.locate[(num_tiles * programs,)](
            self.old, self.tiles, self.facts, first, first_change, counts, blocks, found, found_old, bitmap,
            self.tile_blocks, programs, **LOCATE, **self.layout,
        )  # fmt: skip
        place.number_changes[(num_tiles,)](
            self.facts, first, bitmap, numbers, self.tile_blocks * BITMAP_WORDS, **NUMBER
        )
        return found, found_old, bitmap, numbers
