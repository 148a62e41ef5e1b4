"""What runs in each tensor-parallel rank of an SGLang server: the function for
`--custom-weight-loader deltawire.engines.sglang.loader.load`.

SGLang ends the whole server when a loader raises, and passes nothing back from one that does not. So nothing here
raises; answers, and what went wrong, are files in the folder that the agent names.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from deltawire.disk import locked
from deltawire.engines.live_weights import Found, LiveModel, attempt
from deltawire.engines.places import Computed, check_covered, check_recoverable
from deltawire.engines.shared_folder import save_json
from deltawire.engines.trace import flat_storages, trace
from deltawire.errors import BaseMismatch, Conflict, EngineRejected
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.weights import TensorSpec
from deltawire.workers import short_turns

_ATTRIBUTE = "_deltawire_worker"
# SGLang's models compute here what they derive from their weights, after all of these were loaded.
_DERIVE = "post_load_weights"


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Do what the agent orders. The one tensor holds JSON: a folder, the name of the order there, and the rank."""

    def obey() -> None:
        ((_, order),) = named_tensors
        fields = json.loads(bytes(order.tolist()))
        worker = vars(model).get(_ATTRIBUTE)
        if worker is None:
            worker = Worker(model, fields["rank"])
            setattr(model, _ATTRIBUTE, worker)
        worker.run(Path(fields["folder"]), fields["call"])

    _logged(obey)


def _logged(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        # Without an answer the agent knows that something went wrong.
        logging.getLogger(__name__).exception("a command from deltawire's agent could not be read or answered")


class Worker:
    """The weights of one rank, and how the agent hears of them."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self.model, self.rank = model, rank
        self.live = LiveModel(self._find)
        self.busy = False
        """Writing was begun and did not end well: the weights may be a mix."""
        self._alive: IO[str] | None = None
        self._places: dict[str, Any] = {}
        self._computed: Computed | None = None
        self._counted: list[int] = []
        self._staging: threading.Thread | None = None

    def run(self, folder: Path, call: str) -> None:
        """Do an order and answer it. What is staged is brought here in a thread, so that the server goes on serving."""
        if self._staging is not None:
            self._staging.join()
            self._staging = None
        self._show_alive(folder / f"rank{self.rank}.alive")
        order = json.loads((folder / f"{call}.json").read_text())
        work = partial(self._answer, folder, call, order["name"], order["arguments"][self.rank])
        if order["name"] == "stage":
            self._staging = threading.Thread(target=_logged, args=[work], name="deltawire-stage", daemon=True)
            self._staging.start()
        else:
            work()

    def _answer(self, folder: Path, call: str, name: str, arguments: Mapping[str, Any]) -> None:
        result, error = attempt(lambda: self._do(folder, name, **arguments))
        self._save_status(folder)
        save_json(folder / f"{call}-rank{self.rank}.json", {**self.status(), "result": result, "error": error})

    def status(self) -> dict[str, Any]:
        return {"rank": self.rank, "busy": self.busy, **self.live.status()}

    def _save_status(self, folder: Path) -> None:
        save_json(folder / f"rank{self.rank}.json", self.status())

    def _do(self, folder: Path, name: str, **arguments: Any) -> Any:
        live = self.live
        if name == "bind":
            return self._open(**arguments)
        if name == "measure":
            self._check_places()
            self._counted, *copies = arguments["numbers"]
            live.measure(self._counted)
            return [str(live.sum_of(numbers)) for numbers in copies]
        if name == "stage":
            self._check_places()
            with _device_of(self.model), short_turns():
                live.stage_file(Path(arguments["path"]))
        elif name == "write":
            if live.staged is None or live.staged.token != arguments["token"]:
                # Another agent has dropped it, so it was not written; the digest tells if it was.
                if arguments["undo"]:
                    return None
                raise BaseMismatch(f"{arguments['token']} is not the change that is staged")
            again = self.busy
            self._begin(folder)
            self._write(**arguments)
            if again:
                # Nobody knows how much the attempt before has written, and so what the digest has gained.
                live.measure(self._counted)
            self.busy = False
        elif name == "begin":
            self._begin(folder)
            live.mark(None)
        elif name == "mark":
            state = WeightVersion.parse(arguments["state"])
            if state is not None:
                live.check_read()
            live.mark(state)
            self.busy = False
        elif name != "status":
            raise ValueError(f"unknown command {name!r}")
        return None

    def _open(self, specs: Mapping[str, Any]) -> list[Any]:
        pieces = self.live.bind({name: (dtype, tuple(shape)) for name, (dtype, shape) in specs.items()})
        self._places = _places(self.model)
        return [piece.as_list() for piece in pieces]

    def _begin(self, folder: Path) -> None:
        """From here on nobody may rely on what was reported before, even if this process ends."""
        self.busy = True
        self._save_status(folder)

    def _write(self, token: str, undo: bool) -> None:
        # A batch may still be on its way through the model: pausing does not wait for the device.
        _synchronize(self.model)
        self.live.write(token, undo=undo)
        derive = getattr(self.model, _DERIVE, None)
        if derive is not None:
            with torch.no_grad():
                derive()
        _synchronize(self.model)

    def _find(self, specs: Mapping[str, TensorSpec]) -> Found:
        _check_plain(self.model)
        storages = flat_storages(self.model)
        derives = hasattr(self.model, _DERIVE)
        if derives:
            # It is not part of where weights go, and is called after each change.
            setattr(self.model, _DERIVE, lambda *_, **__: None)
        try:
            with torch.no_grad(), _in_this_thread():
                traced = trace(self.model.load_weights, storages, specs)
        finally:
            if derives:
                delattr(self.model, _DERIVE)
        check_recoverable(traced)
        check_covered(self.model, storages, traced)
        self._computed = Computed(traced, storages, specs, self._computed)
        return Found(self._computed.pieces, {**storages, **self._computed.storages}, [self._computed])

    def _check_places(self) -> None:
        if _places(self.model) != self._places:
            raise EngineRejected(
                "the model's parameters are no longer where they were found, since SGLang moves those of this model "
                "after loading: they cannot be changed in place, use mode 'disk'"
            )

    def _show_alive(self, path: Path) -> None:
        """Hold a lock that the system lets go of when this process ends."""
        if self._alive is not None:
            if path.exists() and os.path.samestat(path.stat(), os.fstat(self._alive.fileno())):
                return
            self._alive.close()
        self._alive = locked(path, "w")
        if self._alive is None:
            raise Conflict(f"another server uses {path.parent}: give each agent its own shared folder")

    def close(self) -> None:
        if self._alive is not None:
            self._alive.close()


def _check_plain(model: torch.nn.Module) -> None:
    """Refuse weights that SGLang keeps otherwise than as they were loaded, by name."""
    quantization = getattr(model, "quant_config", None)
    if quantization is not None:
        raise EngineRejected(
            f"the server quantizes its weights ({type(quantization).__name__}): they cannot be changed in place. Start "
            "it without --quantization or use mode 'disk'"
        )
    for name, module in model.named_modules():
        if getattr(getattr(module, "quant_method", None), "use_flashinfer_trtllm_moe", False):
            raise EngineRejected(
                f"SGLang keeps the experts of {name} in FlashInfer's order, not as they were loaded: "
                "start the server with --moe-runner-backend triton",
                tensor=name,
            )


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Have thread pools of this thread do what they are given at once: some models load their weights with one, and a
    trace sees one thread.
    """
    submit, own = ThreadPoolExecutor.submit, threading.get_ident()

    def at_once(pool: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        if threading.get_ident() != own:
            return submit(pool, work, *arguments, **named)
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done

    ThreadPoolExecutor.submit = at_once  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _places(model: torch.nn.Module) -> dict[str, Any]:
    return {name: (each.data_ptr(), each.dtype, each.shape) for name, each in model.named_parameters()}


def _device_of(model: torch.nn.Module) -> Any:
    device = next(model.parameters()).device
    return torch.get_device_module(device).device(device) if device.type != "cpu" else torch.device("cpu")


def _synchronize(model: torch.nn.Module) -> None:
    device = next(model.parameters()).device
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
