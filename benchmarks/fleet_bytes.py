"""What a run uploads, and what a replica that joins late fetches: 500 steps, with several choices of extra deltas.

    python benchmarks/fleet_bytes.py [--weights 100663296] [--steps 500] [--choices before now]
    python benchmarks/fleet_bytes.py --frontier
    python benchmarks/fleet_bytes.py --densities

The weights are the recorded ones, repeated. Their float32 masters move as AdamW's do under noisy gradients (momentum
0.9, second moments that have settled), by steps of such a size that the recorded share of the bf16 weights changes. The
sizes of deltas over 2, 4 and 8 steps against those of the single ones are printed next to the recorded ones.

Each version is flushed before the next step. Then every version is asked for as a replica would that has nothing, and
one that has the first version, and some are pulled and compared. `beside the store` publishes single deltas alone, and
`deltawire compact` adds the others. SIGTERM ends a run after the step that it is at, with the results until then.
`--densities` counts what a publisher uploads with its defaults when steps are smaller and larger, on 4.2 M weights.

Memory is what a publish added to the resident memory at most, in models, without the pages of mapped files; the
snapshot of one model is there before. CPU seconds are those of all threads, until everything was written.
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numba import njit

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire import Replica, digest
from deltawire.codec import allowed_encodings, encode
from deltawire.follow.routing import find_route
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.maintain.compact import compact
from deltawire.publish.publisher import Publisher
from deltawire.run.planner import SKIPS, longest_tail
from deltawire.run.run import Run
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import Workers
from measure import peak_beyond, private_bytes, write_csv
from support.recorded import DATA

SIDE = 2048
MOMENTUM, STEP, DENSITY = 0.9, 2.8e-7, 0.011
SPANS = (2, 4, 8)
# Steps that change about 0.1, 1.1, 1.25, 1.6, 3.5 and 10 % of the weights. From 1.13 % on, a second anchor pays.
SIZES = (2e-8, STEP, 2.83e-7, 2.9e-7, 3.26e-7, 4.35e-7, 1.13e-6, 4e-6)
CHOICES = {
    "before": {"skips": (4, 16, 64), "most_deltas": None},
    "now": {},
    "now, longer routes": {"skips": (32,), "most_deltas": 36},
    "beside the store": {"skips": (), "anchors": None},
}
COLUMNS = [
    "choice", "weights", "steps", "single_mb", "skip_mb", "long_mb", "anchor_mb", "all_to_single", "anchors",
    "most_objects", "mean_objects", "most_anchors_fetched", "most_anchors_with_base", "blocked_seconds",
    "all_seconds", "cpu_seconds", "peak_memory_models", "scratch_models",
]  # fmt: skip
DENSITY_COLUMNS = ["density", "weights", "steps", "single_mb", "skip_mb", "long_mb", "anchor_mb", "all_to_single",
                   "anchors"]  # fmt: skip


@njit(inline="always")
def _normal(state):
    """About normal: the sum of four parts of a random number."""
    part = np.uint64(0xFFFF)
    total = (state & part) + ((state >> np.uint64(16)) & part) + ((state >> np.uint64(32)) & part)
    return np.float32((float(total + (state >> np.uint64(48))) - 131070.0) / 37837.2)


@njit(fastmath=True)
def step(master, moment, bits, seed, size, momentum):
    """One step of AdamW on noisy gradients; writes the bf16 bits of the masters, rounded to nearest even."""
    state, noise, words = np.uint64(seed), np.float32(np.sqrt(1 - momentum**2)), master.view(np.uint32)
    for i in range(len(master)):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        moment[i] = np.float32(momentum) * moment[i] + noise * _normal(state)
        master[i] += np.float32(size) * moment[i]
        word = words[i]
        bits[i] = np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


class Trainer:
    """Simulated weights: bf16 bits by name, as many as asked for."""

    def __init__(self, num_tensors):
        with np.load(DATA / "rl-lr1e-6.npz") as file:
            bases = [file[key].view(np.uint16) for key in sorted(file.files) if key.endswith("|base")]
        recorded = np.resize(np.concatenate(bases), SIDE * SIDE).astype(np.int64) << 16
        self._rng = np.random.default_rng(0)
        self._parts = []
        for _ in range(num_tensors):
            inside = self._rng.integers(-(1 << 15) + 1, 1 << 15, recorded.size)
            master = np.clip(recorded + inside, 0, (1 << 32) - 1).astype(np.uint32).view(np.float32)
            moment = self._rng.standard_normal(recorded.size, np.float32)
            self._parts.append((master, moment, np.zeros(recorded.size, np.uint16)))
        self.weights = {f"layer.{i}": bits.reshape(SIDE, SIDE) for i, (_, _, bits) in enumerate(self._parts)}
        self.train(0.0)

    def train(self, size=STEP):
        for master, moment, bits in self._parts:
            step(master, moment, bits, self._rng.integers(1, 1 << 62), size, MOMENTUM)


def overlap(num_tensors):
    """The sizes of deltas over several steps, as shares of the single deltas that they span; and the density."""
    trainer, allowed, dtype = Trainer(num_tensors), allowed_encodings("auto"), DTYPES["BF16"]
    states = []
    for _ in range(max(SPANS) + 1):
        states.append(np.concatenate([each.reshape(-1) for each in trainer.weights.values()]))
        trainer.train()

    def size(span, workers):
        deltas = [encode(states[at], states[at + span], dtype, allowed, workers) for at in range(0, max(SPANS), span)]
        return sum(array.nbytes for delta in deltas for array in delta.arrays.values())

    with Workers(1) as workers:
        single = size(1, workers)
        ratios = {span: round(size(span, workers) / single, 3) for span in SPANS}
    return ratios, float(np.mean(states[0] != states[1]))


def frontier(num_versions=500):
    """The fewest bytes, in single deltas, for each length of routes: nested skip deltas, and deltas from the base.

    All choices of up to three nested lengths, with a delta from the base at multiples of the longest, on the sizes that
    deltas over so many steps have here.
    """
    trainer, allowed, dtype = Trainer(1), allowed_encodings("auto"), DTYPES["BF16"]
    spans = sorted({round(2 ** (power / 2)) for power in range(18)} | {num_versions})
    states = {}
    for version in range(num_versions + 2):
        if version <= 2 or version in spans:
            states[version] = trainer.weights["layer.0"].reshape(-1).copy()
        trainer.train()
    with Workers(1) as workers:
        deltas = [encode(states[0], states[span], dtype, allowed, workers) for span in spans]
    sizes = [sum(array.nbytes for array in delta.arrays.values()) for delta in deltas]

    def cost(span):
        return float(np.exp(np.interp(np.log(span), np.log(spans), np.log(sizes)))) / sizes[0]

    best = {}
    factors = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32, 64)
    for depth in range(3):
        for chosen in itertools.product(factors, repeat=depth):
            lengths = np.cumprod(chosen).tolist()
            longest = lengths[-1] if lengths else 1
            for cadence in range(longest, 257, longest):
                if longest > 250 or cadence < 16:
                    continue
                extra = sum(num_versions // length * cost(length) for length in lengths)
                extra += sum(cost(version) for version in range(cadence, num_versions + 1, cadence))
                most = 1 + longest_tail([*lengths, cadence])
                if extra < best.get(most, (np.inf,))[0]:
                    best[most] = extra, (*lengths, f"base/{cadence}")
    cheapest = np.inf
    for most, (extra, how) in sorted(best.items()):
        if extra < cheapest:
            cheapest = extra
            yield [most, round(1 + extra / num_versions, 2), " ".join(map(str, how))]


def bytes_by_kind(hops, skips=SKIPS):
    """Of single deltas, skip deltas, others from the anchor, and anchors."""
    kinds = {"single": 0, "skip": 0, "long": 0, "anchor": 0}
    for hop in hops:
        span = None if hop.base is None else hop.version - hop.base
        kinds["anchor" if span is None else "single" if span == 1 else "skip" if span in skips else "long"] += (
            hop.num_bytes
        )
    return kinds


def all_to_single(hops):
    """Everything but the first anchor, in single deltas."""
    kinds, full = bytes_by_kind(hops), next(hop.num_bytes for hop in hops if hop.base is None)
    return round((sum(kinds.values()) - full) / kinds["single"], 3)


def densities(num_steps):
    """What a publisher uploads with its defaults, by the share of weights that a step changes."""
    for size in SIZES:
        trainer, changed = Trainer(1), []
        with tempfile.TemporaryDirectory(prefix="fleet-bytes-") as folder:
            url = Path(folder) / "run"
            with Publisher(url, trainer.weights, dtype="BF16", check_share=0) as publisher:
                for version in range(num_steps + 1):
                    if version:
                        before = trainer.weights["layer.0"].copy()
                        trainer.train(size)
                        changed.append(np.mean(trainer.weights["layer.0"] != before))
                    publisher.publish()
                    publisher.flush()
            hops = Run(url).hops()
        yield [
            round(statistics.mean(changed), 5), SIDE * SIDE, num_steps,
            *(round(each / 1e6, 2) for each in bytes_by_kind(hops).values()), all_to_single(hops),
            sum(hop.base is None for hop in hops),
        ]  # fmt: skip


def scratch_bytes(folder):
    """The bytes of the unnamed files that this process has open in a folder, mapped ones too."""
    return sum(_bytes_in(link, str(folder)) for link in Path("/proc/self/fd").iterdir())


def _bytes_in(link, folder):
    try:
        return link.stat().st_size if folder in os.readlink(link) else 0
    except OSError:  # closed in the meantime
        return 0


class Measured:
    """A publisher with one of the choices, and what it took."""

    def __init__(self, folder, name, trainer):
        number = list(CHOICES).index(name)
        self.name, self.url, self.scratch = name, folder / f"run-{number}", folder / f"scratch-{number}-"
        self.scratch.mkdir()
        self._trainer = trainer
        self._publisher = Publisher(
            self.url, trainer.weights, dtype="BF16", scratch=self.scratch, check_share=0, **CHOICES[name]
        )
        self.blocked, self.all, self.cpu, self.peak, self.scratch_bytes = [], [], [], 0, 0

    def publish(self):
        def work():
            started, cpu = time.perf_counter(), time.process_time()
            self._publisher.publish()
            blocked = time.perf_counter()
            self._publisher.flush()
            self.blocked.append(blocked - started)
            self.all.append(time.perf_counter() - started)
            self.cpu.append(time.process_time() - cpu)

        self.peak = max(self.peak, peak_beyond(work, private_bytes)[1])
        self.scratch_bytes = max(self.scratch_bytes, scratch_bytes(self.scratch))

    def close(self):
        self._publisher.close()

    def result(self, num_versions, digests):
        run = Run(self.url)
        for version, expected in digests.items():
            weights = {}
            with Replica(run, weights, heartbeat_seconds=None) as replica:
                replica.pull(version)
            if digest(weights) != expected:
                raise AssertionError(f"version {version} differs")
        hops = run.hops()
        full = next(hop.num_bytes for hop in hops if hop.base is None)
        late = [find_route(run, None, run.manifest(version)) for version in range(num_versions)]
        near = [find_route(run, 0, run.manifest(version)) for version in range(num_versions)]
        num_weights = sum(each.size for each in self._trainer.weights.values())
        return [
            self.name, num_weights, num_versions - 1,
            *(round(size / 1e6, 2) for size in bytes_by_kind(hops, CHOICES[self.name].get("skips", SKIPS)).values()),
            all_to_single(hops), sum(hop.base is None for hop in hops),
            max(len(route.hops) for route in late), round(statistics.mean(len(route.hops) for route in late), 2),
            round(max(route.num_bytes for route in late) / full, 3),
            round(max(route.num_bytes for route in near) / full, 3),
            round(statistics.median(self.blocked), 4), round(statistics.mean(self.all), 3),
            round(statistics.mean(self.cpu), 3), round(self.peak / full, 2), round(self.scratch_bytes / full, 2),
        ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=24 * SIDE * SIDE)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=CHOICES)
    parser.add_argument("--frontier", action="store_true", help="only what is the least for routes of each length")
    parser.add_argument("--densities", action="store_true", help="only what is uploaded, by the size of the steps")
    arguments = parser.parse_args()
    warm_up()
    if arguments.densities:
        return print(write_csv("fleet_density.csv", DENSITY_COLUMNS, densities(arguments.steps)))
    if arguments.frontier:
        return print(write_csv("fleet_frontier.csv", ["most_deltas", "all_to_single", "deltas_over"], frontier()))
    ratios, density = overlap(2)
    print(f"density {density:.4f}, deltas over {SPANS} steps {ratios} of the single ones", flush=True)
    trainer = Trainer(-(-arguments.weights // (SIDE * SIDE)))
    checked, is_stopped = set(np.linspace(1, arguments.steps, 6, dtype=int).tolist()), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_stopped.set())
    digests = {}
    with tempfile.TemporaryDirectory(prefix="fleet-bytes-") as temporary:
        publishers = [Measured(Path(temporary), name, trainer) for name in arguments.choices]
        for version in range(arguments.steps + 1):
            if version:
                trainer.train()
            for each in publishers:
                each.publish()
            if version in checked:
                digests[version] = digest(trainer.weights, dtype="BF16")
            if version % 50 == 0:
                print(version, [round(statistics.mean(each.all), 2) for each in publishers], flush=True)
            if is_stopped.is_set():
                break
        rows = []
        for each in publishers:
            each.close()
            if each.name == "beside the store":
                print(f"compact made {len(compact(Run(each.url)))} deltas")
            rows.append(each.result(version + 1, digests))
            print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    notes = {"overlap": f"{ratios} of the single deltas; density {density:.4f}"}
    return print(write_csv("fleet_bytes.csv", COLUMNS, rows, notes=notes))


if __name__ == "__main__":
    main()
