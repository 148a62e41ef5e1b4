"""The tokens of a game, as the policy reads and writes it.

26 letters; for each letter one token per colour, its feedback; X for each letter of an invalid guess; and one that
begins a game. A game is the beginning, then five letters and five feedback tokens for each guess.
"""

from collections.abc import Sequence

from deltawire_demo.wordle.game import GRAY, GREEN, INVALID, NUM_GUESSES, NUM_LETTERS, YELLOW

NUM_ALPHABET = 26
COLOURS = {GRAY: 0, YELLOW: 1, GREEN: 2}
NO_WORD = NUM_ALPHABET + NUM_ALPHABET * len(COLOURS)
BEGIN = NO_WORD + 1
NUM_TOKENS = BEGIN + 1
MAX_TOKENS = 1 + NUM_GUESSES * 2 * NUM_LETTERS


def letters_of(guess: str) -> list[int]:
    """The tokens of a guess.

    >>> letters_of("abz")
    [0, 1, 25]
    """
    return [ord(letter) - ord("a") for letter in guess]


def guess_of(tokens: Sequence[int]) -> str:
    """The guess that some tokens spell."""
    return "".join(chr(ord("a") + token) for token in tokens)


def answer_of(guess: str, feedback: str) -> list[int]:
    """The feedback tokens of a guess: each carries its letter and its colour."""
    return [
        NO_WORD if colour == INVALID else NUM_ALPHABET + len(COLOURS) * letter + COLOURS[colour]
        for letter, colour in zip(letters_of(guess), feedback, strict=True)
    ]
