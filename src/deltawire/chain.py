"""Which ways lead from what I have to what I want. Pure: links in, a plan out; a plan is data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deltawire.errors import BrokenChain, MissingAnchor

# How many versions back the bases of skip deltas lie. Each is written at multiples of its length, so that whoever
# comes late takes a few long strides and at most three of each shorter one.
SKIPS = (4, 16, 64)

# An anchor is written when the deltas since the last one weigh this part of it; a little earlier at versions from which
# long strides start, so that a late joiner has few of them to take.
ANCHOR_PAYS, ANCHOR_PAYS_ALIGNED, ALIGNED = 0.25, 0.2, 16


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """A way to a version, as far as planning needs it: `base` is None for an anchor."""

    version: int
    base: int | None
    num_bytes: int

    def __str__(self) -> str:
        return f"anchor {self.version}" if self.base is None else f"{self.base} -> {self.version}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The links to follow, in order, from `have` (None: nothing) to `want`."""

    have: int | None
    want: int
    links: tuple[Link, ...]

    @property
    def num_bytes(self) -> int:
        return sum(link.num_bytes for link in self.links)

    @property
    def starts_anew(self) -> bool:
        """Whether what one has is replaced by an anchor."""
        return bool(self.links) and self.links[0].base is None

    def __str__(self) -> str:
        steps = ", ".join(f"{link} ({link.num_bytes:,} B)" for link in self.links) or "nothing to do"
        return f"{'nothing' if self.have is None else self.have} => {self.want}: {steps}"

    def as_dict(self) -> dict[str, Any]:
        links = [{"version": link.version, "base": link.base, "bytes": link.num_bytes} for link in self.links]
        return {"have": self.have, "want": self.want, "bytes": self.num_bytes, "links": links}


def plan(have: int | None, want: int, links: Iterable[Link]) -> Plan:
    """The cheapest path in bytes; among equals the one with fewest links."""
    if have == want:
        return Plan(have, want, ())
    known = sorted(links, key=lambda link: link.version)
    # Bytes, number of links, and the last link, for every version that can be reached.
    best: dict[int, tuple[int, int, Link | None]] = {} if have is None else {have: (0, 0, None)}
    for link in known:
        if link.base is not None and link.base not in best:
            continue
        spent, count = (0, 0) if link.base is None else best[link.base][:2]
        cost = spent + link.num_bytes, count + 1
        if link.version not in best or cost < best[link.version][:2]:
            best[link.version] = *cost, link
    if want not in best:
        raise _no_path(have, want, known)
    path: list[Link] = []
    at: int | None = want
    while at is not None and (last := best[at][2]) is not None:
        path.append(last)
        at = last.base
    return Plan(have, want, tuple(reversed(path)))


def _no_path(have: int | None, want: int, links: Sequence[Link]) -> BrokenChain | MissingAnchor:
    if not any(link.version == want for link in links):
        return BrokenChain(f"nothing leads to version {want}", version=want)
    if have is None and not any(link.base is None for link in links):
        return MissingAnchor(f"there is no anchor to start from on the way to version {want}", version=want)
    start = "an anchor" if have is None else f"version {have} or an anchor"
    return BrokenChain(f"no unbroken chain leads from {start} to version {want}", version=want)


def reachable(links: Iterable[Link]) -> set[int]:
    """The versions that can be had from nothing."""
    found: set[int] = set()
    for link in sorted(links, key=lambda link: link.version):
        if link.base is None or link.base in found:
            found.add(link.version)
    return found


def check_skips(skips: Any) -> None:
    """Refuse what are not lengths of skip deltas."""
    if isinstance(skips, (str, bytes)) or not isinstance(skips, Sequence):
        raise TypeError(f"skips is a list of lengths, such as (4, 16, 64), or () for none, not {skips!r}")
    for length in skips:
        if type(length) is not int or length < 2:
            raise ValueError(f"a skip delta is over 2 versions or more, not {length!r}")


def skip_bases(version: int, lengths: Iterable[int] = SKIPS) -> list[int]:
    """The bases of the skip deltas that end at a version."""
    return [version - length for length in lengths if version % length == 0 and version >= length]


def anchor_is_due(version: int, links: Sequence[Link], cadence: int | None) -> bool:
    """Whether a version should get an anchor: every so many versions, or when the path since the last one is heavy."""
    last = max((link for link in links if link.base is None), default=None, key=lambda link: link.version)
    if last is None:
        return True
    if cadence is not None:
        return version - last.version >= cadence
    try:
        since = plan(last.version, version, [link for link in links if link.base is not None])
    except BrokenChain:
        return True
    limit = ANCHOR_PAYS_ALIGNED if version % ALIGNED == 0 else ANCHOR_PAYS
    return since.num_bytes >= limit * last.num_bytes
