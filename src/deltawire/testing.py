"""The conformance suite for engines, under the name that adapters import."""

from deltawire.engines.conformance import CASES, Harness, NotConforming, check

__all__ = ["CASES", "Harness", "NotConforming", "check"]
