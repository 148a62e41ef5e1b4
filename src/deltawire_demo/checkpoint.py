"""The trainer's checkpoint, to resume after a kill: weights in fp32, Adam's moments, the number of steps."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from deltawire.errors import CorruptObject
from deltawire_demo.rollout import Evaluation

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    step: int = 0
    start: list[Evaluation] = field(default_factory=list)
    """The evaluations before the first step."""


def save_progress(file: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write a checkpoint atomically: after a kill the one before is still there."""
    tensors = {}
    for name, parameter in policy.named_parameters():
        tensors[f"policy.{name}"] = parameter.detach()
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = value
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    save_file(tensors, partial, {"progress": json.dumps(asdict(progress))})
    partial.replace(file)


def load_progress(file: Path, policy: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore policy and optimizer from a checkpoint."""
    try:
        with safe_open(file, "pt") as found, torch.no_grad():
            progress = json.loads(found.metadata()["progress"])
            names = set(found.keys())
            for name, parameter in policy.named_parameters():
                parameter.copy_(found.get_tensor(f"policy.{name}"))
                if f"exp_avg.{name}" in names:
                    optimizer.state[parameter] = {
                        moment: found.get_tensor(f"{moment}.{name}").clone() for moment in MOMENTS
                    }
        return Progress(progress["step"], [Evaluation(**each) for each in progress["start"]])
    except Exception as error:
        raise CorruptObject(
            f"{file} is not a checkpoint of this demo: {error}; use another --folder", path=str(file)
        ) from error
