"""Publishing a sharded model: every rank uploads its own shard, and all shards together are one version."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.errors import RankFailed
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.publish.alone import Message, error_from, final
from deltawire.publish.machine import ALL_CALLS, BasePublisher, own_run
from deltawire.publish.recheck import CHECK_SHARE
from deltawire.publish.reference import hold_reference
from deltawire.publish.settings import Settings
from deltawire.publish.sharded.exchange import ShardWorker
from deltawire.publish.sharded.messages import Ranks
from deltawire.publish.sources import Source, sharded_source
from deltawire.publish.upload import check_files
from deltawire.run.planner import MOST_DELTAS, SKIPS
from deltawire.store import Store
from deltawire.tensors.weights import DTypeChoice


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
        rank_store: The torch.distributed store that ranks communicate through; by default, that of the default group.
        timeout: Seconds without a heartbeat after which a rank counts as gone.
        run: The id of a new run. For an existing run it must be that run's id.
        base: For a new run, the checkpoint that the model was loaded from, as a path or URL (`hf://owner/model@revision`):
            version 0 refers to it, with hashes, and nothing of it is uploaded. Only rank 0 reads it.
        files: Files to upload with the anchors: configuration, tokenizer.
        dtype: The dtype to publish parameters in, bf16 by default; buffers are published unchanged.
        frozen: Names or patterns such as `visual.*` of tensors that do not change: in anchors, never compared.
        encoding: `auto`, `mirrorless` or names of encodings, as for `Publisher`.
        queue_size: How many versions may wait while one is being uploaded; `publish` waits when the queue is full.
        anchors: When to write another anchor: `auto`, a number of versions, or `None`: only the first.
        skips: Lengths of skip deltas, in versions. Empty: no skip deltas, and no deltas from the anchor.
        most_deltas: The most deltas on a route from an anchor: where skip deltas alone would need more, a delta from
            the anchor is written, using a copy of its weights in `scratch`. None: no such deltas, and no copy.
        sign_with: The file with the private key from `deltawire keygen`; only rank 0 reads it.
        snapshot: Where the snapshot is kept: `device`, `host`, or `None`: on the GPU if the module is there.
        scratch: An existing folder for the changed bits of recent versions; by default the system's temporary folder.
        check_share: The share of the time between two versions that may be spent on hashing live weights again.
        max_file_bytes: Deltas and checkpoints larger than this are split into several files.
        threads: Threads for one operation on a rank; all cores by default.

    Raises:
        BaseMismatch: The model's weights are not those of `base`.
        RankFailed: From a `Publication`, when another rank has failed or sends no heartbeat.
        SnapshotMismatch: From a `Publication`, when the check of live weights finds a difference; the publisher stops.
        Fenced: From a `Publication`, when another publisher has taken over the run; the publisher stops.

    >>> with ShardedPublisher("s3://bucket/run", model) as publisher:  # doctest: +SKIP
    ...     publisher.publish(step=1)
    """

    _ranks: Ranks

    def __init__(
        self,
        store: str | Path | Store,
        model: Any,
        *,
        group: Any = None,
        rank_store: Any = None,
        timeout: float = 60.0,
        run: str | None = None,
        base: str | Path | None = None,
        files: Sequence[str | Path] = (),
        dtype: DTypeChoice = None,
        frozen: Sequence[str] = (),
        encoding: EncodingChoice = "auto",
        queue_size: int = 1,
        anchors: int | str | None = "auto",
        skips: Sequence[int] = SKIPS,
        most_deltas: int | None = MOST_DELTAS,
        sign_with: str | Path | None = None,
        snapshot: str | None = None,
        scratch: Path | None = None,
        check_share: float = CHECK_SHARE,
        max_file_bytes: int = MAX_FILE_BYTES,
        threads: int | None = None,
    ) -> None:
        allowed = allowed_encodings(encoding)
        settings = Settings(
            allowed, queue_size, anchors, skips, most_deltas, snapshot, scratch, check_share, max_file_bytes, threads
        )
        if timeout <= 0:
            raise ValueError(f"timeout must be more than 0 s, got {timeout}")
        ranks = Ranks.of(group, rank_store, timeout)
        self.rank = ranks.rank
        # Only rank 0 signs.
        own = own_run(store, sign_with if ranks.rank == 0 else None)
        read = sharded_source(model, has_plain=ranks.rank == 0, dtype=dtype, frozen=frozen)
        worker = ShardWorker(Source(read), own.store, ranks, settings)
        reference = None if base is None else partial(hold_reference, self, base, settings.scratch)
        super().__init__(own, run, ranks, worker, settings, partial(check_files, files), reference=reference)

    def _start(self, name: str | None) -> None:
        if self._leader is not None:
            super()._start(name)
            return
        while (command := self._ranks.wait_for_command())["kind"] not in ("started", "refused"):
            self._ranks.answer(lambda command=command: self._worker.do(command))  # type: ignore[misc]
        if command["kind"] == "refused":
            raise error_from(command["error"])
        self.version, self.resumed = command["version"], command["resumed"]
        if not self.resumed:
            self._worker.start_over()

    def _serve(self) -> None:
        if self._leader is not None:
            super()._serve()
            return
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
                if self._closing or final(error) is not None:
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
        if kind not in ("rest", "failed", "committed"):
            self._ranks.answer(lambda: self._worker.do(command))
            return False
        if kind == "committed":
            self._finish_call(command["call"], command["version"], command["stats"])
        self._worker.do(command)
        if kind == "failed":
            self._fail_call(command["call"], error_from(command["error"]))
        return False

    def _check_leader(self) -> None:
        """Fail calls that rank 0 has not made within the timeout."""
        now = time.monotonic()
        late = [job for job in list(self._pending) if now - job.staged_at > self._ranks.timeout]
        for job in late:
            if job.call > self._ranks.beats[0].num_published:
                reason = f"it has not made publish call number {job.call} within {self._ranks.timeout} s"
                self._fail_call(job.call, RankFailed(f"rank 0: {reason}", rank=0, reason=reason))
