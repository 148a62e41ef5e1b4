"""Kills, faults and races, many of each, on a real S3 server: see `__main__.py`."""
