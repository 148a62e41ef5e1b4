"""Where the tensors of a checkpoint are in a model that an engine has loaded, and whether that is all of the model.

What loading computes from a tensor (a cast, `-exp(x)`) cannot be read back from the parameter. Of such tensors, which
are small, the process keeps a second copy as they are in the checkpoint; changes are written to that, and the model's
own operations are done again with all of it, so that the bits are those that a fresh start would give.
"""

from collections.abc import Collection, Iterable, Mapping
from math import prod

import torch

from deltawire.engines.layout import Piece
from deltawire.engines.trace import Copy, Node, Trace, View, not_copied, torch_dtype
from deltawire.errors import EngineRejected
from deltawire.tensors.weights import Specs

# Of all tensors together that are computed on loading: more would be felt in a pause.
MOST_COMPUTED = 1 << 24


def check_recoverable(traced: Trace) -> None:
    """Refuse a tensor that is neither copied nor cast to a wider dtype: its values could not be read back."""
    for copy in traced.copies:
        if copy.pieces() is None and not _is_widened(copy.node):
            raise not_copied(copy.storage, copy.node.tensor, copy.node.tensor)


class Computed:
    """The tensors that a model computes something from when it loads them."""

    def __init__(
        self, traced: Trace, storages: Mapping[str, torch.Tensor], specs: Specs, before: "Computed | None" = None
    ) -> None:
        """`before` has the tensors as they were when they were last looked for."""
        self._storages = storages
        found = [(copy, copy.pieces()) for copy in traced.copies]
        computed = {copy.node.tensor: copy for copy, pieces in found if pieces is None}
        self._copies: dict[str, list[Copy]] = {name: [] for name in computed}
        for copy, _ in found:
            if copy.node.tensor in computed:
                self._copies[copy.node.tensor].append(copy)
        self.pieces = [piece for copy, pieces in found if copy.node.tensor not in computed for piece in pieces or ()]
        """Of all tensors, those that are copied too."""
        self.storages: dict[str, torch.Tensor] = {}
        """The tensors as they are in the checkpoint, flat."""
        room = MOST_COMPUTED
        for name, copy in computed.items():
            dtype, shape = specs[name]
            size = prod(shape)
            room -= size
            if room < 0:
                raise EngineRejected(
                    f"{name} is {dtype} {list(shape)} in the checkpoint and is cast or computed when it is loaded into "
                    f"{copy.storage}: that is done again at each update, and only for small tensors",
                    tensor=name,
                )
            flat = torch.zeros(size, dtype=torch_dtype(dtype), device=storages[copy.storage].device)
            self.storages[_storage_name(name)] = flat
            self.pieces.append(Piece(name, _storage_name(name), 1, size, 0, size, (0, size, 1)))
            self._recover(name, before)

    def _recover(self, name: str, before: "Computed | None") -> None:
        """A tensor from before, if it is what the parameter was made of, or from the parameter itself if that has its
        values in a wider dtype. Otherwise it is unknown, and the weights must be loaded.
        """
        flat = self.storages[_storage_name(name)]
        if before is not None and name in before._copies:
            flat.copy_(before.storages[_storage_name(name)])
            if self._holds(name):
                return
            flat.zero_()
        for copy in self._copies[name]:
            if _is_widened(copy.node):
                flat.as_strided(*copy.source).copy_(self._part(copy))

    def refresh(self, tensors: Collection[str]) -> None:
        for name in self._copies.keys() & tensors:
            for copy, value in self._made(name):
                self._part(copy).copy_(value)

    def holds(self) -> bool:
        return all(map(self._holds, self._copies))

    def _holds(self, name: str) -> bool:
        return all(torch.equal(_bits(self._part(copy)), _bits(value)) for copy, value in self._made(name))

    def _part(self, copy: Copy) -> torch.Tensor:
        return self._storages[copy.storage].as_strided(*copy.to)

    def _made(self, name: str) -> Iterable[tuple[Copy, torch.Tensor]]:
        values = self.storages[_storage_name(name)]
        for copy in self._copies[name]:
            yield copy, copy.node.storage(values).as_strided(*copy.source)


def check_covered(
    model: torch.nn.Module, storages: Mapping[str, torch.Tensor], traced: Trace, known: Collection[str] = ()
) -> None:
    """Refuse a model of which something is not loaded from the checkpoint, by its name.

    That is parameters, and buffers that a checkpoint of the model would have. `known` are names, or last parts of
    names, of what is not loaded by design.
    """
    names = {flat.untyped_storage().data_ptr(): name for name, flat in storages.items()}
    filled: dict[str, list[View]] = {}
    fills = ((place, view) for place, view, _ in traced.fills)
    for place, view in [*((copy.storage, copy.to) for copy in traced.copies), *fills]:
        filled.setdefault(place, []).append(view)
    own: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, value in [*model.named_parameters(), *kept_buffers(model)]:
        storage = names.get(value.untyped_storage().data_ptr())
        if storage is not None and not {name, name.rpartition(".")[2]} & set(known):
            own.setdefault(storage, []).append((name, value))
    for storage, values in own.items():
        views = filled.get(storage, [])
        left = [(name, value) for name, value in values if not _is_covered(views, value)]
        mask = torch.zeros(storages[storage].numel() if left else 0, dtype=torch.bool)
        for view in views if left else ():
            mask.as_strided(*view).fill_(True)
        for name, value in left:
            found = mask.as_strided(value.shape, value.stride(), value.storage_offset())
            if not found.all():
                raise EngineRejected(
                    f"the run fills {int(found.sum()):,} of the {value.numel():,} elements of {name}: the others would "
                    "keep the values that the server was started with. Publish all tensors of the model",
                    tensor=name,
                )


def _is_covered(views: Iterable[View], value: torch.Tensor) -> bool:
    """Whether views that lie in sequence cover a value that does; for others it is not said, and False."""
    spans = sorted((offset, offset + prod(shape)) for shape, strides, offset in views if _in_sequence(shape, strides))
    at, end = value.storage_offset(), value.storage_offset() + value.numel()
    for first, last in spans:
        if first <= at:
            at = max(at, last)
    return bool(value.is_contiguous()) and at >= end


def _in_sequence(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def kept_buffers(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Buffers that are part of a checkpoint."""
    for prefix, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value


def left_out(model: torch.nn.Module, traced: Trace, specs: Specs) -> list[str]:
    """Tensors that the model's own loading code passes over, and for which there is no parameter either."""
    loaded = {copy.node.tensor for copy in traced.copies}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(specs.keys() - loaded - own)


def _storage_name(tensor: str) -> str:
    return f"{tensor} as in the checkpoint"


def _is_widened(node: Node) -> bool:
    """Whether a node has the tensor's values, each in a wider dtype."""
    parent = node.parent
    if parent is None:
        return bool(node.dtype.is_floating_point)
    return node.is_cast and torch.promote_types(parent.dtype, node.dtype) == node.dtype and _is_widened(parent)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
