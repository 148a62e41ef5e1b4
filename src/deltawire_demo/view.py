"""The output of the demo while it runs: drawn on a terminal, as lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING

from deltawire.terminal import Drawing, age_text, pairs_text, pause_text, plain, say, size_text, table
from deltawire_demo.story import WINDOW, WORDS

if TYPE_CHECKING:
    from deltawire_demo.story import Story

REDRAW_SECONDS = 0.25
NUM_NOTES = 5
BARS = "▁▂▃▄▅▆▇█"


def view_of(is_silent: bool) -> "Silence | Lines | Screen":
    if is_silent:
        return Silence()
    return Screen() if sys.stdout.isatty() else Lines()


class Silence:
    """Nothing until the end."""

    def refresh(self, story: "Story") -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line for every tenth step, and for each note."""

    EVERY = 10

    def __init__(self) -> None:
        self._phase, self._step = "", 0
        self._dashboard: str | None = None
        self._shown: set[tuple[float, str]] = set()

    def refresh(self, story: "Story") -> None:
        if story.dashboard != self._dashboard:
            self._dashboard = story.dashboard
            say(f"{clock(story)}  dashboard at {story.dashboard}")
        if story.phase != self._phase:
            self._phase = story.phase
            say(f"{clock(story)}  {story.phase}")
        for note in [each for each in story.notes if each not in self._shown]:
            self._shown.add(note)
            say(f"{clock(story)}  {plain(note[1])}")
        if story.step // self.EVERY > self._step // self.EVERY:
            self._step = story.step
            say(f"{clock(story)}  {step_text(story)}")

    def close(self) -> None: ...


class Screen:
    """The state of the demo, redrawn in place."""

    def __init__(self) -> None:
        self._drawing, self._drawn = Drawing(), 0.0
        self._story: Story | None = None
        self._phase = ""

    def refresh(self, story: "Story") -> None:
        self._story = story
        if time.monotonic() - self._drawn > REDRAW_SECONDS or story.phase != self._phase:
            self._drawn, self._phase = time.monotonic(), story.phase
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
    reward, deltas = story.moving_reward() or 0.0, story.deltas()
    return (
        f"step {story.step:3d}  reward {reward:5.2f}  wins {100 * last['wins']:3.0f} %  "
        f"{size_text(deltas[-1]['bytes']) if deltas else 'no delta'}  replicas at {versions}"
    )


def version_text(version: int | None) -> str:
    return "-" if version is None else str(version)


def payload_text(story: "Story") -> str:
    deltas = story.deltas()
    if not deltas:
        return "no delta yet"
    last = deltas[-1]
    return f"{size_text(last['bytes'])}, 1/{last['full_bytes'] / last['bytes']:.0f} of all"


def spark_text(values: list[float], width: int = 36) -> str:
    """A curve of means, in one line."""
    if len(values) < 2:
        return ""
    size = max(len(values) / width, 1)
    means = []
    for i in range(min(len(values), width)):
        part = values[int(i * size) : max(int((i + 1) * size), int(i * size) + 1)]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    return "".join(BARS[int((each - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for each in means)


def phase_text(story: "Story") -> str:
    if story.played is None:
        return story.phase
    return f"{story.phase}: {story.played[0]:,} of {story.played[1]:,} {WORDS[story.model]['episodes']}"


def screen_text(story: "Story") -> str:
    parts = [f"deltawire demo  {phase_text(story)}  {age_text(time.time() - story.started)}"]
    if story.dashboard is not None:
        parts[0] += f"\ndashboard       {story.dashboard}"
    if story.steps:
        parts.append(pairs_text(training_rows(story)))
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


def training_rows(story: "Story") -> list[tuple[str, str]]:
    last, words = story.steps[story.step], WORDS[story.model]
    rewards = story.rewards()
    deltas = story.deltas()
    density = f"{100 * deltas[-1]['density']:.2f} % of the weights" if deltas else "-"
    return [
        ("step", f"{story.step} of {story.num_steps}, {last['seconds']:.2f} s each"),
        ("reward", f"{story.moving_reward() or 0:.3f}  {spark_text(rewards)}  mean of {WINDOW} steps"),
        (words["wins"], f"{100 * last['wins']:.0f} % of {last['games']} {words['episodes']}"),
        ("changed", density),
        ("payload", payload_text(story)),
        ("staleness", f"{last['staleness']:.2f} versions, {last['max_staleness']} at most"),
    ]
