"""Commits: they make versions exist, by one writer at a time.

Stores with conditional writes decide between two writers themselves. On others, a writer puts its name into
`lease.json` and checks it before each commit. The newest writer wins, and the previous one finds out at its next
commit. Another writer can take over between this check and the commit, so that two commits of one version race and the
later replaces the earlier; the loser notices when it reads its commit back. A replica that has pulled the loser's
version finds that its weights are not the base of the next delta, and starts from an anchor: no wrong weights, but a
version that was replaced.
"""

import json
import time

from deltawire.errors import Fenced, LimitExceeded, ObjectMissing, StoreUnavailable
from deltawire.run.keys import LEASE_KEY
from deltawire.run.manifest import Manifest
from deltawire.run.run import HINT_SECONDS, Run

MOST_LEASE_BYTES = 1 << 12


class Commits:
    """The commits of one writer, who holds the lease if the store needs one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        if not run.store.conditional:
            document = json.dumps({"writer": run.writer, "time": time.time()}).encode()
            run.store.put(LEASE_KEY, document)
            run.uploaded.add([(LEASE_KEY, len(document))])
        self._due = time.monotonic() + HINT_SECONDS
        self.unresolved: tuple[Manifest, bytes] | None = None
        """A commit that was sent and may or may not exist."""

    def commit(self, manifest: Manifest) -> None:
        """Make a version exist. After StoreUnavailable with `uncertain` it may or may not exist."""
        data = self._run.sign(manifest)
        self._check_lease()
        if time.monotonic() >= self._due:
            # In a store that was emptied, or whose folder is mounted no more, nobody could start from a delta.
            self._run.check_is_there()
            self._due = time.monotonic() + HINT_SECONDS
        try:
            self._run.commit(data, manifest)
        except StoreUnavailable as error:
            if error.fields.get("uncertain"):
                self.unresolved = manifest, data
            raise

    def resolve(self) -> Manifest | None:
        """Resolve a commit whose answer was lost, by sending the same bytes again."""
        if self.unresolved is None:
            return None
        manifest, data = self.unresolved
        self._check_lease()
        self._run.commit(data, manifest)
        self.unresolved = None
        return manifest

    def _check_lease(self) -> None:
        if self._run.store.conditional:
            return
        try:
            holder = json.loads(self._run.store.get(LEASE_KEY, limit=MOST_LEASE_BYTES))["writer"]
        except (ObjectMissing, LimitExceeded, ValueError, KeyError, TypeError, RecursionError):
            holder = None
        if holder != self._run.writer:
            raise Fenced(
                f"another writer has taken over run {self._run.id}, so this one must stop. "
                "Close this publisher; to continue from the newest version, create a new one",
                expected=self._run.writer, actual=holder,
            )  # fmt: skip
