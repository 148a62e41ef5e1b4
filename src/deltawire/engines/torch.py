"""A torch module in this process, on CPU or GPU, as an engine."""

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

import torch

from deltawire.engines.engine import Engine, EngineChange, EngineDelta, Served
from deltawire.engines.layout import Layout, pieces_of_copy
from deltawire.engines.live_weights import Found, LiveModel, Ready
from deltawire.engines.places import kept_buffers
from deltawire.engines.staged import split
from deltawire.engines.trace import flat_storages, torch_dtype
from deltawire.errors import (
    DeltawireError,
    DigestMismatch,
    EngineBroken,
    EngineRejected,
    ShapeMismatch,
    UnknownParameter,
)
from deltawire.format.delta import Delta
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.names import plain_name
from deltawire.tensors.weights import Place, TensorSpec, Weights, place, spec, view, write


class TorchEngine(Engine):
    """Updates a torch module in this process between forward passes, which run inside `serving()`.

    The run must have all parameters of the module, and all buffers of its `state_dict()`. Tensors that are replaced by
    others (`model.half()`, `load_state_dict(..., assign=True)`) are noticed by `serving()`, `state` and the next poll:
    the version is unknown until they have been loaded.

    Args:
        model: The module, on CPU or GPU; its tensors are changed in place.
        threads: Threads for hashing and writing in host memory; all cores by default.

    Raises:
        EngineBroken: From `serving`, after an update that failed half-way, until the weights are loaded again.

    >>> engine = TorchEngine(model)  # doctest: +SKIP
    >>> with engine.serving():  # doctest: +SKIP
    ...     model.generate(...)
    """

    kind = "torch"

    def __init__(self, model: torch.nn.Module, threads: int | None = None) -> None:
        self.model = model
        self.address = f"{type(model).__name__} in this process"
        self._live = LiveModel(self._find, threads)
        self._layout: Layout | None = None
        self._places: dict[str, Place | None] = {}
        """Where the module's tensors were when they were found."""
        self._gate = _Gate()
        self._broken: str | None = None

    @property
    def state(self) -> WeightVersion | None:
        """The version of the weights; None if it is unknown."""
        state = self._live.state
        return None if state is None or self._moved() else state

    @contextmanager
    def serving(self) -> Iterator[WeightVersion | None]:
        """Keep the weights unchanged while the block runs; an update waits until no block runs.

        Without `await` inside: coroutines of one thread cannot wait for each other here, so as long as their blocks
        overlap, no update gets its turn. Run the forward pass in a thread, as `asyncio.to_thread` does.

        Yields:
            The version of the weights; None if it is unknown.

        Raises:
            EngineBroken: An update left a mix of two versions, and the weights have not been loaded again.
        """
        with self._gate.shared():
            if self._broken is not None:
                raise EngineBroken(self._broken)
            yield self.state

    def status(self) -> Served:
        if self._layout is not None and self._moved():
            # Other tensors, as after a start.
            self._layout, self._live.boot = None, token_hex(8)
            self._live.mark(None)
        state = self._live.state
        version = None if state is None else str(state.version)
        return Served(self._live.boot, (state,), version, interrupted=self._broken is not None)

    def bind(self, specs: Mapping[str, TensorSpec]) -> None:
        self._layout = None
        layout = Layout(specs, [self._live.bind(specs)])
        self._check_covered(specs)
        self._layout, self._places = layout, self._found_at()

    def digest(self) -> Digest:
        return self._opened.total([self._live.measure(self._opened.counted[0])])

    @property
    def decodes(self) -> bool:
        return True

    @property
    def is_divided(self) -> bool:
        return self._opened.is_divided

    @property
    def on_gpu(self) -> bool:
        return any(value.is_cuda for value in self.model.parameters())

    def specs(self) -> Mapping[str, TensorSpec] | None:
        return None if self._layout is None else self._layout.specs

    def stage(self, change: EngineChange | EngineDelta) -> None:
        token = token_hex(8)
        if isinstance(change, EngineDelta):
            self._live.stage_delta(token, Delta.open(change.files), change.base, change.state)
            return
        (staged,) = split(change, self._opened, token)
        try:
            self._live.stage(staged)
        except DeltawireError as error:
            raise EngineRejected(f"nothing was changed: {error}") from error

    def commit(self, change: EngineChange | EngineDelta) -> float:
        staged = self._live.staged
        if staged is None or staged.state != change.state:
            raise EngineRejected(f"the change to version {change.state.version} is not staged")
        with self._gate.alone():
            self._check_places()
            started = time.perf_counter()
            try:
                self._live.write(staged.token)
                self._check(change.state)
            except Exception as error:
                self._take_back(staged, error)
            self.mark(change.state)
            return time.perf_counter() - started

    def _take_back(self, staged: Ready, error: Exception) -> None:
        try:
            self._live.write(staged.token, undo=True)
            self._check(staged.base)
        except Exception as second:
            self._break(f"the update failed ({error}) and could not be rolled back: {second}", error)
        self.mark(staged.base)
        raise EngineRejected(f"the update was rolled back: {error}") from error

    def _break(self, problem: str, error: Exception) -> NoReturn:
        self._live.mark(None)
        self._broken = problem
        raise EngineBroken(problem) from error

    def _check(self, state: WeightVersion) -> None:
        found = self._opened.total([self._live.partial or Digest()])
        if found != state.digest:
            raise DigestMismatch(f"the weights have digest {found}, not {state.digest}")

    def load(self, weights: Weights, folder: Path | None, state: WeightVersion) -> float:
        if {name: spec(weights, name) for name in weights} != dict(self._opened.specs):
            raise EngineRejected(f"version {state.version} does not have the tensors that the engine was opened for")
        with self._gate.alone():
            self._check_places()
            started = time.perf_counter()
            self._live.mark(None)
            try:
                own = self._tensors()
                for name in weights:
                    write(own[name], slice(None), view(name, weights[name]).bits)
                self.digest()
                self._check(state)
            except Exception as error:
                self._break(f"version {state.version} was written, and the weights are not what they should be", error)
            self.mark(state)
            return time.perf_counter() - started

    def mark(self, state: WeightVersion) -> None:
        self._live.mark(state)
        self._broken = None

    def close(self) -> None: ...

    @property
    def _opened(self) -> Layout:
        if self._layout is None:
            raise EngineRejected("the tensors are not known yet: call bind() first")
        return self._layout

    def _find(self, specs: Mapping[str, TensorSpec]) -> Found:
        storages = flat_storages(self.model)
        names = {flat.untyped_storage().data_ptr(): name for name, flat in storages.items()}
        own = self._tensors()
        pieces = []
        for name, (dtype, shape) in specs.items():
            if name not in own:
                problem = f"the run has {name}, which the model does not have: check that both are the same model"
                raise UnknownParameter(problem, tensor=name)
            value = own[name]
            if (value.dtype, tuple(value.shape)) != (torch_dtype(dtype), shape):
                same = "check that both are the same model"
                advice = "cast the model first, or publish in its dtype" if tuple(value.shape) == shape else same
                raise ShapeMismatch(
                    f"{name} is {value.dtype} {list(value.shape)} in the model, but {dtype} {list(shape)} in the run: "
                    + advice,
                    tensor=name, expected=[dtype, *shape], actual=[str(value.dtype), *value.shape],
                )  # fmt: skip
            if not prod(shape):
                continue
            storage = names.get(value.untyped_storage().data_ptr())
            is_plain = storage is not None and value.is_contiguous() and value.itemsize == storages[storage].itemsize
            if storage is None or not is_plain or value.is_meta:
                where = ", but on the meta device" if value.is_meta else ""
                raise EngineRejected(f"{name} is not a plain, contiguous tensor in the model{where}", tensor=name)
            pieces += pieces_of_copy(
                name, storage, value.shape, (0, value.stride()), (value.storage_offset(), value.stride())
            )
        return Found(pieces, storages)

    def _check_covered(self, names: Collection[str]) -> None:
        """Refuse a model that computes with something that the run does not have."""
        own = self._tensors()
        filled = {place(own[name]) for name in names}
        for name, value in self._own():
            if value.numel() and place(value) not in filled:
                raise UnknownParameter(
                    f"the model has {plain_name(name)}, which the run does not have, so it would never be updated: "
                    "publish it too, or tie it in the model if it is tied at the trainer",
                    tensor=plain_name(name),
                )

    def _own(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters, and the buffers that a checkpoint has."""
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from kept_buffers(self.model)

    def _found_at(self) -> dict[str, Place | None]:
        return {name: place(value) for name, value in self._own()}

    def _moved(self) -> bool:
        return self._found_at() != self._places

    def _check_places(self) -> None:
        if self._moved():
            raise EngineRejected("nothing was changed: tensors of the model were replaced by others meanwhile")

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under their published names."""
        model = self.model
        pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {plain_name(name): value for name, value in pairs}


class _Gate:
    """A lock for many readers or one writer; a waiting writer goes first.

    It is reentrant for readers. A reader cannot become the writer.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()
        self._waiting = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: me in self._inside or (not self._alone and not self._waiting))
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                self._inside += Counter()
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            if threading.get_ident() in self._inside:
                raise EngineRejected("the weights cannot be changed from inside `serving()`: leave the block first")
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._inside)
                self._alone = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
