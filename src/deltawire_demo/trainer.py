"""Asynchronous GRPO on Wordle in plain torch, with weights that are published as deltas.

The parts specific to Wordle are here: what a letter is worth, and how games become batches. `grpo` has the step, `run`
the loop around it, `games` the players.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor

from deltawire_demo import grpo
from deltawire_demo.games import Episode, WordlePlayer, boards, summary
from deltawire_demo.grpo import Batch
from deltawire_demo.policy import Policy, load
from deltawire_demo.run import Job, Task, carry_out, job_options, reporting_errors
from deltawire_demo.tokens import BEGIN
from deltawire_demo.wordle.game import GREEN, NUM_GUESSES, NUM_LETTERS, YELLOW
from deltawire_demo.wordle.words import WORDS

TEMPERATURES = (1.0, 0.7, 0.4)


@dataclass(frozen=True, slots=True)
class Settings(grpo.Settings):
    """The recipe."""

    num_steps: int = 120
    num_groups: int = 4
    group_size: int = 16
    warmup_steps: int = 10
    lr: float = 5e-6
    head_lr: float = 1.2e-3
    norm_lr: float = 3e-3
    num_micro_batches: int = 4
    discount: float = 0.5


def returns_of(episode: Episode, discount: float) -> Tensor:
    """The return of each letter of a game, guesses by letters.

    A letter is credited with its own colour and those of the later letters of its guess, with what the guess as a
    whole earned, and with a part of what the next guess led to.
    """
    seen = episode.seen
    returns = torch.zeros(len(seen.guesses), NUM_LETTERS)
    later = 0.0
    for turn in reversed(range(len(seen.guesses))):
        colours = seen.feedbacks[turn]
        worth = [0.1 if colour == GREEN else 0.05 if colour == YELLOW else 0.0 for colour in colours]
        whole = -0.1 if "X" in colours else 0.0
        if seen.won and turn == len(seen.guesses) - 1:
            whole += 1.0 + 0.1 * (NUM_GUESSES - len(seen.guesses))
        returns[turn] = torch.tensor(worth).flip(0).cumsum(0).flip(0) + whole + discount * later
        later = float(returns[turn, 0])
    return returns


def advantages_of(group: Sequence[Episode], discount: float) -> list[Tensor]:
    """The normalized return of each letter, relative to the other games of the group that reached it."""
    returns = torch.full((len(group), NUM_GUESSES, NUM_LETTERS), torch.nan)
    for game, episode in enumerate(group):
        own = returns_of(episode, discount)
        returns[game, : len(own)] = own
    mean = returns.nanmean(0)
    spread = (returns - mean).square().nanmean(0).sqrt()
    normalised = (returns - mean) / (spread + 1e-4)
    return [normalised[game, : len(episode.seen.guesses)].flatten() for game, episode in enumerate(group)]


def batch_of(games: Sequence[tuple[Episode, Tensor]]) -> Batch:
    """Games and the advantages of their letters as one batch, as long as the longest of them."""
    # Nothing is predicted from the last letter.
    lengths = [len(episode.tokens) - NUM_LETTERS - 1 for episode, _ in games]
    tokens = torch.full((len(games), max(lengths)), BEGIN)
    for row, (episode, _) in enumerate(games):
        tokens[row, : lengths[row]] = torch.tensor(episode.tokens[: lengths[row]])
    places = torch.arange(max(lengths))
    wanted = (places % (2 * NUM_LETTERS) < NUM_LETTERS) & (places < torch.tensor(lengths)[:, None])
    letters = [episode.tokens[place + 1] for row, (episode, _) in enumerate(games)
               for place in places[wanted[row]].tolist()]  # fmt: skip
    log_probs = torch.tensor([each for episode, _ in games for each in episode.log_probs])
    return Batch(tokens, wanted, torch.tensor(letters), log_probs, torch.cat([advantages for _, advantages in games]))


def log_probs_of(policy: Policy, batch: Batch) -> Tensor:
    """The log-probability of each letter under the current weights."""
    logits = policy.letter_logits(policy.hidden(batch.tokens)[batch.wanted])
    found: Tensor = logits.log_softmax(-1).gather(1, batch.written[:, None])[:, 0]
    return found


class Trainer(grpo.Trainer[Episode]):
    """Trains the policy. Its head and its norms take larger steps than its matrices, which are most of the weights."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        named = dict(policy.named_parameters())
        norms = [value for value in named.values() if value.dim() == 1]
        matrices = [value for name, value in named.items() if value.dim() > 1 and name != "lm_head.weight"]
        groups = [(matrices, settings.lr), ([policy.lm_head.weight], settings.head_lr), (norms, settings.norm_lr)]
        super().__init__(policy, groups, settings)
        self._policy, self._recipe = policy, settings

    def batches(self, groups: Sequence[Sequence[Episode]]) -> list[Batch]:
        games = [pair for group in groups
                 for pair in zip(group, advantages_of(group, self._recipe.discount), strict=True)]  # fmt: skip
        games.sort(key=lambda game: len(game[0].tokens))
        size = -(-len(games) // self._recipe.num_micro_batches)
        return [batch_of(games[start : start + size]) for start in range(0, len(games), size)]

    def log_probs(self, batch: Batch) -> Tensor:
        return log_probs_of(self._policy, batch)


@click.command()
@job_options
@click.option("--environment", required=True, metavar="URL", help="The Wordle server.")
def main(environment: str, **given: Any) -> None:
    """Train the demo's policy. Events go to stdout as lines of JSON."""
    job = Job(**given)
    settings = Settings(job.steps, job.groups, warmup_steps=job.warmup)
    if job.no_publish:
        settings = replace(settings, max_staleness=None)
    task = Task(
        lambda url: WordlePlayer(environment, url, is_vllm=job.engine == "vllm"), len(WORDS), summary,
        TEMPERATURES, boards,
    )  # fmt: skip
    with reporting_errors():
        policy, config = load(job.start), job.folder / "config.json"
        config.write_text(json.dumps(policy.shape.config(), indent=1))
        carry_out(job, Trainer(policy, settings), task, [config])


if __name__ == "__main__":
    main(prog_name="python -m deltawire_demo.trainer")
