"""Find the cheapest route from one version to another. Pure functions: hops in, a route out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from deltawire.errors import BrokenChain, MissingAnchor

# How many versions skip deltas span. Each is written at multiples of its length, so that a replica that is far behind
# takes a few long ones and at most three of each shorter one.
SKIPS = (4, 16, 64)

# An anchor is written when the deltas since the last one reach this fraction of its size; a little earlier at versions
# where long skip deltas start, so that a new replica needs few hops.
ANCHOR_PAYS, ANCHOR_PAYS_ALIGNED, ALIGNED = 0.25, 0.2, 16

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


def check_skips(skips: Any) -> None:
    """Reject anything but a list of lengths of skip deltas."""
    if isinstance(skips, (str, bytes)) or not isinstance(skips, Sequence):
        raise TypeError(f"skips is a list of lengths, such as (4, 16, 64), or () for none, not {skips!r}")
    for length in skips:
        if type(length) is not int or length < 2:
            raise ValueError(f"a skip delta is over 2 versions or more, not {length!r}")


def skip_bases(version: int, lengths: Iterable[int] = SKIPS) -> list[int]:
    """The bases of the skip deltas that lead to a version."""
    return [version - length for length in lengths if version % length == 0 and version >= length]


def anchor_is_due(version: int, hops: Sequence[Hop], cadence: int | None) -> bool:
    """Whether a version should get an anchor: every `cadence` versions, or when the route since the last is large."""
    last = max((hop for hop in hops if hop.base is None), default=None, key=lambda hop: hop.version)
    if last is None:
        return True
    if cadence is not None:
        return version - last.version >= cadence
    try:
        since = cheapest_route(last.version, version, [hop for hop in hops if hop.base is not None])
    except BrokenChain:
        return True
    limit = ANCHOR_PAYS_ALIGNED if version % ALIGNED == 0 else ANCHOR_PAYS
    return since.num_bytes >= limit * last.num_bytes
