"""Where a publisher's weights come from: a mapping, a function that returns one, or a torch module as it trains."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple, cast

from deltawire.errors import UnknownParameter, UnsupportedPlacement
from deltawire.publish.streams import NOT_WEIGHTS, Stream
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest
from deltawire.tensors.dtypes import Bits, DType, dtype_named
from deltawire.tensors.names import Ties, check_names, check_ties, plain_name, resolve_ties
from deltawire.tensors.weights import (
    DTypeChoice,
    Tensor,
    Tensors,
    TensorSpec,
    Viewed,
    Weights,
    check_plain,
    is_torch,
    tied_names,
    torch_view,
    untied_name,
)

TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class TorchBits:
    """A torch tensor's bits in its published dtype, cast and copied to the host one slice at a time."""

    def __init__(self, tensor: Any, dtype: DType, torch_dtype: Any) -> None:
        self._flat = tensor.detach().resolve_neg().contiguous().view(-1)
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
    """A module's `state_dict` under plain names: parameters in their published dtypes, buffers in their own."""

    def __init__(
        self, tensors: Mapping[str, Any], dtypes: Mapping[str, str], fixed: frozenset[str], tied: Ties | None = None
    ) -> None:
        self.live = tensors
        """All torch tensors, tied ones too."""
        if tied is None:
            # The same elements in two dtypes are two tensors.
            tied = {name: to for name, to in tied_names(tensors).items() if dtypes.get(name) == dtypes.get(to)}
        self.tied = tied
        self.fixed = fixed
        """Names of frozen tensors, which are not compared."""
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in self.tied}
        self._stated = dtypes

    def _dtypes(self, name: str) -> tuple[DType, Any]:
        import torch

        own = self._tensors[name].dtype
        stated = self._stated.get(name)
        if stated is None:
            return dtype_named(own, name), own
        return dtype_named(stated), getattr(torch, TORCH_NAMES[stated])

    def with_ties(self, tied: Ties) -> "ModuleWeights":
        """The same tensors, other names of which are left out as tied."""
        return self if tied == self.tied else ModuleWeights(self.live, self._stated, self.fixed, tied)

    def tensor(self, name: str) -> Any:
        return self._tensors[name].detach().resolve_neg()

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

    def spec(self, name: str) -> TensorSpec:
        return self._dtypes(name)[0].name, tuple(self._tensors[name].shape)

    def num_elements(self, name: str) -> int:
        return prod(self._tensors[name].shape)


class ShardedWeights(ModuleWeights):
    """What one rank publishes of a sharded module: its own boxes of the parameters.

    Of replicated boxes the first rank publishes; of plain tensors, which every rank has, rank 0 (`has_plain`).
    """

    def __init__(
        self, tensors: Mapping[str, Any], dtypes: Mapping[str, str], fixed: frozenset[str], has_plain: bool
    ) -> None:
        super().__init__(tensors, dtypes, fixed)
        self.specs = {name: super(ShardedWeights, self).spec(name) for name in self._tensors}
        """Dtypes and shapes of all whole tensors, also of those that this rank holds nothing of."""
        self.boxes: dict[str, Box] = {}
        for name, tensor in self._tensors.items():
            plain = Box.whole(tuple(tensor.shape)) if has_plain else None
            box = held_box(name, tensor) if hasattr(tensor, "to_local") else plain
            if box is not None:
                self.boxes[name] = box
        self._tensors = {name: local_part(self._tensors[name]) for name in self.boxes}

    def spec(self, name: str) -> TensorSpec:
        return self.specs[name]


def local_part(tensor: Any) -> Any:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def is_wide(tensor: Any) -> bool:
    """Whether a tensor of torch has floats that may be cast to the published dtype."""
    return bool(tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1)


def is_sharded(module: Any) -> bool:
    return any(hasattr(parameter, "to_local") for parameter in module.parameters())


def check_whole(module: Any) -> None:
    """Refuse a module whose parameters are shards that cannot be distinguished from whole tensors."""
    # FSDP2 marks modules in the same way; its parameters are DTensors.
    if not is_sharded(module) and any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules()):
        raise UnsupportedPlacement(
            "FSDP1 has flattened the parameters into shards without a shape: use FSDP2 (fsdp_version: 2)"
        )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id") and not parameter.numel():
            raise UnsupportedPlacement(
                f"{name} is sharded by ZeRO-3, which gives no access to the shards: use ZeRO-2 or FSDP2", tensor=name
            )


def held_box(name: str, tensor: Any) -> Box | None:
    """The box of a DTensor that this rank publishes; None if another rank does.

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
    """A function that reads a torch module's `state_dict`, for each version, under the names of the bare model.

    Parameters are cast to `dtype` by torch, bf16 by default; a mapping from names gives exceptions.
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
    """A function that reads what this rank publishes of a module with DTensor parameters; see `module_source`."""
    from torch.distributed.fsdp import FSDPModule

    check_whole(module)

    def read() -> ShardedWeights:
        # After a forward pass without a backward pass FSDP leaves some parameters gathered.
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        tensors, dtypes = _named_tensors(module, dtype)
        return ShardedWeights(tensors, dtypes, matching_names(tensors, frozen), has_plain)

    return read


def matching_names(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """The names that match at least one of the patterns; each pattern must match a name."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"frozen must be a list of names or patterns such as 'visual.*', got {patterns!r}")
    names, found = list(names), set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"frozen: no tensor name matches {pattern!r}: names are such as {names[0]!r}")
        found.update(matching)
    return frozenset(found)


def _named_tensors(module: Any, dtype: DTypeChoice) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a module's `state_dict` by plain names, and the dtypes of those that are cast."""
    import torch
    from torch.nn import Parameter

    tensors: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    stated = dtype if isinstance(dtype, Mapping) else {}
    usual = _published((None if isinstance(dtype, Mapping) else dtype) or "BF16")
    for own_name, tensor in module.state_dict(keep_vars=True).items():
        name = plain_name(own_name)
        if name in tensors:
            raise ValueError(f"two tensors of the module are called {name} once wrapper prefixes are removed")
        if not is_torch(tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, not a tensor, as in quantized modules and extra states: "
                "publish the model that was quantized, or pass a function that returns a mapping of tensors"
            )
        check_plain(name, tensor)
        is_parameter = isinstance(tensor, Parameter)
        if is_parameter and tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
            raise TypeError(
                f"{name} is a parameter of dtype {tensor.dtype}, as in quantized modules, and their scales would be "
                "cast: publish the model that was quantized, or model.state_dict, which is published unchanged"
            )
        if is_wide(tensor) and (name in stated or is_parameter):
            dtypes[name] = _published(stated[name]) if name in stated else usual
        tensors[name] = tensor
    if not tensors:
        raise ValueError("the module has no tensors to publish: its state_dict is empty")
    for name in stated:
        if name not in dtypes:
            problem = f"dtype: the module has no floating-point tensor called {name}"
            raise ValueError(f"{problem}: names are such as {next(iter(tensors))!r}")
    return tensors, dtypes


def _published(dtype: Any) -> str:
    published = dtype_named(dtype).name
    if published not in TORCH_NAMES:
        raise ValueError(f"a module can be published as {', '.join(TORCH_NAMES)}, not {published}")
    return published


def source_of(weights: Any, dtype: DTypeChoice, frozen: Sequence[str] = ()) -> Callable[[], Weights | Stream]:
    """A function that returns the current weights."""
    kind = f"the class {weights.__name__}" if isinstance(weights, type) else type(weights).__name__
    if hasattr(weights, "named_parameters") and not isinstance(weights, type):
        return module_source(weights, dtype=dtype, frozen=frozen)
    if isinstance(weights, Mapping):
        unknown = set(dtype) - set(weights) if isinstance(dtype, Mapping) else set()
        if unknown:
            raise ValueError(f"dtype: the weights have no tensor called {min(unknown)}")
        return lambda: weights
    if callable(weights) and not hasattr(weights, "named_parameters"):
        return lambda: _returned(weights())
    raise TypeError(f"expected a mapping, a torch module or a function, got {kind}: pass the module itself")


def _returned(weights: Any) -> Weights | Stream:
    """What a function for weights has returned: by name, or as pairs of a name and a tensor."""
    if isinstance(weights, Mapping):
        return weights
    if isinstance(weights, str | bytes) or not isinstance(weights, Iterable | Stream):
        raise TypeError(f"{NOT_WEIGHTS}{type(weights).__name__}")
    return weights if isinstance(weights, Stream) else Stream(weights)


def lies_on_gpu(value: Any) -> bool:
    return is_torch(value) and bool(value.is_cuda)


def wait_for(values: Iterable[Any]) -> None:
    """Wait for what is queued on the current stream of each GPU with some of these: other threads and other streams,
    which would not wait, may then use them, and the trainer may change what was copied.
    """
    for device in {each.device for each in values if is_torch(each) and each.is_cuda}:
        import torch

        torch.cuda.current_stream(device).synchronize()


def _live(weights: Weights) -> Weights:
    """All tensors by name, also those of a module that are tied."""
    live: Weights = getattr(weights, "live", weights)
    return live


def _check_any(weights: Mapping[str, Any]) -> None:
    if not weights:
        raise ValueError("there are no tensors to publish: the mapping is empty; pass one with at least one tensor")


def unknown_name(name: str, where: str) -> UnknownParameter:
    return UnknownParameter(
        f"{name} is {where} among the published weights: call publish(anchor=True) to start over", tensor=name
    )


def _untied(name: str, to: str) -> ValueError:
    return ValueError(
        f"{name} is tied to {to}, but has other weights: call publish(anchor=True) if it was untied, or leave it out "
        "of tied="
    )


class Taken(NamedTuple):
    """The weights at one moment."""

    live: Weights | Stream
    """As the trainer has them."""
    bits: Tensors | Stream
    tied: Ties
    fixed: AbstractSet[str]
    """Names that need not be compared."""


class Source:
    """Reads what one rank publishes of a module with DTensor parameters."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def take(self, tied: Ties | None, weights: Any = None) -> Taken:
        """The current weights, or others that were read before; `tied` has the ties that they must still have."""
        weights = self.read() if weights is None else weights
        if tied is not None and weights.tied != tied:
            raise ValueError("the tied tensors have changed: call publish(anchor=True) on all ranks")
        return Taken(weights, weights, weights.tied, weights.fixed)


class WholeSource(Source):
    """Reads whole tensors, and finds which names are tied and which are frozen."""

    def __init__(self, weights: Any, dtype: DTypeChoice, tied: Ties | None, frozen: Sequence[str]) -> None:
        super().__init__(source_of(weights, dtype, frozen))
        self._dtype, self._frozen = dtype, frozen
        self._stated_ties = None if tied is None else dict(tied)
        self._names: frozenset[str] = frozenset()

    def check(self, weights: Weights | Stream) -> None:
        """Refuse names, ties and patterns that do not fit, before anything is published; of a stream, as it comes."""
        if isinstance(weights, Stream):
            return
        _check_any(weights)
        check_names(_live(weights))
        self._ties(weights)
        self._fixed(weights)

    def take(self, tied: Ties | None, weights: Any = None) -> Taken:
        weights = self.read() if weights is None else weights
        if isinstance(weights, Stream):
            return self._take_stream(weights)
        # A checkpoint has tied weights once, and states the names that are tied to them.
        names = frozenset(_live(weights)) | getattr(weights, "tied", {}).keys()
        if tied is None:
            tied, self._names = self._ties(weights), names
        elif names != self._names:
            # Also a name that is tied to another one, which a history does not know of.
            name = min(names ^ self._names)
            raise unknown_name(name, "no longer" if name in self._names else "not")
        bits, wrong = self._bits(weights, tied), None
        if not isinstance(weights, ModuleWeights):
            wrong = untied_name(weights, tied, None if isinstance(bits, ModuleWeights) else self._dtype)
        elif weights.tied != tied:
            wrong = untied_name(weights.with_ties({}), tied)
        if wrong is not None:
            raise _untied(wrong, tied[wrong])
        _check_any(bits)
        return Taken(weights, bits, tied, self._fixed(weights))

    def _take_stream(self, stream: Stream) -> Taken:
        stated = self._stated_ties or {}
        stream.tied = resolve_ties(stated, {*stated, *stated.values()})
        stream.is_frozen = lambda name: any(fnmatchcase(name, pattern) for pattern in self._frozen)
        stream.view = self._one
        return Taken(stream, stream, stream.tied, stream.fixed)

    def finish(self, stream: Stream, digest_of: Callable[[str], Digest]) -> None:
        """Refuse ties and patterns that do not fit, which the end of a stream shows."""
        check_ties(stream.tied, stream.names)
        matching_names(stream.names, self._frozen)
        for name, digest in stream.ties.items():
            if digest != digest_of(stream.tied[name]):
                raise _untied(name, stream.tied[name])

    def _one(self, name: str, value: Any, is_fixed: bool) -> Tensors:
        """One tensor as bits; what torch has as what it is, so that it is compared where it lies."""
        dtypes = self._casts({name: value})
        if dtypes is not None:
            return ModuleWeights({name: value}, dtypes, frozenset([name] if is_fixed else ()), {})
        return Viewed({name: value}, self._dtype)

    def _casts(self, tensors: Mapping[str, Any]) -> dict[str, str] | None:
        """The dtypes to cast to; None unless all are plain tensors of torch, of floats where a dtype is stated."""
        dtypes: dict[str, DType] = {}
        for name, tensor in tensors.items():
            if not is_torch(tensor) or hasattr(tensor, "to_local"):
                return None
            check_plain(name, tensor)
            stated = self._dtype.get(name) if isinstance(self._dtype, Mapping) else self._dtype
            if stated is not None and dtype_named(stated) != dtype_named(tensor.dtype, name):
                dtypes[name] = dtype_named(stated)
        taken = [name for name, kind in dtypes.items() if not is_wide(tensors[name]) or kind.name not in TORCH_NAMES]
        if not taken:
            return {name: kind.name for name, kind in dtypes.items()}
        if any(kind.itemsize != tensors[name].itemsize for name, kind in dtypes.items()):
            own, wanted = tensors[taken[0]].dtype, dtypes[taken[0]].name
            raise ValueError(
                f"{taken[0]}: {own} is not cast to {wanted}: pass dtype= as a mapping, from the names of the tensors "
                "to cast to their dtypes"
            )
        return None

    def _bits(self, weights: Weights, tied: Ties) -> Tensors:
        """Weights as bits; tensors of torch on a GPU, or to be cast, as what they are, to be compared there."""
        if isinstance(weights, ModuleWeights):
            return weights.with_ties(tied)
        first = next(iter(weights), None)
        if first is not None and is_torch(weights[first]) and (self._dtype is not None or lies_on_gpu(weights[first])):
            tensors = {name: weights[name] for name in weights}
            dtypes = self._casts(tensors)
            if dtypes is not None:
                return ModuleWeights(tensors, dtypes, self._fixed(weights), tied)
        return Viewed(weights, self._dtype, tied)

    def _ties(self, weights: Weights) -> dict[str, str]:
        stated = tied_names(weights) if self._stated_ties is None else self._stated_ties
        return resolve_ties(stated, _live(weights))

    def _fixed(self, weights: Weights) -> frozenset[str]:
        stated: frozenset[str] = getattr(weights, "fixed", frozenset())
        return stated | matching_names(_live(weights), self._frozen) if self._frozen else stated
