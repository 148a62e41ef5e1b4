"""A publisher's snapshot in small chunks, and what it must read as."""

from contextlib import contextmanager

import numpy as np
import pytest

from deltawire.publish import history, records


@contextmanager
def chunks_of(size):
    with pytest.MonkeyPatch.context() as patched:
        for module in (history, records):
            patched.setattr(module, "CHUNK", size)
        yield


def check(history, states):
    for version, expected in states.items():
        for name, bits in expected.items():
            assert np.array_equal(history.at(name, version)[:], bits), (version, name)
