"""The whole job on every kind of store: publish, pull, late joiner, two writers, clean-up."""

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.errors import Fenced
from deltawire.maintain.audit import audit
from deltawire.maintain.gc import collect, plan_gc
from deltawire.run.run import Run
from support.chains import copy_of, make_weights, same, step
from support.waiting import PATIENCE


def test_a_run(any_store, tmp_path):
    rng, weights, states = np.random.default_rng(0), make_weights(), []
    with (
        Publisher(any_store, weights, anchors=4) as publisher,
        Replica(any_store, {}, name="memory") as first,
        Replica(any_store, tmp_path / "mirror") as second,
    ):
        for _ in range(9):
            publisher.publish().wait(PATIENCE)
            states.append(copy_of(weights))
            publisher.flush()
            for replica in (first, second):
                replica.pull()
                assert same(replica.target.weights(), states[-1])
            step(weights, rng)
        for tensor, bits in zip(weights.values(), states[-1].values(), strict=True):
            tensor.bits[:] = bits
    found = audit(Run(any_store))
    assert not found.problems
    with Replica(any_store, {}, heartbeat_seconds=None) as late:
        for version in (3, 8):
            late.pull(version)
            assert same(late.target.weights(), states[version])
    collect(Run(any_store), plan_gc(Run(any_store), keep_anchors=1).removals)
    with Replica(any_store, {}, heartbeat_seconds=None) as late:
        late.pull()
        assert same(late.target.weights(), states[8])


def test_the_second_writer_is_fenced(any_store):
    rng, mine, theirs = np.random.default_rng(0), make_weights(), make_weights()
    with Publisher(any_store, mine) as first:
        first.publish().wait(PATIENCE)
        with Publisher(any_store, theirs) as second:
            assert second.resumed
            step(theirs, rng)
            second.publish().wait(PATIENCE)
            step(mine, rng)
            with pytest.raises(Fenced):
                first.publish().wait(PATIENCE)
            with pytest.raises(Fenced):
                first.publish()
    with Replica(any_store, {}, heartbeat_seconds=None) as replica:
        replica.pull()
        assert same(replica.target.weights(), copy_of(theirs))
