"""The dashboard of a run: a page that is kept up to date by server-sent events, and the same data as JSON.

    GET /                     the page
    GET /api/events           the state whenever it changes, and notes as they are read; resumes at Last-Event-ID
    GET /api/state            the store, the replicas, alerts, how much was read
    GET /api/series           the lines of the charts: ?axis=time|step&from=X&to=X&last=SECONDS&columns=N
    GET /api/versions         a page of versions: ?after=VERSION&limit=N&kind=KIND&up_to=VERSION
    GET /api/versions.csv     all versions; /api/replicas.csv all samples of replicas
    GET /api/steps            a page of training steps from the event log: ?after=STEP&limit=N
    GET /api/chain            a page of the hops, and what gc would remove: ?after=VERSION&limit=N
    GET /api/anatomy/VERSION  the contents of a delta; ?base=VERSION for a skip delta

It only reads, and has no login: anyone who can reach it can see it.
"""

import asyncio
import csv
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltawire.errors import DeltawireError, MissingDependency, ObjectMissing, StoreUnavailable
from deltawire.hosts import answered_hosts, listen, web_server
from deltawire.pages.anatomy import Anatomies, Chain
from deltawire.pages.feed import Feed, Polling
from deltawire.pages.series import Samples
from deltawire.pages.versions import Window
from deltawire.run.fleet import REPORTED

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

STATIC = Path(__file__).parent / "static"
DEFAULT_LIMIT, MOST_LIMIT = 200, 1000
MOST_DIGITS = 12
NOTES_PER_EVENT = 500
LEAST_COLUMNS, MOST_COLUMNS = 10, 1000
KINDS = ("anchor", "delta", "damaged")
CSV_FIELDS = ("version", "step", "created", "kind", "base", "bytes", "all_bytes", "full_bytes", "changed", "total",
              *REPORTED)  # fmt: skip
LISTEN_SECONDS, TICK_SECONDS = 0.1, 1.0

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def application(
    feed: Feed, is_stopping: Callable[[], bool], *, hosts: list[str], compared: Feed | None = None
) -> "Starlette":
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
        raise MissingDependency("the dashboard needs more packages: pip install 'deltawire[dashboard]'") from None

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
        return anatomies.of(number_in(request.path_params["version"], "version"), whole(request, "base", None))

    def versions(request: Request) -> dict[str, Any]:
        kind = request.query_params.get("kind") or None
        if kind not in (None, *KINDS):
            raise ValueError(f"kind must be one of {', '.join(KINDS)}")
        return feed.versions(window_of(request), kind, whole(request, "up_to", None))

    def download(name: str, lines: Callable[[], Iterable[Sequence[Any]]]) -> Callable[[Request], Response]:
        disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
        return lambda _: StreamingResponse(csv_of(lines()), media_type="text/csv", headers=disposition)

    async def events(request: Request) -> Response:
        stream = event_stream(feed, request.headers.get("last-event-id", ""), is_stopping, compared)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    app = Starlette(routes=[
        Route("/", lambda _: FileResponse(STATIC / "dashboard" / "index.html")),
        Route("/api/events", events),
        Route("/api/state", answered(lambda _: {"now": time.time(), "answered": feed.answered, **feed.state()})),
        Route("/api/series", answered(lambda request: series(request, feed, compared))),
        Route("/api/versions", answered(versions)),
        Route("/api/versions.csv", download("versions.csv", lambda: version_lines(feed))),
        Route("/api/replicas.csv", download("replicas.csv", lambda: sample_lines(feed))),
        Route("/api/steps", answered(lambda request: feed.steps(window_of(request)))),
        Route("/api/chain", answered(lambda request: chain.page(window_of(request)))),
        Route("/api/anatomy/{version}", answered(anatomy)),
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
    return number_in(text, name) if text else default


def number_in(text: str, name: str) -> int:
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > MOST_DIGITS:
        raise ValueError(f"{name} must be a whole number, not {text[:40]!r}")
    return int(text)


def window_of(request: "Request") -> Window:
    limit = whole(request, "limit", DEFAULT_LIMIT) or 0
    if not 1 <= limit <= MOST_LIMIT:
        raise ValueError(f"limit must be a number from 1 to {MOST_LIMIT}")
    return whole(request, "after", None), limit


def real(request: "Request", name: str, default: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text[:40]) if text else default
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ValueError(f"{name} must be a number, not {text[:40]!r}")
    return value


def series(request: "Request", feed: Feed, compared: Feed | None) -> dict[str, Any]:
    """The lines of the charts within a range, those of a second run marked with `run` 1."""
    axis, columns, now = request.query_params.get("axis") or "time", whole(request, "columns", 300) or 0, time.time()
    if axis not in ("time", "step"):
        raise ValueError("axis must be time or step")
    if not LEAST_COLUMNS <= columns <= MOST_COLUMNS:
        raise ValueError(f"columns must be a number from {LEAST_COLUMNS} to {MOST_COLUMNS}")
    feeds = [feed] if compared is None else [feed, compared]
    stamp, runs = stamp_of(feed, compared), [each.charts() for each in feeds]
    lows, highs = zip(*(each.whole(axis, now) for each in runs), strict=True)
    low, high = min(lows), max(highs)
    if last := real(request, "last", 0):
        low = max(runs[0].since(axis, runs[0].origin + runs[0].whole("time", now)[1] - last), low)
    start, end = real(request, "from", low), real(request, "to", high)
    charts: dict[str, list[dict[str, Any]]] = {}
    for number, each in enumerate(runs):
        for name, lines in each.lines(axis, start, max(end, start), columns, now).items():
            charts.setdefault(name, []).extend({**line, "run": number} for line in lines)
    return {
        "axis": axis, "origin": runs[0].origin, "whole": [min(lows), high], "range": [start, end], "stamp": stamp,
        "runs": [each.state().get("run") for each in feeds], "charts": charts,
    }  # fmt: skip


def stamp_of(feed: Feed, compared: Feed | None) -> int:
    return feed.stamp + (0 if compared is None else compared.stamp)


def csv_of(lines: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Lines of CSV. Untrusted text that a spreadsheet would compute is quoted."""
    for line in lines:
        out = io.StringIO()
        csv.writer(out).writerow([f"'{cell}" if str(cell)[:1] in ("=", "+", "-", "@") else cell for cell in line])
        yield out.getvalue()


def version_lines(feed: Feed) -> Iterator[Sequence[Any]]:
    yield CSV_FIELDS
    for _, row in sorted(feed.rows().items()):
        yield [row[name] for name in CSV_FIELDS]


def sample_lines(feed: Feed) -> Iterator[Sequence[Any]]:
    yield ("replica", "engine", *Samples.NAMES)
    for name, samples in list(feed.samples.of.items()):
        for sample in samples[:]:
            yield (name, feed.samples.engines.get(name), *sample)


async def event_stream(
    feed: Feed, last_id: str, is_stopping: Callable[[], bool], compared: Feed | None = None
) -> AsyncIterator[str]:
    """Server-sent events. Their ids count the notes that were sent; with another epoch the page starts over."""
    epoch, _, position = last_id.partition(":")
    sent = int(position) if position.isascii() and position.isdigit() and len(position) <= MOST_DIGITS else 0
    if epoch != feed.epoch:
        epoch, sent = "", 0
    revision, ticked = -1, 0.0
    yield "retry: 1000\n\n"
    while not is_stopping():
        now, count, notes = feed.new_notes(sent, NOTES_PER_EVENT)
        if now != epoch:
            epoch, sent, revision = now, 0, -1
            yield event("reset", {"epoch": epoch}, f"{epoch}:0")
            continue
        # Before the first poll has ended there is none.
        if feed.revision != revision and (state := feed.state()):
            revision = feed.revision
            yield event("state", state)
        if notes:
            sent += len(notes)
            yield event("notes", {"notes": notes}, f"{epoch}:{sent}")
        if time.monotonic() - ticked >= TICK_SECONDS:
            ticked = time.monotonic()
            stamp = stamp_of(feed, compared)
            yield event("tick", {"now": time.time(), "answered": feed.answered, "late": feed.is_late, "stamp": stamp})
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
        compared: Feed | None = None,
    ) -> None:
        self._stopping = False
        hosts = answered_hosts(host, allowed_hosts)
        app = application(feed, lambda: self._stopping, hosts=hosts, compared=compared)
        self._listening = listen(host, port)
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._polling = [Polling(each, every_seconds) for each in (feed, compared) if each is not None]
        self._server = web_server(app, grace_seconds=2)

    def run(self) -> None:
        """Serve until `stop` is called, in this thread."""
        try:
            self._server.run([self._listening])
        finally:
            for each in self._polling:
                each.close()

    def stop(self) -> None:
        """End `run`; also from another thread, or from a signal handler."""
        self._stopping = True
        self._server.should_exit = True
