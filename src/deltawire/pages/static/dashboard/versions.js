// Versions over time: a chart, and a table of which only the rows that can be seen exist.

import { Chart } from "./chart.js";
import { ago, byId, make, refill, say, show } from "./dom.js";
import { count, ofFull, percent, size } from "./format.js";

const ROW = 28, SPARE_ROWS = 6;
const METRICS = {
  bytes: { name: "payload", format: size, value: (row) => row.bytes },
  ratio: { name: "payload as a share of all weights", format: percent, value: (row) => row.ratio },
  density: { name: "share of the weights that changed", format: percent, value: (row) => row.density },
};

export class Versions {
  constructor(model, onChoose) {
    this.model = model;
    this.choose = onChoose;
    this.metric = "bytes";
    this.kind = "all";
    this.upTo = null;
    this.chosen = null;
    this.pointed = null;
    this.shown = [];
    this.canvas = byId("versions-chart");
    this.scroll = byId("versions-scroll");
    this.body = byId("versions-table").tBodies[0];
    this.chart = new Chart(this.canvas, {
      onPoint: (x) => this.point(x === null ? null : this.nearest(x)),
      onPick: (x) => x !== null && this.choose(this.nearest(x)?.version ?? null),
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.scroll.addEventListener("scroll", () => this.rows());
    new ResizeObserver(() => this.rows()).observe(this.scroll);
    for (const button of document.querySelectorAll("[data-metric]")) {
      button.addEventListener("click", () => this.setMetric(button.dataset.metric));
    }
    byId("versions-kind").addEventListener("change", (event) => this.filter({ kind: event.target.value }));
    byId("versions-from").addEventListener("input", (event) => {
      this.filter({ upTo: event.target.value === "" ? null : Number(event.target.value) });
    });
  }

  setMetric(metric) {
    this.metric = metric;
    for (const button of document.querySelectorAll("[data-metric]")) {
      button.setAttribute("aria-pressed", String(button.dataset.metric === metric));
    }
    this.draw();
  }

  filter(change) {
    Object.assign(this, change);
    this.scroll.scrollTop = 0;
    this.list();
  }

  setChosen(version) {
    this.chosen = version;
    this.rows(true);
  }

  render() {
    const { state } = this.model;
    if (state) {
      const { found, read, damaged } = state.counts;
      say("versions-count", (read < found ? `${count(read)} of ${count(found)} read` : count(found))
        + (damaged ? `, ${damaged} damaged` : ""));
    }
    this.draw();
    this.list();
  }

  draw() {
    const rows = this.model.rows();
    const { name, format, value } = METRICS[this.metric];
    const points = [], marks = [];
    for (const row of rows) {
      if (row.kind === "anchor") marks.push({ x: row.version });
      else if (row.kind === "delta" && value(row) !== null) points.push([row.version, value(row)]);
    }
    this.chart.set({ series: [{ points, name: "--accent" }], marks, format });
    this.point(this.pointed);
    if (!rows.length) return;
    const values = points.map((point) => point[1]).sort((a, b) => a - b);
    const middle = values.length ? `, median ${format(values[values.length >> 1])}` : "";
    this.canvas.setAttribute("aria-label", `Version; ${name}${middle}`);
    this.canvas.setAttribute("aria-valuemin", rows[0].version);
    this.canvas.setAttribute("aria-valuemax", rows.at(-1).version);
  }

  nearest(x) {
    const rows = this.model.rows();
    if (!rows.length) return null;
    let low = 0, high = rows.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rows[middle].version < x) low = middle + 1;
      else high = middle;
    }
    return low && x - rows[low - 1].version < rows[low].version - x ? rows[low - 1] : rows[low];
  }

  point(row) {
    this.pointed = row;
    this.chart.point(row ? row.version : null);
    const shown = row ?? this.model.latest();
    if (!shown) return;
    const text = readout(shown);
    say("versions-readout", text);
    this.canvas.setAttribute("aria-valuenow", shown.version);
    this.canvas.setAttribute("aria-valuetext", text);
  }

  key(event) {
    const rows = this.model.rows();
    const far = Math.max(Math.round(rows.length / 20), 1);
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far,
      Home: -rows.length, End: rows.length };
    if (!rows.length) return;
    const from = rows.indexOf(this.pointed ?? rows.at(-1));
    if (event.key in moves) this.point(rows[Math.min(Math.max(from + moves[event.key], 0), rows.length - 1)]);
    else if (event.key === "Enter") this.choose(rows[from].version);
    else return;
    event.preventDefault();
  }

  list() {
    const rows = this.model.rows();
    const wanted = rows.filter((row) => (this.kind === "all" || row.kind === this.kind)
      && (this.upTo === null || row.version <= this.upTo));
    this.shown = wanted.reverse();
    show("versions-empty", !wanted.length);
    say("versions-empty", rows.length ? "No version is like that." : "No version was read yet.");
    byId("versions-table").setAttribute("aria-rowcount", String(this.shown.length + 1));
    this.rows(true);
  }

  rows(isForced = false) {
    const first = Math.max(Math.floor(this.scroll.scrollTop / ROW) - SPARE_ROWS, 0);
    const last = Math.min(first + Math.ceil(this.scroll.clientHeight / ROW) + 2 * SPARE_ROWS, this.shown.length);
    const range = `${first}-${last}`;
    if (!isForced && range === this.range) return;
    this.range = range;
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this.row(this.shown[i], i));
    refill(this.body, spacer(first), ...rows, spacer(this.shown.length - last));
  }

  row(row, index) {
    const button = make("button", { type: "button", class: "link", "data-key": row.version,
      "aria-label": `Version ${row.version}, show its anatomy`, onclick: () => this.choose(row.version) }, String(row.version));
    const cells = row.kind === "damaged"
      ? [make("td", { class: "spare" }, "–"), make("td", { class: "kind-damaged", colspan: 4, title: row.error }, row.error)]
      : [make("td", { class: "spare" }, row.step === null ? "–" : String(row.step)),
        make("td", { class: `kind-${row.kind}` }, row.kind),
        make("td", {}, size(row.bytes)), make("td", {}, ofFull(row.ratio)),
        make("td", {}, row.kind === "anchor" ? "–" : percent(row.density))];
    return make("tr", { class: row.version === this.chosen ? "row chosen" : "row", "aria-rowindex": index + 2 },
      make("td", {}, button), ...cells,
      make("td", { class: "spare" }, row.created === null ? "–" : ago(row.created)));
  }
}

function spacer(rows) {
  const row = make("tr", { "aria-hidden": "true" });
  row.style.height = `${rows * ROW}px`;
  row.hidden = rows === 0;
  return row;
}

function readout(row) {
  if (row.kind === "damaged") return `version ${row.version}: ${row.error}`;
  const step = row.step === null ? "" : `, step ${row.step}`;
  if (row.kind === "anchor") return `version ${row.version}${step}: anchor, ${size(row.bytes)}`;
  return `version ${row.version}${step}: ${size(row.bytes)}, ${ofFull(row.ratio)} of full, ${percent(row.density)} changed`;
}
