"""The state digest's sums. `docs/format.md` defines `mix`; every path must give the same two words."""

from typing import Any

import numpy as np
from numba import njit, uint64

from deltawire.kernels.cpu.compiled import kernel

POSITION = np.uint64(0x9E3779B97F4A7C15)
BITS = np.uint64(0xD6E8FEB86659FD93)
MIX = np.uint64(0xBF58476D1CE4E5B9)
LOW = np.uint64(0x94D049BB133111EB)
HIGH = np.uint64(0xA0761D6478BD642F)
LAST = np.uint64(0xE7037ED1A0B428DB)


@njit(inline="always")
def mix(seed: Any, position: Any, bits: Any) -> Any:
    x = seed + position * POSITION + bits * BITS
    x ^= x >> uint64(32)
    x *= MIX
    x ^= x >> uint64(29)
    low = x * LOW
    low ^= low >> uint64(32)
    high = x * HIGH
    high ^= high >> uint64(31)
    high *= LAST
    high ^= high >> uint64(33)
    return low, high


@kernel
def sum_runs(bits: Any, starts: Any, length: Any, seed: Any) -> Any:
    """The sum over runs of consecutive elements: run r holds elements starts[r] to starts[r] + length of its tensor."""
    low = high = uint64(0)
    for run in range(starts.size):
        start = uint64(starts[run])
        part = bits[run * length : (run + 1) * length]
        for i in range(part.size):
            a, b = mix(seed, start + uint64(i), uint64(part[i]))
            low += a
            high += b
    return low, high


@kernel
def sum_change(old: Any, new: Any, positions: Any, seed: Any) -> Any:
    """What the sum gains when the elements at `positions` go from `old` to `new` (all three of one length)."""
    low = high = uint64(0)
    for i in range(positions.size):
        at = uint64(positions[i])
        a, b = mix(seed, at, uint64(new[i]))
        c, d = mix(seed, at, uint64(old[i]))
        low += a - c
        high += b - d
    return low, high
