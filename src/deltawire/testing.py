"""A conformance suite for engines: test cases that every adapter must pass.

Write a `Harness` for your engine, then run the cases in plain Python,

    for case in deltawire.testing.CASES:
        case(MyHarness)

or in pytest:

    @pytest.mark.parametrize("case", deltawire.testing.CASES, ids=lambda case: case.__name__)
    def test_conformance(case):
        case(MyHarness)

`prove` is for servers: it changes each parameter and sees whether the answers change.

A case that fails raises `NotConforming` with the expected behaviour; one that does not apply raises
`unittest.SkipTest`, which test runners know.
"""

from deltawire.engines.conformance import (
    CASES,
    Harness,
    NotConforming,
    check,
    concurrent_requests,
    failure_in_mid_apply,
    late_join,
    loads_all,
    repeat_apply,
    right_version,
    right_weights,
    starts_unknown,
    wrong_base_refused,
)
from deltawire.engines.prove import Parameter, Probed, Proof, Subject, prove

__all__ = [
    "CASES", "Harness", "NotConforming", "Parameter", "Probed", "Proof", "Subject", "check", "concurrent_requests",
    "failure_in_mid_apply", "late_join", "loads_all", "prove", "repeat_apply", "right_version", "right_weights",
    "starts_unknown", "wrong_base_refused",
]  # fmt: skip
