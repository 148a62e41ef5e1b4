"""The fleet view: a row for each version and each replica, the same for `ls`, `status`, the dashboard and the demo.

Heartbeats are untrusted: anyone with write access to the store can write them.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from deltawire.run.heartbeat import LIVE_SECONDS
from deltawire.run.manifest import Manifest, StoredHop
from deltawire.run.plain import json_fields

Row = dict[str, Any]

# Four heartbeats. A replica sends none during a pull, and gets longer.
SILENT_SECONDS = 60.0

# Numbers of the training loop that a version's metadata may have, for charts: publish(metadata={"reward": 0.7}).
REPORTED = ("reward", "staleness", "token_gap_seconds")

HEALTHS = ("dead", "fault", "silent", "starting", "updating", "behind", "ok", "stopped")
"""Worst first."""


def version_row(manifest: Manifest) -> Row:
    """A manifest as a row. `full_bytes` is the size of the weights in the anchor that its route starts at."""
    hop = manifest.hop
    full = next((weights_bytes(each) for each in (hop, *manifest.route) if each.base is None), None)
    return {
        **json_fields(manifest, "version", "step", "total", "created"),
        **json_fields(hop, "kind", "base", "bytes", "changed"),
        "full_bytes": full,
        "ratio": hop.num_bytes / full if full else None,
        "density": hop.num_changed / manifest.num_elements if manifest.num_elements else None,
        **{name: number(manifest.metadata.get(name)) for name in REPORTED},
        "error": None,
    }


def weights_bytes(anchor: StoredHop) -> int:
    """The bytes of an anchor without configuration, tokenizer and the like."""
    return anchor.num_bytes - sum(each.num_bytes for each in anchor.extra_files)


def replica_row(name: str, fields: Mapping[str, Any] | None, age_seconds: float, latest: int | None) -> Row:
    """A replica by its last heartbeat, which is so old; `fields` is None if it cannot be read."""
    beat = fields or {}
    engine, pull = (beat[key] if isinstance(beat.get(key), dict) else {} for key in ("engine", "last_pull"))
    times = [number(pull.get(f"{phase}_seconds")) for phase in ("fetch", "decode", "apply")]
    version = count(beat.get("version"))
    row = {
        "name": name,
        "engine": " ".join(str(engine[key]) for key in ("kind", "quantized") if engine.get(key)) or None,
        "derived": str(engine["derived"]) if engine.get("derived") else None,
        "address": str(engine["address"]) if engine.get("address") else None,
        "version": version,
        "lag": None if version is None or latest is None else max(latest - version, 0),
        "pause_seconds": number(beat.get("pause_seconds")),
        "served_seconds": number(pull.get("served_seconds")),
        "pull_seconds": None if None in times else number(sum(filter(None, times))),
        "age_seconds": age_seconds,
        "error": str(beat["error"]) if beat.get("error") else None,
    }
    health, detail = "ok", row["error"]
    if fields is None:
        health, detail = "fault", "its heartbeat cannot be read"
    elif age_seconds > LIVE_SECONDS:
        health, detail = "dead", f"no heartbeat for {LIVE_SECONDS:.0f} s"
    elif age_seconds > SILENT_SECONDS and not beat.get("using"):
        health, detail = "silent", f"no heartbeat for {SILENT_SECONDS:.0f} s"
    elif row["error"]:
        health = "fault"
    elif (version is None or row["lag"]) and latest is not None:
        health = "updating" if beat.get("using") else "behind"
    return {**row, "health": health, "detail": detail}


def worst_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (HEALTHS.index(row["health"]), row["name"]))


def printable(value: Any) -> str:
    """Untrusted text, on one line."""
    return "".join(each if each.isprintable() else " " for each in str(value)[:400])


def number(value: Any) -> float | None:
    # An int may be too large for a float.
    is_number = type(value) is float or (type(value) is int and abs(value) < 1 << 63)
    return value if is_number and isfinite(value) else None


def count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None
