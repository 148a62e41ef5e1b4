"""The retry policy of all stores, on top of what their clients retry themselves."""

import time
from collections.abc import Callable
from typing import TypeVar

from deltawire.errors import StoreUnavailable

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
