"""Other programs' layouts: to read what they have written, and to write what they read.

May import: follow, run, store, format, tensors.
Begin with `trl.py`.
"""
