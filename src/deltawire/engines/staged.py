"""A change on its way into one process of an engine: for each piece, which elements, their old and their new bits.

On the way to another process it is a safetensors file:

    pieces   I64 [n, 3]  number of the piece, where it begins in `index`, where in `old` and `new`
    index    U32         elements' numbers in their pieces
    old, new U8          bits, piece after piece
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltawire.engines.engine import EngineChange
from deltawire.engines.layout import Layout, Numbers, Piece
from deltawire.errors import CorruptObject, DeltawireError, UnknownParameter
from deltawire.format.container import Container, header_bytes, lay_out, raw
from deltawire.format.patches import Patch
from deltawire.tensors.boxes import Positions
from deltawire.tensors.digest import Digest, WeightVersion, change_digest, digest, tensor_key
from deltawire.tensors.dtypes import Bits, dtype_named
from deltawire.tensors.weights import TensorSpec, view
from deltawire.workers import PER_CHANGE, Workers


@dataclass(frozen=True, slots=True)
class PieceChange:
    """What changes in one piece."""

    number: int
    index: npt.NDArray[np.uint32]
    old: Bits
    new: Bits


@dataclass(frozen=True, slots=True)
class StagedChange:
    """What changes in one process."""

    token: str
    base: WeightVersion
    state: WeightVersion
    changes: Sequence[PieceChange]

    def save(self, path: Path) -> None:
        # Wide elements first, so that all of them stay aligned.
        changes = sorted(self.changes, key=lambda each: -each.old.itemsize)
        table = np.zeros((len(changes), 3), np.int64)
        elements = num_bytes = 0
        for row, each in zip(table, changes, strict=True):
            row[:] = each.number, elements, num_bytes
            elements, num_bytes = elements + len(each.index), num_bytes + each.old.nbytes
        parts: dict[str, list[npt.NDArray[Any]]] = {"pieces": [table]}
        parts |= {name: [getattr(each, name) for each in changes] for name in ("index", "old", "new")}
        bits: TensorSpec = "U8", (num_bytes,)
        slots = lay_out({"pieces": ("I64", table.shape), "index": ("U32", (elements,)), "old": bits, "new": bits})
        versions = {"base": json.dumps(self.base.as_dict()), "state": json.dumps(self.state.as_dict())}
        with path.open("wb", 1 << 20) as file:
            file.write(header_bytes(slots, {"token": self.token, **versions}))
            file.writelines(raw(part) for name in slots for part in parts[name])

    @classmethod
    def load(cls, path: Path, pieces: Sequence[Piece], specs: Mapping[str, TensorSpec]) -> "StagedChange":
        """Read such a file. Everything in it is checked against the pieces that it is for."""
        names = "pieces", "index", "old", "new"
        try:
            # Not as safetensors reads it: that would keep the interpreter from the thread that serves.
            file = Container(path)
            info, slots = file.header.metadata, [file.header.slots[name] for name in names]
            base, state = (WeightVersion.parse(json.loads(info[name])) for name in ("base", "state"))
            kinds = [slot.dtype for slot in slots]
            if kinds != ["I64", "U32", "U8", "U8"] or slots[0].shape[1:] != (3,) or not (base and state):
                raise ValueError("unexpected fields")
            numbers, index, old, new = map(file.bits, names)
            table = numbers.view(np.int64).reshape(-1, 3)
            changes = []
            elements = num_bytes = 0
            ends = [*table[1:, 1].tolist(), len(index)][: len(table)]
            for (number, start, at), stop in zip(table.tolist(), ends, strict=True):
                piece = pieces[number]
                kind = dtype_named(specs[piece.tensor][0]).unsigned
                size = (stop - start) * kind.itemsize
                own = index[start:stop]
                if number < 0 or (start, at) != (elements, num_bytes) or not start <= stop <= len(index):
                    raise ValueError("inconsistent sizes")
                # Two changes of one element would depend on their order.
                if len(own) and (own[-1] >= piece.num_elements or np.any(own[1:] <= own[:-1])):
                    raise ValueError(f"elements of {piece.tensor} out of range or out of order")
                changes.append(PieceChange(number, own, old[at : at + size].view(kind), new[at : at + size].view(kind)))
                elements, num_bytes = stop, at + size
            if not (elements, num_bytes, num_bytes) == (len(index), len(old), len(new)):
                raise ValueError("inconsistent sizes")
            return cls(info["token"], base, state, changes)
        except (DeltawireError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise CorruptObject(f"{path} does not hold a change for these pieces: {error}", path=str(path)) from error


def changed_elements(patch: Patch, bits: Bits) -> tuple[Positions, Numbers, Bits, Bits]:
    """The positions that a patch changes in a tensor, ascending, the low 32 bits of these, their old and new bits."""
    positions, new = patch.where, patch.bits
    if isinstance(positions, slice):
        positions = np.flatnonzero(bits != new)
        return positions, positions.astype(np.uint32), bits[positions], new[positions]
    from deltawire.kernels.cpu.live import gather

    numbers, old = np.empty(len(positions), np.uint32), np.empty(len(positions), bits.dtype)
    # Kernels are compiled for arrays that can be written.
    positions = np.require(positions, np.int64, ["C", "W"])
    if not (bits.flags.writeable and gather(bits, positions, numbers, old)):
        order = np.argsort(positions, kind="stable")
        positions, new = positions[order], new[order]
        numbers, old = positions.astype(np.uint32), bits[positions]
    return positions, numbers, old, new


def split(change: EngineChange, layout: Layout, token: str) -> list[StagedChange]:
    """What changes in each process."""

    def split_patch(patch: Patch) -> list[list[PieceChange]]:
        if patch.name not in layout.specs:
            raise UnknownParameter(f"the change is for {patch.name}, which the engine does not have", tensor=patch.name)
        changed = changed_elements(patch, view(patch.name, change.old[patch.name]).bits)
        ranks: list[list[PieceChange]] = [[] for _ in layout.ranks]
        for cut in layout.cuts.get(patch.name, []):
            # No element is in two of them.
            for holders, *arrays in cut.divide(*changed):
                for rank, number in holders:
                    ranks[rank].append(PieceChange(number, *arrays))
        return ranks

    with Workers() as workers:
        patches = [each for each in change.patches if each.name not in layout.left_out]
        found = workers.map_sized(split_patch, patches, lambda patch: PER_CHANGE * len(patch.bits))
    ranks = [[each for ranks in found for each in ranks[rank]] for rank in range(len(layout.ranks))]
    return [StagedChange(token, change.base, change.state, changes) for changes in ranks]


def left_out_digests(change: EngineChange, layout: Layout) -> tuple[Digest, Digest]:
    """What the tensors that the engine does not use add to the digest, before a change and after it."""
    if not layout.left_out:
        return Digest(), Digest()
    before = after = digest({name: change.old[name] for name in layout.left_out})
    for patch in change.patches:
        if patch.name in layout.left_out:
            tensor = view(patch.name, change.old[patch.name])
            key = tensor_key(patch.name, tensor.dtype, tensor.shape)
            positions, _, *bits = changed_elements(patch, tensor.bits)
            after += change_digest(key, positions, *bits)
    return before, after
