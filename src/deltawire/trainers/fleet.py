"""The engines that serve a run, as the trainer's process sees them: which version each one has, and word of new ones.

An engine on this machine is driven from here, by an agent in a thread. Elsewhere an agent runs beside it; that one is
told of each version and asked what is served.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from deltawire.agent import Agent
from deltawire.engines.engine import Engine
from deltawire.engines.server import Server
from deltawire.errors import DeltawireError
from deltawire.publication import Publication
from deltawire.redact import redacted
from deltawire.runs import Run

# How often an agent elsewhere is asked while it is behind.
ASK_SECONDS = 0.1
# How long a thread may take to end, and how long an engine that does not answer is waited for at the end.
END_SECONDS = 10.0
GRACE_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentAt:
    """An agent on another machine: `deltawire attach ... --listen HOST:PORT`.

    With its token it is nudged when there is a new version. Without, it finds that out by looking, and is only asked.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known of one engine."""

    version: int | None = None
    """The version of this run that it serves, in its own words; None where that is not known."""
    error: str | None = None
    """What went wrong last, if that has not gone well since."""
    pause_seconds: float | None = None
    """How long it was paused for the last update."""


class _Link(Protocol):
    """The way to one engine."""

    lasts: bool
    """Whether the engine goes on to follow the run after `close`."""

    def nudge(self, version: int) -> None: ...

    def serving(self) -> Serving: ...

    def close(self) -> None: ...


EngineChoice = str | AgentAt | Engine


def named(engines: Sequence[EngineChoice]) -> dict[str, EngineChoice]:
    """Engines by the names that they have in logs: hosts and ports, as a rule."""
    found: dict[str, EngineChoice] = {}
    for each in engines:
        address = _address_of(each)
        # Without the password that a URL may have.
        place = address.partition("://")[2].rpartition("@")[2].rstrip("/")
        name = re.sub(r"[^\w.:-]+", "-", place or address)
        if place and name in found:
            raise ValueError(f"the engine at {place} is there twice")
        # Modules in this process may be called the same.
        found[name if name not in found else f"{name}-{len(found)}"] = each
    return found


def _address_of(engine: EngineChoice) -> str:
    if not isinstance(engine, str | AgentAt):
        if not hasattr(engine, "switch"):
            raise TypeError(f"an engine is a server's URL, an AgentAt or an Engine, not {type(engine).__name__}")
        return engine.address
    url = engine if isinstance(engine, str) else engine.url
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"expected a server's URL, such as http://127.0.0.1:8000, not {redacted(url)!r}")
    return redacted(url)


class Fleet:
    """Keeps engines at the newest version of a run, and knows what each serves.

    Each has a thread of its own, so that one that hangs or is away keeps no other waiting, nor the trainer.
    """

    def __init__(
        self,
        run: Run,
        engines: Mapping[str, EngineChoice],
        *,
        mirrors: str | Path | None = None,
        public_key: str | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        self._changed = threading.Condition()
        self._links: dict[str, _Link] = {}
        self._errors: dict[str, str] = {}
        self._publications: queue.SimpleQueue[Publication | None] = queue.SimpleQueue()
        try:
            for name, each in engines.items():
                if isinstance(each, AgentAt):
                    self._links[name] = _Elsewhere(each, run.id, poll_seconds, self._notify)
                    continue
                folder = None if mirrors is None else Path(mirrors) / re.sub(r"\W+", "-", name)
                own = Run(run.store, public_key=public_key, expected=run.id)
                agent = Agent(_engine_of(each), own, mirror=folder, poll_seconds=poll_seconds)
                self._links[name] = _Here(agent, self._notify)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._tell, name="deltawire-nudges", daemon=True)
        self._thread.start()

    def serving(self) -> dict[str, Serving]:
        """What each engine serves, by its name."""
        return {name: link.serving() for name, link in self._links.items()}

    def follow(self, publication: Publication) -> None:
        """Tell all engines when this version is in the store."""
        self._publications.put(publication)

    def nudge(self, version: int) -> None:
        """Tell all engines of a version; returns at once."""
        for link in self._links.values():
            link.nudge(version)

    def wait(self, is_fine: Callable[[dict[str, Serving]], bool], seconds: float) -> bool:
        """Wait until what is served is fine, for so long at most; whether it is."""
        deadline = time.monotonic() + seconds
        while not is_fine(self.serving()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._changed:
                self._changed.wait(min(left, ASK_SECONDS))
        return True

    def settle(self, version: int, seconds: float) -> None:
        """Wait until engines that nobody else will bring there serve a version; not long where one does not answer."""

        def is_there(name: str, each: Serving) -> bool:
            return self._links[name].lasts or (each.version is not None and each.version >= version)

        def is_away(each: Serving) -> bool:
            return each.version is None and each.error is not None

        self.nudge(version)
        grace = min(seconds, GRACE_SECONDS)
        if self.wait(lambda serving: all(is_there(*each) for each in serving.items()), grace):
            return
        self.wait(lambda serving: all(is_there(*each) or is_away(each[1]) for each in serving.items()), seconds - grace)
        left = {name: each for name, each in self.serving().items() if not is_there(name, each)}
        if left:
            _log.warning("training ends, and these engines do not serve version %d: %s", version, left)

    def report(self) -> None:
        """Put into the log what has gone wrong with an engine, or well again, since this was last called."""
        for name, each in self.serving().items():
            before = self._errors.pop(name, None)
            if each.error is not None:
                self._errors[name] = each.error
            if each.error is not None and before is None:
                _log.warning("the engine at %s does not follow: %s", name, each.error)
            elif each.error is None and before is not None:
                _log.warning("the engine at %s follows again, and serves version %s", name, each.version)

    def close(self) -> None:
        """Leave the engines as they are."""
        self._publications.put(None)
        with ThreadPoolExecutor(max(len(self._links), 1)) as pool:
            list(pool.map(lambda link: link.close(), self._links.values()))

    def _tell(self) -> None:
        while (publication := self._publications.get()) is not None:
            # One that fails is for whoever published it.
            if publication.join():
                self.nudge(publication.version)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Here:
    """An engine on this machine, and the agent that drives it in a thread."""

    lasts = False

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
                # It is in `replica.error` too. What an agent did not expect must not leave the engine without one.
                _log.exception("the agent of %s failed, and is started again", self.agent.target.engine.address)
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
            _log.warning("the agent of %s waits for an answer, and is left", self.agent.target.engine.address)
        else:
            self.agent.close()


class _Elsewhere:
    """An agent on another machine, which a thread tells and asks."""

    lasts = True

    def __init__(self, place: AgentAt, run: str, poll_seconds: float, notify: Callable[[], None]) -> None:
        self._place, self._run, self._poll_seconds, self._notify = place, run, poll_seconds, notify
        self._server = Server(place.url.rstrip("/"), place.token, place.timeout)
        self._wanted, self._told = -1, -1
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
        try:
            refused = self._tell()
            status = self._server.get("/status")
            error = status.get("error")
            if status.get("run") not in (None, self._run):
                return Serving(
                    None, f"the agent at {redacted(self._place.url)} follows run {status['run']}, not {self._run}"
                )
            version = None if status.get("run") is None else status.get("version")
            return Serving(version, error or refused, status.get("pause_seconds"))
        except (DeltawireError, AttributeError) as error:
            return Serving(None, str(error))

    def _tell(self) -> str | None:
        """Nudge the agent, where there is something new; why that was refused, if it was."""
        wanted = self._wanted
        if self._place.token is None or wanted <= self._told:
            return None
        try:
            self._server.tell("/nudge")
        except DeltawireError as error:
            return str(error)
        self._told = wanted
        return None

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


def _engine_of(choice: str | Engine) -> Engine:
    if not isinstance(choice, str):
        return choice
    from deltawire.engines.vllm.client import VllmEngine

    return VllmEngine(choice)


def lowest(serving: Mapping[str, Serving]) -> int | None:
    """The version that every engine has reached; None where that is not known of one."""
    versions = [each.version for each in serving.values()]
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def flat(serving: Mapping[str, Serving]) -> dict[str, Any]:
    """Numbers for a run tracker."""
    numbers: dict[str, float | None] = {
        "engines/count": len(serving),
        "engines/unknown": sum(each.version is None for each in serving.values()),
        "engines/failing": sum(each.error is not None for each in serving.values()),
        "engines/version_min": lowest(serving),
    }
    for name, each in serving.items():
        numbers |= {f"engine/{name}/version": each.version, f"engine/{name}/pause_seconds": each.pause_seconds}
    return {f"deltawire/{name}": value for name, value in numbers.items() if value is not None}
