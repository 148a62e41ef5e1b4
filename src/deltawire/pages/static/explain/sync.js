// Figure 4: one update on its way, phase by phase, from the trainer to all replicas.

import { costs } from "explain/cost";
import { bytesText, h, onWidth, picture, s, secondsText, table } from "explain/dom";
import { Player } from "explain/player";

const WORDS = {
  diff: "The trainer compares its weights with what it published last. This is all it waits for.",
  encode: "In the background, the changes become a small file.",
  upload: "The file goes into the bucket, once, however many replicas there are.",
  commit: "A manifest is created, only if absent. From now on the version exists.",
  fetch: "Every replica fetches the file on its own, and goes on generating.",
  "verify and decode": "Hashes and the digest are checked against the old weights. Engines go on generating.",
  stage: "The changes are laid out next to the live weights. Engines go on generating.",
  "pause and write": "Engines stop, the changed weights are written, engines go on. This is the only red part.",
  resume: "All replicas serve the new version, bit for bit the trainer's.",
  pause: "All engines stop. They generate nothing until the weights are there.",
  broadcast: "All weights go to all replicas, changed or not.",
  reload: "Engines load all weights again.",
  "full upload": "All weights go into the bucket, changed or not, while engines wait.",
  "full fetch": "Every replica fetches all weights, while engines wait.",
};

export function sync(section, { measured }, inputs) {
  const stage = section.querySelector("[data-stage]");
  const list = section.querySelector("[data-phases]");
  const state = { way: "delta", replicas: 2 };
  let width = 0;
  let cost, phases;

  function compute() {
    cost = costs(measured, inputs.values);
    phases = [
      ...(state.way === "delta" ? cost.delta : cost.full),
      { name: "resume", where: "done", seconds: 0, formula: "in the pause above", source: "" },
    ];
  }

  const wordsOf = (phase) => (state.way === "full" && WORDS[`full ${phase.name}`]) || WORDS[phase.name];

  function diagram(active, part) {
    const narrow = width < 600;
    const boxWidth = narrow ? 78 : 130;
    const height = state.replicas > 2 ? 232 : 140;
    const middle = height / 2;
    const phase = phases[active];
    const straight = state.way === "full" && inputs.values.full === "broadcast";
    const bucketLeft = (width - boxWidth) / 2;
    const right = width - boxWidth - 1;
    const count = state.replicas;
    const each = Math.min(46, (height - 8) / count - 6);
    const ys = Array.from({ length: count }, (_, i) => middle + (i - (count - 1) / 2) * (each + 6));
    const stopped = phase.where === "pause";
    const done = phase.where === "done";
    const box = (x, y, w, hgt, kind, ...lines) =>
      s(
        "g",
        { class: `box ${kind}` },
        s("rect", { x, y: y - hgt / 2, width: w, height: hgt, rx: 6 }),
        lines
          .filter(Boolean)
          .map((text, i, all) =>
            s("text", { x: x + w / 2, y: y + 4 + (i - (all.length - 1) / 2) * 15, "text-anchor": "middle" }, text),
          ),
      );
    const path = (x1, y1, x2, y2, on) => s("line", { class: on ? "wire on" : "wire", x1, y1, x2, y2 });
    const at = (from, to) => from + (to - from) * part;
    const ups = phase.name === "upload" || phase.name === "commit";
    const downs = phase.name === "fetch";
    const packet = (x1, y1, x2, y2) =>
      s("circle", {
        class: state.way === "full" ? "packet full" : "packet",
        cx: at(x1, x2),
        cy: at(y1, y2),
        r: state.way === "full" ? 9 : 5,
      });
    const wires = straight
      ? ys.flatMap((y) => [
          path(boxWidth, middle, right, y, phase.name === "broadcast"),
          phase.name === "broadcast" ? packet(boxWidth, middle, right, y) : null,
        ])
      : [
          path(boxWidth, middle, bucketLeft, middle, ups),
          ups ? packet(boxWidth, middle, bucketLeft, middle) : null,
          ...ys.flatMap((y) => [
            path(bucketLeft + boxWidth, middle, right, y, downs),
            downs ? packet(bucketLeft + boxWidth, middle, right, y) : null,
          ]),
        ];
    const busy = phase.where === "trainer" ? "busy" : state.way === "full" && !done ? "stopped" : "";
    const serves = stopped ? (narrow ? "stopped" : "no tokens") : `serves v${done ? 42 : 41}`;
    const replicas = `${count} replica${count === 1 ? "" : "s"}`;
    const label = `${wordsOf(phase)} ${replicas}, ${stopped ? "all stopped" : "all generating"}.`;
    stage.replaceChildren(
      picture(
        width,
        height,
        label,
        wires,
        box(
          0.5,
          middle,
          boxWidth,
          84,
          busy,
          "trainer",
          phase.where === "trainer" ? phase.name : state.way === "full" && !done ? "waits" : "trains",
        ),
        straight
          ? null
          : box(
              bucketLeft,
              middle,
              boxWidth,
              64,
              phase.where === "line" || ups || downs ? "busy" : "",
              "bucket",
              state.way === "delta" ? bytesText(cost.deltaBytes) : bytesText(cost.fullBytes),
            ),
        ys.map((y) =>
          box(
            right,
            y,
            boxWidth,
            each,
            stopped ? "stopped" : phase.where === "replica" ? "serving busy" : "serving",
            serves,
          ),
        ),
      ),
    );
  }

  function draw(position, playing) {
    if (!width) return;
    const at = Math.min(position * phases.length, phases.length - 1e-9);
    const active = Math.floor(at);
    const part = at - active;
    const before = phases.slice(0, active);
    const sum = (some) => some.reduce((total, phase) => total + phase.seconds, 0);
    const elapsed = sum(before) + part * phases[active].seconds;
    const total = sum(phases);
    const red =
      sum(before.filter((phase) => phase.where === "pause")) +
      (phases[active].where === "pause" ? part * phases[active].seconds : 0);
    diagram(active, part);
    let start = 0;
    list.replaceChildren(
      ...phases.map((phase, i) => {
        const bar = h("span", { class: `span ${phase.where}` });
        bar.style.marginLeft = `${total ? (99 * start) / total : 0}%`;
        bar.style.width = `max(2px, ${total ? (99 * phase.seconds) / total : 0}%)`;
        start += phase.seconds;
        return h(
          "li",
          { class: i === active ? "active" : i < active ? "past" : "", "aria-current": i === active ? "step" : null },
          h("span", { class: "phase-name" }, phase.name),
          h("span", { class: "track" }, bar),
          h(
            "span",
            { class: "number phase-time", "data-phase": phase.name, "data-seconds": phase.seconds },
            phase.where === "done" ? "served" : secondsText(phase.seconds),
          ),
        );
      }),
    );
    const pauses = sum(phases.filter((phase) => phase.where === "pause"));
    Object.assign(section.dataset, {
      phase: phases[active].name,
      way: state.way,
      replicas: state.replicas,
      total,
      pause: pauses,
    });
    section
      .querySelector("[data-clock]")
      .replaceChildren(
        h("span", null, h("output", null, secondsText(elapsed)), " since the step ended"),
        h("span", null, h("output", { class: "idle-number" }, secondsText(red)), " without tokens at each engine"),
      );
    section.querySelector("[data-status]").textContent =
      `${wordsOf(phases[active])} (${active + 1} of ${phases.length})`;
    if (playing) return;
    const moved = state.way === "delta" ? cost.deltaBytes : cost.fullBytes;
    const uploads = state.way === "full" && inputs.values.full === "broadcast" ? 0 : moved;
    section.querySelector("[data-numbers]").replaceChildren(
      table(
        `${state.way === "delta" ? "Delta over a bucket" : "Full weights"}, ${state.replicas} replicas`,
        ["Phase", "Time", "Formula", "From"],
        phases.map((phase) => [phase.name, secondsText(phase.seconds), phase.formula, phase.source]),
      ),
      table(
        "In all",
        ["", ""],
        [
          ["From the end of the step until served", secondsText(total)],
          ["No tokens, engines added up", secondsText(pauses * state.replicas)],
          ["Into the bucket", bytesText(uploads)],
          ["To replicas, added up", bytesText(moved * state.replicas)],
        ],
      ),
    );
  }

  const pressed = (group, make) => {
    const buttons = group.map(([value, text]) =>
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            make(value);
            refresh();
            for (const button of buttons) mark(button, button === clicked(value));
          },
        },
        text,
      ),
    );
    const clicked = (value) => buttons[group.findIndex(([each]) => each === value)];
    const mark = (button, on) => button.setAttribute("aria-pressed", on);
    buttons.forEach((button, i) => mark(button, [state.way, state.replicas].includes(group[i][0])));
    return buttons;
  };
  function refresh() {
    compute();
    player.position = Math.min(player.position, 1);
    player.show();
  }
  section.querySelector("[data-switches]").append(
    h(
      "div",
      { role: "group", "aria-label": "Way", class: "buttons" },
      pressed(
        [
          ["delta", "Delta over a bucket"],
          ["full", "Full weights"],
        ],
        (way) => {
          state.way = way;
          player.position = player.stops()[0];
        },
      ),
    ),
    h(
      "div",
      { role: "group", "aria-label": "Replicas", class: "buttons" },
      pressed(
        [
          [1, "1 replica"],
          [2, "2"],
          [8, "8"],
        ],
        (replicas) => {
          state.replicas = replicas;
        },
      ),
    ),
  );
  section.querySelector("[data-controls]").append(...inputs.panel(["weights", "density", "gbits", "machine", "full"]));
  compute();
  const player = new Player(section, {
    seconds: 11,
    start: 0,
    draw,
    // The middle of each phase, where what moves can be seen on its way.
    stops: () => [...phases.slice(0, -1).map((_, i) => (i + 0.5) / phases.length), 1],
  });
  player.position = player.stops()[0];
  inputs.listeners.push(refresh);
  onWidth(stage, (now) => {
    width = now;
    player.show();
  });
  player.show();
}
