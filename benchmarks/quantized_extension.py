"""What quantized_gpu.py asks of a vLLM worker: checksums of what it serves, and what each update wrote."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deltawire.engines.vllm.worker import WorkerExtension


def sha256(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()).hexdigest()


def sha256s(named: dict[str, torch.Tensor]) -> dict[str, str]:
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(named, pool.map(sha256, named.values()), strict=True))


class Extension(WorkerExtension):
    model_runner: Any
    weight_transfer_engine: Any

    def sha256s(self) -> dict[str, str]:
        """The SHA-256 of every parameter, read from memory without deltawire's code."""
        return sha256s(dict(self.model_runner.model.named_parameters()))

    def count_writes(self) -> None:
        """Count what is staged from now on; not what is written, which would be in the pause."""
        live = self.weight_transfer_engine.live
        self._counts: dict[str, int] = {}
        original = live._ready

        def ready(*arguments: Any) -> None:
            original(*arguments)
            counts = dict.fromkeys(("served", "codes", "scales", "kept", "staged_bytes"), 0)
            for item in live.staged.items:
                index, old, new = (getattr(item.change, each) for each in ("index", "old", "new"))
                counts["staged_bytes"] += sum(each.nbytes for each in (index, old, new))
                kind = "kept" if item.piece.storage in live._quantized.tensors else "served"
                if item.number < 0:
                    kind = item.piece.tensor.partition(" ")[0]
                counts[kind] += len(index)
            self._counts = counts

        live._ready = ready

    def written(self) -> dict[str, int]:
        """Of the last update: elements of weights that are served as they are, codes and scales; elements of the
        weights in host memory that codes are made of; and bytes of all of it.
        """
        return self._counts
