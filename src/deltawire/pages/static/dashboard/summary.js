// The line at the top: which run, whether the store and the dashboard answer, and the figures of now.

import { ago, byId, make, refill, say, show } from "./dom.js";
import { count, milliseconds, ofFull, percent, plural, size } from "./format.js";

export class Summary {
  constructor(model) {
    this.model = model;
    this.isConnected = null;
    this.isLate = false;
  }

  // The store was asked, and says neither yes nor no.
  late(isLate) {
    if (isLate === this.isLate) return;
    this.isLate = isLate;
    this.render();
  }

  connected(isConnected) {
    this.isConnected = isConnected;
    pill("link-pill", isConnected ? "good" : "bad", isConnected ? "live" : "disconnected");
    this.banner();
  }

  render() {
    const { state } = this.model;
    if (!state) return;
    say("run", state.run ?? "no run yet");
    document.title = state.counts.latest === null ? "deltawire" : `${state.counts.latest} · ${state.run} · deltawire`;
    say("url", state.url);
    say("phase", state.log?.phase ?? "");
    if (!state.store.ok) pill("store-pill", "bad", "store unreachable");
    else if (this.isLate) pill("store-pill", "warn", "store is slow");
    else pill("store-pill", "good", "store reachable");
    byId("main").classList.toggle("bare", state.counts.latest === null);
    this.banner();
    this.figures();
  }

  banner() {
    const { state } = this.model;
    const banner = byId("banner");
    let kind = "bad", content = null;
    if (this.isConnected === false) {
      content = ["The dashboard does not respond. The data shown may be out of date; this page reconnects automatically."];
    } else if (state && !state.store.ok) {
      content = ["The store has not responded for ", ago(state.store.since), `: ${state.store.error}. `,
        "The data shown was read before that; the dashboard keeps retrying."];
    } else if (state && state.run === null) {
      kind = "info";
      content = ["There is no run here yet. This page waits for it. Start one with ",
        make("code", {}, `deltawire publish CHECKPOINT --to ${state.url}`)];
    } else if (state && state.counts.latest === null) {
      kind = "info";
      content = ["The run has no version yet. This page waits for the first one."];
    }
    const key = content && content.map((each) => each.textContent ?? each).join("").replace(/\d+ (s|min|h|d)\b/, "");
    if (key === this.shown) return;
    this.shown = key;
    banner.className = `banner ${kind}`;
    banner.replaceChildren(...(content ?? []));
    show("banner", content !== null);
  }

  figures() {
    const { state } = this.model;
    const { newest: last, newest_delta: delta, bytes } = state;
    const rows = state.replicas.filter((row) => row.health !== "stopped");
    const lags = rows.map((row) => row.lag).filter((lag) => lag !== null);
    const pauses = state.replicas.filter((row) => row.pause_seconds !== null);
    const worst = pauses.reduce((a, b) => (a && a.pause_seconds >= b.pause_seconds ? a : b), null);
    const trouble = ["dead", "fault", "silent"].filter((health) => state.summary[health]);
    const { latest } = state.counts;
    refill(byId("figures"),
      figure("Version", latest ?? "–", last && [last.step === null ? "" : `step ${last.step}, `, ago(last.created, " ago")]),
      figure("Last delta", size(delta?.bytes), delta && [`${ofFull(delta.ratio)} of ${size(delta.full_bytes)}`]),
      figure("Changed", percent(delta?.density), delta && [`of ${weights(delta.total)} weights`]),
      figure("Uploaded in total", last ? size(bytes.all_bytes) : "–", last && [`${size(bytes.delta_bytes)} of that in deltas`]),
      figure("Replicas", rows.length, [trouble.length ? trouble.map((each) => `${state.summary[each]} ${each}`).join(", ")
        : rows.length ? `${state.summary.ok} current` : state.summary.stopped ? `${state.summary.stopped} stopped` : "none seen"],
      trouble.length ? "bad" : ""),
      figure("Largest lag", lags.length ? plural(Math.max(...lags), "version") : "–", []),
      figure("Longest last pause", milliseconds(worst?.pause_seconds), worst && [worst.name]),
    );
  }
}

function weights(total) {
  return total >= 1e9 ? `${(total / 1e9).toPrecision(3)} G` : total >= 1e6 ? `${(total / 1e6).toPrecision(3)} M` : count(total);
}

function pill(id, kind, text) {
  byId(id).className = `pill ${kind}`;
  say(id, text);
}

function figure(name, main, more, kind = "") {
  return make("div", { class: kind }, make("dt", {}, name),
    make("dd", {}, make("div", { class: "main" }, String(main)), make("div", { class: "more" }, ...(more || []))));
}
