"""Makes the ways that a chain lacks, from the chain itself: for runs whose publisher was restarted, or had no time."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deltawire.chain import SKIPS, Link, reachable, skip_bases
from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.history import History
from deltawire.manifest import Way
from deltawire.parts import MAX_FILE_BYTES
from deltawire.replica import Replica
from deltawire.runs import Run
from deltawire.target import MemoryTarget
from deltawire.upload import encode_delta, put_anchor, put_delta
from deltawire.weights import Tensor
from deltawire.workers import Workers


def missing_links(links: Sequence[Link], skips: Sequence[int] = SKIPS) -> list[tuple[int, int]]:
    """The skip deltas that should be there and are not, as (version, base), for all versions that can be reached."""
    have = {(link.version, link.base) for link in links}
    first = min((link.version for link in links if link.base is None), default=0)
    versions = reachable(links)
    return [
        (version, base)
        for version in sorted(versions)
        for base in skip_bases(version, skips)
        if base >= first and base in versions and (version, base) not in have
    ]


def compact(
    run: Run,
    *,
    skips: Sequence[int] = SKIPS,
    anchor: bool = False,
    encoding: EncodingChoice = "auto",
    scratch: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Way]:
    """Replay the chain once and add what it lacks; with `anchor`, also an anchor at the newest version.

    Safe beside a publisher: each way is made known only if nobody else has. Takes twice the model's memory.
    """
    latest = run.latest()
    missing = missing_links(run.links(), skips)
    wants_anchor = anchor and latest is not None and run.manifest(latest).way.base is not None
    if latest is None or not (missing or wants_anchor):
        return []
    first = min([base for _, base in missing], default=latest)
    last = latest if wants_anchor else max(version for version, _ in missing)
    target = MemoryTarget({})
    made = []
    with Replica(run, target, heartbeat_seconds=None, threads=threads) as replica, Workers(threads) as workers:
        replica.pull(first)
        history = History(_tensors(target), first, tied=run.manifest(first).tied, scratch=scratch)
        digests = {first: run.manifest(first).digest}
        for version in range(first + 1, last + 1):
            replica.pull(version)
            manifest = run.manifest(version)
            history.stage(version, _tensors(target), workers)
            history.settle(version, workers)
            digests[version] = manifest.digest
            for base in [base for each, base in missing if each == version]:
                allowed = allowed_encodings(encoding)
                facts, entries, _ = encode_delta(history, run.id, (base, digests[base]), version, allowed, workers)
                made.append(put_delta(run.store, facts, entries, max_file_bytes))
                run.commit_way(made[-1])
            history.forget(version - max(skips, default=0))
            if progress is not None:
                progress(version - first, last - first)
        if wants_anchor:
            made.append(_anchor(run, history, last, max_file_bytes))
    return made


def _anchor(run: Run, history: History, version: int, max_file_bytes: int) -> Way:
    manifest = run.manifest(version)
    beside = [each for way in manifest.path for each in way.beside]
    way = put_anchor(run.store, run.id, history, version, manifest.digest, beside, max_file_bytes)
    run.commit_way(way)
    return way


def _tensors(target: MemoryTarget) -> dict[str, Tensor]:
    weights = target.weights()
    return {name: weights[name] for name in weights}
