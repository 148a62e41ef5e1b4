"""The examples run as they are, and end well."""

import re
import subprocess
import sys

import pytest

from support import ROOT
from support.waiting import PATIENCE

pytestmark = pytest.mark.process


def test_the_pytorch_loop(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "pytorch_loop.py"), "--store", str(tmp_path / "run")]
    done = subprocess.run([*command, "--steps", "3"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\d+) +(\d+) +[\d,]+ +([\d.]+)% +[\d,]+ +1/\d+$", done.stdout, re.MULTILINE)
    assert [(int(version), int(step)) for version, step, _ in rows] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert all(0 < float(density) < 50 for _, _, density in rows[1:])
    trainer, follower = re.findall(r"^(?:trainer|follower) +(\w{32})$", done.stdout, re.MULTILINE)
    assert trainer == follower


def test_trl_wordle_says_how_it_is_used():
    # What it trains is in test_trl_async.py.
    command = [sys.executable, str(ROOT / "examples" / "trl_wordle.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert {"--model", "--store", "--server", "--agent", "--env"} <= set(re.findall(r"--[a-z-]+", done.stdout))
