"""The weights of one process of an engine, and how they are changed in place."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from deltawire.engines.layout import Piece, each_once
from deltawire.engines.memory import Item, Memory, memory_of
from deltawire.engines.staged import StagedChange
from deltawire.errors import BaseMismatch, DigestMismatch
from deltawire.tensors.digest import Digest, TensorKey, WeightVersion, tensor_key
from deltawire.tensors.dtypes import dtype_named
from deltawire.tensors.weights import TensorSpec
from deltawire.workers import Workers

Found = tuple[list[Piece], Mapping[str, torch.Tensor]]


class LiveModel:
    """What one process holds: the pieces of the checkpoint, their version, and a staged change.

    `find` returns the pieces of a checkpoint's tensors, and flat tensors for the storages that they name. Calls must
    not overlap.
    """

    def __init__(self, find: Callable[[Mapping[str, TensorSpec]], Found], threads: int | None = None) -> None:
        self._find = find
        self.boot = token_hex(8)
        self.state: WeightVersion | None = None
        self.partial: Digest | None = None
        """The digest of the pieces that count; the sum over all processes is that of the weights."""
        self.staged: StagedChange | None = None
        self._items: list[Item] = []
        self._specs: dict[str, TensorSpec] = {}
        self._keys: dict[str, TensorKey] = {}
        self.pieces: list[Piece] = []
        self._counted: list[int] = []
        self._workers = Workers(threads)
        self._memory: Memory = memory_of({}, self._workers)

    def bind(self, specs: Mapping[str, TensorSpec]) -> list[Piece]:
        """Find the pieces. Afterwards the digest must be computed and the version set again."""
        self.partial, self._counted = None, []
        self.mark(None)
        pieces, storages = self._find(specs)
        self.pieces = each_once(pieces)
        self._memory = memory_of({piece.storage: storages[piece.storage] for piece in self.pieces}, self._workers)
        self._specs = dict(specs)
        self._keys = {name: tensor_key(name, dtype_named(dtype), shape) for name, (dtype, shape) in specs.items()}
        kinds = {specs[piece.tensor][0]: piece for piece in self.pieces}
        for kind, piece in kinds.items():
            self._memory.warm_up(piece, self._keys[piece.tensor], dtype_named(kind).unsigned)
        return self.pieces

    def measure(self, counted: Sequence[int]) -> Digest:
        """The digest of the pieces that count here, computed from memory."""
        self._counted = list(counted)
        self.partial = self.sum_of(counted)
        return self.partial

    def sum_of(self, numbers: Sequence[int]) -> Digest:
        """The contribution of some pieces to the digest."""
        chosen = map(self.pieces.__getitem__, numbers)
        return sum((self._memory.digest(piece, self._keys[piece.tensor]) for piece in chosen), Digest())

    def mark(self, state: WeightVersion | None) -> None:
        """Set the version of the weights, and drop what is staged."""
        self.state = state
        self._drop()

    def _drop(self) -> None:
        self.staged, self._items = None, []
        self._memory.drop()

    def stage_file(self, path: Path) -> None:
        self.stage(StagedChange.load(path, self.pieces, self._specs))

    def stage(self, staged: StagedChange) -> None:
        """Copy a change to the device, and check that it fits the weights there. Nothing is written yet."""
        if self.state not in (staged.base, staged.state):
            raise BaseMismatch(
                f"the weights are {text(self.state)}, and the change leads from {text(staged.base)} "
                f"to {text(staged.state)}"
            )
        self._drop()
        items = []
        for change in staged.changes:
            piece = self.pieces[change.number]
            items.append(Item(piece, self._keys[piece.tensor], self._memory.take(change)))
        _refuse(items, self._memory.count_strange(items))
        self.staged, self._items = staged, items

    def write(self, token: str, *, undo: bool = False) -> None:
        """Write what is staged, or the old bits again to `undo`. May be repeated."""
        if self.staged is None or self.staged.token != token:
            raise BaseMismatch(f"{token} is not what is staged")
        # Until all of it is written, the version of the weights is unknown.
        self.state = None
        before, self.partial = self.partial, None
        written = self._memory.put(self._items, undo)
        if before is None:
            # The write before this one was interrupted, so the gain of the digest is unknown.
            self.measure(self._counted)
        else:
            counted = set(self._counted)
            pairs = zip(self.staged.changes, written, strict=True)
            self.partial = sum((each.gain for change, each in pairs if change.number in counted), before)
        _refuse(self._items, [each.num_strange for each in written])
        self.state = self.staged.base if undo else self.staged.state

    def status(self) -> dict[str, Any]:
        """The state of this process, as JSON."""
        return {
            "boot": self.boot,
            "state": None if self.state is None else self.state.as_dict(),
            "partial": None if self.partial is None else str(self.partial),
            "staged": None if self.staged is None else self.staged.token,
            "num_pieces": len(self.pieces),
        }


def _refuse(items: Sequence[Item], num_unexpected: Sequence[int]) -> None:
    for item, number in zip(items, num_unexpected, strict=True):
        if number:
            raise DigestMismatch(
                f"{number:,} elements of {item.piece.tensor} have neither the old bits nor the new ones in "
                f"{item.piece.storage}: someone else has changed them",
                tensor=item.piece.tensor,
            )


def text(state: WeightVersion | None) -> str:
    return "of an unknown version" if state is None else f"version {state.version} of run {state.run}"


def error_fields(error: Exception) -> dict[str, Any]:
    """Why a command to a process of an engine failed, as JSON."""
    return {"message": f"{type(error).__name__}: {error}", "tensor": getattr(error, "tensor", None)}
