"""Find the route from one version of a run to another. For most replicas the manifest has all the hops they need."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from deltawire.errors import ChainError, FormatError, MismatchError, ObjectMissing
from deltawire.run.manifest import Manifest, StoredHop
from deltawire.run.planner import Hop, HopKey, Route, cheapest_route
from deltawire.run.run import Run

# For longer routes it pays to list the store: longer hops may have been added since the manifest was written.
MANY_HOPS = 12
PARALLEL = 8


def find_route(run: Run, have: int | None, manifest: Manifest, bad: Collection[HopKey] = ()) -> Route[StoredHop]:
    """The cheapest route to a version that avoids the bad hops."""
    known = {(hop.version, hop.base): hop for hop in (*manifest.route, manifest.hop)}
    if not bad and (have is None or any(have in key for key in known)):
        try:
            route = cheapest_route(have, manifest.version, known.values())
        except ChainError:
            pass
        else:
            if len(route.hops) <= MANY_HOPS:
                return route
    if have is not None and not bad:
        try:
            return _listed_route(run, have, manifest, known, bad, after=have)
        except ChainError:
            pass
    return _listed_route(run, have, manifest, known, bad, after=-1)


def _listed_route(
    run: Run, have: int | None, manifest: Manifest, known: dict[HopKey, StoredHop], bad: Collection[HopKey], after: int
) -> Route[StoredHop]:
    hops: dict[HopKey, Hop] = {
        (hop.version, hop.base): hop for hop in run.hops(after) if hop.version <= manifest.version
    }
    # Hops of the manifest may be missing from the listing, or deleted; if deleted, fetching them will fail.
    hops |= known
    while True:
        route = cheapest_route(have, manifest.version, [hop for key, hop in hops.items() if key not in bad])
        keys = [(hop.version, hop.base) for hop in route.hops]
        unconfirmed = _learn(run, [key for key in keys if key not in known], known)
        if not unconfirmed:
            return Route(have, manifest.version, tuple(known[key] for key in keys))
        for key in unconfirmed:
            del hops[key]


def _learn(run: Run, keys: list[HopKey], known: dict[HopKey, StoredHop]) -> list[HopKey]:
    """Read the documents of some hops into `known`; returns the hops without a valid document."""
    with ThreadPoolExecutor(PARALLEL, "deltawire-route") as pool:
        found = dict(zip(keys, pool.map(lambda key: _hop(run, key), keys), strict=True))
    known |= {key: hop for key, hop in found.items() if hop is not None}
    return [key for key, hop in found.items() if hop is None]


def _hop(run: Run, key: HopKey) -> StoredHop | None:
    try:
        return run.hop(*key)
    except (ChainError, ObjectMissing, FormatError, MismatchError):
        return None
