"""How often a replica looks for a new version: often while one is due, seldom while none comes."""

from collections import deque

# A version that comes when none was due is noticed after so many polls' time at most.
SLOWEST = 10
# How many gaps between versions are remembered; the next version is due from a little before the shortest one on.
NUM_GAPS, EARLY = 8, 0.9
# Once it is late, how much of the time that nothing came is waited before the next look.
PATIENCE = 1 / 8
MOST_BACKOFF = 32


class Pace:
    """The waits between the polls of one replica, from when versions came before; `poll_seconds` while one is due."""

    def __init__(self, poll_seconds: float, now: float) -> None:
        if not poll_seconds > 0:
            raise ValueError(f"poll_seconds must be a positive number, not {poll_seconds}")
        self._poll, self._seen = poll_seconds, now
        self._polled = self._not_yet = now  # the last poll, and the last one that did not find the newest version
        self._latest: int | None = None
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)

    def saw(self, latest: int | None, now: float) -> None:
        """Note the newest version that a poll has found."""
        before, self._polled = self._polled, now
        if latest is None or latest == self._latest:
            return
        if self._latest is not None and latest > self._latest:
            # If several came at once, each took a part of the time.
            self._gaps.append((now - self._seen) / (latest - self._latest))
        self._latest, self._seen, self._not_yet = latest, now, before

    def wait(self, now: float, failures: int = 0) -> float:
        """Seconds until the next poll, without jitter."""
        if failures:
            return self._poll * min(1 << failures, MOST_BACKOFF)
        late = now - self._seen
        if self._gaps:
            early = self._not_yet + EARLY * min(self._gaps) - now
            if early > self._poll:
                return min(early, SLOWEST * self._poll)
            late -= max(self._gaps)
        return min(max(PATIENCE * late, self._poll), SLOWEST * self._poll)
