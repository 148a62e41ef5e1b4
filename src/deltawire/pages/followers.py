"""The replicas of a run, from their heartbeats in the store and from a demo's event log."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltawire.errors import LimitExceeded, ObjectMissing
from deltawire.run import fleet
from deltawire.run.heartbeat import MOST_BYTES
from deltawire.run.keys import REPLICAS, read_replica_key
from deltawire.store import Stat, Store

MOST_REPLICAS = 1000

# Stores give the time of an object in whole seconds: one this young may be replaced without a visible change.
STABLE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a replica; `fields` is None if it cannot be read."""

    stat: Stat
    read: float
    fields: Mapping[str, Any] | None

    @property
    def time(self) -> float:
        """When it was written, by the replica's own clock if the heartbeat has it."""
        own = None if self.fields is None else fleet.number(self.fields.get("time"))
        return self.stat.modified if own is None else own


@dataclass(slots=True)
class LoggedPart:
    life: str
    """starting, running or ended."""
    since: float
    detail: str | None = None
    version: int | None = None
    pause_seconds: float | None = None
    pulled: float | None = None


class Log:
    """What a program has logged about its run, apart from the store; here nothing. The demo has a log."""

    parts: Mapping[str, LoggedPart] = {}
    has_more = False

    def restart(self) -> None:
        """Read from the start again."""

    def read(self) -> list[dict[str, Any]] | None:
        """New records for the page; None if the log has started over, and all earlier records are void."""
        return []

    def about(self) -> dict[str, Any] | None:
        return None


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
                fields = json.loads(self._store.get(stat.key, limit=MOST_BYTES))
            except ObjectMissing:
                continue
            except (LimitExceeded, ValueError, RecursionError):
                fields = None
            found[name] = Beat(stat, now, fields if isinstance(fields, dict) else None)
        self.beats = found


def replica_rows(
    beats: Mapping[str, Beat], parts: Mapping[str, LoggedPart], latest: int | None, now: float
) -> list[fleet.Row]:
    """The rows of the fleet view, the worst first."""
    names = {*beats, *parts}
    return fleet.worst_first(replica_row(name, beats.get(name), parts.get(name), latest, now) for name in names)


def replica_row(name: str, beat: Beat | None, part: LoggedPart | None, latest: int | None, now: float) -> fleet.Row:
    """The row of the fleet view. An event in the log that is newer than the last heartbeat takes precedence."""
    fields = {} if beat is None else beat.fields
    if fields is not None and part is not None and part.pulled is not None and (not beat or part.pulled > beat.time):
        fields = {**fields, "version": part.version, "pause_seconds": part.pause_seconds}
    row = fleet.replica_row(name, fields, 0.0 if beat is None else now - beat.stat.modified, latest)
    # It changes by itself, and the page computes it.
    del row["age_seconds"]
    row["heard"] = None if beat is None else beat.stat.modified
    if part is not None and (beat is None or part.since > beat.time) and part.life in ("ended", "starting"):
        health = "dead" if part.life == "ended" else "starting"
        return {**row, "health": health, "detail": part.detail, "version": None, "lag": None}
    if beat is None:
        return {**row, "health": "stopped", "detail": "removed its heartbeat"}
    return {**row, "version": None, "lag": None} if row["health"] == "dead" else row
