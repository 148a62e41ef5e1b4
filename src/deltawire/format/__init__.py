"""A delta and a checkpoint as safetensors files: written, read, compared, applied.

Begin with `delta.py` (diff), `replay.py` (apply) and `wire.py` (the header of a delta); docs/format.md specifies.
"""
