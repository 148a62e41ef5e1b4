"""What the tests share: where the benchmark helpers are, and hypothesis without clocks."""

import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

# Kernels ask for this when they are first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "tests", "docs")]

# The first call of a kernel compiles it, and these machines are noisy: time says nothing about an example.
settings.register_profile("deltawire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("deltawire"), max_examples=2000)
settings.load_profile("deltawire")
