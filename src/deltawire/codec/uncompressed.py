"""`coo` and `dense`: the encodings without compression, which decode without the old weights."""

import numpy as np

from deltawire.codec.encoding import Arrays, Decoded, Encoded, Known, changes, take
from deltawire.errors import CorruptObject
from deltawire.tensors.dtypes import DTYPES, Bits, DType, Elements
from deltawire.workers import Workers

# The kernel has 32-bit positions, so large boxes are processed in pieces.
_PIECE = 1 << 24


class Coo:
    """Positions and values, the layout of the TRL post."""

    name = "coo"
    needs_mirror = False

    def parts(self, dtype: DType, num_elements: int) -> dict[str, str]:
        return {"indices": "I32" if num_elements <= 1 << 31 else "I64", "values": dtype.name}

    def size_bytes(self, num_elements: int, num_changed: int, dtype: DType) -> int:
        return num_changed * sum(DTYPES[part].itemsize for part in self.parts(dtype, num_elements).values())

    def encode(self, old: Elements, new: Elements, dtype: DType, workers: Workers, known: Known | None) -> Arrays:
        index = DTYPES[self.parts(dtype, len(old))["indices"]].unsigned

        def find(start: int) -> tuple[Bits, Bits]:
            positions, _, after = changes(old, new, start, min(start + _PIECE, len(old)), known)
            return positions.astype(index) + index.type(start), after

        indices, values = zip(*workers.map(find, range(0, len(old), _PIECE)), strict=True)
        return {"indices": np.concatenate(indices), "values": np.concatenate(values)}

    def decode(self, encoded: Encoded, old: Bits | None, num_elements: int, dtype: DType, workers: Workers) -> Decoded:
        indices = take(encoded, "indices", encoded.num_changed).astype(np.int64)
        values = take(encoded, "values", encoded.num_changed)
        # Compared, not subtracted: differences of 64-bit positions wrap around.
        if len(indices) and (indices[0] < 0 or indices[-1] >= num_elements or (indices[1:] <= indices[:-1]).any()):
            raise CorruptObject(f"positions are out of range or out of order in a box of {num_elements} elements")
        return indices, values


class Dense:
    """All elements of the box. For tensors that changed nearly everywhere."""

    name = "dense"
    needs_mirror = False

    def parts(self, dtype: DType, num_elements: int) -> dict[str, str]:
        return {"dense": dtype.name}

    def size_bytes(self, num_elements: int, num_changed: int, dtype: DType) -> int:
        return num_elements * dtype.itemsize

    def encode(self, old: Elements, new: Elements, dtype: DType, workers: Workers, known: Known | None) -> Arrays:
        return {"dense": new[:]}

    def decode(self, encoded: Encoded, old: Bits | None, num_elements: int, dtype: DType, workers: Workers) -> Decoded:
        return None, take(encoded, "dense", num_elements)
