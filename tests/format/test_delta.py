"""diff and apply, as a caller uses them."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deltawire
from deltawire import Box, Delta, Digest
from deltawire.codec import allowed_encodings
from deltawire.errors import BaseMismatch, ShapeMismatch, UnknownParameter
from deltawire.format.patches import encode_box
from deltawire.format.wire import DeltaInfo
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor, view
from support.patterns import dtypes, pairs

ENCODINGS = ["coo", "gap", "context", "dense", "auto", "mirrorless"]


def nudged(array, rng, density=0.02):
    bits = array.view(f"u{array.dtype.itemsize}").copy()
    changed = rng.random(bits.shape) < density
    bits[changed] += 1
    return bits.view(array.dtype)


def model(rng, dtype=ml_dtypes.bfloat16):
    shapes = {"embed": (50, 16), "layer.weight": (16, 48), "norm": (16,), "scale": (), "empty": (0, 16)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def stepped(weights, rng, density=0.02):
    return {name: nudged(array, rng, density) for name, array in weights.items()}


def same_bits(a, b):
    return all(view(name, a[name]).bits.tobytes() == view(name, b[name]).bits.tobytes() for name in b)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(data=st.data(), dtype=dtypes)
def test_apply_of_diff_is_the_new_weights(encoding, data, dtype):
    old, new = data.draw(pairs(dtype))
    delta = Delta.from_bytes(deltawire.diff({"w": old}, {"w": new}, encoding=encoding, dtype=dtype.name).to_bytes())
    weights = {"w": old.copy()}
    reached = deltawire.apply(delta, weights, dtype=dtype.name)
    assert weights["w"].tobytes() == new.tobytes()
    assert reached == delta.digest == deltawire.digest({"w": new}, dtype=dtype.name)
    assert delta.base_digest == deltawire.digest({"w": old}, dtype=dtype.name)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_chain_equals_one_jump(encoding):
    rng = np.random.default_rng(0)
    versions = [model(rng)]
    for _ in range(4):
        versions.append(stepped(versions[-1], rng, density=0.1))
    chained = {name: array.copy() for name, array in versions[0].items()}
    for number, (old, new) in enumerate(pairwise(versions)):
        delta = deltawire.diff(old, new, encoding=encoding, version=number + 1, base_version=number)
        deltawire.apply(delta, chained)
    jumped = {name: array.copy() for name, array in versions[0].items()}
    jump = deltawire.diff(versions[0], versions[-1], encoding=encoding, version=4, base_version=0)
    assert deltawire.apply(jump, jumped) == deltawire.digest(chained) == deltawire.digest(versions[-1])
    assert same_bits(chained, jumped)
    assert same_bits(jumped, versions[-1])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_patches_are_absolute_and_writing_twice_is_harmless(encoding):
    rng = np.random.default_rng(1)
    old = model(rng)
    new = stepped(old, rng)
    delta = deltawire.diff(old, new, encoding=encoding)
    weights = {name: array.copy() for name, array in old.items()}
    patches = list(delta.patches(old))
    for patch in patches + patches:
        flat = weights[patch.name].reshape(-1).view(np.uint16)
        flat[patch.positions] = patch.bits
    assert same_bits(weights, new)


def test_coo_and_dense_patches_need_no_weights():
    rng = np.random.default_rng(2)
    old = model(rng)
    new = stepped(old, rng)
    for encoding in ("coo", "dense"):
        assert len(list(deltawire.diff(old, new, encoding=encoding).patches())) > 0
    with pytest.raises(ValueError, match="decoded against the old weights"):
        list(deltawire.diff(old, new, encoding="gap").patches())


def test_torch_tensors_in_place():
    torch.manual_seed(0)
    old = {"a": torch.randn(64, 32).bfloat16(), "b": torch.randn(7, requires_grad=True), "c": torch.arange(5)}
    old["q"] = torch.randn(33).to(torch.float8_e4m3fn)
    new = {name: tensor.detach().clone() for name, tensor in old.items()}
    new["a"][3, 4] += 1
    new["b"][2] = float("nan")
    new["c"][0] = -1
    new["q"].view(torch.uint8)[5] ^= 0x80
    delta = deltawire.diff(old, new)
    pointers = {name: tensor.data_ptr() for name, tensor in old.items()}
    assert delta.num_changed == 4
    deltawire.apply(delta, old)
    assert pointers == {name: tensor.data_ptr() for name, tensor in old.items()}
    assert same_bits(old, new)
    assert deltawire.digest(new) == deltawire.digest({name: view(name, tensor) for name, tensor in new.items()})


def test_numpy_torch_and_integer_bits_are_the_same_weights():
    bits = np.random.default_rng(3).integers(0, 1 << 16, (5, 9), np.uint16)
    specs = {
        deltawire.digest({"w": bits}, dtype="bfloat16"),
        deltawire.digest({"w": bits.view(np.int16)}, dtype={"w": "BF16"}),
        deltawire.digest({"w": bits.view(ml_dtypes.bfloat16)}),
        deltawire.digest({"w": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}),
    }
    assert len(specs) == 1


def test_arrays_of_numpys_own_dtypes():
    for kind in (np.bool_, np.int8, np.uint8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64):
        old = {"w": np.arange(6).reshape(2, 3).astype(kind)}
        new = {"w": old["w"].copy()}
        new["w"][1, 1] = not new["w"][1, 1]
        delta = Delta.from_bytes(deltawire.diff(old, new).to_bytes())
        deltawire.apply(delta, old)
        assert old["w"].dtype == kind
        assert (old["w"] == new["w"]).all()


def test_a_file_with_everything_changed_is_hardly_larger_than_the_weights():
    rng = np.random.default_rng(9)
    old = {f"w{i}": rng.integers(0, 1 << 16, 500_000, np.uint16) for i in range(3)}
    new = {name: rng.integers(0, 1 << 16, array.shape, np.uint16) for name, array in old.items()}
    size = len(deltawire.diff(old, new, dtype="BF16").to_bytes())
    assert size <= 1.001 * sum(array.nbytes for array in new.values())


def test_negative_zero_and_nan_payloads_are_changes():
    old = {"w": np.array([0.0, np.nan, 1.0, -0.0], np.float32)}
    new = {"w": np.array([-0.0, np.nan, 1.0, -0.0], np.float32)}
    new["w"].view(np.uint32)[1] ^= 1
    assert deltawire.diff(old, new).num_changed == 2
    assert deltawire.diff(old, old).num_changed == 0


def test_a_delta_for_weights_with_ties_that_it_does_not_touch():
    embed, norm = np.arange(8, dtype=np.float32), np.zeros(3, np.float32)
    old = {"embed": embed, "head": embed, "norm": norm}
    delta = Delta.from_bytes(deltawire.diff(old, old | {"norm": norm + 1}, tied={"head": "embed"}).to_bytes())
    assert delta.tied == {}
    deltawire.apply(delta, old)
    assert old["norm"].tolist() == [1, 1, 1]
    embed[0] += 1
    with pytest.raises(BaseMismatch):
        deltawire.apply(delta, {"embed": embed, "head": embed, "norm": norm * 0})


def test_tied_names_travel_once_and_arrive_twice():
    rng = np.random.default_rng(4)
    old = model(rng)
    old["head"] = old["embed"].copy()
    new = stepped({name: array for name, array in old.items() if name != "head"}, rng)
    new["head"] = new["embed"].copy()
    delta = Delta.from_bytes(deltawire.diff(old, new, tied={"head": "embed"}).to_bytes())
    assert [entry.name for entry in delta.entries].count("head") == 0
    assert delta.tied == {"head": "embed"}
    deltawire.apply(delta, old)
    assert same_bits(old, new)


def test_no_change_is_under_a_kilobyte_for_any_model():
    weights = {f"model.layers.{i}.self_attn.q_proj.weight": np.zeros((4, 4), np.uint16) for i in range(5000)}
    weights["model.embed_tokens.weight"] = np.zeros((4, 4), np.uint16)
    delta = deltawire.diff(weights, weights, tied={"lm_head.weight": "model.embed_tokens.weight"}, run="x" * 64)
    assert len(delta.to_bytes()) < 1000
    assert deltawire.apply(delta, weights) == delta.digest


def test_header_stays_under_300_bytes_a_tensor():
    rng = np.random.default_rng(5)
    projections = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.127.down_proj"]
    names = [f"model.language_model.layers.{i}.{part}.weight" for i in range(20, 48) for part in projections]
    old = {name: rng.integers(0, 1 << 16, (1024, 32), np.uint16) for name in names}
    new = {name: nudged(array, rng) for name, array in old.items()}
    for encoding in ("context", "gap", "dense"):
        delta = deltawire.diff(old, new, encoding=encoding, dtype="BF16")
        assert (len(delta.to_bytes()) - delta.num_bytes) / len(names) < 300


@given(data=st.data(), dtype=dtypes, encoding=st.sampled_from(["coo", "gap", "context", "dense", "auto"]))
def test_any_box_of_any_tensor(data, dtype, encoding):
    """One box, encoded alone, sent, and decoded into the whole."""
    full = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in full)
    shape = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(full, offset, strict=True))
    box = Box(full, offset, shape)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = rng.integers(0, 1 << 8 * dtype.itemsize, full, dtype.unsigned)
    new = old.copy()
    inside = new[box.slices]
    inside[rng.random(shape) < 0.3] += 1
    shard = Tensor(dtype, shape, old[box.slices].copy().reshape(-1))
    entry, gain = encode_box(
        "w", shard.dtype, shard.bits, new[box.slices].copy().reshape(-1), box, allowed_encodings(encoding)
    )
    before, after = (deltawire.digest({"w": side}, dtype=dtype.name) for side in (old, new))
    assert before + gain == after
    if entry is None:
        assert (old == new).all()
        return
    info = DeltaInfo("", 1, 0, before, after, entry.num_changed, old.size, {})
    delta = Delta.from_bytes(Delta(info, [entry]).to_bytes())
    weights = {"w": old.copy()}
    assert deltawire.apply(delta, weights, dtype=dtype.name) == after
    assert weights["w"].tobytes() == new.tobytes()


def test_shards_encoded_alone_make_one_delta():
    """Every shard is diffed where it lies; digests and patches add up to those of the whole."""
    rng = np.random.default_rng(6)
    old = {"w": rng.standard_normal((31, 40)).astype(ml_dtypes.bfloat16)}
    new = stepped(old, rng, density=0.3)
    whole = deltawire.diff(old, new)
    for cuts in ([Box((31, 40), (0, 0), (10, 40)), Box((31, 40), (10, 0), (21, 40))],
                 [Box((31, 40), (0, 0), (31, 7)), Box((31, 40), (0, 7), (31, 33))]):  # fmt: skip
        entries, gain = [], Digest()
        for box in cuts:
            shard, after = (view("w", np.ascontiguousarray(side["w"][box.slices])) for side in (old, new))
            for encoding in ("context", "gap", "coo", "dense"):
                entry, one_gain = encode_box("w", shard.dtype, shard.bits, after.bits, box, [encoding])
            entries.append(entry)
            gain += one_gain
        assert whole.base_digest + gain == whole.digest
        info = DeltaInfo("", 1, 0, whole.base_digest, whole.digest, whole.num_changed, whole.num_elements, {})
        weights = {"w": old["w"].copy()}
        deltawire.apply(Delta(info, entries), weights)
        assert same_bits(weights, new)


def test_boxes_of_one_tensor_are_saved_in_files_of_their_own(tmp_path):
    old = {name: np.zeros((4, 4), np.float16) for name in "vw"}
    new = {name: array + 1 for name, array in old.items()}
    whole, entries = deltawire.diff(old, new), []
    for rows in (0, 2):
        box = Box((4, 4), (rows, 0), (2, 4))
        for name in old:
            before, after = (view(name, side[name][box.slices]) for side in (old, new))
            entries.append(encode_box(name, before.dtype, before.bits, after.bits, box, ["coo"])[0])
    delta = Delta(whole.info, entries)
    assert len(delta.save(tmp_path / "d.safetensors")) == 2
    deltawire.apply(Delta.load(tmp_path / "d.safetensors"), old)
    assert same_bits(old, new)
    with pytest.raises(ValueError, match=r"several boxes of a tensor, as sharded trainers publish: use save\(\)"):
        delta.to_bytes()


@pytest.mark.parametrize("encoding", ["gap", "coo", "dense", "mirrorless"])
def test_a_reader_of_a_shard_takes_only_its_part(encoding):
    """Tensor-parallel readers: each has a slice of the old weights and no more."""
    rng = np.random.default_rng(11)
    full = (40, 60)
    old = {"w": rng.standard_normal(full).astype(ml_dtypes.bfloat16), "v": np.arange(5)}
    new = {"w": nudged(nudged(old["w"], rng, 0.2), rng, 0.1), "v": np.arange(5)}
    delta = Delta.from_bytes(deltawire.diff(old, new, encoding=encoding).to_bytes())
    for box in (Box(full, (0, 20), (40, 20)), Box(full, (10, 0), (30, 60)), Box(full, (3, 5), (1, 1)), Box.whole(full)):
        shard = {"w": old["w"][box.slices].copy()}
        patches = list(delta.patches(shard, boxes={"w": box}))
        for patch in patches:
            local, inside = box.from_tensor(patch.positions)
            assert inside.all()
            shard["w"].reshape(-1).view(np.uint16)[local] = patch.bits
        assert shard["w"].tobytes() == np.ascontiguousarray(new["w"][box.slices]).tobytes()
    nothing = {"w": np.empty((0, 60), ml_dtypes.bfloat16)}
    assert list(delta.patches(nothing, boxes={"w": Box(full, (0, 0), (0, 60))})) == []


def test_a_shard_cannot_read_context():
    rng = np.random.default_rng(12)
    old = {"w": rng.standard_normal((40, 60)).astype(np.float16)}
    delta = deltawire.diff(old, {"w": nudged(old["w"], rng)}, encoding="context")
    box = Box((40, 60), (0, 0), (20, 60))
    with pytest.raises(ValueError, match="mirrorless"):
        list(delta.patches({"w": old["w"][:20].copy()}, boxes={"w": box}))
    with pytest.raises(ShapeMismatch, match=r"of shape \[60, 40\]"):
        list(delta.patches(old, boxes={"w": Box.whole((60, 40))}))
    with pytest.raises(ShapeMismatch, match=r"is F16 \[40, 60\], expected F16 \[20, 60\]"):
        list(delta.patches(old, boxes={"w": box}))
    with pytest.raises(UnknownParameter, match="the delta changes w, which the weights do not have"):
        list(delta.patches({"v": old["w"]}, boxes={"w": box}))
    with pytest.raises(TypeError, match=r"expected weights by name .* got list"):
        list(delta.patches([old["w"]]))


@pytest.mark.parametrize(
    ("stated", "error", "said"),
    [
        ({"version": 1.5}, TypeError, r"a version must be a whole number, not 1.5 \(float\)"),
        ({"version": True}, TypeError, "not True"),
        ({"version": -1}, ValueError, "from 0 to 9999999999999999999, not -1"),
        ({"version": 10**19}, ValueError, "from 0 to"),
        ({"run": 5}, TypeError, "a run's id must be a string, not int"),
        ({"run": "\ud800"}, ValueError, "not valid UTF-8"),
    ],
)
def test_what_no_reader_would_accept_is_not_written(stated, error, said, tmp_path):
    weights = {"w": np.zeros(4, np.float16)}
    with pytest.raises(error, match=said):
        deltawire.diff(weights, weights, **stated)
    with pytest.raises(error, match=said):
        deltawire.save_anchor(weights, tmp_path / "c.safetensors", **stated)
    assert list(tmp_path.iterdir()) == []


def test_diff_of_different_models_is_refused():
    a, b = np.zeros(4, np.uint16), np.zeros((2, 2), np.uint16)
    with pytest.raises(UnknownParameter, match="b is not in the new weights"):
        deltawire.diff({"a": a, "b": a}, {"a": a})
    with pytest.raises(UnknownParameter, match="c is not in the old weights"):
        deltawire.diff({"a": a}, {"a": a, "c": a})
    with pytest.raises(ShapeMismatch, match=r"U16 \[4\] in the old weights and U16 \[2, 2\]"):
        deltawire.diff({"a": a}, {"a": b})
    with pytest.raises(ShapeMismatch, match="I16"):
        deltawire.diff({"a": a}, {"a": a.view(np.int16)})


def test_wrong_arguments():
    a = np.zeros(4, np.uint16)
    with pytest.raises(TypeError, match="expected a numpy array or a torch tensor"):
        deltawire.digest({"a": [1, 2]})
    with pytest.raises(ValueError, match="dtype F32 has 4 bytes"):
        deltawire.digest({"a": a}, dtype="F32")
    with pytest.raises(ValueError, match="is not larger than"):
        deltawire.diff({"a": a}, {"a": a}, version=3, base_version=3)
    with pytest.raises(ValueError, match="are reserved"):
        deltawire.diff({"deltawire.x": a}, {"deltawire.x": a})
    with pytest.raises(ValueError, match="not among the weights"):
        deltawire.diff({"a": a}, {"a": a}, tied={"b": "c"})
    with pytest.raises(ValueError, match="threads must be at least 1"):
        deltawire.digest({"a": a}, threads=0)


def test_apply_refuses_what_it_cannot_change_in_place():
    old, new = np.zeros((4, 4), np.uint16), np.ones((4, 4), np.uint16)
    delta = deltawire.diff({"w": old}, {"w": new})
    frozen = old.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        deltawire.apply(delta, {"w": frozen})
    with pytest.raises(ValueError, match="not contiguous"):
        deltawire.apply(delta, {"w": np.zeros((4, 8), np.uint16)[:, ::2]})


def test_known_base_digest_saves_the_scan():
    rng = np.random.default_rng(7)
    old = model(rng)
    new = stepped(old, rng)
    delta = deltawire.diff(old, new)
    with pytest.raises(BaseMismatch):
        deltawire.apply(delta, old, base_digest=Digest())
    assert deltawire.apply(delta, old, base_digest=delta.base_digest) == delta.digest
    assert same_bits(old, new)


def test_progress_names_every_tensor():
    rng = np.random.default_rng(8)
    old = model(rng)
    seen = {}
    deltawire.diff(old, stepped(old, rng), progress=seen.__setitem__)
    assert seen == {name: array.size for name, array in old.items()}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_by_name(dtype):
    kind = DTYPES[dtype].unsigned
    old = {"w": np.zeros(5, kind)}
    new = {"w": np.array([0, 1, 0, 0, 1], kind)}
    delta = Delta.from_bytes(deltawire.diff(old, new, dtype=dtype).to_bytes())
    deltawire.apply(delta, old, dtype=dtype)
    assert old["w"].tolist() == new["w"].tolist()
