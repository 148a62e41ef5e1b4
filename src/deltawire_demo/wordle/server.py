"""The server: OpenEnv's own, one game per connection, and an extra endpoint for many games in one request.

OpenEnv's clients play over the WebSocket `/ws`; `reset` takes `seed` or `secret`, an index into the words. A trainer
that plays many games in lockstep uses `/batch`, where a session is a game and a name:

    POST /batch/reset   {"games": [{"seed": 7}, {"secret": 12}, {}, {"session": "NAME"}]}
    POST /batch/step    {"steps": [{"session": "NAME", "guess": "crane", "turn": 0}]}
    POST /batch/close   {"sessions": ["NAME"]}

The first two answer `{"games": [{"session", "observation", "reward", "done"}]}` in the order of the request, with the
observations of `/ws`. `turn` may be left out; with it, a request whose answer was lost can be sent again. A request
that names one bad session changes none. Errors are `{"detail", "code"}`.

Sessions that are idle for too long expire, on both endpoints, and each has room for `max_sessions`. With a token,
everything but `/health` needs the header `Authorization: Bearer TOKEN`.
"""

import hmac
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from deltawire import __version__
from deltawire_demo.wordle.game import Game, view
from deltawire_demo.wordle.models import MAX_GUESS_CHARACTERS, WordleAction, WordleObservation, WordleState
from deltawire_demo.wordle.sessions import Move, SessionError, Sessions, Start, start

MAX_BODY_BYTES = 1 << 20


class WordleEnvironment(Environment):  # type: ignore[misc]
    """One session of OpenEnv: a game at a time."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    # One thread for all sessions instead of one for each: a step takes microseconds.
    REQUIRES_SINGLE_THREAD_EXECUTOR = True

    def __init__(self) -> None:
        super().__init__()
        self._game: Game | None = None
        self._episode: str | None = None
        self._closed = False

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, secret: int | None = None, **unknown: Any
    ) -> WordleObservation:
        self._check_open()
        if unknown:
            raise SessionError(
                f"reset takes seed, episode_id and secret, not {', '.join(unknown)}", code="BAD_INPUT", status=422
            )
        self._game = start(seed, secret)
        self._episode = episode_id or str(uuid.uuid4())
        return WordleObservation(**asdict(view(self._game)))

    def step(self, action: WordleAction, timeout_s: float | None = None, **_: Any) -> WordleObservation:
        self._check_open()
        if self._game is None:
            raise SessionError(
                "there is no game yet: reset first, over /ws, since HTTP has no sessions", code="NO_GAME", status=409
            )
        if self._game.done:
            raise SessionError("the game is over: reset", code="GAME_OVER", status=409)
        self._game.play(action.guess)
        return WordleObservation(**asdict(view(self._game)))

    @property
    def state(self) -> WordleState:
        if self._game is None:
            return WordleState()
        seen = asdict(view(self._game))
        known = {name: seen[name] for name in ("guesses", "feedbacks", "score", "done", "won", "secret")}
        return WordleState(episode_id=self._episode, step_count=len(self._game.turns), **known)

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name="wordle", description="Wordle: five letters, six guesses, 200 words", version=__version__
        )

    def close(self) -> None:
        # OpenEnv drops an idle session and leaves its socket open: what comes later must not play on outside the
        # limit.
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("this session expired after a long silence: connect again", code="EXPIRED",
                               status=410)  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Start(_Strict):
    session: str | None = None
    seed: int | None = Field(None, ge=0)
    secret: int | None = Field(None, ge=0)


class _Move(_Strict):
    session: str
    guess: str = Field(max_length=MAX_GUESS_CHARACTERS)
    turn: int | None = Field(None, ge=0)


class _Reset(_Strict):
    games: list[_Start]


class _Step(_Strict):
    steps: list[_Move]


class _Close(_Strict):
    sessions: list[str]


def create(*, max_sessions: int = 512, expire_seconds: float = 600.0, token: str | None = None) -> Any:
    """The application, for an ASGI server."""
    sessions = Sessions(max_sessions=max_sessions, expire_seconds=expire_seconds)
    app = create_fastapi_app(
        WordleEnvironment, WordleAction, WordleObservation, env_name="wordle", state_cls=WordleState,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=expire_seconds),
    )  # fmt: skip

    async def reset(request: _Reset) -> Response:
        """Start games, in new or existing sessions."""
        games = sessions.reset([Start(each.session, each.seed, each.secret) for each in request.games])
        return JSONResponse({"games": [_response(name, game) for name, game in games]})

    async def step(request: _Step) -> Response:
        """Make one guess in each of some sessions."""
        games = sessions.step([Move(each.session, each.guess, each.turn) for each in request.steps])
        responses = [_response(each.session, game) for each, game in zip(request.steps, games, strict=True)]
        return JSONResponse({"games": responses})

    async def close(request: _Close) -> Response:
        """Close sessions; those that do not exist any more are ignored."""
        return JSONResponse({"closed": sessions.close(request.sessions)})

    for name, handler in (("reset", reset), ("step", step), ("close", close)):
        app.add_api_route(f"/batch/{name}", handler, methods=["POST"], tags=["Batch"])

    async def refuse(_: Any, error: SessionError) -> Response:
        return JSONResponse({"detail": str(error), "code": error.code}, error.status)

    app.add_exception_handler(SessionError, refuse)
    app.add_middleware(_Limited)
    if token is not None:
        app.add_middleware(_Guarded, token=token)  # outermost: strangers learn nothing else
    return app


def _response(name: str, game: Game) -> dict[str, Any]:
    """A game in the format of OpenEnv's responses."""
    seen = asdict(view(game))
    reward, done = seen.pop("reward"), seen.pop("done")
    return {"session": name, "observation": seen, "reward": reward, "done": done}


class _Limited:
    """Refuses requests without a length, or that are too long."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                error = {"detail": f"a request states its length, {MAX_BODY_BYTES} bytes at most", "code": "TOO_LONG"}
                await JSONResponse(error, 413)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Guarded:
    """Refuses who does not send the token. Health is for probes, which have none."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = {"detail": "this needs the header Authorization: Bearer TOKEN", "code": "UNAUTHORIZED"}
                await JSONResponse(error, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)
