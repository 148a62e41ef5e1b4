"""Copies to a device and back."""

import pytest
import torch

from deltawire.kernels.gpu.fetch import PIECE, to_device, to_host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("num_bytes", [0, 8, PIECE, PIECE + 8, 3 * PIECE - 8])
def test_what_comes_back_is_what_was_sent(dtype, num_bytes):
    values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype)
    there = to_device(values, torch.device(DEVICE))
    assert there.device.type == DEVICE
    # Reads of what is computed on the device only now.
    assert torch.equal(to_host(there.flip(0)), values.flip(0))
