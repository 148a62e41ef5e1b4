"""Draws the charts of the README and the docs from the CSVs, for light and dark pages."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from measure import RESULTS, read_csv

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "deltawire"
mpl.rcParams["font.size"] = 10

THEMES = {"light": ("#1f2328", "#57606a", "#0969da", "#afb8c1"), "dark": ("#e6edf3", "#8d96a0", "#4493f8", "#484f58")}


def sizes(theme: str) -> Path:
    """Bytes per changed weight on the recorded updates."""
    ink, faint, ours, others = THEMES[theme]
    rows = [row for row in read_csv("codec_size.csv") if row["recording"] == "rl-lr1e-6" and row["encoding"] != "coo"]
    rows.sort(key=lambda row: float(row["bytes_per_change"]))
    names = [f"{row['encoding']}  ({row['used_by']})" for row in rows]
    values = [float(row["bytes_per_change"]) for row in rows]
    colors = [ours if row["used_by"] == "deltawire" else others for row in rows]
    figure, axes = plt.subplots(figsize=(8.6, 0.36 * len(rows) + 0.8))
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, color=ink)
    axes.invert_yaxis()
    axes.set_xlabel("bytes sent per changed weight", color=faint)
    return finish(figure, axes, f"size-{theme}.svg", ink, faint)


def speeds(theme: str) -> Path:
    """Encode and decode against finding the changes with numpy."""
    ink, faint, ours, others = THEMES[theme]
    rows = [row for row in read_csv("codec_speed.csv") if row["operation"].endswith(("encode", "decode"))]
    rows.sort(key=lambda row: float(row["ratio_to_flatnonzero"]))
    names = [f"{row['operation']}  ({row['used_by']})" for row in rows]
    values = [float(row["ratio_to_flatnonzero"]) for row in rows]
    colors = [ours if row["used_by"] == "deltawire" else others for row in rows]
    figure, axes = plt.subplots(figsize=(8.6, 0.32 * len(rows) + 0.8))
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, color=ink)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times np.flatnonzero(old != new), log scale", color=faint)
    return finish(figure, axes, f"speed-{theme}.svg", ink, faint)


def finish(figure: plt.Figure, axes: plt.Axes, name: str, ink: str, faint: str) -> Path:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(faint)
    axes.tick_params(colors=ink)
    axes.margins(x=0.12)
    figure.tight_layout()
    path = RESULTS / name
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    for theme in THEMES:
        print(sizes(theme))
        print(speeds(theme))
