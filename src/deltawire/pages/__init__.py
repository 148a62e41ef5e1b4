"""Web pages: the figures that explain deltawire, and the dashboard of a run.

May import: maintain, follow, run, store, format.
Begin with `feed.py` (reads a run), then `dashboard.py` (serves it).
"""
