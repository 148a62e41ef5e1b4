"""Seconds of what `make fuzz` does for minutes; and random bits straight into the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire import Delta, DeltawireError
from deltawire.kernels.cpu.decode import count_changes, decode_tile, longer_steps
from support import ROOT
from support.damaged_stores import damaged_stores
from support.patterns import examples


@pytest.mark.process
@pytest.mark.parametrize("least", [500, pytest.param(8000, marks=pytest.mark.slow)])
def test_damaged_files(least):
    """In a process of its own, where numba checks every index of every kernel."""
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(Path(sys.prefix) / "checked")}
    command = [
        sys.executable,
        ROOT / "benchmarks" / "fuzz.py",
        "--minutes",
        "0.1",
        "--least",
        str(least),
        "--seed",
        "1",
    ]
    done = subprocess.run(command, env=os.environ | checked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CorruptObject" in done.stdout


def test_damaged_stores():
    num_stores, outcomes = damaged_stores(0, seed=1, least=30)
    assert num_stores == 30
    assert {"pull: right weights", "pull: CorruptObject", "verify: exit code 3"} <= outcomes.keys()


@given(st.binary(max_size=300))
def test_any_bytes_as_a_file(data):
    try:
        Delta.from_bytes(data)
    except DeltawireError:
        return
    raise AssertionError("random bytes passed for a delta")


@examples(400)
@given(st.integers(0, 2**32), st.booleans(), st.integers(0, 60), st.integers(0, 2000), st.floats(0, 1))
def test_any_bits_as_a_tile(seed, contextual, num_bytes, num_elements, ones):
    """Whatever a stream says, a tile decodes to positions inside it or is refused."""
    rng = np.random.default_rng(seed)
    stream = np.packbits(rng.random(8 * num_bytes) < ones)
    old = rng.integers(0, 1 << 16, num_elements, np.uint16)
    status, count = count_changes(stream, num_elements, contextual)
    if status != 0:
        return
    assert count <= 8 * num_bytes
    longer_steps(stream, contextual)
    positions, bits = np.empty(int(count), np.int64), np.empty(int(count), np.uint16)
    if decode_tile(stream, old, 16, 7, 255, True, contextual, positions, bits) == 0:
        assert (np.diff(positions) > 0).all()
        assert count == 0 or (positions[0] >= 0 and positions[-1] < num_elements)
