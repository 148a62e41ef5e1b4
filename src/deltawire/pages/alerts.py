"""What somebody who runs a training should look at now: the alerts of the dashboard.

The Prometheus rules in deploy/ have the same names; some of them wait longer before they fire.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from deltawire.run.fleet import Row

LAG_VERSIONS = 5
PAUSE_SECONDS = 1.0
# A replica that takes so many times as long as the middle one, and at least so long, is slow.
SLOW_TIMES, SLOW_SECONDS = 3.0, 1.0
# Without a new version for so many times the usual interval, and at least so long, the trainer is silent.
QUIET_TIMES, QUIET_SECONDS = 10.0, 60.0


def alerts_of(replicas: Sequence[Row], newest: Sequence[Row], num_damaged: int, now: float) -> list[dict[str, Any]]:
    """The alerts, the worst first. `newest` are some versions, the newest first."""
    found: list[dict[str, Any]] = []

    def alert(name: str, level: str, text: str, replica: str | None = None) -> None:
        found.append({"name": name, "level": level, "replica": replica, "text": text})

    served = [row["served_seconds"] for row in replicas if row["served_seconds"] is not None]
    usual = median(served) if len(served) > 2 else None
    for row in replicas:
        name, health = row["name"], row["health"]
        if health in ("dead", "silent", "fault"):
            alert(f"Replica{health.title()}", "bad", f"{name} is {health}: {row['detail']}", name)
        elif row["lag"] is not None and row["lag"] >= LAG_VERSIONS:
            alert("ReplicaBehind", "bad", f"{name} is {row['lag']} versions behind", name)
        if row["pause_seconds"] is not None and row["pause_seconds"] > PAUSE_SECONDS:
            alert("PauseLong", "warn", f"{name} paused for {row['pause_seconds']:.2f} s during its last update", name)
        if usual is not None and (row["served_seconds"] or 0) > max(SLOW_TIMES * usual, SLOW_SECONDS):
            took = f"{row['served_seconds']:.1f} s from publication to serving, compared with the usual {usual:.1f} s"
            alert("ReplicaSlow", "warn", f"{name} took {took}", name)
    if num_damaged:
        alert("VersionsDamaged", "bad", f"{num_damaged} damaged manifests: see deltawire verify")
    times = [row["created"] for row in newest if row["created"] is not None]
    if len(times) > 2:
        limit = max(QUIET_TIMES * median(a - b for a, b in pairwise(times)), QUIET_SECONDS)
        if now - times[0] > limit and any(row["health"] not in ("dead", "stopped") for row in replicas):
            alert("TrainerSilent", "warn", f"no new version for more than {limit:.0f} s")
    return sorted(found, key=lambda each: each["level"] != "bad")
