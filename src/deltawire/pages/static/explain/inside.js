// Inside a packet of scene 2: one step's changes in a field of weights, and how `context` writes them down.

import { exponentOf } from "explain/bf16";
import { recordedStep } from "explain/data";
import { choice, countText, h, percentText, powerText, scientific, slider, trim } from "explain/dom";
import { colours, darkMode, paint } from "explain/field";

const CLASSES = 16;
const ALL = -1;
const MOST_CODES = 10;

/** A number's Rice code: so many zeros and a one, then the low bits. */
export function riceCode(gap, parameter) {
  const low = gap & ((1 << parameter) - 1);
  return `${"0".repeat(gap >> parameter)}1${parameter ? low.toString(2).padStart(parameter, "0") : ""}`;
}

/** The class of a weight, as docs/format.md says. */
export const classOf = (bits, first) => Math.min(Math.max(exponentOf(bits) - first, 0), CLASSES - 1);

/** Distances between changes, counted over the weights of one class (or of all). */
export function gapsIn(old, now, first, wanted) {
  const gaps = [];
  let gap = 0;
  for (let i = 0; i < old.length; i++) {
    if (wanted !== ALL && classOf(old[i], first) !== wanted) continue;
    if (old[i] === now[i]) gap++;
    else {
      gaps.push(gap);
      gap = 0;
    }
  }
  return gaps;
}

export function inside(section, { recordings, tensors, columns }) {
  const box = section.querySelector("[data-inside]");
  const canvas = box.querySelector("canvas");
  const state = { recording: Object.keys(recordings)[0], step: 1, tensor: 0, group: ALL, size: 0 };
  let drawn = false;
  const classText = (group) => (group === ALL ? "all weights" : `|w| from ${powerText(rows()[group].exponent)}`);
  const measured = () => recordings[state.recording].classes[state.tensor];
  const rows = () => measured().rows;

  function show() {
    if (!state.size) return;
    drawn = true;
    const about = measured();
    const { old, now } = recordedStep(recordings[state.recording], tensors[state.tensor], state.step);
    const c = colours();
    // Small weights bluer: their ticks lie closer, so they change more often.
    const tones = Array.from(
      { length: CLASSES },
      (_, group) => `color-mix(in srgb, ${c.accent} ${Math.round(70 * (1 - group / (CLASSES - 1)) + 6)}%, ${c.ground})`,
    );
    let changed = 0;
    let members = 0;
    paint(canvas, columns, state.size, (i) => {
      const group = classOf(old[i], about.first);
      if (state.group !== ALL && group !== state.group) return null;
      members++;
      if (old[i] !== now[i]) {
        changed++;
        return c.bad;
      }
      return tones[group];
    });
    canvas.setAttribute(
      "aria-label",
      `${countText(members)} weights of ${tensors[state.tensor]} ` +
        `(${classText(state.group)}) before step ${state.step}; ${countText(changed)} of them changed.`,
    );
    Object.assign(box.dataset, { members, changed, group: state.group });
    box.querySelector("[data-shown]").textContent =
      `Step ${state.step}: ${countText(changed)} of ${countText(members)} shown weights changed ` +
      `(${percentText(members ? changed / members : 0)}).`;
    codes(old, now, about);
    classes(about);
    bars(about);
  }

  function codes(old, now, about) {
    const parameter = state.group === ALL ? about.gap.parameter : rows()[state.group].parameter;
    const gaps = gapsIn(old, now, about.first, state.group);
    const inverted = state.group !== ALL && rows()[state.group].changed > rows()[state.group].weights / 2;
    const words = inverted
      ? ["More than half of this class changed, so the stream lists those that did not, which costs even less."]
      : !gaps.length
        ? ["None of these changed in this step."]
        : [
            "Unchanged weights between changes, ",
            ...(state.group === ALL
              ? ["over all weights, as ", h("code", null, "gap"), " counts them"]
              : ["within this class"]),
            `. Below each is its Rice code, with parameter ${parameter}:`,
          ];
    box
      .querySelector("[data-codes]")
      .replaceChildren(
        h("p", null, words),
        h(
          "ol",
          { class: "codes" },
          inverted
            ? []
            : gaps
                .slice(0, MOST_CODES)
                .map((gap) =>
                  h("li", null, h("span", { class: "number" }, gap), h("code", null, riceCode(gap, parameter))),
                ),
        ),
      );
    box.dataset.gaps = gaps.join(" ");
  }

  function classes(about) {
    const most = Math.max(...about.rows.map((row) => row.changed / row.weights));
    const body = about.rows.map((row, group) => {
      const share = row.weights ? row.changed / row.weights : 0;
      const bar = h("span", { class: "bar" });
      bar.style.width = `${(100 * share) / most}%`;
      return h(
        "tr",
        { class: group === state.group ? "chosen" : "", onclick: () => pick(group) },
        h("th", { scope: "row" }, powerText(row.exponent)),
        h("td", null, countText(row.weights)),
        h("td", null, countText(row.changed)),
        h("td", { class: "share" }, h("span", null, percentText(share)), bar),
        h("td", null, row.changed ? trim(row.bits / row.changed, 2) : "–"),
      );
    });
    box.querySelector("[data-classes]").replaceChildren(
      h(
        "caption",
        null,
        `The real stream of ${about.tensor}, first step, ${countText(about.weights)} weights; bits: to say where a change is`,
      ),
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          ["|w| from", "Weights", "Changed", "Share", "Bits"].map((text) => h("th", { scope: "col" }, text)),
        ),
      ),
      h("tbody", null, body),
    );
  }

  function bars(about) {
    const per = (bits) => bits / about.changed;
    const list = [
      ["int32 + bf16", { positions: 32 * about.changed, signs: 0, rest: 16 * about.changed, bytes: 6 * about.changed }],
      ["gap", about.gap],
      ["context", about.context],
    ];
    box.querySelector("[data-bars]").replaceChildren(
      ...list.map(([name, part]) => {
        const pieces = [
          ["positions", "where"],
          ["signs", "up or down"],
          ["rest", name === "int32 + bf16" ? "new value" : "longer steps, headers"],
        ]
          .filter(([key]) => part[key])
          .map(([key, text]) => {
            const piece = h("span", { class: `piece ${key}`, title: `${text}: ${trim(per(part[key]))} bits` });
            piece.style.width = `${(100 * per(part[key])) / 48}%`;
            return piece;
          });
        return h(
          "div",
          { class: "bar-row", "data-encoding": name, "data-bytes": part.bytes / about.changed },
          h("span", { class: "bar-name" }, name),
          h("span", { class: "bar-track" }, pieces),
          h("span", { class: "number" }, `${trim(part.bytes / about.changed)} B`),
          h(
            "span",
            { class: "soft bar-parts" },
            `${trim(per(part.positions))} bits where` +
              `${part.signs ? `, ${trim(per(part.signs))} up or down` : ""}, ` +
              `${trim(per(part.rest))} ${part.signs ? "for the rest" : "new value"}`,
          ),
        );
      }),
    );
    const { sizes, lr } = recordings[state.recording];
    const row = sizes[state.step - 1];
    box.querySelector("[data-sizes]").textContent =
      `Step ${state.step} at lr ${scientific(lr)}, all tensors of the recording: ` +
      ["coo", "gap", "context"]
        .map((name) => `${name === "coo" ? "int32 + bf16" : name} ${trim(row[name] / row.changed)}`)
        .join(", ") +
      ` bytes per change (${countText(row.changed)} of ${countText(row.weights)} weights).`;
  }

  function pick(wanted) {
    state.group = wanted;
    group.set(wanted);
    show();
  }

  const group = slider("Class", [ALL, ...Array.from({ length: CLASSES }, (_, i) => i)], ALL, classText, (value) => {
    state.group = value;
    show();
  });
  group.dataset.input = "class";
  box.querySelector("[data-inside-controls]").append(
    choice(
      "Tensor",
      tensors.map((name, i) => [String(i), name]),
      "0",
      (value) => {
        state.tensor = Number(value);
        group.set(state.group);
        show();
      },
    ),
    group,
  );
  darkMode.addEventListener("change", show);
  return {
    /** Most frames of an animation change nothing here. */
    show(recording, step) {
      if (drawn && state.recording === recording && state.step === step) return;
      Object.assign(state, { recording, step });
      show();
    },
    resize(width) {
      state.size = Math.min(width, 448);
      drawn = false;
    },
  };
}
