"""Which vLLM deltawire works with: what it needs of one, and the versions that it was run with."""

import logging
import re
from operator import attrgetter
from typing import Any

FIRST, LAST = (0, 29), (0, 32)
RUN_WITH = "deltawire needs vLLM 0.29 or later, and was tested with 0.29 to 0.32"

# Of the server's engine client.
NEEDED = (
    "get_weight_version", "update_weight_version", "renderer.clear_mm_cache_async",
    "engine_core.call_utility_async", "engine_core.pause_scheduler_async", "engine_core.resume_scheduler_async",
)  # fmt: skip
_log = logging.getLogger(__name__)


def is_too_old(version: str) -> bool:
    """Whether this is older than the first that works. Says so, and also if it is newer than the last that was run."""
    # A build from source may be called 0.1.dev1, whatever it is.
    found = re.match(r"(\d+)\.(\d+)\.\d", version)
    number = (int(found[1]), int(found[2])) if found else None
    if number and number < FIRST:
        _log.error("vLLM %s is too old: %s", version, RUN_WITH)
        return True
    if number is None or number > LAST:
        _log.warning("vLLM %s is untested: %s", version, RUN_WITH)
    return False


def missing(client: Any) -> str | None:
    """Why an engine client of vLLM is not one that can be driven."""
    for name in NEEDED:
        try:
            attrgetter(name)(client)
        except AttributeError:
            return f"this vLLM has no {name}: {RUN_WITH}"
    return None
