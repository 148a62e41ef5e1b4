"""Deltas, one after the other, onto weights that stay as they are: what each tensor becomes, and the digest."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from deltawire.boxes import Box, Positions
from deltawire.delta import Delta, Progress, check_base, check_reached
from deltawire.dtypes import Bits
from deltawire.errors import BrokenChain, CorruptObject, DigestMismatch
from deltawire.patches import Patch, check_form, check_known, decode_entry, patch_digest
from deltawire.state import Digest, digest, tensor_digest
from deltawire.weights import Tensor, Weights, form, num_elements, view
from deltawire.wire import Entry
from deltawire.workers import Workers


class Replay:
    """What some deltas make of `base`. Nothing is written; everything is checked against what they state."""

    def __init__(
        self, base: Weights, deltas: Sequence[Delta], workers: Workers, progress: Progress | None = None
    ) -> None:
        self.base, self.deltas, self._workers, self._progress = base, deltas, workers, progress
        self._before = self._after = Digest()
        for before, after in pairwise(deltas):
            if (before.version, before.digest) != (after.base_version, after.base_digest):
                raise BrokenChain(
                    f"the delta to version {after.version} does not start where the one to {before.version} ends",
                    version=after.version,
                )
        # For each tensor, a list of entries for each delta that changes it.
        self._entries: dict[str, list[list[Entry]]] = {}
        for delta in deltas:
            by_name: dict[str, list[Entry]] = {}
            for entry in delta.entries:
                check_known(entry, base)
                check_form(entry, form(base, entry.name))
                by_name.setdefault(entry.name, []).append(entry)
            for name, entries in by_name.items():
                self._entries.setdefault(name, []).append(entries)

    def patches(self, base_digest: Digest) -> list[Patch]:
        """One patch for each tensor that changes, from weights of a known digest."""
        if not self.deltas:
            return []
        check_base(self.deltas[0].facts, base_digest)
        patches, reached = [], base_digest
        for name, (patch, gain) in self._workers.spread(
            sorted(self._entries), lambda name: num_elements(self.base, name), self._patch
        ):
            patches.append(patch)
            reached += gain
            self._report(name, num_elements(self.base, name))
        check_reached(self.deltas[-1].facts, reached)
        return patches

    def _patch(self, name: str, workers: Workers) -> tuple[Patch, Digest]:
        tensor, groups = view(name, self.base[name]), self._entries[name]
        if len(groups) == len(groups[0]) == 1:
            patch = decode_entry(groups[0][0], tensor, workers)
            return patch, patch_digest(patch, tensor, workers)
        bits, touched, gain = _advance(tensor, groups, workers)
        where = None if touched is None else np.unique(touched)
        # A position takes four times the space of a bf16 weight.
        if where is None or 5 * len(where) > len(bits):
            return Patch(name, tensor.dtype.name, Box.whole(tensor.shape), bits, None), gain
        return Patch(name, tensor.dtype.name, Box.whole(tensor.shape), bits[where], where), gain

    def bits_of(self, name: str) -> Bits:
        """A tensor as it is at the end. `check`, after all of them, says whether they are right."""
        tensor = view(name, self.base[name])
        was, gain, bits = tensor_digest(name, tensor, self._workers), Digest(), tensor.bits
        if name in self._entries:
            try:
                bits, _, gain = _advance(tensor, self._entries[name], self._workers)
            except CorruptObject:
                # Against other weights a sound patch looks broken, so see first whose fault it is.
                check_base(self.deltas[0].facts, digest(self.base))
                raise
        self._before, self._after = self._before + was, self._after + was + gain
        self._report(name, len(bits))
        return bits

    def check(self, expected: Digest) -> None:
        """Check the digests of the base and of the end, once `bits_of` was called for every tensor."""
        if self.deltas:
            check_base(self.deltas[0].facts, self._before)
            check_reached(self.deltas[-1].facts, self._after)
        if self._after != expected:
            raise DigestMismatch(
                f"the weights have digest {self._after}, not {expected} as they should",
                expected=str(expected), actual=str(self._after),
            )  # fmt: skip

    def verify(self, expected: Digest) -> None:
        """Go over all tensors and check, keeping none of them."""
        for name in self.base:
            self.bits_of(name)
        self.check(expected)
        self._before = self._after = Digest()

    def patches_from(self, weights: Weights, expected: Digest, most: float) -> list[Patch] | None:
        """What turns other weights into these, of digest `expected`; None where that is more than a part of them."""
        if {name: form(weights, name) for name in weights} != {name: form(self.base, name) for name in self.base}:
            return None
        patches, left = [], most * sum(num_elements(self.base, name) for name in self.base)
        for name in self.base:
            tensor, bits = view(name, weights[name]), self.bits_of(name)
            where = np.flatnonzero(tensor.bits != bits)
            left -= len(where)
            if left < 0:
                break
            patches.append(Patch(name, tensor.dtype.name, Box.whole(tensor.shape), bits[where], where))
        else:
            self.check(expected)
        self._before = self._after = Digest()
        return None if left < 0 else [patch for patch in patches if len(patch.bits)]

    def _report(self, name: str, count: int) -> None:
        if self._progress is not None:
            self._progress(name, count)


def _advance(tensor: Tensor, groups: list[list[Entry]], workers: Workers) -> tuple[Bits, Positions | None, Digest]:
    """A tensor after all its entries, the positions they touched (None: all), and what the digest gains."""
    now = Tensor(tensor.dtype, tensor.shape, tensor.bits.copy())
    touched: list[Positions] | None = []
    gain = Digest()
    for group in groups:
        # The boxes of one delta do not overlap, but all of them are read against the weights before it.
        for patch in [decode_entry(entry, now, workers) for entry in group]:
            gain += patch_digest(patch, now, workers)
            now.bits[patch.where] = patch.bits
            touched = None if touched is None or isinstance(patch.where, slice) else [*touched, patch.positions]
    return now.bits, None if touched is None else np.concatenate(touched), gain
