"""What a run will look like, and the sizes and times of its parts, fitted to what this project has measured.

`measured.json` has every constant with the file in `benchmarks/results` that it is from; `benchmarks/estimate_data.py`
makes it. Seconds are of one version, bytes are of one transfer.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

DAY = 86_400.0
MBIT = 1e6 / 8  # bytes
MACHINES = ("gpu", "cpu")
MOST_WEIGHTS, MOST_REPLICAS = 1e14, 100_000
# What can be estimated: far more than any run needs, and little enough to simulate, and to add to a clock.
LIMITS: Mapping[str, tuple[float, float]] = {
    "steps_a_day": (0.01, 864_000), "trainer_mbits": (0.1, 1_000_000_000), "site_mbits": (0.1, 1_000_000_000),
    "replica_mbits": (0.1, 1_000_000_000), "round_trip_ms": (0, 60_000), "poll_seconds": (0.01, 86_400),
    "joins_a_day": (0, 1_000_000), "keep_days": (0, 36_500),
}  # fmt: skip
# AdamW's first beta, in every run that was measured.
MOMENTUM = 0.9


@cache
def measured(column: str = "value") -> dict[str, Any]:
    """The constants by name; the column `from` has the file that each is from."""
    data = json.loads((Path(__file__).parent / "measured.json").read_text())
    return {name: each[column] for name, each in data.items()}


def density_of(learning_rate: float) -> float:
    """The share of bf16 weights that a step of Adam changes at a learning rate."""
    fit = measured()["density_of_lr"]
    return float(min(fit["at_1e-6"] * (learning_rate / 1e-6) ** fit["power"], 1.0))


def at_density(column: str, density: float, rows: Sequence[Mapping[str, float]] | None = None) -> float:
    """A column of density.csv at any density: straight lines over the logarithm of the density."""
    rows = rows or measured()["codec"]
    density = min(max(density, rows[0]["density"]), rows[-1]["density"])
    low, high = next(pair for pair in pairwise(rows) if density <= pair[1]["density"])
    part = math.log(density / low["density"]) / math.log(high["density"] / low["density"])
    return float(low[column] + part * (high[column] - low[column]))


def moved(span: int) -> float:
    """How far weights are after some steps, in single ones, under noisy gradients: on and on at first, then astray.

    The standard deviation of a sum of steps, two of which correlate by the momentum to the power of their distance.
    """
    return math.sqrt(span + 2 * MOMENTUM / (1 - MOMENTUM) * (span - (1 - MOMENTUM**span) / (1 - MOMENTUM)))


def density_over(span: int, density: float, power: float | None = None) -> float:
    """The share of weights that differ after some steps: its odds are a power of how far weights are."""
    if density == 1:
        return 1.0
    odds = density / (1 - density) * moved(span) ** (power or measured()["span_power"])
    return float(odds / (1 + odds))


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, before it starts.

    Attributes:
        weights: How many the model has, in bf16.
        density: The share of them that changes in a step.
        steps_a_day: How many versions are published.
        sites: Places with replicas, each behind a line of its own.
        replicas: Replicas of all sites together.
        trainer_mbits: The trainer's line to the store.
        site_mbits: A site's line to the store.
        replica_mbits: What a site's cache serves, to all its replicas together.
        round_trip_ms: From a replica or the trainer to the store.
        poll_seconds: How often replicas look for a version that is due.
        joins_a_day: How many replicas start with nothing, all sites together: new ones, and restarts.
        machine: `gpu`: models on H200s, in parts of at most 8.19 B weights; `cpu`: two cores each.
        num_tensors: Tensors of the model; each costs a header in every delta.
        keep_days: How long objects are kept in the store.
    """

    weights: float
    density: float
    steps_a_day: float
    sites: int = 1
    replicas: int = 8
    trainer_mbits: float = 1000.0
    site_mbits: float = 1000.0
    replica_mbits: float = 10_000.0
    round_trip_ms: float = 50.0
    poll_seconds: float = 1.0
    joins_a_day: float = 0.0
    machine: str = "gpu"
    num_tensors: int = 400
    keep_days: float = 30.0

    def __post_init__(self) -> None:
        for name in ("weights", "steps_a_day", "trainer_mbits", "site_mbits", "replica_mbits", "poll_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number, not {getattr(self, name)}")
        for name in ("round_trip_ms", "joins_a_day", "keep_days", "num_tensors"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be a share between 0 and 1, not {self.density}")
        if self.weights > MOST_WEIGHTS or self.steps_a_day > DAY * 10:
            raise ValueError("too large to estimate: the limits are 1e14 weights and ten steps a second")
        if not 1 <= self.sites <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"replicas must be at least as many as sites, and at most {MOST_REPLICAS:,}")
        if self.machine not in MACHINES:
            raise ValueError(f"machine must be gpu or cpu, not {self.machine!r}")

    @property
    def step_seconds(self) -> float:
        return DAY / self.steps_a_day

    @property
    def anchor_bytes(self) -> float:
        return float(2 * self.weights + measured()["tensor_bytes"] * self.num_tensors)

    def delta_bytes(self, span: int = 1) -> float:
        """A delta over some steps: many weights that change twice change back, or no further."""
        changed = density_over(span, self.density)
        headers = measured()["tensor_bytes"] * self.num_tensors
        return float(self.weights * changed * at_density("bytes_per_change", changed) + headers)

    @property
    def _device_weights(self) -> float:
        """Weights on one device: a larger model is spread over as many as it needs."""
        return self.weights / math.ceil(self.weights / float(measured()["gpu"]["most_weights"]))

    def _on_gpu(self, part: str) -> float:
        """By the weights on a device, and by what more or fewer of them change than where that was measured."""
        gpu = measured()["gpu"]
        line: Mapping[str, float] = gpu[part]
        further = line.get("per_change", 0.0) * (self.density - float(gpu["density"]))
        return max(line["start"] + (line["per_weight"] + further) * self._device_weights, 0.0)

    def _on_cpu(self, part: str, column: str | None = None) -> float:
        cpu = measured()["cpu"]
        factor = 1.0 if column is None else at_density(column, self.density) / at_density(column, cpu["density"])
        return float(cpu[part] * self.weights * factor)

    @property
    def blocked_seconds(self) -> float:
        """How long `publish` holds the trainer."""
        return self._on_gpu("blocked") if self.machine == "gpu" else self._on_cpu("diff")

    @property
    def encode_seconds(self) -> float:
        overhead = float(measured()["replica"]["s3"]["publish_cpu"])
        return overhead + (self._on_gpu("encode") if self.machine == "gpu" else self._on_cpu("encode", "encode_ratio"))

    @property
    def decode_seconds(self) -> float:
        """From fetched to ready to be written: checked, decoded, staged; the engine serves meanwhile."""
        return self._on_gpu("stage") if self.machine == "gpu" else self._on_cpu("decode", "decode_ratio")

    @property
    def pause_seconds(self) -> float:
        """How long an engine stands still to take a delta."""
        if self.machine == "gpu":
            return self._on_gpu("pause")
        cpu = measured()["cpu"]
        return float(cpu["pause_start"] + cpu["pause_per_change"] * self.weights * self.density)

    @property
    def reload_seconds(self) -> float:
        """How long it stands still to take all weights from its disk; at most, since GPUs were measured at one size."""
        weights = self._device_weights if self.machine == "gpu" else self.weights
        return float(measured()[self.machine]["reload"] * weights)
