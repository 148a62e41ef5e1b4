"""What the tests of the chain share: small runs, and a store that can be made to fail."""

import json
from hashlib import sha256
from uuid import uuid4

import numpy as np

from deltawire import Publisher, Replica
from deltawire.store import open_store
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor, view

BF16 = DTYPES["BF16"]


def fresh_url():
    """A store in memory that nobody else uses."""
    return f"memory:{uuid4().hex}"


def seal(fields):
    """A document with these members, as a careful forger would write it."""
    body = json.dumps(fields).encode()
    return b'{"sha256":"' + sha256(body).hexdigest().encode() + b'",' + body[1:]


def unsealed(data):
    fields = json.loads(data)
    del fields["sha256"]
    return fields


def make_weights(seed=0, shapes=None):
    rng = np.random.default_rng(seed)
    shapes = shapes or {"embed": (300, 64), "layer.weight": (64, 64), "norm": (64,), "scale": ()}
    bits = {name: (rng.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in shapes.items()}
    return {
        name: Tensor(BF16, shape, np.atleast_1d(bits[name].reshape(-1).view(np.uint32) >> 16).astype(np.uint16))
        for name, shape in shapes.items()
    }


def step(weights, rng, density=0.02):
    """One training step: some weights move by an ULP or two, in place."""
    for tensor in weights.values():
        count = max(int(len(tensor.bits) * density), 1)
        where = rng.choice(len(tensor.bits), count, replace=False)
        tensor.bits[where] += rng.choice([1, 2, 65534, 65535], count).astype(np.uint16)


def copy_of(weights):
    return {name: tensor.bits.copy() for name, tensor in weights.items()}


def same(weights, expected):
    return weights.keys() == expected.keys() and all(
        np.array_equal(view(name, weights[name]).bits, expected[name]) for name in expected
    )


def pulled(url, version=None, **options):
    """The weights of a version, or of the newest one."""
    with Replica(url, {}, heartbeat_seconds=None, **options) as replica:
        replica.pull(version)
        return dict(replica.target.weights())


def make_run(num_versions, url=None, **options):
    """A run, and the weights of each of its versions."""
    url, weights, states, rng = url or fresh_url(), make_weights(), [], np.random.default_rng(0)
    with Publisher(url, weights, run="demo", **options) as publisher:
        for _ in range(num_versions):
            publisher.publish()
            states.append(copy_of(weights))
            publisher.flush()
            step(weights, rng)
    return url, states


class Hooked:
    """A store that calls `before(verb, key)` and `after(verb, key)` around every call; either may raise."""

    def __init__(self, url, conditional=True):
        self.inner = open_store(url)
        self.url = self.inner.url
        self.conditional = conditional
        self.before = self.after = lambda verb, key: None
        self.calls = []

    def _call(self, verb, key, *arguments, **options):
        self.before(verb, key)
        result = getattr(self.inner, verb)(key, *arguments, **options)
        self.calls.append((verb, key))
        self.after(verb, key)
        return result

    def put(self, key, data):
        self._call("put", key, data)

    def create(self, key, data):
        self._call("create", key, data)

    def get(self, key, **options):
        return self._call("get", key, **options)

    def get_range(self, key, start, length):
        return self._call("get_range", key, start, length)

    def stat(self, key):
        return self._call("stat", key)

    def list(self, prefix="", *, after=""):
        self.before("list", prefix)
        self.calls.append(("list", prefix))
        return self.inner.list(prefix, after=after)

    def delete(self, keys):
        keys = list(keys)
        self.before("delete", keys)
        self.inner.delete(keys)
