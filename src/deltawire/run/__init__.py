"""A run in a store: the keys and documents that make versions exist, and which hops lead to one.

Begin with `run.py`, then `manifest.py`; `planner.py` is pure.
"""
