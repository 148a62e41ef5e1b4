"""Heartbeats: how often a replica says that it is alive, whatever its clock does."""

import json
import time

import pytest

from deltawire.run.heartbeat import Heartbeat
from deltawire.run.run import Run
from support.chains import fresh_url


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_clock_that_is_set_does_not_change_the_interval(jump, monkeypatch):
    run = Run(fresh_url())
    run.start("demo")
    heartbeat, clock, monotonic = Heartbeat(run, "replica", 15.0), time.time(), time.monotonic()

    def told_after(seconds, number):
        monkeypatch.setattr(time, "time", lambda: clock + jump)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic + seconds)
        heartbeat.beat({"number": number}, at_once=False)
        return json.loads(run.store.get("replicas/replica.json"))["number"]

    heartbeat.beat({"number": 0}, at_once=False)
    assert told_after(5, 1) == 0
    assert told_after(20, 2) == 2
