"""Commits to a store that does not hold the run any more."""

import shutil

import numpy as np
import pytest

from deltawire import Publisher
from deltawire.errors import ObjectMissing, RunMismatch
from deltawire.run import commits
from support.chains import copy_of, make_weights, pulled, same, step
from support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch):
    monkeypatch.setattr(commits, "HINT_SECONDS", 0.0)


def test_a_folder_that_is_gone_for_a_while(tmp_path):
    """As one that is mounted: nothing is committed to the place where it was, and a later version has the changes."""
    weights, run, rng = make_weights(), tmp_path / "run", np.random.default_rng(0)
    with Publisher(run, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        run.rename(tmp_path / "away")
        for _ in range(2):
            step(weights, rng)
            with pytest.raises(ObjectMissing, match="holds no run any more"):
                publisher.publish().wait(PATIENCE)
        assert not list(run.glob("manifests/*"))
        assert publisher.version == 0
        shutil.copytree(tmp_path / "away", run, dirs_exist_ok=True)
        step(weights, rng)
        assert publisher.publish().wait(PATIENCE).version == 1
    assert same(pulled(run), copy_of(weights))


@pytest.mark.parametrize(("name", "said"), [("another", "run another"), ("one", "another run of that id")])
def test_a_store_that_holds_another_run(tmp_path, name, said):
    weights, run = make_weights(), tmp_path / "run"
    with Publisher(run, weights, run="one") as publisher:
        publisher.publish().wait(PATIENCE)
        run.rename(tmp_path / "away")
        with Publisher(run, weights, run=name), pytest.raises(RunMismatch, match=f"now holds {said}"):
            publisher.publish().wait(PATIENCE)
    assert not list(run.glob("manifests/*"))
