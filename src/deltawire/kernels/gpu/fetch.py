"""Copies between a device and the host, which have other things to do meanwhile: through memory that is page-locked,
where the driver has nothing to copy itself.
"""

from collections import deque

import torch

# What is larger is copied so many bytes at a time, through memory that torch keeps.
PIECE = 1 << 21


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


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A flat tensor on the host."""
    if not values.is_cuda:
        return values
    found = torch.empty(values.shape, dtype=values.dtype, device="cpu")
    coming: deque[tuple[torch.Tensor, Fetch]] = deque()
    size = PIECE // values.itemsize
    for here, there in zip(found.split(size), values.split(size), strict=True):
        coming.append((here, Fetch(there)))
        if len(coming) > 1:
            _arrived(*coming.popleft())
    for each in coming:
        _arrived(*each)
    return found


def _arrived(here: torch.Tensor, fetch: Fetch) -> None:
    here.copy_(fetch.wait())


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A flat tensor from the host on a device, which may not have all of it yet."""
    if device.type != "cuda":
        return values.to(device)
    found = torch.empty(values.shape, dtype=values.dtype, device=device)
    size = PIECE // values.itemsize
    for here, there in zip(values.split(size), found.split(size), strict=True):
        there.copy_(here.pin_memory(), non_blocking=True)
    return found
