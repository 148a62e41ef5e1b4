"""Figures of the rounds in `vllm_gpu.csv`: what `explain` shows and `estimate` computes with."""

import statistics
from collections.abc import Callable

from measure import read_csv

WEIGHTS = {"0.6b": 596_049_920, "8b": 8_190_735_360}
DENSITY = 0.01

Row = dict[str, str]


def median(of: Callable[[Row], float], model: str, *, source: str = "mapping", density: float = DENSITY) -> float:
    """Of a server with eight streams whose running requests are kept, without the first round, which compiles."""
    case = {
        "model": model, "mode": "graphs", "source": source, "requests": "keep", "changed": str(density), "streams": "8",
    }  # fmt: skip
    rows = [row for row in read_csv("vllm_gpu.csv") if case.items() <= row.items() and row["round"] != "0"]
    return statistics.median(map(of, rows))


def per_change(of: Callable[[Row], float]) -> float:
    """What a further change adds: by the larger model, of which 0.1 and 5 % were changed."""
    (few, low), (many, high) = (
        (density, median(of, "8b", source="iterator", density=density)) for density in (0.001, 0.05)
    )
    return max(high - low, 0.0) / (WEIGHTS["8b"] * (many - few))


def encode(row: Row) -> float:
    return float(row["encode_s"])


def stage(row: Row) -> float:
    """Checked, decoded and staged, while the server serves."""
    return float(row["apply_s"]) - pause(row)


def pause(row: Row) -> float:
    return float(row["pause_ms"]) / 1000
