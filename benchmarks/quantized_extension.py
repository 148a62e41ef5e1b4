"""What quantized_gpu.py asks of a vLLM worker: checksums of what it serves, and what each update wrote."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deltawire.engines.staged import PieceChange
from deltawire.engines.vllm.worker import WorkerExtension

INDEX_BYTES = 4


def sizes(change: Any) -> tuple[int, int]:
    """How many elements a change in host memory or on a device is of, and the bytes of one."""
    if isinstance(change, PieceChange):
        return len(change.index), change.old.itemsize
    return change.length, change.itemsize


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
                length, item_bytes = sizes(item.change)
                counts["staged_bytes"] += length * (INDEX_BYTES + 2 * item_bytes)
                kind = "kept" if item.piece.storage in live._quantized.tensors else "served"
                if item.number < 0:
                    kind = item.piece.tensor.partition(" ")[0]
                counts[kind] += length
            self._counts = counts

        live._ready = ready

    def written(self) -> dict[str, int]:
        """Of the last update: elements of weights that are served as they are, codes and scales; elements of the
        weights in host memory that codes are made of; and bytes of all of it.
        """
        return self._counts
