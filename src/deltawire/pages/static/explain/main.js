// Brings the figures to life, one after the other.

import { bucket } from "explain/bucket";
import { load } from "explain/data";
import { secondsText, weightsText } from "explain/dom";
import { Inputs } from "explain/inputs";
import { sync } from "explain/sync";
import { timeline } from "explain/timeline";
import { ulp } from "explain/ulp";

const data = await load();
const inputs = new Inputs();
const { demo } = data.measured;
document.querySelector("[data-demo]").textContent =
  `the two replicas of the demo (${weightsText(demo.weights)} weights on two ` +
  `CPU cores, ${demo.steps} steps of ${secondsText(demo.step_seconds)}) last paused for ` +
  `${demo.pauses.map(secondsText).join(" and ")}`;
const at = (id) => document.getElementById(id);
timeline(at("timeline"), data, inputs);
ulp(at("ulp"), data);
bucket(at("bucket"), data);
sync(at("sync"), data, inputs);
document.body.dataset.ready = true;
