"""Two writers that publish the same version at the same moment: one has it, the other is told to stop."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltawire import DeltawireError, Replica, open_store
from deltawire.errors import Fenced
from deltawire.run.keys import read_document_key
from soak import model
from soak.checker import Checker
from soak.processes import Nursery, Stuck, Worker, wait_until
from soak.report import Tally
from soak.worker import last_step, make_publisher

WAIT_SECONDS = 60.0
# Every so many races are between processes, every so many about the first version of a run.
PROCESSES_EVERY, NEW_RUN_EVERY = 5, 10

Progress = Callable[[str], None]
Outcome = tuple[str, int, str]


class Meeting:
    """A store whose commits wait for the other writer's, so that both are sent at one moment."""

    def __init__(self, store: Any, barrier: threading.Barrier) -> None:
        self._store, self._barrier = store, barrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> None:
        about = read_document_key(key)
        if about is not None and about[2]:
            self._barrier.wait(WAIT_SECONDS)
        self._store.create(key, data)


class Races:
    """Races on one run, and a replica that watches all the time."""

    def __init__(self, nursery: Nursery, server: Any, place: Path, name: str, seed: int, tally: Tally) -> None:
        from support.servers import BUCKET

        place.mkdir(parents=True, exist_ok=True)
        self._nursery, self._place, self._seed, self.tally = nursery, place, seed, tally
        self._url, self._config = f"s3://{BUCKET}/{name}", server.config
        self.chance = random.Random(f"{seed} {name}")
        self.checker = Checker(self._store(), seed, tally, self.chance)
        self.held: dict[str, Any] = {}
        self.reader = Replica(self._store(), self.held, heartbeat_seconds=None, threads=1)
        self.seen: list[tuple[int | None, str]] = []
        self._num_started = 0

    def _store(self) -> Any:
        return open_store(self._url, config=self._config, timeout_seconds=10)

    def note(self, _pull: Any) -> None:
        """What the watching replica has after a pull."""
        self.seen.append((self.reader.version, model.fingerprint(self.held)))

    def race(self, processes: bool) -> None:
        before = self.checker.latest
        _, step = last_step(self.checker.store)
        steps = self.chance.sample(range(step + 1, step + 6), 2)
        outcomes = self._between_processes(steps) if processes else self._between_threads(step, steps)
        kind = "between processes" if processes else "between threads"
        self.tally.count("Races", f"{kind}, {'the first version' if before < 0 else 'a later version'}")
        self.checker.look(whole=True)
        results = sorted(outcome[0] for outcome in outcomes)
        if results != ["committed", "fenced"] or self.checker.latest != before + 1:
            self.tally.wrong.append(f"{self._url}: {outcomes} led from version {before} to {self.checker.latest}")
            return
        winner = next(number for number, outcome in enumerate(outcomes) if outcome[0] == "committed")
        manifest = self.checker.manifests[before + 1]
        if (manifest.step, manifest.writer) != (steps[winner], outcomes[winner][2]):
            self.tally.wrong.append(f"{self._url}: version {before + 1} is not the winner's")
        self.reader.wait(before + 1, WAIT_SECONDS)
        self.checker.pull_some()

    def _between_threads(self, step: int, steps: list[int]) -> list[Outcome]:
        barrier = threading.Barrier(2)
        meets = self.chance.random() < 0.5
        outcomes: list[Outcome] = [("nothing", -1, "")] * 2
        anchors = [self.chance.random() < 0.1 for _ in steps]

        def write(number: int) -> None:
            held = model.weights(self._seed, step)
            store = self._store()
            publisher = make_publisher(Meeting(store, barrier) if meets else store, held)
            model.advance(held, self._seed, steps[number])
            barrier.wait(WAIT_SECONDS)
            try:
                done = publisher.publish(step=steps[number], anchor=anchors[number]).wait(WAIT_SECONDS)
                outcomes[number] = ("committed", done.version, publisher.run.writer)
            except Fenced:
                outcomes[number] = (self._still_fenced(publisher), -1, publisher.run.writer)
            except DeltawireError as error:
                outcomes[number] = (f"{type(error).__name__}: {error}", -1, "")
            publisher.close()

        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def _still_fenced(self, publisher: Any) -> str:
        for _ in range(2):
            try:
                publisher.publish()
                return "fenced, and could publish again"
            except Fenced:
                continue
        return "fenced"

    def _between_processes(self, steps: list[int]) -> list[Outcome]:
        self._num_started += 1
        go = self._place / f"go-{self._num_started}"
        racers = []
        for number, step in enumerate(steps):
            spec = {"role": "racer", "url": self._url, "config": self._config, "seed": self._seed, "step": step}
            name = f"racer-{self._num_started}-{number}"
            racers.append(Worker(self._nursery, self._place, name, spec | {"go": str(go)}))
            racers[-1].start()
        for racer in racers:
            wait_until(lambda each=racer: any(line["event"] == "ready" for line in _read(each)), "a racer")
        go.touch()
        for racer in racers:
            if racer.wait_dead() != 0:
                raise Stuck(racer.output())
        outcomes = []
        for racer in racers:
            last = _read(racer)[-1]
            outcomes.append((last["event"], last.get("version", -1), last.get("writer", "")))
        return outcomes

    def end(self) -> None:
        for version, fingerprint in self.seen:
            self.checker.check("the reader", version, fingerprint)
        self.tally.count("Races", "pulls of a reader beside them", len(self.seen))
        self.reader.close()
        self.checker.look_again()
        self.tally.count("Comparisons with recomputed weights", "races", self.checker.num_checked)


def _read(worker: Worker) -> list[dict[str, Any]]:
    worker.news()
    return worker.lines


def run(
    nursery: Nursery, server: Any, place: Path, tally: Tally, *, num_races: int, seed: int, progress: Progress
) -> None:
    """All races, a few on each run."""
    for first in range(0, num_races, NEW_RUN_EVERY):
        number = first // NEW_RUN_EVERY
        races = Races(nursery, server, place / str(number), f"races-{seed}-{number}", seed + number, tally)
        todo = list(range(first, min(first + NEW_RUN_EVERY, num_races)))
        try:
            races.race(number % 2 == 1)
            with races.reader.watching(races.note, poll_seconds=0.02):
                for each in todo[1:]:
                    races.race(each % PROCESSES_EVERY == 0)
        except (Stuck, TimeoutError) as error:
            tally.stuck.append(f"{races._url}: {error}")
        races.end()
        progress(f"race {todo[-1] + 1}/{num_races}; {tally.verdict}")
