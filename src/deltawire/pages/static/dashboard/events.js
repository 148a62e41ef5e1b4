// What happened: faults, deaths, replicas that joined. The newest first.

import { byId, make, say, show } from "./dom.js";
import { clock, plural } from "./format.js";

const MOST = 200;

export class Events {
  constructor(model) {
    this.model = model;
  }

  render() {
    const notes = [...this.model.notes].sort((a, b) => b.time - a.time);
    const faults = notes.filter((note) => note.level === "fault" || note.level === "death").length;
    say("faults-count", faults ? plural(faults, "fault") : "");
    show("faults-empty", !notes.length);
    show("faults", notes.length > 0);
    byId("faults").replaceChildren(...notes.slice(0, MOST).map((note) => make("li", {},
      make("time", { datetime: new Date(1000 * note.time).toISOString() }, clock(note.time)),
      make("span", { class: note.level }, note.part === "demo" ? note.text : `${note.part}: ${note.text}`))));
  }
}
