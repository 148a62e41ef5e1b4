"""What vllm_gpu.py asks of a vLLM worker through `/collective_rpc`: checksums, and updates with vLLM's own code.

vLLM's `/weight_checker` gives the same checksums with one thread, which takes 40 s for 8 B weights.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors.torch import load_file

from deltawire.engines.vllm.worker import WorkerExtension
from measure import sha256

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Extension(WorkerExtension):
    model_runner: Any

    def sha256s(self) -> dict[str, str]:
        """The SHA-256 of every parameter, read from memory without deltawire's code."""
        synchronize()
        named = dict(self.model_runner.model.named_parameters())
        # The largest first, and threads that keep their pinned memory.
        if not hasattr(self, "_hashers"):
            self._hashers = ThreadPoolExecutor(8)
        order = sorted(named, key=lambda name: -named[name].numel())
        return dict(zip(order, self._hashers.map(sha256, map(named.get, order)), strict=True))

    def patch(self, path: str) -> None:
        """Apply indices and values from a file as vLLM's `sparse_nccl` applies those that it receives."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        arrays = load_file(path, device=DEVICE)
        names = [name.removesuffix(".shape") for name in arrays if name.endswith(".shape")]
        patches = [
            CheckpointWeightPatch(
                name, tuple(arrays[f"{name}.shape"].tolist()), torch.bfloat16, arrays[f"{name}.values"],
                arrays[f"{name}.indices"],
            )
            for name in names
        ]  # fmt: skip
        load_checkpoint_weight_patches(self.model_runner.model, patches)
        synchronize()

    def reload(self, path: str) -> None:
        """Load a whole checkpoint in place, layer by layer."""
        self.model_runner.reload_weights(weights_path=path)
        synchronize()
