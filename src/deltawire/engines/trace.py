"""Locates the elements of a checkpoint in a model, by tracing the model's own loading code.

Tensors on torch's meta device go through it under the checkpoint's names. What it does with them, slicing, fusing,
padding, comes down to copies into parameters; each is recorded instead of executed. So there is no table per model, and
nothing is moved. What it computes on the way, element by element from one tensor (a cast, `-exp(x)`), is recorded, too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltawire.engines.layout import Dim, Piece, merged_dims, pieces_of_copy
from deltawire.errors import EngineRejected
from deltawire.tensors.weights import TensorSpec
from deltawire.workers import in_turns

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset in a storage."""
Fill = tuple[str, View, Any]
"""A part of a storage, and the value that it is filled with."""

# Of a message; vLLM's may list all parameters.
MOST_CHARS = 400

# Operations whose result has the same elements in the same order.
_SAME = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for one of safetensors' names."""
    from safetensors.torch import _TYPES

    found: torch.dtype = _TYPES[name]
    return found


@dataclass(frozen=True, eq=False)
class Node:
    """Elements of one tensor of the checkpoint: as they are, in another order, or computed from those of `parent`."""

    tensor: str
    dtype: torch.dtype
    size: int
    """Of the storage."""
    parent: "Node | None" = None
    view: View = ((), (), 0)
    """What of the parent this is made of."""
    apply: Callable[[torch.Tensor], torch.Tensor] | None = None
    """None for a contiguous copy. What is computed has the places of what it is computed from."""
    is_cast: bool = False

    def storage(self, values: torch.Tensor) -> torch.Tensor:
        """This node's storage, flat, from the values of the checkpoint's tensor, on the device that loading uses."""
        if self.parent is None:
            # Checkpoints are read into host memory, and other devices may round differently.
            return values.cpu()
        given = self.parent.storage(values).as_strided(*self.view)
        if self.apply is None:
            return given.contiguous().view(-1)
        result = self.apply(given)
        made = torch.empty(self.size, dtype=self.dtype, device=result.device)
        made.as_strided(*self.view).copy_(result)
        return made


@dataclass(frozen=True)
class Copy:
    """A part of a parameter, and what is loaded into it."""

    node: Node
    source: View
    storage: str
    to: View

    def pieces(self) -> list[Piece] | None:
        """For a plain copy; None where elements are computed, or in an order that pieces cannot have."""
        if 0 in self.to[0]:
            return []
        node, offset = self.node, self.source[2]
        dims = list(zip(self.to[0], self.source[1], self.to[1], strict=True))
        while node.parent is not None:
            found = None if node.apply else _through(dims, offset, node.view)
            if found is None:
                return None
            (dims, offset), node = found, node.parent
        shape, near, far = zip(*dims, strict=True) if dims else ((), (), ())
        return pieces_of_copy(node.tensor, self.storage, shape, (offset, near), (self.to[2], far))


@dataclass
class Trace:
    """What a model's own loading code does with the tensors of a checkpoint."""

    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    """Padding."""


def trace(load: Load, storages: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> Trace:
    """What `load`, a model's own `load_weights`, does with all tensors of a checkpoint.

    `storages` are flat tensors that cover the memory of the model's parameters. Nothing is written to it. A tensor
    whose values are used other than element by element is refused by name.
    """
    tensors = {
        name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for name, (dtype, shape) in specs.items()
    }
    copies = _Copies(tensors, storages)
    with torch.no_grad(), copies:
        try:
            load(copies.feed(tensors))
        except EngineRejected:
            raise
        except Exception as error:
            said = shorten(f"{type(error).__name__}: {error}", MOST_CHARS, placeholder=" ...")
            raise EngineRejected(
                f"the model's own loading code cannot be followed at {copies.last}: {said}; if it has no such tensor, "
                "as of an adapter, publish without it",
                tensor=copies.last,
            ) from error
    return Trace([each for written in copies.written.values() for each in written.values()], copies.fills)


class _Copies(TorchDispatchMode):  # type: ignore[misc]
    """Records copies from the given tensors, and refuses everything else that would need their values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], storages: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.written: dict[tuple[str, View], dict[str, Copy]] = {}
        """For each part of a parameter that is written, the last copy of each tensor."""
        self.fills: list[Fill] = []
        self.last = "the start"
        """The tensor of the checkpoint that was used last."""
        # Tensors are kept alive, so that no other gets their identity.
        self._alive: list[torch.Tensor] = list(tensors.values())
        self._nodes = {_identity(each): Node(name, each.dtype, each.numel()) for name, each in tensors.items()}
        self._storages = {flat.untyped_storage().data_ptr(): (name, flat.dtype) for name, flat in storages.items()}
        self._lost: dict[int, str] = {}
        """Tensors computed in a way that cannot be repeated, with the name of one of those of the checkpoint."""

    def feed(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in in_turns(tensors.items()):
            self.last = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        origin = next(filter(None, map(self._origin, given)), None)
        self.last = origin or self.last
        value_of = self._storage_of(args[0]) if func is torch.ops.aten._local_scalar_dense.default else None
        if value_of is not None and args[0].is_floating_point():
            # A number from a parameter would be that of now, also after the parameter has changed.
            raise not_in_place(f"what {self.last} is loaded as depends on the value of {value_of}", self.last)
        is_same_each_time = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        elementwise = is_same_each_time and len(given) == 1 and args and args[0] is given[0]
        if func._schema.is_mutable:
            if self._write(func, args, kwargs, origin, elementwise):
                return args[0]
        elif func in _SAME or elementwise:
            # What was loaded into a parameter, and is read again.
            source = self._loaded(args[0]) if not args[0].is_meta else args[0]
            node = None if source is None else self._nodes.get(_identity(source))
            if source is not None and node is not None:
                return self._made(func, source, node, args[1:], kwargs)
        made = func(*args, **kwargs)
        if origin is not None:
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor) and each.is_meta and _identity(each) not in self._nodes:
                    self._lost.setdefault(_identity(each), origin)
                    self._alive.append(each)
        return made

    def _made(self, func: Any, source: torch.Tensor, node: Node, args: Any, kwargs: Any) -> torch.Tensor:
        """The result of an operation on some elements of a tensor, each on its own."""
        made: torch.Tensor = func(source, *args, **kwargs | ({"device": "meta"} if "device" in kwargs else {}))
        if made.stride() != source.stride():
            # Elements in another order.
            relaid = torch.empty(source.shape, dtype=source.dtype, device="meta")
            node = Node(node.tensor, source.dtype, source.numel(), node, _view(source))
            self._nodes[_identity(relaid)] = node
            self._alive.append(relaid)
            source = relaid
        if made.dtype == source.dtype and func in _SAME:
            alias: torch.Tensor = torch.ops.aten.alias.default(source)
            return alias
        apply = _repeated(func, args, kwargs)
        twin = torch.empty(node.size, dtype=made.dtype, device="meta")
        is_cast = func in _SAME
        self._nodes[_identity(twin)] = Node(node.tensor, made.dtype, node.size, node, _view(source), apply, is_cast)
        self._alive.append(twin)
        return twin.as_strided(*_view(source))

    def _loaded(self, part: torch.Tensor) -> torch.Tensor | None:
        """What was loaded into a part of a parameter before; None if nothing was, or not into this very part."""
        found = self.written.get((self._storage_of(part) or "", _view(part)))
        if found is None or len(found) > 1:
            return None
        (copy,) = found.values()
        node, device = copy.node, part.device
        flat = torch.empty(node.size, dtype=node.dtype, device="meta")
        if device.type != "cpu":
            node = Node(node.tensor, node.dtype, node.size, node, copy.source, lambda given: given.to(device), True)
        self._nodes[_identity(flat)] = node
        self._alive.append(flat)
        return flat.as_strided(*copy.source)

    def _storage_of(self, tensor: torch.Tensor) -> str | None:
        """The storage that a tensor is a part of, if that is one of the model's."""
        return None if tensor.is_meta else self._storages.get(tensor.untyped_storage().data_ptr(), (None,))[0]

    def _origin(self, tensor: torch.Tensor) -> str | None:
        """The tensor of the checkpoint that this is, or is computed from."""
        if not tensor.is_meta:
            return None
        node = self._nodes.get(_identity(tensor))
        return self._lost.get(_identity(tensor)) if node is None else node.tensor

    def _write(self, func: Any, args: Any, kwargs: Any, origin: str | None, elementwise: bool) -> bool:
        """Handle an operation that writes; whether it was recorded or skipped, and must not be executed."""
        outputs = [
            each
            for argument, each in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for to in filter(torch.is_tensor, tree_leaves((outputs, kwargs.get("out")))):
            storage = self._storage_of(to)
            node = self._nodes.get(_identity(to)) if to.is_meta else None
            if func is torch.ops.aten.copy_.default and args[1].is_meta and not to.is_meta:
                self._copied(to, args[1])
                return True
            if storage is not None and func in _FILLS:
                # Padding, which was filled when the model was loaded.
                self.fills.append((storage, _view(to), args[1] if len(args) > 1 else 0))
                return True
            if node is not None and elementwise and to.numel() == node.size:
                apply = _repeated(func, args[1:], kwargs)
                self._nodes[_identity(to)] = Node(node.tensor, to.dtype, node.size, node, _view(to), apply)
                return True
            loaded = self._loaded(to) if elementwise and storage is not None else None
            if loaded is not None:
                self._copied(to, self._made(func, loaded, self._nodes[_identity(loaded)], args[1:], kwargs))
                return True
            if node is not None:
                raise not_in_place(f"{origin} is changed by {func} before it is copied", origin)
            if storage is not None or (origin is not None and not to.is_meta):
                name = origin or self.last
                raise not_in_place(f"{name} goes into {storage or 'the model'} by {func}, not by a copy", name)
            if origin is not None:
                self._lost.setdefault(_identity(to), origin)
                self._alive.append(to)
        return False

    def _copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if not to.numel():
            return
        node = self._nodes.get(_identity(source))
        storage, dtype = self._storages.get(to.untyped_storage().data_ptr(), (None, None))
        if node is None:
            origin = self._origin(source)
            raise not_copied(storage or "the model", origin or "something else", origin or self.last)
        if storage is None:
            raise EngineRejected(f"{node.tensor} goes to memory that is not a parameter", tensor=node.tensor)
        if to.shape != source.shape or to.dtype != dtype:
            here, there = f"{source.dtype} {list(source.shape)}", f"{to.dtype} {list(to.shape)}"
            raise not_in_place(f"{node.tensor} is {here} in the checkpoint and {there} in {storage}", node.tensor)
        if source.dtype != to.dtype:
            source = self._made(torch.ops.aten._to_copy.default, source, node, (), {"dtype": to.dtype})
        copy = Copy(self._nodes[_identity(source)], _view(source), storage, _view(to))
        self.written.setdefault((storage, copy.to), {})[node.tensor] = copy


def not_in_place(problem: str, tensor: str | None) -> EngineRejected:
    return EngineRejected(f"{problem}: it cannot be changed in place", tensor=tensor)


def not_copied(storage: str, source: str, tensor: str) -> EngineRejected:
    return not_in_place(f"what goes into {storage} is computed from {source}, not copied", tensor)


def _repeated(func: Any, args: Any, kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """An operation, to be done again with a tensor's values."""
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}

    def apply(values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = func(values.clone() if func._schema.is_mutable else values, *args, **kwargs)
        return made

    return apply


def _through(dims: list[Dim], offset: int, view: View) -> tuple[list[Dim], int] | None:
    """Dimensions and an offset in a contiguous copy of a view, as those in what it is a view of; None for others."""
    axes, place = [], 1
    for size, near in reversed(list(zip(view[0], view[1], strict=True))):
        if size > 1:
            axes.append((size, place, near))
            place *= size
    # How far along each axis; no sum of steps may go over its end.
    reach = [offset // place % size for size, place, _ in axes]
    start = view[2] + sum(digit * near for digit, (_, _, near) in zip(reach, axes, strict=True))
    found: list[Dim] = []
    for number, stride, far in merged_dims(dims):
        at = next((i for i, (size, place, _) in enumerate(axes) if stride < place * size), None)
        if number > 1 and (at is None or stride == 0 or stride % axes[at][1]):
            return None
        while number > 1:
            if at is None or at == len(axes):
                return None
            size, place, near = axes[at]
            step = max(stride // place, 1)
            if reach[at] + (number - 1) * step < size:
                found.append((number, step * near, far))
                reach[at] += (number - 1) * step
                break
            # Over the end: along the whole axis, and then along the next one.
            each = size // step
            if reach[at] or size % step or number % each:
                return None
            found.append((each, step * near, far))
            reach[at] = (each - 1) * step
            number, far, stride, at = number // each, far * each, place * size, at + 1
    return found, start


def _view(tensor: torch.Tensor) -> View:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _identity(tensor: torch.Tensor) -> int:
    """An id of a tensor's storage, also on the meta device."""
    found: int = tensor.untyped_storage()._cdata
    return found


def flat_storages(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The memory behind a model's parameters and buffers, as flat tensors, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        storage = value.untyped_storage()
        if storage.nbytes() and value.layout is torch.strided:
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
            found.setdefault(storage.data_ptr(), (name, flat))
    return dict(found.values())
