"""A mirror and the engine next to it, as one target: a replica keeps both current."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltawire.engines.engine import Engine, EngineChange, Served
from deltawire.errors import DeltawireError, EngineRejected
from deltawire.follow.mirror import Mirror
from deltawire.follow.target import MemoryTarget, Target
from deltawire.format.patches import Patch
from deltawire.format.replay import Replay
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.weights import TensorSpec, Weights, spec

# An anchor that changes a smaller part of the weights is applied like a delta.
LITTLE = 0.1


class EngineTarget(Target):
    """Deltas are decoded against the mirror while the engine serves, then written into the engine, then the mirror.

    The mirror is a folder, or host memory. What counts as served is what the engine says, never what was sent to it.
    """

    def __init__(self, engine: Engine, mirror: str | Path | Target | None = None) -> None:
        self.engine = engine
        if mirror is None or isinstance(mirror, str | Path):
            self.mirror: Target = MemoryTarget({}) if mirror is None else Mirror(mirror)
        else:
            self.mirror = mirror
        self.scratch = self.mirror.scratch
        self.pause_seconds: float | None = None
        """How long the engine was paused for the last update."""
        self.updated: float | None = None
        """When that was."""
        self._now: Served | None = None
        self._opened: tuple[str, dict[str, TensorSpec]] | None = None
        self._error: str | None = None

    def state(self) -> WeightVersion | None:
        return self.mirror.state()

    def served(self) -> WeightVersion | None:
        return None if self._now is None else self._now.state

    def refresh(self) -> None:
        try:
            self._now = self.engine.status()
            self._error = None
        except DeltawireError as error:
            self._now, self._error = None, str(error)
            raise

    def about(self) -> dict[str, Any]:
        return {
            "engine": {
                "kind": self.engine.kind,
                "address": self.engine.address,
                "boot": None if self._now is None else self._now.boot,
                "weight_version": None if self._now is None else self._now.version,
                "error": self._error,
            },
            "pause_seconds": self.pause_seconds,
            "updated": self.updated,
        }

    def digest(self, tied: Mapping[str, str]) -> Digest | None:
        return self.mirror.digest(tied)

    def weights(self) -> Weights:
        return self.mirror.weights()

    def apply(
        self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Mapping[str, str]
    ) -> None:
        is_there = self._is_at(base, state)
        if is_there and (patches or self.served() != state):
            is_there = self._switch(EngineChange(base, state, patches, self.mirror.weights()))
        self.mirror.apply(patches, base, state, tied)
        if not is_there:
            self._load(state)

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Mapping[str, str]) -> None:
        have = self.mirror.state()
        patches = None
        if have is not None and self.engine.in_place:
            patches = anchor.patches_from(self.mirror.weights(), state.digest, LITTLE)
        is_there = False
        if have is not None and patches is not None and self._is_at(have, state):
            is_there = self._switch(EngineChange(have, state, patches, self.mirror.weights()))
        self.mirror.load(anchor, state, files, tied)
        if not is_there:
            self._load(state)

    def _is_at(self, base: WeightVersion, state: WeightVersion) -> bool:
        """Whether the engine is at one of two versions, or between them, so that the change from one to the other can
        be written (again).
        """
        if not self.engine.in_place:
            return False
        self._open()
        states = () if self._now is None else self._now.states
        if not states or any(each not in (base, state) for each in states):
            if self.engine.digest() != base.digest:
                return False
            self.engine.mark(base)
            self.refresh()
        return True

    def _open(self) -> None:
        """Have the engine find its places, after it was restarted or when the tensors have changed."""
        self.refresh()
        weights = self.mirror.weights()
        wanted = (self._now.boot if self._now else ""), {name: spec(weights, name) for name in weights}
        if self._opened != wanted:
            self._opened = None
            self.engine.bind(wanted[1])
            self._opened = wanted
            self.refresh()

    def _switch(self, change: EngineChange) -> bool:
        """Write a change into the engine; False where its weights turn out to be others than it says."""
        try:
            self.engine.stage(change)
            self._paused(self.engine.commit(change))
            return True
        except EngineRejected:
            if self.engine.digest() == change.base.digest:
                raise
            return False
        finally:
            self.refresh()

    def _load(self, state: WeightVersion) -> None:
        """Make the engine what the mirror is, whatever it is now."""
        self._open()
        try:
            if self.engine.digest() == state.digest:
                self.engine.mark(state)
            else:
                folder = self.mirror.folder if isinstance(self.mirror, Mirror) else None
                self._paused(self.engine.load(self.mirror.weights(), folder, state))
        finally:
            self.refresh()

    def _paused(self, seconds: float) -> None:
        self.pause_seconds, self.updated = seconds, time.time()

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            self.mirror.close()
