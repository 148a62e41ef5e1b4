"""The agent beside an engine, over real HTTP on the loopback interface: it follows, tells the truth, and comes back."""

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltawire import open_store
from deltawire.engines.agent import Agent
from deltawire.engines.target import EngineTarget
from deltawire.errors import (
    AddressUnavailable,
    Conflict,
    EngineBroken,
    EngineUnavailable,
    MissingDependency,
    StoreUnavailable,
)
from deltawire.follow import replica
from deltawire.run.heartbeat import read_heartbeats
from deltawire.run.run import Run
from support.agents import Server, Trainer, bits
from support.chains import Hooked, fresh_url
from support.waiting import PATIENCE, eventually

FOR_EVER = 3600.0


@pytest.fixture
def url():
    return fresh_url()


@pytest.fixture
def trainer(url):
    made = Trainer(url, run="demo")
    with made.publisher:
        yield made


@pytest.fixture
def server():
    return Server()


@contextmanager
def running(server, url, **options):
    """An agent in the background, and a client of its HTTP."""
    options = {"poll_seconds": 0.05, "port": 0, "heartbeat_seconds": None} | options
    with Agent(server, url, **options) as agent, client_of(agent) as client, agent.running():
        yield agent, client


def client_of(agent):
    return httpx.Client(base_url=f"http://127.0.0.1:{agent.port}")


def unhealthy(client, text):
    def check():
        answer = client.get("/health")
        return answer if answer.status_code == 503 and text in answer.json()["reason"] else None

    return eventually(check).json()


def healthy(client):
    return eventually(lambda: (answer := client.get("/health")).status_code == 200 and answer).json()


def test_it_follows_a_run_and_tells(url, trainer, server):
    with running(server, url, name="one", heartbeat_seconds=0.01) as (agent, client):
        assert agent.wait(0, PATIENCE) == 0
        for _ in range(3):
            version = trainer.step()
            assert agent.wait(version, PATIENCE) == version
            assert bits(server.model) == bits(trainer.model)
        assert healthy(client) == {"ok": True, "reason": "current", "error": None, "version": 3, "lag": 0}
        told = client.get("/status").json()
        assert (told["name"], told["run"], told["version"], told["latest"], told["lag"]) == ("one", "demo", 3, 3, 0)
        assert told["digest"] == str(trainer.publisher.run.manifest(3).digest)
        engine = {"kind": "torch", "address": "a server", "weight_version": "3", "error": None}
        assert told["engine"] == {**engine, "boot": told["engine"]["boot"]}
        assert 0 < told["pause_seconds"] < PATIENCE
        assert (told["last_pull"]["version"], told["last_pull"]["anchor"], told["error"]) == (3, False, None)
        assert told["uptime_seconds"] > 0
        (heard,) = read_heartbeats(Run(url))
        assert (heard["name"], heard["engine"]["kind"]) == ("one", "torch")
    assert read_heartbeats(Run(url)) == []


def test_health_before_during_and_after(url, server):
    with (
        Agent(server, url, port=0, heartbeat_seconds=None, poll_seconds=0.05) as agent,
        client_of(agent) as client,
    ):
        assert unhealthy(client, "not running")["ok"] is False
        with agent.running():
            unhealthy(client, "no version has been seen")
            trainer = Trainer(url)
            assert healthy(client)["version"] == 0
            server.failing = dict.fromkeys(("stage", "load"), EngineUnavailable("slow"))
            trainer.step()
            told = unhealthy(client, "slow")
            assert (told["error"], told["version"]) == ("EngineUnavailable", 0)
            server.failing = {}
            assert agent.wait(1, PATIENCE) == 1
            healthy(client)
        unhealthy(client, "not running")
        trainer.publisher.close()


def test_an_update_that_goes_well_is_healthy(url, trainer, server):
    entered, go_on = threading.Event(), threading.Event()
    with running(server, url) as (agent, client):
        agent.wait(0, PATIENCE)
        stage = server.engine.stage

        def slowly(change):
            entered.set()
            assert go_on.wait(PATIENCE)
            stage(change)

        server.engine.stage = slowly
        trainer.step()
        assert entered.wait(PATIENCE)
        told = healthy(client)
        go_on.set()
        assert (told["version"], told["lag"], told["reason"]) == (0, 1, "1 behind, being updated")
        assert agent.wait(1, PATIENCE) == 1


def test_nudges_need_the_token(url, trainer, server):
    with running(server, url, poll_seconds=FOR_EVER, token="s3cret") as (agent, client):
        agent.wait(0, PATIENCE)
        trainer.step()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"},
                        {"Authorization": "Bearer s3cret2"}, {"Authorization": b"Bearer s3cr\xe9t"}):  # fmt: skip
            answer = client.post("/nudge", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert agent.version == 0
        assert client.get("/nudge", headers={"Authorization": "Bearer s3cret"}).status_code == 405
        answer = client.post("/nudge", headers={"Authorization": "Bearer s3cret"})
        assert (answer.status_code, answer.json()["accepted"]) == (202, True)
        assert agent.wait(1, PATIENCE) == 1
        trainer.step()
        agent.nudge()
        assert agent.wait(2, PATIENCE) == 2


def test_a_token_may_end_with_a_newline(url, trainer, server):
    with running(server, url, poll_seconds=FOR_EVER, token="s3cret\n") as (_, client):
        assert client.post("/nudge", headers={"Authorization": "Bearer s3cret"}).status_code == 202


def test_without_a_token_nudges_are_refused(url, trainer, server):
    with running(server, url, poll_seconds=FOR_EVER) as (agent, client):
        agent.wait(0, PATIENCE)
        answer = client.post("/nudge", headers={"Authorization": "Bearer guess"})
        assert answer.status_code == 403
        assert "--token-file" in answer.json()["error"]


@pytest.mark.parametrize("poll_seconds", [0.05, FOR_EVER])
def test_an_engine_that_is_away_is_waited_for(url, trainer, server, monkeypatch, poll_seconds):
    monkeypatch.setattr(replica, "LOOK_SECONDS", 0.05)
    server.go_away()
    with running(server, url, poll_seconds=poll_seconds) as (agent, client):
        told = unhealthy(client, "does not answer")
        assert (told["error"], told["version"]) == ("EngineUnavailable", None)
        server.start()
        assert agent.wait(0, PATIENCE) == 0
        server.go_away()
        assert unhealthy(client, "does not answer")["version"] is None
        assert client.get("/status").json()["engine"]["error"] == "a server does not answer"
        trainer.step()
        server.failing = {}
        assert agent.wait(1, PATIENCE) == 1
        assert bits(server.model) == bits(trainer.model)
        healthy(client)


def test_an_engine_that_was_started_anew_catches_up(url, trainer, server, monkeypatch):
    """It has the weights it had at first, and nobody tells the agent."""
    monkeypatch.setattr(replica, "LOOK_SECONDS", 0.05)
    with running(server, url, poll_seconds=FOR_EVER) as (agent, client):
        agent.wait(0, PATIENCE)
        for _ in range(2):
            trainer.step()
        agent.nudge()
        agent.wait(2, PATIENCE)
        server.start()
        assert bits(server.model) != bits(trainer.model)
        eventually(lambda: server.engine.state is not None)
        assert agent.wait(2, PATIENCE) == 2
        assert bits(server.model) == bits(trainer.model)
        assert healthy(client)["version"] == 2


def test_a_broken_engine_is_told_and_its_restart_noticed(url, trainer, server, monkeypatch):
    monkeypatch.setattr(replica, "LOOK_SECONDS", 0.05)
    with running(server, url, poll_seconds=FOR_EVER) as (agent, client):
        agent.wait(0, PATIENCE)
        server.failing = dict.fromkeys(("commit", "load"), EngineBroken("a server stays paused: restart it"))
        trainer.step()
        agent.nudge()
        assert unhealthy(client, "stays paused: restart it")["error"] == "EngineBroken"
        server.start()
        assert agent.wait(1, PATIENCE) == 1
        assert bits(server.model) == bits(trainer.model)
        healthy(client)


def test_a_store_that_is_away_is_a_fault(url, trainer, server):
    store = Hooked(url)
    with running(server, store) as (agent, client):
        agent.wait(0, PATIENCE)

        def away(verb, key):
            raise StoreUnavailable("nobody is there")

        store.before = away
        told = unhealthy(client, "nobody is there")
        assert (told["error"], told["version"]) == ("StoreUnavailable", 0)
        store.before = lambda verb, key: None
        agent.nudge()
        healthy(client)


def test_the_versions_of_another_run_do_not_count(url, trainer, server):
    """An engine at version 3 of one run is not current in another whose newest is 1."""
    other = fresh_url()
    with running(server, url) as (agent, _):
        for _ in range(3):
            trainer.step()
        agent.wait(3, PATIENCE)
    second = Trainer(other, run="second")
    second.step()
    with second.publisher, running(server, other) as (agent, client):
        told = unhealthy(client, "of run demo, but")
        assert (told["error"], told["version"]) == ("RunMismatch", None)
        assert server.engine.state.run == "demo"
    with running(server, other, run="second") as (agent, client):
        eventually(lambda: (state := server.engine.state) is not None and state.run == "second")
        assert agent.wait(1, PATIENCE) == 1
        assert bits(server.model) == bits(second.model)
        assert healthy(client)["version"] == 1
        assert client.get("/status").json()["run"] == "second"


KILLED = """
import sys
sys.path[:0] = {path!r}
from deltawire.engines.agent import Agent
from support.agents import Server
with Agent(Server(), {url!r}, mirror={mirror!r}, poll_seconds=0.05, name="one") as agent, agent.running():
    agent.wait(1)
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_a_killed_agent_goes_on_from_its_mirror(tmp_path, server):
    url, mirror = str(tmp_path / "run"), str(tmp_path / "mirror")
    trainer = Trainer(url)
    trainer.step()
    program = KILLED.format(path=sys.path, url=url, mirror=mirror)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "there\n"
        first.send_signal(signal.SIGKILL)
    trainer.step()
    store = Hooked(url)
    with trainer.publisher, running(server, store, mirror=mirror, name="one") as (agent, client):
        assert agent.wait(2, PATIENCE) == 2
        assert bits(server.model) == bits(trainer.model)
        assert healthy(client)["version"] == 2
        assert agent.replica.last_pull.base == 1
    assert not [key for verb, key in store.calls if verb.startswith("get") and key.startswith("anchors/")]


def test_metrics_are_for_prometheus(url, trainer, server):
    with running(server, url, name="one") as (agent, client):
        agent.wait(0, PATIENCE)
        trainer.step()
        agent.wait(1, PATIENCE)
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        samples = {
            sample.name: (sample.value, sample.labels)
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        assert samples["deltawire_replica_version"] == (1, {"run": "demo", "replica": "one"})
        assert samples["deltawire_replica_lag"][0] == 0
        assert samples["deltawire_replica_pause_seconds"][0] > 0


def test_what_other_threads_ask_while_the_engine_goes_away(url, trainer, server):
    """`/health` and `wait` look at what the polling thread has just forgotten."""

    class Forgetting(EngineTarget):
        forgets = False

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name == "_now" and self.forgets:
                # As if the poll came between two looks.
                self._now = None
            return found

    class Recovering(replica.Replica):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name == "error":
                self.error = None
            return found

    with Recovering(url, Forgetting(server), heartbeat_seconds=None) as asked:
        asked.pull()
        asked.target.forgets = True
        assert asked.version == 0
        assert asked.version is None
        asked.error = EngineUnavailable("away")
        assert asked.status()["error"] == "away"
        assert asked.status()["error"] is None


def test_run_blocks_until_stop(url, trainer, server):
    seen = []
    with Agent(server, url, poll_seconds=FOR_EVER) as agent:
        assert agent.port is None

        def pulled(done):
            seen.append(done.version)
            agent.stop()

        agent.run(pulled)
        assert seen == [0]
        assert not agent.health().ok


def test_a_bug_in_an_adapter_is_not_hidden(url, trainer, server):
    server.failing = {"status": KeyError("weight_version")}
    with Agent(server, url) as agent:
        with pytest.raises(KeyError):
            agent.run()
        assert (agent.health().ok, agent.health().error) == (False, "KeyError")


def test_a_port_that_is_taken(url, server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressUnavailable, match=f"127.0.0.1 port {port}") as caught:
            Agent(server, url, mirror=tmp_path / "mirror", port=port)
        assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
    with pytest.raises(AddressUnavailable, match=r"192\.0\.2\.1"):
        Agent(server, url, host="192.0.2.1", port=0)
    with pytest.raises(ValueError, match="name"):
        Agent(server, url, mirror=tmp_path / "mirror", port=port, name="../x")
    Agent(server, url, mirror=tmp_path / "mirror", port=port).close()  # nothing of the failures has stayed


def test_wrong_arguments(url, server):
    for options, text in [
        ({"port": 70000}, "between 0 and 65535"),
        ({"port": 0, "host": ""}, "give a host to listen on"),
        ({"token": " "}, "token is empty"),
        ({"poll_seconds": 0}, "positive"),
    ]:
        with pytest.raises(ValueError, match=text):
            Agent(server, url, **options)


def test_two_agents_do_not_share_a_mirror(url, server, tmp_path):
    with Agent(server, url, mirror=tmp_path / "mirror"), pytest.raises(Conflict, match="another process"):
        Agent(server, url, mirror=tmp_path / "mirror")


@pytest.mark.parametrize("package", ["starlette.applications", "uvicorn", "prometheus_client"])
def test_missing_packages(url, server, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=r"pip install 'deltawire\[agent\]'"):
        Agent(server, url, port=0)
    Agent(server, url).close()


def test_logging_is_left_alone(url, server):
    loggers = [logging.getLogger(name) for name in (None, "uvicorn", "uvicorn.access", "uvicorn.error")]
    before = [(each.level, list(each.handlers), each.propagate) for each in loggers]
    with running(server, url) as (_, client):
        client.get("/health")
    assert [(each.level, list(each.handlers), each.propagate) for each in loggers] == before


def test_heartbeats_go_on_between_long_polls(url, trainer, server, monkeypatch):
    monkeypatch.setattr(replica, "LOOK_SECONDS", 0.02)
    with running(server, url, poll_seconds=FOR_EVER, name="one", heartbeat_seconds=0.02) as (agent, _):
        agent.wait(0, PATIENCE)

        def told():
            return json.loads(open_store(url).get("replicas/one.json"))["time"]

        first = told()
        eventually(lambda: told() > first + 0.1)
