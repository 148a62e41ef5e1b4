"""Damaged bytes at every parser, and damaged stores at every command, for as long as you like.

    python benchmarks/fuzz.py --minutes 5

Half of the time it takes sound deltas of every encoding and dtype, damages them in many ways, and reads, inspects and
applies them; the other half whole runs, whose keys, documents and objects it changes before it lists, checks and pulls
them. What comes back must be the right weights or an error of the library's own, within the memory that sizes allow.
"""

import argparse
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

import deltawire
from deltawire import Delta, DeltawireError
from deltawire.format.inspection import check_structure, inspect_entry
from deltawire.tensors.dtypes import DTYPES

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from support.damaged_stores import damaged_stores

MOST_MEMORY = 2_000_000_000


def sound_deltas(rng):
    for name, dtype in DTYPES.items():
        for encoding in ("coo", "gap", "context", "dense", "auto"):
            size = int(rng.integers(1, 3000))
            old = rng.integers(0, 1 << 8 * dtype.itemsize, size, dtype.unsigned)
            new = old.copy()
            changed = rng.random(size) < rng.choice([0.01, 0.1, 0.6, 1.0])
            changed[0] = True
            new[changed] += rng.integers(1, 40, int(changed.sum()), dtype.unsigned)
            old_model, new_model = {"w": old, "v": old[:1]}, {"w": new, "v": new[:1]}
            delta = deltawire.diff(old_model, new_model, encoding=encoding, dtype=name, threads=1)
            yield name, old_model, new_model, delta.to_bytes()


def damage(data, rng):
    """One of many ways to break a file."""
    broken = bytearray(data)
    header_end = 8 + int.from_bytes(data[:8], "little")
    hop = rng.integers(8)
    if hop == 0:
        for at in rng.integers(0, len(broken), rng.integers(1, 8)):
            broken[at] ^= 1 << rng.integers(8)
    elif hop == 1:
        for at in rng.integers(header_end, max(len(broken), header_end + 1), rng.integers(1, 20)):
            if at < len(broken):
                broken[at] = rng.integers(256)
    elif hop == 2:
        del broken[rng.integers(len(broken)) :]
    elif hop == 3:
        start = int(rng.integers(len(broken)))
        del broken[start : start + int(rng.integers(1, 50))]
    elif hop == 4:
        start = int(rng.integers(len(broken)))
        broken[start:start] = rng.bytes(int(rng.integers(1, 50)))
    elif hop == 5:
        header = json.loads(data[8:header_end])
        fields = header["__metadata__"]
        key = str(rng.choice(sorted(fields)))
        parts = fields[key].split(" ")
        at = int(rng.integers(len(parts)))
        parts[at] = str(
            rng.choice(["0", "1", "99999999999", "-1", "", "1x2", "x", "coo", "gap", "context", "F32", "U8"])
        )
        fields[key] = " ".join(parts)
        text = json.dumps(header).encode()
        broken = bytearray(len(text).to_bytes(8, "little") + text + data[header_end:])
    elif hop == 6 and len(broken) > header_end:
        at = int(rng.integers(header_end, len(broken)))
        broken[at : at + 8] = rng.integers(0, 1 << 63).tobytes()[: len(broken) - at]
    else:
        broken[:8] = int(rng.integers(0, 1 << int(rng.integers(1, 63)))).to_bytes(8, "little")
    return bytes(broken)


def attempt(data, dtype, old, new):
    """What became of it: the right weights, or the name of an error. Anything else raises."""
    weights = {name: array.copy() for name, array in old.items()}
    try:
        delta = Delta.from_bytes(data)
        for entry in delta.entries:
            inspect_entry(entry)
            check_structure(entry)
        deltawire.apply(delta, weights, dtype=dtype, threads=1)
    except DeltawireError as error:
        if any(weights[name].tobytes() != old[name].tobytes() for name in old):
            raise AssertionError(f"weights moved before {type(error).__name__}") from error
        return type(error).__name__
    if any(weights[name].tobytes() != new[name].tobytes() for name in new):
        raise AssertionError("wrong weights passed every check")
    return "right weights"


def run_files(seconds, seed, least):
    rng = np.random.default_rng(seed)
    started = time.monotonic()
    outcomes, slowest, num_tries = Counter(), 0.0, 0
    while time.monotonic() - started < seconds or num_tries < least:
        for dtype, old, new, data in sound_deltas(rng):
            if attempt(data, dtype, old, new) != "right weights":
                raise AssertionError("a sound delta was refused")
            for _ in range(20):
                broken = damage(data, rng)
                before = time.monotonic()
                outcomes[attempt(broken, dtype, old, new)] += 1
                slowest = max(slowest, time.monotonic() - before)
                num_tries += 1
            if time.monotonic() - started > seconds and num_tries >= least:
                break
    print(f"{num_tries:,} damaged files in {time.monotonic() - started:.0f} s, seed {seed}, slowest {slowest:.2f} s")
    tell(outcomes)


def run_stores(seconds, seed, least):
    started = time.monotonic()
    num_stores, outcomes = damaged_stores(seconds, seed, least)
    print(f"{num_stores:,} damaged stores in {time.monotonic() - started:.0f} s, seed {seed}")
    tell(outcomes)


def tell(outcomes):
    for outcome, count in outcomes.most_common():
        print(f"{count:10,}  {outcome}")
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory of the process {peak / 1e6:.0f} MB")
    assert peak < MOST_MEMORY, "memory beyond what the sizes allow"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--least", type=int, default=0, help="try at least so many files")
    parser.add_argument("--least-stores", type=int, default=0, help="try at least so many stores")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    run_files(30 * arguments.minutes, arguments.seed, arguments.least)
    run_stores(30 * arguments.minutes, arguments.seed, arguments.least_stores)
