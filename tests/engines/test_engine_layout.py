"""Where elements live in engines: every piece is exact, and whatever is not a plain copy is refused by name."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltawire import digest
from deltawire.engines import layout as layouts
from deltawire.engines import places as all_places
from deltawire.engines.engine import EngineChange
from deltawire.engines.layout import Layout, Piece, cuts, each_once, pieces_of_copy
from deltawire.engines.places import Computed, check_covered, left_out
from deltawire.engines.staged import left_out_digests, split
from deltawire.engines.trace import flat_storages, trace
from deltawire.errors import EngineRejected, UnknownParameter
from deltawire.format.patches import Patch
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.weights import torch_view
from support.fused_model import SPECS, FusedModel, bits_of, live_model, make_checkpoint, plain_pieces, whole
from support.patterns import examples


def places(piece):
    """Where each element of a piece is: in the tensor, and in the storage."""
    row, column = np.divmod(np.arange(piece.num_elements), piece.columns)
    offset, row_step, column_step = piece.place
    return piece.start + row * piece.stride + column, offset + row * row_step + column * column_step


def do_copies(pieces, source, storage):
    for piece in pieces:
        near, far = places(piece)
        storage[far] = source[near]


# Layout


@st.composite
def copies(draw):
    """A copy between two views: a part of a tensor, its dimensions in another order, into a part of a storage."""
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=4))
    around = [size + draw(st.integers(0, 2)) for size in shape]
    source = torch.arange(prod(around)).reshape(around)
    cuts = [slice(first := draw(st.integers(0, a - n)), first + n) for n, a in zip(shape, around, strict=True)]
    view = source[tuple(cuts)] if cuts else source
    view = view.permute(draw(st.permutations(range(len(shape)))))
    storage = [size + draw(st.integers(0, 2)) for size in view.shape]
    order = draw(st.permutations(range(len(shape))))
    flat = torch.full((prod(storage) + 3,), -1)
    room = flat[3:].reshape([storage[i] for i in order]).permute([order.index(i) for i in range(len(order))])
    to = room[tuple(slice(size - n, size) for n, size in zip(view.shape, storage, strict=True))]
    return source, view, flat, to


@examples(60)
@given(copies())
def test_pieces_do_what_the_copy_does(copy):
    source, view, flat, to = copy
    pieces = pieces_of_copy(
        "t", "s", to.shape, (view.storage_offset(), view.stride()), (to.storage_offset(), to.stride())
    )
    ours = flat.numpy().copy()
    do_copies(pieces, source.reshape(-1).numpy(), ours)
    to.copy_(view)
    assert ours.tolist() == flat.tolist()
    assert sum(piece.num_elements for piece in pieces) == view.numel()
    assert pieces == [Piece.from_list(piece.as_list()) for piece in pieces]


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 6), st.integers(1, 7)), max_size=6),
    st.integers(0, 1 << 32), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1),
)  # fmt: skip
def test_changes_are_divided_among_pieces(parts, seed, width, density):
    """Whatever parts of a matrix are pieces, also the same ones twice: each gets what changes in it."""
    rng = np.random.default_rng(seed)
    pieces = []
    for row, rows, column, columns in parts:
        size = min(rows, 6 - row), min(columns, 7 - column)
        pieces += pieces_of_copy("t", "s", size, (7 * row + column, (7, 1)), (0, (size[1], 1)))
    old, new = rng.integers(0, 1 << 8 * width, (2, 42), f"u{width}")
    where = np.flatnonzero(rng.random(42) < density)
    holders = {}
    for number, piece in enumerate(pieces):
        holders.setdefault(("t", *piece.source), []).append((number % 2, number))
    found = {}
    for cut in cuts(holders).get("t", []):
        for same, index, *bits in cut.divide(where, where.astype(np.uint32), old[where], new[where]):
            assert index.dtype == np.uint32
            found |= {number: (rank, index.tolist(), *map(list, bits)) for rank, number in same}
    for number, piece in enumerate(pieces):
        near = places(piece)[0].tolist()
        here = [each for each in where.tolist() if each in near]
        expected = number % 2, [near.index(each) for each in here], old[here].tolist(), new[here].tolist()
        assert found.pop(number, (number % 2, [], [], [])) == expected
    assert not found


@pytest.mark.parametrize("most", [5, 7, 24])
@pytest.mark.parametrize("strides", [(6, 1), (9, 1), (1, 4)])
def test_large_tensors_are_cut(monkeypatch, most, strides):
    monkeypatch.setattr(layouts, "MOST_ELEMENTS", most)
    pieces = pieces_of_copy("t", "s", (4, 6), (0, (6, 1)), (0, strides))
    assert max(piece.num_elements for piece in pieces) <= most
    storage = np.full(50, -1)
    do_copies(pieces, np.arange(24), storage)
    assert np.lib.stride_tricks.as_strided(storage, (4, 6), [8 * each for each in strides]).reshape(
        -1
    ).tolist() == list(range(24))


@pytest.mark.parametrize("source", [(0, 1), (1, 1), (2, 1), (1, 0)])
def test_elements_that_repeat_are_refused(source):
    with pytest.raises(EngineRejected, match="element by element") as caught:
        pieces_of_copy("t", "s", (4, 3), (0, source), (0, (3, 1)))
    assert caught.value.tensor == "t"
    with pytest.raises(EngineRejected, match="element by element"):
        pieces_of_copy("t", "s", (4, 3), (0, (3, 1)), (0, source))


def test_a_tensor_in_too_many_pieces_is_refused(monkeypatch):
    monkeypatch.setattr(layouts, "MOST_PIECES", 1)
    with pytest.raises(EngineRejected, match="too many pieces"):
        pieces_of_copy("t", "s", (2, 3, 5), (0, (15, 5, 1)), (0, (1, 2, 6)))


def test_a_layout_counts_each_element_once():
    specs = {"a": ("BF16", (6,)), "b": ("F32", (4,))}
    ranks = [[whole("a", "s", 3), whole("b", "r", 4)], [whole("a", "s", 3, first=3), whole("b", "r", 4)]]
    layout = Layout(specs, ranks)
    assert layout.counted == [[0, 1], [0]]
    assert {name: [each.holders for each in own] for name, own in layout.cuts.items()} == {
        "a": [([(0, 0)], [(1, 0)])], "b": [([(0, 1), (1, 1)],)],
    }  # fmt: skip
    # Copies are looked at in turn.
    assert layout.copies == [[[1], []], [[], [1]]]
    assert [layout.measured(rank) for rank in range(2)] == [[[0, 1], [1], []], [[0], [], [1]]]
    one, other, nothing = str(Digest(1, 2)), str(Digest(1, 3)), str(Digest())
    assert layout.alike([[one, nothing], [nothing, one]])
    assert not layout.alike([[one, nothing], [nothing, other]])
    assert layout.total([]) == sum((layout.total([Digest(5, 7)]), Digest()), Digest()) - Digest(5, 7)


@pytest.mark.parametrize(
    "ranks",
    [[[]], [[whole("a", "s", 5)]], [[whole("a", "s", 6), whole("a", "s", 3)]], [[whole("a", "s", 4)], []]],
    ids=["none", "a part", "overlapping", "a rank without"],
)
def test_a_tensor_that_is_not_wholly_there_is_refused(ranks):
    with pytest.raises(UnknownParameter, match="elements of a") as caught:
        Layout({"a": ("BF16", (6,))}, ranks)
    assert caught.value.tensor == "a"


def test_what_is_there_twice_counts_once_and_two_in_one_place_are_refused():
    assert each_once([whole("a", "s", 3), whole("a", "s", 3), whole("a", "r", 3)]) == [
        whole("a", "s", 3),
        whole("a", "r", 3),
    ]
    with pytest.raises(EngineRejected, match="a and b share the memory of s"):
        each_once([whole("a", "s", 3), whole("b", "s", 3)])


def test_tensors_that_are_left_out_count_for_the_digest_and_go_nowhere():
    specs = {"a": ("BF16", (6,)), "draft": ("BF16", (4,))}
    layout = Layout(specs, [[whole("a", "s", 6)]], left_out={"draft"})
    old = {name: torch.arange(shape[0], dtype=torch.bfloat16) for name, (_, shape) in specs.items()}
    new = {name: value + 1 for name, value in old.items()}
    where = np.array([1, 3])
    bits = {name: torch_view(value)[where] for name, value in new.items()}
    patches = [Patch(name, "BF16", Box.whole(specs[name][1]), bits[name], where) for name in specs]
    for name in specs:
        torch_view(old[name])[0] = torch_view(new[name])[0]
        new[name] = old[name].clone()
        torch_view(new[name])[where] = bits[name]
    base, state = (WeightVersion("run", i, digest(each)) for i, each in enumerate((old, new)))
    change = EngineChange(base, state, patches, old)
    (staged,) = split(change, layout, "token")
    assert [each.number for each in staged.changes] == [0]
    before, after = left_out_digests(change, layout)
    assert before + digest({"a": old["a"]}) == base.digest
    assert after + digest({"a": new["a"]}) == state.digest
    assert layout.total([Digest.parse(layout.partial(state.digest - after))]) == digest({"a": new["a"]})


# Trace


@pytest.mark.parametrize("world", [1, 2])
def test_a_trace_finds_where_everything_is(world):
    """Copying by the pieces gives what the model's own code gives; nothing is written on the way."""
    checkpoint = make_checkpoint()
    for rank in range(world):
        model, expected = FusedModel(rank, world), FusedModel(rank, world)
        expected.load_weights(checkpoint.items())
        model.embed.data.fill_(3)
        storages = flat_storages(model)
        assert "head" not in storages
        pieces = each_once(plain_pieces(trace(model.load_weights, storages, SPECS)))
        assert (model.embed == 3).all()
        model.embed.data.fill_(0)
        for piece in pieces:
            near, far = places(piece)
            storages[piece.storage][far] = checkpoint[piece.tensor].reshape(-1)[near]
        for name, value in model.named_parameters():
            assert np.array_equal(bits_of(value), bits_of(expected.get_parameter(name))), name


def test_partial_digests_of_ranks_add_up_to_the_whole():
    checkpoint, ranks = make_checkpoint(), [FusedModel(rank, 2) for rank in range(2)]
    models = []
    for model in ranks:
        model.load_weights(checkpoint.items())
        models.append(live_model(model))
    layout = Layout(SPECS, [model.bind(SPECS) for model in models])
    parts = [model.measure(layout.counted[rank]) for rank, model in enumerate(models)]
    assert layout.total(parts) == digest(checkpoint)


@pytest.mark.parametrize("world", [1, 2])
def test_a_whole_checkpoint_is_written_to_its_places(world):
    first, second = make_checkpoint(), make_checkpoint(1)
    for rank in range(world):
        model, expected = FusedModel(rank, world), FusedModel(rank, world)
        model.load_weights(first.items())
        expected.load_weights(second.items())
        live = live_model(model)
        live.bind(SPECS)
        live.load(second.items())
        for name, value in model.named_parameters():
            assert np.array_equal(bits_of(value), bits_of(expected.get_parameter(name))), name
        with pytest.raises(EngineRejected, match="has no norm"):
            live.load((name, value) for name, value in second.items() if name != "norm")
        for wrong in ({"norm": second["norm"][:3]}, {"norm": second["norm"].float()}, {"other": second["norm"]}):
            with pytest.raises(EngineRejected, match=f"{min(wrong)} is not one"):
                live.load({**second, **wrong}.items())


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6, 4), 7.0))
        self.other = torch.full((6, 4), 7.0)


ACCEPTED = {
    "copy": lambda to, tensor: to.copy_(tensor),
    "into a parameter itself": lambda to, tensor: to.copy_(tensor.clone()),
    "slices": lambda to, tensor: (to[:2].copy_(tensor[:2]), to[2:].copy_(tensor[2:])),
    "assignment": lambda to, tensor: to.__setitem__(slice(None), tensor),
    "transposed twice": lambda to, tensor: to.copy_(tensor.t().contiguous().t()),
    "reshaped": lambda to, tensor: to.copy_(tensor.reshape(4, 6).view(6, 4)),
    "chunks": lambda to, tensor: [to[2 * i : 2 * i + 2].copy_(each) for i, each in enumerate(tensor.chunk(3))],
    "to the device": lambda to, tensor: to.copy_(tensor.to("cpu")),
    "padded": lambda to, tensor: (to.copy_(tensor), to[6:].fill_(0), to[6:].zero_()),
}
REORDERED = {
    "heads in another order": lambda tensor: tensor.view(2, 3, 4).transpose(0, 1).reshape(6, 4),
    "a part of them": lambda tensor: tensor.view(2, 3, 4).transpose(0, 1).reshape(6, 4)[2:4],
    "columns": lambda tensor: tensor.view(6, 2, 2).transpose(1, 2).reshape(6, 4),
    "both": lambda tensor: tensor.view(3, 2, 4).transpose(0, 1).reshape(6, 4).t().contiguous().view(6, 4),
    "every other row": lambda tensor: tensor.t().reshape(6, 4)[::3],
}
COMPUTED = {
    "cast down": lambda to, tensor: to.copy_(tensor.to(torch.bfloat16)),
    "arithmetic": lambda to, tensor: to.copy_(tensor * 2),
    "arithmetic in place": lambda to, tensor: to.copy_(tensor.add_(1)),
    "afterwards": lambda to, tensor: (to.copy_(tensor), to.mul_(2)),
    "read again": lambda to, tensor: (to.copy_(tensor), to.copy_(-torch.exp(to.float()))),
    "of a part": lambda to, tensor: (to[:3].copy_(torch.exp(tensor[:3])), to[3:].copy_(1 + tensor.half()[3:])),
    "in another order": lambda to, tensor: to.copy_(-tensor.t().contiguous().view(6, 4)),
}
REFUSED = {
    "transpose": (lambda to, tensor: to.copy_(tensor.t()), r"w is torch.float32 \[4, 6\]"),
    "addition": (lambda to, tensor: to.add_(tensor), "w goes into weight by aten.add_"),
    "a part of it in place": (lambda to, tensor: (tensor[:2].add_(1), to.copy_(tensor)), "w is changed by aten.add_"),
    "before": (lambda to, tensor: (to.mul_(2), to.copy_(tensor)), "w goes into weight by aten.mul_"),
    "out": (lambda to, tensor: torch.add(tensor, 1, out=to), "w goes into weight by aten.add.out"),
    "broadcast": (lambda to, tensor: to.copy_(tensor[:1]), "cannot be changed in place"),
    "expand": (lambda to, tensor: to.copy_(tensor[:1].expand(6, 4)), "element by element"),
    "item": (lambda to, tensor: to.fill_(tensor[0, 0].item()), "cannot be followed at w"),
    "comparison": (lambda to, tensor: bool((tensor == 0).any()), "cannot be followed at w"),
    "two of them": (lambda to, tensor: to.copy_(tensor + tensor.flip(0)), "computed from w"),
    "a sum": (lambda to, tensor: to.copy_(tensor - tensor.mean()), "computed from w"),
    "joined": (lambda to, tensor: to.copy_(torch.cat([tensor[3:], tensor[:3]])), "computed from w"),
    "by way of another": (lambda to, tensor: to.copy_(torch.empty_like(tensor).copy_(tensor)), "computed from w"),
    "by the value of another": (
        lambda to, tensor: to.copy_(tensor * to[0, 0].item()),
        "w is loaded as depends on the value of weight",
    ),
    "noise": (lambda to, tensor: to.copy_(torch.dropout(tensor, 0.5, True)), "computed from w"),
    "elsewhere": (lambda to, tensor: torch.empty(6, 4).copy_(tensor), "not a parameter"),
    "by index": (
        lambda to, tensor: to.__setitem__(torch.tensor([0]), tensor[:1]),
        "w goes into weight by aten.index_put_",
    ),
    "another storage": (lambda to, tensor: to.set_(tensor), "w goes into weight by aten.set_"),
    "an error": (
        lambda to, tensor: 1 / 0,
        "cannot be followed at w: ZeroDivisionError: division by zero; if it has no such tensor, as of an adapter, "
        "publish without it",
    ),
}


def trace_small(how, model=None):
    model, specs = model or Small(), {"w": ("F32", (6, 4))}
    try:
        return trace(lambda weights: [how(model.weight.data, each) for _, each in weights], flat_storages(model), specs)
    finally:
        assert (model.weight == 7).all()
        assert (model.other == 7).all()


@pytest.mark.parametrize("how", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_plain_copies_are_followed(how):
    storage = np.zeros(24, int)
    do_copies(plain_pieces(trace_small(how)), np.arange(24), storage)
    assert storage.tolist() == list(range(24))


@pytest.mark.parametrize("how", REORDERED.values(), ids=REORDERED.keys())
def test_copies_of_a_copy_in_another_order_are_followed(how):
    expected = how(torch.arange(24.0).view(6, 4))

    def load(to, tensor):
        value = how(tensor)
        to[: len(value)].copy_(value)

    storage = np.full(24, -1.0)
    do_copies(plain_pieces(trace_small(load)), np.arange(24), storage)
    assert storage[: expected.numel()].tolist() == expected.reshape(-1).tolist()


@examples(60)
@given(st.data())
def test_views_of_copies_of_views(data):
    """Whatever is followed through copies in another order gives what torch gives; some of it is not followed."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    shapes = st.sampled_from([[-1], [2, -1], [-1, 3], [3, 2, -1]])
    outer = [each for each in [data.draw(shapes)] if prod(shape) % max(prod(abs(n) for n in each), 1) == 0] or [[-1]]
    swap, first = data.draw(st.booleans()), data.draw(st.integers(0, 1))

    def how(tensor):
        value = tensor.view(shape).permute(order).contiguous().view(outer[0])
        return (value.transpose(0, -1) if swap else value)[first:]

    flat = torch.arange(float(prod(shape)))
    expected = how(flat)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full(expected.shape, -1.0))
    traced = trace(
        lambda weights: [model.weight.data.copy_(how(tensor)) for _, tensor in weights],
        flat_storages(model), {"w": ("F32", (prod(shape),))},
    )  # fmt: skip
    storage = np.full(expected.numel(), -1.0)
    for copy in traced.copies:
        pieces = copy.pieces()
        if pieces is not None:
            do_copies(pieces, flat.numpy(), storage)
            assert storage.tolist() == expected.reshape(-1).tolist()
        assert torch.equal(copy.node.storage(flat).as_strided(*copy.source), expected)


@pytest.mark.parametrize("how", COMPUTED.values(), ids=COMPUTED.keys())
def test_what_is_computed_element_by_element_is_computed_again(how):
    """The bits are those of the model's own code, with whatever values."""
    specs, model, expected = {"w": ("F32", (6, 4))}, Small(), Small()
    storages = flat_storages(model)
    computed = Computed(trace_small(how, model), storages, specs)
    assert [piece.tensor for piece in computed.pieces] == ["w"]
    for seed in range(2):
        values = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        how(expected.weight.data, values.clone())
        assert not computed.holds()
        computed.storages["w as in the checkpoint"].copy_(values.view(-1))
        assert not computed.holds()
        computed.refresh({"another"})
        assert not computed.holds()
        computed.refresh({"w"})
        assert computed.holds()
        assert np.array_equal(bits_of(model.weight), bits_of(expected.weight))
        model.weight.data[0, 0] += 1
    again = Computed(trace_small(how, Small()), storages, specs, computed)
    assert not again.holds()
    computed.refresh({"w"})
    assert Computed(trace_small(how, Small()), storages, specs, computed).holds()
    with pytest.raises(EngineRejected, match="computed from w") as caught:
        plain_pieces(trace_small(how))
    assert caught.value.tensor == "w"


def test_an_error_that_lists_all_parameters_is_cut():
    """As vLLM's, where a checkpoint has a tensor that the model does not have."""

    def fail(*_):
        raise ValueError(f"there is no w; the parameters are {', '.join(f'layers.{i}' for i in range(10_000))}")

    with pytest.raises(EngineRejected, match=r"ValueError: there is no w; .*\.\.\.; if it has no such") as caught:
        trace_small(fail)
    assert len(str(caught.value)) < 1000


def test_a_wider_dtype_has_the_values_already():
    model = Small()
    specs = {"w": ("BF16", (6, 4))}
    traced = trace(lambda weights: [model.weight.data.copy_(each) for _, each in weights], flat_storages(model), specs)
    model.weight.data.copy_(torch.randn(6, 4).bfloat16())
    computed = Computed(traced, flat_storages(model), specs)
    assert computed.holds()
    (flat,) = computed.storages.values()
    assert torch.equal(flat.view(6, 4), model.weight.bfloat16())
    model.weight.data[0, 0] = 1 + 2**-20
    assert not Computed(traced, flat_storages(model), specs).holds()


def test_much_that_is_computed_is_refused(monkeypatch):
    monkeypatch.setattr(all_places, "MOST_COMPUTED", 23)
    with pytest.raises(EngineRejected, match="w is F32") as caught:
        Computed(trace_small(COMPUTED["arithmetic"]), flat_storages(Small()), {"w": ("F32", (6, 4))})
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(("how", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_refused_by_name(how, message):
    with pytest.raises(EngineRejected, match=message) as caught:
        plain_pieces(trace_small(how))
    assert caught.value.tensor == "w"


def test_a_model_of_which_something_is_not_in_the_run_is_refused():
    model = FusedModel()
    storages = flat_storages(model)

    def covered(specs, known=("cache",)):
        check_covered(model, storages, trace(model.load_weights, storages, specs), known)

    covered(SPECS)
    for missing, parameter in (("norm", "norm"), ("v", "qkv"), ("experts.1.up", "w13"), ("embed", "embed")):
        with pytest.raises(EngineRejected, match=f"elements of {parameter}: ") as caught:
            covered({name: each for name, each in SPECS.items() if name != missing})
        assert caught.value.tensor == parameter
    with pytest.raises(EngineRejected, match="0 of the 3 elements of cache"):
        covered(SPECS, known=())
    model._non_persistent_buffers_set.add("cache")
    covered(SPECS, known=())


def test_what_the_model_has_no_parameter_for_is_left_out():
    model = FusedModel()
    specs = {**SPECS, "draft.weight": ("BF16", (3,)), "head": ("BF16", (2, 2))}
    load = model.load_weights
    traced = trace(
        lambda weights: load((name, each) for name, each in weights if name in SPECS), flat_storages(model), specs
    )
    assert left_out(model, traced, specs) == ["draft.weight"]


def test_memory_that_two_widths_share_is_refused():
    model = torch.nn.Module()
    whole = torch.zeros(8, dtype=torch.float32)
    model.register_parameter("a", torch.nn.Parameter(whole))
    model.register_buffer("b", whole.view(torch.bfloat16))
    with pytest.raises(EngineRejected, match="b is"):
        trace(
            lambda weights: [model.b.copy_(each) for _, each in weights], flat_storages(model), {"b": ("BF16", (16,))}
        )


def test_what_covers_a_value():
    from deltawire.engines.places import _is_covered

    flat = torch.zeros(60)
    rows, columns = ((2, 10), (10, 1), 0), ((6, 5), (10, 1), 5)
    value = flat.view(6, 10)
    assert _is_covered([((4, 10), (10, 1), 20), rows], value)
    assert _is_covered([((1, 30), (77, 1), 0), ((30,), (1,), 30)], value)
    assert not _is_covered([rows, ((4, 9), (9, 1), 20)], value)  # ends early
    assert not _is_covered([rows, ((3, 10), (10, 1), 30)], value)  # a gap
    assert not _is_covered([columns, ((6, 5), (10, 1), 0)], value)  # not in sequence: not said
    assert _is_covered([((6, 10), (10, 1), 0)], flat[10:30])
    assert not _is_covered([((6, 10), (10, 1), 0)], value.T)
