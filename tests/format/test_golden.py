"""Files that every release must read, and a reader that knows only docs/format.md."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltawire
from deltawire import Checkpoint, Delta
from deltawire.codec import decode
from deltawire.codec.encoding import Encoded
from deltawire.workers import SERIAL
from support import second_reader
from support.free_writer import write_payload, write_tile
from support.patterns import dtypes, examples, pairs

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("auto", "context", "gap", "coo", "dense", "shards")


def as_second(checkpoint):
    weights = {name: checkpoint[name].bits for name in checkpoint}
    return weights, {name: checkpoint.spec(name) for name in checkpoint}


@pytest.mark.parametrize("name", NAMES)
def test_golden_deltas_lead_to_the_golden_weights(name):
    old, new = Checkpoint(GOLDEN / "old.safetensors"), Checkpoint(GOLDEN / "new.safetensors")
    delta = Delta.load(GOLDEN / f"{name}.safetensors")
    weights = dict(old)
    rebuilt = {tensor: value.bits.copy().reshape(value.shape) for tensor, value in weights.items()}
    specs = {tensor: value.dtype.name for tensor, value in weights.items()}
    deltawire.apply(delta, rebuilt, dtype=specs)
    assert all(rebuilt[tensor].tobytes() == new[tensor].bits.tobytes() for tensor in new)
    assert (delta.run, delta.base_version, delta.version) == ("golden", 41, 42)
    assert delta.tied == {"lm_head.weight": "recorded"}
    assert str(delta.digest) == new.field("digest") == "6d287dcd15793b65f07c8e0855cfd6d5"


@pytest.mark.parametrize("name", NAMES)
def test_the_second_reader_agrees(name):
    parts = sorted(GOLDEN.glob(f"{name}*.safetensors"))
    delta = second_reader.read_delta([part.read_bytes() for part in parts])
    weights, specs = as_second(Checkpoint(GOLDEN / "old.safetensors"))
    expected, _ = as_second(Checkpoint(GOLDEN / "new.safetensors"))
    rebuilt = second_reader.apply(delta, weights, specs)
    assert sorted(rebuilt) == sorted(expected)
    assert all(rebuilt[tensor].tobytes() == expected[tensor].tobytes() for tensor in expected)


@examples(30)
@given(data=st.data(), dtype=dtypes, encoding=st.sampled_from(["context", "gap", "coo", "dense", "auto"]))
def test_the_second_reader_agrees_on_anything(data, dtype, encoding):
    old, new = data.draw(pairs(dtype, 300))
    written = deltawire.diff({"w": old}, {"w": new}, encoding=encoding, dtype=dtype.name).to_bytes()
    specs = {"w": (dtype.name, old.shape)}
    rebuilt = second_reader.apply(second_reader.read_delta([written]), {"w": old}, specs)
    assert rebuilt["w"].tobytes() == new.tobytes()


@examples(100)
@given(data=st.data(), dtype=dtypes, encoding=st.sampled_from(["context", "gap"]), seed=st.integers(0, 2**32))
def test_both_readers_take_whatever_the_page_allows(data, dtype, encoding, seed):
    """Groups inverted or not, any parameter, any first exponent, tiles of any size."""
    old, new = data.draw(pairs(dtype, 300))
    where = np.flatnonzero(old != new)
    if not len(where):
        return
    payload = write_payload(old, new, dtype.name, encoding == "context", Random(seed))
    shape, arrays = (len(old),), {encoding: payload}
    patch = second_reader.SecondPatch("w", encoding, dtype.name, shape, (0,), shape, len(where), arrays)
    ours = decode(Encoded(encoding, len(where), arrays), old, len(old), dtype, SERIAL)
    for positions, bits in (ours, second_reader.decode(patch, old)):
        assert positions.tolist() == where.tolist()
        assert bits.tobytes() == new[where].tobytes()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda header: header["__metadata__"].update({"deltawire.total": "1"}), "more changes than elements"),
        (lambda header: header["w.gap"].update(shape=[*header["w.gap"]["shape"], 1]), "another shape"),
    ],
)
def test_the_second_reader_refuses_headers_that_the_page_forbids(change, match):
    old = np.zeros(9, np.uint16)
    data = deltawire.diff({"w": old}, {"w": old + np.uint16(1)}, encoding="gap").to_bytes()
    body = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:body])
    change(header)
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=match):
        second_reader.read_delta([len(text).to_bytes(8, "little") + text + data[body:]])


def test_the_second_reader_refuses_tiles_that_the_page_forbids():
    old = np.zeros(9, np.uint8)
    stream = bytearray(write_tile(old, old + np.uint8(1), "U8", True, Random(0)))
    stream[0] |= 1
    with pytest.raises(ValueError, match="beyond the mask"):
        second_reader.decode_tile(bytes(stream), old, "U8", True)
    with pytest.raises(ValueError, match="no changes"):
        second_reader.decode_tile(bytes(2), old, "U8", False)


@pytest.mark.process
def test_the_encoder_still_writes_the_same_bytes(tmp_path):
    """The stream is pinned; a deliberate change of the encoder's choices needs new files beside the old ones."""
    subprocess.run([sys.executable, GOLDEN / "make.py", tmp_path], check=True)
    for file in GOLDEN.glob("*.safetensors"):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_golden_covers_every_encoding_and_several_tiles():
    entries = Delta.load(GOLDEN / "context.safetensors").entries
    tiles = next(entry for entry in entries if entry.name == "tiles")
    assert np.prod(tiles.box.shape) > 2 * (1 << int(tiles.arrays["context"][0]))
    used = {entry.encoding for name in NAMES for entry in Delta.load(GOLDEN / f"{name}.safetensors").entries}
    assert used == {"context", "gap", "coo", "dense"}
    assert any(not entry.box.is_whole for entry in Delta.load(GOLDEN / "shards.safetensors").entries)


RUN = GOLDEN / "run"
EXPECTED = json.loads((RUN / "expected.json").read_text())


@pytest.mark.parametrize("version", range(6))
def test_the_golden_run(version, tmp_path):
    with deltawire.Replica(
        RUN / "run", tmp_path / "mirror", public_key=EXPECTED["public_key"], heartbeat_seconds=None
    ) as replica:
        assert replica.run.id == "golden"
        assert replica.run.manifest(version).step == 10 * version
        replica.pull(version)
        assert str(deltawire.digest(replica.target.weights())) == EXPECTED["digests"][version]
    assert (tmp_path / "mirror" / "config.json").read_text() == '{"model_type": "golden"}'
    assert {"00000004.from-00000000.json", "00000005.anchor.json"} <= {
        path.name for path in (RUN / "run" / "manifests").iterdir()
    }


@pytest.mark.parametrize("version", range(6))
def test_the_second_reader_agrees_on_the_golden_run(version):
    def get(key):
        return (RUN / "run" / key).read_bytes()

    public_key = bytes.fromhex(EXPECTED["public_key"])
    weights, specs = second_reader.read_version(get, version, public_key)
    assert second_reader.digest(weights, specs) == EXPECTED["digests"][version]
    for document in (RUN / "run" / "manifests").glob(f"{version:08}.*.json"):
        hop = second_reader.read_document(document.read_bytes(), "hop", public_key)["hop"]
        base = ({}, {}) if hop["base"] is None else second_reader.read_version(get, hop["base"], public_key)
        weights, specs = second_reader.follow_hop(get, "golden", hop, *base)
        assert second_reader.digest(weights, specs) == EXPECTED["digests"][version]


REFERENCE = GOLDEN / "reference"
FOLLOWED = json.loads((REFERENCE / "expected.json").read_text())
PLACE = "memory:golden-base"


def test_the_golden_reference_names_its_first_anchor_and_has_long_deltas():
    manifests = {path.name: json.loads(path.read_text()) for path in (REFERENCE / "run" / "manifests").iterdir()}
    assert manifests["00000000.json"]["hop"]["at"] == manifests["00000001.json"]["route"][0]["at"] == PLACE
    assert [each["base"] for each in manifests["00000007.json"]["route"]] == [None, 0]
    assert manifests["00000010.from-00000000.json"]["hop"]["base"] == 0
    assert not (REFERENCE / "run" / "anchors").exists()


@pytest.mark.parametrize("at_hand", [False, True])
@pytest.mark.parametrize("version", range(11))
def test_the_golden_reference(version, at_hand, tmp_path):
    store = deltawire.open_store(PLACE)
    store.delete([stat.key for stat in store.list()])
    if not at_hand:
        for file in (REFERENCE / "base").iterdir():
            store.put(file.name, file.read_bytes())
    base = REFERENCE / "base" if at_hand else None
    with deltawire.Replica(
        REFERENCE / "run", tmp_path / "mirror", base=base, public_key=FOLLOWED["public_key"], heartbeat_seconds=None
    ) as replica:
        assert replica.run.id == "golden-reference"
        replica.pull(version)
        assert str(deltawire.digest(replica.target.weights())) == FOLLOWED["digests"][version]
    assert (tmp_path / "mirror" / "config.json").read_text() == '{"model_type": "golden"}'


@pytest.mark.parametrize("version", range(11))
def test_the_second_reader_agrees_on_the_golden_reference(version):
    def get(key):
        is_base = key.startswith(PLACE)
        return (REFERENCE / (f"base{key.removeprefix(PLACE)}" if is_base else f"run/{key}")).read_bytes()

    public_key = bytes.fromhex(FOLLOWED["public_key"])
    weights, specs = second_reader.read_version(get, version, public_key)
    assert second_reader.digest(weights, specs) == FOLLOWED["digests"][version]
    for document in (REFERENCE / "run" / "manifests").glob(f"{version:08}.*.json"):
        hop = second_reader.read_document(document.read_bytes(), "hop", public_key)["hop"]
        base = second_reader.read_version(get, hop["base"], public_key)
        weights, specs = second_reader.follow_hop(get, "golden-reference", hop, *base)
        assert second_reader.digest(weights, specs) == FOLLOWED["digests"][version]
