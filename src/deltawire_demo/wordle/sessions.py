"""The games that a server keeps between requests: limited in number, and dropped when they are idle for too long.

All of it runs on the single thread of an event loop, without awaiting, so there are no locks.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deltawire.errors import DeltawireError
from deltawire_demo.wordle.game import Game, choose, tidy


class SessionError(DeltawireError):
    """A request that was refused. `code` is the reason, `status` the HTTP status."""

    def __init__(self, message: str, *, code: str, status: int) -> None:
        super().__init__(message, code=code, status=status)


def start(seed: Any = None, secret: Any = None) -> Game:
    """A game with the secret chosen by a seed, or by an index, or at random."""
    for name, value in (("seed", seed), ("secret", secret)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise SessionError(f"{name} must be an integer from 0, not {value!r}", code="BAD_INPUT", status=422)
    if seed is not None and secret is not None:
        raise SessionError("give a seed or a secret, not both", code="BAD_INPUT", status=422)
    try:
        return Game(choose(seed) if secret is None else secret)
    except ValueError as error:
        raise SessionError(str(error), code="BAD_INPUT", status=422) from None


@dataclass(frozen=True, slots=True)
class Start:
    """A game to start: in an existing session, or in a new one."""

    session: str | None = None
    seed: int | None = None
    secret: int | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A guess in a session. `turn` is how many were made before it; with it, the same move can be sent again."""

    session: str
    guess: str
    turn: int | None = None


class Sessions:
    """Games by the name of their session. A request is executed or refused as a whole."""

    def __init__(
        self, *, max_sessions: int, expire_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_sessions < 1 or expire_seconds <= 0:
            raise ValueError("max_sessions and expire_seconds must be positive")
        self.max_sessions, self.expire_seconds, self._clock = max_sessions, expire_seconds, clock
        # The one that was idle for the longest time comes first.
        self._games: OrderedDict[str, tuple[Game, float]] = OrderedDict()

    def __len__(self) -> int:
        self._expire()
        return len(self._games)

    def reset(self, starts: Sequence[Start]) -> list[tuple[str, Game]]:
        """Start games; returns their sessions, in the same order."""
        self._expire()
        games = [start(each.seed, each.secret) for each in starts]
        given = [each.session for each in starts if each.session is not None]
        self._look_up(given)
        if len(self._games) + len(starts) - len(given) > self.max_sessions:
            raise SessionError(
                f"{len(self._games)} of {self.max_sessions} sessions are in use: close some, or wait until those that "
                f"are silent for {self.expire_seconds:g} s expire", code="CAPACITY_REACHED", status=503,
            )  # fmt: skip
        names = [each.session or secrets.token_hex(8) for each in starts]
        for name, game in zip(names, games, strict=True):
            self._keep(name, game)
        return list(zip(names, games, strict=True))

    def step(self, moves: Sequence[Move]) -> list[Game]:
        """Make one guess in each of some sessions; returns their games, in the same order."""
        self._expire()
        games = self._look_up([move.session for move in moves])
        fresh = [_is_new(game, move) for game, move in zip(games, moves, strict=True)]
        for game, move, is_new in zip(games, moves, fresh, strict=True):
            if is_new:
                game.play(move.guess)
            self._keep(move.session, game)
        return games

    def close(self, names: Iterable[str]) -> int:
        """Close sessions; returns how many of them existed."""
        self._expire()
        return sum(self._games.pop(name, None) is not None for name in names)

    def _look_up(self, names: Sequence[str]) -> list[Game]:
        unknown = [name for name in names if name not in self._games]
        if unknown:
            raise SessionError(
                f"{len(unknown)} of {len(names)} sessions do not exist, {unknown[0]!r} first: reset makes new ones, "
                f"and those that are silent for {self.expire_seconds:g} s expire", code="UNKNOWN_SESSION", status=404,
            )  # fmt: skip
        if len(set(names)) < len(names):
            raise SessionError("a session is named twice in one request", code="BAD_INPUT", status=422)
        return [self._games[name][0] for name in names]

    def _keep(self, name: str, game: Game) -> None:
        self._games[name] = game, self._clock()
        self._games.move_to_end(name)

    def _expire(self) -> None:
        limit = self._clock() - self.expire_seconds
        while self._games:
            name, (_, used) = next(iter(self._games.items()))
            if used > limit:
                return
            del self._games[name]


def _is_new(game: Game, move: Move) -> bool:
    """Whether a move is new, and not the last one again after a lost response."""
    made = len(game.turns)
    if move.turn is not None and move.turn != made:
        if move.turn == made - 1 and game.turns[-1].guess == tidy(move.guess):
            return False
        raise SessionError(
            f"session {move.session!r} is at turn {made}, and a guess was sent for turn {move.turn}",
            code="TURN_MISMATCH", status=409,
        )  # fmt: skip
    if game.done:
        raise SessionError(f"the game of session {move.session!r} is over: reset it", code="GAME_OVER", status=409)
    return True
