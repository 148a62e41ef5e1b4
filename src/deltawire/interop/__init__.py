"""Other programs' layouts: to read what they have written, and to write what they read.

Begin with `trl.py`.
"""
