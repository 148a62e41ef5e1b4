"""The simulator of a fleet: what can be computed by hand comes out, and what it does is what replicas do."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.estimate.plan import Plan, measured
from deltawire.estimate.simulate import Clock, Line, Scene, gets_of, puts_of, simulate
from deltawire.run.planner import ListedHop
from deltawire.run.run import Run
from deltawire.store import open_store
from support.chains import fresh_url

PLAN = Plan(8e9, 0.0132, 1440, sites=2, replicas=16)


def test_transfers_share_a_line():
    clock, ends = Clock(), {}
    line = Line(clock, 1e6)
    clock.at(0, lambda: line.send(3e6, lambda: ends.update(long=clock.now)))
    clock.at(1, lambda: line.send(1e6, lambda: ends.update(short=clock.now)))
    clock.at(10, lambda: line.send(1e6, lambda: ends.update(alone=clock.now)))
    clock.run(lambda: False)
    assert ends == pytest.approx({"short": 3.0, "long": 4.0, "alone": 11.0})


def test_cores_are_shared_too():
    clock, ends = Clock(), []
    cores, own = Line(clock, 2, most=1.0), Line(clock, None, most=1.0)
    for _ in range(4):
        cores.send(1.0, lambda: ends.append(clock.now))
        own.send(1.0, lambda: ends.append(clock.now))
    clock.run(lambda: False)
    assert ends == pytest.approx([1, 1, 1, 1, 2, 2, 2, 2])
    clock, ends = Clock(), []
    Line(clock, 4, most=1.0).send(1.0, lambda: ends.append(clock.now))
    clock.run(lambda: False)
    assert ends == pytest.approx([1]), "one thing takes one core"


@pytest.mark.parametrize("scene", [Scene(PLAN), Scene(PLAN, full=True), Scene(replace(PLAN, joins_a_day=2000))])
def test_the_same_seed_gives_the_same_run(scene):
    assert simulate(scene) == simulate(scene)
    assert simulate(scene) != simulate(replace(scene, seed=1))


def test_one_replica_that_is_told_takes_the_sum_of_the_parts():
    plan = replace(PLAN, sites=1, replicas=1)
    outcome = simulate(Scene(plan, num_versions=1, nudged=True))
    size, trip = plan.delta_bytes(), 0.05
    assert outcome.calls == [0, plan.step_seconds]
    upload = plan.blocked_seconds + plan.encode_seconds + size / 125e6 + 2 * trip
    assert outcome.commits[1] - outcome.calls[1] == pytest.approx(upload)
    overhead = measured()["replica"]["s3"]
    poll = overhead["poll_cpu"] + trip
    pull = 2 * trip + size / 125e6 + overhead["pull_cpu"] + plan.decode_seconds + plan.pause_seconds
    assert outcome.delays() == pytest.approx([poll + pull])


def test_bytes_are_those_of_the_fleet():
    size = round(PLAN.delta_bytes())
    without, cached = (simulate(Scene(PLAN, num_versions=3, caches=caches)) for caches in (False, True))
    assert without.store_bytes == without.replica_bytes == cached.replica_bytes == 3 * 16 * size
    assert cached.store_bytes == 3 * 2 * size
    assert without.uploads["delta"] == 3 * size
    assert median(cached.delays()) < median(without.delays())


@pytest.mark.parametrize(("share", "objects"), [(0.001, 1), (0.03, 2), (0.065, 4), (0.2, 4), (1.0, 4)])
def test_a_large_delta_takes_the_requests_of_all_its_objects(monkeypatch, share, objects):
    for module in ("deltawire.store.transfer", "deltawire.estimate.simulate"):
        monkeypatch.setattr(f"{module}.PART_BYTES", 1 << 16)
    url, asked = fresh_url(), []
    rng, weights = np.random.default_rng(0), {f"layer{number}": np.zeros(20_000, np.float16) for number in range(100)}
    with Publisher(url, weights, skips=(), anchors=None) as publisher:
        publisher.publish().wait()
        with Replica(url, {name: array.copy() for name, array in weights.items()}) as replica:
            replica.pull()
            for array in weights.values():
                array[: int(20_000 * share)] = rng.standard_normal(int(20_000 * share))
            publisher.publish().wait()
            store = type(open_store(url))
            read = store.get_range
            monkeypatch.setattr(store, "get_range", lambda *where: asked.append(where) or read(*where))
            replica.pull()
    hop = Run(url).manifest(1).hop
    assert len(hop.objects) == objects
    assert gets_of(ListedHop(1, 0, hop.num_bytes)) == pytest.approx(len(asked), abs=1)


def test_requests_of_a_hop():
    """Of a delta of 80 MB as counted at an S3 server: one document, three objects of two parts, one of one."""
    delta, anchor, small = ListedHop(1, 0, 80_005_904), ListedHop(0, None, 80_005_904), ListedHop(1, 0, 100)
    assert [gets_of(each) for each in (delta, anchor, small)] == [7, 5, 1]
    assert [puts_of(each) for each in (delta, anchor, small)] == [14, 8, 2]


def test_all_weights_take_their_line():
    plan = replace(PLAN, sites=1, replicas=4, steps_a_day=10)
    outcome = simulate(Scene(plan, num_versions=1, full=True, nudged=True))
    assert outcome.commits[1] - outcome.calls[1] == pytest.approx(plan.anchor_bytes / 125e6, rel=0.01)
    assert outcome.delays()[-1] == pytest.approx(4 * plan.anchor_bytes / 125e6 + plan.reload_seconds, rel=0.01)


def test_a_line_that_is_too_thin_holds_the_trainer_back():
    plan = replace(PLAN, trainer_mbits=1.0, steps_a_day=86_400, replicas=2)
    outcome = simulate(Scene(plan, num_versions=4))
    each = plan.delta_bytes() / 125e3
    gaps = [after - before for before, after in zip(outcome.commits[1:], outcome.commits[2:], strict=False)]
    assert all(gap > each for gap in gaps)
    assert outcome.calls[4] - outcome.calls[1] > each, "its calls wait too"


def test_one_that_was_killed_joins_with_an_anchor():
    plan = replace(PLAN, replicas=2, sites=2, steps_a_day=144)
    outcome = simulate(Scene(plan, num_versions=3, away=[(700.0, 1, 100.0)]))
    (seconds,) = outcome.joins
    assert seconds == pytest.approx(plan.anchor_bytes / 125e6, rel=0.1)
    assert outcome.replica_bytes > plan.anchor_bytes
    assert [len(outcome.served[version]) for version in (1, 2, 3)] == [2, 2, 2]


def test_the_next_version_is_found_without_a_listing():
    outcome = simulate(Scene(replace(PLAN, joins_a_day=0), num_versions=4))
    assert outcome.requests["list"] == 0
    outcome = simulate(Scene(PLAN, num_versions=1, cold=True))
    assert outcome.requests["list"] >= PLAN.replicas


def test_polls_that_are_skipped_over_are_counted_as_if_they_were_not():
    """With cores that are shared every poll is an event of its own; with more than enough of them nothing waits."""
    for every in (60, 1440):
        plan = replace(PLAN, steps_a_day=86_400 / every)
        quick, each = (simulate(Scene(plan, num_versions=6, cores=cores)) for cores in (None, 10_000))
        assert quick.requests["poll"] == pytest.approx(each.requests["poll"], rel=0.15)
        # With shared cores a replica decodes in one thread.
        slower = (measured()["cpu"]["threads_speedup"] - 1) * plan.decode_seconds
        assert median(quick.delays()) + slower == pytest.approx(median(each.delays()), rel=0.05)
        assert quick.delays()[-1] == pytest.approx(each.delays()[-1], rel=0.2)
        assert quick.requests["poll"] < 16 * quick.seconds / 2, "polls adapt"


@pytest.mark.parametrize("replicas", [16, 300, 1000])
def test_polls_that_a_cache_passes_on_are_counted_as_if_they_were_not_skipped(replicas):
    plan = Plan(24e3, 0.02, 1440, replicas=replicas, machine="cpu")
    quick, each = (simulate(Scene(plan, 2, caches=True, cores=cores)) for cores in (None, 100_000))
    assert quick.requests["poll"] == pytest.approx(each.requests["poll"], rel=0.35)


def test_shared_cores_slow_a_fleet_down():
    plan = Plan(24e3, 0.02, 86_400 / 10, replicas=200, machine="cpu", poll_seconds=0.2, round_trip_ms=1)
    alone, shared = (simulate(Scene(plan, caches=True, serves=False, cores=cores)) for cores in (None, 1))
    assert shared.delays()[-1] > alone.delays()[-1] + 0.1


def test_replicas_that_start_with_nothing_fetch_the_anchor():
    outcome = simulate(Scene(PLAN, num_versions=1, cold=True))
    assert len(outcome.joins) == 16
    assert outcome.replica_bytes >= 16 * PLAN.anchor_bytes


def test_too_many_joins_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(Clock, "run", None)
    with pytest.raises(ValueError, match="fewer replicas, joins"):
        simulate(Scene(replace(PLAN, steps_a_day=1, joins_a_day=30_000)))


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr("deltawire.estimate.simulate.MOST_EVENTS", 100)
    with pytest.raises(ValueError, match="too much"):
        simulate(Scene(PLAN))
