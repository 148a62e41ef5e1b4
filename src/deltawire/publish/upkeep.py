"""What keeps routes short: the hops that a run has, and which skip deltas and anchors to add."""

import threading
from contextlib import suppress

from deltawire.errors import BrokenChain, ChainError
from deltawire.publish.settings import Settings
from deltawire.run.manifest import MOST_OBJECTS, StoredHop, StoredObject
from deltawire.run.planner import (
    Hop,
    anchor_is_due,
    anchor_pays,
    cheapest_route,
    coming_skips,
    entries,
    long_is_due,
    skip_bases,
)


class Hops:
    """The hops of a run that a publisher knows, and which ones to add."""

    def __init__(self, settings: Settings) -> None:
        self._skips, self._anchors, self._most_deltas = tuple(settings.skips), settings.anchors, settings.most_deltas
        self.longest_skip = max(self._skips, default=0)
        self.keeps_base = bool(self._skips) and self._most_deltas is not None
        """Whether long deltas are wanted, for which the weights of the anchor are kept."""
        self._noting = threading.Lock()
        self.extra_files: tuple[StoredObject, ...] = ()
        """The files next to the weights in every anchor, once one is committed: before, clean-up may remove them."""
        self.hops: dict[tuple[int, int | None], StoredHop] = {}
        self.error: Exception | None = None
        """Why the last extra hop could not be written. The only effect is that routes get longer."""

    def note(self, *hops: StoredHop) -> None:
        with self._noting:
            files = [hop.extra_files for hop in hops if hop.at is None and hop.extra_files]
            self.extra_files = files[-1] if files else self.extra_files
            known = {**self.hops, **{(hop.version, hop.base): hop for hop in hops}}
            # No reader starts before the last anchor but one, or the last long delta but one and its anchor. What all
            # deltas from that anchor weigh tells when the next one pays.
            through = entries(known.values())
            oldest = min(through[-2:], default=0)
            anchor = max((version for version, base in known if base is None and version <= oldest), default=None)
            # Replaced, not changed: the other thread may be reading them.
            self.hops = {
                key: hop
                for key, hop in known.items()
                if hop.version > oldest or hop.base == anchor or key == (anchor, None)
            }

    def route(self, version: int) -> tuple[StoredHop, ...]:
        """The cheapest known hops from an anchor to a version."""
        try:
            hops = cheapest_route(None, version, self.hops.values()).hops
        except ChainError:
            return ()
        # Readers find a route without it. With it a manifest could get too large for them.
        return hops if sum(len(hop.objects) for hop in hops) <= MOST_OBJECTS else ()

    def due(self, hop: StoredHop, oldest: int, kept: int | None, *, is_coming: bool) -> list[int | None]:
        """The bases of the extra hops that a committed version should get; None for an anchor.

        `oldest` is the oldest version that skip deltas can start from, `kept` the one that long deltas can.
        `is_coming`: a long delta or an anchor is being written, so neither is due.
        """
        version, skips, anchors = hop.version, self._skips, self._anchors
        bases: list[int | None] = [base for base in skip_bases(version, skips) if base >= oldest]
        if hop.base is None or is_coming:
            return bases
        known: list[Hop] = list(self.hops.values())
        with suppress(BrokenChain):
            known += coming_skips(version, [base for base in bases if base is not None], known)
        if isinstance(anchors, int) and anchor_is_due(version, known, anchors):
            return [*bases, None]
        most = self._most_deltas
        if kept is not None and kept not in bases and most and long_is_due(version, kept, known, skips, most):
            return [*bases, None if anchors == "auto" and anchor_pays(version, kept, known, most) else kept]
        return [*bases, None] if anchors == "auto" and anchor_is_due(version, known, None) else bases
