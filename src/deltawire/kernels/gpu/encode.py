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

# Programs per launch parameter; all powers of two.
VECTOR, SLOTS, ROWS = 512, 64, 32


class Layout(NamedTuple):
    """Of a 16-bit dtype with sign and magnitude."""

    shift: int
    mask: int


@dataclass(frozen=True, slots=True)
class Record:
    """What a version changed: for each block where its changes begin; their positions in the chunk; their old bits."""

    begins: torch.Tensor
    positions: torch.Tensor
    olds: torch.Tensor


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
        torch.from_numpy(rows).to(device),
        torch.from_numpy(block_tiles).to(device),
        int(rows[0, 0]),
        origin,
        num_changes,
    )


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The changes of some tiles as steps, in the order of positions."""

    steps: torch.Tensor
    firsts: torch.Tensor
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

    def __init__(self, snapshot: torch.Tensor, record: Record, layout: Layout, chunk: int) -> None:
        self._snapshot, self._record, self._layout, self._chunk = snapshot, record, layout, chunk

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._snapshot.device)

    def survey(self, tiles: Tiles) -> Surveyed:
        record = self._record
        surveyed = Surveyed(
            self._new(tiles.num_changes, dtype=torch.int16),
            self._new(tiles.num_tiles),
            self._new(tiles.num_tiles, 2, dtype=torch.int64),
        )
        ranks.survey[(tiles.num_tiles,)](
            tiles.table, record.begins, tiles.origin, record.positions, record.olds, self._snapshot,
            surveyed.steps, surveyed.firsts, surveyed.digests,
            SHIFT=self._layout.shift, MASK=self._layout.mask, CHUNK=self._chunk, VECTOR=VECTOR,
        )  # fmt: skip
        return surveyed

    def gap_rows(self, tiles: Tiles, surveyed: Surveyed) -> Rows:
        nothing = surveyed.firsts
        return self._rows(tiles, GAP_CLASSES, self._record.positions, surveyed.steps, nothing, nothing)

    def context_rows(self, tiles: Tiles, surveyed: Surveyed) -> Rows:
        record, layout = self._record, {"SHIFT": self._layout.shift, "MASK": self._layout.mask}
        in_blocks, orders, sorted_steps = self._new(3, tiles.num_changes, dtype=torch.int16)
        totals = self._new(tiles.num_blocks, CONTEXT_CLASSES, dtype=torch.int64)
        populations, num_members = self._new(2, tiles.num_tiles, CONTEXT_CLASSES)
        ranks.rank_in_blocks[(tiles.num_blocks,)](
            tiles.block_tiles, tiles.first_block, surveyed.firsts, record.begins, tiles.origin, record.positions,
            record.olds, self._snapshot, in_blocks, orders, totals, SLOTS=SLOTS, **layout,
        )  # fmt: skip
        ranks.add_up_blocks[(tiles.num_tiles,)](
            tiles.table, tiles.first_block, totals, populations, num_members, ROWS=ROWS
        )
        members = self._new(tiles.num_changes)
        ranks.sort_by_class[(tiles.num_tiles,)](
            tiles.table, tiles.first_block, record.begins, tiles.origin, record.positions, record.olds, surveyed.steps,
            surveyed.firsts, in_blocks, orders, totals, num_members, members, sorted_steps,
            CHUNK=self._chunk, VECTOR=VECTOR, **layout,
        )  # fmt: skip
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
            C=num_classes, CHUNK=self._chunk, VECTOR=VECTOR,
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
            REVERSE=reverse, C=rows.num_classes, ROWS=4 * rows.num_classes, VECTOR=VECTOR,
        )  # fmt: skip
