"""Apply deltas: in sequence without changing the base weights (`Replay`), in place (`apply`), to a copy."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from deltawire.codec import ENCODINGS
from deltawire.errors import BaseMismatch, BrokenChain, CorruptObject, DigestMismatch
from deltawire.format.checkpoint import SINGLE_NAME, Checkpoint, anchor_info, write_checkpoint
from deltawire.format.delta import Delta, Progress
from deltawire.format.patches import Patch, check_known, check_spec, decode_entry, patch_digest, write_patches
from deltawire.format.wire import DeltaInfo, Entry
from deltawire.tensors.boxes import Box, Positions
from deltawire.tensors.digest import Digest, digest, tensor_digest
from deltawire.tensors.dtypes import Bits
from deltawire.tensors.weights import (
    DTypeChoice,
    Tensor,
    Viewed,
    Weights,
    mapping_of,
    num_elements,
    spec,
    tied_names,
    untied_name,
    view,
    writables,
)
from deltawire.workers import PER_CHANGE, Workers


class Replay:
    """The result of applying deltas to `base`. Nothing is written; all stated digests are checked."""

    def __init__(
        self, base: Weights, deltas: Sequence[Delta], workers: Workers, progress: Progress | None = None
    ) -> None:
        self.base, self.deltas, self._workers = base, deltas, workers
        self._report = progress or (lambda name, num_elements: None)
        self._before = self._after = Digest()
        for before, after in pairwise(deltas):
            if (before.version, before.digest) != (after.base_version, after.base_digest):
                problem = f"the delta to version {after.version} does not start where the one to {before.version} ends"
                raise BrokenChain(problem, version=after.version)
        # For each tensor, one list of entries per delta that changes it.
        self._entries: dict[str, list[list[Entry]]] = {}
        for delta in deltas:
            by_name: dict[str, list[Entry]] = {}
            for entry in delta.entries:
                check_known(entry, base)
                check_spec(entry, spec(base, entry.name))
                by_name.setdefault(entry.name, []).append(entry)
            for name, entries in by_name.items():
                self._entries.setdefault(name, []).append(entries)

    def patches(self, base_digest: Digest) -> list[Patch]:
        """One patch for each tensor that changes; `base_digest` is the digest of the base weights."""
        if not self.deltas:
            return []
        check_base(self.deltas[0].info, base_digest)
        patches, reached = [], base_digest
        for name, (patch, gain) in self._workers.spread(sorted(self._entries), self._work, self._patch):
            patches.append(patch)
            reached += gain
            self._report(name, num_elements(self.base, name))
        check_reached(self.deltas[-1].info, reached)
        return patches

    def _work(self, name: str) -> int:
        """What decoding a tensor costs: elements to scan, or as many as its changes are worth."""
        entries = [entry for group in self._entries[name] for entry in group]
        if len(entries) > 1 or ENCODINGS[entries[0].encoding].needs_mirror:
            return num_elements(self.base, name)
        return PER_CHANGE * entries[0].num_changed

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
        """The final bits of a tensor. Call `check` after the last tensor to verify them."""
        tensor = view(name, self.base[name])
        was, gain, bits = tensor_digest(name, tensor, self._workers), Digest(), tensor.bits
        if name in self._entries:
            try:
                bits, _, gain = _advance(tensor, self._entries[name], self._workers)
            except CorruptObject:
                # A valid patch decoded against the wrong weights looks corrupt, so check the base first.
                check_base(self.deltas[0].info, digest(self.base))
                raise
        self._before, self._after = self._before + was, self._after + was + gain
        self._report(name, len(bits))
        return bits

    def check(self, expected: Digest) -> None:
        """Check the digests of the base and of the result, once `bits_of` was called for every tensor."""
        before, after = self._before, self._after
        self._before = self._after = Digest()
        if self.deltas:
            check_base(self.deltas[0].info, before)
            check_reached(self.deltas[-1].info, after)
        if after != expected:
            problem = f"the weights have digest {after}, not {expected}"
            raise DigestMismatch(problem, expected=str(expected), actual=str(after))

    def verify(self, expected: Digest) -> None:
        """Compute all tensors and check the digests, without keeping them."""
        for name in self.base:
            self.bits_of(name)
        self.check(expected)

    def patches_from(self, weights: Weights, expected: Digest, most: float) -> list[Patch] | None:
        """Patches that turn other weights into the result; None if specs differ, or more than `most` of all changes."""
        if {name: spec(weights, name) for name in weights} != {name: spec(self.base, name) for name in self.base}:
            return None
        patches, left = [], most * sum(num_elements(self.base, name) for name in self.base)
        for name in self.base:
            tensor, bits = view(name, weights[name]), self.bits_of(name)
            where = np.flatnonzero(tensor.bits != bits)
            left -= len(where)
            if left < 0:
                self._before = self._after = Digest()
                return None
            patches.append(Patch(name, tensor.dtype.name, Box.whole(tensor.shape), bits[where], where))
        self.check(expected)
        return [patch for patch in patches if len(patch.bits)]


def _advance(tensor: Tensor, groups: list[list[Entry]], workers: Workers) -> tuple[Bits, Positions | None, Digest]:
    """A tensor after all its entries, the positions they changed (None: all), and what the digest gains."""
    now = Tensor(tensor.dtype, tensor.shape, tensor.bits.copy())
    touched: list[Positions] | None = []
    gain = Digest()
    for group in groups:
        # The boxes of one delta do not overlap, but all of them are decoded against the weights before it.
        for patch in [decode_entry(entry, now, workers) for entry in group]:
            gain += patch_digest(patch, now, workers)
            now.bits[patch.where] = patch.bits
            touched = None if touched is None or isinstance(patch.where, slice) else [*touched, patch.positions]
    return now.bits, None if touched is None else np.concatenate(touched), gain


def apply(
    delta: Delta,
    weights: Weights,
    *,
    base_digest: Digest | None = None,
    dtype: DTypeChoice = None,
    threads: int | None = None,
) -> Digest:
    """Apply a delta to weights in place, or raise and leave them unchanged.

    Everything is decoded and checked before the first write: names, shapes and dtypes, the digest of the weights, and
    the digest that they will have.

    Args:
        delta: The delta to apply.
        weights: The weights at its base version: arrays or tensors by name, or a torch module.
        base_digest: The digest of the weights, if known. Saves a scan of all weights.
        dtype: What the bits of integer arrays mean, as for `diff`.
        threads: Number of threads (default: all available cores).

    Returns:
        The digest of the weights after the delta.

    Raises:
        BaseMismatch: The weights are not the base of the delta.
        DigestMismatch: The delta does not lead to the digest that it states: it is damaged.
        UnknownParameter: The weights lack a tensor that the delta changes.
        ShapeMismatch: A tensor has another shape or dtype than in the delta.
        ValueError: A tensor cannot be changed in place, or a tied name has other weights.
    """
    weights = mapping_of(weights)
    with Workers(threads) as workers:
        replay = Replay(Viewed(weights, dtype), [delta], workers)
        targets = writables(weights, [entry.name for entry in delta.entries], delta.tied)
        differing = untied_name(weights, delta.tied, dtype)
        if differing is not None:
            raise ValueError(f"{differing} is tied to {delta.tied[differing]} in the run, but has other weights here")
        if base_digest is None:
            base_digest = _digest_before(delta, weights, dtype, threads)
        patches = replay.patches(base_digest)
    write_patches(targets, patches)
    return delta.digest


def _digest_before(delta: Delta, weights: Weights, dtype: DTypeChoice, threads: int | None) -> Digest:
    """The digest of weights that a delta is to be applied to."""
    found = digest(weights, dtype=dtype, tied=delta.tied, threads=threads)
    if found != delta.base_digest:
        # A delta does not name what is tied to tensors that it leaves as they are; here these share memory.
        shared = {name: to for name, to in tied_names(weights).items() if name not in delta.tied.values()}
        if shared.keys() - delta.tied.keys():
            return digest(weights, dtype=dtype, tied={**shared, **delta.tied}, threads=threads)
    return found


def apply_to_checkpoint(
    base: Checkpoint, delta: Delta, path: Path, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Write `base` with the delta applied to `path`, including the files next to the weights."""
    info = anchor_info(delta.run, delta.version, delta.digest, delta.num_elements, base.tied)
    with Workers(threads) as workers:
        replay = Replay(base, [delta], workers, progress)
        write_replayed(replay, path, {"format": "pt", **base.metadata, **info}, delta.digest, base.other_files())


def write_replayed(
    replay: Replay, path: Path, metadata: Mapping[str, str], expected: Digest, extra_files: Sequence[Path]
) -> None:
    """Write the result of a replay of a checkpoint to `path`, where it appears if it has the expected digest."""
    if not isinstance(replay.base, Checkpoint):
        raise TypeError("only a replay of a checkpoint can be written as a checkpoint")
    base = replay.base
    # In the files of the original folder, or all in one.
    files = {file: [name for name in shard.header.slots if name in base] for file, shard in base.shards.items()}
    if len(base):
        files = {file: names for file, names in files.items() if names}
    if path.suffix == ".safetensors" or not base.path.is_dir():
        files = {SINGLE_NAME: list(base)}
    shards = {file: {name: base.spec(name) for name in names} for file, names in files.items()}
    check = partial(replay.check, expected)
    write_checkpoint(path, shards, metadata, replay.bits_of, extra_files=extra_files, check=check)


def verify_delta(
    delta: Delta, base: Checkpoint, *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Check that `base` is the base of a delta, and that the delta leads to the digest that it states."""
    with Workers(threads) as workers:
        Replay(base, [delta], workers, progress).verify(delta.digest)


def check_base(info: DeltaInfo, actual: Digest) -> None:
    if actual != info.base_digest:
        raise BaseMismatch(
            f"these are not the weights of version {info.base_version} that the delta was made for: "
            f"their digest is {actual}, not {info.base_digest}",
            version=info.base_version, expected=str(info.base_digest), actual=str(actual),
        )  # fmt: skip


def check_reached(info: DeltaInfo, actual: Digest) -> None:
    if actual != info.digest:
        raise DigestMismatch(
            f"the delta leads to digest {actual}, not to {info.digest} as it states for version {info.version}: "
            "it is damaged, fetch it again",
            version=info.version, expected=str(info.digest), actual=str(actual),
        )  # fmt: skip
