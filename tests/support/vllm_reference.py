"""What a vLLM server must hold, found without deltawire: fused tensors by hand."""

import hashlib
import os

import torch

from support import ROOT

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "DELTAWIRE_CPU_UNPACKED": "1", "PYTHONPATH": f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
}  # fmt: skip
PADDING = 64


def checksums(weights, *, tp=1):
    """SHA-256 of every parameter of a Qwen3 in vLLM, on each rank, from the tensors of its checkpoint."""
    found = {}
    for rank in range(tp):
        for name, value in fused(weights, tp, rank).items():
            bits = value.contiguous().view(-1).view(torch.uint8).numpy()
            found[f"dp0:pp0:pcp0:tp{rank}:{name}"] = hashlib.sha256(bits).hexdigest()
    return found


def fused(weights, tp, rank):
    def rows(value):
        return value.chunk(tp, 0)[rank]

    def columns(value):
        return value.chunk(tp, 1)[rank]

    def padded(value):
        size = -(-len(value) // PADDING) * PADDING
        return rows(torch.cat([value, value.new_zeros(size - len(value), value.shape[1])]))

    result = {}
    for name, value in weights.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            result[name] = padded(value)
        elif last == "q_proj":
            result[f"{stem}.qkv_proj.weight"] = torch.cat(
                [rows(weights[f"{stem}.{each}_proj.weight"]) for each in "qkv"]
            )
        elif last == "gate_proj" and ".experts." not in name:
            result[f"{stem}.gate_up_proj.weight"] = torch.cat([rows(value), rows(weights[f"{stem}.up_proj.weight"])])
        elif last in ("o_proj", "down_proj") and ".experts." not in name:
            result[name] = columns(value)
        elif ".experts.0.gate_proj" in name:
            layer = name.partition(".experts.")[0] + ".experts"
            count = len({each for each in weights if each.startswith(layer) and each.endswith("gate_proj.weight")})
            each = [f"{layer}.{number}" for number in range(count)]
            result[f"{layer}.routed_experts.w13_weight"] = torch.stack(
                [
                    torch.cat([rows(weights[f"{e}.gate_proj.weight"]), rows(weights[f"{e}.up_proj.weight"])])
                    for e in each
                ]
            )
            result[f"{layer}.routed_experts.w2_weight"] = torch.stack(
                [columns(weights[f"{e}.down_proj.weight"]) for e in each]
            )
        elif "norm" in last or last == "gate":
            result[name] = value
    return result
