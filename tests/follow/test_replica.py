"""Replicas: exact or unchanged, whatever the store holds; they find another route, or report what is wrong."""

import json
import threading
import time
from hashlib import sha256

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.errors import (
    BrokenChain,
    CorruptObject,
    EngineRejected,
    MissingAnchor,
    ObjectMissing,
    ShapeMismatch,
    StoreUnavailable,
    UnknownParameter,
)
from deltawire.follow.target import MemoryTarget
from deltawire.run.keys import DELTAS, manifest_key, replica_key
from deltawire.store import open_store
from deltawire.tensors.weights import Tensor, view
from support.chains import BF16, Hooked, copy_of, fresh_url, make_run, make_weights, same, seal, step, unsealed
from support.waiting import PATIENCE


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def replica_of(url, target=None, **options):
    return Replica(url, {} if target is None else target, heartbeat_seconds=None, **options)


def damage(url, key, how):
    store = open_store(url)
    data = bytearray(store.get(key))
    if how == "flip":
        data[len(data) // 2] ^= 1
    store.delete([key])
    if how != "remove":
        store.put(key, bytes(data[: len(data) // 2] if how == "cut" else data))


def delta_key(url, version, base):
    (key,) = [stat.key for stat in open_store(url).list(f"deltas/{version:08}-from-{base:08}")]
    return key


def test_from_anywhere_to_anywhere(rng):
    url, states = make_run(20)
    for have in (None, 0, 3, 9, 19):
        with replica_of(url) as replica:
            if have is not None:
                replica.pull(have)
            for want in (5, 19, 2, 19):
                done = replica.pull(want)
                assert (done.version, replica.version) == (want, want)
                assert same(replica.target.weights(), states[want])
    assert done.seconds > 0
    assert done.num_bytes > 0


def test_pulling_what_one_has_does_nothing(rng):
    url, _ = make_run(6)
    with replica_of(url) as replica:
        replica.pull()
        again = replica.pull()
    assert (again.num_bytes, again.num_objects, again.base) == (0, 0, 5)


def test_what_has_arrived_is_kept_for_the_next_try(tmp_path):
    url, states = make_run(4)
    store = Hooked(url)

    def fail(verb, key):
        if verb == "get_range" and "00000003" in key:
            raise StoreUnavailable("gone for a moment", refused=True)

    store.before = fail
    (tmp_path / "notes.txt").write_text("somebody's own")
    with replica_of(store, scratch=tmp_path) as replica, pytest.raises(StoreUnavailable):
        replica.pull()
    store.before = lambda verb, key: None
    store.calls.clear()
    with replica_of(store, scratch=tmp_path) as replica:
        replica.pull()
        assert same(replica.target.weights(), states[3])
    assert {key for verb, key in store.calls if verb == "get_range"} == {delta_key(url, 3, 2)}
    assert (tmp_path / "notes.txt").exists()
    assert not any((tmp_path / "deltawire-downloads").iterdir())


def test_what_failed_attempts_have_fetched_does_not_pile_up(tmp_path, monkeypatch):
    """A target that refuses each new version, for as long as somebody takes to notice, must not fill the disk."""
    url, states = make_run(12)
    with replica_of(url, scratch=tmp_path) as replica:
        replica.pull(0)
        with monkeypatch.context() as patch:
            patch.setattr(MemoryTarget, "apply", refuse)
            for version in range(1, 12):
                with pytest.raises(EngineRejected):
                    replica.pull(version)
                route = {(hop.version, hop.base) for hop in replica.route(version).hops}
                assert len(list((tmp_path / "deltawire-downloads").iterdir())) == len(route)
        replica.pull()
        assert same(replica.target.weights(), states[11])


def refuse(*_):
    raise EngineRejected("not now")


def test_weights_are_recognised_by_their_digest(rng):
    """A model loaded from the checkpoint that the run started with needs no anchor."""
    url, states = make_run(6)
    for version in (0, 4, 5):
        weights = {name: Tensor(BF16, tensor.shape, states[version][name].copy())
                   for name, tensor in make_weights().items()}  # fmt: skip
        with replica_of(url, weights) as replica:
            done = replica.pull()
            assert not done.anchor
            assert replica.version == 5
            assert same(weights, states[5])


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_object_is_gone_around(rng, how):
    url, states = make_run(7)
    damage(url, delta_key(url, 3, 2), how)
    with replica_of(url) as replica:
        replica.pull(2)
        done = replica.pull()  # 2 -> 3 is gone, so: 0 by its anchor, 0 -> 4 by the skip delta, 4 -> 5 -> 6
        assert done.anchor
        assert same(replica.target.weights(), states[6])
        assert replica.num_faults >= (how != "remove")  # what is not listed is not even tried


@pytest.mark.parametrize(("how", "error"), [("flip", CorruptObject), ("cut", CorruptObject), ("remove", ObjectMissing)])
def test_where_no_route_is_left_the_old_version_stays(rng, how, error):
    url, states = make_run(7)
    damage(url, delta_key(url, 6, 5), how)
    with replica_of(url) as replica:
        replica.pull(5)
        with pytest.raises(error):
            replica.pull()
        assert replica.version == 5
        assert same(replica.target.weights(), states[5])


def test_a_wrong_delta_with_a_right_hash_is_refused(rng, monkeypatch):
    """A manifest that points at another version's delta."""
    url, states = make_run(4, skips=())
    store = open_store(url)
    one, two = (unsealed(store.get(f"manifests/0000000{version}.json")) for version in (2, 3))
    two["hop"]["objects"] = one["hop"]["objects"]
    store.put("manifests/00000003.json", seal(two))
    with replica_of(url) as replica:
        replica.pull(2)
        with pytest.raises(CorruptObject, match="not the one its document describes"):
            replica.pull()
        assert same(replica.target.weights(), states[2])


def test_a_delta_that_leads_elsewhere_is_refused(rng):
    """Stated digests that are wrong, with everything else in order."""
    url, states = make_run(3, skips=())
    store, wrong = open_store(url), "0" * 32
    manifest = unsealed(store.get("manifests/00000002.json"))
    right = manifest["digest"]
    key = manifest["hop"]["objects"][0]["key"]
    data = bytes(store.get(key)).replace(right.encode(), wrong.encode())
    manifest = json.loads(json.dumps(manifest).replace(right, wrong))
    manifest["hop"]["objects"][0]["sha256"] = sha256(data).hexdigest()
    store.put(key, data)
    store.put("manifests/00000002.json", seal(manifest))
    with replica_of(url) as replica:
        replica.pull(1)
        with pytest.raises(Exception, match=wrong):
            replica.pull()
        assert same(replica.target.weights(), states[1])


def test_weights_that_someone_else_changed_are_replaced(rng):
    url, states = make_run(8)
    with replica_of(url) as replica:
        replica.pull(3)
        for tensor in replica.target.weights().values():
            tensor.bits[:] ^= 1
        assert replica.pull().anchor
        assert same(replica.target.weights(), states[7])


def test_missing_things_are_named(rng):
    with replica_of(fresh_url()) as replica, pytest.raises(ObjectMissing, match="there is no run at memory:"):
        replica.pull()
    url = fresh_url()
    with Publisher(url, make_weights()), replica_of(url) as replica, pytest.raises(ObjectMissing, match="no version"):
        replica.pull()
    url, _ = make_run(3)
    with replica_of(url) as replica, pytest.raises(ObjectMissing, match="version 9 does not exist"):
        replica.pull(9)
    (anchor,) = [stat.key for stat in open_store(url).list("anchors/")]
    open_store(url).delete([anchor])
    with replica_of(url) as replica, pytest.raises((ObjectMissing, MissingAnchor, BrokenChain)):
        replica.pull()


def test_a_target_of_another_model_is_refused(rng):
    url, _ = make_run(2)
    fewer, other = make_weights(), make_weights()
    del fewer["norm"]
    other["norm"] = Tensor(BF16, (32,), np.zeros(32, np.uint16))
    for target, error in ((fewer, UnknownParameter), (other, ShapeMismatch)):
        before = copy_of(target)
        with replica_of(url, target) as replica, pytest.raises(error, match="norm"):
            replica.pull()
        assert same(target, before)
    with pytest.raises(TypeError):
        replica_of(url, 7)


def test_a_dictionary_that_was_empty_follows_the_names_of_the_run():
    url, published, got = fresh_url(), make_weights(), {}
    with Publisher(url, lambda: published) as publisher, replica_of(url, got) as replica:
        for shapes in ({"a": (4,), "b": (2,)}, {"a": (4,)}, {"a": (3,), "c": (5,)}):
            published = make_weights(shapes=shapes)
            publisher.publish(anchor=True).wait(PATIENCE)
            replica.pull()
            assert same(got, copy_of(published))


def test_an_apply_that_failed_half_way_is_repeated(rng):
    class Breaking(MemoryTarget):
        failing = False

        def apply(self, patches, base, state, tied):
            if self.failing:
                self.failing = False
                super().apply(patches[:2], base, state, tied)
                self._state = None
                raise RuntimeError("the device fell off")
            super().apply(patches, base, state, tied)

    url, states = make_run(4)
    target = Breaking({})
    with replica_of(url, target) as replica:
        replica.pull(2)
        target.failing = True
        with pytest.raises(RuntimeError):
            replica.pull()
        assert replica.version is None  # it does not know, so it does not say
        assert replica.pull().num_objects == 0
        assert replica.version == 3
        assert same(target.weights(), states[3])

        # Someone else has put other weights there meanwhile.
        replica.pull(2)
        target.failing = True
        with pytest.raises(RuntimeError):
            replica.pull()
        for tensor in target.weights().values():
            tensor.bits[:] = 1
        assert replica.pull().anchor
        assert same(target.weights(), states[3])


def test_watch_follows_and_writes_heartbeats(rng):
    url, weights = fresh_url(), make_weights()
    seen = []
    with Publisher(url, weights) as publisher, Replica(url, {}, name="one", heartbeat_seconds=0.05) as replica:
        publisher.publish().wait(PATIENCE)
        with replica.watching(seen.append, poll_seconds=0.02):
            for _ in range(5):
                step(weights, rng)
                version = publisher.publish().wait(PATIENCE).version
                replica.nudge()
                assert replica.wait(version, timeout=30) >= version
            assert same(replica.target.weights(), copy_of(weights))
            heartbeat = json.loads(publisher.run.store.get("replicas/one.json"))
            assert heartbeat["name"] == "one"
            assert heartbeat["run"] == publisher.run.id
            with pytest.raises(TimeoutError, match="version 99"):
                replica.wait(99, timeout=0.05)
        assert [pull.version for pull in seen] == sorted({pull.version for pull in seen})
        assert replica.lag == 0
        assert replica.metrics()["deltawire/replica/version"] == 5
    assert not list(open_store(url).list("replicas/"))  # a replica that has left is not in the way of gc


def test_iteration_yields_each_pull_until_the_replica_is_closed(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher, replica_of(url) as replica:
        publisher.publish().wait(PATIENCE)
        seen = []
        for pull in replica:
            assert same(replica.target.weights(), copy_of(weights))
            seen.append(pull.version)
            if pull.version == 3:
                break
            step(weights, rng)
            publisher.publish().wait(PATIENCE)
            replica.nudge()
        assert seen == [0, 1, 2, 3]
        step(weights, rng)
        publisher.publish().wait(PATIENCE)
        for pull in replica:  # again, after a break
            seen.append(pull.version)
            replica.close()
        assert seen == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="closed"):
            iter(replica)


def test_a_replica_shows_url_and_version_but_no_secret():
    url, _ = make_run(2)
    with replica_of(url, name="one") as replica:
        assert repr(replica) == f"Replica('{url}', name='one', version=None)"
        replica.pull()
        assert repr(replica) == f"Replica('{url}', name='one', version=1)"
        assert repr(replica.run) == f"Run('{url}', id='{replica.run.id}')"
        replica.run.store = Hooked(url)
        replica.run.store.url = "s3://user:secret@bucket/run?token=secret"
        assert "secret" not in repr(replica) + repr(replica.run)


def test_watch_outlives_a_store_that_is_away(rng):
    store, weights = Hooked(fresh_url()), make_weights()
    with Publisher(store.url, weights) as publisher, replica_of(store) as replica:
        publisher.publish().wait(PATIENCE)
        with replica.watching(poll_seconds=0.01):
            replica.wait(0, 30)

            def away(verb, key):
                raise StoreUnavailable("nobody is there")

            store.before = away
            deadline = time.monotonic() + 30
            while replica.error is None and time.monotonic() < deadline:
                replica.nudge()
                time.sleep(0.005)
            assert "nobody" in str(replica.error)
            assert replica.version == 0
            step(weights, rng)
            publisher.publish().wait(PATIENCE)
            store.before = lambda verb, key: None
            replica.nudge()
            assert replica.wait(1, 30) == 1
            assert same(replica.target.weights(), copy_of(weights))
    assert replica.error is None


class Flipping(Hooked):
    """A store whose answers may have a wrong bit."""

    flips = ()

    def get(self, key, **options):
        data = super().get(key, **options)
        if self.flips and key.startswith(self.flips[0]):
            self.flips = self.flips[1:]
            data = bytes(data[:-20]) + bytes([data[-20] ^ 1]) + bytes(data[-19:])
        return data


@pytest.mark.parametrize("key", ["run.json", "manifests/"])
def test_a_document_that_arrives_damaged_is_asked_for_again(rng, key):
    url, states = make_run(3)
    store = Flipping(url)
    store.flips = (key, key)
    with replica_of(store) as replica:
        replica.pull()
        assert same(replica.target.weights(), states[2])
    store.flips = (key,) * 9
    with replica_of(store) as replica:
        with pytest.raises(CorruptObject, match="SHA-256"):
            replica.pull()
        store.flips = ()
        replica.pull()  # nothing of what was damaged is remembered
        assert same(replica.target.weights(), states[2])


def test_a_version_that_was_never_there(rng):
    """A listing that arrives damaged names a version 40; the replica does not wait for 41."""
    url, states = make_run(3)
    store = Hooked(url)
    listing = store.inner.list

    def wrong(prefix="", *, after=""):
        store.list = right
        for stat in listing(prefix, after=after):
            yield type(stat)(stat.key.replace("00000002", "00000040"), stat.num_bytes, stat.modified)

    right, store.list = store.list, wrong
    with replica_of(store) as replica:
        with pytest.raises(ObjectMissing, match="version 40"):
            replica.pull()
        assert replica.pull().version == 2
        assert same(replica.target.weights(), states[2])


def test_heartbeats_are_best_effort(rng):
    url, states = make_run(2)
    store = Hooked(url)

    def refuse(verb, key):
        if verb == "put":
            raise StoreUnavailable("read-only")

    store.before = refuse
    with Replica(store, {}, heartbeat_seconds=1) as replica:
        replica.pull()
        assert same(replica.target.weights(), states[1])
    with pytest.raises(ValueError, match="name"):
        Replica(url, {}, name="../x")


def test_a_caught_up_replica_asks_little(rng):
    """One request to look, and for one new version its manifest, the one after it and its object."""
    url, weights, asked = fresh_url(), make_weights(), []
    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        store = Hooked(url)
        store.before = lambda verb, key: asked.append((verb, key))
        with replica_of(store) as replica:
            replica.pull()
            asked.clear()
            replica.pull()
            assert asked == [("get", manifest_key(1))]
            step(weights, rng)
            publisher.publish().wait(PATIENCE)
            asked.clear()
            replica.pull()
            (delta,) = open_store(url).list(DELTAS)
            assert asked == [("get", manifest_key(1)), ("get", manifest_key(2)), ("get_range", delta.key)]


def test_an_update_looks_once(rng):
    """`watch` asks the store and the target for what is new, and pulls what it found."""
    url, weights, asked = fresh_url(), make_weights(), []
    store = Hooked(url)
    store.before = lambda verb, key: asked.append((verb, key))
    with Publisher(url, weights) as publisher, replica_of(store) as replica:
        publisher.publish().wait(PATIENCE)
        replica.pull()
        looked, look = [], replica.target.refresh
        replica.target.refresh = lambda: looked.append(replica.version) or look()
        step(weights, rng)
        publisher.publish().wait(PATIENCE)
        asked.clear()
        assert next(iter(replica)).version == 1
        assert looked == [0]
        assert asked[:2] == [("get", manifest_key(1)), ("get", manifest_key(2))]
        assert [verb for verb, _ in asked[2:]] == ["get_range"]


def test_the_heartbeat_does_not_delay_the_fetch(rng):
    url, states = make_run(2)
    store, fetched = Hooked(url), threading.Event()

    def wait_for_the_fetch(verb, _key):
        if verb == "put":
            assert fetched.wait(PATIENCE)

    store.before = wait_for_the_fetch
    store.after = lambda verb, _key: verb == "get_range" and fetched.set()
    with Replica(store, {}) as replica:
        replica.pull()
        assert same(replica.target.weights(), states[1])
        assert [key for verb, key in store.calls if verb == "put"] == [replica_key(replica.name)] * 2


def test_verify_compares_every_element():
    url, _ = make_run(6)
    with replica_of(url, copy := {}) as replica:
        with pytest.raises(ValueError, match="pull first"):
            replica.verify()
        replica.pull(4)
        assert replica.verify() == {}
        view("embed", copy["embed"]).bits[:2] ^= 1  # nobody would notice: its digest is not measured again
        assert replica.verify() == {"embed": 2}
        del copy["norm"]
        copy["new"] = copy["embed"][:1]
        assert replica.verify() == {"embed": 2, "norm": 64, "new": 64}


def test_verify_finds_a_tied_copy_that_differs():
    url, w = fresh_url(), np.arange(4, dtype=np.float32)
    with Publisher(url, {"a": w, "b": w}) as publisher:
        publisher.publish()
    with replica_of(url, copy := {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}) as replica:
        replica.pull()
        copy["b"][1] = 7
        assert replica.verify() == {"b": 1}
