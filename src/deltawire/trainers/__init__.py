"""Publishing from trainers: transformers (a callback) and TRL (a weight transfer).

Begin with `trl.py`; `fleet.py` has the servers that it feeds.
"""
