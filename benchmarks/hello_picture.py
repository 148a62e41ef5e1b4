"""A moving picture of `deltawire hello`, from the events of a real run; SVG for light and dark pages.

    python benchmarks/hello_picture.py [--record]

With `--record` the run is made anew and its events are kept in `results/hello.jsonl`; otherwise they are read from it.
Squares have the area of their bytes.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from pathlib import Path

from deltawire_demo.hello import say_hello
from measure import RESULTS

EVENTS = RESULTS / "hello.jsonl"
STEPS = 20
WIDTH, HEIGHT = 860, 322
# The anchor's side in pixels.
SIDE = 84
SECONDS, REST_SECONDS, FLIGHT_SECONDS = 15.0, 4.0, 0.45
THEMES = {
    "light": {"ground": "#ffffff", "raised": "#f5f6f8", "line": "#d5d9e0", "text": "#1a1f29", "soft": "#566072",
              "accent": "#1858c4", "good": "#17703a", "bad": "#b3261e", "warn": "#8a5300", "anchor": "#6b3fb5"},
    "dark": {"ground": "#12151b", "raised": "#1b2029", "line": "#343c4a", "text": "#e8ebf0", "soft": "#a3adbd",
             "accent": "#7fb0ff", "good": "#6fd293", "bad": "#ff8f86", "warn": "#f0b862", "anchor": "#b99af2"},
}  # fmt: skip
TRAINER, BUCKET = (20, 56, 160, 96), (245, 20, 330, 168)
REPLICAS = {"memory": (640, 20, 200, 74), "folder": (640, 114, 200, 74)}


def record():
    """Run it, and keep every event with its time."""
    lines = []
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        hello = say_hello(
            f"{folder}/run", STEPS, lambda _, event: lines.append({"seconds": round(time.time() - started, 3)} | event)
        )
    assert hello.ok
    about = {
        "command": f"deltawire hello --steps {STEPS}", "machine": f"Python {platform.python_version()}, 2 cores",
        "full_bytes": hello.full_bytes, "uploaded_bytes": hello.uploaded_bytes, "all_bytes": hello.all_bytes,
    }  # fmt: skip
    EVENTS.write_text("".join(json.dumps(line) + "\n" for line in [about, *lines]))


def mega(num_bytes):
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 99.5e6 else f"{num_bytes / 1e6:,.0f} MB"


class Picture:
    """Elements with the moments at which they are there; without motion, the end of the run."""

    def __init__(self, colours, length):
        self.colours, self.length = colours, length
        self.styles, self.body = [], []

    def at(self, seconds):
        return f"{100 * min(seconds / self.length, 1):.2f}%"

    def animate(self, frames):
        """A class for some keyframes."""
        name = f"a{len(self.styles)}"
        self.styles.append(f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {self.length:.1f}s infinite}}")
        return name

    def shown(self, begin, end=None):
        """A class of what is there from a moment on, or until another one."""
        hidden, there = "{opacity:0}", "{opacity:1}"
        frames = f"0%,{self.at(begin)}{hidden}{self.at(begin + 0.01)}"
        frames += f",100%{there}" if end is None else f",{self.at(end)}{there}{self.at(end + 0.01)},100%{hidden}"
        return self.animate(frames)

    def flight(self, begin, dx, dy):
        """A class of what comes from elsewhere and stays."""
        away = f"transform:translate({dx:.1f}px,{dy:.1f}px)"
        return self.animate(
            f"0%,{self.at(begin)}{{opacity:0;{away}}}{self.at(begin + 0.01)}{{opacity:1;{away}}}"
            f"{self.at(begin + FLIGHT_SECONDS)},100%{{opacity:1;transform:none}}"
        )

    def passing(self, begin, dx, dy):
        """A class of what flies by and is gone."""
        away = f"transform:translate({dx:.1f}px,{dy:.1f}px)"
        return self.animate(
            f"0%,{self.at(begin)}{{opacity:0;transform:none}}{self.at(begin + 0.01)}{{opacity:1;transform:none}}"
            f"{self.at(begin + FLIGHT_SECONDS)}{{opacity:1;{away}}}"
            f"{self.at(begin + FLIGHT_SECONDS + 0.01)},100%{{opacity:0;{away}}}"
        )

    def rect(self, box, fill, extra="", name=""):
        x, y, w, h = box
        self.body.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" class="{name}" {extra}/>'
        )

    def text(self, x, y, words, fill="text", size=14, extra="", name=""):
        colour = self.colours[fill]
        self.body.append(
            f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" class="{name}" {extra}>{words}</text>'
        )

    def frame(self, box, title):
        self.rect(box, self.colours["raised"], f'stroke="{self.colours["line"]}" rx="10"')
        self.text(box[0] + 12, box[1] + 24, title, size=15, extra='font-weight="650"')

    def spans(self, moments, draw):
        """Draw each of some (seconds, value) until the next comes; without motion the last one."""
        for (begin, value), (end, _) in zip(moments, [*moments[1:], (None, None)], strict=True):
            draw(value, self.shown(begin, end) + (" gone" if end else ""))

    def svg(self, label):
        still = "@media (prefers-reduced-motion:reduce){*{animation:none!important}.gone{opacity:0}}"
        font = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'font-family="{font}" role="img" aria-label="{label}"><title>{label}</title>'
            f"<style>{''.join(self.styles)}{still}</style>"
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{self.colours["ground"]}"/>'
            f"{''.join(self.body)}</svg>\n"
        )


def draw(theme):
    about, *events = [json.loads(line) for line in EVENTS.read_text().splitlines()]
    first = next(event["seconds"] for event in events if event["who"] == "trainer")
    last = events[-1]["seconds"]
    speed = max(1.0, (last - first) / SECONDS)
    for event in events:
        event["at"] = 0.4 + max(event["seconds"] - first, 0) / speed
    end = events[-1]["at"]
    colours = THEMES[theme]
    picture = Picture(colours, end + REST_SECONDS)
    published = [event for event in events if event["who"] == "trainer" and "num_bytes" in event]

    def side(num_bytes):
        return SIDE * math.sqrt(num_bytes / about["full_bytes"])

    picture.frame(TRAINER, "trainer")
    picture.text(TRAINER[0] + 12, TRAINER[1] + 78, "one step, one publish", "soft", 12)

    def version(box):
        return lambda words, name: picture.text(box[0] + 12, box[1] + 54, words, size=20, name=name)

    picture.spans([(event["at"], f"version {event['version']}") for event in published], version(TRAINER))
    picture.frame(BUCKET, "any bucket")
    x, y = BUCKET[0] + 14, BUCKET[1] + 40
    for event in published:
        size = side(event["num_bytes"])
        if event["version"]:
            column, row = (event["version"] - 1) % 10, (event["version"] - 1) // 10
            left, top = x + SIDE + 24 + column * 20, y + 18 + row * 32
        else:
            left, top = x, y
        name = picture.flight(event["at"], TRAINER[0] + TRAINER[2] - left, TRAINER[1] + TRAINER[3] / 2 - top)
        picture.rect((left, top, size, size), colours["accent" if event["version"] else "anchor"], name=name)
    deltas = [event["num_bytes"] for event in published[1:]]
    picture.text(x, y + SIDE + 24, f"all weights once, {mega(published[0]['num_bytes'])}", "soft", 12)
    picture.text(x + SIDE + 24, y + 8, f"then one delta per step, {sum(deltas) / len(deltas) / 1e3:.0f} kB", "soft", 12)
    for name, box in REPLICAS.items():
        followed(picture, events, name, box, end, version(box), side)
    bars(picture, about, published, end, speed)
    seconds = f"{last - first:.0f}"
    return picture.svg(
        f"deltawire hello, a real run: a trainer publishes {STEPS} versions into a bucket in {seconds} seconds, two "
        "replicas follow, one of them is killed and comes back, and all end with the same bits; "
        f"{mega(about['uploaded_bytes'])} uploaded in total instead of {mega(about['all_bytes'])}"
    )


def followed(picture, events, name, box, end, version, side):
    """A replica: its versions, what it fetches, and its death."""
    own = [event for event in events if event["who"] == name]
    colours = picture.colours
    killed = next((event["at"] for event in own if event.get("killed")), None)
    back = next((event["at"] for event in own if killed and event.get("ready") and event["at"] > killed), None)
    picture.frame(box, f"replica, {'in memory' if name == 'memory' else 'a folder'}")
    texts = []
    for event in own:
        if "num_bytes" in event:
            size = side(event["num_bytes"])
            start = (BUCKET[0] + BUCKET[2] - size, BUCKET[1] + BUCKET[3] / 2 - size / 2)
            flight = picture.passing(
                event["at"] - FLIGHT_SECONDS, box[0] - start[0] - size / 2, box[1] + box[3] / 2 - start[1] - size / 2
            )
            fill = colours["anchor" if event["version"] == 0 else "accent"]
            picture.rect((*start, size, size), fill, name=f"{flight} gone")
            texts.append((event["at"], f"version {event['version']}"))
        elif event.get("killed"):
            texts.append((event["at"], ""))
        elif event["at"] == back:
            texts.append((event["at"], f"version {event['version']}"))
        elif "sha256" in event:
            texts.append((event["at"], f"✓ version {event['version']}"))
    picture.spans(texts, version)
    if killed:
        dead = picture.shown(killed, back)
        picture.rect(box, "none", f'stroke="{colours["bad"]}" stroke-width="3" rx="10"', f"{dead} gone")
        picture.text(box[0] + 12, box[1] + 52, "kill -9", "bad", 20, 'font-weight="650"', f"{dead} gone")


def bars(picture, about, published, end, speed):
    """What has been uploaded by now, as deltas and as all weights."""
    colours = picture.colours
    wide = 560
    scale = wide / about["all_bytes"]
    rows = [
        (
            228,
            "accent",
            [each["num_bytes"] for each in published],
            about["uploaded_bytes"],
            "uploaded in total, as deltas",
        ),
        (260, "warn", [about["full_bytes"]] * len(published), about["all_bytes"], "all weights at every version"),
    ]
    for y, fill, sizes, total, words in rows:
        frames, sent = ["0%{transform:scaleX(0)}"], 0.0
        # What is not a delta or an anchor of its own is spread over the run.
        factor = total / sum(sizes)
        for event, num_bytes in zip(published, sizes, strict=True):
            frames.append(f"{picture.at(event['at'])}{{transform:scaleX({sent / total:.4f})}}")
            sent += num_bytes * factor
            frames.append(f"{picture.at(event['at'] + FLIGHT_SECONDS / 2)}{{transform:scaleX({sent / total:.4f})}}")
        name = picture.animate("".join([*frames, "100%{transform:none}"]))
        picture.rect((20, y, total * scale, 16), colours[fill], 'style="transform-origin:20px 0"', name)
        x = 20 + max(total * scale, 4) + 10
        picture.text(round(x), y + 13, f"<tspan font-weight='650'>{mega(total)}</tspan> {words}", size=14)
    fast = "" if speed == 1 else f", played {speed:.1f} times as fast"
    weights = f"{about['full_bytes'] / 2e6:.1f} M weights"
    picture.text(20, 304, f"deltawire hello, {weights}, two cores{fast}", "soft", 12)
    picture.text(840, 304, "the same SHA-256 in all three", "good", 14, 'text-anchor="end" font-weight="650"',
                 picture.shown(end))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record()
    for theme in THEMES:
        Path(RESULTS / f"hello-{theme}.svg").write_text(draw(theme))
