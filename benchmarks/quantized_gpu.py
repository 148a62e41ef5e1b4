"""vLLM servers that quantize their weights follow a run of bf16, beside one that does not, on one GPU.

    VLLM_USE_DEEP_GEMM=0 python benchmarks/quantized_gpu.py --models dense --mode eager --rounds 20
    VLLM_USE_DEEP_GEMM=0 python benchmarks/quantized_gpu.py --models moe --mode eager --rounds 20

For each model a server without `--quantization` and one for each of `--quantizations` are started together, with
random weights. All follow one run. In each round 1 % of the weights go one step up or down, a few become zero,
subnormal or the largest of their group, and an expert that was zero gets weights; that is published once, and pulled
by one server after the other, each while it alone streams. After each round every parameter of each server, codes and
scales included, is compared by SHA-256 with what vLLM's own quantization functions, called here with the trainer's
tensors, make of them. At the end fresh servers are started with the same flags from the trainer's checkpoint: every
parameter must be the same as in the server that followed, and so must greedy log probabilities.

Columns: changed is how many bf16 weights the trainer changed, served, codes and scales how many elements of each kind
the server wrote into what it computes with, kept how many it wrote into the bf16 weights in its host memory;
per_change is codes and scales for each changed weight of a quantized tensor; staged_mb all that was staged for that;
pause_ms, gap_ms and idle_ms are as in vllm_gpu.py, gap_ms from the pull on, idle_ms before it, both in `--watched`
seconds, however long the pull takes: the longest of more gaps is longer; gpu_mb the GPU memory that staging took.
On a machine without a GPU it runs with a tiny model and `--quantizations fp8_per_channel`, which shows that it works.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parent))

import vllm_gpu
from deltawire import Publisher, Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.vllm.adapter import VllmEngine
from measure import write_csv
from quantized_extension import sha256s

DENSE = dict(zip(vllm_gpu.FIELDS, vllm_gpu.SHAPES["0.6b"], strict=True))
TINY = dict(zip(vllm_gpu.FIELDS, (256, 2, 4, 2, 64, 2048, 512, False), strict=True))
MOE = {
    **dict(zip(vllm_gpu.FIELDS, (1024, 8, 16, 8, 128, 32_000, 3072, False), strict=True)),
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS = {"dense": DENSE, "moe": MOE, "tiny": TINY}
ZERO_EXPERT, FILLED_IN = 3, 2
PLAIN = "none"


def shapes_of(config):
    experts = config.get("num_experts", 0)
    for name, shape in vllm_gpu.shapes_of(config):
        if not experts or ".mlp." not in name:
            yield name, shape
        elif "gate_proj" in name:
            stem = name.partition(".gate_proj")[0]
            hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
            yield f"{stem}.gate.weight", (experts, hidden)
            for number in range(experts):
                for part, own in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                    yield f"{stem}.experts.{number}.{part}_proj.weight", own


def make_model(folder, config):
    if "num_experts" not in config:
        return vllm_gpu.make_model(folder, config)
    about = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    weights = vllm_gpu.make_model(folder, config, shapes_of(config), **about)
    for name in weights:
        if f".0.mlp.experts.{ZERO_EXPERT}." in name:
            weights[name].zero_()
    save(weights, folder)
    return weights


def save(weights, folder):
    save_file({name: value.cpu() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def change(weights, density, number):
    """A step up or down for some, and what moves scales; returns how many weights changed, and how many of those that
    are quantized.
    """
    torch.manual_seed(1000 + number)
    total = quantized = 0
    for name, value in weights.items():
        bits = value.view(-1).view(torch.int16)
        before = bits.clone()
        chosen = (torch.rand(bits.shape, device=bits.device) < density) & (bits & 0x7FFF).ne(0)
        bits += torch.where(torch.rand(bits.shape, device=bits.device) < 0.5, 1, -1).to(torch.int16) * chosen
        flat = value.view(-1)
        if f".0.mlp.experts.{ZERO_EXPERT}." in name and number == FILLED_IN:
            flat.copy_(torch.randn(flat.shape, device=flat.device) * 0.02)
        elif name.endswith("down_proj.weight") and ".0." in name:
            at = torch.randint(flat.numel(), (4,), device=flat.device)
            flat[at] = torch.stack([flat[at[0]] * 0, flat[at[1]] * 0 + 1e-39, flat.abs().max() * 1.5, -flat[at[3]]])
            # The largest one goes.
            flat[flat.abs().argmax()] *= 0.5 if number % 2 else 1
        differ = int((bits != before).sum())
        total += differ
        quantized += differ if is_quantized(name) else 0
    if vllm_gpu.DEVICE == "cuda":
        torch.cuda.synchronize()
    return total, quantized


def is_quantized(name):
    # vLLM quantizes the router of this model too.
    return name.endswith(("_proj.weight", ".mlp.gate.weight"))


def fused(weights):
    """Tensors as vLLM fuses and calls them."""
    found = {}
    for name, value in weights.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if last == "q_proj":
            found[f"{stem}.qkv_proj.weight"] = torch.cat([weights[f"{stem}.{each}_proj.weight"] for each in "qkv"])
        elif ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            if rest == "0.gate_proj.weight":
                each = [f"{layer}.experts.{i}" for i in range(sum(f"{layer}.experts.{i}.up_proj.weight" in weights
                                                                  for i in range(4096)))]  # fmt: skip
                found[f"{layer}.experts.routed_experts.w13_weight"] = torch.stack(
                    [torch.cat([weights[f"{e}.gate_proj.weight"], weights[f"{e}.up_proj.weight"]]) for e in each]
                )
                found[f"{layer}.experts.routed_experts.w2_weight"] = torch.stack(
                    [weights[f"{e}.down_proj.weight"] for e in each]
                )
        elif last == "gate_proj":
            found[f"{stem}.gate_up_proj.weight"] = torch.cat([value, weights[f"{stem}.up_proj.weight"]])
        elif last not in ("k_proj", "v_proj", "up_proj"):
            found[name] = value
    return found


def quantized_by_vllm(kind, name, value):
    """The parameters that vLLM makes of one, by its own functions, as its methods call them."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    def stacked(made):
        codes, scales = zip(*made, strict=True)
        return torch.stack([each.view(torch.uint8) for each in codes]), torch.stack(scales)

    if kind == "fp8_per_block":
        each = value if value.ndim > 2 else value[None]
        codes, scales = stacked(per_block_cast_to_fp8(part, block_size=[128, 128], use_ue8m0=False) for part in each)
        return {name: codes, f"{name}_scale_inv": scales}
    if name.endswith("w13_weight"):
        codes, scales = stacked(ops.scaled_fp8_quant(part, scale=None, use_per_token_if_dynamic=True) for part in value)
        return {name: codes, f"{name}_scale": scales}
    scales = _fp8_channel_scale(weight_amax(value, dim=-1, keepdim=True))
    if value.ndim > 2:
        codes, scales = stacked((_fp8_quant_per_channel(*each), each[1]) for each in zip(value, scales, strict=True))
        return {name: codes, f"{name}_scale": scales}
    return {name: _fp8_quant_per_channel(value, scales).t(), f"{name}_scale": scales}


def expected(weights, kind):
    found = {}
    for name, value in fused(weights).items():
        whole = is_quantized(name) or name.endswith(("w13_weight", "w2_weight"))
        made = quantized_by_vllm(kind, name, value) if whole and kind != PLAIN else {name: value}
        found |= made
    return sha256s(found)


class Follower:
    """A server, its replica, and what was measured with it."""

    def __init__(self, folder, out, kind, options):
        self.kind, self.out = kind, out / kind
        # With a size for the cache servers that start at the same time do not measure each other's memory.
        flags = ["--kv-cache-memory-bytes", str(options.cache_mb << 20)]
        flags += ["--moe-backend", "triton"] if kind == PLAIN else ["--quantization", kind]
        if vllm_gpu.DEVICE == "cuda":
            flags += vllm_gpu.FLAGS
        self.server = vllm_gpu.Server(
            folder, self.out, eager=options.mode == "eager", memory=options.memory,
            extension="quantized_extension.Extension", flags=flags,
        )  # fmt: skip
        self.replica = None

    def ask(self, method):
        return (
            self.server.client.post("/collective_rpc", json={"method": method}).raise_for_status().json()["results"][0]
        )

    def follow(self, run, running):
        if self.replica is not None:
            self.replica.close()
        self.target = EngineTarget(VllmEngine(self.server.url, running_requests=running))
        self.replica = Replica(run, self.target, heartbeat_seconds=None)
        started = time.perf_counter()
        self.replica.pull()
        self.first_seconds = time.perf_counter() - started

    @contextmanager
    def streaming(self, number):
        streams = vllm_gpu.Streams(self.server.url, number, self.out / "gaps.jsonl")
        try:
            yield streams
        finally:
            streams.close()

    def close(self):
        if self.replica is not None:
            self.replica.close()
        # It may not have started.
        with suppress(ProcessLookupError):
            self.server.close()


class Case:
    def __init__(self, folder, out, options, model, before):
        self.folder, self.out, self.options, self.model, self.before = folder, out, options, model, before
        self.problems, self.num_changes = [], 0
        self.started, self.rows, self.followers = time.time(), [], []
        self.weights = make_model(folder / "base", MODELS[model])

    def say(self, *words):
        print(f"[{time.time() - self.started:6.1f}] {self.model}:", *words, flush=True)

    def start(self, stack, kinds):
        found = []
        for kind in kinds:
            found.append(Follower(self.folder / "base", self.out, kind, self.options))
            stack.callback(found[-1].close)
            if self.options.one_by_one:
                self.wait(found[-1])
        return [each for each in found if self.wait(each)]

    def wait(self, follower):
        try:
            follower.server.wait()
        except SystemExit as error:
            self.problems.append(f"{self.model} {follower.kind} did not start")
            self.say(self.problems[-1], str(error)[-3000:])
            return False
        self.say("up:", follower.kind)
        return True

    def run(self):
        options = self.options
        run = str(self.folder / "run")
        with ExitStack() as stack:
            self.followers = self.start(stack, [PLAIN, *options.quantizations])
            publisher = stack.enter_context(
                Publisher(run, self.weights, run="quantized", anchors=None, skips=(), check_share=0)
            )
            publisher.publish().wait()
            self.together(lambda each: self.check(each, "as started"))
            for running in options.running_requests:
                self.together(partial(self.join, run=run, running=running))
                if running == options.running_requests[0]:
                    vllm_gpu.take_turn(options.turn)
                for number in range(options.rounds):
                    total, quantized = change(self.weights, options.density, self.num_changes)
                    self.num_changes += 1
                    publisher.publish().wait()
                    for each in list(self.followers):
                        self.attempt(each, partial(self.update, running=running, number=number))
                    self.together(partial(self.verify, total=total, quantized=quantized))
                    self.write()
            if not options.fresh:
                return
            ours = {each.kind: (each.server.checksums(), each.server.logprobs()) for each in self.followers}
        save(self.weights, self.folder / "base")
        self.out = self.out / "fresh"
        self.out.mkdir()
        with ExitStack() as stack:
            for each in self.start(stack, list(ours)):
                theirs = each.server.checksums(), each.server.logprobs()
                equal = [one == other for one, other in zip(ours[each.kind], theirs, strict=True)]
                if not all(equal):
                    self.problems.append(f"{self.model} {each.kind}: other than a fresh server")
                self.say(f"{each.kind}: as a fresh server: {len(theirs[0])} parameters {equal[0]}, "
                         f"log probabilities {equal[1]}", theirs[1][:3])  # fmt: skip
                for row in self.rows:
                    if row["quantization"] == each.kind:
                        row |= {"fresh_parameters": equal[0], "fresh_logprobs": equal[1]}

    def together(self, work):
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: self.attempt(each, work), list(self.followers)))

    def attempt(self, follower, work):
        """What fails with one server is told at the end; the others go on."""
        try:
            work(follower)
        except Exception as error:
            self.problems.append(f"{self.model} {follower.kind}: {error!r}")
            self.say(self.problems[-1])
            self.followers.remove(follower)

    def join(self, follower, run, running):
        is_first = follower.replica is None
        follower.follow(run, running)
        self.check(follower, f"newest version, in {follower.first_seconds:.1f} s")
        if is_first:
            follower.ask("count_writes")
            # The first requests of a server compile.
            with follower.streaming(self.options.streams):
                time.sleep(self.options.warm_up)

    def write(self):
        rows = [*self.before, *self.rows]
        if rows:
            notes = {"torch": torch.__version__, "vllm": version("vllm")}
            if vllm_gpu.DEVICE == "cuda":
                notes = {"gpu": torch.cuda.get_device_name(), **notes}
            table = [[row[each] for each in rows[0]] for row in rows]
            write_csv("quantized_gpu.csv", list(rows[0]), table, folder=self.options.out, notes=notes)

    def check(self, follower, when):
        wanted, found = expected(self.weights, follower.kind), follower.server.checksums()
        wrong = sorted(name for name in wanted.keys() | found.keys() if found.get(name) != wanted.get(name))
        if wrong:
            raise AssertionError(
                f"{follower.kind}, {when}: {len(wrong)} of {len(wanted)} parameters differ: {wrong[:4]}"
            )
        self.say(f"{follower.kind}, {when}: all {len(wanted)} parameters as vLLM makes them")
        return len(wanted)

    def update(self, follower, running, number):
        with follower.streaming(self.options.streams) as streams:
            # Until the processes that stream are up, and requests are at different places.
            time.sleep(1)
            watched, since = self.options.watched, time.time()
            time.sleep(watched)
            idle = streams.longest_ms(since, time.time())
            watch = vllm_gpu.Watch() if vllm_gpu.DEVICE == "cuda" else None
            since, clock = time.time(), time.perf_counter()
            pulled = follower.replica.pull()
            seconds = time.perf_counter() - clock
            time.sleep(max(since + watched - time.time(), 0.5))
            gap = streams.longest_ms(since, time.time())
            self.say(f"{follower.kind}: the longest gap ended {streams.ended - since:.3f} s after the pull began")
            staging = watch.end()[0] if watch else 0
        follower.measured = {"requests": running, "round": number}, {
            "pause_ms": round(1000 * follower.target.pause_seconds, 2), "gap_ms": round(gap, 1),
            "idle_ms": round(idle, 1), "decode_s": round(pulled.decode_seconds, 3),
            "apply_s": round(pulled.apply_seconds, 3), "pull_s": round(seconds, 3), "gpu_mb": round(staging),
        }  # fmt: skip

    def verify(self, follower, total, quantized):
        """All servers at the same time, after the last has pulled."""
        number, times = follower.measured
        counts = follower.ask("written")
        tensors = self.check(follower, f"round {number['round']}")
        about = follower.target.about()["engine"]
        row = {
            "model": self.model, "quantization": follower.kind, "mode": self.options.mode, **number,
            "streams": self.options.streams, "parameters_equal": tensors, "changed": total,
            **{each: counts[each] for each in ("served", "codes", "scales", "kept")},
            "per_change": round((counts["codes"] + counts["scales"]) / quantized, 4) if counts["kept"] else 1,
            "staged_mb": round(counts["staged_bytes"] / 1e6, 2), **times,
            "derived": about.get("derived", ""), "fresh_parameters": "", "fresh_logprobs": "",
        }  # fmt: skip
        self.rows.append(row)
        self.say(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["dense", "moe"], choices=MODELS)
    parser.add_argument("--quantizations", nargs="*", default=["fp8_per_block", "fp8_per_channel"])
    parser.add_argument("--mode", default="eager", choices=["graphs", "eager"])
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--streams", type=int, default=8, help="for each server")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--running-requests", nargs="+", default=["keep", "recompute"])
    parser.add_argument("--no-fresh", dest="fresh", action="store_false", help="start no servers to compare with")
    parser.add_argument("--watched", type=float, default=2, help="seconds before an update, and from its begin on")
    parser.add_argument("--warm-up", type=float, default=12)
    parser.add_argument("--memory", default="0.2", help="of the GPU, for each server")
    parser.add_argument("--cache-mb", type=int, default=4096, help="for the context of requests, for each server")
    parser.add_argument("--turn", type=Path, help="a folder: wait for `go` in it, and put `up` there before")
    parser.add_argument("--one-by-one", action="store_true", help="start servers after each other")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
    options.out.mkdir(parents=True, exist_ok=True)
    rows, problems = [], []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as logs:
            case = Case(Path(folder), Path(logs), options, model, rows)
            try:
                case.run()
            finally:
                for log in Path(logs).rglob("vllm.log"):
                    name = "-".join(log.relative_to(logs).parts[:-1])
                    (options.out / f"quantized-{model}-{name}.log").write_bytes(log.read_bytes()[-200_000:])
                case.write()
            rows, problems = rows + case.rows, problems + case.problems
        del case
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
