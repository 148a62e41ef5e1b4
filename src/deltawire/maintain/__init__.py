"""Work on whole runs: remove what nobody needs, check every object, add hops that a run lacks.

Begin with `gc.py`.
"""
