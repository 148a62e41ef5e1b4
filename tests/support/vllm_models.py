"""Tiny models with random weights, of many architectures, as vLLM has found them wrong or refused them before."""

import torch

SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 304, "intermediate_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
_PLAIN = {name: size for name, size in SMALL.items() if name != "head_dim"}
# These compute keys and values for all heads. vLLM would believe a number of its own and write behind its cache.
_ALL_HEADS = {name: size for name, size in _PLAIN.items() if name != "num_key_value_heads"}
_LATENT = {
    **_PLAIN, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}

# The class of its configuration in transformers, and sizes.
ARCHITECTURES = {
    "llama": ("LlamaConfig", SMALL),
    "qwen2": ("Qwen2Config", _PLAIN),
    "qwen3": ("Qwen3Config", SMALL),
    "qwen3_moe": ("Qwen3MoeConfig", {**SMALL, **_EXPERTS, "num_experts": 8}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4}),
    "gemma2": ("Gemma2Config", SMALL),
    "gemma3": ("Gemma3TextConfig", SMALL),
    "phi3": ("Phi3Config", {**_PLAIN, "pad_token_id": 0}),
    "cohere": ("CohereConfig", _PLAIN),
    "granite": ("GraniteConfig", _PLAIN),
    "olmo2": ("Olmo2Config", _PLAIN),
    "starcoder2": ("Starcoder2Config", _PLAIN),
    "nemotron": ("NemotronConfig", SMALL),
    "gpt2": ("GPT2Config", {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 304, "n_positions": 512}),
    "gpt_neox": ("GPTNeoXConfig", _ALL_HEADS),
    "opt": ("OPTConfig", {**_ALL_HEADS, "ffn_dim": 256, "word_embed_proj_dim": 128}),
    "bloom": ("BloomConfig", {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 304}),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1},
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 304, "state_size": 16, "num_heads": 8,
            "head_dim": 32, "n_groups": 1, "expand": 2,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
}  # fmt: skip


def make_architecture(name, *, seed=0, dtype=torch.bfloat16):
    """Such a model, with norms that are not all one and sinks that are not all alike."""
    import transformers

    config, sizes = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    with torch.no_grad():
        for each, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.ndim == 1 and "inv_freq" not in each:
                value.add_(torch.randn_like(value) * 0.1)
    return model.to(dtype)


def draft_layer(weights, number=2):
    """The tensors of a layer that predicts further tokens, which a checkpoint has and a server does not load."""
    last = f"model.layers.{number - 1}."
    found = {
        name.replace(last, f"model.layers.{number}."): value.clone()
        for name, value in weights.items()
        if name.startswith(last)
    }
    return {**found, f"model.layers.{number}.eh_proj.weight": torch.randn(128, 256).to(torch.bfloat16)}
