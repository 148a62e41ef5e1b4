"""Keeps routes short, in the background of a publisher: skip deltas, and anchors when they pay off."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from deltawire.errors import ChainError
from deltawire.publish.history import History
from deltawire.publish.upload import encode_delta, put_anchor, put_delta
from deltawire.run.manifest import MOST_OBJECTS, StoredHop, StoredObject
from deltawire.run.planner import anchor_is_due, cheapest_route, skip_bases
from deltawire.run.run import Run
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.workers import SERIAL


@dataclass(frozen=True, slots=True)
class Task:
    """An extra hop to write: to a version, from a base or (None) as an anchor."""

    history: History
    version: int
    base: int | None

    @property
    def oldest(self) -> int:
        """The oldest version that must still be readable for it."""
        return self.version if self.base is None else self.base


@dataclass(frozen=True, slots=True)
class HopOptions:
    """How deltas and anchors of a run are encoded and split into files."""

    run: Run
    allowed: list[str]
    max_file_bytes: int


class Hops:
    """The hops of a run that a publisher knows, and which ones to add."""

    def __init__(self, skips: Sequence[int], anchors: int | str | None) -> None:
        self._skips, self._anchors = tuple(skips), anchors
        self._noting = threading.Lock()
        self.extra_files: tuple[StoredObject, ...] = ()
        """The files next to the weights in every anchor."""
        self.hops: dict[tuple[int, int | None], StoredHop] = {}
        self.digests: dict[int, Digest] = {}
        self.error: Exception | None = None
        """Why the last extra hop could not be written. The only effect is that routes get longer."""

    def note(self, *hops: StoredHop) -> None:
        """Record hops that exist."""
        with self._noting:
            known = {**self.hops, **{(hop.version, hop.base): hop for hop in hops}}
            # No reader starts before the last anchor but one.
            oldest = min(sorted(version for version, base in known if base is None)[-2:], default=0)
            # Replaced, not changed: the other thread may be reading them.
            self.hops = {key: hop for key, hop in known.items() if hop.version >= oldest}
            self.digests = {**self.digests, **{hop.version: hop.digest for hop in hops}}

    def route(self, version: int) -> tuple[StoredHop, ...]:
        """The cheapest known hops from an anchor to a version."""
        try:
            hops = cheapest_route(None, version, self.hops.values()).hops
        except ChainError:
            return ()
        # Readers find a route without it. With it a manifest could get too large for them.
        return hops if sum(len(hop.objects) for hop in hops) <= MOST_OBJECTS else ()

    def due(self, hop: StoredHop, oldest: int, *, anchor_is_coming: bool) -> list[int | None]:
        """The bases of the extra hops that a committed version should get; None for an anchor."""
        bases: list[int | None] = [base for base in skip_bases(hop.version, self._skips) if base >= oldest]
        cadence = self._anchors if isinstance(self._anchors, int) else None
        wanted = self._anchors is not None and hop.base is not None and not anchor_is_coming
        if wanted and anchor_is_due(hop.version, list(self.hops.values()), cadence):
            bases.append(None)
        return bases

    @property
    def longest_skip(self) -> int:
        return max(self._skips, default=0)


class Upkeep(Hops):
    """Adds skip deltas and anchors to the versions that a publisher has committed."""

    def __init__(self, options: HopOptions, skips: Sequence[int], anchors: int | str | None) -> None:
        super().__init__(skips, anchors)
        self._options = options
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._busy: Task | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def committed(self, hop: StoredHop, history: History) -> None:
        """After a commit: queue the extra hops that are due, and drop old versions that none of them needs."""
        self.note(hop)
        version = hop.version
        with self._changed:
            coming = any(task.base is None for task in self._unwritten())
            bases = self.due(hop, history.oldest, anchor_is_coming=coming)
            self._tasks.extend(Task(history, version, base) for base in bases)
            if self._tasks and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="deltawire-upkeep", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            waiting = [task.oldest for task in self._unwritten()]
            history.forget(min([version - self.longest_skip, *waiting]))
            self.digests = {each: state for each, state in self.digests.items() if each >= history.oldest}

    def _unwritten(self) -> list[Task]:
        return [*self._tasks, *([] if self._busy is None else [self._busy])]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    return
                self._busy = self._tasks.popleft()
            try:
                self._write(self._busy)
                self.error = None
            except Exception as error:
                self.error = error
            finally:
                with self._changed:
                    self._busy = None
                    self._changed.notify_all()

    def _write(self, task: Task) -> None:
        options, run = self._options, self._options.run
        if task.base is None:
            hop = put_anchor(
                run.store, run.id, task.history, task.version, self.digests[task.version], self.extra_files,
                options.max_file_bytes,
            )  # fmt: skip
        else:
            base = WeightVersion(run.id, task.base, self.digests[task.base])
            # One thread: nobody waits for this, and the trainer needs its cores.
            info, entries, _ = encode_delta(task.history, base, task.version, options.allowed, SERIAL)
            if info.digest != self.digests[task.version]:
                raise ChainError(
                    f"the delta {task.base} -> {task.version} would give other weights than the version has"
                )
            hop = put_delta(run.store, info, entries, options.max_file_bytes)
        run.commit_hop(hop)
        self.note(hop)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no extra hop is left to write; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and self._busy is None, timeout)

    def close(self) -> None:
        """Write what is queued, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
