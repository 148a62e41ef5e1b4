"""Whole runs, damaged in every way: whatever reads one says by name what is wrong, or gives the exact bits.

Runs are kept as bytes by key, changed, and laid out in a folder, on which the commands and replicas are let loose.
"""

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from hashlib import sha256
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from deltawire import DeltawireError, Publisher, Replica
from deltawire.cli import main
from deltawire.run.signing import generate_key
from deltawire.tensors.weights import Tensor
from support.chains import copy_of, make_weights, same, step

SHAPES = {"embed": (40, 16), "layer.weight": (16, 16), "norm": (16,), "scale": ()}
NUM_VERSIONS = 6
COMMANDS = (["ls"], ["status"], ["info"], ["route"], ["verify"], ["gc", "--plan", "--keep-anchors", "1"])
FINE, MISMATCH = {0, 1}, 3

ODD_VALUES = [
    None, True, -1, 0, 1, 2, 99_999_999, 100_000_000, 1 << 62, 1 << 70, 1.5, 1e308, float("inf"), float("nan"), "", "x",
    "0" * 32, "f" * 64, "\ud800", "\x1b[31m", "../../x", "deltas/../run.json", "run.json", ".hidden", "a/b",
    "model.safetensors", "deltawire.json", "__metadata__", "deltawire.run", "embed", "norm", [], {}, [[]], [None],
    {"a": "b"}, {"norm": "norm"}, {"norm": "scale", "scale": "norm"}, {"a": "b", "b": "embed"},
]  # fmt: skip
STRANGE_KEYS = [
    "manifests/{}.json".format("00000003".translate({ord("0"): 0x660, ord("3"): 0x663})), "manifests/00000004.json ",
    "manifests/000000003.json", "manifests/00000003.from-00000003.json", "manifests/00000001.from-00000004.json",
    "manifests/00000009.json", "manifests/99999999.json", "manifests/99999999.anchor.json",
    "manifests/00000003.anchor.json",
    "manifests/00000005.from-00000000.json", "manifests/00000003.json/x", "manifests/\x1b[2J.json", "manifests/\udcff",
    "manifests/.json", "manifests/a\nb.json", "deltas/00000003-from-00000002-ab.safetensors", "deltas/x",
    "deltas/00000007-from-00000009-ab.safetensors", "deltas/00000003-from-00000002-ab-00001-of-00002.safetensors",
    "anchors/00000003-ab/model.safetensors", "anchors/00000003-ab/\x07", "anchors/00000009-ab/config.json", "anchors/x",
    "replicas/one.json", "replicas/ä.json", "replicas/\x1b.json", "replicas/a/b.json", "lease.json", "run.json", "x",
]  # fmt: skip


class SoundRun:
    """A run as bytes by key, and the weights of each of its versions."""

    def __init__(self, folder, **options):
        weights, rng, self.states = make_weights(shapes=SHAPES), np.random.default_rng(0), []
        weights["tied"] = weights["embed"]
        config = folder / "config.json"
        config.write_text("{}")
        with Publisher(folder / "run", weights, run="sound", tied={"tied": "embed"}, files=[config], **options) as made:
            for number in range(NUM_VERSIONS):
                made.publish(step=number, metadata={"loss": 0.5, "more": [1, {"a": None}]})
                self.states.append({name: bits for name, bits in copy_of(weights).items() if name != "tied"})
                made.flush()
                step({name: tensor for name, tensor in weights.items() if name != "tied"}, rng)
        with Replica(folder / "run", {}, name="one") as replica:
            replica.pull()
            replica.pull()
            beat = (folder / "run" / "replicas" / "one.json").read_bytes()
        files = [path for path in (folder / "run").rglob("*") if path.is_file()]
        self.objects = {path.relative_to(folder / "run").as_posix(): path.read_bytes() for path in files}
        self.objects["replicas/one.json"] = beat
        self.documents = [json.loads(data) for key, data in self.objects.items() if key.startswith("manifests/")]

    def weights_at(self, version):
        specs = make_weights(shapes=SHAPES)
        return {name: Tensor(specs[name].dtype, specs[name].shape, bits.copy())
                for name, bits in self.states[version].items()}  # fmt: skip


def sound_runs(folder):
    """Runs of several kinds, each with the public key that its readers are given."""
    for number, options in enumerate(({}, {"anchors": 2, "skips": (2, 4)}, {"max_file_bytes": 300}, {})):
        place = folder / f"sound-{number}"
        place.mkdir()
        signed = number == 3
        key = generate_key(place / "key.pem") if signed else None
        yield SoundRun(place, **options, **({"sign_with": place / "key.pem"} if signed else {})), key


def reseal(fields):
    body = json.dumps(fields).encode()
    return b'{"sha256":"' + sha256(body).hexdigest().encode() + b'",' + body[1:]


def places(value, path=()):
    """Every place in a JSON value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def value_at(value, path):
    return value if not path else value_at(value[path[0]], path[1:])


def change_document(data, rng, documents):
    """A document with one of its members changed, most often with the SHA-256 that then is right."""
    try:
        fields = json.loads(data)
        fields.pop("sha256", None)
    except (ValueError, AttributeError, RecursionError):
        return data
    for _ in range(rng.integers(1, 4)):
        spots = list(places(fields))
        if not spots:
            break
        *path, last = pick(rng, spots)
        at = value_at(fields, path)
        kind = rng.integers(4)
        if kind == 0 and isinstance(at, dict):
            del at[last]
        elif kind == 1:
            other = pick(rng, documents)
            at[last] = deepcopy(value_at(other, pick(rng, list(places(other)))))
        elif kind == 2 and type(at[last]) is int:
            at[last] += int(rng.integers(-2, 3))
        else:
            at[last] = deepcopy(pick(rng, ODD_VALUES))
    return reseal(fields) if rng.random() < 0.8 else json.dumps(fields).encode()


def pick(rng, values):
    return values[rng.integers(len(values))]


def damage(objects, rng, documents):
    """One way to break a store, in place. `documents` are sound ones; None stands for what is no regular file."""
    keys = [key for key, data in objects.items() if data is not None]
    if not keys:
        return
    named = [key for key in keys if key.endswith(".json")]
    key = pick(rng, named if named and rng.random() < 0.6 else keys)
    data, hop = objects[key], rng.integers(10)
    if hop <= 2:
        objects[key] = change_document(data, rng, documents)
    elif hop == 3:
        objects[pick(rng, STRANGE_KEYS)] = objects.pop(key)
    elif hop == 4:
        objects[pick(rng, [*STRANGE_KEYS, *keys])] = data
    elif hop == 5:
        other = pick(rng, keys)
        objects[key], objects[other] = objects[other], data
    elif hop == 6:
        objects[key] = data[: rng.integers(len(data) + 1)]
    elif hop == 7 and data:
        flipped = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            flipped[at] ^= 1 << rng.integers(8)
        objects[key] = bytes(flipped)
    elif hop == 8:
        del objects[key]
    else:
        objects[key] = pick(rng, [b"", b"{}", b"[" * 2000, b"\xff" * 40, rng.bytes(60), data + b" ", None])


def lay_out(objects, folder):
    shutil.rmtree(folder, ignore_errors=True)
    for key, data in objects.items():
        # One key may be the folder of another; on a disk only one of them can be.
        with suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            if data is None:
                os.mkfifo(path)
            else:
                path.write_bytes(data)


def attempt(run, public_key, folder):
    """What became of it, command by command. Anything but the exact bits or a named error raises."""
    outcomes = Counter()
    given = [] if public_key is None else ["--public-key", public_key]
    for command in COMMANDS:
        result = CliRunner().invoke(main, [*command, f"file://{folder}", *given], catch_exceptions=False)
        if result.exit_code not in (FINE | {MISMATCH}):
            raise AssertionError(f"{command} ended with {result.exit_code}: {result.output}")
        outcomes[f"{command[0]}: exit code {result.exit_code}"] += 1
    for base in (None, 1):
        outcomes[f"pull: {_pull(run, public_key, folder, base)}"] += 1
    return outcomes


def _pull(run, public_key, folder, base):
    weights = {} if base is None else run.weights_at(base)
    before = copy_of(weights)
    try:
        with Replica(folder, weights, heartbeat_seconds=None, public_key=public_key, threads=1) as replica:
            version = replica.pull().version
    except DeltawireError as error:
        if not same(weights, before):
            raise AssertionError(f"weights moved before {type(error).__name__}") from error
        return type(error).__name__
    if not same({name: weights[name] for name in run.states[version]}, run.states[version]):
        raise AssertionError(f"wrong weights passed every check as version {version}")
    return "right weights"


def damaged_stores(seconds, seed, least):
    """Damage runs for a time, and at least so many; how many there were, and what became of them."""
    rng, outcomes, num_stores = np.random.default_rng(seed), Counter(), 0
    started = time.monotonic()
    # In memory where there is such a folder: thousands of small files are written and removed.
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="deltawire-fuzz-", dir=place) as name:
        runs = list(sound_runs(Path(name)))
        for run, key in runs:
            lay_out(run.objects, Path(name) / "store")
            assert attempt(run, key, Path(name) / "store")["pull: right weights"] == 2, "a sound run was refused"
        while time.monotonic() - started < seconds or num_stores < least:
            run, key = pick(rng, runs)
            objects = dict(run.objects)
            for _ in range(rng.integers(1, 4)):
                damage(objects, rng, run.documents)
            lay_out(objects, Path(name) / "store")
            try:
                outcomes += attempt(run, key, Path(name) / "store")
            except Exception as error:
                kept = Path(tempfile.mkdtemp(prefix="deltawire-found-"))
                lay_out(objects, kept / "store")
                raise AssertionError(f"store {num_stores} of seed {seed}, kept in {kept}: {error!r}") from error
            num_stores += 1
    return num_stores, outcomes
