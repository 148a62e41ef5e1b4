"""A trainer and two replicas, killed at every named point and at random moments, and looked at after each kill."""

import itertools
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltawire import open_store
from soak import points
from soak.checker import Checker
from soak.processes import Nursery, Stuck, Worker, wait_until
from soak.report import Tally
from soak.worker import FENCED

KILLED = -9
ROUNDS_PER_RUN = 20
AT_ONCE = 3
PAUSE_SECONDS = 0.2
POLL_SECONDS = 0.05
# The longest that a random kill waits for its moment.
LONGEST_SECONDS = 0.4

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and where; no point is a random moment. `weights` is what becomes of a mirror's before."""

    victim: str
    point: str = ""
    hits: int = 1
    weights: str = "kept"

    def __str__(self) -> str:
        return f"{self.victim} at {self.point or 'a random moment'}"


def plan(num_random: int, num_each: int, chance: random.Random, share: int = 1) -> list[Kill]:
    """Every point `num_each` times or more, and so many random moments, in random order; one in `share` of all."""
    kills = []
    for victim, names in (("trainer", points.TRAINER), ("memory", points.MEMORY), ("mirror", points.MIRROR)):
        for point in names:
            for _ in range(num_each):
                hits = chance.randint(1, 3) if point in MANY else 1
                kills.append(Kill(victim, point, hits, _before(victim, point, chance)))
    # A file at a time over the weights that are there is the longest of all: kill it after each.
    kills += [Kill("mirror", "load: a file moved", hits, "changed") for hits in ((1, 3, 5, 6) if num_each else ())]
    victims = ["trainer", "memory", "mirror", "mirror", "all"]
    kills += [Kill(chance.choice(victims), weights=chance.choice(["kept", "kept", "none"])) for _ in range(num_random)]
    chance.shuffle(kills)
    return kills[::share]


# Points that are passed several times in one operation.
MANY = {
    "stage: a chunk", "encode: a tensor", "delta: after put", "anchor: before put", "anchor: after put",
    "keep: a tensor", "long delta: after put",
    "fetch: before an object", "fetch: after an object", "write: a patch", "load: a tensor", "load: a file moved",
}  # fmt: skip


def _before(victim: str, point: str, chance: random.Random) -> str:
    return chance.choice(["none", "changed"]) if victim == "mirror" and point in points.LOADING else "kept"


class World:
    """One run with its three processes."""

    def __init__(self, nursery: Nursery, server: Any, place: Path, name: str, seed: int, tally: Tally) -> None:
        from support.servers import BUCKET

        place.mkdir(parents=True)
        self.tally, self.chance = tally, random.Random(f"{seed} {name}")
        self.folder = place / "mirror"
        url = f"s3://{BUCKET}/{name}"
        (place / "config.json").write_text('{"model_type": "soak"}')
        common = {"url": url, "config": server.config, "seed": seed, "poll_seconds": POLL_SECONDS}
        self.nursery, self.place, self.common = nursery, place, common
        files = [str(place / "config.json")]
        specs = {
            "trainer": {"role": "trainer", "files": files, "run": name, "pause_seconds": PAUSE_SECONDS},
            "memory": {"role": "replica", "name": "memory", "folder": None},
            "mirror": {"role": "replica", "name": "mirror", "folder": str(self.folder)},
        }
        self.workers = {name: Worker(nursery, place, name, common | spec) for name, spec in specs.items()}
        self.checker = Checker(open_store(url, config=server.config), seed, tally, self.chance)
        # The mirror's folder must say at least this version; -1 while it may hold nothing.
        self.mirrored = -1

    @property
    def replicas(self) -> list[Worker]:
        return [self.workers["memory"], self.workers["mirror"]]

    def start(self) -> None:
        """Start whoever does not live, and wait until all is well."""
        for worker in self.workers.values():
            if worker.pid is None:
                worker.start()
        self.catch_up()

    def round(self, kill: Kill) -> None:
        """One kill, the look at what it has left, and the return to normal."""
        victims = list(self.workers) if kill.victim == "all" else [kill.victim]
        if not kill.point:
            self._kill_at_random(victims, kill)
        elif kill.point in points.NEW_RUN:
            self.workers["trainer"].arm(kill.point, kill.hits)
            for worker in self.workers.values():
                worker.start()
            self._die(self.workers["trainer"], kill)
        else:
            self._kill_at_point(self.workers[kill.victim], kill)
        self.inspect()
        for name in victims:
            self.workers[name].disarm()
            if name == "mirror":
                self.open_mirror(str(kill) if kill.point in points.LOADED else "")
        self.start()
        self.tally.count("Kills", str(kill))

    def _kill_at_random(self, victims: list[str], kill: Kill) -> None:
        if kill.weights == "none" and "mirror" in victims:
            self._spoil("none")
        time.sleep(self.chance.uniform(0, LONGEST_SECONDS))
        for name in victims:
            self._expect(self.workers[name], self.workers[name].kill(), kill)

    def _kill_at_point(self, victim: Worker, kill: Kill) -> None:
        if kill.point in points.LOADING:
            self._end(victim)
            if kill.victim == "mirror":
                self._change_folder(kill.weights)
            victim.arm(kill.point, kill.hits)
            victim.start()
        else:
            victim.arm(kill.point, kill.hits)
        self._die(victim, kill)

    def _die(self, victim: Worker, kill: Kill) -> None:
        self._expect(victim, victim.wait_dead(), kill)
        if not victim.fired:
            self.tally.stuck.append(f"{kill}: it ended elsewhere: {victim.output()}")

    def _expect(self, victim: Worker, code: int, kill: Kill) -> None:
        if code != KILLED:
            self.tally.stuck.append(f"{kill}: {victim.name} had ended by itself with {code}: {victim.output()}")

    def _end(self, worker: Worker) -> None:
        if worker.pid is not None:
            worker.kill()

    def _spoil(self, weights: str) -> None:
        mirror = self.workers["mirror"]
        self._end(mirror)
        self._change_folder(weights)
        mirror.start()

    def _change_folder(self, weights: str) -> None:
        """Take the folder away, or change weights in it behind the mirror's back."""
        if weights == "kept":
            return
        self.read_logs()
        self.mirrored = -1
        if weights == "none":
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        shards = sorted(self.folder.glob("*.safetensors"))
        if shards:
            with self.chance.choice(shards).open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 0x55]))

    def inspect(self) -> None:
        """The store after a kill, and all that the workers have said up to it."""
        self.checker.look(whole=True)
        self.checker.pull_some()
        self.read_logs()

    def read_logs(self) -> None:
        for worker in self.workers.values():
            for line in worker.news():
                self._check_line(worker, line)

    def _check_line(self, worker: Worker, line: dict[str, Any]) -> None:
        event = line["event"]
        if event == "pulled":
            self.checker.check(worker.name, line["version"], line["weights"])
            self.tally.count("Pulls", f"{worker.name}, {'anchor' if line['anchor'] else 'delta'}")
            if worker.name == "mirror":
                self.mirrored = max(self.mirrored, line["version"] or 0)
            if line["faults"]:
                self.tally.count("Faults that a pull has met by itself", worker.name)
        elif event == "acknowledged":
            self.checker.check_acknowledged(line["version"], line["step"])
            self.tally.count("Versions", "acknowledged")
        elif event == "error":
            self.tally.wrong.append(f"{self.checker.store.url}: {worker.name} saw {line['error']}")
        elif event == "started" and worker.name == "trainer" and line["version"] is not None:
            self.tally.count("Versions", "resumed by a new trainer")
            if not line["resumed"] or line["version"] < line["found"]:
                self.tally.wrong.append(f"{self.checker.store.url}: a trainer did not take up its run: {line}")

    def open_mirror(self, loaded: str = "") -> None:
        """Open the folder in a process of its own: it must be a committed version, and say so.

        `loaded` is the kill before, where that one must have left a whole version in a folder that had none.
        """
        spec = {"role": "opener", "folder": str(self.folder), "safetensors": self.chance.random() < 0.3}
        opener = Worker(self.nursery, self.place, "opener", self.common | spec)
        opener._log.unlink(missing_ok=True)
        opener.start()
        if opener.wait_dead() != 0:
            self.tally.wrong.append(f"{self.folder} cannot be opened: {opener.output()}")
            return
        (found,) = opener.news()
        version = found["version"]
        if version is None:
            self.tally.count("Folders opened after a kill", "says that it holds no version")
            if self.mirrored >= 0 or loaded:
                before = loaded or f"it was at version {self.mirrored}"
                self.tally.wrong.append(f"{self.folder}, {before}, says that it has no version: {found}")
            return
        self.tally.count("Folders opened after a kill", "holds a version")
        for how in ("weights", "checkpoint", "safetensors"):
            if how in found:
                self.checker.check(f"the folder, read as {how},", version, found[how])
        if found["stated"] != version or version < self.mirrored:
            self.tally.wrong.append(f"{self.folder} says {found['stated']} or {version}, after {self.mirrored}")
        if stray := [name for name in found["files"] if name.endswith(".tmp")]:
            self.tally.count("Folders opened after a kill", "of these, with a temporary file left in it", len(stray))
        self.mirrored = max(self.mirrored, version)

    def catch_up(self) -> None:
        """A version later than all that were there must be published, and reach every replica."""
        before = self.checker.latest
        self._wait(lambda: self._published(before), "a new version")
        newest = self.checker.latest
        for replica in self.replicas:
            self._wait(lambda each=replica: self._reached(each, newest), f"{replica.name} to catch up")
        self.read_logs()

    def _reached(self, replica: Worker, version: int) -> bool:
        if replica.last_version() >= version:
            return True
        if (code := replica.exit_code()) is not None:
            raise Stuck(f"{replica.name} ended with {code}: {replica.output()}")
        return False

    def _published(self, before: int) -> bool:
        trainer = self.workers["trainer"]
        if trainer.pid is not None and (code := trainer.exit_code()) is not None:
            if code != FENCED:
                raise Stuck(f"the trainer ended with {code}: {trainer.output()}")
            # A commit that the server finished after its sender was killed: the next trainer finds it.
            self.tally.count("Versions", "fenced by the commit of a killed trainer")
            trainer.start()
        after = f"manifests/{before:08}.z" if before >= 0 else ""
        if not any(self.checker.store.list("manifests/", after=after)):
            return False
        self.checker.look()
        return self.checker.latest > before

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, f"{what} ({self.checker.store.url})")

    def end(self) -> None:
        """Kill all at once, and look at everything for the last time."""
        for worker in self.workers.values():
            self._end(worker)
        self.inspect()
        self.open_mirror()
        self.checker.look_again()
        self.checker.follow_long()
        self.tally.count("Versions", "committed", self.checker.latest + 1)
        self.tally.count("Comparisons with recomputed weights", "crashes", self.checker.num_checked)
        shutil.rmtree(self.place, ignore_errors=True)


def run(
    nursery: Nursery, server: Any, place: Path, tally: Tally, *, num_random: int, num_each: int, seed: int,
    progress: Progress, share: int = 1,
) -> None:  # fmt: skip
    """All kills, over several runs, a few of them at a time."""
    kills = plan(num_random, num_each, random.Random(seed), share)
    # The first kills of a new run come first in it.
    starts = [kill for kill in kills if kill.point in points.NEW_RUN]
    others = [kill for kill in kills if kill.point not in points.NEW_RUN]
    worlds = max(len(starts), -(-len(others) // ROUNDS_PER_RUN))
    done = itertools.count(1)

    def work(number: int) -> None:
        mine = starts[number : number + 1] + others[number::worlds]
        world = World(nursery, server, place / f"run-{number}", f"crash-{seed}-{number}", seed + number, tally)
        try:
            if mine[0].point not in points.NEW_RUN:
                world.start()
            for kill in mine:
                world.round(kill)
                progress(f"kill {next(done)}/{len(kills)}: {kill}; version {world.checker.latest}; {tally.verdict}")
        except Stuck as error:
            tally.stuck.append(f"{error}: {[worker.output() for worker in world.workers.values()]}")
        world.end()

    with ThreadPoolExecutor(AT_ONCE, "world") as pool:
        for each in [pool.submit(work, number) for number in range(worlds)]:
            each.result()
