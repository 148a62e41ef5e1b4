"""A real vLLM server on a GPU follows a trainer on the same GPU: what its streams, and the trainer, see of updates.

    python benchmarks/vllm_gpu.py --models 0.6b 8b --modes graphs eager --densities 0.01 --streams 8 --rounds 20

For each case one server is started with random weights of a Qwen3's shapes. Streaming requests come from a process of
their own, which notes every gap between two tokens. Then in each round some weights change, are published from a
mapping, an iterator or a module in turn, pulled through a folder store, and served. After each round every parameter's
SHA-256 in the server is compared with one that is computed here from the trainer's tensors, without deltawire's code;
with `--fresh`, at the end log probabilities with those of a server that was started with the weights of the last
round, which are known beforehand: changes are drawn by number. With `--own` the
server is then updated in vLLM's own ways, between `/pause` and `/resume`: `patches` applies changed positions and
values with what its `sparse_nccl` calls, from a file in shared memory instead of NCCL, `reload` loads a whole
checkpoint from there, and `pause` does nothing in between: what running requests cost if their context is computed
again. Without a GPU `--models tiny --out FOLDER` shows that all of it works, with VLLM_ENABLE_V1_MULTIPROCESSING=0 and
DELTAWIRE_CPU_UNPACKED=1; its figures mean nothing.

Columns: gap_ms is the longest gap of any stream from the publish on until half a second after it was served, idle_ms
the longest in as much time right before it, without an update; blocked_ms how long `publish` blocked the caller,
held_ms how long the stream on which it trains, served_s from that call until the server served the version; pause_ms
how long no step was computed; staging_mb how much GPU memory the pull took for a while, kept_mb what of it was left;
host_mb by how much the memory of trainer and agent grew, server_mb that of all processes of the server, without the
pages of mapped files.
"""

import argparse
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import product
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parent))

from deltawire import Publisher, Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.vllm.adapter import ROUTE, VllmEngine
from measure import private_bytes, sha256, write_csv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLAGS = ("--attention-backend", "TRITON_ATTN")
SHAPES = {
    "tiny": (512, 4, 8, 4, 64, 32_000, 1536, False),
    "0.6b": (1024, 28, 16, 8, 128, 151_936, 3072, True),
    "8b": (4096, 36, 32, 8, 128, 151_936, 12_288, False),
}
HASHERS = ThreadPoolExecutor(8)
# Whatever ends a benchmark, its servers do not keep the GPU: the kernel tells them.
END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size", "tie_word_embeddings",
)  # fmt: skip
STREAMS = """
import json, sys, threading, time
import httpx
url, number, out = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "a", buffering=1)
def stream(k):
    body = {"model": "m", "prompt": [5 + k, 6, 7, 8], "max_tokens": 512, "temperature": 1, "ignore_eos": True,
            "stream": True}
    with httpx.Client(timeout=120, trust_env=False) as client:
        while True:
            try:
                last = None
                with client.stream("POST", url + "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            now = time.time()
                            if last is not None:
                                out.write(json.dumps([now, now - last]) + chr(10))
                            last = now
            except Exception as error:
                out.write(json.dumps([time.time(), repr(error)[:200]]) + chr(10))
                time.sleep(0.2)
threads = [threading.Thread(target=stream, args=(k,), daemon=True) for k in range(number)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def shapes_of(config):
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    inner = config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (width,), "self_attn.k_norm": (width,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def make_model(folder, config, shapes=None, **more):
    """A checkpoint with random weights, and the same weights on the GPU. `more` is for its config."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weights = {}
    for name, shape in shapes or shapes_of(config):
        value = torch.randn(shape, device=DEVICE) * (0.02 if len(shape) > 1 else 0.1)
        weights[name] = (value if len(shape) > 1 else 1 + value).bfloat16()
    save_file({name: value.cpu() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    about = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "hidden_act": "silu",
        "attention_bias": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **about, **more}))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0").save_pretrained(folder)
    return weights


def change(weights, density, seed):
    torch.manual_seed(seed)
    for value in weights.values():
        bits = value.view(-1).view(torch.int16)
        bits += (torch.rand(bits.shape, device=DEVICE) < density).to(torch.int16)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def checksums(weights):
    """SHA-256 of what vLLM fuses and calls otherwise, by its parameter names."""

    parts = {}
    for name in sorted(weights, key=lambda name: -weights[name].numel()):
        if ".q_proj." in name:
            parts[name.replace("q_proj", "qkv_proj")] = [name.replace("q_proj", f"{each}_proj") for each in "qkv"]
        elif ".gate_proj." in name:
            parts[name.replace("gate_proj", "gate_up_proj")] = [name, name.replace("gate_proj", "up_proj")]
        elif not any(each in name for each in (".k_proj.", ".v_proj.", ".up_proj.")):
            parts[name] = [name]
    found = {name: HASHERS.submit(sha256, *(weights[each] for each in names)) for name, names in parts.items()}
    return {name: each.result() for name, each in found.items()}


def launch(module, arguments, log, **environment):
    """A server in a session of its own, which can import what lies beside this file."""
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", END_WITH_PARENT, sys.executable, "-m", module, *arguments]
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment}, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


class Server:
    def __init__(self, folder, out, *, eager, memory, extension="vllm_extension.Extension", flags=FLAGS):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=600, trust_env=False)
        arguments = [
            "serve", str(folder), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype",
            "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64", *flags, "--gpu-memory-utilization", memory,
            "--weight-transfer-config", json.dumps({"backend": "deltawire"}), "--worker-extension-cls", extension,
            "--middleware", ROUTE, "--disable-uvicorn-access-log", *(["--enforce-eager"] if eager else []),
        ]  # fmt: skip
        # DEV_MODE is for vLLM's own checksums, pause and patches, which this compares with.
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        out.mkdir(exist_ok=True)
        self.log = out / "vllm.log"
        self.process = launch("vllm.entrypoints.cli.main", arguments, self.log, **own)

    def wait(self):
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}: {self.log.read_text()[-5000:]}")
            try:
                if self.client.get("/health", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.2)

    def checksums(self):
        answer = self.client.post("/collective_rpc", json={"method": "sha256s"}).raise_for_status().json()
        return answer["results"][0]

    def complete(self, prompt, tokens):
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 3}
        answer = self.client.post("/v1/completions", json={**body, "ignore_eos": True}).raise_for_status().json()
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    def running(self):
        """How many requests there are; its own makes that known."""
        self.complete([3], 1)
        found = re.findall(r"^vllm:num_requests_running\S* (\S+)", self.client.get("/metrics").text, re.MULTILINE)
        return sum(map(float, found))

    def logprobs(self):
        """After each of four prompts, asked for alone: other requests in a batch change the last digits."""
        while self.running():
            time.sleep(0.2)
        return [self.complete(list(range(first, first + 50)), 8) for first in range(40, 440, 100)]

    def close(self):
        os.killpg(self.process.pid, 15)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()


def take_turn(folder):
    """Several benchmarks may start their servers together, which takes most of the time, and measure in turns."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "up").touch()
        while not (folder / "go").exists():
            time.sleep(0.2)


class Streams:
    """Requests all the time, from a process of its own, and the gaps between tokens."""

    def __init__(self, url, number, path):
        self.path = path
        self.process = subprocess.Popen([sys.executable, "-c", STREAMS, url, str(number), str(path)])

    def longest_ms(self, since, until):
        rows = [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("]")]
        errors = [row for row in rows if isinstance(row[1], str)]
        if errors:
            raise SystemExit(f"a stream failed: {errors[0]}")
        # A gap counts if any of it lies in the interval.
        gap, self.ended = max(((gap, now) for now, gap in rows if now >= since and now - gap <= until), default=(0, 0))
        return 1000 * gap

    def close(self):
        self.process.kill()
        self.process.wait()


class Module(torch.nn.Module):
    """The weights as parameters of a module."""

    def __init__(self, weights):
        super().__init__()
        for name, value in weights.items():
            part, *path = self, *name.split(".")
            for each in path[:-1]:
                if not hasattr(part, each):
                    part.add_module(each, torch.nn.Module())
                part = getattr(part, each)
            part.register_parameter(path[-1], torch.nn.Parameter(value, requires_grad=False))


def source_of(kind, weights):
    if kind == "module":
        return Module(weights)
    return weights if kind == "mapping" else lambda: iter(weights.items())


def update_own(kind, server, weights, before, clears):
    """Update the server with vLLM's own code; seconds to make the file, its size, and seconds of the pause."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "model.safetensors"
        if kind == "patches":
            arrays = {}
            for name, value in weights.items():
                changed = (value.view(-1).view(torch.int16) != before[name].view(-1).view(torch.int16)).nonzero()[:, 0]
                arrays[f"{name}.indices"] = changed.int().cpu()
                arrays[f"{name}.values"] = value.view(-1)[changed].cpu()
                arrays[f"{name}.shape"] = torch.tensor(value.shape)
        elif kind == "reload":
            arrays = {name: value.cpu() for name, value in weights.items()}
        else:
            arrays = {}
        save_file(arrays, path, {"format": "pt"})
        made, num_bytes = time.perf_counter() - started, path.stat().st_size
        clock = time.perf_counter()
        server.client.post(f"/pause?mode=keep&clear_cache={str(clears).lower()}").raise_for_status()
        if kind != "pause":
            method, where = ("patch", path) if kind == "patches" else ("reload", folder)
            body = {"method": method, "args": [str(where)]}
            server.client.post("/collective_rpc", json=body).raise_for_status()
        server.client.post("/resume").raise_for_status()
        return made, num_bytes, time.perf_counter() - clock


def used_mb():
    if DEVICE == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def memory_mb(session=None):
    """The host memory of this process, or of all processes of a session, without the pages of mapped files."""
    if session is None:
        return private_bytes() / 1e6
    found = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may end meanwhile.
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == session:
                found += private_bytes(path.parent.name) / 1e6
    return found


class Watch:
    """How much GPU memory is taken at most, by whomever."""

    def __init__(self):
        self.first = self.most = used_mb()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ended.wait(0.002):
            self.most = max(self.most, used_mb())

    def end(self):
        self._ended.set()
        self._thread.join()
        return self.most - self.first, used_mb() - self.first


class Held:
    """How long the stream on which a trainer trains waits, which the trainer does not have to."""

    def __init__(self):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if DEVICE == "cuda" else []
        self._record(0)

    def _record(self, number):
        if self._events:
            self._events[number].record()

    def end(self):
        self._record(1)

    @property
    def milliseconds(self):
        if not self._events:
            return ""
        torch.cuda.synchronize()
        return round(self._events[0].elapsed_time(self._events[1]), 1)


class Case:
    """One server, and what was measured with it."""

    def __init__(self, folder, out, options, model, mode, before):
        self.folder, self.out, self.options, self.model, self.mode = folder, out, options, model, mode
        self.before = before
        self.started, self.rows, self.seed = time.time(), [], 0
        self.watched = 1.0  # seconds
        self.weights = make_model(folder / "base", dict(zip(FIELDS, SHAPES[model], strict=True)))
        self.plan = self.planned()
        self.server, self.fresh = self.start("first"), None

    def planned(self):
        """For each source its cases: what becomes of running requests, streams, density, and the number of rounds. All
        cases for the first source, and one for the others.
        """
        options = self.options
        cases = list(product(options.running_requests, options.streams, options.densities))
        first = [(*case, options.few if number else options.rounds) for number, case in enumerate(cases)]
        return {source: [(*cases[0], options.few)] if number else first
                for number, source in enumerate(options.sources)}  # fmt: skip

    def start(self, name):
        cache = ["--kv-cache-memory-bytes", str(self.options.cache_mb << 20)] if self.options.cache_mb else []
        return Server(
            self.folder / "base", self.out / name, eager=self.mode == "eager", memory=self.options.memory,
            flags=(*FLAGS, *cache),
        )  # fmt: skip

    def start_fresh(self):
        """A server with the weights of the last round. It is started when the first one has compiled, from the same
        folder, so that it runs what was compiled then: kernels are chosen by their times, and others round otherwise.
        """
        file = self.folder / "base/model.safetensors"
        file.unlink()
        last = {name: value.clone() for name, value in self.weights.items()}
        rounds = [density for cases in self.plan.values() for _, _, density, rounds in cases for _ in range(rounds)]
        for seed, density in enumerate(rounds, 1):
            change(last, density, seed)
        save_file({name: value.cpu() for name, value in last.items()}, file, {"format": "pt"})
        return self.start("fresh")

    def say(self, *words):
        print(f"[{time.time() - self.started:6.1f}] {self.model} {self.mode}:", *words, flush=True)

    def run(self):
        options = self.options
        try:
            self.server.wait()
            if options.fresh:
                self.fresh = self.start_fresh()
                self.fresh.wait()
            # It was loaded, and takes the room of others.
            (self.folder / "base/model.safetensors").unlink()
            # The first requests of a server compile.
            with self.streaming(0, options.streams[0], 12):
                self.say("up")
            # What is there by now, and the rows of gaps that it reads, are not looked through while it publishes.
            gc.collect()
            gc.freeze()
            for source, cases in self.plan.items():
                run = str(self.folder / f"run-{source}")
                with Publisher(
                    run, source_of(source, self.weights), run=source, anchors=None, skips=(), check_share=0
                ) as publisher:
                    publisher.publish().wait()
                    for case in cases:
                        self.follow(source, case, run, publisher)
                shutil.rmtree(run)
            if options.fresh:
                self.compare_with_fresh()
            for kind in options.own:
                with self.streaming(options.densities[0], options.streams[0]) as about:
                    for number in range(options.few):
                        self.update_own(kind, about, number)
        finally:
            for server in self.servers:
                server.close()
        return self.rows

    @property
    def servers(self):
        return [self.server, *([self.fresh] if self.fresh else [])]

    def follow(self, source, case, url, publisher):
        running, streams, density, rounds = case
        target = EngineTarget(VllmEngine(self.server.url, running_requests=running))
        # By name: the server may have followed another run before.
        with Replica(url, target, run=source, heartbeat_seconds=None) as replica:
            with self.streaming(density, streams):
                since = time.time()
                replica.pull()
                gap = round(self.streams.longest_ms(since, time.time()), 1)
                self.say("at the newest version after", round(time.time() - since, 2), "s, longest gap", gap, "ms")
            if not self.rows:
                take_turn(self.options.turn)
            with self.streaming(density, streams) as about:
                about |= {"source": source, "requests": running}
                for number in range(rounds):
                    self.update(publisher, replica, target, about, number)

    @contextmanager
    def streaming(self, density, number, warm_up=2):
        path = self.out / f"gaps-{len(self.rows)}-{density}.jsonl"
        self.streams = Streams(self.server.url, number, path)
        try:
            time.sleep(warm_up)
            yield {"model": self.model, "mode": self.mode, "changed": density, "streams": number}
        finally:
            self.streams.close()

    def idle(self):
        """What streams see in as much time as they were last watched for."""
        since = time.time()
        time.sleep(self.watched)
        return {"idle_ms": round(self.streams.longest_ms(since, time.time()), 1)}

    def memory_mb(self):
        return memory_mb(), memory_mb(self.server.process.pid)

    def change(self, density):
        self.seed += 1
        change(self.weights, density, self.seed)
        # Until streams have got over the checksums of the round before.
        time.sleep(0.3)

    def update(self, publisher, replica, target, about, number):
        self.change(about["changed"])
        about = about | self.idle()
        host = self.memory_mb()
        held = Held()
        since, clock = time.time(), time.perf_counter()
        handle = publisher.publish()
        blocked = time.perf_counter() - clock
        held.end()
        handle.wait()
        committed = time.perf_counter() - clock
        watch = Watch()
        pulled = replica.pull()
        served = time.perf_counter() - clock
        self.add(about, number, since, {
            "bytes": pulled.num_bytes, "pause_ms": round(1000 * target.pause_seconds, 2),
            "blocked_ms": round(1000 * blocked, 1), "held_ms": held.milliseconds,
            "encode_s": round(handle.stats["encode_seconds"], 3), "committed_s": round(committed, 3),
            "fetch_s": round(pulled.fetch_seconds, 3),
            "apply_s": round(pulled.apply_seconds, 3), "served_s": round(served, 3),
        }, watch, host)  # fmt: skip

    def update_own(self, kind, about, number):
        before = {name: value.clone() for name, value in self.weights.items()} if kind == "patches" else {}
        if kind != "pause":
            self.change(about["changed"])
        about = about | self.idle()
        host, since, clock = self.memory_mb(), time.time(), time.perf_counter()
        watch = Watch()
        running = self.options.running_requests[0]
        made, num_bytes, pause = update_own(kind, self.server, self.weights, before, running == "recompute")
        self.add(about | {"source": f"vLLM {kind}", "requests": running}, number, since, {
            "bytes": num_bytes, "pause_ms": round(1000 * pause, 2), "blocked_ms": round(1000 * made, 1), "held_ms": "",
            "encode_s": "", "committed_s": round(made, 3), "fetch_s": "", "apply_s": round(pause, 3),
            "served_s": round(time.perf_counter() - clock, 3),
        }, watch, host)  # fmt: skip

    def add(self, about, number, since, measured, watch, host):
        """A row, after looking at what streams saw until half a second later, and at every parameter."""
        time.sleep(0.5)
        self.watched = time.time() - since
        gap = self.streams.longest_ms(since, since + self.watched)
        if gap:
            self.say(f"the longest gap ended {self.streams.ended - since:.3f} s after the publish began")
        staging, kept = watch.end()
        host, server = (now - before for now, before in zip(self.memory_mb(), host, strict=True))
        with ThreadPoolExecutor(1) as meanwhile:
            asked = meanwhile.submit(self.server.checksums)
            wanted, found = checksums(self.weights), asked.result()
        wrong = [name for name in wanted if found.get(name) != wanted[name]]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {len(wanted)} tensors differ: {wrong[:3]}")
        row = about | {
            "round": number, "tensors": len(wanted), "gap_ms": round(gap, 1), **measured, "staging_mb": round(staging),
            "kept_mb": round(kept), "host_mb": round(host), "server_mb": round(server),
        }  # fmt: skip
        self.rows.append(row)
        self.say(json.dumps(row))
        self.write()

    def write(self):
        """After each row: whatever ends this does not lose what was measured."""
        rows = [*self.before, *self.rows]
        table = [[row[each] for each in rows[0]] for row in rows]
        gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "none"
        notes = {"gpu": gpu, "torch": torch.__version__, "vllm": version("vllm")}
        write_csv("vllm_gpu.csv", list(rows[0]), table, folder=self.options.out, notes=notes)

    def compare_with_fresh(self):
        if self.fresh.checksums() != self.server.checksums():
            raise SystemExit("the fresh server has other weights")
        ours, theirs = self.server.logprobs(), self.fresh.logprobs()
        equal = [one == other for one, other in zip(ours, theirs, strict=True)]
        self.say("log probabilities equal to a fresh server's:", equal, ours[0][:3], theirs[0][:3])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6b"], choices=SHAPES)
    parser.add_argument("--modes", nargs="+", default=["graphs"], choices=["graphs", "eager"])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.01])
    parser.add_argument("--streams", nargs="+", type=int, default=[8])
    parser.add_argument("--sources", nargs="+", default=["mapping", "iterator", "module"])
    parser.add_argument("--running-requests", nargs="+", default=["recompute"], choices=["recompute", "keep", "abort"])
    parser.add_argument(
        "--own", nargs="*", default=[], choices=["pause", "patches", "reload"], help="vLLM's own ways, too"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the first case")
    parser.add_argument("--few", type=int, default=3, help="rounds of each other case")
    parser.add_argument("--memory", default="0.4", help="of the GPU, for a server")
    parser.add_argument("--cache-mb", type=int, help="for the context of requests, where other servers start as well")
    parser.add_argument("--turn", type=Path, help="a folder: wait for `go` in it, and put `up` there before")
    parser.add_argument("--fresh", action="store_true", help="compare with a server that is started then")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for model, mode in product(options.models, options.modes):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as logs:
            try:
                case = Case(Path(folder), Path(logs), options, model, mode, rows)
                rows = [*rows, *case.run()]
            finally:
                for log in Path(logs).rglob("vllm.log"):
                    name = f"vllm-{model}-{mode}-{log.parent.name}.log"
                    (options.out / name).write_bytes(log.read_bytes()[-200_000:])
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
