"""However weights are handed over and wherever they go: every bit arrives, or there is an error by name."""

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deltawire import DeltawireError, Publisher, Replica
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.format.checkpoint import Checkpoint
from support.chains import fresh_url
from support.handover import OnAccess, OneKept, Sink, Source, cast_of, content
from support.waiting import PATIENCE

REFUSALS = (DeltawireError, ValueError, TypeError)


def arrive(weights, copy, **options):
    """Publish a version, then pull it into `copy`."""
    url = fresh_url()
    with Publisher(url, weights, **options) as publisher:
        publisher.publish()
    with Replica(url, copy, heartbeat_seconds=None) as replica:
        replica.pull()
    return copy


def all_equal(copy, weights):
    return copy.keys() == weights.keys() and all(content(copy[name]) == content(weights[name]) for name in weights)


@given(st.data())
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes; the draws say enough
def test_exact_or_an_error(data):
    source = Source(data.draw)
    with tempfile.TemporaryDirectory() as folder:
        sink = Sink(data.draw, source, Path(folder) / "mirror")
        url, published = fresh_url(), {}
        try:
            publisher = Publisher(url, source.given(), check_share=data.draw(st.sampled_from([0.0, 0.01, 1.0])))
        except REFUSALS:
            return
        try:
            with Replica(url, sink.given(), heartbeat_seconds=None) as replica:
                for _ in range(data.draw(st.integers(1, 5))):
                    expected = source.expected()
                    try:
                        version = publisher.publish(anchor=data.draw(st.booleans())).wait(PATIENCE).version
                        published[version] = expected
                    except REFUSALS:
                        pass
                    if data.draw(st.booleans()):
                        pull(replica, sink, published)
                    source.change()
                pull(replica, sink, published)
        finally:
            publisher.close()


def pull(replica, sink, published):
    before = replica.version, sink.arrived(replica)
    try:
        replica.pull()
    except REFUSALS:
        # Copies are other tensors each time, whose version is not known, also if they once had the bits of one.
        versions = [before[0], None] if sink.kind == "copies" else [before[0]]
        assert replica.version in versions
        assert sink.arrived(replica) == before[1]
        return
    expected, arrived = published[replica.version], sink.arrived(replica)
    tied = replica.run.manifest(replica.version).tied
    # A folder is a checkpoint, which has tied weights once; what the user has made need not have all names of them.
    left_out = {} if sink.kind == "empty" else tied.keys() - arrived.keys()
    wanted = {name: each for name, each in expected.items() if name not in left_out}
    assert arrived == wanted


# Each of these was once silently wrong.


def test_tensors_made_on_access_are_not_tied_by_an_address_that_was_freed():
    tensors = {f"w{i}": torch.randn(64, 64) for i in range(8)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for mapping in (OnAccess(tensors, cast_of), OnAccess(arrays, cast_of), OneKept(tensors, cast_of)):
        copy = arrive(mapping, {})
        assert all_equal(copy, {name: cast_of(value) for name, value in mapping.tensors.items()})


def test_a_name_that_is_tied_later_is_not_left_out():
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with Publisher(url := fresh_url(), model) as publisher:
        publisher.publish().wait(PATIENCE)
        model.register_parameter("alias", model.weight)
        with pytest.raises(UnknownParameter, match="alias is not among the published weights"):
            publisher.publish()
        publisher.publish(anchor=True).wait(PATIENCE)
    with Replica(url, copy := {}, heartbeat_seconds=None) as replica:
        replica.pull()
    assert copy.keys() == {"weight", "alias"}


def test_a_transposed_view_is_not_tied():
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    for w in (weight, torch.from_numpy(weight)):
        assert all_equal(arrive({"a": w, "b": w.T}, {}), {"a": w, "b": w.T})


def test_slices_that_start_alike_are_not_tied():
    s = np.arange(8, dtype=np.float32)
    assert all_equal(arrive({"a": s[:4], "b": s[::2]}, {}), {"a": s[:4], "b": s[::2]})


def test_a_parameter_on_the_transposed_data_of_another_is_not_tied():
    model = torch.nn.Module()
    model.enc = torch.nn.Linear(4, 4, bias=False)
    model.dec = torch.nn.Linear(4, 4, bias=False)
    model.dec.weight = torch.nn.Parameter(model.enc.weight.data.t())
    copy = arrive(model, {})
    assert torch.equal(copy["dec.weight"], model.enc.weight.detach().t().bfloat16())


def test_what_is_tied_for_real_is_sent_once_and_arrives_under_both_names():
    w = np.arange(4, dtype=np.float32)
    url = fresh_url()
    with Publisher(url, {"a": w, "b": w[:]}) as publisher:
        publisher.publish()
        w[2] = 7
        publisher.publish().wait(PATIENCE)
        assert publisher.run.manifest(0).tied == {"b": "a"}
    copy = {}
    with Replica(url, copy) as replica:
        replica.pull(0)
        replica.pull()
    assert all_equal(copy, {"a": w, "b": w})


def test_weights_that_were_tied_and_are_not_any_more():
    w = np.zeros(4, np.float32)
    weights, url = {"a": w, "b": w}, fresh_url()
    with Publisher(url, weights) as publisher:
        publisher.publish()
        weights["b"] = w + 1
        with pytest.raises(ValueError, match="b is tied to a, but has other weights"):
            publisher.publish()
        publisher.publish(anchor=True)
    with Replica(url, copy := {}) as replica:
        replica.pull()
    assert all_equal(copy, weights)


def module_of(**tensors):
    module = torch.nn.Module()
    for name, value in tensors.items():
        module.register_parameter(name, value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value))
    return module


def test_a_parameter_that_is_tied_to_another_one_than_before():
    a, c = (torch.nn.Parameter(torch.full((4,), value)) for value in (1.0, 2.0))
    model, url = module_of(a=a, c=c, b=a), fresh_url()
    with Publisher(url, model, check_share=0) as publisher, Replica(url, copy := {}) as replica:
        publisher.publish().wait(PATIENCE)
        replica.pull()
        model.b = c
        with pytest.raises(ValueError, match="b is tied to a, but has other weights"):
            publisher.publish()
        publisher.publish(anchor=True).wait(PATIENCE)
        replica.pull()
    assert all_equal(copy, {name: value.bfloat16() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("tied", [{}, {"b": "a"}, {"a": "b"}, {"c": "a"}])
def test_ties_of_a_module_that_are_stated_come_before_those_that_are_found(tied):
    a = torch.nn.Parameter(torch.arange(4.0))
    model, url = module_of(a=a, b=a, c=torch.arange(4.0)), fresh_url()
    with Publisher(url, model, tied=tied, frozen=["b"] if "b" in tied else []) as publisher:
        publisher.publish().wait(PATIENCE)
        with torch.no_grad():
            model.a[1], model.c[1] = 9, 9
        publisher.publish().wait(PATIENCE)
        assert publisher.run.manifest(1).tied == tied
        with torch.no_grad():
            model.c[1] = 8
        if "c" in tied:
            with pytest.raises(ValueError, match="c is tied to a, but has other weights"):
                publisher.publish()
            return
        publisher.publish()
    with Replica(url, copy := {}) as replica:
        replica.pull()
    assert all_equal(copy, {name: value.bfloat16() for name, value in model.state_dict().items()})


def test_a_dictionary_that_was_empty_follows_ties_that_come_and_go():
    w = np.arange(4, dtype=np.float32)
    weights, copy, url = {"a": w, "b": w}, {}, fresh_url()
    with Publisher(url, weights) as publisher, Replica(url, copy) as replica:
        for weights["b"] in (w, w + 1, w):
            publisher.publish(anchor=True).wait(PATIENCE)
            replica.pull()
            assert all_equal(copy, weights)


def test_a_tied_name_that_is_gone():
    w = np.zeros(4, np.float32)
    weights = {"a": w, "b": w}
    with Publisher(fresh_url(), weights) as publisher:
        publisher.publish()
        del weights["b"]
        with pytest.raises(UnknownParameter, match="b is no longer among the published weights"):
            publisher.publish()


def test_ties_that_are_stated_and_not_true_are_refused():
    weights = {"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}
    with Publisher(fresh_url(), weights, tied={"b": "a"}) as publisher, pytest.raises(ValueError, match="tied to a"):
        publisher.publish()
    weights["b"][:] = 0  # equal bits in other memory are a tie that holds
    copy = arrive(weights, {}, tied={"b": "a"})
    assert all_equal(copy, weights)


def test_a_target_that_ties_what_the_run_does_not():
    w = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="a and b share memory at the target"):
        arrive({"a": w + 1, "b": w + 2}, {"a": w, "b": w})
    assert not w.any()


def test_a_target_whose_tensors_overlap():
    room = torch.zeros(6)
    with pytest.raises(ValueError, match="share memory"):
        arrive({"a": torch.ones(4), "b": torch.ones(4)}, {"a": room[:4], "b": room[2:]})
    assert not room.any()


def test_a_target_that_returns_copies():
    room = {"a": torch.zeros(4)}
    with pytest.raises(ValueError, match="a new copy on each access"):
        arrive({"a": torch.ones(4)}, OnAccess(room, torch.clone))


def test_a_target_with_more_than_the_run():
    with pytest.raises(UnknownParameter, match="the target has head"):
        arrive({"a": np.ones(4)}, {"a": np.zeros(4), "head": np.zeros(4)})


def test_a_tied_copy_at_the_target_that_differs_is_written_again():
    w = np.arange(4, dtype=np.float32)
    url = fresh_url()
    with Publisher(url, {"a": w, "b": w}) as publisher:
        publisher.publish()
    copy = {"a": w.copy(), "b": w + 9}  # its digest, without b, is the run's
    with Replica(url, copy) as replica:
        replica.pull()
    assert all_equal(copy, {"a": w, "b": w})


@pytest.mark.parametrize("replace", ["dict", "module"])
def test_tensors_that_took_the_place_of_those_that_were_written(replace):
    model, url = torch.nn.Linear(4, 4), fresh_url()
    target = torch.nn.Linear(4, 4).bfloat16()
    target = target if replace == "module" else dict(target.state_dict())
    with Publisher(url, model) as publisher, Replica(url, target) as replica:
        publisher.publish().wait(PATIENCE)
        replica.pull()
        if replace == "module":
            target.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        else:
            target["weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
        replica.pull()
        now = target.state_dict() if replace == "module" else target
        assert torch.equal(now["weight"], model.weight.detach().bfloat16())


def test_arrays_in_the_other_byte_order():
    big = np.arange(5, dtype=">f4")
    assert all_equal(arrive({"a": big}, {}), {"a": big})
    with pytest.raises(ValueError, match="byte order"):
        arrive({"a": big}, {"a": np.zeros(5, ">f4")})


def test_an_empty_dictionary_can_be_loaded_into_a_module():
    model = torch.nn.Linear(3, 2)
    other = torch.nn.Linear(3, 2).bfloat16()
    other.load_state_dict(arrive(model, {}))
    assert torch.equal(other.weight, model.weight.bfloat16())


def test_integers_that_stand_for_bf16_come_back():
    bits = np.arange(6, dtype=np.uint16)
    url = fresh_url()
    with Publisher(url, {"w": bits}, dtype="BF16") as publisher, Replica(
        url, copy := {"w": np.zeros(6, np.uint16)}, dtype="BF16"
    ) as replica:  # fmt: skip
        publisher.publish().wait(PATIENCE)
        replica.pull()
        bits[3] += 1
        publisher.publish().wait(PATIENCE)
        assert not replica.pull().anchor
    assert np.array_equal(copy["w"], bits)
    with pytest.raises(ShapeMismatch, match='pass dtype="BF16"'), Replica(url, {"w": bits}) as replica:
        replica.pull()


def test_a_closed_replica_pulls_no_more():
    url = fresh_url()
    with Publisher(url, {"a": np.ones(3)}) as publisher:
        publisher.publish()
    replica = Replica(url, {})
    replica.close()
    for call in (replica.pull, replica.watch, lambda: replica.wait(0)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_pairs_of_names_and_tensors():
    made = {"a": np.arange(4, dtype=np.float32), "b": torch.arange(3)}
    assert all_equal(arrive(lambda: iter(made.items()), {}), made)
    assert all_equal(arrive(lambda: [list(pair) for pair in made.items()], {}), made)
    with (
        Publisher(fresh_url(), lambda: [("a", np.ones(2)), ("a", np.zeros(2))]) as publisher,
        pytest.raises(ValueError, match="a came twice"),
    ):
        publisher.publish()


def test_a_function_that_returns_no_mapping():
    with (
        Publisher(fresh_url(), lambda: [np.ones(2)]) as publisher,
        pytest.raises(TypeError, match="by name, or as pairs of a name and a tensor, not ndarray"),
    ):
        publisher.publish()


def test_a_run_that_is_taken_up_with_other_ties_starts_with_an_anchor():
    """The digest does not show it: tied names have no weights of their own."""
    w, url = np.arange(4, dtype=np.float32), fresh_url()
    with Publisher(url, {"a": w, "b": w}) as publisher:
        publisher.publish()
    with Publisher(url, {"a": w}) as publisher:
        assert not publisher.resumed
    with Publisher(url, {"a": w, "b": w}) as publisher:
        assert publisher.resumed


def test_a_mirror_as_base_has_the_tied_names_that_it_states(tmp_path):
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 4, bias=False), "head": torch.nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    with Publisher(url := fresh_url(), model) as publisher:
        publisher.publish()
    with Replica(url, tmp_path / "mirror", heartbeat_seconds=None) as replica:
        replica.pull()
    with torch.no_grad():
        model["embed"].weight[0] += 1
    with Publisher(url, model, base=Checkpoint(tmp_path / "mirror")) as publisher:
        assert publisher.publish().wait(PATIENCE).version == 1
        assert publisher.run.manifest(1).hop.base == 0
    with Replica(url, copy := {}, heartbeat_seconds=None) as replica:
        replica.pull()
    assert all_equal(copy, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


def test_an_interrupt_at_the_end_of_a_call_does_not_make_two_calls_one():
    weights, url = {"a": np.zeros(100, np.float32)}, fresh_url()

    class Interrupted(threading.Condition):
        num_entered = 0

        def __enter__(self):
            self.num_entered += 1
            if self.num_entered == 2:  # what was staged is noted, and others are told
                raise KeyboardInterrupt
            return super().__enter__()

    with Publisher(url, weights) as publisher:
        publisher.publish().wait(PATIENCE)
        publisher._worker._changed = Interrupted()
        weights["a"][1] = 1
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
        weights["a"][2] = 2
        publisher.publish().wait(PATIENCE)
    with Replica(url, copy := {}) as replica:
        replica.pull()
    assert all_equal(copy, weights)
