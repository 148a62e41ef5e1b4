"""A GRPO run of a Qwen3-0.6B-shaped model at RL learning rates, published step by step: what changes, what it takes.

    python benchmarks/grpo.py --out FOLDER          # a GPU, about six minutes
    python benchmarks/grpo.py --out FOLDER --quick  # a tiny model on the CPU, seconds

No weights or data are fetched. A byte-level model is pretrained on the text of this repository and of Python's standard
library. Then, for each learning rate from that same start and with a fresh optimizer, it is rewarded for writing words
that the text has: a bf16 copy samples groups of completions, advantages are normalised within a group, and one step of
AdamW on the clipped policy gradient follows, in fp32 with bf16 autocast. Each step is published. In the end a replica
must have the same bits. `grpo.csv` grows step by step.
"""

import argparse
import copy
import csv
import re
import sysconfig
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from deltawire import Publisher, Replica
from deltawire.tensors.weights import torch_view
from measure import RESULTS, machine, write_csv

ROOT = RESULTS.parent.parent
WORD = re.compile(rb"[A-Za-z]{2,}")
COLUMNS = ["lr", "step", "reward", "grad_norm", "num_elements", "num_changed", "density", "num_bytes",
           "bytes_per_change", "ratio_to_full", "diff_ms", "publish_ms"]  # fmt: skip
STARTED = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Size:
    """How large everything is. Prompts and completions are counted in bytes, which are the tokens."""

    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 3072
    rows: int = 32
    """Of a pretraining batch, and their length."""
    length: int = 512
    corpus_bytes: int = 32_000_000
    pretrain_lr: float = 5e-4
    prompts: int = 8
    group: int = 16
    prompt: int = 64
    completion: int = 24


QUICK = Size(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, rows=8, length=64,
             corpus_bytes=1_000_000, pretrain_lr=1e-2, prompts=4, group=8, prompt=16)  # fmt: skip


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", flush=True)


def corpus(most_bytes: int) -> bytes:
    """Text that is on every machine that can run this."""
    library = Path(sysconfig.get_path("stdlib"))
    own = [file for pattern in ("*.md", "*.py") for folder in ("src", "docs", "tests", "benchmarks", "examples")
           for file in (ROOT / folder).rglob(pattern)]  # fmt: skip
    python = [file for file in library.rglob("*.py") if "site-packages" not in file.parts]
    texts = [file.read_bytes() for file in (*ROOT.glob("*.md"), *sorted(own), *sorted(python))]
    return b"\n".join(texts)[:most_bytes]


def make_model(size: Size, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_dim, intermediate_size=size.intermediate,
        tie_word_embeddings=True, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device=device, dtype=torch.float32)


def make_optimizer(model: Any, lr: float) -> torch.optim.AdamW:
    """TRL's defaults: betas 0.9 and 0.999, no weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def stretches(text: torch.Tensor, num: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random stretches of the corpus, as tokens."""
    starts = torch.randint(len(text) - length, (num,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def pretrain(model: Any, text: torch.Tensor, size: Size, seconds: float) -> str:
    """Next-byte prediction for some time: warm-up over the first tenth, then linearly down to a tenth."""
    device, generator = model.device, torch.Generator().manual_seed(1)
    optimizer, started, step, last = make_optimizer(model, 0.0), time.perf_counter(), 0, 0.0
    while (spent := (time.perf_counter() - started) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = size.pretrain_lr * min(10 * spent + 0.01, 1, 1.1 - spent)
        tokens = stretches(text, size.rows, size.length, generator).to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            # Waits for the device, so that the clock above is right.
            last = loss.item()
            if step % 50 == 0:
                say(f"pretraining step {step}: loss {last:.3f}")
    return f"{step} steps of {size.rows} x {size.length} bytes, loss {last:.3f} nats a byte"


def vocabulary(text: bytes) -> set[bytes]:
    return {word for word, number in Counter(WORD.findall(text)).items() if number >= 20}


def reward(completion: bytes, known: set[bytes]) -> float:
    """The share of the completion's bytes that are in words that the corpus has; the last one may be cut off."""
    return sum(len(word) for word in WORD.findall(completion)[:-1] if word in known) / len(completion)


@torch.no_grad()
def sample(actor: Any, prompts: torch.Tensor, length: int, generator: torch.Generator) -> tuple[Any, Any]:
    """Completions at temperature 1, and the log-probability of each of their tokens."""
    inputs, cache, tokens, logps = prompts, None, [], []
    for _ in range(length):
        out = actor(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, all_logps = out.past_key_values, out.logits[:, -1].float().log_softmax(-1)
        inputs = torch.multinomial(all_logps.exp(), 1, generator=generator)
        tokens.append(inputs)
        logps.append(all_logps.gather(1, inputs))
    return torch.cat(tokens, 1), torch.cat(logps, 1)


def grpo_loss(model: Any, prompts: Any, completions: Any, old_logps: Any, advantages: Any) -> torch.Tensor:
    """Clipped policy gradient, the mean over tokens."""
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model(input_ids=torch.cat([prompts, completions], 1), use_cache=False).logits
    logps = logits[:, prompts.shape[1] - 1 : -1].float().log_softmax(-1).gather(2, completions[..., None])[..., 0]
    ratio = (logps - old_logps).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -gain.mean()


class Trainer:
    """GRPO on one model: each `step` samples, rewards and updates."""

    def __init__(self, model: Any, text: bytes, tokens: torch.Tensor, size: Size, lr: float) -> None:
        self.model, self.size, self.tokens, self.known = model, size, tokens, vocabulary(text)
        self.actor = copy.deepcopy(model).eval()
        for parameter in self.actor.parameters():  # not its buffers: rotary frequencies stay in fp32, as in the model
            parameter.data = parameter.data.to(torch.bfloat16)
        self.optimizer = make_optimizer(model, lr)
        self.picks = torch.Generator().manual_seed(2)
        self.chances = torch.Generator(model.device).manual_seed(3)

    def step(self) -> tuple[float, float]:
        """The mean reward before the update, and the norm of its gradient."""
        size, device = self.size, self.model.device
        with torch.no_grad():
            for served, trained in zip(self.actor.parameters(), self.model.parameters(), strict=True):
                served.copy_(trained)
        prompts = stretches(self.tokens, size.prompts, size.prompt, self.picks).repeat_interleave(size.group, 0)
        prompts = prompts.to(device)
        completions, old_logps = sample(self.actor, prompts, size.completion, self.chances)
        texts = completions.to(torch.uint8).cpu().numpy()
        rewards = torch.tensor([reward(row.tobytes(), self.known) for row in texts]).view(size.prompts, size.group)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1).to(device)
        grpo_loss(self.model, prompts, completions, old_logps, advantages).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return rewards.mean().item(), norm.item()


def train(trainer: Trainer, lr: float, num_steps: int, store: Path, path: Path) -> None:
    """Publish the start and every step, a row of the CSV for each step; then compare a replica with the model."""
    with Publisher(store, trainer.model, anchors=None, skips=()) as publisher:
        publisher.publish(step=0).wait()
        for step in range(1, num_steps + 1):
            mean_reward, norm = trainer.step()
            started = time.perf_counter()
            stats = publisher.publish(step=step).wait().stats
            seconds = time.perf_counter() - started
            row = [
                lr, step, round(mean_reward, 4), round(norm, 4), stats["num_elements"], stats["num_changed"],
                round(stats["density"], 6), stats["num_bytes"],
                round(stats["num_bytes"] / max(stats["num_changed"], 1), 4),
                round(stats["num_bytes"] / stats["full_bytes"], 6), round(1000 * stats["diff_seconds"], 1),
                round(1000 * seconds, 1),
            ]  # fmt: skip
            with path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(row)
            say(", ".join(f"{name} {value}" for name, value in zip(COLUMNS, row, strict=True)))
    with Replica(store, {}) as replica:
        replica.pull()
        check(replica, trainer.model)
        say(f"lr {lr}: a replica at version {replica.version} has every bit of the model")


def check(replica: Replica, model: Any) -> None:
    weights = replica.target.weights()
    parameters = dict(model.named_parameters())
    same = weights.keys() == parameters.keys() and all(
        np.array_equal(weights[name].bits, torch_view(parameter.detach().to(torch.bfloat16).view(-1)))
        for name, parameter in parameters.items()
    )
    if not same:
        raise AssertionError("not exact")


def compile_kernels() -> None:
    """Publish and pull something small, so that no step of the run waits for numba."""
    module = torch.nn.Linear(512, 1024)
    with Publisher("memory:warm", module) as publisher, Replica("memory:warm", {}) as replica:
        for _ in range(2):
            publisher.publish().wait()
            with torch.no_grad():
                module.weight.add_(1e-5 * torch.randn_like(module.weight))
        replica.pull()


def main(arguments: argparse.Namespace) -> None:
    device = torch.device("cpu" if arguments.quick else "cuda")
    size, seconds = (QUICK, 10.0) if arguments.quick else (Size(), arguments.pretrain_seconds)
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        compiled = pool.submit(compile_kernels)
        text = corpus(size.corpus_bytes)
        tokens = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
        model = make_model(size, device)
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        say(f"{num_weights:,} weights, {len(text):,} bytes of text")
        pretrained = pretrain(model, tokens, size, seconds)
        compiled.result()
        say(f"pretrained: {pretrained}")
        start = {name: value.clone() for name, value in model.state_dict().items()}
        gpu = f"{torch.cuda.get_device_name()}, " if device.type == "cuda" else ""
        notes = {
            "machine": f"{gpu}{machine()}, torch {torch.__version__}",
            "model": f"Qwen3, hidden {size.hidden}, {size.layers} layers, {size.heads}/{size.kv_heads} heads of "
            f"{size.head_dim}, intermediate {size.intermediate}, tied, 256 byte tokens, {num_weights} weights",
            "pretraining": pretrained,
            "grpo": f"{size.prompts} prompts x {size.group} completions of {size.completion} bytes a step, clip 0.2, "
            "AdamW, betas 0.9 and 0.999, no weight decay, gradient norm at most 1, constant lr",
        }
        if arguments.commit:
            notes["commit"] = arguments.commit
        path = write_csv("grpo.csv", COLUMNS, [], folder=arguments.out, notes=notes)
        for lr in arguments.learning_rates:
            model.load_state_dict(start)
            trainer = Trainer(model, text, tokens, size, lr)
            train(trainer, lr, 4 if arguments.quick else arguments.steps, Path(folder) / str(lr), path)
    say(str(path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 3e-6])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--pretrain-seconds", type=float, default=80.0)
    parser.add_argument("--commit", help="what to note as the commit where there is no git")
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, four steps")
    main(parser.parse_args())
