"""What a run costs before it starts: bytes, seconds and money of a fleet, by measured parts and a simulator.

Begin with `plan.py`.
"""
