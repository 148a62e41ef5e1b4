"""The JSON documents of a run: what makes a version exist, and the other ways that lead to it.

    run.json                                    the run's id
    manifests/00000042.json                     version 42: it exists when this does
    manifests/00000042.from-00000038.json       another way to it: a delta over several versions
    manifests/00000042.anchor.json              another way to it: all weights

Each is written once and never changed. Its first member is the SHA-256 of all bytes behind it, so that a bit that
flips on the way is noticed; a signature, where there is one, stands before that and covers all bytes behind itself. So
both can be checked without agreeing on a canonical form. See docs/format.md.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from deltawire.chain import Link
from deltawire.container import no_duplicates
from deltawire.errors import CorruptObject, FormatError, LimitExceeded, SignatureMismatch, UnsupportedFormat
from deltawire.keys import MOST_VERSION, is_file_name, read_object_key
from deltawire.names import check_ties, is_text
from deltawire.plain import plain_metadata, plain_step
from deltawire.state import Digest

DOCUMENT_VERSION = 1
MOST_BYTES = 16_000_000
MOST_OBJECTS = 10_000
MOST_RUN_CHARACTERS = 256

# The year 9999: what clocks and calendars can still show.
_LATEST = 253_402_300_799

_SIGNATURE = re.compile(rb'\{"signature":"([0-9a-f]{128})",')
_CHECKSUM = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that a way needs: where it is, and what it must be."""

    key: str
    num_bytes: int
    sha256: str
    file: str
    """The name of the file in a checkpoint folder, or of the part of a delta."""


@dataclass(frozen=True, slots=True)
class Way:
    """How to get to a version: from a base by a delta, or from nothing by an anchor."""

    version: int
    base: int | None
    digest: Digest
    base_digest: Digest | None
    objects: tuple[StoredObject, ...]
    num_changed: int
    encodings: Mapping[str, int] = field(hash=False)
    """How many patches have which encoding."""

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.objects)

    @property
    def beside(self) -> tuple[StoredObject, ...]:
        """The files of an anchor that are not weights: configuration, tokenizer and the like."""
        weights = (".safetensors", ".safetensors.index.json")
        return tuple(each for each in self.objects if self.base is None and not each.file.endswith(weights))

    @property
    def link(self) -> Link:
        return Link(self.version, self.base, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version: its digest, the way to it from the version before, and the best way to that from nothing."""

    run: str
    version: int
    way: Way
    path: tuple[Way, ...]
    """The cheapest ways from an anchor to the base of `way` that were known when this was written."""
    num_elements: int
    tied: Mapping[str, str]
    """Names that share the weights of others, and so are not published themselves."""
    step: int | None
    metadata: Mapping[str, Any]
    writer: str
    created: float

    @property
    def digest(self) -> Digest:
        return self.way.digest

    def check_tensors(self, own: Collection[str], known: Collection[str]) -> None:
        """Refuse ties that contradict the tensors. `own` are in an anchor or a delta, with weights of their own.

        `known` are all that there are, tied names perhaps among them.
        """
        for name, to in self.tied.items():
            if name in own or to not in known:
                what = f"{name!r} has weights of its own" if name in own else f"there is no {to!r}"
                raise CorruptObject(
                    f"version {self.version} says that {name!r} is tied to {to!r}, but {what}",
                    tensor=name, version=self.version,
                )  # fmt: skip


def manifest_bytes(manifest: Manifest, sign: Sign | None = None) -> bytes:
    data = _document(
        "version",
        {
            "run": manifest.run,
            "version": manifest.version,
            "step": manifest.step,
            "digest": str(manifest.digest),
            "total": manifest.num_elements,
            "tied": dict(manifest.tied),
            "writer": manifest.writer,
            "created": manifest.created,
            "metadata": dict(manifest.metadata),
            "way": _way_fields(manifest.way),
            "path": [_way_fields(way) for way in manifest.path],
        },
        sign,
    )
    return _readable(data, read_manifest)


def way_bytes(run: str, way: Way, writer: str, created: float, sign: Sign | None = None) -> bytes:
    data = _document("way", {"run": run, "writer": writer, "created": created, "way": _way_fields(way)}, sign)
    return _readable(data, read_way)


def run_bytes(run: str, writer: str, created: float, sign: Sign | None = None) -> bytes:
    return _readable(_document("run", {"run": run, "writer": writer, "created": created}, sign), read_run)


def _readable(data: bytes, read: Callable[[bytes], object]) -> bytes:
    """A document, once it has passed what every reader will ask of it."""
    try:
        read(data)
    except FormatError as error:
        raise ValueError(f"this cannot be written, since no reader would take it: {error.message}") from None
    return data


def read_manifest(data: bytes, verify: Verify | None = None) -> Manifest:
    fields = _read(data, "version", verify)
    with _Reading("a manifest"):
        way = _read_way(fields["way"])
        manifest = Manifest(
            run=_run_id(fields["run"]),
            version=_count(fields["version"]),
            way=way,
            path=tuple(map(_read_way, _typed(fields["path"], list))),
            num_elements=_count(fields["total"]),
            tied=_typed(fields["tied"], dict),
            step=plain_step(fields["step"]),
            metadata=plain_metadata(_typed(fields["metadata"], dict)),
            writer=_text(fields["writer"]),
            created=_time(fields["created"]),
        )
        check_ties(manifest.tied)
        if manifest.version != way.version or str(way.digest) != fields["digest"]:
            raise CorruptObject("a manifest's way does not lead to its version", version=manifest.version)
    return manifest


def read_way(data: bytes, verify: Verify | None = None) -> tuple[str, Way]:
    """The run and the way that a document is about."""
    fields = _read(data, "way", verify)
    with _Reading("a way"):
        return _run_id(fields["run"]), _read_way(fields["way"])


def read_run(data: bytes, verify: Verify | None = None) -> str:
    """The run's id."""
    fields = _read(data, "run", verify)
    with _Reading("run.json"):
        return _run_id(fields["run"])


def _document(kind: str, fields: Mapping[str, Any], sign: Sign | None) -> bytes:
    body = json.dumps({"format": DOCUMENT_VERSION, "kind": kind, **fields}, separators=(",", ":")).encode()
    body = b'{"sha256":"' + sha256(body).hexdigest().encode() + b'",' + body[1:]
    if sign is None:
        return body
    return b'{"signature":"' + sign(body).hex().encode() + b'",' + body[1:]


def _read(data: bytes, kind: str, verify: Verify | None) -> dict[str, Any]:
    if len(data) > MOST_BYTES:
        raise LimitExceeded(f"a document of {len(data)} bytes is larger than {MOST_BYTES}")
    signature = _SIGNATURE.match(data)
    if signature is not None:
        data = b"{" + data[signature.end() :]
    _check_sum(data)
    if verify is not None:
        if signature is None:
            raise SignatureMismatch("this is not signed, and a public key was given: nothing unsigned is taken")
        if not verify(bytes.fromhex(signature[1].decode()), data):
            raise SignatureMismatch("this is not signed by the key that was given")
    with _Reading("a document"):
        parsed = json.loads(data, object_pairs_hook=no_duplicates, parse_constant=_no_number)
        fields: dict[str, Any] = _typed(parsed, dict)
        if fields["format"] != DOCUMENT_VERSION:
            raise UnsupportedFormat(
                f"this document has format {fields['format']!r}, this release reads {DOCUMENT_VERSION}: "
                "upgrade deltawire",
                actual=fields["format"],
            )
        if fields["kind"] != kind:
            raise CorruptObject(f"this document is about a {fields['kind']}, not a {kind}")
    return fields


def _check_sum(data: bytes) -> None:
    stated = _CHECKSUM.match(data)
    if stated is None:
        raise CorruptObject("a document does not start with its SHA-256")
    actual = sha256(b"{" + data[stated.end() :]).hexdigest()
    if stated[1].decode() != actual:
        raise CorruptObject(
            "a document is not what its SHA-256 says: it is damaged", expected=stated[1].decode(), actual=actual
        )


class _Reading:
    """Whatever a malformed document makes Python say, it becomes CorruptObject."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)):
            raise CorruptObject(f"{self.what} is malformed: {type(error).__name__} {error}") from None


def _way_fields(way: Way) -> dict[str, Any]:
    return {
        "version": way.version,
        "base": way.base,
        "digest": str(way.digest),
        "base_digest": None if way.base_digest is None else str(way.base_digest),
        "changed": way.num_changed,
        "encodings": dict(way.encodings),
        "objects": [
            {"key": each.key, "bytes": each.num_bytes, "sha256": each.sha256, "file": each.file} for each in way.objects
        ],
    }


def _read_way(fields: Mapping[str, Any]) -> Way:
    base = None if fields["base"] is None else _count(fields["base"])
    version = _count(fields["version"])
    if version > MOST_VERSION or (base is not None and base >= version):
        raise CorruptObject(f"no way leads from version {base} to version {version}")
    way = Way(
        version=version,
        base=base,
        digest=Digest.parse(_typed(fields["digest"], str)),
        base_digest=None if base is None else Digest.parse(_typed(fields["base_digest"], str)),
        objects=tuple(map(_read_object, _typed(fields["objects"], list))),
        num_changed=_count(fields["changed"]),
        encodings={_text(name): _count(count) for name, count in fields["encodings"].items()},
    )
    if not way.objects or len({each.file for each in way.objects}) != len(way.objects):
        raise CorruptObject(f"the way to version {version} has no objects, or two of one name")
    if len(way.objects) > MOST_OBJECTS:
        raise LimitExceeded(f"the way to version {version} has {len(way.objects)} objects, more than {MOST_OBJECTS}")
    return way


def _read_object(fields: Mapping[str, Any]) -> StoredObject:
    key, file, content = (_typed(fields[name], str) for name in ("key", "file", "sha256"))
    # These become paths, in the store and on a disk.
    if read_object_key(key) is None or not is_file_name(file) or not re.fullmatch("[0-9a-f]{64}", content):
        raise CorruptObject(f"an object has an impossible key, file name or hash: {key[:80]!r}, {file[:80]!r}")
    return StoredObject(key, _count(fields["bytes"]), content, file)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: Any) -> str:
    text: str = _typed(value, str)
    if not is_text(text):
        raise ValueError(f"{text[:80]!r} cannot be written as UTF-8")
    return text


def _run_id(value: Any) -> str:
    text = _text(value)
    if not 1 <= len(text) <= MOST_RUN_CHARACTERS or _CONTROL.search(text):
        raise ValueError(
            f"a run's id has 1 to {MOST_RUN_CHARACTERS} characters and no control characters, unlike {text[:80]!r}"
        )
    return text


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _LATEST:
        raise ValueError(f"{value!r} is not a time in seconds since 1970")
    return float(value)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
