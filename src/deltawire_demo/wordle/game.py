"""The rules: five letters, six guesses, a colour for each letter, and what a game is worth.

A guess that is not in the list of words costs its turn and is answered with five X. A whole game is worth
`best + win - inv`:

- best: the most that a valid guess earned, 0.10 for each green letter and 0.05 for each yellow one
- win: 1.0, and 0.1 for each guess that was left, when the word was found
- inv: 0.1 for each invalid guess

That is -0.6 to 2.0. It is added up in hundredths, so that it is exact.
"""

import secrets
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b

from deltawire_demo.wordle.words import WORDS

NUM_LETTERS = 5
NUM_GUESSES = 6
GREEN, YELLOW, GRAY, INVALID = "G", "Y", "-", "X"

_INDEX = {word: index for index, word in enumerate(WORDS)}


def feedback(secret: str, guess: str) -> str:
    """The colours of a valid guess. A letter is coloured as often as the secret has it, greens first, then from the
    left.

    >>> feedback("apple", "paper")
    'YYGY-'
    """
    left = Counter(wanted for wanted, given in zip(secret, guess, strict=True) if wanted != given)
    colours = []
    for wanted, given in zip(secret, guess, strict=True):
        if wanted == given:
            colours.append(GREEN)
        elif left[given] > 0:
            left[given] -= 1
            colours.append(YELLOW)
        else:
            colours.append(GRAY)
    return "".join(colours)


def choose(seed: int | None = None) -> int:
    """The index of a secret: always the same one for a seed, and any without one."""
    if seed is None:
        return secrets.randbelow(len(WORDS))
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest(), "little") % len(WORDS)


@dataclass(frozen=True, slots=True)
class Turn:
    """One guess and its result."""

    guess: str
    feedback: str
    credit: float
    """The reward for the colours of this guess alone."""
    reward: float
    """By how much it changed the score; the rewards of a game add up to that."""


class Game:
    """One game. `secret` is an index into the list of words."""

    __slots__ = ("_best", "_points", "secret", "turns", "won")

    def __init__(self, secret: int) -> None:
        if not 0 <= secret < len(WORDS):
            raise ValueError(f"a secret must be an index from 0 to {len(WORDS) - 1}, not {secret}")
        self.secret = secret
        self.turns: list[Turn] = []
        self.won = False
        self._best = self._points = 0

    @property
    def done(self) -> bool:
        return self.won or len(self.turns) == NUM_GUESSES

    @property
    def score(self) -> float:
        """The score of the game so far."""
        return self._points / 100

    def play(self, guess: str) -> Turn:
        """Make the next guess; capitals and spaces around it do not matter."""
        if self.done:
            raise ValueError("the game is over: start another")
        guess = tidy(guess)
        if guess in _INDEX:
            colours = feedback(WORDS[self.secret], guess)
            credit = 10 * colours.count(GREEN) + 5 * colours.count(YELLOW)
            points = max(credit - self._best, 0)
            self._best += points
            self.won = _INDEX[guess] == self.secret
            if self.won:
                points += 100 + 10 * (NUM_GUESSES - len(self.turns) - 1)
        else:
            colours, credit, points = INVALID * NUM_LETTERS, 0, -10
        self._points += points
        self.turns.append(Turn(guess, colours, credit / 100, points / 100))
        return self.turns[-1]


def tidy(guess: str) -> str:
    """A guess in lower case, without spaces around it."""
    return guess.strip().lower()


@dataclass(frozen=True, slots=True)
class View:
    """What a player sees after a guess, or at the start; the secret only when the game is over."""

    feedback: str
    valid: bool | None
    credit: float
    reward: float | None
    score: float
    done: bool
    won: bool
    guesses: list[str]
    feedbacks: list[str]
    guesses_left: int
    secret: str | None


def view(game: Game) -> View:
    """The view of a game."""
    last = game.turns[-1] if game.turns else None
    return View(
        feedback=last.feedback if last else "",
        valid=INVALID not in last.feedback if last else None,
        credit=last.credit if last else 0.0,
        reward=last.reward if last else None,
        score=game.score,
        done=game.done,
        won=game.won,
        guesses=[turn.guess for turn in game.turns],
        feedbacks=[turn.feedback for turn in game.turns],
        guesses_left=NUM_GUESSES - len(game.turns),
        secret=WORDS[game.secret] if game.done else None,
    )
