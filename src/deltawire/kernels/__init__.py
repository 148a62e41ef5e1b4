"""Bits in, bits out: the inner loops. Nothing here knows of names, files or versions."""
