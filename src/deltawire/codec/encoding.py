"""The interface of an encoding: it turns a patch into a few flat arrays, each of which becomes a tensor of the file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from deltawire.errors import CorruptObject
from deltawire.tensors.boxes import Positions
from deltawire.tensors.dtypes import Bits, DType, Elements
from deltawire.workers import Workers

# Flat and unsigned, whatever their dtype in the file.
Arrays = Mapping[str, Bits]

# Positions in a range of a box, from its start.
Offsets = npt.NDArray[np.uint32]

# The changes in a range of a box: where they are in it, ascending, and the bits before and after of each.
Changes = tuple[Offsets, Bits, Bits]

# Called for each range of a box that has changes: its start, and the changes.
Watch = Callable[[int, Offsets, Bits, Bits], None]

# Ascending positions and their new bits; positions are None if the bits cover the whole box.
Decoded = tuple[Positions | None, Bits]


Result = TypeVar("Result")


class Known(Protocol):
    """What an earlier comparison has kept of a box."""

    def changes(self, start: int, stop: int) -> Changes | None:
        """The changes in a range; None if they were not kept."""

    def scan(self, start: int, stop: int, work: Callable[[Bits], Result]) -> Result:
        """What `work` makes of the bits of a range, which are those before or after at each change.

        It may be called again, if others have changed the bits meanwhile.
        """


@dataclass(frozen=True, slots=True)
class Encoded:
    """One box of a tensor, encoded."""

    encoding: str
    num_changed: int
    arrays: Arrays


class Encoding(Protocol):
    """Encodes one box of a tensor: `old` and `new` are its flat bits, and positions are relative to the box."""

    name: str
    needs_mirror: bool
    """Decoding needs the old bits of the whole box."""

    def parts(self, dtype: DType, num_elements: int) -> Mapping[str, str]:
        """The names of the arrays, with the safetensors dtype of each."""

    def encode(self, old: Elements, new: Elements, dtype: DType, workers: Workers, known: Known | None) -> Arrays: ...

    def decode(
        self, encoded: Encoded, old: Bits | None, num_elements: int, dtype: DType, workers: Workers
    ) -> Decoded: ...


def changes(old: Elements, new: Elements, start: int, stop: int, known: Known | None) -> Changes:
    """The changes in a range of a box; what is known is not read."""
    from deltawire.kernels.cpu.blocks import changed_positions
    from deltawire.kernels.cpu.elements import elements_at

    found = None if known is None else known.changes(start, stop)
    if found is not None:
        return found
    before, after = old[start:stop], new[start:stop]
    positions = changed_positions(before, after)
    return positions, elements_at(before, positions), elements_at(after, positions)


def take(encoded: Encoded, part: str, length: int) -> Bits:
    array = encoded.arrays[part]
    if len(array) != length:
        raise CorruptObject(f"the part {part!r} holds {len(array)} items, not {length}")
    return array
