"""Which objects of a run nobody needs any more. A plan is data: it can be looked at before it is carried out.

Everything that starts at the oldest kept anchor or later stays, and so does what live replicas need from where they
are. Documents go before objects, so that nobody is sent to an object that is gone. A reader that had read a document
before it went finds an object missing and takes another path; the kept anchors make sure that there is one.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deltawire.chain import Link, plan
from deltawire.errors import ChainError
from deltawire.heartbeat import LIVE_SECONDS, read_heartbeats
from deltawire.keys import ANCHORS, DELTAS, MANIFESTS, REPLICAS, read_document_key, read_object_key
from deltawire.runs import Run
from deltawire.store import Stat

# Younger objects without a document may belong to a publish that is under way.
GRACE_SECONDS = 3600.0


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
    documents = list(run.store.list(MANIFESTS))
    objects = [*run.store.list(DELTAS), *run.store.list(ANCHORS)]
    links = run.links()
    anchors = sorted(link.version for link in links if link.base is None)
    floor = anchors[-keep_anchors:][0] if anchors else 0
    kept = {link for link in links if (link.version if link.base is None else link.base) >= floor}
    for told in live:
        kept |= _needed_by(told, links)
    keeping = _Keeping(run, floor, links, kept, grace_seconds)
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


class _Keeping:
    """What stays, and why something does not."""

    def __init__(self, run: Run, floor: int, links: list[Link], kept: set[Link], grace_seconds: float) -> None:
        self._floor, self._grace = floor, grace_seconds
        self._known = {(link.version, link.base) for link in links}
        self._kept = {(link.version, link.base) for link in kept}
        self._versions = {version for version, _ in self._kept}
        # Anchors share the files beside the weights, which lie where the first of them has put them.
        self._shared = {each.key for link in kept if link.base is None for each in run.way(link).objects}

    def why_document(self, stat: Stat) -> str | None:
        about = read_document_key(stat.key)
        if about is None:
            return None
        version, base, is_manifest = about
        if version >= self._floor if is_manifest else (version, base) in self._kept:
            return None
        return None if is_manifest and version in self._versions else self._before()

    def why_object(self, stat: Stat) -> str | None:
        about = read_object_key(stat.key)
        if about is None or about[:2] in self._kept or stat.key in self._shared:
            return None
        if about[:2] in self._known:
            return self._before()
        return "an upload that was given up" if time.time() - stat.modified > self._grace else None

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
