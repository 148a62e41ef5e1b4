"""gc and compact: nothing that anybody needs goes, and what a chain lacks is made."""

import os
import sys
import time

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.errors import Conflict, ObjectMissing
from deltawire.maintain.audit import audit
from deltawire.maintain.compact import compact, missing_hops, planned_hops
from deltawire.maintain.gc import collect, plan_gc
from deltawire.run.run import Run
from deltawire.store import open_store
from support.chains import Hooked, copy_of, fresh_url, make_run, make_weights, same, step
from support.many_versions import make_many
from support.waiting import PATIENCE


def keys(url):
    return {stat.key for stat in open_store(url).list()}


def reachable_versions(url, states):
    found = set()
    for version in Run(url).versions():
        with Replica(url, {}, heartbeat_seconds=None) as replica:
            try:
                replica.pull(version)
            except ObjectMissing:
                continue
            assert same(replica.target.weights(), states[version])
            found.add(version)
    return found


@pytest.mark.parametrize(("keep", "oldest"), [(1, 16), (2, 12), (3, 8), (9, 0)])
def test_versions_from_the_kept_anchors_on_stay(keep, oldest):
    url, states = make_run(20, anchors=4)
    before = keys(url)
    found = plan_gc(Run(url), keep_anchors=keep)
    assert keys(url) == before  # a plan does nothing
    assert found.oldest_anchor == oldest
    collect(Run(url), found.removals)
    gone = {removal.key for removal in found.removals}
    assert keys(url) == before - gone | ({"latest.json"} if gone else set())
    assert reachable_versions(url, states) == set(range(oldest, 20))
    again = plan_gc(Run(url), keep_anchors=keep)
    assert not again.removals
    assert again.num_kept == found.num_kept == len(keys(url) - {"run.json", "latest.json"})


def test_a_publisher_goes_on_after_gc():
    url, _ = make_run(10, anchors=4)
    weights = make_weights()
    with Replica(url, weights, heartbeat_seconds=None) as replica:
        replica.pull()
    collect(Run(url), plan_gc(Run(url), keep_anchors=1).removals)
    with Publisher(url, weights) as publisher:
        assert publisher.resumed
        step(weights, np.random.default_rng(1))
        publisher.publish().wait(PATIENCE)
    with Replica(url, {}, heartbeat_seconds=None) as late:
        late.pull()
        assert same(late.target.weights(), copy_of(weights))


def test_what_live_replicas_need_stays():
    url, states = make_run(20, anchors=12)
    with Replica(url, {}, name="slow") as slow:
        slow.pull(9)
        kept = plan_gc(Run(url), keep_anchors=1)
        assert kept.live_replicas == ("slow",)
        dead = plan_gc(Run(url), keep_anchors=1, live_seconds=0)
        assert len(dead.removals) > len(kept.removals)
        collect(Run(url), kept.removals)
        planned = slow.route()
        assert planned.hops[0].base == 9
        assert not slow.pull().anchor
        assert same(slow.target.weights(), states[19])


def test_a_reader_whose_path_is_removed_finds_another():
    """gc runs between the plan and the download of a replica that nobody knew of."""
    url, states = make_run(20, anchors=4)
    store = Hooked(url)

    def collect_now(verb, key):
        if verb == "get_range" and "-from-" in key:
            store.before = lambda verb, key: None
            collect(Run(url), plan_gc(Run(url), keep_anchors=1).removals)

    with Replica(store, {}, heartbeat_seconds=None) as replica:
        replica.pull(5)
        store.before = collect_now
        replica.pull()
        assert same(replica.target.weights(), states[19])


def test_files_beside_the_weights_stay(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    url, _ = make_run(12, anchors=4, files=[tmp_path / "config.json"])
    collect(Run(url), plan_gc(Run(url), keep_anchors=1).removals)
    with Replica(url, tmp_path / "mirror") as replica:
        replica.pull()
    assert (tmp_path / "mirror" / "config.json").read_text() == "{}"


def test_uploads_that_were_given_up_go_after_a_while():
    url, _ = make_run(3)
    orphan = "deltas/00000009-from-00000008-abcdef.safetensors"
    open_store(url).put(orphan, b"left by a crash")
    assert orphan not in {removal.key for removal in plan_gc(Run(url)).removals}
    old = plan_gc(Run(url), grace_seconds=-1)
    assert [(removal.key, removal.why) for removal in old.removals] == [(orphan, "abandoned upload")]
    open_store(url).put("notes.txt", b"somebody's own")
    assert "notes.txt" not in {removal.key for removal in old.removals}
    with pytest.raises(ValueError, match="keep_anchors must be at least 1"):
        plan_gc(Run(url), keep_anchors=0)


def test_what_a_killed_writer_left_in_a_folder_goes_after_a_while(tmp_path):
    url, _ = make_run(3, str(tmp_path / "run"))
    store, before = open_store(url), keys(url)
    left = "anchors/00000002-abcdef123456/model.safetensors#1"
    others = ["notes.txt#1", "deltas/mine#1", "deltas#1/00000009-from-00000008-abcdef.safetensors#1"]
    for key in (left, *others):
        (tmp_path / "run" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / key).write_bytes(b"half a shard")
    assert keys(url) == before, "it is no object"
    assert plan_gc(Run(url)).removals == ()
    os.utime(tmp_path / "run" / left, (time.time() - 7200,) * 2)
    (removal,) = plan_gc(Run(url)).removals
    assert (removal.key, removal.num_bytes, removal.why) == (left, 12, "abandoned upload")
    collect(Run(url), [removal])
    assert not (tmp_path / "run" / left).exists()
    store.delete([left])
    assert all((tmp_path / "run" / key).exists() for key in others)
    with pytest.raises(ValueError, match="cannot be the key"):
        store.delete(["../x#1"])


def test_an_anchor_that_is_uploaded_for_hours_stays(tmp_path):
    url, _ = make_run(3, tmp_path / "run")
    shards = [f"anchors/00000002-abcdef123456/model-0000{i}-of-00003.safetensors" for i in (1, 2)]
    for shard, hours in zip(shards, (3, 0.5), strict=True):
        open_store(url).put(shard, b"some weights")
        os.utime(tmp_path / "run" / shard, (time.time() - 3600 * hours,) * 2)
    assert plan_gc(Run(url)).removals == ()
    os.utime(tmp_path / "run" / shards[1], (time.time() - 3700,) * 2)
    assert {each.key for each in plan_gc(Run(url)).removals} == set(shards)


def test_compact_makes_what_is_missing():
    url, states = make_run(20, skips=(), anchors=None)
    run = Run(url)
    missing = missing_hops(run.hops())
    assert missing == [(4, 0), (8, 4), (12, 8), (16, 12), (16, 0)]
    made = compact(run, anchor=True)
    assert [(hop.version, hop.base) for hop in made] == [*missing, (19, None)]
    assert compact(Run(url), anchor=False) == []
    with Replica(url, {}, heartbeat_seconds=None) as late:
        late.pull(1)
        planned = late.route()
        assert late.pull().num_objects < 19 - 1
        assert len(planned.hops) < 18
        assert same(late.target.weights(), states[19])
    assert reachable_versions(url, states) == set(range(20))


def test_compact_fills_the_hole_that_a_restart_leaves():
    url, weights, rng = fresh_url(), make_weights(), np.random.default_rng(0)
    for _ in range(3):
        with Publisher(url, weights, anchors=None) as publisher:
            for _ in range(3):
                step(weights, rng)
                publisher.publish()
    assert missing_hops(Run(url).hops()) == [(4, 0), (8, 4)]
    assert len(compact(Run(url))) == 2
    assert missing_hops(Run(url).hops()) == []


@pytest.mark.parametrize("change", ["other tensors", "other ties", "none"])
def test_compact_goes_on_where_all_weights_were_published_anew(change):
    url, rng, states = fresh_url(), np.random.default_rng(0), []
    weights, tied = make_weights(), {}
    weights["head"] = weights["embed"] if change == "other ties" else make_weights()["embed"]
    for number in range(2):
        with Publisher(url, weights, skips=(), anchors=None, tied=tied) as publisher:
            for _ in range(6 if number == 0 else 12):
                publisher.publish(anchor=publisher.num_published == 0).wait(PATIENCE)
                states.append({name: each for name, each in copy_of(weights).items() if name not in tied})
                step(weights, rng)
        if change == "other tensors":
            weights["more"] = make_weights(1)["norm"]
        if change == "other ties":
            tied = {"head": "embed"}
            weights["head"] = weights["embed"]
    run = Run(url)
    made = [(hop.version, hop.base) for hop in compact(run, anchor=True)]
    assert made == [(4, 0), (12, 8), (16, 12), (16, 6), (17, None)]
    assert compact(Run(url)) == []
    assert not audit(Run(url)).problems
    for have, want in ((0, 4), (8, 16), (0, 17)):
        with Replica(url, {}, heartbeat_seconds=None) as replica:
            replica.pull(have)
            replica.pull(want)
            assert same({name: replica.target.weights()[name] for name in states[want]}, states[want])


def test_compact_goes_on_across_what_was_removed():
    url, weights, rng = fresh_url(), make_weights(shapes={"w": (4096,)}), np.random.default_rng(0)
    for number in range(2):
        with Publisher(url, weights, skips=(), anchors=None) as publisher:
            for _ in range(80):
                step(weights, rng, density=1e-4)
                publisher.publish()
        made = [(hop.version, hop.base) for hop in compact(Run(url))]
        if number == 0:
            assert (64, 0) in made
            collect(Run(url), plan_gc(Run(url), keep_anchors=1).removals)
            assert Run(url).versions()[:2] == [0, 64]
    assert {(80, 64), (80, 0)} <= set(made)
    assert compact(Run(url)) == []
    assert not audit(Run(url)).problems


def test_compact_makes_what_was_uploaded_and_not_committed():
    url, states = make_run(10, anchors=None)
    open_store(url).delete(["manifests/00000008.from-00000004.json"])
    assert planned_hops(Run(url)) == [(8, 4)]
    assert [(hop.version, hop.base) for hop in compact(Run(url))] == [(8, 4)]
    assert compact(Run(url)) == []
    assert reachable_versions(url, states) == set(range(10))


@pytest.mark.parametrize(
    "heartbeat",
    [
        b"[" * 100_000,
        b"7",
        b"{}",
        b'{"using": 7, "version": "x"}',
        b'{"name": "../manifests/00000001"}',
        b'{"name": 7}',
    ],
)
def test_heartbeats_may_hold_anything(heartbeat):
    """What a replica writes of itself cannot stop gc, nor make it remove other things."""
    url, _ = make_run(5)
    open_store(url).put("replicas/odd.json", heartbeat)
    found = plan_gc(Run(url))
    assert not found.removals
    assert set(found.live_replicas) <= {"odd"}


def orphan_of(url, kind):
    """A second upload of what is there already, under a name that no document has."""
    store = open_store(url)
    key = next(stat.key for stat in store.list(kind))
    number = key.index("-from-") + 15 if kind == "deltas/" else len("anchors/00000000-")
    other = f"{key[:number]}0123456789ab{key[number + 12 :]}"
    store.put(other, store.get(key))
    return other


def test_a_kill_between_an_anchors_objects_and_its_document():
    """The weights of an anchor lie there, and no document says so: gc neither fails nor counts on it."""
    url, states = make_run(6, anchors=None)
    half = "anchors/00000005-0123456789ab/model.safetensors"
    open_store(url).put(half, b"half an anchor")
    young = plan_gc(Run(url), keep_anchors=1)
    assert (young.removals, young.oldest_anchor) == ((), 0)
    found = plan_gc(Run(url), keep_anchors=1, grace_seconds=-1)
    assert [(each.key, each.why) for each in found.removals] == [(half, "abandoned upload")]
    collect(Run(url), found.removals)
    assert reachable_versions(url, states) == set(range(6))


def test_a_clock_that_is_ahead_deletes_nothing(monkeypatch):
    """By it, an upload in progress is older than its grace."""
    url, states = make_run(12, anchors=4)
    store, orphan = open_store(url), orphan_of(url, "deltas/")
    before = {stat.key for stat in store.list()}
    with monkeypatch.context() as ahead:
        now = time.time
        ahead.setattr(time, "time", lambda: now() + 7200)
        found = plan_gc(Run(url), keep_anchors=1)
        assert orphan in {each.key for each in found.removals}
        with pytest.raises(Conflict, match="7200 s ahead"):
            collect(Run(url), found.removals)
    assert {stat.key for stat in store.list()} == before | {"latest.json"}
    collect(Run(url), plan_gc(Run(url), keep_anchors=1).removals)
    assert store.stat(orphan)
    assert reachable_versions(url, states) == set(range(8, 12))


def test_by_a_clock_that_is_ahead_no_live_replica_is_dead(tmp_path, monkeypatch):
    """A little less than the time after which replicas count as dead: each is, between two heartbeats."""
    url, _ = make_run(12, tmp_path / "run", anchors=4)
    with Replica(url, {}, name="slow") as replica:
        replica.pull(2)
        beat, now = tmp_path / "run/replicas/slow.json", time.time
        os.utime(beat, (now() - 15, now() - 15))
        assert plan_gc(Run(url), keep_anchors=1).live_replicas == ("slow",)
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: now() + 590)
            found = plan_gc(Run(url), keep_anchors=1)
            assert found.live_replicas == ()
            with pytest.raises(Conflict, match="590 s ahead"):
                collect(Run(url), found.removals)
        replica.pull(3)


def test_a_clock_that_is_ahead_keeps_the_first_anchor_of_a_run(monkeypatch):
    """While it is uploaded, the run has no version."""
    url, weights, shard = fresh_url(), make_weights(), "anchors/00000000-abcdef123456/model.safetensors"
    store = open_store(url)
    store.put(shard, b"some weights")
    Publisher(url, weights).close()
    with monkeypatch.context() as ahead:
        now = time.time
        ahead.setattr(time, "time", lambda: now() + 7200)
        found = plan_gc(Run(url))
        assert shard in {each.key for each in found.removals}
        with pytest.raises(Conflict, match="7200 s ahead"):
            collect(Run(url), found.removals)
    assert store.stat(shard)
    collect(Run(url), plan_gc(Run(url), grace_seconds=-1).removals)
    assert shard not in keys(url)
    assert Run(url).latest() is None
    with Publisher(url, weights) as publisher:
        assert publisher.publish().wait(PATIENCE).version == 0


@pytest.mark.parametrize("kind", ["deltas/", "anchors/"])
def test_a_second_upload_of_a_kept_way_goes(kind):
    url, states = make_run(6)
    orphan = orphan_of(url, kind)
    assert not plan_gc(Run(url)).removals
    found = plan_gc(Run(url), grace_seconds=-1)
    assert [each.key for each in found.removals] == [orphan]
    collect(Run(url), found.removals)
    assert reachable_versions(url, states) == set(range(6))


def test_a_second_upload_of_a_way_that_goes_has_its_grace():
    """It may be under way, and its document may come."""
    url, _ = make_run(12, anchors=4)
    orphan = orphan_of(url, "deltas/")
    assert orphan not in {each.key for each in plan_gc(Run(url), keep_anchors=1).removals}
    assert orphan in {each.key for each in plan_gc(Run(url), keep_anchors=1, grace_seconds=-1).removals}


def test_an_anchor_that_is_not_whole_does_not_count():
    url, states = make_run(12, anchors=4)
    store = open_store(url)
    store.delete(stat.key for stat in list(store.list("anchors/00000008")))
    found = plan_gc(Run(url), keep_anchors=1)
    assert found.oldest_anchor == 4
    collect(Run(url), found.removals)
    assert reachable_versions(url, states) == set(range(4, 12))


def test_documents_that_cannot_be_read_stop_nothing_and_keep_what_they_may_name():
    url, _ = make_run(12, anchors=4)
    store, whole = open_store(url), plan_gc(Run(url), keep_anchors=1)
    for key in ("manifests/00000001.json", "manifests/00000009.json", "manifests/00000004.anchor.json"):
        store.put(key, b"damaged")
    found = plan_gc(Run(url), keep_anchors=1, grace_seconds=-1)
    assert {each.key for each in found.removals} == {each.key for each in whole.removals}
    assert not [each for each in found.removals if "/00000009" in each.key]


def test_a_plan_for_more_versions_than_a_run_remembers(tmp_path):
    """Threads read the documents, and forget the oldest at the same time."""
    url = make_many(f"memory:{tmp_path}", 600)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert plan_gc(Run(url)).num_kept > 1000
    finally:
        sys.setswitchinterval(before)


def long_run(url, num_versions=120, **options):
    """A run whose weights move within a tenth of them: deltas from the anchor stay small. Returns the states."""
    rng, states = np.random.default_rng(0), []
    weights = make_weights(shapes={"a": (100, 1000)})
    moving, bits = rng.permutation(100_000)[:8000], weights["a"].bits
    with Publisher(url, weights, **options) as publisher:
        for _ in range(num_versions):
            publisher.publish()
            publisher.flush()
            states.append(copy_of(weights))
            bits[rng.choice(moving, 1000, replace=False)] ^= 1
        assert publisher._leader.hops.error is None
    return states


def longs(url):
    return [(hop.base, hop.version) for hop in Run(url).hops() if hop.base is not None and hop.version - hop.base >= 32]


def test_compact_makes_the_deltas_from_the_anchor_that_a_publisher_would_have_made(tmp_path):
    alone, with_all = str(tmp_path / "alone"), str(tmp_path / "all")
    states = long_run(alone, skips=(), anchors=None)
    long_run(with_all)
    assert len(Run(alone).hops()) == 120
    compact(Run(alone))
    assert longs(alone) == longs(with_all) == [(0, 64), (0, 112)]
    assert missing_hops(Run(alone).hops()) == missing_hops(Run(with_all).hops()) == []
    assert reachable_versions(alone, states) == set(range(120))


@pytest.mark.parametrize(("keep", "oldest"), [(1, 112), (2, 64), (3, 0)])
def test_gc_counts_a_version_with_a_delta_from_the_anchor_as_one(tmp_path, keep, oldest):
    url = str(tmp_path / "run")
    states = long_run(url)
    found = plan_gc(Run(url), keep_anchors=keep)
    assert found.oldest_anchor == oldest
    collect(Run(url), found.removals)
    assert reachable_versions(url, states) == {0, *range(oldest, 120)}
    assert not plan_gc(Run(url), keep_anchors=keep).removals
    assert audit(Run(url), deep=True).problems == ()
    with Replica(url, {}, heartbeat_seconds=None) as replica:
        replica.pull(0)
        assert not replica.pull().anchor
        assert same(replica.target.weights(), states[119])


@pytest.mark.parametrize(
    "left", ["deltas/00000004-from-00000000-ab.safetensors", "anchors/00000003-ab/model.safetensors"]
)
def test_the_audit_of_a_version_takes_no_upload_that_was_abandoned(left):
    url, _ = make_run(6, skips=(), anchors=None)
    store = open_store(url)
    store.put(left, b"left by a crash")
    assert audit(Run(url), version=4).num_proven == 5
    (delta,) = (stat.key for stat in store.list("deltas/00000002-from-00000001"))
    store.put(delta, bytes(len(store.get(delta))))
    assert delta in {problem.where for problem in audit(Run(url), version=4).problems}
