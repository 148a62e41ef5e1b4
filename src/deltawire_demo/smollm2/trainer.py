"""Asynchronous GRPO on a pretrained language model. `grpo` has the step, `run` the loop around it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor, nn

from deltawire_demo import grpo
from deltawire_demo.grpo import Batch
from deltawire_demo.run import Job, Task, carry_out, job_options, reporting_errors
from deltawire_demo.smollm2.task import THINGS, Answer, Asker, summary

TEMPERATURES = (1.0, 0.4)


@dataclass(frozen=True, slots=True)
class Settings(grpo.Settings):
    """The recipe."""

    num_steps: int = 60
    num_groups: int = 4
    group_size: int = 8
    warmup_steps: int = 5
    lr: float = 5e-5
    norm_lr: float = 1e-3
    batch_size: int = 16


def advantages_of(group: Sequence[Answer]) -> list[float]:
    """The normalized reward of each answer, relative to its group."""
    rewards = torch.tensor([answer.reward for answer in group])
    found: list[float] = ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)).tolist()
    return found


def batch_of(answers: Sequence[tuple[Answer, float]]) -> Batch:
    """Answers and their advantages as one batch, as long as the longest of them."""
    # Nothing is predicted from the last token.
    rows = [[*answer.prompt, *answer.written][:-1] for answer, _ in answers]
    length = max(len(row) for row in rows)
    tokens, wanted = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (row, (answer, _)) in enumerate(zip(rows, answers, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        wanted[i, len(answer.prompt) - 1 : len(row)] = True
    return Batch(
        tokens,
        wanted,
        torch.tensor([token for answer, _ in answers for token in answer.written]),
        torch.tensor([each for answer, _ in answers for each in answer.log_probs]),
        torch.tensor([advantage for answer, advantage in answers for _ in answer.written]),
    )


class Trainer(grpo.Trainer[Answer]):
    """Trains all weights, in fp32. Norms, which are few, take larger steps."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        matrices, norms = ([each for each in model.parameters() if (each.dim() > 1) is wide] for wide in (True, False))
        super().__init__(model, [(matrices, settings.lr), (norms, settings.norm_lr)], settings)
        self._batch_size = settings.batch_size

    def batches(self, groups: Sequence[Sequence[Answer]]) -> list[Batch]:
        answers = [pair for group in groups for pair in zip(group, advantages_of(group), strict=True)]
        answers.sort(key=lambda pair: len(pair[0].prompt) + len(pair[0].written))
        size = self._batch_size
        return [batch_of(answers[start : start + size]) for start in range(0, len(answers), size)]

    def log_probs(self, batch: Batch) -> Tensor:
        # Rows are padded at the end, which no earlier token attends to.
        hidden = self.policy.model(batch.tokens).last_hidden_state[batch.wanted]
        logits = self.policy.lm_head(hidden)
        found: Tensor = logits.log_softmax(-1).gather(1, batch.written[:, None])[:, 0]
        return found


@click.command()
@job_options
def main(**given: Any) -> None:
    """Train the language model. Events go to stdout as lines of JSON."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = Job(**given)
    settings = Settings(job.steps, job.groups, warmup_steps=job.warmup)
    if job.no_publish:
        settings = replace(settings, max_staleness=None)
    tokenizer = AutoTokenizer.from_pretrained(job.start)
    task = Task(lambda url: Asker(url, tokenizer), len(THINGS), summary, TEMPERATURES)
    files = [job.start / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    with reporting_errors():
        model = AutoModelForCausalLM.from_pretrained(job.start, dtype=torch.float32)
        carry_out(job, Trainer(model, settings), task, files)


if __name__ == "__main__":
    main(prog_name="python -m deltawire_demo.smollm2.trainer")
