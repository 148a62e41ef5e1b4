"""What an encoding is: a way to turn a patch into a few flat arrays, each of which becomes a tensor of the file."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltawire.boxes import Positions
from deltawire.dtypes import Bits, DType
from deltawire.errors import CorruptObject
from deltawire.workers import Workers

# Flat and unsigned, whatever dtype the file gives them.
Arrays = Mapping[str, Bits]

# Called for each stretch of a box that holds changes: its start, the changed positions in it, its old and new bits.
Watch = Callable[[int, npt.NDArray[np.uint32], Bits, Bits], None]


class Encoding(Protocol):
    """Old and new are the flat bits of one box of a tensor; positions count within the box."""

    name: str
    needs_mirror: bool
    """Decoding needs the old bits of the whole box."""

    def parts(self, dtype: DType, num_elements: int) -> Mapping[str, str]:
        """The names of the arrays, and what safetensors calls the dtype of each."""

    def encode(self, old: Bits, new: Bits, dtype: DType, workers: Workers) -> Arrays: ...

    def decode(
        self, arrays: Arrays, old: Bits | None, num_elements: int, dtype: DType, num_changed: int, workers: Workers
    ) -> tuple[Positions | None, Bits]:
        """Positions, ascending, and new bits; no positions where the bits are those of the whole box."""


def take(arrays: Arrays, part: str, length: int) -> Bits:
    """One array, checked for its length."""
    array = arrays[part]
    if len(array) != length:
        raise CorruptObject(f"the part {part!r} holds {len(array)} items, expected {length}")
    return array
