"""Plays many games at once through a server's batch endpoint, without OpenEnv."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import httpx

from deltawire_demo.wordle.game import View
from deltawire_demo.wordle.sessions import SessionError


class WordleGames:
    """A set of games, by their number. Sessions are used again from one reset to the next.

    >>> with WordleGames("http://127.0.0.1:8001") as games:  # doctest: +SKIP
    ...     games.reset(secrets=[12] * 16)
    ...     views = games.step({0: "crane", 1: "house"})
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout_seconds: float = 30.0) -> None:
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_seconds)
        self._sessions: list[str] = []
        self._views: list[View] = []

    @property
    def views(self) -> list[View]:
        """The view of each game."""
        return list(self._views)

    @property
    def open(self) -> list[int]:
        """The numbers of the games that are not over."""
        return [number for number, seen in enumerate(self._views) if not seen.done]

    def reset(
        self,
        *,
        num_games: int | None = None,
        seeds: Sequence[int] | None = None,
        secrets: Sequence[int] | None = None,
    ) -> list[View]:
        """Start new games: a number of them, or one for each seed, or for each secret."""
        if sum(given is not None for given in (num_games, seeds, secrets)) != 1:
            raise ValueError("give one of num_games, seeds and secrets")
        games: list[dict[str, Any]]
        if seeds is not None:
            games = [{"seed": seed} for seed in seeds]
        elif secrets is not None:
            games = [{"secret": secret} for secret in secrets]
        else:
            games = [{} for _ in range(num_games or 0)]
        self._close(self._sessions[len(games) :])
        del self._sessions[len(games) :]
        again = [{**game, "session": name} for game, name in zip(games, self._sessions, strict=False)]
        try:
            answer = self._post("reset", {"games": again + games[len(again) :]})
        except SessionError as error:
            if error.code != "UNKNOWN_SESSION":
                raise
            # They have expired. Those that have not would occupy sessions.
            self._close(self._sessions)
            self._sessions.clear()
            answer = self._post("reset", {"games": games})
        self._sessions = [game["session"] for game in answer["games"]]
        self._views = [_view(game) for game in answer["games"]]
        return self.views

    def step(self, guesses: Mapping[int, str]) -> dict[int, View]:
        """Make a guess in each of some games; returns the new views."""
        steps = [
            {"session": self._sessions[number], "guess": guess, "turn": len(self._views[number].guesses)}
            for number, guess in guesses.items()
        ]
        answer = self._post("step", {"steps": steps})
        views = {number: _view(game) for number, game in zip(guesses, answer["games"], strict=True)}
        for number, seen in views.items():
            self._views[number] = seen
        return views

    def close(self) -> None:
        """Close the sessions; on a server that is unavailable they expire."""
        with suppress(httpx.TransportError):
            self._close(self._sessions)
        self._sessions.clear()
        self._client.close()

    def __enter__(self) -> "WordleGames":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:  # fmt: skip
        self.close()

    def _close(self, names: Iterable[str]) -> None:
        names = list(names)
        if names:
            self._post("close", {"sessions": names})

    def _post(self, what: str, body: dict[str, Any]) -> Any:
        try:
            response = self._client.post(f"/batch/{what}", json=body)
        except httpx.TransportError:
            # Once more: the server may have closed an idle connection. Each request can be sent twice, see `Move.turn`.
            response = self._client.post(f"/batch/{what}", json=body)
        if response.is_success:
            return response.json()
        try:
            said = response.json()
        except ValueError:
            said = {}
        reason = said.get("detail", response.reason_phrase) if isinstance(said, dict) else said
        code = said.get("code", "BAD_INPUT") if isinstance(said, dict) else "BAD_INPUT"
        raise SessionError(f"the server refused /batch/{what}: {reason}", code=code, status=response.status_code)


def _view(game: dict[str, Any]) -> View:
    return View(**game["observation"], reward=game["reward"], done=game["done"])
