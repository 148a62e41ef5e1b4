"""Files in the layout of TRL's buckets, written as TRL's branches write them, and a run to export."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from deltawire.tensors.weights import view

SIZE = 200_000


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(SIZE // 4, 4, generator=generator).to(torch.bfloat16),
        "norm": torch.randn(7, generator=generator),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
        "quantised": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "frozen": torch.arange(5),
    }


def train(weights, seed):
    """One step: some elements of each tensor get new bits, NaN and -0.0 among them."""
    generator = np.random.default_rng(seed)
    for name in ("embed", "norm", "quantised"):
        flat = weights[name].view(-1)
        at = torch.from_numpy(generator.choice(len(flat), max(len(flat) // 50, 1), replace=False))
        flat[at] = torch.randn(len(at), generator=torch.Generator().manual_seed(seed)).to(flat.dtype)
    weights["embed"].view(-1)[seed * 3] = float("nan")
    weights["embed"].view(-1)[seed * 3 + 1] = -0.0


def bits(weights):
    return {
        name: (tensor.dtype.name, tensor.shape, tensor.bits.tobytes())
        for name in weights
        for tensor in [view(name, weights[name])]
    }


def write_anchor(folder, step, weights, **stated):
    (folder / "anchors").mkdir(parents=True, exist_ok=True)
    metadata = info(step, False, weights, sum(w.numel() for w in weights.values())) | stated
    save_file(
        {name: w.to(torch.bfloat16) for name, w in weights.items()},
        folder / f"anchors/step_{step:06d}.safetensors", metadata=metadata,
    )  # fmt: skip


def info(step, sparse, names, changed):
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": str(sparse),
        "model_version": str(step),
        "num_changed_params": str(len(names)),
        "total_changed_elements": str(changed),
    }


def write_delta(folder, step, before, after, encoding=None):
    """As the post's code does: masks, positions, new values; v1 without an encoding, v2 and v3 with one."""
    (folder / "deltas").mkdir(parents=True, exist_ok=True)
    tensors, names, changed = {}, [], 0
    for name in before:
        index = (before[name].view(-1) != after[name].view(-1)).nonzero().view(-1)
        if len(index):
            names.append(name)
            changed += len(index)
            where, what = (".indices", ".values") if encoding is None else (".idx", ".val")
            tensors[name + what] = after[name].view(-1)[index]
            tensors[name + where] = gaps(index) if encoding == "gap_delta" else index.to(torch.int32)
    metadata = info(step, True, names, changed)
    metadata |= {"changed_params": json.dumps(names)} if encoding is None else {"encoding": encoding}
    save_file(tensors, folder / f"deltas/step_{step:06d}.safetensors", metadata=metadata)
    return tensors


def gaps(index):
    gap = index - torch.cat([torch.tensor([-1]), index[:-1]]) - 1
    return gap.to(torch.uint16 if gap.max() <= 0xFFFF else torch.uint32)


def steps(count):
    """The weights of some steps, bf16: `near` changes in many places, `far` with a gap of more than 16 bits."""
    found = [{"near": torch.randn(300, 5).to(torch.bfloat16), "far": torch.zeros(SIZE, dtype=torch.bfloat16)}]
    for step in range(1, count):
        after = {name: w.clone() for name, w in found[-1].items()}
        after["near"].view(-1)[step::7] += 1.0
        after["far"][[step, step + 1, SIZE - step]] = float(step)
        found.append(after)
    return found
