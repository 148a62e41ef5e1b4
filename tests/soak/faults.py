"""Publisher and replicas behind a proxy that misbehaves at random: whatever happens, no weights are ever wrong."""

import itertools
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltawire import DeltawireError, Replica, open_store
from deltawire.errors import Fenced
from soak import model
from soak.checker import Checker
from soak.report import Tally
from soak.worker import last_step, make_publisher

# Sides of a run that do not know of each other; most of their time is waiting.
LANES = 4
# More than a schedule has faults, so that whoever still fails at the last try would fail for ever.
MOST_TRIES = 16
WAIT_SECONDS = 120.0
# Silence that a client takes for a dead connection, and how long a stalled one is silent.
TIMEOUT_SECONDS = 0.4
STALL_SECONDS = 3.0

Progress = Callable[[str], None]
DOCUMENTS = "manifests/|run.json"
OBJECTS = "deltas/|anchors/"


def schedule(chance: random.Random) -> list[Any]:
    """Some faults for what comes next, each for a few requests."""
    from support.fault_proxy import Rule

    def some() -> dict[str, Any]:
        return {"count": chance.randint(1, 3), "probability": chance.choice([0.3, 1.0])}

    kinds: list[Callable[[], Rule]] = [
        lambda: Rule("latency", seconds=chance.uniform(0.02, 2 * TIMEOUT_SECONDS), **some()),
        lambda: Rule("reset", method="GET", after_bytes=chance.choice([0, 100, 400, 10_000]), **some()),
        lambda: Rule("close", method="GET", after_bytes=chance.choice([0, 100, 400, 10_000]), **some()),
        lambda: Rule("status", method=chance.choice(["", "GET", "PUT"]), **some()),
        lambda: Rule("stall", method="GET", after_bytes=chance.choice([0, 50, 400]), seconds=STALL_SECONDS, count=1),
        lambda: Rule("flip", method="GET", path=OBJECTS, after_bytes=chance.randrange(3000), **some()),
        lambda: Rule("flip", method="GET", path=DOCUMENTS, after_bytes=chance.randrange(1500), **some()),
        lambda: Rule("flip", method="GET", path="list-type", after_bytes=chance.randrange(2000), **some()),
        lambda: Rule("reset_upload", method="PUT", after_bytes=chance.choice([0, 100, 500]), **some()),
        lambda: Rule("drop_reply", method="PUT", path="manifests/", **some()),
        lambda: Rule("drop_reply", method="PUT", **some()),
    ]
    return [chance.choice(kinds)() for _ in range(chance.choice([0, 1, 1, 2, 3, 4]))]


class Lane:
    """One run: a publisher, a replica in memory and a mirror, each with a connection of its own."""

    def __init__(self, server: Any, proxy: Any, place: Path, name: str, seed: int, tally: Tally) -> None:
        from support.servers import BUCKET

        self.tally, self.seed, self.chance, self.proxy = tally, seed, random.Random(f"{seed} {name}"), proxy
        self._url, self._config = f"s3://{BUCKET}/{name}", server.config
        self.checker = Checker(open_store(self._url, config=server.config), seed, tally, self.chance)
        self.folder = place / name
        self.held: dict[str, Any] = {}
        self.step = 0
        self.publisher: Any = None
        self.replicas: dict[str, Replica | None] = {"memory": None, "mirror": None}

    def _store(self) -> Any:
        config = self._config | {"endpoint": self.proxy.endpoint}
        return open_store(self._url, config=config, timeout_seconds=TIMEOUT_SECONDS, retries=2)

    def sync(self) -> None:
        """Publish, then bring both replicas to the newest version."""
        self._new_faults()
        self._publish()
        self.checker.look()
        if self.checker.latest < 0:
            return
        for name in self.replicas:
            self._new_faults()
            # One that misses a version now and then takes longer ways later.
            if self.chance.random() < 0.9:
                self._pull(name)
        if self.chance.random() < 0.1:
            self._restart(self.chance.choice(list(self.replicas)))
        self.tally.count("Syncs", "done")

    def _new_faults(self) -> None:
        self.note_faults()
        self.proxy.rules = schedule(self.chance)

    def note_faults(self) -> None:
        for rule in self.proxy.rules:
            if rule.hits:
                where = {DOCUMENTS: " in a document", OBJECTS: " in an object", "list-type": " in a listing"}
                self.tally.count("Faults", rule.kind + where.get(rule.path, ""), rule.hits)

    def _publish(self) -> None:
        for _ in range(MOST_TRIES):
            try:
                if self.publisher is None:
                    self._open_publisher()
                self.step += self.chance.randint(1, 3)
                model.advance(self.held, self.seed, self.step)
                self.publisher.publish(step=self.step, anchor=self.chance.random() < 0.02).wait(WAIT_SECONDS)
                self.tally.count("Publishes", "committed")
                return
            except TimeoutError:
                self.tally.stuck.append(f"{self._url}: publish did not end")
                return
            except DeltawireError as error:
                self.tally.count("Publishes", f"{type(error).__name__}, made up for later")
                if isinstance(error, Fenced):
                    self._close_publisher()
        self.tally.stuck.append(f"{self._url}: no publish out of {MOST_TRIES} went well")

    def _open_publisher(self) -> None:
        _, step = last_step(self.checker.store)
        self.step = max(self.step, step)
        self.held = model.weights(self.seed, step)
        self.publisher = make_publisher(self._store(), self.held)

    def _close_publisher(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = None

    def _pull(self, name: str) -> None:
        errors: list[str] = []
        for tries in range(1, MOST_TRIES + 1):
            try:
                if self.replicas[name] is None:
                    target = {} if name == "memory" else self.folder
                    self.replicas[name] = Replica(self._store(), target, heartbeat_seconds=None, threads=1)
                self._one(name).pull()
                self.tally.count("Pulls behind the proxy", f"{name}: well")
            except DeltawireError as error:
                errors.append(f"{type(error).__name__}: {error}")
                self.tally.count("Pulls behind the proxy", f"{name}: {type(error).__name__}, tried again")
            if self._compare(name):
                self.tally.count("Tries until a replica was current", str(tries))
                return
        self.tally.stuck.append(f"{self._url}: {name} is not current after {MOST_TRIES} pulls: {errors}")
        self._restart(name)

    def _one(self, name: str) -> Replica:
        replica = self.replicas[name]
        assert replica is not None
        return replica

    def _compare(self, name: str) -> bool:
        """Whatever a pull has done, the weights are what the replica says; whether they are the newest."""
        replica = self.replicas[name]
        if replica is None:
            return False
        weights = replica.target.weights()
        if replica.version is None:
            if weights:
                self.tally.wrong.append(f"{self._url}: {name} has weights and says no version")
            return False
        self.checker.check(name, replica.version, model.fingerprint(weights))
        return replica.version == self.checker.latest

    def _restart(self, name: str) -> None:
        replica, self.replicas[name] = self.replicas[name], None
        if replica is not None:
            replica.close()

    def end(self) -> None:
        self.note_faults()
        self.proxy.rules = []
        self._close_publisher()
        for name in self.replicas:
            self._restart(name)
        self.checker.look_again()
        self.checker.pull_some()
        self.tally.count("Comparisons with recomputed weights", "faults", self.checker.num_checked)
        shutil.rmtree(self.folder, ignore_errors=True)


def run(server: Any, place: Path, tally: Tally, *, num_syncs: int, seed: int, progress: Progress) -> None:
    """All syncs, in several lanes at once."""
    from support.fault_proxy import FaultProxy

    place.mkdir(parents=True)
    done = itertools.count(1)

    def work(number: int) -> None:
        with FaultProxy("127.0.0.1", server.port, seed=seed + number) as proxy:
            lane = Lane(server, proxy, place, f"faults-{seed}-{number}", seed + number, tally)
            try:
                for _ in range(num_syncs // LANES + (number < num_syncs % LANES)):
                    lane.sync()
                    if (total := next(done)) % 10 == 0:
                        progress(f"sync {total}/{num_syncs}; version {lane.checker.latest}; {tally.verdict}")
            except Exception as error:
                tally.stuck.append(f"lane {number} ended with {type(error).__name__}: {error}")
            finally:
                lane.end()

    threads = [threading.Thread(target=work, args=(number,), name=f"lane-{number}") for number in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
