"""The constants behind `deltawire estimate`, from what this project has measured, each with the file it is from.

    python benchmarks/estimate_data.py [--output FILE]

Reads `benchmarks/results` and the data of `deltawire explain` only, so the same inputs give the same bytes.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import gpu_rounds
from deltawire.estimate.plan import at_density, density_over
from deltawire.run.planner import SKIPS
from measure import RESULTS, read_csv

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "src/deltawire/estimate/measured.json"
RECORDED = ROOT / "src/deltawire/pages/static/explain/recorded.json"
CHAIN_DENSITY = 0.0115
# Of what is added up with different signs.
EXACT = 6


def digits(value, number=4):
    return float(f"{value:.{number}g}")


def straight(points):
    """The line through two points, as what it starts with and what each weight adds."""
    (low, one), (high, other) = sorted(points)
    slope = (other - one) / (high - low)
    return {"start": digits(max(one - slope * low, 0.0), EXACT), "per_weight": digits(slope, EXACT)}


def whole_runs(recorded):
    """What a step changes in a whole model at two learning rates, as the data of `deltawire explain` has it."""
    return recorded["measured"]["runs"]


def density_of_lr(recorded):
    """The share of weights that a step changes: a power of the learning rate, through the runs of whole models."""
    points = [(run["lr"], run["density"]) for run in whole_runs(recorded)]
    x, y = [math.log(lr / 1e-6) for lr, _ in points], [math.log(density) for _, density in points]
    slope, start = statistics.linear_regression(x, y)
    return {"at_1e-6": digits(math.exp(start)), "power": digits(slope)}


def codec(recorded):
    """Bytes per change and times by density; at the densities of whole runs, the bytes that those had."""
    names = ("density", "bytes_per_change", "encode_ratio", "decode_ratio")
    table = [{name: float(row[name]) for name in names} for row in read_csv("density.csv")]
    for run in whole_runs(recorded):
        above = next(i for i, row in enumerate(table) if row["density"] > run["density"])
        low, high = table[above - 1], table[above]
        part = math.log(run["density"] / low["density"]) / math.log(high["density"] / low["density"])
        between = {name: digits(low[name] + part * (high[name] - low[name])) for name in names[2:]}
        table.insert(above, {"density": run["density"], "bytes_per_change": run["bytes_per_change"]} | between)
    return table


def span_power(recorded, table):
    """By which power of how far weights have moved the odds of a change grow: mean of the recordings and of long runs.

    Deltas over 4 steps of the recordings, and over 4 and 16 of the runs. What each tensor adds to a delta, whatever it
    spans, is left out.
    """

    def size(span, density, power):
        changed = density_over(span, density, power)
        return changed * at_density("bytes_per_change", changed, table)

    def fit(density, spans, wanted):
        low, high = 0.0, 2.0
        for _ in range(50):
            middle = (low + high) / 2
            found = sum(size(span, density, middle) for span in spans) / size(1, density, middle)
            low, high = (middle, high) if found < wanted else (low, middle)
        return low

    recordings = []
    for recording in recorded["recordings"].values():
        hops, rows = recording["bucket"]["hops"], recording["sizes"]
        single = statistics.mean(row["context"] for row in rows)
        longer = statistics.mean(hop["bytes"] for hop in hops if hop["base"] == hop["version"] - 4)
        density = statistics.mean(row["changed"] / row["weights"] for row in rows)
        recordings.append(fit(density, [4], (longer - headers(recorded)) / single))
    runs = []
    for row in read_csv("fleet_density.csv"):
        steps = int(row["steps"])
        spans = [length for length in SKIPS for _ in range(steps // length)]
        runs.append(fit(float(row["density"]), spans, steps * float(row["skip_mb"]) / float(row["single_mb"])))
    return digits((statistics.mean(recordings) + statistics.mean(runs)) / 2, 3)


def headers(recorded):
    """What a delta of the recordings weighs beyond its encoded changes."""
    hops = [each for recording in recorded["recordings"].values() for each in recording["bucket"]["hops"]]
    singles = [hop["bytes"] for hop in hops if hop["base"] is not None and hop["base"] == hop["version"] - 1]
    encoded = [row["context"] for recording in recorded["recordings"].values() for row in recording["sizes"]]
    return (sum(singles) - sum(encoded)) / len(singles)


def gpu():
    """A vLLM server on a GPU and a publisher next to it, by the number of weights on one device."""
    publishes = [row for row in read_csv("gpu_publish.csv") if row["method"] == "deltawire"]

    def published(of):
        return straight(
            [(gpu_rounds.WEIGHTS[row["model"].lower().removeprefix("qwen3-")], of(row)) for row in publishes]
        )

    def served(of):
        return straight([(weights, gpu_rounds.median(of, model)) for model, weights in gpu_rounds.WEIGHTS.items()])

    def more(of):
        return {"per_change": digits(gpu_rounds.per_change(of), EXACT)}

    reload = gpu_rounds.median(gpu_rounds.pause, "0.6b", source="vLLM reload")
    return {
        "most_weights": max(gpu_rounds.WEIGHTS.values()),
        "density": gpu_rounds.DENSITY,
        "blocked": published(lambda row: float(row["blocked_ms"]) / 1000),
        "encode": published(lambda row: (float(row["in_host_memory_ms"]) - float(row["blocked_ms"])) / 1000)
        | more(gpu_rounds.encode),
        "stage": served(gpu_rounds.stage) | more(gpu_rounds.stage),
        "pause": served(gpu_rounds.pause) | more(gpu_rounds.pause),
        "reload": digits(reload / gpu_rounds.WEIGHTS["0.6b"]),
    }


def cpu():
    """Trainer and replica on two cores, of 128 M weights."""
    row = next(row for row in read_csv("chain.csv") if row["line"] == "loopback")
    words = row["phases_seconds"].split()
    phases = {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    weights = int(row["weights"])
    vllm = {row["mode"]: row for row in read_csv("vllm.csv")}
    notes = dict(
        line[2:].split(": ", 1) for line in (RESULTS / "vllm.csv").read_text().splitlines() if line.startswith("# ")
    )
    ours, changed = vllm["deltawire"], float(notes["weights"]) * float(notes["density"])
    return {
        "density": CHAIN_DENSITY,
        **{name: digits(phases[name] / weights) for name in ("diff", "encode", "decode", "apply")},
        "threads_speedup": next(
            float(row["two_thread_speedup"])
            for row in read_csv("codec_speed.csv")
            if row["operation"] == "context decode"
        ),
        "bytes_per_second": round(int(row["full_bytes"]) / float(row["full_seconds"])),
        "pause_start": digits((float(ours["pause_ms"]) - float(ours["apply_ms"])) / 1000),
        "pause_per_change": digits(float(ours["apply_ms"]) / 1000 / changed),
        "reload": digits(float(vllm["reload"]["pause_ms"]) / 1000 / float(notes["weights"])),
    }


def make():
    recorded = json.loads(RECORDED.read_text())
    demos = [each for each in json.loads((RESULTS / "demo.json").read_text())["runs"] if each["density"]]
    replica = {
        row["store"]: {name: float(value) for name, value in row.items() if name != "store" and value}
        for row in read_csv("replica.csv")
    }
    documents = [demo["uploads"]["documents"] for demo in demos]
    values = {
        "density_of_lr": (density_of_lr(recorded), "grpo.csv, recorded.json"),
        "codec": (codec(recorded), "density.csv, grpo.csv"),
        "span_power": (span_power(recorded, codec(recorded)), "recorded.json, fleet_density.csv"),
        "tensor_bytes": (round(headers(recorded) / 6), "recorded.json"),
        "document_bytes": (
            round(sum(each["num_bytes"] for each in documents) / sum(each["num_objects"] for each in documents)),
            "demo.json",
        ),
        "cpu": (cpu(), "chain.csv, codec_speed.csv, vllm.csv"),
        "gpu": (gpu(), "gpu_publish.csv, vllm_gpu.csv"),
        "replica": (replica, "replica.csv"),
    }
    data = {name: {"value": value, "from": source} for name, (value, source) in values.items()}
    return json.dumps(data, indent=1) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    arguments.output.write_text(make())
    print(arguments.output.read_text(), file=sys.stderr)
