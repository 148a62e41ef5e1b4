"""Patches: encode one box of a tensor as an entry, and decode it to positions and new bits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltawire.codec import ENCODINGS, decode, encode
from deltawire.codec.encoding import Known, Offsets
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.format.wire import Entry
from deltawire.tensors.boxes import Box, Positions, Shape
from deltawire.tensors.digest import Digest, box_digest, change_digest, tensor_key
from deltawire.tensors.dtypes import Bits, DType, Elements
from deltawire.tensors.weights import Tensor, Tensors, TensorSpec, Weights, read, write
from deltawire.workers import SERIAL, Workers


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes to one tensor, decoded: which elements, and their new bits. Writing a patch twice is harmless.

    Attributes:
        name: The name of the tensor.
        dtype: The dtype of the tensor, by its safetensors name.
        box: The part of the tensor that the patch is limited to.
        bits: The new bits, flat, as unsigned integers.
    """

    name: str
    dtype: str
    box: Box
    bits: Bits
    _positions: Positions | None

    @property
    def positions(self) -> Positions:
        """Flat positions in the whole tensor, in the order of the bits."""
        if self._positions is not None:
            return self._positions
        return self.box.to_tensor(np.arange(self.box.num_elements, dtype=np.int64))

    @property
    def where(self) -> Positions | slice:
        """An index for the flat tensor: a slice if the patch covers all of it, otherwise `positions`."""
        if self._positions is None and self.box.is_whole:
            return slice(None)
        return self.positions


def encode_box(
    name: str, dtype: DType, old: Elements, new: Elements, box: Box, allowed: list[str], workers: Workers = SERIAL,
    tile_log2: int | None = None, known: Known | None = None,
) -> tuple[Entry | None, Digest]:  # fmt: skip
    """Encode the changes in a box of a tensor, and what they add to the digest; `old` and `new` hold only the box."""
    key = tensor_key(name, dtype, box.full)
    gains: list[Digest] = []

    def watch(start: int, positions: Offsets, before: Bits, after: Bits) -> None:
        at = box.to_tensor(positions + np.int64(start))
        gains.append(change_digest(key, at, before, after))

    encoded = encode(old, new, dtype, allowed, workers, watch, tile_log2, known)
    entry = None if encoded is None else Entry.of(name, dtype, box, encoded)
    return entry, sum(gains, Digest())


def decode_entry(entry: Entry, old: Tensor | None, workers: Workers) -> Patch:
    """Decode an entry to a patch; `old` is the whole tensor."""
    bits = None if old is None else _cut(old, entry.box)
    positions, new = decode(entry.encoded, bits, entry.box.num_elements, entry.dtype, workers)
    absolute = None if positions is None else entry.box.to_tensor(positions)
    return Patch(entry.name, entry.dtype.name, entry.box, new, absolute)


def decode_part(entry: Entry, part: Box, shard: Tensor | None, workers: Workers) -> Patch | None:
    """Decode the part of an entry that lies in a shard, from the shard's own old bits; None if there is no overlap."""
    if part.full != entry.box.full:
        problem = f"the shard of {entry.name} is of a tensor of shape {list(part.full)}, not {list(entry.box.full)}"
        raise ShapeMismatch(problem, tensor=entry.name, expected=list(entry.box.full), actual=list(part.full))
    if shard is not None and (shard.dtype, shard.shape) != (entry.dtype, part.shape):
        raise ShapeMismatch(
            f"the shard of {entry.name} is {describe(shard.dtype, shard.shape)}, "
            f"expected {describe(entry.dtype, part.shape)}",
            tensor=entry.name, expected=list(part.shape), actual=list(shard.shape),
        )  # fmt: skip
    shared = entry.box.intersection(part)
    if shared is None:
        return None
    if ENCODINGS[entry.encoding].needs_mirror and shared != entry.box:
        raise ValueError(whole_needed(entry))
    old = None
    if shard is not None:
        # Elements outside the shard are unknown, and do not affect the result inside.
        known = np.zeros(entry.box.shape, entry.dtype.unsigned)
        known[shared.slices_in(entry.box)] = shard.bits.reshape(shard.shape)[shared.slices_in(part)]
        old = known.reshape(-1)
    positions, bits = decode(entry.encoded, old, entry.box.num_elements, entry.dtype, workers)
    if positions is None:
        inside = np.ascontiguousarray(bits.reshape(entry.box.shape)[shared.slices_in(entry.box)]).reshape(-1)
        return Patch(entry.name, entry.dtype.name, shared, inside, None)
    absolute = entry.box.to_tensor(positions)
    _, keep = shared.from_tensor(absolute)
    return Patch(entry.name, entry.dtype.name, shared, bits[keep], absolute[keep])


def whole_needed(entry: Entry) -> str:
    """What to say of an entry that cannot be decoded from a part of its box."""
    return (
        f"{entry.name} is encoded as {entry.encoding}, which can only be decoded with the whole box: "
        'keep a mirror, or publish with encoding="mirrorless"'
    )


def write_patches(targets: Mapping[str, Iterable[Any]], patches: Iterable[Patch]) -> None:
    for patch in patches:
        for value in targets[patch.name]:
            write(value, patch.where, patch.bits)


def patch_digest(patch: Patch, old: Tensor, workers: Workers) -> Digest:
    """What the digest gains when a patch is applied to the old tensor."""
    key = tensor_key(patch.name, old.dtype, old.shape)
    if patch._positions is None:
        before = box_digest(key, patch.box, _cut(old, patch.box), workers)
        return box_digest(key, patch.box, patch.bits, workers) - before
    return change_digest(key, patch.positions, read(old.bits, patch.positions), patch.bits)


def matching(entry: Entry, weights: Tensors) -> Tensor:
    """The tensor that an entry changes, checked for shape and dtype."""
    check_known(entry, weights)
    tensor = weights[entry.name]
    check_spec(entry, (tensor.dtype.name, tensor.shape))
    return tensor


def check_known(entry: Entry, weights: Weights) -> None:
    if entry.name not in weights:
        raise UnknownParameter(f"the delta changes {entry.name}, which the weights do not have", tensor=entry.name)


def check_spec(entry: Entry, spec: TensorSpec) -> None:
    """Check the dtype and shape of a target's tensor against those of an entry."""
    if spec != (entry.dtype.name, entry.box.full):
        expected, actual = describe(entry.dtype, entry.box.full), f"{spec[0]} {list(spec[1])}"
        problem = f"{entry.name} is {actual}, the delta was made for {expected}"
        raise ShapeMismatch(problem, tensor=entry.name, expected=expected, actual=actual)


def describe(dtype: DType, shape: Shape) -> str:
    return f"{dtype.name} {list(shape)}"


def _cut(tensor: Tensor, box: Box) -> Bits:
    if box.is_whole:
        return tensor.bits
    return np.ascontiguousarray(tensor.bits.reshape(tensor.shape)[box.slices]).reshape(-1)
