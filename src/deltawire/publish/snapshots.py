"""Where a publisher keeps its snapshot: next to the weights on a GPU, or in host memory."""

import importlib.util
import logging
from typing import Any

from deltawire.errors import MissingDependency
from deltawire.publish.history import History
from deltawire.publish.settings import Settings
from deltawire.publish.sources import ModuleWeights, lies_on_gpu
from deltawire.publish.streams import Stream
from deltawire.tensors.names import Ties, check_names
from deltawire.tensors.weights import Tensors, is_torch

log = logging.getLogger("deltawire")


def new_history(weights: Tensors | Stream, version: int, tied: Ties, settings: Settings) -> History:
    """A history that starts with the current weights; by default on their GPU, if they are on one."""
    if not isinstance(weights, Stream):
        check_names(weights)
    history: History | None = None
    if _on_device(weights, settings.snapshot):
        from deltawire.publish.device import DeviceHistory, is_kept

        assert isinstance(weights, ModuleWeights | Stream)
        if isinstance(weights, Stream) or any(is_kept(weights, name) for name in weights):
            history = DeviceHistory(weights, version, allowed=settings.allowed, tied=tied, scratch=settings.scratch)
    history = history or History(weights, version, tied=tied, scratch=settings.scratch)
    log.info("the snapshot of %d tensors is kept on: %s", len(history.specs), history.place)
    return history


def _on_device(weights: Any, snapshot: str | None) -> bool:
    has_triton = importlib.util.find_spec("triton") is not None
    if snapshot == "host":
        return False
    # Of weights that come one by one the first says where they are.
    is_stream, first = isinstance(weights, Stream), weights.first() if isinstance(weights, Stream) else None
    is_torch_source = is_torch(first) if is_stream else isinstance(weights, ModuleWeights)
    tensors = [first] if is_stream else [weights.tensor(name) for name in weights] if is_torch_source else []
    is_on_gpu = any(map(lies_on_gpu, tensors))
    if snapshot is None:
        return has_triton and is_on_gpu
    if not is_torch_source:
        raise ValueError(
            "snapshot='device' needs a torch module, or torch tensors on a GPU; other weights are published with "
            "snapshot='host'"
        )
    if not has_triton:
        raise MissingDependency("snapshot='device' needs triton: pip install triton")
    from triton import knobs

    # The interpreter runs the kernels on the CPU; it is for tests.
    if not is_on_gpu and not knobs.runtime.interpret:
        raise ValueError("snapshot='device' needs a module on a GPU; use snapshot='host' for one on the CPU")
    return True
