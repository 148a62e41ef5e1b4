"""All that a change of codes and scales takes, once, when an agent attaches: the first time a device does something it
loads what it needs, and whoever it serves waits for that.
"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from deltawire.engines.layout import Piece
from deltawire.engines.quantized.derive import Alike, QuantizedModel, Requantized
from deltawire.engines.quantized.recipes import magnitudes
from deltawire.engines.staged import PieceChange
from deltawire.errors import EngineRejected, UnsupportedFormat

# So many changes: a device sorts few of them in other ways than many.
CHANGES = 1 << 17
# To the bits of a number: at least twice as large.
HIGHER = 1 << 10


def rehearse(model: QuantizedModel) -> None:
    """Derive what some changes would do, but for agreeing with other workers; nothing is kept."""
    for alike in model.alike:
        # Of weights that have no codes there is nothing to rehearse with.
        with suppress(EngineRejected, UnsupportedFormat):
            for found in _requantized(alike):
                model.split(alike, "codes", alike.starts, found.codes)
                model.split(alike, "scales", alike.bases, found.scales)


def _requantized(alike: Alike) -> Iterator[Requantized]:
    """By changes as in training, where once the largest element of a matrix becomes zero, and once the smallest one the
    largest.
    """
    tensor = alike.tensors[0]
    flat = tensor.original.view(-1)
    bits, sizes, size = flat.view(torch.int16), magnitudes(flat), len(flat)
    extremes = int(sizes.argmax()), int(sizes.argmin())
    many = np.union1d(np.arange(0, size, -(-size // CHANGES)), extremes)
    piece = Piece("", "", 1, size, 0, size, (0, size, 1))
    for place, becomes in zip(extremes, (0, int(sizes.max()) + HIGHER), strict=True):
        # Of a few groups a device looks up elements in other ways, too.
        for index in (many, np.array([place])):
            old = bits[torch.from_numpy(index)].numpy()
            new = np.where(index == place, becomes, old ^ 1).astype(np.uint16)
            change = PieceChange(0, index.astype(np.uint32), old.view(np.uint16), new)
            seen = alike.look({tensor.name: [(piece, change)]}, is_done=False)
            yield alike.derive(seen, seen.touched, seen.before, seen.after)
