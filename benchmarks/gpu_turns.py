"""Several series of vLLM servers on one GPU: the servers of all start together, then each series is measured alone.

    TMPDIR=/dev/shm VLLM_USE_DEEP_GEMM=0 python benchmarks/gpu_turns.py --out FOLDER [--series 8b 0.6b dense]

Starting servers takes longer than measuring. With temporary files in shared memory, no disk is still busy with the
anchor of 16 GB while deltas are written. Each series has a folder in `--out` with its log, its CSV files and the
logs of its servers; a series that fails does not stop the others. The rows are not written to `results`: copy them from
there. On a machine without a GPU, `--tiny` shows that it works (VLLM_ENABLE_V1_MULTIPROCESSING=0 and
DELTAWIRE_CPU_UNPACKED=1).
"""

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
DENSITIES = ["0.01", "0.001", "0.05"]
GRAPHS = ["--running-requests", "keep", "--cache-mb", "4096", "--modes", "graphs"]
QUANTIZED = ["--mode", "graphs", "--running-requests", "keep", "--no-fresh", "--cache-mb", "1024", "--memory", "0.1"]
SERIES = {
    "8b": ["vllm_gpu.py", *GRAPHS, "--models", "8b", "--sources", "iterator", "mapping", "module", "--rounds", "12",
           "--few", "4", "--densities", *DENSITIES, "--memory", "0.25", "--fresh"],
    "0.6b": ["vllm_gpu.py", *GRAPHS, "--models", "0.6b", "--rounds", "20", "--few", "2", "--densities", *DENSITIES,
             "--streams", "8", "64", "--memory", "0.15", "--fresh", "--own", "pause", "patches", "reload"],
    "eager": ["vllm_gpu.py", "--modes", "eager", "--models", "0.6b", "--rounds", "5", "--few", "3", "--cache-mb",
              "2048", "--running-requests", "keep", "recompute", "--sources", "mapping", "--memory", "0.1"],
    "dense": ["quantized_gpu.py", *QUANTIZED, "--models", "dense", "--rounds", "8"],
    "moe": ["quantized_gpu.py", *QUANTIZED, "--models", "moe", "--rounds", "5"],
}  # fmt: skip
FEW = ["--running-requests", "keep", "--models", "tiny", "--rounds", "2", "--streams", "2", "--cache-mb", "256"]
TINY = {
    "bf16": ["vllm_gpu.py", *FEW, "--modes", "eager", "--few", "1", "--sources", "iterator"],
    "fp8": ["quantized_gpu.py", *FEW, "--mode", "eager", "--no-fresh", "--quantizations", "fp8_per_channel"],
}


class Series:
    """A benchmark in a process of its own, which waits for its turn."""

    def __init__(self, stack, name, command, out):
        self.name, self._folder = name, out / name
        (self._folder / "turn").mkdir(parents=True)
        self._log = stack.enter_context((self._folder / "log").open("w"))
        script, *options = command
        self._process = subprocess.Popen(
            [sys.executable, HERE / script, *options, "--turn", self._folder / "turn", "--out", self._folder],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        stack.callback(self._end)

    def wait_until_up(self):
        while self._process.poll() is None and not (self._folder / "turn/up").exists():
            time.sleep(0.2)

    def measure(self):
        (self._folder / "turn/go").touch()
        return self._process.wait()

    def _end(self):
        """It ends its servers when it is told to end."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", nargs="+", choices=SERIES, default=["8b", "0.6b", "dense"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chosen = TINY if options.tiny else {name: SERIES[name] for name in options.series}
    since, failed = time.monotonic(), []

    def say(*words):
        print(f"[{time.monotonic() - since:6.1f}]", *words, flush=True)

    with ExitStack() as stack:
        all_series = [Series(stack, name, command, options.out) for name, command in chosen.items()]
        for each in all_series:
            each.wait_until_up()
            say(f"{each.name}: servers are up")
        for each in all_series:
            code = each.measure()
            say(f"{each.name}: ended with {code}")
            failed += [each.name] if code else []
    if failed:
        sys.exit(f"failed, see their logs: {', '.join(failed)}")


if __name__ == "__main__":
    main()
