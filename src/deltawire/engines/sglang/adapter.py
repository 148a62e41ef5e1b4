"""An SGLang server as an engine, driven over HTTP by the agent on its machine.

Two modes, neither of which needs a fork:

patch   changes are written into the live weights by `loader`, which the server is started with. They reach it as files
        in a folder that agent and server both see, by default in shared memory.
disk    the server loads all weights from the mirror's folder, by `/update_weights_from_disk`.

SGLang does not say when it was started, so a restart shows otherwise. With `patch` each rank holds a lock on a file for
as long as it lives. With `disk` the server has forgotten the version that it was given.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from deltawire.engines.engine import EngineChange, EngineDelta, Served
from deltawire.engines.http_engine import HttpEngine, refuse, spec_fields
from deltawire.engines.sglang.ranks import Ranks
from deltawire.engines.sglang.releases import About, about
from deltawire.errors import EngineBroken, EngineRejected
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.weights import TensorSpec, Weights

MODES = ("patch", "disk")


class SglangEngine(HttpEngine):
    """Keeps an SGLang server's weights current while it serves.

    With `mode="patch"` all weights are verified in the server's memory. With `mode="disk"` SGLang's word is taken that
    it has loaded the folder, whose content is verified; its own checksum then shows whether someone else changes them.
    Other options are those of `HttpEngine`.
    """

    kind = "sglang"
    # What SGLang calls it: requests wait with what was computed for them, or go back to the queue without it, or end.
    pauses: ClassVar = {"recompute": "retract", "keep": "in_place", "abort": "abort"}

    def __init__(self, url: str, *, mode: str = "patch", **options: Any) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        super().__init__(url, **options)
        self.in_place = mode == "patch"
        self._ranks = Ranks(self._server, self._shared, self._load_timeout) if self.in_place else None
        self._about = About()
        self._paused = False
        """The server may be paused because of this agent."""
        self._mixed = False
        """The server's weights may be a mix."""
        self._loaded: tuple[str | None, WeightVersion] | None = None
        """With `disk`: the server's checksum when it had loaded these weights."""

    def status(self) -> Served:
        """Costs one request that no rank hears of, except once after each start of the server or of the agent."""
        if self._ranks is not None and self._ranks.statuses() is None:
            self._about = self._ranks.connect()
            with self._held():
                refuse(self._ranks.order("status"), "the server cannot be driven")
        served = self._served()
        if self._paused and not served.interrupted:
            self._resume()
        return served

    def _served(self) -> Served:
        version: str | None = self._server.get("/model_info").get("weight_version")
        if self._ranks is None:
            state = None if self._loaded is None else self._loaded[1]
            known = state is not None and version == str(state.version)
            return Served("", (state if known else None,), version, interrupted=self._mixed)
        statuses = self._ranks.statuses() or []
        states = tuple(WeightVersion.parse(each["state"]) for each in statuses) or (None,)
        # Weights are written first, and named then.
        unnamed = states[0] is not None and version != str(states[0].version)
        busy, boot = any(each["busy"] for each in statuses), "-".join(each["boot"] for each in statuses)
        return Served(boot, states, version, interrupted=busy or unnamed or self._mixed)

    def bind(self, specs: Mapping[str, TensorSpec]) -> None:
        if self._ranks is None:
            return
        with self._held():
            self._find(self._ranks, specs)

    def _find(self, ranks: Ranks, specs: Mapping[str, TensorSpec]) -> None:
        answers = ranks.order("bind", specs=spec_fields(specs))
        refuse(answers, "the server's weights cannot be changed in place")
        self._set_layout(specs, [each["result"] for each in answers])

    def digest(self) -> Digest:
        if self._ranks is None:
            checksum = self._checksum()
            known = self._loaded is not None and checksum is not None and checksum == self._loaded[0]
            # Of weights that nobody knows, this is not the digest.
            return self._loaded[1].digest if self._loaded is not None and known else Digest()
        with self._held():
            return self._measure(self._ranks)

    def _measure(self, ranks: Ranks) -> Digest:
        numbers = [{"numbers": self._bound.measured(rank)} for rank in range(ranks.number)]
        return self._measured(ranks.order("measure", numbers))

    def stage(self, change: EngineChange | EngineDelta) -> None:
        if isinstance(change, EngineDelta):
            raise EngineRejected("SGLang's ranks cannot decode deltas: use a mirror")
        ranks, token = self._patched, token_hex(8)
        with self._shared.change(change, self._bound, token) as paths:
            with self._held():
                call = ranks.send("stage", [{"path": str(path)} for path in paths])
            refuse(ranks.answers(call), "nothing was changed")
        self._token = token

    def commit(self, change: EngineChange | EngineDelta) -> float:
        ranks, token = self._patched, self._take_token(change)
        started = self._pause_and_flush()
        try:
            with self._session():
                problem = self._write(ranks, token, change.state)
                if problem is not None:
                    problem = self._write(ranks, token, change.state)
                failed = problem is not None and self._write(ranks, token, change.base, undo=True)
        except EngineRejected:
            self._resume_if_sound()
            raise
        if failed:
            raise self._broken(f"the update failed ({problem}) and could not be rolled back ({failed})")
        seconds = self._go_on(change.base if problem else change.state, started)
        if problem is not None:
            raise EngineRejected(f"the update to version {change.state.version} was rolled back: {problem}")
        return seconds

    def _write(self, ranks: Ranks, token: str, state: WeightVersion, undo: bool = False) -> str | None:
        """Why the ranks are not at a version that they were to write, if they are not."""
        try:
            answers = ranks.order("write", token=token, undo=undo)
        except EngineRejected as error:
            return str(error)
        problem = self._problem(answers, state.digest)
        if problem is not None and all(each.get("staged", token) != token for each in answers):
            # None of them has written anything: the server was restarted since, or another agent has dropped it.
            raise EngineRejected(f"nothing was changed: {problem}")
        return problem

    def load(self, weights: Weights, folder: Path | None, state: WeightVersion) -> float:
        if folder is None and self._ranks is None:
            raise EngineRejected("mode 'disk' needs a mirror in a folder that the server can read, not in memory")
        with self._shared.checkpoint(weights, folder, state) as source:
            return self._load(source, state)

    def _load(self, folder: Path, state: WeightVersion) -> float:
        if self._ranks is None:
            # It may be another server than at the last load.
            self._about = about(self._server.get("/server_info"))
        before, was = self._mark(), self._served().state
        started = self._pause_and_flush()
        try:
            self._begin()
            body = {"model_path": str(folder), "flush_cache": False, "abort_all_requests": False}
            self._step("/update_weights_from_disk", body, self._load_timeout)
            problem = self._loaded_problem(state)
        except EngineRejected as error:
            if not self._is_still(before):
                raise self._broken(f"version {state.version} could not be loaded: {error}") from error
            self._end(was)
            self._resume()
            raise EngineRejected(f"nothing was changed: version {state.version} cannot be loaded: {error}") from error
        if problem is not None:
            raise self._broken(f"version {state.version} was loaded, and {problem}")
        self._end(state)
        return self._go_on(state, started)

    def _loaded_problem(self, state: WeightVersion) -> str | None:
        """Why what SGLang has loaded is not a version, as far as that can be known."""
        if self._ranks is None:
            return None
        with self._session():
            # Loading may have put the weights elsewhere.
            self._find(self._ranks, self._bound.specs)
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
                refuse(self._ranks.order("begin"), "nothing was changed")

    def _end(self, state: WeightVersion | None) -> None:
        if self._ranks is None:
            self._loaded = None if state is None else (self._checksum(), state)
        else:
            with self._session():
                answers = self._ranks.order("mark", state=None if state is None else state.as_dict())
            refuse(answers, "the version could not be set")
        self._mixed = False

    def mark(self, state: WeightVersion) -> None:
        self._pause("in_place")
        self._end(state)
        self._name(state)
        self._resume()

    @property
    def _patched(self) -> Ranks:
        if self._ranks is None:
            raise EngineRejected("mode 'disk' loads all weights and changes none in place")
        return self._ranks

    def _checksum(self) -> str | None:
        """SGLang's own checksum of all parameters in all ranks."""
        try:
            answer = self._server.post("/weights_checker", {"action": "checksum"}, self._load_timeout)
        except EngineRejected:
            return None
        info = {key: value for key, value in answer.items() if key not in ("success", "message")}
        return sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()

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
        if not self._about.has_sessions:
            yield
            return
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
        self._server.trigger("/pause_generation", {"mode": mode})

    def _pause_and_flush(self) -> float:
        """Pause as the user wants it; the moment when that began.

        The cache is emptied before anything is written: asked to do it afterwards, SGLang ends when it cannot.
        """
        started = time.perf_counter()
        self._pause(self.pauses[self._running_requests])
        server = self._about
        # Since it has sessions, the cache can be emptied while requests that were retracted wait.
        refuses = not server.has_sessions
        if self._running_requests == "keep" or (refuses and not server.keeps_prefixes):
            return started
        try:
            self._server.trigger("/flush_cache", {})
        except EngineRejected as error:
            self._resume_if_sound()
            hint = f". SGLang {server.version} does not empty it while requests wait: see the guide" if refuses else ""
            raise EngineRejected(f"nothing was changed: the cache cannot be emptied: {error}{hint}") from error
        return started

    def _go_on(self, state: WeightVersion, started: float) -> float:
        """Set the version and resume; the seconds since the pause began."""
        self._name(state)
        self._mixed = False
        self._resume()
        return time.perf_counter() - started

    def _name(self, state: WeightVersion) -> None:
        self._step("/update_weight_version", {"new_version": str(state.version), "abort_all_requests": False})

    def _resume(self) -> None:
        self._server.trigger("/continue_generation", {})
        self._paused = False

    def _resume_if_sound(self) -> None:
        if not self._served().interrupted:
            self._resume()

    def _step(self, path: str, body: Any, timeout: float | None = None) -> None:
        answer = self._server.post(path, body, timeout)
        if not answer.get("success", True):
            raise EngineRejected(f"{self.address} refused {path}: {answer.get('message')}")

    def _broken(self, problem: str) -> EngineBroken:
        try:
            # An agent that comes after this one has to know.
            self._begin()
        except EngineRejected as error:
            problem = f"{problem}; {error}"
        return super()._broken(problem)
