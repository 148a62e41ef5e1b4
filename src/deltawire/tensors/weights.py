"""Weights of numpy, ml_dtypes and torch viewed as flat arrays of unsigned integers, and written in place."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from deltawire.tensors.boxes import Positions, Shape
from deltawire.tensors.dtypes import ALIASES, DTYPES, Bits, DType, dtype_named, no_room
from deltawire.tensors.names import Ties

Weights = Mapping[str, Any]
# One dtype for all, or a mapping from tensor names: a dtype's name, or a dtype of torch or numpy.
DTypeChoice = Any

# The dtype (its safetensors name) and the shape of a tensor.
TensorSpec = tuple[str, Shape]

# Address, shape, strides, dtype and what else tells two tensors apart.
Place = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """The bits of one tensor, flat and contiguous, with its dtype and shape."""

    dtype: DType
    shape: Shape
    bits: Bits


Tensors = Mapping[str, Tensor]
Specs = Mapping[str, TensorSpec]


def view(name: str, value: Any, dtype: DTypeChoice = None) -> Tensor:
    """View an array or a tensor as bits, without a copy if it is contiguous and in host memory.

    `dtype` is what the bits mean, if not what the array's own dtype says: bf16 may be kept as 16-bit integers.
    """
    if isinstance(value, Tensor):
        return value
    if is_torch(value):
        if hasattr(value, "to_local"):
            raise TypeError(f"{name} is a DTensor: pass its local shard and box, or gather it first")
        check_plain(name, value)
        array = torch_view(value.detach().resolve_neg().contiguous().view(-1))
    elif isinstance(value, (np.ndarray, np.generic)):
        try:
            native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
            array = np.ascontiguousarray(native)
        except MemoryError:
            raise no_room(f"a contiguous copy of {name}", value.nbytes) from None
    else:
        raise TypeError(f"{name}: expected a numpy array or a torch tensor, got {type(value).__name__}")
    stated = dtype.get(name) if isinstance(dtype, Mapping) else dtype
    kind = dtype_named(value.dtype if stated is None else stated, name)
    if kind.itemsize != array.dtype.itemsize:
        raise ValueError(
            f"{name}: dtype {kind.name} has {kind.itemsize} bytes, but the array's items have {array.dtype.itemsize}"
        )
    own = getattr(value.dtype, "name", str(value.dtype)).removeprefix("torch.")
    if ("float" in own or "complex" in own) and ALIASES.get(own) != kind.name:
        raise ValueError(
            f"{name}: dtype {kind.name} is what the bits of integers mean, but the array is {own}: cast it first, or "
            "leave dtype out"
        )
    return Tensor(kind, tuple(value.shape), array.reshape(-1).view(kind.unsigned))


def mapping_of(weights: Any) -> Weights:
    """Weights by name, from a mapping or from the `state_dict` of a torch module."""
    if hasattr(weights, "state_dict") and not isinstance(weights, Mapping):
        weights = weights.state_dict()
    if not isinstance(weights, Mapping):
        raise TypeError(f"expected weights by name (a mapping, or a torch module), got {type(weights).__name__}")
    return weights


class Viewed(Mapping[str, Tensor]):
    """Weights as bits, each tensor viewed on access; tied names are left out."""

    def __init__(self, weights: Weights, dtype: DTypeChoice = None, tied: Ties | None = None) -> None:
        self._weights, self._dtype = weights, dtype
        self._names = [name for name in weights if name not in (tied or {})]

    def __getitem__(self, name: str) -> Tensor:
        return view(name, self._weights[name], self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def spec(self, name: str) -> TensorSpec:
        return spec(self._weights, name, self._dtype)

    def num_elements(self, name: str) -> int:
        return num_elements(self._weights, name)


def tied_names(weights: Weights) -> dict[str, str]:
    """Names whose tensor is the same memory as an earlier name's, such as tied embeddings."""
    stated = getattr(weights, "tied", None)
    if stated is not None:
        return dict(stated)
    first: dict[Place, str] = {}
    tied, alive = {}, []
    for name in weights:
        value = weights[name]
        where = place(value)
        # A tensor that is created on each access is not shared.
        if where is None or ((again := weights[name]) is not value and place(again) != where):
            continue
        # Keep it alive: the address of a freed tensor may be reused by another one.
        alive.append(value)
        to = first.setdefault(where, name)
        if to != name:
            tied[name] = to
    return tied


def untied_name(weights: Weights, tied: Ties, dtype: DTypeChoice = None) -> str | None:
    """A tied name whose weights differ from those it is tied to, if any; names that are absent are skipped."""
    for name, to in tied.items():
        if name not in weights or to not in weights:
            continue
        value, other = weights[name], weights[to]
        where = place(value)
        if where is not None and where == place(other):
            continue
        mine, others = view(name, value, dtype), view(to, other, dtype)
        if (mine.dtype, mine.shape) != (others.dtype, others.shape) or not np.array_equal(mine.bits[:], others.bits[:]):
            return name
    return None


def place(value: Any) -> Place | None:
    """The memory location of a tensor: equal for two live tensors only if they are the same. None if it is empty."""
    if isinstance(value, Tensor):
        where = place(value.bits)
        return None if where is None else (*where, value.dtype.name, value.shape)
    if hasattr(value, "to_local"):
        return (id(value),)  # a rank may hold no part of it; if tied, it is one object under two names
    if is_torch(value):
        if not value.numel() or value.is_meta or value.layout != sys.modules["torch"].strided:
            return None
        return (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_neg())
    if isinstance(value, np.ndarray) and value.size:
        # Several dtypes of ml_dtypes have the same `str`; the name says nothing of the byte order.
        dtype = value.dtype.str, value.dtype.name
        return (value.__array_interface__["data"][0], value.shape, value.strides, dtype)
    return None


def num_elements(weights: Weights, name: str) -> int:
    """The number of elements of a tensor, without reading it if the weights are a checkpoint on disk."""
    count = getattr(weights, "num_elements", None)
    return count(name) if count is not None else prod(getattr(weights[name], "shape", ()))


def spec(weights: Weights, name: str, dtype: DTypeChoice = None) -> TensorSpec:
    """The dtype and shape of a tensor, without reading it if the weights are a checkpoint on disk."""
    known: Callable[[str], TensorSpec] | None = getattr(weights, "spec", None)
    if known is not None:
        return known(name)
    tensor = view(name, weights[name], dtype)
    return tensor.dtype.name, tensor.shape


def num_bytes_of(spec: TensorSpec) -> int:
    dtype, shape = spec
    return prod(shape) * DTYPES[dtype].itemsize


def read(bits: Bits, positions: Positions) -> Bits:
    """Elements of flat bits by position."""
    from deltawire.kernels.cpu.elements import elements_at

    # The kernel would be compiled again for what is read-only.
    found: Bits = elements_at(bits, positions) if bits.flags.writeable else bits[positions]
    return found


def write(value: Any, positions: Positions | slice, bits: Bits) -> None:
    """Set elements of an array or tensor by flat position."""
    if is_torch(value) and value.device.type != "cpu":  # pragma: no mutate block
        import torch

        flat = value.detach().view(-1).view(_torch_integer(value.element_size()))
        fresh = torch.from_numpy(bits.view(f"<i{bits.dtype.itemsize}")).to(value.device)
        where = positions if isinstance(positions, slice) else torch.from_numpy(positions).to(value.device)
        flat[where] = fresh
        return
    # A subclass may keep two dimensions (a matrix), or ignore what is written (a masked array).
    array = torch_view(value.detach().view(-1)) if is_torch(value) else np.asarray(_array(value))
    array.reshape(-1).view(bits.dtype)[positions] = bits


def writables(weights: Weights, names: Iterable[str], tied: Ties) -> dict[str, list[Any]]:
    """What to write for each name, checked by `writable`: its own tensor and those tied to it, if they are there."""
    aliases: dict[str, list[str]] = {}
    for name, to in tied.items():
        aliases.setdefault(to, []).append(name)
    wanted = {name: [each for each in (name, *aliases.get(name, [])) if each in weights] for name in names}
    values = writable(weights, [each for some in wanted.values() for each in some], tied)
    return {name: [values[each] for each in some] for name, some in wanted.items()}


def writable(weights: Weights, names: Iterable[str], tied: Ties) -> dict[str, Any]:
    """Tensors by name, checked: writing to one in place changes that and nothing else but names tied to the same."""
    values = {}
    for name in names:
        value = values[name] = weights[name]
        check_writable(name, value)
        if place(weights[name]) != place(value):
            raise ValueError(f"{name}: the target returns a new copy on each access, so writes would be lost")
    end, before = ("", 0), ""
    for device, start, stop, name in sorted(_span(value, name) for name, value in values.items()):
        if (device, start) < end and not (
            tied.get(name, name) == tied.get(before, before) and place(values[name]) == place(values[before])
        ):
            raise ValueError(
                f"{before} and {name} share memory at the target, but are two tensors in the run: give each its own, "
                "or tie them at the trainer"
            )
        if (device, stop) > end:
            end, before = (device, stop), name
    return values


def _array(value: Any) -> Any:
    return value.bits if isinstance(value, Tensor) else value


def _span(value: Any, name: str) -> tuple[str, int, int, str]:
    """The memory range of a contiguous tensor."""
    if is_torch(value):
        return str(value.device), value.data_ptr(), value.data_ptr() + value.numel() * value.element_size(), name
    start = _array(value).__array_interface__["data"][0]
    return "cpu", start, start + _array(value).nbytes, name


def check_writable(name: str, value: Any) -> None:
    """Reject tensors that `write` cannot change in place."""
    value, of_torch = _array(value), is_torch(value)
    if of_torch:
        check_plain(name, value)
    if not (value.is_contiguous() if of_torch else value.flags.c_contiguous):
        raise ValueError(f"{name} is not contiguous, so it cannot be changed in place; pass a contiguous array")
    if of_torch and value.is_neg():
        raise ValueError(f"{name} is a lazy negation of another tensor's memory; pass a copy, with resolve_neg()")
    if not of_torch and not value.flags.writeable:
        raise ValueError(f"{name} is read-only; pass an array that can be changed")
    if not of_torch and not value.dtype.isnative:
        raise ValueError(f"{name} is in the other byte order; pass an array in this machine's byte order")


def is_torch(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    return _is_torch_type(type(value))  # type: ignore[arg-type]


@cache
def _is_torch_type(kind: type) -> bool:
    return hasattr(kind, "data_ptr") and any(each.__module__ == "torch" for each in kind.__mro__)


def _torch_integer(itemsize: int) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]


def check_plain(name: str, value: Any) -> None:
    """Reject torch tensors that are not plain dense ones: meta, sparse, quantized or wrapper tensors."""
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, where tensors have no values: load the weights first")
    if str(value.layout) != "torch.strided":
        raise ValueError(f"{name} is a sparse tensor ({value.layout}): pass a dense one, with to_dense()")
    is_wrapper = hasattr(value, "__tensor_flatten__") and not hasattr(value, "to_local")
    if value.is_quantized or is_wrapper:
        kind = type(value).__name__ if is_wrapper else "quantized"
        raise TypeError(
            f"{name} is {kind}, not a plain dense tensor: publish the model that it was made from, or a mapping of "
            "the plain tensors that it consists of"
        )


def torch_view(flat: Any) -> Bits:
    """The bits of a flat tensor, without a copy if it is in host memory."""
    signed = flat.view(_torch_integer(flat.element_size()))
    if signed.is_cuda:  # pragma: no mutate block
        import torch

        # Into page-locked memory, which torch caches for the next call.
        signed = torch.empty(signed.shape, dtype=signed.dtype, device="cpu", pin_memory=True).copy_(signed)
    bits: Bits = signed.cpu().numpy().view(f"<u{flat.element_size()}")
    return bits
