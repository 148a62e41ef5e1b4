"""What the tests share: where the benchmark helpers are, and hypothesis without clocks."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "tests", "docs")]

# The first call of a kernel compiles it, and these machines are noisy: time says nothing about an example.
settings.register_profile("deltawire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("deltawire")
