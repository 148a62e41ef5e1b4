"""The contents of one delta, and the hops of a run: read from the store on request."""

import re
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import lru_cache
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any

from deltawire.errors import BrokenChain
from deltawire.follow.fetch import Fetcher
from deltawire.format.inspection import STEP_NAMES, inspect_entry
from deltawire.maintain.gc import GIVEN_UP, GcPlan, plan_gc
from deltawire.pages.versions import Window, page_of
from deltawire.run.fleet import weights_bytes
from deltawire.run.keys import read_object_key
from deltawire.run.plain import json_fields
from deltawire.run.run import Run
from deltawire.store import Store

MOST_KEPT = 64
MOST_TENSORS = 1000
MOST_EXAMPLES = 20

# A plan for gc lists the whole store: the longer that takes, the longer the result is cached.
PLAN_SECONDS, PLAN_REST = 3.0, 10.0

_LAYER = re.compile(r"\.([0-9]{1,9})(?=\.)")


class Anatomies:
    """A cache of inspected deltas. They never change, so each is fetched once; one at a time."""

    def __init__(self, store: Store, public_key: str | None) -> None:
        self._store, self._public_key = store, public_key
        self._inspected = lru_cache(MOST_KEPT)(self._inspect)
        self._turn = threading.Lock()

    def of(self, version: int, base: int | None = None) -> dict[str, Any]:
        """The delta to a version: its own, or the skip delta from `base`."""
        with self._turn:
            return self._inspected(Run(self._store, public_key=self._public_key).id, version, base)

    def _inspect(self, run_id: str, version: int, base: int | None) -> dict[str, Any]:
        run = Run(self._store, public_key=self._public_key, expected=run_id)
        manifest = run.manifest(version)
        hop = manifest.hop if base in (None, manifest.hop.base) else run.hop(version, base)
        about = json_fields(manifest, "version", "step", "total") | json_fields(hop, "kind", "base", "bytes", "changed")
        if hop.base is None:
            return {**about, "weights_bytes": weights_bytes(hop)}
        with closing(Fetcher(self._store, None)) as fetcher, fetcher.fetch([hop]) as (fetched,):
            rows = [inspect_entry(entry) for entry in fetched.delta(run_id).entries]
        return {**about, **anatomy_of(rows, hop.num_bytes)}


def anatomy_of(rows: list[dict[str, Any]], num_bytes: int) -> dict[str, Any]:
    """Encodings, step lengths and tensors of a delta, from the rows of `inspect`."""
    encodings: dict[str, dict[str, int]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    steps = dict.fromkeys(STEP_NAMES, 0)
    for row in rows:
        own = {"bytes": row["bytes"], "changed": row["changed"]}
        _add({"patches": 1, **own}, to=encodings.setdefault(row["encoding"], {}))
        _add(row["steps"] or {}, to=steps)
        about = {key: row[key] for key in ("name", "dtype", "shape", "encoding")} | {"total": prod(row["shape"])}
        _add(own, to=tensors.setdefault(row["name"], about))
    payload = sum(row["bytes"] for row in rows)
    return {
        "payload_bytes": payload,
        "header_bytes": num_bytes - payload,
        "encodings": encodings,
        "steps": steps,
        "steps_unknown": sum(row["changed"] for row in rows if not row["steps"]),
        **heat_of(tensors.values()),
        "num_tensors": len(tensors),
        "tensors": list(tensors.values())[:MOST_TENSORS],
    }


def _add(numbers: Mapping[str, int], to: dict[str, Any]) -> None:
    for key, number in numbers.items():
        to[key] = to.get(key, 0) + number


def heat_of(tensors: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Changes by layer and part, and the parts in the model's order. Experts and the like are merged."""
    cells: dict[tuple[int | None, str], dict[str, Any]] = {}
    for tensor in tensors:
        name = tensor["name"]
        found = _LAYER.search(name)
        layer = None if found is None else int(found[1])
        part = name if found is None else re.sub(r"\d+", "*", name[found.end() + 1 :])
        cell = cells.setdefault((layer, part), {"layer": layer, "part": part})
        _add({"tensors": 1, "changed": tensor["changed"], "total": tensor["total"]}, to=cell)
    ordered = sorted(cells.values(), key=lambda cell: (-1 if cell["layer"] is None else cell["layer"], cell["part"]))
    parts = {(cell["layer"] is not None, cell["part"]) for cell in ordered}
    return {"cells": ordered, "parts": [part for _, part in sorted(parts, key=_model_order)]}


def _model_order(part: tuple[bool, str]) -> tuple[int, int, str]:
    """The usual order of a transformer, guessed from names: deltas list tensors in alphabetical order."""
    in_layer, name = part
    if not in_layer:
        return (0 if re.search("embed|wte|wpe", name) else 3 if "head" in name else 2), 0, name
    inside = ("input_", "attn", "post_attention", "")
    return 1, next(rank for rank, text in enumerate(inside) if text in name), name


class Chain:
    """The hops of a run, and what gc would remove; nothing is removed."""

    def __init__(self, store: Store, public_key: str | None) -> None:
        self._store, self._public_key = store, public_key
        self._turn = threading.Lock()
        self._known: tuple[list[dict[str, Any]], dict[str, Any]] | None = None
        self._until = 0.0

    def page(self, window: Window) -> dict[str, Any]:
        with self._turn:
            if self._known is None or time.monotonic() > self._until:
                started = time.monotonic()
                self._known = self._read()
                ended = time.monotonic()
                self._until = ended + max(PLAN_SECONDS, PLAN_REST * (ended - started))
            hops, info = self._known
        by_version = {version: list(some) for version, some in groupby(hops, key=itemgetter("version"))}
        page = page_of("hops", by_version, window)
        return {
            **info, **page,
            "latest": max(by_version, default=None), "hops": [hop for some in page["hops"] for hop in some],
        }  # fmt: skip

    def _read(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        run = Run(self._store, public_key=self._public_key)
        _ = run.id
        hops = run.hops()
        try:
            plan: GcPlan | None = plan_gc(run)
            problem = None
        except (BrokenChain, TypeError, AttributeError, RecursionError) as error:
            # A plan depends on heartbeats, which are untrusted.
            plan, problem = None, f"gc could not make a plan: {error}"
        # A hop stays if only a second upload of it is removed.
        removals = [] if plan is None else [each for each in plan.removals if each.why != GIVEN_UP]
        going = {about[:2] for each in removals if (about := read_object_key(each.key))}
        rows: list[dict[str, Any]] = [
            {"version": hop.version, "base": hop.base, "bytes": hop.num_bytes,
             "kind": "anchor" if hop.base is None else "delta" if hop.version - hop.base == 1 else "skip",
             "goes": (hop.version, hop.base) in going}
            for hop in hops
        ]  # fmt: skip
        totals = {kind: {"hops": 0, "bytes": 0, "goes": 0} for kind in ("anchor", "delta", "skip")}
        for row in rows:
            _add({"hops": 1, "bytes": row["bytes"], "goes": row["goes"]}, to=totals[row["kind"]])
        return rows, {"totals": totals, "gc": None if plan is None else gc_fields(plan), "gc_problem": problem}


def gc_fields(plan: GcPlan) -> dict[str, Any]:
    reasons: dict[str, dict[str, int]] = {}
    for each in plan.removals:
        _add({"objects": 1, "bytes": each.num_bytes}, to=reasons.setdefault(each.why, {}))
    return {
        **json_fields(plan, "bytes", "kept", "kept_bytes", "oldest_anchor"),
        "objects": len(plan.removals),
        "live_replicas": len(plan.live_replicas),
        "reasons": reasons,
        "examples": [each.key for each in plan.removals[:MOST_EXAMPLES]],
    }
