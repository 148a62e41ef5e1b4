"""Weights as callers have them (numpy, ml_dtypes, torch) seen as flat arrays of unsigned integers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from deltawire.boxes import Box, Positions
from deltawire.dtypes import Bits, DType, dtype_named, no_room

Weights = Mapping[str, Any]
# One dtype for all, or a mapping from the names of tensors: by name, or as torch and numpy have them.
DTypeChoice = Any

# A tensor's dtype, as safetensors calls it, and shape.
Form = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's bits, flat and contiguous, with what they mean."""

    dtype: DType
    shape: tuple[int, ...]
    bits: Bits


def view(name: str, value: Any, dtype: DTypeChoice = None) -> Tensor:
    """See a numpy array or a torch tensor as bits, without copying where it is contiguous and in host memory.

    `dtype` says what the bits mean where the array's own dtype does not (bf16 kept as 16-bit integers): one name for
    all, or a mapping from tensor names.
    """
    if isinstance(value, Tensor):
        return value
    if _is_torch(value):
        array, own = _torch_bits(name, value)
    elif isinstance(value, (np.ndarray, np.generic)):
        try:
            array, own = np.ascontiguousarray(value), value.dtype.name
        except MemoryError:
            raise no_room(f"a contiguous copy of {name}", value.nbytes) from None
    else:
        raise TypeError(f"{name}: expected a numpy array or a torch tensor, got {type(value).__name__}")
    stated = dtype.get(name) if isinstance(dtype, Mapping) else dtype
    kind = dtype_named(own if stated is None else stated)
    if kind.itemsize != array.dtype.itemsize:
        raise ValueError(
            f"{name}: dtype {kind.name} has {kind.itemsize} bytes, the array's items {array.dtype.itemsize}"
        )
    return Tensor(kind, tuple(value.shape), array.reshape(-1).view(kind.unsigned))


def mapping_of(weights: Any) -> Weights:
    """Weights by name: a mapping itself, or what a torch module's `state_dict` has."""
    if hasattr(weights, "state_dict") and not isinstance(weights, Mapping):
        weights = weights.state_dict()
    if not isinstance(weights, Mapping):
        raise TypeError(f"expected weights by name (a mapping, or a torch module), got {type(weights).__name__}")
    return weights


class Viewed(Mapping[str, Tensor]):
    """Weights as bits, each tensor seen when it is asked for; tied names are left out."""

    def __init__(self, weights: Weights, dtype: DTypeChoice = None, tied: Mapping[str, str] | None = None) -> None:
        self._weights, self._dtype = weights, dtype
        self._names = [name for name in weights if name not in (tied or {})]

    def __getitem__(self, name: str) -> Tensor:
        return view(name, self._weights[name], self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def form(self, name: str) -> Form:
        return (
            form(self._weights, name) if hasattr(self._weights, "form") else (self[name].dtype.name, self[name].shape)
        )

    def num_elements(self, name: str) -> int:
        return num_elements(self._weights, name)


def tied_names(weights: Weights) -> dict[str, str]:
    """Names that share all their memory with a name before them, as tied embeddings do."""
    stated = getattr(weights, "tied", None)
    if stated is not None:
        return dict(stated)
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name in weights:
        value = weights[name]
        address = _address(value)
        shape = tuple(getattr(value, "shape", ()))
        if address is None or not prod(shape):
            continue
        to = first.setdefault((address, shape, str(getattr(value, "dtype", ""))), name)
        if to != name:
            tied[name] = to
    return tied


def boxes_of(weights: Weights) -> Mapping[str, Box]:
    """Which part of its tensor each of some weights is, where that is not the whole."""
    boxes: Mapping[str, Box] = getattr(weights, "boxes", {})
    return boxes


def _address(value: Any) -> Any:
    if hasattr(value, "to_local"):
        return id(value)  # a DTensor has no address; tied, it is one object under two names
    if _is_torch(value):
        return value.data_ptr()
    return getattr(value, "__array_interface__", {"data": None})["data"]


def num_elements(weights: Weights, name: str) -> int:
    """A tensor's size, without reading it where the weights are a checkpoint on disk."""
    count = getattr(weights, "num_elements", None)
    return count(name) if count is not None else prod(getattr(weights[name], "shape", ()))


def form(weights: Weights, name: str) -> Form:
    """A tensor's dtype and shape, without reading it where the weights are a checkpoint on disk."""
    known = getattr(weights, "form", None)
    if known is not None:
        stated: Form = known(name)
        return stated
    tensor = view(name, weights[name])
    return tensor.dtype.name, tensor.shape


def write(value: Any, positions: Positions | slice, bits: Bits) -> None:
    """Set elements of an array or tensor, by flat position."""
    if isinstance(value, Tensor):
        value.bits[positions] = bits
        return
    if _is_torch(value) and value.device.type != "cpu":
        import torch

        flat = value.detach().view(-1).view(_torch_integer(value.element_size()))
        fresh = torch.from_numpy(bits.view(f"<i{bits.dtype.itemsize}")).to(value.device)
        where = positions if isinstance(positions, slice) else torch.from_numpy(positions).to(value.device)
        flat[where] = fresh
        return
    array = _torch_bits("", value)[0] if _is_torch(value) else value
    array.reshape(-1).view(bits.dtype)[positions] = bits


def check_real(name: str, value: Any) -> None:
    """Refuse a tensor that has a shape and no values."""
    if getattr(value, "is_meta", False):
        raise ValueError(f"{name} is on the meta device, where tensors have no values: load the weights first")
    if getattr(value, "is_sparse", False) or getattr(value, "is_sparse_csr", False):
        raise ValueError(f"{name} is a sparse tensor: give it as a dense one, with to_dense()")


def check_writable(name: str, value: Any) -> None:
    """Refuse what `write` could not change in place."""
    check_real(name, value)
    value = value.bits if isinstance(value, Tensor) else value
    contiguous = value.is_contiguous() if _is_torch(value) else value.flags.c_contiguous
    if not contiguous:
        raise ValueError(f"{name} is not contiguous, so it cannot be changed in place; pass a contiguous array")
    if not _is_torch(value) and not value.flags.writeable:
        raise ValueError(f"{name} is read-only; pass an array that can be changed")


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr")


def _torch_integer(itemsize: int) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]


def _torch_bits(name: str, value: Any) -> tuple[np.ndarray[Any, Any], str]:
    if hasattr(value, "to_local"):
        raise TypeError(f"{name} is a DTensor: pass its local shard and box, or gather it first")
    check_real(name, value)
    return torch_view(value.detach().contiguous().view(-1)), str(value.dtype).removeprefix("torch.")


def torch_view(flat: Any) -> Bits:
    """A flat tensor's bits; in host memory they are its own."""
    signed = flat.view(_torch_integer(flat.element_size()))
    if signed.is_cuda:
        import torch

        # Into page-locked memory, which torch keeps for the next time.
        signed = torch.empty(signed.shape, dtype=signed.dtype, pin_memory=True).copy_(signed)
    bits: Bits = signed.cpu().numpy().view(f"<u{flat.element_size()}")
    return bits
