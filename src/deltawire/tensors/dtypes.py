"""The supported dtypes. All are handled as bit patterns; only the encoding `context` interprets them."""

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltawire.errors import NotEnoughMemory, UnsupportedFormat
from deltawire.tensors.boxes import Shape

Bits = npt.NDArray[np.unsignedinteger]


class Elements(Protocol):
    """Flat bits that are read slice by slice: an array, or an object that produces each slice on demand."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, stretch: slice, /) -> Bits: ...


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype as the codec sees it.

    `exponent_shift` and `exponent_mask` extract the exponent from the bits (mask 0: there is none). With
    `sign_magnitude` the top bit is a sign, so that bit patterns of negative numbers are in descending order.
    """

    name: str
    itemsize: int
    exponent_shift: int = 0
    exponent_mask: int = 0
    sign_magnitude: bool = False

    @property
    def unsigned(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integer of the same width."""
        return np.dtype(f"<u{self.itemsize}")


def _float(name: str, itemsize: int, mantissa_bits: int, exponent_bits: int) -> DType:
    return DType(name, itemsize, mantissa_bits, (1 << exponent_bits) - 1, sign_magnitude=True)


# Keyed by the names that safetensors uses.
DTYPES = {
    dtype.name: dtype
    for dtype in (
        _float("BF16", 2, 7, 8),
        _float("F16", 2, 10, 5),
        _float("F32", 4, 23, 8),
        _float("F64", 8, 52, 11),
        _float("F8_E4M3", 1, 3, 4),
        _float("F8_E5M2", 1, 2, 5),
        DType("F8_E8M0", 1),
        DType("BOOL", 1),
        *(DType(f"{sign}{8 * size}", size) for sign in "IU" for size in (1, 2, 4, 8)),
    )
}

# Their names in numpy, ml_dtypes and torch.
ALIASES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


def dtype_named(dtype: Any, tensor: str | None = None) -> DType:
    """Look up a dtype by its name in safetensors, numpy or torch, or from a numpy or torch dtype.

    `tensor` is the name of the tensor that has it, for the error.
    """
    name = _name_of(dtype)
    try:
        return DTYPES[ALIASES.get(name, name)]
    except KeyError:
        known, where = ", ".join(sorted(DTYPES)), "" if tensor is None else f"{tensor}: "
        problem = f"{where}dtype {name!r} is not supported, only {known}"
        raise UnsupportedFormat(problem, actual=name, tensor=tensor) from None


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if isinstance(dtype, DType):
        return dtype.name
    if type(dtype).__module__.partition(".")[0] == "torch":
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, (np.dtype, type)):
        return np.dtype(dtype).name
    raise TypeError(f"a dtype must be a name such as 'BF16', or a dtype of torch or numpy, not {type(dtype).__name__}")


def empty_bits(shape: Shape, dtype: DType, what: str) -> Bits:
    """Allocate a flat array for a tensor, or raise NotEnoughMemory."""
    try:
        return np.empty(prod(shape), dtype.unsigned)
    except (MemoryError, ValueError):  # ValueError: more than the address space
        raise no_room(what, prod(shape) * dtype.itemsize) from None


def no_room(what: str, num_bytes: int) -> NotEnoughMemory:
    return NotEnoughMemory(
        f"{what} takes {num_bytes:,} bytes of memory, which are not available: free some, or use a machine with more",
        num_bytes=num_bytes,
    )
