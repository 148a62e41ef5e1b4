"""A real SGLang server on a GPU follows a trainer on the same GPU: what its streams see of updates, and of kills.

    python benchmarks/sglang_gpu.py --models 0.6b experts --rounds 20 10

For each model one server is started with random weights: of Qwen3-0.6B's shapes, or of a small Qwen3 with experts.
Eight streaming requests come from a process of their own, which notes every gap between two tokens. In each round one
weight in a hundred changes, is published, pulled through a folder store, and served: as patches while requests go on
from what was computed (`keep`), then while their context is computed again (`recompute`), then by a reload of the whole
mirror (`disk`). After each round every parameter's SHA-256 in the server is compared with one that is computed here
from the trainer's tensors, without deltawire's code. Half way through the patches the server is killed: a dense
model's between two updates, one with experts while an update is written. It is started again with the weights of
version 0, and one pull has to heal it. At the end SGLang's own checksums (`/weights_checker`) are compared with those
after a reload.

Columns as in vllm_gpu.csv: gap_ms is the longest gap of any stream from the publish on until half a second after it was
served, idle_ms the longest of three seconds without updates; blocked_ms how long `publish` blocked the caller, served_s
from that call until the server served the version, pause_ms how long no step was computed. `event` says that the server
was killed before; then served_s is the time from its start until it served the version, start_s of that until it
answered.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from base64 import b64encode
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parent))

import vllm_gpu
from deltawire import Publisher, Replica
from deltawire.engines.sglang.adapter import SglangEngine
from deltawire.engines.sglang.ranks import LOADER, pickled
from deltawire.engines.target import EngineTarget
from deltawire.errors import DeltawireError
from measure import sha256, write_csv

FLAGS = [
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-cuda-graph", "--grammar-backend",
    "none", "--disable-radix-cache", "--mem-fraction-static", "0.3", "--context-length", "2048", "--dtype", "bfloat16",
]  # fmt: skip
EXPERTS = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
# The number of experts and their inner size; None for a dense model. The last two are for trying this out.
MODELS = {
    "0.6b": (vllm_gpu.SHAPES["0.6b"], None),
    "experts": ((1024, 12, 16, 4, 64, 32_000, 3072, False), (32, 512)),
    "dry": ((64, 2, 4, 2, 16, 512, 128, True), None),
    "dry-experts": ((64, 2, 4, 2, 16, 512, 128, False), (4, 32)),
}


def shapes_of(config):
    """With experts in place of the dense part of each layer."""
    experts, inner, hidden = (config.get(each) for each in ("num_experts", "moe_intermediate_size", "hidden_size"))
    for name, shape in vllm_gpu.shapes_of(config):
        if experts and ".mlp." in name:
            prefix, kind = name.split(".mlp.")
            if kind.startswith("gate_proj"):
                yield f"{prefix}.mlp.gate.weight", (experts, hidden)
            shape = (hidden, inner) if kind.startswith("down") else (inner, hidden)
            for number in range(experts):
                yield f"{prefix}.mlp.experts.{number}.{kind}", shape
        else:
            yield name, shape


def make_model(folder, model):
    sizes, experts = MODELS[model]
    config = dict(zip(vllm_gpu.FIELDS, sizes, strict=True))
    if experts is None:
        return vllm_gpu.make_model(folder, config)
    config |= EXPERTS | dict(zip(("num_experts", "moe_intermediate_size"), experts, strict=True))
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return vllm_gpu.make_model(folder, config, shapes_of(config), **kind)


def checksums(weights):
    """SHA-256 of what SGLang fuses and calls otherwise, by its parameter names."""
    found = vllm_gpu.checksums({name: value for name, value in weights.items() if ".experts." not in name})
    layers = {name.split(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:
        number = len([name for name in weights if name.startswith(f"{layer}.experts.") and ".down_proj." in name])
        own = [[weights[f"{layer}.experts.{each}.{part}_proj.weight"] for part in ("gate", "up", "down")]
               for each in range(number)]  # fmt: skip
        found[f"{layer}.experts.w13_weight"] = sha256(torch.stack([torch.cat([gate, up]) for gate, up, _ in own]))
        found[f"{layer}.experts.w2_weight"] = sha256(torch.stack([down for _, _, down in own]))
    return found


class Server(vllm_gpu.Server):
    def __init__(self, folder, log, module):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.folder, self.log, self.module = f"http://127.0.0.1:{self.port}", folder, log, module
        self.client = httpx.Client(base_url=self.url, timeout=600, trust_env=False)
        self.start()

    def start(self):
        arguments = [
            "--model-path", str(self.folder), "--served-model-name", "m", "--host", "127.0.0.1", "--port",
            str(self.port), *FLAGS, "--custom-weight-loader", LOADER, "sglang_extension.checksums",
        ]  # fmt: skip
        self.process = vllm_gpu.launch(self.module, arguments, self.log)

    def kill(self):
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def post(self, path, **body):
        answer = self.client.post(path, json=body)
        if answer.is_error:
            raise SystemExit(f"{path}: {answer.status_code} {answer.text[:2000]}")
        return answer

    def checksums(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checksums.json"
            payload = b64encode(pickled("path", str(path).encode())).decode()
            self.post("/pause_generation", mode="in_place")
            # Before 0.5.21 these two are not there, and are not needed.
            self.client.post("/begin_weight_update", json={"selector": "target"})
            self.post(
                "/update_weights_from_tensor", serialized_named_tensors=[payload], flush_cache=False,
                load_format="sglang_extension.checksums",
            )  # fmt: skip
            self.client.post("/end_weight_update", json={})
            self.post("/continue_generation")
            return json.loads(path.read_text())

    def own_checksums(self):
        """SGLang's own, of each parameter and buffer."""
        answer = self.post("/weights_checker", action="checksum").json()
        return [rank["checksums"] for rank in answer["ranks"]]


class Case:
    """One model, its server, and what was measured with it."""

    def __init__(self, model, rounds, event, folder, options, add):
        self.model, self.rounds, self.event, self.options = model, rounds, event, options
        self.folder, self.add_row, self.seed, self.phases, self.failures = folder, add, 0, 0, 0
        self.started = time.time()
        self.weights = make_model(folder / "base", model)
        self.say(f"{sum(value.numel() for value in self.weights.values()) / 1e6:.0f} M weights made")
        self.server = Server(folder / "base", options.out / f"sglang-{model}.log", options.server)

    def say(self, *words):
        print(f"[{time.time() - self.started:6.1f}] {self.model}:", *words, flush=True)

    def run(self):
        few = max(self.rounds // 7, 1)
        try:
            self.server.wait()
            self.say("up")
            with Publisher(
                str(self.folder / "run"), self.weights, run=self.model, anchors=None, skips=(), check_share=0
            ) as self.publisher:
                self.publisher.publish().wait()
                self.attempt(self.follow, "patch", "keep", self.rounds - 2 * few, self.event)
                self.attempt(self.follow, "patch", "recompute", few)
                self.attempt(self.follow, "disk", "recompute", few)
            self.attempt(self.compare_with_reload)
        finally:
            self.server.close()
        return self.failures

    def attempt(self, work, *arguments):
        """The time on a GPU is short: what comes next may still be worth it."""
        try:
            work(*arguments)
        except (Exception, SystemExit):
            self.failures += 1
            self.say(f"FAILED {work.__name__} {arguments}: {traceback.format_exc()}")

    def follow(self, mode, running, rounds, event=None):
        engine = SglangEngine(self.server.url, mode=mode, running_requests=running)
        target = EngineTarget(engine, self.folder / "mirror")
        with Replica(str(self.folder / "run"), target, run=self.model, heartbeat_seconds=None) as replica:
            replica.pull()
            self.say(f"{mode}, {running}: attached")
            parts = [rounds // 2, rounds - rounds // 2] if event else [rounds]
            number = 0
            for part in parts:
                with self.streaming() as about:
                    about |= {"mode": mode, "requests": running}
                    for _ in range(part):
                        self.update(replica, target, about, number)
                        number += 1
                if event and number < rounds:
                    self.heal(replica, target, about, event)

    @contextmanager
    def streaming(self):
        self.phases += 1
        path = self.options.out / f"gaps-{self.model}-{self.phases}.jsonl"
        path.unlink(missing_ok=True)
        self.streams = vllm_gpu.Streams(self.server.url, self.options.streams, path)
        try:
            # The first requests of a server compile.
            time.sleep(self.options.settle)
            quiet = time.time()
            time.sleep(3)
            idle = round(self.streams.longest_ms(quiet, time.time()), 1)
            yield {"model": self.model, "streams": self.options.streams, "changed": self.options.density,
                   "idle_ms": idle}  # fmt: skip
        finally:
            self.streams.close()

    def change(self):
        self.seed += 1
        vllm_gpu.change(self.weights, self.options.density, self.seed)
        # Until streams have got over the checksums of the round before.
        time.sleep(0.3)

    def update(self, replica, target, about, number):
        self.change()
        since, clock = time.time(), time.perf_counter()
        handle = self.publisher.publish()
        blocked = time.perf_counter() - clock
        handle.wait()
        committed = time.perf_counter() - clock
        pulled = replica.pull()
        served = time.perf_counter() - clock
        time.sleep(0.5)
        gap = self.streams.longest_ms(since, time.time())
        self.add(about, number, target, pulled, served, {
            "event": "", "start_s": "", "gap_ms": round(gap, 1), "blocked_ms": round(1000 * blocked, 1),
            "committed_s": round(committed, 3),
        })  # fmt: skip

    def heal(self, replica, target, about, event):
        """Kill the server, start it again, and see that one pull brings it to the newest version."""
        self.change()
        self.publisher.publish().wait()
        if event == "killed during an update":
            write = target.engine._write

            def killed(*arguments, **named):
                threading.Timer(0.002, self.server.kill).start()
                return write(*arguments, **named)

            target.engine._write = killed
        else:
            self.server.kill()
        try:
            replica.pull()
        except DeltawireError as error:
            self.say(f"{event}: {type(error).__name__}: {str(error)[:200]}")
        else:
            raise SystemExit(f"{event}, and the pull says that all is well")
        vars(target.engine).pop("_write", None)
        self.server.process.wait()
        time.sleep(2)
        clock = time.perf_counter()
        self.server.start()
        self.server.wait()
        start = time.perf_counter() - clock
        self.say("up again")
        pulled = replica.pull()
        self.add(about, "", target, pulled, time.perf_counter() - clock, {
            "event": event, "start_s": round(start, 1), "gap_ms": "", "blocked_ms": "", "committed_s": "",
        })  # fmt: skip

    def add(self, about, number, target, pulled, served, measured):
        wanted, found = checksums(self.weights), self.server.checksums()
        wrong = [name for name in wanted if found.get(name) != wanted[name]]
        row = about | {
            "round": number, "tensors": len(wanted), "wrong": len(wrong), "others": len(found.keys() - wanted.keys()),
            **measured, "pause_ms": round(1000 * target.pause_seconds, 2), "bytes": pulled.num_bytes,
            "fetch_s": round(pulled.fetch_seconds, 3), "apply_s": round(pulled.apply_seconds, 3),
            "served_s": round(served, 3),
        }  # fmt: skip
        self.say(json.dumps(row))
        self.add_row(row)
        if wrong or found.keys() - wanted.keys():
            raise SystemExit(f"{len(wrong)} differ: {wrong[:3]}; not known: {sorted(found.keys() - wanted.keys())[:3]}")

    def compare_with_reload(self):
        ours = self.server.own_checksums()
        folder = self.folder / "base"
        save_file({name: value.cpu() for name, value in self.weights.items()}, folder / "model.safetensors",
                  {"format": "pt"})  # fmt: skip
        self.server.post("/update_weights_from_disk", model_path=str(folder), flush_cache=False)
        theirs = self.server.own_checksums()
        self.say(f"SGLang's own checksums of {sum(map(len, ours))} tensors equal to a reload's: {ours == theirs}")
        if ours != theirs:
            raise SystemExit("they differ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6b", "experts"], choices=MODELS)
    parser.add_argument("--rounds", nargs="+", type=int, default=[20, 10], help="of each model")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--settle", type=float, default=5, help="seconds of streams before the first is measured")
    parser.add_argument("--server", default="sglang.launch_server", help="the module that is started")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    try:
        release = version("sglang")
    except PackageNotFoundError:
        release = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"

    def add(row):
        rows.append(row)
        table = [[row[each] for each in rows[0]] for row in rows]
        notes = {"gpu": gpu, "torch": torch.__version__, "sglang": release}
        write_csv("sglang_gpu.csv", list(rows[0]), table, folder=options.out, notes=notes)

    failures = 0
    for place, model in enumerate(options.models):
        rounds = options.rounds[min(place, len(options.rounds) - 1)]
        with tempfile.TemporaryDirectory() as folder:
            event = "killed during an update" if MODELS[model][1] else "killed between two updates"
            case = Case(model, rounds, event, Path(folder), options, add)
            failures += case.run()
        del case
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    sys.exit(failures)


if __name__ == "__main__":
    main()
