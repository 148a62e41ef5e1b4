"""Changes of bf16 matrices that move scales, for the conformance suite."""

from collections.abc import Callable
from typing import Any

import numpy as np


def _rows(bits: Any, rng: np.random.Generator) -> Any:
    """Some rows, which are groups or parts of them; none of a matrix is left out if there are few."""
    return rng.random(len(bits)) < max(0.2, 2 / len(bits))


def _spread(bits: Any, rng: np.random.Generator, value: int) -> None:
    """A value in some rows, with any sign."""
    for row in np.flatnonzero(_rows(bits, rng)):
        bits[row, rng.integers(bits.shape[1])] = value | rng.integers(2) << 15


def _fill(bits: Any, rng: np.random.Generator, low: int, high: int) -> None:
    chosen = _rows(bits, rng)
    bits[chosen] = rng.integers(low, high, (int(chosen.sum()), bits.shape[1])) | (
        rng.integers(0, 2, (int(chosen.sum()), bits.shape[1])) << 15
    )


def _shrink(bits: Any, rng: np.random.Generator) -> None:
    """The largest element of each row is halved."""
    largest = (bits & 0x7FFF).argmax(1)
    rows = np.flatnonzero((bits & 0x7FFF).max(1) >= 0x0100)
    bits[rows, largest[rows]] -= 0x80


# Bits of bf16: 2.0 and 100.0, subnormals, numbers from 0.01 to 0.1.
EDITS: dict[str, Callable[[Any, np.random.Generator], None]] = {
    "largest elements came": lambda bits, rng: _spread(bits, rng, 0x4000),
    "larger ones came": lambda bits, rng: _spread(bits, rng, 0x42C8),
    "all largest ones were halved": _shrink,
    "rows became zero": lambda bits, rng: _fill(bits, rng, 0, 1),
    "rows became subnormal": lambda bits, rng: _fill(bits, rng, 0, 0x80),
    "rows were filled": lambda bits, rng: _fill(bits, rng, 0x3C24, 0x3DCD),
    "all became zero": lambda bits, rng: bits.fill(0),
    "all were filled": lambda bits, rng: bits.__setitem__(slice(None), rng.integers(0x3C24, 0x3DCD, bits.shape)),
}
