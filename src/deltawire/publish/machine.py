"""How all publishers work: `publish` stages the weights as a call, and a thread makes versions of calls.

The worker stages, encodes and uploads what this process holds; the leader decides, collects and commits. A call that
fails is not undone: the next version is a delta from the last committed call to a later one, and covers it. With many
ranks each has a worker, rank 0 also the leader, and the others follow its commands (`sharded/`).
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from deltawire.errors import DeltawireError, RankFailed
from deltawire.publish.alone import Alone, Message, error_fields, error_from, final
from deltawire.publish.leader import Leader, Task
from deltawire.publish.publication import Publication, check_caller
from deltawire.publish.reference import Reference
from deltawire.publish.settings import Settings
from deltawire.publish.worker import Worker
from deltawire.redact import redacted
from deltawire.run.keys import check_version
from deltawire.run.manifest import Manifest
from deltawire.run.plain import plain_metadata, plain_step
from deltawire.run.run import Run
from deltawire.run.signing import public_key_of
from deltawire.store import Store

log = logging.getLogger("deltawire")

# With many ranks, skip deltas and anchors wait while versions do, but no more of them than this: each keeps older
# versions in memory.
MOST_TASKS = 8

# Also calls that are still being staged.
ALL_CALLS = sys.maxsize
CLOSED = "this publisher is closed: create a new one to publish again"


@dataclass(slots=True)
class Job:
    """A call of `publish` that is neither committed nor failed yet."""

    call: int
    publications: list[Publication]
    """Those of earlier calls that it has taken in, and its own."""
    is_anchor: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    """Why this rank could not stage it."""
    is_queued: bool = False
    staged_at: float = field(default_factory=time.monotonic)


class BasePublisher:
    """What Publisher and ShardedPublisher have in common."""

    def __init__(
        self, run: Run, name: str | None, ranks: Alone, worker: Worker, settings: Settings,
        find_files: Callable[[], list[Path]], *, coalesces: bool = False,
        reference: Callable[[], Reference] | None = None,
    ) -> None:  # fmt: skip
        self.run = run
        self.version: int | None = None
        """The last version that was committed."""
        self.resumed = False
        """Whether the next version will be a delta, because the weights are, or were, those of the last version."""
        self.last: Publication | None = None
        self.after_commit: Callable[[int], object] | None = None
        """Called with each committed version, in the publishing thread, so it must be quick: see `Nudges`."""
        self.num_published = self.num_failed = 0
        self._num_told = 0
        """The bytes that the versions so far have told as uploaded."""
        self._failures: list[tuple[int, Publication]] = []
        """The failed calls that no commit has covered yet."""
        self._ranks, self._worker, self._reference = ranks, worker, reference
        self._leader = Leader(run, ranks, worker, settings, find_files) if ranks.rank == 0 else None
        self._queue_size, self._coalesces = settings.queue_size, coalesces
        self._pending: deque[Job] = deque()
        self._refused: DeltawireError | None = None
        self._resolved: tuple[int, BaseException | None] = 0, None
        self._closing = False
        # Its thread does not survive a fork.
        self._process = os.getpid()
        # Staging one call at a time; the queue has a lock of its own.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._upkeep: threading.Thread | None = None
        ranks.start(lambda: (worker.num_calls, self._is_busy))
        try:
            self._start(name)
        except BaseException:
            ranks.close()
            raise
        self._reference = None
        self._thread = threading.Thread(target=self._work, name="deltawire-publish", daemon=True)
        self._thread.start()
        atexit.register(self._tell_unfinished)

    def _start(self, name: str | None) -> None:
        if self._leader is not None:
            self._leader.start(name, self._reference)
            self.version, self.resumed = self._leader.version, self._leader.base is not None

    @property
    def num_waiting(self) -> int:
        """How many versions are staged and not committed yet."""
        return len(self._pending)

    @property
    def snapshot(self) -> str | None:
        """Where the snapshot is kept: `device`, `host`, or `device and host`; None before there is one."""
        held = self._worker.latest
        return None if held is None else held.history.place

    @property
    def _is_busy(self) -> bool:
        return bool(self._pending) or bool(self._leader is not None and self._leader.tasks)

    def publish(
        self, *weights: Any, step: int | None = None, metadata: Mapping[str, Any] | None = None, anchor: bool = False,
        **unknown: Any,
    ) -> Publication:  # fmt: skip
        """Publish the current weights as the next version. With several ranks, all of them call this.

        Returns when the weights may change again; encode, upload and commit run in the background. Weights on a GPU are
        compared by work that is queued on its current stream: what is queued there later comes after it.

        Args:
            step: The number of the optimizer step, for readers; the same on all ranks.
            metadata: Anything that JSON can represent, for readers; that of rank 0 is published.
            anchor: Upload all weights, as for the first version. Needed when names, shapes, dtypes or placements have
                changed.

        Returns:
            A handle for waiting for the commit.

        Raises:
            UnknownParameter: A tensor was added or removed; call `publish(anchor=True)`.
            ShapeMismatch: A tensor has another shape, dtype or placement; call `publish(anchor=True)`.
            TypeError: Weights or an unknown option were passed; weights are given to the constructor.
        """
        if weights:
            kind = type(self).__name__
            raise TypeError(f"publish() takes no weights, since {kind}(...) already has them: call publish(step=...)")
        if unknown:
            wrong = min(unknown)
            raise TypeError(f"publish() has no option {wrong!r}: call publish(step=..., metadata=..., anchor=...)")
        self._check_caller()
        with self._changed:
            merges = self._coalesces and self._queue_size > 0
            self._changed.wait_for(lambda: merges or len(self._pending) <= self._queue_size or self._closing)
        with self._turn:
            self._check_open()
            if self._coalesces:
                # Before a call that waits is taken back for one with wrong arguments.
                plain_step(step), plain_metadata(metadata)
            publication = Publication(0, step, self._thread)
            job = Job(self._worker.num_calls + 1, [publication], anchor)
            try:
                if not anchor:
                    self._take_waiting(job)
                with self._changed:
                    publication.version = (-1 if self.version is None else self.version) + 1 + len(self._pending)
                started = time.perf_counter()
                check_version(publication.version)
                publication.step, job.metadata = self._worker.stage(anchor, step, metadata)
                job.stats = {"diff_seconds": time.perf_counter() - started, "coalesced": len(job.publications) - 1}
                self._add(job)
            except BaseException as error:
                self._give_up(job, error)
                raise
        return publication

    def _check_caller(self) -> None:
        """Refuse who would wait forever, before any lock: in a forked process, a thread that is gone may hold it."""
        check_caller(self._process, self._thread)

    def _check_open(self) -> None:
        if self._refused is not None:
            raise type(self._refused)(self._refused.message, **self._refused.fields)
        if self._closing:
            raise ValueError(CLOSED)

    def _take_waiting(self, job: Job) -> None:
        """Take back the last call that waits if the queue is full: the new one takes its place, and holds both."""
        with self._changed:
            is_full = len(self._pending) > max(self._queue_size, 1)
            if not self._coalesces or not is_full or self._pending[-1].is_anchor:
                return
            waiting = self._pending[-1]
            job.call, job.publications = waiting.call, [*waiting.publications, *job.publications]
            self._pending.pop()
        self._worker.take_back(job.call)

    def _give_up(self, job: Job, error: BaseException) -> None:
        """End a call that raises, unless it is queued already. If it is staged, what follows must not build on it."""
        if job.is_queued:
            return
        *waiting, own = job.publications
        job.error, own._is_seen = error, True
        if self._ranks.others:
            self._add(job)
            return
        self._worker.take_back(job.call)
        own._finish(error)
        if waiting:
            self._end([replace(job, publications=waiting)], error)

    def _add(self, job: Job) -> None:
        """Queue a call, also one that could not be staged, where other ranks have to know."""
        with self._changed:
            call, error = self._resolved
            if job.call > call:
                job.is_queued = True
                self._pending.append(job)
                self._changed.notify_all()
                return
        # This rank is late: the others have gone on without it, or the thread has ended.
        self._end([job], error)

    def _work(self) -> None:
        """The background thread. However it ends, all pending calls are resolved."""
        try:
            self._serve()
        except Exception as error:
            self._refused = error_from(error_fields(error, self._ranks.rank if self._ranks.others else None))
        finally:
            self._closing = True
            self._fail_call(ALL_CALLS, self._refused or ValueError(CLOSED))
            if self._leader is not None:
                with suppress(RankFailed):
                    self._ranks.send({"kind": "stop"}, asks=True)
                    self._ranks.answers()

    def _serve(self) -> None:
        """Make versions of calls until closed."""
        leader = self._leader
        assert leader is not None
        # Ranks follow one command at a time, so their extra hops are written in between.
        hops: deque[Task] = leader.tasks if self._ranks.others else deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or hops or self._closing)
                job = self._pending[0] if self._pending else None
                if job is None and not hops:
                    break
            if job is not None and len(hops) <= MOST_TASKS:
                self._publish_job(leader, job)
            else:
                self._write_hop(leader, hops[0])
        if self._refused is None:
            # If it stays unknown whether a version exists, the next publisher of this run finds out.
            with suppress(DeltawireError):
                self._resolve_commit(leader)

    def _publish_job(self, leader: Leader, job: Job) -> None:
        try:
            if self._refused is not None:
                raise self._refused
            self._resolve_commit(leader)
            if job.error is not None:
                raise job.error
            manifest, seconds = leader.publish(job.call, job.publications[-1].step, job.metadata, job.is_anchor)
        except BaseException as error:
            with self._changed:
                starts_over = leader.note_failure(job.call, job.is_anchor)
            command = {"kind": "failed", "call": job.call, "starts_over": starts_over, "error": error_fields(error)}
            self._send(command)
            self._worker.do(command)
            self._fail_call(job.call, error)
            return
        before, self._num_told = self._num_told, self.run.uploaded.bytes.total()
        stats = {
            **seconds,
            "version": manifest.version,
            "num_changed": manifest.hop.num_changed,
            "num_elements": manifest.num_elements,
            "density": manifest.hop.num_changed / max(manifest.num_elements, 1),
            "num_bytes": manifest.hop.num_bytes,
            "all_bytes": self._num_told - before,
            "full_bytes": sum(leader.model.num_bytes.values()),
        }
        self._note(leader, manifest, job.call, stats)

    def _resolve_commit(self, leader: Leader) -> None:
        """Find out whether a commit whose response was lost has happened."""
        manifest = leader.commits.resolve()
        if manifest is not None:
            self._note(leader, manifest, leader.unresolved_call, {})

    def _note(self, leader: Leader, manifest: Manifest, call: int, stats: Mapping[str, Any]) -> None:
        """Tell everybody of a commit. Nothing from here on can make the version fail."""
        with self._changed:
            oldest = leader.note(manifest, call)
        command = {"kind": "committed", "call": call, "oldest": oldest, "version": manifest.version, "stats": stats}
        self._send(command)
        self._finish_call(call, manifest.version, stats)
        if self.after_commit is not None:
            try:
                self.after_commit(manifest.version)
            except Exception:
                log.warning("after_commit failed for version %s", manifest.version, exc_info=True)
        self._worker.do(command)
        with self._changed:
            if leader.tasks and self._upkeep is None and not self._ranks.others:
                self._upkeep = threading.Thread(
                    target=self._write_hops, args=(leader,), name="deltawire-upkeep", daemon=True
                )
                self._upkeep.start()

    def _send(self, command: Message) -> None:
        # A version stays committed even if others do not hear of it. But a rank that missed a command takes no more.
        try:
            self._ranks.send(command)
        except RankFailed as error:
            self._refused = self._refused or error

    def _write_hops(self, leader: Leader) -> None:
        """The thread that writes extra hops next to versions, as long as there are any."""
        while True:
            with self._changed:
                if not leader.tasks:
                    self._upkeep = None
                    return
                task = leader.tasks[0]
            self._write_hop(leader, task)

    def _write_hop(self, leader: Leader, task: Task) -> None:
        try:
            leader.do(task)
            leader.hops.error = None
        except Exception as error:
            leader.hops.error = error
            if isinstance(error, RankFailed):
                # The only effect is that routes get longer.
                leader.tasks.clear()
        finally:
            # No rank needs pieces from another any more.
            rest = {"kind": "rest", "call": task.target.call}
            self._send(rest)
            self._worker.do(rest)
            with self._changed:
                if task in leader.tasks:
                    leader.tasks.remove(task)
                self._changed.notify_all()

    def _finish_call(self, call: int, version: int, stats: Mapping[str, Any]) -> None:
        """Resolve a call that was committed, and all calls before it."""
        with self._changed:
            self.version, self.resumed = version, True
            jobs = self._take(call, None)
            self.num_published += 1
            # The version holds what those before it could not deliver.
            self._failures = [each for each in self._failures if each[0] > call]
            for job in jobs:
                for publication in job.publications:
                    publication.version, publication.stats = version, {**job.stats, **stats}
                    self.last = publication
            self._end(jobs, None)

    def _fail_call(self, call: int, error: BaseException) -> None:
        if final(error) is not None:
            self._refused = final(error)
            call = max(call, self._worker.num_calls)
        # At once: who waits in `flush` must not see an empty queue before the failure.
        with self._changed:
            self._end(self._take(call, error), error)

    def _take(self, call: int, error: BaseException | None) -> list[Job]:
        """Take the calls up to this one from the queue."""
        with self._changed:
            if call >= self._resolved[0]:
                self._resolved = call, error
            jobs = [job for job in self._pending if job.call <= call]
            self._pending = deque(job for job in self._pending if job.call > call)
            self._changed.notify_all()
        return jobs

    def _end(self, jobs: Sequence[Job], error: BaseException | None) -> None:
        publications = [(job.call, publication) for job in jobs for publication in job.publications]
        failed = [] if error is None else [each for each in publications if not each[1]._is_seen]
        self.num_failed += 0 if error is None else len(jobs)
        if failed and not self._failures:
            log.warning("publishing version %s failed: %s", failed[0][1].version, error)
        with self._changed:
            self._failures += failed
            for _, publication in publications:
                publication._finish(error)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published is committed; in the process that commits, also for skip deltas and anchors.

        Args:
            timeout: Seconds to wait; no limit by default.

        Raises:
            TimeoutError: It took longer than `timeout`.
            Exception: Why a version failed, if that was not seen yet and no later version has covered it.
        """
        self._check_caller()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_busy, timeout):
                raise TimeoutError(f"publishing is not finished after {timeout} s: wait longer, or call close()")
        self._raise_failure()

    def close(self) -> None:
        """Commit what is staged, finish skip deltas and anchors, and stop. With several ranks, all of them call this.

        Raises what `flush` raises. In a forked process there is nothing to do.
        """
        if self._process != os.getpid():
            return
        self._check_caller()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        upkeep = self._upkeep
        if upkeep is not None:
            upkeep.join()
        self._ranks.close()
        atexit.unregister(self._tell_unfinished)
        self._raise_failure()

    def _tell_unfinished(self) -> None:
        """When the program ends, and with it the thread that commits."""
        if self._process == os.getpid() and self._pending:
            log.warning(
                "the program ends before all versions of %s are committed (%s left): call close(), or use `with`",
                redacted(self.run.store.url), len(self._pending),
            )  # fmt: skip

    def _raise_failure(self) -> None:
        """Raise a failure that nobody has seen, once."""
        with self._changed:
            failures, self._failures = self._failures, []
        # Who has seen that one failed knows it of those before, but not of later ones.
        seen = max((call for call, each in failures if each._is_seen), default=-1)
        for error in (each.error for call, each in failures if call > seen):
            if error is not None:
                raise error

    def attach(self, optimizer: Any, *, every: int = 1) -> Any:
        """Publish after every `every`-th step of a torch optimizer; steps are counted from 1.

        The optimizer may be one that Accelerate has prepared. A step that a gradient scaler skips does not count, nor
        one that only accumulates gradients. Returns the handle of the hook; call its `remove()` to stop.
        """
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if type(optimizer).__module__.startswith("accelerate."):
            optimizer = optimizer.optimizer  # which the wrapper steps; its own hooks fail
        if not hasattr(optimizer, "register_step_post_hook"):
            raise TypeError(f"{type(optimizer).__name__} has no hooks for steps: pass an optimizer of torch")
        steps = count(1)

        def publish(*_: object) -> None:
            step = next(steps)
            if step % every == 0:
                self.publish(step=step)

        return optimizer.register_step_post_hook(publish)

    def metrics(self) -> dict[str, float]:
        """Counts, sizes and seconds as a flat dictionary, for W&B, TensorBoard and similar trackers."""
        values = {"published": self.num_published, "failed": self.num_failed, "waiting": self.num_waiting}
        last = {} if self.last is None else self.last.stats
        if self._leader is not None:
            uploaded = self.run.uploaded.bytes
            values["uploaded_bytes"] = uploaded.total()
            values |= {f"uploaded_{kind[:-1].replace(' ', '_')}_bytes": size for kind, size in uploaded.items()}
        return {f"deltawire/publish/{name}": value for name, value in {**values, **last}.items() if value is not None}

    def __repr__(self) -> str:
        where = "" if self.snapshot is None else f", snapshot={self.snapshot!r}"
        return f"{type(self).__name__}({redacted(self.run.store.url)!r}, version={self.version}{where})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The error that ended the block goes first; a failed version was logged.
        with nullcontext() if kind is None else suppress(Exception):
            self.close()


def own_run(store: str | Path | Store, sign_with: str | Path | None) -> Run:
    """A run to publish to, whose documents must have the signature that they are given."""
    return Run(store, sign_with=sign_with, public_key=None if sign_with is None else public_key_of(sign_with))
