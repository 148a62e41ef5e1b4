"""Async GRPO on Wordle with TRL: a trainer on this machine; a vLLM server, a Wordle environment and a bucket anywhere.

Start the environment, then a vLLM server with deltawire's plugin (docs/guides/vllm.md), then the trainer:

    python -m deltawire_demo.wordle --port 8001
    vllm serve Qwen/Qwen3-1.7B --port 8000 --logprobs-mode processed_logprobs \\
      --max-model-len 4096 --weight-transfer-config '{"backend": "deltawire"}' \\
      --worker-extension-cls deltawire.engines.vllm.worker.WorkerExtension \\
      --middleware deltawire.engines.vllm.route.Route
    python examples/trl_wordle.py --model Qwen/Qwen3-1.7B --store s3://bucket/wordle \\
      --server http://127.0.0.1:8000 --env http://127.0.0.1:8001

If the server is on another machine, run its agent there (`deltawire attach ... --listen 0.0.0.0:9100`). Pass the agent
as `--agent http://host:9100`, its token in DELTAWIRE_TOKEN, and the server as `--server`, where TRL sends its requests.
A server behind the proxy of deploy/ needs a key, given in API_TOKEN; the proxy is then also the `--agent`. A Wordle
server on another machine needs a token, given in WORDLE_TOKEN on both machines.
"""

import argparse
import os
import time
from contextlib import suppress
from functools import partial

RULES = (
    "Play Wordle. Find a secret English word of five letters in at most six guesses. Make each guess with the tool "
    "`guess`. The answer has a mark for each letter: G where it is right, Y where it belongs to another place, - where "
    "it is not in the word. XXXXX means that the guess is no word of the game and was lost."
)


class Wordle:
    """Plays one game at a time on an OpenEnv server. TRL makes one for each concurrent rollout, and reuses it."""

    def __init__(self, url):
        self._url = url
        self._game = self._connect()
        self._seen = None

    def _connect(self):
        from deltawire_demo.wordle.env import WordleEnv

        token = os.environ.get("WORDLE_TOKEN")
        return WordleEnv(base_url=self._url, headers=bearer(token) if token else None).sync()

    def reset(self, seed=None, **_):
        """Start the game of a row. All rows of a group have the same seed, so they look for the same word."""
        try:
            self._seen = self._game.reset(seed=seed).observation
        except Exception:
            # A server drops idle sessions, and an error here would end all rollouts.
            with suppress(Exception):
                self._game.close()
            self._game = self._connect()
            self._seen = self._game.reset(seed=seed).observation
        return f"You have {self._seen.guesses_left} guesses."

    def guess(self, word: str) -> str:
        """
        Make the next guess.

        Args:
            word: A word of five letters.

        Returns:
            A mark for each letter, and how many guesses are left.
        """
        from deltawire_demo.wordle.models import MAX_GUESS_CHARACTERS, WordleAction

        if self._seen.done:
            return "The game is over."
        self._seen = self._game.step(WordleAction(guess=word[:MAX_GUESS_CHARACTERS])).observation
        if self._seen.done:
            return f"{self._seen.feedback}. {'You won.' if self._seen.won else f'It was {self._seen.secret}.'}"
        return f"{self._seen.feedback}. {self._seen.guesses_left} guesses are left."

    def get_reward(self):
        """The game's score: colors, a win, a bonus for unused guesses, a penalty for guesses that are not words."""
        return self._seen.score


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="Qwen/Qwen3-1.7B", help="what is trained; the server serves it under the same name")
    add("--store", required=True, metavar="URL", help="where the run goes: a folder, s3://, gs://, az://, hf://")
    add("--server", default="http://127.0.0.1:8000", metavar="URL", help="the vLLM server that rolls out")
    add("--agent", action="append", default=[], metavar="URL", help="an agent beside a server elsewhere; as often as "
        "there are servers. Without one, the server is on this machine, and its agent runs here")  # fmt: skip
    add("--env", default="http://127.0.0.1:8001", metavar="URL", help="the Wordle server")
    add("--games", type=int, default=1000, help="how many games there are to learn from")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=32, help="samples in a step")
    add("--num-generations", type=int, default=16, help="rollouts of a game")
    add("--max-inflight", type=int, default=64, help="rollouts at a time; the Wordle server needs as many sessions")
    add("--max-completion-length", type=int, default=1024)
    add("--learning-rate", type=float, default=1e-6)
    add("--max-staleness", type=int, default=5, help="throw away samples that are older, in syncs")
    add("--max-lag", type=int, help="wait for servers that are more syncs behind  [default: never]")
    add("--output", default="trl-wordle", help="a folder for checkpoints")
    add("--resume", metavar="FOLDER", help="go on from a checkpoint in there, with the same store")
    add("--report-to", default="none", help="a tracker that transformers knows, such as trackio or wandb")
    return parser.parse_args(arguments)


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def with_key(url, key):
    """A server's URL with its key in it: TRL has no other place for the key."""
    return url if key is None else url.replace("://", f"://key:{key}@", 1)


def max_tokens(url, key, patience=240):
    """The token limit of a request, once the server is up. TRL would query it itself, and log the URL with the key."""
    import httpx

    give_up = time.monotonic() + patience
    with httpx.Client(base_url=url, headers=bearer(key), timeout=30) as client:
        while True:
            try:
                answer = client.get("/v1/models")
                if answer.status_code not in (502, 503) or time.monotonic() > give_up:
                    return answer.raise_for_status().json()["data"][0]["max_model_len"]
            except httpx.TransportError:
                if time.monotonic() > give_up:
                    raise
            time.sleep(2)


def make_trainer(options, **settings):
    """The trainer, and the transfer that it sends its weights to. Settings are further fields of AsyncGRPOConfig."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from deltawire.trainers.trl import AgentAt, DeltawireTransfer

    key, token = os.environ.get("API_TOKEN"), os.environ.get("DELTAWIRE_TOKEN")
    engines = [AgentAt(url, token=token) for url in options.agent] or [options.server]
    transfer = DeltawireTransfer(options.store, engines=engines, max_lag=options.max_lag)
    games = {"prompt": [[{"role": "user", "content": RULES}]] * options.games, "seed": list(range(options.games))}
    config = {
        "output_dir": options.output,
        "vllm_server_base_url": with_key(options.server, key),
        "token_budget": max_tokens(options.server, key) if key else None,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch_size,
        "num_generations": options.num_generations,
        "max_inflight_tasks": options.max_inflight,
        "max_completion_length": options.max_completion_length,
        "max_tool_calling_iterations": 6,
        "learning_rate": options.learning_rate,
        "max_staleness": options.max_staleness,
        "chat_template_kwargs": {"enable_thinking": False},
        "logging_steps": 1,
        "report_to": options.report_to,
    }
    trainer = AsyncGRPOTrainer(
        model=options.model,
        args=AsyncGRPOConfig(**{**config, **settings}),
        train_dataset=Dataset.from_dict(games),
        environment_factory=partial(Wordle, options.env),
        weight_transfer=transfer,
    )
    # Trackers and checkpoints store the arguments, and TRL's client logs its URL, so both get the URL without the key.
    # Rollouts have the key, and aiohttp keeps it out of its errors.
    trainer.args.vllm_server_base_url = options.server
    if trainer.vllm_client:
        trainer.vllm_client.server_url = options.server
    transfer.attach(trainer)
    return trainer, transfer


def main():
    options = parse()
    trainer, transfer = make_trainer(options)
    trainer.train(resume_from_checkpoint=options.resume)
    print(f"version {transfer.version} is at {options.store}; the servers have:")
    for name, serving in transfer.served.items():
        print(f"  {name}: {serving.version}")


if __name__ == "__main__":
    main()
