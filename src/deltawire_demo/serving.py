"""Real vLLM servers as replicas of the demo: the commands, and the checkpoint of the policy for them."""

import json
import sys
from pathlib import Path

from deltawire_demo.clients import MODEL
from deltawire_demo.parts import HOST
from deltawire_demo.tokens import NUM_TOKENS

EXTENSION = "deltawire.engines.vllm.worker.WorkerExtension"
ROUTE = "deltawire.engines.vllm.route.Route"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "DELTAWIRE_CPU_UNPACKED": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip


def server_command(folder: Path, port: str, *, max_tokens: int, num_sequences: int, cache_bytes: int) -> list[str]:
    """`vllm serve`, which ends together with the demo."""
    return [
        sys.executable, "-m", "deltawire_demo.part", "vllm.entrypoints.cli.main", "serve", str(folder),
        "--served-model-name", MODEL, "--host", HOST, "--port", port, "--dtype", "bfloat16", "--enforce-eager",
        "--max-model-len", str(max_tokens), "--max-num-seqs", str(num_sequences),
        "--max-num-batched-tokens", "2048", "--kv-cache-memory-bytes", str(cache_bytes),
        # The probabilities that tokens were really sampled with, if only some are allowed.
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--disable-uvicorn-access-log",
        "--weight-transfer-config", json.dumps({"backend": "deltawire"}), "--worker-extension-cls", EXTENSION,
        "--middleware", ROUTE,
    ]  # fmt: skip


def agent_command(server: str, store: str, name: str, mirror: Path) -> list[str]:
    """`deltawire attach` for a server."""
    attach = ["attach", "--engine", "vllm", "--url", server, "--from", store, "--name", name, "--mirror", str(mirror)]
    return [sys.executable, "-m", "deltawire_demo.part", "deltawire.cli", *attach, "--poll", "0.2", "--format", "json"]


def measure_command(server: str, store: str) -> list[str]:
    """The command that hashes the weights of a server."""
    return [sys.executable, "-m", "deltawire_demo.measure", "--store", store, "--url", server]


def make_checkpoint(start: Path, folder: Path) -> None:
    """Write the Wordle policy as a checkpoint for vLLM: in bf16, with a tokenizer that has a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from deltawire_demo.policy import load, save

    folder.mkdir(parents=True, exist_ok=True)
    policy = load(start)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(NUM_TOKENS)}, unk_token="t0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(policy.shape.config(), indent=1))
    save(policy, folder / "model.safetensors")
