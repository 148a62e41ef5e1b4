"""What a run costs before it starts: bytes, seconds and money of a fleet, by measured parts and a simulator.

May import: `run` and below, and `follow` for the pace of polling. Begin with `plan.py`.
"""
