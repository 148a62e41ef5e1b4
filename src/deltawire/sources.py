"""Where a publisher's weights come from: a mapping, a function that returns one, or a torch module as it trains."""

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, cast

from deltawire.boxes import Box
from deltawire.dtypes import Bits, DType, dtype_named
from deltawire.errors import UnsupportedPlacement
from deltawire.weights import DTypeChoice, Form, Tensor, Viewed, Weights, check_real, tied_names, torch_view

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

    def tensor(self, name: str) -> Any:
        """The torch tensor itself."""
        return self._tensors[name].detach()

    def dtype_of(self, name: str) -> DType:
        """The dtype that a tensor is published in."""
        return self._dtypes(name)[0]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
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


class ShardedWeights(ModuleWeights):
    """What one rank publishes of a module whose parameters are spread over ranks: its own boxes of them.

    Of replicas the first holds the box; of plain tensors, which every rank has, rank 0 (`has_plain`) holds the whole.
    """

    def __init__(self, tensors: Mapping[str, Any], dtype: str, fixed: frozenset[str], has_plain: bool) -> None:
        super().__init__(tensors, dtype, fixed)
        self.forms = {name: super(ShardedWeights, self).form(name) for name in self._tensors}
        """Dtypes and shapes of all tensors, whole, also of those that this rank holds nothing of."""
        self.boxes: dict[str, Box] = {}
        for name, tensor in self._tensors.items():
            if hasattr(tensor, "to_local"):
                box = held_box(name, tensor)
            else:
                box = Box.whole(tuple(tensor.shape)) if has_plain else None
            if box is not None:
                self.boxes[name] = box
        self._tensors = {name: local_part(self._tensors[name]) for name in self.boxes}

    def form(self, name: str) -> Form:
        return self.forms[name]


def local_part(tensor: Any) -> Any:
    """What of a tensor is on this rank."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def is_sharded(module: Any) -> bool:
    """Whether a module has parameters that are spread over ranks."""
    return any(hasattr(parameter, "to_local") for parameter in module.parameters())


def check_whole(module: Any) -> None:
    """Refuse a module whose parameters are in pieces that nothing tells apart from whole tensors."""
    if any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules()):
        raise UnsupportedPlacement(
            "the first FSDP has cut the parameters into pieces without a shape: use FSDP2 (fsdp_version: 2)"
        )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id") and not parameter.numel():
            raise UnsupportedPlacement(
                f"{name} is spread over ranks by ZeRO-3, which gives no pieces of it: use ZeRO-2 or FSDP2", tensor=name
            )


def held_box(name: str, tensor: Any) -> Box | None:
    """The box of a DTensor that this rank publishes; None where another one does.

    A dimension is cut as torch cuts it, into chunks of equal size but the last ones. Several mesh dimensions cut it one
    after the other, a `_StridedShard` after those behind it: that is how FSDP cuts what tensor parallelism has cut.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    cuts, strided = [], []
    for axis, placement in enumerate(tensor.placements):
        if hasattr(placement, "split_factor"):
            behind = prod(
                mesh.size(i)
                for i, each in enumerate(tensor.placements)
                if i > axis and getattr(each, "dim", None) == placement.dim
            )
            if placement.split_factor != behind:
                raise _unsupported(name, placement)
            strided.append(axis)
        elif placement.is_shard():
            cuts.append(axis)
        elif not placement.is_replicate():
            raise _unsupported(name, placement)
    full = tuple(tensor.shape)
    offset, shape = [0] * len(full), list(full)
    for axis in cuts + strided[::-1]:
        dim = tensor.placements[axis].dim
        step = -(-shape[dim] // mesh.size(axis))
        start = min(coordinate[axis] * step, shape[dim])
        offset[dim], shape[dim] = offset[dim] + start, min(step, shape[dim] - start)
    box = Box(full, tuple(offset), tuple(shape))
    if tuple(local_part(tensor).shape) != box.shape:
        raise _unsupported(name, tensor.placements)
    is_first = all(coordinate[axis] == 0 for axis, each in enumerate(tensor.placements) if each.is_replicate())
    return box if is_first else None


def _unsupported(name: str, placement: object) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        f"{name} is placed as {placement!r}, which has no box on each rank: publish parameters that are sharded or "
        "replicated",
        tensor=name, actual=repr(placement),
    )  # fmt: skip


def module_source(
    module: Any, *, dtype: Any = None, frozen: bool = False, buffers: bool = False
) -> Callable[[], ModuleWeights]:
    """The parameters of a torch module, read anew for each version.

    Floats of two bytes and more are published as `dtype` (bf16 unless told otherwise), cast as torch casts them. What
    does not require gradients is in anchors but is not compared, unless `frozen` asks for it. `buffers` adds the
    persistent buffers. Names are those of the bare model, whatever has wrapped it.
    """
    published = _published(dtype)

    def read() -> ModuleWeights:
        tensors, fixed = _named_tensors(module, frozen, buffers)
        for name, tensor in tensors.items():
            if hasattr(tensor, "to_local"):
                raise TypeError(f"{name} is a DTensor: publish from all ranks, with ShardedPublisher")
        return ModuleWeights(tensors, published, fixed)

    return read


def sharded_source(
    module: Any, *, has_plain: bool, dtype: Any = None, frozen: bool = False, buffers: bool = False
) -> Callable[[], ShardedWeights]:
    """What this rank publishes of a module with DTensor parameters, read anew for each version; see `module_source`."""
    from torch.distributed.fsdp import FSDPModule

    published = _published(dtype)

    def read() -> ShardedWeights:
        # After a forward pass without a backward pass FSDP leaves some parameters gathered.
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        tensors, fixed = _named_tensors(module, frozen, buffers)
        return ShardedWeights(tensors, published, fixed, has_plain)

    return read


def _published(dtype: Any) -> str:
    published = dtype_named("BF16" if dtype is None else dtype).name
    if published not in ("BF16", "F16", "F32", "F64"):
        raise ValueError(f"a module is published as BF16, F16, F32 or F64, not {published}")
    return published


def _named_tensors(module: Any, frozen: bool, buffers: bool) -> tuple[dict[str, Any], frozenset[str]]:
    """A module's tensors by their plain names, and which of them do not train."""
    tensors = {plain_name(name): tensor for name, tensor in module.named_parameters(remove_duplicate=False)}
    fixed = frozenset() if frozen else frozenset(name for name in tensors if not tensors[name].requires_grad)
    if buffers:
        kept = module.state_dict()
        named = dict(module.named_buffers(remove_duplicate=False))
        tensors |= {plain_name(name): named[name] for name in named if name in kept}
    for name, tensor in tensors.items():
        check_real(name, tensor)
    return tensors, fixed


def source_of(weights: Any, dtype: DTypeChoice) -> Callable[[], Weights]:
    """What to call for the weights as they are."""
    if hasattr(weights, "named_parameters"):
        if isinstance(dtype, Mapping):
            raise ValueError("a module is published in one dtype")
        return module_source(weights, dtype=dtype)
    if isinstance(weights, Mapping):
        return lambda: weights
    if callable(weights):
        return lambda: _named(weights())
    raise TypeError(f"expected a mapping, a torch module or a function, got {type(weights).__name__}")


def _named(weights: Any) -> Weights:
    if not isinstance(weights, Mapping):
        raise TypeError(f"the function for weights must return them by name, not {type(weights).__name__}")
    return weights


def as_bits(weights: Weights, dtype: DTypeChoice, tied: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Weights as a history takes them."""
    return weights if isinstance(weights, ModuleWeights) else Viewed(weights, dtype, tied)
