"""One update of a live vLLM server, in three ways, side by side: what the pause costs.

    python benchmarks/vllm_updates.py [--rounds 5]

A Qwen3 of 128 M bf16 weights on the CPU, 1 % of them changed at a time. "deltawire" stages the changes and writes them
in place; "patch API" is vLLM's own `load_checkpoint_weight_patches`, its patches read before the pause; "reload" loads
the whole checkpoint by vLLM's layerwise reload. All three run in the same server, one after the other in each round;
the weights are compared after each by vLLM's own checker. The pause of vLLM's own modes is the time from sending /pause
to the answer of /resume; deltawire's is one request in the server's own process, timed there from the end of the step
that was running. A version is served when its write has ended, and pulled when the agent's mirror has
it, too. Memory is how far the worker's resident memory rose.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire import Publisher, Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.vllm.adapter import VllmEngine
from measure import write_csv
from support.vllm_reference import checksums
from support.vllm_server import make_model, save_model, serving

SIZES = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 32_000, "intermediate_size": 2304,
}  # fmt: skip
DENSITY = 0.01


def update(weights, seed):
    """Change a part of the weights by one unit in the last place or so; which ones."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, value in weights.items():
        bits = value.view(-1).view(torch.int16)
        where = (torch.rand(bits.shape, generator=generator) < DENSITY).nonzero().squeeze(1)
        bits[where] += 1
        changed[name] = where
    return changed


class Memory(threading.Thread):
    """Watches how much memory a process has."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self._path = Path(f"/proc/{pid}/statm")
        self.first = self.peak = self._now()
        self._ended = threading.Event()
        self.start()

    def _now(self):
        return int(self._path.read_text().split()[1]) * 4096

    def run(self):
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, self._now())

    def rise(self):
        self._ended.set()
        self.join()
        return max(self.peak, self._now()) - self.first


class Bench:
    def __init__(self, folder, server, replica, publisher, weights):
        self.folder, self.server, self.replica = folder, server, replica
        self.publisher, self.weights = publisher, weights
        self.engine = replica.target.engine
        self.pid = self.rpc("bench_seconds")["pid"]

    def rpc(self, method, *args):
        answer = self.server.client.post("/collective_rpc", json={"method": method, "args": list(args)}, timeout=600)
        return answer.raise_for_status().json()["results"][0]

    def check(self):
        assert self.server.checksums() == checksums(self.weights)

    def deltawire(self, seed):
        update(self.weights, seed)
        memory = Memory(self.pid)
        started = time.time()
        self.publisher.publish().wait()
        pulled = self.replica.pull()
        ended = time.time() - started
        rise = memory.rise()
        self.check()
        apply = self.rpc("bench_seconds")["seconds"]
        target = self.replica.target
        return apply, target.pause_seconds, rise, pulled.num_changed, target.updated - started, ended

    def patch_api(self, seed):
        changed = update(self.weights, seed)
        tensors, shapes = {}, {}
        for name, where in changed.items():
            tensors[f"{name}.indices"] = where.to(torch.int32)
            tensors[f"{name}.values"] = self.weights[name].view(-1)[where]
            shapes[name] = ",".join(map(str, self.weights[name].shape))
        save_file(tensors, self.folder / "patches.safetensors", shapes)
        memory = Memory(self.pid)
        self.rpc("bench_stage", str(self.folder / "patches.safetensors"))
        apply, pause = self._paused("bench_apply")
        rise = memory.rise()
        self.check()
        self._bring_mirror()
        self._set_version()
        return apply, pause, rise, sum(map(len, changed.values()))

    def reload(self, seed):
        changed = update(self.weights, seed)
        self._bring_mirror()
        memory = Memory(self.pid)
        apply, pause = self._paused("bench_reload", str(self.replica.target.mirror.folder))
        rise = memory.rise()
        self.check()
        self._set_version()
        return apply, pause, rise, sum(map(len, changed.values()))

    def _paused(self, method, *args):
        """Seconds of a call in the worker, and of the pause around it."""
        started = time.perf_counter()
        self.server.client.post("/pause?mode=keep&clear_cache=true").raise_for_status()
        apply = self.rpc(method, *args)["seconds"]
        self.server.client.post("/resume").raise_for_status()
        return apply, time.perf_counter() - started

    def _bring_mirror(self):
        """Let the run and the mirror have what the server gets by another mode."""
        self.publisher.publish().wait()
        target, self.replica.target = self.replica.target, self.replica.target.mirror
        self.replica.pull()
        self.replica.target = target

    def _set_version(self):
        self.engine.digest()
        self.engine.mark(self.replica.target.mirror.state())
        self.replica.target.refresh()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(make_model(**SIZES), folder / "base")
        weights = {name: value.clone() for name, value in load_file(folder / "base/model.safetensors").items()}
        total = sum(value.numel() for value in weights.values())
        url = str(folder / "run")
        environment = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent / 'tests'}"}
        with (
            serving(folder / "base", extension="vllm_patches.BenchExtension", environment=environment,
                    log=folder / "log") as server,
            Publisher(url, weights, anchors=None, skips=()) as publisher,
            Replica(url, EngineTarget(VllmEngine(server.url), folder / "mirror"), heartbeat_seconds=None) as replica,
        ):  # fmt: skip
            publisher.publish().wait()
            replica.pull()
            update(weights, 0)
            publisher.publish().wait()
            replica.pull()
            bench = Bench(folder, server, replica, publisher, weights)
            results = {"deltawire": [], "patch API": [], "reload": []}
            for i in range(options.rounds):
                for number, (mode, work) in enumerate(
                    {"deltawire": bench.deltawire, "patch API": bench.patch_api, "reload": bench.reload}.items()
                ):
                    results[mode].append(work(1 + 3 * i + number))
                    print(mode, results[mode][-1], flush=True)
    rows = []
    base = {}
    for mode, measured in results.items():
        apply, pause, rise, _, *ends = (statistics.median(each) for each in zip(*measured, strict=True))
        base = base or {"apply": apply, "pause": pause}
        rows.append([
            mode, f"{1000 * apply:.1f}", f"{apply / base['apply']:.2f}", f"{1000 * pause:.1f}",
            f"{pause / base['pause']:.2f}", *([f"{1000 * each:.0f}" for each in ends] or ["", ""]),
            f"{rise / (2 * total):.3f}",
        ])  # fmt: skip
        print(*rows[-1])
    header = [
        "mode", "apply_ms", "apply_ratio", "pause_ms", "pause_ratio", "publish_to_served_ms", "publish_to_pulled_ms",
        "memory_of_model",
    ]  # fmt: skip
    write_csv("vllm.csv", header, rows, notes={"weights": str(total), "density": str(DENSITY), "vllm": "0.32.0"})


if __name__ == "__main__":
    main()
