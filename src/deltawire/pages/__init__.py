"""Web pages: the figures that explain deltawire, and the dashboard of a run.

Begin with `feed.py` (reads a run), then `dashboard.py` (serves it).
"""
