// Puts the page together: a model that the stream fills, and panels that show it.

import { Anatomy } from "./anatomy.js";
import { Chain } from "./chain.js";
import { grow, setClock } from "./dom.js";
import { Events } from "./events.js";
import { Model } from "./model.js";
import { Replicas } from "./replicas.js";
import { Reward } from "./reward.js";
import { listen } from "./stream.js";
import { Summary } from "./summary.js";
import { Versions } from "./versions.js";

const model = new Model();
const summary = new Summary(model);
const anatomy = new Anatomy(model, (version) => versions.setChosen(version));
const versions = new Versions(model, (version) => anatomy.choose(version));
const chain = new Chain(model);
const replicas = new Replicas(model);
const events = new Events(model);
const reward = new Reward(model);
anatomy.hopsTo = (version) => chain.page?.hops.filter((hop) => hop.version === version);

const shows = {
  state: [summary, replicas, chain],
  versions: [summary, versions, anatomy],
  steps: [reward],
  notes: [events],
};
const dirty = new Set();

// Many messages may come between two frames; each panel is drawn once.
function touch(...kinds) {
  if (!dirty.size) requestAnimationFrame(draw);
  for (const kind of kinds) for (const panel of shows[kind]) dirty.add(panel);
}

function draw() {
  const panels = [...dirty];
  dirty.clear();
  for (const panel of panels) panel.render();
}

listen({
  connected: (isConnected) => summary.connected(isConnected),
  reset() {
    model.clear();
    touch("versions", "steps", "notes");
  },
  state(state) {
    const before = model.state;
    model.state = state;
    touch("state");
    // Also when the store is back: what waited for it goes on.
    if (JSON.stringify(before?.counts) !== JSON.stringify(state.counts) || before?.store.ok !== state.store.ok) {
      touch("versions");
    }
  },
  records({ records }) {
    const changed = model.add(records);
    if (changed.size) touch(...changed);
  },
  tick({ now, late }) {
    setClock(now);
    grow();
    summary.late(late);
  },
});
