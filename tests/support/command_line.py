"""What the tests of commands share: commands as a user types them, and what to publish."""

import json
import subprocess
import sys

import numpy as np
from click.testing import CliRunner

from deltawire import Checkpoint, save_anchor
from deltawire.cli import main

NUM_CHECKPOINTS = 7


def run(*arguments, input=None):  # noqa: A002
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=input)


def told(*arguments):
    """The JSON that a command prints."""
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def program(*arguments, **options):
    command = [sys.executable, "-m", "deltawire.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def bits(path):
    checkpoint = Checkpoint(path)
    return {name: checkpoint[name].bits.tobytes() for name in checkpoint}


def save_steps(folder):
    """Checkpoints of one training run: step-0, step-1, ..."""
    rng = np.random.default_rng(0)
    weights = {
        "a.weight": rng.integers(0, 1 << 16, (300, 200), np.uint16),
        "b": rng.integers(0, 1 << 16, 50, np.uint16),
    }
    for number in range(NUM_CHECKPOINTS):
        save_anchor(weights, folder / f"step-{number}", dtype="BF16")
        (folder / f"step-{number}" / "config.json").write_text('{"hidden_size": 200}\n')
        weights = {name: array + (rng.random(array.shape) < 0.02).astype(np.uint16) for name, array in weights.items()}
        weights["b"][number] ^= 1
