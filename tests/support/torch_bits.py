"""Torch tensors of any bits, modules of them, steps away from them, and whether they have arrived."""

import numpy as np
import torch

from deltawire import Replica

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def patterns(count: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Any bit patterns: NaN, infinity, denormals, zeros of both signs."""
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    return torch.randint(low, high, (count,), generator=generator, dtype=integer).view(dtype)


def stepped(tensor: torch.Tensor, density: float, seed: int) -> torch.Tensor:
    """Some elements a few steps away."""
    generator = torch.Generator().manual_seed(seed)
    bits = tensor.clone().view(torch.int16)
    where = torch.rand(bits.shape, generator=generator) < density
    bits[where] += torch.randint(-3, 4, (int(where.sum()),), generator=generator, dtype=torch.int16)
    return bits.view(tensor.dtype)


def module_of(**tensors: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor.to(DEVICE), requires_grad=tensor.is_floating_point()))
    return module


def set_to(module: torch.nn.Module, **tensors: torch.Tensor) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            getattr(module, name).copy_(tensor)


def arrived(store: object) -> dict[str, torch.Tensor]:
    with Replica(store, {}, heartbeat_seconds=None) as replica:
        replica.pull()
        return {
            name: torch.from_numpy(each.bits.view(np.uint8).copy()) for name, each in replica.target.weights().items()
        }


def assert_arrived(store: object, tensors: dict[str, torch.Tensor]) -> None:
    found = arrived(store)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.cpu().contiguous().view(-1).view(torch.uint8)), name
