"""The policy: a small Qwen3 that writes letters, its file, and its sampler.

Weights have the names and the layout of Qwen3 in transformers, so that every engine can load them.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from deltawire.errors import CorruptObject
from deltawire_demo.shape import Shape
from deltawire_demo.tokens import MAX_TOKENS, NUM_ALPHABET, NUM_TOKENS


class Cache:
    """Keys and values of a batch whose rows are all at the same position."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        size = shape.num_layers, 2, num_rows, shape.num_heads, MAX_TOKENS, shape.head_dim
        self.memory = torch.empty(size)
        self.length = 0

    def rows(self, indices: Sequence[int]) -> "Cache":
        """A cache of some of the rows, in this order."""
        taken = Cache.__new__(Cache)
        taken.memory, taken.length = self.memory[:, :, list(indices)], self.length
        return taken


class Norm(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self._epsilon)


class Matrix(nn.Module):  # type: ignore[misc]
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.num_heads * shape.head_dim
        self.q_proj, self.k_proj, self.v_proj = (Matrix(inner, shape.hidden) for _ in range(3))
        self.o_proj = Matrix(shape.hidden, inner)
        self.q_norm, self.k_norm = (Norm(shape.head_dim, shape.epsilon) for _ in range(2))
        self._heads = shape.num_heads, shape.head_dim

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], memory: Tensor | None, start: int) -> Tensor:
        num_rows, length, _ = x.shape
        query, key, value = (part(x).view(num_rows, length, *self._heads) for part in (self.q_proj, self.k_proj,
                                                                                        self.v_proj))  # fmt: skip
        query, key = rotate(self.q_norm(query), turn), rotate(self.k_norm(key), turn)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mask = None
        if memory is not None:
            end = start + length
            memory[0, :, :, start:end], memory[1, :, :, start:end] = key, value
            key, value = memory[0, :, :, :end], memory[1, :, :, :end]
            if length > 1 and start:
                mask = torch.ones(length, end, dtype=torch.bool).tril(start)
        causal = mask is None and length > 1
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(num_rows, length, -1))
        return out


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the halves of each head by the angles of its position."""
    cosine, sine = turn
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (Matrix(shape.inner, shape.hidden) for _ in range(2))
        self.down_proj = Matrix(shape.hidden, shape.inner)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(shape.hidden, shape.epsilon) for _ in range(2))
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], memory: Tensor | None, start: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, memory, start)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = Matrix(NUM_TOKENS, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape.epsilon)


class Policy(nn.Module):  # type: ignore[misc]
    """Logits of the next letter. Other tokens are never sampled, and are not in the loss."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape or Shape()
        self.model = Body(self.shape)
        self.lm_head = Matrix(NUM_TOKENS, self.shape.hidden)
        half = self.shape.head_dim // 2
        rates = self.shape.rope_theta ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(MAX_TOKENS), rates)[:, None, :]
        self._turn = angles.cos(), angles.sin()

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """The hidden states of tokens that follow those in the cache, before the head."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        cosine, sine = (each[start:end].to(tokens.device) for each in self._turn)
        x = embedding(tokens, self.model.embed_tokens.weight)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, (cosine, sine), None if cache is None else cache.memory[i], start)
        if cache is not None:
            cache.length = end
        out: Tensor = self.model.norm(x)
        return out

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        out: Tensor = self.lm_head(self.hidden(tokens, cache))
        return out

    def letter_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the letters alone."""
        return linear(hidden, self.lm_head.weight[:NUM_ALPHABET])


def load(file: Path, shape: Shape | None = None) -> Policy:
    """A policy from its file."""
    policy = Policy(shape)
    try:
        policy.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:
        raise CorruptObject(
            f"{file} is not a policy of this demo ({error}): install deltawire again", path=str(file)
        ) from error
    return policy


def save(policy: Policy, file: Path) -> None:
    """Write a policy in bf16; another process sees the whole file or none."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    weights = {name: value.detach().bfloat16().contiguous() for name, value in policy.state_dict().items()}
    save_file(weights, partial, {"format": "pt"})
    partial.replace(file)


class Sampler:
    """Samples letters after prompts, and caches keys and values of the last prompts for those that continue them.

    The caches belong to the weights that they were computed with: `forget` them when those change.
    """

    def __init__(self, policy: Policy, num_remembered: int = 4) -> None:
        self._policy, self._num_remembered = policy, num_remembered
        self._caches: OrderedDict[tuple[tuple[int, ...], ...], Cache] = OrderedDict()

    def forget(self) -> None:
        self._caches.clear()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def sample(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, generator: torch.Generator
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Letters after each of some prompts of equal length, and their log-probabilities when they were sampled.

        Temperature 0 takes the likeliest letter.
        """
        cache, fresh = self._begin(prompts)
        tokens, log_probs = [], []
        for _ in range(num_tokens):
            logits = self._policy.letter_logits(self._policy.hidden(fresh, cache)[:, -1])
            log_prob = (logits / (temperature or 1.0)).log_softmax(-1)
            if temperature:
                token = torch.multinomial(log_prob.exp(), 1, generator=generator)
            else:
                token = log_prob.argmax(-1, keepdim=True)
            tokens.append(token)
            log_probs.append(log_prob.gather(1, token))
            fresh = token
        written: list[list[int]] = torch.cat(tokens, 1).tolist()
        # The last letter is not in the cache: a prompt that continues this one feeds it first.
        self._remember([(*prompt, *new[:-1]) for prompt, new in zip(prompts, written, strict=True)], cache)
        return written, torch.cat(log_probs, 1).tolist()

    def _begin(self, prompts: Sequence[Sequence[int]]) -> tuple[Cache, Tensor]:
        """A cache for the prompts, and those of their tokens that are not in it."""
        tokens = torch.tensor(prompts)
        for known in reversed(self._caches):
            length = len(known[0])
            places = {prefix: row for row, prefix in enumerate(known)}
            rows = [places.get(tuple(prompt[:length])) for prompt in prompts]
            if length < tokens.shape[1] and None not in rows:
                return self._caches[known].rows([row for row in rows if row is not None]), tokens[:, length:]
        return Cache(self._policy.shape, len(prompts)), tokens

    def _remember(self, computed: list[tuple[int, ...]], cache: Cache) -> None:
        self._caches[tuple(computed)] = cache
        while len(self._caches) > self._num_remembered:
            self._caches.popitem(last=False)
