"""What the tests of the feed and of the dashboard share."""

import json
import threading
from contextlib import contextmanager


def read_all(feed):
    while feed.poll():
        pass
    return feed


def log_file(tmp_path, *events):
    path = tmp_path / "events.jsonl"
    with path.open("a") as log:
        for number, event in enumerate(events):
            log.write(json.dumps({"time": 1000.0 + number, **event}) + "\n")
    return path


@contextmanager
def in_a_thread(server):
    """A server that serves until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
