"""The policy that the demo starts from: it imitates a player who uses the clues and mistypes some words.

The player guesses a random word that fits all clues; in a fifth of the guesses one letter becomes another. The typos
stay in what is imitated, so that reinforcement learning has something to take away. The result is cached under a name
made from everything that it depends on.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deltawire.demo.policy import Policy
from deltawire.demo.recipe import NUM_STEPS, Recipe, Shape
from deltawire.demo.tokens import BEGIN, NUM_ALPHABET, answer_of, guess_of, letters_of
from deltawire.demo.wordle.game import INVALID, NUM_LETTERS, feedback
from deltawire.demo.wordle.words import WORDS
from deltawire.errors import CorruptObject

IGNORED = -100
Progress = Callable[[int, int, float], None]


@cache
def answers() -> np.ndarray:
    """For each guess and secret, a number that stands for the colours."""
    patterns: dict[str, int] = {}
    return np.array([[patterns.setdefault(feedback(secret, guess), len(patterns)) for secret in WORDS]
                     for guess in WORDS])  # fmt: skip


def imitated_game(rng: np.random.Generator, num_guesses: int, typos: float) -> tuple[list[int], list[int]]:
    """The tokens of a game, and for each place the letter that should come next, or none."""
    table, secret = answers(), int(rng.integers(len(WORDS)))
    fits = np.ones(len(WORDS), bool)
    tokens, targets = [BEGIN], []
    for _ in range(num_guesses):
        letters = letters_of(WORDS[rng.choice(np.flatnonzero(fits))])
        if rng.random() < typos:
            letters[rng.integers(NUM_LETTERS)] = int(rng.integers(NUM_ALPHABET))
        guess = guess_of(letters)
        colours = feedback(WORDS[secret], guess) if guess in WORDS else INVALID * NUM_LETTERS
        tokens += letters + answer_of(guess, colours)
        targets += letters + [IGNORED] * NUM_LETTERS
        if guess in WORDS:
            number = WORDS.index(guess)
            fits &= table[number] == table[number, secret]
            if number == secret:
                break
    # What comes after the last answer is nobody's to predict.
    return tokens[: len(targets)], targets


def imitated_batch(rng: np.random.Generator, num_games: int, num_guesses: int, typos: float) -> tuple[Tensor, Tensor]:
    games = [imitated_game(rng, num_guesses, typos) for _ in range(num_games)]
    length = max(len(tokens) for tokens, _ in games)
    tokens = torch.tensor([game + [BEGIN] * (length - len(game)) for game, _ in games])
    targets = torch.tensor([target + [IGNORED] * (length - len(target)) for _, target in games])
    return tokens, targets


def pretrain(recipe: Recipe, shape: Shape, progress: Progress | None = None) -> Policy:
    """Train a policy from nothing."""
    policy = Policy(shape)
    policy.initialise(recipe.seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
    rng = np.random.default_rng(recipe.seed)
    for step in range(recipe.num_steps):
        _, num_guesses, num_games = next(stage for stage in recipe.stages if step < stage[0] * recipe.num_steps)
        tokens, targets = imitated_batch(rng, num_games, num_guesses, recipe.typos)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step)
        logits = policy.letter_logits(policy.hidden(tokens))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if progress is not None:
            progress(step + 1, recipe.num_steps, loss.item())
    return policy


def load(file: Path, shape: Shape) -> Policy:
    """A policy from a cached file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    policy = Policy(shape)
    try:
        policy.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:
        raise CorruptObject(f"{file} is damaged ({error}): remove it, and it is made again", path=str(file)) from error
    return policy


def save(policy: Policy, file: Path) -> None:
    """Write a policy; another process sees the whole file or none."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    save_file(policy.state_dict(), partial, {"format": "pt"})
    partial.replace(file)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option("--steps", type=click.IntRange(1), default=NUM_STEPS, show_default=True, help="How many steps.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads for torch.")
def main(output: Path, steps: int, threads: int) -> None:
    """Pretrain the policy of the demo; progress goes to stdout as lines of JSON."""
    torch.set_num_threads(threads)
    started = time.monotonic()

    def progress(step: int, num_steps: int, loss: float) -> None:
        if step % 20 == 0 or step == num_steps:
            told = {"event": "pretrain", "step": step, "num_steps": num_steps, "loss": round(loss, 4),
                    "seconds": round(time.monotonic() - started, 2)}  # fmt: skip
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()

    save(pretrain(Recipe(num_steps=steps), Shape(), progress), output)


if __name__ == "__main__":
    main(prog_name="python -m deltawire.demo.pretrain")
