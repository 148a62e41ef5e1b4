"""The `Store` protocol: a few calls on keys and bytes. All else is built on these, so a new store is one class."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from deltawire.errors import LimitExceeded
from deltawire.hosts import NO_TEXT

Buffer = bytes | memoryview

# The default limit of `get`; larger objects are read with `get_range`.
MOST_GET_BYTES = 64 << 20

# Pieces of one object, in order. They are iterated over again when an upload is repeated.
Pieces = Iterable[Buffer]

# What some store would refuse or rename in a key: some servers treat a backslash as a slash, and obstore's folders use
# `#NUMBER` for files that are being written. File names that are not UTF-8 have surrogates.
_REFUSED = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\\]|#[0-9]+(/|$)")


@dataclass(frozen=True, slots=True)
class Stat:
    """Key, size and time of an object, without its content."""

    key: str
    num_bytes: int
    modified: float
    """When it was written, in seconds since 1970 by the store's clock."""


class Store(Protocol):
    """Reads and writes objects by key. Keys are relative to `url`, with `/` between parts.

    Every call raises only errors of `errors.py`. Objects become visible atomically, and a `get` that starts after a
    `put` has returned sees what was written.
    """

    url: str
    conditional: bool
    """Whether the store itself makes `create` conditional. If not, writers must not race (see `run/commits.py`)."""

    # A store that can only be read, object by object, says so by `listable = False`: see `store/web.py`.

    def put(self, key: str, data: Buffer | Pieces) -> None:
        """Write an object, or replace it."""

    def create(self, key: str, data: bytes) -> None:
        """Write an object that does not exist yet, or raise Conflict. `data` must differ from any other writer's.

        If the answer is lost, the object is read back and compared: finding `data` is success. If that fails too,
        StoreUnavailable has `uncertain=True`: the object may or may not exist.
        """

    def get(self, key: str, *, limit: int = MOST_GET_BYTES) -> bytes:
        """Read a whole object, or raise ObjectMissing; LimitExceeded, before reading it, if it is above `limit`."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a range of an object; shorter if the object ends before."""

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Stat]:
        """All objects whose key starts with `prefix` and sorts after `after`, in the order of their keys."""

    def stat(self, key: str) -> Stat:
        """Size and time of an object, or ObjectMissing."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""


def is_key(text: str) -> bool:
    return not (any(part in ("", ".", "..") for part in text.split("/")) or _REFUSED.search(text))


def check_key(key: str) -> str:
    """Return the key, or raise ValueError if some store would refuse or rename it."""
    if not is_key(key):
        raise ValueError(f"{key!r} cannot be the key of an object")
    return key


def check_prefix(url: str, prefix: str) -> None:
    """Raise ValueError if keys under the prefix of a store, if it has one, would be refused."""
    if prefix and (any(part in ("", ".", "..") for part in prefix.split("/")) or NO_TEXT.search(prefix)):
        raise ValueError(f"{url!r} cannot be a store: write it without '//', '.', '..' and control characters")


def check_range(start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise ValueError(f"{length} bytes from {start} is not a range of an object")


def slices(data: Buffer | Pieces, num_bytes: int) -> Iterator[memoryview]:
    """Split the pieces of an object into smaller ones of at most this size, without copying."""
    for piece in [data] if isinstance(data, bytes | bytearray | memoryview) else data:
        if memoryview(piece).nbytes:
            flat = memoryview(piece).cast("B")
            yield from (flat[start : start + num_bytes] for start in range(0, len(flat), num_bytes))


def check_size(url: str, key: str, num_bytes: int, limit: int) -> None:
    """Raise LimitExceeded for an object that is larger than the caller allows."""
    if num_bytes > limit:
        raise LimitExceeded(
            f"{url}: {key} has {num_bytes} bytes, more than the limit of {limit}", url=url, key=key, expected=limit,
            actual=num_bytes,
        )  # fmt: skip
