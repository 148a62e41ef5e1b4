"""What a change of some weights does to codes and scales that were derived from them.

The weights themselves, as they are loaded, lie in host memory. Of each group of elements the largest magnitude is kept
on the device. A group is quantized again as a whole only where its scale moves; otherwise the codes of the changed
elements are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deltawire.engines.layout import Piece, cuts, pieces_of_copy
from deltawire.engines.quantized.recipes import Groups, Recipe, as_values, is_finite, magnitudes
from deltawire.engines.staged import PieceChange
from deltawire.errors import EngineRejected
from deltawire.tensors.digest import TensorKey, tensor_key
from deltawire.tensors.dtypes import ALIASES, dtype_named

Change = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Positions, ascending, and what is there before and after."""


@dataclass(frozen=True)
class Requantized:
    """What a change of weights does to codes, to scales, and to the largest magnitudes of groups."""

    codes: Change
    scales: Change
    maxima: Change


class QuantizedTensor:
    """One matrix, or the matrices of experts: as it is loaded, and its codes and scales, which are served.

    Args:
        name: Of the parameter.
        original: The weights as they are loaded, in host memory.
        recipe: How codes and scales are made of them.
        codes: Where the codes are, in the shape of the weights.
        scales: Where the scales are, in any shape.
    """

    def __init__(
        self, name: str, original: torch.Tensor, recipe: Recipe, codes: torch.Tensor, scales: torch.Tensor
    ) -> None:
        self.name, self.original, self.recipe = name, original, recipe
        self.groups = Groups(recipe, tuple(original.shape))
        if codes.shape != original.shape or scales.numel() != self.groups.count or not original.is_contiguous():
            raise EngineRejected(
                f"{name} is {list(original.shape)} when it is loaded, and has codes {list(codes.shape)} and scales "
                f"{list(scales.shape)}: it is laid out in a way that is not known",
                tensor=name,
            )
        self.codes, self.scales = codes, scales
        self._maxima: torch.Tensor | None = None

    @property
    def maxima(self) -> torch.Tensor:
        if self._maxima is None:
            found = [self.groups_of_one.maxima(each.to(self.codes.device)) for each in self._matrices()]
            self._maxima = torch.cat(found)
        return self._maxima

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
        self._maxima = None
        for live, made in self._made():
            live.copy_(made)

    def holds(self) -> bool:
        """Whether codes and scales are those of the weights."""
        return all(torch.equal(_bits(live), _bits(made)) for live, made in self._made())

    def _made(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The codes and the scales of each matrix, and what they should be."""
        codes = self.codes if self.codes.ndim > 2 else self.codes[None]
        scales = self.scales.view(self.groups.shape[0], -1)
        for number, matrix in enumerate(self._matrices()):
            made = self.recipe.quantize(matrix.to(self.codes.device))
            yield codes[number], made[0]
            yield scales[number], made[1].view(-1)

    def derive(self, positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Requantized:
        """What changes when elements at ascending positions change. `old` is what the kept weights have there."""
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
        scales = self._scales(before), self._scales(after)
        moved = _bits(scales[0]).view(len(touched), -1).ne(_bits(scales[1]).view(len(touched), -1)).any(1)
        few = ~moved[which]
        changes = [self._codes(positions[few], old[few], new[few], before[which[few]], after[which[few]])]
        for place, number in self.groups.members(touched[moved]):
            values = self._values(place, positions, old), self._values(place, positions, new)
            changes.append(self._codes(place, *values, before[moved][number], after[moved][number]))
        place, *codes = (torch.cat(parts) for parts in zip(*changes, strict=True))
        place, order = torch.sort(place)
        return Requantized(
            (place, codes[0][order], codes[1][order]),
            (touched[moved], scales[0][moved], scales[1][moved]),
            (touched, before, after),
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
        at = torch.searchsorted(positions, place).clamp_(max=len(positions) - 1)
        return torch.where(positions[at] == place, values[at], found)


@dataclass
class Plan:
    """What a staged change does to codes and scales."""

    changes: list[tuple[int, PieceChange]] = field(default_factory=list)
    """For pieces, by their numbers."""
    maxima: list[tuple[QuantizedTensor, Change]] = field(default_factory=list)


class QuantizedModel:
    """All tensors that one process quantizes, with codes and scales as pieces of memory."""

    def __init__(self, tensors: Sequence[QuantizedTensor]) -> None:
        self.tensors = {each.name: each for each in tensors}
        self.pieces: list[Piece] = []
        self.keys: list[TensorKey] = []
        self.storages: dict[str, torch.Tensor] = {}
        for each in tensors:
            self._add(f"codes of {each.name}", each.codes)
            self._add(f"scales of {each.name}", each.scales)
        self._cuts = cuts({(each.tensor, *each.source): [(0, number)] for number, each in enumerate(self.pieces)})

    def _add(self, name: str, live: torch.Tensor) -> None:
        flat = torch.empty(0, dtype=live.dtype, device=live.device).set_(live.untyped_storage())
        self.storages[name] = flat
        shape = tuple(live.shape)
        near = torch.empty(shape, device="meta").stride()
        found = pieces_of_copy(name, name, shape, (0, near), (live.storage_offset(), live.stride()))
        self.pieces += found
        kind = dtype_named(ALIASES[str(live.dtype).removeprefix("torch.")])
        self.keys += [tensor_key(name, kind, shape)] * len(found)

    @property
    def recipes(self) -> str:
        return ", ".join(sorted({each.recipe.name for each in self.tensors.values()}))

    def load(self) -> None:
        for each in self.tensors.values():
            each.check_finite()
        for each in self.tensors.values():
            each.load()

    def holds(self) -> bool:
        found = all(each.holds() for each in self.tensors.values())
        for each in self.tensors.values():
            # Now, and not next to serving.
            _ = each.maxima
        return found

    def plan(self, changes: Mapping[str, Sequence[tuple[Piece, PieceChange]]], *, is_done: bool) -> Plan:
        """From what changes in the pieces of each tensor, as it is loaded. `is_done` if the weights have it already."""
        plan = Plan()
        for name, own in changes.items():
            tensor = self.tensors[name]
            positions, old, new = _joined(own, tensor)
            if not len(positions):
                continue
            found = tensor.derive(positions, *((new, old) if is_done else (old, new)))
            codes, scales, maxima = (
                (place, after, before) if is_done else (place, before, after)
                for place, before, after in (found.codes, found.scales, found.maxima)
            )
            plan.changes += self._split(f"codes of {name}", codes) + self._split(f"scales of {name}", scales)
            moved = maxima[1] != maxima[2]
            if moved.any():
                plan.maxima.append((tensor, (maxima[0][moved], maxima[1][moved], maxima[2][moved])))
        return plan

    def _split(self, name: str, change: Change) -> list[tuple[int, PieceChange]]:
        changed = [_numpy(each) for each in change]
        return [
            (number, PieceChange(number, *arrays))
            for cut in self._cuts[name]
            for ((_, number),), *arrays in cut.divide(*changed)
        ]

    def settle(self, plan: Plan, *, undo: bool) -> None:
        """After a write: the largest magnitudes are others."""
        for tensor, (groups, before, after) in plan.maxima:
            tensor.maxima[groups] = before if undo else after


def _joined(changes: Sequence[tuple[Piece, PieceChange]], tensor: QuantizedTensor) -> Change:
    """Changes of pieces as one of their tensor, on the device of its codes."""
    device, parts = tensor.codes.device, []
    for piece, change in changes:
        offset, row_step, column_step = piece.place
        index = torch.from_numpy(change.index.astype(np.int64)).to(device)
        places = offset + index // piece.columns * row_step + index % piece.columns * column_step
        bits = (torch.from_numpy(each.view(np.int16)).to(device) for each in (change.old, change.new))
        parts.append((places, *bits))
    places, old, new = (torch.cat(each) for each in zip(*parts, strict=True))
    places, order = torch.sort(places)
    return places, old[order].view(tensor.original.dtype), new[order].view(tensor.original.dtype)


def _numpy(values: torch.Tensor) -> Any:
    found = values.cpu().numpy()
    return found if found.dtype == np.int64 else found.view(f"<u{found.itemsize}")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _not_finite(name: str) -> EngineRejected:
    return EngineRejected(
        f"{name} has infinities or NaN, which have no codes: nothing was changed. Publish finite weights", tensor=name
    )
