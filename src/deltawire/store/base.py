"""What a store is: a few calls on keys and bytes. All else is built on these, so a new store is one class."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from deltawire.errors import LimitExceeded

Buffer = bytes | memoryview

# What `get` reads unless told otherwise: larger objects are for `get_range`.
MOST_GET_BYTES = 64 << 20

# Pieces of one object, in order. They may be asked for again when an upload is repeated.
Pieces = Iterable[Buffer]


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store says of an object without reading it."""

    key: str
    num_bytes: int
    modified: float
    """When it was written, in seconds since 1970, by the store's clock."""


class Store(Protocol):
    """Keys are relative to the store's URL, with `/` between parts; every call raises only errors of `errors.py`.

    A key is seen with all its bytes or not at all, and a `get` that starts after a `put` has returned sees it.
    """

    url: str
    conditional: bool
    """Whether `create` is decided by the store itself. Where it is not, two writers must not meet (see `lease.py`)."""

    def put(self, key: str, data: Buffer | Pieces) -> None:
        """Write an object, or replace it."""

    def create(self, key: str, data: bytes) -> None:
        """Write an object that does not exist yet, or raise Conflict. `data` must be unlike any other writer's.

        When the answer is lost, what is there is read back and compared: to have written it is success. Where that
        fails too, StoreUnavailable has `uncertain=True`: the object may or may not exist.
        """

    def get(self, key: str, *, limit: int = MOST_GET_BYTES) -> bytes:
        """A whole object, or ObjectMissing; LimitExceeded, before it is read, where it has more bytes than `limit`."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Some bytes of an object; fewer where it ends before."""

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Stat]:
        """All objects whose key starts with the prefix and comes after `after`, in the order of their keys."""

    def stat(self, key: str) -> Stat:
        """Size and time of an object, or ObjectMissing."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there count as removed."""


def check_size(url: str, key: str, num_bytes: int, limit: int) -> None:
    """Refuse an object that is larger than whoever asks for it can use."""
    if num_bytes > limit:
        raise LimitExceeded(
            f"{url}: {key} has {num_bytes} bytes, at most {limit} are read", url=url, key=key, expected=limit,
            actual=num_bytes,
        )  # fmt: skip
