"""A change as a step: how far the new bits lie from the old ones on the ordered line of all bit patterns.

For floating point the line runs from the most negative pattern to the most positive one, -0.0 just below +0.0, so one
step is one unit in the last place; for integers it is the bit pattern itself. Steps wrap around, so that every pair of
patterns has one, and it fits the element's own width.

There are no branches on signs: they are coin tosses, and a wrong guess costs more than the rest together.
"""

from typing import Any

import numpy as np
from numba import njit, uint64

from deltawire.kernels.cpu.compiled import kernel

ZERO, ONE, LAST = np.uint64(0), np.uint64(1), np.uint64(63)


@njit(inline="always")
def to_line(bits: Any, width: Any, signed: Any) -> Any:
    """A bit pattern's place on the line; `signed` means sign and magnitude."""
    if not signed:
        return bits
    top = ONE << (width - ONE)
    negative = ZERO - (bits >> (width - ONE))
    return bits ^ ((negative & (top - ONE)) | top)


@njit(inline="always")
def from_line(place: Any, width: Any, signed: Any) -> Any:
    if not signed:
        return place
    top = ONE << (width - ONE)
    negative = (place >> (width - ONE)) - ONE
    return place ^ ((negative & (top - ONE)) | top)


@njit(inline="always")
def all_bits(width: Any) -> Any:
    return ~ZERO >> (uint64(64) - width)


@kernel
def steps_between(before: Any, after: Any, width: Any, signed: Any) -> Any:
    """For each change: is the step downwards, and its length less one."""
    downwards = np.empty(before.size, np.uint8)
    extra = np.empty(before.size, np.uint64)
    full = all_bits(width)
    for i in range(before.size):
        step = to_line(uint64(after[i]), width, signed) - to_line(uint64(before[i]), width, signed)
        down = (step >> (width - ONE)) & ONE
        downwards[i] = down
        extra[i] = (((step ^ (ZERO - down)) + down) & full) - ONE
    return downwards, extra


@njit(inline="always")
def take_step(bits: Any, down: Any, extra: Any, width: Any, signed: Any) -> Any:
    """The new bits, from the old ones and a step."""
    length = extra + ONE
    place = (to_line(bits, width, signed) + ((length ^ (ZERO - down)) + down)) & all_bits(width)
    return from_line(place, width, signed)
