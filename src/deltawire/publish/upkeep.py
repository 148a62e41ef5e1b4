"""What keeps routes short: the hops that a run has, and which skip deltas and anchors to add."""

import threading
from collections.abc import Sequence

from deltawire.errors import ChainError
from deltawire.run.manifest import MOST_OBJECTS, StoredHop, StoredObject
from deltawire.run.planner import anchor_is_due, cheapest_route, skip_bases


class Hops:
    """The hops of a run that a publisher knows, and which ones to add."""

    def __init__(self, skips: Sequence[int], anchors: int | str | None) -> None:
        self._skips, self._anchors = tuple(skips), anchors
        self._noting = threading.Lock()
        self.extra_files: tuple[StoredObject, ...] = ()
        """The files next to the weights in every anchor."""
        self.hops: dict[tuple[int, int | None], StoredHop] = {}
        self.error: Exception | None = None
        """Why the last extra hop could not be written. The only effect is that routes get longer."""

    def note(self, *hops: StoredHop) -> None:
        """Record hops that exist."""
        with self._noting:
            known = {**self.hops, **{(hop.version, hop.base): hop for hop in hops}}
            # No reader starts before the last anchor but one.
            oldest = min(sorted(version for version, base in known if base is None)[-2:], default=0)
            # Replaced, not changed: the other thread may be reading them.
            self.hops = {key: hop for key, hop in known.items() if hop.version >= oldest}

    def route(self, version: int) -> tuple[StoredHop, ...]:
        """The cheapest known hops from an anchor to a version."""
        try:
            hops = cheapest_route(None, version, self.hops.values()).hops
        except ChainError:
            return ()
        # Readers find a route without it. With it a manifest could get too large for them.
        return hops if sum(len(hop.objects) for hop in hops) <= MOST_OBJECTS else ()

    def due(self, hop: StoredHop, oldest: int, *, anchor_is_coming: bool) -> list[int | None]:
        """The bases of the extra hops that a committed version should get; None for an anchor."""
        bases: list[int | None] = [base for base in skip_bases(hop.version, self._skips) if base >= oldest]
        cadence = self._anchors if isinstance(self._anchors, int) else None
        wanted = self._anchors is not None and hop.base is not None and not anchor_is_coming
        if wanted and anchor_is_due(hop.version, list(self.hops.values()), cadence):
            bases.append(None)
        return bases

    @property
    def longest_skip(self) -> int:
        return max(self._skips, default=0)
