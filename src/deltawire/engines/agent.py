"""Runs next to an inference engine: keeps it at the newest version of a run, and reports its state over HTTP.

`GET /health` returns 200 if the engine serves weights that are known and current, or being updated, and 503 otherwise.
`GET /status` returns the agent's state as JSON, `GET /metrics` the metrics for Prometheus. `POST /nudge` makes it poll
the store at once, and needs the header `Authorization: Bearer TOKEN`. Requests for other host names get 400.
"""

import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deltawire.engines.engine import Engine
from deltawire.engines.target import EngineTarget
from deltawire.errors import MissingDependency
from deltawire.follow.pull import Pull
from deltawire.follow.replica import Replica
from deltawire.follow.target import Target
from deltawire.hosts import answered_hosts, listen, web_server
from deltawire.metrics import registry
from deltawire.redact import redacted
from deltawire.run.run import Run
from deltawire.store import Store

if TYPE_CHECKING:
    from starlette.applications import Starlette

OnPull = Callable[[Pull], None]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine serves the right weights, and if not, why."""

    ok: bool
    reason: str
    error: str | None = None
    """The name of the error, if there is one: `EngineUnavailable`, `EngineBroken`, `StoreUnavailable`, ..."""
    version: int | None = None
    lag: int | None = None


class Agent(AbstractContextManager["Agent"]):
    """Keeps an engine at the newest version of a run, until `stop` is called.

    Deltas are fetched and decoded against the mirror while the engine serves. While the engine or the store is
    unavailable, the agent keeps trying.

    Args:
        engine: The engine to update: `TorchEngine`, `VllmEngine`, `SglangEngine`, or any other `Engine`.
        store: A URL, a path, a `Store`, or a `Run`.
        mirror: A folder or a target for the mirror. False for none: then the engine must be able to decode deltas. By
            default none if the engine can decode on a GPU, and otherwise one in host memory.
        name: The name of the replica in heartbeats and metrics.
        public_key: The key that `deltawire keygen` printed; documents of the run must be signed with its private key.
        run: The only run id to accept; any by default.
        base: A local checkpoint, such as the model that the run started from: a mirror starts from it instead of
            fetching an anchor.
        scratch: A folder for downloads.
        poll_seconds: How often to look for a new version; up to 10 times less often while none is due.
        host: The address to listen on.
        port: Serve HTTP on this port, from a thread; 0 picks a free one. `None`: no HTTP.
        token: The secret that a nudge over HTTP must carry; without one, nudges are refused.
        allowed_hosts: Host names to accept in HTTP requests, in addition to those of `host`.
        heartbeat_seconds: How often to write a heartbeat into the store; `None` for never.

    Raises:
        AddressUnavailable: The port is taken, or the address is not one of this machine.
        MissingDependency: A port was given, but `deltawire[agent]` is not installed.

    >>> with Agent(TorchEngine(model), "s3://bucket/run") as agent, agent.running():  # doctest: +SKIP
    ...     agent.wait(0)
    """

    def __init__(
        self,
        engine: Engine,
        store: str | Path | Store | Run,
        *,
        mirror: str | Path | Target | Literal[False] | None = None,
        name: str | None = None,
        public_key: str | None = None,
        run: str | None = None,
        base: str | Path | None = None,
        scratch: str | Path | None = None,
        poll_seconds: float = 1.0,
        host: str = "127.0.0.1",
        port: int | None = None,
        token: str | None = None,
        allowed_hosts: Sequence[str] = (),
        heartbeat_seconds: float | None = 15.0,
    ) -> None:
        if poll_seconds <= 0:
            raise ValueError(f"poll_seconds must be a positive number, not {poll_seconds}")
        if token is not None and not token.strip():
            raise ValueError("the token is empty: give one, or leave it out to refuse nudges")
        self._poll_seconds = poll_seconds
        self._started = time.monotonic()
        # As from a file or a variable that ends with a newline, which no header has.
        token = None if token is None else token.strip()
        application = None if port is None else _application(self, token, answered_hosts(host, allowed_hosts))
        with ExitStack() as undo:
            listening = None if port is None else undo.enter_context(listen(host, port))
            self.target = EngineTarget(engine, mirror)
            if self.target.mirror is not None:
                undo.callback(self.target.mirror.close)
            self.replica = Replica(
                store, self.target, name=name, public_key=public_key, run=run,
                heartbeat_seconds=heartbeat_seconds, base=base, scratch=scratch,
            )  # fmt: skip
            undo.pop_all()
        self._http = None if application is None or listening is None else _Http(application, listening)

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def port(self) -> int | None:
        """The port of its HTTP server, if it has one."""
        return None if self._http is None else self._http.port

    @property
    def version(self) -> int | None:
        """The version that the engine serves, as of its last report."""
        return self.replica.version

    def run(self, on_pull: OnPull | None = None) -> None:
        """Keep the engine current until `stop` is called."""
        self.replica.watch(on_pull, poll_seconds=self._poll_seconds)

    def running(self, on_pull: OnPull | None = None) -> AbstractContextManager[None]:
        """Run `run` in a thread for the duration of a `with` block."""
        return self.replica.watching(on_pull, poll_seconds=self._poll_seconds)

    def nudge(self) -> None:
        """Look for a new version now."""
        self.replica.nudge()

    def stop(self) -> None:
        """End `run` after the current update."""
        self.replica.stop()

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until the engine serves a version or a later one.

        Args:
            version: The version to wait for.
            timeout: Seconds to wait; no limit by default.

        Returns:
            The version that the engine serves.

        Raises:
            TimeoutError: It took longer than `timeout`.
        """
        return self.replica.wait(version, timeout)

    def health(self) -> Health:
        """Whether the engine serves the right weights, as of the last poll of the engine and of the store."""
        version, lag, error = self.version, self.replica.lag, self.replica.error
        if error is not None:
            return Health(False, str(error), type(error).__name__, version, lag)
        if not self.replica.is_watched:
            return Health(False, "the agent is not running", None, version, lag)
        if self.replica.latest is None:
            return Health(False, "no version has been seen in the store yet", None, version, lag)
        if version is None or lag is None:
            return Health(False, "the engine's weights are not known yet: it is being updated")
        return Health(True, f"{lag} behind, being updated" if lag else "current", None, version, lag)

    def status(self) -> dict[str, Any]:
        """The state of the agent: version, digest, lag, the engine, timings, the last fault."""
        return {
            "name": self.name,
            "run": self.replica.run.known_id,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            **self.replica.status(),
        }

    def close(self) -> None:
        """Stop, and release the port, the mirror and the engine. The engine keeps serving its weights."""
        self.stop()
        if self._http is not None:
            self._http.close()
        self.replica.close()

    def __repr__(self) -> str:
        url = redacted(self.replica.run.store.url)
        return f"Agent({redacted(self.target.engine.address)!r}, {url!r}, version={self.version})"

    def __exit__(self, *_: object) -> None:
        self.close()


class _Http:
    """A web application, served from a thread."""

    def __init__(self, application: "Starlette", listening: socket.socket) -> None:
        self.port: int = listening.getsockname()[1]
        self._server = web_server(application, grace_seconds=5)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="deltawire-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def _application(agent: Agent, token: str | None, hosts: list[str]) -> "Starlette":
    try:
        import prometheus_client
        import uvicorn  # noqa: F401
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise MissingDependency("the agent's HTTP server needs more packages: pip install 'deltawire[agent]'") from None

    def health(_: Request) -> Response:
        found = agent.health()
        return JSONResponse(asdict(found), 200 if found.ok else 503)

    def status(_: Request) -> Response:
        return JSONResponse(agent.status())

    def metrics(_: Request) -> Response:
        text = prometheus_client.generate_latest(registry(agent.replica))
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def nudge(request: Request) -> Response:
        if token is None:
            refusal = "this agent has no token: start it with --token-file, DELTAWIRE_TOKEN or Agent(token=...)"
            return JSONResponse({"error": refusal}, 403)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), token.encode()):
            refusal = "a nudge needs the header Authorization: Bearer TOKEN, with the agent's token"
            return JSONResponse({"error": refusal}, 401, {"WWW-Authenticate": "Bearer"})
        agent.nudge()
        return JSONResponse({"accepted": True, "version": agent.version}, 202)

    # Plain functions, which run in threads: the first metrics may have to read the run's name from the store.
    routes = [
        Route("/health", health),
        Route("/status", status),
        Route("/metrics", metrics),
        Route("/nudge", nudge, methods=["POST"]),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return Starlette(routes=routes, middleware=[guard])
