"""A vLLM server as an engine, driven by the agent on its machine through deltawire's route in the server.

Files reach the server through folders that both see: fetched deltas where workers decode them, changes in the shared
folder where they do not.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from deltawire.engines.engine import EngineChange, EngineDelta, Served
from deltawire.engines.http_engine import Answers, HttpEngine, refuse, spec_fields
from deltawire.engines.staged import left_out_digests
from deltawire.engines.token import VARIABLE, engine_token
from deltawire.errors import BaseMismatch, CorruptObject, DeltawireError, EngineRejected, UnsupportedFormat
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.weights import TensorSpec, Weights

EXTENSION = "deltawire.engines.vllm.worker.WorkerExtension"
ROUTE = "deltawire.engines.vllm.route.Route"
FLAGS = (
    '--weight-transfer-config \'{"backend": "deltawire"}\' '
    f"--worker-extension-cls {EXTENSION} --middleware {ROUTE}"
)  # fmt: skip

SAME_TOKEN = (
    f"run agent and server as the same user on one machine, or give both the same {VARIABLE}; if the file of this "
    "user's token was removed since the server started, restart the server"
)

# What a delta may have that is no fault of the server's.
FAULTS: dict[str, type[DeltawireError]] = {
    each.__name__: each for each in (CorruptObject, BaseMismatch, UnsupportedFormat)
}

# How often to look for the answers of workers, and whether these are still there.
LOOK_SECONDS, ALIVE_SECONDS = 0.001, 1.0


class VllmEngine(HttpEngine):
    """Keeps a vLLM server's weights current while it serves. Options are those of `HttpEngine`.

    `api_key` is the engine token, if it is neither in the environment nor in the file of this user.
    """

    kind = "vllm"
    pauses: ClassVar = dict.fromkeys(("recompute", "keep", "abort"))

    def __init__(self, url: str, *, api_key: str | None = None, **options: Any) -> None:
        super().__init__(url, api_key=engine_token() if api_key is None else api_key, **options)
        self._on_gpu = False
        self._after = Served("", ())

    def status(self) -> Served:
        answer = self._ask("status")
        if not answer.keys() >= {"weight_version", "held", "workers"}:
            raise EngineRejected(f"{self.address} does not answer as deltawire's route in vLLM does: check the URL")
        refuse(answer["workers"], "the server cannot be driven")
        return self._served(answer["workers"], answer["weight_version"], answer["held"])

    def _served(self, workers: Answers, version: str | None, held: bool = False) -> Served:
        boot = "-".join(each["boot"] for each in workers)
        quantized = next((each["quantized"] for each in workers if "quantized" in each), None)
        sums = [Digest.parse(each["derived"]) for each in workers if each.get("derived")]
        states = tuple(WeightVersion.parse(each["state"]) for each in workers)
        derived = str(sum(sums, Digest())) if sums else None
        return Served(boot, states, version, interrupted=held, quantized=quantized, derived=derived)

    def bind(self, specs: Mapping[str, TensorSpec]) -> None:
        ranks = len(self._ask("status")["workers"])
        self._take_layout(specs, self._work("bind", ranks, specs=spec_fields(specs)))

    def specs(self) -> Mapping[str, TensorSpec] | None:
        answers = self._ask("layout")["workers"]
        found = [each["result"] for each in answers]
        if not all(found) or any(each["specs"] != found[0]["specs"] for each in found):
            return None
        specs = {name: (dtype, tuple(shape)) for name, (dtype, shape) in found[0]["specs"].items()}
        self._take_layout(specs, answers)
        # What counts was set by `digest`, after all were bound.
        return specs if [each["counted"] for each in found] == self._bound.counted else None

    def _take_layout(self, specs: Mapping[str, TensorSpec], answers: Answers) -> None:
        refuse(answers, "the server's weights cannot be changed in place")
        self._on_gpu = all(each["result"]["device"] != "cpu" for each in answers)
        found = [each["result"] for each in answers]
        # A stage of a pipeline leaves out what is another's.
        left_out = set.intersection(*(set(each["left_out"]) for each in found))
        self._set_layout(specs, [each["pieces"] for each in found], left_out)

    @property
    def decodes(self) -> bool:
        return not self._bound.left_out

    @property
    def is_divided(self) -> bool:
        return self._bound.is_divided

    @property
    def on_gpu(self) -> bool:
        return self._on_gpu

    def digest(self) -> Digest:
        layout = self._bound
        numbers = [layout.measured(rank) for rank in range(len(layout.ranks))]
        return self._measured(self._work("measure", len(numbers), numbers=numbers))

    def stage(self, change: EngineChange | EngineDelta) -> None:
        token = token_hex(8)
        if isinstance(change, EngineDelta):
            self._decode(change, token)
        else:
            with self._shared.change(change, self._bound, token) as paths:
                refuse(self._work("stage", len(paths), paths=[str(path) for path in paths]), "nothing was changed")
        self._token = token

    def _decode(self, change: EngineDelta, token: str) -> None:
        """Have the workers decode a delta, and check what the weights would be before anything is written."""
        versions = {"base": change.base.as_dict(), "state": change.state.as_dict()}
        files = [str(file.absolute()) for file in change.files]
        answers = self._work("decode", len(self._bound.ranks), token=token, files=files, **versions)
        for each in answers:
            kind = FAULTS.get(each["error"]["kind"]) if each["error"] else None
            if kind is not None:
                raise kind(each["error"]["message"])
        refuse(answers, "nothing was changed")
        found = self._total(answers, "planned")
        if found != change.state.digest:
            raise CorruptObject(f"the delta leads to weights with digest {found}, not {change.state.digest}")

    def _work(self, name: str, ranks: int, **arguments: Any) -> Answers:
        """A command that workers go on with after they were asked; their answers, which they leave in files."""
        call = token_hex(8)
        paths = [self._shared.path(f"{call}-answer-{rank}.json") for rank in range(ranks)]
        refuse(self._ask(name, answers=[str(path) for path in paths], **arguments)["workers"], "nothing was changed")
        deadline, look = time.monotonic() + self._load_timeout, time.monotonic() + ALIVE_SECONDS
        try:
            while not all(path.exists() for path in paths):
                now = time.monotonic()
                if now > look:
                    # Answers come before the end of the thread that makes them.
                    idle = not any(each["at_work"] for each in self._ask("status")["workers"])
                    if (idle and not all(path.exists() for path in paths)) or now > deadline:
                        raise EngineRejected(
                            f"{self.address} did not answer {name}: check that it can read {self._shared.folder}"
                        )
                    look = now + ALIVE_SECONDS
                time.sleep(LOOK_SECONDS)
            return [json.loads(path.read_text()) for path in paths]
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def commit(self, change: EngineChange | EngineDelta) -> float:
        layout = self._bound
        before, after = change.base.digest, change.state.digest
        if isinstance(change, EngineChange):
            beside = left_out_digests(change, layout)
            before, after = before - beside[0], after - beside[1]
        answer = self._ask(
            "commit", token=self._take_token(change), running_requests=self._running_requests,
            before=layout.partial(before), after=layout.partial(after), version=str(change.state.version),
        )  # fmt: skip
        if answer.get("failed"):
            raise self._broken(
                f"the update failed ({answer['problem']}) and could not be rolled back ({answer['failed']})"
            )
        if answer["problem"]:
            raise EngineRejected(f"the update to version {change.state.version} was rolled back: {answer['problem']}")
        self._after = self._served(answer["workers"], str(change.state.version))
        return float(answer["seconds"])

    def after_commit(self) -> Served:
        return self._after

    def load(self, weights: Weights, folder: Path | None, state: WeightVersion) -> float:
        with self._shared.checkpoint(weights, folder, state) as source:
            is_unknown = self.status().state is None
            answers = self._work("check", len(self._bound.ranks), folder=str(source), takes=is_unknown)
            refuse(answers, "nothing was changed")
            after = state.digest - digest({name: weights[name] for name in self.left_out})
            if is_unknown and "quantized" in answers[0] and self.digest() == after:
                # The server was started with these weights.
                self.mark(state)
                return 0.0
            answer = self._ask(
                "load", folder=str(source), running_requests=self._running_requests,
                after=self._bound.partial(after), state=state.as_dict(), version=str(state.version),
            )  # fmt: skip
        if answer["problem"]:
            raise self._broken(f"version {state.version} could not be loaded: {answer['problem']}")
        return float(answer["seconds"])

    def mark(self, state: WeightVersion) -> None:
        refuse(self._ask("mark", state=state.as_dict())["workers"], "the version could not be set")
        self._ask("name", version=str(state.version))

    def _ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        # How things are is told at once, by a server that is alive.
        timeout = None if name == "status" else self._load_timeout
        try:
            answer: dict[str, Any] = self._server.post(f"/deltawire/{name}", arguments, timeout)
        except EngineRejected as error:
            if getattr(error, "status", None) == 401:
                raise EngineRejected(f"{error}; {SAME_TOKEN}") from error
            raise EngineRejected(f"{error}; the server must be started with {FLAGS}") from error
        return answer
