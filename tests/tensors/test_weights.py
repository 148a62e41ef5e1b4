"""Numpy and torch seen as bits: what is viewed without a copy, what is refused, and in which words."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from deltawire import Checkpoint, digest, save_anchor
from deltawire.errors import NotEnoughMemory
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import (
    Tensor,
    Viewed,
    check_plain,
    check_writable,
    is_torch,
    mapping_of,
    num_elements,
    place,
    spec,
    tied_names,
    untied_name,
    view,
    writable,
    writables,
    write,
)


def test_only_weights_by_name_are_taken():
    for wrong, name in (([1, 2], "list"), (np.zeros(3), "ndarray"), (None, "NoneType")):
        with pytest.raises(TypeError) as caught:
            mapping_of(wrong)
        assert str(caught.value) == f"expected weights by name (a mapping, or a torch module), got {name}"
    module = torch.nn.Linear(2, 3)
    assert set(mapping_of(module)) == {"weight", "bias"}
    given = {"a": np.zeros(3)}
    assert mapping_of(given) is given


class Counted(dict):
    """Weights that know their specs, and count how often a tensor is read."""

    num_read = 0

    def __getitem__(self, name):
        self.num_read += 1
        return super().__getitem__(name)

    def spec(self, name):
        return "F32", (6,)


def test_specs_are_taken_from_weights_that_know_them():
    known = Counted(a=np.zeros((2, 3), np.float32))
    viewed = Viewed(known)
    assert viewed.spec("a") == ("F32", (6,)) == spec(known, "a")
    assert known.num_read == 0
    assert Viewed({"a": np.zeros((2, 3), np.float32)}).spec("a") == ("F32", (2, 3))
    assert Viewed({"a": np.zeros((2, 3), np.uint16)}, "BF16").spec("a") == ("BF16", (2, 3))


def test_tied_names_are_left_out():
    weights = {"a": np.arange(3, dtype=np.float32), "b": np.zeros(1, np.float32)}
    viewed = Viewed(weights, None, {"b": "a"})
    assert (list(viewed), len(viewed), "b" in list(viewed)) == (["a"], 1, False)
    assert viewed.num_elements("a") == 3
    assert np.array_equal(viewed["a"].bits, weights["a"].view(np.uint32))
    weights["a"][0] = 7
    assert viewed["a"].bits[0] == np.float32(7).view(np.uint32), "not a copy"


def test_a_checkpoint_knows_its_specs(tmp_path):
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_anchor(weights, tmp_path / "model", run="r", version=0)
    checkpoint = Checkpoint(tmp_path / "model")
    assert spec(checkpoint, "a") == Viewed(checkpoint).spec("a") == spec(weights, "a") == ("F32", (2, 3))
    with pytest.raises(TypeError, match=r"^a: expected a numpy array"):
        spec({"a": 3.0}, "a")
    assert digest(checkpoint) == digest(weights)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_what_is_no_plain_tensor_is_refused():
    with pytest.raises(ValueError, match=r"^w is on the meta device, where tensors have no values: load the weights"):
        check_plain("w", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"^w is a sparse tensor \(torch.sparse_coo\): pass a dense one"):
        check_plain("w", torch.eye(3).to_sparse())
    with pytest.raises(TypeError) as caught:
        check_plain("w", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    assert str(caught.value) == (
        "w is quantized, not a plain dense tensor: publish the model that it was made from, or a mapping of the plain "
        "tensors that it consists of"
    )
    check_plain("w", torch.ones(3))


def test_elements_are_counted_without_reading():
    class Known(Counted):
        def num_elements(self, name):
            return 6

    known = Known(a=np.zeros((2, 3), np.float32))
    assert num_elements(known, "a") == 6
    assert known.num_read == 0
    assert num_elements({"a": np.zeros((2, 3)), "b": np.float32(1)}, "a") == 6
    assert num_elements({"b": np.float32(1)}, "b") == 1
    assert num_elements({"b": 3.0}, "b") == 1, "what it is instead of a tensor is for `view` to say"


def test_neighbours_in_one_buffer_are_two_tensors():
    flat = torch.zeros(10)
    apart = {"a": flat[:4], "b": flat[4:6], "c": flat[6:]}
    assert writable(apart, apart, {}).keys() == apart.keys()
    overlapping = {"a": flat[:5], "b": flat[4:]}
    with pytest.raises(ValueError, match=r"^a and b share memory at the target, but are two tensors"):
        writable(overlapping, overlapping, {})
    same = {"a": flat, "b": flat}
    assert writable(same, same, {"b": "a"}).keys() == same.keys()
    with pytest.raises(ValueError, match="a and b share memory"):
        writable(same, same, {})
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"^frozen"):
        writable({"frozen": frozen}, ["frozen"], {})


def test_names_of_one_tensor():
    shared, other = np.ones(3, np.float32), np.ones(3, np.float32)
    weights = {"empty": np.zeros(0), "void": np.zeros(0), "a": shared, "b": other, "c": shared, "d": shared[:2]}
    assert tied_names(weights) == {"c": "a"}
    assert place(weights["empty"]) is None
    bits = np.zeros(4, np.uint16)
    one, two = Tensor(DTYPES["BF16"], (4,), bits), Tensor(DTYPES["BF16"], (4,), bits)
    assert place(one) == place(two) is not None
    assert place(Tensor(DTYPES["F16"], (4,), bits)) != place(one) != place(Tensor(DTYPES["BF16"], (2, 2), bits))
    assert place(Tensor(DTYPES["BF16"], (0,), bits[:0])) is None


def test_a_tied_name_with_other_weights_is_found():
    shared = np.arange(3, dtype=np.uint16)
    weights = {"a": shared, "b": shared, "c": shared.copy(), "d": shared + 1}
    assert untied_name(weights, {"gone": "a", "b": "a", "c": "a"}) is None
    assert untied_name(weights, {"gone": "a", "b": "a", "c": "a"}, "BF16") is None
    assert untied_name(weights, {"b": "a", "e": "gone", "d": "a"}) == "d"
    assert untied_name({"a": shared, "b": shared.reshape(3, 1).copy()}, {"b": "a"}) == "b"


@pytest.mark.parametrize(
    ("value", "name", "shape"),
    [
        (np.arange(6, dtype=">f4").reshape(2, 3), "F32", (2, 3)),
        (np.arange(6, dtype=np.float32).reshape(3, 2).T, "F32", (2, 3)),
        (np.float64(3), "F64", ()),
        (torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).t(), "BF16", (2, 3)),
        (torch.nn.Parameter(torch.ones(3)), "F32", (3,)),
        (torch._neg_view(torch.ones(3)), "F32", (3,)),
        (torch.tensor(True), "BOOL", ()),
        (torch.zeros(0, 3, dtype=torch.int64), "I64", (0, 3)),
    ],
)  # fmt: skip
def test_bits_are_those_of_the_values_in_order(value, name, shape):
    tensor = view("w", value)
    plain = value.detach().double().resolve_neg().numpy() if is_torch(value) else np.asarray(value, float)
    assert (tensor.dtype, tensor.shape) == (DTYPES[name], shape)
    expected = torch.from_numpy(np.array(plain, order="C").reshape(-1))
    kind = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "BOOL": torch.bool, "I64": torch.int64}
    assert tensor.bits.tobytes() == expected.to(kind[name]).view(torch.uint8).numpy().tobytes()
    assert view("w", tensor) is tensor


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)])
def test_what_is_contiguous_is_not_copied(value):
    assert np.shares_memory(view("w", value).bits, np.asarray(value))


def test_a_copy_for_which_there_is_no_room_is_named():
    with pytest.raises(NotEnoughMemory, match=r"^a contiguous copy of w takes 140,737,488,355,328 bytes") as caught:
        view("w", np.broadcast_to(np.zeros(1, np.float32), 1 << 45))
    assert caught.value.num_bytes == 1 << 47


def test_what_bits_mean_can_be_said_for_each_name():
    bits = np.arange(3, dtype=np.uint16)
    names = {"a": "BF16", "b": torch.float16}
    assert [view(name, bits, names).dtype.name for name in "abc"] == ["BF16", "F16", "U16"]
    assert view("a", torch.zeros(3, dtype=torch.int16), "BF16").dtype.name == "BF16"
    assert Viewed({"a": bits}, names)["a"].dtype.name == "BF16"


class Pointer:
    """No tensor of torch, though it has an address."""

    def data_ptr(self):
        return 0


@pytest.mark.parametrize(
    ("value", "dtype", "kind", "message"),
    [
        (3.0, None, TypeError, "w: expected a numpy array or a torch tensor, got float"),
        ([1.0], None, TypeError, "w: expected a numpy array or a torch tensor, got list"),
        (Pointer(), None, TypeError, "w: expected a numpy array or a torch tensor, got Pointer"),
        (torch.float32, None, TypeError, "w: expected a numpy array or a torch tensor, got dtype"),
        (np.zeros(2, np.float32), "BF16", ValueError, "w: dtype BF16 has 2 bytes, but the array's items have 4"),
        (
            torch.zeros(2, dtype=torch.int8),
            {"w": "F32"},
            ValueError,
            "w: dtype F32 has 4 bytes, but the array's items have 1",
        ),
    ],
)
def test_what_cannot_be_viewed_is_said_by_name(value, dtype, kind, message):
    with pytest.raises(kind) as caught:
        view("w", value, dtype)
    assert str(caught.value) == message


@pytest.mark.parametrize("dtype", ["BF16", "U16", {"w": torch.bfloat16}])
@pytest.mark.parametrize("value", [np.ones(2, np.float16), np.ones(2, ">f2"), torch.ones(2, dtype=torch.float16)])
def test_floats_are_not_taken_for_bits_of_another_dtype(value, dtype):
    with pytest.raises(ValueError, match=r"w: dtype \w+ is what the bits of integers mean, but the array is float16"):
        view("w", value, dtype)
    assert view("w", value, "F16").dtype.name == "F16"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 3)).T, "w is not contiguous, so it cannot be changed in place; pass a contiguous array"),
        (torch.zeros(2, 3).t(), "w is not contiguous, so it cannot be changed in place; pass a contiguous array"),
        (np.broadcast_to(np.zeros(1), 1), "w is read-only; pass an array that can be changed"),
        (np.zeros(3, ">f4"), "w is in the other byte order; pass an array in this machine's byte order"),
        (
            Tensor(DTYPES["U8"], (3,), np.frombuffer(b"abc", np.uint8)),
            "w is read-only; pass an array that can be changed",
        ),
        (
            torch._neg_view(torch.ones(3)),
            "w is a lazy negation of another tensor's memory; pass a copy, with resolve_neg()",
        ),
        (
            torch.empty(3, device="meta"),
            "w is on the meta device, where tensors have no values: load the weights first",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(value, message):
    for check in (check_writable, lambda name, value: writable({name: value}, [name], {})):
        with pytest.raises(ValueError, match=r"^w is") as caught:
            check("w", value)
        assert str(caught.value) == message


def test_a_wrapper_is_no_plain_tensor():
    wrapper = TwoTensor(torch.ones(3), torch.ones(3))
    for check in (check_plain, view, check_writable):
        with pytest.raises(TypeError, match=r"^w is TwoTensor, not a plain dense tensor: publish the model"):
            check("w", wrapper)


@pytest.fixture
def mesh():
    """This process as the only one of a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_dtensor_is_known_by_its_object(mesh):
    """Its memory says nothing: a rank may hold no part of it."""
    one, other = (distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]) for _ in range(2))
    weights = {"a": one, "b": other, "c": one}
    check_plain("a", one)
    assert tied_names(weights) == {"c": "a"}
    assert untied_name(weights, {"c": "a"}) is None
    with pytest.raises(TypeError) as caught:
        untied_name(weights, {"b": "a"})
    assert str(caught.value) == "b is a DTensor: pass its local shard and box, or gather it first"


@pytest.mark.parametrize("where", [slice(None), np.array([4, 0, 3])])
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((2, 3), np.float32),
        lambda: np.zeros((2, 3), np.float32).view(np.matrix),
        lambda: np.ma.array(np.zeros((2, 3), np.float32), mask=True, hard_mask=True),
        lambda: torch.zeros(2, 3),
        lambda: torch.nn.Parameter(torch.zeros(2, 3)),
        lambda: Tensor(DTYPES["F32"], (2, 3), np.zeros(6, np.uint32)),
    ],
)
def test_elements_are_written_by_position(make, where):
    value = make()
    fresh = np.arange(1, 7, dtype=np.uint32)[where] * 0x01010101
    write(value, where, fresh)
    expected = np.zeros(6, np.uint32)
    expected[where] = fresh
    assert np.array_equal(view("w", value).bits, expected)


def test_memory_that_two_names_share_is_found():
    flat = torch.zeros(10)
    for weights, tied, names in (
        ({"a": flat, "b": flat.numpy()}, {}, "a and b"),
        ({"a": flat, "b": Tensor(DTYPES["F32"], (2,), flat.numpy().view(np.uint32)[4:6])}, {}, "a and b"),
        ({"a": flat[:9], "b": flat[1:3], "c": flat[5:]}, {"b": "a"}, "a and b"),
        ({"a": flat, "b": flat, "c": flat[9:]}, {"b": "a"}, "a and c"),
        ({"a": flat, "b": flat.view(2, 5)}, {"b": "a"}, "a and b"),
        ({"c": flat[:3], "a": flat[2:5], "b": flat[7:]}, {"a": "b", "c": "b"}, "c and a"),
    ):
        with pytest.raises(ValueError, match="share memory") as caught:
            writable(weights, weights, tied)
        assert str(caught.value) == (
            f"{names} share memory at the target, but are two tensors in the run: give each its own, or tie them at "
            "the trainer"
        )
    assert writable({"a": flat, "b": flat}, ["a", "b"], {"a": "b"}).keys() == {"a", "b"}
    tied = {"b": "a", "c": "a"}
    assert list(writable({"a": flat, "b": flat, "c": flat}, ["c", "b"], tied)) == ["c", "b"]
    assert writable({"b": flat, "c": flat}, ["c", "b"], tied)["c"] is flat, "both are tied to a name that is not here"


def test_a_copy_on_each_access_is_not_written():
    class Copies(dict):
        def __getitem__(self, name):
            return super().__getitem__(name).copy()

    with pytest.raises(ValueError, match=r"^b: the target returns a new copy on each access, so writes would be lost"):
        writable(Copies(b=np.zeros(3)), ["b"], {})


def test_what_tells_two_tensors_apart():
    flat = torch.arange(4.0)
    same = [flat, flat.view(4), flat.detach()]
    others = [
        flat[1:], flat.view(2, 2), flat.view(2, 2).t(), flat.view(torch.int32), torch._neg_view(flat), flat.clone(),
        flat.numpy(), flat.numpy().reshape(2, 2), flat.numpy().reshape(2, 2).T, flat.numpy().view(np.int32),
        flat.numpy()[1:], flat.numpy().view(np.dtype(np.float32).newbyteorder()),
        flat.numpy().view(ml_dtypes.float8_e4m3fn), flat.numpy().view(ml_dtypes.float8_e8m0fnu),
    ]  # fmt: skip
    assert len({place(each) for each in same}) == 1
    assert len({place(each) for each in [flat, *others]}) == 1 + len(others)
    for nowhere in (torch.zeros(0), torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), np.zeros(0), 3.0):
        assert place(nowhere) is None


def test_ties_that_are_stated_are_taken():
    class Stated(dict):
        tied = {"c": "a"}  # noqa: RUF012

    stated = Stated(a=np.zeros(2))
    assert tied_names(stated) == {"c": "a"}
    assert tied_names(stated) is not stated.tied


def test_tied_names_are_written_with_the_name_that_has_the_weights():
    a, d = np.zeros(2), np.ones(3)
    found = writables({"a": a, "b": a, "d": d, "c": a}, ["a", "d"], {"b": "a", "c": "a", "e": "d"})
    assert list(found) == ["a", "d"]
    assert [each is a for each in found["a"]] == [True, True, True]
    assert [each is d for each in found["d"]] == [True]


@pytest.mark.parametrize(("weights", "name"), [({"a": np.zeros(2), "b": 1}, "b"), ({"a": 1, "b": np.zeros(2)}, "a")])
def test_what_is_no_tensor_among_ties_is_named(weights, name):
    with pytest.raises(TypeError, match=f"^{name}: expected a numpy array"):
        untied_name(weights, {"b": "a"})
