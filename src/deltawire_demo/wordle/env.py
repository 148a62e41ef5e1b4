"""One game through OpenEnv's own client, which holds a connection for it."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from deltawire_demo.wordle.models import WordleAction, WordleObservation, WordleState


class WordleEnv(EnvClient):  # type: ignore[misc]
    """A session with a server.

    >>> with WordleEnv(base_url="http://127.0.0.1:8001").sync() as env:  # doctest: +SKIP
    ...     env.reset(seed=7)
    ...     result = env.step(WordleAction(guess="crane"))
    """

    def _step_payload(self, action: WordleAction) -> dict[str, Any]:
        return {"guess": action.guess}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult:
        reward, done = payload.get("reward"), payload.get("done", False)
        seen = WordleObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation=seen, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> WordleState:
        return WordleState(**payload)
