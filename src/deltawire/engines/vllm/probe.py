"""A vLLM server that is to be proven: see `deltawire.engines.prove`."""

from collections.abc import Sequence
from typing import Any

from deltawire.engines.http_engine import refuse
from deltawire.engines.prove import Parameter, Subject
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.errors import EngineRejected


class VllmProbe(VllmEngine):
    """Options are those of `VllmEngine`. Nobody else may use the server meanwhile."""

    def subject(self) -> Subject:
        answers = self._ask("parameters")["workers"]
        refuse(answers, "the server's parameters are not known")
        found = [each["result"] for each in answers]
        parameters = [
            Parameter(rank, name, num_parts)
            for rank, each in enumerate(found)
            for name, num_parts in each["parameters"]
        ]
        self._model = self._server.get("/v1/models")["data"][0]["id"]
        block_size = found[0]["block_size"]
        about = {**found[0]["about"], "workers": len(found)}
        return Subject(about, parameters, block_size if block_size + 8 < found[0]["max_tokens"] else 0)

    def disturb(self, rank: int, name: str, part: int | None, strength: float) -> None:
        self._do("disturb", rank=rank, parameter=name, part=part, strength=strength)

    def steer(self, name: str, part: int, seed: int) -> bool:
        return all(each["result"] for each in self._do("steer", parameter=name, part=part, seed=seed))

    def restore(self) -> None:
        self._do("restore")

    def _do(self, command: str, **arguments: Any) -> Any:
        answers = self._ask(command, **arguments)["workers"]
        refuse(answers, "the parameters could not be changed")
        return answers

    def ask(self, prompt: Sequence[int], salt: str, *, decodes: bool) -> Any:
        body: dict[str, Any] = {
            "model": self._model, "prompt": list(prompt), "max_tokens": 1 if len(prompt) > 24 or not decodes else 4,
            "temperature": 0, "logprobs": 5, "ignore_eos": True, "cache_salt": salt,
        }  # fmt: skip
        if not decodes:
            body["prompt_logprobs"] = 1
        try:
            choice = self._server.post("/v1/completions", body)["choices"][0]
        except EngineRejected:
            # Such as for numbers that JSON does not have.
            return "refused"
        return choice["logprobs"]["top_logprobs"] if decodes else choice["prompt_logprobs"]
