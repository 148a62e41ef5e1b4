"""How small and how fast: our encodings and what peers send, on the same data in the same run.

    python benchmarks/codec.py [--weights 67108864] [--rounds 7]

Sizes: bytes per changed weight over the recorded RL updates. Speeds: one thread, as a ratio to
`np.flatnonzero(old != new)` on the same weights, timed right before each; and how much faster two threads are.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire.codec import ENCODINGS, decode, encode
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import box_digest, change_digest, tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import Workers
from measure import ratios, write_csv
from peers import available_peers
from support.recorded import DATA, RECORDINGS, recorded_like, recorded_steps

BF16 = DTYPES["BF16"]
OURS = ("context", "gap", "coo")


def size_of(encoded):
    return sum(array.nbytes for array in encoded.arrays.values())


def measure_sizes(data):
    rows = []
    with Workers(1) as workers:
        for recording in RECORDINGS:
            totals = {}
            num_changed = 0
            for step in recorded_steps(recording, data):
                changed = int(np.count_nonzero(step.old != step.new))
                if changed == 0:
                    continue
                num_changed += changed
                for name in OURS:
                    encoded = encode(step.old, step.new, BF16, [name], workers)
                    key = "deltawire", name
                    totals[key] = totals.get(key, 0) + size_of(encoded)
                for peer in available_peers():
                    key = peer.used_by, peer.name
                    totals[key] = totals.get(key, 0) + peer.size_bytes(peer.encode(step.old, step.new))
            for (used_by, name), total in totals.items():
                rows.append([recording, used_by, name, num_changed, total, round(total / num_changed, 4)])
                print(f"{recording}  {name:28} {total / num_changed:7.3f} B per change   {used_by}")
    return rows


def measure_ours(old, new, rounds):
    def baseline():
        return np.flatnonzero(old != new)

    positions = baseline()
    before, after = old[positions], new[positions]
    key = tensor_key("w", BF16, old.shape)
    whole = Box.whole(old.shape)
    one, two = Workers(1), Workers(2)
    encoded = {name: encode(old, new, BF16, [name], one) for name in ENCODINGS}

    def jobs(workers):
        for name in ("context", "gap"):
            yield f"{name} encode", lambda name=name: encode(old, new, BF16, [name], workers)
            yield f"{name} decode", lambda name=name: decode(encoded[name], old, len(old), BF16, workers)
        yield "digest, full", lambda: box_digest(key, whole, old, workers)
        yield "digest, incremental", lambda: change_digest(key, positions, before, after)

    rows = []
    for (name, alone), (_, together) in zip(jobs(one), jobs(two), strict=True):
        taken, ratio = ratios(alone, baseline, rounds)
        # The incremental digest of one tensor is one call, too short to share.
        speedup = "" if "incremental" in name else round(ratios(alone, together, rounds)[1], 2)
        rate = old.nbytes / taken / 1e9
        rows.append(["deltawire", name, round(taken, 5), round(ratio, 3), round(rate, 2), speedup])
        print(f"{name:28} {ratio:7.3f} x baseline   {rate:6.2f} GB/s of model   two threads {speedup} x")
    for name, work in (("flatnonzero(old != new)", baseline), ("old.copy()", old.copy)):
        taken, ratio = ratios(work, baseline, rounds)
        rows.append(["numpy", name, round(taken, 5), round(ratio, 3), round(old.nbytes / taken / 1e9, 2), ""])
    return rows


def measure_peers(old, new):
    def baseline():
        return np.flatnonzero(old != new)

    rows = []
    for peer in available_peers():
        encoded = peer.encode(old, new)
        if not np.array_equal(peer.decode(encoded, old), new):
            raise AssertionError(f"{peer.name} is not exact")
        jobs = {"encode": partial(peer.encode, old, new), "decode": partial(peer.decode, encoded, old)}
        for part, work in jobs.items():
            taken, ratio = ratios(work, baseline, 3)
            rate = old.nbytes / taken / 1e9
            rows.append([peer.used_by, f"{peer.name} {part}", round(taken, 5), round(ratio, 3), round(rate, 3), ""])
            print(f"{peer.name + ' ' + part:40} {ratio:8.2f} x baseline   {rate:7.3f} GB/s of model")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=1 << 26)
    parser.add_argument("--density", type=float, default=0.0115)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with other recordings of the same layout")
    arguments = parser.parse_args()
    warm_up((16,))
    # Ours first: some peers bring libraries whose threads go on spinning.
    old, new = recorded_like(arguments.weights, density=arguments.density)
    rows = measure_ours(old, new, arguments.rounds)
    small = slice(0, min(len(old), 1 << 24))
    rows += measure_peers(old[small], new[small])
    header = ["used_by", "operation", "seconds", "ratio_to_flatnonzero", "gigabytes_per_second", "two_thread_speedup"]
    write_csv("codec_speed.csv", header, rows)
    header = ["recording", "used_by", "encoding", "changed", "bytes", "bytes_per_change"]
    write_csv("codec_size.csv", header, measure_sizes(arguments.data))
