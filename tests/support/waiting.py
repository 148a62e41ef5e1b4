"""Waiting for what comes true by itself, however busy the machine is."""

import time

PATIENCE = 300


def eventually(check, what="it to come true", *, seconds=PATIENCE):
    """What a check gives, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.01)
    return found
