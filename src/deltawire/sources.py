"""Where a publisher's weights come from: a mapping, a function that returns one, or a torch module as it trains."""

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, cast

from deltawire.dtypes import Bits, DType, dtype_named
from deltawire.weights import DTypeChoice, Form, Tensor, Viewed, Weights, tied_names, torch_view

# What wrappers put into the names of parameters: data parallel; torch.compile, activation checkpointing, FSDP; PEFT.
_WRAPPERS = re.compile(
    r"^(?:module\.)+|(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
    r"|^base_model\.model\.|(?<=\.)base_layer\."
)


def plain_name(name: str) -> str:
    """A parameter's name as the model's own code has it.

    >>> plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.q.weight")
    'layers.0.q.weight'
    """
    while (shorter := _WRAPPERS.sub("", name)) != name:
        name = shorter
    return name


class TorchBits:
    """A torch tensor's bits in the dtype that it is published in, cast and brought to the host a stretch at a time."""

    def __init__(self, tensor: Any, dtype: DType, torch_dtype: Any) -> None:
        self._flat = tensor.detach().contiguous().view(-1)
        self._dtype, self._torch_dtype = dtype, torch_dtype

    @property
    def nbytes(self) -> int:
        return len(self) * self._dtype.itemsize

    def __len__(self) -> int:
        return int(self._flat.numel())

    def __getitem__(self, stretch: slice, /) -> Bits:
        part = self._flat[stretch]
        return torch_view(part if part.dtype == self._torch_dtype else part.to(self._torch_dtype))


class ModuleWeights(Mapping[str, Tensor]):
    """The parameters of a module as they are now, under their plain names, floats in one dtype."""

    def __init__(self, tensors: Mapping[str, Any], dtype: str, fixed: frozenset[str]) -> None:
        import torch

        self.tied = tied_names(tensors)
        self.fixed = fixed
        """Names whose weights do not train, and so need not be compared."""
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in self.tied}
        self._published = dtype_named(dtype)
        self._torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}[
            self._published.name
        ]

    def _dtypes(self, name: str) -> tuple[DType, Any]:
        own = self._tensors[name].dtype
        if own.is_floating_point and own.itemsize > 1:
            return self._published, self._torch_dtype
        return dtype_named(str(own).removeprefix("torch.")), own

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if hasattr(tensor, "to_local"):
            raise TypeError(f"{name} is a DTensor: sharded modules are not published from one process")
        bits = TorchBits(tensor, *self._dtypes(name))
        return Tensor(self._dtypes(name)[0], tuple(tensor.shape), cast(Bits, bits))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def form(self, name: str) -> Form:
        return self._dtypes(name)[0].name, tuple(self._tensors[name].shape)

    def num_elements(self, name: str) -> int:
        return prod(self._tensors[name].shape)


def module_source(
    module: Any, *, dtype: str | None = None, frozen: bool = False, buffers: bool = False
) -> Callable[[], ModuleWeights]:
    """The parameters of a torch module, read anew for each version.

    Floats of two bytes and more are published as `dtype` (bf16 unless told otherwise), cast as torch casts them. What
    does not require gradients is in anchors but is not compared, unless `frozen` asks for it. `buffers` adds the
    persistent buffers. Names are those of the bare model, whatever has wrapped it.
    """
    published = dtype_named(dtype or "BF16").name
    if published not in ("BF16", "F16", "F32", "F64"):
        raise ValueError(f"a module is published as BF16, F16, F32 or F64, not {published}")

    def read() -> ModuleWeights:
        tensors = {plain_name(name): tensor for name, tensor in module.named_parameters(remove_duplicate=False)}
        fixed = frozenset() if frozen else frozenset(name for name in tensors if not tensors[name].requires_grad)
        if buffers:
            kept = module.state_dict()
            named = dict(module.named_buffers(remove_duplicate=False))
            tensors |= {plain_name(name): named[name] for name in named if name in kept}
        return ModuleWeights(tensors, published, fixed)

    return read


def source_of(weights: Any, dtype: DTypeChoice) -> Callable[[], Weights]:
    """What to call for the weights as they are."""
    if hasattr(weights, "named_parameters"):
        if isinstance(dtype, Mapping):
            raise ValueError("a module is published in one dtype")
        return module_source(weights, dtype=dtype)
    if isinstance(weights, Mapping):
        return lambda: weights
    if callable(weights):
        return cast(Callable[[], Weights], weights)
    raise TypeError(f"expected a mapping, a torch module or a function, got {type(weights).__name__}")


def as_bits(weights: Weights, dtype: DTypeChoice, tied: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Weights as a history takes them."""
    return weights if isinstance(weights, ModuleWeights) else Viewed(weights, dtype, tied)
