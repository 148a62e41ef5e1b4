"""Makes the policy that the demo starts from: it imitates a player with bad habits.

    python tools/pretrain_demo.py

The player knows all 200 words and uses all clues. But in half of the turns it tries its last guess again, which tells
nothing new, and it mistypes a fifth of the words. A lower temperature takes the typos away and brings more of the
repetition; what is to be gained from there has to be learned from rewards.

The same seed, torch and device (and on a CPU, number of threads) give the same file. Elsewhere sums are rounded in
another way, and the policy is another one that plays alike. The one in the package was made on an H200, with
--device cuda in a minute; on a CPU a step takes two seconds of a core.
"""

import os
from functools import cache
from math import sqrt
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deltawire_demo.policy import Policy, save
from deltawire_demo.shape import START
from deltawire_demo.tokens import BEGIN, COLOURS, NUM_ALPHABET, answer_of, guess_of, letters_of
from deltawire_demo.wordle.game import INVALID, NUM_LETTERS, feedback
from deltawire_demo.wordle.words import WORDS

REPEATS, TYPOS = 0.5, 0.2
NUM_STEPS, LR, WARMUP_STEPS = 2500, 3e-3, 15
# The part of the steps at which each stage ends, and the guesses and the number of its games.
STAGES = ((0.06, 1, 256), (0.18, 2, 128), (0.4, 3, 64), (1.0, 6, 64))
INIT_STD = 0.05
IGNORED = -100
NUMBERS = {word: number for number, word in enumerate(WORDS)}


@cache
def answers() -> np.ndarray:
    """For each guess and secret, a number that stands for the colours."""
    patterns: dict[str, int] = {}
    return np.array([[patterns.setdefault(feedback(secret, guess), len(patterns)) for secret in WORDS]
                     for guess in WORDS])  # fmt: skip


def imitated_game(rng: np.random.Generator, num_guesses: int) -> tuple[list[int], list[int]]:
    """The tokens of a game, and for each place the letter that should come next, or none."""
    table, secret = answers(), int(rng.integers(len(WORDS)))
    fits = np.ones(len(WORDS), bool)
    tokens, targets, letters = [BEGIN], [], []
    for _ in range(num_guesses):
        if not letters or rng.random() >= REPEATS:
            letters = letters_of(WORDS[rng.choice(np.flatnonzero(fits))])
            if rng.random() < TYPOS:
                letters[rng.integers(NUM_LETTERS)] = int(rng.integers(NUM_ALPHABET))
        guess = guess_of(letters)
        number = NUMBERS.get(guess)
        colours = INVALID * NUM_LETTERS if number is None else feedback(WORDS[secret], guess)
        tokens += letters + answer_of(guess, colours)
        targets += letters + [IGNORED] * NUM_LETTERS
        if number is not None:
            fits &= table[number] == table[number, secret]
        if number == secret:
            break
    # What comes after the last answer is nobody's to predict.
    return tokens[: len(targets)], targets


def imitated_batch(rng: np.random.Generator, num_games: int, num_guesses: int) -> tuple[Tensor, Tensor]:
    games = [imitated_game(rng, num_guesses) for _ in range(num_games)]
    length = max(len(tokens) for tokens, _ in games)
    tokens = torch.tensor([game + [BEGIN] * (length - len(game)) for game, _ in games])
    targets = torch.tensor([target + [IGNORED] * (length - len(target)) for _, target in games])
    return tokens, targets


def initialise(policy: Policy, seed: int) -> None:
    """Fresh weights. An answer starts as its letter and colour, and the head's letters as the embedded ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, INIT_STD, generator=generator)
        embedded = policy.model.embed_tokens.weight
        colours = torch.randn(len(COLOURS), policy.shape.hidden, generator=generator) * INIT_STD
        for letter in range(NUM_ALPHABET):
            start = NUM_ALPHABET + len(COLOURS) * letter
            embedded[start : start + len(COLOURS)] = (embedded[letter] + colours) / sqrt(2)
        policy.lm_head.weight[:NUM_ALPHABET] = embedded[:NUM_ALPHABET]


def lr_at(step: int, num_steps: int) -> float:
    """Up in a few steps, constant for half of the time, then down to 2 %."""
    late = max(step / num_steps - 0.5, 0) * 2
    return LR * min((step + 1) / WARMUP_STEPS, 1 - 0.98 * late)


def pretrain(policy: Policy, num_steps: int = NUM_STEPS, seed: int = 0, device: str = "cpu") -> None:
    """Train a policy from nothing."""
    initialise(policy, seed)
    policy.to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        _, num_guesses, num_games = next(stage for stage in STAGES if step < stage[0] * num_steps)
        tokens, targets = (each.to(device) for each in imitated_batch(rng, num_games, num_guesses))
        logits = policy.letter_logits(policy.hidden(tokens))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr_at(step, num_steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            click.echo(f"step {step + 1:4d} of {num_steps}, loss {loss.item():.3f}")
    policy.cpu()


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=START, show_default=True, help="The file to write.")
@click.option("--steps", type=click.IntRange(1), default=NUM_STEPS, show_default=True, help="How many steps.")
@click.option("--seed", type=int, default=0, show_default=True, help="For weights and games.")
@click.option("--device", default="cpu", show_default=True, help="Where to compute.")
def main(output: Path, steps: int, seed: int, device: str) -> None:
    """Pretrain the policy of the demo, and write it in bf16."""
    # What cuBLAS asks for where sums should always be added up in the same order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    policy = Policy()
    pretrain(policy, steps, seed, device)
    save(policy, output)


if __name__ == "__main__":
    main()
