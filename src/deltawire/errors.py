"""All exceptions of deltawire. Wrong arguments raise ValueError or TypeError instead.

DeltawireError
├── StoreError: ObjectMissing, Conflict, StoreUnavailable, ReadOnlyStore
├── FormatError: UnsupportedFormat, CorruptObject, LimitExceeded
├── ChainError: MissingAnchor, BrokenChain, Fenced
├── MismatchError: BaseMismatch, DigestMismatch, SnapshotMismatch, SignatureMismatch, RunMismatch
├── EngineError: UnknownParameter, ShapeMismatch, EngineRejected, EngineUnavailable, EngineBroken, EnginesBehind
├── TrainerError: UnsupportedPlacement, RankFailed
└── AddressUnavailable, NotEnoughMemory, MissingDependency
"""

from typing import Any


class DeltawireError(Exception):
    """Base class of all errors.

    Args:
        message: What happened, and what to do about it.
        **fields: Details for programs, readable as attributes: `tensor`, `version`, `expected`, `actual`, `path`, ...
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


class StoreError(DeltawireError):
    """Reading from the store, or writing to it, failed."""


class ObjectMissing(StoreError):
    """A file or object does not exist."""


class Conflict(StoreError):
    """The object exists already and must not be replaced."""


class StoreUnavailable(StoreError):
    """The store did not respond, or refused the request. With `uncertain`, a write may or may not have happened."""


class ReadOnlyStore(StoreError):
    """The store can only be read, object by object: it cannot be written to or listed."""


class FormatError(DeltawireError):
    """A file or document cannot be read as what it should be."""


class UnsupportedFormat(FormatError):
    """A format version, dtype or encoding that this release does not support."""


class CorruptObject(FormatError):
    """Truncated, damaged or contradictory bytes."""


class LimitExceeded(FormatError):
    """A size or count above the limit, refused before any memory is allocated for it."""


class ChainError(DeltawireError):
    """No route leads to the requested version."""


class MissingAnchor(ChainError):
    """There is no anchor to start from."""


class BrokenChain(ChainError):
    """A hop that later versions depend on is missing."""


class Fenced(ChainError):
    """Another publisher has taken over the run."""


class MismatchError(DeltawireError):
    """A content check failed; nothing was changed."""


class BaseMismatch(MismatchError):
    """The weights are not the base of the delta."""


class DigestMismatch(MismatchError):
    """The weights, or the result of applying a delta to them, do not have the stated digest."""


class SnapshotMismatch(MismatchError):
    """What would be published differs from the trainer's weights in `tensor`. The version was not committed."""


class SignatureMismatch(MismatchError):
    """A document is not signed, or not with the expected key."""


class RunMismatch(MismatchError):
    """The store holds a different run from the expected one, or from the one that the target follows."""


class EngineError(DeltawireError):
    """The target cannot load the weights."""


class UnknownParameter(EngineError):
    """A tensor that the target does not have."""


class ShapeMismatch(EngineError):
    """A tensor has a different shape or dtype in the target."""


class EngineRejected(EngineError):
    """The engine refused the update and is unchanged."""


class EngineUnavailable(EngineError):
    """The engine does not respond, or sends an unexpected response."""


class EngineBroken(EngineError):
    """An update failed halfway and could not be rolled back: the engine stays paused and must be restarted."""


class EnginesBehind(EngineError):
    """Engines did not reach the allowed lag in time; `behind` has what is known about each."""


class TrainerError(DeltawireError):
    """The weights cannot be read from the trainer."""


class UnsupportedPlacement(TrainerError):
    """A parameter is sharded over the ranks in a way that cannot be published."""


class RankFailed(TrainerError):
    """Another rank failed or stopped responding; `rank` and `reason` have the details."""


class AddressUnavailable(DeltawireError):
    """The address to listen on is in use, not permitted, or not one of this machine's; see `host` and `port`."""


class NotEnoughMemory(DeltawireError):
    """Memory for a tensor could not be allocated (`num_bytes` were needed), or did not suffice for a sudden change."""


class MissingDependency(DeltawireError):
    """An optional package is not installed; the message has the command that installs it."""
