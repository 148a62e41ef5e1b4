"""Compare weights with a version of a run that is fetched again, element by element and independent of digests."""

from contextlib import closing

import numpy as np

from deltawire.follow.fetch import Fetcher, Progress
from deltawire.follow.routing import find_route
from deltawire.format.replay import Replay
from deltawire.run.run import Run
from deltawire.tensors.weights import Weights, spec, view
from deltawire.workers import Workers


def differing_names(
    run: Run, version: int, weights: Weights, *, threads: int | None = None, progress: Progress | None = None
) -> dict[str, int]:
    """The tensors that differ from those of a version, with the number of elements that differ.

    Every element is compared; if one side lacks a tensor, all of its elements count. A tied name must have the weights
    of the name that it is tied to.
    """
    manifest = run.manifest(version)
    route = find_route(run, None, manifest)
    differing: dict[str, int] = {}
    with (
        closing(Fetcher(run.store, None)) as fetcher,
        fetcher.fetch(route.hops, progress) as fetched,
        Workers(threads) as workers,
    ):
        replay = Replay(fetched[0].checkpoint(run.id), [each.delta(run.id) for each in fetched[1:]], workers)
        # For each tensor the names to compare among the weights: its own, and tied ones that are present.
        names = {name: [name] for name in replay.base}
        for name, to in manifest.tied.items():
            if name in weights:
                names[to].append(name)
        for name in replay.base:
            bits = replay.bits_of(name)
            for each in names.pop(name):
                found = view(each, weights[each]) if each in weights else None
                if found is None or (found.dtype.name, found.shape) != spec(replay.base, name):
                    differing[each] = len(bits)
                elif num := int(np.count_nonzero(found.bits != bits)):
                    differing[each] = num
        # Make sure that the reference is the version itself.
        replay.check(manifest.digest)
    known = {*replay.base, *manifest.tied}
    return differing | {name: view(name, weights[name]).bits.size for name in weights if name not in known}
