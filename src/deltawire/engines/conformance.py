"""The conformance suite for engines; `deltawire.testing` is its public name."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from unittest import SkipTest
from uuid import uuid4

import numpy as np

from deltawire.engines.engine import Engine, EngineChange
from deltawire.engines.quantized.edits import EDITS
from deltawire.engines.target import EngineTarget
from deltawire.errors import DeltawireError, EngineBroken
from deltawire.follow.replica import Replica
from deltawire.format.patches import Patch
from deltawire.publish.publisher import Publisher
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.weights import Tensor, Viewed, Weights, spec, view

RUN = "conformance"
NUM_READERS = 4


class NotConforming(AssertionError):
    """An engine does not behave as it must."""


class Harness(Protocol):
    """What the suite needs to know about an engine. It is created without arguments, once for each case."""

    timeout_seconds: float = 60.0
    """How long a request may take."""

    def weights(self) -> Weights:
        """Names, shapes, dtypes and values of a small checkpoint that the engine can serve."""

    def start(self, weights: Weights) -> Engine:
        """A new engine that serves these weights. A second call is a restart: the previous engine is gone."""

    def matches(self, weights: Weights) -> bool:
        """Whether the engine serves exactly these weights, bit for bit, checked without deltawire."""

    def request(self) -> None:
        """Send the engine a request that uses its weights, and return when it is answered.

        Called from several threads. Raise if the response shows a mix of two versions.
        """

    def fail_next_write(self) -> None:
        """Make the next write of a change fail halfway. Without this, one case is skipped."""
        raise SkipTest("the harness cannot make a write fail")

    def close(self) -> None: ...


class QuantizedHarness(Harness):
    """The same for an engine that quantizes weights when it loads them."""

    @abstractmethod
    def served(self) -> Mapping[str, Any]:
        """The codes and scales that the engine computes with, and the weights that it does not quantize: arrays or
        tensors under any names, read without deltawire.
        """

    @abstractmethod
    def fresh(self, weights: Weights) -> Mapping[str, Any]:
        """What `served` would be in an engine that was just started with these weights."""

    def matches(self, weights: Weights) -> bool:
        found, wanted = (Viewed(each) for each in (self.served(), self.fresh(weights)))
        return found.keys() == wanted.keys() and all(
            np.array_equal(found[name].bits, wanted[name].bits) for name in found
        )


Factory = Callable[[], Harness]
Case = Callable[[Factory], None]

CASES: list[Case] = []
QUANTIZED_CASES: list[Case] = []
"""For engines that quantize: all of the above, and those about scales."""


class _Subject:
    """An engine under test, and what it should be serving."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.rng = harness, np.random.default_rng(0)
        given = harness.weights()
        self._first = {name: view(name, given[name]) for name in given}
        self.weights, self.version = _copy(self._first), 0
        self.engine = harness.start(_copy(self._first))
        self.is_closed = False

    @property
    def state(self) -> WeightVersion:
        return WeightVersion(RUN, self.version, digest(self.weights))

    def restart(self) -> None:
        self.engine.close()
        self.engine = self.harness.start(_copy(self._first))

    def begin(self) -> None:
        self.engine.bind({name: spec(self.weights, name) for name in self.weights})
        if isinstance(self.harness, QuantizedHarness) and self.engine.digest() != self.state.digest:
            # Weights cannot be read back from codes.
            self.engine.load(_copy(self.weights), None, self.state)
        found = self.engine.digest()
        _expect(found == self.state.digest, f"digest() must be {self.state.digest}, as for the weights, but is {found}")
        self.engine.mark(self.state)

    def changes(self) -> Iterator[tuple[str, EngineChange]]:
        """Changes of several kinds. Each is generated after the one before was written."""
        yield "some elements", self.next_change(0.05)
        yield "nothing", self.next_change(0.0)
        yield "the first and the last element of each tensor", self.next_change(0.0, ends=True)
        yield "all elements", self.next_change(1.0)

    def next_change(self, density: float, *, ends: bool = False) -> EngineChange:
        new = _copy(self.weights)
        _flip(new, self.rng, density, ends=ends)
        return self.change_to(new)

    def change_to(self, new: Mapping[str, Tensor]) -> EngineChange:
        patches = []
        for name, tensor in new.items():
            where = np.flatnonzero(tensor.bits != self.weights[name].bits)
            # All of them: a whole tensor, without positions.
            positions = None if len(where) == len(tensor.bits) else where
            patches.append(Patch(name, tensor.dtype.name, Box.whole(tensor.shape), tensor.bits[where], positions))
        patches = [patch for patch in patches if len(patch.bits)]
        return EngineChange(self.state, WeightVersion(RUN, self.version + 1, digest(new)), patches, self.weights)

    def after(self, change: EngineChange) -> dict[str, Tensor]:
        new = _copy(change.old)
        for patch in change.patches:
            new[patch.name].bits[patch.where] = patch.bits
        return new

    def move(self, change: EngineChange) -> None:
        self.weights, self.version = self.after(change), change.state.version

    def write(self, change: EngineChange) -> float:
        self.engine.stage(change)
        return self.engine.commit(change)

    def update(self) -> None:
        change = self.next_change(0.05)
        self.write(change)
        self.move(change)
        self.expect_current("after an update")

    def matches(self) -> bool:
        return self.harness.matches(_copy(self.weights))

    @property
    def matrices(self) -> list[str]:
        return [name for name, each in self.weights.items() if len(each.shape) > 1 and each.dtype.name == "BF16"]

    def close(self) -> None:
        if not self.is_closed:
            self.engine.close()

    @contextmanager
    def requests(self, num_readers: int) -> Iterator[None]:
        """Requests from some threads, one after the other while the block runs, each with a timeout."""
        done, problems = threading.Event(), list[Exception]()

        def ask() -> None:
            try:
                self.harness.request()
                while not done.is_set():
                    self.harness.request()
            except Exception as error:
                problems.append(error)

        readers = [threading.Thread(target=ask, daemon=True) for _ in range(num_readers)]
        for reader in readers:
            reader.start()
        try:
            yield
        finally:
            done.set()
        for reader in readers:
            reader.join(self.harness.timeout_seconds)
        answered = not any(reader.is_alive() for reader in readers)
        _expect(answered, f"a request was not answered within {self.harness.timeout_seconds} s")
        if problems:
            raise NotConforming(f"a request failed: {problems[0]!r}") from problems[0]

    def request(self) -> None:
        with self.requests(1):
            pass

    def expect_state(self, when: str) -> None:
        served, wanted = self.engine.status(), f"version {self.version} and the digest {self.state.digest}"
        _expect(served.state == self.state, f"status() must report {wanted}, but reports {served}: {when}")
        seen, own = served.version, str(self.version)
        _expect(seen in (None, own), f"clients see version {seen!r}, not {own!r}: {when}")

    def expect_current(self, when: str) -> None:
        self.expect_unchanged(when, f"those of version {self.version}")

    def expect_unchanged(self, when: str, what: str = "unchanged") -> None:
        _expect(self.matches(), f"the weights must be {what}, but are not, {when}")
        self.expect_state(when)
        self.request()


def _case(begins: bool = True, *, quantized: bool = False) -> Callable[[Callable[[_Subject], None]], Case]:
    """Add a case to the suite, from a function of a fresh engine that, if it `begins`, takes changes in place."""

    def register(body: Callable[[_Subject], None]) -> Case:
        def case(factory: Factory) -> None:
            with closing(factory()) as harness, closing(_Subject(harness)) as subject:
                if begins:
                    if not subject.engine.in_place:
                        raise SkipTest("the engine takes no changes in place")
                    subject.begin()
                body(subject)

        case.__name__, case.__doc__ = body.__name__, body.__doc__
        QUANTIZED_CASES.append(case)
        if not quantized:
            CASES.append(case)
        return case

    return register


@_case(begins=False)
def starts_unknown(subject: _Subject) -> None:
    """An engine that has just started reports no version; each start has a new `boot`."""
    served = subject.engine.status()
    _expect(bool(served.states), "status() must have a state for each process, None if it is not known")
    _expect(served.state is None, f"before the first mark() no version is known, but status() reports {served}")
    boot = subject.engine.status().boot
    _expect(boot == served.boot, "boot must stay the same until the engine is restarted")
    subject.begin()
    _expect(subject.matches(), "bind() and mark() must not change the weights")
    boot = subject.engine.status().boot
    subject.restart()
    served = subject.engine.status()
    _expect(served.boot != boot, "boot must change when the engine is restarted")
    _expect(served.state is None, f"after a restart no version is known, but status() reports {served.state}")


@_case()
def right_weights(subject: _Subject) -> None:
    """After each change the engine serves exactly the new weights, and until then the old ones."""
    for name, change in subject.changes():
        subject.engine.stage(change)
        _expect(subject.matches(), f"staging must not change the weights ({name})")
        subject.request()
        subject.engine.commit(change)
        subject.move(change)
        _expect(subject.matches(), f"after commit() the weights must be the new ones, bit for bit ({name})")
        found = subject.engine.digest()
        _expect(found == change.state.digest, f"digest() must be that of the weights, but is {found} ({name})")


@_case()
def right_version(subject: _Subject) -> None:
    """The engine reports a version once it has its weights, not before."""
    subject.expect_state("after mark()")
    for name, change in subject.changes():
        subject.engine.stage(change)
        subject.expect_state(f"staging must not report a new version ({name})")
        seconds = subject.engine.commit(change)
        subject.move(change)
        subject.expect_state(f"after commit() ({name})")
        _expect(seconds >= 0, f"commit() must return the seconds of the pause, not {seconds!r}")


@_case()
def wrong_base_refused(subject: _Subject) -> None:
    """A change for other weights is refused; weights and version stay the same, and requests are answered."""
    subject.update()
    change, now = subject.next_change(0.1), subject.state
    state = replace(now, version=now.version + 6, digest=change.state.digest)
    for name, (base, to) in {
        "another version's": (replace(now, version=now.version + 5, digest=Digest(1, 2)), state),
        "another run's": (replace(now, run="other"), state),
        "other weights of that version": (replace(now, digest=Digest(3, 4)), state),
        "one that leads to another digest": (now, replace(now, version=9, digest=Digest(5, 6))),
    }.items():
        try:
            subject.write(replace(change, base=base, state=to))
        except DeltawireError:
            pass
        else:
            raise NotConforming(f"a change must be refused if it is {name}")
        subject.expect_unchanged(f"after a change was refused ({name})")
    subject.update()


@_case()
def failure_in_mid_apply(subject: _Subject) -> None:
    """A write that fails halfway is undone, or the engine is known to be broken; both can be repaired."""
    subject.update()
    change = subject.next_change(0.2)
    subject.harness.fail_next_write()
    try:
        subject.write(change)
    except EngineBroken:
        state = subject.engine.status().state
        _expect(state is None, f"an engine with a mix of weights must not report a version, but reports {state}")
        subject.engine.load(subject.after(change), None, change.state)
    except DeltawireError:
        subject.expect_unchanged("after a write that failed and was rolled back")
        subject.write(change)
    except Exception as error:
        raise NotConforming(f"a write that fails must raise one of deltawire's errors, not {error!r}") from error
    subject.move(change)
    subject.expect_current("after the failure was repaired")


@_case()
def repeat_apply(subject: _Subject) -> None:
    """A change may be written again, even over itself."""
    change = subject.next_change(0.2)
    subject.engine.stage(change)
    subject.write(change)
    subject.move(change)
    for _ in range(2):
        subject.write(change)
        subject.expect_current("after a change was written again")
    subject.update()


@_case(begins=False)
def loads_all(subject: _Subject) -> None:
    """load() replaces all weights at once; a wrong digest is detected, and repaired by loading again."""
    subject.begin()
    change = subject.next_change(0.9)
    subject.engine.load(subject.after(change), None, change.state)
    subject.move(change)
    subject.expect_current("after load()")
    change = subject.next_change(0.5)
    wrong = replace(change.state, digest=Digest(1, 2))
    try:
        subject.engine.load(subject.after(change), None, wrong)
    except DeltawireError:
        state = subject.engine.status().state
        _expect(state != wrong, "weights with another digest must not be reported as that version")
    else:
        raise NotConforming("load() must check the digest of the weights that the engine has afterwards")
    subject.engine.load(subject.after(change), None, change.state)
    subject.move(change)
    subject.expect_current("after weights were loaded again")


@_case(begins=False)
def late_join(subject: _Subject) -> None:
    """An engine with the first weights of a run joins late, follows, is restarted, and is current each time."""
    url, trained = f"memory:{uuid4().hex}", _copy(subject.weights)
    with TemporaryDirectory() as folder, Publisher(url, trained, run=RUN) as publisher:
        publisher.publish().wait()

        def publish() -> None:
            _flip(trained, subject.rng, 0.05)
            publisher.publish().wait()
            subject.weights, subject.version = _copy(trained), subject.version + 1

        def restart() -> None:
            subject.restart()
            target.engine = subject.engine

        for _ in range(5):
            publish()
        target = EngineTarget(subject.engine, Path(folder) / "mirror")
        events: dict[str, Callable[[], None]] = {
            "joined late": lambda: None,
            "followed": publish,
            "was restarted with the first weights": restart,
        }
        with Replica(url, target, heartbeat_seconds=None) as replica:
            for when, happen in events.items():
                happen()
                replica.pull()
                _expect(replica.version == subject.version, f"the replica is at {replica.version} after it {when}")
                subject.expect_current(f"after the engine {when}")
            subject.is_closed = True


@_case()
def concurrent_requests(subject: _Subject) -> None:
    """All requests that run during updates are answered."""
    with subject.requests(NUM_READERS):
        for _ in range(10):
            subject.update()
    subject.expect_current("after updates while requests were running")


@_case(quantized=True)
def moving_scales(subject: _Subject) -> None:
    """The largest elements come and go, rows become zero and are filled again, elements are subnormal."""
    _expect(bool(subject.matrices), "the harness must have matrices of bf16")
    for what, edit in EDITS.items():
        new = _copy(subject.weights)
        for tensor in map(new.__getitem__, subject.matrices):
            edit(tensor.bits.reshape(-1, tensor.shape[-1]), subject.rng)
        change = subject.change_to(new)
        subject.write(change)
        subject.move(change)
        subject.expect_current(f"after {what}")
        found = subject.engine.status().derived
        subject.engine.digest()
        _expect(
            found is not None and found == subject.engine.status().derived,
            f"status() must report the digest of the current codes and scales, but reports {found}, after {what}",
        )


@_case(quantized=True)
def not_finite_is_refused(subject: _Subject) -> None:
    """An infinity has no code: nothing is written, or the result equals an engine that was started with it."""
    subject.update()
    new = _copy(subject.weights)
    new[subject.matrices[0]].bits[-1] = 0x7F80
    change = subject.change_to(new)
    try:
        subject.write(change)
    except DeltawireError:
        subject.expect_unchanged("after an infinity was refused")
    else:
        subject.move(change)
        subject.expect_current("after an infinity was taken")


def check(factory: Factory) -> dict[str, str]:
    """Run all cases. Returns the skipped ones with their reasons; raises `NotConforming` with all that fail."""
    skipped, failed = {}, {}
    is_quantized = isinstance(factory, type) and issubclass(factory, QuantizedHarness)
    for case in QUANTIZED_CASES if is_quantized else CASES:
        try:
            case(factory)
        except SkipTest as reason:
            skipped[case.__name__] = str(reason)
        except Exception as error:
            failed[case.__name__] = error
    if failed:
        lines = [f"{name}: {error}" for name, error in failed.items()]
        raise NotConforming("\n".join(lines)) from next(iter(failed.values()))
    return skipped


def _expect(holds: bool, sentence: str) -> None:
    if not holds:
        raise NotConforming(sentence)


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: Tensor(each.dtype, each.shape, each.bits.copy()) for name, each in weights.items()}


def _flip(weights: Mapping[str, Tensor], rng: np.random.Generator, density: float, *, ends: bool = False) -> None:
    """Flip the lowest bit of some elements."""
    for tensor in weights.values():
        chosen = rng.random(len(tensor.bits)) < density
        if ends and len(chosen):
            chosen[[0, -1]] = True
        tensor.bits[chosen] ^= tensor.bits.dtype.type(1)
