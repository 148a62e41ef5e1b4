"""The replicas of a run, from their heartbeats in the store and from a demo's event log."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltawire.errors import LimitExceeded, ObjectMissing
from deltawire.pages.eventlog import LoggedPart, count, ended_text, number, printable
from deltawire.run.heartbeat import LIVE_SECONDS, MOST_BYTES
from deltawire.run.keys import REPLICAS, read_replica_key
from deltawire.store import Stat, Store

# Four heartbeats. A replica sends none during a pull, and gets longer.
SILENT_SECONDS = 60.0

MOST_REPLICAS = 1000

# Stores give the time of an object in whole seconds: one this young may be replaced without a visible change.
STABLE_SECONDS = 3.0

HEALTHS = ("dead", "fault", "silent", "starting", "updating", "behind", "ok", "stopped")
"""Worst first."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a replica; `fields` is None if it cannot be read."""

    stat: Stat
    read: float
    fields: Mapping[str, Any] | None

    @property
    def time(self) -> float:
        """When it was written, by the replica's own clock if the heartbeat has it."""
        own = None if self.fields is None else number(self.fields.get("time"))
        return self.stat.modified if own is None else own


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
            if known is not None and known.stat == stat and known.read - stat.modified > STABLE_SECONDS:
                found[name] = known
                continue
            try:
                found[name] = Beat(stat, now, self._read(stat))
            except ObjectMissing:
                continue
        self.beats = found

    def _read(self, stat: Stat) -> Mapping[str, Any] | None:
        try:
            found = json.loads(self._store.get(stat.key, limit=MOST_BYTES))
        except (LimitExceeded, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def replica_rows(
    beats: Mapping[str, Beat], parts: Mapping[str, LoggedPart], latest: int | None, now: float
) -> list[dict[str, Any]]:
    """A row for each replica of either source, the worst first."""
    rows = [replica_row(name, beats.get(name), parts.get(name), latest, now) for name in {*beats, *parts}]
    return sorted(rows, key=lambda row: (HEALTHS.index(row["health"]), row["name"]))


def replica_row(
    name: str, beat: Beat | None, part: LoggedPart | None, latest: int | None, now: float
) -> dict[str, Any]:
    fields = {} if beat is None or beat.fields is None else beat.fields
    engine = fields.get("engine")
    row: dict[str, Any] = {
        "name": name,
        "engine": printable(engine["kind"]) if isinstance(engine, dict) and engine.get("kind") else None,
        "version": count(fields.get("version")),
        "lag": None,
        "pause_seconds": number(fields.get("pause_seconds")),
        "pull_seconds": pull_seconds(fields.get("last_pull")),
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
    """How long the last pull took in total, including the pause."""
    times = [number(pull.get(f"{name}_seconds")) if isinstance(pull, dict) else None
             for name in ("fetch", "decode", "apply")]  # fmt: skip
    known = [each for each in times if each is not None]
    return sum(known) if len(known) == len(times) else None


def health_of(
    row: Mapping[str, Any], beat: Beat | None, part: LoggedPart | None, latest: int | None, now: float
) -> tuple[str, str | None]:
    """The health and its details. An event in the log that is newer than the last heartbeat takes precedence."""
    if part is not None and (beat is None or part.since > beat.time):
        if part.life == "ended":
            return "dead", ended_text(part.status)
        if part.life == "starting":
            return "starting", "started, has no weights yet"
    if beat is None:
        return "stopped", "took its heartbeat back"
    if beat.fields is None:
        return "fault", "its heartbeat cannot be read"
    age, is_pulling = now - beat.stat.modified, bool(beat.fields.get("using"))
    if age > LIVE_SECONDS:
        return "dead", f"no heartbeat for {LIVE_SECONDS:.0f} s"
    if age > SILENT_SECONDS and not is_pulling:
        return "silent", f"no heartbeat for {SILENT_SECONDS:.0f} s"
    if error := beat.fields.get("error"):
        return "fault", printable(error)
    if row["version"] is None or (latest is not None and row["version"] < latest):
        return ("updating" if is_pulling else "behind"), None
    return "ok", None
