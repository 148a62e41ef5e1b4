"""What goes wrong between an agent and an SGLang server: ranks that fail, restarts, kills, refusals."""

import copy
from contextlib import contextmanager

import httpx
import pytest

from deltawire.errors import EngineBroken, EngineRejected, EngineUnavailable
from deltawire.tensors.digest import Digest
from support.sglang_double import PROMPT, Trainer


def break_writes(run, rank, times, undo=True):
    """Have a rank fail after it has written some of a change."""
    live = vars(run.server.models[rank])["_deltawire_worker"].live
    original, left = live.write, [times]

    def write(token, *, undo=False):
        if left[0] and not (undo and fails_only_forward):
            left[0] -= 1
            live._memory.put(live.staged.items[:2], undo=undo)
            live.state = None
            raise RuntimeError("the device is on fire")
        original(token, undo=undo)

    fails_only_forward = undo
    live.write = write
    return live


def test_an_error_on_one_rank_is_repaired(start):
    run = start(ranks=2)
    run.attach().pull()
    run.step()
    break_writes(run, 1, 1)
    run.replica.pull()
    assert run.is_current(1)


def test_an_error_on_one_rank_is_taken_back(start):
    run = start(ranks=2)
    run.attach().pull()
    before = Trainer()
    run.step()
    break_writes(run, 1, 2)
    with pytest.raises(EngineRejected, match="rolled back: rank 1: RuntimeError: the device is on fire"):
        run.replica.pull()
    assert run.server.serves(before)
    assert run.server.version == "0"
    assert run.server.paused is None
    assert run.generate()["outputs"] == run.server.fresh_outputs(before, PROMPT, 3)
    run.replica.pull()
    assert run.is_current(1)


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_a_change_that_another_agent_has_dropped_is_refused(start, ranks, monkeypatch):
    """Another agent knows the server by another name. What some ranks have written is taken back."""
    run = start(ranks=2)
    run.attach().pull()
    before = Trainer()
    run.step()
    engine = run.replica.target.engine
    stage = engine.stage

    def stage_and_be_overtaken(change):
        stage(change)
        for rank in ranks:
            live = vars(run.server.models[rank])["_deltawire_worker"].live
            live.mark(live.state)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "stage", stage_and_be_overtaken)
        with pytest.raises(EngineRejected, match="is not the change that is staged"):
            run.replica.pull()
    assert run.replica.version == 0
    assert run.server.serves(before)
    assert run.server.paused is None
    run.replica.pull()
    assert run.is_current(1)


def test_a_server_that_cannot_be_repaired_stays_paused(start):
    run = start(ranks=2)
    run.attach().pull()
    run.step()
    live = break_writes(run, 1, 3, undo=False)
    with pytest.raises(EngineBroken, match="stays paused"):
        run.replica.pull()
    run.replica.target.refresh()
    assert run.replica.version is None
    assert run.server.paused
    assert run.server.version == "0"
    # An agent that comes after must not let it serve either, before it is whole again.
    del live.write
    replica = run.attach()
    replica.target.refresh()
    assert replica.version is None
    assert run.server.paused
    replica.pull()
    assert run.server.paused is None
    assert run.is_current(1)


def test_a_digest_that_is_wrong_stays_wrong_for_the_next_agent(start):
    run = start(ranks=2)
    run.attach().pull()
    run.step()
    live = vars(run.server.models[0])["_deltawire_worker"].live
    original = live.write

    def write(token, *, undo=False):
        original(token, undo=undo)
        live.partial += Digest(1)

    live.write = write
    with pytest.raises(EngineBroken, match="the weights have digest"):
        run.replica.pull()
    del live.write
    replica = run.attach()
    replica.target.refresh()
    assert replica.version is None
    assert run.server.paused
    replica.pull()
    assert run.server.paused is None
    assert run.is_current(1)


def test_a_refused_flush_changes_nothing(start):
    run = start(ranks=2, keeps_prefixes=True)
    run.attach().pull()
    before = Trainer()
    run.step()
    run.server.refuses_flush = True
    with pytest.raises(EngineRejected, match="nothing was changed: the cache cannot be emptied"):
        run.replica.pull()
    assert run.server.serves(before)
    assert (run.server.version, run.server.paused, run.replica.version) == ("0", None, 0)
    run.server.refuses_flush = False
    run.replica.pull()
    assert run.is_current(1)


@pytest.mark.parametrize("mode", ["patch", "disk"])
def test_a_restarted_server_catches_up(start, mode):
    run = start(ranks=2)
    replica = run.attach(mode=mode)
    replica.pull()
    run.server.restart()
    replica.target.refresh()
    assert replica.version is None
    replica.pull()
    assert run.is_current(0)
    run.step()
    run.server.restart()
    replica.pull()
    assert run.is_current(1)


def test_a_server_that_restarts_before_a_commit_is_not_paused(start, monkeypatch):
    """It has nothing of the change, and serves what it was started with."""
    run = start(ranks=2)
    replica = run.attach()
    replica.pull()
    run.step()
    engine = replica.target.engine
    commit = engine.commit

    def restart_and_commit(change):
        run.server.restart()
        return commit(change)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "commit", restart_and_commit)
        with pytest.raises(EngineRejected, match="is not the change that is staged"):
            replica.pull()
    assert run.server.paused is None
    assert replica.version is None
    replica.pull()
    assert run.is_current(1)


def test_a_server_that_restarts_before_it_is_given_a_version_is_not_at_it(start, monkeypatch):
    run = start(ranks=2)
    run.step()
    run.attach(mirror=False).pull()
    replica = run.attach(mirror=False)
    engine = replica.target.engine
    mark = engine.mark

    def restart_and_mark(state):
        run.server.restart()
        mark(state)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "mark", restart_and_mark)
        with pytest.raises(EngineRejected, match="its weights are not known"):
            replica.pull()
    assert run.server.paused is None
    assert replica.version is None
    replica.pull()
    assert run.is_current(1)


def test_a_restart_shows_even_where_the_version_is_the_same(start):
    run = start(version="0")
    replica = run.attach()
    replica.pull()
    run.server.restart()
    replica.target.refresh()
    assert run.server.version == "0"
    assert replica.version is None


@pytest.mark.parametrize("mode", ["patch", "disk"])
def test_a_restarted_agent_goes_on(start, mode):
    run = start(ranks=2)
    run.attach(mode=mode).pull()
    run.step()
    replica = run.attach(mode=mode)
    replica.pull()
    assert run.is_current(1)


class Killed(BaseException):
    """An agent that is gone from one moment to the next."""


@contextmanager
def killed_after(number):
    """No request is made any more after a number of them."""
    original, made = httpx.Client.request, [0]

    def request(self, method, path, **options):
        if made[0] == number:
            raise Killed
        made[0] += 1
        return original(self, method, path, **options)

    httpx.Client.request = request
    try:
        yield
    finally:
        httpx.Client.request = original


@pytest.mark.parametrize("mode", ["patch", "disk"])
def test_an_agent_killed_at_any_request(start, mode):
    run = start(ranks=2)
    run.attach(mode=mode).pull()
    states, version, number = {"0": Trainer()}, 0, 0
    while True:
        run.step()
        version += 1
        states[str(version)] = copy.deepcopy(run.trainer)
        killed = False
        with killed_after(number):
            try:
                run.replica.pull()
            except Killed:
                killed = True
        if run.server.paused is None:
            assert run.server.serves(states[run.server.version])
        replica = run.attach(mode=mode)
        replica.target.refresh()
        if run.server.paused is None:
            assert run.server.serves(states[run.server.version])
        assert replica.version is None or run.server.serves(states[str(replica.version)])
        replica.pull()
        assert run.is_current(version)
        assert (run.server.paused, run.server.session) == (None, False)
        if not killed:
            break
        number += 1
    assert number > 10


def test_a_server_that_is_away(start):
    run = start()
    replica = run.attach()
    replica.pull()
    run.server.stop()
    with pytest.raises(EngineUnavailable):
        replica.pull()
    assert replica.version is None
    run.server.start()
    replica.pull()
    assert run.is_current(0)


def test_weights_that_someone_else_changes(start):
    run = start(ranks=2)
    replica = run.attach()
    replica.pull()
    # Of each tensor, a step changes the first element.
    run.server.models[0].down[0, 0] += 1
    run.step()
    replica.pull()
    assert run.is_current(1)


@pytest.mark.parametrize("mode", ["patch", "disk"])
def test_a_folder_that_the_server_does_not_see(start, mode, monkeypatch):
    run = start()
    load = run.server.load
    monkeypatch.setattr(run.server, "load", lambda folder: load("/nowhere"))
    with pytest.raises(EngineRejected, match="nothing was changed: version 0 cannot be loaded"):
        run.attach(mode=mode).pull()
    assert (run.server.version, run.server.paused) == ("default", None)
    assert run.server.serves(Trainer(seed=9))


@pytest.mark.parametrize("mode", ["patch", "disk"])
def test_a_load_that_fails_half_way(start, mode, monkeypatch):
    run = start(ranks=2)
    load = run.server.load

    def fail(folder):
        run.server.models[0].load_weights(run.trainer.state_dict().items())
        raise OSError("the disk is gone")

    monkeypatch.setattr(run.server, "load", fail)
    replica = run.attach(mode=mode)
    with pytest.raises(EngineBroken, match="stays paused"):
        replica.pull()
    assert run.server.paused
    assert run.server.version == "default"
    monkeypatch.setattr(run.server, "load", load)
    replica.pull()
    assert run.is_current(0)
    assert run.server.paused is None
