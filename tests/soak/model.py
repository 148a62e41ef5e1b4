"""Weights that anyone can recompute: what they are at a step follows from a seed, without the steps before."""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch

SHAPES = {
    "embed": (400, 128),
    **{f"layers.{name}": (192, 128) for name in ("down", "gate", "up")},
    "norm": (128,),
}
# So that an anchor has a file for each tensor, and a delta several parts.
MAX_FILE_BYTES = 600
DTYPES = {name: "F32" if name == "norm" else "BF16" for name in SHAPES}
# Every element changes once in so many steps: one in a hundred at each.
PERIOD = 100


class _Course(NamedTuple):
    """How a tensor's elements move: each by its own small increment of the bits, whenever its turn comes."""

    start: np.ndarray
    turn: np.ndarray
    increment: np.ndarray


@lru_cache(maxsize=64)
def _course(seed: int, name: str) -> _Course:
    rng = np.random.default_rng([seed, *name.encode()])
    size = int(np.prod(SHAPES[name]))
    values = rng.standard_normal(size, np.float32).view(np.uint32)
    start = values if DTYPES[name] == "F32" else values >> 16
    increment = rng.integers(1, 4, size) * rng.choice([-1, 1], size)
    return _Course(start.astype(np.int64), rng.integers(1, PERIOD + 1, size), increment)


def tensor(seed: int, step: int, name: str) -> np.ndarray:
    course = _course(seed, name)
    bits = course.start + (step + PERIOD - course.turn) // PERIOD * course.increment
    return bits.astype(np.uint32 if DTYPES[name] == "F32" else np.uint16).reshape(SHAPES[name])


def weights(seed: int, step: int) -> dict[str, np.ndarray]:
    """All tensors, as bits."""
    return {name: tensor(seed, step, name) for name in SHAPES}


def advance(held: Mapping[str, np.ndarray], seed: int, step: int) -> None:
    """Change weights in place to those of a step, as an optimizer would."""
    for name, array in held.items():
        array[...] = tensor(seed, step, name)


def fingerprint(held: Mapping[str, Any]) -> str:
    """SHA-256 of all names and bits, by none of deltawire's own means; arrays, torch's tensors or deltawire's."""
    digest = sha256()
    for name in sorted(held):
        bits = getattr(held[name], "bits", held[name])
        if hasattr(bits, "detach"):
            bits = bits.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {bits.nbytes}\n".encode())
        digest.update(np.ascontiguousarray(bits).view(np.uint8).data)
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def expected(seed: int, step: int) -> str:
    """The fingerprint that the weights of a step must have."""
    return fingerprint(weights(seed, step))
