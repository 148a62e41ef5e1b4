"""An estimate as a table for people, of the command and of the page."""

from collections.abc import Callable
from typing import Any

from deltawire.estimate.plan import DAY
from deltawire.terminal import count_text, size_text

Way = dict[str, Any]


def head_of(data: dict[str, Any]) -> list[tuple[str, str]]:
    """What was asked for, and how large a delta is."""
    plan, delta, anchor = data["plan"], data["delta_bytes"], data["anchor_bytes"]
    every = seconds_text(DAY / plan["steps_a_day"])
    head = [
        ("model", f"{weights_text(plan['weights'])} weights, {100 * plan['density']:.3g} % of which change in a step"),
        ("steps", f"{plan['steps_a_day']:,g} a day, one every {every}"),
        ("fleet", f"{count_text(plan['replicas'], 'replica')} at {count_text(plan['sites'], 'site')}"),
        ("a delta", f"{size_text(delta)}, 1/{anchor / delta:.0f} of all weights"),
    ]
    if data["simulated_replicas"] < plan["replicas"]:
        # Among more replicas, more of them wait for the anchor of one that joins.
        joins = "; with joins, the last of all may be served much later than shown" if plan["joins_a_day"] else ""
        head.append(("simulated", f"{data['simulated_replicas']:,} of the replicas{joins}"))
    return head


def table_of(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a column for each way. At a terminal of 80 columns, nothing of it is cut."""
    ways = data["ways"]

    def rows(part: str, *lines: tuple[str, Callable[[Way], str]]) -> list[list[str]]:
        return [[f"{part}: {name}", *(of(each) for each in ways)] for name, of in lines]

    steps = rows(
        "step",
        ("uploaded", lambda way: size_text(way["step"]["uploaded_bytes"])),
        ("leaves store", lambda way: size_text(way["step"]["store_bytes"])),
        ("trainer waits", lambda way: seconds_text(way["step"]["blocked_seconds"])),
        ("published in", lambda way: seconds_text(way["step"]["publish_seconds"])),
        ("half serve in", lambda way: seconds_text(way["step"]["served_seconds"]["median"])),
        ("all serve in", lambda way: seconds_text(way["step"]["served_seconds"]["last"])),
        ("engines pause", pause_text),
        ("costs", lambda way: money_text(way["step"]["usd"])),
    )
    days = rows(
        "day",
        ("uploaded", lambda way: size_text(way["day"]["uploaded_bytes"])),
        ("leaves store", lambda way: size_text(way["day"]["store_bytes"])),
        ("requests", lambda way: many_text(way["day"]["gets"] + way["day"]["lists"] + way["day"]["puts"])),
        ("traffic", lambda way: money_text(way["day"]["usd"]["egress"])),
        ("requests cost", lambda way: money_text(way["day"]["usd"]["requests"])),
        ("storage", lambda way: money_text(way["day"]["usd"]["storage"])),
        ("costs", lambda way: money_text(way["day"]["usd"]["total"])),
    )
    lines = [["fits the bandwidth", *(fit_text(each) for each in ways)]]
    lines.append(["busiest line", *(busiest_line(each)[0] for each in ways)])
    names = [each["ships"].removesuffix(" weights") + ", caches" if each["caches"] else each["ships"] for each in ways]
    return ["", *names], [*steps, *days, *lines]


def pause_text(way: Way) -> str:
    """A reload was measured with small models only."""
    return ("up to " if way["ships"] == "all weights" else "") + seconds_text(way["step"]["pause_seconds"])


def busiest_line(way: Way) -> tuple[str, float]:
    """The line that is used most, and how much of it is."""
    found: tuple[str, float] = max(way["use"].items(), key=lambda each: float(each[1]))
    return found


def fit_text(way: Way) -> str:
    _, share = busiest_line(way)
    return f"yes, {100 * share:.2g} %" if share <= 1 else f"no, {f'{share:,.0f}' if share >= 100 else f'{share:.3g}'} x"


def many_text(number: float) -> str:
    return f"{number:,.0f}" if number < 1e7 else f"{number / 1e6:,.1f} M"


def weights_text(weights: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if weights >= size:
            return f"{weights / size:.3g} {unit}"
    return f"{weights:,.0f}"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    for unit, length in (("days", DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{1000 * seconds:.3g} ms"


def money_text(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:,.2f}" if usd >= 0.01 or not usd else f"${usd:.2g}"
