"""Publishing a sharded model: every rank uploads its own shard, and all shards together are one version."""

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.errors import DeltawireError, Fenced, RankFailed, SnapshotMismatch
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.publish.publication import BasePublisher, Publication, check_cadence, refuse_arguments
from deltawire.publish.recheck import CHECK_SHARE, Recheck
from deltawire.publish.sharded.leader import Leader
from deltawire.publish.sharded.messages import Message, Ranks, error_fields, error_from
from deltawire.publish.sharded.worker import ShardWorker
from deltawire.publish.snapshots import check_snapshot
from deltawire.publish.sources import sharded_source
from deltawire.publish.upkeep import Hops
from deltawire.run.manifest import Manifest
from deltawire.run.plain import plain_metadata, plain_step
from deltawire.run.planner import SKIPS, check_skips
from deltawire.run.run import Run
from deltawire.run.signing import public_key_of
from deltawire.store import Store
from deltawire.tensors.weights import DTypeChoice

# Skip deltas and anchors wait while versions do, but no more of them than this: each keeps older versions in memory.
MOST_TASKS = 8

# Also calls that are still being staged.
ALL_CALLS = sys.maxsize


@dataclass(slots=True)
class Job:
    """A call of `publish` that is neither committed nor failed yet."""

    call: int
    publication: Publication
    is_anchor: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)
    diff_seconds: float = 0.0
    error: BaseException | None = None
    """Why this rank could not stage it."""
    staged_at: float = field(default_factory=time.monotonic)


class ShardedPublisher(BasePublisher):
    """Publishes a module with DTensor parameters (FSDP2, HSDP, tensor parallel) from all its ranks at once.

    Every rank creates one and calls `publish` as often as the others, as with any collective. Each rank compares,
    encodes and uploads its own shard; rank 0 commits. Nothing is gathered. Ranks communicate in a thread, through the
    store of torch.distributed. A rank that fails, or sends no heartbeat for `timeout` seconds, fails the version on all
    ranks; the next one covers it.

    Args:
        store: A URL, a path, or a `Store`.
        model: A module with DTensor parameters. It is read at each `publish`.
        group: The process group whose ranks share the model; the default group if not given.
        rank_store: The torch.distributed store that ranks communicate through; that of the default group if not given.
        timeout: Seconds without a heartbeat after which a rank counts as gone.
        run: The id of a new run. For a run that exists it must be its id.
        files: Files that are uploaded with the anchors: configuration, tokenizer.
        dtype: The dtype to publish parameters in, bf16 by default; buffers are published as they are.
        frozen: Names or patterns such as `visual.*` of tensors that do not change: in anchors, never compared.
        encoding: `auto`, `mirrorless` or names of encodings, as for `Publisher`.
        queue_size: How many versions may wait while one is being uploaded; `publish` waits when the queue is full.
        anchors: When to write another anchor: `auto`, a number of versions, or `None`: only the first.
        skips: Lengths of skip deltas, in versions; empty for none.
        sign_with: The file with the private key from `deltawire keygen`; only rank 0 reads it.
        snapshot: Where the snapshot lives: `device`, `host`, or `None`: on the GPU if the module is there.
        scratch: A folder for the changed bits of recent versions; by default the system's temporary folder.
        check_share: The share of the time between two versions that may be spent on hashing live weights again.
        max_file_bytes: Deltas and checkpoints larger than this are split into several files.
        threads: Threads for one operation on a rank; all cores by default.

    Raises:
        RankFailed: From a `Publication`, when another rank has failed or sends no heartbeat.
        SnapshotMismatch: From a `Publication`, when the check of live weights finds a difference; the publisher stops.
        Fenced: From a `Publication`, when another publisher has taken over the run; the publisher stops.

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
        # Only rank 0 signs.
        check_snapshot(snapshot)
        signs = sign_with if ranks.rank == 0 else None
        super().__init__(Run(store, sign_with=signs, public_key=None if signs is None else public_key_of(signs)))
        read = sharded_source(model, has_plain=ranks.rank == 0, dtype=dtype, frozen=frozen)
        self._worker = ShardWorker(
            read, self.run.store, ranks, allowed, max_file_bytes, snapshot, scratch, recheck, threads
        )
        self._queue_size = queue_size
        self._pending: deque[Job] = deque()
        self._leader: Leader | None = None
        if ranks.rank == 0:
            hops = Hops(skips, anchors)
            self._leader = Leader(self.run, ranks, self._worker, hops, files, max_file_bytes)
        self.resumed = False
        """Whether the next version will be a delta, because the weights are, or were, those of the last version."""
        self._refused: DeltawireError | None = None
        self._resolved: tuple[int, BaseException | None] = 0, None
        self._closing = self._is_writing = False
        # Staging one call at a time; the queue has a lock of its own.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        ranks.start(lambda: (self._worker.num_calls, self._is_busy))
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
            self._ranks.answer(lambda command=command: self._worker.do(command))  # type: ignore[misc]
        if command["kind"] == "refused":
            raise error_from(command["error"])
        self.version, self.resumed = command["version"], command["resumed"]
        if not self.resumed:
            self._worker.start_over()

    @property
    def num_waiting(self) -> int:
        """How many versions are staged and not committed yet."""
        return len(self._pending)

    @property
    def _is_busy(self) -> bool:
        return bool(self._pending) or self._is_writing or bool(self._leader is not None and self._leader.tasks)

    def publish(
        self,
        *weights: Any,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        anchor: bool = False,
        **unknown: Any,
    ) -> Publication:
        """Publish the current weights as the next version. All ranks call this.

        Returns after the diff; encode, upload and commit run in the background. The weights may change again as soon as
        this returns.

        Args:
            step: The number of the optimizer step, the same on all ranks.
            metadata: Anything that JSON can hold; that of rank 0 is published.
            anchor: Upload all weights, as for the first version. Needed when names, shapes, dtypes or placements have
                changed.

        Returns:
            A handle to wait for the commit with.

        Raises:
            UnknownParameter: A tensor was added or removed; call `publish(anchor=True)` on all ranks.
            ShapeMismatch: A tensor has another shape, dtype or placement; call `publish(anchor=True)` on all ranks.
            TypeError: Weights or an unknown option were passed; weights are given to the constructor.
        """
        refuse_arguments(self, weights, unknown)
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) <= self._queue_size or self._closing)
        with self._turn:
            self._check_open()
            version = (-1 if self.version is None else self.version) + 1 + len(self._pending)
            job = Job(self._worker.num_calls + 1, Publication(version, step), anchor)
            started = time.perf_counter()
            try:
                self._worker.stage(anchor, step)
                # Only now: a rejected call counts too, or the ranks would count differently.
                job.publication.step = plain_step(step)
                job.metadata = plain_metadata(metadata)
                job.diff_seconds = time.perf_counter() - started
            except BaseException as error:
                job.error = error
                job.publication._is_seen = True
                raise
            finally:
                # Also one that failed: the other ranks have to know.
                self._add(job)
        return job.publication

    def _add(self, job: Job) -> None:
        with self._changed:
            call, error = self._resolved
            if job.call > call:
                self._pending.append(job)
                self._changed.notify_all()
                return
        # This rank is late: the others have gone on without it, or the thread has ended.
        job.publication._finish(error)
        if error is not None:
            self.num_failed += 1
            self._failed([job.publication])

    def _check_open(self) -> None:
        if self._refused is not None:
            raise type(self._refused)(self._refused.message, **self._refused.fields)
        if self._closing:
            raise ValueError("this publisher is closed: make a new one to publish again")

    def _work(self) -> None:
        """The background thread. However it ends, all pending calls are resolved."""
        try:
            if self._leader is None:
                self._follow()
            else:
                self._lead(self._leader)
        except Exception as error:
            self._refused = error_from(error_fields(error, self.rank))
        finally:
            self._closing = True
            self._fail_call(
                ALL_CALLS, self._refused or ValueError("this publisher is closed: make a new one to publish again")
            )
            if self._leader is not None:
                with suppress(RankFailed):
                    self._ranks.send({"kind": "stop"}, asks=True)
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
                self._write_hop(leader)
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
                leader.base = None if job.is_anchor else leader.base
                raise job.error
            manifest, seconds = leader.publish(job.call, job.publication.step, job.metadata, job.is_anchor)
        except BaseException as error:
            starts_over = leader.note_failure(job.call)
            command = {"kind": "failed", "call": job.call, "starts_over": starts_over, "error": error_fields(error)}
            self._send(command)
            self._worker.do(command)
            self._fail_call(job.call, error)
            return
        stats = {
            **seconds,
            "version": manifest.version,
            "num_changed": manifest.hop.num_changed,
            "num_elements": manifest.num_elements,
            "density": manifest.hop.num_changed / max(manifest.num_elements, 1),
            "num_bytes": manifest.hop.num_bytes,
            "full_bytes": sum(leader.model.num_bytes.values()),
        }
        self._note(leader, manifest, job.call, stats)

    def _resolve_commit(self, leader: Leader) -> None:
        resolved = leader.resolve_commit()
        if resolved is not None:
            self._note(leader, *resolved, {})

    def _note(self, leader: Leader, manifest: Manifest, call: int, stats: Mapping[str, Any]) -> None:
        oldest = leader.note(manifest, call)
        command = {"kind": "committed", "call": call, "oldest": oldest, "version": manifest.version, "stats": stats}
        self._send(command)
        self._finish_call(call, manifest.version, stats)
        self._worker.do(command)

    def _send(self, command: Message) -> None:
        # A version stays committed even if others do not hear of it. But a rank that missed a command takes no more.
        try:
            self._ranks.send(command)
        except RankFailed as error:
            self._refused = self._refused or error

    def _write_hop(self, leader: Leader) -> None:
        self._is_writing = True
        task = leader.tasks.popleft()
        try:
            leader.write_hop(task)
            leader.hops.error = None
        except Exception as error:
            leader.hops.error = error
            if isinstance(error, RankFailed):
                # The only effect is that routes get longer.
                leader.tasks.clear()
        finally:
            # No rank needs pieces from another any more.
            self._send({"kind": "rest"})
            self._worker.do({"kind": "rest"})
            with self._changed:
                self._is_writing = False
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
                self._fail_call(self._worker.num_calls, error)
                if self._closing or _is_lost(error):
                    return
            if self._closing and not self._pending and time.monotonic() - idle_since > self._ranks.timeout:
                return

    def _obey(self, command: Message) -> bool:
        """Execute a command of rank 0; whether that was the last."""
        kind = command["kind"]
        if kind == "stop":
            self._ranks.answer(dict)
            stopped = RankFailed("rank 0 has stopped: see its log", rank=0, reason="it has stopped")
            if not self._closing:
                self._refused = self._refused or stopped
            self._fail_call(ALL_CALLS, stopped)
            return True
        if kind == "rest":
            self._worker.do(command)
        elif kind == "failed":
            self._worker.do(command)
            self._fail_call(command["call"], error_from(command["error"]))
        elif kind == "committed":
            self._finish_call(command["call"], command["version"], command["stats"])
            self._worker.do(command)
        else:
            self._ranks.answer(lambda: self._worker.do(command))
        return False

    def _check_leader(self) -> None:
        """Fail calls that rank 0 has not made within the timeout."""
        now = time.monotonic()
        late = [job for job in list(self._pending) if now - job.staged_at > self._ranks.timeout]
        for job in late:
            if job.call > self._ranks.beats[0].num_published:
                reason = f"it has not called publish for the {job.call}. time within {self._ranks.timeout} s"
                self._fail_call(job.call, RankFailed(f"rank 0: {reason}", rank=0, reason=reason))

    # All

    def _finish_call(self, call: int, version: int, stats: Mapping[str, Any]) -> None:
        """Resolve a call that was committed, and all calls before it."""
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
            call = max(call, self._worker.num_calls)
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
        """Wait until everything published is committed; on rank 0 also until its skip deltas and anchors are written.

        Args:
            timeout: Seconds to wait; no limit by default.

        Raises:
            TimeoutError: It took longer than `timeout`.
            Exception: Why a version failed, if nobody has seen that yet and no later version has covered it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_busy, timeout):
                raise TimeoutError(
                    f"there is still something to publish after {timeout} s: wait longer, or call close()"
                )
        self._raise_failure()

    def close(self) -> None:
        """Commit what is staged, finish skip deltas and anchors, and stop. All ranks call this.

        Raises what `flush` raises.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._ranks.close()
        self._raise_failure()


def _is_lost(error: BaseException) -> TypeGuard[RankFailed]:
    """Whether the ranks can no longer communicate, so that all later versions would fail too."""
    return isinstance(error, RankFailed) and bool(error.fields.get("is_lost"))
