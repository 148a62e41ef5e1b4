"""More than 2^31 elements in one tensor: positions, counts and digests beyond 32 bits."""

import numpy as np
import pytest

import deltawire
from deltawire import Delta


@pytest.mark.slow
def test_a_tensor_beyond_32_bits():
    size = (1 << 31) + 4096
    old = {"w": np.zeros(size, np.uint8)}
    changed = np.array([0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, size - 1])
    new = {"w": np.zeros(size, np.uint8)}
    new["w"][changed] = [1, 2, 3, 255, 128, 7]
    for encoding, most_bytes in (("context", 2_000), ("gap", 2_000), ("coo", 6 * 9 + 1)):
        delta = Delta.from_bytes(deltawire.diff(old, new, encoding=encoding).to_bytes())
        assert delta.num_bytes < most_bytes
        (patch,) = delta.patches(old)
        assert patch.positions.tolist() == changed.tolist()
        assert patch.bits.tolist() == [1, 2, 3, 255, 128, 7]
    assert deltawire.apply(delta, old) == delta.digest
    assert old["w"][changed].tolist() == [1, 2, 3, 255, 128, 7]
    assert np.count_nonzero(old["w"]) == 6
