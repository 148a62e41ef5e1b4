"""Runs a module as a part of the demo: `python -m deltawire_demo.part MODULE ...`.

Its stdin is a pipe from the parent process. When it closes, the parent is gone, and the part ends.
"""

import os
import runpy
import signal
import sys
import threading
import time

GRACE_SECONDS = 15.0


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_watch, name="parent", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
