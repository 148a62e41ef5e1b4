"""What the policy is made by: its sizes, and how it is pretrained."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltawire.demo.tokens import BEGIN, MAX_TOKENS, NUM_TOKENS
from deltawire.demo.wordle.words import WORDS

NUM_STEPS = 600


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a policy."""

    hidden: int = 256
    num_layers: int = 2
    num_heads: int = 8
    head_dim: int = 32
    inner: int = 512
    rope_theta: float = 500.0
    epsilon: float = 1e-6
    init_std: float = 0.05

    def config(self) -> dict[str, Any]:
        """What transformers and engines read as config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
            "vocab_size": NUM_TOKENS, "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads, "head_dim": self.head_dim, "rms_norm_eps": self.epsilon,
            "rope_theta": self.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": MAX_TOKENS, "hidden_act": "silu", "attention_bias": False,
            "tie_word_embeddings": False, "bos_token_id": BEGIN, "eos_token_id": None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the policy is pretrained. `stages` holds the part of the steps at which each ends, guesses and games."""

    num_steps: int = NUM_STEPS
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 15
    typos: float = 0.2
    stages: tuple[tuple[float, int, int], ...] = ((0.13, 1, 128), (0.36, 2, 64), (0.70, 3, 32), (1.0, 5, 32))
    seed: int = 0

    def name(self, shape: Shape) -> str:
        """A name for what comes of it."""
        facts = json.dumps([1, asdict(self), asdict(shape), WORDS], sort_keys=True)
        return f"wordle-{self.num_steps}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.safetensors"

    def lr_at(self, step: int) -> float:
        """Up in a few steps, constant for half of the time, then down to 2 %."""
        late = max(step / self.num_steps - 0.5, 0) * 2
        return self.lr * min((step + 1) / self.warmup_steps, 1 - 0.98 * late)


def cache_folder() -> Path:
    """Where pretrained policies are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltawire" / "demo"
