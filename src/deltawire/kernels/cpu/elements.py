"""Elements at some positions, read and written without the GIL, which numpy's own indexing holds."""

from typing import Any

import numpy as np

from deltawire.kernels.cpu.compiled import kernel
from deltawire.kernels.cpu.simd import prefetch

# How many positions ahead memory is asked for.
AHEAD = 32


@kernel
def elements_at(bits: Any, positions: Any) -> Any:
    """The elements at some positions."""
    found = np.empty(positions.size, bits.dtype)
    for i in range(positions.size):
        if i + AHEAD < positions.size:
            prefetch(bits, np.intp(positions[i + AHEAD]))
        at = np.int64(positions[i])
        if at < 0 or at >= bits.size:
            raise IndexError
        found[i] = bits[at]
    return found


@kernel
def put_elements(bits: Any, positions: Any, values: Any) -> None:
    """Set the elements at some positions."""
    for i in range(positions.size):
        at = np.int64(positions[i])
        if at < 0 or at >= bits.size:
            raise IndexError
        bits[at] = values[i]
