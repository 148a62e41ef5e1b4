"""Publishing from all ranks of a model at once: each rank compares, encodes and uploads its own shard.

Begin with `publisher.py`; `messages.py` is what ranks send each other, `exchange.py` how boxes become whole tensors.
"""
