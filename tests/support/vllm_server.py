"""A real vLLM server on the CPU, and the tiny models that it serves."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from deltawire import Publisher, Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.run.run import Run
from support.servers import free_ports
from support.vllm_models import ARCHITECTURES, SMALL, draft_layer, make_architecture
from support.vllm_reference import ENVIRONMENT, checksums

# A start takes its time, more so where others need the cores.
PATIENCE = 300
EXTENSION = "support.vllm_faults.CheckedExtension"
FAULTY = "support.vllm_faults.FaultyExtension"
PROMPTS = [[1, 2, 3], list(range(40, 60))]
ROUTE = "deltawire.engines.vllm.route.Route"


def make_model(kind="dense", *, tied=False, seed=0, **sizes):
    """A Qwen3, dense or with experts, with norms that are not all one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if kind in ARCHITECTURES:
        return make_architecture(kind, seed=seed, **sizes)
    sizes = {**SMALL, "tie_word_embeddings": tied, **sizes}
    torch.manual_seed(seed)
    if kind == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(torch.bfloat16)


def save_model(model, folder):
    """A checkpoint that vLLM serves: with a tokenizer, which has a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(model.config.vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0").save_pretrained(folder)


class Trainer:
    """Weights that change as in training, with the checkpoint of each version."""

    def __init__(self, folder, store, *, without=(), encoding="auto", **options):
        self.folder, self.tied, self.kind = folder, options.get("tied", False), options.get("kind", "dense")
        self.is_known = self.kind not in ARCHITECTURES and not without
        save_model(make_model(**options), folder / "base")
        self.weights = {name: value.clone() for name, value in load_file(folder / "base/model.safetensors").items()}
        if self.kind == "deepseek_v3":
            self.weights |= draft_layer(self.weights)
            self.checkpoint()
        for name in without:
            del self.weights[name]
        self.publisher = Publisher(store, self.weights, anchors=None, encoding=encoding)
        self.expected, self.digests = {}, {}

    def publish(self, *, density=0.02, tp=1, **how):
        for value in self.weights.values():
            value[torch.rand(value.shape) < density] += 0.01
        version = self.publisher.publish(**how).wait().version
        if self.is_known:
            self.expected[version] = checksums(self.weights, tp=tp)
        self.digests[version] = str(self.publisher.run.manifest(version).digest)
        return version

    def checkpoint(self):
        """The weights as they are, for a fresh server."""
        save_file(self.weights, self.folder / "base/model.safetensors", {"format": "pt"})
        return self.folder / "base"


class Vllm:
    """A server that is running."""

    def __init__(self, model, *, tp=1, environment=None, arguments=(), extension=EXTENSION, log=None, nursery=None):
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        self._command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16", "--enforce-eager",
            "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256",
            "--kv-cache-memory-bytes", str(64 << 20), "--tensor-parallel-size", str(tp),
            "--weight-transfer-config", json.dumps({"backend": "deltawire"}), "--middleware", ROUTE, *arguments,
        ]  # fmt: skip
        if extension:
            self._command += ["--worker-extension-cls", extension]
        own = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if nursery and tp == 1:
            # The worker in the engine's process, as on a GPU: between processes both spin while they wait.
            own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._log = open(log, "ab") if log else subprocess.DEVNULL  # noqa: SIM115
        self._environment = {**os.environ, **own, **(environment or {})}
        self._nursery = nursery
        self.start()

    def start(self):
        """Also again, after a kill: with the weights that it had at first."""
        if self._nursery:
            self._process = self._nursery.start(self._command[1:], self._environment, self._log)
            return
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def pid(self):
        return self._process.pid

    def wait(self, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self._process.returncode}")
            try:
                if self.client.get("/health", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise TimeoutError("vLLM did not start")

    def complete(self, prompt, *, num_tokens=8, logprobs=3, **more):
        """Tokens and log probabilities that follow some tokens, greedily."""
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": logprobs,
            "return_token_ids": True, "ignore_eos": True, **more,
        }  # fmt: skip
        answer = self.client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
        return answer["token_ids"], (answer.get("logprobs") or {}).get("token_logprobs"), answer["finish_reason"]

    @property
    def weight_version(self):
        return self.client.get("/weight_info").raise_for_status().json()["weight_version"]

    def checksums(self):
        answer = self.client.post("/weight_checker", json={"action": "checksum"})
        if answer.status_code != 404:
            return answer.raise_for_status().json()["checksums"]
        workers = self.client.post("/collective_rpc", json={"method": "checksums"}).raise_for_status()
        return {name: value for each in workers.json()["results"] for name, value in each.items()}

    def zero_weights(self):
        """As nobody should."""
        if self.client.post("/weight_checker", json={"action": "reset"}).status_code == 404:
            self.client.post("/collective_rpc", json={"method": "zero"}).raise_for_status()

    def is_in_order(self):
        """Whether it runs and answers requests."""
        if self._process.poll() is not None:
            return False
        with suppress(httpx.HTTPError):
            return not self.client.get("/is_paused").raise_for_status().json()["is_paused"]
        return False

    def kill(self):
        """As when the machine goes away."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self):
        self.client.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except (subprocess.TimeoutExpired, TimeoutError):
                self.kill()
        if self._log is not subprocess.DEVNULL:
            self._log.close()


@contextmanager
def serving(model, **options):
    server = Vllm(model, **options)
    try:
        yield server.wait()
    finally:
        server.close()


@contextmanager
def following(store, server, mirror=None, **options):
    # The server has served another test's run before, so this one is named.
    target = EngineTarget(VllmEngine(server.url, **options), mirror)
    with Replica(store, target, run=Run(store).id, heartbeat_seconds=None) as replica:
        yield replica
