"""A run of very many versions, made quickly: documents as a publisher writes them, deltas that repeat."""

from dataclasses import replace
from hashlib import sha256

import numpy as np

from deltawire import Delta, Publisher
from deltawire.run.run import Run
from support.chains import make_weights, step
from support.waiting import PATIENCE

NUM_REAL = 16


def make_many(url, num_versions):
    """Some real versions, and then manifests and objects like theirs."""
    weights, rng = make_weights(), np.random.default_rng(0)
    with Publisher(url, weights, run="many", skips=(), anchors=None) as publisher:
        for version in range(NUM_REAL):
            publisher.publish(step=version).wait(PATIENCE)
            step(weights, rng, density=0.01 + 0.002 * version)
    run = Run(url)
    likes = [(run.manifest(version), delta_of(run, version)) for version in range(1, NUM_REAL)]
    for version in range(NUM_REAL, num_versions):
        like, delta = likes[(version // 50 + int(rng.integers(3))) % len(likes)]
        key = f"deltas/{version:08}-from-{version - 1:08}-{version:016x}.safetensors"
        data = Delta(replace(delta.info, version=version, base_version=version - 1), delta.entries).to_bytes()
        stored = replace(like.hop.objects[0], key=key, num_bytes=len(data), sha256=sha256(data).hexdigest())
        hop = replace(like.hop, version=version, base=version - 1, objects=(stored,))
        manifest = replace(like, version=version, step=version, hop=hop, route=likes[0][0].route)
        run.store.put(key, data)
        run.commit(run.sign(manifest), manifest)
    return url


def delta_of(run, version):
    return Delta.from_bytes(run.store.get(run.manifest(version).hop.objects[0].key))
