"""Starts the parts of the demo as processes, keeps them going, and checks in the end that all weights are the same."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from deltawire.demo.parts import HOST, Event, Part, PartFailed, free_ports, module
from deltawire.demo.recipe import Recipe, Shape
from deltawire.demo.s3 import S3Server
from deltawire.demo.story import Follower, Story
from deltawire.errors import MissingDependency

NEEDED = ("torch", "starlette", "uvicorn", "httpx", "openenv", "prometheus_client")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
REACH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a run of the demo is like."""

    folder: Path
    cache: Path
    store: str | None = None
    s3: bool = False
    num_steps: int = 180
    num_replicas: int = 2
    num_secrets: int = 8
    warmup_steps: int = 20
    pretrain_steps: int = 600
    rounds: int = 3
    time_limit: float = 240.0
    kill_replica_at: int | None = None
    late_join_at: int | None = None
    publishes: bool = True
    seed: int = 0


class Interrupted(Exception):
    """Somebody wants it to end."""


class Demo:
    """One run. `refresh` is called several times a second with what is known."""

    def __init__(self, options: Options, refresh: Callable[[Story], None]) -> None:
        check_installed()
        self.options, self._refresh = options, refresh
        options.folder.mkdir(parents=True, exist_ok=True)
        self.story = Story(options.folder / "events.jsonl", options.num_steps)
        self.story.read()
        self._events: queue.Queue[Event] = queue.Queue()
        self._num_signals = 0
        self._parts: list[Part] = []
        direct = ",".join(each for each in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), HOST) if each)
        self._environment = {**ONE_THREAD, "no_proxy": direct, "NO_PROXY": direct}
        self.store = options.store or str(options.folder / "store")
        has_late = options.late_join_at is not None
        ports = free_ports(1 + options.num_replicas + has_late)
        self._urls = [f"http://{HOST}:{port}" for port in ports]
        self._killed = self._joined = False

    def run(self) -> None:
        """All of it; Interrupted when a signal came, and then too nothing is left running."""
        with self._signals():
            try:
                start = self._pretrained()
                self._start_store()
                environment = self._part("environment", *module("wordle", "--port", self._port(0)))
                replicas = [self._replica(i) for i in range(self.options.num_replicas)]
                trainer = self._part("trainer", *self._trainer(start), max_starts=4)
                for part in (trainer, *replicas, environment):
                    part.start()
                self.story.phase = "training"
                self._follow(trainer)
                self.story.phase = "checking"
                self._check_replicas()
                self.story.audit = self._verify()
                self.story.add({"event": "verified", **self.story.audit})
            finally:
                self._stop()
        self.story.phase = "done"
        self._refresh(self.story)

    def _pretrained(self) -> Path:
        """The policy to start from, from the cache or made now."""
        file = self.options.cache / Recipe(num_steps=self.options.pretrain_steps).name(Shape())
        if not file.exists():
            self.story.phase = "pretraining"
            arguments = ["--output", str(file), "--steps", str(self.options.pretrain_steps)]
            # With both cores, but not waiting for each other on them where others need them too.
            environment = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
            part = self._part("pretrain", *module("pretrain", *arguments), environment=environment)
            part.start()
            while part.ended() is None:
                self._listen()
            part.wait_for_output()
            if part.ended():
                raise PartFailed(f"pretraining failed: {part.log.read_text(errors='replace')[-600:]}", part="pretrain")
            self._parts.remove(part)
            part.stop(0)
        return file

    def _start_store(self) -> None:
        if self.options.s3:
            folder = self.options.folder
            server = S3Server(folder / "s3", folder / "logs" / "s3.log", self._events)
            self._parts.append(server.part)
            server.start()
            self.store = server.url
            self._environment |= server.environment

    def _port(self, number: int) -> str:
        return self._urls[number].rpartition(":")[2]

    def _part(self, name: str, *command: str, max_starts: int = 6, environment: dict[str, str] | None = None) -> Part:
        log = self.options.folder / "logs" / f"{name}.log"
        part = Part(
            name, command, log=log, events=self._events, environment=environment or self._environment,
            max_starts=max_starts,
        )  # fmt: skip
        self._parts.append(part)
        return part

    def _replica(self, number: int) -> Part:
        name = f"replica-{number}"
        self.story.replicas[name] = Follower()
        return self._part(
            name, *module("replica", "--store", self.store, "--name", name, "--port", self._port(1 + number))
        )

    def _trainer(self, start: Path) -> list[str]:
        options = self.options
        replicas = [word for url in self._urls[1:] for word in ("--replica", url)]
        return module(
            "trainer", "--store", self.store, "--environment", self._urls[0], *replicas, "--policy", str(start),
            "--folder", str(options.folder), "--steps", str(options.num_steps), "--secrets", str(options.num_secrets),
            "--warmup", str(options.warmup_steps), "--rounds", str(options.rounds),
            "--time-limit", str(options.time_limit), "--seed", str(options.seed),
            *([] if options.publishes else ["--no-publish"]),
        )  # fmt: skip

    def _follow(self, trainer: Part) -> None:
        """Until the trainer is done; other parts that end are started again, and so is the trainer."""
        while True:
            self._listen()
            self._do_harm()
            for part in self._parts:
                status = part.ended()
                if status is None or part.num_starts == 0:
                    continue
                if part is trainer and status == 0:
                    part.wait_for_output()
                    self._listen()
                    if self.story.done is not None:
                        return
                self.story.add({"event": "ended", "part": part.name, "status": status})
                part.start_again()

    def _listen(self) -> None:
        """Take in what the parts have told, and show it."""
        if self._num_signals:
            raise Interrupted
        with suppress(queue.Empty):
            self.story.add(self._events.get(timeout=0.1))
        self._drain()
        self._refresh(self.story)

    def _drain(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.story.add(self._events.get_nowait())

    def _do_harm(self) -> None:
        """What was asked for: kill a replica, or let another one join."""
        options, step = self.options, self.story.step
        if options.kill_replica_at is not None and step >= options.kill_replica_at and not self._killed:
            self._killed = True
            self.story.note(f"killing replica-0 at step {step}", step=step)
            next(part for part in self._parts if part.name == "replica-0").kill()
        if options.late_join_at is not None and step >= options.late_join_at and not self._joined:
            self._joined = True
            self.story.note(f"starting replica-{options.num_replicas} at step {step}", step=step)
            self._replica(options.num_replicas).start()

    def _check_replicas(self) -> None:
        """Ask each replica for the digest of its memory, once it is at the last version."""
        done = self.story.done or {}
        deadline = time.monotonic() + REACH_SECONDS
        for name in sorted(self.story.replicas):
            number = int(name.rpartition("-")[2])
            while True:
                self._listen()
                try:
                    told = httpx.get(f"{self._urls[1 + number]}/digest", timeout=10, trust_env=False).json()
                except (httpx.HTTPError, ValueError):
                    told = {"version": None, "digest": None}
                if told["version"] == done.get("version") or time.monotonic() > deadline:
                    break
            follower = self.story.replicas[name]
            follower.version, follower.digest = told["version"], told["digest"]
            self.story.add({"event": "checked", "replica": name, **told, "trainer": done.get("digest")})

    def _verify(self) -> Event:
        """The whole chain, checked by the same command that anyone can run."""
        command = [sys.executable, "-m", "deltawire.cli", "verify", self.store, "--format", "json"]
        ended = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, env={**os.environ, **self._environment}, check=False
        )
        try:
            told: Event = json.loads(ended.stdout)
        except ValueError:
            told = {"ok": False, "error": ended.stderr.strip()[-600:]}
        return {"ok": ended.returncode == 0, "command": f"deltawire verify {self.store}", "told": told}

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def count(*_: object) -> None:
            self._num_signals += 1

        before = {each: signal.signal(each, count) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _stop(self) -> None:
        """End all parts, the trainer first: it writes down how far it is. A second signal makes it quick."""
        trainers = [part for part in self._parts if part.name == "trainer"]
        others = [part for part in reversed(self._parts) if part.name != "trainer"]
        for part in trainers + others:
            part.stop(20 if part.name == "trainer" else 8, should_hurry=lambda: self._num_signals > 1)
        self._drain()


def check_installed() -> None:
    """Refuse to start what could not run."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingDependency(f"the demo needs {', '.join(missing)}: pip install 'deltawire[demo,agent,torch]'")
