"""Which keys are allowed: those that every store keeps unchanged."""

import re

# Some servers treat a backslash as a slash, and obstore's folders use `#NUMBER` for files that are being written. File
# names that are not UTF-8 have surrogates.
_REFUSED = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\\]|#[0-9]+(/|$)")


def is_key(text: str) -> bool:
    return not (any(part in ("", ".", "..") for part in text.split("/")) or _REFUSED.search(text))


def check_key(key: str) -> str:
    """Return the key, or raise ValueError if some store would refuse or rename it."""
    if not is_key(key):
        raise ValueError(f"{key!r} cannot be the key of an object")
    return key
