"""What the demo learns: three seeds, and a control whose replicas never hear of what was trained.

    python benchmarks/demo_seeds.py

Each run is the command that users start, one after the other, with more games before and after, and with time enough
for all steps on a busy machine. What comes of them goes to results/demo.json, the tables of docs/guides/demo.md to
stdout.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from measure import RESULTS, machine

RUNS = {"seed 0": ["--seed", "0"], "seed 1": ["--seed", "1"], "seed 2": ["--seed", "2"],
        "nothing published": ["--seed", "0", "--no-publish"]}  # fmt: skip
OPTIONS = ["--evaluate", "3", "--time-limit", "1800", "--format", "json", "--no-dashboard"]
LEFT_OUT = ("store", "folder", "keeps_store", "dashboard")
WINDOW = 20


def run(arguments: list[str]) -> dict:
    """The summary of one run, with what each step told."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "demo"
        command = [sys.executable, "-m", "deltawire.cli", "demo", *arguments, *OPTIONS, "--folder", str(folder)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    summary = {key: value for key, value in json.loads(ended.stdout).items() if key not in LEFT_OUT}
    summary["verify"] = summary["verify"]["report"]
    for found in summary["evaluations"].values():
        for each in found:
            del each["samples"]
    steps = [each for each in events if each["event"] == "step"]
    deltas = [each for each in events if each["event"] == "published" and each["version"]]
    return {
        "command": " ".join(["deltawire", "demo", *arguments, *OPTIONS]),
        **summary,
        "rewards": [each["reward"] for each in steps],
        "densities": [each["density"] for each in deltas],
    }


def best(evaluations: list[dict]) -> dict:
    return max(evaluations, key=lambda each: each["reward"])


def rows(runs: dict[str, dict]) -> list[list[str]]:
    """The tables of the guide."""
    starts = range(0, max(len(each["rewards"]) for each in runs.values()), WINDOW)
    lines = [["mean reward in steps", *(f"{start + 1}-{start + WINDOW}" for start in starts)]]
    for name, each in runs.items():
        parts = [each["rewards"][start : start + WINDOW] for start in starts]
        lines.append([name, *(f"{sum(part) / len(part):.2f}" if part else "" for part in parts)])
    lines += [[], ["each at its best temperature", "reward before", "after", "wins before", "after"]]
    for name, each in runs.items():
        before, after = (best(each["evaluations"][which]) for which in ("start", "final"))
        lines.append([name, *(f"{one['reward']:.3f} at {one['temperature']:g}" for one in (before, after)),
                      *(f"{100 * one['wins']:.1f} %" for one in (before, after))])  # fmt: skip
    return lines


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "demo.json", help="The file to write.")
def main(output: Path) -> None:
    """Run the demo four times."""
    runs = {}
    for name, arguments in RUNS.items():
        runs[name] = run(arguments)
        # After each, so that one that fails later costs nothing.
        output.write_text(json.dumps({"machine": machine(), "runs": list(runs.values())}, indent=1) + "\n")
        print(f"{name}: {runs[name]['seconds']:g} s, ok {runs[name]['ok']}", file=sys.stderr, flush=True)
    for row in rows(runs):
        print(f"| {' | '.join(row)} |" if row else "")


if __name__ == "__main__":
    main()
