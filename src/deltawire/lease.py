"""Who may write, on stores that cannot decide between two writers themselves.

A writer puts its name into `lease.json` and looks, before each commit, whether it still stands there. The newest writer
wins, and the one before finds out at its next commit. Between that look and the commit another can take over, so two
commits of one version can meet, and the later replaces the earlier; the loser sees it when it reads its commit back. A
reader that had taken the loser's version finds that the next delta was not made for its weights, and starts from an
anchor: no wrong weights, but a version that was replaced. Stores with conditional writes need none of this.
"""

import json
import time

from deltawire.errors import Fenced, LimitExceeded, ObjectMissing
from deltawire.keys import LEASE_KEY
from deltawire.runs import Run

MOST_BYTES = 1 << 12


class Lease:
    """Nothing, where the store decides by itself."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def take(self) -> None:
        if not self._run.store.conditional:
            told = {"writer": self._run.writer, "time": time.time()}
            self._run.store.put(LEASE_KEY, json.dumps(told).encode())

    def check(self) -> None:
        """Raise Fenced if another writer has taken over."""
        if self._run.store.conditional:
            return
        try:
            holder = json.loads(self._run.store.get(LEASE_KEY, limit=MOST_BYTES))["writer"]
        except (ObjectMissing, LimitExceeded, ValueError, KeyError, TypeError, RecursionError):
            holder = None
        if holder != self._run.writer:
            raise Fenced(
                f"another writer has taken over run {self._run.id}: this one must stop. "
                "Close this publisher; to go on from what is there, make a new one",
                expected=self._run.writer, actual=holder,
            )  # fmt: skip
