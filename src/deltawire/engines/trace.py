"""Finds where the elements of a checkpoint live in a model, by watching the model's own loading code.

Tensors without memory (torch's meta device) go through it under the checkpoint's names. What it does with them,
slicing, fusing, padding, comes down to copies into parameters; each is written down instead of done. So there is no
table per model, and nothing is moved.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltawire.engines.layout import Piece, pieces_of_copy
from deltawire.errors import EngineRejected
from deltawire.weights import Form

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for one of safetensors' names."""
    from safetensors.torch import _TYPES

    found: torch.dtype = _TYPES[name]
    return found


def trace(load: Load, storages: Mapping[str, torch.Tensor], forms: Mapping[str, Form]) -> list[Piece]:
    """The pieces of all tensors of a checkpoint that `load`, a model's own `load_weights`, takes.

    `storages` are flat tensors that cover the memory of the model's parameters.
    """
    tensors = {
        name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for name, (dtype, shape) in forms.items()
    }
    copies = _Copies(tensors, storages)
    with copies:
        try:
            load(tensors.items())
        except EngineRejected:
            raise
        except Exception as error:
            raise EngineRejected(
                f"the model's own loading code cannot be followed at {copies.last}: {type(error).__name__}: {error}"
            ) from error
    return copies.pieces


class _Copies(TorchDispatchMode):  # type: ignore[misc]
    """Writes down copies from the given tensors, and refuses whatever else would need their values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], storages: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.last = "the start"
        self._sources = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
        self._storages = {flat.untyped_storage().data_ptr(): name for name, flat in storages.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._copied(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(source.untyped_storage()._cdata)
        storage = self._storages.get(to.untyped_storage().data_ptr())
        if name is None:
            raise EngineRejected(
                f"what goes into {storage or 'the model'} is computed from the checkpoint, not copied: "
                "it cannot be changed in place"
            )
        self.last = name
        if storage is None:
            raise EngineRejected(f"{name} goes to memory that is no parameter of the model", tensor=name)
        if to.shape != source.shape or to.dtype != source.dtype:
            raise EngineRejected(
                f"{name} is {source.dtype} {list(source.shape)} in the checkpoint and {to.dtype} {list(to.shape)} in "
                f"{storage}: only a plain copy can be changed in place",
                tensor=name,
            )
        self.pieces += pieces_of_copy(
            name, storage, to.shape,
            (source.storage_offset(), source.stride()), (to.storage_offset(), to.stride()),
        )  # fmt: skip


def flat_storages(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The memory behind a model's parameters and buffers, as flat tensors, each once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        storage = value.untyped_storage()
        if storage.nbytes() and value.layout is torch.strided:
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
            found.setdefault(storage.data_ptr(), (name, flat))
    return dict(found.values())
