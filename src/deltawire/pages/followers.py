"""The replicas of a run, from their heartbeats in the store and from a demo's event log."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltawire.errors import LimitExceeded, ObjectMissing
from deltawire.heartbeat import LIVE_SECONDS, MOST_BYTES
from deltawire.keys import REPLICAS, read_replica_key
from deltawire.pages.eventlog import LoggedPart, count, ended_text, number, printable
from deltawire.store import Stat, Store

# Four heartbeats. One that is in the middle of a pull sends none, and has longer.
SILENT_SECONDS = 60.0

MOST_REPLICAS = 1000

# Stores tell the time of an object in whole seconds: one this young may be replaced without looking different.
SETTLED_SECONDS = 3.0

HEALTHS = ("dead", "fault", "silent", "starting", "updating", "behind", "ok", "stopped")
"""Worst first."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a replica told last; None where it is no heartbeat at all."""

    stat: Stat
    read: float
    told: Mapping[str, Any] | None

    @property
    def time(self) -> float:
        """By the replica's own clock, where it says so."""
        told = None if self.told is None else number(self.told.get("time"))
        return self.stat.modified if told is None else told


class Heartbeats:
    """Reads the heartbeats that were written since they were last read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.beats: dict[str, Beat] = {}

    def look(self) -> None:
        found: dict[str, Beat] = {}
        for stat in list(self._store.list(REPLICAS))[:MOST_REPLICAS]:
            name = read_replica_key(stat.key)
            if name is None:
                continue
            known, now = self.beats.get(name), time.time()
            if known is not None and known.stat == stat and known.read - stat.modified > SETTLED_SECONDS:
                found[name] = known
                continue
            try:
                found[name] = Beat(stat, now, self._read(stat))
            except ObjectMissing:
                continue
        self.beats = found

    def _read(self, stat: Stat) -> Mapping[str, Any] | None:
        try:
            told = json.loads(self._store.get(stat.key, limit=MOST_BYTES))
        except (LimitExceeded, ValueError, RecursionError):
            return None
        return told if isinstance(told, dict) else None


def replica_rows(
    beats: Mapping[str, Beat], parts: Mapping[str, LoggedPart], latest: int | None, now: float
) -> list[dict[str, Any]]:
    """A row for each replica that either source knows of, the worst first."""
    rows = [replica_row(name, beats.get(name), parts.get(name), latest, now) for name in {*beats, *parts}]
    return sorted(rows, key=lambda row: (HEALTHS.index(row["health"]), row["name"]))


def replica_row(
    name: str, beat: Beat | None, part: LoggedPart | None, latest: int | None, now: float
) -> dict[str, Any]:
    told = {} if beat is None or beat.told is None else beat.told
    engine = told.get("engine")
    row: dict[str, Any] = {
        "name": name,
        "engine": printable(engine["kind"]) if isinstance(engine, dict) and engine.get("kind") else None,
        "version": count(told.get("version")),
        "lag": None,
        "pause_seconds": number(told.get("pause_seconds")),
        "pull_seconds": pull_seconds(told.get("last_pull")),
        "heard": None if beat is None else beat.stat.modified,
        "detail": None,
    }
    if part is not None and part.pulled is not None and (beat is None or part.pulled > beat.time):
        row |= {"version": part.version, "pause_seconds": part.pause_seconds}
    row["health"], row["detail"] = health_of(row, beat, part, latest, now)
    if row["health"] in ("dead", "starting"):
        row["version"] = None
    if row["version"] is not None and latest is not None:
        row["lag"] = max(latest - row["version"], 0)
    return row


def pull_seconds(pull: Any) -> float | None:
    """How long the last pull took in all, pause included."""
    times = [number(pull.get(f"{name}_seconds")) if isinstance(pull, dict) else None
             for name in ("fetch", "decode", "apply")]  # fmt: skip
    known = [each for each in times if each is not None]
    return sum(known) if len(known) == len(times) else None


def health_of(
    row: Mapping[str, Any], beat: Beat | None, part: LoggedPart | None, latest: int | None, now: float
) -> tuple[str, str | None]:
    """One word, and what there is to say of it. What the log says of a process is newer than its last heartbeat."""
    if part is not None and (beat is None or part.since > beat.time):
        if part.life == "ended":
            return "dead", ended_text(part.status)
        if part.life == "starting":
            return "starting", "started, has no weights yet"
    if beat is None:
        return "stopped", "took its heartbeat back"
    if beat.told is None:
        return "fault", "its heartbeat cannot be read"
    age, is_pulling = now - beat.stat.modified, bool(beat.told.get("using"))
    if age > LIVE_SECONDS:
        return "dead", f"no heartbeat for {LIVE_SECONDS:.0f} s"
    if age > SILENT_SECONDS and not is_pulling:
        return "silent", f"no heartbeat for {SILENT_SECONDS:.0f} s"
    if error := beat.told.get("error"):
        return "fault", printable(error)
    if row["version"] is None or (latest is not None and row["version"] < latest):
        return ("updating" if is_pulling else "behind"), None
    return "ok", None
