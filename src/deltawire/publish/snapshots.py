"""Where a publisher keeps its snapshot: next to the weights on a GPU, or in host memory."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from deltawire.errors import MissingDependency
from deltawire.publish.history import History
from deltawire.publish.settings import Settings
from deltawire.publish.sources import ModuleWeights
from deltawire.tensors.names import check_names
from deltawire.tensors.weights import Tensor


def new_history(weights: Mapping[str, Tensor], version: int, tied: Mapping[str, str], settings: Settings) -> History:
    """A history that starts with the current weights; by default on their GPU, if they are on one."""
    check_names(weights)
    if not _on_device(weights, settings.snapshot):
        return History(weights, version, tied=tied, scratch=settings.scratch)
    from deltawire.publish.device import DeviceHistory, is_kept

    assert isinstance(weights, ModuleWeights)
    if not any(is_kept(weights, name) for name in weights):
        return History(weights, version, tied=tied, scratch=settings.scratch)
    return DeviceHistory(weights, version, allowed=settings.allowed, tied=tied, scratch=settings.scratch)


def _on_device(weights: Any, snapshot: str | None) -> bool:
    has_triton = importlib.util.find_spec("triton") is not None
    if snapshot == "host":
        return False
    if snapshot is None:
        return has_triton and isinstance(weights, ModuleWeights) and _lies_on_gpu(weights)
    if not isinstance(weights, ModuleWeights):
        raise ValueError("snapshot='device' is for torch modules; other weights are published with snapshot='host'")
    if not has_triton:
        raise MissingDependency("snapshot='device' needs triton: pip install triton")
    from triton import knobs

    # The interpreter runs the kernels on the CPU; it is for tests.
    if not _lies_on_gpu(weights) and not knobs.runtime.interpret:
        raise ValueError("snapshot='device' needs a module on a GPU; use snapshot='host' for one on the CPU")
    return True


def _lies_on_gpu(weights: ModuleWeights) -> bool:
    return any(weights.tensor(name).device.type == "cuda" for name in weights)
