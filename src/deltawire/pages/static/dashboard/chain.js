// Which ways lead to which versions, and what gc would remove. Asked for when there is something new.

import { colour, onCanvas, redrawing } from "./chart.js";
import { byId, make, refill, say } from "./dom.js";
import { count, plural, size } from "./format.js";

const LEAST = 9, MOST = 18, EDGE = 16, BASELINE = 34, AGAIN_MS = 4000;
const NAMES = { anchor: "anchors", delta: "deltas", skip: "skip deltas" };

export class Chain {
  constructor(model) {
    this.model = model;
    this.canvas = byId("chain-chart");
    this.end = null;
    this.page = null;
    this.asked = 0;
    redrawing(this.canvas, () => this.resized());
    byId("chain-older").addEventListener("click", () => this.turn(-1));
    byId("chain-newer").addEventListener("click", () => this.turn(1));
    byId("chain-panel").addEventListener("toggle", () => this.render());
  }

  // How many versions fit.
  span() {
    return Math.max(Math.floor((this.canvas.clientWidth - 2 * EDGE) / LEAST), 8);
  }

  // Pixels for each version: more where there are few.
  room(width) {
    const { first, latest } = this.model.state.counts;
    return Math.min(Math.max((width - 2 * EDGE) / Math.max(latest - first, 1), LEAST), MOST);
  }

  turn(direction) {
    const { first, latest } = this.model.state.counts;
    const end = (this.end ?? latest) + direction * Math.round(0.8 * this.span());
    this.end = end >= latest ? null : Math.max(end, Math.min(first + this.span() - 1, latest));
    this.ask(true);
  }

  resized() {
    this.draw();
    if (this.page && this.span() > this.drawnSpan) this.ask(true);
  }

  render() {
    const latest = this.model.state?.store.ok ? this.model.state.counts.latest : null;
    if (!byId("chain-panel").open || latest === null || (latest === this.known && this.page)) return;
    this.ask(false);
  }

  // At most every few seconds, and once more for what came in between.
  ask(isUrgent) {
    clearTimeout(this.later);
    const wait = isUrgent ? 0 : Math.max(this.asked + AGAIN_MS - performance.now(), 0);
    this.later = setTimeout(() => this.fetch(), wait);
  }

  async fetch() {
    const { store, counts: { latest } } = this.model.state;
    if (latest === null || !store.ok) return;
    const asked = (this.asked = performance.now());
    this.known = latest;
    this.drawnSpan = this.span();
    const after = (this.end ?? latest) - this.drawnSpan;
    try {
      const answer = await fetch(`/api/chain?after=${after}&limit=${Math.min(this.drawnSpan, 1000)}`);
      const page = await answer.json();
      if (!answer.ok) throw new Error(page.error);
      // Another part was asked for meanwhile.
      if (asked !== this.asked) return;
      this.page = page;
      this.after = after;
      // The answer may be some seconds old.
      this.known = page.latest;
      this.table();
      this.draw();
      if (page.latest < latest) this.ask(false);
    } catch (error) {
      this.known = null;
      if (error instanceof TypeError) return;
      say("chain-gc", `The chain cannot be read now: ${error.message}`);
    }
  }

  table() {
    const { totals, gc, gc_problem: problem } = this.page;
    const { first, latest } = this.model.state.counts;
    const last = this.end ?? latest;
    say("chain-range", `versions ${count(Math.max(this.after + 1, first))} to ${count(last)}`);
    byId("chain-older").disabled = this.after < first;
    byId("chain-newer").disabled = this.end === null;
    refill(byId("chain-table").tBodies[0], ...Object.entries(totals).map(([kind, total]) => make("tr", {},
      make("td", { class: `key ${kind}` }, NAMES[kind]), make("td", {}, count(total.hops)),
      make("td", {}, size(total.bytes)), make("td", {}, count(total.goes)))));
    say("chain-gc", problem ?? (gc.objects
      ? `deltawire gc, with its defaults, would remove ${plural(gc.objects, "object")} (${size(gc.bytes)}) and keep `
        + `${count(gc.kept)} (${size(gc.kept_bytes)}): everything from version ${gc.oldest_anchor} on`
        + (gc.live_replicas ? `, and what ${plural(gc.live_replicas, "live replica")} may need.` : ".")
      : `deltawire gc would remove nothing; it keeps ${plural(gc.kept, "object")} (${size(gc.kept_bytes)}).`));
    const counts = Object.entries(totals).map(([kind, total]) => `${total.hops} ${NAMES[kind]}`).join(", ");
    this.canvas.setAttribute("aria-label", `The chain: ${counts}; the table below shows how much of each gc would remove`);
  }

  draw() {
    if (this.page) onCanvas(this.canvas, (context, width, height) => this.paint(context, width, height));
  }

  paint(context, width, height) {
    const last = this.end ?? this.known ?? this.model.state.counts.latest;
    const room = this.room(width);
    const x = (version) => width - EDGE - (last - version) * room;
    const ground = height - BASELINE;
    const paint = (kind, goes) => {
      context.globalAlpha = goes ? 0.45 : 1;
      context.strokeStyle = context.fillStyle = goes ? colour("--soft")
        : colour({ anchor: "--anchor", delta: "--accent", skip: "--skip" }[kind]);
    };
    for (const hop of this.page.hops.filter((each) => each.kind === "skip")) {
      paint("skip", hop.goes);
      const from = x(hop.base), to = x(hop.version), reach = (to - from) / 2;
      context.lineWidth = 1.25;
      context.beginPath();
      context.ellipse((from + to) / 2, ground - 5, reach, Math.min(6 + reach * 0.75, ground - 12), 0, Math.PI, 0);
      context.stroke();
    }
    for (const hop of this.page.hops.filter((each) => each.kind === "delta")) {
      paint("delta", hop.goes);
      context.fillRect(x(hop.base) + 2, ground - 1, x(hop.version) - x(hop.base) - 4, 3);
      context.fillRect(x(hop.version) - 1.5, ground - 2, 3, 5);
    }
    for (const hop of this.page.hops.filter((each) => each.kind === "anchor")) {
      paint("anchor", hop.goes);
      context.fillRect(x(hop.version) - 4.5, ground + 6, 9, 9);
    }
    context.globalAlpha = 1;
    context.fillStyle = colour("--soft");
    context.textAlign = "center";
    const shown = Math.ceil(width / room);
    const every = [5, 10, 20, 50].find((each) => each * room > 60);
    for (let version = Math.max(last - shown, 0); version <= last; version++) {
      if (version % every === 0 && x(version) > EDGE) context.fillText(String(version), x(version), height - 4);
    }
  }
}
