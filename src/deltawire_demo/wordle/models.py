"""The messages of an OpenEnv environment: a guess, the observation after it, and the state of a session."""

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

MAX_GUESS_CHARACTERS = 64


class WordleAction(Action):  # type: ignore[misc]
    """A guess. Anything that is not in the list of words costs its turn."""

    guess: str = Field(max_length=MAX_GUESS_CHARACTERS)


class WordleObservation(Observation):  # type: ignore[misc]
    """The fields of `game.View`; `done` and `reward` are OpenEnv's own fields."""

    feedback: str = Field("", description="G, Y or - for each letter; XXXXX after an invalid guess; empty at the start")
    valid: bool | None = Field(None, description="whether the last guess was a word of the list")
    credit: float = Field(0.0, description="what the colours of the last guess are worth alone")
    score: float = Field(0.0, description="what the game is worth so far: the sum of all rewards")
    won: bool = False
    guesses: list[str] = Field(default_factory=list)
    feedbacks: list[str] = Field(default_factory=list)
    guesses_left: int = 6
    secret: str | None = Field(None, description="only when the game is over")


class WordleState(State):  # type: ignore[misc]
    """A session as OpenEnv shows it; without the secret, until the game is over."""

    guesses: list[str] = Field(default_factory=list)
    feedbacks: list[str] = Field(default_factory=list)
    score: float = 0.0
    done: bool = False
    won: bool = False
    secret: str | None = None
