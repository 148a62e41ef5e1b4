"""Find the cheapest route from one version to another. Pure functions: hops in, a route out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from deltawire.errors import BrokenChain, MissingAnchor

# How many versions skip deltas span. Each is written at multiples of its length, so that a replica that is far behind
# takes a few long ones and at most three of each shorter one.
SKIPS = (4, 16)

# The most deltas on a route. Where skip deltas would need more, one from the anchor is written.
MOST_DELTAS = 9

# When the deltas since the anchor reach this fraction of its size, one from the anchor is written or, if the last of
# these was not much smaller or all of them weigh as much as an anchor, an anchor; a little earlier at versions where
# skip deltas start, so that a new replica needs few hops. With routes of MOST_DELTAS one from the anchor comes earlier,
# so that a new replica fetches 1.2 times the model at most, although the sizes of skip deltas that are still to come
# are estimated.
ANCHOR_PAYS, ANCHOR_PAYS_ALIGNED, ALIGNED = 0.25, 0.2, 16
LONG_PAYS, MOST_LONG = 0.19, 0.15

# A delta over n versions takes n^-0.3 of the single deltas that it spans: 0.83, 0.67, 0.53 over 2, 4, 8 recorded steps.
OVERLAP = -0.3

# A version with a delta from an anchor over so many others is where a new replica comes through, as through an anchor.
LONG = 32

HopKey = tuple[int, int | None]
"""The version that a hop leads to, and its base."""


class Hop(Protocol):
    """A delta from `base`, or an anchor if that is None, that leads to a version."""

    @property
    def version(self) -> int: ...

    @property
    def base(self) -> int | None: ...

    @property
    def num_bytes(self) -> int: ...


AnyHop = TypeVar("AnyHop", bound=Hop)


@dataclass(frozen=True, slots=True, order=True)
class ListedHop:
    """A hop as found by listing the store."""

    version: int
    base: int | None
    num_bytes: int


def hop_text(hop: Hop) -> str:
    return f"anchor {hop.version}" if hop.base is None else f"{hop.base} -> {hop.version}"


@dataclass(frozen=True, slots=True)
class Route(Generic[AnyHop]):
    """The hops to follow, in order, from version `have` (None: from nothing) to version `want`."""

    have: int | None
    want: int
    hops: tuple[AnyHop, ...]

    @property
    def num_bytes(self) -> int:
        return sum(hop.num_bytes for hop in self.hops)

    @property
    def starts_over(self) -> bool:
        """Whether the route starts with an anchor, which replaces the current weights."""
        return bool(self.hops) and self.hops[0].base is None

    def __str__(self) -> str:
        steps = ", ".join(f"{hop_text(hop)} ({hop.num_bytes:,} B)" for hop in self.hops) or "nothing to do"
        return f"{'nothing' if self.have is None else self.have} => {self.want}: {steps}"

    def as_dict(self) -> dict[str, Any]:
        hops = [{"version": hop.version, "base": hop.base, "bytes": hop.num_bytes} for hop in self.hops]
        return {"have": self.have, "want": self.want, "bytes": self.num_bytes, "hops": hops}


def cheapest_route(have: int | None, want: int, hops: Iterable[AnyHop]) -> Route[AnyHop]:
    """The route with the fewest bytes; among equals the one with the fewest hops."""
    if have == want:
        return Route(have, want, ())
    known = sorted(hops, key=lambda hop: hop.version)
    # Bytes, number of hops, and the last hop, for every version that can be reached.
    best: dict[int, tuple[int, int, AnyHop | None]] = {} if have is None else {have: (0, 0, None)}
    for hop in known:
        if hop.base is not None and hop.base not in best:
            continue
        spent, count = (0, 0) if hop.base is None else best[hop.base][:2]
        cost = spent + hop.num_bytes, count + 1
        if hop.version not in best or cost < best[hop.version][:2]:
            best[hop.version] = *cost, hop
    if want not in best:
        raise _no_route(have, want, known)
    route: list[AnyHop] = []
    at: int | None = want
    while at is not None and (last := best[at][2]) is not None:
        route.append(last)
        at = last.base
    return Route(have, want, tuple(reversed(route)))


def _no_route(have: int | None, want: int, hops: Sequence[Hop]) -> BrokenChain | MissingAnchor:
    if not any(hop.version == want for hop in hops):
        return BrokenChain(f"nothing leads to version {want}", version=want)
    if have is None and not any(hop.base is None for hop in hops):
        return MissingAnchor(f"there is no anchor from which version {want} can be reached", version=want)
    start = "an anchor" if have is None else f"version {have} or an anchor"
    return BrokenChain(f"no unbroken chain leads from {start} to version {want}", version=want)


def reachable(hops: Iterable[Hop]) -> set[int]:
    """The versions that can be reached from an anchor."""
    found: set[int] = set()
    for hop in sorted(hops, key=lambda hop: hop.version):
        if hop.base is None or hop.base in found:
            found.add(hop.version)
    return found


def entries(hops: Iterable[Hop]) -> list[int]:
    """The versions that new replicas come through: those with an anchor, or with a long delta from one."""
    known = list(hops)
    anchors = {hop.version for hop in known if hop.base is None}
    long = {hop.version for hop in known if hop.base in anchors and hop.version - hop.base >= LONG}
    return sorted(anchors | long)


def check_skips(skips: Any, most_deltas: int | None) -> None:
    """Reject anything but a list of lengths of skip deltas, and a number of deltas or None."""
    if isinstance(skips, (str, bytes)) or not isinstance(skips, Sequence):
        raise TypeError(f"skips must be a list of lengths, such as (4, 16, 64), or () for none, not {skips!r}")
    for length in skips:
        if type(length) is not int or length < 2:
            raise ValueError(f"a skip delta must span 2 versions or more, not {length!r}")
    if most_deltas is not None and (type(most_deltas) is not int or most_deltas < 1):
        raise ValueError(f"most_deltas must be a number of deltas, or None, not {most_deltas!r}")


def skip_bases(version: int, lengths: Iterable[int] = SKIPS) -> list[int]:
    """The bases of the skip deltas that lead to a version."""
    return [version - length for length in lengths if version % length == 0 and version >= length]


def longest_tail(lengths: Iterable[int]) -> int:
    """How many deltas may follow on a route after the last version that a skip delta of the longest length leads to."""
    count, shorter = 0, 1
    for length in sorted(lengths):
        count, shorter = count + -(-length // shorter) - 1, length
    return count


def coming_skips(version: int, bases: Iterable[int], hops: Iterable[Hop]) -> list[ListedHop]:
    """The skip deltas to a version that will be written, as large as the last ones, or as usual for what they span."""
    deltas = [hop for hop in hops if hop.base is not None]
    sizes = {hop.version - (hop.base or 0): hop.num_bytes for hop in deltas}
    found = []
    for base in bases:
        spanned = cheapest_route(base, version, deltas).num_bytes
        usual = int(spanned * (version - base) ** OVERLAP)
        found.append(ListedHop(version, base, min(sizes.get(version - base, usual), spanned)))
    return found


def long_is_due(
    version: int, base: int, hops: Sequence[Hop], skips: Sequence[int] = SKIPS, most_deltas: int | None = MOST_DELTAS
) -> bool:
    """Whether a version should get a delta from `base`: when the route from there gets too long, or too large."""
    if most_deltas is None:
        return False
    since = _deltas_since(base, version, hops)
    if since is None:
        return True
    is_long = version % max(skips) == 0 and len(since.hops) + longest_tail(skips) > most_deltas
    paid = max((hop.num_bytes for hop in hops if hop.base == base), default=0)
    is_large = _is_large(since, hops, most_deltas) and paid < MOST_LONG * _anchor_bytes(hops)
    return len(since.hops) > 1 and (is_long or is_large)


def anchor_pays(version: int, base: int, hops: Sequence[Hop], most_deltas: int = MOST_DELTAS) -> bool:
    """Whether an anchor should be written in place of a delta from `base`: if those from there weigh as much as one.

    Only where size is what makes one due. Where the length of routes does, an anchor would not make them rarer.
    """
    since = _deltas_since(base, version, hops)
    spent = sum(hop.num_bytes for hop in hops if hop.base == base)
    return since is not None and _is_large(since, hops, most_deltas) and spent >= _anchor_bytes(hops)


def _deltas_since(base: int, version: int, hops: Iterable[Hop]) -> Route[Hop] | None:
    try:
        return cheapest_route(base, version, [hop for hop in hops if hop.base is not None])
    except BrokenChain:
        return None


def _anchor_bytes(hops: Iterable[Hop]) -> int:
    return max((hop.num_bytes for hop in hops if hop.base is None), default=0)


def _is_large(since: Route[Hop], hops: Iterable[Hop], most_deltas: int) -> bool:
    limit = LONG_PAYS if most_deltas <= MOST_DELTAS else pays_at(since.want)
    return since.num_bytes >= limit * _anchor_bytes(hops) > 0


def anchor_is_due(version: int, hops: Sequence[Hop], cadence: int | None) -> bool:
    """Whether a version should get an anchor: every `cadence` versions, or when the route since the last is large."""
    last = max((hop for hop in hops if hop.base is None), default=None, key=lambda hop: hop.version)
    if last is None:
        return True
    if cadence is not None:
        return version - last.version >= cadence
    since = _deltas_since(last.version, version, hops)
    return since is None or since.num_bytes >= pays_at(version) * last.num_bytes


def pays_at(version: int) -> float:
    """How large the deltas since an anchor may get, as a fraction of its size."""
    return ANCHOR_PAYS_ALIGNED if version % ALIGNED == 0 else ANCHOR_PAYS
