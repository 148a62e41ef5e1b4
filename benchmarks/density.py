"""From quiet to violent updates: what `auto` takes, how small it is and how long it needs.

    python benchmarks/density.py [--weights 16777216]

The same weights, updated by normal steps of growing size and cast to bf16; one thread.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire.codec import allowed_encodings, decode, encode
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import Workers
from measure import ratios, write_csv
from support.recorded import recorded_like

BF16 = DTYPES["BF16"]
STEPS = (1e-9, 1e-8, 1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1e-2)


def measure(num_weights: int, step: float) -> dict[str, object]:
    old, new = recorded_like(num_weights, density=None, step=step)
    allowed = allowed_encodings("auto")

    def baseline() -> object:
        return np.flatnonzero(old != new)

    with Workers(1) as workers:
        encoded = encode(old, new, BF16, allowed, workers)
        if encoded is None:
            raise SystemExit(f"an update of {step} changes nothing")
        _, encoding = ratios(lambda: encode(old, new, BF16, allowed, workers), baseline, 3)
        _, decoding = ratios(lambda: decode(encoded, old, num_weights, BF16, workers), baseline, 3)
        positions, bits = decode(encoded, old, num_weights, BF16, workers)
    rebuilt = old.copy()
    rebuilt[slice(None) if positions is None else positions] = bits
    if not np.array_equal(rebuilt, new):
        raise AssertionError("not exact")
    num_bytes = sum(array.nbytes for array in encoded.arrays.values())
    return {
        "update_size": step,
        "density": f"{encoded.num_changed / num_weights:.6f}",
        "encoding": encoded.encoding,
        "bytes_per_change": round(num_bytes / encoded.num_changed, 3),
        "times_smaller_than_full": round(new.nbytes / num_bytes, 1),
        "encode_ratio": round(encoding, 2),
        "decode_ratio": round(decoding, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=1 << 24)
    arguments = parser.parse_args()
    warm_up((16,))
    rows = []
    for step in STEPS:
        rows.append(measure(arguments.weights, step))
        print(rows[-1], flush=True)
    write_csv("density.csv", list(rows[0]), (list(row.values()) for row in rows))
