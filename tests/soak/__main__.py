"""Kills, faults and races on a real S3 server, many of each.

    python tests/soak --crashes 200 --syncs 500 --races 100 --report benchmarks/results/soak.md
    python tests/soak --parts engines --report benchmarks/results/soak_engines.md

Ends with 1 if any weights were wrong, anything was stuck or any version was lost.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from soak import crashes, faults, races, report  # noqa: E402
from soak.processes import nursery  # noqa: E402
from support.servers import BUCKET, seaweedfs  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crashes", type=int, default=200, help="kills at random moments")
    parser.add_argument("--each", type=int, default=3, help="kills at each named point")
    parser.add_argument("--syncs", type=int, default=500)
    parser.add_argument("--races", type=int, default=100)
    parser.add_argument("--kills", type=int, default=50, help="kills beside a vLLM server")
    parser.add_argument("--versions", type=int, default=100, help="versions that a fleet of engines follows")
    parser.add_argument("--parts", choices=["runs", "engines"], default="runs", help="what to do")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--report", type=Path)
    chosen = parser.parse_args()
    tally = report.Tally()
    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", flush=True)

    with seaweedfs() as server, nursery() as workers, tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server.make_bucket(BUCKET)
        place = Path(folder)
        common = {"seed": chosen.seed, "progress": progress}
        if chosen.parts == "engines":
            from soak import engines

            with report.Timed(tally, "kills beside an engine"):
                engines.kills(server, place / "kills", tally, num_kills=chosen.kills, **common)
            with report.Timed(tally, "fleet"):
                engines.fleet(server, place / "fleet", tally, num_versions=chosen.versions, **common)
            chosen.crashes = chosen.each = chosen.syncs = chosen.races = 0
        if chosen.crashes or chosen.each:
            with report.Timed(tally, "crashes"):
                crashes.run(
                    workers, server, place / "crashes", tally, num_random=chosen.crashes, num_each=chosen.each, **common
                )
        if chosen.syncs:
            with report.Timed(tally, "faults"):
                faults.run(server, place / "faults", tally, num_syncs=chosen.syncs, **common)
        if chosen.races:
            with report.Timed(tally, "races"):
                races.run(workers, server, place / "races", tally, num_races=chosen.races, **common)
    text = report.page(tally, f"python {' '.join(sys.argv)}", chosen.seed)
    print(text)
    if chosen.report:
        chosen.report.parent.mkdir(parents=True, exist_ok=True)
        chosen.report.write_text(text)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
