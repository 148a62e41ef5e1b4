"""Polls a run into plain data: what the dashboard shows, as a page and as JSON.

There are two kinds of data. The state is small and sent whole whenever it changes: the store, the replicas, how much
was read. Records (a version, a step, a note) are only ever appended, in the order in which they were read, so a client
that has the first N asks for the rest. Nothing is ever written to the store.
"""

import threading
import time
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import Any

from deltawire.errors import DeltawireError, ObjectMissing
from deltawire.pages.followers import Heartbeats, Log, replica_row
from deltawire.pages.versions import Versions, Window, page_of
from deltawire.run.fleet import HEALTHS, printable, worst_first
from deltawire.run.run import Run
from deltawire.store import Store, open_store

# How long manifests are read before they are shown.
READ_SECONDS = 0.2

LATE_SECONDS = 8.0

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
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            self.epoch = token_hex(4)
            self._run = Run(self.store, public_key=self.public_key)
            self._versions = Versions(self._run, self._window)
            self._beats = Heartbeats(self.store)
            self._log.restart()
            self._faults: dict[str, str | None] = {}
            self._records: list[Record] = []
            self._steps: list[Record] = []
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
        return self._log.has_more or (failure is None and bool(self._versions.num_pending))

    def _read_store(self) -> None:
        if not self._run.exists():
            return
        if not self._versions.look():
            if Run(self.store, public_key=self.public_key).id == self._run.id:
                raise ObjectMissing(f"version {self._versions.latest} is not in {self.store.url} any more")
            self._restart()
            return
        self._beats.look()
        self._add([{"kind": "version", **row} for row in self._versions.read(READ_SECONDS)])
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
            self._records += records
            for record in records:
                if record["kind"] == "resumed":
                    self._steps = [each for each in self._steps if each["step"] <= record["step"]]
                elif record["kind"] == "step":
                    self._steps.append(record)

    def _update_state(self) -> None:
        versions, beats, parts, now = self._versions, self._beats.beats, self._log.parts, time.time()
        rows = worst_first(
            replica_row(name, beats.get(name), parts.get(name), versions.latest, now) for name in {*beats, *parts}
        )
        state = {
            "epoch": self.epoch,
            "run": self._run.known_id,
            "url": self.store.url,
            "store": {
                "ok": self.failure is None,
                "since": self._since,
                "error": None if self.failure is None else str(self.failure),
            },
            "counts": {
                "first": versions.first,
                "latest": versions.latest,
                "found": versions.num_found,
                "read": len(versions.rows),
                "damaged": versions.num_damaged,
            },
            "replicas": rows,
            "summary": {health: sum(row["health"] == health for row in rows) for health in HEALTHS},
            "log": self._log.about(),
        }
        with self._lock:
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

    def records(self, start: int, limit: int) -> tuple[str, int, list[Record]]:
        """The epoch, how many records there are, and some of them."""
        with self._lock:
            return self.epoch, len(self._records), self._records[start : start + limit]

    def versions(self, window: Window) -> dict[str, Any]:
        versions = self._versions
        # The polling thread adds rows meanwhile; copying a dict is one step.
        page = page_of("versions", versions.rows.copy(), window, versions.latest)
        return {**page, "unread": versions.num_pending}

    def steps(self, window: Window) -> dict[str, Any]:
        with self._lock:
            known = {record["step"]: record for record in self._steps}
        return page_of("steps", known, window)

    def notes(self, limit: int) -> list[Record]:
        """The newest faults and other notes, in order."""
        with self._lock:
            found = [record for record in self._records if record["kind"] in ("note", "resumed")]
        return sorted(found, key=lambda record: float(record["time"]))[-limit:]

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
