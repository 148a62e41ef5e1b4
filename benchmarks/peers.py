"""What other delta-weight-sync systems send for one bf16 tensor, for timing and sizing beside ours on the same data.

Each `Peer` turns `old` into `new`, two flat contiguous uint16 arrays of bf16 bit patterns:

    encoded = peer.encode(old, new)          # a tuple: what goes over the wire
    peer.size_bytes(encoded)                 # its payload in bytes
    peer.decode(encoded, old)                # a new array, equal to `new` bit for bit

The first five are short rewrites of the format each project documents, without its file layout. So `size_bytes` counts
payload only, for all of them: tensor names, shapes, counts, integer widths and checksums that live in a file header are
free. None of the five hashes anything, though most of the projects do; that too is in their favour. The last three call
the real package `fireworks-delta-compression`, which checks an Adler-32 as part of decoding.

Call each function once before timing it: optional packages are imported on first use.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]
Gaps = npt.NDArray[np.unsignedinteger[Any]]

ZSTD_LEVEL = 1


def payload_bytes(encoded: tuple[Any, ...]) -> int:
    """Bytes of the arrays and byte strings in `encoded`; integers and strings are header fields, not counted."""
    num_bytes = sum(len(part) for part in encoded if isinstance(part, bytes))
    return num_bytes + sum(part.nbytes for part in encoded if isinstance(part, np.ndarray))


@dataclass(frozen=True, slots=True)
class Peer:
    """One system's encoding of a tensor's update."""

    name: str
    used_by: str
    encode: Callable[[Bits, Bits], Any]
    decode: Callable[[Any, Bits], Bits]
    size_bytes: Callable[[Any], int] = payload_bytes
    requires: tuple[str, ...] = ()  # modules, by import name


def _patched(old: Bits, positions: npt.NDArray[Any], values: Bits) -> Bits:
    new = old.copy()
    new[positions] = values
    return new


# int32 positions


class Indexed(NamedTuple):
    positions: npt.NDArray[np.int32]
    values: Bits


def encode_indexed(old: Bits, new: Bits) -> Indexed:
    positions = np.flatnonzero(old != new)
    return Indexed(positions.astype(np.int32), new[positions])


def decode_indexed(encoded: Indexed, old: Bits) -> Bits:
    return _patched(old, encoded.positions, encoded.values)


# gaps


class Gapped(NamedTuple):
    gaps: Gaps
    values: Bits


def _gaps_from_positions(positions: Positions, *widths: type[np.unsignedinteger[Any]]) -> Gaps:
    """Unchanged weights before each position, in the first of `widths` that holds them all."""
    gaps = np.diff(positions, prepend=-1) - 1
    largest = int(gaps.max(initial=0))
    return gaps.astype(next(width for width in widths if largest <= np.iinfo(width).max))


def _positions_from_gaps(gaps: Gaps) -> Positions:
    positions = gaps.astype(np.int64)
    positions += 1
    np.cumsum(positions, out=positions)
    positions -= 1
    return positions


def encode_gapped(old: Bits, new: Bits) -> Gapped:
    positions = np.flatnonzero(old != new)
    return Gapped(_gaps_from_positions(positions, np.uint16, np.uint32), new[positions])


def decode_gapped(encoded: Gapped, old: Bits) -> Bits:
    return _patched(old, _positions_from_gaps(encoded.gaps), encoded.values)


# zstd


def _compress(data: npt.NDArray[Any]) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data.data)


def _decompress(frame: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(frame)


def encode_dense_xor(old: Bits, new: Bits) -> tuple[bytes]:
    return (_compress(old ^ new),)


def decode_dense_xor(encoded: tuple[bytes], old: Bits) -> Bits:
    return old ^ np.frombuffer(_decompress(encoded[0]), dtype=np.uint16)


class CompressedGaps(NamedTuple):
    frame: bytes
    gap_width: int  # bytes per gap


def encode_compressed_gaps(old: Bits, new: Bits, *, xor: bool) -> CompressedGaps:
    positions = np.flatnonzero(old != new)
    gaps = _gaps_from_positions(positions, np.uint8, np.uint16, np.uint32)
    values = new[positions]
    if xor:
        values ^= old[positions]
    return CompressedGaps(_compress(np.concatenate((gaps.view(np.uint8), values.view(np.uint8)))), gaps.itemsize)


def decode_compressed_gaps(encoded: CompressedGaps, old: Bits, *, xor: bool) -> Bits:
    raw = np.frombuffer(_decompress(encoded.frame), dtype=np.uint8)
    num_gap_bytes = raw.size // (encoded.gap_width + 2) * encoded.gap_width
    positions = _positions_from_gaps(raw[:num_gap_bytes].view(f"u{encoded.gap_width}"))
    # A copy, because one-byte gaps can leave the values at an odd address.
    values = raw[num_gap_bytes:].copy().view(np.uint16)
    if xor:
        values ^= old[positions]
    return _patched(old, positions, values)


# fireworks-delta-compression


class Fireworks(NamedTuple):
    diff: npt.NDArray[np.uint8]
    checksum: str


@contextmanager
def _read_only_is_fine() -> Iterator[None]:
    # torch warns of tensors over read-only memory. Here nothing writes to them, and the package itself makes one.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given .* is not writable", category=UserWarning)
        yield


def _as_bf16(bits: Bits) -> "torch.Tensor":
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)  # no copy, so no `prepare` step is needed


def encode_fireworks(old: Bits, new: Bits, *, compression_format: str) -> Fireworks:
    from fireworks_delta_compression import delta_compress

    with _read_only_is_fine():
        diff, checksum = delta_compress(src=_as_bf16(old), dst=_as_bf16(new), compression_format=compression_format)
    return Fireworks(diff.numpy(), checksum)


def encode_fireworks_best(old: Bits, new: Bits) -> Fireworks:
    """arc_v3 with time for every candidate.

    As shipped, arc_v3 races five encodings in threads and keeps the smallest of those done within 1.5 times the
    fastest one's time. Its sizes then vary from run to run, and a candidate that has begun to compress runs on.
    """
    from fireworks_delta_compression.backends import arc3

    shipped = arc3._CANDIDATE_WAIT_MULTIPLIER  # the package offers only an environment variable, read at import
    arc3._CANDIDATE_WAIT_MULTIPLIER = 1e6
    try:
        return encode_fireworks(old, new, compression_format="arc_v3")
    finally:
        arc3._CANDIDATE_WAIT_MULTIPLIER = shipped


def decode_fireworks(encoded: Fireworks, old: Bits, *, compression_format: str) -> Bits:
    import torch
    from fireworks_delta_compression import delta_decompress

    with _read_only_is_fine():
        new = delta_decompress(
            src=_as_bf16(old),
            compressed_diff=torch.from_numpy(encoded.diff),
            checksum=encoded.checksum,
            compression_format=compression_format,
        )
    bits: Bits = new.view(torch.int16).numpy().view(np.uint16)
    return bits


_FIREWORKS = ("fireworks_delta_compression", "torch")

# arc_v3 as shipped comes last: what it leaves running may slow whoever is timed next.
PEERS: list[Peer] = [
    Peer("int32 + bf16", "TRL v1, verl", encode_indexed, decode_indexed),
    Peer("uint16 gaps + bf16", "TRL v3, slime (first generation)", encode_gapped, decode_gapped),
    Peer(
        "dense XOR, zstd-1",
        "slime, miles, SkyRL, Stitch",
        encode_dense_xor,
        decode_dense_xor,
        requires=("zstandard",),
    ),
    Peer(
        "gaps + bf16, zstd-1",
        "PULSE / grail, NeMo-RL (overwrite)",
        partial(encode_compressed_gaps, xor=False),
        partial(decode_compressed_gaps, xor=False),
        requires=("zstandard",),
    ),
    Peer(
        "gaps + XOR, zstd-1",
        "NeMo-RL (default)",
        partial(encode_compressed_gaps, xor=True),
        partial(decode_compressed_gaps, xor=True),
        requires=("zstandard",),
    ),
    Peer(
        "arc_v2",
        "Fireworks",
        partial(encode_fireworks, compression_format="arc_v2"),
        partial(decode_fireworks, compression_format="arc_v2"),
        requires=_FIREWORKS,
    ),
    Peer(
        "arc_v3, all candidates",
        "Fireworks, at its smallest",
        encode_fireworks_best,
        partial(decode_fireworks, compression_format="arc_v3"),
        requires=_FIREWORKS,
    ),
    Peer(
        "arc_v3",
        "Fireworks",
        partial(encode_fireworks, compression_format="arc_v3"),
        partial(decode_fireworks, compression_format="arc_v3"),
        requires=_FIREWORKS,
    ),
]


def available_peers() -> list[Peer]:
    """The peers whose packages are installed here."""
    return [peer for peer in PEERS if all(importlib.util.find_spec(module) for module in peer.requires)]
