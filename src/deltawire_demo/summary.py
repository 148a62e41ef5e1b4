"""The summary that the demo prints in the end."""

from typing import TYPE_CHECKING, Any

from deltawire.terminal import pairs_text, pause_text, size_text, table
from deltawire_demo.story import WORDS, joined_text
from deltawire_demo.view import version_text

if TYPE_CHECKING:
    from deltawire_demo.orchestrate import Demo

NUM_DIGITS = 16
SQUARES = {"G": "\N{LARGE GREEN SQUARE}", "Y": "\N{LARGE YELLOW SQUARE}", "-": "\N{BLACK LARGE SQUARE}",
           "X": "\N{LARGE RED SQUARE}"}  # fmt: skip
# Five squares, each two columns wide, and the guess.
BOARD_COLUMNS = 17
NUM_COLUMNS = 36


def shown(demo: "Demo") -> dict[str, Any]:
    """The summary as data."""
    options, story = demo.options, demo.story
    summary = story.summary()
    is_exact = bool(summary["replicas"]) and all(each["exact"] for each in summary["replicas"])
    is_verified = bool(summary["verify"] and summary["verify"]["ok"])
    return {
        "ok": is_exact and is_verified,
        "exact": is_exact,
        "verified": is_verified,
        "publishes": options.publishes,
        **summary,
        "store": demo.store,
        "keeps_store": not options.s3,
        "folder": str(options.folder),
        "dashboard": story.dashboard if options.keeps else None,
    }


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary_text(summary: dict[str, Any]) -> str:
    parts = [pairs_text(training_rows(summary)), replicas_text(summary), uploads_text(summary), control_text(summary),
             boards_text(summary), files_text(summary)]  # fmt: skip
    return "\n" + "\n\n".join(part for part in parts if part)


def training_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    payload, full = summary["payload_bytes"], summary["full_bytes"]
    window, words = summary["window"], WORDS[summary["model"]]
    rows = [
        ("steps", f"{summary['steps']}, {number(summary['step_seconds'], 2)} s each, "
                  f"{number(summary['max_step_seconds'], 2)} s at most; {summary['games']:,} {words['episodes']}"),
        ("reward", f"{number(summary['reward_first'])} in the first {window} steps, "
                   f"{number(summary['reward_last'])} in the last {window}"),
        (words["wins"], f"{percent(summary['wins_first'])} in the first {window} steps, "
                 f"{percent(summary['wins_last'])} in the last {window}"),
        ("changed", f"{percent(summary['density'], 2)} of the weights per step, {percent(summary['max_density'], 2)} "
                    "at most"),
        ("delta", f"{size_text(payload)}, 1/{full / payload:.0f} of all weights, "
                  f"{summary['bytes_per_change']:.2f} bytes per change" if payload else "none: nothing was published"),
        ("blocked", f"{pause_text(summary['publish_blocked_seconds'])} of each step, to find what changed"),
        ("checked", f"{pause_text(summary['check_seconds'])} of each step, to hash live weights again"),
        ("staleness", f"{number(summary['staleness'], 2)} versions, {summary['max_staleness']} at most; "
                      f"{summary['dropped_groups']} groups of {words['episodes']} dropped as too old"),
    ]  # fmt: skip
    for each in summary["disturbances"]:
        came = joined_text(each) if "seconds" in each else "not back in time"
        rows.append((each["what"], f"{each['part']} at step {each['step']}: {came}"))
    return [*rows, ("faults", f"{summary['faults']}, none of which stopped the run")]


def replicas_text(summary: dict[str, Any]) -> str:
    rows = [
        [each["name"], version_text(each["version"]), (each["digest"] or "-")[:NUM_DIGITS],
         "the same bits" if each["exact"] else "WRONG",
         str(each["pulls"]), size_text(each["bytes"]), pause_text(each["pause_seconds"])]
        for each in summary["replicas"]
    ]  # fmt: skip
    trainer = ["trainer", version_text(summary["version"]), (summary["digest"] or "-")[:NUM_DIGITS], "", "", "", ""]
    header = ["", "version", "digest in memory", "compared", "updates", "fetched", "pause"]
    verified = "every version verified" if summary["verified"] else f"NOT VERIFIED: {summary['verify']}"
    return f"{table(header, [trainer, *rows])}\n{verified}: deltawire verify {summary['store']}"


def uploads_text(summary: dict[str, Any]) -> str:
    """Everything that was uploaded, compared to full weights for each version."""
    kinds = summary["uploads"]
    if not kinds or not summary["full_bytes"]:
        return ""
    total = {key: sum(kind[key] for kind in kinds.values()) for key in ("num_objects", "num_bytes")}
    rows = [[name, f"{each['num_objects']:,}", size_text(each["num_bytes"])]
            for name, each in [*kinds.items(), ("in total", total)]]  # fmt: skip
    full = summary["num_versions"] * summary["full_bytes"]
    rows.append(["all weights at each version", f"{summary['num_versions']:,}", size_text(full)])
    sent = total["num_bytes"]
    ratio = (f"Sent {size_text(sent)} instead of {size_text(full)}, 1/{full / sent:.0f}.\n"
             f"Per version: {size_text(sent / summary['num_versions'])} in total, "
             f"{size_text(summary['payload_bytes'])} as a delta.")  # fmt: skip
    return f"{table(['uploaded', 'objects', 'bytes'], rows)}\n{ratio}"


def best(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    return max(evaluations, key=lambda each: each["reward"])


def control_text(summary: dict[str, Any]) -> str:
    """The evaluations: each policy at several temperatures, so that they can be compared at their best."""
    evaluations = summary["evaluations"]
    if not evaluations.get("start") or not evaluations.get("final"):
        return ""
    rows, words = [], WORDS[summary["model"]]
    for which, name in (("start", "before"), ("final", "after" if summary["publishes"] else "served")):
        top = best(evaluations[which])
        rows += [
            [f"{name}  (best)" if each is top else name, f"{each['temperature']:g}", f"{each['num_games']:,}",
             number(each["reward"]), percent(each["wins"]), percent(each["valid"])]
            for each in sorted(evaluations[which], key=lambda each: -each["temperature"])
        ]  # fmt: skip
    before, after = (best(evaluations[which]) for which in ("start", "final"))
    text = (f"Each at its best temperature: reward {after['reward'] - before['reward']:+.3f}, "
            f"{words['wins']} {100 * (after['wins'] - before['wins']):+.1f} points.")  # fmt: skip
    header = ["policy", "temperature", words["episodes"], "reward", words["wins"], words["valid"]]
    return f"{table(header, rows)}\n{text}"


def boards_text(summary: dict[str, Any]) -> str:
    """The same word before and after, each policy at its best temperature: the first that one lost and one won."""
    evaluations = summary["evaluations"]
    if not evaluations.get("start") or not evaluations.get("final"):
        return ""
    before, after = (best(evaluations[which]) for which in ("start", "final"))
    pairs = list(zip(before.get("samples", ()), after.get("samples", ()), strict=False))
    first, second = next(((lost, won) for lost, won in pairs if won["won"] and not lost["won"]), (None, None))
    if first is None or second is None:
        return ""
    lines = [f"The word is {first['word']}.", f"{'before':<{NUM_COLUMNS}}after"]
    boards = [board_lines(each) for each in (first, second)]
    for i in range(max(map(len, boards))):
        left, right = (board[i] if i < len(board) else "" for board in boards)
        gap = NUM_COLUMNS - (BOARD_COLUMNS if left else 0)
        lines.append(f"{left}{' ' * gap}{right}".rstrip())
    return "\n".join(lines)


def board_lines(game: dict[str, Any]) -> list[str]:
    return ["".join(SQUARES[colour] for colour in colours) + f"  {guess}"
            for guess, colours in zip(game["guesses"], game["feedbacks"], strict=True)]  # fmt: skip


def files_text(summary: dict[str, Any]) -> str:
    folder, store = summary["folder"], summary["store"]
    files = pairs_text([("events", f"{folder}/events.jsonl"), ("logs", f"{folder}/logs"), ("store", store)])
    if not summary["keeps_store"]:
        return f"{files}\n\nThe S3 server stops with the demo. Its data is in {folder}/s3."
    commands = [f"dashboard {folder}", f"ls {store}", f"verify {store}", f"pull {store} --to mirror"]
    return f"{files}\n\nTry next:\n" + "\n".join(f"  deltawire {command}" for command in commands)
