// What somebody should look at now. Nothing is shown where all is well.

import { byId, make, refill, show } from "./dom.js";

const MOST = 8;

export class Alerts {
  constructor(model) {
    this.model = model;
  }

  render() {
    const { alerts } = this.model.state;
    show("alerts", alerts.length > 0);
    const rest = alerts.length - MOST;
    refill(byId("alerts"), ...alerts.slice(0, MOST).map(({ level, name, text }) => make("li", { class: level, "data-alert": name },
      make("strong", {}, name), ` ${text}`)), ...(rest > 0 ? [make("li", { class: "bad" }, `and ${rest} more`)] : []));
  }
}
