// The replicas, the worst first, each with its engine and a sparkline of its lag.

import { sparkline } from "./chart.js";
import { ago, byId, make, refill, say, show } from "./dom.js";
import { milliseconds, plural } from "./format.js";

const LOOKS = { ok: "good", behind: "warn", updating: "warn", starting: "warn", silent: "bad", fault: "bad", dead: "bad" };

export class Replicas {
  constructor(model, charts) {
    this.model = model;
    this.charts = charts;
    this.before = null;
  }

  render() {
    const { state } = this.model;
    const rows = state.replicas;
    say("replicas-count", rows.length ? plural(rows.length, "replica") : "");
    show("replicas-scroll", rows.length > 0);
    show("replicas-empty", !rows.length);
    if (!rows.length) {
      byId("replicas-empty").replaceChildren("No replica has reported yet. Start one with ",
        make("code", {}, `deltawire watch ${state.url} --to mirror/`));
    }
    this.speak(rows);
    refill(byId("replicas-table").tBodies[0], ...rows.flatMap((row) => this.rows(row)));
    this.sparklines();
  }

  // The lag of each over the range of the charts.
  sparklines() {
    const { data } = this.charts;
    if (!data) return;
    const lags = new Map(data.charts.lag.filter((line) => line.run === 0).map((line) => [line.name, line.points]));
    for (const canvas of document.querySelectorAll("#replicas-table canvas")) {
      const { replica } = canvas.dataset, points = lags.get(replica);
      canvas.hidden = !points;
      if (!points) continue;
      sparkline(canvas, points, data.range, this.charts.colourOf(replica));
      const most = plural(Math.max(...points.map((point) => point[1])), "version");
      canvas.setAttribute("aria-label", `Lag of ${replica} over time, ${most} at most`);
    }
  }

  // For those who do not see the table: who has got worse, and who has come back.
  speak(rows) {
    const now = new Map(rows.map((row) => [row.name, LOOKS[row.health]]));
    const changes = rows.filter((row) => this.before?.has(row.name) && this.before.get(row.name) !== now.get(row.name)
      && (now.get(row.name) === "bad" || this.before.get(row.name) === "bad"));
    if (changes.length) say("spoken", changes.map((row) => `${row.name} is ${row.health}`).join(", "));
    this.before = now;
  }

  rows(row) {
    const detail = row.detail && row.health !== "stopped" ? row.detail : null;
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.borderColor = `var(${this.charts.colourOf(row.name)})`;
    const first = make("tr", { class: detail ? "has-detail" : "", "data-replica": row.name },
      make("th", { scope: "row" }, swatch, row.name),
      make("td", {}, make("span", { class: `pill ${LOOKS[row.health] ?? ""}`, "data-health": row.health }, row.health)),
      make("td", { class: "spare", title: row.address }, row.engine ?? "–"),
      make("td", {}, row.version === null ? "–" : String(row.version)),
      make("td", {}, row.lag === null ? "–" : String(row.lag)),
      make("td", { class: "spare" }, make("canvas", { class: "spark", role: "img", "data-replica": row.name,
        "aria-label": `Lag of ${row.name} over time` })),
      make("td", {}, milliseconds(row.pause_seconds)),
      make("td", { class: "spare" }, milliseconds(row.served_seconds)),
      make("td", {}, row.heard === null ? "–" : ago(row.heard)));
    return detail ? [first, make("tr", {}, make("td", { class: "detail", colspan: 9 }, detail))] : [first];
  }
}
