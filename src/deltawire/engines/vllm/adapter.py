"""A vLLM server as an engine, driven over HTTP by the agent on its machine.

The server needs `VLLM_SERVER_DEV_MODE=1`, the backend and the worker extension of `worker`. Changes reach it as files
in a folder that both see, by default in shared memory.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from deltawire.engines.engine import EngineChange, Served
from deltawire.engines.http_engine import HttpEngine, refuse, spec_fields, version_of
from deltawire.errors import EngineRejected, EngineUnavailable
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.weights import TensorSpec, Weights

EXTENSION = "deltawire.engines.vllm.worker.WorkerExtension"
FLAGS = f'--weight-transfer-config \'{{"backend": "deltawire"}}\' --worker-extension-cls {EXTENSION}'


class VllmEngine(HttpEngine):
    """Keeps a vLLM server's weights current while it serves. Options are those of `HttpEngine`."""

    kind = "vllm"
    pauses: ClassVar = {
        "recompute": "mode=keep&clear_cache=true",
        "keep": "mode=keep&clear_cache=false",
        "abort": "mode=abort&clear_cache=true",
    }

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._resumes = True
        self._checked = False
        """That the server has our extension: a call to one that does not would put its workers out of step."""

    def status(self) -> Served:
        try:
            if not self._checked:
                self._check_server()
            version = self._server.get("/weight_info").get("weight_version")
            statuses = self._ask("status")
        except EngineUnavailable:
            self._checked = False
            raise
        return Served(
            boot="-".join(each["boot"] for each in statuses),
            states=tuple(version_of(each) for each in statuses),
            version=version,
            interrupted=any(each["busy"] or each["session"] for each in statuses),
        )

    def bind(self, specs: Mapping[str, TensorSpec]) -> None:
        self._set_layout(specs, self._ask("bind", specs=spec_fields(specs)))

    def digest(self) -> Digest:
        layout = self._bound
        return self._measured(
            self._ask("measure", numbers=[layout.measured(rank) for rank in range(len(layout.ranks))])
        )

    def stage(self, change: EngineChange) -> None:
        self._note_pause()
        token = token_hex(8)
        with self._shared.change(change, self._bound, token) as paths:
            refuse(self._ask("stage", paths=[str(path) for path in paths]), "nothing was changed")
        self._token = token

    def commit(self, change: EngineChange) -> float:
        token = self._take_token(change)
        self._begin_session()
        started = self._pause()
        for _ in range(2):
            self._call("/update_weights", {"update_info": {"token": token}})
            problem = self._written_problem(change.state)
            if problem is None:
                return self._go_on(change.state, started)
        # Patches are absolute, so what some workers have written can be taken back.
        failed = self._problem(self._ask("undo", token=token), change.base.digest)
        if failed is not None:
            raise self._broken(f"the update failed ({problem}) and could not be taken back ({failed})")
        self._go_on(change.base, started)
        raise EngineRejected(f"the update to version {change.state.version} was taken back: {problem}")

    def load(self, weights: Weights, folder: Path | None, state: WeightVersion) -> float:
        self._note_pause()
        with self._shared.checkpoint(weights, folder, state) as source:
            self._ask("begin")
            self._begin_session()
            started = self._pause()
            self._call("/update_weights", {"update_info": {"folder": str(source)}}, self._load_timeout)
            problem = self._problem(self._ask("status"), state.digest)
            if problem is not None:
                raise self._broken(f"version {state.version} could not be loaded: {problem}")
            return self._go_on(state, started)

    def mark(self, state: WeightVersion) -> None:
        self._note_pause()
        self._end_session()
        self._call("/update_weight_version", {"new_version": str(state.version)})
        self._resume()
        self._ask("end", state=state.as_dict())

    def _check_server(self) -> None:
        """Refuse a server that was not started as it should be. One that has only just started may take long."""
        config = self._server.get("/server_info?config_format=json", self._load_timeout).get("vllm_config", {})
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        extension = config.get("parallel_config", {}).get("worker_extension_cls")
        if backend != "deltawire" or not extension:
            raise EngineRejected(f"the server at {self.address} was not started with {FLAGS}")
        self._checked = True

    def _ask(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        """A command to all workers; their answers in the order of ranks."""
        body = {"method": "deltawire", "args": [name, arguments]}
        results = self._server.post("/collective_rpc", body, self._load_timeout).get("results")
        if not results or any(not isinstance(each, dict) or "rank" not in each for each in results):
            raise EngineRejected(f"the workers of {self.address} answer {results}")
        return sorted(results, key=lambda each: int(each["rank"]))

    def _note_pause(self) -> None:
        """See whether someone else has paused the server, so that it stays so. A pause while workers are busy with an
        update is one that an agent before this made, and did not live to end.
        """
        busy = any(each["busy"] for each in self._ask("status"))
        self._resumes = busy or not self._server.get("/is_paused")["is_paused"]

    def _begin_session(self) -> None:
        self._end_session()
        self._call("/start_weight_update")

    def _end_session(self) -> None:
        if any(each["session"] for each in self._ask("status")):
            self._call("/finish_weight_update")

    def _pause(self) -> float:
        started = time.perf_counter()
        self._call(f"/pause?{self.pauses[self._running_requests]}")
        return started

    def _go_on(self, state: WeightVersion, started: float) -> float:
        """Set the version and resume; the seconds since the pause began."""
        self._call("/finish_weight_update", {"weight_version": str(state.version)})
        self._resume()
        seconds = time.perf_counter() - started
        # Until here an agent that takes over would know that the server may be paused for an update.
        self._ask("end", state=state.as_dict())
        return seconds

    def _resume(self) -> None:
        if self._resumes:
            self._call("/resume")

    def _written_problem(self, state: WeightVersion) -> str | None:
        """Why the workers are not at a version that they should have written, if they are not."""
        statuses = self._ask("status")
        late = [each["rank"] for each in statuses if not each["error"] and version_of(each) != state]
        return f"rank {late[0]} has not got there" if late else self._problem(statuses, state.digest)

    def _call(self, path: str, body: Any = None, timeout: float | None = None) -> None:
        """A step of an update. One that fails inside the server may leave its workers out of step."""
        try:
            self._server.post(path, body, timeout)
        except EngineRejected as error:
            if len(self._bound.ranks) > 1:
                raise self._broken(f"{path} failed: {error}") from error
            raise
