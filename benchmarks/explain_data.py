"""The data behind `deltawire explain`: recorded updates, encoded for real, and measured times.

    python benchmarks/explain_data.py [--output FILE]

Reads `benchmarks/data` and `benchmarks/results` only, so the same inputs give the same bytes. The page shows nothing
that is not in this file or computed from it.
"""

import argparse
import base64
import json
import re
import statistics
import sys
from itertools import groupby
from pathlib import Path
from uuid import uuid4

import numpy as np

import gpu_rounds

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from deltawire import Publisher, Replica
from deltawire.codec import encode
from deltawire.codec.tiled import kernel_layout, read_tiles
from deltawire.kernels.cpu.blocks import NUM_CLASSES, changed_positions, class_ranks
from deltawire.kernels.cpu.decode import stream_words
from deltawire.kernels.cpu.groups import MEMBERS, PARAMETER, get_header, members_to_gaps
from deltawire.kernels.cpu.steps import steps_between
from deltawire.run.planner import cheapest_route
from deltawire.run.run import Run
from deltawire.tensors.dtypes import DTYPES
from deltawire.tensors.weights import Tensor
from deltawire.workers import Workers
from measure import RESULTS, read_csv
from support.recorded import RECORDINGS, recorded_steps

OUTPUT = Path(__file__).parent.parent / "src/deltawire/pages/static/explain/recorded.json"
BF16 = DTYPES["BF16"]
LEARNING_RATES = {"rl-lr1e-6": 1e-6, "rl-lr3e-6": 3e-6}
COLUMNS = 64
FIELD = COLUMNS * COLUMNS
ENCODINGS = ("coo", "gap", "context")
# Where the second anchor of the figure lies. By itself a publisher writes one when the deltas weigh a quarter of it.
SECOND_ANCHOR = 5
# The first steps of a run change more.
SETTLED = 10


def as_text(array):
    return base64.b64encode(np.ascontiguousarray(array, "<u2").tobytes()).decode()


def by_step(recording):
    """For each step of a recording, its large tensors, and all of them."""
    steps = sorted(recorded_steps(recording), key=lambda step: (step.number, step.tensor))
    for number, group in groupby(steps, key=lambda step: step.number):
        tensors = list(group)
        yield number, [each for each in tensors if len(each.old) > FIELD], tensors


def field_of(recording):
    """The first weights of each large tensor, and how each step changed them."""
    base, steps = {}, []
    for number, large, _ in by_step(recording):
        if number == 0:
            base = {each.tensor: as_text(each.old[:FIELD]) for each in large}
        changed = {each.tensor: np.flatnonzero(each.old[:FIELD] != each.new[:FIELD]) for each in large}
        steps.append(
            {
                each.tensor: {"at": as_text(changed[each.tensor]), "bits": as_text(each.new[changed[each.tensor]])}
                for each in large
            }
        )
    return {"base": base, "steps": steps}


def sizes_of(recording, workers):
    """Each step of a recording: how many weights changed, and the bytes of each encoding."""
    rows = []
    for _, _, tensors in by_step(recording):
        row = {"weights": sum(len(each.old) for each in tensors), "changed": 0} | dict.fromkeys(ENCODINGS, 0)
        for each in tensors:
            for name in ENCODINGS:
                encoded = encode(each.old, each.new, BF16, [name], workers)
                if encoded is not None:
                    row[name] += sum(array.nbytes for array in encoded.arrays.values())
            row["changed"] += int(np.count_nonzero(each.old != each.new))
        rows.append(row)
    return rows


def position_bits(members, universe, row):
    """What the codes of a position group take: its gaps, or where most are members those of the others."""
    own, gaps = np.zeros(6, np.uint64), np.empty(universe, np.uint64)
    end = members_to_gaps(members, universe, own, gaps, np.uint64(0))
    assert row[MEMBERS] == own[MEMBERS]
    parameter = row[PARAMETER]
    return int(end * (parameter + 1) + np.sum(gaps[:end] >> parameter))


def classes_of(step, workers):
    """What the `context` stream of a tensor spends its bits on, class by class, beside what `gap` spends."""
    streams = {}
    for name in ("context", "gap"):
        payload = encode(step.old, step.new, BF16, [name], workers, tile_log2=20).arrays[name]
        (tile,) = read_tiles(payload, len(step.old))
        table = np.zeros((3 * (NUM_CLASSES if name == "context" else 1), 6), np.uint64)
        first, _, header_bits, found = get_header(
            stream_words(tile.stream, len(tile.stream)), 8 * len(tile.stream), table
        )
        assert found
        streams[name] = table, int(first), int(header_bits), len(payload)
    width, shift, mask, signed = kernel_layout(BF16)
    positions = changed_positions(step.old, step.new)
    before, after = step.old[positions], step.new[positions]
    _, extra = steps_between(before, after, np.uint64(width), signed)
    table, first, header_bits, payload_bytes = streams["context"]
    layout = (np.uint16(each) for each in (shift, mask, first))
    classes, ranks, population = class_ranks(step.old, positions, before, after, *layout)
    rows = []
    for k in range(NUM_CLASSES):
        mine = np.sort(ranks[classes == k])
        row = table[2 * NUM_CLASSES + k]
        rows.append({
            "exponent": first + k - 127, "weights": int(population[k]), "changed": len(mine),
            "parameter": int(row[PARAMETER]), "bits": position_bits(mine, int(population[k]), row),
        })  # fmt: skip
    signs, placed = len(positions), sum(row["bits"] for row in rows)
    gap = streams["gap"]
    gap_placed = position_bits(positions, len(step.old), gap[0][2])
    return {
        "tensor": step.tensor, "step": step.number, "weights": len(step.old), "changed": len(positions),
        "one_step": int(np.count_nonzero(extra == 0)), "first": first, "rows": rows,
        "context": {"positions": placed, "signs": signs, "bytes": payload_bytes,
                    "rest": 8 * payload_bytes - placed - signs, "header": header_bits},
        "gap": {"positions": gap_placed, "signs": signs, "bytes": gap[3],
                "rest": 8 * gap[3] - gap_placed - signs, "parameter": int(gap[0][2][PARAMETER])},
    }  # fmt: skip


def files_of(store):
    """Every object of a run by its name and size, in the order in which versions come to exist: manifests are last.

    An upload's part of a name is random; here it is a number, so that the same inputs give the same names. Documents
    have times in them and so no size of their own.
    """
    found = []
    for stat in store.list(""):
        numbers = re.findall(r"(?<!\d)\d{8}(?!\d)", stat.key)
        version = int(numbers[0]) if numbers else -1
        extra = version > 0 and ((len(numbers) > 1 and version - int(numbers[1]) > 1) or "anchor" in stat.key)
        found.append((version, extra, stat.key.startswith("manifests/"), stat.key, stat.num_bytes))
    files = []
    for number, (version, _, _, key, num_bytes) in enumerate(sorted(found)):
        name = re.sub(r"-[0-9a-f]{12}(?=[./])", f"-{(number + 1) * 0x9E3779B97F4B % (1 << 48):012x}", key)
        files.append({"key": name, "version": version, "bytes": None if key.endswith(".json") else num_bytes})
    return files


def bucket_of(recording):
    """Publish a recording to a store in memory: what lies in it then, and what a replica that comes late fetches."""
    steps = [{each.tensor: each for each in tensors} for _, _, tensors in by_step(recording)]
    live = {name: Tensor(BF16, each.old.shape, each.old.copy()) for name, each in steps[0].items()}
    store = f"memory:explain-{uuid4().hex}"
    with Publisher(store, live, run="explain", anchors=SECOND_ANCHOR) as publisher:
        publisher.publish(step=0).wait()
        for number, step in enumerate(steps, 1):
            for name, each in step.items():
                live[name].bits[:] = each.new
            publisher.publish(step=number).wait()
            publisher.flush()
        with Replica(store, {}, heartbeat_seconds=None) as replica:
            replica.pull()
            assert all(np.array_equal(replica.target.weights()[name].bits, live[name].bits) for name in live)
    hops = sorted(Run(store).hops(), key=lambda hop: (hop.version, hop.base is None, hop.base or 0))
    names = {hop: number for number, hop in enumerate(hops)}
    plans = {}
    for skips in (False, True):
        for anchors in (False, True):
            allowed = [
                hop
                for hop in hops
                if (skips or hop.base is None or hop.version - hop.base == 1)
                and (anchors or hop.base is not None or hop.version == 0)
            ]
            plans[f"skips={int(skips)} anchors={int(anchors)}"] = [
                [
                    names[hop]
                    for hop in cheapest_route(None, want, [each for each in allowed if each.version <= want]).hops
                ]
                for want in range(len(steps) + 1)
            ]
    return {
        "weights": sum(len(each.old) for each in steps[0].values()),
        "hops": [{"version": hop.version, "base": hop.base, "bytes": hop.num_bytes} for hop in hops],
        "plans": plans,
        "files": files_of(Run(store).store),
    }


def notes_of(name):
    """The lines at the head of a CSV: the command, the machine and the like."""
    lines = (RESULTS / name).read_text().splitlines()
    return dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))


def whole_runs():
    """What a step changes in a whole model, by learning rate: the medians of the GRPO runs from step 10 on."""
    rows = read_csv("grpo.csv")
    found = []
    for lr in sorted({row["lr"] for row in rows}, key=float):
        own = [row for row in rows if row["lr"] == lr and int(row["step"]) >= SETTLED]
        density, per_change, ratio = (
            statistics.median(float(row[name]) for row in own)
            for name in ("density", "bytes_per_change", "ratio_to_full")
        )
        found.append({"lr": float(lr), "density": density, "bytes_per_change": per_change, "ratio": ratio})
    return found


def measured():
    """What other benchmarks have measured, as numbers in seconds, bytes and weights."""
    lines = {row["line"]: row for row in read_csv("chain.csv")}

    def chain(row):
        words = row["phases_seconds"].split()
        return {
            "weights": int(row["weights"]), "delta_bytes": int(row["delta_bytes"]),
            "full_bytes": int(row["full_bytes"]), "full_seconds": float(row["full_seconds"]),
            "delta_seconds": float(row["delta_seconds"]),
            "phases": {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)},
        }  # fmt: skip

    vllm, notes = {row["mode"]: row for row in read_csv("vllm.csv")}, notes_of("vllm.csv")
    split = read_csv("engine_split.csv")[0]

    def gpu_model(model, weights):
        return {
            "model": model, "weights": weights,
            "blocked": gpu_rounds.median(lambda row: float(row["blocked_ms"]) / 1000, model),
            **{part.__name__: gpu_rounds.median(part, model) for part in parts},
            "served": gpu_rounds.median(lambda row: float(row["served_s"]), model),
        }  # fmt: skip

    parts = (gpu_rounds.encode, gpu_rounds.stage, gpu_rounds.pause)

    return {
        "machine": notes_of("chain.csv")["machine"].split(",")[0],
        "chain": {"density": 0.0115, "loopback": chain(lines["loopback"]), "slow": chain(lines["100 Mbit/s each way"])},
        "vllm": {
            "weights": int(notes["weights"]), "density": float(notes["density"]), "version": notes["vllm"],
            "write": float(vllm["deltawire"]["apply_ms"]) / 1000, "pause": float(vllm["deltawire"]["pause_ms"]) / 1000,
            "served": float(vllm["deltawire"]["publish_to_served_ms"]) / 1000,
            "reload": float(vllm["reload"]["pause_ms"]) / 1000,
        },
        "gpu": {
            "name": notes_of("vllm_gpu.csv")["gpu"], "density": gpu_rounds.DENSITY,
            "models": [gpu_model(*each) for each in gpu_rounds.WEIGHTS.items()],
            "per_change": {part.__name__: gpu_rounds.per_change(part) for part in parts},
            "reload": {
                "weights": gpu_rounds.WEIGHTS["0.6b"],
                "stop": gpu_rounds.median(gpu_rounds.pause, "0.6b", source="vLLM pause"),
                "seconds": gpu_rounds.median(gpu_rounds.pause, "0.6b", source="vLLM reload"),
            },
        },
        "split": {
            name: float(split[f"{name}, ns a change"]) / 1e9 for name in ("split", "save")
        },
        "uploads": [
            {name: float(row[name]) for name in ("density", "all_to_single")} for row in read_csv("fleet_density.csv")
        ],
        "density": [
            {name: float(row[name]) for name in ("density", "bytes_per_change", "encode_ratio", "decode_ratio")}
            for row in read_csv("density.csv")
        ],
        "runs": whole_runs(),
    }  # fmt: skip


def make():
    with Workers(1) as workers:
        recordings = {}
        for name in RECORDINGS:
            tensors = [each for number, large, _ in by_step(name) if number == 0 for each in large]
            recordings[name] = {
                "lr": LEARNING_RATES[name],
                "field": field_of(name),
                "sizes": sizes_of(name, workers),
                "classes": [classes_of(each, workers) for each in tensors],
                "bucket": bucket_of(name),
            }
    data = {
        "columns": COLUMNS,
        "tensors": [each.tensor for each in tensors],
        "recordings": recordings,
        "measured": measured(),
    }
    return json.dumps(data, indent=1) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    arguments.output.write_text(make())
    print(f"{arguments.output.stat().st_size:,} bytes", file=sys.stderr)
