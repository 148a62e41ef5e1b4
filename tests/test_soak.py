"""A little of what `make soak` does: kills at every point, faults on the line, racing writers; and a tenth of it."""

import random

import pytest

from soak import crashes, faults, races
from soak.processes import nursery
from soak.report import Tally, page

SEED = 1


@pytest.fixture(scope="module")
def workers():
    with nursery() as started:
        yield started


@pytest.fixture
def tally():
    return Tally()


def quiet(_line):
    pass


@pytest.mark.process
@pytest.mark.parametrize(("num_random", "share", "seed"), [(0, 4, 2), pytest.param(20, 1, 1, marks=pytest.mark.slow)])
def test_kills(workers, s3_server, tmp_path, tally, num_random, share, seed):
    how = {"num_random": num_random, "num_each": 1, "share": share, "seed": seed}
    crashes.run(workers, s3_server, tmp_path, tally, **how, progress=quiet)
    assert tally.problems == []
    planned = crashes.plan(num_random, 1, random.Random(seed), share)
    assert sum(tally.tables["Kills"].values()) == len(planned)
    assert {str(kill) for kill in planned} == set(tally.tables["Kills"])


@pytest.mark.process
@pytest.mark.parametrize(("num_syncs", "seed"), [(25, 2), pytest.param(50, 1, marks=pytest.mark.slow)])
def test_faults(s3_server, tmp_path, tally, num_syncs, seed):
    faults.run(s3_server, tmp_path / "faults", tally, num_syncs=num_syncs, seed=seed, progress=quiet)
    assert tally.problems == []
    assert tally.tables["Syncs"]["done"] == num_syncs
    kinds = {kind.partition(" ")[0] for kind in tally.tables["Faults"]}
    assert kinds == {"latency", "reset", "close", "status", "stall", "flip", "reset_upload", "drop_reply"}


@pytest.mark.process
@pytest.mark.parametrize(("num_races", "seed"), [(4, 2), pytest.param(12, 1, marks=pytest.mark.slow)])
def test_races(workers, s3_server, tmp_path, tally, num_races, seed):
    races.run(workers, s3_server, tmp_path, tally, num_races=num_races, seed=seed, progress=quiet)
    assert tally.problems == []
    assert sum(number for row, number in tally.tables["Races"].items() if row.startswith("between")) == num_races


@pytest.mark.slow
@pytest.mark.vllm
def test_kills_beside_an_engine(s3_server, tmp_path, tally):
    pytest.importorskip("vllm")
    from soak import engines

    engines.kills(s3_server, tmp_path, tally, num_kills=4, seed=SEED, progress=quiet)
    assert tally.problems == []
    assert tally.tables["Kills beside an engine"] == {"agent": 2, "server": 1, "store": 1}
    assert tally.tables["Looks"]["at a server"] > 10
    assert tally.tables["Looks"]["at an agent"] > 10


@pytest.mark.slow
@pytest.mark.vllm
def test_a_fleet(s3_server, tmp_path, tally):
    pytest.importorskip("vllm")
    from soak import engines

    engines.fleet(s3_server, tmp_path, tally, num_versions=10, seed=SEED, progress=quiet)
    assert tally.problems == []
    assert len(tally.tables["Pulls in a fleet"]) == 6


def test_the_report_counts_problems(tally):
    assert "0 wrong, 0 stuck, 0 lost" in page(tally, "command", 7)
    tally.wrong.append("these weights")
    tally.count("Kills", "trainer at delta: before put", 3)
    text = page(tally, "command", 7)
    assert "1 wrong, 0 stuck, 0 lost" in text
    assert "- wrong: these weights" in text
    assert "| trainer at delta: before put | 3 |" in text
