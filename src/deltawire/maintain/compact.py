"""Adds missing skip deltas and anchors to a run, for runs whose publisher was restarted or too slow to write them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.follow.replica import Replica
from deltawire.follow.target import MemoryTarget
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.publish.encode import encode_delta
from deltawire.publish.history import History
from deltawire.publish.upload import put_anchor, put_delta
from deltawire.run.manifest import StoredHop
from deltawire.run.planner import SKIPS, ListedHop, reachable, skip_bases
from deltawire.run.run import Run
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.weights import Tensor
from deltawire.workers import Workers


def missing_hops(hops: Sequence[ListedHop], skips: Sequence[int] = SKIPS) -> list[tuple[int, int]]:
    """The missing skip deltas as (version, base), for all versions that can be reached."""
    have = {(hop.version, hop.base) for hop in hops}
    first = min((hop.version for hop in hops if hop.base is None), default=0)
    versions = reachable(hops)
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
) -> list[StoredHop]:
    """Replay the run once and add the missing hops; with `anchor`, also an anchor at the newest version.

    Safe to run next to a publisher: each hop is committed only if nobody else has. Takes twice the model's memory.
    """
    latest = run.latest()
    missing = missing_hops(run.hops(), skips)
    wants_anchor = anchor and latest is not None and run.manifest(latest).hop.base is not None
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
            history.pack(version, workers)
            digests[version] = manifest.digest
            for base in [base for each, base in missing if each == version]:
                allowed = allowed_encodings(encoding)
                info, entries, _ = encode_delta(
                    history, WeightVersion(run.id, base, digests[base]), version, allowed, workers
                )
                made.append(put_delta(run.store, info, entries, max_file_bytes))
                run.commit_hop(made[-1])
            history.forget(version - max(skips, default=0))
            if progress is not None:
                progress(version - first, last - first)
        if wants_anchor:
            made.append(_anchor(run, history, last, max_file_bytes))
    return made


def _anchor(run: Run, history: History, version: int, max_file_bytes: int) -> StoredHop:
    manifest = run.manifest(version)
    extra_files = [each for hop in manifest.route for each in hop.extra_files]
    hop = put_anchor(run.store, run.id, history, version, manifest.digest, extra_files, max_file_bytes)
    run.commit_hop(hop)
    return hop


def _tensors(target: MemoryTarget) -> dict[str, Tensor]:
    weights = target.weights()
    return {name: weights[name] for name in weights}
