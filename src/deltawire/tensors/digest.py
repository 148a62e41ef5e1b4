"""The digest: one value for all weights of a version, which can be updated from the changed elements alone.

The digest of a tensor is the sum of `mix(seed, position, bits)` over its elements, modulo 2^64 in each of two lanes,
plus a constant; seed and constant come from a hash of the tensor's name, dtype and shape. The digest of a model is the
sum over its tensors. Because it is a sum, shards add up to the whole in any order, and a change only adds the
difference of its own elements.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from deltawire.errors import CorruptObject
from deltawire.tensors.boxes import Box, Positions, Shape
from deltawire.tensors.dtypes import Bits, DType, Elements
from deltawire.tensors.names import Ties
from deltawire.tensors.weights import DTypeChoice, Tensor, Weights, mapping_of, num_elements, view
from deltawire.workers import SERIAL, Workers

_WORD = (1 << 64) - 1
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """128 bits that identify weights; `str()` gives 32 hexadecimal digits.

    Digests of disjoint parts add up to the digest of the whole.

    Attributes:
        low: The lower 64 bits.
        high: The upper 64 bits.
    """

    low: int = 0
    high: int = 0

    def __add__(self, other: "Digest") -> "Digest":
        return Digest((self.low + other.low) & _WORD, (self.high + other.high) & _WORD)

    def __sub__(self, other: "Digest") -> "Digest":
        return Digest((self.low - other.low) & _WORD, (self.high - other.high) & _WORD)

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}"

    def __repr__(self) -> str:
        return f"Digest({self})"

    @classmethod
    def parse(cls, text: str) -> "Digest":
        """Read 32 hexadecimal digits; anything else is CorruptObject."""
        if len(text) != 32 or set(text) - set("0123456789abcdef"):
            raise CorruptObject(f"{text[:64]!r} is not a digest: expected 32 hexadecimal digits")
        return cls(int(text[16:], 16), int(text[:16], 16))


def from_sums(sums: Iterable[Any]) -> Digest:
    """The two sums of a kernel as a digest, whatever their sign."""
    low, high = sums
    return Digest(int(low) & _WORD, int(high) & _WORD)


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Identifies weights: run, version and digest."""

    run: str
    version: int
    digest: Digest

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON values, for files and messages."""
        return {"run": self.run, "version": self.version, "digest": str(self.digest)}

    @classmethod
    def parse(cls, fields: Mapping[str, Any] | None) -> "WeightVersion | None":
        """Read what `as_dict` returned; None stays None. A version that is not one is CorruptObject."""
        if fields is None:
            return None
        version = fields["version"]
        if type(version) is not int or version < 0:
            raise CorruptObject(f"{str(version)[:64]!r} is not a version")
        return cls(str(fields["run"]), version, Digest.parse(fields["digest"]))


@dataclass(frozen=True, slots=True)
class TensorKey:
    """What identifies a tensor in the digest."""

    seed: np.uint64
    constant: Digest


def tensor_key(name: str, dtype: DType, shape: Shape) -> TensorKey:
    text = f"{name}\n{dtype.name}\n{','.join(map(str, shape))}"
    words = np.frombuffer(sha256(text.encode()).digest(), "<u8")
    return TensorKey(words[0], Digest(int(words[1]), int(words[2])))


def box_digest(key: TensorKey, box: Box, bits: Elements, workers: Workers = SERIAL) -> Digest:
    """The contribution of a box to the digest of its tensor, without the tensor's constant."""
    starts, length = box.runs()
    return runs_digest(key, starts, length, bits, workers)


def runs_digest(key: TensorKey, starts: Positions, length: int, bits: Elements, workers: Workers) -> Digest:
    """Like `box_digest`, for runs of consecutive elements of the tensor: `length` from each of `starts`."""
    from deltawire.kernels.cpu.sums import sum_runs

    is_single = len(starts) == 1
    step = _CHUNK if is_single else max(_CHUNK // max(length, 1), 1)

    def part(at: int) -> Digest:
        if is_single:
            stretch = bits[at : at + step]
            return from_sums(sum_runs(stretch, starts + at, len(stretch), key.seed))
        some = bits[at * length : (at + step) * length]
        return from_sums(sum_runs(some, starts[at : at + step], length, key.seed))

    return sum(workers.map(part, range(0, length if is_single else len(starts), step)), Digest())


def change_digest(key: TensorKey, positions: Positions, old: Bits, new: Bits) -> Digest:
    """What the digest of a tensor gains when the elements at `positions` change from `old` to `new` bits."""
    from deltawire.kernels.cpu.sums import sum_change

    return from_sums(sum_change(old, new, positions, key.seed))


def tensor_digest(name: str, tensor: Tensor, workers: Workers = SERIAL) -> Digest:
    key = tensor_key(name, tensor.dtype, tensor.shape)
    return key.constant + box_digest(key, Box.whole(tensor.shape), tensor.bits, workers)


def digest(
    weights: Weights, *, dtype: DTypeChoice = None, tied: Ties | None = None, threads: int | None = None
) -> Digest:
    """Compute the digest of weights.

    Args:
        weights: Arrays or tensors by name, a `Checkpoint`, or a torch module (its `state_dict()` is used unchanged).
        dtype: What the bits of integer arrays mean (bf16 kept as uint16): one dtype, or a mapping from tensor names.
        tied: Names that share the weights of another name. They are left out, as they are in a checkpoint and in the
            digest of a version: `replica.run.manifest(version).tied`.
        threads: Number of threads (default: all available cores).

    Returns:
        The digest, equal for equal names, dtypes, shapes and bits.
    """
    weights = mapping_of(weights)
    names = [name for name in weights if name not in (tied or {})]

    def one(name: str, workers: Workers) -> Digest:
        return tensor_digest(name, view(name, weights[name], dtype), workers)

    with Workers(threads) as workers:
        parts = workers.spread(names, lambda name: num_elements(weights, name), one)
        return sum((part for _, part in parts), Digest())
