"""The trainer's side: finds what changed, and makes it a version, or leaves everything as it was."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltawire.chain import SKIPS, check_skips
from deltawire.checkpoint import Checkpoint
from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.commits import Commits
from deltawire.errors import DeltawireError, Fenced, SnapshotMismatch, UnknownParameter
from deltawire.history import History
from deltawire.keys import check_version
from deltawire.manifest import Manifest, Way
from deltawire.names import check_names, resolve_ties
from deltawire.parts import MAX_FILE_BYTES
from deltawire.plain import plain_metadata, plain_step
from deltawire.publication import BasePublisher, Publication, check_cadence, refuse_weights
from deltawire.recheck import CHECK_SHARE, Copied, Digests, Recheck
from deltawire.runs import Run
from deltawire.signing import public_key_of
from deltawire.snapshots import check_snapshot, new_history
from deltawire.sources import as_bits, matching_names, source_of
from deltawire.state import Digest
from deltawire.store import Store
from deltawire.upkeep import Making, Upkeep
from deltawire.upload import (
    advanced,
    box_digests,
    check_files,
    encode_delta,
    is_worth_sending,
    put_anchor,
    put_delta,
    put_files,
    whole_digest,
)
from deltawire.weights import DTypeChoice, Weights, tied_names, untied_name
from deltawire.workers import Workers

__all__ = ["Publication", "Publisher"]


@dataclass(slots=True)
class Job:
    """A version that is staged: what stands between the snapshot and the store."""

    version: int
    step: int | None
    metadata: Mapping[str, Any]
    publications: list[Publication]
    is_anchor: bool
    history: History
    before: History | None
    """The history that an anchor replaces."""
    measured: Digests = field(default_factory=dict)
    """Of an anchor: all live tensors."""
    copied: list[Copied] = field(default_factory=list)
    """Of any other version: those that are measured in the background."""
    digests: Digests = field(default_factory=dict)
    """What each tensor of the version contributes to the digest."""
    stats: dict[str, Any] = field(default_factory=dict)


class Publisher(BasePublisher):
    """Publishes the weights of a training run, version by version.

    `publish` finds what changed and returns; encoding, upload and commit go on in a thread. Versions are committed in
    order. When one fails, it and those after it are undone, so that the next one holds everything since the last that
    was committed. A failure that nobody has seen on its handle, and that no later version has covered, is raised by
    `flush` and `close`.

    Everything that a module's `state_dict` holds is published, and compared each time. `frozen` names what will not
    change, by patterns such as `visual.*`. `check_share` is the part of the time between two versions that may go into
    measuring live weights again, by another path than the publisher's snapshot: where they differ, the version fails
    with SnapshotMismatch and the publisher stops. 0 turns it off.

    >>> with Publisher("s3://bucket/run", model) as publisher:  # doctest: +SKIP
    ...     publisher.publish(step=1)
    """

    def __init__(
        self,
        store: str | Path | Store,
        weights: Any,
        *,
        run: str | None = None,
        base: Weights | None = None,
        files: Sequence[str | Path] = (),
        dtype: DTypeChoice = None,
        tied: Mapping[str, str] | None = None,
        frozen: Sequence[str] = (),
        encoding: EncodingChoice = "auto",
        queue_size: int = 1,
        when_full: str = "wait",
        anchors: int | str | None = "auto",
        skips: Sequence[int] = SKIPS,
        sign_with: str | Path | None = None,
        snapshot: str | None = None,
        scratch: Path | None = None,
        check_share: float = CHECK_SHARE,
        max_file_bytes: int = MAX_FILE_BYTES,
        threads: int | None = None,
    ) -> None:
        if when_full not in ("wait", "coalesce"):
            raise ValueError(f"when_full is 'wait' or 'coalesce', not {when_full!r}")
        check_cadence(anchors, queue_size)
        check_skips(skips)
        check_snapshot(snapshot)
        self._read = source_of(weights, dtype, frozen)
        self._recheck = Recheck(check_share)
        self._dtype, self._frozen = dtype, frozen
        self._stated_ties = None if tied is None else dict(tied)
        now = self._read()
        check_names(now)
        self._ties(now)
        self._fixed(now)
        self._queue_size, self._coalesces = queue_size, when_full == "coalesce"
        self._where, self._scratch, self._threads = snapshot, scratch, threads
        self._files = check_files(files) or _files_of(now)
        allowed = allowed_encodings(encoding)
        key = None if sign_with is None else public_key_of(sign_with)
        super().__init__(Run(store, sign_with=sign_with, public_key=key))
        self.run.start(run)
        self._commits = Commits(self.run)
        self._making = Making(self.run, allowed, max_file_bytes)
        self._upkeep = Upkeep(self._making, skips, anchors)
        self._keeps_history = bool(skips) or anchors is not None
        self._digest = Digest()
        self._history: History | None = None
        self._next = 0
        self._resume(now if base is None else base)
        self._pending: deque[Job] = deque()
        self._unsettled: Job | None = None
        self._stopped: DeltawireError | None = None
        self._closing = False
        # Staging and undoing exclude each other; the queue has a lock of its own.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="deltawire-publish", daemon=True)
        self._thread.start()

    def _resume(self, weights: Weights) -> None:
        """Take up the run where it is: go on from weights that are its last version, or else start with an anchor."""
        latest = self.run.latest()
        if latest is None:
            return
        manifest = self.run.manifest(latest)
        self.version, self._next, self._digest = latest, latest + 1, manifest.digest
        self._upkeep.note(*manifest.path, manifest.way)
        self._upkeep.beside = tuple(each for way in self._upkeep.path(latest) for each in way.beside)
        history = self._snapshot(weights, latest)
        with Workers(self._threads) as workers:
            digests = box_digests(history, latest, workers)
        if whole_digest(history, digests) == manifest.digest and history.tied == manifest.tied:
            self._history, self._recheck.expected = history, digests

    @property
    def resumed(self) -> bool:
        """Whether the next version will be a delta: the weights are those of the last version."""
        return self._history is not None

    def publish(
        self, *weights: Any, step: int | None = None, metadata: Mapping[str, Any] | None = None, anchor: bool = False
    ) -> Publication:
        """Make the weights as they are now the next version. They may change again as soon as this returns.

        `metadata` is free, as far as JSON goes. `anchor=True` sends all weights, as for the first version: needed when
        names, shapes or dtypes have changed.
        """
        refuse_weights(weights)
        step, metadata = plain_step(step), plain_metadata(metadata)
        self._wait_for_room()
        with self._turn:
            self._check_open()
            waiting = self._take_waiting(anchor)
            started = time.perf_counter()
            try:
                job = self._stage(step, metadata, anchor)
            except BaseException as error:
                for publication in waiting:
                    publication._finish(error)
                raise
            job.stats["diff_seconds"] = time.perf_counter() - started
            job.stats["coalesced"] = len(waiting)
            job.publications[:0] = waiting
            with self._changed:
                self._pending.append(job)
                self._changed.notify_all()
        return job.publications[-1]

    def _wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    len(self._pending) <= self._queue_size or (self._coalesces and self._queue_size) or self._closing
                )
            )

    def _check_open(self) -> None:
        if self._stopped is not None:
            raise type(self._stopped)(self._stopped.message, **self._stopped.fields)
        if self._closing:
            raise ValueError("this publisher is closed")

    def _take_waiting(self, anchor: bool) -> list[Publication]:
        """Undo the last version that waits, if the queue is full: the new one will hold both."""
        with self._changed:
            full = len(self._pending) > self._queue_size and len(self._pending) > 1
            if not (self._coalesces and full) or anchor or self._pending[-1].is_anchor:
                return []
            job = self._pending.pop()
        job.history.roll_back(job.version)
        self._next = job.version
        return job.publications

    def _stage(self, step: int | None, metadata: Mapping[str, Any], anchor: bool) -> Job:
        weights, version, before = self._read(), check_version(self._next), self._history
        publication = Publication(version, step)
        with Workers(self._threads) as workers:
            if anchor or before is None:
                history = self._snapshot(weights, version)
                job = Job(version, step, metadata, [publication], True, history, before)
                job.measured = self._recheck.measure(weights, history, workers)
                self._history = history
            else:
                self._check_names(weights)
                self._check_tied(weights, before.tied)
                fresh = as_bits(weights, self._dtype, before.tied)
                before.stage(version, fresh, workers, self._fixed(weights))
                job = Job(version, step, metadata, [publication], False, before, None)
                started = time.perf_counter()
                try:
                    job.copied = self._recheck.copy(weights, before)
                except BaseException:
                    before.roll_back(version)
                    raise
                job.stats["check_seconds"] = time.perf_counter() - started
        self._next = version + 1
        return job

    def _snapshot(self, weights: Weights, version: int) -> History:
        tied = self._ties(weights)
        self._check_tied(weights, tied)
        bits = as_bits(weights, self._dtype, tied)
        self._names = frozenset(getattr(weights, "live", weights))
        if not bits:
            raise ValueError("there are no tensors to publish: the mapping is empty")
        return new_history(bits, version, tied, self._making.allowed, self._where, self._scratch)

    def _ties(self, weights: Weights) -> dict[str, str]:
        return resolve_ties(tied_names(weights) if self._stated_ties is None else self._stated_ties, weights)

    def _check_names(self, weights: Weights) -> None:
        """The same names as in the last anchor, tied ones too."""
        gone = self._names - frozenset(getattr(weights, "live", weights))
        if gone:
            raise UnknownParameter(
                f"{min(gone)} is no longer among the published weights: call publish(anchor=True) to start anew",
                tensor=min(gone),
            )

    def _check_tied(self, weights: Weights, tied: Mapping[str, str]) -> None:
        name = untied_name(weights, tied, self._dtype)
        if name is not None:
            raise ValueError(
                f"{name} is tied to {tied[name]} and has other weights: call publish(anchor=True) where it was untied, "
                "or leave it out of tied="
            )

    def _fixed(self, weights: Weights) -> frozenset[str]:
        """What need not be compared."""
        stated: frozenset[str] = getattr(weights, "fixed", frozenset())
        return stated | matching_names(weights, self._frozen) if self._frozen else stated

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                job = self._pending[0]
            try:
                manifest = self._process(job)
            except BaseException as error:
                self._fail(job, error)
            else:
                self._finish(job, manifest)

    def _process(self, job: Job) -> Manifest:
        """Everything up to the commit. What comes after it can no longer make the version fail."""
        self._settle()
        started = time.perf_counter()
        way = self._upload_anchor(job, started) if job.is_anchor else self._upload_delta(job, started)
        manifest = Manifest(
            run=self.run.id,
            version=job.version,
            way=way,
            path=() if job.is_anchor else self._upkeep.path(job.version - 1),
            num_elements=job.history.num_elements,
            tied=job.history.tied,
            step=job.step,
            metadata=job.metadata,
            writer=self.run.writer,
            created=time.time(),
        )
        committing = time.perf_counter()
        self._commit(job, manifest)
        job.stats["commit_seconds"] = time.perf_counter() - committing
        return manifest

    def _upload_delta(self, job: Job, started: float) -> Way:
        base = job.version - 1, self._digest
        with Workers(self._threads) as workers:
            facts, entries, gains = encode_delta(
                job.history, self.run.id, base, job.version, self._making.allowed, workers
            )
        encoded = time.perf_counter()
        job.digests = advanced(self._recheck.expected, gains)
        self._recheck.compare(job.copied, job.digests, job.history)
        job.copied = []
        checked = time.perf_counter()
        job.stats["check_seconds"] += checked - encoded
        way = put_delta(self.run.store, facts, entries, self._making.max_file_bytes)
        job.stats |= {"encode_seconds": encoded - started, "upload_seconds": time.perf_counter() - checked}
        return way

    def _upload_anchor(self, job: Job, started: float) -> Way:
        with Workers(self._threads) as workers:
            job.digests = box_digests(job.history, job.version, workers)
        self._recheck.compare_all(job.measured, job.digests)
        state = whole_digest(job.history, job.digests)
        encoded = time.perf_counter()
        store = self.run.store
        if self._files and not self._upkeep.beside:
            self._upkeep.beside = put_files(store, job.version, self._files)
        way = put_anchor(
            store, self.run.id, job.history, job.version, state, self._upkeep.beside, self._making.max_file_bytes
        )
        job.stats |= {"encode_seconds": encoded - started, "upload_seconds": time.perf_counter() - encoded}
        return way

    def _commit(self, job: Job, manifest: Manifest) -> None:
        try:
            self._commits.commit(manifest)
        finally:
            if self._commits.unsettled is not None:
                self._unsettled = job

    def _settle(self) -> None:
        """Find out whether a commit whose answer was lost has happened."""
        manifest = self._commits.settle()
        if manifest is not None and self._unsettled is not None:
            job, self._unsettled = self._unsettled, None
            self._note(job, manifest)

    def _note(self, job: Job, manifest: Manifest) -> None:
        """What a commit changes on this side."""
        self.version, self._digest = manifest.version, manifest.digest
        self._recheck.expected = job.digests
        self.num_published += 1
        self._covered()
        try:
            if self._keeps_history and not job.is_anchor:
                with Workers(self._threads) as workers:
                    job.history.settle(job.version, workers)
            self._upkeep.committed(manifest.way, job.history)
        except Exception as error:
            # Say, no room for the scratch file. The chain gets longer than it should be, no more.
            self._upkeep.error = error
            job.history.forget(job.version)

    def _finish(self, job: Job, manifest: Manifest) -> None:
        full = sum(dtype.itemsize * job.history.num_elements_of(name) for name, (dtype, _) in job.history.forms.items())
        job.stats |= {
            "version": job.version,
            "num_changed": manifest.way.num_changed,
            "num_elements": manifest.num_elements,
            "density": manifest.way.num_changed / max(manifest.num_elements, 1),
            "num_bytes": manifest.way.num_bytes,
            "full_bytes": full,
        }
        self.version = job.version
        for publication in job.publications:
            publication.version, publication.stats = job.version, dict(job.stats)
            self.last = publication
            publication._finish()
        self._note(job, manifest)
        with self._changed:
            self._pending.popleft()
            self._changed.notify_all()

    def _fail(self, job: Job, error: BaseException) -> None:
        """Undo a version that was not committed and those staged after it; an unsettled one stays."""
        with self._turn, self._changed:
            if isinstance(error, (Fenced, SnapshotMismatch)):
                self._stopped = error
            settled = self._unsettled is not job
            dropped = list(self._pending) if settled else [job]
            if settled:
                try:
                    for each in reversed(dropped):
                        self._undo(each)
                except Exception:
                    # What the snapshot is cannot be known any more, so the next version sends all weights.
                    self._history = None
                self._next = job.version
            for each in dropped:
                self._pending.remove(each)
            self.num_failed += len(dropped)
            self._changed.notify_all()
        for each in dropped:
            for publication in each.publications:
                publication._finish(error)
        self._failed([publication for each in dropped for publication in each.publications])

    def _undo(self, job: Job) -> None:
        if job.is_anchor:
            self._history = job.before
        else:
            job.history.roll_back(job.version)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was published is committed, and further ways are made.

        Raises why a version has failed, where nobody has seen that yet and no later one has covered it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._pending, timeout)
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not idle or not self._upkeep.drain(left):
            raise TimeoutError(f"there is still something to publish after {timeout} s")
        self._tell_failure()

    @property
    def num_waiting(self) -> int:
        """How many versions are staged and not committed yet."""
        return len(self._pending)

    def close(self) -> None:
        """Commit what is staged, finish what makes the chain short, and stop; raises as `flush` does."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._unsettled is not None and self._stopped is None:
            # Where it stays unknown, whoever resumes the run will see.
            with suppress(DeltawireError):
                self._settle()
        self._upkeep.close()
        self._tell_failure()


def _files_of(weights: Weights) -> list[Path]:
    """What lies beside a checkpoint that is published."""
    return [file for file in weights.other_files() if is_worth_sending(file)] if isinstance(weights, Checkpoint) else []
