"""Numbers on their way between a device and the host, which has other things to do meanwhile."""

from typing import Any

import numpy.typing as npt
import torch


def send(numbers: npt.NDArray[Any], device: Any) -> torch.Tensor:
    """Numbers for a device. The host does not wait until they are there."""
    found = torch.from_numpy(numbers)
    return found.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else found


class Fetch:
    """A copy of a tensor that is under way; what the device is given later does not delay it."""

    def __init__(self, numbers: torch.Tensor) -> None:
        on_gpu = numbers.is_cuda
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=on_gpu)
        self._host.copy_(numbers, non_blocking=True)
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> torch.Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host
