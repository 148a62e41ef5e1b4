"""Which objects of a run nobody needs any more. A plan is data: it can be looked at before it is carried out.

Everything that starts at the oldest kept anchor or later stays, and so does what live replicas need from where they
are. What an object is for, its documents say: one that none of them names was given up, whatever its key says.
Documents go before objects, so that nobody is sent to an object that is gone. A reader that had read a document
before it went finds an object missing and takes another path; the kept anchors make sure that there is one.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deltawire.chain import Link, plan
from deltawire.errors import ChainError, FormatError, MismatchError, ObjectMissing
from deltawire.heartbeat import LIVE_SECONDS, read_heartbeats
from deltawire.keys import ANCHORS, DELTAS, MANIFESTS, REPLICAS, read_document_key, read_object_key
from deltawire.manifest import Way
from deltawire.runs import Run
from deltawire.store import Stat

# Younger objects without a document may belong to a publish that is under way.
GRACE_SECONDS = 3600.0
PARALLEL = 8

GIVEN_UP = "an upload that was given up"


@dataclass(frozen=True, slots=True)
class Removal:
    key: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What would go, documents first, and what stays."""

    removals: tuple[Removal, ...]
    num_kept: int
    kept_bytes: int
    oldest_anchor: int | None
    live_replicas: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(removal.num_bytes for removal in self.removals)

    def as_dict(self) -> dict[str, Any]:
        return {
            "removals": [{"key": each.key, "bytes": each.num_bytes, "why": each.why} for each in self.removals],
            "bytes": self.num_bytes,
            "kept": self.num_kept,
            "kept_bytes": self.kept_bytes,
            "oldest_anchor": self.oldest_anchor,
            "live_replicas": list(self.live_replicas),
        }


def plan_gc(
    run: Run,
    *,
    keep_anchors: int = 2,
    live_seconds: float = LIVE_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
) -> GcPlan:
    """Find what may go: ways that start before the last `keep_anchors` anchors, and uploads that were given up."""
    if keep_anchors < 1:
        raise ValueError("at least one anchor must stay, or nobody could start")
    # Replicas are asked first: one that comes later looks at the newest documents, and those stay.
    heartbeats = read_heartbeats(run)
    live = [told for told in heartbeats if told["age_seconds"] < live_seconds]
    # Objects before documents: whatever is committed meanwhile is named by then.
    objects = [*run.store.list(DELTAS), *run.store.list(ANCHORS)]
    documents = list(run.store.list(MANIFESTS))
    ways = _read_ways(run, documents)
    known = [way for way in ways.values() if way is not None]
    sizes = {stat.key: stat.num_bytes for stat in objects}
    anchors = sorted({way.version for way in known if way.base is None and _is_whole(way, sizes)})
    floor = anchors[-keep_anchors:][0] if anchors else 0
    kept = {way.link for way in known if (way.version if way.base is None else way.base) >= floor}
    links = sorted({way.link for way in known}, key=lambda link: link.version)
    for told in live:
        kept |= _needed_by(told, links)
    keeping = _Keeping(floor, ways, kept, grace_seconds)
    removals = [
        *(Removal(stat.key, stat.num_bytes, why) for stat in documents if (why := keeping.why_document(stat))),
        *(Removal(stat.key, stat.num_bytes, why) for stat in objects if (why := keeping.why_object(stat))),
        *(
            Removal(f"{REPLICAS}{told['name']}.json", 0, "a replica that was silent for a day")
            for told in heartbeats
            if told["age_seconds"] > 86400
        ),
    ]
    gone = {removal.key for removal in removals}
    left = [stat for stat in (*documents, *objects) if stat.key not in gone]
    return GcPlan(
        removals=tuple(removals),
        num_kept=len(left),
        kept_bytes=sum(stat.num_bytes for stat in left),
        oldest_anchor=floor if anchors else None,
        live_replicas=tuple(sorted(told["name"] for told in live)),
    )


def collect(run: Run, removals: Iterable[Removal]) -> None:
    """Remove what a plan says, in its order: a crash leaves objects that the next plan finds."""
    keys = [removal.key for removal in removals]
    documents = [key for key in keys if key.startswith(MANIFESTS)]
    run.store.delete(documents)
    run.store.delete(key for key in keys if not key.startswith(MANIFESTS))


def _read_ways(run: Run, documents: Sequence[Stat]) -> dict[str, Way | None]:
    """The way that each document is about; None where it cannot be believed. One that went meanwhile is left out."""

    def read(key: str) -> Way | None:
        version, base, is_manifest = read_document_key(key) or (0, None, True)
        try:
            return run.manifest(version).way if is_manifest else run.way(Link(version, base, 0))
        except (ChainError, FormatError, MismatchError):
            return None

    def found(key: str) -> list[tuple[str, Way | None]]:
        with suppress(ObjectMissing):
            return [(key, read(key))]
        return []

    keys = [stat.key for stat in documents if read_document_key(stat.key)]
    with ThreadPoolExecutor(PARALLEL, "deltawire-gc") as pool:
        return dict(each for some in pool.map(found, keys) for each in some)


def _is_whole(way: Way, sizes: Mapping[str, int]) -> bool:
    """Whether all that a way needs is there, as far as listing tells."""
    return all(sizes.get(each.key) == each.num_bytes for each in way.objects)


class _Keeping:
    """What stays, and why something does not."""

    def __init__(self, floor: int, ways: Mapping[str, Way | None], kept: set[Link], grace_seconds: float) -> None:
        self._floor, self._grace, self._kept = floor, grace_seconds, kept
        self._ways = ways
        known = [way for way in ways.values() if way is not None]
        self._named = {each.key for way in known for each in way.objects}
        self._needed = {each.key for way in known if way.link in kept for each in way.objects}
        self._versions = {link.version for link in kept}
        # What these need nobody can tell.
        self._unknown = {about[0] for key, way in ways.items() if way is None and (about := read_document_key(key))}

    def why_document(self, stat: Stat) -> str | None:
        about = read_document_key(stat.key)
        if about is None or stat.key not in self._ways:
            return None
        version, base, is_manifest = about
        if is_manifest:
            return None if version >= self._floor or version in self._versions else self._before()
        way = self._ways[stat.key]
        if way is None:
            return None if (version if base is None else base) >= self._floor else self._before()
        return None if way.link in self._kept else self._before()

    def why_object(self, stat: Stat) -> str | None:
        about = read_object_key(stat.key)
        if about is None or stat.key in self._needed:
            return None
        if stat.key in self._named:
            return self._before()
        if about[0] in self._unknown and about[0] >= self._floor:
            return None
        return GIVEN_UP if time.time() - stat.modified > self._grace else None

    def _before(self) -> str:
        return f"leads there from before version {self._floor}, the oldest anchor that is kept"


def _needed_by(told: dict[str, Any], links: list[Link]) -> set[Link]:
    """The ways that a live replica is on, or would take from where it is."""
    using = told.get("using")
    needed = {link for link in links if isinstance(using, list) and str(link) in using}
    version = told.get("version")
    if isinstance(version, int) and links:
        with suppress(ChainError):
            needed |= set(plan(version, links[-1].version, links).links)
    return needed
