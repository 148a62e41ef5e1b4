"""Draws the charts of the README and the docs from the CSVs, for light and dark pages."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from measure import RESULTS, read_csv

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "deltawire"
mpl.rcParams["font.size"] = 10

THEMES = {"light": ("#1f2328", "#57606a", "#0969da", "#afb8c1"), "dark": ("#e6edf3", "#8d96a0", "#4493f8", "#484f58")}


def sizes(theme: str) -> Path:
    """Bytes per changed weight on the recorded updates."""
    rows = [row for row in read_csv("codec_size.csv") if row["recording"] == "rl-lr1e-6" and row["encoding"] != "coo"]
    return bars(rows, "encoding", "bytes_per_change", "bytes sent per changed weight", "size", theme)


def speeds(theme: str) -> Path:
    """Encode and decode against finding the changes with numpy."""
    rows = [row for row in read_csv("codec_speed.csv") if row["operation"].endswith(("encode", "decode"))]
    return bars(
        rows, "operation", "ratio_to_flatnonzero", "times np.flatnonzero(old != new), log scale", "speed", theme
    )


def bars(rows: list[dict[str, str]], name: str, value: str, label: str, file: str, theme: str) -> Path:
    """Horizontal bars, the smallest on top, ours in another colour."""
    ink, faint, ours, others = THEMES[theme]
    rows.sort(key=lambda row: float(row[value]))
    values = [float(row[value]) for row in rows]
    colors = [ours if row["used_by"] == "deltawire" else others for row in rows]
    figure, axes = plt.subplots(figsize=(8.6, 0.34 * len(rows) + 0.8))
    drawn = axes.barh([f"{row[name]}  ({row['used_by']})" for row in rows], values, color=colors)
    axes.bar_label(drawn, [f"{number:.2f}" for number in values], padding=4, color=ink)
    axes.invert_yaxis()
    if "log" in label:
        axes.set_xscale("log")
    axes.set_xlabel(label, color=faint)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(faint)
    axes.tick_params(colors=ink)
    axes.margins(x=0.12)
    return save(figure, file, theme)


def steps(theme: str) -> Path:
    """Density and bytes per change over the steps of the GRPO runs, a line for each learning rate."""
    ink, faint, ours, _ = THEMES[theme]
    rows = read_csv("grpo.csv")
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 2.9))
    for axes, column, scale, label in (
        (panels[0], "density", 100, "weights changed by a step, %, log scale"),
        (panels[1], "bytes_per_change", 1, "bytes sent per changed weight"),
    ):
        for color, lr in zip((ours, faint), sorted({row["lr"] for row in rows}, key=float), strict=False):
            own = [row for row in rows if row["lr"] == lr]
            values = [scale * float(row[column]) for row in own]
            axes.plot([int(row["step"]) for row in own], values, color=color, label="lr " + lr.replace("e-0", "e-"))
        axes.set_title(label, color=ink, fontsize=10, loc="left")
        axes.set_xlabel("step", color=faint)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(faint)
        axes.tick_params(which="both", colors=ink)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panels[0].yaxis.set_minor_formatter(NullFormatter())
    panels[1].set_ylim(0, 1.15 * panels[1].get_ylim()[1])
    panels[1].legend(frameon=False, labelcolor=ink)
    return save(figure, "grpo", theme)


def simulated(theme: str) -> Path:
    """What the simulator of `deltawire estimate` says, as a multiple of what real runs have measured."""
    ink, faint, ours, others = THEMES[theme]
    rows = read_csv("simulator.csv")
    figure, axes = plt.subplots(figsize=(8.6, 0.3 * len(rows) + 0.9))
    axes.axvspan(0.75, 1.25, color=others, alpha=0.35, linewidth=0)
    axes.axvline(1, color=faint, linewidth=1)
    names = [f"{row['run']}: {row['quantity']} ({row['unit']})" for row in rows]
    axes.scatter([float(row["ratio"]) for row in rows], names, color=ours, zorder=3)
    axes.invert_yaxis()
    axes.set_xlim(0.5, 1.5)
    axes.set_xlabel("predicted / measured; the band is 25 %", color=faint)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(faint)
    axes.tick_params(colors=ink)
    return save(figure, "simulator", theme)


def save(figure: Figure, file: str, theme: str) -> Path:
    figure.tight_layout()
    path = RESULTS / f"{file}-{theme}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    for theme in THEMES:
        print(sizes(theme))
        print(speeds(theme))
        print(simulated(theme))
        # Made on a GPU, so not by `make bench`.
        if (RESULTS / "grpo.csv").exists():
            print(steps(theme))
