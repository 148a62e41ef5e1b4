"""The conformance suite passes for a sound engine, and finds what is wrong with others."""

import re
import subprocess
import sys
from unittest import SkipTest

import numpy as np
import pytest
import torch

from deltawire.engines import conformance as testing
from deltawire.engines.torch import TorchEngine
from deltawire.errors import EngineBroken, EngineRejected
from deltawire.tensors.weights import torch_view, write
from support import ROOT
from support.fused_model import bits_of
from support.half_writes import fail_next_write

GUIDE = ROOT / "docs" / "guides" / "any-engine.md"


class TorchHarness(testing.Harness):
    """A small module. Requests read it, and see to it that its two layers are of one version."""

    timeout_seconds = 20.0
    make = TorchEngine

    def __init__(self):
        self.model = None

    def weights(self):
        model = self._model()
        return {name: value.detach() for name, value in model.named_parameters()}

    def _model(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)).to(torch.bfloat16)
        model.register_parameter("wide", torch.nn.Parameter(torch.randn(7)))
        model.register_parameter(
            "small", torch.nn.Parameter(torch.randn(33).to(torch.float8_e4m3fn), requires_grad=False)
        )
        return model

    def start(self, weights):
        self.model = self._model()
        for name, value in self.model.named_parameters():
            write(value, slice(None), weights[name].bits)
        self.engine = type(self).make(self.model, threads=1)
        return self.engine

    def matches(self, weights):
        found = {name: bits_of(value) for name, value in self.model.named_parameters()}
        return found.keys() == weights.keys() and all(np.array_equal(found[name], weights[name].bits) for name in found)

    def request(self):
        with self.engine.serving():
            before = [torch_view(value.detach().view(-1)).copy() for value in self.model[0].parameters()]
            with torch.no_grad():
                self.model[:2](torch.ones(1, 24, dtype=torch.bfloat16))
            after = [torch_view(value.detach().view(-1)) for value in self.model[0].parameters()]
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))

    def fail_next_write(self):
        fail_next_write(self.engine._live._memory, slice(1))

    def close(self):
        pass


@pytest.mark.parametrize("case", testing.CASES, ids=lambda case: case.__name__)
def test_a_torch_module_conforms(case):
    case(TorchHarness)


def test_all_at_once():
    assert testing.check(TorchHarness) == {}


class WrongBits(TorchEngine):
    def commit(self, change):
        seconds = super().commit(change)
        self.model.wide.data.view(torch.int32)[0] ^= 1
        return seconds


class LostUpdate(TorchEngine):
    def commit(self, change):
        self.mark(change.state)
        return 0.0


class WritesAtStage(TorchEngine):
    def stage(self, change):
        super().stage(change)
        super().commit(change)
        self.mark(change.base)

    def commit(self, change):
        self.mark(change.state)
        return 0.0


class ToldTooEarly(TorchEngine):
    early = None

    def stage(self, change):
        super().stage(change)
        self.early = change.state

    def status(self):
        served = super().status()
        return served if self.early is None else type(served)(served.boot, (self.early,), str(self.early.version))

    def mark(self, state):
        super().mark(state)
        self.early = None


class ToldTooLate(TorchEngine):
    def commit(self, change):
        seconds = super().commit(change)
        self._live.mark(change.base)
        return seconds


class BaseNotChecked(TorchEngine):
    def stage(self, change):
        self._live.mark(change.base)
        super().stage(change)


class DigestNotChecked(TorchEngine):
    def _check(self, state):
        pass


class HalfWritten(TorchEngine):
    def _take_back(self, staged, error):
        self.mark(staged.base)
        raise EngineRejected("taken back, or so it says") from error


class BrokenAndTold(TorchEngine):
    def _take_back(self, staged, error):
        self.mark(staged.state)
        raise EngineBroken("a mix") from error


class ErrorOfItsOwn(TorchEngine):
    def _take_back(self, staged, error):
        raise error


class NotIdempotent(TorchEngine):
    """Writes differences."""

    def stage(self, change):
        pass

    def commit(self, change):
        own = self._tensors()
        for patch in change.patches:
            bits = bits_of(own[patch.name])
            bits[patch.where] ^= patch.bits ^ torch_view(torch.from_numpy(change.old[patch.name].bits[patch.where]))
        self.mark(change.state)
        return 0.0


class BlocksRequests(TorchEngine):
    def commit(self, change):
        seconds = super().commit(change)
        self._gate._alone = True
        return seconds


class FailsRequests(TorchEngine):
    def serving(self):
        if self.state is not None and self.state.version > 4:
            raise RuntimeError("busy")
        return super().serving()


class SameBoot(TorchEngine):
    def __init__(self, model, threads=None):
        super().__init__(model, threads)
        self._live.boot = "one"


class KnowsTooMuch(TorchEngine):
    def bind(self, specs):
        super().bind(specs)
        self.model.wide.data.view(torch.int32)[0] ^= 1

    def digest(self):
        self.model.wide.data.view(torch.int32)[0] ^= 1
        try:
            return super().digest()
        finally:
            self.model.wide.data.view(torch.int32)[0] ^= 1


class LoadsNothing(TorchEngine):
    def load(self, weights, folder, state):
        self.mark(state)
        return 0.0


DEFECTS = [
    (WrongBits, testing.right_weights, "after commit.. the weights must be the new ones"),
    (LostUpdate, testing.right_weights, "after commit.. the weights must be the new ones"),
    (WritesAtStage, testing.right_weights, "staging must not change the weights"),
    (ToldTooEarly, testing.right_version, "staging must not report a new version"),
    (ToldTooLate, testing.right_version, "status.. must report version 1"),
    (BaseNotChecked, testing.wrong_base_refused, "must be refused if it is another version's"),
    (DigestNotChecked, testing.wrong_base_refused, "must be refused if it is one that leads to another digest"),
    (HalfWritten, testing.failure_in_mid_apply, "must be unchanged, but are not, after a write that failed"),
    (BrokenAndTold, testing.failure_in_mid_apply, "must not report a version"),
    (ErrorOfItsOwn, testing.failure_in_mid_apply, "one of deltawire's errors, not OSError"),
    (NotIdempotent, testing.repeat_apply, "after a change was written again"),
    (BlocksRequests, testing.right_weights, "not answered within 0.5 s"),
    (BlocksRequests, testing.concurrent_requests, "not answered"),
    (FailsRequests, testing.concurrent_requests, "a request failed"),
    (SameBoot, testing.starts_unknown, "must change when the engine is restarted"),
    (KnowsTooMuch, testing.starts_unknown, "must not change the weights"),
    (LoadsNothing, testing.loads_all, "those of version 1"),
    (LoadsNothing, testing.late_join, "those of version 5"),
]


@pytest.mark.parametrize(("engine", "case", "message"), DEFECTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_defect_fails_its_case(engine, case, message):
    class Defective(TorchHarness):
        timeout_seconds = 0.5
        make = engine

    with pytest.raises(testing.NotConforming, match=message):
        case(Defective)


def test_what_does_not_apply_is_skipped():
    class Plain(TorchHarness):
        fail_next_write = testing.Harness.fail_next_write

    class WholeOnly(TorchEngine):
        in_place = False

    class Whole(TorchHarness):
        make = WholeOnly

    assert testing.check(Plain) == {"failure_in_mid_apply": "the harness cannot make a write fail"}
    assert {"right_weights", "repeat_apply"} <= testing.check(Whole).keys()
    assert "late_join" not in testing.check(Whole)
    with pytest.raises(SkipTest):
        testing.failure_in_mid_apply(Plain)


def test_a_report_names_everything_that_failed():
    class Defective(TorchHarness):
        make = LostUpdate

    with pytest.raises(testing.NotConforming, match=r"(?s)right_weights: .*repeat_apply: "):
        testing.check(Defective)


def test_the_guide_runs_as_it_is():
    programs = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(programs) == 4
    names = {}
    for program in programs:
        exec(compile(program, GUIDE.name, "exec"), names)
    assert names["server"].state.version == 1
    for case in testing.CASES:
        names["test_conformance"](case)
        assert f"`{case.__name__}`" in GUIDE.read_text()


@pytest.mark.process
def test_the_suite_needs_no_test_runner():
    program = "import sys, deltawire.testing; print([name for name in ('pytest', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
