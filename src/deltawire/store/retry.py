"""The retry policy of all stores, on top of what their clients retry themselves; and how versions come to exist."""

import time
from collections.abc import Callable
from typing import TypeVar

from deltawire.errors import Conflict, LimitExceeded, ObjectMissing, StoreError, StoreUnavailable

ATTEMPTS = 4

Result = TypeVar("Result")


def backoff_seconds(attempt: int) -> float:
    """How long to wait after an attempt has failed, counted from 0."""
    return min(0.25 * 2.0**attempt, 8.0)


def retried(work: Callable[[], Result]) -> Result:
    """Do idempotent work, again where the store was unavailable; not where it has refused for good."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return work()
        except StoreUnavailable as error:
            if error.fields.get("refused"):
                raise
        time.sleep(backoff_seconds(attempt))
    return work()


def create_once(write: Callable[[], None], read: Callable[[], bytes], data: bytes) -> None:
    """Create an object with `write`, exactly once, also if an answer is lost or a request is repeated.

    `data` is unique to this writer, so reading it back means that we were first. A conflict is read back too, as the
    client may have repeated a request that had succeeded. Conflict: another writer was first. StoreUnavailable: with
    `refused` nothing was written, with `uncertain` it may have been.
    """
    for attempt in range(ATTEMPTS):
        try:
            return write()
        except (Conflict, StoreUnavailable) as error:
            if error.fields.get("refused"):
                raise
            failure = error
        if _is_there(read, data, failure):
            return None
        if attempt + 1 < ATTEMPTS:
            time.sleep(backoff_seconds(attempt))
    raise _uncertain(failure, failure)


def _is_there(read: Callable[[], bytes], data: bytes, failure: StoreError) -> bool:
    try:
        found: bytes | None = read()
        # Unexpected bytes are read twice, since a bit may have flipped in transfer and a conflict ends the publisher.
        again = found if found == data else read()
    except ObjectMissing:
        return False
    except StoreUnavailable as error:
        raise _uncertain(failure, error) from None
    except LimitExceeded:
        found = again = None  # it is longer than what we wrote
    if data in (found, again):
        return True
    if found != again:
        raise _uncertain(failure, failure)
    where = {name: failure.fields.get(name) for name in ("url", "key")}
    raise Conflict(f"{where['key']} was written by another writer", **where) from None


def _uncertain(failure: StoreError, last: StoreError) -> StoreUnavailable:
    # A conflict that cannot be read back is uncertain: it may be with our own earlier request.
    fields = failure.fields | {"uncertain": True, "refused": False}
    return StoreUnavailable(f"{last.message}; it is not known whether the object was written", **fields)
