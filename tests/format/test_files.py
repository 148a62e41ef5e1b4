"""Deltas and checkpoints on disk: parts, shards, atomic outputs, small memory, and readers of other people."""

import json
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import deltawire
from deltawire import Checkpoint, Delta, save_anchor
from deltawire.errors import BaseMismatch, Conflict, CorruptObject, DigestMismatch, ObjectMissing
from deltawire.format.delta import diff_checkpoints
from deltawire.format.replay import apply_to_checkpoint, verify_delta
from deltawire.tensors.weights import Viewed, spec


def model(seed, scale=1.0):
    rng = np.random.default_rng(0)
    shapes = {"embed": (50, 16), "norm": (16,), "scale": (), "empty": (0, 16), **{f"w{i}": (32, 48) for i in range(6)}}
    weights = {
        name: np.asarray(rng.standard_normal(shape)).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    weights["counts"] = np.arange(7)
    if seed:
        rng = np.random.default_rng(seed)
        for array in weights.values():
            bits = array.reshape(-1).view(np.uint16)
            bits[rng.random(bits.shape) < 0.05 * scale] += 1
    return weights


def same(checkpoint, weights):
    return sorted(checkpoint) == sorted(weights) and all(
        checkpoint[name].bits.tobytes() == weights[name].tobytes() for name in weights
    )


@pytest.fixture
def folders(tmp_path):
    save_anchor(model(0), tmp_path / "old", run="r", version=4, max_shard_bytes=6000)
    save_anchor(model(1), tmp_path / "new.safetensors", run="r", version=5)
    (tmp_path / "old" / "config.json").write_text("{}")
    return tmp_path


def test_anchor_is_an_ordinary_checkpoint(folders):
    weights = model(0)
    index = json.loads((folders / "old" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
    for file in set(index["weight_map"].values()):
        for name, tensor in load_file(folders / "old" / file).items():
            assert tensor.view(torch.uint8).numpy().tobytes() == weights[name].tobytes() if tensor.dim() else True
    checkpoint = Checkpoint(folders / "old")
    assert same(checkpoint, weights)
    assert (checkpoint.version, checkpoint.field("run")) == (4, "r")
    assert checkpoint.field("digest") == str(deltawire.digest(weights))
    path = str(folders / "old")
    assert repr(checkpoint) == f"Checkpoint({path!r}, num_tensors={len(weights)}, version=4)"


def test_the_spec_of_a_tensor_is_read_from_the_header(folders, monkeypatch):
    checkpoint = Checkpoint(folders / "old")
    monkeypatch.setattr(Checkpoint, "__getitem__", None)
    for name in checkpoint:
        assert spec(checkpoint, name) == spec(Viewed(checkpoint), name) == checkpoint.spec(name)


def test_transformers_loads_an_anchor_as_it_is(tmp_path):
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for limit in (10_000_000, 8_000):
        folder = tmp_path / str(limit)
        save_anchor(
            source.state_dict(), folder, tied={"lm_head.weight": "model.embed_tokens.weight"}, max_shard_bytes=limit
        )
        config.save_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert len(list(folder.glob("*.safetensors"))) == (1 if limit > 10_000 else len(Checkpoint(folder).shards))
        for name, tensor in source.state_dict().items():
            assert torch.equal(tensor.view(torch.int16), loaded.state_dict()[name].view(torch.int16))
        assert Checkpoint(folder).tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_plain_safe_open_reads_a_delta(tmp_path):
    old, new = {"w": np.zeros(100, np.float32)}, {"w": np.zeros(100, np.float32)}
    new["w"][[3, 50]] = [1.5, -2]
    deltawire.diff(old, new, encoding="coo", run="r").save(tmp_path / "d.safetensors")
    with safe_open(tmp_path / "d.safetensors", "np") as file:
        assert file.get_tensor("w.indices").tolist() == [3, 50]
        assert file.get_tensor("w.values").tolist() == [1.5, -2]
        assert file.metadata()["w"] == "coo F32 100 2"
        assert file.metadata()["deltawire.run"] == "r"
    deltawire.diff(old, new, encoding="context").save(tmp_path / "d.safetensors")
    with safe_open(tmp_path / "d.safetensors", "pt") as file:
        assert file.get_tensor("w.context").dtype == torch.uint8


def test_a_delta_in_parts(tmp_path):
    delta = deltawire.diff(model(0), model(1), encoding="dense")
    paths = delta.save(tmp_path / "d.safetensors", max_file_bytes=5000)
    assert len(paths) > 2
    assert paths[0].name == f"d-00001-of-{len(paths):05}.safetensors"
    for name in ("d.safetensors", paths[1].name):
        weights = model(0)
        deltawire.apply(Delta.load(tmp_path / name), weights)
        assert deltawire.digest(weights) == delta.digest
    paths[1].rename(tmp_path / "elsewhere")
    with pytest.raises(CorruptObject, match="only parts"):
        Delta.load(tmp_path / "d.safetensors")


def test_parts_of_two_deltas_do_not_mix(tmp_path):
    first = deltawire.diff(model(0), model(1), encoding="dense").save(tmp_path / "a.safetensors", max_file_bytes=5000)
    other = deltawire.diff(model(0), model(2), encoding="dense").save(tmp_path / "b.safetensors", max_file_bytes=5000)
    assert len(first) == len(other)
    os.replace(other[0], first[0])
    with pytest.raises(CorruptObject, match="different deltas"):
        Delta.load(tmp_path / "a.safetensors")


def test_a_delta_takes_the_place_of_one_of_other_parts(tmp_path):
    path, sizes = tmp_path / "d.safetensors", (10**9, 5000, 20_000, 5000, 10**9)
    checkpoint = tmp_path / "d-00001-of-00009.safetensors"
    save_anchor(model(0), checkpoint)
    counts = set()
    for seed, size in enumerate(sizes, 1):
        delta = deltawire.diff(model(0), model(seed), encoding="dense")
        paths = delta.save(path, max_file_bytes=size)
        counts.add(len(paths))
        checkpoint.rename(tmp_path / "aside")
        assert Delta.load(path).digest == delta.digest
        assert set(tmp_path.glob("d*")) == set(paths)
        (tmp_path / "aside").rename(checkpoint)
    assert len(counts) == 3


def test_a_delta_that_was_loaded_is_saved_over_its_own_files(tmp_path):
    old = {name: np.zeros(500, np.float16) for name in "abcd"}
    new = {name: np.where(np.arange(500) < size, 1, 0).astype(np.float16) for name, size in zip(
        "abcd", (110, 100, 100, 300), strict=True)}  # fmt: skip
    path, delta = tmp_path / "d.safetensors", deltawire.diff(old, new, encoding="coo")
    first = delta.save(path, max_file_bytes=1300)
    # The second tensor moves from the first of three files to the second.
    assert Delta.load(path).save(path, max_file_bytes=1200) == first
    deltawire.apply(Delta.load(path), old)
    assert deltawire.digest(old) == delta.digest
    assert sorted(tmp_path.iterdir()) == first


def test_a_delta_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path, delta = tmp_path / "d.safetensors", deltawire.diff(model(0), model(1), encoding="dense")
    files = delta.save(path, max_file_bytes=5000)
    (tmp_path / "other").mkdir()
    deltawire.diff(model(0), model(2), encoding="dense").save(tmp_path / "other" / "d.safetensors")
    broken = Delta.load(tmp_path / "other" / "d.safetensors")
    broken.entries[-1].arrays.data["dense"] = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        broken.save(path, max_file_bytes=5000)
    assert sorted(each for each in tmp_path.iterdir() if each.is_file()) == files
    assert Delta.load(path).digest == delta.digest


def test_a_file_that_was_replaced_after_it_was_opened_is_not_read(tmp_path):
    path = tmp_path / "c.safetensors"
    save_anchor({"a": np.full(10, 1, np.float16), "b": np.full(10, 2, np.float16)}, path)
    opened = Checkpoint(path)
    bits = opened["b"].bits
    os.utime(path, ns=(0, 0))  # as an update in place leaves it
    assert np.array_equal(opened["b"].bits, bits)
    save_anchor({"a": np.full(20, 3, np.float16), "b": np.full(10, 4, np.float16)}, path)
    with pytest.raises(CorruptObject, match="was replaced by another file after it was opened: open it again"):
        opened["b"]
    assert np.array_equal(Checkpoint(path)["b"].bits.view(np.float16), np.full(10, 4, np.float16))


def test_what_was_opened_by_a_relative_path_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_anchor(model(0), "c.safetensors")
    delta = deltawire.diff(model(0), model(1))
    delta.save("d.safetensors")
    opened, loaded = Checkpoint("c.safetensors"), Delta.load("d.safetensors")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    weights = dict(opened)
    deltawire.apply(loaded, weights)
    assert deltawire.digest(weights) == delta.digest


@pytest.mark.parametrize("encoding", ["auto", "mirrorless", "coo", "dense"])
def test_diff_and_apply_between_checkpoints(folders, encoding):
    old, new = Checkpoint(folders / "old"), Checkpoint(folders / "new.safetensors")
    path = folders / "d.safetensors"
    delta = diff_checkpoints(old, new, path, encoding=encoding, run="r", version=5, base_version=4)
    in_memory = deltawire.diff(model(0), model(1), encoding=encoding, run="r", version=5, base_version=4)
    assert delta.info == in_memory.info
    assert path.read_bytes() != b""
    verify_delta(delta, old)
    for output in (folders / "rebuilt", folders / "rebuilt.safetensors"):
        apply_to_checkpoint(old, delta, output)
        rebuilt = Checkpoint(output)
        assert same(rebuilt, model(1))
        assert rebuilt.version == 5
        assert rebuilt.field("digest") == str(delta.digest)
    assert (folders / "rebuilt" / "config.json").read_text() == "{}"
    assert set(Checkpoint(folders / "rebuilt").shards) == set(old.shards)


@pytest.mark.parametrize("name", ["old.safetensors", "old.st"])
def test_a_single_file_with_a_delta_becomes_a_folder_that_others_load(name, tmp_path):
    save_anchor(model(0), tmp_path / "old.safetensors")
    (tmp_path / "old.safetensors").rename(tmp_path / name)
    apply_to_checkpoint(Checkpoint(tmp_path / name), deltawire.diff(model(0), model(1)), tmp_path / "new")
    assert list(Checkpoint(tmp_path / "new").shards) == ["model.safetensors"]
    assert same(Checkpoint(tmp_path / "new"), model(1))


def test_files_equal_bytes(tmp_path):
    delta = deltawire.diff(model(0), model(1))
    delta.save(tmp_path / "d.safetensors")
    assert (tmp_path / "d.safetensors").read_bytes() == delta.to_bytes()
    assert Delta.load(tmp_path / "d.safetensors").to_bytes() == delta.to_bytes()


def test_a_failed_apply_leaves_nothing_behind(folders):
    old, new = Checkpoint(folders / "old"), Checkpoint(folders / "new.safetensors")
    delta = diff_checkpoints(old, new, folders / "d.safetensors")
    before = sorted(path.name for path in folders.iterdir())
    for output in (folders / "x", folders / "x.safetensors"):
        with pytest.raises(BaseMismatch):
            apply_to_checkpoint(new, delta, output)
    assert sorted(path.name for path in folders.iterdir()) == before


def test_a_delta_against_other_weights_blames_the_base(folders):
    """A context stream decoded against other weights looks broken; the base is what is wrong."""
    old, new = Checkpoint(folders / "old"), Checkpoint(folders / "new.safetensors")
    delta = diff_checkpoints(old, new, folders / "d.safetensors", encoding="context")
    save_anchor({name: np.zeros_like(array) for name, array in model(0).items()}, folders / "zeros")
    with pytest.raises(BaseMismatch):
        verify_delta(delta, Checkpoint(folders / "zeros"))


def test_damage_on_disk_is_found(folders):
    old, new = Checkpoint(folders / "old"), Checkpoint(folders / "new.safetensors")
    path = folders / "d.safetensors"
    diff_checkpoints(old, new, path, encoding="dense")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatch):
        apply_to_checkpoint(old, Delta.load(path), folders / "x")
    assert not (folders / "x").exists()


def test_an_existing_folder_is_not_replaced(folders):
    with pytest.raises(Conflict, match="already exists"):
        save_anchor(model(0), folders / "old")


def test_a_delta_does_not_replace_what_is_no_delta(folders):
    old, new = Checkpoint(folders / "old"), Checkpoint(folders / "new.safetensors")
    delta = deltawire.diff(model(0), model(1), encoding="dense")
    (folders / "notes").write_text("mine")
    first = folders / "old" / min(old.shards)
    for path in (folders / "new.safetensors", first, folders / "notes"):
        before = path.read_bytes()
        with pytest.raises(Conflict, match="exists and is not a delta: choose another name"):
            diff_checkpoints(old, new, path)
        with pytest.raises(Conflict, match="exists and is not a delta"):
            delta.save(path)
        assert path.read_bytes() == before
    parts = len(delta.save(folders / "d.safetensors", max_file_bytes=5000))
    shard = folders / f"shards-00001-of-{parts:05}.safetensors"
    first.rename(shard)
    with pytest.raises(Conflict, match="shards-00001"):
        delta.save(folders / "shards.safetensors", max_file_bytes=5000)
    assert not list(folders.glob(".*"))


def test_outputs_keep_the_umask(tmp_path):
    deltawire.diff(model(0), model(1)).save(tmp_path / "d.safetensors")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "d.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
    save_anchor(model(0), tmp_path / "anchor")
    (tmp_path / "folder").mkdir()
    assert (tmp_path / "anchor").stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ObjectMissing, match="does not exist"):
        Checkpoint(tmp_path / "nothing")
    with pytest.raises(ObjectMissing, match="no safetensors file"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    files = ("../escape.safetensors", "\\u0000.safetensors", "\\ud800.safetensors")
    for text in ("{", "[]", "{}", '{"weight_map": {}}', *(f'{{"weight_map": {{"w": "{file}"}}}}' for file in files)):
        index.write_text(text)
        with pytest.raises(CorruptObject, match="weight_map"):
            Checkpoint(tmp_path)
    index.write_text('{"weight_map": {"w": "gone.safetensors"}}')
    with pytest.raises(ObjectMissing, match="gone"):
        Checkpoint(tmp_path)
    index.unlink()
    for name in ("a", "b"):
        save_anchor({"w": np.zeros(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ObjectMissing, match="2 safetensors files"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}')
    with pytest.raises(CorruptObject, match="in two files"):
        Checkpoint(tmp_path)
    save_anchor({"v": np.zeros(3)}, tmp_path / "b.safetensors")
    Checkpoint(tmp_path)
    for places in ({"w": "b", "v": "a"}, {"w": "a", "v": "b", "u": "a"}):
        index.write_text(json.dumps({"weight_map": {name: f"{file}.safetensors" for name, file in places.items()}}))
        with pytest.raises(CorruptObject, match="says that"):
            Checkpoint(tmp_path)
    save_anchor({"w": np.ones(3)}, tmp_path / "model.safetensors")
    for places in ({"w": "a", "v": "b"}, {"w": "model", "v": "b"}):
        index.write_text(json.dumps({"weight_map": {name: f"{file}.safetensors" for name, file in places.items()}}))
        with pytest.raises(CorruptObject, match="has both"):
            Checkpoint(tmp_path)
    index.write_text('{"weight_map": {"w": "model.safetensors"}}')
    assert list(Checkpoint(tmp_path)) == ["w"]


@pytest.mark.process
def test_memory_stays_near_the_largest_tensor(tmp_path):
    """Twelve tensors of 8 MB: diff and apply in a fresh process grow by far less than the model."""
    rng = np.random.default_rng(0)
    old = {f"w{i}": rng.integers(0, 1 << 16, 1 << 22, np.uint16) for i in range(12)}
    save_anchor(old, tmp_path / "old", dtype="BF16")
    for array in old.values():
        array[rng.random(array.size) < 0.5] += 1
    save_anchor(old, tmp_path / "new", dtype="BF16")
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import numpy as np
        import deltawire
        from deltawire import Checkpoint, Delta
        from deltawire.format.delta import diff_checkpoints
        from deltawire.format.replay import apply_to_checkpoint

        folder = Path(sys.argv[1])
        small = {"w": np.zeros(1000, np.uint16)}
        deltawire.apply(deltawire.diff(small, {"w": small["w"] + 1}, dtype="BF16"), small, dtype="BF16")
        def peak():
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = peak()
        old, new = Checkpoint(folder / "old"), Checkpoint(folder / "new")
        delta = diff_checkpoints(old, new, folder / "d.safetensors", encoding="dense", threads=1)
        apply_to_checkpoint(old, delta, folder / "rebuilt", threads=1)
        print(peak() - before)
    """)
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    model_bytes = 12 * (1 << 23)
    assert int(result.stdout) < model_bytes * 0.75
