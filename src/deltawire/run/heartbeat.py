"""Heartbeats: the status that replicas write to `replicas/`, for people and for `gc`."""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_hex
from typing import Any

from deltawire.errors import DeltawireError, LimitExceeded, ObjectMissing, StoreError
from deltawire.run.keys import REPLICAS, read_replica_key, replica_key
from deltawire.run.run import Run

# A replica without a heartbeat for longer is considered dead.
LIVE_SECONDS = 600.0
MOST_BYTES = 1 << 16


class Heartbeat:
    """Writes one small object under the replica's name. Best effort: a store that refuses it is ignored."""

    def __init__(self, run: Run, name: str | None, every_seconds: float | None) -> None:
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
        self.name = name or f"{host}-{os.getpid()}-{token_hex(2)}"
        self._key = replica_key(self.name)
        self._run, self._every = run, every_seconds
        self._due = 0.0
        # Of a write in one thread and the removal in another, the removal comes last.
        self._lock = threading.RLock()
        self._written = False

    def beat(self, status: Mapping[str, Any], *, at_once: bool) -> None:
        """Write the status: at once, or only if the interval has elapsed."""
        # A clock that is set back must not silence a replica: clean-up would take it for dead.
        now = time.monotonic()
        if not at_once and now < self._due:
            return
        self._due = now + (self._every or 0.0)
        with self._lock, suppress(DeltawireError):
            if self._every is None:
                return
            sender = {"name": self.name, "run": self._run.id, "host": socket.gethostname(), "pid": os.getpid()}
            self._run.store.put(self._key, json.dumps({**sender, "time": time.time(), **status}).encode())
            self._written = True

    def remove(self) -> None:
        """Delete the object, and write none from now on."""
        with self._lock:
            self._every = None
            if self._written:
                with suppress(StoreError):
                    self._run.store.delete([self._key])


def read_heartbeats(run: Run) -> list[dict[str, Any]]:
    """The last heartbeat of each replica, with `age_seconds` (store's clock against ours); skips malformed ones."""
    found = []
    for stat in run.store.list(REPLICAS):
        name = read_replica_key(stat.key)
        if name is None:
            continue
        with suppress(ObjectMissing, LimitExceeded, ValueError, TypeError, RecursionError):
            document = json.loads(run.store.get(stat.key, limit=MOST_BYTES))
            found.append({**document, "name": name, "age_seconds": max(time.time() - stat.modified, 0.0)})
    return found
