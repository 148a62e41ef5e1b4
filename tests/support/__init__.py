"""What tests, benchmarks and tools share: servers, doubles, small runs and models. Nothing here is a test."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
