// The reader's numbers. Figures 1 and 4 share them, so that a slider in one moves the other.

import { choice, h, percentText, secondsText, slider, trim, weightsText } from "explain/dom";

const gbitsText = (value) => (value < 1 ? `${trim(value * 1000)} Mbit/s` : `${trim(value)} Gbit/s`);

const SLIDERS = {
  weights: [
    "Model size",
    [0.128e9, 0.3e9, 0.596e9, 1e9, 1.7e9, 3e9, 4e9, 8.191e9, 14e9, 20e9, 32e9, 50e9, 70e9],
    weightsText,
  ],
  density: [
    "Weights changed per step",
    [0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.0115, 0.015, 0.02, 0.028, 0.04, 0.06, 0.08, 0.1],
    percentText,
  ],
  gbits: ["Bandwidth", [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400], gbitsText],
  replicas: ["Replicas", [1, 2, 4, 8, 16, 32, 64], String],
  stepSeconds: ["Training step", [1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600], secondsText],
};
const CHOICES = {
  machine: [
    "Machines",
    [
      ["h200", "one H200 each"],
      ["cpu", "two CPU cores each"],
    ],
  ],
  full: [
    "Compare with",
    [
      ["broadcast", "full broadcast"],
      ["checkpoint", "full checkpoint"],
    ],
  ],
};

export const PRESETS = [
  ["8 B weights, 10 Gbit/s", { weights: 8.191e9, density: 0.01, gbits: 10, machine: "h200", stepSeconds: 60 }],
  ["0.6 B weights, 1 Gbit/s", { weights: 0.596e9, density: 0.0115, gbits: 1, machine: "h200", stepSeconds: 10 }],
  [
    "As measured: 128 M weights on two cores, 100 Mbit/s",
    { weights: 0.128e9, density: 0.0115, gbits: 0.1, machine: "cpu", stepSeconds: 10 },
  ],
  [
    "A fast network: 8 B weights, 400 Gbit/s",
    { weights: 8.191e9, density: 0.01, gbits: 400, machine: "h200", stepSeconds: 60 },
  ],
];

export class Inputs {
  constructor() {
    this.values = { ...PRESETS[0][1], replicas: 8, full: "broadcast" };
    this.listeners = [];
  }

  set(values) {
    Object.assign(this.values, values);
    for (const listener of this.listeners) listener(this.values);
  }

  /** Controls for some of the numbers, with ready-made sets of them. */
  panel(names) {
    const controls = names.map((name) => {
      const [label, options, text] = SLIDERS[name] ?? CHOICES[name];
      const change = (value) => this.set({ [name]: value });
      const control = SLIDERS[name]
        ? slider(label, options, this.values[name], text, change)
        : choice(label, options, this.values[name], change);
      control.dataset.input = name;
      this.listeners.push((values) => {
        if (control.set) control.set(values[name]);
        else control.querySelector("select").value = values[name];
      });
      return control;
    });
    const presets = PRESETS.map(([text, values]) =>
      h("button", { type: "button", onclick: () => this.set(values) }, text),
    );
    return [
      h("div", { class: "presets", role: "group", "aria-label": "Ready-made numbers" }, presets),
      h("div", { class: "controls" }, controls),
    ];
  }
}
