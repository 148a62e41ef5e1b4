"""Made the files beside it, once. They stay as they are: every later release must read them.

python tests/format/golden/make.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

import deltawire
from deltawire import Box, Delta
from deltawire.format.parts import save
from deltawire.format.patches import encode_box
from deltawire.tensors.dtypes import DTYPES
from support.recorded import recorded_steps

ENCODINGS = ("auto", "context", "gap", "coo", "dense")
TIED = {"lm_head.weight": "recorded"}


def weights():
    """A model with every dtype, odd shapes, and a piece of a recorded update; before and after."""
    rng = np.random.default_rng(20261115)
    step = next(step for step in recorded_steps("rl-lr3e-6") if "q_proj" in step.tensor)
    size = 30_000
    old = {"recorded": step.old[:size].reshape(100, 300)}
    new = {"recorded": step.new[:size].reshape(100, 300)}
    for index, dtype in enumerate(DTYPES.values()):
        shape = [(17, 9), (211,), (3, 5, 7), (64, 4)][index % 4]
        bits = rng.integers(0, 1 << 8 * dtype.itemsize, shape, dtype.unsigned)
        after = bits.copy()
        changed = rng.random(shape) < [0.02, 0.4, 1.0][index % 3]
        changed.flat[0] = True
        after[changed] += rng.integers(1, 6, int(changed.sum()), dtype.unsigned)
        if dtype.name == "BOOL":
            bits, after = bits & 1, (bits & 1) ^ changed
        old[dtype.name], new[dtype.name] = bits, after.astype(dtype.unsigned)
    old["tiles"] = rng.integers(0, 256, (400, 500), np.uint8)
    new["tiles"] = old["tiles"] + (rng.random((400, 500)) < 0.4) * rng.choice(
        np.array([1, 1, 1, 255, 3], np.uint8), 500
    )
    old["scalar"], new["scalar"] = np.array(0x3F80, np.uint16), np.array(0xBF80, np.uint16)
    old["empty"] = new["empty"] = np.empty((0, 4), np.uint16)
    old["unchanged"] = new["unchanged"] = np.arange(10, dtype=np.uint16)
    return old, new


def dtypes():
    names = {name: name for name in DTYPES}
    return names | dict.fromkeys(("recorded", "scalar", "empty", "unchanged"), "BF16") | {"tiles": "F8_E4M3"}


def sharded(whole, old, new):
    """The delta as two ranks would write it, each with its half of the columns of `recorded`."""
    entries = [[], []]
    for rank, (start, stop) in enumerate(((0, 100), (100, 300))):
        box = Box((100, 300), (0, start), (100, stop - start))
        before, after = (np.ascontiguousarray(side["recorded"][box.slices]).reshape(-1) for side in (old, new))
        entry, _ = encode_box("recorded", DTYPES["BF16"], before, after, box, ["context", "gap"])
        entries[rank].append(entry)
    entries[1] += [entry for entry in whole.entries if entry.name != "recorded"]
    return [*entries[0], *entries[1]], entries[0][0].num_bytes


def main(folder: Path) -> None:
    old, new = weights()
    info = {"run": "golden", "dtype": dtypes(), "threads": 1}
    deltawire.save_anchor(old, folder / "old.safetensors", version=41, tied=TIED, **info)
    deltawire.save_anchor(new, folder / "new.safetensors", version=42, tied=TIED, **info)
    for encoding in ENCODINGS:
        delta = deltawire.diff(old, new, encoding=encoding, version=42, base_version=41, tied=TIED, **info)
        delta.save(folder / f"{encoding}.safetensors")
    whole = Delta.load(folder / "auto.safetensors")
    entries, first_bytes = sharded(whole, old, new)
    save(whole.info, entries, folder / "shards.safetensors", first_bytes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
