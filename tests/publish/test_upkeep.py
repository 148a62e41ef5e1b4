"""Which hops a publisher adds, and which it remembers."""

from dataclasses import replace
from pathlib import Path

import pytest

from deltawire.publish.settings import Settings
from deltawire.publish.upkeep import Hops
from deltawire.run.manifest import StoredHop, StoredObject
from deltawire.run.planner import SKIPS
from deltawire.tensors.digest import Digest

SETTINGS = Settings([], 0, "auto", SKIPS, 9, "host", Path(), 0, 1 << 30, None)
ANCHOR = 100_000


def hop(version, base, single):
    """A delta over n versions takes n^0.6 single ones, at most a seventh of an anchor."""
    size = ANCHOR if base is None else min(int(single * (version - base) ** 0.6), ANCHOR // 7)
    return StoredHop(version, base, Digest(), None, (StoredObject("key", size, "0" * 64, "a.safetensors"),), 0, {})


def published(single, num_versions=800, settings=SETTINGS):
    """All hops of a run whose deltas weigh so much, and the most that the publisher remembered of them."""
    hops, kept, all_hops, most = Hops(settings), 0, [hop(0, None, single)], 0
    hops.note(*all_hops)
    for version in range(1, num_versions):
        new = [hop(version, version - 1, single)]
        hops.note(*new)
        new += [hop(version, base, single) for base in hops.due(new[0], 0, kept, is_coming=False)]
        hops.note(*new[1:])
        all_hops += new
        kept = version if new[-1].base is None else kept
        most = max(most, len(hops.hops))
    return all_hops, most


def anchors_of(hops):
    return [each.version for each in hops if each.base is None]


def test_a_new_anchor_when_those_from_the_last_weigh_as_much():
    hops, most = published(600)
    first, second, *_ = anchors_of(hops)
    spent = sum(each.num_bytes for each in hops if each.base == first)
    assert ANCHOR <= spent < 1.25 * ANCHOR
    assert max(each.version for each in hops if each.base == first) < second
    assert most < len(hops) / 4


@pytest.mark.parametrize("anchors", [None, 300])
def test_anchors_only_as_asked_for(anchors):
    hops, _ = published(600, settings=replace(SETTINGS, anchors=anchors))
    assert anchors_of(hops) == ([0] if anchors is None else [0, 300, 600])


def test_no_anchor_where_only_the_length_of_routes_asks_for_more():
    hops, _ = published(100, 3000)
    assert sum(each.num_bytes for each in hops if each.base == 0) > ANCHOR
    assert anchors_of(hops) == [0]
