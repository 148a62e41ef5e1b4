"""The engines that serve a run, as the trainer's process sees them: which version each serves, and nudges for new ones.

An engine on this machine is driven from here, by an agent in a thread. On other machines an agent runs next to the
engine; it is nudged after each version, and polled for what is served.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltawire.engines.agent import Agent
from deltawire.engines.engine import Engine
from deltawire.engines.server import Server
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.errors import DeltawireError
from deltawire.hosts import split_url
from deltawire.redact import redacted
from deltawire.run.run import Run
from deltawire.workers import Pool

# How often an agent on another machine is polled while it is behind.
ASK_SECONDS = 0.1
# How long a thread may take to end, and how long to wait at the end for an engine that does not respond.
END_SECONDS = 10.0
GRACE_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentAt:
    """An agent on another machine: `deltawire attach ... --listen HOST:PORT`.

    Args:
        url: Its HTTP address.
        token: With it, the agent is nudged when there is a new version. Without it, the agent finds new versions by
            polling, and is only queried for its status.
        timeout: Seconds to wait for a response.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known about one engine."""

    version: int | None = None
    """The version of this run that it serves, as it reports; None if unknown."""
    error: str | None = None
    """The last error, if it has not been resolved since."""
    pause_seconds: float | None = None
    """How long it was paused for the last update."""


EngineChoice = str | AgentAt | Engine


def named(engines: Sequence[EngineChoice]) -> dict[str, EngineChoice]:
    """Engines by their names in logs: usually host and port."""
    if isinstance(engines, str | AgentAt) or hasattr(engines, "commit"):
        kind = type(engines).__name__
        raise TypeError(f"engines must be a list, such as ['http://127.0.0.1:8000'], not {kind}")
    found: dict[str, EngineChoice] = {}
    for each in engines:
        address = _address_of(each)
        # Without the password that a URL may have.
        place = address.partition("://")[2].rpartition("@")[2].rstrip("/")
        name = re.sub(r"[^\w.:-]+", "-", place or address)
        if place and name in found:
            raise ValueError(f"the engine at {place} is listed twice: list it once")
        # Modules in this process may have the same name.
        found[name if name not in found else f"{name}-{len(found)}"] = each
    return found


def _address_of(engine: EngineChoice) -> str:
    if not isinstance(engine, str | AgentAt):
        if not hasattr(engine, "commit"):
            raise TypeError(f"an engine must be a server's URL, an AgentAt or an Engine, not {type(engine).__name__}")
        return engine.address
    url = engine if isinstance(engine, str) else engine.url
    if split_url(url).scheme not in ("http", "https") or not split_url(url).hostname:
        raise ValueError(f"expected a server's URL, such as http://127.0.0.1:8000, not {redacted(url)!r}")
    return redacted(url)


class Fleet:
    """Keeps engines at the newest version of a run, and tracks what each serves.

    Each has a thread of its own, so that one that hangs or is unavailable delays neither the others nor the trainer.
    """

    def __init__(
        self, run: Run, engines: Mapping[str, EngineChoice], *, mirrors: str | Path | None = None,
        public_key: str | None = None, poll_seconds: float = 1.0,
    ) -> None:  # fmt: skip
        self._changed = threading.Condition()
        self._connections: dict[str, _Here | _Elsewhere] = {}
        self._errors: dict[str, str | None] = {}
        try:
            for name, each in engines.items():
                if isinstance(each, AgentAt):
                    self._connections[name] = _Elsewhere(each, run.id, poll_seconds, self._notify)
                    continue
                folder = None if mirrors is None else Path(mirrors) / re.sub(r"\W+", "-", name)
                own = Run(run.store, public_key=public_key, expected=run.id)
                engine = VllmEngine(each) if isinstance(each, str) else each
                agent = Agent(engine, own, mirror=folder, poll_seconds=poll_seconds)
                self._connections[name] = _Here(agent, self._notify)
        except BaseException:
            self.close()
            raise

    def serving(self) -> dict[str, Serving]:
        return {name: each.serving() for name, each in self._connections.items()}

    def nudge(self, version: int) -> None:
        """Nudge all engines for a version; returns at once."""
        for each in self._connections.values():
            each.nudge(version)

    def wait(self, is_fine: Callable[[dict[str, Serving]], bool], seconds: float) -> bool:
        """Wait until `is_fine` accepts what is served, or the time is over; whether it does."""
        deadline = time.monotonic() + seconds
        while not is_fine(self.serving()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._changed:
                self._changed.wait(min(left, ASK_SECONDS))
        return True

    def catch_up(self, version: int, seconds: float) -> None:
        """Wait until the engines driven from here serve a version; not long for one that does not respond."""

        def is_there(name: str, each: Serving) -> bool:
            return self._connections[name].lasts or (each.version is not None and each.version >= version)

        def is_away(each: Serving) -> bool:
            return each.version is None and each.error is not None

        self.nudge(version)
        grace = min(seconds, GRACE_SECONDS)
        if self.wait(lambda serving: all(is_there(*each) for each in serving.items()), grace):
            return
        self.wait(lambda serving: all(is_there(*each) or is_away(each[1]) for each in serving.items()), seconds - grace)
        if left := {name: each for name, each in self.serving().items() if not is_there(name, each)}:
            _log.warning("training has ended, but these engines do not serve version %d: %s", version, left)

    def report(self) -> None:
        """Log which engines have failed or recovered since the last call."""
        for name, each in self.serving().items():
            before, self._errors[name] = self._errors.get(name), each.error
            if each.error is not None and before is None:
                _log.warning("the engine at %s is not following the run: %s", name, each.error)
            elif each.error is None and before is not None:
                _log.warning("the engine at %s follows the run again, and serves version %s", name, each.version)

    def close(self) -> None:
        with Pool(max(len(self._connections), 1)) as pool:
            list(pool.map(lambda each: each.close(), self._connections.values()))

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Here:
    """An engine on this machine, and the agent that drives it in a thread."""

    lasts = False
    """Whether the engine keeps following the run after `close`."""

    def __init__(self, agent: Agent, notify: Callable[[], None]) -> None:
        self.agent, self._notify = agent, notify
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltawire-agent", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.agent.run(lambda _: self._notify())
            except Exception:
                # It is in `replica.error` too. An unexpected error must not leave the engine without an agent.
                _log.exception("the agent of %s failed and will be restarted", self.agent.target.engine.address)
                self._stopped.wait(1.0)

    def nudge(self, version: int) -> None:
        self.agent.nudge()

    def serving(self) -> Serving:
        error = self.agent.replica.error
        return Serving(self.agent.version, None if error is None else str(error), self.agent.target.pause_seconds)

    def close(self) -> None:
        self._stopped.set()
        self.agent.stop()
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            address = self.agent.target.engine.address
            _log.warning("the agent of %s is still waiting for a response and is abandoned", address)
        else:
            self.agent.close()


class _Elsewhere:
    """An agent on another machine, nudged and polled from a thread."""

    lasts = True

    def __init__(self, place: AgentAt, run: str, poll_seconds: float, notify: Callable[[], None]) -> None:
        self._place, self._run, self._poll_seconds, self._notify = place, run, poll_seconds, notify
        self._server = Server(place.url.rstrip("/"), place.token, place.timeout)
        self._wanted, self._nudged = -1, -1
        self._now = Serving()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="deltawire-asks", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while True:
            last = self._stopped.is_set()
            self._now = self._ask()
            self._notify()
            if last:
                return
            now = self._now
            behind = now.version < self._wanted if now.version is not None else now.error is None
            self._wake.wait(min(ASK_SECONDS, self._poll_seconds) if behind else self._poll_seconds)
            self._wake.clear()

    def _ask(self) -> Serving:
        refused, wanted = None, self._wanted
        if self._place.token is not None and wanted > self._nudged:
            try:
                self._server.trigger("/nudge")
                self._nudged = wanted
            except DeltawireError as error:
                refused = str(error)
        try:
            status = self._server.get("/status")
            if status.get("run") not in (None, self._run):
                url = redacted(self._place.url)
                return Serving(None, f"the agent at {url} follows run {status['run']}, not {self._run}")
            version = None if status.get("run") is None else status.get("version")
            return Serving(version, status.get("error") or refused, status.get("pause_seconds"))
        except (DeltawireError, AttributeError) as error:
            return Serving(None, str(error))

    def nudge(self, version: int) -> None:
        self._wanted = version
        self._wake.set()

    def serving(self) -> Serving:
        return self._now

    def close(self) -> None:
        self._stopped.set()
        self._wake.set()
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            self._server.close()


def lowest(serving: Mapping[str, Serving]) -> int | None:
    """The version that every engine has reached; None if that of one is unknown."""
    known = [each.version for each in serving.values() if each.version is not None]
    return min(known) if known and len(known) == len(serving) else None


def flat(serving: Mapping[str, Serving]) -> dict[str, Any]:
    """The state of all engines as metrics, for W&B, TensorBoard and similar trackers."""
    numbers: dict[str, float | None] = {
        "engines/count": len(serving),
        "engines/unknown": sum(each.version is None for each in serving.values()),
        "engines/failing": sum(each.error is not None for each in serving.values()),
        "engines/version_min": lowest(serving),
    }
    for name, each in serving.items():
        numbers |= {f"engine/{name}/version": each.version, f"engine/{name}/pause_seconds": each.pause_seconds}
    return {f"deltawire/{name}": value for name, value in numbers.items() if value is not None}
