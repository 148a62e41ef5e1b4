"""Numpy and torch seen as bits: what is viewed without a copy, what is refused, and in which words."""

import numpy as np
import pytest
import torch

from deltawire import Checkpoint, digest, save_anchor
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import (
    Tensor,
    Viewed,
    check_plain,
    mapping_of,
    num_elements,
    place,
    spec,
    tied_names,
    untied_name,
    writable,
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
    assert spec(checkpoint, "a") == Viewed(checkpoint).spec("a") == ("F32", (2, 3))
    assert digest(checkpoint) == digest(weights)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_what_is_no_plain_tensor_is_refused():
    with pytest.raises(ValueError, match=r"^w is on the meta device, where tensors have no values: load the weights"):
        check_plain("w", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"^w is a sparse tensor \(torch.sparse_coo\): give it as a dense one"):
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


def test_neighbours_in_one_buffer_are_two_tensors():
    flat = torch.zeros(10)
    apart = {"a": flat[:4], "b": flat[4:6], "c": flat[6:]}
    assert writable(apart, apart, {}).keys() == apart.keys()
    overlapping = {"a": flat[:5], "b": flat[4:]}
    with pytest.raises(ValueError, match=r"^a and b share memory at the target, and are two tensors"):
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
    weights = {"empty": np.zeros(0), "a": shared, "b": other, "c": shared, "d": shared[:2]}
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
