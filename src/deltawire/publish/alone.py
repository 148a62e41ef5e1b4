"""The processes that publish together: here only one. `sharded/messages.py` is the same for many."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from deltawire import errors
from deltawire.errors import DeltawireError, Fenced, RankFailed, SnapshotMismatch

Message = dict[str, Any]


class Alone:
    """The only rank: nobody to send commands to, no answers to wait for."""

    rank, size, timeout = 0, 1, 0.0

    @property
    def others(self) -> list[int]:
        return [other for other in range(self.size) if other != self.rank]

    def start(self, state: Callable[[], tuple[int, bool]]) -> None:
        """Send heartbeats from now on, with `state`: how often this rank has published, and whether it has work."""

    def send(self, command: Mapping[str, Any], *, asks: bool = False) -> None:
        """Send the next command to all others; `asks` if they have to answer."""

    def answers(self) -> list[Message]:
        """The answers of the others to the last command, by rank; raises the error of the first that failed."""
        return []

    def close(self) -> None:
        """Send no more heartbeats."""


def error_fields(error: BaseException, rank: int | None = None) -> Message:
    """An error as a message for other ranks; `rank` is where it happened, if that matters."""
    where = "" if rank is None else f"rank {rank}: "
    if not isinstance(error, DeltawireError):
        reason = f"{type(error).__name__}: {error}"
        return {"kind": "RankFailed", "message": where + reason, "fields": {"rank": rank or 0, "reason": reason}}
    fields = {name: value for name, value in error.fields.items() if _is_plain(value)}
    return {
        "kind": type(error).__name__,
        "message": where + error.message,
        "fields": fields if rank is None else {"rank": rank, **fields},
    }


def error_from(message: Message) -> DeltawireError:
    """The error that another rank has sent."""
    kind = getattr(errors, message["kind"], RankFailed)
    error: DeltawireError = kind(message["message"], **message["fields"])
    return error


def final(error: BaseException | None) -> DeltawireError | None:
    """The error, if all later versions would fail with it too: another writer, other weights, no way to the others."""
    if isinstance(error, Fenced | SnapshotMismatch) or (isinstance(error, RankFailed) and error.fields.get("is_lost")):
        return error
    return None


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
