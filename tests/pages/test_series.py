"""The numbers behind the dashboard's charts, alerts, and CSV: thinned without losing a peak, the same on both axes."""

import csv
import io
import json
import time

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from deltawire import Publisher, Replica
from deltawire.cli import main
from deltawire.hosts import answered_hosts
from deltawire.pages.alerts import alerts_of
from deltawire.pages.dashboard import application
from deltawire.pages.feed import Feed
from deltawire.pages.series import FIELDS, MOST_LINES, Charts, Columns, Samples, halved, running_mean, thinned
from deltawire.run.fleet import replica_row
from deltawire.run.run import Run
from deltawire.run.uploads import find_uploads
from deltawire.store import open_store
from deltawire_demo.eventlog import EventLog
from support.chains import fresh_url, make_run, make_weights, step
from support.pages import log_file, read_all


def client_of(feed, compared=None):
    app = application(feed, lambda: False, hosts=answered_hosts("127.0.0.1"), compared=compared)
    return TestClient(app, base_url="http://127.0.0.1")


def reported_run(num_versions, **options):
    url, weights, rng = fresh_url(), make_weights(), np.random.default_rng(0)
    with Publisher(url, weights, **options) as publisher:
        for number in range(num_versions):
            told = {"reward": number / 10, "staleness": 1, "token_gap_seconds": 0.05, "other": "text"}
            publisher.publish(step=10 * number, metadata=told)
            publisher.flush()  # with skip deltas and anchors
            step(weights, rng)
    return url


def line(charts, chart, name):
    return next(each["points"] for each in charts[chart] if each["name"] == name)


def test_thinning_keeps_every_peak_and_the_neighbours_of_a_range():
    x = np.arange(100_000.0)
    y = x % 7
    y[55_555], y[44_444] = 99, -99
    found = thinned(x, y, 0, 99_999, 300)
    assert len(found) <= 2 * 301
    assert {max(b for _, b in found), min(b for _, b in found)} == {99, -99}
    assert [a for a, _ in found] == sorted(a for a, _ in found)
    few = thinned(x, y, 10, 12.5, 300)
    assert [a for a, _ in few] == [9, 10, 11, 12, 13]
    # Not in order, and not all known.
    assert thinned(np.array([3.0, 1, 2]), np.array([30, 10, np.nan]), 0, 9, 100) == [[1, 10], [3, 30]]
    assert thinned(np.array([]), np.array([]), 0, 1, 100) == []


def test_rows_replace_each_other_and_are_forgotten():
    columns = Columns("a")
    for key in range(600):
        columns.put(600 - key, {"a": key})
    columns.put(600, {"a": None})
    found = columns.sorted()["a"]
    assert len(found) == 600
    assert np.isnan(found[-1])
    assert found[0] == 599
    columns.drop_after(2)
    assert columns.sorted()["a"].tolist() == [599, 598]
    columns.put(3, {"a": 7})
    assert columns.sorted()["a"].tolist() == [599, 598, 7]


def test_the_mean_is_of_those_that_there_are():
    assert running_mean(np.arange(3.0)).tolist() == [0, 0.5, 1]
    assert running_mean(np.arange(30.0))[-1] == np.arange(10, 30).mean()


def beat(name, version, latest, served=0.5, age=0.0, **more):
    fields = {"version": version, "last_pull": {"served_seconds": served}, "engine": {"kind": "vllm"}, **more}
    return replica_row(name, fields, age, latest)


def test_a_replica_that_is_behind_is_seen_to_wait():
    samples, rows = Samples(), {version: {"created": 100.0 + version} for version in range(9)}
    assert samples.add([beat("one", 3, 3)], 3, rows, 103.5)
    assert not samples.add([beat("one", 3, 3)], 3, rows, 104.5), "nothing is new"
    assert samples.add([beat("one", 3, 5)], 5, rows, 106.0)
    # A dead one has no version on the page, and its lag grows here.
    samples.add([{**beat("one", 3, 8), "health": "dead", "version": None, "lag": None}], 8, rows, 120.0)
    found = samples.of_one("one", None)
    assert found["lag"].tolist() == [0, 2, 5]
    assert found["served_seconds"].tolist() == [0.5, 2.0, 16.0]
    held = samples.of_one("one", 130.0)
    assert (held["time"][-1], held["lag"][-1]) == (130, 5)
    assert not samples.add([{**beat("one", 3, 8), "health": "stopped"}], 8, rows, 121.0)


def test_samples_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr("deltawire.pages.series.MOST_SAMPLES", 200)
    samples, peak = Samples(), 0
    for number in range(2000):
        samples.add([beat("one", number, number + (50 if number == 700 else 1))], number + 1, {}, float(number))
        peak = max(peak, len(samples.of["one"]))
    assert peak <= 201
    assert samples.of["one"][-1][0] == 1999
    pairs = [(float(i), 1, 1, i, None if i % 2 else 0.1, None) for i in range(8)]
    assert halved(pairs) == [(1.0, 1, 1, 1, 0.1, None), (3.0, 1, 1, 3, 0.1, None), *pairs[4:]]


def test_the_charts_of_a_run():
    url = reported_run(30, anchors=8)
    feed = Feed(url)
    with Replica(url, {}, name="one") as replica:
        replica.pull(3)
        read_all(feed)
        replica.pull()
        time.sleep(0.01)
        read_all(feed)
        client = client_of(feed)
        data = client.get("/api/series?axis=step").json()
        charts = data["charts"]
        assert data["whole"] == data["range"] == [0, 290]
        assert line(charts, "reward", "each")[7] == [70, 0.7]
        assert line(charts, "staleness", "staleness")[0] == [0, 1]
        assert line(charts, "pause", "longest token gap")[-1] == [290, 0.05]
        assert [lag for _, lag in line(charts, "lag", "one")] == [26, 0, 0], "before, after, and still"
        assert line(charts, "served", "one")[-1][1] == pytest.approx(replica.last_pull.served_seconds, rel=1e-3)
        hops = Run(url).hops()
        stored = find_uploads(open_store(url)).versions
        assert dict(line(charts, "bytes", "everything")) == {10 * each: stored[each] for each in stored}
        assert len(line(charts, "bytes", "delta")) == 29
        state = feed.state()
        assert state["bytes"]["all_bytes"] == stored.total(), "as status, ls and the metrics count"
        assert state["bytes"]["delta_bytes"] == sum(hop.num_bytes for hop in hops if hop.base == hop.version - 1)
        assert state["counts"]["anchors"] == sum(hop.base is None for hop in hops) == 4
        assert len(client.get("/api/versions?kind=anchor").json()["versions"]) == 4

        timed = client.get("/api/series").json()
        assert timed["origin"] == pytest.approx(Run(url).manifest(0).created)
        assert timed["range"][1] >= time.time() - timed["origin"] - 60, "up to now, since a replica is alive"
        part = client.get("/api/series?axis=step&from=100&to=120").json()["charts"]
        assert [x for x, _ in line(part, "reward", "each")] == [90, 100, 110, 120, 130]
        assert client.get("/api/series?last=0.000001&axis=step").json()["range"][0] >= 0
    for query in ("axis=x", "from=x", "to=nan", "columns=1", "columns=5000", "last=inf"):
        assert client.get(f"/api/series?{query}").status_code == 400, query
    assert client.get("/api/versions?kind=x").status_code == 400
    up_to = client.get("/api/versions?up_to=9&limit=3").json()
    assert ([row["version"] for row in up_to["versions"]], up_to["matching"]) == ([7, 8, 9], 10)


def test_without_reports_there_are_no_lines():
    url, _ = make_run(5)
    charts = client_of(read_all(Feed(url))).get("/api/series").json()["charts"]
    assert [name for name, lines in charts.items() if lines] == ["bytes"]
    empty = client_of(read_all(Feed(fresh_url()))).get("/api/series").json()
    assert not any(empty["charts"].values())


def test_an_event_log_has_the_steps_and_repeats_them(tmp_path):
    url, _ = make_run(2)
    steps = [{"event": "step", "step": number, "reward": number / 10, "staleness": 2.0} for number in range(1, 5)]
    again = {"event": "step", "step": 3, "reward": 0.9}
    log = log_file(tmp_path, *steps, {"event": "resumed", "step": 2}, again)
    charts = client_of(read_all(Feed(url, events=EventLog(log)))).get("/api/series?axis=step").json()["charts"]
    assert line(charts, "reward", "each") == [[1, 0.1], [2, 0.2], [3, 0.9]]
    assert line(charts, "staleness", "staleness") == [[1, 2], [2, 2]]


@pytest.mark.parametrize("seconds", [2.0004, 2.0006, 7.9999996])
def test_the_range_ends_with_the_newest_version(seconds):
    """The page shows the values at the end of the range; points beyond it would not count."""
    versions = Columns(*FIELDS)
    for version, moment in enumerate((1e9, 1e9 + 1.1, 1e9 + seconds)):
        versions.put(version, {"version": version, "time": moment, "delta_bytes": version, "all_bytes": version})
    charts = Charts(versions, Columns(*FIELDS), Samples(), [])
    low, high = charts.whole("time", 2e9)
    for each in charts.lines("time", low, high, 300, 2e9)["bytes"]:
        assert each["points"][0] == [low, 0]
        assert each["points"][-1] == [high, 2]


def test_many_replicas_share_a_line():
    url, _ = make_run(3)
    store = open_store(url)
    for number in range(MOST_LINES + 6):
        store.put(f"replicas/r{number}.json", json.dumps({"version": 0 if number == 3 else 2}).encode())
    lags = client_of(read_all(Feed(url))).get("/api/series").json()["charts"]["lag"]
    assert len(lags) == MOST_LINES + 1
    assert lags[0]["name"] == "r3", "the worst first"
    assert lags[-1]["name"] == "6 others"


def test_two_runs_are_compared():
    one, two = reported_run(4), reported_run(6)
    feeds = [read_all(Feed(url)) for url in (one, two)]
    data = client_of(*feeds).get("/api/series?axis=step").json()
    assert data["runs"] == [Run(one).id, Run(two).id]
    assert {(each["run"], len(each["points"])) for each in data["charts"]["reward"]} == {(0, 4), (1, 6)}
    assert data["whole"] == [0, 50]
    timed = client_of(*feeds).get("/api/series").json()["charts"]["reward"]
    assert [each["points"][0][0] for each in timed if each["name"] == "each"] == [0, 0], "each from its own start"


def test_csv():
    url = reported_run(3)
    store = open_store(url)
    told = {"version": 1, "pause_seconds": 0.25, "engine": {"kind": "=1+1"}}
    store.put("replicas/one.json", json.dumps(told).encode())
    client = client_of(read_all(Feed(url)))
    answer = client.get("/api/versions.csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(row["version"], row["step"], row["kind"], row["reward"]) for row in rows] == [
        ("0", "0", "anchor", "0.0"), ("1", "10", "delta", "0.1"), ("2", "20", "delta", "0.2")
    ]  # fmt: skip
    (sample,) = csv.DictReader(io.StringIO(client.get("/api/replicas.csv").text))
    assert (sample["replica"], sample["version"], sample["lag"], sample["pause_seconds"]) == ("one", "1", "1", "0.25")
    assert sample["engine"] == "'=1+1", "a spreadsheet does not compute it"


def test_alerts():
    def names(rows, newest=(), damaged=0, now=1000.0):
        return [each["name"] for each in alerts_of(rows, newest, damaged, now)]

    well = [beat(name, 9, 9) for name in "abc"]
    assert names(well) == []
    assert names([*well, beat("d", 4, 9)]) == ["ReplicaBehind"]
    assert names([*well, beat("d", 5, 9)]) == []
    assert names([*well, beat("d", 9, 9, served=3.0)]) == ["ReplicaSlow"]
    assert names([beat("d", 9, 9, served=3.0)]) == [], "there is no usual time"
    assert names([beat("d", 9, 9, age=700.0)]) == ["ReplicaDead"]
    assert names([beat("d", 9, 9, age=70.0)]) == ["ReplicaSilent"]
    assert names([beat("d", 9, 9, pause_seconds=1.5, error="full")]) == ["ReplicaFault", "PauseLong"]
    assert names([], damaged=2) == ["VersionsDamaged"]
    newest = [{"created": created} for created in (900.0, 890.0, 880.0, 870.0)]
    assert names(well, newest) == []
    assert names(well, newest, now=1001.0) == ["TrainerSilent"]
    assert names([], newest, now=1001.0) == [], "a run that has ended"


def test_status_has_the_replicas_of_the_dashboard(tmp_path):
    """Those of heartbeats, of which one cannot be read, and those that only the log of a demo knows."""
    folder = tmp_path / "demo"
    make_run(4, str(folder / "store"))
    store = open_store(str(folder / "store"))
    store.put("replicas/one.json", json.dumps({"version": 1}).encode())
    store.put("replicas/odd.json", b"{")
    log_file(
        folder,
        {"event": "serving", "part": "new", "url": "http://127.0.0.1:1"},
        {"event": "pull", "replica": "gone", "version": 2},
        {"event": "ended", "part": "gone", "status": -9},
    )

    def rows(*command):
        result = CliRunner().invoke(main, [*command, "--format", "json"])
        assert result.exit_code == 0, result.output
        return {
            row["name"]: {key: row[key] for key in ("version", "lag", "health", "detail")}
            for row in json.loads(result.stdout)["replicas"]
        }

    found = rows("dashboard", str(folder))
    assert {name: row["health"] for name, row in found.items()} == {
        "gone": "dead", "odd": "fault", "new": "starting", "one": "behind"
    }  # fmt: skip
    assert rows("status", str(folder)) == rows("ls", str(folder)) == found
    text = CliRunner().invoke(main, ["status", str(folder)]).stdout
    assert "killed by SIGKILL" in text
