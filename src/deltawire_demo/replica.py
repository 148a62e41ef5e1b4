"""A rollout replica: the policy behind an endpoint in the style of OpenAI's, kept current by an agent.

    POST /v1/completions   {"prompt": [[105, 2, 17], ...], "max_tokens": 5, "temperature": 1.0, "seed": 7}
    GET  /health           200 if it can sample
    GET  /status           the state of the agent: version, digest, lag, pauses, the last pull
    GET  /digest           the version, and the digest of all weights in memory

A completion has `token_ids` and the log-probability of each token when it was sampled, and the response has the
`weight_version` that all of it was computed with. The engine holds the weights in bf16, as they were published. They
are cast to fp32 for computing, which changes no value: bf16 is slow on most CPUs.
"""

import json
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deltawire import Pull, digest
from deltawire.engines.agent import Agent
from deltawire.engines.torch import TorchEngine
from deltawire.errors import DeltawireError, EngineUnavailable
from deltawire.tensors.digest import WeightVersion
from deltawire_demo.policy import Policy, Sampler
from deltawire_demo.tokens import MAX_TOKENS, NUM_TOKENS

MODEL = "wordle-policy"
MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for completions, checked."""

    prompts: list[list[int]]
    num_tokens: int
    temperature: float
    seed: int | None

    @classmethod
    def parse(cls, body: Any) -> "Wanted":
        if not isinstance(body, dict):
            raise ValueError("expected a JSON object")
        prompts = body.get("prompt")
        if isinstance(prompts, list) and prompts and all(type(token) is int for token in prompts):
            prompts = [prompts]
        num_tokens, temperature = body.get("max_tokens", 1), body.get("temperature", 1.0)
        if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_PROMPTS:
            raise ValueError(f"prompt must be a list of 1 to {MAX_PROMPTS} lists of tokens")
        if type(num_tokens) is not int or not 0 < num_tokens < MAX_TOKENS:
            raise ValueError(f"max_tokens must be a number from 1 to {MAX_TOKENS - 1}")
        if type(temperature) not in (int, float) or not 0 <= temperature <= 100:
            raise ValueError("temperature must be a number from 0 to 100")
        for prompt in prompts:
            if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_TOKENS - num_tokens:
                raise ValueError(f"a prompt has at least one token, and at most {MAX_TOKENS} with its completion")
            if not all(type(token) is int and 0 <= token < NUM_TOKENS for token in prompt):
                raise ValueError(f"a token must be a number from 0 to {NUM_TOKENS - 1}")
        seed = body.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
            raise ValueError("seed must be 0 or more")
        return cls(prompts, num_tokens, float(temperature), seed)


class Completions:
    """Samples from the engine's weights, one request at a time."""

    def __init__(self, engine: TorchEngine, policy: Policy) -> None:
        self._engine, self._served = engine, policy
        self._computing = Policy(policy.shape).requires_grad_(False)
        self._sampler = Sampler(self._computing)
        self._widened: WeightVersion | None = None
        self._turn = threading.Lock()

    def complete(self, wanted: Wanted) -> tuple[WeightVersion, list[tuple[list[int], list[float]]]]:
        """The version of the weights, and for each prompt tokens and their log-probabilities."""
        generator = torch.Generator()
        if wanted.seed is None:
            generator.seed()
        else:
            generator.manual_seed(wanted.seed)
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, prompt in enumerate(wanted.prompts):
            by_length[len(prompt)].append(i)
        results: list[tuple[list[int], list[float]]] = [([], [])] * len(wanted.prompts)
        with self._turn:
            state = self._widen()
            for indices in by_length.values():
                written = self._sampler.sample(
                    [wanted.prompts[i] for i in indices], wanted.num_tokens, wanted.temperature, generator
                )
                for i, tokens, log_probs in zip(indices, *written, strict=True):
                    results[i] = tokens, log_probs
        return state, results

    def _widen(self) -> WeightVersion:
        """Update the fp32 copy to what is served. An update during sampling takes effect with the next request."""
        with self._engine.serving() as state:
            if state is None:
                raise EngineUnavailable("the replica has no weights yet: try again soon")
            if state != self._widened:
                with torch.no_grad():
                    for wide, narrow in zip(self._computing.parameters(), self._served.parameters(), strict=True):
                        wide.copy_(narrow)
                self._sampler.forget()
                self._widened = state
            return state


def application(agent: Agent, engine: TorchEngine, policy: Policy) -> Starlette:
    """The replica's endpoints."""
    completions = Completions(engine, policy)

    def refused(message: str, status: int) -> Response:
        return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)

    def answer(body: bytes) -> Response:
        try:
            wanted = Wanted.parse(json.loads(body))
        except ValueError as error:
            return refused(str(error), 400)
        try:
            state, results = completions.complete(wanted)
        except DeltawireError as error:
            return refused(str(error), 503)
        choices = [
            {"index": i, "text": "", "finish_reason": "length", "token_ids": tokens,
             "logprobs": {"token_logprobs": log_probs}}
            for i, (tokens, log_probs) in enumerate(results)
        ]  # fmt: skip
        num_read = sum(len(prompt) for prompt in wanted.prompts)
        num_written = wanted.num_tokens * len(choices)
        usage = {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
        return JSONResponse({
            "object": "text_completion", "created": int(time.time()), "model": MODEL,
            "weight_version": state.version, "choices": choices, "usage": usage,
        })  # fmt: skip

    async def complete(request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        return await run_in_threadpool(answer, await request.body())

    def health(_: Request) -> Response:
        found = agent.health()
        # Old weights are better than none: a replica that cannot reach the store keeps serving.
        return JSONResponse(asdict(found), 503 if found.version is None else 200)

    def status(_: Request) -> Response:
        return JSONResponse(agent.status())

    def measured(_: Request) -> Response:
        with engine.serving() as state:
            found = digest(dict(policy.named_parameters()), threads=1)
        return JSONResponse({"version": None if state is None else state.version, "digest": str(found)})

    return Starlette(routes=[
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/health", health),
        Route("/status", status),
        Route("/digest", measured),
    ])  # fmt: skip


@click.command()
@click.option("--store", required=True, help="The URL of the run.")
@click.option("--name", required=True, help="The replica's name in the run.")
@click.option(
    "--port", type=int, default=0, show_default=True, help="The port to listen on, at 127.0.0.1; 0 picks a free one."
)
@click.option(
    "--poll", type=float, default=0.1, show_default=True, help="How often to look for a new version, in seconds."
)
def main(store: str, name: str, port: int, poll: float) -> None:
    """Serve completions of the demo's policy at the newest version of a run. Each update prints a line of JSON."""
    torch.set_num_threads(1)
    policy = Policy().bfloat16().requires_grad_(False)
    engine = TorchEngine(policy, threads=1)

    def say(**event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    def pulled(done: Pull) -> None:
        say(event="pull", replica=name, version=done.version, base=done.base, anchor=done.anchor, bytes=done.num_bytes,
            seconds=round(done.seconds, 4), pause_seconds=agent.target.pause_seconds)  # fmt: skip

    # On SIGTERM the agent removes its heartbeat.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listening = socket.create_server(("127.0.0.1", port))
    say(event="serving", part=name, url=f"http://127.0.0.1:{listening.getsockname()[1]}")
    with Agent(engine, store, name=name, poll_seconds=poll) as agent, agent.running(pulled):
        config = uvicorn.Config(
            application(agent, engine, policy), log_level="warning", access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main(prog_name="python -m deltawire_demo.replica")
