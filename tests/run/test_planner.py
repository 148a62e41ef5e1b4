"""Planning: the cheapest path, checked against trying all of them, and what makes chains short."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire import Publisher, Replica
from deltawire.errors import BrokenChain, MissingAnchor
from deltawire.run.planner import (
    ListedHop,
    Route,
    anchor_is_due,
    anchor_pays,
    cheapest_route,
    coming_skips,
    entries,
    long_is_due,
    longest_tail,
    reachable,
    skip_bases,
)
from support.chains import Hooked, copy_of, fresh_url, make_weights, same, step


def test_a_plan_is_printable_data():
    hops = [ListedHop(0, None, 1000), ListedHop(1, 0, 10), ListedHop(2, 1, 20)]
    found = cheapest_route(None, 2, hops)
    assert found == Route(None, 2, tuple(hops))
    assert str(found) == "nothing => 2: anchor 0 (1,000 B), 0 -> 1 (10 B), 1 -> 2 (20 B)"
    assert found.as_dict()["bytes"] == found.num_bytes == 1030
    assert found.starts_over


@pytest.mark.parametrize(
    ("have", "want", "expected"),
    [
        (None, 4, [(0, None), (4, 0)]),
        (0, 4, [(4, 0)]),
        (1, 4, [(2, 1), (3, 2), (4, 3)]),
        (3, 5, [(4, 3), (5, 4)]),
        (4, 4, []),
        (None, 9, [(8, None), (9, 8)]),
        (5, 9, [(8, None), (9, 8)]),  # the anchor is cheaper than a heavy delta
        (9, 3, [(0, None), (1, 0), (2, 1), (3, 2)]),  # back in time
    ],
)
def test_paths(have, want, expected):
    hops = [ListedHop(0, None, 100), ListedHop(8, None, 100)]
    hops += [ListedHop(version, version - 1, 10) for version in range(1, 10) if version not in (6, 8)]
    hops += [ListedHop(4, 0, 25), ListedHop(6, 5, 500), ListedHop(8, 7, 10)]
    assert [(hop.version, hop.base) for hop in cheapest_route(have, want, hops).hops] == expected


def test_what_cannot_be_reached_is_named():
    deltas = [ListedHop(version, version - 1, 10) for version in range(1, 4)]
    with pytest.raises(MissingAnchor):
        cheapest_route(None, 3, deltas)
    with pytest.raises(BrokenChain, match="nothing leads to version 7"):
        cheapest_route(None, 7, [ListedHop(0, None, 100), *deltas])
    with pytest.raises(BrokenChain, match="no unbroken chain"):
        cheapest_route(None, 3, [ListedHop(0, None, 100), deltas[2]])
    assert reachable([ListedHop(0, None, 100), deltas[0], deltas[2]]) == {0, 1}


hops = st.lists(
    st.tuples(st.integers(0, 8), st.none() | st.integers(0, 7), st.integers(0, 50)).filter(
        lambda hop: hop[1] is None or hop[1] < hop[0]
    ),
    max_size=14,
).map(lambda found: [ListedHop(*hop) for hop in found])


@given(hops, st.none() | st.integers(0, 8), st.integers(0, 8))
def test_no_path_is_cheaper(known, have, want):
    def costs(at):
        """All ways to arrive at a version."""
        if at == have:
            yield 0
        for hop in known:
            if hop.version == at:
                if hop.base is None:
                    yield hop.num_bytes
                else:
                    yield from (cost + hop.num_bytes for cost in costs(hop.base))

    best = min(costs(want), default=None)
    if best is None:
        with pytest.raises((BrokenChain, MissingAnchor)):
            cheapest_route(have, want, known)
        return
    found = cheapest_route(have, want, known)
    assert found.num_bytes == best
    at = have
    for i, hop in enumerate(found.hops):
        assert hop.base == at or (i == 0 and hop.base is None)
        at = hop.version
    assert at == want


def test_skip_bases():
    assert [skip_bases(version) for version in (1, 4, 8, 16, 64)] == [[], [0], [4], [12, 0], [60, 48]]


def test_long_deltas_are_due_when_routes_get_long_or_large():
    def due(version, hops, **options):
        return long_is_due(version, 0, [ListedHop(0, None, 10_000), *hops], **options)

    sixteens = [ListedHop(version, version - 16, 10) for version in range(16, 97, 16)]
    assert [longest_tail(lengths) for lengths in ((), (4,), (4, 16), (4, 16, 64), (2, 7))] == [0, 3, 6, 9, 4]
    assert [version for version in range(16, 97, 16) if due(version, sixteens)] == [64, 80, 96]
    assert [version for version in range(16, 97, 16) if due(version, sixteens, most_deltas=11)] == [96]
    assert not due(96, sixteens, most_deltas=None)
    assert not due(80, [*sixteens, ListedHop(64, 0, 20)])
    assert not due(64, [ListedHop(64, 0, 5000)])  # there is one
    assert due(64, sixteens[1:])  # no other way leads there
    singles = [ListedHop(version, version - 1, 1000) for version in range(1, 5)]
    assert [version for version in (1, 2, 3, 4) if due(version, singles, skips=(9,))] == [2, 3, 4]
    assert [version for version in (1, 2, 3, 4) if due(version, singles, skips=(9,), most_deltas=10)] == [3, 4]
    assert not due(3, [*singles, ListedHop(2, 0, 1500)], skips=(9,))  # an anchor then


@pytest.mark.parametrize(
    ("num_long", "tail", "most_deltas", "pays"),
    [
        (9, 90, 9, False),  # they weigh less than an anchor
        (10, 90, 9, True),
        (10, 89, 9, False),  # the length of the route is what makes one due
        (10, 149, 36, False),
        (10, 150, 36, True),
        (10, None, 9, False),  # nothing leads there
    ],
)
def test_an_anchor_pays_when_the_deltas_from_the_last_weigh_as_much(num_long, tail, most_deltas, pays):
    known = [ListedHop(0, None, 1000), *(ListedHop(91 + i, 0, 100) for i in range(num_long))]
    known += [] if tail is None else [ListedHop(101, 99, tail)]
    assert anchor_pays(101, 0, known, most_deltas) == pays


def test_coming_skips_are_as_large_as_the_last_ones():
    singles = [ListedHop(version, version - 1, 100) for version in range(1, 9)]
    assert coming_skips(8, [4], singles) == [ListedHop(8, 4, 263)]
    assert coming_skips(8, [4], [*singles, ListedHop(4, 0, 200)]) == [ListedHop(8, 4, 200)]
    with pytest.raises(BrokenChain):
        coming_skips(8, [4], singles[6:])


def test_new_replicas_come_through_anchors_and_long_deltas():
    hops = [(0, None), (1, 0), (31, 0), (32, 0), (70, 32), (80, 0), (90, None), (100, 0), (130, 90)]
    assert entries([ListedHop(version, base, 1) for version, base in hops]) == [0, 32, 80, 90, 100, 130]


def test_anchors_are_due_when_they_pay():
    anchor = ListedHop(0, None, 1000)
    chain = [anchor] + [ListedHop(version, version - 1, 30) for version in range(1, 20)]
    assert next(version for version in range(1, 20) if anchor_is_due(version, chain, None)) == 9
    assert anchor_is_due(16, [anchor, ListedHop(16, 0, 210)], None)
    assert not anchor_is_due(17, [anchor, ListedHop(16, 0, 210), ListedHop(17, 16, 1)], None)
    assert [version for version in range(1, 9) if anchor_is_due(version, chain, 5)] == [5, 6, 7, 8]
    assert anchor_is_due(3, [ListedHop(3, 2, 1)], None)


def test_a_late_joiner_fetches_little():
    """Version 300 of a 1 % chain: at most 1.3 anchors and 10 objects, the manifest counted."""
    url, weights, rng = fresh_url(), make_weights(shapes={"a": (200, 1000), "b": (50, 1000)}), np.random.default_rng(0)
    with Publisher(url, weights) as publisher:
        for version in range(301):
            if version:
                step(weights, rng, 0.01)
            publisher.publish()
            publisher.flush()
    store = Hooked(url)
    with Replica(store, {}, heartbeat_seconds=None) as replica:
        done = replica.pull()
        anchor = replica.run.manifest(300).route[0]
        assert done.version == 300
        assert same(replica.target.weights(), copy_of(weights))
    assert done.num_bytes <= 1.3 * anchor.num_bytes
    fetched = {key for verb, key in store.calls if verb in ("get", "get_range") and key != "run.json"}
    assert len(fetched - {each.key for each in anchor.objects}) <= 10
