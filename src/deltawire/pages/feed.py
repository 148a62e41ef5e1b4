"""Polls a run into plain data: what the dashboard shows, as a page and as JSON.

There are three kinds of data. The state is small and sent whole whenever it changes: the store, the replicas, alerts,
how much was read. Notes are only ever appended, in the order in which they were read, so a client that has the first N
asks for the rest. Versions, steps and samples of replicas may be very many: a client asks for a page of them, or for
charts. Nothing is ever written to the store.
"""

import threading
import time
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import Any

from deltawire.errors import DeltawireError, ObjectMissing
from deltawire.pages.alerts import alerts_of
from deltawire.pages.followers import Heartbeats, Log, replica_rows
from deltawire.pages.series import FIELDS, Charts, Columns, Samples
from deltawire.pages.versions import Versions, Window, page_of
from deltawire.run.fleet import HEALTHS, printable
from deltawire.run.run import Run
from deltawire.store import Store, open_store

# How long manifests are read before they are shown.
READ_SECONDS = 0.2

LATE_SECONDS = 8.0

# So many of the newest versions say how often one comes.
FEW = 32

# What a replica says of itself in words.
TEXTS = ("engine", "derived", "address", "error", "detail")

Record = dict[str, Any]


class Feed:
    """The data of a run. One thread polls; any thread may read.

    `epoch` changes whenever earlier records are void: another run is at the URL, or the log has started over.
    """

    def __init__(
        self, url: str | Path | Store, *, public_key: str | None = None, events: Log | None = None,
        window: Window | None = None,
    ) -> None:  # fmt: skip
        # An unavailable store should be reported soon. There will be another poll.
        self.store = open_store(url, timeout_seconds=5.0, retries=1)
        self.public_key, self._log, self._window = public_key, events or Log(), window
        self._lock = threading.Lock()
        self.failure: DeltawireError | None = None
        """Why the last poll of the store failed, if it did."""
        self._since = self._started = time.time()
        self.answered: float | None = None
        """When the last successful poll was."""
        self.every_seconds = 1.0
        """How often the store is polled."""
        self.revision = 0
        """Counts the changes of the state."""
        self.stamp = 0
        """Counts the changes of what charts show."""
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            self.epoch = token_hex(4)
            self._run = Run(self.store, public_key=self.public_key)
            self._versions = Versions(self._run, self._window)
            self._beats = Heartbeats(self.store)
            self._log.restart()
            self._faults: dict[str, str | None] = {}
            self._notes: list[Record] = []
            self._steps: dict[int, Record] = {}
            self._version_numbers = Columns(*FIELDS)
            self._step_numbers = Columns("step", "time", "reward", "staleness")
            self.samples = Samples()
            self._state: dict[str, Any] = {}

    def poll(self) -> bool:
        """Poll once; whether there is more to read at once."""
        logged = self._log.read()
        if logged is None:
            self._restart()
        else:
            self._add(logged)
        try:
            self._read_store()
            failure = None
            self.answered = time.time()
        except DeltawireError as error:
            failure = error
        if (failure is None) != (self.failure is None):
            self._since = time.time()
        self.failure = failure
        self._update_state()
        return self._log.has_more or (failure is None and self._versions.has_more)

    def _read_store(self) -> None:
        if not self._run.exists():
            return
        if not self._versions.look():
            if Run(self.store, public_key=self.public_key).id == self._run.id:
                raise ObjectMissing(f"version {self._versions.latest} is no longer in {self.store.url}")
            self._restart()
            return
        self._beats.look()
        rows = self._versions.read(READ_SECONDS)
        with self._lock:
            for row in rows:
                numbers = {"time": row["created"], "delta_bytes": row["bytes"] if row["kind"] == "delta" else None}
                self._version_numbers.put(row["version"], {**row, **numbers})
            self.stamp += bool(rows)
        self._note_faults()

    def _restart(self) -> None:
        self._versions.close()
        self._begin()

    def _note_faults(self) -> None:
        """Keep the faults of replicas: a heartbeat has only the current one."""
        for name, beat in self._beats.beats.items():
            error = None if beat.fields is None else beat.fields.get("error")
            fault = printable(error) if error else None
            if fault is not None and fault != self._faults.get(name):
                self._add([{"kind": "note", "time": beat.time, "level": "fault", "part": name, "text": fault}])
            self._faults[name] = fault

    def _add(self, records: list[Record]) -> None:
        with self._lock:
            for record in records:
                if record["kind"] == "step":
                    self._steps[record["step"]] = record
                    self._step_numbers.put(record["step"], record)
                    continue
                self._notes.append(record)
                if record["kind"] == "resumed":
                    self._steps = {step: each for step, each in self._steps.items() if step <= record["step"]}
                    self._step_numbers.drop_after(record["step"])
            self.stamp += bool(records)

    def _update_state(self) -> None:
        versions, beats, parts, now = self._versions, self._beats.beats, self._log.parts, time.time()
        rows = [
            row | {key: printable(row[key]) for key in TEXTS if row[key] is not None}
            for row in replica_rows(beats, parts, versions.latest, now)
        ]
        newest = [versions.rows[each] for each in range(versions.latest or 0, -1, -1)[:FEW] if each in versions.rows]
        state = {
            "epoch": self.epoch,
            "run": self._run.known_id,
            "url": self.store.url,
            "store": {"ok": self.failure is None, "since": self._since, "error": self.failure and str(self.failure)},
            "counts": {
                "first": versions.first,
                "latest": versions.latest,
                "found": versions.num_found,
                "read": len(versions.rows),
                "damaged": versions.num_damaged,
                "anchors": versions.num_anchors,
            },
            "bytes": {"delta_bytes": versions.delta_bytes, "all_bytes": versions.all_bytes},
            "newest": newest[0] if newest else None,
            "newest_delta": next((row for row in newest if row["kind"] == "delta"), None),
            "replicas": rows,
            "summary": {health: sum(row["health"] == health for row in rows) for health in HEALTHS},
            "alerts": alerts_of(rows, newest, versions.num_damaged, now),
            "log": self._log.about(),
        }
        with self._lock:
            self.stamp += self.samples.add(rows, versions.latest, versions.rows, now)
            if state != self._state:
                self._state = state
                self.revision += 1

    @property
    def is_late(self) -> bool:
        """Whether a poll of the store takes unusually long."""
        since = self._started if self.answered is None else self.answered
        return self.failure is None and time.time() - since > self.every_seconds + LATE_SECONDS

    def state(self) -> dict[str, Any]:
        with self._lock:
            return self._state

    def charts(self) -> Charts:
        with self._lock:
            return Charts(self._version_numbers, self._step_numbers, self.samples, self._state.get("replicas", []))

    def new_notes(self, start: int, limit: int) -> tuple[str, int, list[Record]]:
        """The epoch, how many notes there are, and some of them in the order in which they were read."""
        with self._lock:
            return self.epoch, len(self._notes), self._notes[start : start + limit]

    def rows(self, kind: str | None = None, up_to: int | None = None) -> dict[int, Record]:
        """The versions that were read: of one kind, and not later than one. An anchor may come besides a delta."""
        # The polling thread adds rows meanwhile; copying a dict is one step.
        rows = self._versions.rows.copy()
        if kind is None and up_to is None:
            return rows
        return {
            version: row for version, row in rows.items()
            if (up_to is None or version <= up_to)
            and (kind in (None, row["kind"]) or (kind == "anchor" and row["further_anchor"]))
        }  # fmt: skip

    def versions(self, window: Window, kind: str | None = None, up_to: int | None = None) -> dict[str, Any]:
        rows, versions = self.rows(kind, up_to), self._versions
        last = versions.latest if len(rows) == len(versions.rows) else None
        return {**page_of("versions", rows, window, last), "matching": len(rows), "unread": versions.num_pending}

    def steps(self, window: Window) -> dict[str, Any]:
        with self._lock:
            known = self._steps.copy()
        return page_of("steps", known, window)

    def notes(self, limit: int) -> list[Record]:
        """The newest faults and other notes, in order."""
        with self._lock:
            return sorted(self._notes, key=lambda record: float(record["time"]))[-limit:]

    def close(self) -> None:
        self._versions.close()


def snapshot(url: str | Path | Store, window: Window, *, public_key: str | None, events: Log | None) -> dict[str, Any]:
    """The current state of a run, with one page of its versions and of its steps."""
    with closing(Feed(url, public_key=public_key, events=events, window=window)) as feed:
        _ = Run(feed.store, public_key=public_key).id
        while feed.poll():
            pass
        if feed.failure is not None:
            raise feed.failure
        return {**feed.state(), **feed.versions(window), "log_steps": feed.steps(window), "notes": feed.notes(200)}


class Polling:
    """Polls a feed in a thread of its own."""

    def __init__(self, feed: Feed, every_seconds: float) -> None:
        self.feed = feed
        feed.every_seconds = every_seconds
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="deltawire-feed", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self.stopping.is_set():
            started = time.monotonic()
            if not self.feed.poll():
                self.stopping.wait(max(self.feed.every_seconds - (time.monotonic() - started), 0.05))

    def close(self) -> None:
        self.stopping.set()
        self._thread.join(10)
        self.feed.close()
