"""Asynchronous GRPO in plain torch, with weights that travel as deltas.

Three things go on at the same time. Threads play games through the replicas and the environment, with whatever weights
the replicas have (`rollout`). The loop below takes a batch of games, makes one step, and publishes. Replicas, wherever
they are, find the new version in the store by themselves. Nobody waits for anybody; each letter carries the
log-probability that it was sampled with, and the ratio to that corrects for weights that have moved since.

The trainer can be killed at any moment and started again with the same arguments: it goes on from its checkpoint.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from deltawire import Publication, Publisher, digest
from deltawire.demo.checkpoint import Progress, load_progress, save_progress
from deltawire.demo.policy import Policy
from deltawire.demo.pretrain import load
from deltawire.demo.recipe import Shape
from deltawire.demo.rollout import Episode, Evaluation, Rollouts, evaluate, summary
from deltawire.demo.tokens import BEGIN
from deltawire.demo.wordle.game import GREEN, NUM_GUESSES, NUM_LETTERS, YELLOW
from deltawire.errors import DeltawireError

CONTROL_TEMPERATURE = 0.4  # where the pretrained policy plays best


@dataclass(frozen=True, slots=True)
class Settings:
    """The recipe."""

    num_steps: int = 180
    num_secrets: int = 8
    group_size: int = 16
    lr: float = 2e-5
    head_lr: float = 1.2e-3
    norm_lr: float = 3e-3
    warmup_steps: int = 20
    clip: tuple[float, float] = (0.8, 1.28)
    max_grad_norm: float = 1.0
    num_micro_batches: int = 4
    discount: float = 0.5
    max_staleness: int | None = 4
    """Games that began with older weights are thrown away."""


def returns_of(episode: Episode, discount: float) -> Tensor:
    """What each letter of a game led to, guesses by letters.

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
    """How much better each letter did than the same letter in the other games of the group that got so far."""
    returns = torch.full((len(group), NUM_GUESSES, NUM_LETTERS), torch.nan)
    for game, episode in enumerate(group):
        own = returns_of(episode, discount)
        returns[game, : len(own)] = own
    mean = returns.nanmean(0)
    spread = (returns - mean).square().nanmean(0).sqrt()
    normalised = (returns - mean) / (spread + 1e-4)
    return [normalised[game, : len(episode.seen.guesses)].flatten() for game, episode in enumerate(group)]


@dataclass(slots=True)
class Batch:
    """Games as tensors. `wanted` says at which places a letter comes next; the rest has a value for each of them."""

    tokens: Tensor
    wanted: Tensor
    letters: Tensor
    log_probs: Tensor
    advantages: Tensor


def batch_of(games: Sequence[tuple[Episode, Tensor]]) -> Batch:
    """Games and the advantages of their letters as one batch, as long as the longest of them."""
    # Nothing is predicted from the last letter on.
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
    """The log-probability of each letter under the weights as they are."""
    logits = policy.letter_logits(policy.hidden(batch.tokens)[batch.wanted])
    found: Tensor = logits.log_softmax(-1).gather(1, batch.letters[:, None])[:, 0]
    return found


class Trainer:
    """The policy, its optimizer, and the step."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        named = dict(policy.named_parameters())
        norms = [value for value in named.values() if value.dim() == 1]
        head = [policy.lm_head.weight]
        matrices = [value for name, value in named.items() if value.dim() > 1 and name != "lm_head.weight"]
        groups = [(matrices, settings.lr), (head, settings.head_lr), (norms, settings.norm_lr)]
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters, "lr": lr, "full_lr": lr} for parameters, lr in groups], weight_decay=0.0
        )

    def step(self, number: int, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """One step of the optimizer on some groups of games; what there is to tell of it."""
        settings = self.settings
        games = [pair for group in groups
                 for pair in zip(group, advantages_of(group, settings.discount), strict=True)]  # fmt: skip
        games.sort(key=lambda game: len(game[0].tokens))
        num_letters = sum(len(episode.log_probs) for episode, _ in games)
        num_clipped, divergence = 0, 0.0
        size = -(-len(games) // settings.num_micro_batches)
        for start in range(0, len(games), size):
            batch = batch_of(games[start : start + size])
            log_ratio = log_probs_of(self.policy, batch) - batch.log_probs
            ratio = log_ratio.exp()
            clipped = ratio.clamp(*settings.clip)
            gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
            (-gain.sum() / num_letters).backward()
            num_clipped += int((gain < ratio * batch.advantages).sum())
            divergence += float((ratio - 1 - log_ratio).detach().sum())
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * min(number / max(settings.warmup_steps, 1), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "clipped": num_clipped / num_letters, "divergence": divergence / num_letters, "grad_norm": float(norm),
            "letters": num_letters,
        }  # fmt: skip


def say(**told: Any) -> None:
    """Tell an event: a line of JSON on stdout."""
    sys.stdout.write(json.dumps({key: _short(value) for key, value in told.items()}) + "\n")
    sys.stdout.flush()


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


class Run:
    """A training run: takes games, makes steps, publishes, and remembers how far it is."""

    def __init__(
        self, trainer: Trainer, publisher: Publisher, rollouts: Rollouts, progress: Progress, *,
        publishes: bool, time_limit: float, checkpoint: Path, checkpoint_every: int,
    ) -> None:  # fmt: skip
        self.trainer, self.publisher, self.rollouts, self.progress = trainer, publisher, rollouts, progress
        self._publishes, self._time_limit, self._deadline = publishes, time_limit, 0.0
        self._checkpoint, self._every = checkpoint, checkpoint_every
        self._untold: list[Publication] = []
        self.version = -1 if publisher.version is None else publisher.version
        """What the weights are, or will be when it is in the store."""
        self.stopped = False

    def stop(self, *_: object) -> None:
        """End after the step that is being made; also as a signal's handler."""
        self.stopped = True

    def publish(self) -> None:
        """Make the weights a version. It is on its way when this returns."""
        publication = self.publisher.publish(step=self.progress.step)
        self.version = publication.version
        self._untold.append(publication)
        self.tell_published()

    def settle(self) -> None:
        """Wait until the weights as they are now are in the store."""
        self.publisher.flush()
        self.tell_published()
        if self.publisher.version != self.version:
            self.publisher.publish(step=self.progress.step).wait()
            self.version = self.publisher.version or 0

    def tell_published(self) -> None:
        """Tell of versions that are in the store by now."""
        while self._untold and self._untold[0].done():
            publication = self._untold.pop(0)
            if publication.error is not None:
                # The next version holds what this one would have.
                say(event="fault", part="trainer", reason=f"version {publication.version}: {publication.error}")
                continue
            stats = publication.stats
            say(event="published", version=publication.version, step=publication.step, density=stats["density"],
                changed=stats["num_changed"], bytes=stats["num_bytes"], full_bytes=stats["full_bytes"],
                diff_seconds=stats["diff_seconds"], encode_seconds=stats["encode_seconds"],
                upload_seconds=stats["upload_seconds"], commit_seconds=stats["commit_seconds"])  # fmt: skip

    def train(self) -> None:
        """All steps that are left, or as many as there is time for."""
        self.rollouts.start()
        self._deadline = time.monotonic() + self._time_limit
        while self.progress.step < self.trainer.settings.num_steps and not self.should_stop():
            started = time.perf_counter()
            groups, dropped = self.take_games()
            if self.stopped or not groups:
                break
            taken = time.perf_counter()
            episodes = [episode for group in groups for episode in group]
            staleness = [self.version - episode.version for episode in episodes]
            told = self.trainer.step(self.progress.step + 1, groups)
            self.progress.step += 1
            if self._publishes:
                self.publish()
            if self.progress.step % self._every == 0:
                self.save()
            result = summary(episodes, self.version, 1.0)
            say(event="step", step=self.progress.step, reward=result.reward, wins=result.wins, valid=result.valid,
                games=len(episodes), staleness=sum(staleness) / len(staleness), max_staleness=max(staleness),
                dropped=dropped, wait_seconds=taken - started, seconds=time.perf_counter() - started,
                **told)  # fmt: skip
        self.rollouts.stop()
        self.save()

    def should_stop(self) -> bool:
        self.tell_published()
        return self.stopped or time.monotonic() > self._deadline

    def take_games(self) -> tuple[list[list[Episode]], int]:
        """A batch of groups that are fresh enough, and how many were not."""
        settings, dropped = self.trainer.settings, 0
        groups: list[list[Episode]] = []
        while len(groups) < settings.num_secrets and not self.should_stop():
            for group in self.rollouts.take(settings.num_secrets - len(groups), self.should_stop):
                oldest = min(episode.version for episode in group)
                if settings.max_staleness is not None and self.version - oldest > settings.max_staleness:
                    dropped += 1
                else:
                    groups.append(group)
        return (groups if len(groups) == settings.num_secrets else []), dropped

    def save(self) -> None:
        save_progress(self._checkpoint, self.trainer.policy, self.trainer.optimizer, self.progress)


def evaluations(
    environment: str, replicas: Sequence[str], version: int, rounds: int, on_fault: Callable[[str, Exception], None]
) -> list[Evaluation]:
    """How a version plays, as it is sampled in training and at the temperature that suits the start best."""
    return [
        evaluate(environment, replicas, version, temperature=temperature, rounds=rounds, on_fault=on_fault)
        for temperature in (1.0, CONTROL_TEMPERATURE)
    ]


def told_fault(where: str, error: Exception) -> None:
    say(event="fault", part=where, reason=f"{type(error).__name__}: {error}"[:300])


def run(
    *, store: str, environment: str, replicas: Sequence[str], policy: Policy, settings: Settings, folder: Path,
    publishes: bool, time_limit: float, checkpoint_every: int, rounds: int, seed: int,
) -> None:  # fmt: skip
    """Train from where the last run in the folder ended, or from the start; then see what came of it."""
    checkpoint, config = folder / "checkpoint.safetensors", folder / "config.json"
    trainer, progress, first_digest = Trainer(policy, settings), Progress(), published_digest(policy)
    if checkpoint.exists():
        progress = load_progress(checkpoint, policy, trainer.optimizer)
        say(event="resumed", step=progress.step)
    config.write_text(json.dumps(policy.shape.config(), indent=1))
    rollouts = Rollouts(
        environment, replicas, group_size=settings.group_size, seed=seed + 1_000_003 * progress.step,
        groups_per_batch=max(settings.num_secrets // 2, 1), num_ahead=2 * settings.num_secrets, on_fault=told_fault,
    )  # fmt: skip
    with Publisher(store, policy, files=[config], threads=1) as publisher:
        this = Run(
            trainer, publisher, rollouts, progress, publishes=publishes, time_limit=time_limit, checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, this.stop)
        signal.signal(signal.SIGINT, this.stop)
        if publisher.version is None or (publishes and not publisher.resumed):
            this.publish()
        this.settle()
        if rounds and progress.step == 0 and not progress.start:
            progress.start = evaluations(environment, replicas, this.version, rounds, told_fault)
            this.save()
        for each in progress.start:
            say(event="evaluation", which="start", **asdict(each))
        this.train()
        this.settle()
        if this.stopped:
            return
        final = evaluations(environment, replicas, this.version, rounds, told_fault) if rounds else []
        for each in final:
            say(event="evaluation", which="final", **asdict(each))
        last_digest = published_digest(policy) if publishes else first_digest
        say(event="done", step=progress.step, version=this.version, digest=str(last_digest))


def published_digest(policy: Policy) -> Any:
    """The digest of the trainer's own weights, as torch casts them."""
    weights: Mapping[str, Tensor] = {name: value.detach().bfloat16() for name, value in policy.named_parameters()}
    return digest(weights, threads=1)


@click.command()
@click.option("--store", required=True, help="Where to publish.")
@click.option("--environment", required=True, metavar="URL", help="The Wordle server.")
@click.option("--replica", "replicas", required=True, multiple=True, metavar="URL", help="A replica; several times.")
@click.option("--policy", "start", type=click.Path(path_type=Path), required=True, help="Where the weights start.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="For the checkpoint.")
@click.option("--steps", type=int, default=180, show_default=True, help="How many steps.")
@click.option("--secrets", type=int, default=8, show_default=True, help="Groups in a step, of 16 games each.")
@click.option("--warmup", type=int, default=20, show_default=True, help="Steps until the full learning rate.")
@click.option("--time-limit", type=float, default=240.0, show_default=True, help="Begin no step after so many seconds.")
@click.option("--checkpoint-every", type=int, default=5, show_default=True, help="Steps between checkpoints.")
@click.option("--rounds", type=int, default=3, show_default=True, help="How often an evaluation plays each word.")
@click.option("--seed", type=int, default=0, show_default=True, help="For the choice of words and of letters.")
@click.option("--no-publish", is_flag=True, help="Publish the start only, so that replicas never learn anything.")
def main(
    store: str, environment: str, replicas: tuple[str, ...], start: Path, folder: Path, steps: int, secrets: int,
    warmup: int, time_limit: float, checkpoint_every: int, rounds: int, seed: int, no_publish: bool,
) -> None:  # fmt: skip
    """Train the demo's policy. Events go to stdout as lines of JSON."""
    torch.set_num_threads(1)
    settings = Settings(num_steps=steps, num_secrets=secrets, warmup_steps=warmup)
    if no_publish:
        settings = replace(settings, max_staleness=None)
    try:
        policy = load(start, Shape())
        run(store=store, environment=environment, replicas=replicas, policy=policy, settings=settings, folder=folder,
            publishes=not no_publish, time_limit=time_limit, checkpoint_every=checkpoint_every, rounds=rounds,
            seed=seed)  # fmt: skip
    except DeltawireError as error:
        say(event="failed", part="trainer", reason=f"{type(error).__name__}: {error}")
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m deltawire.demo.trainer")
