"""Prompts, answers, and rewards.

The model is asked to describe things with words that begin with the letter s. An answer is worth the share of its words
that do, each word counted once; one of fewer than three words is worth nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deltawire_demo.clients import VllmClient
from deltawire_demo.rollout import Evaluation

THINGS = (
    "ocean", "night", "market", "forest", "kitchen", "river", "garden", "winter", "street", "mountain", "school",
    "moon", "storm", "library", "beach", "farm", "castle", "desert", "train", "song",
)  # fmt: skip
LETTER = "s"
PROMPT = "<|im_start|>user\nDescribe the {thing} with words that begin with s.<|im_end|>\n<|im_start|>assistant\n"
NUM_TOKENS = 16
MIN_WORDS = 3


def words_of(text: str) -> list[str]:
    """The words of an answer: letters alone, three at least.

    >>> words_of("1. Sun 2. Sea-side, to")
    ['sun', 'sea', 'side']
    """
    return re.findall(r"[a-z]{3,}", text.lower())


def reward_of(text: str) -> float:
    """The reward of an answer, 0 to 1.

    >>> reward_of("sun, sea, sun, moon")
    0.5
    """
    words = words_of(text)
    if len(words) < MIN_WORDS:
        return 0.0
    return len({word for word in words if word[0] == LETTER}) / len(words)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the model, as the trainer uses it."""

    prompt: list[int]
    written: list[int]
    log_probs: list[float]
    version: int
    text: str
    reward: float

    @property
    def versions(self) -> Sequence[int]:
        return (self.version,)


class Asker:
    """Asks one vLLM server, all prompts in one request."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        self.url = url
        self._client, self._tokenizer = VllmClient(url), tokenizer
        self._prompts = [tokenizer.encode(PROMPT.format(thing=thing), add_special_tokens=False) for thing in THINGS]

    def version(self) -> int | None:
        return self._client.version()

    def play(self, tasks: Sequence[int], *, temperature: float, seed: int) -> list[Answer]:
        prompts = [self._prompts[task] for task in tasks]
        version, completions = self._client.complete(prompts, NUM_TOKENS, temperature, seed)
        texts = [self._tokenizer.decode(each.tokens, skip_special_tokens=True) for each in completions]
        return [
            Answer(prompt, each.tokens, each.log_probs, version, text, reward_of(text))
            for prompt, each, text in zip(prompts, completions, texts, strict=True)
        ]

    def close(self) -> None:
        self._client.close()


def summary(answers: Sequence[Answer], version: int, temperature: float) -> Evaluation:
    """The mean results of some answers; a win is one without a wrong word."""
    return Evaluation(
        version=version,
        temperature=temperature,
        num_games=len(answers),
        reward=sum(each.reward for each in answers) / len(answers),
        wins=sum(each.reward == 1 for each in answers) / len(answers),
        valid=sum(len(words_of(each.text)) >= MIN_WORDS for each in answers) / len(answers),
    )
