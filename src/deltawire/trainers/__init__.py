"""Publishing from trainers: transformers (a callback) and TRL (a weight transfer).

May import: engines, publish, run, store, tensors.
Begin with `trl.py`; `fleet.py` has the servers that it feeds.
"""
