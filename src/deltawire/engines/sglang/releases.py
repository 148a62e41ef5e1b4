"""Which SGLang deltawire works with, and what differs between its versions."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltawire.errors import EngineRejected

FIRST, LAST = (0, 5, 17), (0, 5, 23)
RUN_WITH = "deltawire needs SGLang 0.5.17 or later; 0.5.17 was tested, and the source of releases up to 0.5.23 was read"
# Weights change between `/begin_weight_update` and `/end_weight_update` only.
_SESSIONS = (0, 5, 21)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself."""

    version: str = ""
    has_sessions: bool = True
    keeps_prefixes: bool = True
    """Whether what was computed for one request is used for others."""


def about(info: Mapping[str, Any]) -> About:
    """From what `/server_info` answers. A version that is too old is refused."""
    version = str(info.get("version"))
    # A build from source may be called 0.0.0.dev1, whatever it is.
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found and any(map(int, found.groups())) else None
    if number is not None and number < FIRST:
        raise EngineRejected(f"SGLang {version} is too old: {RUN_WITH}")
    if number is None or number > LAST:
        _log.warning("SGLang %s is untested: %s", version, RUN_WITH)
    return About(version, number is None or number >= _SESSIONS, not info.get("disable_radix_cache", False))
