"""Waiting for what comes true by itself, however busy the machine is."""

import threading
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


def hold_commits(publisher):
    """Have a publisher's commits wait for the event that this returns."""
    held, commit = threading.Event(), publisher.run.commit

    def wait(*arguments):
        assert held.wait(PATIENCE)
        commit(*arguments)

    publisher.run.commit = wait
    return held
