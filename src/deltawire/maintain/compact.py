"""Adds missing skip deltas, deltas from anchors, and anchors to a run.

For runs whose publisher was restarted, or too slow to write them, or is far from the store and writes deltas alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

from deltawire.codec import AUTO, allowed_encodings
from deltawire.errors import BrokenChain
from deltawire.follow.replica import Replica
from deltawire.follow.target import MemoryTarget
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.publish.alone import Alone
from deltawire.publish.leader import Committed, Leader, Task, add_up
from deltawire.publish.settings import Settings
from deltawire.publish.sources import WholeSource
from deltawire.publish.worker import Worker
from deltawire.run.manifest import StoredHop
from deltawire.run.planner import SKIPS, Hop, ListedHop, coming_skips, entries, long_is_due, reachable, skip_bases
from deltawire.run.run import Run


def missing_hops(hops: Sequence[ListedHop]) -> list[tuple[int, int]]:
    """The missing skip deltas, and deltas from anchors, as (version, base), for all versions that can be reached."""
    have = {(hop.version, hop.base) for hop in hops}
    anchors = sorted(hop.version for hop in hops if hop.base is None)
    # Where all weights were published anew, maybe with other tensors: no delta leads across.
    anew = [version for version in anchors if version == anchors[0] or (version, version - 1) not in have]
    versions, missing = reachable(hops), list[tuple[int, int]]()
    # What leads to the versions so far, with what is missing.
    known, number = list[Hop](), 0
    ordered = sorted(hops, key=lambda hop: hop.version)
    for version in sorted(version for version in versions if version >= anchors[0]):
        while number < len(ordered) and ordered[number].version <= version:
            known.append(ordered[number])
            number += 1
        anchor = anchors[bisect_right(anchors, version) - 1]
        first = anew[bisect_right(anew, version) - 1]
        skips = [each for each in skip_bases(version) if each >= first and each in versions]
        missing += [(version, base) for base in skips if (version, base) not in have]
        if version % max(SKIPS) or version == anchor:
            continue
        with suppress(BrokenChain):  # all weights were published anew in between
            known += coming_skips(version, skips, known)
        if anchor not in skips and (version, anchor) not in have and long_is_due(version, anchor, known):
            missing.append((version, anchor))
            known.append(ListedHop(version, anchor, 0))
        through = entries(known)[-2:]
        known = [hop for hop in known if hop.version >= through[0] or hop.version == anchor]
    return missing


def planned_hops(run: Run, *, anchor: bool = False) -> list[tuple[int, int | None]]:
    """What `compact` would add, as (version, base); without a base it is an anchor."""
    _, missing, latest = _look(run, anchor)
    return [*missing, *([] if latest is None else [(latest, None)])]


def _look(run: Run, anchor: bool) -> tuple[list[ListedHop], list[tuple[int, int]], int | None]:
    """The hops of a run, those that it lacks, and the newest version if an anchor is to be added there."""
    documents = set(run.documents().values())
    # Who died between the upload of an extra hop and its document has left no hop.
    committed = {about[:2] for about in documents}
    hops = [hop for hop in run.hops() if hop.base in (None, hop.version - 1) or (hop.version, hop.base) in committed]
    latest = run.latest() if anchor else None
    if latest is not None and ((latest, None, False) in documents or run.manifest(latest).hop.base is None):
        latest = None
    return hops, missing_hops(hops), latest


def compact(
    run: Run, *, anchor: bool = False, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[StoredHop]:
    """Replay the run once and add the missing hops; with `anchor`, also an anchor at the newest version.

    Safe to run next to a publisher: each hop is committed only if nobody else has. Takes twice the model's memory, and
    its size on disk where deltas from an anchor are missing.
    """
    hops, missing, latest = _look(run, anchor)
    if latest is None and not missing:
        return []
    run.check_key()
    last = max(version for version, _ in missing) if latest is None else latest
    first = min((base for _, base in missing), default=last)
    target, alone, made = MemoryTarget({}), Alone(), []
    settings = Settings(allowed_encodings(AUTO), 0, None, SKIPS, None, "host", None, 0, MAX_FILE_BYTES, threads)
    with Replica(run, target, heartbeat_seconds=None, threads=threads) as replica:
        replica.pull(first)
        manifest = run.manifest(first)
        worker = Worker(WholeSource(target.weights, None, manifest.tied, ()), run.store, alone, settings)
        leader = Leader(run, alone, worker, settings, list)
        model, _ = add_up([worker.resume(has_version=True)])
        staged = {first: Committed(first, 0, manifest.digest)}
        # The bases that are too far back for the history; each is kept until the next one.
        far = {base for version, base in missing if version - base > max(SKIPS)}
        # Those that are there: clean-up leaves gaps.
        versions = sorted(version for version in {*reachable(hops), last} if first <= version <= last)
        for call, (before, version) in enumerate(pairwise(versions), 1):
            if before in far:
                worker.keep(call - 1)
            replica.pull(version)
            manifest = run.manifest(version)
            if manifest.hop.base is None:
                worker.start_over()
                worker.source, staged = WholeSource(target.weights, None, manifest.tied, ()), {}
            worker.stage(anchor=False)
            if manifest.hop.base is None:
                model, _ = add_up([worker.measure(call)])
            staged[version] = Committed(version, call, manifest.digest)
            bases = [staged[base] for each, base in missing if each == version and base in staged]
            made += [leader.write_hop(Task(staged[version], base, model), threads) for base in bases]
            worker.committed(call, call - max(SKIPS))
            if progress is not None:
                progress(version - first, last - first)
        if latest is not None:
            leader.take_files(manifest.route)
            made.append(leader.write_hop(Task(staged[last], None, model), threads))
    return made
