"""Patches to arrays and back: four encodings, and the choice of the smallest one.

Begin with `encoding.py` (what an encoding is), then `tiled.py`.
"""

from collections.abc import Iterable, Mapping

from deltawire.codec.encoding import Arrays, Decoded, Encoded, Encoding, Known, Watch, changes
from deltawire.codec.tiled import Tiled, encode_payload
from deltawire.codec.uncompressed import Coo, Dense
from deltawire.tensors.dtypes import Bits, DType, Elements
from deltawire.workers import Workers

COO, GAP, CONTEXT, DENSE = Coo(), Tiled("gap", contextual=False), Tiled("context", contextual=True), Dense()
ENCODINGS: dict[str, Encoding] = {encoding.name: encoding for encoding in (COO, GAP, CONTEXT, DENSE)}

AUTO, MIRRORLESS = "auto", "mirrorless"
EncodingChoice = str | Iterable[str]


def allowed_encodings(choice: EncodingChoice) -> list[str]:
    """The encodings that a choice allows: `auto` for all, `mirrorless` for those that decode without the whole base."""
    if choice == AUTO:
        return list(ENCODINGS)
    if choice == MIRRORLESS:
        return [name for name, encoding in ENCODINGS.items() if not encoding.needs_mirror]
    names = [choice] if isinstance(choice, str) else list(choice)
    unknown = [name for name in names if name not in ENCODINGS]
    if unknown or not names:
        raise ValueError(f"unknown encoding {unknown}: choose {AUTO}, {MIRRORLESS}, or from {', '.join(ENCODINGS)}")
    return names


def encode(
    old: Elements, new: Elements, dtype: DType, allowed: list[str], workers: Workers, watch: Watch | None = None,
    tile_log2: int | None = None, known: Known | None = None,
) -> Encoded | None:  # fmt: skip
    """Encode the changes with the smallest allowed encoding; None if nothing changed. `watch` sees every change once.

    `tile_log2` is the tile size for callers that know the number of changes; by default it is estimated from a sample.
    `known` is for callers that have compared before.
    """
    sizes: dict[str, int] = {}
    kept: dict[str, Arrays] = {}
    if CONTEXT.name in allowed or GAP.name in allowed:
        tiled = CONTEXT if CONTEXT.name in allowed else GAP
        limit = DENSE.size_bytes(len(old), 0, dtype) if DENSE.name in allowed else None
        payload, num_changed, gap_bytes, gap = encode_payload(
            old, new, dtype, tiled.contextual, workers, watch, limit, tile_log2, known
        )
        if payload is not None:
            kept[tiled.name] = {tiled.name: payload}
            sizes[tiled.name] = len(payload)
            if GAP.name in allowed:
                sizes[GAP.name] = gap_bytes
                kept |= {GAP.name: {GAP.name: gap}} if gap is not None else {}
        del payload, gap
    else:
        num_changed = count_changes(old, new, workers, watch, known)
    if num_changed == 0:
        return None
    best = smallest_encoding(sizes, len(old), num_changed, dtype, allowed)
    # Free the losers before encoding the winner: at high densities each is nearly as large as the tensor.
    kept = {name: arrays for name, arrays in kept.items() if name == best}
    return Encoded(best, num_changed, kept.get(best) or ENCODINGS[best].encode(old, new, dtype, workers, known))


def smallest_encoding(
    tiled: Mapping[str, int], num_elements: int, num_changed: int, dtype: DType, allowed: list[str]
) -> str:
    """The allowed encoding with the fewest bytes; `tiled` has the sizes of the encodings that depend on the changes."""
    others = {each.name: each.size_bytes(num_elements, num_changed, dtype) for each in (COO, DENSE)}
    sizes = {**tiled, **{name: size for name, size in others.items() if name in allowed}}
    return min(sizes, key=lambda name: sizes[name])


def count_changes(old: Elements, new: Elements, workers: Workers, watch: Watch | None, known: Known | None) -> int:
    size = 1 << 20

    def count(start: int) -> int:
        positions, before, after = changes(old, new, start, min(start + size, len(old)), known)
        if watch is not None and len(positions):
            watch(start, positions, before, after)
        return len(positions)

    return sum(workers.map(count, range(0, len(old), size)))


def decode(encoded: Encoded, old: Bits | None, num_elements: int, dtype: DType, workers: Workers) -> Decoded:
    """Positions in the box and their new bits; positions are None if the bits cover the whole box."""
    return ENCODINGS[encoded.encoding].decode(encoded, old, num_elements, dtype, workers)
