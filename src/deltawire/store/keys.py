"""Which keys are allowed: those that every store keeps as they are."""

import re

# A backslash is a slash to some servers, and a folder keeps a number after `#` for files that are being written.
_REFUSED = re.compile(r"[\x00-\x1f\x7f\\]|#\d+(/|$)")


def check_key(key: str) -> str:
    """The key itself, or ValueError where some store would refuse it or keep it under another name."""
    if any(part in ("", ".", "..") for part in key.split("/")) or _REFUSED.search(key):
        raise ValueError(f"{key!r} cannot be the key of an object")
    return key
