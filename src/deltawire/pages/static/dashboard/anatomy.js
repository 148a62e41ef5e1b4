// One delta: where it changes the model, by how much, and what that takes.

import { byId, make, refill, say, show } from "./dom.js";
import { count, percent, size } from "./format.js";

// Larger deltas are fetched only when somebody asks for them.
const FOLLOW_BYTES = 16e6, FOLLOW_MS = 5000;
const MOST_COLUMNS_WITH_TEXT = 10;

export class Anatomy {
  constructor(model, onShown) {
    this.model = model;
    this.onShown = onShown;
    this.version = null;
    this.base = "";
    this.asked = 0;
    this.follow = byId("anatomy-follow");
    byId("anatomy-version").addEventListener("change", (event) => this.choose(Number(event.target.value)));
    byId("anatomy-base").addEventListener("change", (event) => {
      this.follow.checked = false;
      this.fetch(this.version, event.target.value);
    });
    this.follow.addEventListener("change", () => this.render());
    byId("anatomy-panel").addEventListener("toggle", () => this.render());
  }

  // Somebody wants this version.
  choose(version) {
    if (version === null || !Number.isInteger(version)) return;
    this.follow.checked = false;
    byId("anatomy-panel").open = true;
    this.fetch(version, "");
  }

  render() {
    if (!this.follow.checked || !this.model.state?.store.ok) return;
    if (!byId("anatomy-panel").open) return;
    const newest = this.model.state.newest_delta;
    if (!newest) {
      if (this.version === null) say("anatomy-facts", "There is no delta yet.");
      return;
    }
    if (newest.version === this.version) return;
    if (newest.bytes > FOLLOW_BYTES) {
      say("anatomy-facts", `Version ${newest.version} is ${size(newest.bytes)}: choose a version to fetch it.`);
      this.follow.checked = false;
      return;
    }
    clearTimeout(this.later);
    this.later = setTimeout(() => this.follow.checked && this.model.state.store.ok && this.fetch(newest.version, ""),
      Math.max(this.asked + FOLLOW_MS - performance.now(), 0));
  }

  async fetch(version, base) {
    const asked = (this.asked = performance.now());
    this.version = version;
    if (document.activeElement !== byId("anatomy-version")) byId("anatomy-version").value = version;
    say("anatomy-facts", `Reading version ${version} …`);
    let found;
    try {
      const answer = await fetch(`/api/anatomy/${version}${base === "" ? "" : `?base=${base}`}`);
      found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
    } catch (error) {
      if (asked === this.asked) {
        say("anatomy-facts", `Version ${version} cannot be shown: ${error.message}`);
        show("anatomy-body", false);
        this.version = null;
      }
      return;
    }
    // Another one was asked for meanwhile.
    if (asked !== this.asked) return;
    this.bases(version, found.base);
    this.fill(found);
    this.onShown(version);
  }

  // The skip deltas that the chain knows of.
  bases(version, chosen) {
    const skips = (this.hopsTo?.(version) ?? []).filter((hop) => hop.kind === "skip");
    const options = [make("option", { value: "" }, "the previous version"),
      ...skips.map((hop) => make("option", { value: hop.base, selected: hop.base === chosen }, `${hop.base} (skip delta)`))];
    refill(byId("anatomy-base"), ...options);
  }

  fill(found) {
    if (found.kind === "anchor") {
      say("anatomy-facts", `version ${found.version} is an anchor: all ${count(found.total)} weights, ${size(found.bytes)}`);
      show("anatomy-body", false);
      return;
    }
    say("anatomy-facts", `${found.base} → ${found.version}: ${count(found.changed)} of ${count(found.total)} weights changed `
      + `(${percent(found.changed / found.total)}), in ${count(found.num_tensors)} tensors; ${size(found.bytes)}, `
      + `${(found.bytes / Math.max(found.changed, 1)).toFixed(2)} bytes per change`);
    show("anatomy-body", true);
    heat(found.cells, found.parts);
    const unknown = found.steps_unknown ? [["not recorded", found.steps_unknown]] : [];
    const steps = [...Object.entries(found.steps), ...unknown];
    refill(byId("steps"), bars(["ULPs", "changes", "share"], steps, found.changed, (value) => count(value)));
    const mix = Object.entries(found.encodings).map(([name, each]) => [name, each.bytes]).sort((a, b) => b[1] - a[1]);
    refill(byId("encodings"), bars(["encoding", "bytes", "share"], [...mix, ["headers", found.header_bytes]], found.bytes, size));
  }
}

function bars(header, rows, total, format) {
  return make("table", { class: "bars" },
    make("thead", {}, make("tr", {}, ...header.map((each) => make("th", { scope: "col" }, each)),
      make("td", { "aria-hidden": "true" }))),
    make("tbody", {}, ...rows.map(([name, value]) => {
      const fill = make("div", { class: name === "headers" || name === "not recorded" ? "fill soft-fill" : "fill" });
      fill.hidden = !value;
      fill.style.width = `${total ? (100 * value) / total : 0}%`;
      return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, format(value)),
        make("td", {}, percent(total ? value / total : 0)), make("td", { class: "bar", "aria-hidden": "true" }, fill));
    })));
}

function heat(cells, order) {
  const layers = [...new Set(cells.map((cell) => cell.layer).filter((layer) => layer !== null))];
  const parts = new Map(order.map((part) => [part, new Map()]));
  for (const cell of cells) parts.get(cell.part).set(cell.layer, cell);
  const shares = cells.map((cell) => cell.changed / cell.total).filter((share) => share > 0);
  const low = Math.min(...shares), high = Math.max(...shares);
  const columns = Math.max(layers.length, 1);
  const hasText = columns <= MOST_COLUMNS_WITH_TEXT;
  const square = (cell, span) => {
    const share = cell ? cell.changed / cell.total : 0;
    const text = percent(share);
    const node = make("td", { colspan: span, class: share ? "" : "none", title: text },
      hasText || span > 1 ? text : make("span", { class: "hidden-text" }, text));
    // Logarithmic: densities differ by orders of magnitude, and the eye should see that.
    const depth = high > low ? Math.log(share / low) / Math.log(high / low) : 1;
    if (share) node.style.backgroundColor = `color-mix(in srgb, var(--accent) ${Math.round(6 + 40 * depth)}%, var(--ground))`;
    return node;
  };
  const rows = [...parts].map(([part, byLayer]) => make("tr", {},
    make("th", { scope: "row", title: part }, part.replace(/^model\.|\.weight$/g, "")),
    ...(byLayer.has(null) ? [square(byLayer.get(null), columns)] : layers.map((layer) => square(byLayer.get(layer), 1)))));
  const every = Math.ceil(columns / 12);
  refill(byId("heat"), make("table", { class: "heat" },
    make("colgroup", {}, make("col", { class: "name" }), make("col", { span: columns })),
    make("thead", { hidden: !layers.length }, make("tr", {}, make("th", { scope: "col" }, "layer"),
      ...layers.map((layer, i) => make("th", { scope: "col" }, i % every ? "" : String(layer))))),
    make("tbody", {}, ...rows)));
  say("heat-legend", `Faint means ${percent(low)} changed, strong ${percent(high)}, on a logarithmic scale; `
    + "a dashed frame means unchanged.");
}
