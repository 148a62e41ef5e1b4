"""Boxes: rectangular parts of tensors, such as a shard or a whole tensor."""

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor, such as a shard; a whole tensor is a box too.

    Attributes:
        full: The shape of the whole tensor.
        offset: The index of the first element of the box, per dimension.
        shape: The size of the box, per dimension.

    Raises:
        ValueError: The box does not fit in a tensor of shape `full`.
    """

    full: Shape
    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        fits = len(self.full) == len(self.offset) == len(self.shape) and all(
            start >= 0 and size >= 0 and start + size <= whole
            for whole, start, size in zip(self.full, self.offset, self.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"box {self.offset} + {self.shape} does not fit in a tensor of shape {self.full}")

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
        """The box that covers a whole tensor of this shape."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.full

    @property
    def place(self) -> str:
        """Offset and shape as text for messages."""
        return "whole" if self.is_whole else f"from {list(self.offset)} {list(self.shape)}"

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def runs(self) -> tuple[Positions, int]:
        """The box as runs of consecutive elements, in row-major order: the start of each, and their common length."""
        if self.num_elements == 0:
            return np.empty(0, np.int64), 0
        # Trailing dimensions that the box covers fully, and the one before them, are consecutive in memory.
        inner = len(self.full)
        while inner > 0 and self.shape[inner - 1] == self.full[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        starts = np.zeros(1, np.int64)
        for axis in range(inner):
            stride = prod(self.full[axis + 1 :])
            along = (np.arange(self.shape[axis], dtype=np.int64) + self.offset[axis]) * stride
            starts = (starts[:, None] + along).reshape(-1)
        if inner < len(self.full):
            starts = starts + self.offset[inner] * prod(self.full[inner + 1 :])
        return starts, prod(self.shape[inner:])

    def to_tensor(self, positions: Positions) -> Positions:
        """Convert positions in the box to positions in the tensor (both flat, row-major)."""
        if self.is_whole:
            return positions
        starts, length = self.runs()
        if len(starts) == 1:
            return positions + int(starts[0])
        absolute: Positions = starts[positions // length] + positions % length
        return absolute

    def from_tensor(self, positions: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """Convert positions in the tensor to positions in the box: those inside it, and a mask of which ones are."""
        inside = np.ones(len(positions), bool)
        local = np.zeros(len(positions), np.int64)
        rest = positions
        for axis in range(len(self.full)):
            stride = prod(self.full[axis + 1 :])
            index = rest // stride - self.offset[axis]
            rest = rest % stride
            inside &= (index >= 0) & (index < self.shape[axis])
            local = local * self.shape[axis] + index
        return local[inside], inside

    def intersection(self, other: "Box") -> "Box | None":
        """The overlap of two boxes of one tensor; None if there is none."""
        starts = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stops = (min(a.stop, b.stop) for a, b in zip(self.slices, other.slices, strict=True))
        shape = tuple(max(stop - start, 0) for start, stop in zip(starts, stops, strict=True))
        return Box(self.full, starts, shape) if prod(shape) else None

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """The slices of this box in an array that holds the box `outer`."""
        begins = (start - base for start, base in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.shape, strict=True))
