"""How often a replica looks for a new version."""

import itertools

import pytest

from deltawire.follow.pace import SLOWEST, Pace
from deltawire.run import run as run_module
from deltawire.run.keys import MANIFESTS, RUN_KEY, manifest_key
from deltawire.run.run import Run
from support.chains import Hooked, make_run


def polls(pace, commits, end, start=0.0):
    """The times at which a replica polls until `end`, and how long after its commit each version is seen."""
    now, times, delays, seen = start, [], [], 0
    while now < end:
        there = sum(1 for each in commits if each <= now)
        delays += [now - each for each in commits[seen:there]]
        seen = there
        pace.saw(there - 1 if there else None, now)
        times.append(now)
        now += pace.wait(now)
    return times, delays


def test_a_version_that_is_due_is_seen_within_a_poll():
    commits = [60.0 * number for number in range(1, 30)]
    times, delays = polls(Pace(1.0, 0.0), commits, 1700)
    assert max(delays[2:]) <= 1
    per_version = len([each for each in times if each > 600]) / len([each for each in commits if 600 < each < 1700])
    assert per_version < 25, "60 without adapting"


def test_versions_at_odd_times_are_seen_within_a_poll_once_the_shortest_and_the_longest_gap_are_known():
    commits = list(itertools.accumulate([30, 55, 35, 60, 40, 30, 50, 45, 60, 35, 55, 30, 40]))
    _, delays = polls(Pace(1.0, 0.0), commits, 700)
    assert max(delays[5:]) <= 1


def test_polls_become_rare_when_nothing_comes_and_never_stop():
    times, _ = polls(Pace(0.5, 0.0), [], 10_000)
    gaps = [round(after - before, 6) for before, after in itertools.pairwise(times)]
    assert gaps[0] == 0.5
    assert gaps == sorted(gaps)
    assert gaps[-1] == SLOWEST * 0.5


def test_a_trainer_that_comes_back_is_noticed():
    commits = [10.0, 20.0, 30.0, 40.0, 5000.0, 5010.0, 5020.0, 5030.0]
    _, delays = polls(Pace(1.0, 0.0), commits, 5100)
    assert delays[4] <= SLOWEST
    assert max(delays[5:]) <= 1


def test_versions_that_come_faster_than_polls_are_polled_for_at_once():
    pace = Pace(1.0, 0.0)
    pace.saw(0, 1.0)
    pace.saw(40, 3.0)
    assert pace.wait(3.0) == 1.0


def test_a_run_that_went_back_is_no_gap():
    pace = Pace(1.0, 0.0)
    pace.saw(9, 1.0)
    pace.saw(2, 500.0)
    assert pace.wait(500.0) == 1.0


def test_faults_are_retried_with_longer_pauses():
    pace = Pace(2.0, 0.0)
    assert [pace.wait(0.0, failures) for failures in (1, 2, 5, 6, 5000)] == [4, 8, 64, 64, 64]


def test_poll_seconds_is_positive():
    with pytest.raises(ValueError, match="poll_seconds"):
        Pace(0, 0.0)


def test_one_request_by_name_when_nothing_is_new(monkeypatch):
    url, _ = make_run(4)
    store = Hooked(url)
    asked = []
    store.before = lambda verb, key: asked.append((verb, key))
    run = Run(store)
    assert run.latest() == 3
    asked.clear()
    for _ in range(3):
        assert run.latest(3) is None
    assert asked == [("get", manifest_key(4))] * 3
    asked.clear()
    assert run.latest(2) == 3
    assert [verb for verb, _ in asked] == ["get"] * 3, "a single one is found by name, and the run's id is checked"
    asked.clear()
    assert run.latest(1) == 3
    assert asked.count(("list", MANIFESTS)) == 1, "several are listed"
    asked.clear()
    monkeypatch.setattr(run_module.time, "monotonic", lambda: 1e12)
    assert run.latest(3) is None
    assert asked == [("list", MANIFESTS), ("get", RUN_KEY)], "for a version behind a gap, and for the run itself"
