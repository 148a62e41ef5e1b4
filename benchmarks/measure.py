"""Timing on noisy machines: every figure is a ratio to a baseline that was timed right before it, in the same run."""

import csv
import hashlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

# What is hashed at a time.
PART = 1 << 26
_thread = threading.local()


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratios(work: Callable[[], Any], baseline: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Medians over rounds: seconds of the work, and its ratio to the baseline timed just before it.

    Short work gets more rounds.
    """
    work()
    rounds = max(rounds, min(40, int(1 / seconds(work))))
    pairs = [(seconds(baseline), seconds(work)) for _ in range(rounds)]
    return statistics.median(own for _, own in pairs), statistics.median(own / base for base, own in pairs)


def sha256(*tensors: Any) -> str:
    """Of torch tensors after each other; from a GPU through pinned memory: while one part is hashed the next comes."""
    import torch

    hashed, ready = hashlib.sha256(), None
    flats = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if not all(flat.is_cuda for flat in flats):
        for flat in flats:
            hashed.update(flat.cpu().numpy())
        return hashed.hexdigest()
    if not hasattr(_thread, "buffers"):
        _thread.buffers = [torch.empty(PART, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        _thread.stream = torch.cuda.Stream()
    _thread.stream.wait_stream(torch.cuda.current_stream())
    parts = (flat[at : at + PART] for flat in flats for at in range(0, len(flat), PART))
    with torch.cuda.stream(_thread.stream):
        for number, part in enumerate(parts):
            buffer, done = _thread.buffers[number % 2][: len(part)], torch.cuda.Event()
            buffer.copy_(part, non_blocking=True)
            done.record()
            if ready is not None:
                ready[1].synchronize()
                hashed.update(ready[0].numpy())
            ready = buffer, done
    if ready is not None:
        ready[1].synchronize()
        hashed.update(ready[0].numpy())
    return hashed.hexdigest()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def private_bytes(process: str = "self") -> int:
    """The resident memory without the pages of mapped files, which the kernel takes back when it needs them."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


def peak_beyond(work: Callable[[], Any], taken: Callable[[], int] = resident_bytes) -> tuple[Any, int]:
    """What the work returns, and how far the memory that is taken rose above where it was."""
    before = taken()
    peak = before
    running = True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, taken())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        running = False
        watcher.join()
    return result, max(peak, taken()) - before


def machine() -> str:
    name = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{name}, Python {platform.python_version()}"


def commit() -> str:
    """The commit, and whether anything but results differs from it."""
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def write_csv(
    name: str,
    header: list[str],
    rows: Iterable[list[Any]],
    *,
    folder: Path = RESULTS,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Keep results with the command, the machine and the commit that made them; `notes` add to these or replace one."""
    command = f"python {Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".rstrip()
    folder.mkdir(exist_ok=True)
    path = folder / name
    with path.open("w", newline="") as file:
        for key, text in ({"command": command, "machine": machine(), "commit": commit()} | dict(notes or {})).items():
            file.write(f"# {key}: {text}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return path


def read_csv(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))
