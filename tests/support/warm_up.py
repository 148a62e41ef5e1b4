"""What is done once before all workers, and not by each."""

import numpy as np

import deltawire
from deltawire.dtypes import DTYPES


def warm_up():
    """Compile the kernels of every width and encoding; they are kept on disk."""
    for name, dtype in DTYPES.items():
        old = {"w": np.zeros(1000, dtype.unsigned)}
        new = {"w": old["w"].copy()}
        new["w"][::9] += 1
        for encoding in ("coo", "gap", "context", "dense"):
            delta = deltawire.diff(old, new, encoding=encoding, dtype=name, threads=1)
            deltawire.apply(delta, {"w": old["w"].copy()}, dtype=name, threads=1)
