"""The JSON documents of a run: the manifest that makes a version exist, and additional hops that lead to it.

Their keys are in `keys.py`. Each is written once and never changed. Its first member is the SHA-256 of all bytes after
it, so that a flipped bit is noticed; a signature, if there is one, precedes it and covers all bytes after itself. Both
can be checked without a canonical JSON encoding. See docs/format.md.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from deltawire.errors import CorruptObject, FormatError, LimitExceeded, SignatureMismatch, UnsupportedFormat
from deltawire.format.container import no_duplicates
from deltawire.run.keys import MOST_VERSION, is_file_name, read_object_key
from deltawire.run.plain import json_fields, plain_metadata, plain_step
from deltawire.run.planner import hop_text
from deltawire.tensors.digest import Digest
from deltawire.tensors.names import Ties, check_ties, is_text

DOCUMENT_VERSION = 1
MOST_BYTES = 16_000_000
MOST_OBJECTS = 10_000
MOST_RUN_CHARACTERS = 256
MOST_URL_CHARACTERS = 2048

# The end of the year 9999, the latest that datetime supports.
_LATEST = 253_402_300_799

_SIGNATURE = re.compile(rb'\{"signature":"([0-9a-f]{128})",')
_CHECKSUM = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a hop: its key, and its expected size and SHA-256."""

    key: str
    num_bytes: int
    sha256: str
    file: str
    """The name of the file in a checkpoint folder, or of a part of a delta."""


@dataclass(frozen=True, slots=True)
class StoredHop:
    """A hop as stored in a document, with its objects: a delta from `base`, or an anchor if `base` is None."""

    version: int
    base: int | None
    digest: Digest
    base_digest: Digest | None
    objects: tuple[StoredObject, ...]
    num_changed: int
    encodings: Mapping[str, int] = field(hash=False)
    """The number of patches per encoding."""
    at: str | None = None
    """Where the objects of an anchor are, if not in the run's own store: a URL. Their keys are their names there."""

    @property
    def kind(self) -> str:
        return "anchor" if self.base is None else "delta"

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.objects)

    @property
    def extra_files(self) -> tuple[StoredObject, ...]:
        """The files of an anchor that are not weights: configuration, tokenizer and the like."""
        weights = (".safetensors", ".safetensors.index.json")
        return tuple(each for each in self.objects if self.base is None and not each.file.endswith(weights))

    def __str__(self) -> str:
        return hop_text(self)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version: its digest, the hop to it from the version before, and the cheapest route to that from an anchor."""

    run: str
    version: int
    hop: StoredHop
    route: tuple[StoredHop, ...]
    """The cheapest route from an anchor to the base of `hop` at the time of writing."""
    num_elements: int
    tied: Ties
    """Names that share the weights of other names, and so are not published themselves."""
    step: int | None
    metadata: Mapping[str, Any]
    writer: str
    created: float

    @property
    def digest(self) -> Digest:
        return self.hop.digest

    def check_tensors(self, own: Collection[str], known: Collection[str]) -> None:
        """Reject ties that contradict the tensors: `own` have weights in an anchor or a delta, `known` all."""
        for name, to in self.tied.items():
            if name in own or to not in known:
                what = f"{name!r} has its own weights" if name in own else f"there is no {to!r}"
                problem = f"version {self.version} states that {name!r} is tied to {to!r}, but {what}"
                raise CorruptObject(problem, tensor=name, version=self.version)


def manifest_bytes(manifest: Manifest, sign: Sign | None = None) -> bytes:
    fields = json_fields(manifest, "run", "version", "step", "digest", "total", "tied", "writer", "created", "metadata")
    hops = {"hop": _hop_fields(manifest.hop), "route": [_hop_fields(hop) for hop in manifest.route]}
    return _document("version", {**fields, **hops}, sign, read_manifest)


def hop_bytes(run: str, hop: StoredHop, writer: str, created: float, sign: Sign | None = None) -> bytes:
    fields = {"run": run, "writer": writer, "created": created, "hop": _hop_fields(hop)}
    return _document("hop", fields, sign, read_hop)


def run_bytes(run: str, writer: str, created: float, sign: Sign | None = None) -> bytes:
    return _document("run", {"run": run, "writer": writer, "created": created}, sign, read_run)


def read_manifest(data: bytes, verify: Verify | None = None) -> Manifest:
    fields = _read(data, "version", verify)
    with _reading("a manifest"):
        hop = _read_hop(fields["hop"])
        manifest = Manifest(
            run=_run_id(fields["run"]),
            version=_count(fields["version"]),
            hop=hop,
            route=tuple(map(_read_hop, _typed(fields["route"], list))),
            num_elements=_count(fields["total"]),
            tied=_typed(fields["tied"], dict),
            step=plain_step(fields["step"]),
            metadata=plain_metadata(_typed(fields["metadata"], dict)),
            writer=_text(fields["writer"]),
            created=_time(fields["created"]),
        )
        check_ties(manifest.tied)
        if manifest.version != hop.version or str(hop.digest) != fields["digest"]:
            raise CorruptObject("a manifest's hop does not lead to its version", version=manifest.version)
    return manifest


def read_hop(data: bytes, verify: Verify | None = None) -> tuple[str, StoredHop]:
    """Read the document of a hop: the run's id and the hop."""
    fields = _read(data, "hop", verify)
    with _reading("a hop"):
        return _run_id(fields["run"]), _read_hop(fields["hop"])


def is_signed(data: bytes) -> bool:
    """Whether a document has a signature; with which key is not checked."""
    return _SIGNATURE.match(data) is not None


def read_run(data: bytes, verify: Verify | None = None) -> str:
    fields = _read(data, "run", verify)
    with _reading("run.json"):
        return _run_id(fields["run"])


def _document(kind: str, fields: Mapping[str, Any], sign: Sign | None, read: Callable[[bytes], object]) -> bytes:
    """The bytes of a document, after checking that readers will accept it."""
    data = json.dumps({"format": DOCUMENT_VERSION, "kind": kind, **fields}, separators=(",", ":")).encode()
    data = b'{"sha256":"' + sha256(data).hexdigest().encode() + b'",' + data[1:]
    if sign is not None:
        data = b'{"signature":"' + sign(data).hex().encode() + b'",' + data[1:]
    try:
        read(data)
    except FormatError as error:
        raise ValueError(f"this cannot be written, since no reader would accept it: {error.message}") from None
    return data


def _read(data: bytes, kind: str, verify: Verify | None) -> dict[str, Any]:
    if len(data) > MOST_BYTES:
        raise LimitExceeded(f"a document of {len(data)} bytes is larger than {MOST_BYTES}")
    signature = _SIGNATURE.match(data)
    if signature is not None:
        data = b"{" + data[signature.end() :]
    stated = _CHECKSUM.match(data)
    if stated is None:
        raise CorruptObject("a document does not start with its SHA-256")
    expected, actual = stated[1].decode(), sha256(b"{" + data[stated.end() :]).hexdigest()
    if expected != actual:
        raise CorruptObject("a document does not match its SHA-256: it is damaged", expected=expected, actual=actual)
    if verify is not None:
        if signature is None:
            raise SignatureMismatch("a document of the run is not signed, but with a public key all must be")
        if not verify(bytes.fromhex(signature[1].decode()), data):
            raise SignatureMismatch("a document of the run is not signed with the given key")
    with _reading("a document"):
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


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn the Python exceptions that a malformed document causes into CorruptObject."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptObject(f"{what} is malformed: {type(error).__name__} {error}") from None


def _hop_fields(hop: StoredHop) -> dict[str, Any]:
    fields = json_fields(hop, "version", "base", "digest", "base_digest", "changed", "encodings")
    place = {} if hop.at is None else {"at": hop.at}
    return place | {**fields, "objects": [json_fields(each, "key", "bytes", "sha256", "file") for each in hop.objects]}


def _read_hop(fields: Mapping[str, Any]) -> StoredHop:
    base = None if fields["base"] is None else _count(fields["base"])
    version = _count(fields["version"])
    if version > MOST_VERSION or (base is not None and base >= version):
        raise CorruptObject(f"no hop leads from version {base} to version {version}")
    at = None if fields.get("at") is None else _text(fields["at"])
    if at is not None and (base is not None or not 1 <= len(at) <= MOST_URL_CHARACTERS or _CONTROL.search(at)):
        raise CorruptObject(f"the hop to version {version} is not an anchor, or has an invalid URL: {at[:80]!r}")
    hop = StoredHop(
        version=version,
        base=base,
        at=at,
        digest=Digest.parse(_typed(fields["digest"], str)),
        base_digest=None if base is None else Digest.parse(_typed(fields["base_digest"], str)),
        objects=tuple(_read_object(each, at) for each in _typed(fields["objects"], list)),
        num_changed=_count(fields["changed"]),
        encodings={_text(name): _count(count) for name, count in fields["encodings"].items()},
    )
    if not hop.objects or len({each.file for each in hop.objects}) != len(hop.objects):
        raise CorruptObject(f"the hop to version {version} has no objects, or two with the same name")
    if len(hop.objects) > MOST_OBJECTS:
        raise LimitExceeded(f"the hop to version {version} has {len(hop.objects)} objects, more than {MOST_OBJECTS}")
    return hop


def _read_object(fields: Mapping[str, Any], at: str | None) -> StoredObject:
    key, file, content = (_typed(fields[name], str) for name in ("key", "file", "sha256"))
    # These become paths, in the store and on a disk.
    is_key = read_object_key(key) is not None if at is None else key == file
    if not is_key or not is_file_name(file) or not re.fullmatch("[0-9a-f]{64}", content):
        raise CorruptObject(f"an object has an invalid key, file name or hash: {key[:80]!r}, {file[:80]!r}")
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
