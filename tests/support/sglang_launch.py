"""Starts the loopback server of `sglang_double` with a Qwen3's names and places, by the arguments that SGLang's own
`launch_server` takes: for trying out what drives a server of its own.
"""

import argparse
import asyncio
import json
import time
from functools import partial
from pathlib import Path

import torch
from starlette.responses import PlainTextResponse, StreamingResponse

from support.sglang_double import Double

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip


class Qwen(torch.nn.Module):
    """Parameters as SGLang's Qwen3ForCausalLM and Qwen3MoeForCausalLM have them."""

    def __init__(self, config, rank, ranks):
        super().__init__()
        self.own, self.parts = {}, {}
        hidden, width, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
        queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
        self.parts["qkv_proj"] = {"q_proj": (0, queries), "k_proj": (queries, keys), "v_proj": (queries + keys, keys)}
        self.add("model.embed_tokens.weight", vocab, hidden)
        self.add("model.norm.weight", hidden)
        if not config["tie_word_embeddings"]:
            self.add("lm_head.weight", vocab, hidden)
        experts = config.get("num_experts", 0)
        inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        self.parts["gate_up_proj"] = {"gate_proj": (0, inner), "up_proj": (inner, inner)}
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            self.add(f"{layer}.self_attn.qkv_proj.weight", queries + 2 * keys, hidden)
            self.add(f"{layer}.self_attn.o_proj.weight", hidden, queries)
            self.add(f"{layer}.self_attn.q_norm.weight", width)
            self.add(f"{layer}.self_attn.k_norm.weight", width)
            self.add(f"{layer}.input_layernorm.weight", hidden)
            self.add(f"{layer}.post_attention_layernorm.weight", hidden)
            if experts:
                self.add(f"{layer}.mlp.gate.weight", experts, hidden)
                self.add(f"{layer}.mlp.experts.w13_weight", experts, 2 * inner, hidden)
                self.add(f"{layer}.mlp.experts.w2_weight", experts, hidden, inner)
            else:
                self.add(f"{layer}.mlp.gate_up_proj.weight", 2 * inner, hidden)
                self.add(f"{layer}.mlp.down_proj.weight", hidden, inner)

    def add(self, name, *shape):
        part, *path = self, *name.split(".")
        for each in path[:-1]:
            if not hasattr(part, each):
                part.add_module(each, torch.nn.Module())
            part = getattr(part, each)
        value = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        part.register_parameter(path[-1], value)
        self.own[name] = value

    def load_weights(self, weights):
        for name, value in weights:
            if ".experts." in name:
                prefix, rest = name.split(".experts.")
                number, part, _ = rest.split(".")
                to = self.own[f"{prefix}.experts.{'w2' if part == 'down_proj' else 'w13'}_weight"][int(number)]
                at, rows = (0, len(to)) if part == "down_proj" else self.parts["gate_up_proj"][part]
                to.narrow(0, at, rows).copy_(value)
                continue
            part = name.split(".")[-2]
            fused = FUSED.get(part)
            to = self.own[name if fused is None else name.replace(part, fused)]
            at, rows = (0, len(to)) if fused is None else self.parts[fused][part]
            to.narrow(0, at, rows).copy_(value)

    def context(self, token):
        return self.own["model.embed_tokens.weight"][token].float()

    def output(self, state):
        return self.own["model.embed_tokens.weight"].float() @ state


class Launched(Double):
    def routes(self):
        return super().routes() | {("GET", "/health"): self.health, ("POST", "/v1/completions"): self.complete}

    async def health(self, _):
        return PlainTextResponse("")

    async def complete(self, body):
        async def tokens():
            answer = {"input_ids": body["prompt"], "max_new_tokens": 1}
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0.01)
                given = json.loads((await self.generate(answer)).body)
                yield f"data: {json.dumps({'choices': [{'text': str(given['outputs'])}]})}\n\n"

        return StreamingResponse(tokens(), media_type="text/event-stream")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--custom-weight-loader", nargs="*")
    parser.add_argument("--disable-radix-cache", action="store_true")
    options, _ = parser.parse_known_args()
    config = json.loads((options.model_path / "config.json").read_text())
    server = Launched(
        options.model_path, model=partial(Qwen, config), loaders=options.custom_weight_loader, release="0.5.17",
        keeps_prefixes=not options.disable_radix_cache, port=options.port,
    )  # fmt: skip
    while server.thread.is_alive():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
