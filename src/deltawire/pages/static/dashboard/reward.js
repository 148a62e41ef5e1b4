// The reward of each step that the event log tells of, and its mean over some steps.

import { Chart } from "./chart.js";
import { byId, say, show } from "./dom.js";
import { percent, plural } from "./format.js";

const WINDOW = 20;

export class Reward {
  constructor(model) {
    this.model = model;
    this.canvas = byId("reward-chart");
    this.chart = new Chart(this.canvas, { onPoint: (x) => this.point(x) });
  }

  render() {
    const steps = [...this.model.steps.values()].sort((a, b) => a.step - b.step);
    show("reward-panel", steps.length > 0);
    byId("chain-panel").classList.toggle("alone", !steps.length);
    if (!steps.length) return;
    this.steps = steps;
    this.means = [];
    let sum = 0;
    steps.forEach((step, i) => {
      sum += step.reward - (i >= WINDOW ? steps[i - WINDOW].reward : 0);
      this.means.push([step.step, sum / Math.min(i + 1, WINDOW)]);
    });
    say("reward-count", `${plural(steps.length, "step")}; dots are steps, the line is the mean of up to ${WINDOW}`);
    this.chart.set({
      series: [
        { points: steps.map((step) => [step.step, step.reward]), name: "--soft", dots: true },
        { points: this.means, name: "--accent" },
      ],
      format: (value) => value.toFixed(2),
      fromZero: false,
    });
    this.point(null);
    const first = this.means[Math.min(WINDOW, this.means.length) - 1][1];
    this.canvas.setAttribute("aria-label", `Reward by step: ${first.toFixed(2)} in the first ${Math.min(WINDOW, steps.length)} `
      + `steps, ${this.means.at(-1)[1].toFixed(2)} in the last`);
  }

  point(x) {
    const index = x === null ? this.steps.length - 1 : this.steps.reduce((best, step, i) =>
      Math.abs(step.step - x) < Math.abs(this.steps[best].step - x) ? i : best, 0);
    const step = this.steps[index];
    this.chart.point(x === null ? null : step.step);
    say("reward-readout", `step ${step.step}: ${step.reward.toFixed(3)}, mean ${this.means[index][1].toFixed(3)}`
      + (step.wins === null ? "" : `, won ${percent(step.wins)}`)
      + (step.staleness === null ? "" : `, staleness ${step.staleness.toFixed(1)} versions`));
  }
}
