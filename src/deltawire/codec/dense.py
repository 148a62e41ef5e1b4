"""`dense`: all elements of the box, uncompressed. For tensors that changed nearly everywhere."""

from deltawire.codec.encoding import Arrays, Known, take
from deltawire.tensors.dtypes import Bits, DType, Elements
from deltawire.workers import Workers


class Dense:
    name = "dense"
    needs_mirror = False

    def parts(self, dtype: DType, num_elements: int) -> dict[str, str]:
        return {"dense": dtype.name}

    def size_bytes(self, num_elements: int, num_changed: int, dtype: DType) -> int:
        return num_elements * dtype.itemsize

    def encode(
        self, old: Elements, new: Elements, dtype: DType, workers: Workers, known: Known | None = None
    ) -> Arrays:
        return {"dense": new[:]}

    def decode(
        self, arrays: Arrays, old: Bits | None, num_elements: int, dtype: DType, num_changed: int, workers: Workers
    ) -> tuple[None, Bits]:
        return None, take(arrays, "dense", num_elements)
