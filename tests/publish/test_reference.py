"""Runs that start from a checkpoint that lies elsewhere: named, never uploaded; and replicas that have it at hand."""

import http.server
import json
import shutil
import threading
from functools import partial

import numpy as np
import pytest

from deltawire import Publisher, Replica, save_anchor
from deltawire.errors import BaseMismatch, CorruptObject, ObjectMissing, ShapeMismatch, UnknownParameter
from deltawire.maintain.audit import audit
from deltawire.maintain.compact import compact
from deltawire.maintain.gc import plan_gc
from deltawire.run.manifest import hop_bytes, read_hop
from deltawire.run.run import Run
from deltawire.store import open_store
from deltawire.tensors.weights import Tensor
from support import second_reader
from support.chains import Hooked, copy_of, fresh_url, make_weights, pulled, same, seal, step, unsealed
from support.command_line import told
from support.waiting import PATIENCE


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def base(tmp_path):
    """A checkpoint of two files, as anybody would have it: nothing in it is about a run."""
    save_anchor(make_weights(), tmp_path / "base", max_shard_bytes=20_000)
    for file in (tmp_path / "base").glob("*.safetensors"):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header["__metadata__"] = {"format": "pt"}
        plain = json.dumps(header).encode().ljust(size)
        file.write_bytes(data[:8] + plain + data[8 + size :])
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "base"


def publish(url, base, weights, rng, num_versions=3, **options):
    states = []
    with Publisher(url, weights, base=base, **options) as publisher:
        assert publisher.version == 0
        assert publisher.resumed
        for _ in range(num_versions):
            publisher.publish().wait(PATIENCE)
            publisher.flush()
            states.append(copy_of(weights))
            step(weights, rng)
    return states


def test_nothing_of_the_base_is_uploaded(base, tmp_path, rng):
    url, weights = str(tmp_path / "run"), make_weights()
    first = copy_of(weights)
    states = publish(url, base, weights, rng)
    run = Run(url)
    assert run.manifest(1).hop.num_changed == 0  # the weights were those of the base
    assert run.manifest(0).hop.at == f"file://{base}"
    assert not list(run.store.list("anchors/"))
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        assert replica.pull(0).anchor
        assert same(replica.target.weights(), first)
    assert (tmp_path / "mirror" / "config.json").read_text() == "{}"
    for version, state in enumerate(states, 1):
        assert same(pulled(url, version), state)
    found = audit(run, deep=True)
    assert (found.problems, found.num_proven, found.num_anchors, found.num_orphans) == ((), 4, 1, 0)
    assert not plan_gc(run).removals


def test_a_base_in_a_folder_with_an_odd_name_is_found(base, tmp_path, rng):
    base = base.rename(tmp_path / "step#3 of 100%")
    url, weights = str(tmp_path / "run"), make_weights()
    states = publish(url, base, weights, rng)
    assert same(pulled(url), states[-1])


def test_weights_that_differ_are_the_first_delta(base, tmp_path, rng):
    url, weights = str(tmp_path / "run"), make_weights()
    step(weights, rng)
    states = publish(url, base, weights, rng, 6, skips=(), anchors=None)
    assert Run(url).manifest(1).hop.num_changed > 0
    assert same(pulled(url, 1), states[0])
    assert [(hop.version, hop.base) for hop in compact(Run(url))] == [(4, 0)]


def test_another_store_is_a_base(base, rng):
    place, url, weights = fresh_url(), fresh_url(), make_weights()
    for file in base.iterdir():
        open_store(place).put(file.name, file.read_bytes())
    states = publish(url, place, weights, rng)
    assert same(pulled(url), states[-1])


def test_a_later_anchor_has_the_files_and_a_restart_goes_on(base, tmp_path, rng):
    url, weights = str(tmp_path / "run"), make_weights()
    publish(url, base, weights, rng, 3, anchors=2)
    assert (2, None) in {(hop.version, hop.base) for hop in Run(url).hops()}
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        shutil.move(base, tmp_path / "moved")
        replica.pull()
        weights = {name: replica.target.weights()[name] for name in weights}
        # Through version 2, which has an anchor of its own.
        with Publisher(url, weights, base=base) as publisher:
            assert publisher.resumed
            assert publisher.version == 3
    assert (tmp_path / "mirror" / "config.json").exists()


@pytest.mark.parametrize("adds", ["publisher", "compact"])
def test_an_anchor_that_is_added_later_has_the_files_of_the_base(base, tmp_path, rng, adds):
    url, weights = str(tmp_path / "run"), make_weights()
    publish(url, base, weights, rng, 3, skips=(), anchors=None)
    if adds == "compact":
        (hop,) = compact(Run(url), anchor=True)
    else:
        with Publisher(url, weights) as publisher:
            publisher.publish(anchor=True).wait(PATIENCE)
            hop = publisher.run.manifest(4).hop
    assert [each.file for each in hop.extra_files] == ["config.json"]
    assert not audit(Run(url)).problems
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        shutil.rmtree(base)
        replica.pull()
    assert (tmp_path / "mirror" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_base_without_its_files_holds_no_anchor_up(base, tmp_path, rng, caplog, is_gone):
    url, weights = str(tmp_path / "run"), make_weights()
    publish(url, base, weights, rng)
    (base / "config.json").unlink() if is_gone else (base / "config.json").write_text("[]")
    with Publisher(url, weights) as publisher:
        publisher.publish(anchor=True).wait(PATIENCE)
        assert not publisher.run.manifest(4).hop.extra_files
    assert "the anchor of version 4 has no configuration and tokenizer" in caplog.text
    assert same(pulled(url), copy_of(weights))


def test_a_base_that_is_gone_or_differs_is_an_error_by_name(base, tmp_path, rng):
    url, weights = str(tmp_path / "run"), make_weights()
    publish(url, base, weights, rng)
    shard = sorted(base.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptObject, match="SHA-256"):
        pulled(url)
    shard.unlink()
    with pytest.raises(ObjectMissing, match=shard.name):
        pulled(url)
    with pytest.raises(ObjectMissing, match="not a checkpoint to start from"):
        Publisher(fresh_url(), make_weights(), base=tmp_path / "nowhere")


def test_a_base_of_another_model_is_refused(base):
    weights = make_weights()
    url = fresh_url()
    with pytest.raises(UnknownParameter, match="has scale, which is not in the weights to publish"):
        Publisher(url, {name: weights[name] for name in weights if name != "scale"}, base=base)
    with pytest.raises(UnknownParameter, match="the model has more"):
        Publisher(url, weights | {"more": make_weights()["norm"]}, base=base)
    other = make_weights(shapes={"embed": (300, 64), "layer.weight": (64, 64), "norm": (32,), "scale": ()})
    with pytest.raises(ShapeMismatch, match=r"norm is BF16 \[64\]"):
        Publisher(url, other, base=base)
    assert not Run(url).exists()


def test_tied_weights_of_a_module(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(40, 8), "head": torch.nn.Linear(8, 40, bias=False)})
    model["head"].weight = model["embed"].weight
    model.to(torch.bfloat16)
    save_anchor({"embed.weight": model["embed"].weight.detach()}, tmp_path / "base")
    with Publisher(tmp_path / "run", model, base=tmp_path / "base") as publisher:
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] == 0
        with torch.no_grad():
            model["embed"].weight[3] += 1
        publisher.publish().wait(PATIENCE)
        assert publisher.run.manifest(0).tied == {"head.weight": "embed.weight"}
    copy = {}
    with Replica(tmp_path / "run", copy, heartbeat_seconds=None) as replica:
        replica.pull()
    assert torch.equal(copy["head.weight"].view(torch.int16), model["head"].weight.detach().view(torch.int16))


@pytest.mark.parametrize("named", [True, False])
def test_a_replica_with_the_base_at_hand_fetches_deltas_alone(base, tmp_path, rng, named):
    """Whether the run names it, or has uploaded the same weights."""
    url, weights = str(tmp_path / "run"), make_weights()
    states = publish(url, base, weights, rng, 4) if named else []
    if not named:
        with Publisher(url, weights) as publisher:
            for _ in range(5):
                publisher.publish().wait(PATIENCE)
                states.append(copy_of(weights))
                step(weights, rng)
    shutil.copytree(base, tmp_path / "own")
    if named:
        shutil.rmtree(base)
    store = Hooked(url)
    with Replica(store, tmp_path / "mirror", base=tmp_path / "own", heartbeat_seconds=None) as replica:
        assert replica.route().hops[0].base == 0
        done = replica.pull()
        assert (done.anchor, done.base) == (False, 0)
        assert done.num_bytes == sum(hop.num_bytes for hop in replica.run.manifest(4).route if hop.base is not None) + (
            replica.run.manifest(4).hop.num_bytes
        )
        assert same(replica.target.weights(), states[-1])
    assert not [key for verb, key in store.calls if verb == "get_range" and key.startswith("anchors/")]
    assert (tmp_path / "mirror" / "config.json").exists()
    with Replica(url, {}, base=tmp_path / "own", heartbeat_seconds=None) as replica:
        replica.pull(0)
        assert replica.pull().base == 0


@pytest.mark.parametrize("same_bits", [True, False])
def test_a_checkpoint_at_hand_may_hold_tied_weights_twice(tmp_path, rng, same_bits):
    """As a file of its own, too; with other bits it is not what the run started from."""
    url, weights = fresh_url(), make_weights()
    head, tensor = next(iter(weights.items()))
    again = Tensor(tensor.dtype, tensor.shape, tensor.bits ^ (not same_bits))
    save_anchor(weights | {"z.tied": again}, tmp_path / "own", max_shard_bytes=1000)
    with Publisher(url, weights, tied={"z.tied": head}, anchors=None) as publisher:
        publisher.publish().wait(PATIENCE)
        step(weights, rng)
        publisher.publish().wait(PATIENCE)
    store = Hooked(url)
    for target in (tmp_path / "mirror", {}):
        with Replica(store, target, base=tmp_path / "own", heartbeat_seconds=None) as replica:
            replica.pull()
            found = replica.target.weights()
            assert same({name: found[name] for name in weights}, copy_of(weights))
            assert np.array_equal(found.get("z.tied", found[head]).bits, weights[head].bits)
    fetched = [key for verb, key in store.calls if verb == "get_range" and key.startswith("anchors/")]
    assert bool(fetched) is not same_bits


def test_something_else_at_hand_is_refused(base, tmp_path, rng):
    url, weights = fresh_url(), make_weights(seed=5)
    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
    with (
        Replica(url, tmp_path / "mirror", base=base, heartbeat_seconds=None) as replica,
        pytest.raises(BaseMismatch, match="is not a version of run"),
    ):
        replica.pull()
    with pytest.raises(ObjectMissing):
        Replica(url, {}, base=tmp_path / "nowhere")


def test_the_second_reader_follows(base, tmp_path, rng):
    url, weights = tmp_path / "run", make_weights()
    states = publish(str(url), base, weights, rng)

    def get(key):
        return (url / key).read_bytes() if "://" not in key else (tmp_path / key.removeprefix("file://")).read_bytes()

    found, _ = second_reader.read_version(get, 3)
    assert all(np.array_equal(found[name], bits) for name, bits in states[-1].items())


def test_impossible_places_are_refused(base, tmp_path, rng):
    url, weights = str(tmp_path / "run"), make_weights()
    publish(url, base, weights, rng)
    run = Run(url)
    fields = unsealed(hop_bytes(run.id, run.manifest(0).hop, "me", 1.0))

    def change(**members):
        return seal(fields | {"hop": fields["hop"] | members})

    assert read_hop(change()) == (run.id, run.manifest(0).hop)
    delta = {"base": 0, "version": 1, "base_digest": fields["hop"]["digest"]}
    for members in ({"at": ""}, {"at": "x" * 2049}, {"at": "a\nb"}, {"at": 5}, {"at": None}, delta):
        with pytest.raises(CorruptObject):
            read_hop(change(**members))
    elsewhere = [each | {"key": "config.json"} for each in fields["hop"]["objects"][:1]]
    with pytest.raises(CorruptObject):
        read_hop(change(objects=elsewhere))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.process
def test_a_model_on_the_hub(base, tmp_path, rng, monkeypatch):
    """Its resolve URLs, from a plain server: small files at once, and no listing."""
    hub = tmp_path / "hub" / "owner" / "model" / "resolve"
    hub.mkdir(parents=True)
    shutil.copytree(base, hub / "main")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path / "hub"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        url, weights = str(tmp_path / "run"), make_weights()
        states = publish(url, "hf://owner/model@main", weights, rng)
        hop = Run(url).manifest(0).hop
        assert hop.at == "hf://owner/model@main"
        assert {each.file for each in hop.extra_files} == {"config.json"}
        assert same(pulled(url), states[-1])
    finally:
        server.shutdown()
        server.server_close()


def test_the_commands(base, tmp_path, rng):
    weights = make_weights()
    step(weights, rng)
    save_anchor(weights, tmp_path / "trained")
    assert told("publish", tmp_path / "trained", "--to", tmp_path / "run", "--base", base)["version"] == 1
    assert not (tmp_path / "run" / "anchors").exists()
    pulled = told("pull", tmp_path / "run", "--to", tmp_path / "mirror", "--base", base)
    assert (pulled["version"], pulled["base"], pulled["anchor"]) == (1, 0, False)
    with Replica(tmp_path / "run", tmp_path / "mirror", heartbeat_seconds=None) as replica:
        assert same(replica.target.weights(), copy_of(weights))
