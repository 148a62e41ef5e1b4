"""The codec on real RL updates: the bytes of each encoding, compared with the full weights, and the time it takes.

    python examples/codec_table.py

For each recorded learning rate, it takes one optimizer step of six tensors of a Qwen3-0.6B-shaped model, makes a delta
in every encoding, applies it to the old weights and checks that every bit matches the new ones.
"""

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import deltawire
from deltawire.terminal import size_text, table
from support.recorded import RECORDINGS, recorded_steps

ENCODINGS = ("dense", "coo", "gap", "context", "auto")


def main() -> None:
    print("compiling kernels (the first time only) ...", flush=True)
    for recording in RECORDINGS:
        steps = [step for step in recorded_steps(recording) if step.number == 0]
        old = {step.tensor: step.old for step in steps}
        new = {step.tensor: step.new for step in steps}
        full_bytes = sum(array.nbytes for array in old.values())
        rows = []
        for encoding in ENCODINGS:
            delta = deltawire.diff(old, new, encoding=encoding, dtype="BF16")
            diffing, applying = [], []
            for _ in range(5):
                started = time.perf_counter()
                deltawire.diff(old, new, encoding=encoding, dtype="BF16")
                diffing.append(time.perf_counter() - started)
                weights = {name: array.copy() for name, array in old.items()}
                started = time.perf_counter()
                deltawire.apply(delta, weights, dtype="BF16")
                applying.append(time.perf_counter() - started)
            exact = all(weights[name].tobytes() == new[name].tobytes() for name in new)
            rows.append(
                [
                    encoding,
                    size_text(delta.num_bytes),
                    f"{delta.num_bytes / delta.num_changed:.3f}",
                    f"1/{full_bytes / delta.num_bytes:.0f}",
                    f"{1000 * min(diffing):.1f} ms",
                    f"{1000 * min(applying):.1f} ms",
                    "yes" if exact else "NO",
                ]
            )
        print(f"\n{recording}: {delta.num_changed:,} of {delta.num_elements:,} bf16 weights changed "
              f"({100 * delta.num_changed / delta.num_elements:.2f} %), {size_text(full_bytes)} in full")  # fmt: skip
        print(table(["encoding", "payload", "B/change", "of full", "diff", "apply", "bit-exact"], rows))
    print(f"\nbest of five; diff and apply include the digest of all weights, the last one being {delta.digest}")


if __name__ == "__main__":
    main()
