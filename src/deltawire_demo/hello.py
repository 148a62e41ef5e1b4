"""A trainer and two replicas on this machine, as processes that share nothing but a store.

The trainer takes small steps on random weights, as RL does, and publishes each. One replica holds its weights in
memory, the other in a folder; the second is killed half-way and comes back. In the end the weights that each of the
three holds are hashed, without any code of deltawire.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltawire.errors import DeltawireError
from deltawire.follow.replica import Replica
from deltawire.format.checkpoint import Checkpoint
from deltawire.publish.publisher import Publisher
from deltawire.store import open_store
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor

BF16 = DTYPES["BF16"]
NUM_TENSORS = 8
SIZE = 1 << 20
FULL_BYTES = NUM_TENSORS * SIZE * BF16.itemsize
STEP_SECONDS = 0.25
# Of weights with a standard deviation of 0.02, this changes one in seventy by a bit of bf16.
UPDATE = np.float32(3.5e-7)
PATIENCE_SECONDS = 120.0
AWAY_STEPS = 3
REPLICAS = ("memory", "folder")

Bits = npt.NDArray[np.uint16]
OnEvent = Callable[["Hello", dict[str, Any]], None]


@dataclass(slots=True)
class Hello:
    """The progress and the results."""

    store: str
    num_steps: int
    full_bytes: int = FULL_BYTES
    versions: dict[str, int] = field(default_factory=dict)
    """The versions of the trainer and the replicas."""
    sha256: dict[str, str] = field(default_factory=dict)
    step_bytes: list[int] = field(default_factory=list)
    """The bytes of each version after the first."""
    killed_at: int | None = None
    back_from: int | None = None
    """The version that the killed replica still had when it came back."""
    longest_step_seconds: float = 0.0
    uploaded_bytes: int = 0
    """Everything in the store: deltas, skip deltas, anchors and documents."""

    def take(self, event: dict[str, Any]) -> None:
        """Process an event."""
        name, version = event["who"], event["version"]
        if "ready" in event:
            self.back_from = version
        if version is not None:
            self.versions[name] = version
        if "sha256" in event:
            self.sha256[name] = event["sha256"]
        if "step_seconds" in event and version:
            self.step_bytes.append(event["num_bytes"])
            self.longest_step_seconds = max(self.longest_step_seconds, event["step_seconds"])

    def lose(self, name: str) -> dict[str, Any]:
        """Note that a replica was killed; returns the event."""
        self.killed_at = self.versions[name]
        self.sha256.pop(name, None)
        return {"who": name, "version": self.killed_at, "killed": True}

    def misses(self, name: str) -> int:
        """How many versions a replica is behind the trainer; enough to restart it if the trainer is done."""
        done = AWAY_STEPS if "trainer" in self.sha256 else 0
        return max(self.versions["trainer"] - self.versions[name], done)

    @property
    def all_bytes(self) -> int:
        """The bytes of full weights for every version."""
        return self.full_bytes * self.num_steps

    @property
    def ok(self) -> bool:
        return len(self.sha256) == 3 and len(set(self.sha256.values())) == 1

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self), "all_bytes": self.all_bytes}


def say_hello(url: str, num_steps: int, on_event: OnEvent) -> Hello:
    """Run all three to the end; `on_event` is called after each event."""
    with tempfile.TemporaryDirectory(prefix="deltawire-hello-") as folder, Parts(url, num_steps, folder) as parts:
        hello = Hello(url, num_steps)
        for name in REPLICAS:
            parts.start(name)
        while len(hello.sha256) < 3 or hello.killed_at is None:
            event = parts.next()
            hello.take(event)
            on_event(hello, event)
            if "ready" in event and len(hello.versions) == 0 and all(map(parts.is_ready, REPLICAS)):
                parts.start("trainer")
            if hello.killed_at is None and hello.versions.get("folder", -1) >= num_steps // 4:
                parts.kill("folder")
                on_event(hello, hello.lose("folder"))
            if parts.is_away("folder") and hello.misses("folder") >= AWAY_STEPS:
                parts.start("folder")
        hello.uploaded_bytes = sum(stat.num_bytes for stat in open_store(url).list(""))
        return hello


class Parts:
    """The processes. Each prints events, one JSON object per line."""

    def __init__(self, url: str, num_steps: int, folder: str) -> None:
        self._arguments = [url, str(num_steps), folder]
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._ready: set[str] = set()
        self._events: queue.SimpleQueue[tuple[subprocess.Popen[str], dict[str, Any] | str]] = queue.SimpleQueue()

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "deltawire_demo.hello", name, *self._arguments]
        # What a process leaves behind that is killed is removed with the folder.
        pipe, environment = subprocess.PIPE, {**os.environ, "TMPDIR": self._arguments[-1]}
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)  # noqa: S603
        self._running[name] = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        with process:
            for line in process.stdout:
                self._events.put((process, json.loads(line)))
            said = process.stderr.read().strip()
        self._events.put((process, said))

    def next(self) -> dict[str, Any]:
        """The next event of a process that was not killed."""
        while True:
            try:
                process, event = self._events.get(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                raise DeltawireError(
                    f"no event for {PATIENCE_SECONDS:.0f} s: try again with fewer other jobs on this machine"
                ) from None
            name = next((name for name, each in self._running.items() if each is process), None)
            if name is None:
                continue
            if not isinstance(event, str):
                self._ready.add(name)
                return event
            del self._running[name]
            if process.returncode != 0:
                raise DeltawireError(f"the {name} process ended with status {process.returncode}: {event[-2000:]}")

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise DeltawireError(f"the {name} process ended with status {process.returncode} before it was killed")

    def is_ready(self, name: str) -> bool:
        return name in self._ready

    def is_away(self, name: str) -> bool:
        return name not in self._running

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def train(url: str, num_steps: int) -> None:
    """Train, and publish each step."""
    rng = np.random.default_rng(0)
    masters = {f"layers.{i}": rng.standard_normal(SIZE, np.float32) * np.float32(0.02) for i in range(NUM_TENSORS)}
    weights = {name: Tensor(BF16, (SIZE,), to_bf16(master)) for name, master in masters.items()}
    started = time.monotonic()
    with Publisher(url, weights, run="hello", threads=1) as publisher:
        for step in range(num_steps):
            if step:
                time.sleep(max(started + STEP_SECONDS - time.monotonic(), 0))
                for name, master in masters.items():
                    master += rng.standard_normal(SIZE, np.float32) * UPDATE
                    weights[name].bits[:] = to_bf16(master)
            before, started = started, time.monotonic()
            stats = publisher.publish(step=step).wait().stats
            say("trainer", step, step_seconds=started - before, **{key: stats[key] for key in ("num_bytes", "density")})
    say("trainer", num_steps - 1, sha256=hash_of(weights[name].bits for name in sorted(weights)))


def follow(name: str, url: str, num_steps: int, folder: str) -> None:
    """Follow the run until the last version."""
    own = {f"layers.{i}": Tensor(BF16, (SIZE,), np.zeros(SIZE, np.uint16)) for i in range(NUM_TENSORS)}
    mirror = Path(folder) / "mirror"
    with Replica(url, own if name == "memory" else mirror, name=name, heartbeat_seconds=None, threads=1) as replica:
        say(name, replica.version, ready=True)
        while replica.version != num_steps - 1:
            replica.wait(0 if replica.version is None else replica.version + 1, timeout=PATIENCE_SECONDS)
            pull = replica.last_pull
            say(name, replica.version, num_bytes=None if pull is None else pull.num_bytes)
    held = own if name == "memory" else Checkpoint(mirror)
    say(name, num_steps - 1, sha256=hash_of(held[each].bits for each in sorted(own)))


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Round to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def hash_of(arrays: Iterator[Any]) -> str:
    state = sha256()
    for array in arrays:
        state.update(np.ascontiguousarray(array[:]).tobytes())
    return state.hexdigest()


def say(who: str, version: int | None, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"who": who, "version": version, **fields}) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, url, num_steps, folder = sys.argv[1:]
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(url, int(num_steps)) if name == "trainer" else follow(name, url, int(num_steps), folder)
    except (DeltawireError, OSError) as error:
        sys.exit(str(error))
    if name != "trainer":
        # Until the parent ends this process, or is gone.
        sys.stdin.read()


if __name__ == "__main__":
    main()
