// Scene 2: all weights and a delta on the same line, as squares whose area is their bytes.

import { atDensity, costs } from "explain/cost";
import { bytesText, countText, onWidth, picture, s, secondsText, table, trim } from "explain/dom";
import { inside } from "explain/inside";
import { Player } from "explain/player";

const LARGEST = 176;
const SLOWER = 2.2;

const pixels = (value) => Math.round(value * 100) / 100;

export function packets(section, data, settings) {
  const stage = section.querySelector("[data-stage]");
  const field = inside(section, data);
  let width = 0;

  function draw(position) {
    if (!width) return;
    const { fullBytes, deltaBytes, perChange } = costs(data.measured, settings.values);
    const line = (settings.values.gbits * 1e9) / 8;
    const ratio = fullBytes / deltaBytes;
    const [whole, one] = [fullBytes / line, deltaBytes / line];
    // Slower in the beginning, so that the first delta can be seen on its way; both lanes have the same clock.
    const now = whole * position ** SLOWER;
    const arrived = Math.min(Math.floor(now / one + 1e-9), Math.floor(ratio));
    const columns = width < 620 ? 1 : 2;
    const wide = (width - (columns - 1) * 28) / columns;
    const side = Math.floor(Math.min(LARGEST, wide * 0.36));
    const tall = side + 62;
    const small = side / Math.sqrt(ratio);
    // As many deltas as have the bytes of all weights fill the same square.
    const per = Math.max(1, Math.round(Math.sqrt(ratio)));
    const cell = { width: side / per, height: (side * per) / ratio };

    const lane = (index, kind, title, caption, size, part, landed) => {
      const x = columns === 2 ? index * (wide + 28) : 0;
      const y = columns === 2 ? 0 : index * (tall + 12);
      const middle = y + 34 + side / 2;
      const from = x;
      const to = x + wide - side;
      return s(
        "g",
        { class: kind },
        s("text", { class: "title", x, y: y + 16 }, title),
        s("line", { class: "wire", x1: from + side, x2: to, y1: middle, y2: middle }),
        s("text", { class: "axis", x: from, y: y + side + 52 }, "trainer"),
        s("text", { class: "axis", x: (from + to + side) / 2, y: y + side + 52, "text-anchor": "middle" }, caption),
        s("text", { class: "axis", x: to + side, y: y + side + 52, "text-anchor": "end" }, "engine"),
        s("rect", { class: "slot", x: from + 0.5, y: y + 34.5, width: side - 1, height: side - 1 }),
        s("rect", { class: "slot", x: to + 0.5, y: y + 34.5, width: side - 1, height: side - 1 }),
        landed(to, y + 34),
        part === null
          ? null
          : s("rect", {
              class: "packet",
              x: from + (to - from) * part + (side - size) / 2,
              y: middle - size / 2,
              width: size,
              height: size,
            }),
      );
    };
    const pieces = (x, y) => {
      const gap = small > 5 ? 1 : 0;
      const [across, down] = [pixels(cell.width - gap), pixels(cell.height - gap)];
      const d = Array.from({ length: arrived }, (_, i) => {
        const [left, top] = [x + (i % per) * cell.width, y + Math.floor(i / per) * cell.height];
        return `M${pixels(left)} ${pixels(top)}h${across}v${down}h-${across}z`;
      });
      return s("path", { class: "landed", d: d.join("") });
    };
    const label =
      `After ${secondsText(now)}: ${countText(arrived)} delta${arrived === 1 ? " has" : "s have"} arrived, ` +
      (position < 1 ? `and ${Math.round(100 * (now / whole))} % of all weights.` : "and all weights, once.");
    stage.replaceChildren(
      picture(
        width,
        columns === 2 ? tall : 2 * tall + 12,
        label,
        lane(0, "full", `All weights: ${bytesText(fullBytes)}`, secondsText(whole), side, now / whole, () => null),
        lane(
          1,
          "delta",
          `A delta: ${bytesText(deltaBytes)}`,
          `${secondsText(one)} each`,
          small,
          position === 1 ? null : now / one - arrived,
          pieces,
        ),
      ),
    );
    section.querySelector("[data-share]").textContent = `1/${Math.round(ratio)}`;
    section.querySelector("[data-status]").textContent =
      position < 1 ? label : `${label} The same bytes carry all weights once, or ${countText(arrived)} updates.`;
    Object.assign(section.dataset, { fullBytes, deltaBytes, arrived });
    const times = atDensity(data.measured.uploads, "all_to_single", settings.values.density);
    const all = times * deltaBytes;
    section.querySelector("[data-uploaded]").textContent =
      `Total upload, with the longer deltas and anchors for late joiners: ${bytesText(all)} a step, ` +
      `${trim(times)} times the delta.`;
    section.querySelector("[data-numbers]").replaceChildren(
      table(
        "One step, with the numbers of this scene",
        ["", "Bytes", "Transfer time"],
        [
          ["All weights, 2 bytes each", bytesText(fullBytes), secondsText(whole)],
          [`A delta, ${trim(perChange)} bytes per change`, bytesText(deltaBytes), secondsText(one)],
          ["Total upload for a delta", bytesText(all), secondsText(all / line)],
        ],
      ),
    );
    field.show(settings.values.recording, 1);
  }

  const player = new Player(section, {
    seconds: 11,
    draw,
    stops: () => {
      const { fullBytes, deltaBytes } = costs(data.measured, settings.values);
      const after = (count) => ((count * deltaBytes) / fullBytes) ** (1 / SLOWER);
      return [0, ...[1, 10, 50, 100].map(after).filter((at) => at < 1), 1];
    },
  });
  settings.panel(section, ["weights", "density", "gbits"]);
  settings.listeners.push(() => player.show());
  player.once(stage);
  onWidth(stage, (now) => {
    width = now;
    player.show();
  });
  onWidth(section, () => field.resize(section.clientWidth - 36));
}
