"""The processes that are killed: a trainer, replicas, and one that opens a folder as a user would.

Run as a script this is a nursery: it loads the product once and forks a worker for each line that it reads, since two
hundred starts of Python would take longer than all else. Workers are processes of their own, and they share nothing
that a store has opened. When its input ends, the nursery ends all of them.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
FENCED = 3
WAIT_SECONDS = 60.0
MAX_ATTEMPTS = 3

Spec = dict[str, Any]


class Log:
    """One line of JSON for each thing that happened, on its way to the file before the next one does."""

    def __init__(self, path: str) -> None:
        self._file: TextIO = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the process

    def __call__(self, **info: Any) -> None:
        self._file.write(json.dumps(info) + "\n")


def open_run(spec: Spec) -> Any:
    from deltawire import open_store

    return open_store(spec["url"], config=spec["config"], timeout_seconds=10)


def last_step(store: Any) -> tuple[int | None, int]:
    """The last version of a run and its step, or those to begin with."""
    from deltawire.run.run import Run

    run = Run(store)
    latest = run.latest() if run.exists() else None
    return latest, 0 if latest is None else run.manifest(latest).step or 0


def make_publisher(store: Any, held: Any, **options: Any) -> Any:
    from deltawire import Publisher
    from soak import model, points

    settings = {"skips": (2, points.LONGEST_SKIP), "most_deltas": 3, "anchors": 12, "threads": 1, **options}
    settings |= {"max_file_bytes": model.MAX_FILE_BYTES}
    return Publisher(store, held, dtype=model.DTYPES, **settings)


def trainer(spec: Spec, log: Log) -> int:
    """Takes up the run where it is and publishes without end. What was acknowledged is in the log."""
    from deltawire.errors import Fenced
    from soak import model

    # Not from the seed: after each restart the steps between versions are others, so that no version is made twice.
    chance = random.Random()
    store = open_run(spec)
    latest, step = last_step(store)
    held = model.weights(spec["seed"], step)
    try:
        publisher = make_publisher(store, held, files=spec["files"], run=spec["run"])
        log(event="started", version=publisher.version, found=latest, resumed=publisher.resumed)
        previous = None
        while True:
            step += chance.randint(1, 3)
            model.advance(held, spec["seed"], step)
            publication = publisher.publish(step=step, anchor=chance.random() < 0.03)
            if previous is not None:
                previous.wait(WAIT_SECONDS)
                log(event="acknowledged", version=previous.version, step=previous.step)
            previous = publication
            time.sleep(chance.uniform(0.0, 2 * spec["pause_seconds"]))
    except Fenced as error:
        log(event="fenced", error=str(error))
        return FENCED


def replica(spec: Spec, log: Log) -> int:
    """Stays current, and logs what the weights are after each pull."""
    from deltawire import DeltawireError, Replica
    from soak import model

    target = spec["folder"] or {}
    held = Replica(open_run(spec), target, name=spec["name"], heartbeat_seconds=0.5, threads=1)
    log(event="started", version=held.version)
    pull = held.pull

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return pull(*args, **kwargs)
        except DeltawireError as error:
            log(event="error", error=f"{type(error).__name__}: {error}", version=held.version)
            raise

    def tell(done: Any) -> None:
        state = held.target.state()
        told = None if state is None else state.version
        weights = held.target.weights()
        log(event="pulled", version=told, asked=done.version, weights=model.fingerprint(weights), anchor=done.anchor,
            faults=held.num_faults)  # fmt: skip

    held.pull = watched  # type: ignore[method-assign]
    held.watch(tell, poll_seconds=spec["poll_seconds"])
    return 0


def opener(spec: Spec, log: Log) -> int:
    """Opens a mirror's folder and says what it holds, then reads it as a checkpoint, then with safetensors."""
    import numpy as np

    from deltawire import Checkpoint
    from deltawire.follow.mirror import Mirror
    from soak import model

    mirror = Mirror(spec["folder"])
    state = mirror.state()
    found: dict[str, Any] = {"version": None if state is None else state.version}
    if state is not None:
        found["weights"] = model.fingerprint(mirror.weights())
    mirror.close()
    if state is not None:
        checkpoint = Checkpoint(spec["folder"])
        found["checkpoint"], found["stated"] = model.fingerprint(dict(checkpoint)), checkpoint.version
        if spec["safetensors"]:
            import safetensors

            arrays = {}
            for file in checkpoint.shards:
                data = (Path(spec["folder"]) / file).read_bytes()
                arrays |= {name: np.frombuffer(each["data"], np.uint8) for name, each in safetensors.deserialize(data)}
            found["safetensors"] = model.fingerprint(arrays)
    found["files"] = sorted(file.name for file in Path(spec["folder"]).iterdir())
    log(event="opened", **found)
    return 0


def racer(spec: Spec, log: Log) -> int:
    """One of two writers: prepares, waits for the start, publishes, and tries once more."""
    from deltawire.errors import DeltawireError, Fenced
    from soak import model

    store = open_run(spec)
    _, step = last_step(store)
    held = model.weights(spec["seed"], step)
    publisher = make_publisher(store, held)
    model.advance(held, spec["seed"], spec["step"])
    log(event="ready", version=publisher.version, resumed=publisher.resumed)
    deadline = time.monotonic() + WAIT_SECONDS
    while not Path(spec["go"]).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the race was not started")
        time.sleep(0.0005)
    try:
        done = publisher.publish(step=spec["step"]).wait(WAIT_SECONDS)
        log(event="committed", version=done.version, writer=publisher.run.writer)
    except Fenced:
        for _ in range(2):
            try:
                publisher.publish(step=spec["step"])
                log(event="wrong", error="a fenced writer could publish again")
            except Fenced:
                continue
        log(event="fenced", writer=publisher.run.writer)
    except DeltawireError as error:
        log(event="wrong", error=f"{type(error).__name__}: {error}")
    publisher.close()
    return 0


ROLES = {"trainer": trainer, "replica": replica, "opener": opener, "racer": racer}


def warm() -> None:
    """Load what every worker needs, and nothing that a fork would break: no store is opened."""
    import numpy as np

    import deltawire.follow.replica
    import deltawire.maintain.gc
    import deltawire.publish.publisher
    import deltawire.store.clouds
    from deltawire.publish.history import History
    from deltawire.tensors.weights import Viewed
    from deltawire.workers import SERIAL
    from soak import model

    held = model.weights(0, 0)
    for encoding in ("auto", "coo", "gap", "context", "dense"):
        delta = deltawire.diff(held, model.weights(0, 1), dtype=model.DTYPES, encoding=encoding, threads=1)
        deltawire.apply(delta, {name: np.copy(array) for name, array in held.items()}, dtype=model.DTYPES, threads=1)
    history = History(Viewed(held, model.DTYPES), 0)
    history.stage(1, Viewed(model.weights(0, 1), model.DTYPES), SERIAL)
    history.pack(1, SERIAL)
    history.at("embed", 0)[:10]


def run_worker(spec: Spec) -> int:
    """What a forked process does, from its first to its last breath."""
    from soak import points

    with open(os.devnull, "r+") as nothing, open(spec["output"], "a") as output:
        for fd, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file.fileno(), fd)
    if spec.get("armed"):
        install = points.install_trainer if spec["role"] == "trainer" else points.install_replica
        install(points.Points(Path(spec["armed"])))
    try:
        return ROLES[spec["role"]](spec, Log(spec["log"]))
    except BaseException:
        traceback.print_exc()
        return 1


def nursery() -> None:
    warm()
    print("ready", flush=True)
    alive: set[int] = set()
    for line in sys.stdin:
        asked = json.loads(line)
        answer: int | None
        if "role" in asked:
            answer = os.fork()
            if answer == 0:
                os._exit(run_worker(asked))
            alive.add(answer)
        else:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            alive.discard(pid)
            answer = None if pid == 0 else os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)
    nursery()
