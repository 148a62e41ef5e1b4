"""How the demo is shown: live on a terminal, as lines elsewhere, and a summary in the end."""

import sys
import time
from typing import TYPE_CHECKING, Any

from deltawire.cli.output import Drawing, age_text, facts_text, pause_text, plain, say, size_text, table
from deltawire.demo.story import WORDS

if TYPE_CHECKING:
    from deltawire.demo.orchestrate import Demo
    from deltawire.demo.story import Story

REDRAW_SECONDS = 0.25
NUM_NOTES = 5
BARS = "▁▂▃▄▅▆▇█"


def view_of(output_format: str, quiet: bool) -> "Silence | Lines | Screen":
    if quiet or output_format == "json":
        return Silence()
    return Screen() if sys.stdout.isatty() else Lines()


class Silence:
    """Nothing until the end."""

    def refresh(self, story: "Story") -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line for each tenth step, and for everything that people should see."""

    EVERY = 10

    def __init__(self) -> None:
        self._phase, self._step, self._pretrained = "", 0, 0
        self._told: set[tuple[float, str]] = set()

    def refresh(self, story: "Story") -> None:
        if story.phase != self._phase:
            self._phase = story.phase
            say(f"{clock(story)}  {story.phase}")
        if story.pretrained is not None and story.pretrained[0] >= self._pretrained + 100:
            self._pretrained = story.pretrained[0]
            say(f"{clock(story)}  pretraining: step {story.pretrained[0]} of {story.pretrained[1]}")
        for note in [each for each in story.notes if each not in self._told]:
            self._told.add(note)
            say(f"{clock(story)}  {plain(note[1])}")
        if story.step // self.EVERY > self._step // self.EVERY:
            self._step = story.step
            say(f"{clock(story)}  {step_text(story)}")

    def close(self) -> None: ...


class Screen:
    """All that is known, drawn over itself."""

    def __init__(self) -> None:
        self._drawing, self._drawn = Drawing(), 0.0
        self._story: Story | None = None

    def refresh(self, story: "Story") -> None:
        self._story = story
        if time.monotonic() - self._drawn > REDRAW_SECONDS or story.phase == "done":
            self._drawn = time.monotonic()
            self._drawing.draw(screen_text(story))

    def close(self) -> None:
        if self._story is not None:
            self._drawing.draw(screen_text(self._story))
            self._story = None


def clock(story: "Story") -> str:
    return f"{time.time() - story.started:5.0f} s"


def step_text(story: "Story") -> str:
    last = story.steps[story.step]
    versions = " ".join(version_text(each.version) for _, each in sorted(story.replicas.items()))
    reward = story.moving_reward() or 0.0
    return (
        f"step {story.step:3d}  reward {reward:5.2f}  wins {100 * last['wins']:3.0f} %  {payload_text(story)}  "
        f"replicas at {versions}  staleness {last['staleness']:.1f}"
    )


def version_text(version: int | None) -> str:
    return "-" if version is None else str(version)


def payload_text(story: "Story") -> str:
    deltas = story.deltas()
    if not deltas:
        return "no delta yet"
    last = deltas[-1]
    return f"{size_text(last['bytes'])} = 1/{last['full_bytes'] / last['bytes']:.0f} of {size_text(last['full_bytes'])}"


def spark_text(values: list[float], width: int = 48) -> str:
    """A curve in one line, of means."""
    if len(values) < 2:
        return ""
    size = max(len(values) / width, 1)
    means = []
    for i in range(min(len(values), width)):
        part = values[int(i * size) : max(int((i + 1) * size), int(i * size) + 1)]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    return "".join(BARS[int((each - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for each in means)


def screen_text(story: "Story") -> str:
    parts = [f"deltawire demo  {story.phase}  {age_text(time.time() - story.started)}"]
    if story.phase == "pretraining" and story.pretrained is not None:
        parts.append(f"pretraining the policy, once: step {story.pretrained[0]} of {story.pretrained[1]}")
    if story.steps:
        parts.append(facts_text(training_facts(story)))
    if story.replicas:
        rows = [
            [name, version_text(each.version), version_text(story.lag(each)), str(each.num_pulls),
             size_text(each.num_bytes), pause_text(each.pause_seconds)]
            for name, each in sorted(story.replicas.items())
        ]  # fmt: skip
        parts.append(table(["replica", "version", "lag", "updates", "fetched", "last pause"], rows))
    if story.notes:
        parts.append("\n".join(f"{age_text(time.time() - when):>6} ago  {plain(text)}"
                               for when, text in list(story.notes)[-NUM_NOTES:]))  # fmt: skip
    return "\n\n".join(parts)


def training_facts(story: "Story") -> list[tuple[str, str]]:
    last, words = story.steps[story.step], WORDS[story.model]
    rewards = story.rewards()
    deltas = story.deltas()
    density = f"{100 * deltas[-1]['density']:.2f} % of the weights" if deltas else "-"
    return [
        ("step", f"{story.step} of {story.num_steps}, {last['seconds']:.2f} s each"),
        (
            "reward",
            f"{story.moving_reward() or 0:.3f}  {spark_text(rewards)}  mean of 20 steps, of {last['games']} "
            f"{words['episodes']}",
        ),
        (words["wins"], f"{100 * last['wins']:.0f} %"),
        ("changed", density),
        ("payload", payload_text(story)),
        ("staleness", f"{last['staleness']:.2f} versions, {last['max_staleness']} at most"),
    ]


def shown(demo: "Demo") -> dict[str, Any]:
    """What is told in the end, as data."""
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
    }


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary_text(summary: dict[str, Any]) -> str:
    payload, full = summary["payload_bytes"], summary["full_bytes"]
    ratio = f", 1/{full / payload:.0f} of all weights ({size_text(full)})" if payload else ""
    per_change = f", {summary['bytes_per_change']:.2f} bytes per changed weight" if payload else ""
    blocked, window = pause_text(summary["publish_blocked_seconds"]), summary["window"]
    words = WORDS[summary["model"]]
    episodes = words["episodes"]
    facts = [
        ("steps", f"{summary['steps']}, {summary['games']:,} {episodes}, "
                  f"{number(summary['step_seconds'], 2)} s a step"),
        ("reward", f"{number(summary['reward_first'])} in the first {window} steps, "
                   f"{number(summary['reward_last'])} in the last {window}"),
        (words["wins"], f"{percent(summary['wins_first'])} in the first {window} steps, "
                 f"{percent(summary['wins_last'])} in the last {window}"),
        ("changed", f"{percent(summary['density'], 2)} of the weights a step, {percent(summary['max_density'], 2)} at "
                    "most"),
        ("payload", f"{size_text(payload)} a step{ratio}{per_change}" if payload else "none: nothing was published"),
        ("blocked", f"{blocked} of a step, while what changed is found"),
        ("staleness", f"{number(summary['staleness'], 2)} versions, {summary['max_staleness']} at most; "
                      f"{summary['dropped_groups']} groups of {episodes} were too old"),
        ("faults", str(summary["faults"])),
    ]  # fmt: skip
    parts = [facts_text(facts), replicas_text(summary)]
    if control := control_text(summary):
        parts.append(control)
    parts.append(files_text(summary))
    return "\n" + "\n\n".join(parts)


def replicas_text(summary: dict[str, Any]) -> str:
    rows = [
        [each["name"], version_text(each["version"]), each["digest"] or "-",
         "the same bits" if each["exact"] else "WRONG",
         str(each["pulls"]), size_text(each["bytes"]), pause_text(each["pause_seconds"])]
        for each in summary["replicas"]
    ]  # fmt: skip
    trainer = ["trainer", version_text(summary["version"]), summary["digest"] or "-", "", "", "", ""]
    header = ["", "version", "digest of the weights in memory", "compared", "updates", "fetched", "last pause"]
    verified = "every version verified" if summary["verified"] else f"NOT VERIFIED: {summary['verify']}"
    return f"{table(header, [trainer, *rows])}\n{verified}: deltawire verify {summary['store']}"


def control_text(summary: dict[str, Any]) -> str:
    """What the policy had learned, beside what a lower temperature alone would have given."""
    evaluations = summary["evaluations"]
    if not evaluations.get("start") or not evaluations.get("final"):
        return ""
    rows, words = [], WORDS[summary["model"]]
    final = "after RL" if summary["publishes"] else "served in the end"
    best = max(evaluations["start"], key=lambda each: each["reward"])
    for which, name in (("start", "pretrained"), ("final", final)):
        for each in sorted(evaluations[which], key=lambda each: -each["temperature"]):
            control = "  (control)" if each is best else ""
            rows.append([f"{name}{control}", f"{each['temperature']:g}", f"{each['num_games']:,}",
                         number(each["reward"]), percent(each["wins"]), percent(each["valid"])])  # fmt: skip
    told = "The control is the pretrained policy at the temperature that suits it better, with nothing learned."
    header = ["policy", "temperature", words["episodes"], "reward", words["wins"], words["valid"]]
    return f"{table(header, rows)}\n{told}"


def files_text(summary: dict[str, Any]) -> str:
    folder, store = summary["folder"], summary["store"]
    files = facts_text([("files", folder), ("events", f"{folder}/events.jsonl"), ("logs", f"{folder}/logs"),
                        ("store", store)])  # fmt: skip
    if not summary["keeps_store"]:
        return f"{files}\n\nThe S3 server has ended. Its data is in {folder}/s3."
    commands = [f"dashboard {folder}", f"ls {store}", f"status {store}", f"verify {store}", f"pull {store} --to mirror"]
    return f"{files}\n\nTry next:\n" + "\n".join(f"  deltawire {command}" for command in commands)
