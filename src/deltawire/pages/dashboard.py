"""The dashboard of a run: a page that is kept up to date by server-sent events, and the same data as JSON.

    GET /                     the page
    GET /api/events           the state whenever it changes, and records as they are read; resumes at Last-Event-ID
    GET /api/state            the store, the replicas, how much was read
    GET /api/versions         a page of versions: ?after=VERSION&limit=N
    GET /api/steps            a page of training steps from the event log: ?after=STEP&limit=N
    GET /api/chain            a page of the hops, and what gc would remove: ?after=VERSION&limit=N
    GET /api/anatomy/VERSION  the contents of a delta; ?base=VERSION for a skip delta

It only reads, and has no login: anyone who can reach it can see it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltawire.errors import DeltawireError, MissingDependency, ObjectMissing, StoreUnavailable
from deltawire.hosts import answered_hosts, listen, web_server
from deltawire.pages.anatomy import Anatomies, Chain
from deltawire.pages.feed import Feed, Polling
from deltawire.pages.versions import Window

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

STATIC = Path(__file__).parent / "static"
DEFAULT_LIMIT, MOST_LIMIT = 200, 1000
RECORDS_PER_EVENT = 500
LISTEN_SECONDS, TICK_SECONDS = 0.1, 1.0

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def application(feed: Feed, is_stopping: Callable[[], bool], *, hosts: list[str]) -> "Starlette":
    """The web application, which accepts requests for `hosts` only."""
    try:
        import uvicorn  # noqa: F401
        from starlette.applications import Starlette
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles
    except ImportError:
        raise MissingDependency("the dashboard needs packages: pip install 'deltawire[dashboard]'") from None

    anatomies, chain = Anatomies(feed.store, feed.public_key), Chain(feed.store, feed.public_key)

    def answered(work: Callable[[Request], dict[str, Any]]) -> Callable[[Request], Response]:
        """Wrap a function of a request: its result becomes JSON, its exception an error status."""

        def answer(request: Request) -> Response:
            try:
                return JSONResponse(work(request))
            except (ValueError, DeltawireError) as error:
                statuses = {ValueError: 400, ObjectMissing: 404, StoreUnavailable: 503}
                status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 502)
                return JSONResponse({"error": str(error)}, status)

        return answer

    def anatomy(request: Request) -> dict[str, Any]:
        return anatomies.of(request.path_params["version"], whole(request, "base", None))

    async def events(request: Request) -> Response:
        stream = event_stream(feed, request.headers.get("last-event-id", ""), is_stopping)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    app = Starlette(routes=[
        Route("/", lambda _: FileResponse(STATIC / "dashboard" / "index.html")),
        Route("/api/events", events),
        Route("/api/state", answered(lambda _: {"now": time.time(), "answered": feed.answered, **feed.state()})),
        Route("/api/versions", answered(lambda request: feed.versions(window_of(request)))),
        Route("/api/steps", answered(lambda request: feed.steps(window_of(request)))),
        Route("/api/chain", answered(lambda request: chain.page(window_of(request)))),
        Route("/api/anatomy/{version:int}", answered(anatomy)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ])  # fmt: skip
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(_Headers)
    return app


class _Headers:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import MutableHeaders

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for key, value in HEADERS.items():
                    headers.setdefault(key, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def whole(request: "Request", name: str, default: int | None) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 12:
        raise ValueError(f"{name} is a whole number, not {text[:40]!r}")
    return int(text)


def window_of(request: "Request") -> Window:
    limit = whole(request, "limit", DEFAULT_LIMIT) or 0
    if not 1 <= limit <= MOST_LIMIT:
        raise ValueError(f"limit is a number from 1 to {MOST_LIMIT}")
    return whole(request, "after", None), limit


async def event_stream(feed: Feed, last_id: str, is_stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Server-sent events. Their ids count the records that were sent; with another epoch the page starts over."""
    epoch, _, position = last_id.partition(":")
    sent = int(position) if position.isascii() and position.isdigit() else 0
    if epoch != feed.epoch:
        epoch, sent = "", 0
    revision, ticked = -1, 0.0
    yield "retry: 1000\n\n"
    while not is_stopping():
        now, count, records = feed.records(sent, RECORDS_PER_EVENT)
        if now != epoch:
            epoch, sent, revision = now, 0, -1
            yield event("reset", {"epoch": epoch}, f"{epoch}:0")
            continue
        if feed.revision != revision:
            revision = feed.revision
            yield event("state", feed.state())
        if records:
            sent += len(records)
            yield event("records", {"records": records}, f"{epoch}:{sent}")
        if time.monotonic() - ticked >= TICK_SECONDS:
            ticked = time.monotonic()
            yield event("tick", {"now": time.time(), "answered": feed.answered, "late": feed.is_late})
        # Between full messages other requests get their turn.
        await asyncio.sleep(0 if sent < count else LISTEN_SECONDS)


def event(name: str, data: dict[str, Any], identity: str | None = None) -> str:
    head = "" if identity is None else f"id: {identity}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


class Dashboard:
    def __init__(
        self,
        feed: Feed,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        every_seconds: float = 1.0,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        self._stopping = False
        app = application(feed, lambda: self._stopping, hosts=answered_hosts(host, allowed_hosts))
        self._listening = listen(host, port)
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._polling = Polling(feed, every_seconds)
        self._server = web_server(app, grace_seconds=2)

    def run(self) -> None:
        """Serve until `stop` is called, in this thread."""
        try:
            self._server.run([self._listening])
        finally:
            self._polling.close()

    def stop(self) -> None:
        """End `run`; also from another thread, or from a signal handler."""
        self._stopping = True
        self._server.should_exit = True
