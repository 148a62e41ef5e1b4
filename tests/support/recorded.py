"""The recorded RL updates in `benchmarks/data`, and data made to look like them at any size."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from support import ROOT

DATA = ROOT / "benchmarks" / "data"
RECORDINGS = ("rl-lr1e-6", "rl-lr3e-6")

Bits = npt.NDArray[np.uint16]


class Step(NamedTuple):
    tensor: str
    number: int
    old: Bits
    new: Bits


def recorded_steps(recording: str, data: Path = DATA) -> Iterator[Step]:
    """Every tensor and step of a recording, as bf16 bits before and after."""
    with np.load(data / f"{recording}.npz") as file:
        for name in sorted({key.split("|")[0] for key in file.files}):
            old = file[f"{name}|base"].view(np.uint16)
            for number in range(8):
                new = old.copy()
                new[file[f"{name}|{number}|i"]] = file[f"{name}|{number}|v"].view(np.uint16)
                yield Step(name, number, old, new)
                old = new


def recorded_like(
    num_weights: int, *, density: float | None = 0.0115, step: float = 1e-6, seed: int = 0
) -> tuple[Bits, Bits]:
    """Weights and an update with the density and the step lengths of an RL step, in any size.

    Weights are normal, the update is what Adam makes of noisy gradients: normal, of size `step`, cast to bf16. A random
    gate holds it back until the asked density is met; None lets all of it through.
    """
    rng = np.random.default_rng(seed)
    old, new = np.empty(num_weights, np.uint16), np.empty(num_weights, np.uint16)
    chunk = 1 << 22
    gate = 1.0
    for start in range(0, num_weights, chunk):
        size = min(chunk, num_weights - start)
        master = rng.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        change = rng.standard_normal(size, dtype=np.float32) * np.float32(step)
        before, after = to_bf16(master), to_bf16(master + change)
        if start == 0 and density is not None:
            gate = density / np.mean(before != after)
        change[rng.random(size, dtype=np.float32) >= gate] = 0
        old[start : start + size], new[start : start + size] = before, to_bf16(master + change)
    return old, new


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Round to nearest even, as torch and every accelerator do."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
