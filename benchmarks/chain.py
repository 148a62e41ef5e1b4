"""From a trainer to a replica through a real S3 server on the loopback interface: all weights against a delta.

    python benchmarks/chain.py [--weights 128000000]

128 M bf16 weights, 1.15 % of them changed, in tensors like those of a transformer. "full" puts one safetensors file of
all weights and gets it back, with the same client. "delta" is `publish` until the commit, then `pull` into a replica's
memory. Both over plain loopback, several times, one after the other (the CSV holds medians), and once through a proxy
that lets 100 Mbit/s through each way.

What `publish` blocks is compared with `np.flatnonzero(old != new)` on the same arrays, timed right before it; memory is
the peak of the publishing process beyond what it holds after its first version (weights, snapshot, interpreter).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire import Publisher, Replica
from deltawire.format.container import header_bytes, lay_out, raw
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.store import open_store
from deltawire.store.transfer import Measured, download
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from measure import peak_beyond, write_csv
from support.fault_proxy import FaultProxy
from support.recorded import recorded_like
from support.servers import BUCKET, seaweedfs

BF16 = DTYPES["BF16"]
RATE = 100e6 / 8
ROUNDS = 3


def make_model(num_weights):
    """Two versions of a model: an eighth of it one embedding, the rest 24 layers of three tensors."""
    old, new = recorded_like(num_weights, density=0.0115)
    sizes = [num_weights // 8] + [(num_weights - num_weights // 8) // 72] * 72
    ends = np.cumsum(sizes)
    parts = [slice(int(end) - size, int(end)) for size, end in zip(sizes, ends, strict=True)]
    return tuple(
        {f"tensor.{i}": Tensor(BF16, (part.stop - part.start,), bits[part].copy()) for i, part in enumerate(parts)}
        for bits in (old, new)
    )


def set_to(weights, other):
    for name, tensor in weights.items():
        tensor.bits[:] = other[name].bits


def full_sync(store, weights, folder):
    """All weights as one file, there and back; the bytes each way."""
    slots = lay_out({name: ("BF16", tensor.shape) for name, tensor in weights.items()})
    pieces = Measured([header_bytes(slots, {"format": "pt"}), *(raw(weights[name].bits) for name in slots)])
    key = f"full/{uuid4().hex}.safetensors"
    store.put(key, pieces)
    download(store, key, folder / "full.safetensors", num_bytes=pieces.num_bytes, sha256=pieces.sha256)
    (folder / "full.safetensors").unlink()
    store.delete([key])
    return 2 * pieces.num_bytes


def find_changes(old, new):
    return [np.flatnonzero(old[name].bits != new[name].bits) for name in new]


def timed(work):
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def compare(server, port, models, rounds, proxy=None, fulls=None):
    """Rows of one kind of line: bytes and seconds, full and delta; all weights only in the first `fulls` rounds."""
    old, new = models
    config = {**server.config, "endpoint": f"http://127.0.0.1:{port}"}
    store = open_store(f"s3://{BUCKET}/run-{uuid4().hex}", config=config, timeout_seconds=120)
    live = {name: Tensor(BF16, tensor.shape, tensor.bits.copy()) for name, tensor in old.items()}
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Publisher(store, live, skips=(), anchors=None) as publisher,
        Replica(store, {}, heartbeat_seconds=None) as replica,
    ):
        first = publisher.publish()
        first.wait()
        replica.pull()
        for number in range(rounds):
            if fulls is None or number < fulls:
                full_bytes, full_seconds = timed(lambda: full_sync(store, live, Path(folder)))
            if proxy is not None:
                proxy.stats.bytes_up = proxy.stats.bytes_down = 0
            set_to(live, new if number % 2 == 0 else old)

            def sync():
                publication = publisher.publish()
                publication.wait()
                return publication.stats, replica.pull()

            (stats, pulled), delta_seconds = timed(sync)
            assert all(np.array_equal(replica.target.weights()[name].bits, live[name].bits) for name in live)
            wire = 2 * stats["num_bytes"] if proxy is None else proxy.stats.bytes_up + proxy.stats.bytes_down
            results.append((full_bytes, full_seconds, wire, delta_seconds, stats, pulled))
    return results


def publisher_alone(num_weights, server_config):
    """In a process of its own: what a publish blocks, and the memory that it takes."""
    old, new = make_model(num_weights)
    config = json.loads(server_config)
    store = open_store(f"s3://{BUCKET}/run-{uuid4().hex}", config=config)
    live = {name: Tensor(BF16, tensor.shape, tensor.bits.copy()) for name, tensor in old.items()}
    with Publisher(store, live) as publisher:
        publisher.publish().wait()
        publisher.flush()
        blocked = []
        for number in range(10):
            set_to(live, new if number % 2 == 0 else old)
            baseline = timed(partial(find_changes, old if number % 2 == 0 else new, live))[1]
            publication, seconds = timed(publisher.publish)
            publication.wait()
            publisher.flush()
            blocked.append((seconds / baseline, seconds, baseline))
        model_bytes = sum(tensor.bits.nbytes for tensor in live.values())

        def some_versions():
            for number in range(8):  # through versions that also get skip deltas over 4 and 16
                set_to(live, new if number % 2 == 0 else old)
                publisher.publish().wait()
            publisher.flush()

        _, beyond = peak_beyond(some_versions)
    median = [statistics.median(column) for column in zip(*blocked[1:], strict=True)]
    print(json.dumps({"blocked": median, "memory": beyond / model_bytes}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=int, default=128_000_000)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        publisher_alone(arguments.weights, arguments.alone)
        return
    warm_up((16,))
    rows = []
    with seaweedfs() as server:
        server.make_bucket(BUCKET)
        models = make_model(arguments.weights)
        plain = compare(server, server.port, models, ROUNDS)
        with FaultProxy("127.0.0.1", server.port) as proxy:
            proxy.rate_bytes_per_second = RATE
            slow = compare(server, proxy.port, models, 1, proxy)
        for line, results in (("loopback", plain), ("100 Mbit/s each way", slow)):
            full_bytes, full_seconds, delta_bytes, delta_seconds = (
                statistics.median(column) for column in list(zip(*results, strict=True))[:4]
            )
            stats, pulled = results[-1][4:]
            phases = {name.removesuffix("_seconds"): stats[name] for name in stats if name.endswith("_seconds")}
            phases |= {"fetch": pulled.fetch_seconds, "decode": pulled.decode_seconds, "apply": pulled.apply_seconds}
            rows.append(
                [line, arguments.weights, int(full_bytes), f"{full_seconds:.3f}", int(delta_bytes),
                 f"{delta_seconds:.3f}", f"{full_bytes / delta_bytes:.1f}", f"{full_seconds / delta_seconds:.1f}",
                 " ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())]
            )  # fmt: skip
            print(rows[-1])
        del models
        command = [sys.executable, __file__, "--weights", str(arguments.weights), "--alone", json.dumps(server.config)]
        alone = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    write_csv(
        "chain.csv",
        ["line", "weights", "full_bytes", "full_seconds", "delta_bytes", "delta_seconds", "times_fewer_bytes",
         "times_faster", "phases_seconds"],
        rows,
    )  # fmt: skip
    ratio, seconds, baseline = alone["blocked"]
    rows = [[arguments.weights, f"{seconds:.4f}", f"{baseline:.4f}", f"{ratio:.2f}", f"{alone['memory']:.3f}"]]
    header = ["weights", "blocking_seconds", "flatnonzero_seconds", "ratio_to_flatnonzero", "memory_beyond"]
    print(write_csv("publish.csv", header, rows).read_text())


if __name__ == "__main__":
    main()
