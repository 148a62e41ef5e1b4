"""Publishing: what is committed is what the weights were, whatever fails on the way, and nothing is lost."""

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica, digest
from deltawire.errors import Conflict, ShapeMismatch, SignatureMismatch
from deltawire.run.planner import Route
from deltawire.run.signing import generate_key
from deltawire.store import transfer
from deltawire.tensors.weights import Tensor
from support.chains import Hooked, copy_of, fresh_url, make_weights, pulled, same, step
from support.waiting import PATIENCE


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


@pytest.mark.parametrize(
    ("part_bytes", "max_file_bytes", "num_parts"), [(100, 1 << 40, 4), (1 << 40, 1 << 40, 1), (100, 150, 12)]
)
def test_large_deltas_have_parts_that_are_sent_in_parallel(part_bytes, max_file_bytes, num_parts, monkeypatch):
    monkeypatch.setattr(transfer, "PART_BYTES", part_bytes)
    url, weights = fresh_url(), {f"w{number:02}": np.zeros(400, np.float32) for number in range(12)}
    with Publisher(url, weights, max_file_bytes=max_file_bytes) as publisher:
        publisher.publish().wait(PATIENCE)
        for value in weights.values():
            value[::8] += 1
        publisher.publish().wait(PATIENCE)
        assert len(publisher.run.manifest(1).hop.objects) == num_parts
    found = pulled(url)
    assert all(np.array_equal(found[name].bits, value.view(np.uint32)) for name, value in weights.items())


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


def test_deltas_from_the_anchor_keep_routes_short(rng):
    url, weights, states = fresh_url(), make_weights(), []
    for first, last in ((0, 30), (30, 60)):
        with Publisher(url, weights, anchors=None, skips=(2, 4), most_deltas=4) as publisher:
            for _ in range(first, last):
                step(weights, rng, 0.005)  # so that routes get long before they get large
                publisher.publish()
                states.append(copy_of(weights))
                publisher.flush()
            assert publisher._leader.hops.error is None
    long = [hop for hop in publisher.run.hops() if hop.base is not None and hop.version - hop.base > 4]
    # Before the restart from the anchor, after it from the version that was there.
    assert [(hop.base, hop.version) for hop in long if hop.version < 30] == [(0, 12), (0, 20), (0, 28)]
    assert {hop.base for hop in long if hop.version >= 30} == {29}
    with Replica(url, {}, heartbeat_seconds=None) as late:
        for version, state in enumerate(states):
            assert len(late.route(version).hops) <= 10
            assert same(pulled(url, version), state)


def test_a_new_anchor_is_the_base_of_the_deltas_after_it(rng):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights, anchors=10, skips=(2,), most_deltas=3) as publisher:
        for version in range(40):
            step(weights, rng)
            publisher.publish(anchor=version == 25)
            publisher.flush()
            assert same(pulled(url), copy_of(weights))
        assert publisher._leader.hops.error is None
    deltas = [hop for hop in publisher.run.hops() if hop.base is not None]
    assert {hop.base for hop in deltas if hop.version - hop.base > 2} == {0, 10, 25}


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
    with pytest.raises(SignatureMismatch, match="sign_with="):
        Publisher(url, weights)
    assert pulled(url, public_key=public).keys() == weights.keys()


def test_wrong_arguments():
    url, weights = fresh_url(), make_weights()
    late = {"threads": 0}, {"max_file_bytes": 0}, {"max_file_bytes": "5GB"}, {"scratch": "no such folder"}
    for options in ({"when_full": "drop"}, {"anchors": 0}, {"queue_size": -1}, {"encoding": "zip"}, *late):
        with pytest.raises(ValueError, match=r"when_full|anchors|encoding|threads|max_file_bytes|scratch"):
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


def test_relative_paths_are_those_of_the_constructor(tmp_path, monkeypatch, rng):
    url, weights = fresh_url(), make_weights()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with Publisher(url, weights, files=["config.json"], scratch="scratch") as publisher:
        monkeypatch.chdir(tmp_path / "elsewhere")
        publisher.publish()
        for _ in range(6):
            step(weights, rng)
            publisher.publish()
        publisher.flush(PATIENCE)
    assert (publisher._worker.error, publisher._leader.hops.error) == (None, None)
    assert [each.file for each in publisher.run.manifest(0).hop.extra_files] == ["config.json"]


def test_publish_says_how_to_call_it():
    weights = make_weights()
    with Publisher(fresh_url(), weights) as publisher:
        with pytest.raises(TypeError, match=r"since Publisher\(...\) already has them: call publish\(step=...\)"):
            publisher.publish(weights)
        with pytest.raises(TypeError, match=r"no option 'steps': call publish\(step=..., metadata=..., anchor=...\)"):
            publisher.publish(steps=1)
        assert publisher.num_waiting == 0


def test_repr_is_one_line():
    url = fresh_url()
    with Publisher(url, make_weights()) as publisher:
        assert repr(publisher) == f"Publisher({url!r}, version=None)"
        publication = publisher.publish(step=7).wait(PATIENCE)
        assert repr(publisher) == f"Publisher({url!r}, version=0, snapshot='host')"
        assert repr(publication) == "Publication(version=0, step=7, committed)"


@pytest.mark.parametrize("call", ["publish", "flush", "close"])
def test_after_commit_does_not_wait_for_itself(rng, call, caplog):
    url, weights = fresh_url(), make_weights()
    with Publisher(url, weights, skips=(2,)) as publisher:
        publisher.after_commit = lambda version: getattr(publisher, call)()
        for _ in range(4):
            publisher.publish()
            step(weights, rng)
        publisher.flush(PATIENCE)
        assert publisher.version == 3
    assert caplog.text.count("ValueError: after_commit must not call the publisher, which would wait for it") == 4


@pytest.mark.parametrize("call", ["wait", "join"])
def test_after_commit_does_not_wait_for_a_later_version(call, caplog):
    both = threading.Event()
    with Publisher(fresh_url(), make_weights()) as publisher:
        publisher.after_commit = lambda version: both.wait(PATIENCE) and getattr(publications[1], call)()
        publications = [publisher.publish(), publisher.publish()]
        both.set()
        publisher.flush(PATIENCE)
    assert caplog.text.count("ValueError: after_commit must not call the publisher, which would wait for it") == 1


@pytest.mark.process
def test_a_forked_process_is_refused():
    program = """
        import os, signal, threading
        import numpy as np
        from deltawire import Publisher
        weights = {"w": np.zeros(4, np.float16)}
        with Publisher("memory:", weights) as publisher:
            first, go_on = publisher.publish().wait(), threading.Event()
            publisher.after_commit = lambda version: go_on.wait()
            second = [publisher.publish(), publisher.publish()][1]
            if os.fork():
                status = os.wait()[1]
                go_on.set()
                assert status == 0
                print(second.wait().version)
            else:
                signal.alarm(20)
                threading.Thread(target=publisher._changed.acquire).start()  # as the other thread may have
                assert first.wait() is first
                for call in (publisher.publish, publisher.flush, second.wait, second.join):
                    try:
                        call()
                    except ValueError as error:
                        print(error, flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    said = "this publisher belongs to the process that this one was forked from: publish there, or start it with spawn"
    assert done.stdout.splitlines() == [said, said, said, said, "2"]


@pytest.mark.process
@pytest.mark.parametrize("closes", [False, True])
def test_a_program_that_ends_before_a_version_is_committed_says_so(closes):
    """Without `with` or `close`: the thread that commits ends with the program."""
    program = f"""
        import threading, time
        import numpy as np
        from deltawire import Publisher, open_store
        weights, store = {{"w": np.zeros(4, np.float16)}}, open_store("memory:")
        publisher = Publisher(store, weights)
        publisher.publish().wait()
        put = store.put
        store.put = lambda *given: time.sleep({0.2 if closes else 600}) or put(*given)
        for _ in range(2):
            weights["w"][0] += 1
            publisher.publish()
        if {closes}:
            publisher.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    said = "the program ends before all versions of memory: are committed (2 left): call close(), or use `with`"
    assert done.stderr.splitlines() == ([] if closes else [said])


@pytest.mark.process
def test_a_program_that_ends_can_publish_what_is_merged():
    """When no thread can be started any more."""
    program = """
        import atexit, threading
        import numpy as np
        from deltawire import Publisher, open_store
        weights, store, go_on = {"w": np.zeros(4, np.float16)}, open_store("memory:"), threading.Event()
        publisher = Publisher(store, weights, when_full="coalesce")
        publisher.publish().wait()
        put = store.put
        store.put = lambda *given: go_on.wait() and put(*given)
        for _ in range(2):
            publisher.publish()

        @atexit.register
        def end():
            try:
                print(publisher.publish(step=3).step)
            finally:
                go_on.set()
                publisher.close()
            print(publisher.version, publisher.run.manifest(2).step)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "2", "3"]
