"""A live vLLM server on the CPU with a mirror beside it, and without one.

    python benchmarks/vllm_mirror.py [--rounds 9]

Without a mirror the worker decodes each delta against the weights that it serves. Runs that are published with
`encoding="mirrorless"` take more bytes, and are encoded and decoded without a scan of all weights. A Qwen3 of 128 M
bf16 weights, 1 % of them changed at a time, as in training: the smaller a weight, the more often. The mirror is in host
memory. The weights are compared after each round by vLLM's own checker.

Two workers are not timed: on two cores they, and the process that drives them, spin for a second after each request.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire import Publisher, Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.vllm.adapter import VllmEngine
from measure import write_csv
from support.vllm_reference import checksums
from support.vllm_server import make_model, save_model, serving
from vllm_updates import DENSITY, SIZES

MODES = [(True, "auto"), (True, "mirrorless"), (False, "auto"), (False, "mirrorless")]
HEADER = ["mirror", "encoding", "delta_bytes", "publish_to_committed_ms", "publish_to_served_ms",
          "publish_to_pulled_ms", "pause_ms", "mirror_bytes"]  # fmt: skip


def update(weights, seed):
    """Change a part of the weights by one unit in the last place, with a chance that halves as that unit doubles."""
    generator = torch.Generator().manual_seed(seed)
    for value in weights.values():
        chance = torch.exp2(-torch.frexp(value.float()).exponent.float())
        chance *= DENSITY / chance.clamp(max=chance.median() * 64).mean()
        value.view(torch.int16)[torch.rand(value.shape, generator=generator) < chance] += 1


def measure(folder, mirror, encoding, rounds):
    save_model(make_model(**SIZES), folder / "base")
    weights = {name: value.clone() for name, value in load_file(folder / "base/model.safetensors").items()}
    url = str(folder / "run")
    found = []
    with (
        serving(folder / "base", log=folder / "log") as server,
        Publisher(url, weights, anchors=None, skips=(), encoding=encoding) as publisher,
        Replica(
            url, EngineTarget(VllmEngine(server.url), None if mirror else False), heartbeat_seconds=None
        ) as replica,
    ):
        publisher.publish().wait()
        replica.pull()
        for seed in range(rounds + 1):
            update(weights, seed)
            started = time.time()
            publisher.publish().wait()
            committed = time.time()
            pulled = replica.pull()
            ended = time.time()
            assert server.checksums() == checksums(weights)
            target = replica.target
            times = committed - started, target.updated - started, ended - started, target.pause_seconds
            found.append((pulled.num_bytes, *(1000 * each for each in times)))
            print(mirror, encoding, found[-1], flush=True)
        copy = 0 if target.mirror is None else sum(each.bits.nbytes for each in target.mirror.weights().values())
    # The first round compiles and allocates.
    num_bytes, *times = map(statistics.median, zip(*found[1:], strict=True))
    return ["yes" if mirror else "no", encoding, int(num_bytes), *(f"{each:.1f}" for each in times), copy]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for mode in MODES:
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(Path(name), *mode, options.rounds))
    write_csv("vllm_mirror.csv", HEADER, rows)
    for row in rows:
        print(*row)


if __name__ == "__main__":
    main()
