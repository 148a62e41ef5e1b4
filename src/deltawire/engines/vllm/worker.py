"""What runs in each worker of a vLLM server: `--weight-transfer-config '{"backend": "deltawire"}'` together with
`--worker-extension-cls deltawire.engines.vllm.worker.WorkerExtension`.

With several workers vLLM loses step for good when one of them raises, so nothing here does. What went wrong is in the
answer. What takes long runs in a thread, on a stream of its own, while the worker serves: such a command returns at
once, and its answer is a file that the agent waits for.
"""

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.forward_context import is_forward_context_available

from deltawire.engines.live_weights import Derived, Found, LiveModel, attempt
from deltawire.engines.memory import BESIDE
from deltawire.engines.places import Computed, check_covered, left_out
from deltawire.engines.quantized.derive import QuantizedModel
from deltawire.engines.shared_folder import save_json
from deltawire.engines.trace import flat_storages, trace
from deltawire.engines.vllm import copies, quantized
from deltawire.engines.vllm.disturbed import Disturbed
from deltawire.errors import EngineRejected
from deltawire.format.checkpoint import Checkpoint
from deltawire.format.container import Container
from deltawire.format.delta import Delta
from deltawire.format.parts import merge
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.dtypes import ALIASES, DTYPES
from deltawire.tensors.weights import TensorSpec
from deltawire.workers import short_turns

THREADED = ("bind", "measure", "stage", "decode", "check", "drop")
DROP_AFTER_SECONDS = 0.05


class DeltawireEngine(WeightTransferEngine):  # type: ignore[misc]
    """Writes staged changes into the model's parameters, or reloads all of them. vLLM makes it when a worker starts."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.live = LiveModel(self._find)
        self._specs: dict[str, TensorSpec] = {}
        self._counted: list[int] = []
        self._computed: Computed | None = None
        self._left_out: list[str] = []
        self._quantized: QuantizedModel | None = None
        self._disturbed = Disturbed(self.model, self.vllm_config)
        self._held = False
        """The server's scheduler is held because of an update that failed."""
        self._thread: threading.Thread | None = None
        self._is_awaited = threading.Event()
        """Whether others wait for the thread."""
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what updates need, before anybody is served."""
        kinds = {str(value.dtype).removeprefix("torch.") for value in self.model.parameters()}
        dtypes = [ALIASES[kind] for kind in kinds if kind in ALIASES]
        if self.device.type == "cuda":
            from deltawire.engines.device_memory import warm_up_decoding

            self._stream = torch.cuda.Stream(self.device)
            warm_up_decoding(self.device, dtypes)
        else:
            from deltawire.kernels.cpu import warmup

            warmup.warm_up(sorted({8 * DTYPES[name].itemsize for name in dtypes}))
            # As vLLM does at the end of a start, but not in workers on a CPU.
            gc.collect()
            gc.freeze()

    @property
    def index(self) -> int:
        """The number of this worker among all of this server: of each data-parallel engine one after the other."""
        config = self.parallel_config
        engine = config.data_parallel_rank_local if copies.is_one_of_several(config) else config.data_parallel_index
        return int(engine * config.world_size + config.rank)

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing: there is no connection to open or to close."""

    init_transfer_engine = start_weight_update = finish_weight_update = shutdown

    def update_weights(self, update_info: dict[str, Any]) -> None:
        raise RuntimeError("weights come through deltawire's own route: see `deltawire attach`")

    receive_weights = update_weights

    def command(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """What the server asks for through the extension."""
        live = self.live
        if name in ("parameters", "disturb", "steer", "restore"):
            return self._probe(name, arguments)
        self._disturbed.restore()
        if name in THREADED:
            return self._begin(name, arguments)
        if name == "layout":
            return None if not live.pieces else self._layout()
        if name == "write":
            started = time.perf_counter()
            self._write(arguments["token"])
            return time.perf_counter() - started
        if name == "undo":
            # What is staged no more, as another agent has dropped it, was not written; the digest tells if it was.
            if live.staged is not None and live.staged.token == arguments["token"]:
                live.write(arguments["token"], undo=True)
        elif name == "load":
            with self._together():
                live.load(_tensors(Path(arguments["folder"])))
            live.measure(self._counted)
        elif name == "mark":
            live.check_read()
            live.mark(WeightVersion.parse(arguments["state"]))
        elif name == "hold":
            self._held = arguments["held"]
        elif name != "status":
            raise ValueError(f"unknown command {name!r}")
        return None

    def _probe(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """For `deltawire prove`. The weights are no version's, and any other command puts all bits back first."""
        self.live.mark(None)
        result: Any = None
        if name in ("restore", "parameters"):
            self._disturbed.restore()
            result = self._disturbed.about() if name == "parameters" else None
        elif name == "steer":
            result = self._disturbed.steer(arguments["parameter"], arguments["part"], arguments["seed"])
        elif arguments["rank"] == self.index:
            self._disturbed.disturb(arguments["parameter"], arguments["part"], arguments["strength"])
        # As after an update.
        copies.Copies(self.model, self.model_config.dtype).refresh(())
        return result

    def _layout(self) -> dict[str, Any]:
        specs = {name: [dtype, list(shape)] for name, (dtype, shape) in self._specs.items()}
        pieces = [piece.as_list() for piece in self.live.pieces]
        found = {"specs": specs, "pieces": pieces, "left_out": self._left_out}
        return {**found, "counted": self._counted, "device": self.device.type}

    def _write(self, token: str) -> None:
        """Write what is staged, between two steps. If that fails twice, the weights are those of before."""
        try:
            self._write_once(token)
        except Exception:
            try:
                self._write_once(token)
            except Exception:
                self.live.write(token, undo=True)
                raise

    def _write_once(self, token: str) -> None:
        self.live.write(token)
        staged = self.live.staged
        if staged is None or self.live.partial != staged.partial:
            raise EngineRejected("after the write, the weights do not have the digest computed before it")

    def _in_order(self) -> None:
        """What goes on next to serving reads weights, and what was noted of codes and scales: it comes after what was
        asked of the device so far, on the stream that serves.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _begin(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._is_awaited.set()
        self._is_awaited = threading.Event()
        works: dict[str, Callable[[Any], Any]] = {
            "bind": self._bind, "measure": self._measure, "stage": self._stage, "decode": self._decode,
            "check": self._check, "drop": partial(self._drop_written, self._is_awaited),
        }  # fmt: skip
        answer = Path(arguments["answers"][self.index]) if "answers" in arguments else None
        before = self._thread
        self._in_order()
        # A new thread has another stream, and the first device.
        serving = None if self._stream is None else torch.cuda.current_stream(self.device)
        # In a step that no graph has as a whole, as one with a new request, many calls want the interpreter.
        is_busy = bool if serving is None else is_forward_context_available

        def run() -> None:
            if before is not None:
                before.join()
            with nullcontext() if serving is None else _beside(serving), short_turns(is_busy):
                result, error = attempt(partial(works[name], arguments))
                if error is not None:
                    attempt(self._drop)
            if answer is not None:
                save_json(answer, self.answer(result, error))

        # torch's settings for what is compiled are of the context in which vLLM has made them.
        work = partial(copy_context().run, run)
        thread = threading.Thread(target=work, name=f"deltawire-{name}", daemon=True)
        thread.start()
        self._thread = thread

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A stream and memory of its own, for what goes on next to serving. The memory is given back by `_drop`."""
        self._drop()
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            # A pool is of the device that is the current one.
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                yield

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._quantized is None else self._quantized.together()

    def _drop(self) -> None:
        """Give back the memory of what is staged. Nobody else may refer to that: the memory of what is freed after its
        pool stays with the process.
        """
        self.live.drop_staged()
        self._pool = None

    def _drop_written(self, is_awaited: threading.Event, arguments: Mapping[str, Any]) -> None:
        if self._stream is not None:
            # Some steps later: the device is waited for, and who waits for tokens has just waited for the write.
            is_awaited.wait(DROP_AFTER_SECONDS)
        # The next one may have been staged since.
        if getattr(self.live.staged, "token", None) in (None, arguments["token"]):
            self._drop()

    def _bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        specs = {tensor: (dtype, tuple(shape)) for tensor, (dtype, shape) in arguments["specs"].items()}
        # vLLM keeps this for the process. Commands that do the same in the thread that serves wait for this one.
        with set_current_vllm_config(self.vllm_config):
            self.live.bind(specs)
        self._specs = specs
        self._in_order()
        with self._aside():
            self.live.rehearse()
        self._drop()
        # What was loaded and compiled stays, so Python need not look through it now and then, for which a server
        # would stand still for some 50 ms. vLLM does the same with what is there when it has started.
        gc.collect()
        gc.freeze()
        return self._layout()

    def _measure(self, arguments: Mapping[str, Any]) -> list[str]:
        """The digests of copies that workers share."""
        self._counted, *copies = arguments["numbers"][self.index]
        with self._aside():
            self.live.measure(self._counted)
            found = [str(self.live.sum_of(numbers)) for numbers in copies]
        self._drop()
        return found

    def _check(self, arguments: Mapping[str, Any]) -> None:
        folder = Path(arguments["folder"])
        if not arguments["takes"]:
            self.live.check(_tensors(folder))
            return
        with self._together(), self._aside():
            self.live.check(_tensors(folder))
            self.live.take_kept(_tensors(folder))
        self._drop()

    def _stage(self, arguments: Mapping[str, Any]) -> None:
        with self._together(), self._aside():
            self.live.stage_file(Path(arguments["paths"][self.index]))

    def _decode(self, arguments: Mapping[str, Any]) -> None:
        base, state = WeightVersion.parse(arguments["base"]), WeightVersion.parse(arguments["state"])
        if base is None or state is None:
            raise ValueError("the delta's versions are missing")
        delta = Delta(*merge([Container(_read(Path(file))) for file in arguments["files"]]))
        with self._together(), self._aside():
            self.live.stage_delta(arguments["token"], delta, base, state)
        # One by one: all at once they would be let go of in one turn.
        while delta.entries:
            delta.entries.pop()

    def wait(self) -> None:
        """Wait for what runs in the thread: other commands must not overlap with it. Those that begin in a thread
        wait there, while the worker serves.
        """
        if self._thread is not None:
            self._is_awaited.set()
            self._thread.join()
            self._thread = None

    @property
    def is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def answer(self, result: Any, error: Any) -> dict[str, Any]:
        return {"rank": self.index, "error": error, "result": result, "held": self._held, **self.live.status()}

    def _find(self, specs: Mapping[str, TensorSpec]) -> Found:
        known = copies.check(self.model, self.vllm_config)
        model = self.model
        if self.model_config.quantization is not None:
            self._quantized = self._quantized or quantized.find(model)
            model = quantized.as_loaded(model, self._quantized)
        storages = flat_storages(model)
        traced = trace(model.load_weights, storages, specs)
        check_covered(model, storages, traced, known)
        self._left_out = left_out(model, traced, specs)
        self._computed = Computed(traced, storages, specs, self._computed)
        derived: list[Derived] = [self._computed, copies.Copies(self.model, self.model_config.dtype)]
        found = {**storages, **self._computed.storages}
        return Found(self._computed.pieces, found, derived, traced.fills, self._quantized)


class WorkerExtension:
    """Adds one method to vLLM's worker, which deltawire's route in the server calls on all of them."""

    def deltawire(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do a command, and say how it went and how things are."""
        engine = getattr(self, "weight_transfer_engine", None)
        if not isinstance(engine, DeltawireEngine):
            return {"error": 'the server was not started with --weight-transfer-config \'{"backend": "deltawire"}\''}
        if name == "status":
            return engine.answer(None, None) | {"at_work": engine.is_at_work}
        if name not in THREADED:
            engine.wait()
        config = nullcontext() if name in THREADED else set_current_vllm_config(self.vllm_config)  # type: ignore[attr-defined]
        with config:
            # What vLLM cannot send would end the thread that answers, and nobody would hear from it again.
            result, error = attempt(lambda: json.loads(json.dumps(engine.command(name, arguments))))
        if name in ("write", "load"):
            self.model_runner.reset_lora_state()  # type: ignore[attr-defined]
        return engine.answer(result, error)


@contextmanager
def _beside(serving: torch.cuda.Stream) -> Iterator[None]:
    """For a thread next to one that serves: on the same stream, and with few processors for what torch computes on the
    host, since all of them together would leave none to the others.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(min(usual, BESIDE))
    try:
        with torch.cuda.stream(serving):
            yield
    finally:
        # That is also what threads that begin later have.
        torch.set_num_threads(usual)


def _read(file: Path) -> npt.NDArray[np.uint8]:
    """A file's bytes. At once: reading an array at a time would hand the interpreter back and forth with the thread
    that serves. In torch's memory: it is let go of page by page, and torch lets others run meanwhile.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        content: npt.NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
        if opened.readinto(content.data) != len(content):
            raise OSError(f"{file} became shorter while it was being read")
    return content


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    # A folder may have other files of weights that are no part of the checkpoint.
    for file in Checkpoint(folder).shards:
        with safe_open(folder / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
