"""The content half of the Hub double: xorbs, shards and reconstructions, as the Xet protocol defines them.

Everything that a client uploads is checked against its content, with the hashes of the protocol (keyed BLAKE3):

- a xorb parses to its last byte, each chunk unpacks to its stated size, and the Merkle root of the chunks is its name;
- a shard parses to its end; each xorb it lists was uploaded and has these chunks; each file's segments point into
  uploaded xorbs, have the stated sizes and range hashes, and their chunks hash to the file's name;
- the SHA-256 of a file, where a shard carries one (the bucket client sends none).

Not checked: where chunks are cut, and limits on xorb sizes.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import lz4.frame
from blake3 import blake3

CHUNK_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
RANGE_KEY = bytes.fromhex("7f1857d6ce56ed66127ff913e7a5c3f3a4cd26d5b5db49e64124987f28fb94c3")
FILE_KEY = bytes(32)
EMPTY_FILE = bytes(32)

CHUNK_HEADER = 8
ENTRY = 48
BOOKEND = b"\xff" * 32
WITH_RANGE_HASHES = 1 << 31
WITH_SHA256 = 1 << 30
MEAN_BRANCHES = 4


# Makes the URL for some bytes of a xorb, the last one included.
Signer = Callable[[str, int, int], str]


class Rejected(Exception):
    """An upload that is not what it says."""


def name_of(digest: bytes) -> str:
    """A hash as it stands in URLs: four little-endian numbers in hexadecimal."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))


def digest_of(name: str) -> bytes:
    return struct.pack("<4Q", *(int(name[at : at + 16], 16) for at in range(0, 64, 16)))


def keyed(key: bytes, data: bytes) -> bytes:
    return blake3(data, key=key).digest()


@dataclass(frozen=True)
class Chunk:
    digest: bytes
    start: int
    """Where it is in the serialized xorb, with its header."""
    end: int
    data: bytes

    @property
    def leaf(self) -> tuple[bytes, int]:
        return self.digest, len(self.data)


@dataclass(frozen=True)
class Xorb:
    raw: bytes
    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class Segment:
    xorb: str
    start: int
    end: int
    num_bytes: int


@dataclass(frozen=True)
class File:
    segments: Sequence[Segment]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


def merkle_root(nodes: list[tuple[bytes, int]]) -> bytes:
    while len(nodes) > 1:
        cuts, at = [0], 0
        while at < len(nodes):
            at += _group_length(nodes[at : at + 2 * MEAN_BRANCHES + 1])
            cuts.append(at)
        nodes = [_parent(nodes[start:end]) for start, end in pairwise(cuts)]
    return nodes[0][0]


def _group_length(nodes: list[tuple[bytes, int]]) -> int:
    """A group of siblings ends after a hash that is divisible by the mean number of branches, the first two aside."""
    for index, (digest, _) in enumerate(nodes[2:], start=2):
        if int.from_bytes(digest[24:], "little") % MEAN_BRANCHES == 0:
            return index + 1
    return len(nodes)


def _parent(nodes: list[tuple[bytes, int]]) -> tuple[bytes, int]:
    lines = "".join(f"{name_of(digest)} : {size}\n" for digest, size in nodes)
    return keyed(NODE_KEY, lines.encode()), sum(size for _, size in nodes)


def file_digest(nodes: list[tuple[bytes, int]]) -> bytes:
    return keyed(FILE_KEY, merkle_root(nodes)) if nodes else EMPTY_FILE


def parse_xorb(raw: bytes) -> Xorb:
    chunks, at = [], 0
    while at < len(raw):
        packed_bytes, scheme, num_bytes = _chunk_header(raw[at : at + CHUNK_HEADER])
        end = at + CHUNK_HEADER + packed_bytes
        data = _unpack(raw[at + CHUNK_HEADER : end], scheme)
        if end > len(raw) or len(data) != num_bytes:
            raise Rejected(f"a chunk of {num_bytes} bytes unpacks to {len(data)}")
        chunks.append(Chunk(keyed(CHUNK_KEY, data), at, end, data))
        at = end
    return Xorb(raw, chunks)


def _chunk_header(header: bytes) -> tuple[int, int, int]:
    if len(header) != CHUNK_HEADER or header[0] != 0:
        raise Rejected(f"not a chunk header: {header!r}")
    return int.from_bytes(header[1:4], "little"), header[4], int.from_bytes(header[5:8], "little")


def _unpack(packed: bytes, scheme: int) -> bytes:
    if scheme == 0:
        return packed
    if scheme not in (1, 2):
        raise Rejected(f"unknown compression {scheme}")
    data: bytes = lz4.frame.decompress(packed)
    return data if scheme == 1 else _ungroup(data)


def _ungroup(grouped: bytes) -> bytes:
    """Back from four groups, each with every fourth byte."""
    data, at = bytearray(len(grouped)), 0
    for lane in range(4):
        num = len(range(lane, len(grouped), 4))
        data[lane::4] = grouped[at : at + num]
        at += num
    return bytes(data)


class Cas:
    """What was uploaded, by its hash."""

    def __init__(self) -> None:
        self.xorbs: dict[str, Xorb] = {}
        self.shards: list[bytes] = []
        self.files: dict[str, File] = {name_of(EMPTY_FILE): File(())}

    def put_xorb(self, name: str, raw: bytes) -> bool:
        xorb = parse_xorb(raw)
        if not xorb.chunks or name_of(merkle_root([chunk.leaf for chunk in xorb.chunks])) != name:
            raise Rejected(f"the chunks are not those of xorb {name}")
        known = name in self.xorbs
        self.xorbs[name] = xorb
        return not known

    def put_shard(self, raw: bytes) -> None:
        files, at = self._shard_files(raw, ENTRY)
        self._check_shard_xorbs(raw, at)
        self.files |= files
        self.shards.append(raw)

    def read(self, name: str) -> bytes:
        return b"".join(chunk.data for segment in self.files[name].segments for chunk in self._chunks(segment))

    def reconstruction(self, name: str, start: int, end: int, sign: Signer, version: int) -> dict[str, object]:
        """Which chunks of which xorbs make the bytes from `start` to `end`, and where to fetch them."""
        terms, at, skip = [], 0, 0
        for segment in self.files[name].segments:
            for index, chunk in enumerate(self._chunks(segment), start=segment.start):
                if at < end and at + len(chunk.data) > start:
                    skip = skip if terms else start - at
                    _add_term(terms, segment.xorb, index, len(chunk.data))
                at += len(chunk.data)
        fetches = [self._fetch(term, sign) for term in terms]
        key, build = ("xorbs", _fetches_v2) if version == 2 else ("fetch_info", _fetches_v1)
        return {"offset_into_first_range": skip, "terms": terms, key: build(terms, fetches)}

    def _fetch(self, term: dict, sign: Signer) -> tuple[str, dict, dict]:
        chunks = self.xorbs[term["hash"]].chunks
        first, last = term["range"]["start"], term["range"]["end"] - 1
        span = {"start": chunks[first].start, "end": chunks[last].end - 1}
        return sign(term["hash"], span["start"], span["end"]), dict(term["range"]), span

    def _chunks(self, segment: Segment) -> Sequence[Chunk]:
        return self.xorbs[segment.xorb].chunks[segment.start : segment.end]

    def _shard_files(self, raw: bytes, at: int) -> tuple[dict[str, File], int]:
        files = {}
        while (head := _entry(raw, at))[:32] != BOOKEND:
            flags, num = struct.unpack_from("<II", head, 32)
            segments = [self._segment(_entry(raw, at + ENTRY * (1 + index))) for index in range(num)]
            at += ENTRY * (1 + num)
            if not flags & WITH_RANGE_HASHES:
                raise Rejected("a file without range hashes")
            self._check_ranges(segments, [_entry(raw, at + ENTRY * index) for index in range(num)])
            at += ENTRY * num
            sha256 = _entry(raw, at)[:32] if flags & WITH_SHA256 else None
            at += ENTRY if sha256 else 0
            files[name_of(head[:32])] = self._checked_file(head[:32], segments, sha256)
        return files, at + ENTRY

    def _segment(self, entry: bytes) -> Segment:
        _, num_bytes, start, end = struct.unpack_from("<4I", entry, 32)
        segment = Segment(name_of(entry[:32]), start, end, num_bytes)
        if segment.xorb not in self.xorbs:
            raise Rejected(f"xorb {segment.xorb} was never uploaded")
        if not start < end <= len(self.xorbs[segment.xorb].chunks):
            raise Rejected(f"xorb {segment.xorb} has no chunks {start} to {end}")
        if sum(len(chunk.data) for chunk in self._chunks(segment)) != num_bytes:
            raise Rejected(f"a segment of xorb {segment.xorb} does not have {num_bytes} bytes")
        return segment

    def _check_ranges(self, segments: list[Segment], entries: list[bytes]) -> None:
        for segment, entry in zip(segments, entries, strict=True):
            digests = b"".join(chunk.digest for chunk in self._chunks(segment))
            if keyed(RANGE_KEY, digests) != entry[:32]:
                raise Rejected("a wrong range hash")

    def _checked_file(self, digest: bytes, segments: list[Segment], sha256: bytes | None) -> File:
        chunks = [chunk for segment in segments for chunk in self._chunks(segment)]
        if file_digest([chunk.leaf for chunk in chunks]) != digest:
            raise Rejected(f"the segments are not those of file {name_of(digest)}")
        if sha256 and hashlib.sha256(b"".join(chunk.data for chunk in chunks)).digest() != sha256:
            raise Rejected("a wrong SHA-256")
        return File(segments)

    def _check_shard_xorbs(self, raw: bytes, at: int) -> None:
        while (head := _entry(raw, at))[:32] != BOOKEND:
            xorb = self.xorbs.get(name_of(head[:32]))
            num = struct.unpack_from("<I", head, 36)[0]
            if xorb is None or [chunk.leaf for chunk in xorb.chunks] != [
                _listed_chunk(_entry(raw, at + ENTRY * (1 + index))) for index in range(num)
            ]:
                raise Rejected(f"xorb {name_of(head[:32])} is not what the shard lists")
            at += ENTRY * (1 + num)


def _entry(raw: bytes, at: int) -> bytes:
    entry = raw[at : at + ENTRY]
    if len(entry) != ENTRY:
        raise Rejected("a shard that ends too early")
    return entry


def _listed_chunk(entry: bytes) -> tuple[bytes, int]:
    return entry[:32], struct.unpack_from("<I", entry, 36)[0]


def _add_term(terms: list[dict], xorb: str, index: int, num_bytes: int) -> None:
    """One more chunk: part of the last term where it is the next of the same xorb."""
    if terms and terms[-1]["hash"] == xorb and terms[-1]["range"]["end"] == index:
        terms[-1]["range"]["end"] += 1
        terms[-1]["unpacked_length"] += num_bytes
    else:
        terms.append({"hash": xorb, "unpacked_length": num_bytes, "range": {"start": index, "end": index + 1}})


def _fetches_v1(terms: list[dict], fetches: list[tuple[str, dict, dict]]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for term, (url, chunks, span) in zip(terms, fetches, strict=True):
        found.setdefault(term["hash"], []).append({"range": chunks, "url": url, "url_range": span})
    return found


def _fetches_v2(terms: list[dict], fetches: list[tuple[str, dict, dict]]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for term, (url, chunks, span) in zip(terms, fetches, strict=True):
        found.setdefault(term["hash"], []).append({"url": url, "ranges": [{"chunks": chunks, "bytes": span}]})
    return found
