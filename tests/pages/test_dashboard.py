"""The dashboard over HTTP and as a command: what a delta is made of, the chain, pages, the stream, a snapshot."""

import asyncio
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from deltawire import Publisher
from deltawire.cli import main
from deltawire.cli.pages import places
from deltawire.errors import ObjectMissing
from deltawire.hosts import answered_hosts
from deltawire.maintain.gc import plan_gc
from deltawire.pages.anatomy import Anatomies, Chain, heat_of
from deltawire.pages.dashboard import application, event_stream
from deltawire.pages.feed import Feed
from deltawire.run.run import Run
from deltawire.store import open_store
from deltawire_demo.eventlog import EventLog
from support.chains import Hooked, make_run, make_weights
from support.pages import log_file, read_all
from support.waiting import PATIENCE


def client_of(feed, **options):
    return TestClient(
        application(feed, lambda: False, hosts=answered_hosts("127.0.0.1")), base_url="http://127.0.0.1", **options
    )


def test_it_only_reads(tmp_path):
    url, _ = make_run(6, anchors=3)
    store = Hooked(url)
    before = {stat.key: stat.modified for stat in store.inner.list()}
    feed = read_all(Feed(store))
    client = client_of(feed)
    for path in ("/", "/api/state", "/api/versions", "/api/steps", "/api/chain", "/api/anatomy/4"):
        assert client.get(path).status_code == 200, path
    assert {verb for verb, _ in store.calls} <= {"get", "get_range", "list", "stat"}
    assert {stat.key: stat.modified for stat in store.inner.list()} == before


def test_anatomy_is_what_inspect_says(tmp_path):
    url, _ = make_run(6)
    store = Hooked(url)
    anatomies = Anatomies(store, None)
    told = anatomies.of(4)
    (stored,) = Run(url).manifest(4).hop.objects
    (tmp_path / "delta.safetensors").write_bytes(store.get(stored.key))
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "delta.safetensors"), "--format", "json"])
    expected = json.loads(result.stdout)
    rows = expected["tensors"]
    assert told["changed"] == expected["changed"] == sum(row["changed"] for row in rows)
    assert {name: mix["bytes"] for name, mix in told["encodings"].items()} == {
        name: sum(row["bytes"] for row in rows if row["encoding"] == name) for name in {row["encoding"] for row in rows}
    }
    for name in told["steps"]:
        assert told["steps"][name] == sum(row["steps"][name] for row in rows if row["steps"])
    assert sum(told["steps"].values()) + told["steps_unknown"] == told["changed"]
    assert told["payload_bytes"] + told["header_bytes"] == told["bytes"] == stored.num_bytes
    asked = len([key for _, key in store.calls if key == stored.key])
    anatomies.of(4)
    assert len([key for _, key in store.calls if key == stored.key]) == asked, "it is kept"
    skip = anatomies.of(4, 0)
    assert (skip["base"], skip["changed"]) != (told["base"], told["changed"])
    assert anatomies.of(0)["kind"] == "anchor"
    with pytest.raises(ObjectMissing, match="99"):
        anatomies.of(99)


def test_tensors_are_in_the_order_of_the_model():
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.layers.10.mlp.experts.0.up.weight",
             "model.layers.10.mlp.experts.1.up.weight", "model.layers.2.self_attn.q_proj.weight", "model.norm.weight",
             "model.layers.2.input_layernorm.weight"]  # fmt: skip
    heat = heat_of([{"name": name, "changed": 1, "total": 10} for name in names])
    assert heat["parts"] == [
        "model.embed_tokens.weight", "input_layernorm.weight", "self_attn.q_proj.weight", "mlp.experts.*.up.weight",
        "model.norm.weight", "lm_head.weight",
    ]  # fmt: skip
    assert [cell["layer"] for cell in heat["cells"]] == [None, None, None, 2, 2, 10]
    assert heat["cells"][-1] == {"layer": 10, "part": heat["parts"][3], "tensors": 2, "changed": 2, "total": 20}


def test_a_long_number_in_a_name_is_no_layer():
    heat = heat_of([{"name": f"model.{'9' * 5000}.weight", "changed": 1, "total": 10}])
    assert [cell["layer"] for cell in heat["cells"]] == [None]


def test_the_chain_and_what_gc_would_remove():
    url, _ = make_run(20, anchors=4)
    page = Chain(open_store(url), None).page((None, 100))
    plan = plan_gc(Run(url))
    assert (page["gc"]["objects"], page["gc"]["bytes"], page["gc"]["kept"]) == (
        len(plan.removals), plan.num_bytes, plan.num_kept
    )  # fmt: skip
    assert page["gc"]["oldest_anchor"] == 12
    hops = {(hop["version"], hop["base"]): hop for hop in page["hops"]}
    assert len(hops) == len(Run(url).hops())
    assert [hops[key]["kind"] for key in ((16, None), (16, 15), (16, 12), (16, 0))] == [
        "anchor",
        "delta",
        "skip",
        "skip",
    ]
    assert [hops[key]["goes"] for key in ((8, None), (12, None), (12, 11), (13, 12), (16, 0))] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert page["latest"] == 19
    few = Chain(open_store(url), None).page((3, 2))
    assert {hop["version"] for hop in few["hops"]} == {4, 5}
    assert few["next_after"] == 5


def test_over_http(tmp_path):
    url, _ = make_run(5)
    feed = read_all(Feed(url))
    client = client_of(feed)
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    script = client.get("/static/dashboard/main.js")
    assert script.headers["x-content-type-options"] == "nosniff"
    assert "content-security-policy" in script.headers
    assert client.get("/api/state").json()["counts"]["latest"] == 4
    assert len(client.get("/api/versions?limit=2").json()["versions"]) == 2
    for query in ("limit=0", "limit=1001", "limit=x", "after=1e3", "limit=-1", "after=" + "9" * 40):
        assert client.get(f"/api/versions?{query}").status_code == 400, query
    assert client.get("/api/anatomy/77").status_code == 404
    for version in ("x", "9" * 40, "9" * 5000):
        answer = client.get(f"/api/anatomy/{version}")
        assert (answer.status_code, answer.json()["error"][:30]) == (400, "version must be a whole number"), version
    assert client.get("/static/../dashboard.py").status_code == 404
    assert client.post("/api/versions").status_code == 405
    rebound = client.get("/api/state", headers={"host": "attacker.example:80"})
    assert rebound.status_code == 400
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:9"):
        assert client.get("/api/state", headers={"host": host}).status_code == 200, host


def events_of(feed, last_id):
    """What a page is sent up to the first tick."""
    # In a thread: the loop of a browser may be running in this one.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(events_until_tick(feed, last_id))).result()


async def events_until_tick(feed, last_id):
    found = []
    stream = event_stream(feed, last_id, lambda: False)
    async for text in stream:
        fields = dict(line.split(": ", 1) for line in text.strip().splitlines())
        if "event" in fields:
            found.append((fields["event"], fields.get("id"), json.loads(fields["data"])))
        if found and found[-1][0] == "tick":
            break
    await stream.aclose()
    return found


def test_there_is_no_state_before_the_first_poll():
    url, _ = make_run(1)
    assert [name for name, _, _ in events_of(Feed(url), "")] == ["reset", "tick"]


def test_the_stream_resumes_and_starts_over(tmp_path):
    url, _ = make_run(4)
    log = log_file(tmp_path, *({"event": "note", "text": f"{number}"} for number in range(4)))
    feed = read_all(Feed(url, events=EventLog(log)))

    first = events_of(feed, "")
    assert [name for name, _, _ in first] == ["reset", "state", "notes", "tick"]
    assert len(first[2][2]["notes"]) == 4
    last_id = first[2][1]
    again = events_of(feed, last_id)
    assert [name for name, _, _ in again] == ["state", "tick"], "nothing twice"
    with Publisher(url, make_weights(3)) as publisher:
        publisher.publish().wait(PATIENCE)
    log_file(tmp_path, {"event": "note", "text": "one more"})
    stamp = feed.stamp
    read_all(feed)
    more = events_of(feed, last_id)
    assert [note["text"] for name, _, data in more if name == "notes" for note in data["notes"]] == ["one more"]
    assert more[-1][2]["stamp"] > stamp, "the page knows that its charts have changed"
    for other in ("00000000:3", "nonsense", ":", f"{feed.epoch}:x", f"{feed.epoch}:{'9' * 5000}"):
        assert len(events_of(feed, other)) >= 3


def test_the_command_prints_a_snapshot(tmp_path):
    folder = tmp_path / "demo"
    make_run(3, str(folder / "store"))
    log_file(folder, {"event": "step", "step": 1, "reward": 0.5})
    for url in (folder, folder / "store", f"file://{folder}/store"):
        result = CliRunner().invoke(main, ["dashboard", str(url), "--format", "json", "--limit", "2"])
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert [row["version"] for row in told["versions"]] == [1, 2]
        assert told["log_steps"]["steps"][0]["reward"] == 0.5
    assert places("s3://bucket/run") == ("s3://bucket/run", None)
    log = tmp_path / "later.jsonl"
    early = CliRunner().invoke(main, ["dashboard", str(url), "--format", "json", "--events", str(log)])
    assert early.stderr == f"{log} is not there yet: rewards and faults are shown once it is\n"
    assert json.loads(early.stdout)["counts"]
    missing = CliRunner().invoke(main, ["dashboard", str(tmp_path / "none"), "--format", "json"])
    assert missing.exit_code == 1
    assert "deltawire publish" in missing.stderr


@pytest.mark.parametrize("arguments", [["https://h.invalid/run"], ["memory:run", "--compare", "https://h.invalid/run"]])
def test_the_command_refuses_a_store_that_cannot_be_listed(arguments, monkeypatch):
    monkeypatch.setattr("deltawire.pages.dashboard.Dashboard.run", lambda _: None)
    result = CliRunner().invoke(main, ["dashboard", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be listed: over http(s)" in result.stderr


def test_the_command_says_what_is_in_the_way(tmp_path, monkeypatch):
    make_run(1, str(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["dashboard", str(tmp_path / "run"), "--port", port])
    assert result.exit_code == 1
    assert "--port" in result.stderr
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    result = CliRunner().invoke(main, ["dashboard", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "pip install 'deltawire[dashboard]'" in result.stderr
