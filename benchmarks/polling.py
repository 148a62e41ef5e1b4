"""A thousand replicas that poll a real S3 server: how many requests, how soon they notice, and what a day costs.

    python benchmarks/polling.py [--readers 1000] [--seconds 120] [--every 20]

The readers are light: each has a `Run` and a `Pace` of its own, as a replica has, and looks for new versions without
fetching them; they share one client and some threads. A trainer commits a version every so many seconds. "every second,
by listing" is how replicas polled before intervals adapted: the same readers with a fixed wait, and a list request each
time. Delays are from the commit until a reader has seen the version, for versions after the third.

replica.csv has what a poll and a pull of a tiny model take apart from weights: CPU and wall time of a real `Replica`,
through the S3 server and through nginx. The simulator of `deltawire estimate` takes its overheads from there.
"""

import argparse
import heapq
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire import Publisher, Replica
from deltawire.estimate.prices import PRICES
from deltawire.follow.pace import Pace
from deltawire.run.run import Run
from deltawire.store import open_store
from measure import write_csv
from support.chains import make_weights, step
from support.servers import BUCKET, seaweedfs
from support.web_servers import file_server

THREADS = 48
NUM_PULLS, NUM_TOGETHER = 30, 16


class Counted:
    """A store that counts its requests."""

    def __init__(self, store, counts):
        self._store, self.counts, self.url = store, counts, store.url

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key, **options):
        self.counts["get"] += 1
        return self._store.get(key, **options)

    def list(self, prefix="", *, after=""):
        self.counts["list"] += 1
        return self._store.list(prefix, after=after)


class Fixed:
    """The pace of before: the same wait each time."""

    def __init__(self, poll_seconds, _now):
        self._poll = poll_seconds

    def saw(self, latest, now):
        pass

    def wait(self, _now):
        return self._poll


class Reader:
    def __init__(self, store, pace, by_name):
        self.run, self.pace, self.by_name, self.latest = Run(store), pace(1.0, time.monotonic()), by_name, -1

    def poll(self):
        """The newest version, if it is new."""
        if self.by_name:
            found = self.run.latest(after=self.latest)
        else:
            found = max(self.run.versions(after=self.latest), default=None)
        now = time.monotonic()
        self.latest = self.latest if found is None else found
        self.pace.saw(self.latest, now)
        return found, now


def many(server, readers, seconds, every, pace, by_name):
    store = open_store(f"s3://{BUCKET}/run-{uuid4().hex}", config=server.config, timeout_seconds=60)
    weights, rng, counts = make_weights(), np.random.default_rng(0), Counter()
    chance, committed, delays, stop, lock = random.Random(0), {}, [], threading.Event(), threading.Lock()
    with Publisher(store, weights, skips=(), anchors=None) as publisher:
        publisher.publish().wait()
        watched = Counted(store, counts)
        fleet = [Reader(watched, pace, by_name) for _ in range(readers)]
        waiting = [(time.monotonic() + chance.uniform(0, 1), number) for number in range(readers)]
        heapq.heapify(waiting)

        def work():
            while not stop.is_set():
                with lock:
                    due, number = heapq.heappop(waiting) if waiting else (time.monotonic() + 0.05, None)
                if stop.wait(max(min(due - time.monotonic(), 0.05), 0)):
                    return
                if number is None or due > time.monotonic():
                    if number is not None:
                        with lock:
                            heapq.heappush(waiting, (due, number))
                    continue
                found, now = fleet[number].poll()
                with lock:
                    if found is not None and found > 3:
                        delays.append(now - committed.get(found, now))
                    wait = fleet[number].pace.wait(now) * chance.uniform(0.75, 1.25)
                    heapq.heappush(waiting, (now + wait, number))

        used = _cpu(server.process.pid)
        own = resource.getrusage(resource.RUSAGE_SELF)
        started = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            done = [pool.submit(work) for _ in range(THREADS)]
            after_first = None
            while time.monotonic() - started < seconds:
                time.sleep(max(started + every * (len(committed) + 1) - time.monotonic(), 0))
                step(weights, rng)
                version = publisher.publish().wait().version
                committed[version] = time.monotonic()
                if version == 3:
                    after_first = time.monotonic(), Counter(counts)
            time.sleep(every)
            ended, total = time.monotonic(), Counter(counts)
            stop.set()
        for each in done:
            each.result()
    elapsed, asked = ended - after_first[0], total - after_first[1]
    now = resource.getrusage(resource.RUSAGE_SELF)
    own_cpu = now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
    price = PRICES["s3"]
    cost = 86_400 / elapsed * (asked["get"] * price.get_1000 + asked["list"] * price.put_1000) / 1000
    delays.sort()
    return [
        readers, every, round(elapsed, 1), asked["get"], asked["list"], round(asked.total() / elapsed, 1),
        round(statistics.median(delays), 2), round(delays[int(0.99 * len(delays))], 2), round(delays[-1], 2),
        round((_cpu(server.process.pid) - used) / (ended - started), 2), round(own_cpu / (ended - started), 2),
        round(cost, 2),
    ]  # fmt: skip


def _cpu(pid):
    """The CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def one(publish_to, read_from):
    """Median seconds of a poll that finds nothing, and of a pull of a tiny delta: wall and CPU."""
    weights, rng = make_weights(), np.random.default_rng(0)
    polls, pulls, publishes = [], [], []

    def timed(work):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu

    with Publisher(publish_to, weights, skips=(), anchors=None) as publisher:
        publisher.publish().wait()
        with Replica(read_from, {}, threads=1, heartbeat_seconds=None) as replica:
            replica.pull()
            for _ in range(NUM_PULLS):
                polls.append(timed(replica._is_behind))
                step(weights, rng)
                publishes.append(timed(lambda: publisher.publish().wait()))
                publisher.flush()
                replica._is_behind()
                pulls.append(timed(replica.pull))
    return [
        round(statistics.median(column), 6)
        for rows in (polls, pulls, publishes)
        for column in zip(*rows[3:], strict=True)
    ]


def together(publish_to, read_from, count=NUM_TOGETHER):
    """The same where replicas are threads of one process, and do it at the same moment: seconds for each of them."""
    weights, rng = make_weights(), np.random.default_rng(0)
    polls, pulls = [], []
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(publish_to, weights, skips=(), anchors=None))
        publisher.publish().wait()
        fleet = [stack.enter_context(Replica(read_from, {}, threads=1, heartbeat_seconds=None)) for _ in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))

        def timed(call):
            wall, cpu = time.perf_counter(), time.process_time()
            list(pool.map(call, fleet))
            return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count

        timed(Replica.pull)
        for _ in range(NUM_PULLS):
            polls.append(timed(Replica._is_behind))
            step(weights, rng)
            publisher.publish().wait()
            timed(Replica._is_behind)
            pulls.append(timed(Replica.pull))
    return [round(statistics.median(column), 6) for rows in (polls, pulls) for column in zip(*rows[3:], strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", type=float, default=20)
    parser.add_argument("--parts-only", action="store_true", help="make replica.csv alone")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(seaweedfs())
        server.make_bucket(BUCKET)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        origin = stack.enter_context(file_server(folder))
        store = open_store(f"s3://{BUCKET}/one", config=server.config)
        rows = [["s3", *one(store, store)], ["nginx", *one(folder / "root/one", f"{origin.url}/one")]]
        rows.append(["nginx, 16 threads", *together(folder / "root/many", f"{origin.url}/many"), "", ""])
        write_csv(
            "replica.csv",
            ["store", "poll_seconds", "poll_cpu", "pull_seconds", "pull_cpu", "publish_seconds", "publish_cpu"],
            rows,
        )
        print(rows)
        if arguments.parts_only:
            return
        rows = []
        for name, pace, by_name in (("adaptive, by name", Pace, True), ("every second, by listing", Fixed, False)):
            rows.append([name, *many(server, arguments.readers, arguments.seconds, arguments.every, pace, by_name)])
            print(rows[-1], flush=True)
    header = [
        "polling", "readers", "version_every_seconds", "seconds", "gets", "lists", "requests_per_second",
        "median_delay", "p99_delay", "most_delay", "server_cores", "reader_cores", "usd_a_day_s3",
    ]  # fmt: skip
    write_csv("polling.csv", header, rows)


if __name__ == "__main__":
    main()
