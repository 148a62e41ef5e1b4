"""Pages for people: the figures that explain deltawire, and the dashboard of a run."""
