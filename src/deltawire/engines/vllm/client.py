"""A vLLM server as an engine, driven over HTTP from the agent beside it.

The server needs `VLLM_SERVER_DEV_MODE=1`, the backend and the worker extension of `worker`. Changes come to it as files
in a folder that both see, by default in shared memory.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from deltawire.engines.engine import Change, Engine, Served
from deltawire.engines.layout import Layout, Piece
from deltawire.engines.server import Server
from deltawire.engines.stage import Stage
from deltawire.engines.staged import state_text
from deltawire.errors import EngineBroken, EngineRejected, EngineUnavailable
from deltawire.redact import redacted
from deltawire.state import Digest
from deltawire.target import State
from deltawire.weights import Form, Weights

# What happens to requests that are running, and to what was computed for them.
PAUSES = {
    "recompute": {"mode": "keep", "clear_cache": "true"},
    "keep": {"mode": "keep", "clear_cache": "false"},
    "abort": {"mode": "abort", "clear_cache": "true"},
}
EXTENSION = "deltawire.engines.vllm.worker.WorkerExtension"
FLAGS = f'--weight-transfer-config \'{{"backend": "deltawire"}}\' --worker-extension-cls {EXTENSION}'


class VllmEngine(Engine):
    """Keeps a vLLM server's weights current while it serves.

    `kv` says what becomes of running requests: `recompute` (default) computes their context again under the new
    weights, `keep` goes on from what the old weights computed, prefix cache included, `abort` ends them.
    """

    kind = "vllm"

    def __init__(
        self,
        url: str,
        *,
        stage: str | Path | None = None,
        kv: str = "recompute",
        api_key: str | None = None,
        timeout: float = 60.0,
        load_timeout: float = 3600.0,
    ) -> None:
        if kv not in PAUSES:
            raise ValueError(f"kv is one of {', '.join(PAUSES)}, not {kv!r}")
        self.address = redacted(url.rstrip("/"))
        self._server = Server(url.rstrip("/"), api_key, timeout)
        self._stage = Stage(stage, self.address)
        self._kv, self._load_timeout = kv, load_timeout
        self._layout: Layout | None = None
        self._token: str | None = None
        self._resumes = True
        self._checked = False
        """That the server has our extension: a call to one that does not would put its workers out of step."""

    def look(self) -> Served:
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
            states=tuple(_state(each["state"]) for each in statuses),
            version=version,
            interrupted=any(each["busy"] or each["session"] for each in statuses),
        )

    def open(self, forms: Mapping[str, Form]) -> None:
        statuses = self._ask("open", forms={name: [dtype, list(shape)] for name, (dtype, shape) in forms.items()})
        _refuse(statuses, "the server's weights cannot be changed in place")
        pieces = [[Piece.from_list(fields) for fields in each["result"]] for each in statuses]
        self._layout = Layout(forms, pieces)

    def digest(self) -> Digest:
        layout = self._opened
        statuses = self._ask("measure", numbers=[layout.measured(rank) for rank in range(len(layout.ranks))])
        _refuse(statuses, "the server's weights could not be read")
        # Where workers differ in what they should share, these are the weights of no version.
        return self._total(statuses) if layout.alike(each["result"] for each in statuses) else Digest()

    def stage(self, change: Change) -> None:
        self._note_pause()
        token = token_hex(8)
        with self._stage.change(change, self._opened, token) as paths:
            _refuse(self._ask("stage", paths=[str(path) for path in paths]), "nothing was changed")
        self._token = token

    def switch(self, change: Change) -> float:
        token, self._token = self._token, None
        if token is None:
            raise EngineRejected(f"the change to version {change.state.version} is not staged")
        self._begin_session()
        started = self._pause()
        for _ in range(2):
            self._call("/update_weights", {"update_info": {"token": token}})
            problem = self._problem(change.state)
            if problem is None:
                return self._go_on(change.state, started)
        # Patches are absolute, so what some workers have written can be taken back.
        undone = self._ask("undo", token=token)
        if any(each["error"] for each in undone) or self._total(undone) != change.base.digest:
            self._break(f"the update failed ({problem}) and could not be taken back")
        self._go_on(change.base, started)
        raise EngineRejected(f"the update to version {change.state.version} was taken back: {problem}")

    def load(self, weights: Weights, folder: Path | None, state: State) -> float:
        self._note_pause()
        with self._stage.checkpoint(weights, folder, state) as source:
            self._ask("begin")
            self._begin_session()
            started = self._pause()
            self._call("/update_weights", {"update_info": {"folder": str(source)}}, self._load_timeout)
            problem = self._problem(state, loaded=True)
            if problem is not None:
                self._break(f"version {state.version} could not be loaded: {problem}")
            return self._go_on(state, started)

    def adopt(self, state: State) -> None:
        self._note_pause()
        self._end_session()
        self._call("/update_weight_version", {"new_version": str(state.version)})
        self._resume()
        self._ask("end", state=state_text(state))

    def close(self) -> None:
        self._server.close()
        self._stage.close()

    @property
    def _opened(self) -> Layout:
        if self._layout is None:
            raise EngineRejected("the tensors are not known yet: open the engine first")
        return self._layout

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
        query = "&".join(f"{key}={value}" for key, value in PAUSES[self._kv].items())
        started = time.perf_counter()
        self._call(f"/pause?{query}")
        return started

    def _go_on(self, state: State, started: float) -> float:
        """Tell the version and resume; the seconds since the pause began."""
        self._call("/finish_weight_update", {"weight_version": str(state.version)})
        self._resume()
        seconds = time.perf_counter() - started
        # Until here an agent that takes over would know that the server may be paused for an update.
        self._ask("end", state=state_text(state))
        return seconds

    def _resume(self) -> None:
        if self._resumes:
            self._call("/resume")

    def _problem(self, state: State, loaded: bool = False) -> str | None:
        """Why the workers are not at a state that was written, if they are not."""
        statuses = self._ask("status")
        for each in statuses:
            if each["error"]:
                return f"worker {each['rank']}: {each['error']}"
            if not loaded and _state(each["state"]) != state:
                return f"worker {each['rank']} has not got there"
        found = self._total(statuses)
        return None if found == state.digest else f"the weights have digest {found}, not {state.digest}"

    def _total(self, statuses: list[dict[str, Any]]) -> Digest:
        return self._opened.total(Digest.parse(each["partial"]) for each in statuses if each["partial"])

    def _call(self, path: str, body: Any = None, timeout: float | None = None) -> None:
        """A step of an update. One that fails inside the server may leave its workers out of step."""
        try:
            self._server.post(path, body, timeout)
        except EngineRejected as error:
            if len(self._opened.ranks) > 1:
                self._break(f"{path} failed: {error}")
            raise

    def _break(self, problem: str) -> None:
        raise EngineBroken(f"{problem}; {self.address} stays paused: restart it", url=self.address)


def _state(fields: list[Any] | None) -> State | None:
    return None if fields is None else State(str(fields[0]), int(fields[1]), Digest.parse(fields[2]))


def _refuse(statuses: list[dict[str, Any]], what: str) -> None:
    for each in statuses:
        if each["error"]:
            raise EngineRejected(f"{what}: worker {each['rank']}: {each['error']}")
