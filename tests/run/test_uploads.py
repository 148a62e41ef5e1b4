"""What a run has uploaded: as its publisher counts it, and as it is found in the store."""

import re
from collections import Counter

import numpy as np
import pytest

from deltawire import Publisher, Replica, open_store, save_anchor
from deltawire.errors import StoreUnavailable
from deltawire.run.uploads import KINDS, find_uploads
from support.chains import Hooked, fresh_url, make_weights, step
from support.command_line import run
from support.command_line import told as told_by
from support.waiting import PATIENCE


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def told(publisher):
    return {key.removeprefix("deltawire/publish/"): value for key, value in publisher.metrics().items()}


def assert_found_is_told(url, publisher):
    """What is found in the store is what is there, by version and by kind, and what the publisher has counted."""
    sizes = {stat.key: stat.num_bytes for stat in open_store(url).list()}
    found, uploaded = find_uploads(open_store(url)), told(publisher)
    assert (found.objects.total(), found.bytes.total()) == (len(sizes), sum(sizes.values()))
    by_version = Counter()
    for key, size in sizes.items():
        if named := re.match(r"(?:manifests|deltas|anchors)/(\d{8})", key):
            by_version[int(named[1])] += size
    assert found.versions == by_version
    assert uploaded["uploaded_bytes"] == sum(sizes.values())
    for kind, name in zip(KINDS, ("delta", "skip_delta", "anchor", "document"), strict=True):
        assert uploaded[f"uploaded_{name}_bytes"] == found.bytes[kind], kind
    return found


def test_everything_that_was_uploaded(rng, tmp_path):
    url, weights, config = fresh_url(), make_weights(), tmp_path / "config.json"
    config.write_text("{}")
    options = {"skips": (2, 4), "most_deltas": 4, "anchors": 16, "files": [config]}
    with Publisher(url, weights, **options) as publisher:
        done = []
        for _ in range(20):
            step(weights, rng)
            done.append(publisher.publish())
            publisher.flush()
        found = assert_found_is_told(url, publisher)
    deltas = {(hop.version, hop.base) for hop in publisher.run.hops() if hop.base is not None}
    assert {(12, 0), (14, 12), (16, 12)} <= deltas
    # The file next to the first anchor is not uploaded again.
    assert found.objects == {"deltas": 19, "skip deltas": len(deltas) - 19, "anchors": 3,
                             "documents": 1 + 20 + len(deltas) - 19 + 1}  # fmt: skip
    # Each version tells what was uploaded since the one before, so that together they miss what came after the last.
    assert sum(each.stats["all_bytes"] for each in done) == told(publisher)["uploaded_bytes"]
    assert done[1].stats["all_bytes"] == found.versions[1]
    assert done[9].stats["all_bytes"] == found.versions[9] + found.versions[8] - first_bytes(publisher, 8)


def first_bytes(publisher, version):
    """The bytes of a version when it was committed: its own delta and its manifest."""
    manifest = publisher.run.manifest(version)
    return manifest.hop.num_bytes + publisher.run.store.stat(f"manifests/{version:08}.json").num_bytes


def test_what_was_uploaded_for_a_version_that_failed_counts_too(rng):
    weights, store = make_weights(), Hooked(fresh_url())

    def fail(verb, key):
        if (verb, key) == ("create", "manifests/00000001.json"):
            raise StoreUnavailable("the store is away", url=store.url)

    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        step(weights, rng)
        store.before = fail
        failed = publisher.publish()
        assert not failed.join()
        assert failed.error is not None
        store.before = lambda verb, key: None
        assert publisher.publish().wait(PATIENCE).version == 1
        found = assert_found_is_told(store.url, publisher)
    assert found.objects["deltas"] == 2


def test_of_a_reference_only_the_manifest_is_uploaded(rng, tmp_path):
    url, weights = str(tmp_path / "run"), make_weights()
    save_anchor(weights, tmp_path / "base")
    with Publisher(url, weights, base=tmp_path / "base") as publisher:
        step(weights, rng)
        publisher.publish().wait(PATIENCE)
        found = assert_found_is_told(url, publisher)
    assert (found.objects["anchors"], found.bytes["anchors"]) == (0, 0)
    data = told_by("ls", url)
    assert data["versions"][0]["all_bytes"] == (tmp_path / "run/manifests/00000000.json").stat().st_size
    assert data["versions"][0]["bytes"] > data["store"]["bytes"]
    assert data["versions"][0]["at"] == f"file://{tmp_path / 'base'}"
    assert f"at file://{tmp_path / 'base'}" in run("ls", url).stdout


def test_other_objects_do_not_count(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher, Replica(url, {}, name="one") as replica:
        publisher.publish().wait()
        before = find_uploads(open_store(url))
        open_store(url).put("notes/about.txt", b"mine")
        open_store(url).put("deltas/00000000.txt", b"mine")
        assert find_uploads(open_store(url)).as_dict() == before.as_dict()
        replica.pull()
        after = find_uploads(open_store(url))
    assert after.objects - before.objects == {"documents": 1}, "a heartbeat"
