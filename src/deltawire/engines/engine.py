"""What deltawire asks of whatever serves the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltawire.patches import Patch
from deltawire.state import Digest
from deltawire.target import State
from deltawire.weights import Form, Weights


@dataclass(frozen=True, slots=True)
class Change:
    """What turns the weights that an engine serves into others."""

    base: State
    state: State
    patches: Sequence[Patch]
    old: Weights
    """The weights of `base`, in the checkpoint's layout. They are only read."""

    @property
    def num_changed(self) -> int:
        return sum(len(patch.bits) for patch in self.patches)


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine says of itself."""

    boot: str
    """Another one after each start of the engine."""
    states: tuple[State | None, ...]
    """What the weights are, as each of its processes knows; None where deltawire has not been since the start."""
    version: str | None = None
    """What the engine calls its weights to its own clients."""
    interrupted: bool = False
    """An update of deltawire's was begun and not ended, so nobody may rely on `states`."""

    @property
    def state(self) -> State | None:
        """What the weights are, where that is certain."""
        first = self.states[0] if self.states else None
        return None if self.interrupted or any(each != first for each in self.states) else first


class Engine(Protocol):
    """Something that serves weights. One agent at a time drives it, call after call.

    Whatever fails leaves the engine serving what it served before, with its version unchanged (`EngineRejected`), or
    paused and known to be broken (`EngineBroken`). Where it does not answer, it is `EngineUnavailable`.
    """

    kind: str
    address: str
    in_place: bool = True
    """Whether changes are written into the weights that are there. Otherwise the engine loads all of them each time,
    from a mirror that was brought to the new version before.
    """

    def look(self) -> Served:
        """Ask the engine what it serves. Cheap: it is asked at every poll."""

    def open(self, forms: Mapping[str, Form]) -> None:
        """Find where the tensors of a checkpoint live in the engine, after its start or when they are others.

        A tensor that cannot be changed in place, or that has no place, is refused by name.
        """

    def digest(self) -> Digest:
        """The digest of the weights as they are in the engine now, read from all of them."""

    def stage(self, change: Change) -> None:
        """Bring a change to where it can be written in an instant. The engine goes on serving.

        Refused where the engine's weights are neither those of `change.base` nor of `change.state`.
        """

    def switch(self, change: Change) -> float:
        """Pause, write what was staged, check it, tell the version, go on; the seconds of the pause."""

    def load(self, weights: Weights, folder: Path | None, state: State) -> float:
        """Replace all weights in the way that the engine itself loads them, and check; the seconds of the pause.

        `folder` is a checkpoint with the same weights, where there is one on disk.
        """

    def adopt(self, state: State) -> None:
        """Tell the version of weights that are there already, and end whatever was begun before."""

    def close(self) -> None: ...
