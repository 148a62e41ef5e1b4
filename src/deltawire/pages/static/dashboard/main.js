// Puts the page together: a model that the stream fills, and panels that show it.

import { Alerts } from "./alerts.js";
import { Anatomy } from "./anatomy.js";
import { Chain } from "./chain.js";
import { Charts } from "./charts.js";
import { grow, setClock } from "./dom.js";
import { Events } from "./events.js";
import { Model } from "./model.js";
import { Replicas } from "./replicas.js";
import { listen } from "./stream.js";
import { Summary } from "./summary.js";
import { Versions } from "./versions.js";

const model = new Model();
const summary = new Summary(model);
const alerts = new Alerts(model);
const anatomy = new Anatomy(model, (version) => versions.setChosen(version));
const versions = new Versions(model, (version) => anatomy.choose(version));
const chain = new Chain(model);
const charts = new Charts(model, () => replicas.sparklines());
const replicas = new Replicas(model, charts);
const events = new Events(model);
anatomy.hopsTo = (version) => chain.page?.hops.filter((hop) => hop.version === version);

const dirty = new Set();

// Many messages may come between two frames; each panel is drawn once.
function touch(...panels) {
  if (!dirty.size) requestAnimationFrame(draw);
  for (const panel of panels) dirty.add(panel);
}

function draw() {
  const panels = [...dirty];
  dirty.clear();
  for (const panel of panels) panel.render();
}

listen({
  connected: (isConnected) => summary.connected(isConnected),
  reset() {
    model.notes = [];
    touch(events);
  },
  state(state) {
    const before = model.state;
    model.state = state;
    touch(summary, alerts, replicas, chain);
    // Also when the store is back: what waited for it goes on.
    if (JSON.stringify(before?.counts) !== JSON.stringify(state.counts) || before?.store.ok !== state.store.ok) {
      touch(versions, anatomy);
    }
  },
  notes({ notes }) {
    model.add(notes);
    touch(events);
  },
  tick({ now, late, stamp }) {
    setClock(now);
    grow();
    summary.late(late);
    charts.news(stamp);
  },
});
