// Six charts on one axis. The server thins what they show; they ask again when there is something new.

import { Chart, valueAt } from "./chart.js";
import { byId, make, say, show } from "./dom.js";
import { clock, count, elapsed, milliseconds, plural, short, size } from "./format.js";

const AGAIN_MS = 900;
const PALETTE = ["--accent", "--anchor", "--skip", "--warn", "--pink", "--soft"];
const COLOURS = { each: "--soft", everything: "--anchor", delta: "--accent", "longest token gap": "--warn" };

const versions = (value) => (Number.isInteger(value) ? plural(value, "version") : `${short(value)} versions`);
const CHARTS = {
  reward: { format: short, fromZero: false,
    missing: 'Not reported. Publish it with each version: publish(step=step, metadata={"reward": 0.7}).' },
  staleness: { format: short, text: versions,
    missing: 'Not reported. How many versions old the rollouts of a step are: metadata={"staleness": 1.5}.' },
  lag: { format: short, text: versions, stairs: true, missing: "No replica has reported since the dashboard started." },
  pause: { format: milliseconds, stairs: true,
    missing: 'No engine has reported a pause since the dashboard started, and no version has a token gap.' },
  bytes: { format: size, missing: "No version has been read yet." },
  served: { format: milliseconds, stairs: true, missing: "No replica has reported since the dashboard started." },
};

export class Charts {
  constructor(model, onData) {
    this.model = model;
    this.onData = onData;
    this.view = { axis: "time", log: false, range: null, last: null };
    this.data = this.cursor = this.stamp = null;
    this.colours = new Map();
    this.charts = new Map(Object.keys(CHARTS).map((id) => [id, new Chart(byId(`${id}-chart`), {
      point: (x) => this.point(x),
      select: (from, to) => this.zoom([from, to]),
      reset: () => this.zoom(null),
      key: (event) => this.key(event),
    })]));
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.addEventListener("click", () => this.change({ axis: button.dataset.axis, range: null }));
    }
    byId("log-scale").addEventListener("click", () => this.change({ log: !this.view.log }));
    byId("span").addEventListener("change", ({ target }) => {
      this.change({ last: target.value ? Number(target.value) : null, range: null });
    });
    byId("zoom-in").addEventListener("click", () => this.scale(0.5));
    byId("zoom-out").addEventListener("click", () => this.scale(2));
    byId("zoom-reset").addEventListener("click", () => this.zoom(null));
  }

  change(view) {
    Object.assign(this.view, view);
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === this.view.axis));
    }
    byId("log-scale").setAttribute("aria-pressed", String(this.view.log));
    byId("zoom-reset").disabled = this.view.range === null;
    this.render();
    this.ask(true);
  }

  zoom(range) {
    this.cursor = null;
    this.change({ range });
  }

  scale(factor) {
    if (!this.data) return;
    const [from, to] = this.data.range, [first, last] = this.data.whole;
    const middle = this.cursor ?? (from + to) / 2, half = (factor * (to - from)) / 2;
    const range = [Math.max(middle - half, first), Math.min(middle + half, last)];
    this.zoom(range[0] <= first && range[1] >= last ? null : range);
  }

  key(event) {
    if (!this.data) return;
    const [from, to] = this.data.range;
    const moves = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: 0.1, PageDown: -0.1, Home: -1, End: 1 };
    if (event.key in moves) {
      const at = (this.cursor ?? to) + moves[event.key] * (to - from);
      this.point(Math.min(Math.max(at, from), to));
    } else if (event.key === "+") this.scale(0.5);
    else if (event.key === "-") this.scale(2);
    else if (event.key === "0" || event.key === "Escape") this.zoom(null);
    else return;
    event.preventDefault();
  }

  // The server has something new to draw.
  news(stamp) {
    if (stamp !== this.stamp && !document.hidden) this.ask(false);
  }

  // One request at a time, and not more often than the eye needs.
  ask(isUrgent) {
    if (this.asking) {
      this.again ||= isUrgent;
      return;
    }
    clearTimeout(this.later);
    this.later = setTimeout(() => this.fetch(), isUrgent ? 0 : Math.max((this.asked ?? 0) + AGAIN_MS - performance.now(), 0));
  }

  async fetch() {
    const { axis, range, last } = this.view;
    const query = new URLSearchParams({ axis, columns: Math.max(Math.min(byId("reward-chart").clientWidth, 500), 100) });
    if (range) query.set("from", range[0]), query.set("to", range[1]);
    else if (last) query.set("last", last);
    this.asking = true;
    this.asked = performance.now();
    try {
      const answer = await fetch(`/api/series?${query}`);
      if (!answer.ok) throw new Error((await answer.json()).error);
      this.data = await answer.json();
      this.stamp = this.data.stamp;
      this.render();
      this.onData();
    } catch (error) {
      if (!(error instanceof TypeError)) say("spoken", `The charts cannot be drawn: ${error.message}`);
    } finally {
      this.asking = false;
    }
    if (this.again) {
      this.again = false;
      this.ask(true);
    }
  }

  // Replicas keep their colours; one in trouble is red.
  colourOf(name) {
    if (!this.colours.has(name)) this.colours.set(name, PALETTE[this.colours.size % PALETTE.length]);
    return this.isIll(name) ? "--bad" : this.colours.get(name);
  }

  isIll(name) {
    const health = this.model.state?.replicas.find((row) => row.name === name)?.health;
    return ["dead", "fault", "silent"].includes(health);
  }

  render() {
    if (!this.data || this.data.axis !== this.view.axis) return;
    const { range, runs, charts } = this.data;
    byId("charts").removeAttribute("aria-busy");
    for (const [id, chart] of this.charts) {
      const { format, fromZero = true, stairs = false, missing } = CHARTS[id];
      const lines = charts[id].map((line) => ({ ...line, label: line.run ? `${line.name} of ${runs[line.run]}` : line.name,
        stairs: stairs && line.replica, dash: line.run > 0, bold: line.replica && this.isIll(line.name),
        name: line.replica ? this.colourOf(line.name) : COLOURS[line.name] ?? "--accent" }));
      show(`${id}-missing`, !lines.length);
      if (!lines.length) say(`${id}-missing`, this.isReading() ? "Reading the run …" : missing);
      chart.canvas.classList.toggle("veiled", !lines.length);
      chart.set({ lines, range, format, fromZero, log: this.view.log, formatX: (x, span) => this.axisText(x, span) });
    }
    show("gap-missing", charts.pause.some((line) => line.replica) && !charts.pause.some((line) => !line.replica));
    this.keys(runs);
    this.point(this.cursor);
  }

  isReading() {
    const counts = this.model.state?.counts;
    return !counts || counts.read < counts.found;
  }

  // What is dashed, where two runs are compared.
  keys(runs) {
    show("runs-key", runs.length > 1);
    if (runs.length > 1) byId("runs-key").replaceChildren(make("span", { class: "swatch solid" }), ` ${runs[0] ?? "no run yet"} `,
      make("span", { class: "swatch dashed" }), ` ${runs[1] ?? "no run yet"}`);
  }

  axisText(x, span) {
    if (this.view.axis === "step") return Number.isInteger(x) ? count(x) : "";
    if (this.data.runs.length > 1) return elapsed(x);
    const time = this.data.origin + x;
    if (span > 172800) return new Date(1000 * time).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    return span > 1200 ? clock(time).slice(0, 5) : clock(time);
  }

  point(x) {
    this.cursor = x;
    if (!this.data) return;
    const at = x ?? this.data.range[1];
    for (const [id, chart] of this.charts) {
      chart.point(x);
      const text = this.readout(id, chart.data.lines, at);
      say(`${id}-readout`, text);
      const { canvas } = chart;
      canvas.setAttribute("aria-valuemin", this.data.range[0]);
      canvas.setAttribute("aria-valuemax", this.data.range[1]);
      canvas.setAttribute("aria-valuenow", at);
      canvas.setAttribute("aria-valuetext", `${this.axisText(this.view.axis === "step" ? Math.round(at) : at, 0)}: ${text}`);
    }
  }

  // The values at a place; of replicas the largest, with its name.
  readout(id, lines, at) {
    const write = CHARTS[id].text ?? CHARTS[id].format;
    const values = lines.map((line) => ({ ...line, value: valueAt(line.points, at) })).filter((line) => line.value !== null);
    const replicas = values.filter((line) => line.replica).sort((a, b) => b.value - a.value);
    const parts = values.filter((line) => !line.replica).map((line) => `${line.label} ${write(line.value)}`);
    if (replicas.length) parts.push(`${replicas[0].label} ${write(replicas[0].value)}`
      + (replicas.length > 1 ? `, ${plural(replicas.length - 1, "other")} up to ${write(replicas[1].value)}` : ""));
    return parts.join("; ") || "–";
  }
}
