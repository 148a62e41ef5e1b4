"""Weights as codes and scales, to be published instead of bf16: for fleets that serve nothing else."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deltawire.engines.quantized.recipes import RECIPES, is_finite
from deltawire.errors import ObjectMissing, UnsupportedFormat
from deltawire.format.checkpoint import Checkpoint

PUBLISHED = ("fp8_per_block",)
"""Recipes whose codes and scales engines load from a checkpoint."""


def quantized(weights: Mapping[str, Any], recipe: str = "fp8_per_block") -> dict[str, torch.Tensor]:
    """Weights with codes and scales instead of all tensors that are called `..._proj.weight`.

    Args:
        weights: Tensors of torch by their names in a checkpoint.
        recipe: How they are quantized: `fp8_per_block`, in 128 x 128 blocks, with scales called `..._scale_inv`.

    Raises:
        UnsupportedFormat: The recipe is not known, or a tensor is not bf16 or fp16, or not finite.

    >>> publisher = Publisher(url, lambda: quantized(model.state_dict()))  # doctest: +SKIP
    """
    return dict(_each(weights, recipe))


def _each(weights: Mapping[str, Any], recipe: str) -> Iterator[tuple[str, torch.Tensor]]:
    if recipe not in PUBLISHED:
        raise UnsupportedFormat(f"{recipe!r} cannot be published: choose from {', '.join(PUBLISHED)}")
    for name, value in weights.items():
        if not is_quantized(name):
            yield name, value
            continue
        if value.dtype not in (torch.bfloat16, torch.float16) or value.ndim != 2 or not is_finite(value):
            raise UnsupportedFormat(
                f"{name} is {value.dtype} {list(value.shape)}, or not finite: only finite matrices of bf16 or "
                "fp16 can be quantized",
                tensor=name,
            )
        codes, scales = RECIPES[recipe].quantize(value.detach())
        yield name, codes
        yield f"{name}_scale_inv", scales[0]


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantize_checkpoint(source: str | Path, to: Path, recipe: str = "fp8_per_block") -> Path:
    """Write a checkpoint with codes and scales, file by file, and say so in its configuration. Returns its folder.

    Args:
        source: A checkpoint of bf16 or fp16: a file, or a folder, whose other files are copied.
        to: A folder that does not exist yet.
        recipe: As for `quantized`.
    """
    from safetensors.torch import load_file, save_file

    opened = Checkpoint(source)
    if opened.path.is_dir():
        shutil.copytree(opened.path, to, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    else:
        to.mkdir(parents=True)
    where: dict[str, str] = {}
    for file in opened.shards:
        path = opened.path / file if opened.path.is_dir() else opened.path
        made = quantized(load_file(path), recipe)
        save_file({name: value.contiguous() for name, value in made.items()}, to / file, {"format": "pt"})
        where |= dict.fromkeys(made, file)
    if not any(is_quantized(name) for name in where):
        problem = f"{source} has no tensor named ..._proj.weight: there is nothing to quantize"
        raise ObjectMissing(problem, path=str(source))
    if len(opened.shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = to / "config.json"
    if config.is_file():
        plain = {name.rpartition(".")[0] for name in where if name.endswith(".weight") and not is_quantized(name)}
        about = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        fields = json.loads(config.read_text())
        fields["quantization_config"] = {**about, "modules_to_not_convert": sorted(plain)}
        config.write_text(json.dumps(fields, indent=2))
    return to
