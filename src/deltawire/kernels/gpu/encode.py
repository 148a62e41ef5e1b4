"""Runs the kernels that turn a record of changes into streams. Everything stays on the device but what is returned."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deltawire.kernels.gpu import ranks
from deltawire.kernels.gpu import rows as kernels
from deltawire.kernels.gpu.compare import BLOCK

GAP_CLASSES, CONTEXT_CLASSES = 1, 16

# How much a program takes at a time, and its warps, as measured on an H200; for rows by number of classes.
SUBS = BLOCK // 64
CHOOSE = {"BLOCKS": 32, "SLOTS": 64, "num_warps": 4}
SURVEY = {"SLOTS": 64, "num_warps": 1}
COUNT = {"num_warps": 1}
ADD = {"ROWS": 128}
RANK = {"SLOTS": 32, "NEAR": 2, "num_warps": 1}
MAKE = {1: {"VECTOR": 1024, "num_warps": 4}, 16: {"VECTOR": 128, "num_warps": 1}}
WRITE = {"VECTOR": 128, "num_warps": 1}


class Layout(NamedTuple):
    """Of a 16-bit dtype with sign and magnitude."""

    shift: int
    mask: int


@dataclass(frozen=True, slots=True)
class Record:
    """What a version changed: for each block how many changes the blocks before it have, and where its own start.

    A change is one number: old bits above the place in the block.
    """

    begins: torch.Tensor
    starts: torch.Tensor
    changes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Some tiles that follow each other in the snapshot."""

    table: torch.Tensor
    """One row a tile, as in ranks.py."""
    block_tiles: torch.Tensor
    """For each block its tile."""
    first_block: int
    origin: int
    """The first change of the first tile."""
    num_changes: int

    @property
    def num_tiles(self) -> int:
        return len(self.table)

    @property
    def num_blocks(self) -> int:
        return len(self.block_tiles)


def tile_table(rows: npt.NDArray[np.int64], origin: int, num_changes: int, device: Any) -> Tiles:
    num_blocks = -(-rows[:, 1] // BLOCK)
    block_tiles = np.repeat(np.arange(len(rows), dtype=np.int32), num_blocks)
    return Tiles(
        torch.from_numpy(rows).to(device, non_blocking=True),
        torch.from_numpy(block_tiles).to(device, non_blocking=True),
        int(rows[0, 0]),
        origin,
        num_changes,
    )


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The changes of some tiles, in the order of positions: steps, and positions in the tile."""

    steps: torch.Tensor
    positions: torch.Tensor
    firsts: torch.Tensor
    totals: torch.Tensor
    """For each block by class, as in ranks.py; where it is not for `context`, nothing of use."""
    digests: torch.Tensor
    """For each tile what its digest gains, low and high."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The streams of some tiles, measured but not written."""

    num_classes: int
    num_members: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    sizes: torch.Tensor


class Encoder:
    """The changes between a snapshot, which has moved on, and the old bits in a record."""

    def __init__(self, snapshot: torch.Tensor, record: Record, layout: Layout) -> None:
        self._snapshot, self._record = snapshot, record
        self._layout = {"SHIFT": layout.shift, "MASK": layout.mask}

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._snapshot.device)

    def survey(self, tiles: Tiles, contextual: bool) -> Surveyed:
        record = self._record
        firsts = self._new(tiles.num_tiles)
        if contextual:
            ranks.choose_first[(tiles.num_tiles,)](
                tiles.table, record.begins, record.starts, record.changes, firsts, **CHOOSE, **self._layout
            )
        digests = torch.zeros((tiles.num_tiles, 2), dtype=torch.int64, device=self._snapshot.device)
        totals = self._new(tiles.num_blocks, CONTEXT_CLASSES, dtype=torch.int64) if contextual else digests
        steps, positions = self._new(tiles.num_changes, dtype=torch.int16), self._new(tiles.num_changes)
        surveyed = Surveyed(steps, positions, firsts, totals, digests)
        ranks.survey[(tiles.num_blocks,)](
            tiles.table, tiles.block_tiles, tiles.first_block, record.begins, tiles.origin, record.starts,
            record.changes, self._snapshot, surveyed.firsts, surveyed.steps, surveyed.positions, surveyed.totals,
            surveyed.digests, BY_CLASS=contextual, **SURVEY, **self._layout,
        )  # fmt: skip
        return surveyed

    def gap_rows(self, tiles: Tiles, surveyed: Surveyed) -> Rows:
        nothing = surveyed.firsts
        return self._rows(tiles, GAP_CLASSES, surveyed.positions, surveyed.steps, nothing, nothing)

    def context_rows(self, tiles: Tiles, surveyed: Surveyed) -> Rows:
        record, firsts = self._record, surveyed.firsts
        counters = self._new(tiles.num_blocks, SUBS, 4, dtype=torch.int64)
        ranks.count_classes[(tiles.num_blocks,)](
            tiles.block_tiles, tiles.first_block, firsts, self._snapshot, counters, **COUNT, **self._layout
        )
        populations, num_members = self._new(2, tiles.num_tiles, CONTEXT_CLASSES)
        totals = surveyed.totals
        ranks.add_up_blocks[(tiles.num_tiles,)](
            tiles.table, tiles.first_block, counters, totals, populations, num_members, **ADD
        )
        members, sorted_steps = self._new(tiles.num_changes), self._new(tiles.num_changes, dtype=torch.int16)
        ranks.rank_changes[(tiles.num_blocks,)](
            tiles.table, tiles.block_tiles, tiles.first_block, firsts, record.begins, tiles.origin, record.starts,
            record.changes, surveyed.steps, self._snapshot, counters, totals, num_members, members, sorted_steps,
            **RANK, **self._layout,
        )  # fmt: skip
        # What comes next takes memory too.
        del counters
        return self._rows(tiles, CONTEXT_CLASSES, members, sorted_steps, num_members, populations)

    def _rows(
        self, tiles: Tiles, num_classes: int, members: torch.Tensor, steps: torch.Tensor, num_members: torch.Tensor,
        populations: torch.Tensor,
    ) -> Rows:  # fmt: skip
        values = self._new(2 * tiles.num_changes)
        rows = self._new(tiles.num_tiles, 3 * num_classes, kernels.ROW_FIELDS.value)
        sizes = self._new(tiles.num_tiles, dtype=torch.int64)
        begins = self._record.begins
        kernels.make_rows[(tiles.num_tiles, num_classes)](
            tiles.table, begins, tiles.origin, members, steps, num_members, populations, values, rows,
            C=num_classes, **MAKE[num_classes],
        )  # fmt: skip
        kernels.measure[(tiles.num_tiles,)](tiles.table, begins, rows, sizes, C=num_classes, ROWS=4 * num_classes)
        return Rows(num_classes, num_members, values, rows, sizes)

    def write(
        self, tiles: Tiles, surveyed: Surveyed, rows: Rows, offsets: torch.Tensor, out: torch.Tensor, reverse: bool
    ) -> None:
        """Write streams at offsets, in bytes, of an output of zeros with at least 8 bytes to spare."""
        kernels.write[(tiles.num_tiles, 3 * rows.num_classes + 1)](
            tiles.table, self._record.begins, tiles.origin, surveyed.steps, surveyed.firsts, rows.num_members,
            rows.values, rows.rows, offsets, out,
            REVERSE=reverse, C=rows.num_classes, ROWS=4 * rows.num_classes, **WRITE,
        )  # fmt: skip
