"""What a change of some weights does to codes and scales that were derived from them.

The weights themselves, as they are loaded, lie in host memory. Of each group of elements the largest magnitude is kept
on the device. A group is quantized again as a whole only where its scale moves; otherwise the codes of the changed
elements are. Where a group is divided between workers, they tell each other their largest magnitudes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from deltawire.engines.layout import Piece, cuts, pieces_of_copy
from deltawire.engines.memory import make_room
from deltawire.engines.quantized.recipes import Groups, Recipe, as_values, group_of, is_finite, magnitudes
from deltawire.engines.staged import PieceChange
from deltawire.errors import EngineRejected
from deltawire.kernels.gpu.fetch import to_device, to_host
from deltawire.tensors.digest import TensorKey, tensor_key
from deltawire.tensors.dtypes import ALIASES, dtype_named
from deltawire.workers import in_turns, rest

# So many weights are looked at together, and so many elements of groups whose scales move.
TOGETHER, MEMBERS = 1 << 27, 1 << 21
# About so many bytes a device needs for each changed weight, to tell which codes become others.
PER_CHANGE = 128

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
                f"{name} is {list(original.shape)} when it is loaded, but has codes {list(codes.shape)} and scales "
                f"{list(scales.shape)}: its layout is not known",
                tensor=name,
            )
        self.codes, self.scales = codes, scales

    def maxima(self) -> torch.Tensor:
        """The largest magnitudes of groups, of the elements that are here."""
        groups = Groups(self.recipe, self.groups.shape[1:])
        return torch.cat([groups.maxima(each.to(self.codes.device)) for each in self._matrices()])

    def _matrices(self) -> torch.Tensor:
        return self.original.view(self.groups.shape)

    def check_finite(self) -> None:
        if not all(is_finite(each.to(self.codes.device)) for each in self._matrices()):
            raise not_finite(self.name)

    def made(self, agreed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The codes and the scales of each matrix, and what they should be."""
        codes = self.codes if self.codes.ndim > 2 else self.codes[None]
        scales = self.scales.view(self.groups.shape[0], -1)
        of_all = agreed.view(len(scales), -1) if self.is_shared else [None] * len(scales)
        for number, (matrix, largest) in enumerate(zip(self._matrices(), of_all, strict=True)):
            made = self.recipe.quantize(matrix.to(self.codes.device), largest)
            yield codes[number], made[0]
            yield scales[number], made[1].view(-1)


class Alike:
    """Tensors that are quantized in one way, as if they lay one after the other.

    What a change does to all of them is computed together: a device that serves is waited for a few times, and not a
    few times for each tensor.
    """

    def __init__(self, tensors: Sequence[QuantizedTensor]) -> None:
        self.tensors, first = tensors, tensors[0]
        self.recipe, self.is_shared = first.recipe, first.is_shared
        self.device, self._dtype = first.codes.device, first.original.dtype
        self.counts = [each.groups.count for each in tensors]
        self.starts, self.bases = _starts([each.original.numel() for each in tensors]), _starts(self.counts)
        places = zip(self.starts, self.bases, tensors, strict=True)
        self._table = [(start, base, *each.groups.sizes) for start, base, each in places]
        # Here, since what fills them may have memory for a while only.
        self._maxima = torch.empty(sum(self.counts), dtype=torch.int32, device=self.device)
        self._agreed = torch.empty_like(self._maxima) if self.is_shared else self._maxima
        self._are_known = False

    @property
    def maxima(self) -> torch.Tensor:
        """Of the elements that are here."""
        self._fill()
        return self._maxima

    @property
    def agreed(self) -> torch.Tensor:
        """Of all elements of each group: what scales are made of."""
        self._fill()
        return self._agreed

    def _fill(self) -> None:
        if not self._are_known:
            torch.cat([each.maxima() for each in self.tensors], out=self._maxima)
            self._agreed.copy_(self._maxima)
            self._are_known = True

    def forget(self) -> None:
        """The weights are others now."""
        self._are_known = False

    def made(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All codes and scales, and what they should be."""
        for tensor, agreed in zip(self.tensors, self.agreed.split(self.counts), strict=True):
            yield from tensor.made(agreed)

    def look(self, changes: Mapping[str, Sequence[tuple[Piece, PieceChange]]], *, is_done: bool) -> Seen:
        """Where elements change, and in which groups. `is_done` if the weights have the new bits already."""
        positions, old, new, numbers = self._joined(changes)
        if is_done:
            old, new = new, old
        if not is_finite(new):
            where = zip(self.tensors, new.split(numbers), strict=True)
            raise not_finite(next(tensor.name for tensor, own in where if not is_finite(own)))
        start, base, *sizes = self._spread(self._table, numbers, 8)
        touched, which = torch.unique(group_of(positions - start, *sizes) + base, return_inverse=True)
        rest()
        before = self.maxima[touched]
        most = torch.zeros_like(before).scatter_reduce(0, which, magnitudes(new).int(), "amax")
        # The largest one has become smaller: there may be another as large, or the next one counts.
        lost = torch.zeros_like(before, dtype=torch.bool)
        lost[which[magnitudes(old).int() == before[which]]] = True
        lost &= most < before
        after = torch.maximum(most, before)
        rest()
        if lost.any():
            found = torch.zeros_like(before[lost])
            for place, number, there in self.members(touched[lost]):
                values = _looked_up(place, positions, new, there)
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
        was, becomes = (_looked_up(touched, groups, each, agreed)[which[few]] for each in (before, after))
        changes = [self._codes(positions[few], old[few], new[few], was, becomes)]
        for place, number, there in self.members(groups[moved]):
            one, other = (_looked_up(place, positions, each, there) for each in (old, new))
            changes.append(self._codes(place, one, other, before[moved][number], after[moved][number]))
        place, *codes = (torch.cat(parts) for parts in zip(*changes, strict=True))
        place, order = torch.sort(place)
        return Requantized(
            (place, codes[0][order], codes[1][order]), (groups[moved], scales[0][moved], scales[1][moved])
        )

    def _codes(
        self, place: torch.Tensor, old: torch.Tensor, new: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> Change:
        """Those that change."""
        codes = [
            self.recipe.elements(values, as_values(largest, self._dtype))[0].view(torch.uint8)
            for values, largest in in_turns(((old, before), (new, after)))
        ]
        differ = codes[0] != codes[1]
        return place[differ], codes[0][differ], codes[1][differ]

    def _scales(self, maxima: torch.Tensor) -> torch.Tensor:
        largest = as_values(maxima, self._dtype)
        return self.recipe.elements(torch.zeros_like(largest), largest)[1]

    def members(self, chosen: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The elements of some groups, which ascend: their positions, which of the groups each is in, and the weights
        that are kept there; some groups at a time.
        """
        edges = torch.searchsorted(chosen, torch.tensor([*self.bases, sum(self.counts)], device=self.device)).tolist()
        of_tensors = [last - first for first, last in pairwise(edges)]
        start, base, rows, columns, in_rows, in_columns, down, across = self._spread(self._table, of_tensors, 8)
        row, column = (chosen - base) // across, (chosen - base) % across * in_columns
        expert, row = row // down, row % down * in_rows
        first = start + (expert * rows + row) * columns + column
        width = torch.minimum(columns - column, in_columns)
        sizes = width * torch.minimum(rows - row, in_rows)
        ends = np.cumsum([0, *sizes.tolist()])
        begin = 0
        while begin < len(chosen):
            rest()
            end = max(int(np.searchsorted(ends, ends[begin] + MEMBERS, "right")) - 1, begin + 1)
            own = slice(begin, end)
            number = torch.arange(begin, end, device=self.device)
            number = number.repeat_interleave(sizes[own], output_size=int(ends[end] - ends[begin]))
            before = torch.from_numpy(ends[own] - ends[begin]).to(self.device)
            inside, wide = torch.arange(len(number), device=self.device) - before[number - begin], width[number]
            place = first[number] + inside // wide * columns[number] + inside % wide
            yield place, number, self._kept(place, [ends[min(max(each, begin), end)] for each in edges])
            begin = end

    def _kept(self, place: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """The weights at some places, of each tensor between two ends."""
        places = to_host(place).split([int(last - first) for first, last in pairwise(ends)])
        parts = zip(self.tensors, self.starts, places, strict=True)
        there = [tensor.original.view(-1)[each - start] for tensor, start, each in in_turns(parts) if len(each)]
        return to_device(torch.cat(there), self.device)

    def _joined(
        self, changes: Mapping[str, Sequence[tuple[Piece, PieceChange]]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Changes of pieces as one change of all tensors, on the device, and how many elements are of each tensor."""
        of_tensors = [changes.get(each.name, ()) for each in self.tensors]
        every = [change for own in of_tensors for _, change in own]
        make_room(PER_CHANGE * sum(len(each.index) for each in every), self.device)

        def there(parts: list[Any], kind: type) -> torch.Tensor:
            joined = np.concatenate([np.empty(0, kind), *(each.view(kind) for each in parts)])
            return to_device(torch.from_numpy(joined), self.device)

        index, old, new = (there([getattr(each, name) for each in every], kind)
                           for name, kind in (("index", np.int32), ("old", np.int16), ("new", np.int16)))  # fmt: skip
        places = [(start + piece.place[0], piece.columns, *piece.place[1:])
                  for own, start in zip(of_tensors, self.starts, strict=True) for piece, _ in own]  # fmt: skip
        offset, columns, row_step, column_step = self._spread(places, [len(each.index) for each in every], 4)
        inside = index.long() & 0xFFFFFFFF
        positions, order = torch.sort(offset + inside // columns * row_step + inside % columns * column_step)
        old, new = (each[order].view(self._dtype) for each in (old, new))
        return positions, old, new, [sum(len(change.index) for _, change in own) for own in of_tensors]

    def _spread(self, table: Sequence[tuple[int, ...]], numbers: Sequence[int], width: int) -> list[torch.Tensor]:
        """The columns of a table, each row of it for so many elements."""
        columns = torch.tensor(table, dtype=torch.int64).view(len(table), width).T.to(self.device)
        repeats = torch.tensor(numbers, dtype=torch.int64).to(self.device)
        return [each.repeat_interleave(repeats, output_size=sum(numbers)) for each in in_turns(columns)]


@dataclass
class Plan:
    """What a staged change does to codes and scales."""

    changes: list[tuple[int, PieceChange]] = field(default_factory=list)
    """For pieces, by their numbers."""
    maxima: list[tuple[torch.Tensor, Change]] = field(default_factory=list)
    """For tables of largest magnitudes."""


class QuantizedModel:
    """All tensors that one process quantizes, with codes and scales as pieces of memory.

    With tensors that are shared, `take`, `load` and `plan` are called in all workers at the same time.
    """

    def __init__(self, tensors: Sequence[QuantizedTensor], largest: Largest | None = None) -> None:
        self.tensors = {each.name: each for each in tensors}
        self.alike = list(_alike(tensors))
        self._largest = largest
        self._is_awaited = False
        self.is_given = not tensors
        """Whether the weights are some that were loaded or taken."""
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
    def _shared(self) -> list[Alike]:
        return [each for each in self.alike if each.is_shared]

    def prepare(self) -> None:
        """Compute what is kept, before there is a change."""
        for alike in self.alike:
            # When they are first asked for.
            _ = alike.agreed

    def take(self) -> None:
        """The weights are others now."""
        for each in self.tensors.values():
            each.check_finite()
        for alike in self.alike:
            alike.forget()
        if self._shared:
            values = self._of_all(torch.cat([each.maxima.cpu() for each in self._shared]))
            for alike, own in zip(self._shared, values.split([sum(each.counts) for each in self._shared]), strict=True):
                alike.agreed.copy_(own)
        self.is_given, self._is_awaited = True, False

    def load(self) -> None:
        """The same, and write their codes and scales."""
        self.take()
        for alike in self.alike:
            for live, made in alike.made():
                live.copy_(made)

    def holds(self) -> bool:
        """Whether codes and scales are those of the weights."""
        made = (each for alike in self.alike for each in alike.made())
        return all(torch.equal(_bits(live), _bits(wanted)) for live, wanted in made)

    def plan(self, changes: Mapping[str, Sequence[tuple[Piece, PieceChange]]], *, is_done: bool) -> Plan:
        """From what changes in the pieces of each tensor, as it is loaded. `is_done` if the weights have it already."""
        seen = {each: each.look(changes, is_done=is_done) for each in self._shared}
        agreed = self._agree(seen, is_done) if seen else {}
        self._is_awaited = False
        plan = Plan()
        for alike in in_turns(self.alike):
            if not alike.is_shared and not any(each.name in changes for each in alike.tensors):
                continue
            own = seen.pop(alike, None) or alike.look(changes, is_done=is_done)
            here = own.touched, own.before, own.after
            codes, scales = alike.derive(own, *agreed.get(alike, here))
            plan.changes += self.split(alike, "codes", alike.starts, _turned(codes, is_done))
            plan.changes += self.split(alike, "scales", alike.bases, _turned(scales, is_done))
            tables = [(alike.maxima, here), *([(alike.agreed, agreed[alike])] if alike.is_shared else [])]
            for table, (groups, before, after) in tables:
                moved = before != after
                if moved.any():
                    plan.maxima.append((table, _turned((groups[moved], before[moved], after[moved]), is_done)))
        return plan

    def _agree(self, seen: Mapping[Alike, Seen], is_done: bool) -> dict[Alike, Change]:
        """For shared tensors: the groups whose largest magnitude becomes another in some worker, and the largest of all
        workers before and after.
        """
        sizes = [sum(alike.counts) for alike in seen]
        marks = torch.zeros(sum(sizes), dtype=torch.uint8)
        for mark, own in zip(marks.split(sizes), seen.values(), strict=True):
            mark[own.touched[own.before != own.after].cpu()] = 1
        changes = []
        for (alike, own), mark in zip(seen.items(), self._of_all(marks).split(sizes), strict=True):
            groups = mark.nonzero().view(-1).to(alike.device)
            now = alike.maxima[groups]
            # What is before and what is after means the same to all, whoever has it already.
            changes.append(_turned((groups, now, _looked_up(groups, own.touched, own.after, now)), is_done))
        values = torch.cat([torch.stack(change[1:]).cpu() for change in changes], 1)
        values = self._of_all(values) if values.numel() else values
        largest = values.split([len(change[0]) for change in changes], 1)
        return {
            alike: _turned((groups, *pair.to(groups.device)), is_done)
            for alike, (groups, *_), pair in zip(seen, changes, largest, strict=True)
        }

    def split(self, alike: Alike, kind: str, starts: Sequence[int], change: Change) -> list[tuple[int, PieceChange]]:
        """A change of tensors that are alike as changes of pieces."""
        positions, old, new = (_numpy(each) for each in change)
        edges = [*np.searchsorted(positions, starts), len(positions)]
        found = []
        for i, tensor in enumerate(in_turns(alike.tensors)):
            own = slice(edges[i], edges[i + 1])
            at = positions[own] - starts[i]
            for cut in self._cuts[f"{kind} of {tensor.name}"] if len(at) else ():
                shared = cut.divide(at, at.astype(np.uint32), old[own], new[own])
                found += [(number, PieceChange(number, *arrays)) for ((_, number),), *arrays in shared]
        return found

    def settle(self, plan: Plan, *, undo: bool) -> None:
        """After a write: the largest magnitudes are others."""
        for table, (groups, before, after) in plan.maxima:
            table[groups] = before if undo else after


def _alike(tensors: Sequence[QuantizedTensor]) -> Iterator[Alike]:
    """Those of one recipe together, as far as a change of them does not take too much memory. Where workers agree on
    scales all of them have the same ones together.
    """
    found: dict[Any, list[QuantizedTensor]] = {}
    for each in tensors:
        key = each.recipe, each.is_shared, each.original.dtype, each.codes.device
        own = found.setdefault(key, [])
        if not each.is_shared and sum(other.original.numel() for other in own) > TOGETHER:
            yield Alike(found.pop(key))
            own = found.setdefault(key, [])
        own.append(each)
    yield from map(Alike, found.values())


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _turned(change: Change, turns: bool) -> Change:
    """A change, or the way back."""
    return (change[0], change[2], change[1]) if turns else change


def _looked_up(
    places: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, otherwise: torch.Tensor
) -> torch.Tensor:
    """The values at some places, which those at ascending positions are known for."""
    if not len(positions):
        return otherwise
    rest()
    at = torch.searchsorted(positions, places).clamp_(max=len(positions) - 1)
    return torch.where(positions[at] == places, values[at], otherwise)


def _numpy(values: torch.Tensor) -> Any:
    found = to_host(values).numpy()
    return found if found.dtype == np.int64 else found.view(f"<u{found.itemsize}")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def not_finite(name: str) -> EngineRejected:
    return EngineRejected(f"{name} has infinities or NaN, which have no codes: publish finite weights", tensor=name)
