"""Weights that an engine quantizes when it loads them: codes and scales, derived from the weights that are published.

`recipes.py` has the arithmetic, `derive.py` what a change of some weights does to codes and scales.
"""
