"""A run and its fleet, event by event: publishing, polling, fetching, decoding, pausing, joining, failing.

Lines are shared by what travels on them, cores by what computes on them. The same scene and seed give the same result.
Waits are those of `follow.pace`, hops and routes those of `run.planner`, so what replicas do here is what they do.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from deltawire.estimate.plan import DAY, MBIT, Plan, measured
from deltawire.follow.pace import Pace
from deltawire.format.parts import MAX_FILE_BYTES
from deltawire.run.planner import SKIPS, ListedHop, anchor_is_due, anchor_pays, cheapest_route, long_is_due, skip_bases
from deltawire.store.transfer import PARALLEL, PART_BYTES, object_bytes

# deploy/site-cache: what is not there is asked for four times a second; who waits for another's fetch looks twice.
MISSING_SECONDS, LOCK_SECONDS = 0.25, 0.5
# From a replica to the cache of its site.
INSIDE_TRIP = 0.001
# From a version that was found to its objects: look for the next one (or list them), ask for the objects.
FOUND_TRIPS, COMMIT_TRIPS = 2, 2
HEARTBEAT_SECONDS = 15.0
# The measurement of replicas that are threads of one process.
SHARED = "nginx, 16 threads"
MOST_EVENTS, MOST_JOINS = 20_000_000, 100_000
TOO_MUCH = "too much to simulate: use fewer replicas, joins or versions, or poll less often"

Done = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is simulated.

    Attributes:
        plan: The run.
        num_versions: How many versions are published after the first.
        full: Whether each version is all weights.
        caches: Whether each site has a cache that fetches an object once.
        nudged: Whether replicas are told of a version instead of finding it by polling.
        cold: Whether replicas start with nothing, instead of at the first version.
        serves: Whether replicas drive an engine that has to pause, or hold plain arrays.
        cores: How many cores all replicas of a site share; None: each has its own machine.
        skips: Lengths of skip deltas.
        away: Times at which a replica, by its number, is killed, and for how long: it comes back with nothing.
        seed: For jitter and joins.
    """

    plan: Plan
    num_versions: int = 5
    full: bool = False
    caches: bool = False
    nudged: bool = False
    cold: bool = False
    serves: bool = True
    cores: int | None = None
    skips: Sequence[int] = SKIPS
    away: Sequence[tuple[float, int, float]] = ()
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What has happened."""

    calls: list[float] = field(default_factory=list)
    """When each version was published, from the trainer's call on; the first is there at 0."""
    commits: list[float] = field(default_factory=list)
    served: dict[int, list[float]] = field(default_factory=dict)
    """When each replica had a version; not those that joined with it."""
    joins: list[float] = field(default_factory=list)
    """Seconds from nothing to serving."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Bytes by kind: delta, skip delta, anchor, document."""
    replica_bytes: int = 0
    store_bytes: int = 0
    """What has left the store: with caches, what they have fetched."""
    requests: Counter[str] = field(default_factory=Counter)
    """poll, get, list and put at the store; a poll is a get of what is not there, mostly."""
    seconds: float = 0.0

    def delays(self, first: int = 1) -> list[float]:
        """From the commit of each version to each replica that had it, sorted."""
        return sorted(
            each - self.commits[version] for version, times in self.served.items() if version >= first for each in times
        )


class Clock:
    """The events that are to come."""

    def __init__(self) -> None:
        self.now, self._events, self._order = 0.0, list[tuple[float, int, Done]](), count()

    def at(self, when: float, what: Done) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), what))

    def run(self, until: Callable[[], bool]) -> None:
        for _ in range(MOST_EVENTS):
            if not self._events or until():
                return
            self.now, _, what = heapq.heappop(self._events)
            what()
        raise ValueError(TOO_MUCH)


class Line:
    """A line, or cores: all who use it share its rate evenly, at most `most` each. Without a rate each has `most`."""

    def __init__(self, clock: Clock, rate: float | None, most: float = math.inf) -> None:
        self._clock, self._rate, self._most = clock, rate, most
        self._flows: list[tuple[float, int, Done]] = []
        self._order, self._each, self._since, self._planned = count(), 0.0, 0.0, 0

    def send(self, amount: float, done: Done) -> None:
        if self._rate is None:
            self._clock.at(self._clock.now + amount / self._most, done)
            return
        self._advance()
        heapq.heappush(self._flows, (self._each + amount, next(self._order), done))
        self._plan()

    def _advance(self) -> None:
        """`_each` is what every transfer would have got if it had been there from the start."""
        if self._flows:
            self._each += (self._clock.now - self._since) * self._speed()
        self._since = self._clock.now

    def _speed(self) -> float:
        return min((self._rate or 0.0) / len(self._flows), self._most)

    def _plan(self) -> None:
        self._planned += 1
        if self._flows:
            left, plan = self._flows[0][0] - self._each, self._planned
            self._clock.at(self._clock.now + left / self._speed(), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._planned:  # others have come since
            return
        self._advance()
        first, ended = self._flows[0][0], list[Done]()
        while self._flows and self._flows[0][0] <= first:
            ended.append(heapq.heappop(self._flows)[2])
        self._plan()
        for each in ended:
            each()


class World:
    """One simulation."""

    def __init__(self, scene: Scene, committed: Done | None = None) -> None:
        self._committed = committed
        self.scene, self.plan, self.clock, self.outcome = scene, scene.plan, Clock(), Outcome()
        self.chance, self.trip = random.Random(scene.seed), scene.plan.round_trip_ms / 1000  # noqa: S311
        self.hops: list[ListedHop] = []
        self._routes: dict[tuple[int | None, int, int], list[ListedHop]] = {}
        self.latest = self.num_current = 0
        """The newest version, and how many replicas have the last one."""
        self._uplink, self._busy, self._waiting = Line(self.clock, self.plan.trainer_mbits * MBIT), False, list[int]()
        self.sites = [Site(self) for _ in range(self.plan.sites)]
        self.replicas = [Replica(self, self.sites[n % self.plan.sites]) for n in range(self.plan.replicas)]

    def run(self) -> Outcome:
        scene, plan, outcome = self.scene, self.plan, self.outcome
        if plan.joins_a_day / plan.steps_a_day * scene.num_versions > MOST_JOINS:
            raise ValueError(TOO_MUCH)
        self._add(hop_of(plan, 0, None))
        outcome.calls, outcome.commits, outcome.served = [0.0], [0.0], {0: []}
        for replica in self.replicas:
            replica.start(None if scene.cold else 0, self.chance.uniform(0, plan.poll_seconds))
        for time, number, seconds in scene.away:
            self.clock.at(time, lambda who=self.replicas[number], seconds=seconds: who.die(seconds))  # type: ignore[misc]
        if plan.joins_a_day:
            self._next_join()
        self.clock.at(plan.step_seconds, self._publish)
        self.clock.run(lambda: self.num_current == len(self.replicas))
        outcome.seconds = self.clock.now
        outcome.requests["put"] += round(len(self.replicas) * self.clock.now / HEARTBEAT_SECONDS)
        return outcome

    def _next_join(self) -> None:
        def join() -> None:
            self.chance.choice(self.replicas).die(0.0)
            if self.latest < self.scene.num_versions:
                self._next_join()

        self.clock.at(self.clock.now + self.chance.expovariate(self.plan.joins_a_day / DAY), join)

    # The trainer

    def _publish(self) -> None:
        """The trainer's call; it waits while one version is being uploaded and another one is waiting."""
        version = len(self.outcome.calls)
        self.outcome.calls.append(self.clock.now)

        def stage() -> None:
            self._waiting.append(version)
            self._begin()

        self.clock.at(self.clock.now + (0.0 if self.scene.full else self.plan.blocked_seconds), stage)

    def _begin(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy, version = True, self._waiting.pop(0)
        if version < self.scene.num_versions:
            self.clock.at(self.outcome.calls[version] + self.plan.step_seconds, self._publish)
        size = self.plan.anchor_bytes if self.scene.full else self.plan.delta_bytes()
        ready = self.clock.now + (0.0 if self.scene.full else self.plan.encode_seconds)

        def uploaded() -> None:
            self.clock.at(self.clock.now + COMMIT_TRIPS * self.trip, lambda: self._commit(version))

        self.clock.at(ready, lambda: self._uplink.send(size, uploaded))

    def _commit(self, version: int) -> None:
        self.latest, self._busy = version, False
        self.outcome.commits.append(self.clock.now)
        self.outcome.served[version] = []
        self._add(hop_of(self.plan, version, None if self.scene.full else version - 1))
        if not self.scene.full:
            for hop in extra_hops(self.plan, version, self.hops, self.scene.skips):
                self._uplink.send(hop.num_bytes, lambda hop=hop: self._add(hop))  # type: ignore[misc]
        for site in self.sites:
            site.note_commit()
        for each in self.replicas:
            each.note_commit()
        self._begin()
        if self._committed is not None:
            self._committed()

    def _add(self, hop: ListedHop) -> None:
        kind = "anchor" if hop.base is None else "delta" if hop.version - hop.base == 1 else "skip delta"
        self.hops.append(hop)
        self.outcome.uploads[kind] += hop.num_bytes
        self.outcome.uploads["document"] += measured()["document_bytes"]
        self.outcome.requests["put"] += puts_of(hop)

    def route(self, have: int | None, want: int) -> list[ListedHop]:
        key = have, want, len(self.hops)
        if key not in self._routes:
            known = [hop for hop in self.hops if hop.version <= want]
            self._routes[key] = [*cheapest_route(None if self.scene.full else have, want, known).hops]
        return self._routes[key]


class Site:
    """The replicas of one place: their line to the store, their cache if there is one, and what they share."""

    def __init__(self, world: World) -> None:
        self._world, plan = world, world.plan
        self._line, self._inside = (Line(world.clock, each * MBIT) for each in (plan.site_mbits, plan.replica_mbits))
        self.cores, self.num_replicas = Line(world.clock, world.scene.cores, most=1.0), plan.replicas / plan.sites
        self._checked, self._known = -math.inf, 0
        self._passed = 0.0
        """The part of a poll that is left of those counted."""
        self._there: dict[ListedHop, float] = {}
        self._asked: dict[ListedHop, list[Done]] = {}

    def poll_trip(self) -> float:
        """How long the answer to a poll takes: a cache has most of them."""
        inside = INSIDE_TRIP if self._world.scene.caches else 0.0
        return inside + (self._world.trip if self._is_due() else 0.0)

    def _is_due(self) -> bool:
        return not self._world.scene.caches or self._world.clock.now - self._checked >= MISSING_SECONDS

    def look(self) -> int:
        """The newest version, as a poll finds it."""
        if self._is_due():
            self._world.outcome.requests["poll"] += 1
            self._checked, self._known = self._world.clock.now, self._world.latest
        return self._known

    def note_polls(self, number: int, seconds: float) -> None:
        """Count polls that found nothing; a cache passes some of them on."""
        if self._world.scene.caches and number:
            # After each that it passes on, those of the whole site stay inside for a while.
            self._passed += number / (1 + number * self.num_replicas * MISSING_SECONDS / max(seconds, MISSING_SECONDS))
            number = int(self._passed)
            self._passed -= number
        self._world.outcome.requests["poll"] += number

    def note_commit(self) -> None:
        self._checked = self._world.clock.now - self._world.chance.uniform(0, MISSING_SECONDS)

    def fetch(self, hop: ListedHop, done: Done) -> None:
        """Bring the objects of a hop to a replica."""
        world, outcome = self._world, self._world.outcome
        outcome.replica_bytes += hop.num_bytes
        if not world.scene.caches:
            outcome.store_bytes += hop.num_bytes
            outcome.requests["get"] += gets_of(hop)
            self._line.send(hop.num_bytes, done)
            return
        asked, left = world.clock.now, 2

        def half() -> None:
            """Done when the cache has it and has passed it on, which go on at the same time."""
            nonlocal left
            left -= 1
            if not left:
                done()

        def come() -> None:
            wait = math.ceil((world.clock.now - asked) / LOCK_SECONDS) * LOCK_SECONDS
            world.clock.at(asked + wait, half)

        self._inside.send(hop.num_bytes, half)
        if hop in self._there:
            half()
        elif hop in self._asked:
            self._asked[hop].append(come)
        else:
            outcome.store_bytes += hop.num_bytes
            outcome.requests["get"] += gets_of(hop)
            self._asked[hop] = [half]
            begin = world.clock.now + world.trip
            world.clock.at(begin, lambda: self._line.send(hop.num_bytes, lambda: self._come(hop)))

    def _come(self, hop: ListedHop) -> None:
        self._there[hop] = self._world.clock.now
        for each in self._asked.pop(hop):
            each()


class Replica:
    """One replica. What it has begun before it dies has no effect."""

    def __init__(self, world: World, site: Site) -> None:
        self._world, self._site = world, site
        self.version: int | None = None
        self._life, self._turn = 0, 0
        self._idle = False
        self._next: float | None = None
        """When an idle replica polls next; None if that is an event of its own."""
        costs = measured()["replica"]
        shares = world.scene.cores is not None
        self._poll_seconds = costs[SHARED]["poll_seconds"] if shares else costs["s3"]["poll_cpu"]
        self._pull_seconds = costs[SHARED]["pull_seconds"] if shares else costs["s3"]["pull_cpu"]
        # What two threads decode at the same time, one core does one after the other.
        self._slower = measured()["cpu"]["threads_speedup"] if shares else 1.0

    def start(self, version: int | None, after: float) -> None:
        now, step = self._world.clock.now, self._world.plan.step_seconds
        self._pace, self._started = Pace(self._world.plan.poll_seconds, now), now
        self.version = version
        if version is not None:  # in the middle of a run, whose pace is known
            self._pace.saw(version - 1, now - step)
            self._pace.saw(version, now)
            after = self._wait()
        self._later(after)

    def die(self, seconds: float) -> None:
        self._life += 1
        self._world.num_current -= self.version == self._world.scene.num_versions
        self.version, self._idle = None, False
        life = self._life
        self._world.clock.at(self._world.clock.now + seconds, lambda: self._revive(life))

    def _revive(self, life: int) -> None:
        if life == self._life:
            self.start(None, 0.0)

    def note_commit(self) -> None:
        """There is something to find: at once where replicas are nudged, otherwise with the next poll."""
        if self._idle and (self._world.scene.nudged or self._next is not None):
            self._later(0.0 if self._world.scene.nudged else self._first_poll() - self._world.clock.now, known=False)

    def _first_poll(self) -> float:
        """When the first poll from now on comes; those before it found nothing, and are only counted."""
        now, at, number, start = self._world.clock.now, self._next or 0.0, 0, self._next or 0.0
        while at < now:
            wait, several = self._pace.wait(at), 1
            while at + 2 * several * wait < now and self._pace.wait(at + 2 * several * wait) == wait:
                several *= 2
            self._pace.saw(self.version, at + (several - 1) * wait)
            at += (several - 1) * wait + wait * self._world.chance.uniform(0.75, 1.25)
            number += several
        self._site.note_polls(number, now - min(start, now))
        return at

    def _wait(self) -> float:
        return self._pace.wait(self._world.clock.now) * self._world.chance.uniform(0.75, 1.25)

    def _later(self, seconds: float, *, known: bool = True) -> None:
        """Poll after some time, if nothing else happens before. Where nothing is new, only note when that would be."""
        self._turn += 1
        self._idle, self._next = True, None
        life, turn, when = self._life, self._turn, self._world.clock.now + seconds
        if known and self.version == self._world.latest and self._world.scene.cores is None:
            self._next = when
        else:
            self._world.clock.at(when, lambda: self._poll(life, turn))

    def _poll(self, life: int, turn: int) -> None:
        if (life, turn) == (self._life, self._turn):
            self._idle = False
            self._site.cores.send(self._poll_seconds, lambda: self._ask(life))

    def _ask(self, life: int) -> None:
        self._world.clock.at(self._world.clock.now + self._site.poll_trip(), lambda: self._answer(life))

    def _answer(self, life: int) -> None:
        if life != self._life:
            return
        world, latest = self._world, self._site.look()
        self._pace.saw(latest, world.clock.now)
        if self.version == latest:
            self._later(self._wait())
            return
        if not world.scene.caches:
            is_next = self.version is not None and latest == self.version + 1
            world.outcome.requests.update({"poll" if is_next else "list": 1, "put": 2})
        hops = world.route(self.version, latest)
        left = len(hops)

        def come() -> None:
            nonlocal left
            left -= 1
            if left == 0 and life == self._life:
                self._decode(life, latest, hops)

        def begin() -> None:
            for hop in hops:
                self._site.fetch(hop, come)

        trip = INSIDE_TRIP if world.scene.caches else world.trip
        world.clock.at(world.clock.now + FOUND_TRIPS * trip, begin)

    def _decode(self, life: int, version: int, hops: list[ListedHop]) -> None:
        scene, plan = self._world.scene, self._world.plan
        deltas = sum(hop.base is not None for hop in hops)
        seconds = deltas * plan.decode_seconds * self._slower + self._pull_seconds
        pause = plan.pause_seconds if deltas else plan.reload_seconds
        seconds += pause if scene.serves else measured()["cpu"]["apply"] * plan.weights
        self._site.cores.send(seconds, lambda: self._serve(life, version))

    def _serve(self, life: int, version: int) -> None:
        if life != self._life:
            return
        if self.version is None:
            self._world.outcome.joins.append(self._world.clock.now - self._started)
        else:
            self._world.outcome.served[version].append(self._world.clock.now)
        self.version = version
        self._world.num_current += version == self._world.scene.num_versions
        self._later(self._wait())


def hop_of(plan: Plan, version: int, base: int | None) -> ListedHop:
    return ListedHop(version, base, round(plan.anchor_bytes if base is None else plan.delta_bytes(version - base)))


def extra_hops(plan: Plan, version: int, hops: Sequence[ListedHop], skips: Sequence[int] = SKIPS) -> list[ListedHop]:
    """What a publisher uploads after a version's delta: skip deltas, and at times one from the anchor, or an anchor."""
    found = [hop_of(plan, version, base) for base in skip_bases(version, skips)]
    known = [*hops, *found]
    kept = max((hop.version for hop in hops if hop.base is None), default=None)
    is_new = kept is not None and all(hop.base != kept for hop in found)
    if kept is not None and skips and is_new and long_is_due(version, kept, known, skips):
        return [*found, hop_of(plan, version, None if anchor_pays(version, kept, known) else kept)]
    return [*found, hop_of(plan, version, None)] if anchor_is_due(version, known, None) else found


def gets_of(hop: ListedHop) -> int:
    """How many requests fetch the objects of a hop."""
    return sum(_parts_of(hop))


def puts_of(hop: ListedHop) -> int:
    """How many requests write them and the document: an object in several parts is also begun and completed."""
    return 1 + sum(parts + (2 if parts > 1 else 0) for parts in _parts_of(hop))


def _parts_of(hop: ListedHop) -> list[int]:
    """In how many parts each object of a hop travels. A delta is spread over a few objects, an anchor is not."""
    most = MAX_FILE_BYTES if hop.base is None else min(object_bytes(hop.num_bytes, PARALLEL), MAX_FILE_BYTES)
    whole, rest = divmod(hop.num_bytes, most)
    return [math.ceil(each / PART_BYTES) for each in [most] * int(whole) + [rest] * (rest > 0)]


def simulate(scene: Scene, committed: Done | None = None) -> Outcome:
    """Run a scene until every replica has the last version. `committed` is called for each version."""
    return World(scene, committed).run()
