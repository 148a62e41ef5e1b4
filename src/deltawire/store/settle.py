"""Settles a create whose answer was lost, or came to a repeated request: what is there now decides."""

import time
from collections.abc import Callable

from deltawire.errors import Conflict, LimitExceeded, ObjectMissing, StoreError, StoreUnavailable


def settle(
    write: Callable[[], None],
    read: Callable[[], bytes],
    data: bytes,
    *,
    attempts: int = 4,
    pause_seconds: float = 0.2,
) -> None:
    """Make `write` create an object once. `data` tells writers apart, so finding it there means that we were first.

    Conflict: another writer was first. StoreUnavailable: with `refused` nothing was written, with `uncertain` it may
    have been. A conflict is read back too, as the client may have repeated a request that had succeeded.
    """
    for attempt in range(attempts):
        try:
            return write()
        except (Conflict, StoreUnavailable) as error:
            if error.fields.get("refused"):
                raise
            failure = error
        if _is_there(read, data, failure):
            return None
        if attempt + 1 < attempts:
            time.sleep(pause_seconds * 2**attempt)
    raise _uncertain(failure, failure)


def _is_there(read: Callable[[], bytes], data: bytes, failure: StoreError) -> bool:
    try:
        found: bytes | None = read()
        # Other bytes are read twice: one bit may have flipped on the way, and it is a grave thing to be told.
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
    raise Conflict(f"{where['key']} was written by another", **where) from None


def _uncertain(failure: StoreError, last: StoreError) -> StoreUnavailable:
    # A conflict that cannot be read back is one all the same, unless it was with our own earlier request.
    fields = failure.fields | {"uncertain": True, "refused": False}
    return StoreUnavailable(f"{last.message}; whether it was written is not known", **fields)
