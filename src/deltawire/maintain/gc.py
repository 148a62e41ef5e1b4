"""Garbage collection: find the objects of a run that are no longer needed, and delete them in a second step.

New replicas come through anchors, and through versions with a long delta from one. All hops that start at the oldest of
these that is kept stay, the way to it does, and so do those that live replicas need from their current version.
Documents determine what an object is for: one that no document refers to was abandoned, whatever its key. Documents are
deleted before objects, so that no document refers to a deleted object. A reader that had read a document before finds
an object missing and takes another route; what is kept guarantees that there is one.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deltawire.errors import ChainError, Conflict, FormatError, MismatchError, ObjectMissing
from deltawire.run.heartbeat import LIVE_SECONDS, read_heartbeats
from deltawire.run.keys import ANCHORS, DELTAS, LATEST_KEY, MANIFESTS, REPLICAS, read_document_key, read_object_key
from deltawire.run.manifest import StoredHop
from deltawire.run.plain import json_fields
from deltawire.run.planner import cheapest_route, entries
from deltawire.run.run import Run
from deltawire.run.uploads import kind_of
from deltawire.store import Stat

# Objects without a document may belong to a publish in progress, if any of their version's is younger: a large anchor
# is uploaded for hours.
GRACE_SECONDS = 3600.0
# Ages are the difference of two clocks. A live replica must not look dead between two heartbeats.
MOST_AHEAD_SECONDS = LIVE_SECONDS / 2
PARALLEL = 8

GIVEN_UP = "abandoned upload"
BEFORE = "starts before version {}, the oldest that is kept"

# The hop of each document, by its key; None if it is not valid.
Hops = Mapping[str, StoredHop | None]


@dataclass(frozen=True, slots=True)
class Removal:
    key: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What to delete, documents first, and what stays."""

    removals: tuple[Removal, ...]
    num_kept: int
    kept_bytes: int
    oldest_anchor: int | None
    live_replicas: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(removal.num_bytes for removal in self.removals)

    def as_dict(self) -> dict[str, Any]:
        removals = [json_fields(each, "key", "bytes", "why") for each in self.removals]
        kept = json_fields(self, "bytes", "kept", "kept_bytes", "oldest_anchor", "live_replicas")
        return {"removals": removals, **kept}


def plan_gc(
    run: Run, *, keep_anchors: int = 2, live_seconds: float = LIVE_SECONDS, grace_seconds: float = GRACE_SECONDS
) -> GcPlan:
    """Find what can be deleted: hops that start before the last `keep_anchors` anchors, and abandoned uploads.

    A version with a long delta from an anchor counts as an anchor; that one stays, too.
    """
    if keep_anchors < 1:
        raise ValueError("keep_anchors must be at least 1: a new replica needs an anchor to start from")
    # Heartbeats are read first: a replica that starts later reads the newest documents, and those stay.
    heartbeats = read_heartbeats(run)
    live = [beat for beat in heartbeats if beat["age_seconds"] < live_seconds]
    # Objects before documents: an object that is committed meanwhile has a document by then.
    objects = [*run.store.list(DELTAS), *run.store.list(ANCHORS)]
    documents = list(run.store.list(MANIFESTS))
    by_document = _read_hops(run, documents)
    known = [hop for hop in by_document.values() if hop is not None]
    listed = {(stat.key, stat.num_bytes) for stat in objects}
    whole = [hop for hop in known if hop.at is not None or listed >= {(one.key, one.num_bytes) for one in hop.objects}]
    anchors = entries(whole)
    floor = anchors[-keep_anchors:][0] if anchors else 0
    kept = {hop for hop in known if (hop.version if hop.base is None else hop.base) >= floor}
    kept |= set(cheapest_route(None, floor, whole).hops if anchors else ())
    hops = sorted(set(known), key=lambda hop: hop.version)
    for beat in live:
        kept |= _needed_by(beat, hops)
    removals = [
        *_unneeded_documents(documents, floor, by_document, kept),
        *_unneeded_objects(objects, floor, by_document, kept, grace_seconds),
        *_left_by_killed_writers(run, grace_seconds),
        *(
            Removal(f"{REPLICAS}{beat['name']}.json", 0, "replica silent for more than a day")
            for beat in heartbeats
            if beat["age_seconds"] > 86400
        ),
    ]
    gone = {removal.key for removal in removals}
    left = [stat for stat in (*documents, *objects) if stat.key not in gone]
    return GcPlan(
        removals=tuple(removals),
        num_kept=len(left),
        kept_bytes=sum(stat.num_bytes for stat in left),
        oldest_anchor=floor if anchors else None,
        live_replicas=tuple(sorted(beat["name"] for beat in live)),
    )


def collect(run: Run, removals: Iterable[Removal]) -> None:
    """Delete what `plan_gc` found, documents first: after a crash the next plan finds the rest.

    Raises Conflict, before anything is deleted, if this machine's clock is ahead of the store's.
    """
    keys = [removal.key for removal in removals]
    if keys:
        run.write_hint()
        _check_clock(run)
    documents = [key for key in keys if key.startswith(MANIFESTS)]
    run.store.delete(documents)
    run.store.delete(key for key in keys if not key.startswith(MANIFESTS))


def _check_clock(run: Run) -> None:
    """Refuse a clock by which uploads in progress look abandoned, and live replicas dead."""
    ahead = time.time() - run.store.stat(LATEST_KEY).modified
    if ahead > MOST_AHEAD_SECONDS:
        raise Conflict(
            f"nothing was deleted: the clock of this machine is {ahead:.0f} s ahead of that of {run.store.url}, so "
            "uploads in progress look abandoned: set the clock and try again",
            url=run.store.url,
        )


def _read_hops(run: Run, documents: Sequence[Stat]) -> Hops:
    """The hop of each document; None if the document is not valid. Those deleted meanwhile are left out."""

    def read(key: str) -> dict[str, StoredHop | None]:
        version, base, is_manifest = read_document_key(key) or (0, None, True)
        try:
            return {key: run.manifest(version).hop if is_manifest else run.hop(version, base)}
        except ObjectMissing:
            return {}
        except (ChainError, FormatError, MismatchError):
            return {key: None}

    keys = [stat.key for stat in documents if read_document_key(stat.key)]
    with ThreadPoolExecutor(PARALLEL, "deltawire-gc") as pool:
        return {key: hop for found in pool.map(read, keys) for key, hop in found.items()}


def _unneeded_documents(documents: Sequence[Stat], floor: int, hops: Hops, kept: set[StoredHop]) -> Iterator[Removal]:
    versions = {hop.version for hop in kept}
    for stat in documents:
        about = read_document_key(stat.key)
        if about is None or stat.key not in hops:
            continue
        (version, base, is_manifest), hop = about, hops[stat.key]
        if is_manifest:
            stays = version >= floor or version in versions
        else:
            stays = hop in kept if hop is not None else (version if base is None else base) >= floor
        if not stays:
            yield Removal(stat.key, stat.num_bytes, BEFORE.format(floor))


def _unneeded_objects(
    objects: Sequence[Stat], floor: int, hops: Hops, kept: set[StoredHop], grace_seconds: float
) -> Iterator[Removal]:
    known = [hop for hop in hops.values() if hop is not None]
    named = {each.key for hop in known for each in hop.objects}
    needed = {each.key for hop in known if hop in kept for each in hop.objects}
    # Versions with an invalid document: what they need is unknown.
    unknown = {named_by[0] for key, hop in hops.items() if hop is None and (named_by := read_document_key(key))}
    latest: dict[int, float] = {}
    for stat in objects:
        about = read_object_key(stat.key)
        if about is not None and stat.key not in named:
            latest[about[0]] = max(latest.get(about[0], 0.0), stat.modified)
    for stat in objects:
        about = read_object_key(stat.key)
        if about is None or stat.key in needed:
            continue
        if stat.key in named:
            yield Removal(stat.key, stat.num_bytes, BEFORE.format(floor))
        elif time.time() - latest[about[0]] > grace_seconds and (about[0] not in unknown or about[0] < floor):
            yield Removal(stat.key, stat.num_bytes, GIVEN_UP)


def _left_by_killed_writers(run: Run, grace_seconds: float) -> Iterator[Removal]:
    """Files of a folder that are no objects yet, and to which nobody has written for a while."""
    for stat in getattr(run.store, "unfinished", tuple)():
        if kind_of(stat.key.rpartition("#")[0]) and time.time() - stat.modified > grace_seconds:
            yield Removal(stat.key, stat.num_bytes, GIVEN_UP)


def _needed_by(heartbeat: dict[str, Any], hops: list[StoredHop]) -> set[StoredHop]:
    """The hops that a live replica is using, or would take from its current version."""
    using = heartbeat.get("using")
    needed = {hop for hop in hops if isinstance(using, list) and str(hop) in using}
    version = heartbeat.get("version")
    if isinstance(version, int) and hops:
        with suppress(ChainError):
            needed |= set(cheapest_route(version, hops[-1].version, hops).hops)
    return needed
