"""Games played through HTTP: letters come from a replica, colours from the environment, and results go into a queue.

Anything that answers completions in OpenAI's style can be a replica: prompts are lists of tokens, and an answer has
`token_ids`, their log-probabilities and the `weight_version` that they come from.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from deltawire.demo.tokens import BEGIN, answer_of, guess_of
from deltawire.demo.wordle.client import WordleGames
from deltawire.demo.wordle.game import NUM_LETTERS, View
from deltawire.demo.wordle.sessions import SessionError
from deltawire.demo.wordle.words import WORDS
from deltawire.errors import EngineUnavailable

TIMEOUT_SECONDS = 30.0
PATIENCE_SECONDS = 180.0
# What a part that is away, talks nonsense or comes back without what it knew looks like from here.
FAULTS = (httpx.HTTPError, SessionError, EngineUnavailable, ValueError, LookupError)

OnFault = Callable[[str, Exception], None]


@dataclass(slots=True)
class Episode:
    """A game as the trainer needs it."""

    secret: int
    tokens: list[int] = field(default_factory=lambda: [BEGIN])
    log_probs: list[float] = field(default_factory=list)
    """Of each letter, as the sampler had it."""
    versions: list[int] = field(default_factory=list)
    """The weights that each guess was made with."""
    view: View | None = None

    @property
    def version(self) -> int:
        """The oldest weights that have a part in it."""
        return min(self.versions)

    @property
    def seen(self) -> View:
        if self.view is None:
            raise ValueError("this game has not begun")
        return self.view

    @property
    def num_valid(self) -> int:
        return sum("X" not in each for each in self.seen.feedbacks)

    def add(self, letters: Sequence[int], log_probs: Sequence[float], version: int, seen: View) -> None:
        self.tokens += [*letters, *answer_of(guess_of(letters), seen.feedback)]
        self.log_probs += log_probs
        self.versions.append(version)
        self.view = seen


class ReplicaClient:
    """Asks a replica for completions."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)

    def complete(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> tuple[int, list[tuple[list[int], list[float]]]]:
        """The version of the weights, and for each prompt tokens and their log-probabilities."""
        answer = self._ask("POST", "/v1/completions", {
            "prompt": prompts, "max_tokens": num_tokens, "temperature": temperature, "seed": seed, "logprobs": 0,
        })  # fmt: skip
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        written = [(each["token_ids"], each["logprobs"]["token_logprobs"]) for each in choices]
        return int(answer["weight_version"]), written

    def version(self) -> int | None:
        """What it serves; None where it does not answer or has nothing yet."""
        try:
            found = self._client.get("/health").json()["version"]
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        return None if found is None else int(found)

    def _ask(self, method: str, path: str, body: Any) -> Any:
        response = self._client.request(method, path, json=body)
        if not response.is_success:
            raise EngineUnavailable(f"{self.url}{path} answered {response.status_code}: {response.text[:200]}")
        return response.json()

    def close(self) -> None:
        self._client.close()


def play(
    games: WordleGames, replica: ReplicaClient, secrets: Sequence[int], *, temperature: float, seed: int
) -> list[Episode]:
    """Play a game for each secret, all guesses of a turn in one request."""
    games.reset(secrets=secrets)
    episodes = [Episode(secret) for secret in secrets]
    for turn in range(100):
        numbers = games.open
        if not numbers:
            break
        version, completions = replica.complete(
            [episodes[number].tokens for number in numbers], NUM_LETTERS, temperature, seed + turn
        )
        written = dict(zip(numbers, completions, strict=True))
        views = games.step({number: guess_of(letters) for number, (letters, _) in written.items()})
        for number, (letters, log_probs) in written.items():
            episodes[number].add(letters, log_probs, version, views[number])
    return episodes


class Rollouts:
    """Plays groups of games of the same secret, with a thread for each replica, some way ahead of the trainer.

    A replica may be away: its thread waits for it, and the others go on.
    """

    def __init__(
        self, environment: str, replicas: Sequence[str], *, group_size: int, groups_per_batch: int, num_ahead: int,
        seed: int, on_fault: OnFault,
    ) -> None:  # fmt: skip
        self._environment, self._urls = environment, list(replicas)
        self._group_size, self._groups_per_batch = group_size, groups_per_batch
        self._on_fault, self._random = on_fault, Random(seed)  # noqa: S311
        self._lock, self._entrance, self._stopped = threading.Lock(), threading.Lock(), threading.Event()
        self._groups: queue.Queue[list[Episode]] = queue.Queue()
        # A group has a place from before it is played until it is taken, so that none waits for long.
        self._places = threading.Semaphore(num_ahead)
        self._threads = [
            threading.Thread(target=self._work, args=(url,), name=f"rollout-{i}", daemon=True)
            for i, url in enumerate(self._urls)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def take(self, num_groups: int, should_stop: Callable[[], bool]) -> Iterator[list[Episode]]:
        """So many groups, each as soon as it is there; fewer only when it should stop."""
        patience = time.monotonic() + PATIENCE_SECONDS
        taken = 0
        while taken < num_groups and not should_stop():
            try:
                group = self._groups.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > patience:
                    raise EngineUnavailable(f"no replica has finished a game for {PATIENCE_SECONDS:g} s") from None
                continue
            self._places.release()
            taken += 1
            yield group

    def _work(self, url: str) -> None:
        replica, games = ReplicaClient(url), WordleGames(self._environment)
        try:
            while not self._stopped.is_set():
                if replica.version() is None:
                    self._stopped.wait(0.3)
                elif self._take_places():
                    self._play_batch(games, replica)
        finally:
            games.close()
            replica.close()

    def _take_places(self) -> bool:
        """Places for a batch, all or none; one thread after the other, so that none waits with half of them."""
        with self._entrance:
            for _ in range(self._groups_per_batch):
                while not self._places.acquire(timeout=0.2):
                    if self._stopped.is_set():
                        return False
        return not self._stopped.is_set()

    def _play_batch(self, games: WordleGames, replica: ReplicaClient) -> None:
        with self._lock:
            secrets = [self._random.randrange(len(WORDS)) for _ in range(self._groups_per_batch)]
            seed = self._random.randrange(1 << 62)
        each = self._group_size
        try:
            episodes = play(
                games, replica, [secret for secret in secrets for _ in range(each)], temperature=1.0, seed=seed
            )
        except FAULTS as error:
            self._places.release(self._groups_per_batch)
            if not self._stopped.is_set():
                self._on_fault(replica.url, error)
                self._stopped.wait(0.3)
            return
        for start in range(0, len(episodes), each):
            self._groups.put(episodes[start : start + each])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a version plays at a temperature."""

    version: int
    temperature: float
    num_games: int
    reward: float
    wins: float
    valid: float


def evaluate(
    environment: str, replicas: Sequence[str], version: int, *, temperature: float, rounds: int, on_fault: OnFault
) -> Evaluation:
    """Play every secret some times on all replicas that are at a version."""
    todo: queue.Queue[tuple[int, list[int]]] = queue.Queue()
    halves = [list(range(start, len(WORDS), 2)) for start in range(2)]
    for number in range(2 * rounds):
        todo.put((number, halves[number % 2]))
    done: dict[int, list[Episode]] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS

    def work(url: str) -> None:
        client, games = ReplicaClient(url), WordleGames(environment)
        try:
            while len(done) < 2 * rounds and time.monotonic() < deadline:
                if client.version() != version:
                    time.sleep(0.1)
                    continue
                try:
                    number, secrets = todo.get(timeout=0.1)
                except queue.Empty:
                    continue
                try:
                    episodes = play(games, client, secrets, temperature=temperature, seed=1000 * number)
                    if {each for episode in episodes for each in episode.versions} != {version}:
                        raise EngineUnavailable(f"{url} changed its weights during an evaluation")
                    done[number] = episodes
                except FAULTS as error:
                    todo.put((number, secrets))
                    on_fault(url, error)
        finally:
            games.close()
            client.close()

    threads = [threading.Thread(target=work, args=(url,), daemon=True) for url in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(done) < 2 * rounds:
        raise EngineUnavailable(f"no replica reached version {version} within {PATIENCE_SECONDS:g} s")
    return summary([episode for episodes in done.values() for episode in episodes], version, temperature)


def summary(episodes: Sequence[Episode], version: int, temperature: float) -> Evaluation:
    """What some games are worth."""
    num_games, num_guesses = len(episodes), sum(len(episode.seen.guesses) for episode in episodes)
    return Evaluation(
        version=version,
        temperature=temperature,
        num_games=num_games,
        reward=sum(episode.seen.score for episode in episodes) / num_games,
        wins=sum(episode.seen.won for episode in episodes) / num_games,
        valid=sum(episode.num_valid for episode in episodes) / num_guesses,
    )
