"""Publishing: what is committed is what the weights were, whatever fails on the way, and nothing is lost."""

import threading

import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica, digest
from deltawire.errors import Conflict, Fenced, ShapeMismatch, SignatureMismatch, StoreUnavailable
from deltawire.publish import leader
from deltawire.run.planner import Route
from deltawire.run.signing import generate_key
from deltawire.tensors.weights import Tensor
from support.chains import Hooked, copy_of, fresh_url, make_weights, same, step
from support.waiting import PATIENCE


def pulled(url, version=None, **options):
    with Replica(url, {}, heartbeat_seconds=None, **options) as replica:
        replica.pull(version)
        return dict(replica.target.weights())


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_versions_are_what_the_weights_were(rng):
    url, weights, states = fresh_url(), make_weights(), []
    with Publisher(url, weights, run="demo") as publisher:
        for number in range(10):
            publication = publisher.publish(step=10 * number, metadata={"loss": number / 2})
            states.append(copy_of(weights))
            step(weights, rng)  # the weights may move as soon as publish has returned
            assert publication.version == number
        assert publication.wait(PATIENCE).done()
        assert publisher.version == 9
        stats = publication.stats
        assert stats["num_elements"] == sum(len(tensor.bits) for tensor in weights.values())
        assert 0 < stats["num_changed"] < stats["num_elements"]
        assert {"diff_seconds", "encode_seconds", "upload_seconds", "commit_seconds", "num_bytes"} <= stats.keys()
        manifest = publisher.run.manifest(9)
        assert (manifest.step, manifest.metadata, manifest.run) == (90, {"loss": 4.5}, "demo")
        assert manifest.digest == digest({name: Tensor(weights[name].dtype, weights[name].shape, bits)
                                          for name, bits in states[9].items()})  # fmt: skip
    for version, state in enumerate(states):
        assert same(pulled(url, version), state)


def test_a_version_without_changes():
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher:
        publisher.publish()
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] == 0
    assert same(pulled(url), copy_of(weights))


def test_nothing_is_visible_before_the_manifest(rng):
    url, weights = fresh_url(), make_weights()
    store, committing, go_on = Hooked(url), threading.Event(), threading.Event()

    def hold(verb, key):
        if verb == "create" and key == "manifests/00000001.json":
            committing.set()
            assert go_on.wait(PATIENCE)

    store.before = hold
    with Publisher(store, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        before = copy_of(weights)
        step(weights, rng)
        publication = publisher.publish()
        assert committing.wait(PATIENCE)
        assert any(stat.key.startswith("deltas/00000001") for stat in store.list("deltas/"))
        assert same(pulled(url), before)
        assert not publication.done()
        go_on.set()
        publication.wait(PATIENCE)
    assert same(pulled(url), copy_of(weights))


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


def test_a_full_queue_waits_or_coalesces(rng):
    for policy in ("wait", "coalesce"):
        store, weights, states = Hooked(fresh_url()), make_weights(), {}
        held = threading.Event()

        def hold(verb, key, held=held):
            if verb == "put" and key.startswith("deltas/00000001"):
                assert held.wait(PATIENCE)

        store.before = hold
        with Publisher(store, weights, when_full=policy, queue_size=1) as publisher:
            publisher.publish().wait(PATIENCE)
            publications = []
            for number in range(6):
                if policy == "wait" and number == 2:
                    held.set()  # without this, the next publish would wait for ever
                step(weights, rng)
                publications.append(publisher.publish(step=number))
                states[number] = copy_of(weights)
            held.set()
            for publication in publications:
                publication.wait(PATIENCE)
            versions = [publication.version for publication in publications]
            if policy == "wait":
                assert versions == [1, 2, 3, 4, 5, 6]
            else:
                assert versions == [1, 2, 2, 2, 2, 2]
                assert publications[-1].stats["coalesced"] == 4
                assert publisher.run.manifest(2).step == 5
                assert same(pulled(store.url, 1), states[0])
        assert same(pulled(store.url), copy_of(weights))


def test_a_restarted_trainer_goes_on(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights, run="demo") as publisher:
        for _ in range(5):
            step(weights, rng)
            publisher.publish()
    with Publisher(url, weights) as publisher:
        assert publisher.resumed
        assert (publisher.version, publisher.run.id) == (4, "demo")
        step(weights, rng)
        assert publisher.publish().wait(PATIENCE).version == 5
        assert publisher.run.manifest(5).hop.base == 4
        assert publisher.run.manifest(5).route[0].base is None
    assert same(pulled(url), copy_of(weights))


def test_a_trainer_with_other_weights_starts_with_an_anchor(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher:
        publisher.publish()
    step(weights, rng)
    with Publisher(url, weights) as publisher:
        assert not publisher.resumed
        assert publisher.publish().wait(PATIENCE).version == 1
        assert publisher.run.manifest(1).hop.base is None
        step(weights, rng)
        assert publisher.publish().wait(PATIENCE).version == 2
        assert publisher.run.manifest(2).hop.base == 1
    assert same(pulled(url), copy_of(weights))


def test_base_weights_make_a_delta_of_it(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher:
        publisher.publish()
    base = make_weights()
    step(weights, rng)
    with Publisher(url, weights, base=base) as publisher:
        assert publisher.resumed
        publisher.publish().wait(PATIENCE)
        assert publisher.run.manifest(1).hop.base == 0
    assert same(pulled(url), copy_of(weights))


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


def test_changed_shapes_need_an_anchor(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        old = weights["norm"]
        weights["norm"] = Tensor(old.dtype, (32,), old.bits[:32].copy())
        with pytest.raises(ShapeMismatch, match="anchor=True"):
            publisher.publish()
        assert publisher.publish(anchor=True).wait(PATIENCE).version == 1
        step(weights, rng)
        assert publisher.publish().wait(PATIENCE).version == 2
    assert same(pulled(url), copy_of(weights))


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


def test_versions_go_on_while_an_anchor_is_uploaded(rng):
    store, weights = Hooked(fresh_url()), make_weights()
    uploading, go_on = threading.Event(), threading.Event()

    def hold(verb, key):
        if verb == "put" and key.startswith("anchors/00000002"):
            uploading.set()
            assert go_on.wait(PATIENCE)

    store.before, states = hold, []
    with Publisher(store, weights, anchors=2, skips=(3,)) as publisher:
        for number in range(8):
            step(weights, rng)
            states.append(copy_of(weights))
            publisher.publish().wait(PATIENCE)
            if number == 2:
                assert uploading.wait(PATIENCE)
        assert (2, None) not in {(hop.version, hop.base) for hop in publisher.run.hops()}
        go_on.set()
        publisher.flush(PATIENCE)
        assert {(2, None), (3, 0), (6, 3)} <= {(hop.version, hop.base) for hop in publisher.run.hops()}
    for version, state in enumerate(states):
        assert same(pulled(store.url, version), state)


def test_extra_hops_lead_to_the_same_weights(rng):
    """Every skip delta and every anchor of a chain, alone."""
    url, weights, states = fresh_url(), make_weights(), []
    with Publisher(url, weights, anchors=7) as publisher:
        for _ in range(20):
            publisher.publish()
            states.append(copy_of(weights))
            publisher.flush()
            step(weights, rng)
        hops = publisher.run.hops()
        assert {(hop.version, hop.base) for hop in hops} >= {(4, 0), (16, 12), (16, 0), (7, None), (14, None)}
        for hop in [hop for hop in hops if hop.base is None or hop.version - hop.base > 1]:
            hop = publisher.run.hop(hop.version, hop.base)
            with Replica(url, {}, heartbeat_seconds=None) as replica:
                if hop.base is not None:
                    replica.pull(hop.base)
                manifest = replica.run.manifest(hop.version)
                have = replica.target.state()
                replica._follow(manifest, have, Route(hop.base, hop.version, (hop,)), None)
                assert same(replica.target.weights(), states[hop.version])


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


def test_a_torch_module_with_tied_weights():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(50, 16)
            self.head = torch.nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight

    torch.manual_seed(0)
    model, other, url = Model().bfloat16(), Model().bfloat16(), fresh_url()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Publisher(url, model) as publisher, Replica(url, other) as replica:
        for _ in range(4):
            publisher.publish().wait(PATIENCE)
            replica.pull()
            for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
                assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
            model.head(model.embed(torch.arange(50))).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert publisher.run.manifest(0).tied == {"head.weight": "embed.weight"}


def test_signed_runs(tmp_path, rng):
    url, weights = fresh_url(), make_weights()
    public, other = generate_key(tmp_path / "a.pem"), generate_key(tmp_path / "b.pem")
    with Publisher(url, weights, sign_with=tmp_path / "a.pem") as publisher:
        for _ in range(5):
            publisher.publish()
            step(weights, rng)
    assert pulled(url, public_key=public).keys() == weights.keys()
    with pytest.raises(SignatureMismatch):
        pulled(url, public_key=other)
    with pytest.raises(SignatureMismatch):
        Publisher(url, weights, sign_with=tmp_path / "b.pem")


def test_wrong_arguments():
    url, weights = fresh_url(), make_weights()
    for options in ({"when_full": "drop"}, {"anchors": 0}, {"queue_size": -1}, {"encoding": "zip"}):
        with pytest.raises(ValueError, match=r"when_full|anchors|encoding"):
            Publisher(url, weights, **options)
    with pytest.raises(TypeError):
        Publisher(url, 3)
    with Publisher(url, weights, run="one") as publisher:
        for metadata, error in (({"x": object()}, TypeError), ({"x": float("nan")}, ValueError)):
            with pytest.raises(error):
                publisher.publish(metadata=metadata)
    with pytest.raises(ValueError, match="closed"):
        publisher.publish()
    with pytest.raises(Conflict, match="holds run one"):
        Publisher(url, weights, run="two")


def broken_store(url):
    """A store that refuses everything but what is there already."""
    store = Hooked(url)

    def fail(verb, key):
        if verb in ("put", "create"):
            raise StoreUnavailable("the bucket is gone", refused=True)

    return store, fail


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


def test_publish_says_how_to_call_it():
    weights = make_weights()
    with Publisher(fresh_url(), weights) as publisher:
        with pytest.raises(TypeError, match=r"given to Publisher\(...\); call publish\(step=...\)"):
            publisher.publish(weights)
        with pytest.raises(TypeError, match=r"no option 'steps': call publish\(step=..., metadata=..., anchor=...\)"):
            publisher.publish(steps=1)
        assert publisher.num_waiting == 0


def test_repr_is_one_line():
    url = fresh_url()
    with Publisher(url, make_weights()) as publisher:
        assert repr(publisher) == f"Publisher({url!r}, version=None)"
        publication = publisher.publish(step=7).wait(PATIENCE)
        assert repr(publisher) == f"Publisher({url!r}, version=0)"
        assert repr(publication) == "Publication(version=0, step=7, committed)"
