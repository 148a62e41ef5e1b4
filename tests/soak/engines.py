"""Real vLLM servers with agents beside them: kills in the middle of updates, and a fleet that follows one run."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from deltawire import Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.torch import TorchEngine
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.errors import StoreError
from deltawire.store import open_store
from soak.processes import Stuck, wait_until
from soak.report import Tally
from support.servers import BUCKET, S3Server, free_ports
from support.vllm_server import Trainer, Vllm, make_model

# A server takes its time to start, more so when both cores are busy.
SERVER_SECONDS = 300.0
VICTIMS = ["agent", "agent", "server", "store"]


class AgentProcess:
    """`deltawire attach`, as one would run it."""

    def __init__(self, url: str, server: Vllm, mirror: Path, environment: dict[str, str]) -> None:
        (self.port,) = free_ports(1)
        self._command = [
            sys.executable, "-m", "deltawire.cli", "attach", "--engine", "vllm", "--url", server.url, "--from", url,
            "--mirror", str(mirror), "--poll", "0.1", "--listen", f"127.0.0.1:{self.port}", "--name", "agent",
            "--format", "json",
        ]  # fmt: skip
        self._environment = {**os.environ, **environment}
        self._log = mirror.with_suffix(".log")
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(how)
        self._process.wait(60)

    def status(self) -> dict[str, Any] | None:
        with suppress(httpx.HTTPError, ValueError):
            found: dict[str, Any] = httpx.get(
                f"http://127.0.0.1:{self.port}/status", timeout=10, trust_env=False
            ).json()
            return found
        return None

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


class Truth(threading.Thread):
    """Asks server and agent all the time what they have, and compares that with what the version is."""

    def __init__(self, server: Vllm, agent: AgentProcess, trainer: Trainer, tally: Tally) -> None:
        super().__init__(daemon=True)
        self._server, self._agent, self._trainer, self._tally = server, agent, trainer, tally
        self._ended = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=30, trust_env=False) as client:
            while not self._ended.wait(0.05):
                with suppress(httpx.HTTPError, KeyError, ValueError):
                    self._look_at_server(client)
                self._look_at_agent()

    def _look_at_server(self, client: httpx.Client) -> None:
        def version() -> str:
            return str(client.get("/weight_info").raise_for_status().json()["weight_version"])

        def is_paused() -> bool:
            return bool(client.get("/is_paused").raise_for_status().json()["is_paused"])

        before, paused = version(), is_paused()
        found = client.post("/weight_checker", json={"action": "checksum"}).raise_for_status().json()["checksums"]
        # Weights change in a pause, and then the version: where it is the same after one that was none, no update lies
        # between.
        if is_paused() or paused or version() != before:
            return
        self._tally.count("Looks", "at a server")
        # "default" is what a server says of the weights that it was started with.
        expected = self._trainer.expected.get(int(before) if before.isdigit() else 0)
        if expected is not None and found != expected:
            self._tally.wrong.append(f"the server says version {before}, and has other weights")

    def _look_at_agent(self) -> None:
        status = self._agent.status()
        if status is None or status.get("version") is None:
            return
        self._tally.count("Looks", "at an agent")
        expected = self._trainer.digests.get(status["version"])
        if expected is not None and status["digest"] != expected:
            self._tally.wrong.append(f"the agent says version {status['version']} with digest {status['digest']}")

    def close(self) -> None:
        self._ended.set()
        self.join()


def kills(
    server: S3Server, place: Path, tally: Tally, *, num_kills: int, seed: int, progress: Callable[[str], None]
) -> None:
    """Kill the agent, the vLLM server or the store in the middle of updates."""
    place.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(seed)
    url = f"s3://{BUCKET}/engine-kills-{seed}"
    trainer = Trainer(place, open_store(url, config=server.config))
    trainer.publish(density=0)
    with ExitStack() as stack:
        vllm = Vllm(place / "base", log=place / "vllm.log")
        stack.callback(vllm.close)
        vllm.wait(SERVER_SECONDS)
        agent = AgentProcess(url, vllm, place / "mirror", server.environment)
        stack.callback(lambda: agent.kill(signal.SIGTERM))
        truth = Truth(vllm, agent, trainer, tally)
        truth.start()
        stack.callback(truth.close)
        _wait_current(vllm, trainer, 0, agent)
        victims = [VICTIMS[i % len(VICTIMS)] for i in range(num_kills)]
        random_.shuffle(victims)
        for number, victim in enumerate(victims):
            version = trainer.publish()
            time.sleep(random_.uniform(0, 0.6))
            if victim == "agent":
                agent.kill()
                agent.start()
            elif victim == "server":
                vllm.kill()
                vllm.start()
                vllm.wait(SERVER_SECONDS)
            else:
                server.kill()
                time.sleep(random_.uniform(0, 1.0))
                server.start_again()
                version = _publish_anyhow(trainer, version)
            tally.count("Kills beside an engine", victim)
            try:
                _wait_current(vllm, trainer, version, agent)
            except Stuck as stuck:
                tally.stuck.append(f"after the kill of the {victim}: {stuck}; {agent.log()}")
                return
            progress(f"kill {number + 1} of {num_kills}: {victim}; back at version {version}")


def _publish_anyhow(trainer: Trainer, version: int) -> int:
    """A version after a store's death; it may take more than one try."""
    for _ in range(20):
        with suppress(StoreError):
            return trainer.publish()
        time.sleep(0.5)
    return version


def _wait_current(vllm: Vllm, trainer: Trainer, version: int, agent: AgentProcess) -> None:
    def is_current() -> bool:
        with suppress(httpx.HTTPError):
            return vllm.weight_version == str(version) and vllm.checksums() == trainer.expected[version]
        return False

    wait_until(is_current, f"the server to be at version {version}", SERVER_SECONDS)

    def agent_agrees() -> bool:
        status = agent.status()
        return status is not None and status.get("version") == version

    wait_until(agent_agrees, f"the agent to say version {version}", SERVER_SECONDS)
    # It serves, and was not left paused.
    assert vllm.complete([1, 2, 3], num_tokens=2)[2] == "length"


def fleet(
    server: S3Server, place: Path, tally: Tally, *, num_versions: int, seed: int, progress: Callable[[str], None]
) -> None:
    """Two vLLM servers and three torch modules follow a run; another module joins later."""
    place.mkdir(parents=True, exist_ok=True)
    store = open_store(f"s3://{BUCKET}/fleet-{seed}", config=server.config)
    trainer = Trainer(place, store)
    trainer.publish(density=0)
    with ExitStack() as stack:
        servers = [Vllm(place / "base", log=place / f"vllm-{i}.log") for i in range(2)]
        for each in servers:
            stack.callback(each.close)
        for each in servers:
            each.wait(SERVER_SECONDS)
        replicas = [
            stack.enter_context(_following(store, EngineTarget(VllmEngine(each.url)), f"vllm-{i}"))
            for i, each in enumerate(servers)
        ]
        replicas += [stack.enter_context(_module(store, i)) for i in range(3)]
        joined = False
        for _ in range(num_versions):
            version = trainer.publish()
            if version >= 0.6 * num_versions and not joined:
                replicas.append(stack.enter_context(_module(store, 3)))
                joined = True
            time.sleep(0.05)
        for replica in replicas:
            replica.wait(version, SERVER_SECONDS)
            progress(f"{replica.name} is at version {replica.version} after {replica.num_pulls} pulls")
            tally.count("Pulls in a fleet", replica.name, replica.num_pulls)
            state = replica.target.served()
            if state is None or str(state.digest) != trainer.digests[version]:
                tally.wrong.append(f"{replica.name} is at {state}")
        for each in servers:
            if (each.weight_version, each.checksums()) != (str(version), trainer.expected[version]):
                tally.wrong.append(f"a server says {each.weight_version} at the end, and may have other weights")
        for replica in replicas:
            if isinstance(replica.target.engine, TorchEngine):
                own = replica.target.engine.model.state_dict()
                if any(own[name].ne(value).any() for name, value in trainer.weights.items()):
                    tally.wrong.append(f"{replica.name} has other weights at the end")


@contextmanager
def _following(store: Any, target: EngineTarget, name: str) -> Iterator[Replica]:
    with Replica(store, target, name=name) as replica, replica.watching(poll_seconds=0.2):
        yield replica


@contextmanager
def _module(store: Any, number: int) -> Iterator[Replica]:
    engine = TorchEngine(make_model(seed=number + 1))
    with _following(store, EngineTarget(engine), f"torch-{number}") as replica:
        yield replica
