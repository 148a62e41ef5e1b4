"""Where a replica's weights live: what it asks of them, and arrays or a torch module in memory."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deltawire.dtypes import dtype_named, empty_bits
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.patches import Patch
from deltawire.replay import Replay
from deltawire.state import Digest, digest
from deltawire.weights import Tensor, Weights, check_writable, form, write


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
    """Arrays or tensors in memory, changed in place. An empty dictionary is filled from the first anchor."""

    scratch: Path | None = None

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._owned = weights if isinstance(weights, MutableMapping) and not weights else None
        """The dictionary, where it was empty: its names then follow the run's."""
        self._state: State | None = None

    def state(self) -> State | None:
        return self._state

    def digest(self, tied: Mapping[str, str]) -> Digest | None:
        return digest(self._weights, tied=tied) if self._weights else None

    def weights(self) -> Weights:
        return self._weights

    def apply(self, patches: Sequence[Patch], base: State, state: State, tied: Mapping[str, str]) -> None:
        aliases = _aliases(tied)
        for patch in patches:
            check_writable(patch.name, self._weights[patch.name])
        self._state = None
        for patch in patches:
            for name in (patch.name, *aliases.get(patch.name, [])):
                if name in self._weights:
                    write(self._weights[name], patch.where, patch.bits)
        self._state = state

    def load(self, anchor: Replay, state: State, files: Sequence[Path], tied: Mapping[str, str]) -> None:
        aliases = _aliases(tied)
        if self._owned is None:
            self._check(anchor.base)
        anchor.verify(state.digest)
        self._state = None
        if self._owned is not None:
            self._make_room(self._owned, anchor.base)
        for name in anchor.base:
            bits = anchor.bits_of(name)
            for each in (name, *aliases.get(name, [])):
                if each in self._weights:
                    write(self._weights[each], slice(None), bits)
        self._state = state

    def _make_room(self, weights: MutableMapping[str, Any], base: Weights) -> None:
        for name in [name for name in weights if name not in base or form(weights, name) != form(base, name)]:
            del weights[name]
        for name in base:
            if name not in weights:
                dtype, shape = form(base, name)
                kind = dtype_named(dtype)
                weights[name] = Tensor(kind, shape, empty_bits(shape, kind, name))

    def _check(self, base: Weights) -> None:
        for name in base:
            if name not in self._weights:
                raise UnknownParameter(f"the run has {name}, which the target does not have", tensor=name)
            expected, actual = form(base, name), form(self._weights, name)
            if expected != actual:
                raise ShapeMismatch(
                    f"{name} is {actual[0]} {list(actual[1])} at the target, and {expected[0]} {list(expected[1])} "
                    "in the run",
                    tensor=name, expected=str(expected), actual=str(actual),
                )  # fmt: skip
            check_writable(name, self._weights[name])

    def close(self) -> None: ...


def _aliases(tied: Mapping[str, str]) -> dict[str, list[str]]:
    aliases: dict[str, list[str]] = {}
    for name, to in tied.items():
        aliases.setdefault(to, []).append(name)
    return aliases
