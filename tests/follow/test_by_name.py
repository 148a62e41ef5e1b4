"""Following a run on a store that cannot list: every document is asked for by its name."""

import json

import pytest

from deltawire import Replica
from deltawire.errors import ChainError, ObjectMissing, ReadOnlyStore, StoreUnavailable
from deltawire.follow.routing import find_route
from deltawire.maintain.gc import collect, plan_gc
from deltawire.run import run as run_module
from deltawire.run.keys import LATEST_KEY, manifest_key
from deltawire.run.run import Run
from deltawire.store import open_store
from support.chains import Hooked, make_run, same
from support.command_line import bits, run, told
from support.many_versions import make_many


class ByName(Hooked):
    """A store as a web server is: no listing, no writing. `asked` has the keys that were asked for."""

    listable = False

    def __init__(self, url):
        super().__init__(url)
        self.asked, self.lost = [], set()
        self.before = self._ask

    def _ask(self, verb, key):
        if verb not in ("get", "get_range", "stat"):
            raise ReadOnlyStore(f"{verb} of {key}")
        self.asked.append(key)
        if key in self.lost:
            raise ObjectMissing(f"{key} is gone", key=key)


@pytest.fixture(scope="module")
def long_run():
    """A run of 70 versions with anchors that are far apart, and the weights of each."""
    return make_run(70, anchors=50)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 21])
def test_the_newest_version_is_found(count):
    url, _ = make_run(count)
    for after in range(-1, count):
        assert Run(ByName(url)).latest(after) == Run(url).latest(after)


def test_few_requests_find_it(tmp_path):
    store = ByName(make_many(tmp_path / "run", 1000))
    by_name = Run(store)
    assert by_name.latest() == 999
    assert len(store.asked) < 25
    store.asked.clear()
    assert by_name.latest(999) is None
    assert store.asked == [manifest_key(1000)], "one request where nothing is new"
    by_name._manifests.clear()
    store.asked.clear()
    assert by_name.latest(998) == 999
    assert store.asked == [manifest_key(999), manifest_key(1000)], "two where one version is"
    assert by_name.latest(990) == 999


def test_there_is_no_run_and_no_version(tmp_path):
    with Replica(ByName(tmp_path), {}) as replica, pytest.raises(ObjectMissing, match="no run"):
        replica.pull()
    url, _ = make_run(0)
    with Replica(ByName(url), {}) as replica, pytest.raises(ObjectMissing, match="no version"):
        replica.pull()


def test_replicas_follow(long_run):
    url, states = long_run
    weights = {}
    with Replica(ByName(url), weights) as replica:
        for version in (3, 4, 20, 9):
            replica.pull(version)
            assert same(replica.target.weights(), states[version])
        replica.pull()
        assert same(replica.target.weights(), states[69])
        assert not replica.last_pull.anchor


@pytest.mark.parametrize("have", [None, 0, 1, 3, 16, 49, 50, 51, 63, 68, 69])
def test_routes_are_as_good_as_with_a_listing(long_run, have):
    url, _ = long_run
    by_name, listed = Run(ByName(url)), Run(url)
    found = find_route(by_name, have, by_name.manifest(69))
    best = find_route(listed, have, listed.manifest(69))
    assert found.num_bytes <= 1.1 * best.num_bytes
    assert len(found.hops) <= len(best.hops) + 1


def test_a_damaged_hop_is_gone_around(long_run):
    url, states = long_run
    by_name = Run(ByName(url))
    for have, place in ((None, 0), (None, 1), (55, 0), (55, 1)):
        bad = set()
        while True:
            try:
                route = find_route(by_name, have, by_name.manifest(69), bad)
            except ChainError:
                break
            keys = [(hop.version, hop.base) for hop in route.hops]
            assert not bad & {*keys}
            bad.add(keys[place])
        assert len(bad) > 1
        with pytest.raises(ChainError):
            find_route(Run(url), have, Run(url).manifest(69), bad)
    store = ByName(url)
    *hops, _ = find_route(Run(url), None, Run(url).manifest(69)).hops
    store.lost = {each.key for hop in hops for each in hop.objects}
    with Replica(store, {}) as replica:
        replica.pull()
        assert same(replica.target.weights(), states[69])


def test_a_damaged_manifest_does_not_hide_the_next():
    url, states = make_run(6)
    store = open_store(url)
    store.put(manifest_key(3), b"damaged")
    with Replica(ByName(url), {}) as replica:
        replica.pull(2)
        replica.latest = 2
        replica.pull()
        assert replica.version == 5
        assert same(replica.target.weights(), states[5])


def test_the_newest_version_is_found_after_gc():
    url, states = make_run(30, anchors=4)
    assert Run(url).store.get(manifest_key(0))
    collect(Run(url), plan_gc(Run(url), keep_anchors=1).removals)
    with pytest.raises(ObjectMissing):
        open_store(url).get(manifest_key(0))
    with Replica(ByName(url), {}) as replica:
        replica.pull()
        assert same(replica.target.weights(), states[29])


def test_gc_says_where_to_look_before_it_removes():
    url, _ = make_run(30, anchors=4)
    removals = plan_gc(Run(url), keep_anchors=1).removals
    for verb in ("put", "delete"):
        store = Hooked(url)

        def fail(called, _key, verb=verb):
            if called == verb:
                raise StoreUnavailable("cut off")

        store.before = fail
        with pytest.raises(StoreUnavailable):
            collect(Run(store), removals)
        assert Run(ByName(url)).latest() == 29, "nothing was removed"
        assert open_store(url).get(manifest_key(0))
    assert json.loads(open_store(url).get(LATEST_KEY)) == {"version": 29}


def test_a_reader_that_clean_up_has_overtaken_catches_up(monkeypatch):
    url, states = make_run(30, anchors=4)
    with Replica(ByName(url), {}) as replica:
        replica.pull(2)
        replica.latest = 2
        collect(Run(url), plan_gc(Run(url), keep_anchors=1).removals)
        replica.run._manifests.clear()
        assert replica.run.latest(2) is None
        monkeypatch.setattr(run_module, "HINT_SECONDS", 0.0)
        replica.run._hint_due = 0.0
        replica.pull()
        assert same(replica.target.weights(), states[29])


@pytest.mark.parametrize("hint", [b'{"version": 3}', b'{"version": 0}', b'{"version": 99999999}', b'{"version": -5}',
                                  b'{"version": "5"}', b'{"version": true}', b'{"version": 1e400}', b"[]", b"", b"\xff",
                                  b'{"version": 123456789012}', b"[" * 1000, b" " * 2000])  # fmt: skip
def test_a_hint_is_never_believed(hint):
    url, _ = make_run(6)
    open_store(url).put(LATEST_KEY, hint)
    assert Run(ByName(url)).latest() == 5


def test_nothing_is_asked_for_that_cannot_be_there(long_run):
    store = ByName(long_run[0])
    by_name = Run(store)
    find_route(by_name, 66, by_name.manifest(69))
    assert {*store.asked} == {"run.json", *map(manifest_key, (67, 68, 69))}


@pytest.mark.process
def test_the_commands_over_http(web_server, steps, tmp_path):
    folder, url = web_server.folder / "root" / "commands", f"{web_server.url}/commands?sig=hidden"
    told("publish", steps / "step-0", "--to", folder, "--run", "demo")
    told("publish", steps / "step-1", "--to", folder, "--base", steps / "step-0")
    assert told("route", url)["want"] == 1
    assert told("pull", url, "--to", tmp_path / "mirror")["version"] == 1
    assert bits(tmp_path / "mirror") == bits(steps / "step-1")
    told("verify", url, "--mirror", tmp_path / "mirror")
    for arguments in (["ls", url], ["gc", url], ["publish", steps / "step-2", "--to", url]):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "over http(s), objects can only be read by name" in result.output
        assert "hidden" not in result.output
