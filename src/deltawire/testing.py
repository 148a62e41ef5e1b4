"""A conformance suite for engines: test cases that every adapter must pass.

Write a `Harness` for your engine, then run the cases in plain Python,

    for case in deltawire.testing.CASES:
        case(MyHarness)

or in pytest:

    @pytest.mark.parametrize("case", deltawire.testing.CASES, ids=lambda case: case.__name__)
    def test_conformance(case):
        case(MyHarness)

For an engine that quantizes weights when it loads them, write a `QuantizedHarness` and run `QUANTIZED_CASES`: after
each update, its codes and scales must be those of a fresh load.

`prove` is for servers: it changes each parameter and checks whether the answers change.

A case that fails raises `NotConforming` with the expected behavior. One that does not apply raises
`unittest.SkipTest`, which test runners understand.
"""

from deltawire.engines.conformance import (
    CASES,
    QUANTIZED_CASES,
    Harness,
    NotConforming,
    QuantizedHarness,
    check,
    concurrent_requests,
    failure_in_mid_apply,
    late_join,
    loads_all,
    moving_scales,
    not_finite_is_refused,
    repeat_apply,
    right_version,
    right_weights,
    starts_unknown,
    wrong_base_refused,
)
from deltawire.engines.prove import Parameter, Probed, Proof, Subject, prove

__all__ = [
    "CASES", "QUANTIZED_CASES", "Harness", "NotConforming", "Parameter", "Probed", "Proof", "QuantizedHarness",
    "Subject", "check", "concurrent_requests", "failure_in_mid_apply", "late_join", "loads_all", "moving_scales",
    "not_finite_is_refused", "prove", "repeat_apply", "right_version", "right_weights", "starts_unknown",
    "wrong_base_refused",
]  # fmt: skip
