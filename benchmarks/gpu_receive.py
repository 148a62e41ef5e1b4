"""The GPU kernels of the receiving side: digest, decode and apply. `gpu.py` runs this."""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire.codec.tiled import MOST_TILE_LOG2, encode_payload
from deltawire.kernels.gpu.decode import MOST_ELEMENTS, Decoded, decode, tile_tables, upload
from deltawire.kernels.gpu.live import Launch
from deltawire.kernels.gpu.sums import Runs, box_sum, signed
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, TensorKey, box_digest
from deltawire.tensors.dtypes import DTYPES, DType
from deltawire.workers import Workers
from support.recorded import recorded_like, recorded_steps

SEED = 0x9ABCDEF012345678
LARGE = 1 << 30
PART = 1 << 25
PART_TILE_LOG2 = 21
ENCODINGS = ("gap", "context")

Bits = npt.NDArray[np.uint16]


class Case(NamedTuple):
    """Weights before and after, which every machine makes for itself."""

    name: str
    dtype: DType
    old: Bits
    new: Bits
    tile_log2: int


class Row(NamedTuple):
    name: str
    milliseconds: float
    ratio: float


def cases() -> Iterator[Case]:
    bf16 = DTYPES["BF16"]
    yield Case("part", bf16, *recorded_like(PART), PART_TILE_LOG2)
    for step in islice(recorded_steps("rl-lr3e-6"), 0, 96, 12):
        yield Case(f"recorded {step.tensor} {step.number}", bf16, step.old, step.new, 18)
    rng = np.random.default_rng(1)
    for density in (0.0005, 0.02, 0.3, 0.6, 0.95, 1.0):
        for name in ("BF16", "F16"):
            old = rng.integers(0, 1 << 16, 300_001, np.uint16)
            new = old.copy()
            changed = rng.random(len(old)) < density
            new[changed] += rng.integers(1, 1 << 16, int(changed.sum()), np.uint16)
            yield Case(f"patterns {name} {density}", DTYPES[name], old, new, 16)
            new = np.where(changed, old + 1, old)
            yield Case(f"steps {name} {density}", DTYPES[name], old, new, 14)


def vectors(only: str = "") -> dict[str, npt.NDArray[np.generic]]:
    """The payloads of all cases, or of one, and the digests of their weights, as the CPU makes them."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    with Workers() as workers:
        for case in cases():
            if only and case.name != only:
                continue
            for encoding in ENCODINGS:
                payload = encode_payload(
                    case.old, case.new, case.dtype, encoding == "context", workers, tile_log2=case.tile_log2
                ).payload
                assert payload is not None
                arrays[f"{case.name}|{encoding}"] = payload
            key = TensorKey(np.uint64(SEED), Digest())
            for part in ("old", "new"):
                sums = box_digest(key, Box.whole(case.old.shape), getattr(case, part), workers)
                arrays[f"{case.name}|{part}"] = np.array([sums.low, sums.high], np.uint64).view(np.int64)
    return arrays


def on_device(bits: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16) if bits.dtype == np.uint16 else bits).cuda()


def check(vectors: dict[str, npt.NDArray[np.generic]]) -> list[Row]:
    """Every case through every kernel, bit for bit."""
    rows = []
    for case in cases():
        old, new = on_device(case.old), on_device(case.new)
        sums = {part: vectors[f"{case.name}|{part}"].tolist() for part in ("old", "new")}
        assert box_sum(old, SEED).tolist() == sums["old"], case.name
        gain = torch.tensor(sums["new"]) - torch.tensor(sums["old"])
        where = torch.nonzero(old != new).squeeze(1)
        for encoding in ENCODINGS:
            payload = vectors[f"{case.name}|{encoding}"]
            (table,), arrays = tile_tables([payload], [len(case.old)], MOST_TILE_LOG2)
            words = upload(arrays, "cuda")
            for most_elements in (1 << 28, 1 << 16):
                found = decode(words, table.rows, old, case.dtype, encoding == "context", most_elements)
                assert not found.statuses.any(), (case.name, encoding)
                assert torch.equal(found.positions.long(), where), (case.name, encoding)
                assert torch.equal(found.new, new[where]), (case.name, encoding)
                assert torch.equal(found.old, old[where]), (case.name, encoding)
            weights = old.clone()
            launch = writing(weights, found)
            assert launch.run(writes=True).tolist() == [[0, *gain.tolist()]]
            assert torch.equal(weights, new)
            other = replace(found, new=found.old)
            assert writing(weights, other).run(writes=True).tolist() == [[len(where), 0, 0]]
            assert torch.equal(weights, new)
            assert launch.run(writes=True, undo=True).tolist() == [[0, *(-gain).tolist()]]
            assert torch.equal(weights, old)
        rows.append(Row(f"checked: {case.name}, {len(where)} changes", 0.0, 0.0))
    return rows


def writing(weights: torch.Tensor, found: Decoded) -> Launch:
    """The changes of a whole tensor, as an engine's worker writes them; all tensors must outlive this."""
    addresses = [each.data_ptr() for each in (weights, found.positions, found.old, found.new)]
    size = len(weights)
    row = (*addresses, len(found.positions), size, 0, size, 0, size, 1, signed(SEED))
    return Launch([row], weights.itemsize, weights.device)


def repeated(payload: Bits, num_elements: int, times: int) -> Bits:
    """The payload of weights that repeat as often."""
    num_tiles = -(-num_elements // (1 << int(payload[0])))
    head = 4 + 4 * num_tiles
    return np.concatenate([payload[:4], np.tile(payload[4:head], times), np.tile(payload[head:], times)])


def timed(work: Callable[[], object], prepare: Callable[[], object] | None = None, rounds: int = 9) -> float:
    """Milliseconds on the device, launches and waits included; the median."""
    times = []
    for i in range(rounds + 2):
        if prepare is not None:
            prepare()
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


class Timer:
    """Rows of times; the first one is the floor."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, milliseconds: float) -> None:
        self.rows.append(Row(name, milliseconds, milliseconds / self.rows[0].milliseconds if self.rows else 1.0))

    def time(self, name: str, run: Callable[[], object], parts: int = 1) -> None:
        from triton.testing import do_bench

        self.add(name, do_bench(run, warmup=25, rep=150, return_mode="median") / parts)

    def profile(self, label: str, run: Callable[[], object]) -> None:
        """The time in each kernel."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        for event in sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)[:14]:
            self.add(f"  {label}: {event.key[:40]} x{event.count}", event.device_time_total / 1000)


def measure(vectors: dict[str, npt.NDArray[np.generic]]) -> list[Row]:
    """A thousand million weights of which 1.15 % change."""
    case = next(cases())
    old, new = (on_device(bits).repeat(LARGE // PART) for bits in (case.old, case.new))
    timer = Timer()
    copy = torch.empty_like(old)
    timer.time("floor: copy", partial(copy.copy_, old))
    timer.time("digest of all weights", partial(box_sum, old, SEED))
    timer.time("digest of a shard of rows", partial(box_sum, old, SEED, Runs(1 << 16, 1 << 17, 5)))
    for encoding in ENCODINGS:
        payload = repeated(vectors[f"part|{encoding}"], PART, LARGE // PART)
        measure_encoding(encoding, payload, old, new, copy, timer)
    return timer.rows


def measure_encoding(
    encoding: str, payload: Bits, old: torch.Tensor, new: torch.Tensor, weights: torch.Tensor, timer: Timer
) -> None:
    weights.copy_(old)
    (table,), arrays = tile_tables([payload], [LARGE], MOST_TILE_LOG2)
    words = upload(arrays, "cuda")

    def run(words: torch.Tensor = words, most_elements: int = MOST_ELEMENTS) -> Decoded:
        return decode(words, table.rows, weights, DTYPES["BF16"], encoding == "context", most_elements)

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = run()
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(each.nbytes for each in (found.positions, found.old, found.new))
    print(f"{encoding}: payload {len(payload):,}, results {results:,}, scratch {peak - results:,} bytes")

    launch = writing(weights, found)
    forth, back = partial(launch.run, writes=True), partial(launch.run, writes=True, undo=True)
    assert not found.statuses.any()
    assert forth()[0, 0].item() == 0
    assert torch.equal(weights, new)
    assert back()[0, 0].item() == 0
    assert torch.equal(weights, old)

    def decode_and_apply() -> None:
        changes = run()
        writing(weights, changes).run(writes=True)

    timer.time(f"{encoding}: decode", run)
    timer.time(f"{encoding}: decode, all at a time", partial(run, most_elements=LARGE))
    timer.time(f"{encoding}: decode, payload from the host", lambda: run(upload(arrays, "cuda")))
    timer.time(f"{encoding}: apply with check and digest", lambda: (forth(), back()), parts=2)
    timer.add(f"{encoding}: decode and apply", timed(decode_and_apply, partial(weights.copy_, old)))
    assert torch.equal(weights, new)
    weights.copy_(old)
    timer.profile(encoding, decode_and_apply)
