"""The sizes of the policy, and where its weights are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltawire_demo.tokens import BEGIN, MAX_TOKENS, NUM_TOKENS

START = Path(__file__).with_name("policy.safetensors")
"""The initial weights, in bf16, from tools/pretrain_demo.py."""


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

    def config(self) -> dict[str, Any]:
        """The config.json for transformers and engines."""
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
            "vocab_size": NUM_TOKENS, "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads, "head_dim": self.head_dim, "rms_norm_eps": self.epsilon,
            "rope_theta": self.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": MAX_TOKENS, "hidden_act": "silu", "attention_bias": False,
            "tie_word_embeddings": False, "bos_token_id": BEGIN, "eos_token_id": None,
        }  # fmt: skip
