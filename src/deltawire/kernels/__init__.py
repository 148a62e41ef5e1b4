"""Bits in, bits out: the inner loops. Nothing here knows of names, files or versions.

Begin with `cpu/encode.py` and `cpu/decode.py`; `gpu/` has the same for 16-bit weights.
"""
