"""Samples episodes over HTTP, with a thread for each replica, into a queue for the trainer."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, Protocol, TypeVar

import httpx

from deltawire.errors import EngineUnavailable
from deltawire_demo.wordle.sessions import SessionError

PATIENCE_SECONDS = 180.0
# The errors of a part that is unavailable, returns garbage or has lost its state in a restart.
FAULTS = (httpx.HTTPError, SessionError, EngineUnavailable, ValueError, LookupError)

OnFault = Callable[[str, Exception], None]


class Sampled(Protocol):
    """An episode of any task."""

    @property
    def versions(self) -> Sequence[int]:
        """The version of the weights that each part of it was sampled with."""
        ...


E = TypeVar("E", bound=Sampled)
E_co = TypeVar("E_co", bound=Sampled, covariant=True)


class Player(Protocol[E_co]):
    """Samples episodes with one replica."""

    @property
    def url(self) -> str: ...

    def version(self) -> int | None:
        """The version that the replica serves; None if it is unavailable."""
        ...

    def play(self, tasks: Sequence[int], *, temperature: float, seed: int) -> Sequence[E_co]:
        """An episode for each task, which is a number."""
        ...

    def close(self) -> None: ...


PlayerOf = Callable[[str], Player[E]]


def oldest(episode: Sampled) -> int:
    """The oldest version that a part of an episode was sampled with."""
    return min(episode.versions)


class Rollouts(Generic[E]):
    """Samples groups of episodes of the same task, with a thread for each replica, ahead of the trainer.

    While a replica is unavailable its thread waits for it, and the others continue.
    """

    def __init__(
        self, player_of: PlayerOf[E], replicas: Sequence[str], *, num_tasks: int, group_size: int,
        groups_per_batch: int, num_ahead: int, seed: int, on_fault: OnFault,
    ) -> None:  # fmt: skip
        self._player_of, self._num_tasks = player_of, num_tasks
        self._group_size, self._groups_per_batch = group_size, groups_per_batch
        self._on_fault, self._random = on_fault, Random(seed)  # noqa: S311
        self._lock, self._entrance, self._stopped = threading.Lock(), threading.Lock(), threading.Event()
        self._groups: queue.Queue[list[E]] = queue.Queue()
        # A group holds a place from before it is played until it is taken, so that none gets too old.
        self._places = threading.Semaphore(num_ahead)
        self._threads = [
            threading.Thread(target=self._work, args=(url,), name=f"rollout-{i}", daemon=True)
            for i, url in enumerate(replicas)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def take(self, num_groups: int, should_stop: Callable[[], bool]) -> Iterator[list[E]]:
        """Yield `num_groups` groups as they arrive; fewer only if `should_stop`."""
        patience = time.monotonic() + PATIENCE_SECONDS
        taken = 0
        while taken < num_groups and not should_stop():
            try:
                group = self._groups.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > patience:
                    raise EngineUnavailable(f"no replica has finished an episode for {PATIENCE_SECONDS:g} s") from None
                continue
            self._places.release()
            taken += 1
            yield group
            # Others may have been waited for before, and much may have been done with this one.
            patience = time.monotonic() + PATIENCE_SECONDS

    def _work(self, url: str) -> None:
        player = self._player_of(url)
        try:
            while not self._stopped.is_set():
                if player.version() is None:
                    self._stopped.wait(0.3)
                elif self._take_places():
                    self._play_batch(player)
        finally:
            player.close()

    def _take_places(self) -> bool:
        """Take places for a batch, all or none; one thread at a time, so that none waits with half of them."""
        with self._entrance:
            for _ in range(self._groups_per_batch):
                while not self._places.acquire(timeout=0.2):
                    if self._stopped.is_set():
                        return False
        return not self._stopped.is_set()

    def _play_batch(self, player: Player[E]) -> None:
        with self._lock:
            tasks = [self._random.randrange(self._num_tasks) for _ in range(self._groups_per_batch)]
            seed = self._random.randrange(1 << 62)
        each = self._group_size
        try:
            episodes = player.play([task for task in tasks for _ in range(each)], temperature=1.0, seed=seed)
        except FAULTS as error:
            self._places.release(self._groups_per_batch)
            if not self._stopped.is_set():
                self._on_fault(player.url, error)
                self._stopped.wait(0.3)
            return
        for start in range(0, len(episodes), each):
            self._groups.put(list(episodes[start : start + each]))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of a version at a temperature."""

    version: int
    temperature: float
    num_games: int
    reward: float
    wins: float
    valid: float
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Some of the episodes, to show."""


def episodes_at(
    player_of: PlayerOf[E], replicas: Sequence[str], version: int, *, num_tasks: int, temperature: float, rounds: int,
    on_fault: OnFault, progress: Callable[[int], None],
) -> list[E]:  # fmt: skip
    """Play each task `rounds` times, on all replicas at a version. `progress` gets the number of episodes."""
    todo: queue.Queue[tuple[int, list[int]]] = queue.Queue()
    halves = [list(range(start, num_tasks, 2)) for start in range(2)]
    for number in range(2 * rounds):
        todo.put((number, halves[number % 2]))
    done: dict[int, Sequence[E]] = {}
    last = time.monotonic()
    """When an episode was last finished."""

    def work(url: str) -> None:
        nonlocal last
        player = player_of(url)
        try:
            while len(done) < 2 * rounds and time.monotonic() < last + PATIENCE_SECONDS:
                if player.version() != version:
                    time.sleep(0.1)
                    continue
                try:
                    number, tasks = todo.get(timeout=0.1)
                except queue.Empty:
                    continue
                try:
                    episodes = player.play(tasks, temperature=temperature, seed=1000 * number)
                    if {each for episode in episodes for each in episode.versions} != {version}:
                        raise EngineUnavailable(f"{url} changed its weights during an evaluation")
                    done[number], last = episodes, time.monotonic()
                    progress(sum(map(len, list(done.values()))))
                except FAULTS as error:
                    todo.put((number, tasks))
                    on_fault(url, error)
        finally:
            player.close()

    threads = [threading.Thread(target=work, args=(url,), daemon=True) for url in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(done) < 2 * rounds:
        raise EngineUnavailable(f"no replica reached version {version} within {PATIENCE_SECONDS:g} s")
    return [episode for episodes in done.values() for episode in episodes]
