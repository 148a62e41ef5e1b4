// Scene 1: one weight from close by, then the field that it is in.

import { bitsOfFloat, toBf16 } from "explain/bf16";
import { numbers, recordedStep } from "explain/data";
import { countText, h, onWidth, percentText, picture, s, scientific, table, trim } from "explain/dom";
import { cellAt, colours, darkMode, paint } from "explain/field";
import { numberLine, valueText } from "explain/numberline";
import { Player } from "explain/player";
import { firstChange, masters } from "explain/update";

const CLOSE_UP = 0.55;
const STEPS = 8;
// A weight that has not moved by then is shown as it is.
const MOST = 400;
const PARTS = { typical: 0.5, small: 0.06, large: 0.98 };

/** A weight whose magnitude is at a part of the sorted ones. */
function weightAt(bits, part) {
  const order = [...bits.keys()].sort((a, b) => (bits[a] & 0x7fff) - (bits[b] & 0x7fff));
  return order[Math.floor(part * (order.length - 1))];
}

/** The 32 bits of a master above the 16 of its weight, each a cell; those that differ from the start are lit. */
function bitCells(start, master, width) {
  const narrow = width < 560;
  const cell = Math.min(narrow ? Math.floor(width / 16.6) : Math.floor((width - 24) / 33), 30);
  const [now, before] = [bitsOfFloat(master), bitsOfFloat(start)];
  const [cast, old] = [toBf16(master), toBf16(start)];
  // Sign, exponent and fraction stand apart.
  const cells = (value, other, x, y, kind, groups = [1, 9]) =>
    Array.from({ length: 16 }, (_, i) => {
      const bit = (word) => (word >>> (15 - i)) & 1;
      const lit = bit(value) !== bit(other);
      const left = x + i * cell + (groups.filter((end) => end <= i).length * cell) / 4;
      return s(
        "g",
        { class: `${kind}${lit ? " lit" : ""}` },
        s("rect", { x: left + 0.5, y: y + 0.5, width: cell - 2, height: cell - 2, rx: 2 }),
        cell > 15 ? s("text", { x: left + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle" }, bit(value)) : null,
      );
    });
  const wide = 16.5 * cell;
  const low = narrow ? { x: 0, y: cell + 50 } : { x: wide + 16, y: 20 };
  const top = low.y + cell + 32;
  const height = top + cell + 2;
  const changed = cast !== old;
  return picture(
    width,
    height,
    `The bits of the fp32 master and of the bf16 weight, which ${changed ? "has changed" : "is unchanged"}.`,
    s("text", { class: "axis", x: 0, y: 12 }, `fp32, in the trainer: ${narrow ? "" : "sign, exponent, fraction; "}kept by bf16`),
    cells(now >>> 16, before >>> 16, 0, 20, "bit"),
    s("text", { class: "axis", x: low.x, y: low.y - 8 }, "rounded away"),
    cells(now & 0xffff, before & 0xffff, low.x, low.y, "bit low", []),
    s("text", { class: "axis", x: 0, y: top - 8 }, "bf16, in the engines"),
    cells(cast, old, 0, top, "bit served"),
    narrow
      ? null
      : s(
          "text",
          { class: `verdict${changed ? " moved" : ""}`, x: wide + 16, y: top + cell / 2 + 5 },
          changed ? "one tick further: this must be sent" : "the same bits: nothing to send",
        ),
  );
}

export function weight(section, { recordings, tensors, columns, measured }, settings) {
  const boxes = Object.fromEntries(
    ["bits", "line", "facts", "share", "status", "numbers"].map((n) => [n, section.querySelector(`[data-${n}]`)]),
  );
  const canvas = section.querySelector("canvas");
  const state = { width: 0, size: 0, picked: null };

  const base = () => numbers(recordings[settings.values.recording].field.base[tensors[settings.values.tensor]]);
  const chosen = (bits) => state.picked ?? weightAt(bits, PARTS[settings.values.size]);
  const runOf = (lr) => measured.runs.find((run) => run.lr === lr);
  const fact = (name, value) => h("div", null, h("dt", null, name), h("dd", { class: "number" }, value));

  function draw(position) {
    if (!state.width) return;
    const { lr, recording, tensor } = settings.values;
    const starts = base();
    const picked = chosen(starts);
    const bits = starts[picked];
    const flips = firstChange(bits, lr, MOST);
    const last = flips ?? MOST;
    const inField = position > CLOSE_UP + 1e-6;
    const step = Math.round(Math.min(position / CLOSE_UP, 1) * last);
    const path = masters(bits, lr, step);
    const { picture: line, start, unit, cast } = numberLine(bits, path, boxes.line.clientWidth);
    boxes.bits.replaceChildren(bitCells(path[0], path.at(-1), state.width));
    boxes.line.replaceChildren(line);
    const share = Math.fround(lr) / unit; // of the way to the next bf16 number
    boxes.facts.replaceChildren(
      fact("weight", start),
      fact("to the next bf16 number", valueText(unit)),
      fact(
        `largest step at lr ${scientific(lr)}`,
        share < 1 ? `1/${trim(1 / share)} of that` : `${trim(share)} times that`,
      ),
      fact(`after ${countText(step)} step${step === 1 ? "" : "s"}`, cast === bits ? "same bits" : "different bits"),
    );

    const c = colours();
    const number = inField ? Math.min(STEPS, 1 + Math.floor(((position - CLOSE_UP) / (1 - CLOSE_UP)) * STEPS)) : 0;
    let lit = 0;
    if (number) {
      const { old, now } = recordedStep(recordings[recording], tensors[tensor], number);
      paint(canvas, columns, state.size, (i) => (old[i] === now[i] ? c.line : (lit++, c.bad)), picked);
    } else paint(canvas, columns, state.size, () => c.line, picked);
    const shown = columns * columns;
    const run = runOf(recordings[recording].lr);
    const words = number
      ? `Recorded step ${number} of ${STEPS} at learning rate ${scientific(run.lr)}: ${countText(lit)} of these ` +
        `${countText(shown)} weights changed.`
      : `Step ${countText(step)} at learning rate ${scientific(lr)}: the trainer’s weight moved ${trim(step * share)} of the way to ` +
        "the next bf16 number, and engines " +
        (cast === bits ? "get the same bits." : "get a different weight.");
    const alone = flips ? ` The framed weight would need ${countText(flips)} steps in one direction to change.` : "";
    boxes.status.textContent = position < 1 ? words : words + alone;
    const all = `${countText(shown)} weights of ${tensors[tensor]}; one is framed.`;
    canvas.setAttribute("aria-label", number ? words : all);
    boxes.share.textContent = percentText(run.density);
    section.querySelector("[data-lr]").textContent = scientific(run.lr);
    Object.assign(section.dataset, { step, flips: flips ?? "", lit, recorded: number, cast, start: bits });
    boxes.numbers.replaceChildren(
      table(
        "Weights whose bf16 bits change in a step",
        ["", "Changed", "Bytes per change", "Delta, of all weights"],
        measured.runs.map((each) => [
          `A whole run at lr ${scientific(each.lr)}, median from step 10`,
          percentText(each.density),
          trim(each.bytes_per_change),
          `1/${Math.round(1 / each.ratio)}`,
        ]),
      ),
    );
  }

  canvas.addEventListener("click", (event) => {
    state.picked = cellAt(canvas, columns, event);
    player.go(CLOSE_UP);
  });
  const player = new Player(section, {
    seconds: 13,
    draw,
    stops: () => [
      ...[0, 0.1, 0.25, 0.5, 0.75, 1].map((part) => part * CLOSE_UP),
      ...Array.from({ length: STEPS - 1 }, (_, i) => CLOSE_UP + ((i + 0.5) / STEPS) * (1 - CLOSE_UP)),
      1,
    ],
  });
  settings.panel(section, ["lr", "size", "recording", "tensor"]);
  let size = settings.values.size;
  settings.listeners.push((values) => {
    if (values.size !== size || values.tensor !== state.tensor) state.picked = null;
    ({ size, tensor: state.tensor } = values);
    player.show();
  });
  state.tensor = settings.values.tensor;
  darkMode.addEventListener("change", () => player.show());
  player.once(boxes.bits);
  onWidth(boxes.bits, (now) => {
    state.width = now;
    state.size = Math.min(now, 336);
    player.show();
  });
  onWidth(boxes.line, () => player.show());
}
