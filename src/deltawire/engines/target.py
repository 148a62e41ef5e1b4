"""An engine as the target of a replica, with a mirror next to it, or alone where it decodes deltas itself."""

import time
from collections import UserDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from deltawire.codec import ENCODINGS
from deltawire.engines.engine import Engine, EngineChange, EngineDelta, Served
from deltawire.errors import BaseMismatch, CorruptObject, DeltawireError, EngineRejected
from deltawire.follow.mirror import Mirror
from deltawire.follow.target import MemoryTarget, Target
from deltawire.format.checkpoint import Checkpoint
from deltawire.format.delta import Delta
from deltawire.format.patches import Patch
from deltawire.format.replay import Replay
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.weights import TensorSpec, Weights, spec

# An anchor that changes a smaller part of the weights is applied like a delta.
LITTLE = 0.1


class EngineTarget(Target):
    """Weights in an engine. What counts as served is what the engine says, never what was sent to it.

    With a mirror, which is a folder or in host memory, deltas are decoded against the mirror while the engine serves,
    then written into the engine, then into the mirror. Without one the engine decodes them against its own weights.

    Args:
        engine: The engine.
        mirror: A folder or a target for the mirror. False for none: the engine must be able to decode. By default none
            where the engine can decode any delta on a GPU, and otherwise one in host memory.
    """

    def __init__(self, engine: Engine, mirror: str | Path | Target | Literal[False] | None = None) -> None:
        self.engine = engine
        self._may_drop = mirror is None
        """Whether the mirror is dropped if the engine decodes on a GPU."""
        self.mirror: Target | None
        if mirror is None:
            self.mirror = MemoryTarget({})
        elif isinstance(mirror, str | Path):
            self.mirror = Mirror(mirror)
        else:
            self.mirror = mirror or None
        self.scratch = None if self.mirror is None else self.mirror.scratch
        self.pause_seconds: float | None = None
        """How long the engine was paused for the last update."""
        self.updated: float | None = None
        """When that was."""
        self._now: Served | None = None
        self._opened: tuple[str, dict[str, TensorSpec]] | None = None
        self._error: str | None = None
        self._asked: str | None = None
        """The start of the engine that was asked whether it can be adopted."""

    def state(self) -> WeightVersion | None:
        """The version of the mirror; without one, of the engine's weights, also while an update is under way."""
        if self.mirror is not None:
            return self.mirror.state()
        states = () if self._now is None else self._now.states
        return states[0] if states and all(each == states[0] for each in states) else None

    def served(self) -> WeightVersion | None:
        now = self._now  # read once: the polling thread may forget it meanwhile
        return None if now is None else now.state

    def refresh(self) -> None:
        try:
            self._now = self.engine.status()
            self._error = None
        except DeltawireError as error:
            self._now, self._error = None, str(error)
            raise
        if self._may_drop and self.mirror is not None and self._now.state is not None and self.mirror.state() is None:
            self._adopt(self._now.boot)

    def _adopt(self, boot: str) -> None:
        """Do without a mirror if an agent before this one has, and the engine is as that one left it."""
        if self._asked == boot:
            return
        specs = self.engine.specs() if self.engine.in_place else None
        if specs is not None and self._needs_no_mirror():
            self._opened = boot, dict(specs)
            self._drop_mirror()
        self._asked = boot

    def _needs_no_mirror(self) -> bool:
        return self.engine.decodes and self.engine.on_gpu and not self.engine.is_divided

    def _drop_mirror(self) -> None:
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None

    def about(self) -> dict[str, Any]:
        now = self._now
        return {
            "engine": {
                "kind": self.engine.kind,
                "address": self.engine.address,
                "boot": None if now is None else now.boot,
                "weight_version": None if now is None else now.version,
                "error": self._error,
                **({"left_out": len(self.engine.left_out)} if self.engine.left_out else {}),
                **({"quantized": now.quantized, "derived": now.derived} if now is not None and now.quantized else {}),
            },
            "pause_seconds": self.pause_seconds,
            "updated": self.updated,
        }

    def digest(self, tied: Mapping[str, str]) -> Digest | None:
        if self.mirror is not None:
            return self.mirror.digest(tied)
        self.refresh()
        return self.engine.digest() if self._is_bound() else None

    def weights(self) -> Weights:
        if self.mirror is not None:
            return self.mirror.weights()
        if self._opened is None:
            self.refresh()
            self._is_bound()
        return _OnlyInEngine({} if self._opened is None else self._opened[1])

    @property
    def decodes(self) -> bool:
        return self.mirror is None

    @property
    def undecodable(self) -> Collection[str]:
        names = [name for name, encoding in ENCODINGS.items() if encoding.needs_mirror]
        return names if self.mirror is None and self._opened is not None and self.engine.is_divided else ()

    def apply_delta(self, delta: Delta) -> None:
        base = WeightVersion(delta.run, delta.base_version, delta.base_digest)
        state = WeightVersion(delta.run, delta.version, delta.digest)
        if not self._is_bound() or not self._is_at(base, state):
            raise BaseMismatch(f"the engine does not serve version {base.version}, or another program has changed it")
        if self.state() == state:
            self.engine.mark(state)
            self.refresh()
            return
        try:
            is_there = self._switch(EngineDelta(base, state, delta.files))
        except EngineRejected as error:
            raise EngineRejected(error.message, **{**error.fields, "refused": state.version}) from error
        if not is_there:
            raise BaseMismatch(f"the engine's weights are not those of version {base.version}")

    def apply(
        self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Mapping[str, str]
    ) -> None:
        if self.mirror is None:
            # Without patches: the weights are there, and the engine does not say so yet.
            if patches or not self._is_bound() or self.engine.digest() != state.digest:
                raise BaseMismatch(f"the engine does not have the weights of version {state.version}")
            self.engine.mark(state)
            self.refresh()
            return
        # In the middle of an update, the mirror does not have the weights of the base, which a change needs.
        is_there = self.mirror.state() is not None and self._open(self.mirror) and self._is_at(base, state)
        if is_there and (patches or self.served() != state):
            is_there = self._switch(EngineChange(base, state, patches, self.mirror.weights()))
        self.mirror.apply(patches, base, state, tied)
        if not is_there:
            self._load(self.mirror.weights(), self._folder(), state)

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Mapping[str, str]) -> None:
        if self._decodes(anchor.base):
            self._load_decoding(anchor, state)
            return
        mirror = self.mirror
        if mirror is None:
            raise EngineRejected("the engine does not decode deltas itself, or does not use all tensors: use a mirror")
        have, patches, is_there = mirror.state(), None, False
        if have is not None and self.engine.in_place:
            patches = anchor.patches_from(mirror.weights(), state.digest, LITTLE)
        if have is not None and patches is not None and self._open(mirror) and self._is_at(have, state):
            is_there = self._switch(EngineChange(have, state, patches, mirror.weights()))
        mirror.load(anchor, state, files, tied)
        if not is_there:
            self._load(mirror.weights(), self._folder(), state)

    def _decodes(self, weights: Weights) -> bool:
        """Whether the engine can do without a mirror for these tensors."""
        if not self.engine.in_place or (self.mirror is not None and not self._may_drop):
            return False
        self._bind(weights)
        if not (self.engine.decodes if self.mirror is None else self._needs_no_mirror()):
            return False
        self._drop_mirror()
        return True

    def _load_decoding(self, anchor: Replay, state: WeightVersion) -> None:
        """Load an anchor, and then delta after delta."""
        first = state
        if anchor.deltas:
            first = WeightVersion(state.run, anchor.deltas[0].base_version, anchor.deltas[0].base_digest)
        checkpoint = anchor.base
        folder = checkpoint.path if isinstance(checkpoint, Checkpoint) and checkpoint.path.is_dir() else None
        self._load(checkpoint, folder, first)
        for delta in anchor.deltas:
            self.apply_delta(delta)

    def _folder(self) -> Path | None:
        return self.mirror.folder if isinstance(self.mirror, Mirror) else None

    def _is_at(self, base: WeightVersion, state: WeightVersion) -> bool:
        """Whether the engine is at one of two versions, or between them, so that the change from one to the other can
        be written (again).
        """
        states = () if self._now is None else self._now.states
        if not states or any(each not in (base, state) for each in states):
            if self._digest(None if self.mirror is None else self.mirror.weights()) != base.digest:
                return False
            self.engine.mark(base)
            self.refresh()
        return True

    def _open(self, mirror: Target) -> bool:
        """Bind the engine to the mirror's tensors. False if it takes no changes in place."""
        if self.engine.in_place:
            self._bind(mirror.weights())
        return self.engine.in_place

    def _is_bound(self) -> bool:
        """Whether the engine has found its places since its start, for this agent or for one before it."""
        boot = self._now.boot if self._now else ""
        if self._opened is None or self._opened[0] != boot:
            bound = self.engine.specs()
            self._opened = None if bound is None else (boot, dict(bound))
        return self._opened is not None

    def _bind(self, weights: Weights) -> None:
        """Have the engine find its places, after it was restarted or when the tensors have changed."""
        self.refresh()
        wanted = self._now.boot if self._now else "", {name: spec(weights, name) for name in weights}
        if self._opened != wanted:
            self._opened = None
            self.engine.bind(wanted[1])
            self._opened = wanted
            self.refresh()

    def _switch(self, change: EngineChange | EngineDelta) -> bool:
        """Write a change into the engine; False where its weights turn out to be others than it says."""
        now = None
        try:
            self.engine.stage(change)
            self._paused(self.engine.commit(change))
            now = self.engine.after_commit()
            return True
        except (EngineRejected, CorruptObject) as error:
            try:
                found = self._digest(change.old if isinstance(change, EngineChange) else None)
            except EngineRejected:
                raise error from None  # it was restarted meanwhile, and knows of no tensors yet
            if found == change.base.digest:
                raise
            return False
        finally:
            if now is None:
                self.refresh()
            else:
                self._now = now

    def _load(self, weights: Weights, folder: Path | None, state: WeightVersion) -> None:
        """Give the engine these weights, whatever it has now."""
        self._bind(weights)
        try:
            if self._digest(weights) == state.digest:
                self.engine.mark(state)
            else:
                self._paused(self.engine.load(weights, folder, state))
        finally:
            self.refresh()

    def _digest(self, weights: Weights | None) -> Digest:
        """The digest of what the engine has; of what it leaves out, these weights count."""
        names = self.engine.left_out
        beside = Digest() if weights is None or not names else digest({name: weights[name] for name in names})
        return self.engine.digest() + beside

    def _paused(self, seconds: float) -> None:
        self.pause_seconds, self.updated = seconds, time.time()

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            if self.mirror is not None:
                self.mirror.close()


class _OnlyInEngine(UserDict[str, Any]):
    """The names of weights that only an engine has."""

    def __getitem__(self, name: str) -> Any:
        raise EngineRejected(f"{name} cannot be read: there is no mirror, only the engine has it", tensor=name)
