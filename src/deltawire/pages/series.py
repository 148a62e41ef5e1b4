"""The numbers behind the charts: of versions, of steps and of replicas over time, thinned to what a screen can show.

A chart asks for a range of its axis and a number of columns; of each column it gets the lowest and the highest value.
So no peak is lost, and an answer stays small whatever the length of the run.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltawire.run.fleet import REPORTED, Row

Numbers = NDArray[np.float64]
Line = dict[str, Any]

FIELDS = ("version", "step", "time", "delta_bytes", "all_bytes", *REPORTED)
MEAN_OF = 20

# So many replicas have lines of their own, the worst first; of the others there is the largest value.
MOST_LINES = 24
MOST_SAMPLES = 400_000

# While nothing changes, a sample is taken so often.
SAMPLE_SECONDS = 30.0


class Columns:
    """Rows with the same numbers, in arrays that grow; a row with a known key replaces that one."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._data: Numbers = np.full((len(names), 256), np.nan)
        self._places: dict[int, int] = {}
        self._sorted: dict[str, Numbers] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def put(self, key: int, row: Mapping[str, Any]) -> None:
        place = self._places.setdefault(key, len(self._places))
        if place == self._data.shape[1]:
            self._data = np.hstack([self._data, np.full_like(self._data, np.nan)])
        self._data[:, place] = [np.nan if row.get(name) is None else row[name] for name in self._names]
        self._sorted = None

    def drop_after(self, key: int) -> None:
        """Forget the rows with larger keys."""
        kept = {each: place for each, place in self._places.items() if each <= key}
        if len(kept) < len(self._places):
            data = self._data[:, list(kept.values())]
            self._places = {each: place for place, each in enumerate(kept)}
            self._data = np.hstack([data, np.full((len(self._names), 256), np.nan)])
            self._sorted = None

    def sorted(self) -> dict[str, Numbers]:
        """The columns, in the order of the keys."""
        if self._sorted is None:
            order = np.argsort(np.fromiter(self._places, np.int64, len(self._places)), kind="stable")
            self._sorted = {name: self._data[i, order] for i, name in enumerate(self._names)}
        return self._sorted


class Samples:
    """What the heartbeats of replicas said while the dashboard was running."""

    NAMES = ("time", "latest", "version", "lag", "pause_seconds", "served_seconds")

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[float | None, ...]]] = {}
        self.engines: dict[str, str | None] = {}

    def add(self, rows: Iterable[Row], latest: int | None, created: Mapping[int, Row], now: float) -> bool:
        """Take a sample of each replica; whether anything is new.

        A dead one keeps the version that it had, so that its lag is seen to grow. For one that is behind the version
        that it waits for counts as long as it has waited.
        """
        is_new = False
        for row in rows:
            known = self.of.setdefault(row["name"], [])
            version = row["version"]
            if version is None and row["health"] == "dead" and known:
                version = known[-1][2]
            if row["health"] == "stopped" or version is None or latest is None:
                continue
            lag, served = max(latest - version, 0), row["served_seconds"]
            waiting = created.get(int(version) + 1) if lag else None
            if waiting is not None and waiting["created"] is not None:
                served = max(served or 0.0, now - waiting["created"])
            sample = (now, latest, version, lag, row["pause_seconds"], served)
            self.engines[row["name"]] = row["engine"]
            if not known or known[-1][1:] != sample[1:] or now - (known[-1][0] or 0) > SAMPLE_SECONDS:
                known.append(sample)
                is_new = True
            if len(known) > max(MOST_SAMPLES // max(len(self.of), 1), 200):
                known[:] = halved(known)
        return is_new

    def of_one(self, name: str, now: float | None) -> dict[str, Numbers]:
        """The samples of a replica as columns; its last one holds until `now`."""
        known = self.of[name][:]
        data: Numbers = np.array(known if now is None else [*known, (now, *known[-1][1:])], np.float64)
        return dict(zip(self.NAMES, data.T, strict=True))


def halved(samples: list[tuple[float | None, ...]]) -> list[tuple[float | None, ...]]:
    """Half as many samples, each with the largest values of two; the newest half stays as it is."""
    middle = len(samples) // 2 // 2 * 2
    pairs = zip(samples[:middle:2], samples[1:middle:2], strict=True)
    older = [(*b[:3], *(max((x for x in xy if x is not None), default=None) for xy in zip(a[3:], b[3:], strict=True)))
             for a, b in pairs]  # fmt: skip
    return older + samples[middle:]


def thinned(x: Numbers, y: Numbers, low: float, high: float, columns: int) -> list[list[float]]:
    """Points within a range, in order of x: all of them, or the lowest and the highest of each column.

    One on each side of the range is kept, for lines that leave it.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    start, stop = max(np.searchsorted(x, low) - 1, 0), np.searchsorted(x, high, "right") + 1
    x, y = x[start:stop], y[start:stop]
    if len(x) <= 2 * columns:
        return points(x, y)
    column = np.floor(np.clip((x - low) / max(high - low, 1e-9), -1e-9, 1) * columns)
    starts = np.flatnonzero(np.diff(column, prepend=np.nan))
    ends = np.append(starts[1:], len(x)) - 1
    both = np.stack([np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)], 1)
    # In the order in which the line goes on.
    falls = y[starts] > y[ends]
    both[falls] = both[falls, ::-1]
    return points(np.repeat(x[starts], 2), both.reshape(-1))


def points(x: Numbers, y: Numbers) -> list[list[float]]:
    return [[a, float(f"{b:.6g}")] for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def running_mean(y: Numbers) -> Numbers:
    """The mean of up to `MEAN_OF` values before each, itself included."""
    total = np.cumsum(np.concatenate([np.zeros(1), y]))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(ends - MEAN_OF, 0)
    mean: Numbers = (total[ends] - total[starts]) / (ends - starts)
    return mean


class Charts:
    """The six charts of one run, on one axis: `time` in seconds since its first version, or `step`."""

    def __init__(self, versions: Columns, steps: Columns, samples: Samples, rows: list[Row]) -> None:
        self._versions, self._samples, self._rows = versions.sorted(), samples, rows
        self._present = {row["name"] for row in rows if row["health"] != "stopped"}
        known = steps.sorted() if len(steps) else self._versions
        self._steps = {name: known[name] for name in ("step", "time", "reward", "staleness")}
        times = self._versions["time"][np.isfinite(self._versions["time"])]
        self.origin = float(times.min()) if len(times) else time.time()

    def axis(self, numbers: Mapping[str, Numbers], axis: str) -> Numbers:
        if axis == "time":
            # Rounded here, for points and for the end of the range: a point after that end would be left out.
            return np.round(numbers["time"] - self.origin, 3)
        if "latest" not in numbers:
            return np.where(np.isfinite(numbers["step"]), numbers["step"], numbers.get("version", np.nan))
        own = self.axis(self._versions, "step")
        at = np.searchsorted(self._versions["version"], numbers["latest"], "right") - 1
        return np.where(at >= 0, own[np.maximum(at, 0)], np.nan) if len(own) else np.full(len(at), np.nan)

    def whole(self, axis: str, now: float) -> tuple[float, float]:
        """The range of everything; up to now while a replica is alive."""
        ends = [each for columns in (self._versions, self._steps) for each in self.axis(columns, axis)[-1:]]
        if axis == "time" and any(row["health"] not in ("dead", "stopped") for row in self._rows):
            ends.append(now - self.origin)
        starts = self.axis(self._versions, axis)
        low = float(np.nanmin(starts)) if np.isfinite(starts).any() else 0.0
        finite = [float(each) for each in ends if np.isfinite(each)]
        return low, max([low + 1.0, *finite])

    def since(self, axis: str, moment: float) -> float:
        """Where the axis is at a moment."""
        if axis == "time":
            return moment - self.origin
        later = self.axis(self._versions, axis)[self._versions["time"] >= moment]
        return float(np.nanmin(later)) if np.isfinite(later).any() else 0.0

    def lines(self, axis: str, low: float, high: float, columns: int, now: float) -> dict[str, list[Line]]:
        """The lines of each chart; a chart without any has nothing reported."""

        def line(name: str, of: Mapping[str, Numbers], values: Numbers, **more: Any) -> list[Line]:
            found = thinned(self.axis(of, axis), values, low, high, columns)
            return [{"name": name, **more, "points": found}] if found else []

        versions, steps = self._versions, self._steps
        rewarded = np.isfinite(steps["reward"])
        some = {name: values[rewarded] for name, values in steps.items()}
        charts = {
            "reward": line("each", some, some["reward"], dots=True)
            + line(f"mean of {MEAN_OF}", some, running_mean(some["reward"])),
            "staleness": line("staleness", steps, steps["staleness"]),
            "lag": list[Line](),
            "pause": line("longest token gap", versions, versions["token_gap_seconds"]),
            "bytes": line("everything", versions, versions["all_bytes"])
            + line("delta", versions, versions["delta_bytes"]),
            "served": list[Line](),
        }
        names = [row["name"] for row in self._rows if self._samples.of.get(row["name"])]
        known = {name: self._samples.of_one(name, now if name in self._present else None) for name in names}
        others = [known.pop(name) for name in names[MOST_LINES:]]
        if others:
            known[f"{len(others)} others"] = {
                key: np.concatenate([each[key] for each in others]) for key in Samples.NAMES
            }
        for chart, key in (("lag", "lag"), ("pause", "pause_seconds"), ("served", "served_seconds")):
            for name, numbers in known.items():
                charts[chart] += line(name, numbers, numbers[key], replica=True)
        return charts
