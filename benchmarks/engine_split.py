"""What it costs a host to split the changes of an update for the workers of an engine.

    python benchmarks/engine_split.py

Layers of a model with fused attention and stacked gates, embeddings and norms, as vLLM holds them on one and on two
ranks: rows are cut into runs, columns into strides, norms are on every rank. The baseline, in the same run, is the
way with numpy alone that finds a change's row and column by a division.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltawire.engines.engine import EngineChange
from deltawire.engines.layout import Layout, Piece, pieces_of_copy
from deltawire.engines.staged import split
from deltawire.format.patches import Patch
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from measure import ratios, write_csv

HIDDEN, HEADS, KV, INNER, VOCABULARY = 1024, 2048, 1024, 3072, 30_000


def shapes(num_layers: int) -> dict[str, tuple[int, int]]:
    found = {"embed": (VOCABULARY, HIDDEN)}
    for layer in range(num_layers):
        found |= {
            f"{layer}.q": (HEADS, HIDDEN), f"{layer}.k": (KV, HIDDEN), f"{layer}.v": (KV, HIDDEN),
            f"{layer}.o": (HIDDEN, HEADS), f"{layer}.gate": (INNER, HIDDEN), f"{layer}.up": (INNER, HIDDEN),
            f"{layer}.down": (HIDDEN, INNER), f"{layer}.norm": (1, HIDDEN),
        }  # fmt: skip
    return found


def layout_of(sizes: dict[str, tuple[int, int]], num_ranks: int) -> Layout:
    """Rows of most tensors, behind each other where they are fused; columns of `o` and `down`; all of a norm."""
    ranks: list[list[Piece]] = []
    for rank in range(num_ranks):
        pieces: list[Piece] = []
        used: dict[str, int] = {}
        for name, (rows, columns) in sizes.items():
            layer, _, kind = name.rpartition(".")
            storage = layer + {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gates", "up": "gates"}.get(kind, kind)
            own = (rows, columns // num_ranks) if kind in ("o", "down") else (rows // num_ranks, columns)
            own = (rows, columns) if kind == "norm" else own
            start = 0 if kind == "norm" else rank * own[1] if kind in ("o", "down") else rank * own[0] * columns
            at = used.get(storage, 0)
            pieces += pieces_of_copy(name, storage, own, (start, (columns, 1)), (at, (own[1], 1)))
            used[storage] = at + own[0] * own[1]
        ranks.append(pieces)
    return Layout({name: ("BF16", shape) for name, shape in sizes.items()}, ranks)


def by_division(change: EngineChange, layout: Layout) -> list[list[tuple[object, ...]]]:
    """What `split` does, with numpy alone."""
    found: list[list[tuple[object, ...]]] = [[] for _ in layout.ranks]
    numbers = [{piece.tensor: [number] for number, piece in enumerate(pieces)} for pieces in layout.ranks]
    for patch in change.patches:
        old = change.old[patch.name].bits[patch.where]
        if np.any(patch.where[1:] < patch.where[:-1]):
            raise ValueError("positions ascend here")
        for changes, pieces, own in zip(found, layout.ranks, numbers, strict=True):
            for number in own[patch.name]:
                piece = pieces[number]
                rows, columns = np.divmod(patch.where - piece.start, piece.stride)
                inside = (rows >= 0) & (rows < piece.rows) & (columns < piece.columns)
                index = (rows[inside] * piece.columns + columns[inside]).astype(np.uint32)
                if len(index):
                    changes.append((number, index, old[inside], patch.bits[inside]))
    return found


def update(sizes: dict[str, tuple[int, int]], num_changes: int) -> EngineChange:
    rng = np.random.default_rng(0)
    total = sum(rows * columns for rows, columns in sizes.values())
    old, patches = {}, []
    for name, (rows, columns) in sizes.items():
        count = max(rows * columns * num_changes // total, 1)
        bits = rng.integers(0, 1 << 16, rows * columns, np.uint16)
        where = np.unique(rng.integers(0, rows * columns, count))
        old[name] = Tensor(DTYPES["BF16"], (rows, columns), bits)
        patches.append(Patch(name, "BF16", Box.whole((rows, columns)), bits[where] + np.uint16(1), where))
    versions = (WeightVersion("run", number, Digest()) for number in range(2))
    return EngineChange(*versions, patches, old)


def cpu_seconds(work: Callable[[], object]) -> float:
    """The time of all threads on cores, which other programs hardly change."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warm_up((16,))
    sizes = shapes(options.layers)
    change = update(sizes, options.changes)
    num_changes = sum(len(patch.bits) for patch in change.patches)
    num_weights = sum(len(tensor.bits) for tensor in change.old.values())
    rows = []
    for num_ranks in (1, 2, 4):
        layout = layout_of(sizes, num_ranks)
        ours, theirs = split(change, layout, "token"), by_division(change, layout)
        for staged, expected in zip(ours, theirs, strict=True):
            for each, (number, *arrays) in zip(staged.changes, expected, strict=True):
                assert each.number == number
                assert all(map(np.array_equal, (each.index, each.old, each.new), arrays))
        pairs = [
            (cpu_seconds(lambda: by_division(change, layout)), cpu_seconds(lambda: split(change, layout, "token")))  # noqa: B023
            for _ in range(options.rounds)
        ]
        own, ratio = statistics.median(own for _, own in pairs), statistics.median(own / base for base, own in pairs)
        wall, _ = ratios(lambda layout=layout: split(change, layout, "token"), lambda: None, options.rounds)
        with tempfile.TemporaryDirectory() as folder:
            saved, _ = ratios(lambda ours=ours: ours[0].save(Path(folder) / "file"), lambda: None, options.rounds)
        in_file = sum(len(each.index) for each in ours[0].changes)
        numpy_alone = statistics.median(base for base, _ in pairs)
        row = [own / num_changes * 1e9, numpy_alone / num_changes * 1e9, ratio, wall / num_changes * 1e9]
        row.append(saved / in_file * 1e9)
        rows.append([num_ranks, num_weights, num_changes, *(f"{each:.2f}" for each in row)])
        print(rows[-1])
    each = "ns a change"
    header = [
        "ranks",
        "weights",
        "changes",
        f"split, CPU {each}",
        f"numpy alone, CPU {each}",
        "ratio",
        f"split, {each}",
    ]
    header.append(f"save, {each}")
    write_csv("engine_split.csv", header, rows)


if __name__ == "__main__":
    main()
