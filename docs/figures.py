"""Every figure that pages say in their own words, from `benchmarks/results`, and where a page has it.

A page says a figure between two marks, `<!--=name-->1.6 %<!--/-->`; `make docs` writes what is between them, and a test
fails where it is something else. A table or an output is such a figure too, on lines of its own.
"""

import csv
import json
import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import mean, median
from typing import Any

from click.testing import CliRunner

from deltawire.cli import main
from deltawire.estimate.bill import planned
from deltawire.estimate.plan import Plan, density_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXPLAIN = ROOT / "src/deltawire/pages/static/explain"
MARKED = re.compile(r"<!--=([\w.-]+)-->(.*?)<!--/-->", re.DOTALL)
# The first steps of a run change more.
SETTLED = 10
MEASURED = {"0.6b": ("0.6 B", "Qwen3-0.6B"), "8b": ("8.19 B", "Qwen3-8B")}
COMPUTED = (32, 70, 235, 405)
BILL = [
    "estimate",
    "--params",
    "1t",
    "--lr",
    "1e-6",
    "--steps-per-day",
    "50",
    "--sites",
    "5",
    "--replicas",
    "1000",
    "--joins-per-day",
    "20",
    "--trainer-mbits",
    "10000",
    "--site-mbits",
    "10000",
    "--inside-mbits",
    "100000",
]


@cache
def read(name: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """A CSV's notes (command, machine, commit) and rows."""
    lines = (RESULTS / name).read_text().splitlines()
    notes = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    return notes, list(csv.DictReader(line for line in lines if not line.startswith("# ")))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(value: float, digits: int = 3) -> str:
    """Some significant digits, no exponent."""
    return f"{float(f'{value:.{digits}g}'):,.12f}".rstrip("0").rstrip(".")


def size(num_bytes: float, digits: int = 3) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * scale:
            return f"{short(num_bytes / scale, digits)} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float, digits: int = 2) -> str:
    return f"{short(1000 * seconds, digits)} ms" if seconds < 0.9995 else f"{short(seconds, digits)} s"


def percent(share: float, digits: int = 2) -> str:
    return f"{short(100 * share, digits)} %"


def marked(text: str) -> str:
    """A page with the figures as they are now."""

    def now(found: re.Match[str]) -> str:
        value = figures()[found[1]]
        return f"<!--={found[1]}-->" + (f"\n\n{value}\n\n" if "\n" in value else value) + "<!--/-->"

    return MARKED.sub(now, text)


def pages() -> list[Path]:
    """Where people read figures."""
    return [
        *ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "benchmarks").rglob("*.md"),
        EXPLAIN / "index.html",
    ]  # fmt: skip


@cache
def figures() -> dict[str, str]:
    return whole_runs() | recordings() | servers() | chains() | demo() | smollm2() | polling() | bill() | {
        "models": models(), "sizes": sizes(), "sizing": sizing(),
        "report-runs": report_runs(), "report-ways": report_ways(), "report-chain": report_chain(),
        "quantized-servers": quantized_servers(),
        "report-sources": report_sources(), "report-soak": report_soak(), "first-minute": first_minute(),
    }  # fmt: skip


@cache
def settled(lr: float) -> dict[str, float]:
    """A step of a whole run at a learning rate: medians from step 10 on."""
    own = [row for row in read("grpo.csv")[1] if float(row["lr"]) == lr]
    later = [row for row in own if int(row["step"]) >= SETTLED]
    names = ("density", "bytes_per_change", "ratio_to_full", "num_bytes")
    return {name: median(float(row[name]) for row in later) for name in names} | {"first": float(own[0]["density"])}


def whole_runs() -> dict[str, str]:
    found = {}
    for lr, name in ((1e-6, "1e-6"), (3e-6, "3e-6")):
        step = settled(lr)
        found |= {
            f"density-{name}": percent(step["density"]), f"ratio-{name}": f"1/{1 / step['ratio_to_full']:.0f}",
            f"first-{name}": percent(step["first"], 1),
        }  # fmt: skip
    weights = re.search(r"(\d+) weights", read("grpo.csv")[0]["model"])
    assert weights
    return found | {"whole-run-weights": f"{int(weights[1]) / 1e6:.0f} M"}


@cache
def recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((EXPLAIN / "recorded.json").read_text())
    return data


def recordings() -> dict[str, str]:
    """The tensors that encodings are compared on."""
    found = {}
    for name in recorded()["recordings"]:
        rows = recorded()["recordings"][name]["sizes"]
        share = sum(row["changed"] for row in rows) / sum(row["weights"] for row in rows)
        found[f"slices-{name.removeprefix('rl-lr')}"] = percent(share)
    notes, rows = read("codec_size.csv")
    sizes = {row["encoding"]: row for row in rows if row["recording"] == "rl-lr1e-6"}
    others = [float(row["bytes_per_change"]) for row in sizes.values() if row["used_by"] != "deltawire"]
    classes = recorded()["recordings"]["rl-lr1e-6"]["classes"][0]
    return found | {
        "slices-changes-1e-6": f"{int(sizes['context']['changed']):,}",
        "context-1e-6": f"{float(sizes['context']['bytes_per_change']):.2f}",
        "peers-least-1e-6": f"{min(others):.2f}", "peers-most-1e-6": f"{max(others):.0f}",
        "position-context": short(classes["context"]["positions"] / classes["changed"], 2),
        "position-gap": f"{classes['gap']['positions'] / classes['changed']:.0f}",
        "codec-commit": notes["commit"].removesuffix("-dirty"),
    }  # fmt: skip


NAMES = {
    "context": "deltawire `context`", "gap": "deltawire `gap`",
    "arc_v3, all candidates": "Fireworks `arc_v3`, waiting for all its candidates",
    "gaps + XOR, zstd-1": "NeMo-RL's gaps and XOR, zstd",
    "dense XOR, zstd-1": "XOR of all bytes, zstd (slime, miles, SkyRL, Stitch)",
    "gaps + bf16, zstd-1": "PULSE's gaps and values, zstd", "uint16 gaps + bf16": "TRL v3's uint16 gaps and values",
    "int32 + bf16": "int32 positions and values (TRL v1, verl)",
}  # fmt: skip


def sizes() -> str:
    rows = {row["encoding"]: row for row in read("codec_size.csv")[1] if row["recording"] == "rl-lr1e-6"}
    own = [[text, f"{float(rows[name]['bytes_per_change']):.2f}"] for name, text in NAMES.items()]
    return table(["encoding", "bytes per change, lr 1e-6"], own)


def rounds(model: str, source: str = "mapping") -> list[dict[str, str]]:
    """Those of a vLLM server with 1 % and eight streams, after the first."""
    case = {
        "model": model, "mode": "graphs", "source": source, "requests": "keep", "changed": "0.01", "streams": "8",
    }  # fmt: skip
    return [row for row in read("vllm_gpu.csv")[1] if case.items() <= row.items() and row["round"] != "0"]


@cache
def on_gpu(model: str, column: str, source: str = "mapping") -> float:
    return median(float(row[column]) for row in rounds(model, source))


@cache
def publishes(model: str) -> dict[str, str]:
    return next(r for r in read("gpu_publish.csv")[1] if r["model"] == model and r["method"] == "deltawire")


def servers() -> dict[str, str]:
    """Engines and trainers: how long something stands still."""
    notes, rows = read("vllm.csv")
    cpu = {row["mode"]: row for row in rows}
    gpu = read("vllm_gpu.csv")[0]
    found = {
        "cpu-weights": f"{int(notes['weights']) / 1e6:.1f} M",
        "vllm": gpu["vllm"], "sglang": read("sglang_gpu.csv")[0]["sglang"], "full-8b": size(2 * weights_of("8b")),
    }  # fmt: skip
    for mode, name in (("deltawire", "cpu-pause"), ("patch API", "cpu-patches"), ("reload", "cpu-reload")):
        found[name] = f"{float(cpu[mode]['pause_ms']):.0f} ms"
    for model, (_, name) in MEASURED.items():
        found |= {
            f"pause-{model}": duration(on_gpu(model, "pause_ms") / 1000),
            f"served-{model}": duration(on_gpu(model, "served_s")),
            f"blocked-{model}": duration(float(publishes(name)["blocked_ms"]) / 1000),
        }
    return found


def weights_of(model: str) -> int:
    weights: int = next(e["weights"] for e in recorded()["measured"]["gpu"]["models"] if e["model"] == model)
    return weights


def chains() -> dict[str, str]:
    """From a trainer to a replica, and all that is uploaded."""
    publish = read("publish.csv")[1][0]
    fleet = uploads()
    return {
        "chain-weights": f"{int(read('chain.csv')[1][0]['weights']) / 1e6:.0f} M",
        "blocking": publish["ratio_to_flatnonzero"], "publisher-memory": percent(float(publish["memory_beyond"])),
        "uploads-all": short(float(fleet["all_to_single"])),
        "uploads-density": percent(float(uploads_at(0.011)["density"])),
        "uploads-1e-6": short(float(uploads_at(settled(1e-6)["density"])["all_to_single"])),
        "uploads-3e-6": short(float(uploads_at(settled(3e-6)["density"])["all_to_single"])),
        "uploads-weights": f"{int(fleet['weights']) / 1e6:.0f} M",
        "uploads-steps": fleet["steps"], "uploads-scratch": short(float(scratch()["scratch_models"])),
        "join-most": short(float(fleet["most_anchors_fetched"]), 2), "join-objects": fleet["most_objects"],
    }  # fmt: skip


def uploads() -> dict[str, str]:
    """The largest run that counted everything a publisher uploads."""
    rows = [row for row in read("fleet_bytes.csv")[1] if row["choice"] == "now"]
    return max(rows, key=lambda row: int(row["weights"]))


def uploads_at(density: float) -> dict[str, str]:
    """The run in which a step changed about this share of the weights."""
    return min(read("fleet_density.csv")[1], key=lambda row: abs(float(row["density"]) - density))


def scratch() -> dict[str, str]:
    return next(row for row in read("fleet_bytes.csv")[1] if row["choice"] == "now" and row["scratch_models"])


def models() -> str:
    """All weights, a delta and a pause, by the size of the model; what was measured and what was computed."""
    rows = []
    for model, (text, name) in MEASURED.items():
        whole = 2 * weights_of(model)
        delta = on_gpu(model, "bytes")
        like = Plan(weights_of(model), 0.01, 1440)
        factor = planned(like).uploaded_bytes / like.delta_bytes()
        reloads = rounds(model, "vLLM reload")
        reload = duration(on_gpu(model, "pause_ms", "vLLM reload") / 1000) if reloads else "-"
        rows.append([
            f"{text}, measured", "1 %", size(whole), size(delta), size(factor * delta),
            duration(float(publishes(name)["blocked_ms"]) / 1000), duration(on_gpu(model, "pause_ms") / 1000), reload,
        ])  # fmt: skip
    for billions in COMPUTED:
        plan = Plan(billions * 1e9, density_of(1e-6), 1440)
        rows.append([
            f"{billions} B, computed", percent(plan.density), size(2 * plan.weights), size(plan.delta_bytes()),
            size(planned(plan).uploaded_bytes), duration(plan.blocked_seconds), duration(plan.pause_seconds),
            f"at most {duration(plan.reload_seconds)}",
        ])  # fmt: skip
    header = ["model", "weights changed", "all weights", "delta", "total upload per step (computed)", "trainer blocked",
              "engine paused", "paused for a full reload"]  # fmt: skip
    return table(header, rows)


def sizing() -> str:
    """Room that parts take, by the size of the model."""
    weights = [weights_of("0.6b"), weights_of("8b"), 70e9, 405e9]
    extra = float(publishes("Qwen3-8B")["extra_memory"])
    disk = float(scratch()["scratch_models"])

    def row(name: str, share: float) -> list[str]:
        return [name, *(size(2 * share * each) for each in weights)]

    staging = [f"{on_gpu(model, 'staging_mb'):,.0f} MB" for model in MEASURED]
    rows = [
        row("bf16 weights", 1.0),
        row("trainer: snapshot, in addition to the weights", 1.0),
        row("trainer: while a delta is made, with 1 % changed", extra),
        row("trainer: scratch files, at most", disk),
        row("replica: mirror, unless the engine decodes", 1.0),
        ["server's GPU: during an update, with 1 % changed", *staging, "-", "-"],
    ]
    return table(["", "0.6 B", "8.19 B", "70 B", "405 B"], rows)


def report_runs() -> str:
    rows = []
    for lr, name in ((1e-6, "1e-6"), (3e-6, "3e-6")):
        step = settled(lr)
        rows.append([
            name, percent(step["first"], 3), percent(step["density"], 3), size(step["num_bytes"]),
            f"{step['bytes_per_change']:.3f}", f"1/{1 / step['ratio_to_full']:.0f}",
        ])  # fmt: skip
    header = ["lr", "changed, first step", "changed, median", "delta", "bytes per change", "fraction of all weights"]
    return table(header, rows)


def report_ways() -> str:
    """Ways to change a server's weights, in the same server."""
    rows = []
    sources = ("mapping", "vLLM patches", "vLLM reload")
    for model, source in ((m, s) for m in MEASURED for s in sources if rounds(m, s)):
        rows.append([
            f"vLLM on an H200, {MEASURED[model][0]}", "deltawire" if source == "mapping" else source,
            size(on_gpu(model, "bytes", source)), duration(on_gpu(model, "pause_ms", source) / 1000, 3),
            duration(on_gpu(model, "gap_ms", source) / 1000, 3), duration(on_gpu(model, "served_s", source), 3),
        ])  # fmt: skip
    sglang, ways = read("sglang_gpu.csv")
    for mode, name in (("patch", "deltawire"), ("disk", "SGLang reload from a folder")):
        own = [row for row in ways if (row["model"], row["mode"]) == ("0.6b", mode) and not row["event"]]
        if mode == "patch":
            own = [row for row in own if row["requests"] == "keep" and row["round"] != "0"]
        pause, gap, sent = (median(float(row[each]) for row in own) for each in ("pause_ms", "gap_ms", "bytes"))
        served = duration(median(float(row["served_s"]) for row in own), 3)
        server = f"SGLang {sglang['sglang']} on an H200, 0.6 B"
        rows.append([server, name, size(sent), duration(pause / 1000, 3), duration(gap / 1000, 3), served])
    notes, ways = read("vllm.csv")
    for row in ways:
        served = duration(float(row["publish_to_served_ms"]) / 1000, 3) if row["publish_to_served_ms"] else "-"
        pause = duration(float(row["pause_ms"]) / 1000, 3)
        name = f"vLLM on two cores, {int(notes['weights']) / 1e6:.0f} M"
        rows.append([name, row["mode"], "-", pause, "-", served])
    return table(["server", "method", "sent", "pause", "longest token gap", "publish to served"], rows)


def quantized_servers() -> str:
    """Servers of one model that follow one run: medians of their updates."""
    rows = []
    found: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in read("quantized_gpu.csv")[1]:
        found.setdefault((row["model"], row["mode"], row["quantization"]), []).append(row)
    for (model, mode, kind), own in found.items():
        numbers = {
            each: median(float(row[each]) for row in own) for each in own[0] if each.endswith(("_ms", "_s", "_mb"))
        }
        written = [sum(int(row[each]) for each in ("served", "codes", "scales")) for row in own]
        shares = [number / int(row["changed"]) for number, row in zip(written, own, strict=True)]
        rows.append([
            f"{model}, {mode}", "bf16" if kind == "none" else f"`{kind}`", str(len(own)),
            f"{median(written) / 1e6:.2f} M", f"{median(shares):.2f}",
            f"{numbers['staged_mb']:.0f} MB", f"{numbers['pause_ms']:.1f} ms", f"{numbers['gap_ms']:.0f} ms",
            f"{numbers['pull_s']:.2f} s",
        ])  # fmt: skip
    header = ["model", "served as", "updates", "elements written on the GPU", "written per changed weight", "staged",
              "pause", "longest token gap", "pull"]  # fmt: skip
    return table(header, rows)


def report_chain() -> str:
    rows = [
        [row["line"], f"{size(int(row['full_bytes']))}, {row['full_seconds']} s",
         f"{size(int(row['delta_bytes']))}, {row['delta_seconds']} s", row["times_fewer_bytes"], row["times_faster"]]
        for row in read("chain.csv")[1]
    ]  # fmt: skip
    return table(["link", "all weights, up and down", "delta, up and down", "times fewer bytes", "times faster"], rows)


def report_soak() -> str:
    """The verdict of the soak, and how much it did."""
    text = (RESULTS / "soak.md").read_text()
    verdict = re.search(r"^\*\*(.+)\*\*$", text, re.MULTILINE)
    counts = re.findall(r"^## (\w+)\n.*?\*\*all\*\* \| \*\*([\d,]+)\*\*", text, re.MULTILINE | re.DOTALL)
    assert verdict
    return verdict[1] + " after " + ", ".join(f"{count} {name.lower()}" for name, count in counts)


def report_sources() -> str:
    """The files that a report is made of: what made each, on what, and what is in it."""
    rows = []
    for path in sorted(RESULTS.glob("*.csv")):
        notes = read(path.name)[0]
        machine = notes.get("gpu") or notes.get("machine", "-").split(",")[0]
        digest = sha256(path.read_bytes()).hexdigest()
        commit = notes.get("commit", "-").removesuffix("-dirty")
        rows.append([f"[`{path.name}`](../benchmarks/results/{path.name})", machine, commit, f"`{digest}`"])
    return table(["file", "machine", "commit", "SHA-256"], rows)


def first_minute() -> str:
    """From nothing to the page of `deltawire explain`."""
    found = re.search(r"^all of it, .* ([\d.]+) s$", (RESULTS / "first_minute.txt").read_text(), re.MULTILINE)
    assert found
    return duration(float(found[1]))


@cache
def demo_runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((RESULTS / "demo.json").read_text())["runs"]
    return runs


def demo() -> dict[str, str]:
    runs = demo_runs()
    names = ["seed 0", "seed 1", "seed 2", "nothing published"]
    window = 20
    parts = range(0, runs[0]["steps"], window)
    rewards = [
        [name, *(f"{mean(run['rewards'][i : i + window]):.2f}" for i in parts)]
        for name, run in zip(names, runs, strict=True)
    ]
    header = ["mean reward of the replicas' games, by step", *(f"{i + 1}-{i + window}" for i in parts)]
    return {
        "demo-rewards": table(header, rewards), "demo-games": demo_games(names), "demo-deltas": demo_deltas(),
        "demo-delta": size(runs[0]["payload_bytes"], 2), "demo-full": size(runs[0]["full_bytes"], 2),
        "demo-blocked": duration(runs[0]["publish_blocked_seconds"], 1),
        "demo-density": percent(runs[0]["density"]), "demo-versions": str(runs[0]["num_versions"]),
    }  # fmt: skip


def demo_games(names: list[str]) -> str:
    def row(name: str, games: list[dict[str, Any]]) -> list[str]:
        best = max(game["reward"] for game in games)
        texts = [(f"{g['reward']:.3f}, {100 * g['wins']:.1f} %", g["reward"] == best) for g in games]
        return [name, *(f"**{text}**" if bold else text for text, bold in texts)]

    runs = demo_runs()
    rows = [row("before", runs[0]["evaluations"]["start"])]
    for name, run in zip(names, runs, strict=True):
        rows.append(row(f"after, {name}" if run["publishes"] else name, run["evaluations"]["final"]))
    header = [f"reward and wins over {runs[0]['evaluations']['start'][0]['num_games']} games, by temperature"]
    return table([*header, *(f"{g['temperature']:g}" for g in runs[0]["evaluations"]["start"])], rows)


def demo_deltas() -> str:
    runs = [run for run in demo_runs() if run["publishes"]]

    def row(name: str, of: Any, other: str = "") -> list[str]:
        return [name, *(of(run) for run in runs), other]

    def after(run: dict[str, Any], which: int) -> str:
        return f"{run['disturbances'][which]['seconds']:.1f} s, {run['disturbances'][which]['steps']} steps"

    def all_of(run: dict[str, Any]) -> float:
        total: float = sum(each["num_bytes"] for each in run["uploads"].values())
        return total

    whole = [settled(lr) for lr in (1e-6, 3e-6)]
    rows = [
        row("weights changed per step", lambda run: percent(run["density"], 3),
            " and ".join(percent(each["density"], 2) for each in whole)),
        row("most in one step", lambda run: percent(run["max_density"], 3)),
        row("delta, with headers", lambda run: size(run["payload_bytes"])),
        row("fraction of all weights", lambda run: f"1/{run['full_bytes'] / run['payload_bytes']:.0f}",
            " and ".join(f"1/{1 / each['ratio_to_full']:.0f}" for each in whole)),
        row("bytes per changed weight, with headers", lambda run: f"{run['bytes_per_change']:.2f}",
            " and ".join(f"{each['bytes_per_change']:.2f}" for each in whole)),
        row("total upload", lambda run: size(all_of(run))),
        row(f"all weights, {runs[0]['num_versions']} versions",
            lambda run: size(run["full_bytes"] * run["num_versions"], 4)),
        row("killed replica back after", lambda run: after(run, 0)),
        row("new replica joined after", lambda run: after(run, 1)),
    ]  # fmt: skip
    link = "[recorded RL runs](../performance.md#a-grpo-run-step-by-step), lr 1e-6 and 3e-6"
    return table(["", "seed 0", "seed 1", "seed 2", link], rows)


def smollm2() -> dict[str, str]:
    """The demo with a pretrained model."""
    events = [json.loads(line) for line in (RESULTS / "demo_smollm2.jsonl").read_text().splitlines()]
    deltas = [each for each in events if each["event"] == "published" and each["version"]]
    pauses = [e["pause_seconds"] for e in events if e["event"] == "pull" and e["pause_seconds"] and e["changed"]]
    payload, whole = mean(each["bytes"] for each in deltas), deltas[0]["full_bytes"]
    changed = mean(each["changed"] for each in deltas)
    return {
        "smollm2-density": percent(mean(each["density"] for each in deltas), 3),
        "smollm2-most": percent(max(each["density"] for each in deltas), 3), "smollm2-weights": f"{whole / 2e6:.1f} M",
        "smollm2-delta": size(payload), "smollm2-full": size(whole), "smollm2-ratio": f"1/{whole / payload:.0f}",
        "smollm2-bytes": f"{payload / changed:.2f}", "smollm2-pause": f"{median(pauses):.2f} s",
        "smollm2-changed": f"{changed / 1e6:.0f} million",
    }  # fmt: skip


def polling() -> dict[str, str]:
    rows = [
        [row["polling"], f"{float(row['requests_per_second']):.0f}", f"{row['median_delay']} s",
         f"{row['p99_delay']} s", f"${float(row['usd_a_day_s3']):.0f}"]
        for row in read("polling.csv")[1]
    ]  # fmt: skip
    header = ["polling", "requests per second", "delay, median", "delay, p99", "S3 cost per day"]
    return {"polling": table(header, rows)}


@cache
def estimated(*more: str, as_json: bool = True) -> str:
    """What `deltawire estimate` prints for the large run, with more options."""
    words = [*BILL, *more, *(("--format", "json") if as_json else ())]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def bill() -> dict[str, str]:
    """A trillion weights and a thousand replicas."""

    def ways(*more: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(estimated(*more))["ways"]
        return found

    def day(way: dict[str, Any]) -> str:
        return f"${way['day']['usd']['total']:,.0f}"

    def traffic(way: dict[str, Any]) -> str:
        return f"${way['day']['usd']['egress']:,.0f}"

    def over(way: dict[str, Any]) -> str:
        return f"{max(way['use'].values()):.0f}"

    bare, cached, whole, whole_cached = ways()
    quiet = ways("--joins-per-day", "0")[1]
    free, near = ways("--store", "r2"), ways("--egress-price", "0.02")
    joins = cached["day"]["usd"]["total"] - quiet["day"]["usd"]["total"]
    return {
        "bill": "```text\n" + estimated(as_json=False).rstrip() + "\n```",
        "bill-over": over(whole), "bill-over-inside": over(whole_cached),
        "bill-full-millions": f"{whole['day']['usd']['egress'] / 1e6:.0f} million",
        "bill-site-bytes": size(cached["step"]["store_bytes"], 2),
        "bill-served": f"{cached['step']['served_seconds']['median'] / 60:.1f} minutes",
        "bill-last": f"{cached['step']['served_seconds']['last'] / 60:.0f} minutes",
        "bill-pause": duration(cached["step"]["pause_seconds"]),
        "bill-bare": f"{traffic(bare)} of {day(bare)}", "bill-cached": f"{traffic(cached)} of {day(cached)}",
        "bill-joins": f"${joins:,.0f}", "bill-quiet": day(quiet),
        "bill-r2": f"{day(free[0])} a day without caches and {day(free[1])} with",
        "bill-near": f"{day(near[0])} and {day(near[1])}",
    }  # fmt: skip
