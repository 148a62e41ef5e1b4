// The versions as a table, a page at a time: there may be very many.

import { ago, byId, make, refill, say, show } from "./dom.js";
import { count, ofFull, percent, plural, size } from "./format.js";

const ROWS = 100, AGAIN_MS = 2000;

export class Versions {
  constructor(model, onChoose) {
    this.model = model;
    this.choose = onChoose;
    this.chosen = this.upTo = null;
    this.before = [];
    this.rows = [];
    this.asked = 0;
    byId("versions-panel").addEventListener("toggle", () => this.ask(true));
    byId("versions-kind").addEventListener("change", () => this.turn(null));
    byId("versions-from").addEventListener("input", ({ target }) => this.turn(target.value === "" ? null : Number(target.value)));
    byId("versions-older").addEventListener("click", () => {
      this.before.push(this.upTo);
      this.upTo = this.rows[0].version - 1;
      this.ask(true);
    });
    byId("versions-newer").addEventListener("click", () => {
      this.upTo = this.before.pop();
      this.ask(true);
    });
  }

  turn(upTo) {
    this.upTo = upTo;
    this.before = [];
    this.ask(true);
  }

  setChosen(version) {
    this.chosen = version;
    this.fill();
  }

  render() {
    const { state } = this.model;
    if (!state) return;
    const { found, read, damaged, anchors } = state.counts;
    say("versions-count", (read < found ? `${count(read)} of ${count(found)} read` : count(found))
      + `, ${plural(anchors, "anchor")}` + (damaged ? `, ${damaged} damaged` : ""));
    this.ask(false);
  }

  ask(isUrgent) {
    if (!byId("versions-panel").open) return;
    clearTimeout(this.later);
    this.later = setTimeout(() => this.fetch(), isUrgent ? 0 : Math.max(this.asked + AGAIN_MS - performance.now(), 0));
  }

  async fetch() {
    const asked = (this.asked = performance.now());
    const query = new URLSearchParams({ limit: ROWS, kind: byId("versions-kind").value });
    if (this.upTo !== null) query.set("up_to", this.upTo);
    let page;
    try {
      const answer = await fetch(`/api/versions?${query}`);
      page = await answer.json();
      if (!answer.ok) throw new Error(page.error);
    } catch (error) {
      if (!(error instanceof TypeError)) say("versions-empty", error.message);
      return;
    }
    // An answer that is late says nothing about what was asked for since.
    if (asked !== this.asked) return;
    this.rows = page.versions;
    byId("versions-older").disabled = page.matching <= this.rows.length;
    byId("versions-newer").disabled = !this.before.length;
    say("versions-empty", this.model.state?.counts.read ? "No version matches." : "No version has been read yet.");
    show("versions-empty", !this.rows.length);
    this.fill();
  }

  fill() {
    refill(byId("versions-table").tBodies[0], ...[...this.rows].reverse().map((row) => this.row(row)));
  }

  row(row) {
    const button = make("button", { type: "button", class: "link", "data-key": row.version,
      "aria-label": `Version ${row.version}, show its anatomy`, onclick: () => this.choose(row.version) }, String(row.version));
    const also = [row.further_anchor ? "anchor" : "", ...row.skip_deltas_from.map((base) => `from ${base}`)].filter(Boolean);
    const cells = row.kind === "damaged"
      ? [make("td", { class: "spare" }, "–"), make("td", { class: "kind-damaged", colspan: 6, title: row.error }, row.error)]
      : [make("td", { class: "spare" }, row.step === null ? "–" : String(row.step)),
        make("td", { class: `kind-${row.kind}` }, row.kind),
        make("td", {}, size(row.bytes)), make("td", {}, ofFull(row.ratio)),
        make("td", {}, row.kind === "anchor" ? "–" : percent(row.density)),
        make("td", { class: "spare" }, also.join(", ") || "–"), make("td", { class: "spare" }, size(row.all_bytes))];
    return make("tr", { class: row.version === this.chosen ? "row chosen" : "row" },
      make("td", {}, button), ...cells,
      make("td", { class: "spare" }, row.created === null ? "–" : ago(row.created)));
  }
}
