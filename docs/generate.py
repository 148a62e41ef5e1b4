"""Writes the parts of the documentation that come from the program and from the benchmarks: `make docs`."""

import re
from pathlib import Path
from statistics import median

import figures
import rooms
from click.testing import CliRunner
from figures import RESULTS, read
from figures import table as markdown_table

from deltawire.cli import main
from deltawire.metrics import COUNTERS, HELP

DOCS = Path(__file__).parent

CLI_HEAD = """# Command line

Every command takes `--format json` (data on stdout for programs), `--quiet` and `--help`. Progress and errors go to
stderr. Exit codes: 0 fine, 1 failure, 2 usage, 3 a verification found a mismatch. `DELTAWIRE_DEBUG=1` shows tracebacks.

A checkpoint is a safetensors file, or a folder of them with the usual index. A delta is a safetensors file; one that
was written in parts is named by the path it was saved to, or by any part.
"""

METRICS = """# Metrics

Publishers and replicas count what they do. `metrics()` of each is a flat dictionary for a run tracker, with keys such
as `deltawire/publish/num_bytes`. For Prometheus the same numbers have the names below. They are read when Prometheus
asks; nothing is kept in between.

- An [agent](guides/agent.md) with `--listen` has those of its replica under `/metrics`.
- In a program of your own, put publishers and replicas into a registry, and serve it or pass it to your own exporter:

```python
import numpy as np

from prometheus_client import start_http_server

from deltawire import Publisher, Replica
from deltawire.metrics import registry

weights = {{"layer.weight": np.zeros((64, 64), np.float32)}}
with Publisher("memory:metrics", weights) as publisher, Replica("memory:metrics", {{}}, name="gpu-0") as replica:
    publisher.publish().wait()
    replica.pull()
    server, _ = start_http_server(0, addr="127.0.0.1", registry=registry(publisher, replica))  # 0: a free port
    print(f"http://127.0.0.1:{{server.server_port}}/metrics")
    server.shutdown()
    server.server_close()
```

That needs `pip install 'deltawire[metrics]'`. Each metric has the label `run`, those of replicas also `replica`.
Counters end in `_total`. A number that is not known (the lag of a replica that has not seen the store, say) is left out
rather than reported as 0.

## Of a publisher

{publish}

## Of a replica or an agent

{replica}

## Grafana, and what to alert on

[`deploy/monitoring`](../deploy/monitoring/rules.yaml) has a dashboard for Grafana (`grafana.json`, to import) and alert
rules for Prometheus (`rules.yaml`). Alerts have the names of the [dashboard's](guides/dashboard.md#alerts):
`ReplicaDead`, `ReplicaFault`, `ReplicaBehind`, `ReplicaSlow`, `PauseLong`, `TrainerSilent`; and `PublishFails`. Reward
and staleness are the training loop's own numbers: a tracker has them, and the dashboard of deltawire.

## Trackers

The callback for transformers and TRL's transfer add the same names to what the Trainer logs, so that trackio, W&B and
TensorBoard show `deltawire/publish/num_bytes` and so on. In a loop of your own, log `publisher.metrics()`.

## Of TRL's transfer

`DeltawireTransfer.metrics()` has the publisher's numbers, and `deltawire/transfer/...` and `deltawire/engines/...`,
which go into the trainer's log and not to Prometheus: see [TRL](guides/trl.md#numbers).
"""

PERFORMANCE = """# Performance

Made by `make bench` and `make docs` from the CSVs in `benchmarks/results`. {conditions}

## Size

Bytes sent per changed weight, over six tensors and eight steps of two [recorded RL runs](../benchmarks/data/README.md);
all tensor data counted, headers not (ours takes under 300 bytes per changed tensor; peers' are not counted either). Of
these tensors <!--=slices-1e-6--><!--/--> and <!--=slices-3e-6--><!--/--> change in a step; of a whole
model <!--=density-1e-6--><!--/--> and <!--=density-3e-6--><!--/-->, [further down](#a-grpo-run-step-by-step).

{sizes}

arc_v3 races several encodings against the clock, so its size differs from run to run; "all candidates" waits for each
and takes the smallest.

## Speed

Time as a multiple of `np.flatnonzero(old != new)` on the same weights, timed right before each; median of several
rounds. These machines are noisy: compare ratios, not seconds. Ours: 64 M bf16 weights with 1.15 % changed; peers: 16 M
of them. One thread (arc_v2 and arc_v3 start threads of their own), and how much faster two threads are. Decoding gives
positions and new bits with ours, and the whole new tensor with the peers', so that a copy of the old one is in theirs.

{speeds}

## Growth

`context`, one thread, each size in a process of its own. Memory is the peak of an encode beyond its two inputs, as a
multiple of one of them. In the last three rows weights change to random patterns.

{growth}

## Density

16 M normal weights (deviation 0.02) and normal updates of growing size, cast to bf16; `auto`, one thread, times as
multiples of `np.flatnonzero(old != new)` on the same weights. RL steps at lr 1e-6 change <!--=density-1e-6--><!--/-->
and lie between updates of 1e-7 and 1e-6. Nothing falls back to `dense` here: even where 99.6 % of the weights change,
their steps are smaller than their values.

{density}

## From trainer to replica

{chain_weights} bf16 weights, 1.15 % changed, through a real S3 server (seaweedfs) on the loopback interface, both sides
and the server on the same two cores. "All weights" is one file put and fetched with the same client; "delta" is
`publish` until the commit, then `pull` into a replica's memory. Bytes are both directions together.

{chain}

Where a delta's time goes, in seconds: {phases}

The part of `publish` that blocks the caller takes {blocking} times `np.flatnonzero(old != new)` on the same weights,
and the publisher needs {memory} % of the model's size beyond weights and snapshot, while it also writes skip deltas.

Measuring live weights again takes {check_percent} % of the time where {check_weights:.0f} M weights are published every
{check_seconds:.1f} s, and has seen all of them after {check_versions} versions
([`recheck.csv`](../benchmarks/results/recheck.csv), `python benchmarks/recheck.py --versions 25`).
{vllm}{vllm_gpu}{gpu}{grpo}
## Where it does not help

- **On a fast, shared network** (NVLink, 400 Gb/s InfiniBand) broadcasting all weights takes a second or two for models
  of hundreds of gigabytes; a delta saves bytes that were not the bottleneck.
- **At high learning rates** most weights change. A delta is then 2 to 10 times smaller than the weights rather than
  100, and coding it takes several times longer. At lr 1e-6 a step
  changes <!--=density-1e-6--><!--/-->, at 3e-6 <!--=density-3e-6--><!--/-->, and the first step of a
  run <!--=first-1e-6--><!--/--> and <!--=first-3e-6--><!--/-->.
- **fp32 weights** change nearly everywhere at every step. Publish bf16.
- **Tiny tensors**: norms and biases cost 200 to 300 bytes of header each, more than their payload.
"""


VLLM = """
## In a live vLLM server

One update of a vLLM {vllm} server on the CPU, {weights:,} bf16 weights, {density} of them changed, by three methods
in the same server and run: by deltawire, by vLLM's own `load_checkpoint_weight_patches` (its patches read before the
pause), and by its layerwise reload of the whole checkpoint from a local folder. "Written" is the time inside the
worker, "pause" from `/pause` sent to `/resume` answered. Memory is what the worker needs beyond what it has, as a part
of the model.

{table}

From the call of `publish` until the server serves the new version {served} ms pass, store, checks and decoding
included. Made by `benchmarks/vllm_updates.py`.
"""

VLLM_GPU = """
## In a live vLLM server on a GPU

vLLM {vllm} on an {gpu} serves streams with random weights of a Qwen3's shapes while a trainer on the same GPU changes
some of them and publishes a mapping, an iterator or a module of CUDA tensors, through a folder. Workers decode on the
GPU against the weights that they serve, and no mirror is kept. After each update every parameter's SHA-256 was equal to
one that was computed from the trainer's tensors. "Blocked" is how long `publish` holds the trainer, "served" the time
from that call until the server serves the version, "gap" the longest between two tokens of any stream, first update
included, and "idle" the same without updates. "Recompute" computes the context of running requests again, "keep" does
not. Below each shape are vLLM's own ways in the same server: `pause` and resume around nothing, its patch API (which
`sparse_nccl` uses) and its reload, both from files in shared memory; there "blocked" is making the file. Milliseconds.
Made by `benchmarks/vllm_gpu.py`; all rows are in [`vllm_gpu.csv`](../benchmarks/results/vllm_gpu.csv).

{table}
"""

GPU = """
## On a GPU

2^30 bf16 weights on an {gpu} (torch {torch}), 1.15 % of them changed as training changes them. The same script,
`benchmarks/gpu.py`, checks every kernel against the CPU's, bit for bit, on random and recorded data. The floor is a
copy of the weights on the device, in the same run: it moves as many bytes as reading new and old weights once. Times
include launches and waits. "Compare" is what `publish` waits for; the rest goes on behind it.

{table}
{publish}"""

PUBLISH = """
Whole `publish()` calls of bf16 models, next to the same work done by other methods in the same run. "Blocked" is how
long the call holds the training loop; "in host memory" is when the finished bytes are there, ready to upload. TRL v1
stands for two copies of all weights to the host and a comparison there. Memory is what the device holds at most beyond
the weights and their snapshot.

{table}
"""

GRPO = """
## A GRPO run, step by step

{steps} steps at each learning rate, from the same start and with a fresh optimizer, each published and counted as it
lies in the store, headers included. In the end a replica has the same bits. Made by `benchmarks/grpo.py`, which says
what is rewarded; all steps are in [`grpo.csv`](../benchmarks/results/grpo.csv).

- Machine: {machine}.
- Model: {model}.
- Pretrained from scratch for this: {pretraining}.
- GRPO: {grpo}.

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="../benchmarks/results/grpo-dark.svg">
  <img src="../benchmarks/results/grpo-light.svg" alt="Share of weights changed and bytes per change, step by step">
</picture>

{table}
"""


def help_text(*arguments: str) -> str:
    """What the program itself prints."""
    return CliRunner().invoke(main, [*arguments, "--help"], prog_name="deltawire", terminal_width=100).output


def cli_page() -> str:
    text = CLI_HEAD + f"\n```text\n{help_text()}```\n"
    for name in main.commands:
        text += f"\n## deltawire {name}\n\n```text\n{help_text(name)}```\n"
    return text


def metrics_page() -> str:
    def part(prefix: str) -> str:
        rows = []
        for key, meaning in HELP.items():
            if key.startswith(prefix):
                name = f"deltawire_{key.replace('/', '_')}" + ("_total" if key in COUNTERS else "")
                rows.append([f"`{name}`", "counter" if key in COUNTERS else "gauge", meaning])
        return markdown_table(["name", "type", "meaning"], rows)

    return METRICS.format(publish=part("publish/"), replica=part("replica/"))


def grpo_section() -> str:
    """The GRPO runs, where they were made: that takes a GPU."""
    if not (RESULTS / "grpo.csv").exists():
        return ""
    notes, rows = read("grpo.csv")
    lines = []
    for lr in sorted({row["lr"] for row in rows}, key=float):
        own = [row for row in rows if row["lr"] == lr]
        later = [row for row in own if int(row["step"]) >= 10]
        for name, some in (("first step", own[:1]), ("median from step 10", later), ("last step", own[-1:])):
            density, num_bytes, each, ratio, score = (
                median(float(row[column]) for row in some)
                for column in ("density", "num_bytes", "bytes_per_change", "ratio_to_full", "reward")
            )
            lines.append([lr.replace("e-0", "e-"), name, f"{100 * density:.2f} %", f"{num_bytes:,.0f}", f"{each:.3f}",
                          f"1/{1 / ratio:.0f}", f"{score:.3f}"])  # fmt: skip
    header = ["lr", "", "changed", "payload, bytes", "bytes per change", "of all weights", "reward"]
    return GRPO.format(
        machine=notes["machine"], model=notes["model"], pretraining=notes["pretraining"], grpo=notes["grpo"],
        steps=max(int(row["step"]) for row in rows), table=markdown_table(header, lines),
    )  # fmt: skip


def gpu_section() -> str:
    """The kernels on a GPU, where they were measured."""
    if not (RESULTS / "gpu.csv").exists():
        return ""
    notes, rows = read("gpu.csv")
    lines = [
        [row["side"], row["work"], f"{float(row['milliseconds']):.2f}", f"{float(row['times_floor']):.2f}"]
        for row in rows
        if not row["work"].startswith(" ")
    ]
    table = markdown_table(["side", "work", "ms", "times the floor"], lines)
    return GPU.format(gpu=notes["gpu"], torch=notes["torch"], table=table, publish=publish_section())


def vllm_section() -> str:
    """Updates of a live server, where they were measured."""
    if not (RESULTS / "vllm.csv").exists():
        return ""
    notes, rows = read("vllm.csv")
    lines = [
        [row["mode"], row["apply_ms"], row["apply_ratio"], row["pause_ms"], row["pause_ratio"],
         f"{100 * float(row['memory_of_model']):.0f} %"]
        for row in rows
    ]  # fmt: skip
    header = ["method", "written, ms", "times ours", "pause, ms", "times ours", "memory"]
    return VLLM.format(
        vllm=notes["vllm"], weights=int(notes["weights"]), density=f"{100 * float(notes['density']):.0f} %",
        served=rows[0]["publish_to_served_ms"], table=markdown_table(header, lines),
    )  # fmt: skip


def vllm_gpu_section() -> str:
    """The same on a GPU: least and most of the rounds of each case."""
    notes, rows = read("vllm_gpu.csv")
    cases: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        case = (row["model"], row["mode"], row["source"], row["requests"], row["changed"], row["streams"])
        cases.setdefault(case, []).append(row)
    lines = []
    for (model, mode, source, requests, changed, streams), some in cases.items():

        def spread(column: str, some: list[dict[str, str]] = some, times: int = 1) -> str:
            values = sorted(round(times * float(row[column])) for row in some)
            return f"{values[0]:,}" if values[0] == values[-1] else f"{values[0]:,} - {values[-1]:,}"

        lines.append([
            f"Qwen3-{model.upper()}, {mode}", source, requests, f"{100 * float(changed):g} %", streams, str(len(some)),
            spread("idle_ms"), spread("gap_ms"), spread("pause_ms"), spread("blocked_ms"),
            spread("served_s", times=1000), f"{int(some[0]['bytes']) / 1e6:,.1f} MB",
        ])  # fmt: skip
    header = ["shape", "from", "requests", "changed", "streams", "rounds", "idle", "gap", "pause", "blocked", "served"]
    return VLLM_GPU.format(vllm=notes["vllm"], gpu=notes["gpu"], table=markdown_table([*header, "sent"], lines))


def publish_section() -> str:
    if not (RESULTS / "gpu_publish.csv").exists():
        return ""
    rows = [
        [row["model"], row["method"], f"{float(row['blocked_ms']):,.1f}", f"{float(row['in_host_memory_ms']):,.0f}",
         f"{int(row['payload_bytes']):,}", f"{100 * float(row['density']):.2f} %",
         f"{100 * float(row['extra_memory']):.1f} %" if row["extra_memory"] else "-"]
        for row in read("gpu_publish.csv")[1]
    ]  # fmt: skip
    header = ["model", "method", "blocked, ms", "in host memory, ms", "payload, bytes", "changed", "memory"]
    return PUBLISH.format(table=markdown_table(header, rows))


def performance_page() -> str:
    notes, sizes = read("codec_size.csv")
    by_encoding: dict[tuple[str, str], dict[str, str]] = {}
    for row in sizes:
        by_encoding.setdefault((row["encoding"], row["used_by"]), {})[row["recording"]] = row["bytes_per_change"]
    ordered = sorted(by_encoding.items(), key=lambda item: float(item[1]["rl-lr1e-6"]))
    size_rows = [
        [encoding, used_by, *(f"{float(values[name]):.3f}" for name in ("rl-lr1e-6", "rl-lr3e-6"))]
        for (encoding, used_by), values in ordered
    ]
    speeds = [
        [row["operation"], row["used_by"], row["ratio_to_flatnonzero"], row["gigabytes_per_second"],
         row["two_thread_speedup"] or "-"]
        for row in read("codec_speed.csv")[1]
    ]  # fmt: skip
    growth = read("growth.csv")[1]
    names = ["weights", "density", "encodings allowed", "taken", "encode, ns/weight", "decode, ns/weight",
             "flatnonzero, ns/weight", "bytes per change", "memory"]  # fmt: skip
    growth_rows = [[f"{int(row['weights']):,}", *list(row.values())[1:]] for row in growth]
    density_names = [
        "update size",
        "density",
        "taken",
        "bytes per change",
        "times smaller than full",
        "encode",
        "decode",
    ]
    chain, publish = read("chain.csv")[1], read("publish.csv")[1][0]
    check = read("recheck.csv")[1][-1]
    chain_rows = [
        [row["line"], f"{int(row['full_bytes']):,}", row["full_seconds"], f"{int(row['delta_bytes']):,}",
         row["delta_seconds"], row["times_fewer_bytes"], row["times_faster"]]
        for row in chain
    ]  # fmt: skip
    chain_names = [
        "line",
        "all weights, bytes",
        "seconds",
        "delta, bytes",
        "seconds",
        "times fewer bytes",
        "times faster",
    ]
    return PERFORMANCE.format(
        vllm=vllm_section(),
        vllm_gpu=vllm_gpu_section(),
        gpu=gpu_section(),
        grpo=grpo_section(),
        chain_weights=f"{int(chain[0]['weights']):,}",
        chain=markdown_table(chain_names, chain_rows),
        phases="; ".join(f"{row['line']}: {row['phases_seconds'].replace(' ', ' ')}" for row in chain),
        blocking=publish["ratio_to_flatnonzero"],
        memory=f"{100 * float(publish['memory_beyond']):.1f}",
        check_percent=check["check, % of the time"],
        check_weights=int(check["weights"]) / 1e6,
        check_seconds=float(check["seconds a version"]),
        check_versions=check["versions until all tensors were measured"],
        conditions=f"Machine: {notes['machine']}, 2 cores.",
        sizes=markdown_table(["encoding", "used by", "lr 1e-6", "lr 3e-6"], size_rows),
        speeds=markdown_table(["operation", "used by", "x flatnonzero", "GB/s of model", "two threads"], speeds),
        growth=markdown_table(names, growth_rows),
        density=markdown_table(density_names, [list(row.values()) for row in read("density.csv")[1]]),
    )


def architecture_page() -> str:
    """ARCHITECTURE.md with the table of rooms as the imports are now."""
    begin, end = "<!-- rooms: begin -->\n", "<!-- rooms: end -->"
    text = (DOCS.parent / "ARCHITECTURE.md").read_text()
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{rooms.table()}\n{end}", text, flags=re.DOTALL)


def pages() -> dict[Path, str]:
    """The generated pages, and those with figures in them, and what they must say."""
    made = {
        DOCS / "cli.md": cli_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "performance.md": performance_page(),
        DOCS.parent / "ARCHITECTURE.md": architecture_page(),
    }
    written = {path: path.read_text() for path in figures.pages() if path not in made}
    return {path: figures.marked(text) for path, text in (made | written).items() if path in made or "<!--=" in text}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content)
