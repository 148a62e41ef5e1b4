"""Find the route from one version of a run to another. For most replicas the manifest has all the hops they need."""

from collections.abc import Collection
from contextlib import suppress

from deltawire.errors import ChainError, EngineRejected, FormatError, MismatchError, ObjectMissing
from deltawire.run.manifest import Manifest, StoredHop
from deltawire.run.planner import Hop, HopKey, Route, cheapest_route, skip_bases
from deltawire.run.run import Run
from deltawire.workers import Pool

# For longer routes it pays to list the store: longer hops may have been added since the manifest was written.
MANY_HOPS = 10
PARALLEL = 8
# Without a listing, around a damaged hop: so many versions are asked for all that may lead to them.
MOST_ASKED = 128
# The skip deltas that it asks for, longest first.
ASKED_SKIPS = (64, 16, 4)


def find_route(run: Run, have: int | None, manifest: Manifest, bad: Collection[HopKey] = ()) -> Route[StoredHop]:
    """The cheapest route to a version that avoids the bad hops."""
    known = {(hop.version, hop.base): hop for hop in (*manifest.route, manifest.hop)}
    if not bad and (have is None or any(have in key for key in known)):
        with suppress(ChainError):
            route = cheapest_route(have, manifest.version, known.values())
            if len(route.hops) <= MANY_HOPS:
                return route
    if not run.listable:
        return _asked_route(run, have, manifest, known, bad)
    if have is not None and not bad:
        with suppress(ChainError):
            return _listed_route(run, have, manifest, known, bad, after=have)
    return _listed_route(run, have, manifest, known, bad, after=-1)


class Refusals:
    """The versions that an engine without a mirror, to which each delta leads to a version of its own, did not take."""

    def __init__(self) -> None:
        self._versions: set[int] = set()

    def note(self, error: EngineRejected, want: int) -> set[HopKey]:
        """The hops to avoid after a refusal: those to a version on the way that was refused before.

        Not at once, since not each refusal is due to the weights, and a route past them may start with an anchor.
        """
        version: int | None = getattr(error, "refused", None)
        is_known = version in self._versions
        if version is None:
            return set()
        self._versions.add(version)
        return {(version, base) for base in (None, *range(version))} if is_known and version != want else set()


def _listed_route(
    run: Run, have: int | None, manifest: Manifest, known: dict[HopKey, StoredHop], bad: Collection[HopKey], after: int
) -> Route[StoredHop]:
    found: list[Hop] = [hop for hop in run.hops(after) if hop.version <= manifest.version]
    # Hops of the manifest may be missing from the listing, or deleted; if deleted, fetching them will fail.
    hops = {(hop.version, hop.base): hop for hop in [*found, *known.values()]}
    while True:
        route = cheapest_route(have, manifest.version, [hop for key, hop in hops.items() if key not in bad])
        keys = [(hop.version, hop.base) for hop in route.hops]
        unconfirmed = _learn(run, [key for key in keys if key not in known], known)
        if not unconfirmed:
            return Route(have, manifest.version, tuple(known[key] for key in keys))
        for key in unconfirmed:
            del hops[key]


def _asked_route(
    run: Run, have: int | None, manifest: Manifest, known: dict[HopKey, StoredHop], bad: Collection[HopKey]
) -> Route[StoredHop]:
    """A route on a store that cannot list: documents are asked for by the names that they would have."""
    anchor = next((hop.version for hop in known.values() if hop.base is None), manifest.version)
    _walk(run, anchor if have is None else have, manifest.version, known, bad)
    try:
        return cheapest_route(have, manifest.version, [hop for key, hop in known.items() if key not in bad])
    except ChainError:
        _search(run, manifest.version, known)
    return cheapest_route(have, manifest.version, [hop for key, hop in known.items() if key not in bad])


def _walk(run: Run, at: int, want: int, known: dict[HopKey, StoredHop], bad: Collection[HopKey]) -> None:
    """Learn the hops from a version on: the longest skip delta that there is, or the next version's own hop."""
    while at < want:
        skips = [(at + length, at) for length in ASKED_SKIPS if at % length == 0]
        wanted = [key for key in skips if key[0] <= want and key not in bad]
        hop = next((hop for key in wanted if (hop := known.get(key) or _hop(run, key))), None)
        hop = hop or next(iter(_named_hops(run, at + 1)), None)
        if hop is None or (hop.version, hop.base) in bad:
            return
        known[hop.version, hop.base] = hop
        at = hop.version


def _search(run: Run, want: int, known: dict[HopKey, StoredHop]) -> None:
    """Learn every hop to the last versions, by the names of documents, and those on routes that manifests name."""
    versions = range(max(want - MOST_ASKED, 0), want + 1)
    _learn(run, [(each, base) for each in versions for base in (None, *skip_bases(each, ASKED_SKIPS))], known)
    with Pool(PARALLEL, "deltawire-route") as pool:
        named = [hop for hops in pool.map(lambda version: _named_hops(run, version), versions) for hop in hops]
    known |= {(hop.version, hop.base): hop for hop in named}


def _named_hops(run: Run, version: int) -> list[StoredHop]:
    """The hop of a version, and those of the route to it; none if there is no valid manifest."""
    try:
        manifest = run.manifest(version)
    except (ObjectMissing, FormatError, MismatchError):
        return []
    return [manifest.hop, *manifest.route]


def _learn(run: Run, keys: list[HopKey], known: dict[HopKey, StoredHop]) -> list[HopKey]:
    """Read the documents of some hops into `known`; returns the hops without a valid document."""
    with Pool(PARALLEL, "deltawire-route") as pool:
        found = dict(zip(keys, pool.map(lambda key: _hop(run, key), keys), strict=True))
    known |= {key: hop for key, hop in found.items() if hop is not None}
    return [key for key, hop in found.items() if hop is None]


def _hop(run: Run, key: HopKey) -> StoredHop | None:
    try:
        return run.hop(*key)
    except (ChainError, ObjectMissing, FormatError, MismatchError):
        return None
