"""What a day costs."""

import math
from dataclasses import replace

import pytest
from generate import read

from deltawire.estimate.bill import NUM_PLANNED, WAYS, estimate, planned, sampled, way
from deltawire.estimate.plan import LIMITS, Plan
from deltawire.estimate.prices import PRICES, Prices
from deltawire.estimate.report import head_of, money_text, seconds_text, table_of, weights_text

PLAN = Plan(8e9, 0.0132, 1440, sites=2, replicas=64)


def test_traffic_goes_through_the_tiers_of_a_month():
    prices = PRICES["s3"]
    assert prices.egress_a_day(1e12 / 30) == pytest.approx(90 / 30)
    assert prices.egress_a_day(200e12 / 30) == pytest.approx(
        (10_000 * 0.09 + 40_000 * 0.085 + 100_000 * 0.07 + 50_000 * 0.05) / 30
    )
    assert PRICES["r2"].egress_a_day(1e18) == 0


def test_the_bill_of_deltas():
    prices = Prices(storage=0.3, put_1000=1.0, get_1000=0.1, egress=[(0, 0.05)])
    found = way(PLAN, prices, full=False, caches=False)
    day, size = found["day"], PLAN.delta_bytes()
    assert day["store_bytes"] == pytest.approx(1440 * 64 * size)
    assert day["usd"]["egress"] == pytest.approx(1440 * 64 * size / 1e9 * 0.05)
    assert day["usd"]["storage"] == pytest.approx(30 * day["uploaded_bytes"] / 1e9 * 0.01)
    assert day["usd"]["requests"] == pytest.approx((day["puts"] + day["lists"] + day["gets"] / 10) / 1000)
    assert found["step"]["usd"] == pytest.approx(day["usd"]["total"] / 1440)
    heartbeats = 64 * 86_400 / 15
    assert heartbeats < day["puts"] < 2 * heartbeats
    assert day["lists"] == PLAN.joins_a_day + 1440 * 64, "a minute without a version: one of each replica"
    assert found["fits"]


def test_a_cache_fetches_once_for_a_site():
    plain, cached = (way(PLAN, PRICES["s3"], full=False, caches=caches) for caches in (False, True))
    assert plain["day"]["store_bytes"] == pytest.approx(32 * cached["day"]["store_bytes"])
    assert plain["day"]["replica_bytes"] == cached["day"]["replica_bytes"]
    assert cached["day"]["usd"]["total"] < plain["day"]["usd"]["total"] / 10


def test_what_does_not_fit_is_said():
    full = way(PLAN, PRICES["s3"], full=True, caches=False)
    assert not full["fits"]
    assert full["use"]["site"] == pytest.approx(32 * PLAN.anchor_bytes * 8 / 1e9 / 60)
    rows = {row[0]: row[1:] for row in table_of(estimate(PLAN, PRICES["s3"]))[1]}
    assert rows["fits the bandwidth"] == ["yes, 38 %", "yes, 3.8 %", "no, 68.3 x", "no, 6.83 x"]
    assert rows["busiest line"] == ["site", "inside", "site", "inside"]


@pytest.mark.parametrize(("name", "value"), [
    ("steps_a_day", 1e-300), ("trainer_mbits", 1e-300), ("site_mbits", 1e300), ("replica_mbits", 1e-300),
    ("round_trip_ms", 1e300), ("poll_seconds", 1e-300), ("joins_a_day", 1e300), ("keep_days", 1e300),
])  # fmt: skip
def test_what_no_run_needs_is_refused_before_it_is_simulated(monkeypatch, name, value):
    monkeypatch.setattr("deltawire.estimate.simulate.MOST_EVENTS", 0)
    with pytest.raises(ValueError, match=f"{name} must be between .*, not 1e"):
        estimate(replace(PLAN, **{name: value}), PRICES["s3"])


@pytest.mark.parametrize("most", [False, True])
def test_what_lies_at_the_limits_is_estimated(most):
    ends = {name: limits[most] for name, limits in LIMITS.items()}
    for name, value in ends.items():
        found = estimate(replace(PLAN, **{name: value}), PRICES["s3"], num_versions=1)
        assert all(0 <= each["day"]["usd"]["total"] < math.inf for each in found["ways"])


def test_each_version_of_each_way_is_progress():
    seen = []
    estimate(PLAN, PRICES["s3"], num_versions=3, progress=lambda name, number: seen.append((name, number)))
    assert seen == [("deltas", 1)] * 6 + [("all weights", 1)] * 6


@pytest.mark.parametrize("sites", [1, 3, 200])
@pytest.mark.parametrize(("full", "caches"), WAYS)
def test_a_large_fleet_is_simulated_by_a_part_of_it(monkeypatch, sites, full, caches):
    plan = replace(PLAN, sites=sites, replicas=1200, steps_a_day=50)
    whole = way(plan, PRICES["s3"], full=full, caches=caches)
    monkeypatch.setattr("deltawire.estimate.bill.MOST_SIMULATED", 300)
    some = sampled(plan, caches=caches)
    assert some.replicas <= 300
    part = way(plan, PRICES["s3"], full=full, caches=caches)
    for name in ("median", "last"):
        assert part["step"]["served_seconds"][name] == pytest.approx(whole["step"]["served_seconds"][name], rel=0.1)
    if not caches or sites == 200:  # otherwise caches ask so seldom that a few requests more are many
        assert part["day"]["gets"] == pytest.approx(whole["day"]["gets"], rel=0.05)
    assert part["use"] == whole["use"]


def test_how_much_of_a_fleet_was_simulated_is_said(monkeypatch):
    assert "simulated" not in dict(head_of(estimate(PLAN, PRICES["s3"], num_versions=1)))
    monkeypatch.setattr("deltawire.estimate.bill.MOST_SIMULATED", 32)
    data = estimate(PLAN, PRICES["s3"], num_versions=1)
    assert data["simulated_replicas"] == 32
    assert dict(head_of(data))["simulated"] == "32 of the replicas"
    data = estimate(replace(PLAN, joins_a_day=10), PRICES["s3"], num_versions=1)
    assert "the last of all may be served much later" in dict(head_of(data))["simulated"]


def test_a_small_fleet_is_simulated_as_it_is():
    plan = replace(PLAN, replicas=10_000)
    assert sampled(plan, caches=False) is plan


@pytest.mark.parametrize(("replicas", "sites"), [(100_000, 1), (100_000, 100_000), (10_001, 10_000), (99_999, 7)])
def test_what_is_simulated_of_a_fleet(replicas, sites):
    some = sampled(replace(PLAN, replicas=replicas, sites=sites, joins_a_day=10), caches=True)
    assert 9000 <= some.replicas <= 10_000
    assert some.site_mbits == PLAN.site_mbits
    each, all_share = some.replicas / some.sites / some.replica_mbits, replicas / sites / PLAN.replica_mbits
    assert each == pytest.approx(all_share), "as many share a line of the same width"
    assert some.joins_a_day / some.replicas == pytest.approx(10 / replicas)


def test_joins_cost_an_anchor_and_what_came_since():
    joined = way(replace(PLAN, joins_a_day=10), PRICES["s3"], full=False, caches=False)
    plain = way(PLAN, PRICES["s3"], full=False, caches=False)
    assert joined["day"]["store_bytes"] - plain["day"]["store_bytes"] == pytest.approx(10 * joined["join_bytes"])
    assert PLAN.anchor_bytes < joined["join_bytes"] < 1.4 * PLAN.anchor_bytes


def test_what_lies_in_the_store_follows_the_planner():
    kept = planned(PLAN)
    assert kept.uploaded_bytes > PLAN.delta_bytes() * 1.2
    assert 0 <= kept.anchors < 0.1
    assert 1.2 < kept.hops < 1.5
    quiet = planned(replace(PLAN, density=0.0005))
    assert quiet.uploaded_bytes < kept.uploaded_bytes


@pytest.mark.parametrize("row", read("fleet_density.csv")[1], ids=lambda row: row["density"])
def test_what_a_step_uploads_was_measured(row):
    assert int(row["steps"]) == NUM_PLANNED
    plan = Plan(float(row["weights"]), float(row["density"]), 1440, num_tensors=1)
    predicted = planned(plan).uploaded_bytes / plan.delta_bytes()
    assert predicted == pytest.approx(float(row["all_to_single"]), rel=0.04)


def test_the_table_has_a_column_for_each_way():
    data = estimate(PLAN, PRICES["s3"])
    header, rows = table_of(data)
    assert header == ["", "deltas", "deltas, caches", "all weights", "all, caches"]
    assert all(len(row) == 5 for row in rows)
    (uploaded,) = [row for row in rows if row[0] == "step: uploaded"]
    assert uploaded[3] == "16.00 GB"
    (waits,) = [row for row in rows if row[0] == "step: trainer waits"]
    assert waits[3] == "not measured"
    assert dict(head_of(data))["fleet"] == "64 replicas at 2 sites"
    one = {"plan": data["plan"] | {"replicas": 1, "sites": 1}}
    assert dict(head_of(data | one))["fleet"] == "1 replica at 1 site"


def test_numbers_for_people():
    assert [seconds_text(each) for each in (None, 0, 0.0134, 1.5, 119, 121, 7300, 2e5)] == [
        "not measured", "0 s", "13.4 ms", "1.5 s", "119 s", "2.02 min", "2.03 h", "2.31 days",
    ]  # fmt: skip
    assert [money_text(each) for each in (0, 0.0012, 0.5, 99.5, 1234.5)] == [
        "$0.00",
        "$0.0012",
        "$0.50",
        "$99.50",
        "$1,234",
    ]
    assert [weights_text(each) for each in (1e12, 8.19e9, 1.35e8, 24_000)] == ["1 T", "8.19 B", "135 M", "24,000"]
