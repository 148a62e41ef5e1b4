"""What a change of some weights does to codes and scales that were derived from them.

The weights themselves, as they are loaded, lie in host memory. Of each group of elements the largest magnitude is kept
on the device. A group is quantized again as a whole only where its scale moves; otherwise the codes of the changed
elements are. Where a group is divided between workers, they tell each other their largest magnitudes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from deltawire.engines.layout import Piece, pieces_of_copy
from deltawire.engines.quantized.recipes import Groups, Recipe, as_values, is_finite, magnitudes
from deltawire.engines.staged import PieceChange
from deltawire.errors import EngineRejected
from deltawire.tensors.digest import TensorKey, tensor_key
from deltawire.tensors.dtypes import ALIASES, dtype_named

Change = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Positions, ascending, and what is there before and after."""


Largest = Callable[[torch.Tensor], torch.Tensor]
"""Of integers in host memory that each worker calls it with: the largest of each element, for all of them."""


class Elsewhere(Exception):
    """Another worker failed, and says why."""


class Requantized(NamedTuple):
    """What a change of weights does to codes and scales."""

    codes: Change
    scales: Change


class Seen(NamedTuple):
    """Changed elements, the groups that they are in, and the largest magnitudes of these here, before and after."""

    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    touched: torch.Tensor
    which: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


class QuantizedTensor:
    """One matrix, or the matrices of experts: as it is loaded, and its codes and scales, which are served.

    Args:
        name: Of the parameter.
        original: The weights as they are loaded, in host memory.
        recipe: How codes and scales are made of them.
        codes: Where the codes are, in the shape of the weights.
        scales: Where the scales are, in any shape.
        is_shared: Whether its groups are divided between workers, which have the same scales.
    """

    def __init__(
        self, name: str, original: torch.Tensor, recipe: Recipe, codes: torch.Tensor, scales: torch.Tensor, *,
        is_shared: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.original, self.recipe, self.is_shared = name, original, recipe, is_shared
        self.groups = Groups(recipe, tuple(original.shape))
        if codes.shape != original.shape or scales.numel() != self.groups.count or not original.is_contiguous():
            raise EngineRejected(
                f"{name} is {list(original.shape)} when it is loaded, and has codes {list(codes.shape)} and scales "
                f"{list(scales.shape)}: it is laid out in a way that is not known",
                tensor=name,
            )
        self.codes, self.scales = codes, scales
        self._maxima: torch.Tensor | None = None
        self._agreed: torch.Tensor | None = None

    @property
    def maxima(self) -> torch.Tensor:
        """Of the elements that are here."""
        if self._maxima is None:
            found = [self.groups_of_one.maxima(each.to(self.codes.device)) for each in self._matrices()]
            self._maxima = torch.cat(found)
        return self._maxima

    @property
    def agreed(self) -> torch.Tensor:
        """Of all elements of each group: what scales are made of."""
        if not self.is_shared:
            return self.maxima
        if self._agreed is None:
            self._agreed = self.maxima.clone()
        return self._agreed

    def forget(self) -> None:
        """The weights are others now."""
        self._maxima = self._agreed = None

    @property
    def groups_of_one(self) -> Groups:
        return Groups(self.recipe, self.groups.shape[1:])

    def _matrices(self) -> torch.Tensor:
        return self.original.view(self.groups.shape)

    def check_finite(self) -> None:
        if not all(is_finite(each.to(self.codes.device)) for each in self._matrices()):
            raise _not_finite(self.name)

    def load(self) -> None:
        """Quantize all of it."""
        for live, made in self._made():
            live.copy_(made)

    def holds(self) -> bool:
        """Whether codes and scales are those of the weights."""
        return all(torch.equal(_bits(live), _bits(made)) for live, made in self._made())

    def _made(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The codes and the scales of each matrix, and what they should be."""
        codes = self.codes if self.codes.ndim > 2 else self.codes[None]
        scales = self.scales.view(self.groups.shape[0], -1)
        agreed = self.agreed.view(len(scales), -1) if self.is_shared else [None] * len(scales)
        for number, (matrix, largest) in enumerate(zip(self._matrices(), agreed, strict=True)):
            made = self.recipe.quantize(matrix.to(self.codes.device), largest)
            yield codes[number], made[0]
            yield scales[number], made[1].view(-1)

    def look(self, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Seen:
        """Which groups elements at ascending positions are in. `old` is what the kept weights have there."""
        if not is_finite(new):
            raise _not_finite(self.name)
        own = self.groups.of(positions)
        touched, which = torch.unique(own, return_inverse=True)
        before = self.maxima[touched]
        most = torch.zeros_like(before).scatter_reduce(0, which, magnitudes(new).int(), "amax")
        # The largest one has become smaller: there may be another as large, or the next one counts.
        lost = torch.zeros_like(before, dtype=torch.bool)
        lost[which[magnitudes(old).int() == before[which]]] = True
        lost &= most < before
        after = torch.maximum(most, before)
        if lost.any():
            found = torch.zeros_like(before[lost])
            for place, number in self.groups.members(touched[lost]):
                values = self._values(place, positions, new)
                found = found.scatter_reduce(0, number, magnitudes(values).int(), "amax")
            after[lost] = found
        return Seen(positions, old, new, touched, which, before, after)

    def derive(self, seen: Seen, groups: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Requantized:
        """What changes with some elements, when the largest magnitudes of some groups are others afterwards."""
        positions, old, new, touched, which, *_ = seen
        scales = self._scales(before), self._scales(after)
        moved = _bits(scales[0]).ne(_bits(scales[1])).view(len(groups), scales[0].element_size()).any(1)
        agreed = self.agreed[touched]
        few = ~_looked_up(touched, groups, moved, torch.zeros_like(agreed, dtype=torch.bool))[which]
        largest = (_looked_up(touched, groups, each, agreed)[which[few]] for each in (before, after))
        changes = [self._codes(positions[few], old[few], new[few], *largest)]
        for place, number in self.groups.members(groups[moved]):
            values = self._values(place, positions, old), self._values(place, positions, new)
            changes.append(self._codes(place, *values, before[moved][number], after[moved][number]))
        place, *codes = (torch.cat(parts) for parts in zip(*changes, strict=True))
        place, order = torch.sort(place)
        return Requantized(
            (place, codes[0][order], codes[1][order]), (groups[moved], scales[0][moved], scales[1][moved])
        )

    def _codes(
        self, place: torch.Tensor, old: torch.Tensor, new: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> Change:
        """Those that change."""
        dtype = self.original.dtype
        codes = [
            self.recipe.elements(values, as_values(largest, dtype))[0].view(torch.uint8)
            for values, largest in ((old, before), (new, after))
        ]
        differ = codes[0] != codes[1]
        return place[differ], codes[0][differ], codes[1][differ]

    def _scales(self, maxima: torch.Tensor) -> torch.Tensor:
        largest = as_values(maxima, self.original.dtype)
        return self.recipe.elements(torch.zeros_like(largest), largest)[1]

    def _values(self, place: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The weights at some places, where those at `positions` are `values`."""
        found = self.original.view(-1)[place.cpu()].to(place.device)
        return _looked_up(place, positions, values, found)


@dataclass
class Plan:
    """What a staged change does to codes and scales."""

    changes: list[tuple[int, PieceChange]] = field(default_factory=list)
    """For pieces, by their numbers."""
    maxima: list[tuple[torch.Tensor, Change]] = field(default_factory=list)
    """For tables of largest magnitudes."""


class QuantizedModel:
    """All tensors that one process quantizes, with codes and scales as pieces of memory.

    With tensors that are shared, `load` and `plan` are called in all workers at the same time.
    """

    def __init__(self, tensors: Sequence[QuantizedTensor], largest: Largest | None = None) -> None:
        self.tensors = {each.name: each for each in tensors}
        self._largest = largest
        self._is_awaited = False
        self.pieces: list[Piece] = []
        self.keys: list[TensorKey] = []
        self.storages: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, list[int]] = {}
        for each in tensors:
            self._add(f"codes of {each.name}", each.codes)
            self._add(f"scales of {each.name}", each.scales)

    def _add(self, name: str, live: torch.Tensor) -> None:
        flat = torch.empty(0, dtype=live.dtype, device=live.device).set_(live.untyped_storage())
        self.storages[name] = flat
        shape = tuple(live.shape)
        near = torch.empty(shape, device="meta").stride()
        found = pieces_of_copy(name, name, shape, (0, near), (live.storage_offset(), live.stride()))
        self._numbers[name] = list(range(len(self.pieces), len(self.pieces) + len(found)))
        self.pieces += found
        kind = dtype_named(ALIASES[str(live.dtype).removeprefix("torch.")])
        self.keys += [tensor_key(name, kind, shape)] * len(found)

    @property
    def recipes(self) -> str:
        return ", ".join(sorted({each.recipe.name for each in self.tensors.values()}))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What workers do at the same time. One that fails says so to the others, which would wait for it."""
        self._is_awaited = self._largest is not None
        try:
            yield
        except Exception:
            if self._largest is not None and self._is_awaited:
                self._largest(torch.ones(1, dtype=torch.int32))
            raise
        finally:
            self._is_awaited = False

    def _of_all(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each element over all workers."""
        if self._largest is None:
            return values
        is_awaited, self._is_awaited = self._is_awaited, False
        if self._largest(torch.zeros(1, dtype=torch.int32)).item():
            raise Elsewhere("another worker of the server failed")
        found = self._largest(values)
        self._is_awaited = is_awaited
        return found

    @property
    def _shared(self) -> list[QuantizedTensor]:
        return [each for each in self.tensors.values() if each.is_shared]

    def load(self) -> None:
        for each in self.tensors.values():
            each.forget()
            each.check_finite()
        if self._shared:
            values = self._of_all(torch.cat([each.maxima.cpu() for each in self._shared]))
            for each, own in zip(self._shared, values.split([each.groups.count for each in self._shared]), strict=True):
                each.agreed.copy_(own)
        self._is_awaited = False
        for each in self.tensors.values():
            each.load()

    def holds(self) -> bool:
        found = all(each.holds() for each in self.tensors.values())
        for each in self.tensors.values():
            # Now, and not next to serving.
            _ = each.agreed
        return found

    def plan(self, changes: Mapping[str, Sequence[tuple[Piece, PieceChange]]], *, is_done: bool) -> Plan:
        """From what changes in the pieces of each tensor, as it is loaded. `is_done` if the weights have it already."""

        def look(tensor: QuantizedTensor) -> Seen:
            positions, old, new = _joined(changes.get(tensor.name, ()), tensor)
            return tensor.look(positions, *((new, old) if is_done else (old, new)))

        seen = {each.name: look(each) for each in self._shared}
        agreed = self._agree(seen, is_done) if seen else {}
        self._is_awaited = False
        plan = Plan()
        for name, tensor in self.tensors.items():
            if name not in seen and name not in changes:
                continue
            own = seen.pop(name, None) or look(tensor)
            here = own.touched, own.before, own.after
            found = tensor.derive(own, *agreed.get(name, here))
            for kind, change in zip(("codes", "scales"), found, strict=True):
                plan.changes += self._split(f"{kind} of {name}", _turned(change, is_done))
            tables = [(tensor.maxima, here), *([(tensor.agreed, agreed[name])] if tensor.is_shared else [])]
            for table, (groups, before, after) in tables:
                moved = before != after
                if moved.any():
                    plan.maxima.append((table, _turned((groups[moved], before[moved], after[moved]), is_done)))
        return plan

    def _agree(self, seen: Mapping[str, Seen], is_done: bool) -> dict[str, Change]:
        """For shared tensors: the groups whose largest magnitude becomes another in some worker, and the largest of all
        workers before and after.
        """
        sizes = [self.tensors[name].groups.count for name in seen]
        marks = torch.zeros(sum(sizes), dtype=torch.uint8)
        for mark, own in zip(marks.split(sizes), seen.values(), strict=True):
            mark[own.touched[own.before != own.after].cpu()] = 1
        changes = []
        for (name, own), mark in zip(seen.items(), self._of_all(marks).split(sizes), strict=True):
            maxima = self.tensors[name].maxima
            groups = mark.nonzero().view(-1).to(maxima.device)
            now = maxima[groups]
            # What is before and what is after means the same to all, whoever has it already.
            changes.append(_turned((groups, now, _looked_up(groups, own.touched, own.after, now)), is_done))
        values = torch.cat([torch.stack(change[1:]).cpu() for change in changes], 1)
        values = self._of_all(values) if values.numel() else values
        largest = values.split([len(change[0]) for change in changes], 1)
        return {
            name: _turned((groups, *pair.to(groups.device)), is_done)
            for name, (groups, *_), pair in zip(seen, changes, largest, strict=True)
        }

    def _split(self, name: str, change: Change) -> list[tuple[int, PieceChange]]:
        positions, old, new = (_numpy(each) for each in change)
        found = []
        for number in self._numbers[name]:
            index, inside = self.pieces[number].select(positions)
            if len(index):
                found.append((number, PieceChange(number, index, old[inside], new[inside])))
        return found

    def settle(self, plan: Plan, *, undo: bool) -> None:
        """After a write: the largest magnitudes are others."""
        for table, (groups, before, after) in plan.maxima:
            table[groups] = before if undo else after


def _joined(changes: Sequence[tuple[Piece, PieceChange]], tensor: QuantizedTensor) -> Change:
    """Changes of pieces as one of their tensor, on the device of its codes."""
    device = tensor.codes.device
    nothing = torch.empty(0, dtype=torch.int16, device=device)
    parts = [(nothing.long(), nothing, nothing)]
    for piece, change in changes:
        offset, row_step, column_step = piece.place
        index = torch.from_numpy(change.index.astype(np.int64)).to(device)
        places = offset + index // piece.columns * row_step + index % piece.columns * column_step
        bits = (torch.from_numpy(each.view(np.int16)).to(device) for each in (change.old, change.new))
        parts.append((places, *bits))
    places, old, new = (torch.cat(each) for each in zip(*parts, strict=True))
    places, order = torch.sort(places)
    return places, old[order].view(tensor.original.dtype), new[order].view(tensor.original.dtype)


def _turned(change: Change, turns: bool) -> Change:
    """A change, or the way back."""
    return (change[0], change[2], change[1]) if turns else change


def _looked_up(
    places: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, otherwise: torch.Tensor
) -> torch.Tensor:
    """The values at some places, which those at ascending positions are known for."""
    if not len(positions):
        return otherwise
    at = torch.searchsorted(positions, places).clamp_(max=len(positions) - 1)
    return torch.where(positions[at] == places, values[at], otherwise)


def _numpy(values: torch.Tensor) -> Any:
    found = values.cpu().numpy()
    return found if found.dtype == np.int64 else found.view(f"<u{found.itemsize}")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _not_finite(name: str) -> EngineRejected:
    return EngineRejected(
        f"{name} has infinities or NaN, which have no codes: nothing was changed. Publish finite weights", tensor=name
    )
