"""What weights are: dtypes, boxes, bits, names, and the digest of them all.

Begin with `weights.py` (numpy and torch seen as bits), then `digest.py`.
"""
