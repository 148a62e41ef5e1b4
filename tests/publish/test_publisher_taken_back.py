"""Calls of `publish` that wait, and are taken back: for a later one that takes them in, or because they fail."""

import _thread
import threading
from itertools import count

import numpy as np
import pytest

from deltawire import Publisher
from deltawire.errors import StoreUnavailable, UnknownParameter
from deltawire.publish.history import History
from support.chains import Hooked, copy_of, fresh_url, make_weights, pulled, same, step
from support.waiting import PATIENCE


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_rejected_call_loses_no_call_that_waits(rng):
    url, weights, uploads = fresh_url(), make_weights(), threading.Event()
    store = Hooked(url)
    store.before = lambda verb, key: uploads.wait(PATIENCE) if verb == "put" else None
    publisher = Publisher(store, weights, when_full="coalesce")
    for _ in range(2):
        step(weights, rng)
        publisher.publish()
    staged = copy_of(weights)
    for wrong in ({"step": "one"}, {"metadata": {1: 2}}):
        with pytest.raises(TypeError):
            publisher.publish(**wrong)
    uploads.set()
    publisher.close()
    assert same(pulled(url), staged)


def test_a_call_is_taken_back_together_with_one_that_was_refused_after_it(rng):
    url, weights, uploads = fresh_url(), make_weights(), threading.Event()
    store = Hooked(url)
    store.before = lambda verb, key: uploads.wait(PATIENCE) if verb == "put" else None
    with Publisher(store, lambda: weights, when_full="coalesce") as publisher:
        publications = [publisher.publish() for _ in range(2)]
        step(weights, rng)
        weights["__metadata__"] = weights["scale"]
        with pytest.raises(ValueError, match="reserved"):
            publisher.publish(anchor=True)
        del weights["__metadata__"]
        publications.append(publisher.publish())
        uploads.set()
        assert [each.wait(PATIENCE).version for each in publications] == [0, 1, 1]
    assert same(pulled(url), copy_of(weights))


@pytest.mark.parametrize("is_covered", [False, True])
def test_a_call_that_was_taken_back_for_one_that_failed_is_a_failure(rng, is_covered):
    url, weights, uploads = fresh_url(), make_weights(), threading.Event()
    store = Hooked(url)
    store.before = lambda verb, key: uploads.wait(PATIENCE) if verb == "put" else None
    publisher = Publisher(store, lambda: weights, when_full="coalesce")
    publications = [publisher.publish() for _ in range(2)]
    step(weights, rng)
    scale = weights.pop("scale")
    with pytest.raises(UnknownParameter):
        publisher.publish()
    weights["scale"] = scale
    uploads.set()
    assert [each.join() for each in publications] == [True, False]
    if is_covered:
        publisher.publish()
        publisher.close()
        assert same(pulled(url), copy_of(weights))
    else:
        with pytest.raises(UnknownParameter):
            publisher.close()


def test_an_interrupt_while_a_call_is_taken_back_leaves_nothing_half_done(rng, monkeypatch):
    url, weights, uploads = fresh_url(), make_weights(), threading.Event()
    store = Hooked(url)
    store.before = lambda verb, key: uploads.wait(PATIENCE) if verb == "put" else None
    publisher = Publisher(store, weights, when_full="coalesce")
    publications = []
    for _ in range(2):
        step(weights, rng)
        publications.append(publisher.publish())
    revert_chunk, numbers = History._revert_chunk, count()

    def interrupted(*arguments):
        if next(numbers) == 1:
            _thread.interrupt_main()
        revert_chunk(*arguments)

    monkeypatch.setattr(History, "_revert_chunk", interrupted)
    step(weights, rng)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish()
    uploads.set()
    assert publications[0].join()
    with pytest.raises(KeyboardInterrupt):
        publications[1].wait(PATIENCE)
    publisher.publish().wait(PATIENCE)
    publisher.close()
    assert same(pulled(url), copy_of(weights))


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("method", ["stage", "_add"])
def test_an_interrupt_between_staging_and_the_queue_takes_the_call_back(rng, monkeypatch, method, anchor):
    """Nobody waits for a version that is in no queue, and the next one does not build on weights that are in none."""
    url, weights, uploads = fresh_url(), make_weights(), threading.Event()
    store = Hooked(url)
    publisher = Publisher(store, weights, when_full="coalesce")
    publisher.publish().wait(PATIENCE)
    store.before = lambda verb, key: uploads.wait(PATIENCE) if verb == "put" else None
    publications = []
    for _ in range(2):
        step(weights, rng)
        publications.append(publisher.publish())
    owner = publisher._worker if method == "stage" else publisher
    work = getattr(owner, method)

    def interrupted(*arguments):
        if method == "stage":
            work(*arguments)
        raise KeyboardInterrupt

    step(weights, rng)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(anchor=anchor)
    # A call that waits was taken in by the one that was interrupted, unless that is an anchor.
    if not anchor:
        with pytest.raises(KeyboardInterrupt):
            publications[1].wait(PATIENCE)
    step(weights, rng)
    publications.append(publisher.publish())
    uploads.set()
    assert [each.join() for each in publications] == [True, anchor, True]
    assert publisher.run.manifest(publisher.version).hop.base is not None
    publisher.close()
    assert same(pulled(url), copy_of(weights))


def test_a_call_is_not_taken_back_while_the_one_before_it_is_given_up(rng, monkeypatch):
    url, weights, uploads = fresh_url(), make_weights(), threading.Event()
    store = Hooked(url)
    publisher = Publisher(store, weights, when_full="coalesce")
    publisher.publish().wait(PATIENCE)

    def fail(verb, key):
        if key.startswith("anchors/00000001"):
            assert uploads.wait(PATIENCE)
            store.before = lambda verb, key: None
            raise StoreUnavailable("no answer")

    store.before = fail
    lost = publisher.publish(anchor=True)
    step(weights, rng)
    publisher.publish()
    forgetting, reverting, forgotten = (threading.Event() for _ in range(3))
    forget, revert_chunk = History.forget, History._revert_chunk

    def slow_forget(history, version):
        forgetting.set()
        reverting.wait(0.5)
        forget(history, version)
        forgotten.set()

    def slow_revert_chunk(*arguments):
        reverting.set()
        forgotten.wait(PATIENCE)
        revert_chunk(*arguments)

    monkeypatch.setattr(History, "forget", slow_forget)
    monkeypatch.setattr(History, "_revert_chunk", slow_revert_chunk)
    uploads.set()
    assert forgetting.wait(PATIENCE)
    step(weights, rng)
    publisher.publish().wait(PATIENCE)
    assert not lost.join()
    publisher.close()
    assert same(pulled(url), copy_of(weights))
