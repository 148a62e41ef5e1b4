"""Where a replica's weights live: what it asks of them, and arrays or a torch module in memory."""

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deltawire.dtypes import ALIASES, DType, dtype_named, empty_bits
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.patches import Patch
from deltawire.replay import Replay
from deltawire.state import Digest, digest
from deltawire.weights import (
    DTypeChoice,
    Place,
    Tensor,
    Viewed,
    Weights,
    aliases_of,
    form,
    place,
    untied_name,
    writable,
    write,
)


@dataclass(frozen=True, slots=True)
class State:
    """Which weights these are."""

    run: str
    version: int
    digest: Digest


class Target(Protocol):
    """Weights that a replica keeps current.

    A target says what its weights are, never what it was asked to make of them: while it is being changed, and after
    a change that failed half-way, `state` is None. Patches are absolute, so a change may be repeated.
    """

    scratch: Path | None
    """A folder for downloads that outlives the process, where there is one: they are resumed from it."""

    def state(self) -> State | None:
        """Run, version and digest of the weights, where they are known."""

    def served(self) -> State | None:
        """What is in use: the weights themselves, or those of the engine that they are a mirror of."""
        return self.state()

    def look(self) -> None:
        """Find out anew what is in use, where that can change by itself."""
        return

    def about(self) -> dict[str, Any]:
        """What else there is to tell, for a replica's status."""
        return {}

    def digest(self, tied: Mapping[str, str]) -> Digest | None:
        """The digest of the weights as they are, for weights of unknown version; None where there are none yet."""

    def weights(self) -> Weights:
        """The weights, to decode deltas against. They are only read."""

    def apply(self, patches: Sequence[Patch], base: State, state: State, tied: Mapping[str, str]) -> None:
        """Write patches, which turn the weights from `base` into `state`. Everything was checked before."""

    def load(self, anchor: Replay, state: State, files: Sequence[Path], tied: Mapping[str, str]) -> None:
        """Replace all weights. `anchor.base` is the anchor, `files` are those that came beside it."""

    def close(self) -> None: ...


class MemoryTarget(Target):
    """Arrays or tensors in memory, changed in place: those of a mapping, or of what a function returns each time.

    An empty dictionary is filled from the first anchor: `make` gives a new tensor for a name, a dtype and a shape.
    Without it they are `Tensor`s, and tied names are left out.
    """

    scratch: Path | None = None

    def __init__(
        self,
        weights: Weights | Callable[[], Weights],
        *,
        dtype: DTypeChoice = None,
        make: Callable[[str, DType, tuple[int, ...]], Any] | None = None,
    ) -> None:
        self._read = weights if callable(weights) else lambda: weights
        self._owned = weights if isinstance(weights, MutableMapping) and not weights else None
        """The dictionary, where it was empty: its names then follow the run's."""
        self._dtype, self._make = dtype, make
        self._tied: Mapping[str, str] = {}
        self._state: State | None = None
        self._written: dict[str, Any] = {}
        """The tensors of that state, kept: while they are alive nothing else has their addresses."""

    def state(self) -> State | None:
        return self._state

    def look(self) -> None:
        """Forget what the weights are where others have taken their place."""
        if self._state is not None and _places(self._read()) != _places(self._written):
            self._state, self._written = None, {}

    def digest(self, tied: Mapping[str, str]) -> Digest | None:
        weights = self._read()
        if not weights or untied_name(weights, tied, self._dtype) is not None:
            return None
        return digest(weights, dtype=self._dtype, tied=tied)

    def weights(self) -> Mapping[str, Tensor]:
        return Viewed(self._read(), self._dtype)

    def apply(self, patches: Sequence[Patch], base: State, state: State, tied: Mapping[str, str]) -> None:
        weights, aliases = self._read(), aliases_of(tied)
        names = {name: None for patch in patches for name in (patch.name, *aliases.get(patch.name, []))}
        values = writable(weights, [name for name in names if name in weights], tied)
        self._state = None
        for patch in patches:
            for name in (patch.name, *aliases.get(patch.name, [])):
                if name in values:
                    write(values[name], patch.where, patch.bits)
        self._become(state, tied)

    def load(self, anchor: Replay, state: State, files: Sequence[Path], tied: Mapping[str, str]) -> None:
        if self._owned is None:
            self._check(anchor.base, tied)
        anchor.verify(state.digest)
        self._state = None
        if self._owned is not None:
            self._make_room(self._owned, anchor.base, tied)
        weights, aliases = self._read(), aliases_of(tied)
        for name in anchor.base:
            bits = anchor.bits_of(name)
            for each in (name, *aliases.get(name, [])):
                if each in weights:
                    write(weights[each], slice(None), bits)
        self._become(state, tied)

    def _become(self, state: State, tied: Mapping[str, str]) -> None:
        weights = self._read()
        self._written = {name: weights[name] for name in weights}
        self._state, self._tied = state, tied

    def _make_room(self, weights: MutableMapping[str, Any], base: Weights, tied: Mapping[str, str]) -> None:
        now = Viewed(weights, self._dtype)
        # What was tied is a name for another tensor's memory.
        kept = {name for name in weights if name in base and name not in self._tied}
        for name in [name for name in weights if name not in kept or now.form(name) != form(base, name)]:
            del weights[name]
        for name in base:
            if name not in weights:
                dtype, shape = form(base, name)
                make = self._make or _plain
                weights[name] = make(name, dtype_named(dtype), shape)
        if self._make is not None:
            weights.update({name: weights[to] for name, to in tied.items()})
        writable(weights, weights, tied)

    def _check(self, base: Weights, tied: Mapping[str, str]) -> None:
        weights = self._read()
        now = Viewed(weights, self._dtype)
        for name in base:
            if name not in weights:
                raise UnknownParameter(f"the run has {name}, which the target does not have", tensor=name)
        for name in weights:
            if name not in base and name not in tied:
                raise UnknownParameter(
                    f"the target has {name}, which the run does not have, so that nobody would keep it current: "
                    "publish it too, or pass a mapping of those that the run has",
                    tensor=name,
                )
            expected, actual = form(base, tied.get(name, name)), now.form(name)
            if expected != actual:
                raise ShapeMismatch(
                    f"{name} is {actual[0]} {list(actual[1])} at the target, and {expected[0]} {list(expected[1])} "
                    "in the run" + _advice(expected[0], actual[0]),
                    tensor=name, expected=str(expected), actual=str(actual),
                )  # fmt: skip
        writable(weights, weights, tied)

    def close(self) -> None: ...


def _plain(name: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    return Tensor(dtype, shape, empty_bits(shape, dtype, name))


def _places(weights: Weights) -> dict[str, Place | None]:
    return {name: place(weights[name]) for name in weights}


def _advice(expected: str, actual: str) -> str:
    same_size = dtype_named(expected).itemsize == dtype_named(actual).itemsize
    return f': pass dtype="{expected}" if these integers are its bits' if actual[0] in "IU" and same_size else ""


def new_tensor(name: str, dtype: DType, shape: tuple[int, ...]) -> Any:
    """An empty tensor as a caller would have it: torch's where that is imported, else numpy's.

    Of dtypes that numpy lacks it is an array of ml_dtypes, where that is imported, or a `Tensor`.
    """
    torch, ml_dtypes = sys.modules.get("torch"), sys.modules.get("ml_dtypes")
    known_as = next(alias for alias, own in ALIASES.items() if own == dtype.name)
    plain = _plain(name, dtype, shape)
    if torch is not None:
        kind = getattr(torch, known_as)
        bits = torch.from_numpy(plain.bits.view(np.uint8))
        return bits.view(kind).view(shape) if len(bits) else torch.empty(shape, dtype=kind)
    own_kind = getattr(np, known_as, None) or getattr(ml_dtypes, known_as, None)
    return plain if own_kind is None else plain.bits.view(own_kind).reshape(shape)
