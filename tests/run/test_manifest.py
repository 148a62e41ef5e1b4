"""The documents of a run: written and read back, signed, and refused where they are malformed."""

import json
from dataclasses import replace
from hashlib import sha256

import pytest

from deltawire.errors import CorruptObject, LimitExceeded, ObjectMissing, SignatureMismatch, UnsupportedFormat
from deltawire.run.keys import hop_key, manifest_key, read_document_key
from deltawire.run.manifest import (
    MOST_BYTES,
    MOST_OBJECTS,
    Manifest,
    StoredHop,
    StoredObject,
    hop_bytes,
    manifest_bytes,
    read_hop,
    read_manifest,
    read_run,
    run_bytes,
)
from deltawire.run.signing import generate_key, public_key_of, signer, verifier
from deltawire.tensors.digest import Digest
from support import second_reader
from support.chains import seal, unsealed

PART = StoredObject("deltas/00000002-from-00000001-ab12.safetensors", 10, "0" * 64, "part.safetensors")
WHOLE = StoredObject("anchors/00000000-ff/model.safetensors", 99, "1" * 64, "model.safetensors")
CONFIG = StoredObject("anchors/00000000-ff/config.json", 9, "2" * 64, "config.json")
DELTA = StoredHop(2, 1, Digest(1, 2), Digest(3, 4), (PART,), 5, {"gap": 1})
ANCHOR = StoredHop(0, None, Digest(5, 6), None, (WHOLE, CONFIG), 50, {"dense": 3})
MANIFEST = Manifest("run", 2, DELTA, (ANCHOR,), 50, {"head": "embed"}, 7, {"loss": 0.5, "note": "ü"}, "w", 1.5)


def test_documents_come_back():
    assert read_manifest(manifest_bytes(MANIFEST)) == MANIFEST
    assert read_hop(hop_bytes("run", ANCHOR, "w", 1.5)) == ("run", ANCHOR)
    assert read_run(run_bytes("run", "w", 1.5)) == "run"
    assert ANCHOR.extra_files == (CONFIG,)
    assert (DELTA.num_bytes, str(DELTA), str(ANCHOR)) == (10, "1 -> 2", "anchor 0")


def test_keys():
    assert manifest_key(42) == "manifests/00000042.json"
    assert hop_key(16, 12) == "manifests/00000016.from-00000012.json"
    assert hop_key(16, None) == "manifests/00000016.anchor.json"
    assert read_document_key(manifest_key(42)) == (42, None, True)
    assert read_document_key(hop_key(16, 12)) == (16, 12, False)
    assert read_document_key(hop_key(16, None)) == (16, None, False)
    assert read_document_key("manifests/notes.txt") is None


def test_signatures(tmp_path):
    public = generate_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    assert public_key_of(tmp_path / "key.pem") == public
    data, check = manifest_bytes(MANIFEST, signer(tmp_path / "key.pem")), verifier(public)
    assert read_manifest(data, check) == MANIFEST
    assert read_manifest(data) == MANIFEST  # a reader without a key takes signed documents too
    assert json.loads(data)["version"] == 2
    with pytest.raises(SignatureMismatch, match="not signed"):
        read_manifest(manifest_bytes(MANIFEST), check)
    for i in range(0, len(data), 7):
        damaged = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
        with pytest.raises((SignatureMismatch, CorruptObject)):
            read_manifest(damaged, check)
    with pytest.raises(SignatureMismatch, match="not signed with the given key"):
        read_manifest(data, verifier(generate_key(tmp_path / "other.pem")))
    (tmp_path / "public.txt").write_text(public + "\n")
    assert read_manifest(data, verifier(str(tmp_path / "public.txt"))) == MANIFEST


def test_keys_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        verifier("nonsense")
    with pytest.raises(ObjectMissing, match="keygen"):
        signer(tmp_path / "missing.pem")
    (tmp_path / "bad.pem").write_text("not a key")
    with pytest.raises(ValueError, match="not an ed25519 private key"):
        signer(tmp_path / "bad.pem")
    with pytest.raises(FileExistsError):
        generate_key(tmp_path / "bad.pem")


def with_sum(body):
    return b'{"sha256":"' + sha256(body).hexdigest().encode() + b'",' + body[1:]


def test_a_flipped_bit_is_noticed(tmp_path):
    generate_key(tmp_path / "key.pem")
    for data in (manifest_bytes(MANIFEST), manifest_bytes(MANIFEST, signer(tmp_path / "key.pem"))):
        signature = len(data) - len(manifest_bytes(MANIFEST))
        for i in range(signature, len(data)):
            with pytest.raises(CorruptObject):
                read_manifest(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])


def changed(*path_and_value):
    *path, value = path_and_value
    fields = unsealed(manifest_bytes(MANIFEST))
    at = fields
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return seal(fields)


NESTED = {}
for _ in range(33):
    NESTED = {"a": NESTED}

# Rules that only documents have, as docs/format.md states them.
AGREED = [
    ("run", ""),
    ("run", "x" * 257),
    ("run", "a\x1b[31m"),
    ("run", "\ud800"),
    ("created", -1),
    ("created", 253402300800),
    ("created", float("inf")),
    ("step", 1.5),
    ("step", True),
    ("step", 1 << 63),
    ("tied", []),
    ("tied", {"a": "a"}),
    ("tied", {"a": "b", "b": "a"}),
    ("tied", {"a": "b", "b": "c"}),
    ("tied", {"a": "__metadata__"}),
    ("tied", {"deltawire.x": "a"}),
    ("metadata", {"loss": float("nan")}),
    ("metadata", {"n": 1 << 63}),
    ("metadata", {"text": "\udfff"}),
    ("metadata", {"text": "x" * 1_000_000}),
    ("metadata", NESTED),
]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        seal({}),
        with_sum(b'{"format":1,"format":1}'),
        with_sum(b"[" * 100_000),
        json.dumps(unsealed(manifest_bytes(MANIFEST))).encode(),
        changed("kind", "hop"),
        changed("version", -1),
        changed("version", 3),
        changed("version", True),
        changed("version", "2"),
        changed("digest", "0" * 32),
        changed("total", 1 << 62),
        changed("step", "x"),
        changed("metadata", []),
        changed("tied", {"a": 1}),
        changed("route", {}),
        changed("hop", "base", 2),
        changed("hop", "digest", "xyz"),
        changed("hop", "objects", []),
        changed("hop", "objects", 0, "bytes", -1),
        changed("hop", "objects", 0, "sha256", "0"),
        changed("hop", "objects", 0, "key", "../../etc/passwd"),
        changed("hop", "objects", 0, "key", "deltas/../run.json"),
        changed("hop", "objects", 0, "key", "manifests/00000001.json"),
        changed("hop", "objects", 0, "file", "../x"),
        changed("hop", "objects", 0, "file", ".hidden"),
        changed("hop", "objects", 0, "file", "a/b"),
        changed("route", 0, "objects", 1, "file", "model.safetensors"),
        changed("created", "yesterday"),
        changed("hop", "objects", 0, "key", "deltas/x"),
        changed("hop", "objects", 0, "key", "deltas/00000002-from-00000001-ab 12.safetensors"),
        changed("hop", "objects", 0, "file", "a b"),
        changed("hop", "objects", 0, "file", "deltawire.json"),
        *(changed(*path_and_value) for path_and_value in AGREED),
    ],
)
def test_malformed_documents_are_corrupt(data):
    with pytest.raises(CorruptObject):
        read_manifest(data)


@pytest.mark.parametrize("path_and_value", AGREED)
def test_the_second_reader_refuses_the_same(path_and_value):
    second_reader.read_document(seal(unsealed(manifest_bytes(MANIFEST))), "version")
    with pytest.raises((ValueError, TypeError, RecursionError)):
        second_reader.read_document(changed(*path_and_value), "version")


def test_a_way_of_too_many_objects():
    part = unsealed(manifest_bytes(MANIFEST))["hop"]["objects"][0]
    most = [{**part, "file": f"part-{number}"} for number in range(MOST_OBJECTS + 1)]
    assert len(read_manifest(changed("hop", "objects", most[:-1])).hop.objects) == MOST_OBJECTS
    with pytest.raises(LimitExceeded):
        read_manifest(changed("hop", "objects", most))


@pytest.mark.parametrize("name", ["run", "step", "tied", "metadata", "version", "created"])
def test_what_a_reader_refuses_is_not_written(name):
    wrong = {"run": "", "step": True, "tied": {"a": "a"}, "metadata": {"a": 1 << 70}, "version": 3, "created": -1.0}
    with pytest.raises(ValueError, match="no reader would accept it"):
        manifest_bytes(replace(MANIFEST, **{name: wrong[name]}))


def test_newer_and_larger_documents():
    with pytest.raises(UnsupportedFormat, match="upgrade"):
        read_manifest(changed("format", 2))
    with pytest.raises(LimitExceeded):
        read_manifest(b" " * (MOST_BYTES + 1))
