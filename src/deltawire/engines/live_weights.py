"""The weights of one process of an engine, and how they are changed in place."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from deltawire.codec import ENCODINGS
from deltawire.engines.layout import Piece, each_once
from deltawire.engines.memory import Item, Memory, Written, memory_of
from deltawire.engines.quantized.derive import Plan, QuantizedModel, not_finite
from deltawire.engines.quantized.recipes import is_finite
from deltawire.engines.quantized.rehearsal import rehearse
from deltawire.engines.staged import PieceChange, StagedChange
from deltawire.engines.trace import Fill, torch_dtype
from deltawire.errors import BaseMismatch, DigestMismatch, EngineRejected, UnsupportedFormat
from deltawire.format.delta import Delta
from deltawire.format.patches import check_known, check_spec, whole_needed
from deltawire.format.wire import Entry
from deltawire.tensors.digest import Digest, TensorKey, WeightVersion, tensor_key
from deltawire.tensors.dtypes import dtype_named
from deltawire.tensors.weights import TensorSpec
from deltawire.workers import Workers, in_turns


class Derived(Protocol):
    """What a process computes from its weights, and keeps."""

    def refresh(self, tensors: Collection[str]) -> None:
        """Compute it again, from these tensors of the checkpoint at least."""

    def holds(self) -> bool:
        """Whether it is what the weights give."""


class Found(NamedTuple):
    """Where the tensors of a checkpoint are in a process."""

    pieces: Sequence[Piece]
    storages: Mapping[str, torch.Tensor]
    derived: Sequence[Derived] = ()
    fills: Sequence[Fill] = ()
    """Padding, which a server that was started without weights may not have filled."""
    quantized: QuantizedModel | None = None
    """Codes and scales that are computed with, where pieces are of the weights that these were made of."""


class Gains(NamedTuple):
    """What digests gain by a write."""

    counted: Digest
    """That of the pieces that count."""
    derived: Digest
    """That of codes and scales."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A change that only has to be written."""

    token: str
    base: WeightVersion
    state: WeightVersion
    items: Sequence[Item]
    partial: Digest | None
    """The digest of the pieces that count, once it is written."""
    plan: Plan
    """What it does to codes and scales. Their items come last, with negative numbers."""
    served: Sequence[Item]
    """Those of what is computed with."""
    kept: Sequence[Item]
    """Those of weights that codes are made of. Nobody computes with them."""
    found: Sequence[Written]
    """What writing these, and then those that are served, does."""
    gains: Gains
    """All of that, added up."""
    tensors: Collection[str]
    """Those of all items."""


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
        self.derived: Digest | None = None
        """The digest of the codes and scales that are made of the weights."""
        self.staged: Ready | None = None
        self._is_new = False
        """Whether no write of it has begun."""
        self._unwritten: Ready | None = None
        """A change that was written but for what is kept."""
        self._specs: dict[str, TensorSpec] = {}
        self._keys: dict[str, TensorKey] = {}
        self.pieces: list[Piece] = []
        self._counted: list[int] = []
        self._derived: Sequence[Derived] = ()
        self._fills: Sequence[Fill] = ()
        self._quantized = QuantizedModel([])
        self._storages: Mapping[str, torch.Tensor] = {}
        self._workers = Workers(threads)
        self._memory: Memory = memory_of({}, self._workers)

    def bind(self, specs: Mapping[str, TensorSpec]) -> list[Piece]:
        """Find the pieces. Afterwards the digest must be computed and the version set again."""
        self.partial, self.derived, self._counted = None, None, []
        self.mark(None)
        # If it is refused, nothing is known of any tensor.
        self.pieces = []
        pieces, self._storages, self._derived, self._fills, quantized = self._find(specs)
        self._quantized = quantized or QuantizedModel([])
        storages = {**self._storages, **self._quantized.storages}
        self.pieces = each_once(pieces)
        every = [*self.pieces, *self._quantized.pieces]
        self._memory = memory_of({piece.storage: storages[piece.storage] for piece in every}, self._workers)
        self._specs = dict(specs)
        self._keys = {name: tensor_key(name, dtype_named(dtype), shape) for name, (dtype, shape) in specs.items()}
        kinds = {(self._memory.part(piece), specs[piece.tensor][0]): piece for piece in self.pieces}
        for (memory, kind), piece in kinds.items():
            memory.warm_up(piece, self._keys[piece.tensor], dtype_named(kind).unsigned)
        own = zip(self._quantized.pieces, self._quantized.keys, strict=True)
        for size, (piece, key) in {storages[each[0].storage].itemsize: each for each in own}.items():
            self._memory.part(piece).warm_up(piece, key, np.dtype(f"<u{size}"))
        return self.pieces

    def rehearse(self) -> None:
        """Let the device load what changes of codes and scales need, so that nobody waits for that later."""
        self._quantized.prepare()
        rehearse(self._quantized)

    def measure(self, counted: Sequence[int]) -> Digest:
        """The digest of the pieces that count here, computed from memory."""
        self.finish()
        self._counted = list(counted)
        if not self._quantized.is_given:
            # As after a start. They are no version's, and need not be read.
            self.partial = Digest(1, 0)
            return self.partial
        own = zip(self._quantized.pieces, self._quantized.keys, strict=True)
        try:
            partial, derived = self.sum_of(counted), sum((self._memory.digest(*each) for each in own), Digest())
            if not (self._quantized.holds() and all(each.holds() for each in self._derived)):
                # Whatever the weights are, what is computed with is no version's.
                partial += Digest(1, 0)
        except BaseException:
            self.state = self.partial = None
            raise
        self.partial, self.derived = partial, derived
        return partial

    def sum_of(self, numbers: Sequence[int]) -> Digest:
        """The contribution of some pieces to the digest."""
        chosen = in_turns(map(self.pieces.__getitem__, numbers))
        return sum((self._memory.digest(piece, self._keys[piece.tensor]) for piece in chosen), Digest())

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse tensors that `load` could not make codes of, while there are still others. Nothing is written."""
        self.check_read()
        quantized = {piece.tensor for piece in self.pieces if piece.storage in self._quantized.tensors}
        for name, value in tensors if quantized else ():
            if name in quantized and not is_finite(value):
                raise not_finite(name)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write all tensors of a checkpoint to their places. Afterwards the version must be set again."""
        self.mark(None)
        self.partial = None
        for storage, view, filling in self._fills:
            self._storages[storage].as_strided(*view).fill_(filling)
        self._copy(tensors, self.pieces)
        self._quantized.load()
        self.refresh(self._specs)

    def take_kept(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Of a checkpoint, write only what codes are made of, which nobody computes with. Where the codes are those of
        these weights already, as after a start, `measure` says so afterwards, and there is nothing to load.
        """
        kept = [piece for piece in self.pieces if piece.storage in self._quantized.tensors]
        if kept:
            self.mark(None)
            self.partial = None
            self._copy(tensors, kept)
            self._quantized.take()

    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]], pieces: Sequence[Piece]) -> None:
        places: dict[str, list[Piece]] = {}
        for piece in pieces:
            places.setdefault(piece.tensor, []).append(piece)
        missing = set(places)
        for name, value in tensors:
            dtype, shape = self._specs.get(name, (None, None))
            if dtype is None or (torch_dtype(dtype), shape) != (value.dtype, tuple(value.shape)):
                problem = f"{name} is not one of the bound tensors, or its shape or dtype has changed"
                raise EngineRejected(problem, tensor=name)
            for piece in places.get(name, []):
                offset, *steps = piece.place
                to = self._storages[piece.storage].as_strided((piece.rows, piece.columns), steps, offset)
                with torch.no_grad():
                    to.copy_(value.reshape(-1).as_strided(to.shape, (piece.stride, 1), piece.start))
            missing.discard(name)
        if missing:
            raise EngineRejected(f"the checkpoint has no {min(missing)}", tensor=min(missing))

    def mark(self, state: WeightVersion | None) -> None:
        """Set the version of the weights, and drop what is staged."""
        self.state = state
        self.drop_staged()

    def check_read(self) -> None:
        """Refuse what was meant for a process that this one came after."""
        if self.partial is None:
            raise EngineRejected("its weights are not known: they were not read since it was started or bound")

    def drop_staged(self) -> None:
        """Release what is staged; what was written is finished first."""
        self.finish()
        self.staged = None
        self._memory.drop()

    def stage_file(self, path: Path) -> None:
        self.stage(StagedChange.load(path, self.pieces, self._specs))

    def stage(self, staged: StagedChange) -> None:
        """Copy a change to the device, and check that it fits the weights there. Nothing is written yet."""
        if self.state not in (staged.base, staged.state):
            raise _other_base(self.state, staged.base, staged.state)
        self.drop_staged()
        taken = self._memory.take([(change, self.pieces[change.number]) for change in staged.changes])
        items = [self._item(change.number, own) for change, own in in_turns(zip(staged.changes, taken, strict=True))]
        self._ready(staged.token, staged.base, staged.state, items)

    def stage_delta(self, token: str, delta: Delta, base: WeightVersion, state: WeightVersion) -> None:
        """The same for a delta, which is decoded against the weights themselves. Of a tensor that is not here in whole,
        the entry must be in an encoding that needs no other elements.
        """
        if self.state != base:
            raise _other_base(self.state, base, state)
        self.drop_staged()
        numbers: dict[str, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            numbers.setdefault(piece.tensor, []).append(number)
        found: list[tuple[int, Entry, Piece]] = []
        for entry in in_turns(delta.entries):
            check_known(entry, self._specs)
            check_spec(entry, self._specs[entry.name])
            for number in numbers.get(entry.name, []):
                piece = self.pieces[number]
                if piece.num_elements != prod(entry.box.full) and ENCODINGS[entry.encoding].needs_mirror:
                    raise UnsupportedFormat(whole_needed(entry), tensor=entry.name)
                found.append((number, entry, piece))
        changes = self._memory.decode([(entry, piece) for _, entry, piece in found])
        items = [self._item(number, change) for (number, _, _), change in in_turns(zip(found, changes, strict=True))]
        self._ready(token, base, state, items)

    def _item(self, number: int, change: Any) -> Item:
        piece = self.pieces[number]
        return Item(number, piece, self._keys[piece.tensor], change)

    def _ready(self, token: str, base: WeightVersion, state: WeightVersion, items: Sequence[Item]) -> None:
        plan = self._plan(items, is_done=self.state == state)
        own = self._quantized
        taken = self._memory.take([(change, own.pieces[number]) for number, change in plan.changes])
        derived = zip((number for number, _ in plan.changes), taken, strict=True)
        items = [*items, *(Item(-1 - number, own.pieces[number], own.keys[number], each) for number, each in derived)]
        kept = [item for item in in_turns(items) if item.piece.storage in own.tensors]
        served = [item for item in in_turns(items) if item.piece.storage not in own.tensors]
        every = [*kept, *served]
        found = [*self._put_kept(kept, writes=False), *self._memory.put(served, writes=False)]
        _refuse(every, found)
        gains, tensors = self._gains(every, found), {item.piece.tensor for item in items}
        partial = None if self.partial is None else self.partial + gains.counted
        self.staged = Ready(token, base, state, items, partial, plan, served, kept, found, gains, tensors)
        self._is_new = True

    def _plan(self, items: Sequence[Item], *, is_done: bool) -> Plan:
        """What a change does to codes and scales."""
        changes: dict[str, list[tuple[Piece, PieceChange]]] = {}
        for item in in_turns(items):
            if item.piece.storage in self._quantized.tensors:
                changes.setdefault(item.piece.storage, []).append((item.piece, item.change))
        return self._quantized.plan(changes, is_done=is_done)

    def _gains(self, items: Sequence[Item], found: Sequence[Written]) -> Gains:
        counted, every = set(self._counted), list(zip(items, found, strict=True))
        return Gains(
            sum((each.gain for item, each in in_turns(every) if item.number in counted), Digest()),
            sum((each.gain for item, each in in_turns(every) if item.number < 0), Digest()),
        )

    def write(self, token: str, *, undo: bool = False) -> None:
        """Write what is staged, or the old bits again to `undo`. May be repeated.

        What is kept and not computed with is left to `finish`, if all goes well at once.
        """
        staged = self.staged
        if staged is None or staged.token != token:
            raise BaseMismatch(f"{token} is not the change that is staged")
        self.finish()
        # Until all of it is written, the version of the weights is unknown.
        self.state = None
        before, self.partial = self.partial, None
        leaves, self._is_new = self._is_new and not undo, False
        written = self._memory.put(staged.served, undo=undo)
        kept = staged.found[: len(staged.kept)] if leaves else self._put_kept(staged.kept, undo=undo)
        every, found = [*staged.kept, *staged.served], [*kept, *written]
        # As a rule. There may be tens of thousands of pieces, and nothing is done for each while requests are held.
        is_planned = found == staged.found
        self._quantized.settle(staged.plan, undo=undo)
        self.refresh(staged.tensors)
        self.partial = before
        self._unwritten = staged if leaves else None
        if before is None:
            # The write before this one was interrupted, so the gain of the digest is unknown.
            self.measure(self._counted)
        else:
            gains = staged.gains if is_planned else self._gains(every, found)
            self.partial = before + gains.counted
            self.derived = (self.derived or Digest()) + gains.derived
        if not is_planned:
            _refuse(every, found)
        self.state = staged.base if undo else staged.state

    def finish(self) -> None:
        """Write what is kept. All that reads it comes after this."""
        staged, self._unwritten = self._unwritten, None
        if staged is None:
            return
        try:
            found = self._put_kept(staged.kept)
            _refuse(staged.kept, found)
            if found != staged.found[: len(found)]:
                raise EngineRejected("the weights that codes are made from do not have the digest computed before")
        except BaseException:
            self.state = self.partial = None
            raise

    def _put_kept(self, items: Sequence[Item], *, undo: bool = False, writes: bool = True) -> list[Written]:
        # In its own memory, so that what a device has prepared for the others stays.
        return self._memory.part(items[0].piece).put(items, undo=undo, writes=writes) if items else []

    def refresh(self, tensors: Collection[str] = ()) -> None:
        """Compute again what is kept next to the weights, and what these tensors are loaded as."""
        for each in self._derived:
            each.refresh(tensors)

    def status(self) -> dict[str, Any]:
        """The state of this process, as JSON. May be called while another call is under way in a thread."""
        # Each is read once: the other thread may set it to None.
        state, partial, derived, staged = self.state, self.partial, self.derived, self.staged
        planned = None if staged is None else staged.partial
        return {
            "boot": self.boot,
            "state": None if state is None else state.as_dict(),
            "partial": None if partial is None else str(partial),
            "staged": None if staged is None else staged.token,
            "planned": None if planned is None else str(planned),
            "num_pieces": len(self.pieces),
            **(
                {"quantized": self._quantized.recipes, "derived": None if derived is None else str(derived)}
                if self._quantized.tensors
                else {}
            ),
        }


def _other_base(found: WeightVersion | None, base: WeightVersion, state: WeightVersion) -> BaseMismatch:
    return BaseMismatch(f"the weights are {text(found)}, but the change leads from {text(base)} to {text(state)}")


def _refuse(items: Sequence[Item], found: Sequence[Written]) -> None:
    for item, each in in_turns(zip(items, found, strict=True)):
        if each.num_unexpected:
            raise DigestMismatch(
                f"{each.num_unexpected:,} elements of {item.piece.tensor} have neither the old bits nor the new ones "
                f"in {item.piece.storage}: another program has changed them",
                tensor=item.piece.tensor,
            )


def text(state: WeightVersion | None) -> str:
    return "of an unknown version" if state is None else f"version {state.version} of run {state.run}"


def attempt(work: Callable[[], Any]) -> tuple[Any, dict[str, Any] | None]:
    """What a command to a process of an engine returns, or why it failed, as JSON."""
    try:
        return work(), None
    except Exception as error:
        kind = type(error).__name__
        return None, {"kind": kind, "message": f"{kind}: {error}", "tensor": getattr(error, "tensor", None)}
