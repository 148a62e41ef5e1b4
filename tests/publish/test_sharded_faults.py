"""When ranks fail: all learn of it in bounded time, nothing is published by halves, and the next version covers it."""

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from deltawire import Replica, ShardedPublisher
from deltawire.errors import BrokenChain, Fenced, RankFailed, StoreUnavailable
from deltawire.publish import leader
from deltawire.publish.sharded import exchange
from support.chains import Hooked
from support.processes import change, gathered, run_ranks, same_bits, sharded_model, train_step
from support.waiting import PATIENCE

pytestmark = pytest.mark.process

# Ranks that only wait for a core must not pass for dead.
TIMEOUT = 5.0


def assert_published(url, version, state):
    with Replica(url, {}, heartbeat_seconds=None) as replica:
        replica.pull()
        assert replica.version == version
        assert same_bits(replica.target.weights(), state)
        return replica.run


def nothing(verb, key):
    pass


def fail_uploads(rank, url, broken):
    store, model = Hooked(url), sharded_model()

    def fail(verb, key):
        if verb == "put" and rank == broken:
            raise StoreUnavailable("no answer", refused=False, uncertain=False)

    with ShardedPublisher(store, model, timeout=20) as publisher:
        store.before = fail
        for _ in range(2):  # an anchor, and then another one that covers it
            with pytest.raises(StoreUnavailable, match="no answer"):
                publisher.publish().wait(PATIENCE)
        store.before = nothing
        assert publisher.publish().wait(PATIENCE).version == 0
        change(model, 1)
        store.before = fail
        with pytest.raises(StoreUnavailable, match="no answer"):
            publisher.publish().wait(PATIENCE)
        assert publisher.version == 0
        store.before = nothing
        change(model, 2)
        assert publisher.publish().wait(PATIENCE).version == 1
        assert publisher.metrics()["deltawire/publish/failed"] == 3
    return gathered(model)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failed_upload_fails_all_ranks_and_is_covered(tmp_path, broken):
    state = run_ranks(2, fail_uploads, str(tmp_path), broken)[0]
    run = assert_published(tmp_path, 1, state)
    assert run.manifest(1).hop.base == 0


def checkpointed(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def lose_rank_1(rank, url, checkpoint):
    store, model = Hooked(url), sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_step(model, optimizer, rank, 0)

    def die(verb, key):
        if verb == "put" and key.startswith("deltas/00000001") and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    store.before = die
    publisher = ShardedPublisher(store, model, timeout=TIMEOUT, run="demo")
    publisher.publish().wait(PATIENCE)
    dcp.save(checkpointed(model, optimizer), checkpoint_id=checkpoint)
    change(model, 1)
    started = time.monotonic()
    publication = publisher.publish()
    with pytest.raises(RankFailed, match="rank 1") as caught:
        publication.wait(PATIENCE)
    took = time.monotonic() - started
    assert caught.value.rank == 1
    assert publisher.version == 0
    with pytest.raises(RankFailed, match="rank 1"):
        publisher.publish().wait(PATIENCE)
    publisher.close()
    return took, time.monotonic() - started


def go_on(rank, url, checkpoint):
    """As many ranks as there are now, from the trainer's own checkpoint."""
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = checkpointed(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    with ShardedPublisher(url, model, timeout=20) as publisher:
        assert (publisher.resumed, publisher.version, publisher.run.id) == (True, 0, "demo")
        train_step(model, optimizer, rank, 1)
        assert publisher.publish().wait(PATIENCE).version == 1
    return gathered(model)


def test_a_killed_rank_fails_the_others_in_time_and_a_restart_goes_on(tmp_path):
    url, checkpoint = str(tmp_path / "run"), str(tmp_path / "checkpoint")
    for took, closed in [times for times in run_ranks(4, lose_rank_1, url, checkpoint, killed=[1]) if times]:
        assert took < 6 * TIMEOUT
        assert closed < 9 * TIMEOUT
    state = run_ranks(2, go_on, url, checkpoint)[0]
    run = assert_published(url, 1, state)
    assert run.manifest(1).hop.base == 0


def lose_rank_0(rank, url, port, timeout):
    ranks_store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0) if port else None
    store, model = Hooked(url), sharded_model()

    def die(verb, key):
        if verb == "create" and key == "manifests/00000001.json":
            os.kill(os.getpid(), signal.SIGKILL)

    store.before = die
    publisher = ShardedPublisher(store, model, timeout=timeout, rank_store=ranks_store)
    publisher.publish().wait(PATIENCE)
    change(model, 1)
    started = time.monotonic()
    publication = publisher.publish()
    with pytest.raises(RankFailed, match="rank 0"):
        publication.wait(PATIENCE)
    publisher.close()
    return time.monotonic() - started


@pytest.mark.parametrize("holds_store", [False, True])
def test_rank_0_killed_before_its_commit(tmp_path, holds_store):
    """The others learn of it by its silence, or at once where the store of the ranks goes with it."""
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port if holds_store else None
    timeout = 30 if holds_store else TIMEOUT
    took = run_ranks(2, lose_rank_0, str(tmp_path), port, timeout, killed=[0])[1]
    assert took < 30
    with Replica(tmp_path, {}, heartbeat_seconds=None) as replica:
        assert replica.run.versions() == [0]


def come_late(rank, url):
    model = sharded_model()
    with ShardedPublisher(url, model, timeout=1.0) as publisher:
        publisher.publish().wait(PATIENCE)
        for late in (1, 0):
            change(model, late)
            dist.barrier()
            if rank != late:
                with pytest.raises(RankFailed, match=f"rank {late}: it has not made publish call"):
                    publisher.publish().wait(PATIENCE)
            dist.barrier()
            if rank == late:
                publication = publisher.publish()
                # What rank 0 publishes late is published after all: the others have staged it.
                if rank == 0:
                    publication.wait(PATIENCE)
                else:
                    with pytest.raises(RankFailed, match="rank 1: it has not made publish call"):
                        publication.wait(PATIENCE)
            dist.barrier()
            publisher.flush(30)
            change(model, 5 + late)
            publisher.publish().wait(PATIENCE)
        assert publisher.version == 3
        assert publisher.num_failed == 1 + rank  # also what it was too late for
    return gathered(model)


def test_a_rank_that_does_not_publish(tmp_path):
    assert_published(tmp_path, 3, run_ranks(2, come_late, tmp_path)[0])


def fail_to_stage(rank, url, broken):
    model = sharded_model()
    with ShardedPublisher(url, model, timeout=20) as publisher:
        read, states = publisher._worker.source.read, []

        def fail():
            raise OSError("no memory")

        for number, anchor in enumerate((True, False, True, False)):
            if rank == broken:
                publisher._worker.source.read = fail
                with pytest.raises(OSError, match="no memory"):
                    publisher.publish(anchor=anchor)
                publisher._worker.source.read = read
            else:
                with pytest.raises(RankFailed, match="no memory"):
                    publisher.publish(anchor=anchor).wait(PATIENCE)
            change(model, number)
            assert publisher.publish().wait(PATIENCE).version == number
            states.append(gathered(model))
    return states


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_take_its_weights(tmp_path, broken):
    states = run_ranks(2, fail_to_stage, tmp_path, broken)[0]
    run = assert_published(tmp_path, 3, states[3])
    # After an anchor that failed comes an anchor: not all ranks know the weights before.
    assert [run.manifest(version).hop.base for version in range(4)] == [None, 0, None, 2]


def lose_the_commit(rank, url, written):
    store, model, states = Hooked(url), sharded_model(), []

    def lose(verb, key):
        if verb == "create" and key == "manifests/00000001.json":
            store.before = store.after = nothing
            raise StoreUnavailable("the answer was lost", uncertain=True)

    with ShardedPublisher(store, model, timeout=20) as publisher:
        publisher.publish().wait(PATIENCE)
        setattr(store, "after" if written else "before", lose)
        change(model, 1)
        states.append(gathered(model))
        with pytest.raises(StoreUnavailable, match="lost"):
            publisher.publish().wait(PATIENCE)
        change(model, 2)
        states.append(gathered(model))
        assert publisher.publish().wait(PATIENCE).version == publisher.version == 2
    return states


@pytest.mark.parametrize("written", [True, False])
def test_a_commit_whose_answer_is_lost_is_resolved_by_the_next_publish(tmp_path, written):
    states = run_ranks(2, lose_the_commit, str(tmp_path), written)[0]
    assert_published(tmp_path, 2, states[1])
    with Replica(tmp_path, {}, heartbeat_seconds=None) as replica:
        replica.pull(1)
        assert same_bits(replica.target.weights(), states[0])


def fence(rank, url):
    model = sharded_model()
    first = ShardedPublisher(url, model, timeout=20)
    first.publish().wait(PATIENCE)
    with ShardedPublisher(url, model, timeout=20) as second:
        assert second.resumed
        change(model, 1)
        second.publish().wait(PATIENCE)
        lost = first.publish()
        with pytest.raises(Fenced, match="another writer"):
            lost.wait(PATIENCE)
        with pytest.raises(Fenced, match="another writer"):
            first.publish()
        first.close()
        change(model, 2)
        assert second.publish().wait(PATIENCE).version == 2
    with ShardedPublisher(url, model, timeout=20) as third:
        assert third.resumed
    change(model, 3)
    with ShardedPublisher(url, model, timeout=20) as fourth:
        assert not fourth.resumed
        assert fourth.publish().wait(PATIENCE).version == 3
    return gathered(model)


def test_a_second_writer_fences_all_ranks_and_other_weights_start_with_an_anchor(tmp_path):
    run = assert_published(tmp_path, 3, run_ranks(2, fence, tmp_path)[0])
    assert [run.manifest(version).hop.base for version in range(4)] == [None, 0, 1, None]


class Repeating(Hooked):
    """A store whose uploads break off after two pieces and start again."""

    def put(self, key, data):
        if not isinstance(data, bytes):
            pieces = iter(data)
            for _ in range(3):
                next(pieces, None)
            del pieces
        super().put(key, data)


def repeat_uploads(rank, url):
    exchange.PIECE = 64  # many pieces, also of these small tensors
    store, model, failing = Repeating(url), sharded_model(), []

    def fail(verb, key):
        if verb == "put" and rank == 1 and key.startswith("deltas/00000004-from-00000000"):
            failing.append(key)
            raise StoreUnavailable("no answer")

    store.before = fail
    with ShardedPublisher(store, model, timeout=20, anchors=3) as publisher:
        for number in range(9):
            publisher.publish().wait(PATIENCE)
            publisher.flush(30)
            state = gathered(model)
            change(model, number)
        dist.barrier()  # rank 0 has written all hops
        # No message is left in the store but the last: in a long run they would add up.
        assert len(publisher._ranks.store.list_keys()) < 10, publisher._ranks.store.list_keys()
    assert bool(failing) == (rank == 1)
    return state


def test_uploads_that_are_repeated_and_upkeep_that_fails(tmp_path):
    run = assert_published(tmp_path, 8, run_ranks(2, repeat_uploads, str(tmp_path))[0])
    hops = {(hop.version, hop.base) for hop in run.hops()}
    assert {(8, 4), (3, None), (6, None)} <= hops
    with pytest.raises(BrokenChain):
        run.hop(4, 0)


def refuse_arguments(rank, url):
    model = sharded_model()
    with ShardedPublisher(url, model, timeout=20) as publisher:
        publisher.publish().wait(PATIENCE)
        change(model, 1)
        for wrong, said in (({"metadata": {"loss": float("nan")}}, "JSON"), ({"step": 1.5}, "whole number")):
            if rank == 0:
                with pytest.raises((TypeError, ValueError), match=said):
                    publisher.publish(**wrong)
            else:
                with pytest.raises(RankFailed, match=said):
                    publisher.publish().wait(PATIENCE)
            dist.barrier()  # a rank that is late is told why the last call failed
        change(model, 2)
        assert publisher.publish(step=np.int64(2)).wait(PATIENCE).version == 1
        assert publisher.num_failed == 2
    return gathered(model)


def test_a_call_that_is_refused_on_one_rank_counts_on_all(tmp_path):
    """Else later versions would be made of weights of different steps."""
    assert_published(tmp_path, 1, run_ranks(2, refuse_arguments, tmp_path)[0])


def fail_for_long(rank, url):
    leader.MOST_FAILED = 3
    store, model = Hooked(url), sharded_model()

    def fail(verb, key):
        if verb == "put" and rank == 1:
            raise StoreUnavailable("no answer", refused=False, uncertain=False)

    with ShardedPublisher(store, model, timeout=20) as publisher:
        for version in (0, 1):
            store.before = fail
            for number in range(8):
                change(model, number)
                with pytest.raises(StoreUnavailable, match="no answer"):
                    publisher.publish().wait(PATIENCE)
            dist.barrier()
            assert len(publisher._worker._held) <= 4
            assert all(len(held.history._records) <= 3 for held in publisher._worker._held.values())
            store.before = nothing
            assert publisher.publish().wait(PATIENCE).version == version
        change(model, 9)
        assert publisher.publish().wait(PATIENCE).version == 2
    return gathered(model)


def test_a_store_that_stays_away_costs_no_more_and_more_memory(tmp_path):
    run = assert_published(tmp_path, 2, run_ranks(2, fail_for_long, str(tmp_path))[0])
    assert [run.manifest(version).hop.base for version in range(3)] == [None, None, 1]


def settle_late(rank, url):
    leader.MOST_FAILED = 2
    store, model = Hooked(url), sharded_model()

    def lose(verb, key):
        if verb == "create" and key == "manifests/00000001.json":
            raise StoreUnavailable("the answer was lost", uncertain=True)

    with ShardedPublisher(store, model, timeout=20) as publisher:
        publisher.publish().wait(PATIENCE)
        store.after = lose
        for number in range(3):
            change(model, number)
            with pytest.raises(StoreUnavailable, match="lost"):
                publisher.publish().wait(PATIENCE)
        store.after = nothing
        assert publisher.publish().wait(PATIENCE).version == 2
        change(model, 4)
        assert publisher.publish().wait(PATIENCE).version == 3
    return gathered(model)


def test_a_commit_that_is_settled_after_its_weights_were_given_up(tmp_path):
    run = assert_published(tmp_path, 3, run_ranks(2, settle_late, str(tmp_path))[0])
    assert [run.manifest(version).hop.base for version in range(4)] == [None, 0, None, 2]


def stop_early(rank, url):
    """Rank 0 stops while another one is taking its weights; that one is not left waiting, nor later ones."""
    model = sharded_model()
    publisher = ShardedPublisher(url, model, timeout=TIMEOUT)
    publisher.publish().wait(PATIENCE)
    dist.barrier()
    if rank == 0:
        publisher.close()
        return
    read = publisher._worker.source.read

    def read_slowly():
        publisher._thread.join(30)
        return read()

    publisher._worker.source.read = read_slowly
    publication = publisher.publish()
    with pytest.raises(RankFailed, match="rank 0 has stopped"):
        publication.wait(PATIENCE)
    with pytest.raises(RankFailed, match="rank 0 has stopped"):
        publisher.publish()
    publisher.close()


def test_rank_0_stops_before_the_others(tmp_path):
    run_ranks(2, stop_early, tmp_path)


def break_down(rank, url):
    """What nobody has thought of, in the thread of rank 0."""
    model = sharded_model()
    publisher = ShardedPublisher(url, model, timeout=TIMEOUT)
    publisher.publish().wait(PATIENCE)
    if rank == 0:

        def fail(manifest, call):
            raise KeyError("a mistake")

        publisher._leader.note = fail
    change(model, 1)
    with pytest.raises(RankFailed, match="a mistake" if rank == 0 else "rank 0 has stopped"):
        publisher.publish().wait(PATIENCE)
    with pytest.raises(RankFailed, match="a mistake" if rank == 0 else "rank 0 has stopped"):
        publisher.publish()
    publisher.close()


def test_a_thread_that_breaks_down_leaves_nobody_waiting(tmp_path):
    run_ranks(2, break_down, tmp_path)


def close_after_a_pause(rank, url):
    model = sharded_model()
    publisher = ShardedPublisher(url, model, timeout=TIMEOUT)
    publisher.publish().wait(PATIENCE)
    publisher.flush(30)
    dist.barrier()
    time.sleep(1.5 * TIMEOUT + (0.5 * TIMEOUT if rank == 0 else 0))
    started = time.monotonic()
    publisher.close()
    return time.monotonic() - started


def test_a_rank_that_closes_after_a_pause_waits_for_rank_0(tmp_path):
    first, _ = run_ranks(2, close_after_a_pause, tmp_path)
    assert first < TIMEOUT


def leave_out_a_call(rank, url):
    model = sharded_model()
    with ShardedPublisher(url, model, timeout=TIMEOUT) as publisher:
        publisher.publish(step=0).wait(PATIENCE)
        change(model, 1)
        reason = r"rank 1: its publish call number 2 was for step 2, rank 0's for step 1"
        with pytest.raises(RankFailed, match=reason):
            publisher.publish(step=1 if rank == 0 else 2).wait(PATIENCE)


def test_weights_of_different_steps_are_never_one_version(tmp_path):
    run_ranks(2, leave_out_a_call, tmp_path)
    with Replica(tmp_path, {}, heartbeat_seconds=None) as replica:
        assert replica.run.versions() == [0]
