"""An SGLang server as an engine, driven over HTTP from the agent beside it.

Two ways, neither of which needs a fork:

patch   changes are written into the live weights by `loader`, which the server is started with. They come as files in
        a folder that agent and server both see, by default in shared memory.
disk    the server loads all weights anew from the mirror's folder, by `/update_weights_from_disk`.

SGLang has no word for "who are you", so a restart shows otherwise. By the way `patch` each rank holds a lock on a file
for as long as it lives. By the way `disk` the server has forgotten the version that it was told.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from deltawire.engines.engine import Change, Engine, Served
from deltawire.engines.layout import Layout, Piece
from deltawire.engines.server import Server
from deltawire.engines.sglang.ranks import Ranks
from deltawire.engines.stage import Stage
from deltawire.engines.staged import parse_state, state_text
from deltawire.errors import EngineBroken, EngineRejected
from deltawire.redact import redacted
from deltawire.state import Digest
from deltawire.target import State
from deltawire.weights import Form, Weights

# What SGLang calls the ways to hold requests: they wait as they are, with what was computed for them (in_place), or go
# back to the queue without it (retract), or end.
PAUSES = {"recompute": "retract", "keep": "in_place", "abort": "abort"}
WAYS = ("patch", "disk")


class SglangEngine(Engine):
    """Keeps an SGLang server's weights current while it serves.

    `kv` says what becomes of running requests: `recompute` (default) computes their context again under the new
    weights, `keep` goes on from what the old weights computed, prefix cache included, `abort` ends them.

    By the way `patch`, all weights are verified in the server's memory. By the way `disk` SGLang's word is taken that
    it has loaded the folder, whose content is verified; its own checksum then tells whether someone else changes them.
    """

    kind = "sglang"

    def __init__(
        self,
        url: str,
        *,
        way: str = "patch",
        stage: str | Path | None = None,
        kv: str = "recompute",
        api_key: str | None = None,
        timeout: float = 60.0,
        load_timeout: float = 3600.0,
    ) -> None:
        if kv not in PAUSES:
            raise ValueError(f"kv is one of {', '.join(PAUSES)}, not {kv!r}")
        if way not in WAYS:
            raise ValueError(f"way is one of {', '.join(WAYS)}, not {way!r}")
        self.address = redacted(url.rstrip("/"))
        self.in_place = way == "patch"
        self._server = Server(url.rstrip("/"), api_key, timeout)
        self._stage = Stage(stage, self.address)
        self._ranks = Ranks(self._server, self._stage, load_timeout) if self.in_place else None
        self._kv, self._load_timeout = kv, load_timeout
        self._layout: Layout | None = None
        self._token: str | None = None
        self._paused = False
        """The server may be paused because of this agent."""
        self._mixed = False
        """The server's weights may be a mix."""
        self._loaded: tuple[str | None, State] | None = None
        """By the way `disk`: the server's checksum when it had loaded these weights."""

    def look(self) -> Served:
        """Costs one request that no rank hears of, except once after each start of the server or of the agent."""
        version = self._version()
        if self._ranks is not None and self._ranks.statuses() is None:
            self._ranks.connect()
            with self._held():
                _refuse(self._ranks.order("status"), "the server cannot be driven")
        served = self._served(version)
        if self._paused and not served.interrupted:
            self._resume()
        return served

    def _version(self) -> str | None:
        version: str | None = self._server.get("/model_info").get("weight_version")
        return version

    def _served(self, version: str | None) -> Served:
        if self._ranks is None:
            state = None if self._loaded is None else self._loaded[1]
            known = state is not None and version == str(state.version)
            return Served("", (state if known else None,), version, interrupted=self._mixed)
        statuses = self._ranks.statuses() or []
        states = tuple(_state(each) for each in statuses) or (None,)
        # Weights are written first, and named then.
        unnamed = states[0] is not None and version != str(states[0].version)
        busy = any(each["busy"] for each in statuses)
        return Served(
            "-".join(each["boot"] for each in statuses), states, version, interrupted=busy or unnamed or self._mixed
        )

    def open(self, forms: Mapping[str, Form]) -> None:
        if self._ranks is None:
            return
        with self._held():
            self._find(self._ranks, forms)

    def _find(self, ranks: Ranks, forms: Mapping[str, Form]) -> None:
        fields = {name: [dtype, list(shape)] for name, (dtype, shape) in forms.items()}
        answers = ranks.order("open", [{"forms": fields}] * ranks.number)
        _refuse(answers, "the server's weights cannot be changed in place")
        self._layout = Layout(forms, [[Piece.from_list(each) for each in answer["result"]] for answer in answers])

    def digest(self) -> Digest:
        if self._ranks is None:
            checksum = self._checksum()
            known = self._loaded is not None and checksum is not None and checksum == self._loaded[0]
            # Of weights that nobody knows, this is not the digest.
            return self._loaded[1].digest if self._loaded is not None and known else Digest()
        with self._held():
            return self._measure(self._ranks)

    def _measure(self, ranks: Ranks) -> Digest:
        layout = self._opened
        answers = ranks.order("measure", [{"numbers": layout.measured(rank)} for rank in range(ranks.number)])
        _refuse(answers, "the server's weights could not be read")
        # Where ranks differ in what they should share, these are the weights of no version.
        return self._total(answers) if layout.alike(each["result"] for each in answers) else Digest()

    def stage(self, change: Change) -> None:
        ranks, token = self._patched, token_hex(8)
        with self._stage.change(change, self._opened, token) as paths:
            with self._held():
                call = ranks.send("stage", [{"path": str(path)} for path in paths])
            _refuse(ranks.answers(call), "nothing was changed")
        self._token = token

    def switch(self, change: Change) -> float:
        ranks, token, self._token = self._patched, self._token, None
        if token is None:
            raise EngineRejected(f"the change to version {change.state.version} is not staged")
        started = self._pause_and_flush()
        with self._session():
            problem = self._write(ranks, token, change.state)
            if problem is not None:
                problem = self._write(ranks, token, change.state)
            failed = problem is not None and self._write(ranks, token, change.base, undo=True)
        if failed:
            self._break(f"the update failed ({problem}) and could not be taken back ({failed})")
        seconds = self._go_on(change.base if problem else change.state, started)
        if problem is not None:
            raise EngineRejected(f"the update to version {change.state.version} was taken back: {problem}")
        return seconds

    def _write(self, ranks: Ranks, token: str, state: State, undo: bool = False) -> str | None:
        """Why the ranks are not at a state that they were to write, if they are not."""
        try:
            answers = ranks.order("write", [{"token": token, "undo": undo}] * ranks.number)
        except EngineRejected as error:
            return str(error)
        for each in answers:
            if each["error"]:
                return f"rank {each['rank']}: {each['error']['message']}"
        found = self._total(answers)
        return None if found == state.digest else f"the weights have digest {found}, not {state.digest}"

    def load(self, weights: Weights, folder: Path | None, state: State) -> float:
        if folder is None and self._ranks is None:
            raise EngineRejected("the way 'disk' needs a mirror in a folder that the server sees, not in memory")
        with self._stage.checkpoint(weights, folder, state) as source:
            return self._load(source, state)

    def _load(self, folder: Path, state: State) -> float:
        before, was = self._mark(), self._served(self._version()).state
        started = self._pause_and_flush()
        try:
            self._begin()
            body = {"model_path": str(folder), "flush_cache": False, "abort_all_requests": False}
            self._step("/update_weights_from_disk", body, self._load_timeout)
            problem = self._loaded_problem(state)
        except EngineRejected as error:
            if not self._is_still(before):
                self._break(f"version {state.version} could not be loaded: {error}")
            self._end(was)
            self._resume()
            raise EngineRejected(f"nothing was changed, version {state.version} cannot be loaded: {error}") from error
        if problem is not None:
            self._break(f"version {state.version} was loaded, and {problem}")
        self._end(state)
        return self._go_on(state, started)

    def _loaded_problem(self, state: State) -> str | None:
        """Why what SGLang has loaded is not a state, as far as that can be known."""
        if self._ranks is None:
            return None
        with self._session():
            # Loading may have put the weights elsewhere.
            self._find(self._ranks, self._opened.forms)
            found = self._measure(self._ranks)
        return None if found == state.digest else f"the weights have digest {found}, not {state.digest}"

    def _is_still(self, before: Any) -> bool:
        try:
            return before is not None and bool(self._mark() == before)
        except EngineRejected:
            return False

    def _mark(self) -> Any:
        """What changes when weights do."""
        return self._checksum() if self._ranks is None else self.digest()

    def _begin(self) -> None:
        self._mixed, self._loaded = True, None
        if self._ranks is not None:
            with self._session():
                _refuse(self._ranks.order("begin"), "nothing was changed")

    def _end(self, state: State | None) -> None:
        if self._ranks is None:
            self._loaded = None if state is None else (self._checksum(), state)
        else:
            with self._session():
                answers = self._ranks.order("adopt", [{"state": state_text(state)}] * self._ranks.number)
            _refuse(answers, "the version could not be told")
        self._mixed = False

    def adopt(self, state: State) -> None:
        self._pause("in_place")
        self._end(state)
        self._name(state)
        self._resume()

    def close(self) -> None:
        self._server.close()
        self._stage.close()

    @property
    def _patched(self) -> Ranks:
        if self._ranks is None:
            raise EngineRejected("by the way 'disk' all weights are loaded, none are changed in place")
        return self._ranks

    @property
    def _opened(self) -> Layout:
        if self._layout is None:
            raise EngineRejected("the tensors are not known yet: open the engine first")
        return self._layout

    def _total(self, answers: list[dict[str, Any]]) -> Digest:
        return self._opened.total(Digest.parse(each["partial"]) for each in answers if each["partial"])

    def _checksum(self) -> str | None:
        """SGLang's own checksum of all parameters in all ranks."""
        try:
            answer = self._server.post("/weights_checker", {"action": "checksum"}, self._load_timeout)
        except EngineRejected:
            return None
        facts = {key: value for key, value in answer.items() if key not in ("success", "message")}
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """A session in which no weights change: requests wait as they are. A server that serves would first let all of
        them end.
        """
        self._pause("in_place")
        try:
            with self._session():
                yield
        finally:
            self._resume_if_sound()

    @contextmanager
    def _session(self) -> Iterator[None]:
        try:
            self._step("/begin_weight_update", {"selector": "target"})
        except EngineRejected:
            # An agent before this one may have begun one, and not lived to end it.
            self._step("/end_weight_update", {})
            self._step("/begin_weight_update", {"selector": "target"})
        try:
            yield
        finally:
            self._step("/end_weight_update", {})

    def _pause(self, mode: str) -> None:
        self._paused = True
        self._server.tell("/pause_generation", {"mode": mode})

    def _pause_and_flush(self) -> float:
        """Pause as the user wants it; the moment when that began.

        The cache is emptied before anything is written: asked to do it afterwards, SGLang ends when it cannot.
        """
        started = time.perf_counter()
        self._pause(PAUSES[self._kv])
        if self._kv != "keep":
            try:
                self._server.tell("/flush_cache", {})
            except EngineRejected as error:
                self._resume_if_sound()
                raise EngineRejected(f"nothing was changed, the cache cannot be emptied: {error}") from error
        return started

    def _go_on(self, state: State, started: float) -> float:
        """Tell the version and resume; the seconds since the pause began."""
        self._name(state)
        self._mixed = False
        self._resume()
        return time.perf_counter() - started

    def _name(self, state: State) -> None:
        self._step("/update_weight_version", {"new_version": str(state.version), "abort_all_requests": False})

    def _resume(self) -> None:
        self._server.tell("/continue_generation", {})
        self._paused = False

    def _resume_if_sound(self) -> None:
        if not self._served(self._version()).interrupted:
            self._resume()

    def _step(self, path: str, body: Any, timeout: float | None = None) -> None:
        answer = self._server.post(path, body, timeout)
        if not answer.get("success", True):
            raise EngineRejected(f"{self.address} refused {path}: {answer.get('message')}")

    def _break(self, problem: str) -> None:
        try:
            # An agent that comes after this one has to know.
            self._begin()
        except EngineRejected as error:
            problem = f"{problem}; {error}"
        raise EngineBroken(f"{problem}; {self.address} stays paused: restart it", url=self.address)


def _state(status: Mapping[str, Any]) -> State | None:
    found: State | None = parse_state(json.dumps(status["state"]))
    return found


def _refuse(answers: list[dict[str, Any]], what: str) -> None:
    for each in answers:
        if each["error"]:
            tensor = each["error"]["tensor"]
            raise EngineRejected(
                f"{what}: rank {each['rank']}: {each['error']['message']}", **({"tensor": tensor} if tensor else {})
            )
