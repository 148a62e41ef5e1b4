"""What follows the weights that TRL sends: engines in this process and agents elsewhere, some of them slow or away."""

import logging
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch

from deltawire import Publisher
from deltawire.engines.agent import Agent
from deltawire.engines.torch import TorchEngine
from deltawire.errors import EnginesBehind, EngineUnavailable, StoreUnavailable
from deltawire.run.signing import generate_key
from deltawire.trainers import fleet
from deltawire.trainers.trl import AgentAt, DeltawireTransfer, Serving
from support.chains import Hooked, fresh_url
from support.servers import free_ports
from support.waiting import PATIENCE, eventually

FOR_EVER = 3600.0


def module(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))


def bits(model):
    return {name: value.detach().bfloat16().view(torch.int16).numpy().tobytes() for name, value in
            model.named_parameters()}  # fmt: skip


class Trainer:
    """Calls what TRL calls, in its order."""

    def __init__(self, transfer):
        self.transfer, self.model = transfer, module()
        transfer.init_weight_transfer()

    def sync(self):
        self.transfer.pause()
        self.transfer.send_weights(self.model.named_parameters())
        self.transfer.resume()

    def step(self):
        with torch.no_grad():
            for value in self.model.parameters():
                value[torch.rand_like(value) < 0.05] += 0.01
        self.sync()


class Server:
    """An engine, with other weights than the trainer's; it can be held up, and fail."""

    kind = "torch"

    def __init__(self, address="a server"):
        self.address = address
        self.model = module(seed=1).bfloat16()
        self.engine = TorchEngine(self.model, threads=1)
        self.free, self.error = threading.Event(), None
        self.free.set()

    def __getattr__(self, name):
        if self.error is not None and name in ("status", "bind", "digest", "stage"):
            raise self.error
        return getattr(self.engine, name)

    def commit(self, change):
        assert self.free.wait(PATIENCE)
        return self.engine.commit(change)


@contextmanager
def training(store=None, **options):
    transfer = DeltawireTransfer(store or fresh_url(), **{"timeout": PATIENCE, "queue_size": 9, **options})
    try:
        yield Trainer(transfer)
    finally:
        for each in options.get("engines", ()):
            if isinstance(each, Server):
                each.free.set()
        with suppress(Exception):
            transfer.destroy()


def test_all_follow_as_soon_as_a_version_is_committed(tmp_path):
    servers = [Server(f"http://host:{port}/") for port in (1, 2)]
    servers += [TorchEngine(module(seed).bfloat16(), threads=1) for seed in (2, 3)]
    names = ["host:1", "host:2", "Sequential-in-this-process", "Sequential-in-this-process-3"]
    # They would not look again by themselves in time.
    with training(engines=servers, poll_seconds=FOR_EVER, mirrors=tmp_path) as trainer:
        transfer = trainer.transfer
        assert (transfer.served, transfer.served_version, transfer.lag) == ({}, None, None)
        trainer.sync()
        for version in range(1, 4):
            trainer.step()
            eventually(lambda version=version: transfer.served_version == version)
            assert transfer.lag == 0
            assert all(bits(each.model) == bits(trainer.model) for each in servers)
        assert list(transfer.served) == names
        assert all(each.error is None for each in transfer.served.values())
        numbers = transfer.metrics()
        assert [numbers[f"deltawire/engine/{name}/version"] for name in names] == [3] * 4
        assert [numbers[f"deltawire/engines/{each}"] for each in ("count", "version_min", "lag_max")] == [4, 3, 0]
        assert (numbers["deltawire/engines/unknown"], numbers["deltawire/engines/failing"]) == (0, 0)
        assert all(isinstance(value, int | float) for value in numbers.values())
    assert len(list(tmp_path.iterdir())) == 4
    assert transfer.served_version == 3


def test_the_last_version_arrives_before_training_ends():
    server = Server()
    with training(engines=[server]) as trainer:
        for _ in range(3):
            trainer.step()
        trainer.transfer.destroy()
        assert trainer.transfer.served == {"a-server": Serving(2, None, pytest.approx(0, abs=PATIENCE))}
        assert bits(server.model) == bits(trainer.model)
        # TRL would not call init_weight_transfer again for a second train().
        trainer.step()
        trainer.transfer.destroy()
        assert trainer.transfer.served_version == trainer.transfer.version == 3
        assert bits(server.model) == bits(trainer.model)


def test_one_that_is_away_stops_nothing_and_comes_back(caplog):
    well, away = Server("well"), Server("away")
    away.error = EngineUnavailable("nobody answers")
    with training(engines=[well, away], poll_seconds=0.05) as trainer, caplog.at_level(logging.WARNING):
        transfer = trainer.transfer
        for _ in range(3):
            trainer.step()
        eventually(lambda: transfer.served["well"].version == 2 and transfer.served["away"].error)
        assert transfer.served["away"] == Serving(None, "nobody answers")
        assert (transfer.served_version, transfer.lag) == (None, None)
        numbers = transfer.metrics()
        assert (numbers["deltawire/engines/unknown"], numbers["deltawire/engines/failing"]) == (1, 1)
        assert "deltawire/engines/version_min" not in numbers
        trainer.step()
        assert "away is not following the run: nobody answers" in caplog.text
        away.error = None
        eventually(lambda: transfer.served_version == 3 and transfer.served["away"].error is None)
        assert bits(away.model) == bits(trainer.model)
        trainer.step()
        assert "away follows the run again" in caplog.text
        # It is known at once that it has gone, not at the next version.
        eventually(lambda: transfer.served_version == 4)
        away.error = EngineUnavailable("gone again")
        eventually(lambda: transfer.served["away"].version is None)
        started = time.monotonic()
        transfer.destroy()
        assert time.monotonic() - started < fleet.GRACE_SECONDS + 60
        assert "do not serve version 4" in caplog.text
        assert (transfer.served["well"].version, transfer.served["away"].version) == (4, None)


def test_a_slow_one_keeps_nobody_waiting():
    quick, slow = Server("quick"), Server("slow")
    with training(engines=[quick, slow]) as trainer:
        transfer = trainer.transfer
        trainer.sync()
        eventually(lambda: transfer.served_version == 0)
        slow.free.clear()
        for number in range(1, 4):
            trainer.step()
            eventually(lambda number=number: transfer.served["quick"].version == number)
            assert (transfer.served["slow"].version, transfer.lag) == (0, number)
        slow.free.set()
        eventually(lambda: transfer.served_version == 3)
        assert transfer.lag == 0


def test_max_lag_waits_and_then_complains():
    quick, slow = Server("quick"), Server("slow")
    with training(engines=[quick, slow], max_lag=1) as trainer:
        transfer = trainer.transfer
        trainer.sync()
        assert transfer.served_version == 0  # weights that are not known are too old
        slow.free.clear()
        trainer.step()
        assert transfer.served["slow"].version == 0
        threading.Timer(0.3, slow.free.set).start()
        trainer.step()
        assert transfer.served["slow"].version >= 1
        assert transfer.metrics()["deltawire/transfer/wait_seconds"] > 0.1
        eventually(lambda: transfer.lag == 0)
        slow.free.clear()
        trainer.step()
        transfer._timeout = 0.5
        with pytest.raises(EnginesBehind, match=r"more than 1 syncs behind: slow at version 2 .*store has version 4"):
            trainer.step()
        slow.free.set()


def test_with_no_lag_allowed_a_sync_ends_when_all_serve_it():
    servers = [Server(str(number)) for number in range(3)]
    store, failures = Hooked(fresh_url()), []

    def fail(verb, key):
        if verb == "put" and key.startswith("deltas/") and failures:
            raise failures.pop()

    store.before = fail
    with training(store, engines=servers, max_lag=0) as trainer:
        for number in range(4):
            if number == 2:
                failures.append(StoreUnavailable("down"))  # so the version is tried again while it is waited for
            trainer.step()
            assert trainer.transfer.served_version == trainer.transfer.version == number
            assert all(bits(each.model) == bits(trainer.model) for each in servers)
        assert trainer.transfer.metrics()["deltawire/publish/failed"] == 1


def test_a_store_that_is_down_counts_as_lag():
    store = Hooked(fresh_url())
    with training(store, engines=[Server()], max_lag=1) as trainer:
        trainer.sync()

        def fail(verb, key):
            if verb == "put" and key.startswith("deltas/"):
                raise StoreUnavailable("no network")

        store.before = fail
        trainer.step()
        assert trainer.transfer.lag == 1
        trainer.transfer._timeout = 1.5
        with pytest.raises(EnginesBehind, match="failed: no network") as caught:
            trainer.step()
        assert caught.value.behind["a-server"].version == caught.value.version == 0
        store.before = lambda verb, key: None


def lose_the_answer(store, key):
    """The next commit under a key happens, and its answer is lost."""

    def lose(verb, found):
        if (verb, found) == ("create", key):
            store.after = lambda verb, key: None
            raise StoreUnavailable("the answer was lost", uncertain=True)

    store.after = lose


def test_a_sync_waits_for_its_own_weights_after_a_commit_whose_answer_was_lost():
    store, server = Hooked(fresh_url()), Server()
    with training(store, engines=[server], max_lag=0) as trainer:
        trainer.sync()
        lose_the_answer(store, "manifests/00000001.json")
        for _ in range(4):
            trainer.step()
            assert bits(server.model) == bits(trainer.model)
            assert trainer.transfer.lag == 0


def test_a_version_that_is_published_again_counts_whatever_its_number():
    store, server = Hooked(fresh_url()), Server()
    with training(store, engines=[server], max_lag=0) as trainer:
        trainer.sync()
        lose_the_answer(store, "manifests/00000001.json")
        server.error = EngineUnavailable("away")
        syncing = threading.Thread(target=trainer.step)
        syncing.start()
        # The engine sees only the second attempt.
        eventually(lambda: trainer.transfer.version == 2)
        server.error = None
        syncing.join(PATIENCE)
        assert not syncing.is_alive()
        assert trainer.transfer.served_version == 2
        assert bits(server.model) == bits(trainer.model)


def test_a_restarted_training_goes_on_with_its_run():
    url, server = fresh_url(), Server()
    with training(url, engines=[server], max_lag=0) as trainer:
        trainer.sync()
        old = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.step()
        weights = trainer.model.state_dict()
    with training(url, engines=[server], max_lag=0) as trainer:
        trainer.model.load_state_dict(weights)
        trainer.sync()  # a checkpoint with what the store has: nothing to publish, and the server has it
        assert (trainer.transfer.last, trainer.transfer.served_version, trainer.transfer.lag) == (None, 1, 0)
        trainer.step()
        assert trainer.transfer.served_version == 2
    with training(url, engines=[server], max_lag=0) as trainer:
        trainer.model.load_state_dict(old)
        trainer.sync()  # an older checkpoint: a new version with the old weights
        assert trainer.transfer.served_version == 3
        assert bits(server.model) == bits(trainer.model)


def test_what_an_agent_did_not_expect_does_not_end_it(caplog):
    server = Server()
    server.error = RuntimeError("a bug")
    with training(engines=[server], poll_seconds=0.05) as trainer:
        trainer.sync()
        eventually(lambda: "a bug" in (trainer.transfer.served["a-server"].error or ""))
        server.error = None
        eventually(lambda: trainer.transfer.served_version == 0)
        assert "will be restarted" in caplog.text


@contextmanager
def agent_at(url, server, **options):
    with Agent(server, url, port=0, heartbeat_seconds=None, **options) as agent, agent.running():
        yield f"http://127.0.0.1:{agent.port}"


def test_agents_elsewhere_are_nudged_and_asked(caplog):
    url, servers = fresh_url(), [Server(str(number)) for number in range(4)]
    with (
        agent_at(url, servers[0], poll_seconds=FOR_EVER, token="secret") as nudged,
        agent_at(url, servers[1], poll_seconds=0.05) as asked,
        agent_at(url, servers[2], poll_seconds=0.05, token="secret") as refused,
        agent_at(fresh_url(), servers[3], poll_seconds=0.05) as other,
    ):
        away = f"http://127.0.0.1:{free_ports(1)[0]}"
        places = [AgentAt(nudged, "secret"), AgentAt(asked), AgentAt(refused, "wrong"), AgentAt(other), AgentAt(away)]
        names = [place.url.removeprefix("http://") for place in places]
        assert "secret" not in repr(places[0])
        with training(url, engines=places, poll_seconds=0.05) as trainer:
            served = lambda: [trainer.transfer.served[name] for name in names]  # noqa: E731
            trainer.sync()
            for version in range(1, 4):
                trainer.step()
                eventually(lambda version=version: [each.version for each in served()] == [version] * 3 + [None] * 2)
            assert all(bits(each.model) == bits(trainer.model) for each in servers[:3])
            assert (served()[0].error, served()[1].error) == (None, None)
            assert "401" in served()[2].error
            assert "does not answer" in served()[4].error
            trainer.step()
            assert f"{names[4]} is not following the run" in caplog.text
            trainer.transfer.destroy()
        # They go on without the trainer, and the last of it is not lost on them.
        eventually(lambda: servers[0].engine.state.version == 4)


def test_an_agent_of_another_run_is_not_taken_for_ours():
    ours, theirs, server = fresh_url(), fresh_url(), Server()
    with training(theirs, run="theirs") as other, training(ours, run="ours") as trainer:
        other.sync()
        other.transfer.last.wait(PATIENCE)
        with agent_at(theirs, server, poll_seconds=0.05) as address:
            eventually(lambda: server.engine.state)
            trainer.transfer = DeltawireTransfer(ours, run="ours", engines=[AgentAt(address)], poll_seconds=0.05)
            trainer.sync()
            (name,) = trainer.transfer.served
            eventually(lambda: "follows run theirs, not ours" in (trainer.transfer.served[name].error or ""))
            assert trainer.transfer.served_version is None
            trainer.transfer.destroy()


def test_engines_refuse_what_the_trainer_did_not_sign(tmp_path, monkeypatch):
    # A forger's program would not refuse to forge.
    monkeypatch.setattr("deltawire.run.run.Run.check_key", lambda _: None)
    generate_key(tmp_path / "key")
    url, server = fresh_url(), Server()
    with training(url, engines=[server], max_lag=0, sign_with=tmp_path / "key", poll_seconds=0.05) as trainer:
        trainer.sync()
        with Publisher(url, module(seed=5)) as forger:
            forger.publish().wait(PATIENCE)
        eventually(lambda: "sign" in (trainer.transfer.served["a-server"].error or ""))
        assert trainer.transfer.served_version == 0
        assert bits(server.model) == bits(trainer.model)


def test_its_numbers_are_in_the_trainers_log():
    pytest.importorskip("transformers")
    seen, state = {}, SimpleNamespace(global_step=7, log_history=[{"loss": 1.0, "reward": 0.25}])
    tracker = SimpleNamespace(on_log=lambda *_, logs, **__: seen.update(logs))
    host = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[tracker]), state=state)
    with training(engines=[Server()], max_lag=0) as trainer:
        trainer.transfer.attach(host)
        trainer.sync()
        logs = {"loss": 1.0}
        for callback in host.callback_handler.callbacks:
            callback.on_log(None, state, None, logs=logs)
        manifest = trainer.transfer.publisher.run.manifest(0)
        assert (manifest.step, manifest.metadata) == (7, {"sync": 1, "reward": 0.25})
    for each in (seen, logs, state.log_history[-1]):
        assert (each["loss"], each["deltawire/engines/version_min"], each["deltawire/transfer/syncs"]) == (1.0, 0, 1)


def test_wrong_engines():
    url = fresh_url()
    for wrong in ("127.0.0.1:8000", "s3://bucket", "http://", AgentAt("host:9100")):
        with pytest.raises(ValueError, match="server's URL"):
            DeltawireTransfer(url, engines=[wrong])
    with pytest.raises(TypeError, match="not int"):
        DeltawireTransfer(url, engines=[8000])
    with pytest.raises(ValueError, match="twice"):
        DeltawireTransfer(url, engines=["http://user:password@host:1", AgentAt("http://host:1/")])
    with pytest.raises(ValueError, match="max_lag"):
        DeltawireTransfer(url, max_lag=1)
    with pytest.raises(ValueError, match="max_lag"):
        DeltawireTransfer(url, max_lag=-1, engines=["http://host:1"])
    with pytest.raises(ValueError, match="poll_seconds more than 0"):
        DeltawireTransfer(url, poll_seconds=0)
