"""A trainer and two replicas as processes that share nothing but a store; a third joins late.

    python examples/follow.py [--store URL] [--versions 12] [--weights 4000000]

The weights move as in RL: a master copy in fp32, small normal updates, cast to bf16, of which about 1 % change a bit.
Every replica checks itself after each pull: the digest of all its weights must be the one in the manifest.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import deltawire
from deltawire.dtypes import DTYPES
from deltawire.weights import Tensor

BF16 = DTYPES["BF16"]


def to_bf16(values):
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def train(url, num_versions, num_weights):
    rng = np.random.default_rng(0)
    masters = {f"layers.{i}": rng.standard_normal(num_weights // 8, np.float32) * np.float32(0.02) for i in range(8)}
    weights = {name: Tensor(BF16, (len(master),), to_bf16(master)) for name, master in masters.items()}
    say("who", "version", "changed", "payload", "smaller", "seconds", "what")
    with deltawire.Publisher(url, weights, run="demo") as publisher:
        for step in range(num_versions):
            started = time.perf_counter()
            publication = publisher.publish(step=step).wait()
            stats, seconds = publication.stats, time.perf_counter() - started
            smaller = stats["full_bytes"] / stats["num_bytes"]
            say("trainer", publication.version, f"{100 * stats['density']:.2f} %", f"{stats['num_bytes']:,} B",
                f"{smaller:.0f} x", f"{seconds:.3f}", f"blocked for {1000 * stats['diff_seconds']:.1f} ms")  # fmt: skip
            for name, master in masters.items():
                master += rng.standard_normal(len(master), np.float32) * np.float32(3.5e-7)
                weights[name].bits[:] = to_bf16(master)
            time.sleep(0.3)


def follow(name, url, target, last):
    with deltawire.Replica(url, target or {}, name=name) as replica:
        while replica.version != last:
            version = -1 if replica.version is None else replica.version
            replica.wait(version + 1, timeout=60)
            pulled = replica.last_pull
            right = deltawire.digest(replica.target.weights()) == replica.run.manifest(pulled.version).digest
            how = "from an anchor" if pulled.anchor else f"from {pulled.base}"
            say(name, pulled.version, "", f"{pulled.num_bytes:,} B", "", f"{pulled.seconds:.3f}",
                f"{how}, {'every bit right' if right else 'WRONG'}")  # fmt: skip
            if not right:
                sys.exit(1)


def say(*cells):
    print(
        "".join(f"{cell!s:<{width}}" for cell, width in zip(cells, (12, 9, 10, 14, 10, 9, 0), strict=True)), flush=True
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", help="where the run lives; a temporary folder unless given")
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--weights", type=int, default=4_000_000)
    parser.add_argument("--role", nargs=2, metavar=("NAME", "TARGET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        name, target = arguments.role
        if name == "trainer":
            train(arguments.store, arguments.versions, arguments.weights)
        else:
            follow(name, arguments.store, target, arguments.versions - 1)
        return
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.store or str(Path(folder) / "run")
        options = ["--store", url, "--versions", str(arguments.versions), "--weights", str(arguments.weights)]

        def start(name, target=""):
            return subprocess.Popen([sys.executable, __file__, *options, "--role", name, target])

        processes = [start("trainer"), start("memory"), start("mirror", str(Path(folder) / "mirror"))]
        failed = processes[0].wait()
        processes.append(start("late"))
        failed |= max(process.wait() for process in processes)
        for words in (["ls", url], ["verify", url]):
            print(f"\n$ deltawire {' '.join(words)}", flush=True)
            failed |= subprocess.call([sys.executable, "-m", "deltawire.cli", *words])
    sys.exit(failed)


if __name__ == "__main__":
    main()
