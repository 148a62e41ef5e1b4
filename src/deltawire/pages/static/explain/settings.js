// The reader's numbers. Scenes share them; those that differ from the first ones are kept in the page's address, as
// #scene?name=value, so that a link shows the same.

import { choice, h, percentText, scientific, secondsText, slider, tick, trim, weightsText } from "explain/dom";

const gbitsText = (value) => (value < 1 ? `${trim(value * 1000)} Mbit/s` : `${trim(value)} Gbit/s`);
const RATES = [-8, -7, -6, -5, -4].flatMap((power) =>
  [1, 2, 3, 4, 5, 6, 7, 8, 9].map((digit) => Number(`${digit}e${power}`)),
);

/** What can be set, by name: a label, the values, and how a value reads. The first numbers are those of the story. */
function known({ recordings, tensors, measured }) {
  const [run, faster] = measured.runs;
  const densities = [0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.0115, 0.02, 0.028, 0.05, 0.08, 0.1];
  densities.push(run.density, faster.density);
  const names = Object.keys(recordings);
  return {
    sliders: {
      weights: [
        "Model size",
        [128e6, 300e6, 596.05e6, 1e9, 1.7e9, 4e9, 8.19e9, 14e9, 32e9, 70e9, 235e9, 405e9],
        8.19e9,
        weightsText,
      ],
      density: ["Changed in a step", densities.sort((a, b) => a - b), run.density, percentText],
      gbits: ["Bandwidth", [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400], 10, gbitsText],
      replicas: ["Replicas", [1, 2, 4, 8, 16, 32, 64], 8, String],
      stepSeconds: ["Training step", [1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600], 60, secondsText],
      lr: ["Learning rate", [...RATES, 1e-3], 1e-6, scientific],
      joins: ["B joins at version", [1, 2, 3, 4, 5, 6, 7, 8], 6, String],
    },
    choices: {
      machine: [
        "Machines",
        [
          ["h200", "an H200 each"],
          ["cpu", "two CPU cores each"],
        ],
      ],
      full: [
        "Compare with",
        [
          ["broadcast", "a broadcast of all weights"],
          ["checkpoint", "a checkpoint in the bucket"],
        ],
      ],
      recording: ["Recording", names.map((name) => [name, `learning rate ${scientific(recordings[name].lr)}`])],
      tensor: ["Tensor", tensors.map((name, i) => [String(i), name])],
      size: [
        "Weight",
        [
          ["typical", "a typical one"],
          ["small", "a small one"],
          ["large", "a large one"],
        ],
      ],
    },
    ticks: {
      skips: ["skip deltas", true],
      anchors: ["a second anchor at version 5", false],
    },
  };
}

export class Settings {
  constructor(data) {
    Object.assign(this, known(data), { listeners: [], links: [] });
    this.first = Object.fromEntries([
      ...Object.entries(this.sliders).map(([name, each]) => [name, each[2]]),
      ...Object.entries(this.choices).map(([name, each]) => [name, each[1][0][0]]),
      ...Object.entries(this.ticks).map(([name, each]) => [name, each[1]]),
    ]);
    this.values = { ...this.first };
    this.presets = [
      ["8 B, 10 Gbit/s", {}],
      ["0.6 B, 1 Gbit/s", { weights: 596.05e6, gbits: 1, stepSeconds: 10 }],
      [
        "128 M on two cores, 100 Mbit/s",
        { weights: 128e6, density: 0.0115, gbits: 0.1, machine: "cpu", stepSeconds: 10 },
      ],
      ["8 B, 400 Gbit/s", { gbits: 400 }],
    ];
    this.read();
    addEventListener("hashchange", () => {
      this.read();
      this.tell();
    });
  }

  /** Take what the address says; a value that nobody could have chosen is left out. */
  read() {
    const [, query] = decodeURIComponent(location.hash).split("?");
    const given = Object.fromEntries(new URLSearchParams(query ?? ""));
    this.values = { ...this.first };
    for (const [name, text] of Object.entries(given)) {
      const allowed = Object.hasOwn(this.sliders, name)
        ? this.sliders[name][1]
        : Object.hasOwn(this.choices, name)
          ? this.choices[name][1].map(([value]) => value)
          : Object.hasOwn(this.ticks, name)
            ? [true, false]
            : [];
      const value = allowed.find((each) => String(each) === text);
      if (value !== undefined) this.values[name] = value;
    }
  }

  /** The address of a scene with these numbers. */
  address(scene) {
    const changed = Object.entries(this.values).filter(([name, value]) => value !== this.first[name]);
    return changed.length ? `#${scene}?${new URLSearchParams(changed)}` : `#${scene}`;
  }

  set(values, scene) {
    Object.assign(this.values, values);
    if (scene) history.replaceState(null, "", this.address(scene));
    this.tell();
  }

  tell() {
    for (const listener of this.listeners) listener(this.values);
  }

  control(name, scene) {
    const change = (value) => this.set({ [name]: value }, scene);
    if (this.ticks[name]) {
      const control = tick(this.ticks[name][0], this.values[name], change);
      this.listeners.push((values) => {
        control.querySelector("input").checked = values[name];
      });
      return control;
    }
    const isSlider = Boolean(this.sliders[name]);
    const [label, options, , text] = this.sliders[name] ?? this.choices[name];
    const control = isSlider
      ? slider(label, options, this.values[name], text, change)
      : choice(label, options, this.values[name], change);
    control.dataset.input = name;
    this.listeners.push((values) => {
      if (isSlider) control.set(values[name]);
      else control.querySelector("select").value = values[name];
    });
    return control;
  }

  /** What "Your numbers" of a scene holds: ready-made sets where they make sense, controls, and a link. */
  panel(section, names) {
    const scene = section.id;
    const link = h("a", { class: "link" }, "Link to these numbers");
    const show = () => link.setAttribute("href", this.address(scene));
    this.listeners.push(show);
    show();
    const reset = h("button", { type: "button", onclick: () => this.set(this.first, scene) }, "Reset");
    const presets = this.presets.map(([text, values]) =>
      h("button", { type: "button", onclick: () => this.set({ ...this.first, ...values }, scene) }, text),
    );
    section.querySelector("[data-controls]").append(
      names.includes("gbits")
        ? h("div", { class: "presets", role: "group", "aria-label": "Presets" }, presets)
        : "",
      h(
        "div",
        { class: "controls" },
        names.map((name) => this.control(name, scene)),
      ),
      h("p", { class: "row" }, reset, link),
    );
  }
}
