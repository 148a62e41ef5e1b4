"""Removes secrets from text that is shown, logged or sent to other machines."""

import re

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# Up to the last @ of the word: secret keys may contain slashes, which are often pasted unescaped.
_USER_AND_PASSWORD = re.compile(r"(://)[^\s@:/]*:[^\s@]*@(?:[^\s@]*@)*")
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+")
_BEARER = re.compile(r"(Bearer\s+)[^\s'\"]+", re.IGNORECASE)
_LIKE_A_KEY = re.compile(r"[0-9A-Za-z+/=_-]{40,}")


def redacted(text: str) -> str:
    """The text without private keys, bearer tokens, and the passwords and queries of URLs."""
    text = _PRIVATE_KEY.sub("(a private key)", text)
    text = _USER_AND_PASSWORD.sub(r"\1***@", text)
    return _BEARER.sub(r"\1***", _QUERY.sub(r"\1***", text))


def is_like_a_key(text: str) -> bool:
    """Whether the text may be a key itself where a file name was expected."""
    return "PRIVATE KEY" in text or _LIKE_A_KEY.fullmatch(text) is not None
