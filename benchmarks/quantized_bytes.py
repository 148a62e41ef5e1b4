"""How many bytes a run of FP8 codes and scales takes, beside one of bf16, on recorded RL updates.

    python benchmarks/quantized_bytes.py

For each recorded step of each matrix whose recorded part has whole rows: the delta of the bf16 weights, and that of the
codes and scales that `deltawire publish --as fp8_per_block` makes of them, both as files of deltawire. `written` counts
for each recipe how many codes and scales change; what a server writes that derives them from a bf16 stream.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import deltawire
from deltawire.engines.quantized.published import quantized
from deltawire.engines.quantized.recipes import RECIPES
from measure import write_csv
from support.recorded import DATA, RECORDINGS, recorded_steps


def tensor(bits, columns):
    return torch.from_numpy(bits.reshape(-1, columns).view(np.int16).copy()).view(torch.bfloat16)


def num_bytes(old, new):
    return len(deltawire.diff(old, new).to_bytes())


def differing(one, other):
    return int((one.contiguous().view(-1).view(torch.uint8) != other.contiguous().view(-1).view(torch.uint8)).sum())


def main():
    rows, kept = [], {}
    for recording in RECORDINGS:
        with np.load(DATA / f"{recording}.npz") as file:
            shapes = {key.split("|")[0]: file[key] for key in file.files if key.endswith("|shape")}
        for step in recorded_steps(recording):
            shape = shapes[step.tensor]
            columns = int(shape[-1])
            if len(shape) != 2 or step.old.size % columns or step.old.size // columns % 128:
                continue
            old, new = tensor(step.old, columns), tensor(step.new, columns)
            changed = int((step.old != step.new).sum())
            if not step.number:
                kept = {name: recipe.quantize(old) for name, recipe in RECIPES.items()}
            made = {name: recipe.quantize(new) for name, recipe in RECIPES.items()}
            written = [
                number for name, (codes, scales) in made.items()
                for number in (differing(kept[name][0], codes), int((kept[name][1] != scales).sum()))
            ]  # fmt: skip
            kept = made
            name = "w_proj.weight"
            plain = num_bytes({name: old}, {name: new})
            codes = num_bytes(quantized({name: old}), quantized({name: new}))
            rows.append([recording, step.tensor, step.number, step.old.size, changed, plain, codes,
                         round(plain / codes, 2), *written])  # fmt: skip
    header = ["recording", "tensor", "step", "weights", "changed", "bf16_bytes", "fp8_per_block_bytes", "ratio"]
    header += [f"{name}_{kind}" for name in RECIPES for kind in ("codes", "scales")]
    write_csv("quantized_bytes.csv", header, rows)
    for recording in RECORDINGS:
        own = [row for row in rows if row[0] == recording]
        total = np.array([row[3:7] for row in own]).sum(0)
        print(
            recording,
            "weights",
            total[0],
            "changed",
            total[1],
            "bf16",
            total[2],
            "codes",
            total[3],
            total[2] / total[3],
        )
        for at, name in enumerate(header[8:], 8):
            print("  ", name, sum(row[at] for row in own) / total[1])


if __name__ == "__main__":
    main()
