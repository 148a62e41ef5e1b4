"""Web pages: the figures that explain deltawire, and the dashboard of a run."""
