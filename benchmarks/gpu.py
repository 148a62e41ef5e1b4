"""The GPU kernels: checked bit for bit against the CPU's, then timed; and whole publishes of two models.

    PYTHONPATH=src python benchmarks/gpu.py --out FOLDER

Times are ratios to the floor: a copy of the weights on the device, which moves as many bytes as reading new and old
weights once; timed in the same run.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import gpu_receive
from deltawire import Publisher, Replica
from deltawire.codec.tiled import MOST_TILE_LOG2
from deltawire.kernels.gpu import encode as kernels
from deltawire.kernels.gpu.arena import Arena
from deltawire.kernels.gpu.compare import BLOCK
from deltawire.kernels.gpu.decode import decode, tile_tables, upload
from deltawire.publish.changes import advanced, box_digests, encode_changes
from deltawire.publish.device import DeviceHistory
from deltawire.publish.history import History
from deltawire.publish.sources import ModuleWeights, module_source
from deltawire.workers import Workers
from gpu_receive import Row, Timer, timed
from measure import write_csv

DEVICE = torch.device("cuda")
LARGE = 1 << 30
DENSITY = 0.0115
TILE_LOG2 = 20


class Model(torch.nn.Module):
    """Parameters of given shapes, and nothing else."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        for name, shape in shapes.items():
            values = torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=0.02)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(values))


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (151936, hidden), "norm": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"{i}.q": (heads * 128, hidden), f"{i}.k": (kv_heads * 128, hidden), f"{i}.v": (kv_heads * 128, hidden),
            f"{i}.o": (hidden, heads * 128), f"{i}.gate": (inner, hidden), f"{i}.up": (inner, hidden),
            f"{i}.down": (hidden, inner), f"{i}.norms": (2 * hidden,), f"{i}.qk_norms": (256,),
        }  # fmt: skip
    return shapes if tied else shapes | {"head": (151936, hidden)}


MODELS = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 8, 12288, tied=False),
}


def update(weights: torch.Tensor, size: float, part: int = 1 << 26) -> None:
    """What training with master weights does to bf16: the smaller a weight's last place, the likelier it changes."""
    flat = weights.view(-1)
    for start in range(0, len(flat), part):
        piece = flat[start : start + part]
        values = piece.float()
        places = torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - 8)
        hidden = (torch.rand_like(values) - 0.5) * places
        piece.copy_(values + hidden + size * torch.randn_like(values))


def calibrated() -> float:
    """The size of updates that changes 1.15 % of normal weights."""
    weights = torch.empty(1 << 24, dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02)
    size = 1e-6
    for _ in range(4):
        changed = weights.clone()
        update(changed, size)
        size *= DENSITY / (changed.view(torch.int16) != weights.view(torch.int16)).float().mean().item()
    return size


# Checks


def check_sending() -> int:
    """Every case of the receiving side, and odd ones, through a history on the device and one on the host."""
    checked = 0
    for case in gpu_receive.cases():
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[case.dtype.name]
        old, new = (gpu_receive.on_device(bits).view(dtype) for bits in (case.old, case.new))
        check_update(case.name, [old, old[:5001], old[-70001:]], [new, new[:5001], new[-70001:]], case.dtype.name)
        checked += 1
    for seed in range(3):
        torch.manual_seed(seed)
        old = torch.randint(-(1 << 31), 1 << 31, (300_001,), device=DEVICE, dtype=torch.int64).to(torch.int32)
        new = old + torch.randint(-(1 << 16), 1 << 16, old.shape, device=DEVICE, dtype=torch.int32)
        for dtype in ("BF16", "F16"):
            check_update(f"float32 patterns {seed}", [old.view(torch.float32)], [new.view(torch.float32)], dtype)
            checked += 1
    return checked


def check_update(name: str, old: list[torch.Tensor], new: list[torch.Tensor], dtype: str) -> None:
    module = torch.nn.Module()
    for i, tensor in enumerate(old):
        module.register_parameter(f"p{i}", torch.nn.Parameter(tensor.clone()))
    source = module_source(module, dtype=dtype)
    for choice in (["context", "gap", "coo", "dense"], ["gap"]):
        with torch.no_grad():
            for i, tensor in enumerate(old):
                getattr(module, f"p{i}").copy_(tensor)
        weights = source()
        histories = [DeviceHistory(weights, 0, allowed=choice), History(weights, 0)]
        before = {each: histories[1].at(each, 0)[:].copy() for each in weights}
        with torch.no_grad():
            for i, tensor in enumerate(new):
                getattr(module, f"p{i}").copy_(tensor)
        with Workers() as workers:
            results = []
            for history in histories:
                history.stage(1, source(), workers)
                results.append(encode_changes(history, 0, 1, choice, workers))
            assert box_digests(histories[0], 1, workers) == box_digests(histories[1], 1, workers), name
        (ours, gain), (theirs, expected) = results
        assert gain == expected, name
        assert [each.name for each in ours] == [each.name for each in theirs], name
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine.encoding, mine.num_changed) == (other.encoding, other.num_changed), (name, mine.name)
            for part in mine.encoded.arrays:
                assert np.array_equal(mine.encoded.arrays[part], other.encoded.arrays[part]), (name, mine.name, part)
        for each in weights:
            assert np.array_equal(histories[0].at(each, 0)[:], before[each]), (name, "the way back")
        histories[0].roll_back(1)
        for each in weights:
            assert np.array_equal(histories[0].at(each, 0)[:], before[each]), (name, "rolled back")


def check_large(size: float) -> None:
    """One parameter with more than 2^31 elements: found, encoded and decoded on the device."""
    module = Model({"large": ((1 << 31) + 12_345,)})
    source = module_source(module)
    old = module.large.data.clone().view(torch.int16)
    with Workers() as workers:
        history = DeviceHistory(source(), 0, allowed=["context"])
        update(module.large.data, size / 10)
        # The very last elements too.
        module.large.data[-3:] += 1
        history.stage(1, source(), workers)
        (entry,), gains = encode_changes(history, 0, 1, ["context"], workers)
        before = DeviceHistory(as_module(old), 0, allowed=[])
        assert box_digests(history, 1, workers) == advanced(box_digests(before, 0, workers), gains)
        del before
    payload = entry.encoded.arrays["context"]
    (table,), arrays = tile_tables([payload], [len(old)], MOST_TILE_LOG2)
    found = decode(upload(arrays, DEVICE), table.rows, old, entry.dtype, True)
    assert not found.statuses.any()
    assert len(found.positions) == entry.num_changed
    assert torch.equal(old[found.positions], found.old)
    old[found.positions] = found.new
    assert torch.equal(old, module.large.data.view(torch.int16))
    print(f"2^31 + 12,345 elements, {entry.num_changed:,} changes: equal", flush=True)


def as_module(bits: torch.Tensor) -> ModuleWeights:
    module = torch.nn.Module()
    module.register_parameter("large", torch.nn.Parameter(bits.view(torch.bfloat16)))
    return module_source(module)()


# Times


def measure_sending(size: float) -> list[Row]:
    """A thousand million weights of which 1.15 % change."""
    old = torch.empty(LARGE, dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02)
    new = old.clone()
    update(new, size)
    timer = Timer()
    copy = torch.empty_like(old)
    timer.add("floor: copy", timed(lambda: copy.copy_(new)))
    arena = Arena([LARGE], torch.bfloat16, DEVICE)
    arena.point_at([new])

    def reset() -> None:
        arena.snapshot.copy_(old.view(torch.int16))

    def find() -> kernels.Record:
        begun = arena.begin(arena.sample())
        assert arena.has_all(begun)
        return begun.record

    reset()
    changes = int(find().begins[-1])
    timer.add("compare, list changes, move the snapshot", timed(find, reset))
    fields = [(i << 8, 1 << TILE_LOG2, i << TILE_LOG2, 12345, LARGE, LARGE, 0) for i in range(LARGE >> TILE_LOG2)]
    tiles = kernels.tile_table(np.array(fields, np.int64), 0, changes, DEVICE)
    sizes: dict[bool, float] = {}

    def encode(contextual: bool) -> None:
        encoder = kernels.Encoder(arena.snapshot, find(), kernels.Layout(7, 255))
        surveyed = encoder.survey(tiles, contextual)
        rows = (encoder.context_rows if contextual else encoder.gap_rows)(tiles, surveyed)
        ends = torch.cumsum(rows.sizes, 0)
        offsets = ends - rows.sizes
        total = int(ends[-1])
        out = torch.zeros(total // 4 + 3, dtype=torch.int32, device=DEVICE)
        encoder.write(tiles, surveyed, rows, offsets, out, False)
        sizes[contextual] = total / changes

    for contextual, name in ((False, "gap"), (True, "context")):
        timer.add(f"the same, to finished {name} bytes, with digest", timed(partial(encode, contextual), reset))
        print(f"{name}: {sizes[contextual]:.3f} bytes per change, {changes / LARGE:.4f} changed")
    wide = new.float()
    arena.point_at([wide])
    timer.add("compare from float32 (reads 1.5 floors)", timed(find, reset))
    timer.add("ne, nonzero, gather, copy (torch)", timed(partial(torch_changes, new, old.clone()), None))
    return timer.rows


def torch_changes(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How one would do it in torch."""
    new, old = new.view(-1).view(torch.int16), old.view(-1).view(torch.int16)
    where = (new != old).nonzero().squeeze(1)
    values = new[where]
    old.copy_(new)
    return where, values


# Whole publishes


def publish(name: str, size: float, rounds: int) -> list[list[object]]:
    model = Model(MODELS[name])
    weights = [parameter.data for parameter in model.parameters()]
    total = sum(each.numel() for each in weights)
    print(f"{name}: {total:,} weights", flush=True)
    before = torch.cuda.memory_allocated()
    rows: list[list[object]] = []
    with Publisher(f"memory:{name}", model, anchors=None, skips=()) as publisher:
        publisher.publish().wait(120)
        returns, blocked, ready, stats = [], [], [], {}
        for i in range(rounds + 2):
            for each in weights:
                update(each, size)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            publication = publisher.publish()
            returned = time.perf_counter() - started
            # What is trained next waits for this, and for nothing else of it.
            torch.cuda.current_stream().synchronize()
            goes_on = time.perf_counter() - started
            publication.wait(120)
            peak = torch.cuda.max_memory_allocated() - before
            if i >= 2:
                stats = publication.stats
                returns.append(1000 * returned)
                blocked.append(1000 * goes_on)
                ready.append(1000 * (returned + stats["encode_seconds"]))
        share = (peak - 2 * total) / (2 * total)
        rows.append(
            [name, "deltawire", statistics.median(returns), statistics.median(blocked), statistics.median(ready),
             stats["num_bytes"], stats["density"], share]
        )  # fmt: skip
        if total < LARGE:
            check_replica(f"memory:{name}", model)
    old = [each.clone() for each in weights]
    for method in (by_torch, by_host_copies):
        for each in weights:
            update(each, size)
        rows.append([name, *method(weights, old)])
        for each, now in zip(old, weights, strict=True):
            each.copy_(now)
    return rows


def check_replica(url: str, model: torch.nn.Module) -> None:
    with Replica(url, {}) as replica:
        replica.pull()
        found = replica.target.weights()
        for name, parameter in model.named_parameters():
            bits = parameter.data.view(-1).view(torch.int16).cpu().numpy().view(np.uint16)
            assert np.array_equal(found[name].bits, bits), name


def by_torch(weights: list[torch.Tensor], old: list[torch.Tensor]) -> list[object]:
    """The same on the device with torch alone: `ne`, `nonzero`, gather; positions and values to the host."""
    for new, before in zip(weights, old, strict=True):
        torch_changes(new.clone(), before.clone())
    torch.cuda.synchronize()
    started = time.perf_counter()
    found = [torch_changes(new, before) for new, before in zip(weights, old, strict=True)]
    torch.cuda.synchronize()
    blocked = time.perf_counter() - started
    host = [(where.to(torch.int32).cpu(), values.cpu()) for where, values in found]
    ready = time.perf_counter() - started
    num_bytes = sum(where.nbytes + values.nbytes for where, values in host)
    changed = sum(len(values) for _, values in host)
    return [
        "torch nonzero",
        1000 * blocked,
        1000 * blocked,
        1000 * ready,
        num_bytes,
        changed / sum(each.numel() for each in weights),
        "",
    ]


def by_host_copies(weights: list[torch.Tensor], old: list[torch.Tensor]) -> list[object]:
    """As TRL's first version did: a copy to the host before the step and one after it, and a comparison there."""
    started = time.perf_counter()
    before = [each.cpu().clone() for each in old]
    after = [each.cpu() for each in weights]
    masks = [new != each for new, each in zip(after, before, strict=True)]
    blocked = time.perf_counter() - started
    found = [
        (mask.view(-1).nonzero().squeeze(1).to(torch.int32), new[mask]) for mask, new in zip(masks, after, strict=True)
    ]
    ready = time.perf_counter() - started
    num_bytes = sum(where.nbytes + values.nbytes for where, values in found)
    changed = sum(len(values) for _, values in found)
    total = sum(each.numel() for each in weights)
    blocked *= 1000
    return ["two host copies (TRL v1)", blocked, blocked, 1000 * ready, num_bytes, changed / total, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default="", help="what the results are of, where there is no git")
    parser.add_argument("--parts", default="check,kernels,publish,large", help="what to do, in this order")
    options = parser.parse_args()
    assert BLOCK << 8 == 1 << TILE_LOG2
    parts = options.parts.split(",")
    notes = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    notes |= {"commit": options.commit} if options.commit else {}
    torch.manual_seed(0)
    size = calibrated()
    started = time.perf_counter()
    if "check" in parts:
        print(f"sending: {check_sending()} cases equal", flush=True)
        vectors = gpu_receive.vectors()
        print(f"receiving: {len(gpu_receive.check(vectors))} cases equal", flush=True)
    if "kernels" in parts:
        rows = [("send", *row) for row in measure_sending(size)]
        torch.cuda.empty_cache()
        rows += [("receive", *row) for row in gpu_receive.measure(gpu_receive.vectors(only="part"))]
        for side, name, milliseconds, ratio in rows:
            print(f"{side:8} {name:55} {milliseconds:8.3f} ms {ratio:6.2f}x")
        header = ["side", "work", "milliseconds", "times_floor"]
        write_csv("gpu.csv", header, [list(row) for row in rows], folder=options.out, notes=notes)
    if "publish" in parts:
        table: list[list[object]] = []
        header = ["model", "method", "returns_ms", "blocked_ms", "in_host_memory_ms", "payload_bytes", "density",
                  "extra_memory"]  # fmt: skip
        for name in MODELS:
            for row in publish(name, size, 4):
                print(*row, flush=True)
                table.append(row)
            write_csv("gpu_publish.csv", header, table, folder=options.out, notes=notes)
            torch.cuda.empty_cache()
    if "large" in parts:
        torch.cuda.empty_cache()
        check_large(size)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
