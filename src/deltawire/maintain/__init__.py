"""Work on whole runs: remove what nobody needs, check every object, add hops that a run lacks.

May import: follow, publish, run, store, format, tensors.
Begin with `gc.py`.
"""
