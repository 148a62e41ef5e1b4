"""The trainer's side: diffs the weights and commits the changes as a version, or rolls everything back."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.errors import DeltawireError, Fenced, SnapshotMismatch, UnknownParameter
from deltawire.format.checkpoint import Checkpoint
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.publish.history import History
from deltawire.publish.publication import BasePublisher, Publication, check_cadence, refuse_arguments
from deltawire.publish.recheck import CHECK_SHARE, Copied, Digests, Recheck
from deltawire.publish.snapshots import check_snapshot, new_history
from deltawire.publish.sources import as_bits, matching_names, source_of
from deltawire.publish.upkeep import HopOptions, Upkeep
from deltawire.publish.upload import (
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
from deltawire.run.commits import Commits
from deltawire.run.keys import check_version
from deltawire.run.manifest import Manifest, StoredHop
from deltawire.run.plain import plain_metadata, plain_step
from deltawire.run.planner import SKIPS, check_skips
from deltawire.run.run import Run
from deltawire.run.signing import public_key_of
from deltawire.store import Store
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.names import check_names, resolve_ties
from deltawire.tensors.weights import DTypeChoice, Weights, tied_names, untied_name
from deltawire.workers import Workers

__all__ = ["Publication", "Publisher"]


@dataclass(slots=True)
class Job:
    """A staged version that is not committed yet."""

    version: int
    step: int | None
    metadata: Mapping[str, Any]
    publications: list[Publication]
    is_anchor: bool
    history: History
    before: History | None
    """For an anchor: the history that it replaces."""
    measured: Digests = field(default_factory=dict)
    """For an anchor: the digests of all live tensors."""
    copied: list[Copied] = field(default_factory=list)
    """For a delta: copies of the live tensors whose digests are checked in the background."""
    digests: Digests = field(default_factory=dict)
    """The contribution of each tensor to the digest of the version."""
    stats: dict[str, Any] = field(default_factory=dict)


class Publisher(BasePublisher):
    """Publishes the weights of a training run, version by version.

    `publish` diffs the weights against a snapshot and returns; encode, upload and commit run in a background thread.
    Versions are committed in order. When one fails, it and those staged after it are rolled back, so that the next one
    holds everything since the last commit. A failure that nobody has seen on its `Publication`, and that no later
    version has covered, is raised by `flush` and `close`. Everything in a module's `state_dict` is published, and
    compared each time.

    Args:
        store: A URL, a path, or a `Store`.
        weights: A torch module, a mapping from names to arrays or tensors, or a function that returns such a mapping.
            It is read at each `publish`.
        run: The id of a new run. For a run that exists it must be its id.
        base: The weights of the last version, if they differ from the current ones.
        files: Files that are uploaded with the anchors: configuration, tokenizer.
        dtype: The dtype to publish in. Modules: bf16 by default. Plain integer arrays: what their bits are.
        tied: Names that share the weights of other names; detected where they share memory.
        frozen: Names or patterns such as `visual.*` of tensors that do not change: in anchors, never compared.
        encoding: `auto`: the smallest for each tensor. `mirrorless`: the smallest of those that need no full copy at
            the reader. Or names of encodings.
        queue_size: How many versions may wait while one is being uploaded.
        when_full: With a full queue `publish` may `wait`, or `coalesce`: merge the step into the waiting version.
        anchors: `auto`: when the deltas have grown large enough. A number: every so many versions. `None`: the first.
        skips: Lengths of skip deltas, in versions; empty for none.
        sign_with: The file with the private key from `deltawire keygen`.
        snapshot: Where the snapshot lives: `device`, `host`, or `None`: on the GPU if the module is there.
        scratch: A folder for the changed bits of recent versions; by default the system's temporary folder.
        check_share: The share of time that may go into hashing live weights again, without the snapshot; 0: none.
        max_file_bytes: Deltas and checkpoints larger than this are split into several files.
        threads: Threads for one operation; all cores by default.

    Raises:
        SnapshotMismatch: From a `Publication`, when the check of live weights finds a difference; the publisher stops.
        Fenced: From a `Publication`, when another publisher has taken over the run; the publisher stops.

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
        self._options = HopOptions(self.run, allowed, max_file_bytes)
        self._upkeep = Upkeep(self._options, skips, anchors)
        self._keeps_history = bool(skips) or anchors is not None
        self._digest = Digest()
        self._history: History | None = None
        self._next = 0
        self._resume(now if base is None else base)
        self._pending: deque[Job] = deque()
        self._unresolved: Job | None = None
        self._stopped: DeltawireError | None = None
        self._closing = False
        # Staging and undoing exclude each other; the queue has a lock of its own.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="deltawire-publish", daemon=True)
        self._thread.start()

    def _resume(self, weights: Weights) -> None:
        """Resume the run: continue with a delta if the weights are those of its last version, else with an anchor."""
        latest = self.run.latest()
        if latest is None:
            return
        manifest = self.run.manifest(latest)
        self.version, self._next, self._digest = latest, latest + 1, manifest.digest
        self._upkeep.note(*manifest.route, manifest.hop)
        self._upkeep.extra_files = tuple(each for hop in self._upkeep.route(latest) for each in hop.extra_files)
        history = self._snapshot(weights, latest)
        with Workers(self._threads) as workers:
            digests = box_digests(history, latest, workers)
        if whole_digest(history, digests) == manifest.digest and history.tied == manifest.tied:
            self._history, self._recheck.expected = history, digests

    @property
    def resumed(self) -> bool:
        """Whether the next version will be a delta, because the weights are those of the last version."""
        return self._history is not None

    def publish(
        self, *weights: Any, step: int | None = None, metadata: Mapping[str, Any] | None = None, anchor: bool = False,
        **unknown: Any,
    ) -> Publication:  # fmt: skip
        """Publish the current weights as the next version.

        Returns after the diff, when the weights may change again; encode, upload and commit run in the background.

        Args:
            step: The number of the optimizer step, for readers.
            metadata: Anything that JSON can hold, for readers.
            anchor: Upload all weights, as for the first version. Needed when names, shapes or dtypes have changed.

        Returns:
            A handle to wait for the commit with.

        Raises:
            UnknownParameter: A tensor was added or removed; call `publish(anchor=True)`.
            ShapeMismatch: A tensor has another shape or dtype; call `publish(anchor=True)`.
            TypeError: Weights or an unknown option were passed; weights are given to the constructor.
        """
        refuse_arguments(self, weights, unknown)
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
            raise ValueError("this publisher is closed: make a new one to publish again")

    def _take_waiting(self, anchor: bool) -> list[Publication]:
        """Roll back the last waiting version if the queue is full: the new one will hold both."""
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
            raise ValueError("there are no tensors to publish: the mapping is empty; pass one with at least one tensor")
        return new_history(bits, version, tied, self._options.allowed, self._where, self._scratch)

    def _ties(self, weights: Weights) -> dict[str, str]:
        return resolve_ties(tied_names(weights) if self._stated_ties is None else self._stated_ties, weights)

    def _check_names(self, weights: Weights) -> None:
        """Check that all names of the last anchor are still there, tied ones too."""
        gone = self._names - frozenset(getattr(weights, "live", weights))
        if gone:
            raise UnknownParameter(
                f"{min(gone)} is no longer among the published weights: call publish(anchor=True) to start over",
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
        """The names that need not be compared."""
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
        """Encode, upload and commit. What comes after the commit can no longer make the version fail."""
        self._resolve_commit()
        started = time.perf_counter()
        hop = self._upload_anchor(job, started) if job.is_anchor else self._upload_delta(job, started)
        manifest = Manifest(
            run=self.run.id,
            version=job.version,
            hop=hop,
            route=() if job.is_anchor else self._upkeep.route(job.version - 1),
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

    def _upload_delta(self, job: Job, started: float) -> StoredHop:
        base = WeightVersion(self.run.id, job.version - 1, self._digest)
        with Workers(self._threads) as workers:
            info, entries, gains = encode_delta(job.history, base, job.version, self._options.allowed, workers)
        encoded = time.perf_counter()
        job.digests = advanced(self._recheck.expected, gains)
        self._recheck.compare(job.copied, job.digests, job.history)
        job.copied = []
        checked = time.perf_counter()
        job.stats["check_seconds"] += checked - encoded
        hop = put_delta(self.run.store, info, entries, self._options.max_file_bytes)
        job.stats |= {"encode_seconds": encoded - started, "upload_seconds": time.perf_counter() - checked}
        return hop

    def _upload_anchor(self, job: Job, started: float) -> StoredHop:
        with Workers(self._threads) as workers:
            job.digests = box_digests(job.history, job.version, workers)
        self._recheck.compare_all(job.measured, job.digests)
        state = whole_digest(job.history, job.digests)
        encoded = time.perf_counter()
        store = self.run.store
        if self._files and not self._upkeep.extra_files:
            self._upkeep.extra_files = put_files(store, job.version, self._files)
        hop = put_anchor(
            store, self.run.id, job.history, job.version, state, self._upkeep.extra_files, self._options.max_file_bytes
        )
        job.stats |= {"encode_seconds": encoded - started, "upload_seconds": time.perf_counter() - encoded}
        return hop

    def _commit(self, job: Job, manifest: Manifest) -> None:
        try:
            self._commits.commit(manifest)
        finally:
            if self._commits.unresolved is not None:
                self._unresolved = job

    def _resolve_commit(self) -> None:
        """Find out whether a commit whose response was lost has happened."""
        manifest = self._commits.resolve()
        if manifest is not None and self._unresolved is not None:
            job, self._unresolved = self._unresolved, None
            self._note(job, manifest)

    def _note(self, job: Job, manifest: Manifest) -> None:
        """Update the local state after a commit."""
        self.version, self._digest = manifest.version, manifest.digest
        self._recheck.expected = job.digests
        self.num_published += 1
        self._covered()
        try:
            if self._keeps_history and not job.is_anchor:
                with Workers(self._threads) as workers:
                    job.history.pack(job.version, workers)
            self._upkeep.committed(manifest.hop, job.history)
        except Exception as error:
            # For example, no room for the scratch file. The only effect is that routes get longer.
            self._upkeep.error = error
            job.history.forget(job.version)

    def _finish(self, job: Job, manifest: Manifest) -> None:
        full = sum(dtype.itemsize * job.history.num_elements_of(name) for name, (dtype, _) in job.history.specs.items())
        job.stats |= {
            "version": job.version,
            "num_changed": manifest.hop.num_changed,
            "num_elements": manifest.num_elements,
            "density": manifest.hop.num_changed / max(manifest.num_elements, 1),
            "num_bytes": manifest.hop.num_bytes,
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
        """Roll back a version that was not committed and those staged after it; an unresolved one stays."""
        with self._turn, self._changed:
            if isinstance(error, (Fenced, SnapshotMismatch)):
                self._stopped = error
            resolved = self._unresolved is not job
            dropped = list(self._pending) if resolved else [job]
            if resolved:
                try:
                    for each in reversed(dropped):
                        self._undo(each)
                except Exception:
                    # The state of the snapshot is unknown now, so the next version uploads all weights.
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
        """Wait until everything published is committed, and its skip deltas and anchors are written.

        Raises:
            TimeoutError: It took longer than `timeout` seconds.
            Exception: Why a version failed, if nobody has seen that yet and no later version has covered it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._pending, timeout)
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not idle or not self._upkeep.drain(left):
            raise TimeoutError(f"there is still something to publish after {timeout} s: wait longer, or call close()")
        self._raise_failure()

    @property
    def num_waiting(self) -> int:
        """How many versions are staged and not committed yet."""
        return len(self._pending)

    def close(self) -> None:
        """Commit what is staged, finish skip deltas and anchors, and stop. Raises what `flush` raises."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._unresolved is not None and self._stopped is None:
            # If it stays unknown, the next publisher of this run finds out.
            with suppress(DeltawireError):
                self._resolve_commit()
        self._upkeep.close()
        self._raise_failure()


def _files_of(weights: Weights) -> list[Path]:
    """The extra files next to a checkpoint that is published."""
    return [file for file in weights.other_files() if is_worth_sending(file)] if isinstance(weights, Checkpoint) else []
