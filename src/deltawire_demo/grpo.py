"""The step of asynchronous GRPO, for any policy.

Each token carries the log-probability that it was sampled with. The ratio to that corrects for weights that have
changed since, and is clipped.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Settings:
    """The hyperparameters that all recipes have."""

    num_steps: int
    num_groups: int
    group_size: int
    warmup_steps: int
    clip: tuple[float, float] = (0.8, 1.28)
    max_grad_norm: float = 1.0
    max_staleness: int | None = 4
    """Episodes that began with older weights are dropped."""


@dataclass(slots=True)
class Batch:
    """Episodes as tensors. `wanted` marks the positions before a sampled token; the others have a value for each."""

    tokens: Tensor
    wanted: Tensor
    written: Tensor
    log_probs: Tensor
    advantages: Tensor


E = TypeVar("E")


class Trainer(ABC, Generic[E]):
    """A policy, its optimizer, and the step. A recipe implements batches and log-probabilities."""

    def __init__(
        self, policy: nn.Module, parameters: Iterable[tuple[Sequence[Tensor], float]], settings: Settings
    ) -> None:
        self.policy, self.settings = policy, settings
        self.optimizer = torch.optim.AdamW(
            [{"params": each, "lr": lr, "full_lr": lr} for each, lr in parameters], weight_decay=0.0
        )

    @abstractmethod
    def batches(self, groups: Sequence[Sequence[E]]) -> Sequence[Batch]:
        """Groups of episodes with their advantages, in parts of a size that fits."""

    @abstractmethod
    def log_probs(self, batch: Batch) -> Tensor:
        """The log-probability of each sampled token under the current weights."""

    def step(self, number: int, groups: Sequence[Sequence[E]]) -> dict[str, float]:
        """One step of the optimizer on some groups; returns its metrics."""
        settings, batches = self.settings, self.batches(groups)
        num_tokens = sum(len(batch.written) for batch in batches)
        num_clipped, divergence = 0, 0.0
        for batch in batches:
            log_ratio = self.log_probs(batch) - batch.log_probs
            ratio = log_ratio.exp()
            clipped = ratio.clamp(*settings.clip)
            gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
            (-gain.sum() / num_tokens).backward()
            num_clipped += int((gain < ratio * batch.advantages).sum())
            divergence += float((ratio - 1 - log_ratio).detach().sum())
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * min(number / max(settings.warmup_steps, 1), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "clipped": num_clipped / num_tokens, "divergence": divergence / num_tokens, "grad_norm": float(norm),
            "tokens": num_tokens,
        }  # fmt: skip
