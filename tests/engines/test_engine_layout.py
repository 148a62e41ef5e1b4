"""Where elements live in engines: every piece is exact, and whatever is not a plain copy is refused by name."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltawire import digest
from deltawire.engines import layout as layouts
from deltawire.engines.layout import Layout, Piece, each_once, pieces_of_copy
from deltawire.engines.trace import flat_storages, trace
from deltawire.errors import EngineRejected, UnknownParameter
from deltawire.tensors.digest import Digest
from support.fused_model import SPECS, FusedModel, bits_of, live_model, make_checkpoint, whole
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


@examples(20)
@given(copies(), st.integers(0, 1 << 32))
def test_select_finds_the_elements_of_a_piece(copy, seed):
    source, view, _, to = copy
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(source.numel()) < 0.5)
    for piece in pieces_of_copy("t", "s", to.shape, (view.storage_offset(), view.stride()), (0, to.stride())):
        near = places(piece)[0]
        index, inside = piece.select(positions)
        assert near[index].tolist() == positions[inside].tolist()
        assert set(positions[inside]) == set(positions) & set(near)
        assert index.dtype == np.uint32


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
    with pytest.raises(EngineRejected, match="too thinly"):
        pieces_of_copy("t", "s", (2, 3, 5), (0, (15, 5, 1)), (0, (1, 2, 6)))


def test_a_layout_counts_each_element_once():
    specs = {"a": ("BF16", (6,)), "b": ("F32", (4,))}
    ranks = [[whole("a", "s", 3), whole("b", "r", 4)], [whole("a", "s", 3, first=3), whole("b", "r", 4)]]
    layout = Layout(specs, ranks)
    assert layout.counted == [[0, 1], [0]]
    assert layout.by_tensor == [{"a": [0], "b": [1]}] * 2
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
        pieces = each_once(trace(model.load_weights, storages, SPECS))
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
REFUSED = {
    "cast": (lambda to, tensor: to.copy_(tensor.to(torch.bfloat16)), "computed from w"),
    "transpose": (lambda to, tensor: to.copy_(tensor.t()), r"w is torch.float32 \[4, 6\]"),
    "arithmetic": (lambda to, tensor: to.copy_(tensor * 2), "computed from w"),
    "arithmetic in place": (lambda to, tensor: to.copy_(tensor.add_(1)), "w is changed by aten.add_"),
    "addition": (lambda to, tensor: to.add_(tensor), "weight is computed by aten.add_"),
    "afterwards": (lambda to, tensor: (to.copy_(tensor), to.mul_(2)), "weight is computed by aten.mul_"),
    "out": (lambda to, tensor: torch.add(tensor, 1, out=to), "weight is computed by aten.add.out"),
    "broadcast": (lambda to, tensor: to.copy_(tensor[:1]), "only a plain copy"),
    "expand": (lambda to, tensor: to.copy_(tensor[:1].expand(6, 4)), "element by element"),
    "item": (lambda to, tensor: to.fill_(tensor[0, 0].item()), "cannot be followed at w"),
    "comparison": (lambda to, tensor: bool((tensor == 0).any()), "cannot be followed at w"),
    "joined": (lambda to, tensor: to.copy_(torch.cat([tensor[3:], tensor[:3]])), "computed from w"),
    "by way of another": (lambda to, tensor: to.copy_(torch.empty_like(tensor).copy_(tensor)), "computed from w"),
    "elsewhere": (lambda to, tensor: torch.empty(6, 4).copy_(tensor), "no parameter of the model"),
    "by index": (lambda to, tensor: to.__setitem__(torch.tensor([0]), tensor[:1]), "computed by aten.index_put_"),
    "another storage": (lambda to, tensor: to.set_(tensor), "weight is computed by aten.set_"),
    "an error": (lambda to, tensor: 1 / 0, "cannot be followed at w: ZeroDivisionError"),
}


def trace_small(how):
    model = Small()
    try:
        return trace(
            lambda weights: [how(model.weight.data, tensor) for _, tensor in weights],
            flat_storages(model),
            {"w": ("F32", (6, 4))},
        )
    finally:
        assert (model.weight == 7).all()
        assert (model.other == 7).all()


@pytest.mark.parametrize("how", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_plain_copies_are_followed(how):
    storage = np.zeros(24, int)
    do_copies(trace_small(how), np.arange(24), storage)
    assert storage.tolist() == list(range(24))


@pytest.mark.parametrize(("how", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_refused_by_name(how, message):
    with pytest.raises(EngineRejected, match=message) as caught:
        trace_small(how)
    assert caught.value.tensor in ("w", "weight")


def test_memory_that_two_widths_share_is_refused():
    model = torch.nn.Module()
    whole = torch.zeros(8, dtype=torch.float32)
    model.register_parameter("a", torch.nn.Parameter(whole))
    model.register_buffer("b", whole.view(torch.bfloat16))
    with pytest.raises(EngineRejected, match="b is"):
        trace(
            lambda weights: [model.b.copy_(each) for _, each in weights], flat_storages(model), {"b": ("BF16", (16,))}
        )
