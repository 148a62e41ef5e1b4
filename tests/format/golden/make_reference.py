"""Writes the golden run by reference, to stay readable for ever: python tests/format/golden/make_reference.py FOLDER.

Version 0 is a checkpoint of two files that lies elsewhere, at `memory:golden-base`: whoever reads the run puts `base`
there, or has it at hand. Ten versions follow, signed, with skip deltas and deltas from version 0.
"""

import json
import sys
from pathlib import Path

import numpy as np
from make_run import first_weights, move

import deltawire
from deltawire.run.signing import generate_key, public_key_of

PLACE = "memory:golden-base"


def main(folder: Path) -> None:
    rng = np.random.default_rng(1)
    key = folder / "key.pem"
    folder.mkdir(parents=True)
    generate_key(key)
    weights = first_weights(rng)
    deltawire.save_anchor(weights, folder / "base", max_shard_bytes=1000)
    (folder / "base" / "config.json").write_text('{"model_type": "golden"}')
    store = deltawire.open_store(PLACE)
    for file in (folder / "base").iterdir():
        store.put(file.name, file.read_bytes())
    digests = [str(deltawire.digest(weights))]
    with deltawire.Publisher(
        folder / "run",
        weights,
        run="golden-reference",
        base=PLACE,
        sign_with=key,
        skips=(2,),
        most_deltas=3,
        anchors=None,
    ) as publisher:
        for step in range(1, 11):
            move(weights, rng)
            publisher.publish(step=10 * step)
            publisher.flush()
            digests.append(str(deltawire.digest(weights)))
    info = {"public_key": public_key_of(key), "digests": digests}
    (folder / "expected.json").write_text(json.dumps(info, indent=2) + "\n")
    key.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
