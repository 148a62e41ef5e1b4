"""A training run: takes episodes, steps the optimizer, publishes, and resumes from its checkpoint after a kill.

Three things run at the same time. Threads sample episodes from the replicas, with whatever weights these have
(`rollout`). The loop in `Run.train` takes a batch of them, does one step, and publishes. Replicas, wherever they are,
find the new version in the store by themselves. None of them waits for another.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
from torch import Tensor, nn

from deltawire import Publication, Publisher, digest
from deltawire.errors import DeltawireError
from deltawire.run.uploads import KINDS, find_uploads
from deltawire_demo.checkpoint import Progress, load_progress, save_progress
from deltawire_demo.grpo import Trainer
from deltawire_demo.rollout import Evaluation, PlayerOf, Rollouts, Sampled, episodes_at, oldest

E = TypeVar("E", bound=Sampled)


def say(**event: Any) -> None:
    """Print an event: a line of JSON on stdout."""
    sys.stdout.write(json.dumps({key: _short(value) for key, value in event.items()}) + "\n")
    sys.stdout.flush()


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def say_fault(where: str, error: Exception) -> None:
    say(event="fault", part=where, reason=f"{type(error).__name__}: {error}"[:300])


@dataclass(frozen=True, slots=True)
class Task(Generic[E]):
    """The task to train on."""

    player_of: PlayerOf[E]
    num_tasks: int
    summary: Callable[[Sequence[E], int, float], Evaluation]
    temperatures: tuple[float, ...]
    """The temperatures of evaluations: what is learned must exceed what another temperature gives."""
    samples: Callable[[Sequence[E]], list[dict[str, Any]]] = lambda _: []
    """Some episodes to show."""


@dataclass(frozen=True, slots=True)
class Job:
    """The options of a run, from the command line."""

    store: str
    replicas: tuple[str, ...]
    engine: str
    start: Path
    folder: Path
    steps: int
    groups: int
    warmup: int
    time_limit: float
    checkpoint_every: int
    rounds: int
    seed: int
    no_publish: bool


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a job, for a command that takes them as keywords."""
    path = click.Path(path_type=Path)
    options = [
        click.option("--store", required=True, help="The URL of the run."),
        click.option("--replica", "replicas", required=True, multiple=True, metavar="URL",
                     help="A replica. Repeatable."),
        click.option("--engine", type=click.Choice(["torch", "vllm"]), default="torch", help="What the replicas are."),
        click.option("--policy", "start", type=path, required=True, help="The initial weights."),
        click.option("--folder", type=path, required=True, help="For the checkpoint."),
        click.option("--steps", type=int, required=True, help="How many steps."),
        click.option("--groups", type=int, required=True, help="Groups of episodes in a step."),
        click.option("--warmup", type=int, required=True, help="Steps until the full learning rate."),
        click.option("--time-limit", type=float, required=True, help="Start no new step after this many seconds."),
        click.option("--checkpoint-every", type=int, default=5, show_default=True, help="Steps between checkpoints."),
        click.option("--rounds", type=int, required=True, help="How often an evaluation repeats all tasks."),
        click.option("--seed", type=int, default=0, show_default=True, help="Random seed for tasks and tokens."),
        click.option("--no-publish", is_flag=True, help="Publish only the start, so that replicas never learn."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


class Run(Generic[E]):
    """A run in progress."""

    def __init__(
        self, job: Job, trainer: Trainer[E], task: Task[E], publisher: Publisher, rollouts: Rollouts[E],
        progress: Progress,
    ) -> None:  # fmt: skip
        self.trainer, self.publisher, self.rollouts, self.progress = trainer, publisher, rollouts, progress
        self._job, self._task, self._deadline = job, task, 0.0
        self._unreported: list[Publication] = []
        self.version = -1 if publisher.version is None else publisher.version
        """The version of the weights; it may still be uploading."""
        self.stopped = False

    def stop(self, *_: object) -> None:
        """End after the current step; also a signal handler."""
        self.stopped = True

    def publish(self) -> None:
        """Publish the weights. Returns while the upload runs."""
        publication = self.publisher.publish(step=self.progress.step)
        self.version = publication.version
        self._unreported.append(publication)
        self.report_published()

    def wait_for_commit(self) -> None:
        """Wait until the current weights are committed."""
        for publication in self._unreported:
            publication.join()
        self.report_published()
        self.publisher.flush()
        if self.publisher.version != self.version:
            self.publisher.publish(step=self.progress.step).wait()
            self.version = self.publisher.version or 0

    def report_published(self) -> None:
        """Print an event for each version that was committed since the last call."""
        while self._unreported and self._unreported[0].done():
            publication = self._unreported.pop(0)
            if publication.error is not None:
                # The next version holds what this one would have.
                say(event="fault", part="trainer", reason=f"version {publication.version}: {publication.error}")
                continue
            stats = publication.stats
            say(event="published", version=publication.version, step=publication.step, density=stats["density"],
                changed=stats["num_changed"], bytes=stats["num_bytes"],
                all_bytes=stats["all_bytes"], full_bytes=stats["full_bytes"],
                diff_seconds=stats["diff_seconds"], encode_seconds=stats["encode_seconds"],
                upload_seconds=stats["upload_seconds"], commit_seconds=stats["commit_seconds"],
                check_seconds=stats.get("check_seconds", 0.0))  # fmt: skip

    def train(self) -> None:
        """All steps that are left, or as many as there is time for."""
        self.rollouts.start()
        self._deadline = time.monotonic() + self._job.time_limit
        while self.progress.step < self.trainer.settings.num_steps and not self.should_stop():
            started = time.perf_counter()
            groups, dropped = self.take_groups()
            if self.stopped or not groups:
                break
            taken = time.perf_counter()
            episodes = [episode for group in groups for episode in group]
            staleness = [self.version - oldest(episode) for episode in episodes]
            numbers = self.trainer.step(self.progress.step + 1, groups)
            self.progress.step += 1
            if not self._job.no_publish:
                self.publish()
            if self.progress.step % self._job.checkpoint_every == 0:
                self.save()
            result = self._task.summary(episodes, self.version, 1.0)
            say(event="step", step=self.progress.step, reward=result.reward, wins=result.wins, valid=result.valid,
                games=len(episodes), staleness=sum(staleness) / len(staleness), max_staleness=max(staleness),
                dropped=dropped, wait_seconds=taken - started, seconds=time.perf_counter() - started,
                **numbers)  # fmt: skip
        self.rollouts.stop()
        self.save()

    def should_stop(self) -> bool:
        self.report_published()
        return self.stopped or time.monotonic() > self._deadline

    def take_groups(self) -> tuple[list[list[E]], int]:
        """A batch of groups that are fresh enough, and how many were not."""
        settings, dropped = self.trainer.settings, 0
        groups: list[list[E]] = []
        while len(groups) < settings.num_groups and not self.should_stop():
            for group in self.rollouts.take(settings.num_groups - len(groups), self.should_stop):
                stalest = min(oldest(episode) for episode in group)
                if settings.max_staleness is not None and self.version - stalest > settings.max_staleness:
                    dropped += 1
                else:
                    groups.append(group)
        return (groups if len(groups) == settings.num_groups else []), dropped

    def save(self) -> None:
        save_progress(checkpoint_of(self._job), self.trainer.policy, self.trainer.optimizer, self.progress)

    def evaluations(self) -> list[Evaluation]:
        """The results of this version at each temperature."""
        job, task = self._job, self._task
        found: list[Evaluation] = []

        def progress(num_done: int) -> None:
            each = job.rounds * task.num_tasks
            say(event="played", num_done=len(found) * each + num_done, total=len(task.temperatures) * each)

        for temperature in task.temperatures:
            episodes = episodes_at(
                task.player_of, job.replicas, self.version, num_tasks=task.num_tasks, temperature=temperature,
                rounds=job.rounds, on_fault=say_fault, progress=progress,
            )  # fmt: skip
            found.append(replace(task.summary(episodes, self.version, temperature), samples=task.samples(episodes)))
        return found


def carry_out(job: Job, trainer: Trainer[E], task: Task[E], files: Sequence[Path]) -> None:
    """Train from the checkpoint in the folder, or from the start; then evaluate.

    `files` are published with the weights: what an engine needs to serve them.
    """
    policy, settings = trainer.policy, trainer.settings
    progress, first_digest = Progress(), published_digest(policy)
    if checkpoint_of(job).exists():
        progress = load_progress(checkpoint_of(job), policy, trainer.optimizer)
        say(event="resumed", step=progress.step)
    rollouts = Rollouts(
        task.player_of, job.replicas, num_tasks=task.num_tasks, group_size=settings.group_size,
        seed=job.seed + 1_000_003 * progress.step, groups_per_batch=max(settings.num_groups // 2, 1),
        num_ahead=2 * settings.num_groups, on_fault=say_fault,
    )  # fmt: skip
    with Publisher(job.store, policy, files=files, threads=1) as publisher:
        this = Run(job, trainer, task, publisher, rollouts, progress)
        signal.signal(signal.SIGTERM, this.stop)
        signal.signal(signal.SIGINT, this.stop)
        if publisher.version is None or not (job.no_publish or publisher.resumed):
            this.publish()
        this.wait_for_commit()
        if job.rounds and progress.step == 0 and not progress.start:
            say(event="phase", name="playing before training")
            progress.start = this.evaluations()
            this.save()
        for each in progress.start:
            say(event="evaluation", which="start", **asdict(each))
        say(event="phase", name="training")
        this.train()
        this.wait_for_commit()
        if this.stopped:
            return
        if job.rounds:
            say(event="phase", name="playing after training")
            for each in this.evaluations():
                say(event="evaluation", which="final", **asdict(each))
    # Skip deltas and anchors may have been uploading until here.
    found = find_uploads(publisher.run.store)
    kinds = {kind: {"num_objects": found.objects[kind], "num_bytes": found.bytes[kind]} for kind in KINDS}
    say(event="uploaded", kinds=kinds)
    last_digest = first_digest if job.no_publish else published_digest(policy)
    say(event="done", step=progress.step, version=this.version, digest=str(last_digest))


def checkpoint_of(job: Job) -> Path:
    return job.folder / "checkpoint.safetensors"


def published_digest(policy: nn.Module) -> Any:
    """The digest of the trainer's own weights, cast by torch."""
    weights: Mapping[str, Tensor] = {name: value.detach().bfloat16() for name, value in policy.named_parameters()}
    return digest(weights, threads=1)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print errors of deltawire as events, and end the process."""
    try:
        yield
    except DeltawireError as error:
        say(event="failed", part="trainer", reason=f"{type(error).__name__}: {error}")
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
