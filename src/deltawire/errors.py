"""Everything that can go wrong, on one page. Wrong arguments raise ValueError or TypeError instead.

DeltawireError
├── StoreError
│   ├── ObjectMissing           a file or object is not there
│   ├── Conflict                it exists already, and may not be replaced
│   └── StoreUnavailable        the store did not answer, or said no
├── FormatError
│   ├── UnsupportedFormat       a newer format, or not deltawire's
│   ├── CorruptObject           bytes that say something impossible
│   └── LimitExceeded           a size beyond what is allowed
├── ChainError
│   ├── MissingAnchor
│   ├── BrokenChain
│   └── Fenced
├── MismatchError
│   ├── BaseMismatch            these are not the weights the delta was made for
│   ├── DigestMismatch          the weights are not what they were said to be
│   ├── SnapshotMismatch        what would be published is not what the trainer has
│   ├── SignatureMismatch
│   └── RunMismatch             another run than the one that is followed
├── EngineError
│   ├── UnknownParameter        a tensor the target does not have
│   ├── ShapeMismatch           it has another shape or dtype there
│   ├── EngineRejected          it refused the update, and is as it was
│   ├── EngineUnavailable       it does not answer
│   ├── EngineBroken            its weights are a mix, so it must not serve: restart it
│   └── EnginesBehind           engines serve older weights than the trainer allows
├── TrainerError
│   ├── UnsupportedPlacement    a parameter is spread over ranks in a way that has no boxes
│   └── RankFailed              a rank of a sharded trainer failed, or gave no sign of life
├── AddressUnavailable          the agent cannot listen there
├── NotEnoughMemory             a tensor is larger than what is left
└── MissingDependency           an optional package is not installed
"""

from typing import Any


class DeltawireError(Exception):
    """The base of all. What a program may want is in attributes: `tensor`, `version`, `expected`, `actual`, `path`."""

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
    """Getting bytes from a place, or putting them there, failed."""


class ObjectMissing(StoreError):
    """A file or object that was asked for is not there."""


class Conflict(StoreError):
    """Something is there already and may not be replaced."""


class StoreUnavailable(StoreError):
    """The store did not answer, or refused."""


class FormatError(DeltawireError):
    """Bytes that are not what they should be."""


class UnsupportedFormat(FormatError):
    """A format version, dtype or encoding that this release does not know."""


class CorruptObject(FormatError):
    """Truncated, damaged or contradictory bytes."""


class LimitExceeded(FormatError):
    """A size or count beyond what is allowed, refused before memory was taken for it."""


class ChainError(DeltawireError):
    """Versions that do not lead to one another."""


class MissingAnchor(ChainError):
    """No anchor to start from."""


class BrokenChain(ChainError):
    """A version that others build on is missing."""


class Fenced(ChainError):
    """Another writer has taken over the run."""


class MismatchError(DeltawireError):
    """A check of content failed; nothing was changed."""


class BaseMismatch(MismatchError):
    """The weights are not those that the delta was made for."""


class DigestMismatch(MismatchError):
    """The weights, or what a delta makes of them, do not have the digest that was stated."""


class SnapshotMismatch(MismatchError):
    """What a version would publish is not what the trainer has: `tensor`. It was not committed."""


class SignatureMismatch(MismatchError):
    """Not signed by the key that was given."""


class RunMismatch(MismatchError):
    """The store holds another run than the one that was named, or that the target follows."""


class EngineError(DeltawireError):
    """The target cannot take the weights."""


class UnknownParameter(EngineError):
    """A tensor that the target does not have."""


class ShapeMismatch(EngineError):
    """A tensor has another shape or dtype at the target."""


class EngineRejected(EngineError):
    """The engine refused the update, and is as it was."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or not in the way it should."""


class EngineBroken(EngineError):
    """An update failed half-way and could not be taken back: the engine was left paused, and must be restarted."""


class EnginesBehind(EngineError):
    """Engines did not come near enough to the newest weights in time: `behind` says what is known of each."""


class TrainerError(DeltawireError):
    """The weights cannot be had from the trainer."""


class UnsupportedPlacement(TrainerError):
    """A parameter is spread over ranks in a way that cannot be published."""


class RankFailed(TrainerError):
    """Another rank failed, or gave no sign of life: `rank`, and the `reason`."""


class AddressUnavailable(DeltawireError):
    """The host or port to listen on is taken, not allowed or not ours: `host`, `port`."""


class NotEnoughMemory(DeltawireError):
    """Memory for a tensor could not be had: `num_bytes` were needed."""


class MissingDependency(DeltawireError):
    """An optional package is needed; the message holds the line that installs it."""
