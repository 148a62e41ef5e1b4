// Brings the scenes to life, one after the other.

import { bucket } from "explain/bucket";
import { load } from "explain/data";
import { packets } from "explain/packets";
import { Settings } from "explain/settings";
import { tokens } from "explain/tokens";
import { weight } from "explain/weight";

const data = await load();
const settings = new Settings(data);
for (const [id, scene] of Object.entries({ weight, packets, tokens, bucket }))
  scene(document.getElementById(id), data, settings);
// A browser knows no element by an address with settings in it.
const [id, query] = location.hash.slice(1).split("?");
if (query) document.getElementById(id)?.scrollIntoView();
document.body.dataset.ready = true;
