"""Where the elements of checkpoint tensors live in the memory of one process of an engine.

Engines fuse tensors, slice them over processes and pad them, but element by element all of that is copying. A piece is
one such copy: a grid of rows and columns with fixed strides in the tensor, and fixed strides in a storage.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from deltawire.errors import EngineRejected, UnknownParameter
from deltawire.tensors.boxes import Positions
from deltawire.tensors.digest import Digest, tensor_key
from deltawire.tensors.dtypes import Bits, dtype_named
from deltawire.tensors.weights import TensorSpec

# An element's number in a piece has 32 bits.
MOST_ELEMENTS = 1 << 31
MOST_PIECES = 1 << 16

Dim = tuple[int, int, int]
"""A size, a stride, and a stride elsewhere."""
StridedView = tuple[int, Sequence[int]]
"""An offset, and a stride for each dimension."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Element (r, c) is the tensor's element `start + r * stride + c`, and the storage's at `place`, which has an
    offset and a step for each row and for each column.
    """

    tensor: str
    storage: str
    rows: int
    columns: int
    start: int
    stride: int
    place: tuple[int, int, int]

    @property
    def num_elements(self) -> int:
        return self.rows * self.columns

    @property
    def is_one_run(self) -> bool:
        """Whether the elements follow each other in the tensor."""
        return self.rows == 1 or self.stride == self.columns

    @property
    def source(self) -> tuple[int, ...]:
        """Which elements of the tensor these are; equal for copies in other processes."""
        return self.rows, self.columns, self.start, self.stride

    def as_list(self) -> list[Any]:
        return [self.tensor, self.storage, self.rows, self.columns, self.start, self.stride, list(self.place)]

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> "Piece":
        tensor, storage, rows, columns, start, stride, place = fields
        return cls(tensor, storage, rows, columns, start, stride, tuple(place))


Numbers = npt.NDArray[np.uint32]
Shared = tuple[Sequence[tuple[int, int]], Numbers, Bits, Bits]
"""What changes in a piece: ranks that have it and its number there, elements' numbers, their old and new bits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces of a tensor that lie side by side in each of its rows."""

    rows: int
    stride: int
    edges: npt.NDArray[np.int64]
    """Where each begins and ends in the first row."""
    holders: Sequence[Sequence[tuple[int, int]]]
    """Ranks that have a piece, and its number there."""

    def divide(self, positions: Positions, numbers: Numbers, old: Bits, new: Bits) -> Iterator[Shared]:
        """Changes of the tensor by piece, at ascending positions; `numbers`, 32 bits of these, are given away."""
        if self.rows == 1:
            spans = positions.searchsorted(self.edges).tolist()
            # Both wrap around, and their difference is right.
            origins = self.edges[:, 0].astype(np.uint32)
            for holders, origin, (first, last) in zip(self.holders, origins, spans, strict=True):
                if first < last:
                    numbers[first:last] -= origin
                    yield holders, numbers[first:last], old[first:last], new[first:last]
            return
        from deltawire.kernels.cpu.live import divide

        end = self.edges[-1, 1] + (self.rows - 1) * self.stride
        inside = slice(*positions.searchsorted((self.edges[0, 0], end)).tolist())
        # Kernels are compiled for arrays that can be written.
        given = [np.require(each[inside], requirements=("C", "W")) for each in (positions, old, new)]
        room = len(given[0]) + 1
        ends = np.arange(0, room * len(self.edges), room)
        starts = ends.tolist()
        found = [np.empty(room * len(starts), kind) for kind in (np.uint32, old.dtype, new.dtype)]
        divide(*given, self.edges, self.stride, ends, *found)
        for holders, first, last in zip(self.holders, starts, ends.tolist(), strict=True):
            if first < last:
                # Most of the room was not needed.
                index, before, after = (each[first:last].copy() for each in found)
                yield holders, index, before, after


def cuts(holders: Mapping[tuple[Any, ...], Sequence[tuple[int, int]]]) -> dict[str, list[Cut]]:
    """For each tensor the pieces side by side, from who holds what: by tensor and `Piece.source`."""
    same: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for (name, rows, columns, start, stride), own in holders.items():
        is_one_run = rows == 1 or stride == columns
        key = (name, 1, 0, start, rows * columns) if is_one_run else (name, rows, stride, start, columns)
        same.setdefault(key, []).extend(own)
    groups: dict[tuple[Any, ...], list[tuple[tuple[int, int], Sequence[tuple[int, int]]]]] = {}
    kind: tuple[Any, ...] = ()
    base = end = number = 0
    for (name, rows, stride, start, columns), alike in sorted(same.items()):
        if kind != (name, rows, stride) or start < end or (stride and start + columns > base + stride):
            kind, base, number = (name, rows, stride), start, number + 1
        end = start + columns
        groups.setdefault((*kind, number), []).append(((start, end), alike))
    found: dict[str, list[Cut]] = {}
    for (name, rows, stride, _), group in groups.items():
        edges, own = zip(*group, strict=True)
        found.setdefault(name, []).append(Cut(rows, stride, np.array(edges), own))
    return found


def pieces_of_copy(
    tensor: str, storage: str, shape: Sequence[int], source: StridedView, place: StridedView
) -> list[Piece]:
    """A copy between two views of one shape as pieces."""
    if prod(shape) == 0:
        return []
    start, offset = source[0], place[0]
    # Each dimension's size, stride in the tensor and stride in the storage; the tensor's order decides.
    dims = [dim for dim in zip(shape, source[1], place[1], strict=True) if dim[0] > 1]
    dims.sort(key=lambda dim: -dim[1])
    merged = merged_dims(dims)
    if not merged or merged[-1][1] != 1:
        merged.append((1, 1, 1))
    columns, _, column_step = merged.pop()
    rows, stride, row_step = merged.pop() if merged else (1, columns, columns * column_step)
    if _overlap([(size, near) for size, near, _ in dims]) or _overlap([(size, far) for size, _, far in dims]):
        raise EngineRejected(f"{tensor} is not copied into {storage} element by element", tensor=tensor)
    if columns > MOST_ELEMENTS:
        # Each row in several pieces.
        parts = range(0, columns, MOST_ELEMENTS)
        return [
            piece
            for part in parts
            for piece in pieces_of_copy(
                tensor, storage, [*(size for size, _, _ in merged), rows, min(MOST_ELEMENTS, columns - part)],
                (start + part, [*(near for _, near, _ in merged), stride, 1]),
                (offset + part * column_step, [*(far for _, _, far in merged), row_step, column_step]),
            )
        ]  # fmt: skip
    most_rows = max(MOST_ELEMENTS // columns, 1)
    outer = [range(size) for size, _, _ in merged]
    if prod(len(each) for each in outer) > MOST_PIECES:
        raise EngineRejected(f"{tensor} is scattered over {storage} in too many pieces", tensor=tensor)
    pieces = []
    for at in product(*outer):
        near = start + sum(i * dim[1] for i, dim in zip(at, merged, strict=True))
        far = offset + sum(i * dim[2] for i, dim in zip(at, merged, strict=True))
        for row in range(0, rows, most_rows):
            at_row = far + row * row_step, row_step, column_step
            number = min(most_rows, rows - row)
            pieces.append(Piece(tensor, storage, number, columns, near + row * stride, stride, at_row))
    return pieces


def merged_dims(dims: Iterable[Dim]) -> list[Dim]:
    """Dimensions without those that go on where the next one ends."""
    merged: list[Dim] = []
    for size, near, far in dims:
        if merged and merged[-1][1:] == (near * size, far * size):
            merged[-1] = merged[-1][0] * size, near, far
        else:
            merged.append((size, near, far))
    return merged


def _overlap(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether dimensions, each a size and a stride, may address one element twice."""
    end = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride < end:
            return True
        end += (size - 1) * stride
    return False


def each_once(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces of one process without duplicates. Raises if two tensors share memory."""
    found: dict[tuple[Any, ...], Piece] = {}
    for piece in pieces:
        first = found.setdefault((piece.storage, piece.rows, piece.columns, piece.place), piece)
        if (first.tensor, first.source) != (piece.tensor, piece.source):
            raise EngineRejected(
                f"{first.tensor} and {piece.tensor} share the memory of {piece.storage}: publish them as tied, under "
                "one name",
                tensor=piece.tensor,
            )
    return list(found.values())


class Layout:
    """The pieces of all processes of an engine, and which of them count for the digest: one of each set of copies.

    `left_out` are tensors that the engine does not use.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], ranks: Iterable[Sequence[Piece]], left_out: Collection[str] = ()
    ) -> None:
        self.left_out = frozenset(left_out)
        self.specs = specs = {name: each for name, each in specs.items() if name not in self.left_out}
        keys = (tensor_key(name, dtype_named(dtype), shape) for name, (dtype, shape) in specs.items())
        self._constant = sum((key.constant for key in keys), Digest())
        self.ranks = [list(pieces) for pieces in ranks]
        self.counted: list[list[int]] = [[] for _ in self.ranks]
        found = dict.fromkeys(specs, 0)
        holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for rank, pieces in enumerate(self.ranks):
            for number, piece in enumerate(pieces):
                alike = holders.setdefault((piece.tensor, *piece.source), [])
                alike.append((rank, number))
                if len(alike) == 1:
                    self.counted[rank].append(number)
                    found[piece.tensor] += piece.num_elements
        self.cuts = cuts(holders)
        self.copies = self._turns([alike for alike in holders.values() if len(alike) > 1])
        """For pieces that several processes hold: turns, each with one copy of every such piece."""
        for name, (_, shape) in specs.items():
            if found[name] != prod(shape):
                raise UnknownParameter(
                    f"the engine has a place for {found[name]:,} of the {prod(shape):,} elements of {name}: "
                    "it does not load this tensor, or changes it while loading",
                    tensor=name,
                )

    @property
    def is_divided(self) -> bool:
        """Whether some process holds a tensor only in part, or in several parts."""
        sizes = {name: prod(shape) for name, (_, shape) in self.specs.items()}
        return any(piece.num_elements != sizes[piece.tensor] for pieces in self.ranks for piece in pieces)

    def _turns(self, holders: list[list[tuple[int, int]]]) -> list[list[list[int]]]:
        turns = []
        for turn in range(max(map(len, holders), default=0)):
            numbers: list[list[int]] = [[] for _ in self.ranks]
            for alike in holders:
                rank, number = alike[turn % len(alike)]
                numbers[rank].append(number)
            turns.append(numbers)
        return turns

    def measured(self, rank: int) -> list[list[int]]:
        """The pieces that a process has to hash: those that count, and its share of the copies in each turn."""
        return [self.counted[rank], *(numbers[rank] for numbers in self.copies)]

    def alike(self, sums: Iterable[Sequence[str]]) -> bool:
        """Whether copies have the same bits, from the sums of each process for each turn."""
        turns = zip(*([Digest.parse(each) for each in own] for own in sums), strict=True)
        return len({sum(turn, Digest()) for turn in turns}) <= 1

    def partial(self, digest: Digest) -> str:
        """The sum of the processes that gives a digest."""
        return str(digest - self._constant)

    def total(self, partials: Iterable[Digest]) -> Digest:
        """The digest of the weights, from the sums of each process over the pieces that count."""
        return sum(partials, self._constant)
