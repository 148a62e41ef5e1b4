"""The trainer's side: diffs the weights and commits the changes as a version, in the background."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.publish.alone import Alone
from deltawire.publish.machine import BasePublisher, own_run
from deltawire.publish.publication import Publication
from deltawire.publish.recheck import CHECK_SHARE
from deltawire.publish.reference import base_weights, files_of, hold_reference
from deltawire.publish.settings import Settings
from deltawire.publish.sources import WholeSource
from deltawire.publish.upload import check_files
from deltawire.publish.worker import Worker
from deltawire.run.planner import MOST_DELTAS, SKIPS
from deltawire.store import Store
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import DTypeChoice, Weights

__all__ = ["Publication", "Publisher"]


class Publisher(BasePublisher):
    """Publishes the weights of a training run, version by version.

    `publish` diffs the weights against a snapshot and returns; encode, upload and commit run in a background thread.
    Versions are committed in order. If one fails, the next one covers it: it holds everything since the last commit.
    `flush` and `close` raise a failure that no later version has covered, unless it was already seen on its
    `Publication`. Everything in a module's `state_dict` is published, and compared each time.

    Args:
        store: A URL, a path, or a `Store`.
        weights: A torch module, a mapping from names to arrays or tensors, or a function that returns such a mapping,
            or pairs of a name and a tensor one by one. It is read at each `publish`.
        run: The id of a new run. For an existing run it must be that run's id.
        base: For a new run, an existing checkpoint, as a path or URL (`hf://owner/model@revision`): version 0 refers to
            it, with hashes, and nothing of it is uploaded. Or the weights of the last version, if they differ from the
            current ones.
        files: Files to upload with the anchors: configuration, tokenizer.
        dtype: The dtype to publish in, or a mapping from names. Modules: bf16 by default. Torch tensors of floats are
            cast to it. Plain integer arrays: what their bits mean.
        tied: Names that share the weights of other names; detected where they share memory.
        frozen: Names or patterns such as `visual.*` of tensors that do not change: in anchors, never compared.
        encoding: `auto`: the smallest for each tensor. `mirrorless`: the smallest of those for which the reader needs
            no full copy. Or names of encodings.
        queue_size: How many versions may wait while one is being uploaded.
        when_full: What `publish` does when the queue is full: `wait`, or `coalesce` the step into the waiting version.
        anchors: When to write another anchor. `auto`: when the deltas have grown large enough. A number: every so many
            versions. `None`: only the first.
        skips: Lengths of skip deltas, in versions. Empty: no skip deltas, and no deltas from the anchor.
        most_deltas: The most deltas on a route from an anchor: where skip deltas alone would need more, a delta from
            the anchor is written, using a copy of its weights in `scratch`. None: no such deltas, and no copy.
        sign_with: The file with the private key from `deltawire keygen`.
        snapshot: Where the snapshot is kept: `device`, `host`, or `None`: on the GPU if the weights are there.
        scratch: An existing folder for the anchor's weights and the changed bits of recent versions; by default the
            system's temporary folder.
        check_share: The share of time that may be spent on hashing live weights again, without the snapshot; 0: none.
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
        base: Weights | str | Path | None = None,
        files: Sequence[str | Path] = (),
        dtype: DTypeChoice = None,
        tied: Ties | None = None,
        frozen: Sequence[str] = (),
        encoding: EncodingChoice = "auto",
        queue_size: int = 1,
        when_full: str = "wait",
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
        if when_full not in ("wait", "coalesce"):
            raise ValueError(f"when_full must be 'wait' or 'coalesce', not {when_full!r}")
        if base is not None and not isinstance(base, str | Path | Mapping):
            raise TypeError(f"base must be a checkpoint's path or URL, or weights by name, not {type(base).__name__}")
        allowed = allowed_encodings(encoding)
        settings = Settings(
            allowed, queue_size, anchors, skips, most_deltas, snapshot, scratch, check_share, max_file_bytes, threads
        )
        source = WholeSource(weights, dtype, tied, frozen)
        now = source.read()
        source.check(now)
        paths = check_files(files) or files_of(now)
        own, alone = own_run(store, sign_with), Alone()
        first, reference = now if base is None or isinstance(base, str | Path) else base, None
        if isinstance(base, str | Path) and own.latest() is None:
            reference = hold_reference(self, base, settings.scratch)
            first = base_weights(reference, source.take(None, now))
        worker = Worker(source, own.store, alone, settings, first)
        super().__init__(
            own, run, alone, worker, settings, lambda: paths, coalesces=when_full == "coalesce",
            reference=None if reference is None else lambda: reference,
        )  # fmt: skip
