"""Clients for completions: prompts are lists of tokens, completions are tokens and their log-probabilities.

The demo's own replica returns with each completion the version that all of it was computed with. vLLM is asked for its
version before, so that it is the oldest version that a part of the completion comes from.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx

from deltawire.errors import EngineUnavailable

TIMEOUT_SECONDS = 60.0
MODEL = "policy"


class Completion(NamedTuple):
    """The sampled tokens after a prompt, and the log-probability of each when it was sampled."""

    tokens: list[int]
    log_probs: list[float]


class ReplicaClient:
    """A client of one of the demo's own replicas."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)

    def complete(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> tuple[int, list[Completion]]:
        """The version of the weights, and a completion for each prompt."""
        answer = self._ask("/v1/completions", {
            "prompt": prompts, "max_tokens": num_tokens, "temperature": temperature, "seed": seed, "logprobs": 0,
        })  # fmt: skip
        return int(answer["weight_version"]), completions_of(answer)

    def version(self) -> int | None:
        """The version that it serves; None if it does not respond or has no weights yet."""
        return self._version("/health", "version")

    def _version(self, path: str, key: str) -> int | None:
        try:
            found = self._client.get(path).json()[key]
            return None if found is None else int(found)
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    def _ask(self, path: str, body: Any) -> Any:
        response = self._client.post(path, json=body)
        if not response.is_success:
            raise EngineUnavailable(f"{self.url}{path} answered {response.status_code}: {response.text[:200]}")
        return response.json()

    def close(self) -> None:
        self._client.close()


class VllmClient(ReplicaClient):
    """A client of a vLLM server, whose weights an agent keeps current.

    `allowed` are the tokens that may be sampled; without it all may, and the model can end its answer.
    """

    def __init__(self, url: str, allowed: Sequence[int] | None = None) -> None:
        super().__init__(url)
        self._limits = {} if allowed is None else {"allowed_token_ids": list(allowed), "ignore_eos": True}

    def complete(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> tuple[int, list[Completion]]:
        version = self.version()
        if version is None:
            raise EngineUnavailable(f"{self.url} has no version yet")
        # Without the seed: vLLM would use it for each prompt, and equal prompts would all get the same completion.
        answer = self._ask("/v1/completions", {
            "model": MODEL, "prompt": prompts, "max_tokens": num_tokens, "temperature": temperature, "logprobs": 0,
            "return_token_ids": True, "skip_special_tokens": False, **self._limits,
        })  # fmt: skip
        return version, completions_of(answer)

    def version(self) -> int | None:
        return self._version("/weight_info", "weight_version")


def completions_of(answer: Any) -> list[Completion]:
    """The choices of an answer, in the order of the prompts."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [Completion(each["token_ids"], each["logprobs"]["token_logprobs"]) for each in choices]
