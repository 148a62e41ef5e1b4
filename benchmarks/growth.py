"""Does it stay linear: time, size and memory of `context` from 1 M to 256 M weights.

    python benchmarks/growth.py [--most 268435456]

Each size runs in a process of its own, so that its peak memory is its own. Memory is what encoding takes beyond the two
inputs, in sizes of the tensor; it is also measured at densities of 50 and 100 %, where the payload itself is large.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire.codec import allowed_encodings, decode, encode
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import Workers
from measure import peak_beyond, seconds, write_csv
from support.recorded import recorded_like

BF16 = DTYPES["BF16"]


def measure(num_weights, density, choice):
    old, new = recorded_like(num_weights, density=min(density, 0.0115))
    if density > 0.0115:
        rng = np.random.default_rng(1)
        for start in range(0, num_weights, 1 << 22):
            part = new[start : start + (1 << 22)]
            noise = rng.integers(1, 1 << 16, part.size, np.uint16)
            part ^= np.where(rng.random(part.size) < density, noise, 0).astype(np.uint16)
    allowed = allowed_encodings(choice)
    with Workers(1) as workers:
        small = encode(old[:5000], new[:5000], BF16, allowed, workers)
        decode(small, old[:5000], 5000, BF16, workers)
        encoded, memory = peak_beyond(lambda: encode(old, new, BF16, allowed, workers))
        encoding = [seconds(lambda: encode(old, new, BF16, allowed, workers)) for _ in range(3)]
        decoding = [seconds(lambda: decode(encoded, old, num_weights, BF16, workers)) for _ in range(3)]
        baseline = [seconds(lambda: np.flatnonzero(old != new)) for _ in range(3)]
    num_bytes = sum(array.nbytes for array in encoded.arrays.values())
    return {
        "weights": num_weights,
        "density": round(encoded.num_changed / num_weights, 5),
        "encodings": choice,
        "encoding": encoded.encoding,
        "encode_ns_per_weight": round(1e9 * statistics.median(encoding) / num_weights, 3),
        "decode_ns_per_weight": round(1e9 * statistics.median(decoding) / num_weights, 3),
        "baseline_ns_per_weight": round(1e9 * statistics.median(baseline) / num_weights, 3),
        "bytes_per_change": round(num_bytes / encoded.num_changed, 4),
        "peak_memory_in_tensors": round(memory / old.nbytes, 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1 << 28)
    parser.add_argument("--one", nargs=3, metavar=("WEIGHTS", "DENSITY", "ENCODING"), help="measure one size only")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(int(arguments.one[0]), float(arguments.one[1]), arguments.one[2])))
        sys.exit()
    sizes = [1 << log2 for log2 in range(20, 29, 2) if 1 << log2 <= arguments.most]
    cases = [(size, 0.0115, "context") for size in sizes]
    cases += [(1 << 26, density, "auto") for density in (0.5, 1.0)] + [(1 << 26, 1.0, "context")]
    warm_up((16,))
    rows = []
    for case in cases:
        command = [sys.executable, __file__, "--one", *map(str, case)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], flush=True)
    write_csv("growth.csv", list(rows[0]), (list(row.values()) for row in rows))
