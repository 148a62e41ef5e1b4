"""A run of very many versions, made quickly: documents as a publisher writes them, deltas that repeat."""

from dataclasses import replace
from hashlib import sha256

import numpy as np

from deltawire import Delta, Publisher
from deltawire.run.keys import manifest_key
from deltawire.run.run import Run
from deltawire.store import open_store
from support.chains import make_weights, seal, step, unsealed
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
        manifest = replace(
            like, version=version, step=version, hop=hop, route=likes[0][0].route, created=like.created + version
        )
        run.store.put(key, data)
        run.commit(run.sign(manifest), manifest)
    return url


def make_very_many(url, num_versions, peak):
    """As many manifests without objects, for what reads only those; a reward with one peak."""
    weights = make_weights()
    with Publisher(url, weights, run="very-many", skips=(), anchors=None) as publisher:
        publisher.publish(step=0).wait(PATIENCE)
        step(weights, np.random.default_rng(0))
        publisher.publish(step=1).wait(PATIENCE)
    store = open_store(url)
    like = unsealed(store.get(manifest_key(1)))
    created = like["created"]
    for version in range(2, num_versions):
        like |= {"version": version, "step": version, "created": created + 2 * version}
        like["metadata"] = {"reward": 99.0 if version == peak else version % 7 / 7, "staleness": 1}
        like["hop"] |= {"version": version, "base": version - 1}
        key = f"deltas/{version:08}-from-{version - 1:08}-1.safetensors"
        like["hop"]["objects"][0] |= {"key": key, "bytes": 1000 + version % 100}
        store.put(manifest_key(version), seal(like))
    return url


def delta_of(run, version):
    return Delta.from_bytes(run.store.get(run.manifest(version).hop.objects[0].key))
