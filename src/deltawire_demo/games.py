"""Games of Wordle through HTTP: letters come from a replica, colours from the environment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltawire_demo.clients import ReplicaClient, VllmClient
from deltawire_demo.rollout import Evaluation
from deltawire_demo.tokens import BEGIN, NUM_ALPHABET, answer_of, guess_of
from deltawire_demo.wordle.client import WordleGames
from deltawire_demo.wordle.game import NUM_LETTERS, View
from deltawire_demo.wordle.words import WORDS


@dataclass(slots=True)
class Episode:
    """A game, as the trainer uses it."""

    secret: int
    tokens: list[int] = field(default_factory=lambda: [BEGIN])
    log_probs: list[float] = field(default_factory=list)
    """The log-probability of each letter when it was sampled."""
    versions: list[int] = field(default_factory=list)
    """The version of the weights that each guess was sampled with."""
    view: View | None = None

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


class WordlePlayer:
    """Plays with one replica, all guesses of a turn in one request."""

    def __init__(self, environment: str, url: str, *, is_vllm: bool = False) -> None:
        self.url = url
        self._replica = VllmClient(url, range(NUM_ALPHABET)) if is_vllm else ReplicaClient(url)
        self._games = WordleGames(environment)

    def version(self) -> int | None:
        return self._replica.version()

    def play(self, tasks: Sequence[int], *, temperature: float, seed: int) -> list[Episode]:
        self._games.reset(secrets=tasks)
        episodes = [Episode(secret) for secret in tasks]
        for turn in range(100):
            numbers = self._games.open
            if not numbers:
                break
            version, completions = self._replica.complete(
                [episodes[number].tokens for number in numbers], NUM_LETTERS, temperature, seed + turn
            )
            written = dict(zip(numbers, completions, strict=True))
            views = self._games.step({number: guess_of(each.tokens) for number, each in written.items()})
            for number, (letters, log_probs) in written.items():
                episodes[number].add(letters, log_probs, version, views[number])
        return episodes

    def close(self) -> None:
        self._games.close()
        self._replica.close()


def boards(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """A game of every tenth word, to show."""
    games = {episode.secret: episode.seen for episode in episodes if episode.secret % 10 == 0}
    return [
        {"word": WORDS[secret], "won": seen.won, "guesses": seen.guesses, "feedbacks": seen.feedbacks}
        for secret, seen in sorted(games.items())
    ]


def summary(episodes: Sequence[Episode], version: int, temperature: float) -> Evaluation:
    """The mean results of some games."""
    num_games, num_guesses = len(episodes), sum(len(episode.seen.guesses) for episode in episodes)
    return Evaluation(
        version=version,
        temperature=temperature,
        num_games=num_games,
        reward=sum(episode.seen.score for episode in episodes) / num_games,
        wins=sum(episode.seen.won for episode in episodes) / num_games,
        valid=sum(episode.num_valid for episode in episodes) / num_guesses,
    )
