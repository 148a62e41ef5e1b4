"""Updates of a torch module on a GPU: checked bit for bit against the CPU's, then timed for two models.

    PYTHONPATH=src python benchmarks/gpu_live.py --out FOLDER

The pause is timed as the engine tells it: from the moment when nobody computes with the weights until they may again.
Beside it, in the same run: a copy of all weights on the device (the floor of anything that touches all of them),
`load_state_dict` from page-locked host memory, and `index_copy_` of the same changes, which checks nothing. With
`--device cpu` a small module goes through the same code.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from deltawire.engines.engine import EngineChange
from deltawire.engines.torch import TorchEngine
from deltawire.errors import EngineRejected
from deltawire.format.patches import Patch
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion, change_digest, tensor_key
from deltawire.tensors.dtypes import dtype_named
from deltawire.tensors.weights import Tensor, spec, torch_view
from measure import write_csv

DENSITY = 0.01
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8)


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (151936, hidden), "norm": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"{i}_q": (heads * 128, hidden), f"{i}_k": (kv_heads * 128, hidden), f"{i}_v": (kv_heads * 128, hidden),
            f"{i}_o": (hidden, heads * 128), f"{i}_gate": (inner, hidden), f"{i}_up": (inner, hidden),
            f"{i}_down": (hidden, inner), f"{i}_norm1": (hidden,), f"{i}_norm2": (hidden,),
            f"{i}_q_norm": (128,), f"{i}_k_norm": (128,),
        }  # fmt: skip
    return shapes if tied else shapes | {"head": (151936, hidden)}


MODELS = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 8, 12288, tied=False),
}
SMALL = {"small": {f"{i}": (300 + i, 200) for i in range(5)}}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(SIGNED[tensor.itemsize])


def host_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """All weights in host memory, as a mirror has them."""
    found = {}
    for name, value in module.named_parameters():
        bits = torch_view(value.detach().view(-1)).copy()
        found[name] = Tensor(dtype_named(str(value.dtype).removeprefix("torch.")), tuple(value.shape), bits)
    return found


def opened(module: torch.nn.Module) -> TorchEngine:
    engine = TorchEngine(module)
    weights = {name: value.detach() for name, value in module.named_parameters()}
    engine.bind({name: spec(Forms(weights), name) for name in weights})
    engine.mark(WeightVersion("bench", 0, engine.digest()))
    return engine


class Forms(dict[str, torch.Tensor]):
    """Tensors whose dtypes and shapes are known without a copy to the host."""

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        return dtype_named(str(self[name].dtype).removeprefix("torch.")).name, tuple(self[name].shape)


def random_change(module: torch.nn.Module, old: dict[str, Tensor], base: WeightVersion, density: float) -> EngineChange:
    """Some elements of every tensor get another lowest bit."""
    patches, reached = [], base.digest
    for name, value in module.named_parameters():
        where = torch_view((torch.rand(value.numel(), device=value.device) < density).nonzero().view(-1)).view(np.int64)
        tensor = old[name]
        before = tensor.bits[where]
        after = before ^ before.dtype.type(1)
        patches.append(Patch(name, tensor.dtype.name, Box.whole(tensor.shape), after, where))
        reached += change_digest(tensor_key(name, tensor.dtype, tensor.shape), where, before, after)
    return EngineChange(base, WeightVersion(base.run, base.version + 1, reached), patches, old)


# Checks


def check(device: torch.device) -> None:
    """The same changes on the device and on the host: forth, again, refused and taken back, and over a mix."""
    torch.manual_seed(1)
    pairs = [{}, {}]
    for i, dtype in enumerate(DTYPES):
        bits = torch.randint(-(1 << 62), 1 << 62, (20_011 + i,), dtype=torch.int64).to(SIGNED[dtype.itemsize])
        for tensors, to in zip(pairs, (torch.device("cpu"), device), strict=True):
            # Two parameters in one storage, the second where no word starts.
            whole = bits.to(to, copy=True).view(dtype)
            tensors |= {
                f"{i}_a": whole[:7],
                f"{i}_b": whole[7:10_007].view(-1, 2)[: 4000 + i],
                f"{i}_c": bits[:1].to(to, copy=True).view(dtype),
            }
    host, live = (module_of(tensors) for tensors in pairs)
    engines = [opened(host), opened(live)]
    old = host_weights(host)
    assert engines[0].digest() == engines[1].digest()

    def same() -> None:
        for (name, ours), theirs in zip(host.named_parameters(), live.parameters(), strict=True):
            assert torch.equal(flat_bits(ours), flat_bits(theirs).cpu()), name

    for density in (0.0, 0.001, 0.3, 1.0):
        base = engines[0].state
        assert base is not None
        change = random_change(host, old, base, density)
        wrong = EngineChange(base, WeightVersion("bench", 99, Digest(1, 2)), change.patches, old)
        for engine in engines:
            for refused in (wrong, EngineChange(wrong.state, change.state, change.patches, old)):
                try:
                    engine.stage(refused)
                    engine.commit(refused)
                except EngineRejected:
                    continue
                raise AssertionError("a wrong change was written")
        same()
        assert engines[1].digest() == base.digest
        for engine in engines:
            for _ in range(2):
                engine.stage(change)
                engine.commit(change)
        same()
        assert engines[0].digest() == engines[1].digest() == change.state.digest
        old = host_weights(host)
    print(f"{len(old)} tensors of {len(DTYPES)} dtypes, four densities: equal", flush=True)


# Times


def measure(name: str, shapes: dict[str, tuple[int, ...]], device: torch.device, rounds: int) -> Iterator[list[object]]:
    torch.manual_seed(0)
    tensors = {each: torch.empty(shape, dtype=torch.bfloat16, device=device) for each, shape in shapes.items()}
    module = module_of({each: tensor.normal_(std=0.02) for each, tensor in tensors.items()})
    total = sum(value.numel() for value in module.parameters())
    engine = opened(module)
    old = host_weights(module)
    base = engine.state
    assert base is not None
    forth = random_change(module, old, base, DENSITY)
    new = {each: Tensor(tensor.dtype, tensor.shape, tensor.bits.copy()) for each, tensor in old.items()}
    back_patches = []
    for patch in forth.patches:
        back_patches.append(Patch(patch.name, patch.dtype, patch.box, old[patch.name].bits[patch.where], patch.where))
        new[patch.name].bits[patch.where] = patch.bits
    back = EngineChange(forth.state, base, back_patches, new)
    changed = forth.num_changed
    print(f"{name}: {total:,} weights, {changed:,} changes, {len(shapes)} tensors", flush=True)

    floor = timed(partial(copy_all, tensors, like(tensors)), device, rounds)

    def row(work: str, milliseconds: float, extra_bytes: int | None = None) -> list[object]:
        extra = "" if extra_bytes is None else extra_bytes / changed
        return [name, work, milliseconds, milliseconds / floor, changed, extra]

    yield row("floor: copy of all weights on the device", floor)
    pauses, stages, extra = [], [], 0
    for i in range(2 * rounds + 2):
        change = back if i % 2 else forth
        before = held_bytes(device)
        started = time.perf_counter()
        engine.stage(change)
        wait(device)
        seconds = time.perf_counter() - started
        extra = held_bytes(device) - before
        pause = engine.commit(change)
        if i >= 2:
            stages.append(1000 * seconds)
            pauses.append(1000 * pause)
    assert engine.digest() == base.digest
    yield row("deltawire: stage (the engine serves)", statistics.median(stages), extra)
    yield row("deltawire: pause (write, check, digest)", statistics.median(pauses))
    del new, back
    yield row("digest of all weights", timed(engine.digest, device, rounds))

    where = {patch.name: torch.from_numpy(patch.positions).to(device) for patch in forth.patches}
    values = {patch.name: torch.from_numpy(patch.bits.view(np.int16)).to(device) for patch in forth.patches}
    index_copy = timed(partial(index_copy_all, tensors, where, values), device, rounds)
    yield row("index_copy_, int64 positions, no check", index_copy, 10 * changed)
    assert engine.digest() == forth.state.digest
    del where, values
    pinned = {
        each: torch.empty(shapes[each], dtype=torch.bfloat16, pin_memory=device.type == "cuda") for each in shapes
    }
    for each, tensor in pinned.items():
        tensor.copy_(tensors[each])
    yield row("load_state_dict from page-locked memory", timed(lambda: module.load_state_dict(pinned), device, rounds))
    assert engine.digest() == forth.state.digest


def like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}


def copy_all(source: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    for name, tensor in source.items():
        to[name].copy_(tensor)


def index_copy_all(
    tensors: dict[str, torch.Tensor], where: dict[str, torch.Tensor], values: dict[str, torch.Tensor]
) -> None:
    for name, tensor in tensors.items():
        flat_bits(tensor).index_copy_(0, where[name], values[name])


def held_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def timed(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Milliseconds until the device is done; the median."""
    times = []
    for i in range(rounds + 2):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if i >= 2:
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default="", help="what the results are of, where there is no git")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--models", default=",".join(MODELS), help="which of them, in this order")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    check(device)
    notes = {"gpu": torch.cuda.get_device_name() if is_gpu else "none", "torch": torch.__version__}
    notes |= {"commit": options.commit} if options.commit else {}
    header = ["model", "work", "milliseconds", "times_floor", "changes", "extra_bytes_per_change"]
    rows: list[list[object]] = []
    for name, shapes in (SMALL if not is_gpu else {each: MODELS[each] for each in options.models.split(",")}).items():
        for row in measure(name, shapes, device, options.rounds):
            print(f"{row[0]:12} {row[1]:45} {row[2]:10.3f} ms {row[3]:8.2f}x  {row[5]}", flush=True)
            rows.append(row)
        if is_gpu:
            torch.cuda.empty_cache()
        write_csv("gpu_live.csv", header, rows, folder=options.out, notes=notes)


if __name__ == "__main__":
    main()
