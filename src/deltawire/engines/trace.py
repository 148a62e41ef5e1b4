"""Locates the elements of a checkpoint in a model, by tracing the model's own loading code.

Tensors on torch's meta device go through it under the checkpoint's names. What it does with them, slicing, fusing,
padding, comes down to copies into parameters; each is recorded instead of executed. So there is no table per model, and
nothing is moved.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltawire.engines.layout import Piece, pieces_of_copy
from deltawire.errors import EngineRejected
from deltawire.tensors.weights import TensorSpec

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]

# Operations whose result has the same elements in the same order.
_SAME = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for one of safetensors' names."""
    from safetensors.torch import _TYPES

    found: torch.dtype = _TYPES[name]
    return found


def trace(load: Load, storages: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> list[Piece]:
    """The pieces of all tensors of a checkpoint that `load`, a model's own `load_weights`, takes.

    `storages` are flat tensors that cover the memory of the model's parameters. Nothing is written to it. A tensor that
    is cast, or whose values are used, is refused by name.
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
            raise EngineRejected(
                f"the model's own loading code cannot be followed at {copies.last}: {type(error).__name__}: {error}",
                tensor=copies.last,
            ) from error
    return copies.pieces


class _Copies(TorchDispatchMode):  # type: ignore[misc]
    """Records copies from the given tensors, and refuses everything else that would need their values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], storages: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.last = "the start"
        """The tensor of the checkpoint that was used last."""
        self._sources = {_identity(tensor): name for name, tensor in tensors.items()}
        self._storages = {flat.untyped_storage().data_ptr(): (name, flat.itemsize) for name, flat in storages.items()}
        self._computed: dict[int, tuple[str, torch.Tensor]] = {}
        """Tensors computed from the checkpoint's, with the name of one of those. They are kept alive, so that no other
        tensor gets their identity."""

    def feed(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            self.last = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        origin = next(filter(None, map(self._origin, given)), None)
        self.last = origin or self.last
        if func._schema.is_mutable and self._write(func, args, kwargs, origin):
            return args[0]
        if func in _SAME and self._is_source(args[0]) and kwargs.get("dtype") in (None, args[0].dtype):
            return torch.ops.aten.alias.default(args[0])
        made = func(*args, **kwargs)
        if origin is not None:
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor) and not self._is_source(each):
                    self._computed.setdefault(_identity(each), (origin, each))
        return made

    def _is_source(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and _identity(tensor) in self._sources

    def _origin(self, tensor: torch.Tensor) -> str | None:
        """The tensor of the checkpoint that this is, or is computed from."""
        if not tensor.is_meta:
            return None
        return self._sources.get(_identity(tensor)) or self._computed.get(_identity(tensor), (None,))[0]

    def _write(self, func: Any, args: Any, kwargs: Any, origin: str | None) -> bool:
        """Handle an operation that writes; whether it was recorded or skipped, and must not be executed."""
        outputs = [
            each
            for argument, each in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for to in filter(torch.is_tensor, tree_leaves((outputs, kwargs.get("out")))):
            storage, _ = (None, 0) if to.is_meta else self._storages.get(to.untyped_storage().data_ptr(), (None, 0))
            if func is torch.ops.aten.copy_.default and args[1].is_meta and not to.is_meta:
                self._copied(to, args[1])
                return True
            if self._is_source(to):
                raise EngineRejected(
                    f"{origin} is changed by {func} before it is copied: it cannot be changed in place", tensor=origin
                )
            if storage is not None and func in _FILLS:
                # Padding, which was filled when the model was loaded.
                return True
            if storage is not None or (origin is not None and not to.is_meta):
                raise EngineRejected(
                    f"{storage or origin} is computed by {func}, not copied: it cannot be changed in place",
                    tensor=origin or storage,
                )
            if origin is not None:
                self._computed.setdefault(_identity(to), (origin, to))
        return False

    def _copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(_identity(source))
        storage, itemsize = self._storages.get(to.untyped_storage().data_ptr(), (None, 0))
        if name is None:
            origin = self._origin(source)
            raise EngineRejected(
                f"what goes into {storage or 'the model'} is computed from {origin or 'something else'}, not copied: "
                "it cannot be changed in place",
                tensor=origin or storage,
            )
        if storage is None:
            raise EngineRejected(f"{name} goes to memory that is no parameter of the model", tensor=name)
        if to.shape != source.shape or to.dtype != source.dtype or to.itemsize != itemsize:
            raise EngineRejected(
                f"{name} is {source.dtype} {list(source.shape)} in the checkpoint and {to.dtype} {list(to.shape)} in "
                f"{storage}: only a plain copy can be changed in place",
                tensor=name,
            )
        self.pieces += pieces_of_copy(
            name, storage, to.shape,
            (source.storage_offset(), source.stride()), (to.storage_offset(), to.stride()),
        )  # fmt: skip


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
