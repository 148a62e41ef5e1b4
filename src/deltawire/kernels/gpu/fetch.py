"""Numbers on their way from a device to the host, which has other things to do meanwhile."""

import torch


class Fetch:
    """A copy of a tensor that is under way; what the device is given later does not delay it."""

    def __init__(self, numbers: torch.Tensor) -> None:
        on_gpu = numbers.is_cuda
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=on_gpu)
        self._host.copy_(numbers, non_blocking=True)
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> torch.Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host
