"""Weights as raw bit patterns, for the property tests: every dtype, odd shapes, and the patterns that numbers hide."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from deltawire.tensors.dtypes import DTYPES, Bits, DType

# Zeros of both signs, one step around them, infinities, NaN payloads and subnormals, cut to each width below.
CORNERS = [0, 1, 2, 0x7F, 0x80, 0x3F80, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x8000, 0x8001, 0xBF80, 0xFF80, 0xFFFF]

DENSITIES = st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.5, 0.9, 1.0])


def examples(number):
    """For a test with so many examples, or as many times more as the profile has."""
    return settings(max_examples=number * settings().max_examples // settings.get_profile("test").max_examples)


@st.composite
def pairs(draw: st.DrawFn, dtype: DType, max_elements: int = 3000) -> tuple[Bits, Bits]:
    """Flat bits before and after. Changes range from one step to any pattern at all."""
    size = draw(st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 1000]), st.integers(0, max_elements)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = 8 * dtype.itemsize
    kind = draw(st.sampled_from(["patterns", "weights", "corners"]))
    if kind == "patterns":
        old = rng.integers(0, 1 << width, size, dtype.unsigned)
    elif kind == "corners":
        corners = [corner << max(width - 16, 0) & (1 << width) - 1 for corner in CORNERS]
        old = rng.choice(np.array(corners, dtype.unsigned), size) if size else np.empty(0, dtype.unsigned)
    else:
        old = rng.integers(0, 1 << width, size, dtype.unsigned) & dtype.unsigned.type((1 << (width - 1)) - 1)
    changed = rng.random(size) < draw(DENSITIES)
    new = old.copy()
    if draw(st.booleans()):
        new[changed] += np.where(rng.random(changed.sum()) < 0.5, 1, (1 << width) - 1).astype(dtype.unsigned)
    else:
        new[changed] = rng.integers(0, 1 << width, int(changed.sum()), dtype.unsigned)
    return old, new


dtypes = st.sampled_from(sorted(DTYPES.values(), key=lambda dtype: dtype.name))
