"""The inference side: find a new version, fetch it, check it, and apply it to a target.

Begin with `replica.py`, then `target.py` (memory) and `mirror.py` (a checkpoint folder).
"""
