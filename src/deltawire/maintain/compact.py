"""Adds missing skip deltas and anchors to a run, for runs whose publisher was restarted or too slow to write them."""

from collections.abc import Callable, Sequence

from deltawire.codec import AUTO, allowed_encodings
from deltawire.follow.replica import Replica
from deltawire.follow.target import MemoryTarget
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.publish.history import History
from deltawire.publish.upload import encode_delta, put_anchor, put_delta
from deltawire.run.manifest import StoredHop
from deltawire.run.planner import SKIPS, ListedHop, reachable, skip_bases
from deltawire.run.run import Run
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.weights import Tensor
from deltawire.workers import Workers


def missing_hops(hops: Sequence[ListedHop]) -> list[tuple[int, int]]:
    """The missing skip deltas as (version, base), for all versions that can be reached."""
    have = {(hop.version, hop.base) for hop in hops}
    first = min((hop.version for hop in hops if hop.base is None), default=0)
    versions = reachable(hops)
    return [
        (version, base)
        for version in sorted(versions)
        for base in skip_bases(version)
        if base >= first and base in versions and (version, base) not in have
    ]


def compact(
    run: Run, *, anchor: bool = False, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[StoredHop]:
    """Replay the run once and add the missing hops; with `anchor`, also an anchor at the newest version.

    Safe to run next to a publisher: each hop is committed only if nobody else has. Takes twice the model's memory.
    """
    latest = run.latest()
    missing = missing_hops(run.hops())
    wants_anchor = anchor and latest is not None and run.manifest(latest).hop.base is not None
    if latest is None or not (missing or wants_anchor):
        return []
    first = min([base for _, base in missing], default=latest)
    last = latest if wants_anchor else max(version for version, _ in missing)
    target = MemoryTarget({})
    made = []
    with Replica(run, target, heartbeat_seconds=None, threads=threads) as replica, Workers(threads) as workers:
        replica.pull(first)
        history = History(_tensors(target), first, tied=run.manifest(first).tied)
        digests = {first: run.manifest(first).digest}
        for version in range(first + 1, last + 1):
            replica.pull(version)
            manifest = run.manifest(version)
            history.stage(version, _tensors(target), workers)
            history.pack(version, workers)
            digests[version] = manifest.digest
            for base in [base for each, base in missing if each == version]:
                start = WeightVersion(run.id, base, digests[base])
                info, entries, _ = encode_delta(history, start, version, allowed_encodings(AUTO), workers)
                made.append(put_delta(run.store, info, entries, MAX_FILE_BYTES))
                run.commit_hop(made[-1])
            history.forget(version - max(SKIPS))
            if progress is not None:
                progress(version - first, last - first)
        if wants_anchor:
            manifest = run.manifest(last)
            files = [each for hop in manifest.route for each in hop.extra_files]
            made.append(put_anchor(run.store, run.id, history, last, manifest.digest, files, MAX_FILE_BYTES))
            run.commit_hop(made[-1])
    return made


def _tensors(target: MemoryTarget) -> dict[str, Tensor]:
    weights = target.weights()
    return {name: weights[name] for name in weights}
