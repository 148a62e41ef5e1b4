"""Targets hold the weights of a replica: the protocol, weights in memory, and a checkpoint that is written once."""

import sys
from collections.abc import Callable, Collection, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deltawire.errors import BaseMismatch, ShapeMismatch, UnknownParameter
from deltawire.format.checkpoint import anchor_info, check_new
from deltawire.format.delta import Delta
from deltawire.format.patches import Patch, write_patches
from deltawire.format.replay import Replay, write_replayed
from deltawire.tensors.boxes import Shape
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.dtypes import ALIASES, DType, dtype_named, empty_bits
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import (
    DTypeChoice,
    Place,
    Tensor,
    Tensors,
    TensorSpec,
    Viewed,
    Weights,
    num_elements,
    place,
    spec,
    untied_name,
    writable,
    writables,
    write,
)

FILLED = "pass an empty dictionary, which is filled"


class Target(Protocol):
    """Weights that a replica updates.

    `state` describes the actual weights: it is None during an update and after one that failed half-way. Patches are
    absolute, so an update can be repeated.
    """

    scratch: Path | None = None
    """A persistent folder for downloads, from which they are resumed; None if there is none."""

    def state(self) -> WeightVersion | None:
        """Run, version and digest of the weights; None if unknown."""
        return None

    def served(self) -> WeightVersion | None:
        """The weights in use: the target's own, or those of the engine that it is the mirror of."""
        return self.state()

    def refresh(self) -> None:
        """Check again which weights are in use, if that can change on its own."""
        return

    def about(self) -> dict[str, Any]:
        """Additional fields for the status of a replica."""
        return {}

    def digest(self, tied: Ties) -> Digest | None:
        """Compute the digest of the weights, for weights of unknown version; None if there are none yet."""
        return None

    def weights(self) -> Weights:
        """The weights to decode deltas against, read-only."""
        return {}

    @property
    def decodes(self) -> bool:
        """Whether deltas are given to `apply_delta` as they were fetched, instead of to `apply` as patches."""
        return False

    @property
    def undecodable(self) -> Collection[str]:
        """The encodings that `apply_delta` does not take."""
        return ()

    def apply_delta(self, delta: Delta) -> None:
        """Decode a delta and write it, where the target `decodes`. Raises BaseMismatch if the weights are not its base,
        CorruptObject or UnsupportedFormat if they are and it cannot be decoded, and EngineRejected, with the version
        that is `refused`, if an engine does not take it.
        """
        raise ValueError("this target takes patches, not deltas")

    def apply(self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Ties) -> None:
        """Write patches that turn the weights from `base` into `state`. Everything was checked before."""

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Ties) -> None:
        """Replace all weights. `anchor.base` is the anchor, `files` are its additional files (configuration, ...)."""

    def close(self) -> None:
        """Release what the target holds."""
        return


class MemoryTarget(Target):
    """Arrays or tensors in memory, updated in place: those of a mapping, or of the mapping that a function returns.

    An empty dictionary is filled from the first anchor: `make` creates a tensor for a name, a dtype and a shape.
    Without it they are `Tensor`s, and tied names are left out.
    """

    def __init__(
        self, weights: Weights | Callable[[], Weights], *, dtype: DTypeChoice = None,
        make: Callable[[str, DType, Shape], Any] | None = None,
    ) -> None:  # fmt: skip
        self._read = weights if callable(weights) else lambda: weights
        self._owned = weights if isinstance(weights, MutableMapping) and not weights else None
        """The dictionary if it was empty: its names then follow those of the run."""
        self._dtype, self._make = dtype, make
        self._tied: Ties = {}
        self._state: WeightVersion | None = None
        self._written: dict[str, Any] = {}
        """The tensors of that state, kept alive so that no other tensor gets their addresses."""

    def state(self) -> WeightVersion | None:
        return self._state

    def refresh(self) -> None:
        """Reset the state if the tensors were replaced by others."""
        if self._state is not None and _places(self._read()) != _places(self._written):
            self._state, self._written = None, {}

    def digest(self, tied: Ties) -> Digest | None:
        weights = self._read()
        if not weights or untied_name(weights, tied, self._dtype) is not None:
            return None
        return digest(weights, dtype=self._dtype, tied=tied)

    def weights(self) -> Tensors:
        return Viewed(self._read(), self._dtype)

    def apply(self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Ties) -> None:
        targets = writables(self._kept(), [patch.name for patch in patches], tied)
        is_known, self._state = self._state is not None, None
        write_patches(targets, patches)
        # After an update that was interrupted, patches are written again, to whatever is there by now.
        if not is_known and self.digest(tied) != state.digest:
            raise BaseMismatch(f"the weights were changed meanwhile: they are not those of version {state.version}")
        self._become(state, tied)

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Ties) -> None:
        if self._owned is None:
            self._check(anchor.base, tied)
        anchor.verify(state.digest)
        self._state = None
        if self._owned is not None:
            self._make_room(self._owned, anchor.base, tied)
        for name, values in writables(self._kept(), anchor.base, tied).items():
            bits = anchor.bits_of(name)
            for value in values:
                write(value, slice(None), bits)
        self._become(state, tied)

    def _kept(self) -> Weights:
        """The weights, if they are the same tensors each time: what is written to a copy would be lost."""
        weights, again = self._read(), self._read()
        for name in weights if again is not weights else ():
            if place(weights[name]) != place(again[name]):
                raise ValueError(f"{name}: the target returns a new copy on each access, so writes would be lost")
        return weights

    def _become(self, state: WeightVersion, tied: Ties) -> None:
        weights = self._read()
        self._written = {name: weights[name] for name in weights}
        self._state, self._tied = state, tied

    def _make_room(self, weights: MutableMapping[str, Any], base: Weights, tied: Ties) -> None:
        now = Viewed(weights, self._dtype)
        # A name that was tied refers to another tensor's memory.
        kept = {name for name in weights if name in base and name not in self._tied}
        for name in [name for name in weights if name not in kept or now.spec(name) != spec(base, name)]:
            del weights[name]
        for name in base:
            if name not in weights:
                dtype, shape = spec(base, name)
                make = self._make or _plain
                weights[name] = make(name, dtype_named(dtype), shape)
        if self._make is not None:
            weights.update({name: weights[to] for name, to in tied.items()})
        writable(weights, weights, tied)

    def _check(self, base: Weights, tied: Ties) -> None:
        weights = self._kept()
        now = Viewed(weights, self._dtype)
        for name in base:
            if name not in weights:
                problem = f"the run has {name}, which the target does not have: add it, or {FILLED}"
                raise UnknownParameter(problem, tensor=name)
        for name in weights:
            if name not in base and name not in tied:
                raise UnknownParameter(
                    f"the target has {name}, which the run does not have, so it would never be updated: "
                    "publish it too, or pass a mapping without it",
                    tensor=name,
                )
            expected, actual = spec(base, tied.get(name, name)), now.spec(name)
            if expected != actual:
                raise ShapeMismatch(
                    f"{name} is {actual[0]} {list(actual[1])} at the target, but {expected[0]} {list(expected[1])} "
                    f"in the run: {_advice(expected, actual)}",
                    tensor=name, expected=str(expected), actual=str(actual),
                )  # fmt: skip
        writable(weights, weights, tied)


class Export(Target):
    """A new checkpoint: written from an anchor and the deltas after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        check_new(path)

    def apply(self, patches: Sequence[Patch], base: WeightVersion, state: WeightVersion, tied: Ties) -> None:
        raise TypeError("an export cannot be patched")

    def load(self, anchor: Replay, state: WeightVersion, files: Sequence[Path], tied: Ties) -> None:
        total = sum(num_elements(anchor.base, name) for name in anchor.base)
        info = anchor_info(state.run, state.version, state.digest, total, tied)
        write_replayed(anchor, self._path, {"format": "pt", **info}, state.digest, files)


def _plain(name: str, dtype: DType, shape: Shape) -> Tensor:
    return Tensor(dtype, shape, empty_bits(shape, dtype, name))


def _places(weights: Weights) -> dict[str, Place | None]:
    return {name: place(weights[name]) for name in weights}


def _advice(expected: TensorSpec, actual: TensorSpec) -> str:
    if expected[1] != actual[1]:
        return f"check that both have the same model, or {FILLED}"
    if actual[0].startswith(("I", "U")) and dtype_named(expected[0]).itemsize == dtype_named(actual[0]).itemsize:
        return f'pass dtype="{expected[0]}" if these integers are its bits'
    return f"cast it to the run's dtype first, or {FILLED}"


def new_tensor(name: str, dtype: DType, shape: Shape) -> Any:
    """An uninitialized tensor: of torch if that is imported, else of numpy or ml_dtypes; a `Tensor` if both lack it."""
    torch, ml_dtypes = sys.modules.get("torch"), sys.modules.get("ml_dtypes")
    known_as = next(alias for alias, own in ALIASES.items() if own == dtype.name)
    plain = _plain(name, dtype, shape)
    if torch is not None:
        return torch.from_numpy(plain.bits.view(np.uint8)).view(getattr(torch, known_as)).view(shape)
    own_kind = getattr(np, known_as, None) or getattr(ml_dtypes, known_as, None)
    return plain if own_kind is None else plain.bits.view(own_kind).reshape(shape)
