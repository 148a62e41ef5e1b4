"""Weights beside a version of a run, fetched anew: which tensors differ, whatever anybody says of them."""

from collections.abc import Mapping

import numpy as np

from deltawire.fetch import Fetcher, Progress
from deltawire.replay import Replay
from deltawire.routing import find_route
from deltawire.runs import Run
from deltawire.weights import Weights, form, view
from deltawire.workers import Workers


def differing_names(
    run: Run,
    version: int,
    weights: Weights,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """The tensors that are not those of a version, and in how many elements; all, where one side lacks a tensor.

    Every element is compared. A tied name must have the weights of the name that it is tied to.
    """
    manifest = run.manifest(version)
    route = find_route(run, None, manifest)
    differing: dict[str, int] = {}
    fetcher = Fetcher(run.store, None)
    try:
        with fetcher.fetch(route.ways, progress) as fetched, Workers(threads) as workers:
            replay = Replay(fetched[0].checkpoint(run.id), [each.delta(run.id) for each in fetched[1:]], workers)
            names = _names(replay.base, manifest.tied, weights)
            for name in replay.base:
                bits = replay.bits_of(name)
                for each in names.pop(name):
                    found = view(each, weights[each]) if each in weights else None
                    if found is None or (found.dtype.name, found.shape) != form(replay.base, name):
                        differing[each] = len(bits)
                    elif num := int(np.count_nonzero(found.bits != bits)):
                        differing[each] = num
            # What is compared with must be the version itself.
            replay.check(manifest.digest)
    finally:
        fetcher.close()
    known = {*replay.base, *manifest.tied}
    return differing | {name: view(name, weights[name]).bits.size for name in weights if name not in known}


def _names(base: Weights, tied: Mapping[str, str], weights: Weights) -> dict[str, list[str]]:
    """For each tensor of a version, the names that it must have among the weights; tied ones where they are there."""
    names = {name: [name] for name in base}
    for name, to in tied.items():
        if name in weights:
            names[to].append(name)
    return names
