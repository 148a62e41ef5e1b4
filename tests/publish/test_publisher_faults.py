"""Publishing when things fail: the next version covers what could not be committed, and nobody misses a failure."""

import errno
import io
import threading
import time

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.errors import Fenced, StoreUnavailable
from deltawire.maintain.gc import collect, plan_gc
from deltawire.publish import leader, records
from deltawire.run.run import Run
from support.chains import Hooked, copy_of, fresh_url, make_weights, pulled, same, step
from support.waiting import PATIENCE


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def broken_store(url):
    """A store that refuses everything but what is there already."""
    store = Hooked(url)

    def fail(verb, key):
        if verb in ("put", "create"):
            raise StoreUnavailable("the bucket is gone", refused=True)

    return store, fail


@pytest.mark.parametrize("fault", ["put", "create"])
def test_a_failed_publish_is_covered_by_the_next(rng, fault):
    url, weights = fresh_url(), make_weights()
    store = Hooked(url)
    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)

        def fail(verb, key):
            if verb == fault and "00000001" in key:
                raise StoreUnavailable("no answer", refused=False, uncertain=False)

        store.before, first = fail, copy_of(weights)
        step(weights, rng)
        lost = publisher.publish()
        with pytest.raises(StoreUnavailable, match="no answer"):
            lost.wait(PATIENCE)
        assert isinstance(lost.error, StoreUnavailable)
        assert publisher.version == 0
        assert same(pulled(url), first)
        store.before = lambda verb, key: None
        step(weights, rng)
        assert publisher.publish().wait(PATIENCE).version == 1
    assert same(pulled(url), copy_of(weights))


def test_failures_of_several_staged_versions_are_covered_by_one(rng):
    url, weights = fresh_url(), make_weights()
    store, staged = Hooked(url), threading.Event()

    def fail(verb, key):
        if verb == "put" and key.startswith("deltas/00000001"):
            assert staged.wait(PATIENCE)
            raise StoreUnavailable("no answer")

    with Publisher(store, weights, queue_size=3) as publisher:
        publisher.publish().wait(PATIENCE)
        store.before = fail
        lost = []
        for _ in range(3):
            step(weights, rng)
            lost.append(publisher.publish())
        staged.set()
        for publication in lost:
            with pytest.raises(StoreUnavailable):
                publication.wait(PATIENCE)
        store.before = lambda verb, key: None
        assert publisher.publish().wait(PATIENCE).version == 1
        assert publisher.metrics()["deltawire/publish/failed"] == 3
    assert same(pulled(url), copy_of(weights))


@pytest.mark.parametrize("written", [True, False])
def test_a_commit_whose_answer_is_lost_is_resolved_by_the_next_publish(rng, written):
    store, weights = Hooked(fresh_url()), make_weights()
    url = store.url

    def lose(verb, key):
        if verb == "create" and key == "manifests/00000001.json":
            store.before = store.after = lambda verb, key: None
            raise StoreUnavailable("the answer was lost", uncertain=True)

    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        if written:
            store.after = lose
        else:
            store.before = lose
        step(weights, rng)
        first = copy_of(weights)
        unsure = publisher.publish()
        with pytest.raises(StoreUnavailable, match="lost"):
            unsure.wait(PATIENCE)
        step(weights, rng)
        assert publisher.publish().wait(PATIENCE).version == 2
        assert publisher.version == 2
    assert same(pulled(url, 1), first)
    assert same(pulled(url), copy_of(weights))


def test_an_anchor_that_fails_before_a_lost_commit_is_resolved_is_covered_by_an_anchor(rng):
    store, weights = Hooked(fresh_url()), make_weights()
    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)

        def lose(verb, key):
            if verb == "create":
                raise StoreUnavailable("the answer was lost", uncertain=True)

        store.before = lose
        for anchor in (False, True):
            step(weights, rng)
            with pytest.raises(StoreUnavailable, match="lost"):
                publisher.publish(anchor=anchor).wait(PATIENCE)
        store.before = lambda verb, key: None
        for version, base in ((2, None), (3, 2)):
            step(weights, rng)
            assert publisher.publish().wait(PATIENCE).version == version
            assert publisher.run.manifest(version).hop.base == base
    assert same(pulled(store.url), copy_of(weights))


def test_an_unsettled_commit_is_settled_at_the_end(rng):
    store, weights = Hooked(fresh_url()), make_weights()
    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)

        def lose(verb, key):
            if verb == "create" and key == "manifests/00000001.json":
                store.before = lambda verb, key: None
                raise StoreUnavailable("the answer was lost", uncertain=True)

        store.before = lose
        step(weights, rng)
        publisher.publish()
    assert same(pulled(store.url), copy_of(weights))


@pytest.mark.parametrize("conditional", [True, False])
def test_a_second_writer_is_fenced(rng, conditional):
    """Also where the store cannot decide itself: the newest writer has the lease."""
    store, weights, other = Hooked(fresh_url(), conditional), make_weights(), make_weights()
    with Publisher(store, weights) as first:
        first.publish().wait(PATIENCE)
        with Publisher(Hooked(store.url, conditional), other) as second:
            assert second.resumed
            step(other, rng)
            second.publish().wait(PATIENCE)
            step(weights, rng)
            lost = first.publish()
            with pytest.raises(Fenced, match="another writer"):
                lost.wait(PATIENCE)
            with pytest.raises(Fenced, match="another writer"):
                first.publish()
            step(other, rng)
            assert second.publish().wait(PATIENCE).version == 2
    assert same(pulled(store.url), copy_of(other))


def test_a_failed_anchor_is_covered_by_an_anchor(rng):
    store, weights = Hooked(fresh_url()), make_weights()
    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)

        def fail(verb, key):
            if verb == "put" and key.startswith("anchors/00000001"):
                raise StoreUnavailable("no answer")

        store.before = fail
        step(weights, rng)
        with pytest.raises(StoreUnavailable):
            publisher.publish(anchor=True).wait(PATIENCE)
        store.before = lambda verb, key: None
        for base in (None, 1):
            step(weights, rng)
            version = publisher.publish().wait(PATIENCE).version
            assert publisher.run.manifest(version).hop.base == base
        assert publisher.run.versions() == [0, 1, 2]
    assert same(pulled(store.url), copy_of(weights))


def test_a_call_that_is_rejected_changes_nothing(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        for anchor in (False, True):
            step(weights, rng)
            with pytest.raises(ValueError, match="JSON"):
                publisher.publish(metadata={"loss": float("nan")}, anchor=anchor)
        assert publisher.publish().wait(PATIENCE).version == 1
        assert publisher.run.manifest(1).hop.base == 0
        assert publisher.num_failed == 0
    assert same(pulled(url), copy_of(weights))


def test_who_waits_for_the_queue_sees_the_failure(monkeypatch):
    store, fail = broken_store(fresh_url())
    publisher = Publisher(store, make_weights())
    publisher.publish().wait(PATIENCE)
    end = publisher._end

    def late(*given):
        time.sleep(0.2)
        end(*given)

    monkeypatch.setattr(publisher, "_end", late)
    store.before = fail
    publisher.publish()
    with pytest.raises(StoreUnavailable, match="gone"):
        publisher.flush(PATIENCE)
    publisher.close()


def test_a_full_disk_for_old_bits_leaves_them_in_memory(rng, monkeypatch, tmp_path):
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def no_room(**_):
        (tmp_path / "full").touch()
        return io.BufferedRandom(Full(tmp_path / "full", "r+"))

    url, weights = fresh_url(), make_weights()
    store, fail = broken_store(url)
    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        monkeypatch.setattr(records.tempfile, "TemporaryFile", no_room)
        for before in (fail, lambda verb, key: None):
            store.before = before
            step(weights, rng)
            publication = publisher.publish()
            assert publication.join() == (before is not fail)
        assert isinstance(publisher._worker.error, OSError)
    assert same(pulled(url), copy_of(weights))


def test_files_of_an_anchor_that_failed_are_put_again(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    url, weights = fresh_url(), make_weights()
    store, fail = broken_store(url)
    with Publisher(store, weights, files=[tmp_path / "config.json"], anchors=1) as publisher:
        store.before = lambda verb, key: fail(verb, key) if verb == "create" else None
        assert not publisher.publish().join()
        collect(Run(url), plan_gc(Run(url), grace_seconds=-1).removals)
        store.before = lambda verb, key: None
        for _ in range(2):
            publisher.publish().wait(PATIENCE)
            publisher.flush()
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        replica.pull()
    assert (tmp_path / "mirror" / "config.json").exists()
    assert len([key for verb, key in store.calls if verb == "put" and key.endswith("config.json")]) == 2


def test_files_that_differ_after_a_restart_are_put(tmp_path):
    config, store, weights = tmp_path / "config.json", Hooked(fresh_url()), make_weights()
    for number, (text, given) in enumerate([("1", True), ("1", True), ("2", True), ("3", False)]):
        config.write_text(text)
        with Publisher(store, weights, files=[config] if given else ()) as publisher:
            publisher.publish(anchor=True).wait(PATIENCE)
        with Replica(store.url, tmp_path / f"mirror-{number}", heartbeat_seconds=None) as replica:
            replica.pull()
        assert (tmp_path / f"mirror-{number}" / "config.json").read_text() == (text if given else "2")
    assert len([key for verb, key in store.calls if verb == "put" and key.endswith("config.json")]) == 2


def test_a_store_that_stays_away_costs_no_more_and_more_memory(rng, monkeypatch):
    monkeypatch.setattr(leader, "MOST_FAILED", 3)
    weights = make_weights()
    store, fail = broken_store(fresh_url())
    with Publisher(store, weights, check_share=1.0) as publisher:
        publisher.publish().wait(PATIENCE)
        store.before = fail
        for _ in range(8):
            step(weights, rng)
            assert not publisher.publish().join()
            assert len(publisher._worker._held) <= 4
        store.before = lambda verb, key: None
        assert publisher.publish().wait(PATIENCE).version == 1
        step(weights, rng)
        assert publisher.publish().wait(PATIENCE).version == 2
        assert [publisher.run.manifest(version).hop.base for version in (1, 2)] == [None, 1]
    assert same(pulled(store.url), copy_of(weights))


def test_a_run_goes_on_after_a_manifest_that_was_damaged(rng, caplog):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        step(weights, rng)
        publisher.publish().wait(PATIENCE)
    store = publisher.run.store
    data = bytearray(store.get("manifests/00000001.json"))
    data[200] ^= 1
    store.put("manifests/00000001.json", bytes(data))
    with Publisher(url, weights) as publisher:
        assert (publisher.version, publisher.resumed) == (1, False)
        assert publisher.publish().wait(PATIENCE).version == 2
        step(weights, rng)
        publisher.publish()
    assert "the manifest of version 1 is damaged, so the next version is an anchor" in caplog.text
    assert [publisher.run.manifest(version).hop.base for version in (2, 3)] == [None, 2]
    assert same(pulled(url), copy_of(weights))


def test_upkeep_that_fails_does_no_harm(rng):
    store, weights = Hooked(fresh_url()), make_weights()

    def fail(verb, key):
        if verb == "put" and "-from-" in key and key.startswith("deltas/00000004-from-00000000"):
            raise StoreUnavailable("no answer")

    store.before = fail
    with Publisher(store, weights) as publisher:
        for _ in range(9):
            publisher.publish()
            publisher.flush()
            step(weights, rng)
        assert (4, 0) not in {(hop.version, hop.base) for hop in publisher.run.hops()}
        assert (8, 4) in {(hop.version, hop.base) for hop in publisher.run.hops()}


@pytest.mark.parametrize("fault", ["put", "create"])
def test_a_long_delta_that_fails_is_left_out_and_the_next_one_is_written(rng, fault):
    store, weights, states = Hooked(fresh_url()), make_weights(), []

    def fail(verb, key):
        if verb == fault and "00000008" in key and "from-00000000" in key:
            raise StoreUnavailable("no answer")

    store.before = fail
    with Publisher(store, weights, skips=(2, 4), most_deltas=3, anchors=None) as publisher:
        for version in range(14):
            publisher.publish()
            publisher.flush()
            states.append(copy_of(weights))
            step(weights, rng)
            # The error stays until an extra hop is written, which the next even version brings.
            assert (publisher._leader.hops.error is not None) == (version in (8, 9))
        committed = {about[:2] for about in publisher.run.documents().values()}
    assert (8, 0) not in committed
    assert (12, 0) in committed
    for version, state in enumerate(states):
        assert same(pulled(store.url, version), state)


def test_a_base_that_cannot_be_kept_leaves_anchors(rng, tmp_path):
    """Without a folder for it there are no deltas from the anchor, and the rest goes on."""
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights, skips=(2,), most_deltas=3) as publisher:
        publisher.publish().wait(PATIENCE)
        publisher._worker.latest.history._scratch = tmp_path / "gone"
        for _ in range(20):
            step(weights, rng)
            publisher.publish()
            publisher.flush()
        assert any(hop.base is None and hop.version for hop in publisher.run.hops())
    assert same(pulled(url), copy_of(weights))


@pytest.mark.parametrize("how", ["flush", "close", "with"])
def test_a_failure_that_nobody_looked_at_is_raised(how, caplog):
    weights = make_weights()
    store, fail = broken_store(fresh_url())
    publisher = Publisher(store, weights)
    publisher.publish().wait(PATIENCE)
    store.before = fail
    for _ in range(3):
        publisher.publish()
    end = {"flush": publisher.flush, "close": publisher.close, "with": lambda: publisher.__exit__(None, None, None)}
    with pytest.raises(StoreUnavailable, match="gone"):
        end[how]()
    publisher.close()  # raised once
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the bucket is gone" in caplog.text


def test_a_failure_that_was_seen_is_not_raised_again():
    store, fail = broken_store(fresh_url())
    for waits in (False, True):
        store.before = lambda verb, key: None
        with Publisher(store, make_weights()) as publisher:
            publisher.publish().wait(PATIENCE)
            store.before = fail
            publications = [publisher.publish() for _ in range(2)]
            assert [each.join() for each in publications] == [False, False]
            if waits:
                with pytest.raises(StoreUnavailable):
                    publications[-1].wait()
            else:
                assert publications[-1].error is not None


def test_a_failure_after_one_that_was_seen_is_raised():
    store, fail = broken_store(fresh_url())
    publisher = Publisher(store, make_weights())
    publisher.publish().wait(PATIENCE)
    store.before = fail
    with pytest.raises(StoreUnavailable):
        publisher.publish().wait(PATIENCE)
    publisher.publish()
    with pytest.raises(StoreUnavailable, match="gone"):
        publisher.close()
    publisher.close()  # raised once


def test_a_failure_that_a_later_version_covers_is_not_raised(rng):
    weights, url = make_weights(), fresh_url()
    store, fail = broken_store(url)
    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        store.before = fail
        step(weights, rng)
        publisher.publish().join()
        store.before = lambda verb, key: None
        publisher.publish()
    with Replica(url, {}) as replica:
        replica.pull()
        assert same(replica.target.weights(), copy_of(weights))


def test_what_ends_the_block_comes_before_a_failure():
    store, fail = broken_store(fresh_url())

    def run():
        with Publisher(store, make_weights()) as publisher:
            store.before = fail
            publisher.publish()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
