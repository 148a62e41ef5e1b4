"""Where a publisher's weights come from: a mapping, a function that returns one, or a torch module as it trains."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, cast

from deltawire.boxes import Box
from deltawire.dtypes import Bits, DType, dtype_named
from deltawire.errors import UnsupportedPlacement
from deltawire.weights import DTypeChoice, Form, Tensor, Viewed, Weights, check_plain, is_torch, tied_names, torch_view

# What wrappers put into the names of parameters: data parallel; torch.compile, activation checkpointing, FSDP; PEFT.
_WRAPPERS = re.compile(
    r"^(?:module\.)+|(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
    r"|^base_model\.model\.|(?<=\.)base_layer\."
)


TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


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
    """What a module's `state_dict` holds now, under plain names: parameters in the dtypes that they are published in.

    Buffers keep their own dtypes.
    """

    def __init__(self, tensors: Mapping[str, Any], dtypes: Mapping[str, str], fixed: frozenset[str]) -> None:
        self.live = tensors
        """All torch tensors, tied ones too."""
        # The same elements in two dtypes are two tensors.
        self.tied = {name: to for name, to in tied_names(tensors).items() if dtypes.get(name) == dtypes.get(to)}
        self.fixed = fixed
        """Names whose weights are promised not to change, and so are not compared."""
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in self.tied}
        self._stated = dtypes

    def _dtypes(self, name: str) -> tuple[DType, Any]:
        import torch

        own = self._tensors[name].dtype
        stated = self._stated.get(name)
        if stated is None:
            return dtype_named(str(own).removeprefix("torch.")), own
        return dtype_named(stated), getattr(torch, TORCH_NAMES[stated])

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

    def __init__(
        self, tensors: Mapping[str, Any], dtypes: Mapping[str, str], fixed: frozenset[str], has_plain: bool
    ) -> None:
        super().__init__(tensors, dtypes, fixed)
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


def module_source(module: Any, *, dtype: DTypeChoice = None, frozen: Sequence[str] = ()) -> Callable[[], ModuleWeights]:
    """What a torch module's `state_dict` holds, read anew for each version, under the names of the bare model.

    Parameters are published as `dtype` (bf16 unless told otherwise; a mapping from names states exceptions), cast as
    torch casts them; buffers as they are. `frozen` names what will not change, by patterns such as `visual.*`: it is in
    anchors and is not compared.
    """
    check_whole(module)

    def read() -> ModuleWeights:
        tensors, dtypes = _named_tensors(module, dtype)
        for name, tensor in tensors.items():
            if hasattr(tensor, "to_local"):
                raise TypeError(f"{name} is a DTensor: publish from all ranks, with ShardedPublisher")
        return ModuleWeights(tensors, dtypes, matching_names(tensors, frozen))

    return read


def sharded_source(
    module: Any, *, has_plain: bool, dtype: DTypeChoice = None, frozen: Sequence[str] = ()
) -> Callable[[], ShardedWeights]:
    """What this rank publishes of a module with DTensor parameters, read anew for each version; see `module_source`."""
    from torch.distributed.fsdp import FSDPModule

    def read() -> ShardedWeights:
        # After a forward pass without a backward pass FSDP leaves some parameters gathered.
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        tensors, dtypes = _named_tensors(module, dtype)
        return ShardedWeights(tensors, dtypes, matching_names(tensors, frozen), has_plain)

    return read


def matching_names(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """The names that match at least one of some patterns; each must match one."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"frozen is a list of names or patterns such as 'visual.*', got {patterns!r}")
    names, found = list(names), set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"frozen: no tensor has a name like {pattern!r}")
        found.update(matching)
    return frozenset(found)


def _named_tensors(module: Any, dtype: DTypeChoice) -> tuple[dict[str, Any], dict[str, str]]:
    """What a module's `state_dict` holds, by plain names, and the dtypes of what is cast to one."""
    import torch
    from torch.nn import Parameter

    tensors: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    stated = dtype if isinstance(dtype, Mapping) else {}
    usual = _published((None if isinstance(dtype, Mapping) else dtype) or "BF16")
    for own_name, tensor in module.state_dict(keep_vars=True).items():
        name = plain_name(own_name)
        if name in tensors:
            raise ValueError(f"two tensors of the module are called {name} once the names of wrappers are left out")
        if not is_torch(tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, not a tensor, as quantized modules and extra states have: "
                "publish the model that was quantized, or pass a function that returns a mapping of tensors"
            )
        check_plain(name, tensor)
        is_wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
        is_parameter = isinstance(tensor, Parameter)
        if is_parameter and tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
            raise TypeError(
                f"{name} is a parameter of dtype {tensor.dtype}, as quantized modules have, and their scales would be "
                "cast: publish the model that was quantized, or model.state_dict, which is taken as it is"
            )
        if is_wide and (name in stated or is_parameter):
            dtypes[name] = _published(stated[name]) if name in stated else usual
        tensors[name] = tensor
    for name in stated:
        if name not in dtypes:
            raise ValueError(f"dtype: the module has no tensor of floats called {name}")
    if not tensors:
        raise ValueError("the module has no tensors to publish")
    return tensors, dtypes


def _published(dtype: Any) -> str:
    published = dtype_named(dtype).name
    if published not in TORCH_NAMES:
        raise ValueError(f"a module is published as {', '.join(TORCH_NAMES)}, not {published}")
    return published


def source_of(weights: Any, dtype: DTypeChoice, frozen: Sequence[str] = ()) -> Callable[[], Weights]:
    """What to call for the weights as they are."""
    if hasattr(weights, "named_parameters"):
        return module_source(weights, dtype=dtype, frozen=frozen)
    if isinstance(weights, Mapping):
        return lambda: weights
    if callable(weights):
        return lambda: _returned(weights())
    raise TypeError(f"expected a mapping, a torch module or a function, got {type(weights).__name__}")


def _returned(weights: Any) -> Weights:
    if not isinstance(weights, Mapping):
        raise TypeError(f"the function for weights must return them by name, not {type(weights).__name__}")
    return weights


def as_bits(weights: Weights, dtype: DTypeChoice, tied: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Weights as a history takes them."""
    return weights if isinstance(weights, ModuleWeights) else Viewed(weights, dtype, tied)
