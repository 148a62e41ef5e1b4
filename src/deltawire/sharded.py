"""Publishing from a model that is spread over ranks: every rank its own shard, one version of all."""

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from deltawire.chain import SKIPS, check_skips
from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.errors import DeltawireError, Fenced, RankFailed, SnapshotMismatch
from deltawire.holder import Holder
from deltawire.leader import Leader
from deltawire.manifest import Manifest
from deltawire.parts import MAX_FILE_BYTES
from deltawire.plain import plain_metadata, plain_step
from deltawire.publication import BasePublisher, Publication, check_cadence, refuse_weights
from deltawire.ranks import Message, Ranks, error_fields, error_from
from deltawire.recheck import CHECK_SHARE, Recheck
from deltawire.runs import Run
from deltawire.signing import public_key_of
from deltawire.snapshots import check_snapshot
from deltawire.sources import sharded_source
from deltawire.store import Store
from deltawire.upkeep import Ways
from deltawire.weights import DTypeChoice

# Further ways wait while versions do, but no more of them than this: each needs the weights of older versions.
MOST_TASKS = 8

# Also those that are still being staged.
ALL_CALLS = sys.maxsize


@dataclass(slots=True)
class Job:
    """A call of `publish` that is neither committed nor has failed."""

    call: int
    publication: Publication
    is_anchor: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)
    diff_seconds: float = 0.0
    error: BaseException | None = None
    """Why this rank has refused it."""
    staged_at: float = field(default_factory=time.monotonic)


class ShardedPublisher(BasePublisher):
    """Publishes a module with DTensor parameters (FSDP2, HSDP, tensor parallel) from all its ranks at once.

    Every rank makes one and calls `publish` as often as the others, as with any collective. It compares, encodes and
    uploads its own shard; rank 0 commits. Nothing is gathered. Ranks talk in a thread, through the store of
    torch.distributed. A rank that fails, or gives no sign of life for `timeout` seconds, fails the version on all
    ranks; the next one covers it. `frozen`, `check_share` and other options are those of `Publisher`.

    >>> with ShardedPublisher("s3://bucket/run", model) as publisher:  # doctest: +SKIP
    ...     publisher.publish(step=1)
    """

    def __init__(
        self,
        store: str | Path | Store,
        model: Any,
        *,
        group: Any = None,
        rank_store: Any = None,
        timeout: float = 60.0,
        run: str | None = None,
        files: Sequence[str | Path] = (),
        dtype: DTypeChoice = None,
        frozen: Sequence[str] = (),
        encoding: EncodingChoice = "auto",
        queue_size: int = 1,
        anchors: int | str | None = "auto",
        skips: Sequence[int] = SKIPS,
        sign_with: str | Path | None = None,
        snapshot: str | None = None,
        scratch: Path | None = None,
        check_share: float = CHECK_SHARE,
        max_file_bytes: int = MAX_FILE_BYTES,
        threads: int | None = None,
    ) -> None:
        check_cadence(anchors, queue_size)
        check_skips(skips)
        if timeout <= 0:
            raise ValueError(f"timeout must be more than 0 s, got {timeout}")
        allowed, recheck = allowed_encodings(encoding), Recheck(check_share)
        self._ranks = ranks = Ranks.of(group, rank_store, timeout)
        self.rank = ranks.rank
        # Only rank 0 writes documents.
        check_snapshot(snapshot)
        signs = sign_with if ranks.rank == 0 else None
        super().__init__(Run(store, sign_with=signs, public_key=None if signs is None else public_key_of(signs)))
        read = sharded_source(model, has_plain=ranks.rank == 0, dtype=dtype, frozen=frozen)
        self._holder = Holder(read, self.run.store, ranks, allowed, max_file_bytes, snapshot, scratch, recheck, threads)
        self._queue_size = queue_size
        self._pending: deque[Job] = deque()
        self._leader: Leader | None = None
        if ranks.rank == 0:
            ways = Ways(skips, anchors)
            self._leader = Leader(self.run, ranks, self._holder, ways, files, max_file_bytes)
        self.resumed = False
        """Whether the next version will be a delta: the weights are those of the last version, or have been."""
        self._refused: DeltawireError | None = None
        self._resolved: tuple[int, BaseException | None] = 0, None
        self._closing = self._is_making = False
        # Staging one call at a time; the queue has a lock of its own.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        ranks.start(lambda: (self._holder.num_calls, self._is_busy))
        try:
            if self._leader is not None:
                self._leader.start(run)
                self.version, self.resumed = self._leader.version, self._leader.base is not None
            else:
                self._join_run()
        except BaseException:
            ranks.close()
            raise
        self._thread = threading.Thread(target=self._work, name="deltawire-publish", daemon=True)
        self._thread.start()

    def _join_run(self) -> None:
        while (command := self._ranks.wait_for_command())["kind"] not in ("started", "refused"):
            self._ranks.answer(lambda command=command: self._holder.do(command))  # type: ignore[misc]
        if command["kind"] == "refused":
            raise error_from(command["error"])
        self.version, self.resumed = command["version"], command["resumed"]
        if not self.resumed:
            self._holder.start_anew()

    @property
    def num_waiting(self) -> int:
        """How many versions are staged and not committed yet."""
        return len(self._pending)

    @property
    def _is_busy(self) -> bool:
        return bool(self._pending) or self._is_making or bool(self._leader is not None and self._leader.tasks)

    def publish(
        self, *weights: Any, step: int | None = None, metadata: Mapping[str, Any] | None = None, anchor: bool = False
    ) -> Publication:
        """Make the weights as they are now the next version. They may change again as soon as this returns.

        All ranks call this, with the same step; metadata is that of rank 0. `anchor=True` sends all
        weights, as for the first version: needed when names, shapes, dtypes or placements have changed.
        """
        refuse_weights(weights)
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) <= self._queue_size or self._closing)
        with self._turn:
            self._check_open()
            version = (-1 if self.version is None else self.version) + 1 + len(self._pending)
            job = Job(self._holder.num_calls + 1, Publication(version, step), anchor)
            started = time.perf_counter()
            try:
                self._holder.stage(anchor, step)
                # Only now: a call that is refused counts too, or the ranks would no longer count alike.
                job.publication.step = plain_step(step)
                job.metadata = plain_metadata(metadata)
                job.diff_seconds = time.perf_counter() - started
            except BaseException as error:
                job.error = error
                job.publication._is_seen = True
                raise
            finally:
                # Also one that failed: the others have to be told.
                self._add(job)
        return job.publication

    def _add(self, job: Job) -> None:
        with self._changed:
            call, error = self._resolved
            if job.call > call:
                self._pending.append(job)
                self._changed.notify_all()
                return
        # This rank comes late: the others have gone on without it, or there is nobody left to do it.
        job.publication._finish(error)
        if error is not None:
            self.num_failed += 1
            self._failed([job.publication])

    def _check_open(self) -> None:
        if self._refused is not None:
            raise type(self._refused)(self._refused.message, **self._refused.fields)
        if self._closing:
            raise ValueError("this publisher is closed")

    def _work(self) -> None:
        """Whatever ends it, nobody waits for it then."""
        try:
            if self._leader is None:
                self._follow()
            else:
                self._lead(self._leader)
        except Exception as error:
            self._refused = error_from(error_fields(error, self.rank))
        finally:
            self._closing = True
            self._fail_call(ALL_CALLS, self._refused or ValueError("this publisher is closed"))
            if self._leader is not None:
                with suppress(RankFailed):
                    self._ranks.tell({"kind": "stop"}, asks=True)
                    self._ranks.answers()

    # Rank 0

    def _lead(self, leader: Leader) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or leader.tasks or self._closing)
                job = self._pending[0] if self._pending else None
                if job is None and not leader.tasks:
                    break
            if job is not None and len(leader.tasks) <= MOST_TASKS:
                self._publish_job(leader, job)
            else:
                self._make_way(leader)
        if self._refused is None:
            # Where it stays unknown whether a version exists, whoever resumes the run will see.
            with suppress(DeltawireError):
                self._settle(leader)

    def _publish_job(self, leader: Leader, job: Job) -> None:
        try:
            if self._refused is not None:
                raise self._refused
            self._settle(leader)
            if job.error is not None:
                leader.base = None if job.is_anchor else leader.base
                raise job.error
            manifest, seconds = leader.publish(job.call, job.publication.step, job.metadata, job.is_anchor)
        except BaseException as error:
            starts_anew = leader.note_failure(job.call)
            command = {"kind": "failed", "call": job.call, "starts_anew": starts_anew, "error": error_fields(error)}
            self._tell(command)
            self._holder.do(command)
            self._fail_call(job.call, error)
            return
        stats = {
            **seconds,
            "version": manifest.version,
            "num_changed": manifest.way.num_changed,
            "num_elements": manifest.num_elements,
            "density": manifest.way.num_changed / max(manifest.num_elements, 1),
            "num_bytes": manifest.way.num_bytes,
            "full_bytes": sum(leader.model.num_bytes.values()),
        }
        self._note(leader, manifest, job.call, stats)

    def _settle(self, leader: Leader) -> None:
        settled = leader.settle()
        if settled is not None:
            self._note(leader, *settled, {})

    def _note(self, leader: Leader, manifest: Manifest, call: int, stats: Mapping[str, Any]) -> None:
        oldest = leader.note(manifest, call)
        command = {"kind": "committed", "call": call, "oldest": oldest, "version": manifest.version, "stats": stats}
        self._tell(command)
        self._finish_call(call, manifest.version, stats)
        self._holder.do(command)

    def _tell(self, command: Message) -> None:
        # A version is what it is, whether the others hear of it or not. But who has missed a command takes no other.
        try:
            self._ranks.tell(command)
        except RankFailed as error:
            self._refused = self._refused or error

    def _make_way(self, leader: Leader) -> None:
        self._is_making = True
        task = leader.tasks.popleft()
        try:
            leader.make(task)
            leader.ways.error = None
        except Exception as error:
            leader.ways.error = error
            if isinstance(error, RankFailed):
                # The chain gets longer than it should be, no more.
                leader.tasks.clear()
        finally:
            # Nobody needs another rank's pieces any more.
            self._tell({"kind": "rest"})
            self._holder.do({"kind": "rest"})
            with self._changed:
                self._is_making = False
                self._changed.notify_all()

    # All others

    def _follow(self) -> None:
        idle_since = time.monotonic()
        while True:
            try:
                command = self._ranks.next_command(self._ranks.timeout / 16)
                if command is not None and self._obey(command):
                    return
                if command is None and (self._pending or self._closing):
                    self._ranks.check_alive([0])
                    self._check_leader()
                if command is not None or not self._closing or self._ranks.beats[0].is_busy:
                    idle_since = time.monotonic()
            except Exception as error:
                self._fail_call(self._holder.num_calls, error)
                if self._closing or _is_lost(error):
                    return
            if self._closing and not self._pending and time.monotonic() - idle_since > self._ranks.timeout:
                return

    def _obey(self, command: Message) -> bool:
        """Do what rank 0 has told; whether that was the last."""
        kind = command["kind"]
        if kind == "stop":
            self._ranks.answer(dict)
            stopped = RankFailed("rank 0 has stopped", rank=0, reason="it has stopped")
            if not self._closing:
                self._refused = self._refused or stopped
            self._fail_call(ALL_CALLS, stopped)
            return True
        if kind == "rest":
            self._holder.do(command)
        elif kind == "failed":
            self._holder.do(command)
            self._fail_call(command["call"], error_from(command["error"]))
        elif kind == "committed":
            self._finish_call(command["call"], command["version"], command["stats"])
            self._holder.do(command)
        else:
            self._ranks.answer(lambda: self._holder.do(command))
        return False

    def _check_leader(self) -> None:
        """Give up what rank 0 does not know of for too long."""
        now = time.monotonic()
        late = [job for job in list(self._pending) if now - job.staged_at > self._ranks.timeout]
        for job in late:
            if job.call > self._ranks.beats[0].num_published:
                reason = f"it has not called publish for the {job.call}. time within {self._ranks.timeout} s"
                self._fail_call(job.call, RankFailed(f"rank 0: {reason}", rank=0, reason=reason))

    # All

    def _finish_call(self, call: int, version: int, stats: Mapping[str, Any]) -> None:
        """A call was committed, and with it all before."""
        self.version, self.resumed = version, True
        self.num_published += 1
        self._covered()
        for job in self._take(call, None):
            job.publication.version = version
            job.publication.stats = {"diff_seconds": job.diff_seconds, **stats}
            self.last = job.publication
            job.publication._finish()

    def _fail_call(self, call: int, error: BaseException) -> None:
        if isinstance(error, (Fenced, SnapshotMismatch)) or _is_lost(error):
            self._refused = error
            call = max(call, self._holder.num_calls)
        jobs = self._take(call, error)
        self.num_failed += len(jobs)
        for job in jobs:
            job.publication._finish(error)
        self._failed([job.publication for job in jobs])

    def _take(self, call: int, error: BaseException | None) -> list[Job]:
        with self._changed:
            if call >= self._resolved[0]:
                self._resolved = call, error
            jobs = [job for job in self._pending if job.call <= call]
            self._pending = deque(job for job in self._pending if job.call > call)
            self._changed.notify_all()
        return jobs

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was published is committed; on rank 0 also until further ways are made.

        Raises why a version has failed, where nobody has seen that yet and no later one has covered it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_busy, timeout):
                raise TimeoutError(f"there is still something to publish after {timeout} s")
        self._tell_failure()

    def close(self) -> None:
        """Commit what is staged, finish what makes the chain short, and stop; raises as `flush` does. All ranks call
        this.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._ranks.close()
        self._tell_failure()


def _is_lost(error: BaseException) -> TypeGuard[RankFailed]:
    """Whether the ranks can no longer talk to each other, so that all later versions would fail too."""
    return isinstance(error, RankFailed) and bool(error.fields.get("is_lost"))
