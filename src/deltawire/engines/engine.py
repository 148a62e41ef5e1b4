"""The protocol between deltawire and an inference engine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltawire.format.patches import Patch
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.weights import TensorSpec, Weights


@dataclass(frozen=True, slots=True)
class EngineChange:
    """The patches that turn the weights that an engine serves into those of another version."""

    base: WeightVersion
    state: WeightVersion
    patches: Sequence[Patch]
    old: Weights
    """The weights of `base`, in the checkpoint's layout. Read-only."""

    @property
    def num_changed(self) -> int:
        return sum(len(patch.bits) for patch in self.patches)


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """A delta as it was fetched, for an engine that decodes it against the weights that it serves."""

    base: WeightVersion
    state: WeightVersion
    files: Sequence[Path]
    """All parts of the delta, where the engine can read them until `stage` returns."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine reports about itself."""

    boot: str
    """An id that changes with each start of the engine."""
    states: tuple[WeightVersion | None, ...]
    """The version of the weights in each of its processes; None if deltawire has not set one since the start."""
    version: str | None = None
    """The version that the engine reports to its own clients."""
    interrupted: bool = False
    """An update by deltawire was started and not finished, so `states` is not reliable."""
    quantized: str | None = None
    """How weights are quantized when they are loaded, if they are."""
    derived: str | None = None
    """The digest of the codes and scales that are made from them."""

    @property
    def state(self) -> WeightVersion | None:
        """The version of the weights, if it is certain."""
        first = self.states[0] if self.states else None
        return None if self.interrupted or any(each != first for each in self.states) else first


class Engine(Protocol):
    """An adapter for something that serves weights. One agent at a time drives it; calls do not overlap.

    A call that fails leaves the engine serving what it served before, with its version unchanged (`EngineRejected`), or
    paused and known to be broken (`EngineBroken`). If it does not respond, that is `EngineUnavailable`.
    """

    kind: str
    address: str
    in_place: bool = True
    """Whether changes are written into the weights in place. Otherwise the engine loads all weights each time, from a
    mirror that is at the new version already.
    """

    @property
    def decodes(self) -> bool:
        """Whether `stage` also takes an `EngineDelta`, so that no mirror is needed. Read after `bind`."""
        return False

    @property
    def is_divided(self) -> bool:
        """Whether its processes hold parts of tensors, as with tensor parallelism: then they cannot decode `context`.
        Read after `bind`.
        """
        return False

    @property
    def on_gpu(self) -> bool:
        """Whether the weights are on a GPU, where decoding does not load the host. Read after `bind`."""
        return False

    def specs(self) -> Mapping[str, TensorSpec] | None:
        """The tensors that the engine is bound to, even if an earlier agent did that; None if it is not bound."""
        return None

    def status(self) -> Served:
        """What the engine serves. Must be cheap: it is called at every poll."""

    def bind(self, specs: Mapping[str, TensorSpec]) -> None:
        """Locate the tensors of a checkpoint in the engine, after its start or when names, shapes or dtypes change.

        Raises for a tensor that cannot be changed in place, or that the engine does not have, with its name.
        """

    @property
    def left_out(self) -> Collection[str]:
        """Tensors that the engine does not use, and that are not part of `digest`. Read after `bind`."""
        return ()

    def digest(self) -> Digest:
        """The digest of the weights in the engine, computed from all of them."""

    def stage(self, change: EngineChange | EngineDelta) -> None:
        """Bring a change to where it can be written with a short pause. The engine keeps serving.

        Raises if the engine's weights are neither those of `change.base` nor of `change.state`; for a delta they must
        be those of its base, and CorruptObject, BaseMismatch or UnsupportedFormat means that it cannot be decoded.
        """

    def commit(self, change: EngineChange | EngineDelta) -> float:
        """Pause, write what was staged, check the digest, set the version, resume; returns the seconds of the pause."""

    def after_commit(self) -> Served:
        """What the engine serves after a commit: from its answer, or from `status`."""
        return self.status()

    def load(self, weights: Weights, folder: Path | None, state: WeightVersion) -> float:
        """Replace all weights with the engine's own loading code, and check; returns the seconds of the pause.

        `folder` is a checkpoint with the same weights, if there is one on disk.
        """

    def mark(self, state: WeightVersion) -> None:
        """Set the version of the weights that are there already, and drop any unfinished update."""

    def close(self) -> None: ...
