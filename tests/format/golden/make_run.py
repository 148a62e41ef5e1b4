"""Writes the golden run: python tests/format/golden/make_run.py FOLDER. Runs that exist must stay readable for ever.

Six versions, signed, with anchors in several files and a configuration beside them, a skip delta, and a further anchor.
"""

import json
import sys
from pathlib import Path

import numpy as np

import deltawire
import deltawire.run.signing
import deltawire.tensors.dtypes
from deltawire.run.signing import public_key_of
from deltawire.tensors.weights import Tensor

SPECS = {"embed": ("BF16", (40, 16)), "norm": ("F32", (16,)), "scale": ("F16", ()), "steps": ("I64", (3,))}


def first_weights(rng: np.random.Generator) -> dict[str, Tensor]:
    weights = {}
    for name, (dtype, shape) in SPECS.items():
        kind = deltawire.tensors.dtypes.dtype_named(dtype)
        bits = rng.integers(0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8).view(kind.unsigned)
        weights[name] = Tensor(kind, shape, bits)
    return weights


def move(weights: dict[str, Tensor], rng: np.random.Generator) -> None:
    for tensor in weights.values():
        tensor.bits[rng.integers(0, len(tensor.bits), 1 + len(tensor.bits) // 20)] += 1


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    key = folder / "key.pem"
    folder.mkdir(parents=True)
    deltawire.run.signing.generate_key(key)
    (folder / "config.json").write_text('{"model_type": "golden"}')
    weights = first_weights(rng)
    digests = []
    with deltawire.Publisher(
        folder / "run",
        weights,
        run="golden",
        files=[folder / "config.json"],
        sign_with=key,
        max_file_bytes=1000,
        anchors=5,
    ) as publisher:
        for step in range(6):
            publisher.publish(step=10 * step, metadata={"loss": 1 / (step + 1)})
            publisher.flush()
            digests.append(str(deltawire.digest(weights)))
            move(weights, rng)
    info = {"public_key": public_key_of(key), "digests": digests}
    (folder / "expected.json").write_text(json.dumps(info, indent=2) + "\n")
    key.unlink()
    (folder / "config.json").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
