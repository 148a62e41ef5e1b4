"""From a version to another through a run: which ways to take. The manifest tells most replicas all they need."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from deltawire.chain import Link, Plan, plan
from deltawire.errors import ChainError, FormatError, MismatchError, ObjectMissing
from deltawire.manifest import Manifest, Way
from deltawire.runs import Run

# From here on it pays to list the store: someone may have made shorter ways since the manifest was written.
MANY_LINKS = 12
PARALLEL = 8

WayKey = tuple[int, int | None]


class Route(NamedTuple):
    plan: Plan
    ways: list[Way]


def find_route(run: Run, have: int | None, manifest: Manifest, bad: Collection[WayKey] = ()) -> Route:
    """The cheapest path to a version that takes none of the bad ways."""
    known = {(way.version, way.base): way for way in (*manifest.path, manifest.way)}
    if not bad and (have is None or any(have in key for key in known)):
        try:
            found = plan(have, manifest.version, [way.link for way in known.values()])
        except ChainError:
            pass
        else:
            if len(found.links) <= MANY_LINKS:
                return Route(found, [known[link.version, link.base] for link in found.links])
    if have is not None and not bad:
        try:
            return _listed_route(run, have, manifest, known, bad, after=have)
        except ChainError:
            pass
    return _listed_route(run, have, manifest, known, bad, after=-1)


def _listed_route(
    run: Run, have: int | None, manifest: Manifest, known: dict[WayKey, Way], bad: Collection[WayKey], after: int
) -> Route:
    links = {(link.version, link.base): link for link in run.links(after) if link.version <= manifest.version}
    # What the manifest tells may be in no listing, or be gone; if it is gone, that will show.
    links |= {key: way.link for key, way in known.items()}
    while True:
        found = plan(have, manifest.version, [link for key, link in links.items() if key not in bad])
        unconfirmed = _learn(run, [link for link in found.links if (link.version, link.base) not in known], known)
        if not unconfirmed:
            ways = [known[link.version, link.base] for link in found.links]
            return Route(Plan(have, manifest.version, tuple(way.link for way in ways)), ways)
        for link in unconfirmed:
            del links[link.version, link.base]


def _learn(run: Run, links: list[Link], known: dict[WayKey, Way]) -> list[Link]:
    """Read the documents of some links; those for which there is none, or none to be trusted."""
    with ThreadPoolExecutor(PARALLEL, "deltawire-route") as pool:
        ways = list(pool.map(lambda link: _way(run, link), links))
    known |= {(way.version, way.base): way for way in ways if way is not None}
    return [link for link, way in zip(links, ways, strict=True) if way is None]


def _way(run: Run, link: Link) -> Way | None:
    try:
        return run.way(link)
    except (ChainError, ObjectMissing, FormatError, MismatchError):
        return None
