"""The trainer's side: find what changed, encode it, upload it, commit it as the next version.

Begin with `machine.py` (a call becomes a version), then `worker.py`, `leader.py` and `history.py` (the snapshot);
`sharded/` is what many ranks need more.
"""
