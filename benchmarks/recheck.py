"""What measuring live weights again costs a trainer, and how soon all of them were measured.

    python benchmarks/recheck.py

A trainer publishes the 128 M weights of `chain.py` to a folder, with a second between two versions in which nothing
else runs, so that what is measured is the check alone.
"""

import argparse
import tempfile
import time
from pathlib import Path

from chain import make_model, set_to
from deltawire import Publisher
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.tensors.weights import Tensor
from measure import write_csv


def measure(num_weights: int, num_versions: int, step_seconds: float, share: float) -> list[object]:
    old, new = make_model(num_weights)
    live = {name: Tensor(tensor.dtype, tensor.shape, tensor.bits.copy()) for name, tensor in old.items()}
    checked: set[str] = set()
    until_all = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Publisher(Path(folder) / "run", live, skips=(), anchors=None, check_share=share) as publisher,
    ):
        copy = publisher._worker._recheck.copy

        def noted(*arguments):
            copied = copy(*arguments)
            checked.update(each.name for each in copied)
            return copied

        publisher._worker._recheck.copy = noted
        publisher.publish().wait()
        started, seconds, blocked = time.perf_counter(), 0.0, 0.0
        for number in range(num_versions):
            time.sleep(step_seconds)
            set_to(live, new if number % 2 == 0 else old)
            stats = publisher.publish().wait().stats
            seconds += stats["check_seconds"]
            blocked += stats["diff_seconds"]
            if len(checked) == len(live) and not until_all:
                until_all = number + 1
        elapsed = time.perf_counter() - started
    return [
        num_weights, share, num_versions, f"{elapsed / num_versions:.3f}", f"{seconds / num_versions:.4f}",
        f"{100 * seconds / elapsed:.2f}", f"{blocked / num_versions:.4f}", until_all or f"> {num_versions}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=128_000_000)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--step", type=float, default=1.0, help="seconds between two versions")
    arguments = parser.parse_args()
    warm_up((16,))
    rows = [measure(arguments.weights, arguments.versions, arguments.step, share) for share in (0.0, 0.01)]
    header = [
        "weights", "check_share", "versions", "seconds a version", "check seconds a version", "check, % of the time",
        "publish blocks, seconds", "versions until all tensors were measured",
    ]  # fmt: skip
    print(write_csv("recheck.csv", header, rows).read_text())


if __name__ == "__main__":
    main()
