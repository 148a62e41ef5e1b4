"""Starts the parts of the demo as processes, restarts them, and checks in the end that all weights are equal."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import httpx

from deltawire.errors import MissingDependency
from deltawire.kernels.cpu.warmup import warm_up
from deltawire_demo.parts import HOST, Event, Part, PartFailed, free_ports, module
from deltawire_demo.s3 import S3Server
from deltawire_demo.serving import ENVIRONMENT, agent_command, make_checkpoint, measure_command, server_command
from deltawire_demo.shape import START
from deltawire_demo.smollm2 import start as smollm2
from deltawire_demo.story import Follower, Story
from deltawire_demo.tokens import MAX_TOKENS

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# For the trainer: several cores, without busy waiting, since other parts need them too.
THREADS = {"OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 4)), "OMP_WAIT_POLICY": "passive"}
REACH_SECONDS = 60.0
# What keeps running with --keep.
KEPT = ("dashboard", "s3")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a demo."""

    folder: Path
    cache: Path
    model: str = "wordle"
    engine: str = "torch"
    store: str | None = None
    s3: bool = False
    num_steps: int = 120
    num_replicas: int = 2
    num_groups: int = 4
    warmup_steps: int = 10
    rounds: int = 2
    time_limit: float = 80.0
    kill_replica_at: int = 0
    """The step at which a replica is killed; 0: never."""
    late_join_at: int = 0
    """The step at which another replica is started; 0: never."""
    has_dashboard: bool = True
    keeps: bool = False
    """Whether dashboard and store keep running after the end, until a signal."""
    publishes: bool = True
    seed: int = 0


class Interrupted(Exception):
    """A signal asked the demo to end."""


class Demo:
    """One run. `refresh` is called several times a second with the story so far."""

    def __init__(self, options: Options, refresh: Callable[[Story], None]) -> None:
        check_installed(options)
        self.options, self._refresh = options, refresh
        options.folder.mkdir(parents=True, exist_ok=True)
        self.story = Story(options.folder / "events.jsonl", options.num_steps, options.model)
        self.story.read()
        self._events: queue.Queue[Event] = queue.Queue()
        self._num_signals = 0
        self._parts: list[Part] = []
        direct = ",".join(each for each in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), HOST) if each)
        self._environment = {**ONE_THREAD, "no_proxy": direct, "NO_PROXY": direct}
        self.store = options.store or str(options.folder / "store")
        self._dashboard_port, *ports = free_ports(2 + options.num_replicas + (options.late_join_at > 0))
        self._urls = [f"http://{HOST}:{port}" for port in ports]
        # A run that is resumed may be beyond these steps.
        self._killed = self.story.step >= options.kill_replica_at
        self._joined = self.story.step >= options.late_join_at
        self._start = Path()

    def run(self) -> None:
        """Run everything; raises Interrupted after a signal. Nothing is left running either way."""
        is_done = False
        with self._signals():
            try:
                self._compile_kernels()
                start = self._start = self._policy()
                self._start_store()
                self._start_dashboard()
                replicas = [part for i in range(self.options.num_replicas) for part in self._replica(i, start)]
                trainer = self._part(
                    "trainer", *self._trainer(start), max_starts=4, environment={**self._environment, **THREADS}
                )
                for part in (trainer, *replicas, *self._environments()):
                    part.start()
                self.story.begin("starting the trainer and its replicas")
                self._follow(trainer)
                self.story.begin("checking")
                self._check_replicas()
                self.story.audit = self._verify()
                self.story.add({"event": "verified", **self.story.audit})
                is_done = True
            finally:
                self._stop(KEPT if is_done and self.options.keeps else ())
        self.story.begin("done")
        self._refresh(self.story)

    def wait(self) -> None:
        """Wait for a signal, if something was kept running."""
        with self._signals():
            try:
                while self._parts and not self._num_signals:
                    time.sleep(0.1)
            finally:
                self._stop()

    def _compile_kernels(self) -> None:
        """Compile kernels before anything is started or timed."""
        self.story.begin("compiling kernels")
        self._meanwhile(lambda: warm_up((16,)))
        self.story.started = time.time()

    def _policy(self) -> Path:
        """The initial weights: the policy in the package, or a model that is unpacked once."""
        if self.options.model == "wordle":
            return START
        file = self.options.cache / "smollm2-135m"
        if not file.exists():
            self.story.begin("unpacking the model")
            part = self._part("start", *module("smollm2.start", "--output", str(file)), environment=THREADS)
            part.start()
            while part.ended() is None:
                self._listen()
            part.wait_for_output()
            if part.ended():
                raise PartFailed(f"the start failed: {part.log.read_text(errors='replace')[-600:]}", part="start")
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

    def _start_dashboard(self) -> None:
        if self.options.has_dashboard:
            log, port = str(self.story.log), str(self._dashboard_port)
            command = ["dashboard", self.store, "--events", log, "--port", port, "--quiet"]
            self._part("dashboard", sys.executable, "-m", "deltawire_demo.part", "deltawire.cli", *command).start()
            self.story.dashboard = f"http://{HOST}:{port}/"

    def _port(self, number: int) -> str:
        return self._urls[number].rpartition(":")[2]

    def _part(
        self, name: str, *command: str, max_starts: int = 6, environment: dict[str, str] | None = None,
        defaults: Event | None = None,
    ) -> Part:  # fmt: skip
        log = self.options.folder / "logs" / f"{name}.log"
        part = Part(
            name, command, log=log, events=self._events, environment=environment or self._environment,
            max_starts=max_starts, defaults=defaults,
        )  # fmt: skip
        self._parts.append(part)
        return part

    def _environments(self) -> list[Part]:
        if self.options.model != "wordle":
            return []
        alone = {**self._environment, "WORDLE_TOKEN": ""}  # on this machine only, whatever another server's is
        return [self._part("environment", *module("wordle", "--port", self._port(0)), environment=alone)]

    def _replica(self, number: int, start: Path) -> list[Part]:
        """A replica of the demo's own, or a vLLM server and its agent."""
        name, port = f"replica-{number}", self._port(1 + number)
        self.story.replicas[name] = Follower()
        if self.options.engine == "torch":
            return [self._part(name, *module("replica", "--store", self.store, "--name", name, "--port", port))]
        folder, sizes = self._served(start)
        server = self._part(
            f"vllm-{number}", *server_command(folder, port, **sizes), environment={**self._environment, **ENVIRONMENT}
        )
        mirror = self.options.folder / "mirrors" / name
        agent = agent_command(self._urls[1 + number], self.store, name, mirror)
        return [server, self._part(name, *agent, defaults={"event": "pull", "replica": name})]

    def _served(self, start: Path) -> tuple[Path, dict[str, int]]:
        """The checkpoint that vLLM servers start from, and their sizes."""
        if self.options.model == "smollm2":
            return start, {"max_tokens": 128, "num_sequences": 64, "cache_bytes": 512 << 20}
        folder = self.options.folder / "served"
        if not (folder / "model.safetensors").exists():
            make_checkpoint(start, folder)
        return folder, {"max_tokens": MAX_TOKENS, "num_sequences": 128, "cache_bytes": 128 << 20}

    def _trainer(self, start: Path) -> list[str]:
        options = self.options
        name, environment = "trainer", ["--environment", self._urls[0]]
        if options.model == "smollm2":
            # A checkpoint has fp32 weights and moments, 1.6 GB.
            name, environment = "smollm2.trainer", ["--checkpoint-every", "20"]
        replicas = [word for url in self._urls[1:] for word in ("--replica", url)]
        return module(
            name, "--store", self.store, *environment, *replicas, "--engine", options.engine, "--policy", str(start),
            "--folder", str(options.folder), "--steps", str(options.num_steps), "--groups", str(options.num_groups),
            "--warmup", str(options.warmup_steps), "--rounds", str(options.rounds),
            "--time-limit", str(options.time_limit), "--seed", str(options.seed),
            *([] if options.publishes else ["--no-publish"]),
        )  # fmt: skip

    def _follow(self, trainer: Part) -> None:
        """Wait until the trainer is done; restart it and other parts that end too early."""
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
        """Process the events of the parts, and refresh the view."""
        if self._num_signals:
            raise Interrupted
        with suppress(queue.Empty):
            self.story.add(self._events.get(timeout=0.1))
        self._drain()
        self._refresh(self.story)

    def _meanwhile(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and process events meanwhile."""
        doing = ThreadPoolExecutor(1).submit(work)
        while not doing.done():
            self._listen()
        return doing.result()

    def _drain(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.story.add(self._events.get_nowait())

    def _do_harm(self) -> None:
        """Kill a replica, and start another one, at the steps of the options."""
        options, step = self.options, self.story.step
        if step >= options.kill_replica_at and not self._killed:
            self._killed = True
            name = "replica-0" if options.engine == "torch" else "vllm-0"
            next(part for part in self._parts if part.name == name).kill()
            self._note_disturbance("killed", name, "replica-0")
        if step >= options.late_join_at and not self._joined:
            self._joined = True
            name = f"replica-{options.num_replicas}"
            self._note_disturbance("started", name, name)
            for part in self._replica(options.num_replicas, self._start):
                part.start()

    def _note_disturbance(self, what: str, part: str, replica: str) -> None:
        self.story.add({
            "event": "disturbance", "what": what, "part": part, "replica": replica, "step": self.story.step,
        })  # fmt: skip

    def _check_replicas(self) -> None:
        """Ask each replica for the digest of its memory, once it is at the last version."""
        done = self.story.done or {}
        deadline = time.monotonic() + REACH_SECONDS
        for name in sorted(self.story.replicas):
            number = int(name.rpartition("-")[2])
            while True:
                self._listen()
                try:
                    found = self._measured(self._urls[1 + number])
                except (httpx.HTTPError, ValueError) as error:
                    found = {"version": None, "digest": None, "error": str(error)}
                if found["version"] == done.get("version") or time.monotonic() > deadline:
                    break
            follower = self.story.replicas[name]
            follower.version, follower.digest = found["version"], found["digest"]
            self.story.add({"event": "checked", "replica": name, **found, "trainer": done.get("digest")})

    def _measured(self, url: str) -> Event:
        """The version of a replica, and the digest of the weights in its memory."""
        found: Event
        if self.options.engine == "torch":
            found = httpx.get(f"{url}/digest", timeout=10, trust_env=False).json()
        else:
            ended = self._printed(measure_command(url, self.store))
            if ended.returncode:
                raise ValueError(ended.stderr.strip()[-300:])
            found = json.loads(ended.stdout)
        return found

    def _printed(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, **self._environment}
        return self._meanwhile(
            lambda: subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # noqa: S603
        )

    def _verify(self) -> Event:
        """Verify the whole chain with the command that anyone can run."""
        command = [sys.executable, "-m", "deltawire.cli", "verify", self.store, "--format", "json"]
        ended = self._printed(command)
        try:
            report: Event = json.loads(ended.stdout)
        except ValueError:
            report = {"ok": False, "error": ended.stderr.strip()[-600:]}
        return {"ok": ended.returncode == 0, "command": f"deltawire verify {self.store}", "report": report}

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

    def _stop(self, kept: tuple[str, ...] = ()) -> None:
        """End all parts, the trainer first: it writes a checkpoint. A second signal kills them."""
        if self._num_signals:
            self.story.begin("stopping; press Ctrl-C again to stop at once")
            self._refresh(self.story)
        ending = [part for part in reversed(self._parts) if part.name not in kept]
        for part in sorted(ending, key=lambda part: part.name != "trainer"):
            part.stop(20 if part.name == "trainer" else 8, should_hurry=lambda: self._num_signals > 1)
        self._parts = [part for part in self._parts if part.name in kept]
        self._drain()


def check_installed(options: Options) -> None:
    """Raise MissingDependency if what samples, or the model, needs a package that is missing."""
    if options.engine == "vllm" and find_spec("vllm") is None:
        raise MissingDependency(
            "--engine vllm needs vLLM 0.29 or later: pip install 'deltawire[vllm]'; for a CPU see docs/guides/vllm.md"
        )
    if options.model == "smollm2":
        smollm2.check_installed()
