"""A worker extension that also updates weights by vLLM's own `load_checkpoint_weight_patches` and reload, timed."""

import os
import time

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from deltawire.engines.vllm.worker import DeltawireEngine, WorkerExtension

_command = DeltawireEngine.command


def _timed(self, name, arguments):
    started = time.perf_counter()
    result = _command(self, name, arguments)
    if name == "write":
        self.seconds = time.perf_counter() - started
    return result


DeltawireEngine.command = _timed


class BenchExtension(WorkerExtension):
    def bench_seconds(self):
        """How long the last update took inside the worker."""
        return {"seconds": self.weight_transfer_engine.seconds, "pid": os.getpid()}

    def bench_stage(self, path):
        """Read patches, before the pause."""
        with safe_open(path, "pt") as file:
            self._patches = [
                CheckpointWeightPatch(
                    name, tuple(map(int, shape.split(","))), torch.bfloat16, file.get_tensor(f"{name}.values"),
                    file.get_tensor(f"{name}.indices"),
                )
                for name, shape in file.metadata().items()
            ]  # fmt: skip
        return {}

    def bench_apply(self):
        started = time.perf_counter()
        load_checkpoint_weight_patches(self.weight_transfer_engine.model, self._patches)
        return {"seconds": time.perf_counter() - started}

    def bench_reload(self, path):
        started = time.perf_counter()
        self.model_runner.reload_weights(weights_path=path)
        return {"seconds": time.perf_counter() - started}
