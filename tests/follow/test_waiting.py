"""Replicas that are waited for, and closed, while other threads use them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.errors import Conflict
from deltawire.follow.mirror import Mirror
from deltawire.store import open_store
from support.chains import fresh_url, make_run, make_weights, step
from support.waiting import PATIENCE, eventually


def replica_of(url, target=None, **options):
    return Replica(url, {} if target is None else target, heartbeat_seconds=None, **options)


def test_wait_pulls_where_nobody_watches():
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher, replica_of(url) as replica:
        publisher.publish().wait(PATIENCE)
        threading.Timer(0.1, publisher.publish).start()
        assert replica.wait(1, 30) == 1


def test_wait_polls_at_its_pace_after_a_nudge():
    url, _ = make_run(1)
    with replica_of(url) as replica:
        replica.pull()
        replica.nudge()
        polled = []
        replica.target.refresh = lambda: polled.append(replica.version)
        with pytest.raises(TimeoutError, match="the weights are at version 0"):
            replica.wait(1, timeout=1.0)
        assert len(polled) < 20


@pytest.mark.parametrize("watched", [True, False])
def test_wait_ends_when_the_replica_is_closed(watched):
    url, _ = make_run(1)
    replica = replica_of(url)
    with replica.watching() if watched else nullcontext(), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replica.wait, 1)
        eventually(lambda: replica.version == 0)
        replica.close()
        with pytest.raises(ValueError, match="closed"):
            waiting.result(PATIENCE)


def test_close_waits_for_a_pull_in_another_thread(tmp_path, monkeypatch):
    """Until the pull ends, no other process gets the folder, and afterwards there is no heartbeat."""
    url, weights = fresh_url(), make_weights()
    begun, goes_on, write = threading.Event(), threading.Event(), Mirror._write

    def write_slowly(mirror, patches):
        begun.set()
        assert goes_on.wait(PATIENCE)
        write(mirror, patches)

    with Publisher(url, weights) as publisher, ThreadPoolExecutor(2) as pool:
        publisher.publish().wait(PATIENCE)
        replica = Replica(url, tmp_path / "mirror")
        replica.pull()
        step(weights, np.random.default_rng(0))
        publisher.publish().wait(PATIENCE)
        monkeypatch.setattr(Mirror, "_write", write_slowly)
        watching = pool.submit(replica.watch)
        assert begun.wait(PATIENCE)
        closing = pool.submit(replica.close)
        eventually(lambda: replica._closed)
        with pytest.raises(Conflict, match="another process keeps"):
            Mirror(tmp_path / "mirror")
        goes_on.set()
        closing.result(PATIENCE)
        watching.result(PATIENCE)
        assert not list(open_store(url).list("replicas/"))
        with replica_of(url, tmp_path / "mirror") as again:
            assert again.version == 1


def test_a_version_that_becomes_unknown_while_it_is_waited_for(monkeypatch):
    url, _ = make_run(1)
    with replica_of(url) as replica:
        found = [0, None, 1]
        monkeypatch.setattr(Replica, "version", property(lambda self: found.pop(0) if len(found) > 1 else found[0]))
        replica.is_watched = True
        assert replica.wait(1, PATIENCE) == 1
