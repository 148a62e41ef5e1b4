// The replicas, the worst first.

import { ago, byId, make, refill, say, show } from "./dom.js";
import { milliseconds, plural } from "./format.js";

const LOOKS = { ok: "good", behind: "warn", updating: "warn", starting: "warn", silent: "bad", fault: "bad", dead: "bad" };

export class Replicas {
  constructor(model) {
    this.model = model;
    this.before = null;
  }

  render() {
    const { state } = this.model;
    if (!state) return;
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
    const first = make("tr", { class: detail ? "has-detail" : "", "data-replica": row.name },
      make("th", { scope: "row" }, row.name),
      make("td", {}, make("span", { class: `pill ${LOOKS[row.health] ?? ""}`, "data-health": row.health }, row.health)),
      make("td", {}, row.version === null ? "–" : String(row.version)),
      make("td", {}, row.lag === null ? "–" : String(row.lag)),
      make("td", {}, milliseconds(row.pause_seconds)),
      make("td", {}, row.heard === null ? "–" : ago(row.heard)));
    return detail ? [first, make("tr", {}, make("td", { class: "detail", colspan: 6 }, detail))] : [first];
  }
}
