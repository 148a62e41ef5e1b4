"""What the dashboard knows of a run: read, followed, lost and found again."""

import json
import threading
import time

import numpy as np
import pytest

from deltawire import Publisher, Replica
from deltawire.errors import StoreUnavailable
from deltawire.pages import followers
from deltawire.pages.anatomy import Chain
from deltawire.pages.feed import Feed, Polling, snapshot
from deltawire.pages.followers import LoggedPart
from deltawire.run import fleet
from deltawire.run.keys import hop_key, manifest_key
from deltawire.run.run import Run
from deltawire.store import Stat, open_store
from deltawire_demo.eventlog import EventLog
from support.chains import Hooked, fresh_url, make_run, make_weights, seal, step, unsealed
from support.pages import log_file, read_all
from support.waiting import PATIENCE, eventually


def beat(name, told, age_seconds=0.0):
    """A heartbeat as a replica writes it, as old as wanted."""
    now = time.time() - age_seconds
    data = json.dumps({"name": name, "run": "demo", "time": now, **told}).encode()
    return followers.Beat(Stat(f"replicas/{name}.json", len(data), now), time.time(), json.loads(data))


@pytest.fixture(params=["memory", "folder"])
def url(request, tmp_path):
    return fresh_url() if request.param == "memory" else str(tmp_path / "run")


def test_a_run_and_its_replica_are_followed(url):
    weights, rng = make_weights(), np.random.default_rng(0)
    with Publisher(url, weights, run="demo") as publisher:
        publisher.publish(step=10).wait(PATIENCE)
        feed = read_all(Feed(url))
        (row,) = feed.versions((None, 10))["versions"]
        assert (row["version"], row["step"], row["kind"], row["ratio"]) == (0, 10, "anchor", 1.0)
        assert feed.state()["replicas"] == []
        step(weights, rng, density=0.05)
        publisher.publish(step=11).wait(PATIENCE)
        with Replica(url, {}, name="one") as replica:
            replica.pull(0)
            read_all(feed)
            (behind,) = feed.state()["replicas"]
            assert (behind["name"], behind["version"], behind["lag"], behind["health"]) == ("one", 0, 1, "behind")
            replica.pull()
            read_all(feed)
            (current,) = feed.state()["replicas"]
            assert (current["version"], current["lag"], current["health"]) == (1, 0, "ok")
            assert time.time() - current["heard"] < 30
            assert current["pull_seconds"] > 0
        read_all(feed)
        assert feed.state()["replicas"] == [], "it took its heartbeat back"
    manifest = Run(url).manifest(1)
    row = feed.versions((0, 10))["versions"][0]
    assert row["bytes"] == manifest.hop.num_bytes
    assert row["full_bytes"] == manifest.route[0].num_bytes, "the anchor, which has no extra files"
    assert row["density"] == pytest.approx(manifest.hop.num_changed / manifest.num_elements)
    assert feed.state()["counts"] == {"first": 0, "latest": 1, "found": 2, "read": 2, "damaged": 0, "anchors": 1}


def test_manifests_are_read_once_and_listing_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr("deltawire.pages.versions.LOOK_BACK", 1)
    url, _ = make_run(5)
    store = Hooked(url)
    asked, listed = [], []
    store.before = lambda verb, key: asked.append(key) if verb == "get" else None
    inner = store.inner.list
    store.inner.list = lambda prefix="", *, after="": listed.append((prefix, after)) or inner(prefix, after=after)
    feed = read_all(Feed(store))
    asked.clear()
    listed.clear()
    for _ in range(3):
        feed.poll()
    assert not [key for key in asked if key.startswith("manifests/")]
    assert {after for prefix, after in listed if prefix == "manifests/"} == {manifest_key(2)}


def test_the_newest_are_read_first(monkeypatch):
    monkeypatch.setattr("deltawire.pages.feed.READ_SECONDS", 1e-9)
    monkeypatch.setattr("deltawire.pages.versions.BATCH", 3)
    url, _ = make_run(8)
    feed = Feed(url)
    assert feed.poll()
    assert [row["version"] for row in feed.versions((None, 10))["versions"]] == [5, 6, 7]
    assert feed.versions((None, 10))["unread"] == 5
    assert feed.state()["counts"]["read"] == 3
    assert feed.state()["counts"]["found"] == 8
    read_all(feed)
    assert [row["version"] for row in feed.versions((None, 10))["versions"]] == list(range(8))


def test_pages(tmp_path):
    url, _ = make_run(7)
    log = log_file(tmp_path, *({"event": "step", "step": number, "reward": 0.5} for number in range(1, 6)))
    feed = read_all(Feed(url, events=EventLog(log)))

    def numbers(after, limit):
        page = feed.versions((after, limit))
        return [row["version"] for row in page["versions"]], page["next_after"]

    assert numbers(None, 3) == ([4, 5, 6], None)
    assert numbers(-1, 3) == ([0, 1, 2], 2)
    assert numbers(2, 3) == ([3, 4, 5], 5)
    assert numbers(5, 3) == ([6], None)
    assert numbers(6, 3) == ([], None)
    assert [row["step"] for row in feed.steps((2, 2))["steps"]] == [3, 4]
    assert feed.steps((2, 2))["next_after"] == 4
    assert feed.steps((4, 2))["next_after"] is None


def test_a_store_that_is_away_for_a_while():
    url, _ = make_run(3)
    store = Hooked(url)
    feed = read_all(Feed(store))

    def refuse(verb, key):
        raise StoreUnavailable("the network is gone", url=url, key=key, refused=True, uncertain=False)

    store.before = refuse
    feed.poll()
    state = feed.state()
    assert not state["store"]["ok"]
    assert "the network is gone" in state["store"]["error"]
    assert len(feed.versions((None, 10))["versions"]) == 3, "what was read stays"
    with Publisher(url, make_weights(1)) as publisher:
        publisher.publish().wait(PATIENCE)
    store.before = lambda verb, key: None
    read_all(feed)
    assert feed.state()["store"]["ok"]
    assert feed.state()["counts"]["latest"] == 3


def test_manifests_that_cannot_be_had_for_a_while_are_read_later():
    url, _ = make_run(6)
    store = Hooked(url)

    def refuse(verb, key):
        if verb == "get" and key in (manifest_key(2), manifest_key(4)):
            raise StoreUnavailable("try later", url=url, key=key, refused=True, uncertain=False)

    store.before = refuse
    feed = Feed(store)
    for _ in range(3):
        feed.poll()
    assert [row["version"] for row in feed.versions((None, 10))["versions"]] == [0, 1, 3, 5]
    assert "try later" in feed.state()["store"]["error"]
    store.before = lambda verb, key: None
    read_all(feed)
    assert feed.state()["store"]["ok"]
    assert [row["version"] for row in feed.versions((None, 10))["versions"]] == list(range(6))


def test_a_store_that_says_nothing_is_late(monkeypatch):
    monkeypatch.setattr("deltawire.pages.feed.LATE_SECONDS", 0.2)
    url, _ = make_run(1)
    store, may_answer = Hooked(url), threading.Event()
    polling = Polling(Feed(store), 0.05)
    try:
        eventually(lambda: polling.feed.answered)
        store.before = lambda verb, key: may_answer.wait(PATIENCE)
        eventually(lambda: polling.feed.is_late)
        may_answer.set()
        eventually(lambda: not polling.feed.is_late)
    finally:
        may_answer.set()
        polling.close()


def test_a_folder_that_goes_and_comes_back(tmp_path):
    make_run(2, str(tmp_path / "run"))
    feed = read_all(Feed(str(tmp_path / "run")))
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    feed.poll()
    assert not feed.state()["store"]["ok"]
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    feed.poll()
    assert feed.state()["store"]["ok"]


def test_a_run_that_does_not_exist_yet_is_waited_for():
    url = fresh_url()
    feed = Feed(url)
    feed.poll()
    assert feed.state()["store"]["ok"]
    assert feed.state()["run"] is None
    make_run(1, url)
    read_all(feed)
    assert feed.state()["run"] == "demo"
    assert feed.state()["counts"]["latest"] == 0


def test_another_run_at_the_same_place_starts_over():
    url, _ = make_run(3)
    feed = read_all(Feed(url))
    epoch, store = feed.epoch, open_store(url)
    store.delete([stat.key for stat in store.list()])
    with Publisher(url, make_weights(), run="other") as publisher:
        publisher.publish().wait(PATIENCE)
    feed.poll()
    read_all(feed)
    assert feed.epoch != epoch
    assert feed.state()["run"] == "other"
    assert [row["version"] for row in feed.versions((None, 10))["versions"]] == [0]


@pytest.mark.parametrize("damage", [
    b"", b"{}", b"[" * 100_000, b"\xff" * 100,
    seal({"format": 1, "kind": "version", "run": "other", "version": 1}),
], ids=["empty", "bare", "deep", "binary", "other"])  # fmt: skip
def test_a_damaged_manifest_is_reported_and_the_rest_is_shown(damage):
    url, _ = make_run(3)
    open_store(url).put(manifest_key(1), damage)
    feed = read_all(Feed(url))
    rows = feed.versions((None, 10))["versions"]
    assert [row["kind"] for row in rows] == ["anchor", "damaged", "delta"]
    assert rows[1]["error"]
    assert feed.state()["counts"]["damaged"] == 1
    assert feed.state()["store"]["ok"]


def test_times_that_are_no_numbers_are_left_out():
    url, _ = make_run(2)
    store = open_store(url)
    fields = unsealed(store.get(manifest_key(1)))
    store.put(manifest_key(1), seal({**fields, "created": float("nan")}))
    feed = read_all(Feed(url))
    assert feed.versions((0, 10))["versions"][0]["created"] is None
    json.dumps([feed.state(), feed.versions((None, 9))], allow_nan=False)


@pytest.mark.parametrize("told", [
    b"", b"nothing", b"[]", b"{}", b"7", b'{"version":"<b>1</b>","pause_seconds":NaN,"error":{"a":1},"engine":[]}',
    b'{"version":-1,"using":7,"last_pull":3,"time":"now","pause_seconds":1e999}', b'{"a":' * 50_000, b"0" * 70_000,
])  # fmt: skip
def test_heartbeats_may_say_anything(told):
    url, _ = make_run(2)
    open_store(url).put("replicas/odd.json", told)
    feed = read_all(Feed(url))
    (row,) = feed.state()["replicas"]
    assert row["name"] == "odd"
    assert row["version"] is None
    assert row["health"] in ("fault", "behind", "updating")
    json.dumps(feed.state(), allow_nan=False)
    chain = Chain(open_store(url), None).page((None, 10))
    assert chain["totals"]["delta"]["hops"] == 1, "a plan for gc that fails on them takes nothing else along"


def test_health_follows_the_heartbeat():
    for fields, age, expected in [
        ({"version": 5}, 1, "ok"), ({"version": 4}, 1, "behind"), ({"version": None}, 1, "behind"),
        ({"version": 4, "using": ["4 -> 5"]}, 90, "updating"), ({"version": 5}, 59, "ok"),
        ({"version": 5}, 61, "silent"), ({"version": 5, "using": ["x"]}, 601, "dead"), ({"version": 5}, 601, "dead"),
        ({"version": 5, "error": "no"}, 1, "fault"), (None, 1, "fault"),
    ]:  # fmt: skip
        assert fleet.replica_row("one", fields, age, 5)["health"] == expected, (fields, age)


def test_the_log_knows_of_a_death_before_the_heartbeat_is_old():
    now = time.time()
    told = beat("one", {"version": 5}, 2)

    def row(part, heard=told):
        found = followers.replica_row("one", heard, part, 5, now)
        return found["health"], found["version"]

    assert row(LoggedPart("ended", now - 1)) == ("dead", None)
    assert row(LoggedPart("ended", now - 10)) == ("ok", 5), "it was heard of since"
    assert row(LoggedPart("starting", now - 1)) == ("starting", None)
    assert row(LoggedPart("running", now - 9, version=4, pulled=now - 1)) == ("behind", 4)
    assert row(LoggedPart("running", now - 9, version=4, pulled=now - 8)) == ("ok", 5)
    assert row(LoggedPart("running", now - 9, version=5, pulled=now - 8), None) == ("stopped", 5)
    assert row(LoggedPart("ended", now - 9), None) == ("dead", None)


def test_a_log_is_followed(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    assert log.read() == []
    path = log_file(tmp_path, {"event": "serving", "part": "replica-0", "url": "http://127.0.0.1:7"})
    assert log.read() == []
    assert log.parts["replica-0"].life == "starting"
    with path.open("a") as file:
        file.write('not json\n[]\n{"event": 3, "time": 1}\n{"event": "step", "step": 1}\n{"event":"note","time":5,')
        file.flush()
        assert log.read() == []
        file.write('"text":"a\\u001b[2Jb"}\n')
    (note,) = log.read()
    assert (note["level"], note["text"]) == ("note", "a [2Jb")
    log_file(
        tmp_path, {"event": "pull", "replica": "replica-0", "version": 3, "pause_seconds": 0.001, "anchor": True},
        {"event": "fault", "part": "http://127.0.0.1:7", "reason": "ReadError"},
        {"event": "step", "step": 1, "reward": 0.25, "wins": 0.5},
        {"event": "ended", "part": "replica-0", "status": -9}, {"event": "ended", "part": "trainer", "status": 1},
    )  # fmt: skip
    told = [(record.get("level"), record.get("part"), record.get("text")) for record in log.read()]
    assert told == [
        ("join", "replica-0", "joined at version 3"), ("fault", "replica-0", "ReadError"), (None, None, None),
        ("death", "replica-0", "killed by SIGKILL"), ("death", "trainer", "ended with status 1"),
    ]  # fmt: skip
    assert log.parts["replica-0"].life == "ended"
    path.write_text("")
    assert log.read() is None, "the log has started over"
    assert log.parts == {}


def test_a_long_log_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("deltawire_demo.eventlog.READ_BYTES", 100)
    url, _ = make_run(1)
    log = log_file(tmp_path, *({"event": "step", "step": number, "reward": 0.5} for number in range(1, 30)))
    feed = Feed(url, events=EventLog(log))
    assert feed.poll(), "there is more"
    assert len(read_all(feed).steps((None, 100))["steps"]) == 29


def test_steps_that_are_made_again_count_once(tmp_path):
    url, _ = make_run(1)
    steps = [{"event": "step", "step": number, "reward": number / 10} for number in range(1, 5)]
    log = log_file(tmp_path, *steps, {"event": "resumed", "step": 2}, {"event": "step", "step": 3, "reward": 0.9})
    feed = read_all(Feed(url, events=EventLog(log)))
    assert [row["reward"] for row in feed.steps((None, 10))["steps"]] == [0.1, 0.2, 0.9]
    assert "resumed after step 2" in feed.notes(10)[-1]["text"]
    log.write_text("")
    epoch = feed.epoch
    read_all(feed)
    assert feed.epoch != epoch
    assert feed.steps((None, 10))["steps"] == []


def test_the_faults_of_replicas_stay():
    url, _ = make_run(2)
    store, feed = open_store(url), Feed(url)
    for error in ("one", "one", None, "two"):
        store.put("replicas/a.json", json.dumps({"version": 1, "time": time.time(), "error": error}).encode())
        read_all(feed)
    assert [(note["part"], note["text"]) for note in feed.notes(10)] == [("a", "one"), ("a", "two")]
    assert feed.state()["replicas"][0]["health"] == "fault"


def test_a_snapshot_reads_only_its_page(tmp_path):
    url, _ = make_run(9)
    store = Hooked(url)
    found = snapshot(store, (2, 3), public_key=None, events=None)
    assert [row["version"] for row in found["versions"]] == [3, 4, 5]
    assert found["next_after"] == 5
    assert found["counts"]["found"] == 9
    read = {key for verb, key in store.calls if verb == "get" and key.startswith("manifests/")}
    assert read == {*(manifest_key(version) for version in (3, 4, 5)), hop_key(4, 0)}
