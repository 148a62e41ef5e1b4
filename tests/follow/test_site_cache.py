"""A fleet of replicas behind the cache of deploy/site-cache, which is a real nginx in front of another."""

import http.client
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.run.keys import manifest_key
from deltawire.run.manifest import read_manifest
from deltawire.store import open_store
from support.chains import copy_of, make_weights, same, step
from support.waiting import PATIENCE, eventually
from support.web_servers import NGINX, file_server, site_cache

pytestmark = [pytest.mark.process, pytest.mark.skipif(NGINX is None, reason="needs nginx")]


class Fleet:
    """Replicas in threads. Each compares every version that it gets with what was published."""

    def __init__(self, url, count, states):
        store = open_store(url)
        self._states, self._lock = states, threading.Lock()
        self.replicas = [Replica(store, {}, threads=1) for _ in range(count)]
        self.wrong, self.arrived = [], {}

    def follow(self, stack):
        for replica in self.replicas:
            stack.enter_context(replica)
            stack.enter_context(replica.watching(lambda pull, of=replica: self._note(of, pull), poll_seconds=0.2))

    def _note(self, replica, pull):
        with self._lock:
            self.arrived.setdefault(pull.version, []).append(time.monotonic())
            if not same(replica.target.weights(), self._states[pull.version]):
                self.wrong.append((replica.name, pull.version))

    def are_at(self, version):
        return all(each.version == version for each in self.replicas)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_fleet_behind_a_site_cache(tmp_path, count):
    weights, rng, states, spreads = make_weights(), np.random.default_rng(0), [], []
    with ExitStack() as stack:
        origin = stack.enter_context(file_server(tmp_path / "origin"))
        cache = stack.enter_context(site_cache(tmp_path / "cache", origin.url))
        publisher = stack.enter_context(Publisher(tmp_path / "origin/root/run", weights, anchors=4))

        def publish():
            states.append(copy_of(weights))
            version = publisher.publish().wait(PATIENCE).version
            step(weights, rng)
            return version, time.monotonic()

        publish()
        fleet = Fleet(f"{cache.url}/run", count, states)
        fleet.follow(stack)
        eventually(lambda: fleet.are_at(0), "the first version")
        for _ in range(5):
            version, committed = publish()
            eventually(lambda version=version: fleet.are_at(version), f"version {version}")
            spreads.append(max(fleet.arrived[version]) - committed)

        cache.kill()
        before, _ = publish()
        eventually(lambda: all(each.error for each in fleet.replicas), "every replica to notice")
        assert fleet.are_at(before - 1)
        cache.start()
        eventually(lambda: fleet.are_at(before), "the version that was published without the cache")

        origin.stop()
        last, _ = publish()
        eventually(lambda: all(each.error for each in fleet.replicas), "every replica to notice")
        assert fleet.are_at(before)
        origin.start()
        eventually(lambda: fleet.are_at(last), "the version that was published without the origin")
        late = Fleet(f"{cache.url}/run", 1, states)
        late.follow(stack)
        eventually(lambda: late.are_at(last), "one that joins late")

    assert not fleet.wrong + late.wrong
    served = [line for line in origin.asked() if line.startswith("20")]
    print(f"{count} replicas, seconds from commit to the last: {[round(each, 2) for each in spreads]}, "
          f"{len(served)} of {len(origin.asked())} answers with a body")  # fmt: skip
    check_once(served)


def check_once(served):
    """Every object and every manifest was served once by the origin."""
    objects = Counter(line for line in served if re.search("deltas|anchors|manifests", line))
    assert len(objects) > 8
    assert {*objects.values()} == {1}, objects.most_common(3)


@pytest.mark.timing
def test_a_version_reaches_200_readers_within_a_second(tmp_path):
    """Readers that fetch and check and decode nothing, so that 200 of them fit into one process."""
    weights, rng, stop, arrived = make_weights(), np.random.default_rng(0), threading.Event(), {}
    with ExitStack() as stack:
        origin = stack.enter_context(file_server(tmp_path / "origin"))
        cache = stack.enter_context(site_cache(tmp_path / "cache", origin.url))
        publisher = stack.enter_context(Publisher(tmp_path / "origin/root/run", weights, skips=(), anchors=None))
        publisher.publish().wait(PATIENCE)

        def read(_):
            version, line = 0, http.client.HTTPConnection("127.0.0.1", cache.port)
            while not stop.wait(0.2):
                line.request("GET", f"/run/{manifest_key(version)}")
                answer = line.getresponse()
                body = answer.read()
                if answer.status == 404:
                    continue
                for stored in read_manifest(body).hop.objects:
                    line.request("GET", f"/run/{stored.key}", headers={"Range": f"bytes=0-{stored.num_bytes - 1}"})
                    assert sha256(line.getresponse().read()).hexdigest() == stored.sha256
                arrived.setdefault(version, []).append(time.monotonic())
                version += 1
            line.close()

        with ThreadPoolExecutor(200) as pool:
            done = [pool.submit(read, number) for number in range(200)]
            try:
                eventually(lambda: len(arrived.get(0, ())) == 200, "the first version")
                spreads = []
                for version in range(1, 8):
                    step(weights, rng)
                    publisher.publish().wait(PATIENCE)
                    committed = time.monotonic()
                    eventually(lambda version=version: len(arrived.get(version, ())) == 200, f"version {version}")
                    spreads.append(max(arrived[version]) - committed)
            finally:
                stop.set()
            assert all(each.exception() is None for each in done)
    print(f"seconds from commit to the last of 200: {[round(each, 2) for each in spreads]}")
    check_once([line for line in origin.asked() if line.startswith("20")])
    assert sorted(spreads)[len(spreads) // 2] < 1
