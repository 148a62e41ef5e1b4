"""What runs in each worker of a vLLM server: `--weight-transfer-config '{"backend": "deltawire"}'` together with
`--worker-extension-cls deltawire.engines.vllm.worker.WorkerExtension`.

With several workers vLLM loses step for good when one of them raises, so nothing here does. What went wrong is kept,
and the agent asks for it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from deltawire.engines.live_weights import Found, LiveModel, error_fields
from deltawire.engines.trace import flat_storages, trace
from deltawire.engines.vllm import cpu
from deltawire.errors import EngineRejected
from deltawire.tensors.digest import WeightVersion
from deltawire.tensors.weights import TensorSpec


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: the agent opens the engine through the worker extension."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which update: the token of a change that is staged, or the folder of a checkpoint."""

    token: str | None = None
    folder: str | None = None


class DeltawireEngine(WeightTransferEngine):  # type: ignore[misc]
    """Writes staged changes into the model's parameters, or reloads all of them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.live = LiveModel(self._find)
        self.busy = False
        """An update was begun and not ended. The server may be paused because of it."""
        self.error: dict[str, Any] | None = None
        """Why the last command failed."""
        self._specs: dict[str, TensorSpec] = {}
        self._counted: list[int] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None: ...

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.attempt(lambda: self.receive_weights(self.parse_update_info(update_info)))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.token is not None:
            self.live.write(update_info.token)
        elif update_info.folder is not None:
            self._reload(Path(update_info.folder))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def attempt(self, work: Callable[[], Any]) -> Any:
        """Do something; what it returns, or None where it failed, and then `error` says why."""
        self.error = None
        try:
            return work()
        except Exception as error:
            self.error = error_fields(error)
            return None

    def command(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """What the agent asks for through the extension."""
        live = self.live
        if name == "bind":
            self._specs = {tensor: (dtype, tuple(shape)) for tensor, (dtype, shape) in arguments["specs"].items()}
            return [piece.as_list() for piece in live.bind(self._specs)]
        if name == "measure":
            self._counted, *copies = arguments["numbers"][self.parallel_config.rank]
            live.measure(self._counted)
            return [str(live.sum_of(numbers)) for numbers in copies]
        if name == "begin":
            self.busy = True
        elif name == "stage":
            self.busy = True
            live.stage_file(Path(arguments["paths"][self.parallel_config.rank]))
        elif name == "undo":
            live.write(arguments["token"], undo=True)
        elif name == "end":
            live.mark(WeightVersion.parse(arguments["state"]))
            self.busy = False
        elif name != "status":
            raise ValueError(f"unknown command {name!r}")
        return None

    def _find(self, specs: Mapping[str, TensorSpec]) -> Found:
        if current_platform.is_cpu():
            packed = cpu.packed_layer(self.model)
            if packed is not None:
                raise EngineRejected(
                    f"vLLM has packed the weights of {packed} for the CPU and computes from the packed copy, so "
                    f"changes in place would be lost: start the server with {cpu.SWITCH}=1, which keeps them unpacked",
                    tensor=packed,
                )
        storages = flat_storages(self.model)
        return trace(self.model.load_weights, storages, specs), storages

    def _reload(self, folder: Path) -> None:
        """Load a checkpoint layer by layer, as vLLM does it, and find out again where everything is."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        before = self.live.pieces
        initialize_layerwise_reload(self.model)
        with torch.no_grad(), self.device:
            self.model.load_weights(_tensors(folder))
        finalize_layerwise_reload(self.model, self.model_config)
        if self.live.bind(self._specs) != before:
            raise EngineRejected("after a reload the weights live elsewhere: restart the server")
        self.live.measure(self._counted)


class WorkerExtension:
    """Adds one method to vLLM's worker, which the agent calls on all of them by `/collective_rpc`."""

    def deltawire(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do a command, and tell how it went and how things are."""
        engine = getattr(self, "weight_transfer_engine", None)
        if not isinstance(engine, DeltawireEngine):
            return {"error": 'the server was not started with --weight-transfer-config \'{"backend": "deltawire"}\''}
        # The state after an update that has failed is what counts, so asking for it must not clear the error.
        result = None
        if name != "status":
            result = engine.attempt(lambda: engine.command(name, arguments))
        return {
            "rank": engine.parallel_config.rank,
            "session": getattr(self, "_weight_update_active", False),
            "busy": engine.busy,
            "error": engine.error,
            "result": result,
            **engine.live.status(),
        }


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
