"""Inspect and check the entries of a delta without the weights they apply to."""

from typing import Any

import numpy as np

from deltawire.codec import CONTEXT, ENCODINGS, GAP, decode
from deltawire.codec.tiled import Tiled, check_gaps, step_lengths
from deltawire.format.wire import Entry
from deltawire.workers import SERIAL

# Bins of step lengths, and the largest length of each but the last.
STEP_NAMES = ("1", "2", "3-4", "5-8", ">8")
_STEP_ENDS = np.array([1, 2, 4, 8], np.uint64)


def inspect_entry(entry: Entry) -> dict[str, Any]:
    """One row: encoding, counts, bytes, and a histogram of step lengths (None if the encoding does not have them)."""
    return {
        "name": entry.name,
        "encoding": entry.encoding,
        "dtype": entry.dtype.name,
        "shape": list(entry.box.full),
        "offset": list(entry.box.offset),
        "box_shape": list(entry.box.shape),
        "changed": entry.num_changed,
        "density": entry.num_changed / entry.box.num_elements,
        "bytes": entry.num_bytes,
        "bytes_per_change": entry.num_bytes / entry.num_changed,
        "steps": _step_histogram(entry),
    }


def check_structure(entry: Entry) -> None:
    """Check without the old weights: all of `gap`, `coo` and `dense`, the headers and steps of `context`."""
    if entry.encoding == CONTEXT.name:
        _step_histogram(entry)
    elif entry.encoding == GAP.name:
        check_gaps(entry.encoded, entry.box.num_elements, entry.dtype)
    else:
        # Not as a patch, which takes memory for each row of its box: a small file may state any number of them.
        decode(entry.encoded, None, entry.box.num_elements, entry.dtype, SERIAL)


def _step_histogram(entry: Entry) -> dict[str, int] | None:
    encoding = ENCODINGS[entry.encoding]
    if not isinstance(encoding, Tiled):
        return None
    payload = entry.arrays[encoding.name]
    lengths = step_lengths(payload, entry.box.num_elements, entry.num_changed, encoding.contextual)
    counts = np.bincount(np.searchsorted(_STEP_ENDS, lengths), minlength=len(STEP_NAMES))
    counts[0] = entry.num_changed - len(lengths)
    return dict(zip(STEP_NAMES, map(int, counts), strict=True))
