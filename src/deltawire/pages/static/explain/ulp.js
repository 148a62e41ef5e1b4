// Figure 2: a small step of the fp32 master, cast to bf16, lands on the tick where it was. Mostly.

import { meanChange, numbers, recordedStep } from "explain/data";
import { choice, countText, h, newId, onWidth, percentText, scientific, slider, table, trim } from "explain/dom";
import { cellAt, colours, darkMode, paint } from "explain/field";
import { numberLine, valueText } from "explain/numberline";
import { Player } from "explain/player";
import { countDifferent, masters, run, signOf } from "explain/update";

const STEPS = 20;
const RATES = [-8, -7, -6, -5, -4].flatMap((power) =>
  [1, 2, 3, 4, 5, 6, 7, 8, 9].map((digit) => Number(`${digit}e${power}`)),
);
RATES.push(1e-3);
/** A weight whose magnitude is at a part of the sorted ones. */
function weightAt(bits, part) {
  const order = [...bits.keys()].sort((a, b) => (bits[a] & 0x7fff) - (bits[b] & 0x7fff));
  return order[Math.floor(part * (order.length - 1))];
}

export function ulp(section, { recordings, tensors, columns }) {
  const names = Object.keys(recordings);
  const source = recordings[names.at(-1)];
  const starts = tensors.map((name) => numbers(source.field.base[name]));
  const state = { lr: 3e-6, tensor: 0, weight: weightAt(starts[0], 0.06), shows: "rule", size: 0 };
  const lineBox = section.querySelector("[data-line]");
  const canvas = section.querySelector("canvas");
  const facts = section.querySelector("[data-facts]");
  let width = 0;

  const firstOf = (tensor) => tensor * columns * columns;

  /** All tensors after some steps: changed in the last one, since the start, of how many. */
  function counts(steps) {
    const all = starts.map((start, i) => run(start, state.lr, steps, firstOf(i)));
    return {
      all,
      last: all.reduce((sum, { before, now }) => sum + countDifferent(before, now), 0),
      since: all.reduce((sum, { start, now }) => sum + countDifferent(start, now), 0),
      weights: starts.length * columns * columns,
    };
  }

  function drawLine(step) {
    const bits = starts[state.tensor][state.weight];
    const sign = signOf(firstOf(state.tensor) + state.weight);
    const path = masters(bits, sign, state.lr, step);
    const { picture, start, unit, cast } = numberLine(bits, path, width);
    lineBox.replaceChildren(picture);
    facts.replaceChildren(
      fact("bf16 weight", start),
      fact("distance of ticks (1 ULP)", valueText(unit)),
      fact("one step", `${trim(Math.fround(state.lr) / unit)} ULP`),
      fact(
        step ? `after ${step} step${step === 1 ? "" : "s"}` : "before the first step",
        step === 0 ? "on its tick" : cast === bits ? "snaps back" : "a new tick",
      ),
    );
    Object.assign(section.dataset, { cast, start: bits });
  }

  const fact = (name, value) => h("div", null, h("dt", null, name), h("dd", { class: "number" }, value));

  function drawField(step, result) {
    const c = colours();
    let changed, earlier;
    if (state.shows === "rule") {
      const { before, now, start } = result.all[state.tensor];
      changed = (i) => before[i] !== now[i];
      earlier = (i) => start[i] !== now[i];
    } else {
      const number = Math.min(Math.max(step, 1), 8);
      const { old, now } = recordedStep(recordings[state.shows], tensors[state.tensor], number);
      changed = (i) => old[i] !== now[i];
      earlier = () => false;
    }
    const faded = `color-mix(in srgb, ${c.accent} 45%, ${c.ground})`;
    let lit = 0;
    paint(
      canvas,
      columns,
      state.size,
      (i) => {
        if (changed(i)) {
          lit++;
          return c.bad;
        }
        return earlier(i) ? faded : c.line;
      },
      state.weight,
    );
    canvas.setAttribute(
      "aria-label",
      `${countText(columns * columns)} weights of ${tensors[state.tensor]}; ` +
        `${countText(lit)} are lit: their bf16 bits changed in this step.`,
    );
    section.dataset.lit = lit;
  }

  function draw(position, playing) {
    const step = Math.round(position * STEPS);
    if (!width || (playing && step === Number(section.dataset.step))) return;
    const result = counts(step);
    drawLine(step);
    drawField(step, result);
    const snapped = result.weights - result.last;
    Object.assign(section.dataset, {
      step,
      lr: state.lr,
      changed: result.last,
      since: result.since,
      weights: result.weights,
    });
    section.querySelector("[data-share]").textContent = step ? percentText(snapped / result.weights) : "–";
    section.querySelector("[data-status]").textContent =
      step === 0
        ? "Before the first step: every master lies on its tick."
        : `Step ${step} at learning rate ${scientific(state.lr)}: ` +
          `${countText(snapped)} of ${countText(result.weights)} weights ` +
          `snap back, ${countText(result.last)} change (${percentText(result.last / result.weights)}); ` +
          `${countText(result.since)} have left their first tick.`;
    section
      .querySelector("[data-numbers]")
      .replaceChildren(
        table(
          "Share of weights whose bf16 bits change in a step",
          ["", "Weights", "Changed in a step"],
          [
            [
              `Computed: step ${step}, lr ${scientific(state.lr)}`,
              countText(result.weights),
              percentText(result.last / result.weights),
            ],
            ...names.map((name) => [
              `Recorded: lr ${scientific(recordings[name].lr)}, mean of 8 steps`,
              countText(recordings[name].sizes[0].weights),
              percentText(meanChange(recordings[name])),
            ]),
          ],
        ),
      );
  }

  const again = () => player.show();
  const pickId = newId();
  const pick = h("input", {
    id: pickId,
    type: "number",
    min: 0,
    max: columns * columns - 1,
    value: state.weight,
    oninput: () => {
      choose(Math.min(Math.max(Math.floor(Number(pick.value)) || 0, 0), columns * columns - 1), false);
    },
  });
  function choose(weight, tell = true) {
    state.weight = weight;
    if (tell) pick.value = weight;
    again();
  }
  canvas.addEventListener("click", (event) => choose(cellAt(canvas, columns, event)));
  const rate = slider("Learning rate", RATES, state.lr, scientific, (lr) => {
    state.lr = lr;
    if (player.position === 0) player.position = 1 / STEPS;
    again();
  });
  rate.dataset.input = "lr";
  section.querySelector("[data-controls]").append(rate);
  section.querySelector("[data-more]").append(
    choice(
      "Tensor",
      tensors.map((name, i) => [String(i), name]),
      "0",
      (value) => {
        state.tensor = Number(value);
        again();
      },
    ),
    choice(
      "Cells are lit by",
      [
        ["rule", "the rule, at your learning rate"],
        ...names.map((name) => [name, `recorded steps at lr ${scientific(recordings[name].lr)}`]),
      ],
      "rule",
      (value) => {
        state.shows = value;
        again();
      },
    ),
    h(
      "div",
      { class: "control" },
      h("label", { for: pickId }, "Weight on the line"),
      pick,
      h(
        "span",
        { class: "buttons" },
        Object.entries({ small: 0.02, typical: 0.5, large: 0.98 }).map(([text, part]) =>
          h("button", { type: "button", onclick: () => choose(weightAt(starts[state.tensor], part)) }, text),
        ),
      ),
    ),
  );
  section
    .querySelector("[data-recorded]")
    .append(
      ...names.flatMap((name, i) => [
        i ? " and " : "",
        h(
          "span",
          { class: "nowrap" },
          `${percentText(meanChange(recordings[name]))} at lr ${scientific(recordings[name].lr)}`,
        ),
      ]),
    );
  const player = new Player(section, {
    seconds: 8,
    start: 1 / STEPS,
    draw,
    stops: () => Array.from({ length: STEPS + 1 }, (_, i) => i / STEPS),
  });
  darkMode.addEventListener("change", again);
  onWidth(lineBox, (now) => {
    width = now;
    state.size = Math.min(now, 512);
    player.show();
  });
  player.show();
}
