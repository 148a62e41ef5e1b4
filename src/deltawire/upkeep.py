"""What keeps a chain short, in the background of a publisher: deltas over many versions, and anchors when they pay."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from deltawire.chain import anchor_is_due, plan, skip_bases
from deltawire.errors import ChainError
from deltawire.history import History
from deltawire.manifest import MOST_OBJECTS, StoredObject, Way
from deltawire.runs import Run
from deltawire.state import Digest
from deltawire.upload import encode_delta, put_anchor, put_delta
from deltawire.workers import SERIAL


@dataclass(frozen=True, slots=True)
class Task:
    """A further way to make: to a version, from a base or (None) as an anchor."""

    history: History
    version: int
    base: int | None

    @property
    def oldest(self) -> int:
        """The oldest version that it needs."""
        return self.version if self.base is None else self.base


@dataclass(frozen=True, slots=True)
class Making:
    """How deltas and anchors of a run are made."""

    run: Run
    allowed: list[str]
    max_file_bytes: int


class Ways:
    """The ways of a run that a publisher knows, and which ones to add."""

    def __init__(self, skips: Sequence[int], anchors: int | str | None) -> None:
        self._skips, self._anchors = tuple(skips), anchors
        self._noting = threading.Lock()
        self.beside: tuple[StoredObject, ...] = ()
        """What lies beside the weights in every anchor."""
        self.ways: dict[tuple[int, int | None], Way] = {}
        self.digests: dict[int, Digest] = {}
        self.error: Exception | None = None
        """Why the last further way could not be made. Nothing depends on it but the length of the chain."""

    def note(self, *ways: Way) -> None:
        """Take notice of ways that exist."""
        with self._noting:
            known = {**self.ways, **{(way.version, way.base): way for way in ways}}
            # Nobody starts before the last anchor but one.
            oldest = min(sorted(version for version, base in known if base is None)[-2:], default=0)
            # Replaced, not changed: the other thread may be reading them.
            self.ways = {key: way for key, way in known.items() if way.version >= oldest}
            self.digests = {**self.digests, **{way.version: way.digest for way in ways}}

    def path(self, version: int) -> tuple[Way, ...]:
        """The cheapest known ways from an anchor to a version."""
        try:
            links = plan(None, version, [way.link for way in self.ways.values()]).links
        except ChainError:
            return ()
        path = tuple(self.ways[link.version, link.base] for link in links)
        # Readers find their way without it. With it a manifest could get too large for them.
        return path if sum(len(way.objects) for way in path) <= MOST_OBJECTS else ()

    def due(self, way: Way, oldest: int, *, anchor_is_coming: bool) -> list[int | None]:
        """What else should lead to a version that was committed by a way: from which bases, None for an anchor."""
        bases: list[int | None] = [base for base in skip_bases(way.version, self._skips) if base >= oldest]
        cadence = self._anchors if isinstance(self._anchors, int) else None
        links = [each.link for each in self.ways.values()]
        wanted = self._anchors is not None and way.base is not None and not anchor_is_coming
        if wanted and anchor_is_due(way.version, links, cadence):
            bases.append(None)
        return bases

    @property
    def longest_skip(self) -> int:
        return max(self._skips, default=0)


class Upkeep(Ways):
    """Follows the commits of a publisher and adds ways to the versions that it has published."""

    def __init__(self, making: Making, skips: Sequence[int], anchors: int | str | None) -> None:
        super().__init__(skips, anchors)
        self._making = making
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._busy: Task | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def committed(self, way: Way, history: History) -> None:
        """A version was committed: decide what else to make, and forget what nothing needs any more."""
        self.note(way)
        version = way.version
        with self._changed:
            coming = any(task.base is None for task in self._unmade())
            bases = self.due(way, history.oldest, anchor_is_coming=coming)
            self._tasks.extend(Task(history, version, base) for base in bases)
            if self._tasks and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="deltawire-upkeep", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            waiting = [task.oldest for task in self._unmade()]
            history.forget(min([version - self.longest_skip, *waiting]))
            self.digests = {each: state for each, state in self.digests.items() if each >= history.oldest}

    def _unmade(self) -> list[Task]:
        return [*self._tasks, *([] if self._busy is None else [self._busy])]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    return
                self._busy = self._tasks.popleft()
            try:
                self._make(self._busy)
                self.error = None
            except Exception as error:
                self.error = error
            finally:
                with self._changed:
                    self._busy = None
                    self._changed.notify_all()

    def _make(self, task: Task) -> None:
        making, run = self._making, self._making.run
        if task.base is None:
            way = put_anchor(
                run.store, run.id, task.history, task.version, self.digests[task.version], self.beside,
                making.max_file_bytes,
            )  # fmt: skip
        else:
            base = task.base, self.digests[task.base]
            # One thread: nobody waits for this, and the trainer wants its cores.
            facts, entries, _ = encode_delta(task.history, run.id, base, task.version, making.allowed, SERIAL)
            if facts.digest != self.digests[task.version]:
                raise ChainError(f"the delta {task.base} -> {task.version} would lead elsewhere")
            way = put_delta(run.store, facts, entries, making.max_file_bytes)
        run.commit_way(way)
        self.note(way)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to make; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and self._busy is None, timeout)

    def close(self) -> None:
        """Finish what is waiting, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
