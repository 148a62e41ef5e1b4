"""How many weights a model has, from its size as people write it, or from its config.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def read_size(text: str) -> float:
    """A number of weights: 8b, 0.6b, 135m, 1t or 8190735360."""
    plain = text.strip().lower().replace("_", "").replace(",", "")
    unit = _UNITS.get(plain[-1:])
    try:
        weights = float(plain[:-1] if unit else plain) * (unit or 1)
    except ValueError:
        weights = math.nan
    if not 0 < weights < math.inf:
        raise ValueError(f"a model's size looks like 8b, 0.6b, 135m or 1t, not {text!r}")
    return weights


def count_weights(path: Path) -> tuple[float, int]:
    """Weights and tensors of the model that a config.json of transformers describes: a decoder, dense or of experts."""
    try:
        config = json.loads(path.read_text())
        text = config.get("text_config") or config
        return _count(text, tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        missing = f" ({error.args[0]} is not in it)" if isinstance(error, KeyError) else ""
        raise ValueError(
            f"{path} does not describe a decoder like Llama, Qwen or DeepSeek{missing}: give --params instead"
        ) from None


def _count(config: Mapping[str, Any], tied: bool) -> tuple[float, int]:
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    embeddings = int(config["vocab_size"]) * hidden * (1 if tied else 2)
    attention, per_layer = _attention(config, hidden)
    experts = next((int(config[name]) for name in ("num_experts", "num_local_experts", "n_routed_experts")
                    if config.get(name)), 0)  # fmt: skip
    dense = 3 * hidden * int(config["intermediate_size"])
    one = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0)
    sparse = (experts + shared) * one + experts * hidden
    # The first layers are dense; without experts all of them.
    first = int(config.get("first_k_dense_replace") or 0) if experts else layers
    total = embeddings + layers * (attention + 2 * hidden) + first * dense + (layers - first) * sparse + hidden
    tensors = layers * (per_layer + 2) + 3 * first + (layers - first) * (3 * (experts + shared) + 1)
    return float(total), tensors + (1 if tied else 2) + 1


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Weights and tensors of a layer's attention."""
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):
        latent, rope, plain, value = (
            int(config[name]) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        rank = int(config.get("q_lora_rank") or 0)
        query = (hidden + heads * (plain + rope)) * rank + rank if rank else hidden * heads * (plain + rope)
        others = hidden * (latent + rope) + latent + latent * heads * (plain + value) + heads * value * hidden
        return query + others, 7 if rank else 5
    head = int(config.get("head_dim") or hidden // heads)
    groups = int(config.get("num_key_value_heads") or heads)
    return hidden * head * (2 * heads + 2 * groups), 4
