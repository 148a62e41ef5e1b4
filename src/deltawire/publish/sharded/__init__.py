"""Publishing from all ranks of a model at once: each rank compares, encodes and uploads its own shard.

May import: what publish may, and publish itself.
Begin with `publisher.py`; `leader.py` is rank 0, `worker.py` any rank, `messages.py` what they send each other.
"""
