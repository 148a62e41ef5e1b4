"""The simulator behind `deltawire estimate` against real runs: each time and byte count, measured and predicted.

    python benchmarks/simulator.py [--runs chain,fleet-20,fleet-200,demo] [--demo FOLDER]

- chain: `benchmarks/chain.py` through a proxy that lets 100 Mbit/s through: 128 M weights, one publisher, one replica;
  the fastest of nine rounds.
- fleet-20, fleet-200: replicas in threads of one process behind the nginx cache of deploy/site-cache, in front of
  another nginx; 1 M weights, versions in an even rhythm. All threads share one core's worth of Python.
- demo: `deltawire demo`, with its kill and its late replica. What the trainer's steps took, and how long a replica
  needs to start, are given to the simulator; bytes and delays are predicted, with the pause of an engine on two cores.
  The demo's replicas generate on the same cores, and an update waits for a batch, which the simulator does not know.
  --demo takes the folder of a run instead of making one.

Predictions come from measured.json, whose constants were measured before and elsewhere. How threads share cores, and
trips inside a site, were added to the simulator after its first predictions of the fleets' times were 0.4 to 0.6 of
what was measured, so these are fitted in part. Rows of runs that are not made again are kept, so that one run can be
repeated alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import chain
from deltawire import Publisher, Replica
from deltawire.estimate.plan import DAY, Plan, measured
from deltawire.estimate.simulate import Scene, simulate
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.run.uploads import find_uploads
from deltawire.store import open_store
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from measure import RESULTS, read_csv, write_csv
from support.fault_proxy import FaultProxy
from support.recorded import recorded_like
from support.servers import BUCKET, seaweedfs
from support.waiting import PATIENCE, eventually
from support.web_servers import file_server, site_cache

HEADER = ["run", "quantity", "unit", "measured", "predicted", "ratio"]
DENSITY = 0.0115
FLEET_WEIGHTS, FLEET_VERSIONS = 1_000_000, 12
EVERY = {20: 2.0, 200: 6.0}


def rows_of(run, quantities):
    return [
        [run, name, unit, f"{real:.4g}", f"{guess:.4g}", f"{guess / real:.3f}"]
        for name, unit, real, guess in quantities
    ]


def round_trip_ms(store):
    """Of a request on the loopback interface: what a pull, which takes three, waits for."""
    parts = measured()["replica"][store]
    return 1000 * (parts["pull_seconds"] - parts["pull_cpu"]) / 3


def run_chain(num_weights=128_000_000):
    trip = round_trip_ms("s3")
    plan = Plan(
        num_weights, DENSITY, 1, replicas=1, trainer_mbits=100, site_mbits=100, round_trip_ms=trip, machine="cpu",
        num_tensors=73,
    )  # fmt: skip
    warm_up((16,))
    with seaweedfs() as server:
        server.make_bucket(BUCKET)
        models = chain.make_model(num_weights)
        with FaultProxy("127.0.0.1", server.port) as proxy:
            proxy.rate_bytes_per_second = chain.RATE
            rounds = chain.compare(server, proxy.port, models, 9, proxy, fulls=1)
    # The fastest round: others use the cores too.
    full_bytes, full_seconds, delta_bytes, delta_seconds = min(rounds, key=lambda each: each[3])[:4]
    print("seconds of each round:", [round(each[3], 2) for each in rounds])
    delta = simulate(Scene(plan, num_versions=1, nudged=True, serves=False))
    full = simulate(Scene(plan, num_versions=1, nudged=True, serves=False, full=True))

    def seconds(outcome):
        return outcome.commits[1] - outcome.calls[1] + outcome.delays()[-1]

    sent = delta.uploads["delta"] + delta.replica_bytes + 2 * measured()["document_bytes"]
    return rows_of("chain", [
        ("a delta, there and back", "bytes", delta_bytes, sent),
        ("a delta, there and back", "seconds", delta_seconds, seconds(delta)),
        ("all weights, there and back", "bytes", full_bytes, 2 * plan.anchor_bytes),
        ("all weights, there and back", "seconds", full_seconds, seconds(full)),
    ])  # fmt: skip


def run_fleet(count):
    warm_up((16,))
    every, name = EVERY[count], f"fleet-{count}"
    old, new = recorded_like(FLEET_WEIGHTS, density=DENSITY)
    live = {"weight": Tensor(DTYPES["BF16"], (FLEET_WEIGHTS,), old.copy())}
    arrived, committed, lock, num_bytes = {}, {}, threading.Lock(), 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        origin = stack.enter_context(file_server(folder / "origin"))
        cache = stack.enter_context(site_cache(folder / "cache", origin.url))
        root = folder / "origin/root/run"
        publisher = stack.enter_context(Publisher(root, live, skips=(), anchors=None))
        publisher.publish().wait(PATIENCE)
        store = open_store(f"{cache.url}/run")

        def note(pull):
            nonlocal num_bytes
            with lock:
                arrived.setdefault(pull.version, []).append(time.monotonic())
                num_bytes += pull.num_bytes

        for _ in range(count):
            replica = stack.enter_context(Replica(store, {}, threads=1, heartbeat_seconds=None))
            stack.enter_context(replica.watching(note, poll_seconds=0.2))
        eventually(lambda: len(arrived.get(0, ())) == count, "the first version")
        start = time.monotonic()
        for number in range(1, FLEET_VERSIONS + 1):
            live["weight"].bits[:] = new if number % 2 else old
            time.sleep(max(start + number * every - time.monotonic(), 0))
            version = publisher.publish().wait(PATIENCE).version
            committed[version] = time.monotonic()
        eventually(lambda: len(arrived.get(FLEET_VERSIONS, ())) == count, "the last version")
        served = [line.split()[2] for line in origin.asked() if line.startswith("20")]
        from_origin = sum(
            (folder / "origin/root" / each.lstrip("/")).stat().st_size
            for each in served
            if "/deltas/" in each or "/anchors/" in each
        )
    # The first versions teach replicas the rhythm.
    settled = range(3, FLEET_VERSIONS + 1)
    delays = sorted(each - committed[version] for version in settled for each in arrived.get(version, ()))
    # On a busy machine some replicas take two versions at once.
    everywhere = [version for version in settled if len(arrived.get(version, ())) == count]
    last = statistics.median(max(arrived[version]) - committed[version] for version in everywhere)
    trip = round_trip_ms("nginx")
    plan = Plan(
        FLEET_WEIGHTS, DENSITY, DAY / every, replicas=count, machine="cpu", round_trip_ms=trip, poll_seconds=0.2,
        trainer_mbits=1e5, site_mbits=1e5, replica_mbits=1e4, num_tensors=1,
    )  # fmt: skip
    outcome = simulate(
        Scene(plan, num_versions=FLEET_VERSIONS, caches=True, cold=True, serves=False, cores=1, skips=())
    )
    return rows_of(name, [
        ("leaves the origin", "bytes", from_origin, outcome.store_bytes),
        ("fetched by replicas", "bytes", num_bytes, outcome.replica_bytes),
        ("commit to replica, median", "seconds", statistics.median(delays), statistics.median(outcome.delays(3))),
        ("commit to last replica, median", "seconds", last, statistics.median(
            max(outcome.served[version]) - outcome.commits[version] for version in settled)),
    ])  # fmt: skip


def run_demo(folder):
    """Bytes of each kind, what replicas fetch, and how soon they serve a version."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="demo-")) / "run"
        command = [sys.executable, "-m", "deltawire.cli", "demo", "--no-dashboard", "--evaluate", "0", "--seed", "7"]
        subprocess.run([*command, "--folder", folder, "--format", "json", "--quiet"], check=True, stdout=sys.stderr)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    published = {each["version"]: each for each in events if each["event"] == "published"}
    pulls = [each for each in events if each["event"] == "pull"]
    start, last = published[0]["time"], max(published)
    steps = [published[version] for version in range(1, last + 1)]
    every = (steps[-1]["time"] - start) / last
    first_pulls = {}
    for each in pulls:
        first_pulls.setdefault(each["replica"], each["time"])
    killed = [each for each in events if each["event"] == "disturbance" and each["what"] == "killed"]
    away = []
    for each in killed:
        back = min(pull["time"] for pull in pulls if pull["replica"] == each["replica"] and pull["anchor"]
                   and pull["time"] > each["time"])  # fmt: skip
        away.append((each["time"] - start, int(each["replica"][-1]), back - each["time"]))
    late = max(first_pulls, key=first_pulls.get)
    away.append((1e-3, int(late[-1]), first_pulls[late] - start))
    plan = Plan(
        published[0]["changed"], statistics.mean(each["density"] for each in steps), DAY / every,
        replicas=len(first_pulls), machine="cpu", poll_seconds=0.1, round_trip_ms=1, num_tensors=25,
        trainer_mbits=1e5, site_mbits=1e5,
    )  # fmt: skip
    outcome = simulate(Scene(plan, num_versions=last, cold=True, away=away))
    real = find_uploads(open_store(folder / "store")).bytes
    manifests = folder / "store" / "manifests"
    delays = [
        each["time"] - (manifests / f"{each['version']:08}.json").stat().st_mtime
        for each in pulls
        if not each["anchor"]
    ]
    kinds = {"deltas": "delta", "skip deltas": "skip delta", "anchors": "anchor", "documents": "document"}
    return rows_of("demo", [
        *((f"uploaded {kind}", "bytes", real[kind], outcome.uploads[own]) for kind, own in kinds.items()),
        ("uploaded", "bytes", real.total(), outcome.uploads.total()),
        ("fetched by replicas", "bytes", sum(each["bytes"] for each in pulls), outcome.replica_bytes),
        ("commit to replica, median", "seconds", statistics.median(delays), statistics.median(outcome.delays())),
    ])  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="chain,fleet-20,fleet-200,demo")
    parser.add_argument("--demo", type=Path)
    arguments = parser.parse_args()
    path = RESULTS / "simulator.csv"
    kept = [list(row.values()) for row in read_csv("simulator.csv")] if path.exists() else []
    for run in arguments.runs.split(","):
        if run == "chain":
            rows = run_chain()
        elif run == "demo":
            rows = run_demo(arguments.demo)
        else:
            rows = run_fleet(int(run.removeprefix("fleet-")))
        for row in rows:
            print(row, flush=True)
        kept = [row for row in kept if row[0] != run] + rows
        write_csv("simulator.csv", HEADER, sorted(kept))


if __name__ == "__main__":
    main()
