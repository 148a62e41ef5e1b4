"""Where weights go: engines that serve them, the mirror next to each, and the agent that drives them.

Begin with `engine.py` (what an engine must be able to do), then `target.py` (a mirror and an engine as one target).
`layout.py` and `trace.py` find where tensors live, `live_weights.py` changes them in place, `http_engine.py` is what
servers share, `conformance.py` the suite for engines.
"""
