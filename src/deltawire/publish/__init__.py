"""The trainer's side: find what changed, encode it, upload it, commit it as the next version.

May import: run, store, format, codec, kernels, tensors.
Begin with `publisher.py`, then `history.py` (the snapshot); `sharded/` is the same for a model on many ranks.
"""
