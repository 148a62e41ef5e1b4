"""Deltawire's own route in a vLLM server: `--middleware deltawire.engines.vllm.route.Route`.

`POST /deltawire/NAME` takes and gives JSON, and needs the engine token (see `token.py`); without it nothing here
answers. What an update does to a server (hold the scheduler, write, set the version, go on) is one request, in the
server's own process: no agent that dies can leave it half done. It needs no `VLLM_SERVER_DEV_MODE`.

The scheduler's calls are those of vLLM's engine client. Its own `pause_generation` sleeps for 20 ms.
"""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from deltawire.engines.token import engine_token
from deltawire.engines.vllm.versions import missing
from deltawire.tensors.digest import Digest

PREFIX = "/deltawire/"
MOST_BYTES = 256 << 20
# After a write: some steps, so that a stream does not wait for both between two of its tokens.
DROP_SECONDS = 0.05

# What becomes of running requests: how the scheduler is held, and whether what was computed for them is dropped.
HOLDS = {"recompute": ("keep", True), "keep": ("keep", False), "abort": ("abort", True)}
# Commands that workers take as they are.
COMMANDS = (
    "bind", "layout", "measure", "stage", "decode", "check", "mark", "parameters", "disturb", "steer", "restore",
)  # fmt: skip
# What requests that change weights must have.
FIELDS = {
    "commit": {"token", "running_requests", "before", "after", "version"},
    "load": {"folder", "running_requests", "after", "state", "version"},
}

Answers = Sequence[dict[str, Any]]


class Refused(Exception):
    """A request that is wrong."""


class Route:
    """An ASGI middleware. `app.state.engine_client` is the engine."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self._token = engine_token()
        self._lock: asyncio.Lock | None = None
        self._dropping: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        status, answer = 200, {}
        try:
            if not self._is_authorized(scope):
                raise PermissionError
            body = json.loads(await _read(receive) or b"{}")
            answer = await self._answer(scope, scope["path"].removeprefix(PREFIX), body)
        except PermissionError:
            status, answer = 401, {"error": "this needs the header Authorization: Bearer TOKEN, with the engine token"}
        except (Refused, ValueError, KeyError, TypeError) as error:
            status, answer = 400, {"error": str(error) or type(error).__name__}
        except Exception as error:
            # The server ends soon after its engine.
            status = 503 if type(error).__name__ == "EngineDeadError" else 500
            answer = {"error": f"{type(error).__name__}: {error}"}
        content = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _is_authorized(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return given[0].lower() == b"bearer" and hmac.compare_digest(given[2].strip(), self._token.encode())

    async def _answer(self, scope: Any, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if scope["method"] != "POST":
            raise Refused("use POST for this")
        client = scope["app"].state.engine_client
        problem = missing(client)
        if problem:
            raise Refused(problem)
        if name == "status":
            # Each would wait for a step to end; together they wait for one.
            version, answers = await asyncio.gather(client.get_weight_version(), _ask(client, "status", {}))
            return {"weight_version": version, "held": _are_held(answers), "workers": answers}
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if name in COMMANDS:
                return {"workers": await _ask(client, name, body)}
            if name in ("commit", "load"):
                return await self._change(client, name, body)
            if name == "name":
                held = _are_held(await _ask(client, "status", {}))
                await client.update_weight_version(body["version"])
                await self._resume(client, resumes=held, held=held)
                return {}
        raise Refused(f"there is no {PREFIX}{name}")

    async def _change(self, client: Any, name: str, body: dict[str, Any]) -> dict[str, Any]:
        # Before anything is held.
        if lacking := FIELDS[name] - body.keys():
            raise Refused(f"{name} needs {', '.join(sorted(lacking))}")
        if body["running_requests"] not in HOLDS:
            raise Refused(f"running_requests is one of {', '.join(HOLDS)}")
        try:
            return await (self._commit if name == "commit" else self._load)(client, body)
        except BaseException:
            # The scheduler may be held, and what the workers have is unknown, until others were loaded. If they cannot
            # be told, the server ends.
            with suppress(Exception):
                await _ask(client, "hold", {"held": True})
            raise

    async def _commit(self, client: Any, body: dict[str, Any]) -> dict[str, Any]:
        """Write what is staged in all workers, or in none."""
        # Also where requests go on as they are: the first tokens after the write have to be named after it.
        resumes = await self._hold(client, *HOLDS[body["running_requests"]])
        started = time.perf_counter()
        workers = await _ask(client, "write", {"token": body["token"]})
        held = _are_held(workers)
        problem = _problem(workers, body["after"])
        failed = None
        if all(each["staged"] != body["token"] for each in workers):
            # None of them has written anything: the server was restarted since, or another agent has dropped it.
            await self._resume(client, resumes=resumes, held=False)
            return {"problem": problem}
        if problem is not None:
            failed = _problem(await _ask(client, "undo", {"token": body["token"]}), body["before"])
        if failed is not None:
            await self._keep_held(client)
            return {"problem": problem, "failed": failed}
        # Both are sent at once, and in this order, like those of `_hold`.
        naming = [] if problem is not None else [client.update_weight_version(body["version"])]
        await asyncio.gather(*naming, self._resume(client, resumes=resumes or held, held=held))
        seconds = time.perf_counter() - started
        self._dropping = asyncio.create_task(self._drop(client, body["token"]))
        return {"problem": problem, "seconds": seconds, "workers": workers}

    async def _drop(self, client: Any, token: str) -> None:
        """Have memory given back, for which a GPU stops. For nobody who waits for this update, nor with its pause."""
        await asyncio.sleep(DROP_SECONDS)
        await _ask(client, "drop", {"token": token})

    async def _load(self, client: Any, body: dict[str, Any]) -> dict[str, Any]:
        """Load all weights from a folder, with vLLM's own code."""
        resumes = await self._hold(client, *HOLDS[body["running_requests"]])
        started = time.perf_counter()
        workers = await _ask(client, "load", {"folder": body["folder"]})
        held = _are_held(workers)
        problem = _problem(workers, body["after"])
        if problem is not None:
            await self._keep_held(client)
            return {"problem": problem}
        await _ask(client, "mark", {"state": body["state"]})
        await client.update_weight_version(body["version"])
        await self._resume(client, resumes=resumes or held, held=held)
        return {"problem": None, "seconds": time.perf_counter() - started}

    async def _hold(self, client: Any, mode: str, clears: bool) -> bool:
        """Let the running step end and begin no other. Returns whether to go on afterwards: not if someone else has
        paused the server.
        """
        if clears:
            await client.renderer.clear_mm_cache_async()
        # Both are sent at once, and in this order: waiting for each would be waiting for a step to end.
        # A write sent with them would be made at once, before the steps under way have ended.
        held = _call(client, "is_scheduler_paused"), _call(client, "pause_scheduler", mode, clears)
        return not any((await asyncio.gather(*held))[0])

    async def _keep_held(self, client: Any) -> None:
        """The weights are a mix: nothing is computed from them until others were loaded."""
        await client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await _ask(client, "hold", {"held": True})

    async def _resume(self, client: Any, *, resumes: bool, held: bool) -> None:
        if resumes:
            await client.engine_core.resume_scheduler_async()
        if held:
            await _ask(client, "hold", {"held": False})


async def _call(client: Any, method: str, *arguments: Any) -> list[Any]:
    """What each engine of the server answers. vLLM has `call_utility_all_async` for this, but only from 0.32 on."""
    core = client.engine_core
    if hasattr(core, "call_utility_all_async"):
        return list(await core.call_utility_all_async(method, *arguments))
    return await asyncio.gather(
        *(core._call_utility_async(method, *arguments, engine=each) for each in core.core_engines)
    )


async def _ask(client: Any, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """A command to all workers of all engines of the server; their answers in the order of ranks."""
    engines = await _call(client, "collective_rpc", "deltawire", None, (name, arguments), None)
    answers = [each for workers in engines for each in workers]
    if any(not isinstance(each, dict) or "rank" not in each for each in answers):
        raise Refused(f"the workers answered {answers}: start the server as in the guide")
    return sorted(answers, key=lambda each: int(each["rank"]))


def _are_held(answers: Answers) -> bool:
    """Whether the scheduler is held because of an update that failed. Workers keep this: a server may have several
    processes that answer requests, with a route each.
    """
    return any(each["held"] for each in answers)


def _problem(answers: Answers, expected: str) -> str | None:
    """Why the workers do not hold what they should, by their own words and by the sum of their digests."""
    # Some have failed only because another one has.
    for each in sorted(answers, key=lambda each: (each["error"] or {}).get("kind") == "Elsewhere"):
        if each["error"]:
            return f"rank {each['rank']}: {each['error']['message']}"
    found = sum((Digest.parse(each["partial"]) for each in answers if each["partial"]), Digest())
    return None if str(found) == expected else f"the weights have digest {found}, not {expected}"


async def _read(receive: Any) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > MOST_BYTES:
            raise Refused(f"a request has more than {MOST_BYTES} bytes")
    return b"".join(parts)
