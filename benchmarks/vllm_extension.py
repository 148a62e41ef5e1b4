"""What vllm_gpu.py asks of a vLLM worker through `/collective_rpc`: checksums, and updates with vLLM's own code.

vLLM's `/weight_checker` gives the same checksums with one thread, which takes 40 s for 8 B weights.
"""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors.torch import load_file

from deltawire.engines.vllm.worker import WorkerExtension

PART = 1 << 26
_thread = threading.local()


def sha256(*values: torch.Tensor) -> str:
    """Of some tensors after each other, through pinned memory: while one part is hashed the next comes."""
    if not hasattr(_thread, "buffers"):
        _thread.buffers = [torch.empty(PART, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        _thread.stream = torch.cuda.Stream()
    hashed, ready = hashlib.sha256(), None
    flats = [value.contiguous().view(-1).view(torch.uint8) for value in values]
    parts = (flat[at : at + PART] for flat in flats for at in range(0, len(flat), PART))
    with torch.cuda.stream(_thread.stream):
        for number, part in enumerate(parts):
            buffer = _thread.buffers[number % 2][: len(part)]
            done = torch.cuda.Event()
            buffer.copy_(part, non_blocking=True)
            done.record()
            if ready is not None:
                ready[1].synchronize()
                hashed.update(ready[0].numpy())
            ready = buffer, done
        if ready is not None:
            ready[1].synchronize()
            hashed.update(ready[0].numpy())
    return hashed.hexdigest()


class Extension(WorkerExtension):
    model_runner: Any

    def sha256s(self) -> dict[str, str]:
        """The SHA-256 of every parameter, read from memory without deltawire's code."""
        torch.cuda.synchronize()
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

        arrays = load_file(path, device="cuda")
        names = [name.removesuffix(".shape") for name in arrays if name.endswith(".shape")]
        patches = [
            CheckpointWeightPatch(
                name, tuple(arrays[f"{name}.shape"].tolist()), torch.bfloat16, arrays[f"{name}.values"],
                arrays[f"{name}.indices"],
            )
            for name in names
        ]  # fmt: skip
        load_checkpoint_weight_patches(self.model_runner.model, patches)
        torch.cuda.synchronize()

    def reload(self, path: str) -> None:
        """Load a whole checkpoint in place, layer by layer."""
        self.model_runner.reload_weights(weights_path=path)
        torch.cuda.synchronize()
