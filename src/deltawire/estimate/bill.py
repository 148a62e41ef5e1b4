"""Bytes, seconds and money of a step and a day: as deltas and as all weights, with a cache at each site or not."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import mean, median
from typing import Any

from deltawire.estimate.plan import DAY, LIMITS, MBIT, Plan, measured
from deltawire.estimate.prices import Prices
from deltawire.estimate.simulate import HEARTBEAT_SECONDS, Scene, extra_hops, gets_of, hop_of, puts_of, simulate
from deltawire.run.planner import cheapest_route
from deltawire.run.run import HINT_SECONDS

# Over how many versions the mean of what is uploaded and of what a joiner fetches is taken: as many as were measured.
NUM_PLANNED = 500
# Larger fleets are simulated by some of their replicas.
MOST_SIMULATED = 10_000
Progress = Callable[[str, int], None]
WAYS = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True, slots=True)
class Planned:
    """What lies in the store for a version, on average."""

    uploaded_bytes: float
    """Delta, skip deltas and anchors."""
    join_bytes: float
    """What a replica fetches that has nothing."""
    anchors: float
    """How many anchors a version gets."""
    hops: float
    """How many hops: each has a document."""
    puts: float
    """Requests that write all this."""
    join_gets: float
    """Requests that fetch what a replica needs that has nothing."""


@cache
def planned(plan: Plan) -> Planned:
    hops = [hop_of(plan, 0, None)]
    uploaded = anchors = 0.0
    joins, num_hops, puts = [], 0, 0
    for version in range(1, NUM_PLANNED + 1):
        new = [hop_of(plan, version, version - 1)]
        new += extra_hops(plan, version, hops + new)
        hops += new
        uploaded += sum(hop.num_bytes for hop in new)
        num_hops += len(new)
        puts += sum(map(puts_of, new))
        joins.append(cheapest_route(None, version, hops).hops)
        if new[-1].base is None:
            anchors += 1
            hops = [new[-1]]
    return Planned(
        uploaded / NUM_PLANNED,
        mean(sum(hop.num_bytes for hop in route) for route in joins),
        anchors / NUM_PLANNED,
        num_hops / NUM_PLANNED,
        puts / NUM_PLANNED,
        mean(sum(map(gets_of, route)) for route in joins),
    )


def sampled(plan: Plan, *, caches: bool) -> Plan:
    """A fleet that can be simulated in seconds: fewer sites, then fewer replicas at each, which share less of a line.

    Sites share nothing, and each replica gets as much of a line as it would among all.
    """
    if plan.replicas <= MOST_SIMULATED:
        return plan
    at_site = plan.replicas / plan.sites
    sites = max(min(int(MOST_SIMULATED / at_site), plan.sites), 1)
    replicas = max(min(round(at_site * sites), MOST_SIMULATED), sites)
    share = replicas / sites / at_site
    return replace(
        plan, sites=sites, replicas=replicas, joins_a_day=plan.joins_a_day * replicas / plan.replicas,
        site_mbits=plan.site_mbits if caches else plan.site_mbits * share, replica_mbits=plan.replica_mbits * share,
    )  # fmt: skip


def way(
    plan: Plan, prices: Prices, *, full: bool, caches: bool, num_versions: int = 5, seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One way to ship the weights: what a step and a day take."""
    some, ships = sampled(plan, caches=caches), "all weights" if full else "deltas"
    scene = Scene(some, num_versions, full=full, caches=caches, seed=seed)
    outcome = simulate(scene, (lambda: progress(ships, 1)) if progress else None)
    # Each replica polls the store, or each cache.
    polls = outcome.requests["poll"] * (plan.sites / some.sites if caches else plan.replicas / some.replicas)
    hop = hop_of(plan, 1, None if full else 0)
    one, gets = hop.num_bytes, gets_of(hop)
    kept = Planned(one, one, 1.0, 1.0, puts_of(hop), gets) if full else planned(plan)
    fetches = plan.sites if caches else plan.replicas
    # A cache has a joiner's anchor if another one of the site has joined since it was written.
    joins = min(plan.joins_a_day, plan.sites * (1 + kept.anchors * plan.steps_a_day)) if caches else plan.joins_a_day
    document = measured()["document_bytes"]
    uploaded = kept.uploaded_bytes + kept.hops * document
    day = {
        "uploaded_bytes": plan.steps_a_day * uploaded,
        "store_bytes": plan.steps_a_day * fetches * one + joins * kept.join_bytes,
        "replica_bytes": plan.steps_a_day * plan.replicas * one + plan.joins_a_day * kept.join_bytes,
        **_requests(plan, kept, polls / outcome.seconds * DAY, fetches, gets, joins),
    }
    stored = plan.keep_days * day["uploaded_bytes"]
    usd = {
        "egress": prices.egress_a_day(day["store_bytes"]),
        "requests": prices.requests(day["puts"] + day["lists"], day["gets"]),
        "storage": prices.storage_a_day(stored),
    }
    usd["total"] = sum(usd.values())
    delays = outcome.delays()
    calls = [end - start for start, end in zip(outcome.calls[1:], outcome.commits[1:], strict=True)]
    step = {
        "uploaded_bytes": uploaded,
        "store_bytes": fetches * one,
        "blocked_seconds": None if full else plan.blocked_seconds,
        "publish_seconds": median(calls),
        "served_seconds": {"median": median(delays), "last": delays[-1]},
        "pause_seconds": plan.reload_seconds if full else plan.pause_seconds,
        "usd": usd["total"] / plan.steps_a_day,
    }
    use = _use(plan, kept.uploaded_bytes, one, caches)
    return {
        "ships": ships, "caches": caches, "step": step, "day": day | {"usd": usd},
        "stored_bytes": stored, "join_bytes": kept.join_bytes, "use": use, "fits": max(use.values()) <= 1,
    }  # fmt: skip


def _requests(plan: Plan, kept: Planned, polls: float, fetches: int, gets: int, joins: float) -> dict[str, float]:
    pulls = plan.steps_a_day * plan.replicas + plan.joins_a_day
    objects = plan.steps_a_day * fetches * gets + joins * kept.join_gets
    # Where a site has a cache, replicas read through it: they list nothing, and cannot write heartbeats.
    direct = fetches == plan.replicas
    heartbeats = plan.replicas * DAY / HEARTBEAT_SECONDS + 2 * pulls if direct else 0.0
    # Who joins lists, and who has found nothing for a while, which then looks whether the run is still there.
    looks = plan.steps_a_day * plan.replicas * (plan.step_seconds // HINT_SECONDS) if direct else 0.0
    return {
        "gets": objects + polls + looks,
        "lists": plan.joins_a_day + looks if direct else 0.0,
        "puts": plan.steps_a_day * kept.puts + heartbeats,
    }


def _use(plan: Plan, uploaded: float, one: float, caches: bool) -> dict[str, float]:
    """How much of each line is in use; above 1 it is too thin for every version to reach every replica."""
    at_site = plan.replicas / plan.sites

    def share(num_bytes: float, mbits: float) -> float:
        return num_bytes / (mbits * MBIT) / plan.step_seconds

    return {
        "trainer": share(uploaded, plan.trainer_mbits),
        "site": share(one if caches else one * at_site, plan.site_mbits),
        "inside": share(one * at_site, plan.replica_mbits) if caches else 0.0,
    }


def estimate(
    plan: Plan, prices: Prices, *, num_versions: int = 5, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """All ways, with what they were computed from. `progress` is called for each version of each way."""
    for name, (least, most) in LIMITS.items():
        if not least <= getattr(plan, name) <= most:
            raise ValueError(f"{name} must be between {least:,g} and {most:,}, not {getattr(plan, name):g}")
    return {
        "plan": asdict(plan),
        "prices": asdict(prices),
        "simulated_replicas": sampled(plan, caches=False).replicas,
        "delta_bytes": plan.delta_bytes(),
        "anchor_bytes": plan.anchor_bytes,
        "ways": [
            way(plan, prices, full=full, caches=caches, num_versions=num_versions, seed=seed, progress=progress)
            for full, caches in WAYS
        ],
        "from": measured("from"),
    }
