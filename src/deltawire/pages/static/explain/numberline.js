// The line of scene 1: bf16 ticks around one weight, its fp32 master above, and where the cast lands.

import { fromBf16, neighbour, placeOf, toBf16, ulpOf } from "explain/bf16";
import { picture, s } from "explain/dom";

const HEIGHT = 138;
const MASTER_Y = 34;
const RAIL_Y = 80;
// Beyond this many ticks they would run into each other.
const MOST_TICKS = 13;
const LABEL_WIDTH = 84;

export function valueText(value) {
  const text = Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(3) : value.toPrecision(4);
  return text.replace(/\.?0+(e|$)/, "$1");
}

/** All bf16 numbers within reach of a weight, ascending; where there are too many, some of them. */
function ticksAround(bits, reach) {
  const start = fromBf16(bits);
  const [low, high] = [start - reach, start + reach].map((value) => placeOf(toBf16(value)));
  const all = high - low <= MOST_TICKS;
  const some = all
    ? Array.from({ length: high - low + 1 }, (_, i) => neighbour(bits, low + i - placeOf(bits)))
    : Array.from({ length: MOST_TICKS }, (_, i) => toBf16(start + reach * ((2 * i) / (MOST_TICKS - 1) - 1)));
  return { all, ticks: [...new Set(some)].filter((tick) => Math.abs(fromBf16(tick) - start) <= reach) };
}

/** `path` are the values of the master from the start on. */
export function numberLine(bits, path, width) {
  const [start, master] = [path[0], path.at(-1)];
  const cast = toBf16(master);
  const moved = cast !== bits;
  const unit = ulpOf(bits);
  const reach = Math.max(2.4 * unit, 1.25 * Math.abs(master - start));
  const x = (value) => width / 2 + ((value - start) / reach) * (width / 2 - 8);
  const { all, ticks } = ticksAround(bits, reach);

  const marks = [];
  let labelled = -Infinity;
  for (const tick of ticks) {
    const at = x(fromBf16(tick));
    const kind = tick === cast ? "tick now" : tick === bits ? "tick old" : "tick";
    marks.push(s("line", { class: kind, x1: at, x2: at, y1: RAIL_Y - 18, y2: RAIL_Y + 18 }));
    const crowded = at - labelled < LABEL_WIDTH || Math.abs(at - x(start)) < LABEL_WIDTH;
    if (tick === bits || (!crowded && at > LABEL_WIDTH / 2 && at < width - LABEL_WIDTH / 2)) {
      const text = valueText(fromBf16(tick));
      marks.push(s("text", { class: "axis", x: at, y: RAIL_Y + 36, "text-anchor": "middle" }, text));
      labelled = at;
    }
  }
  const borders = all ? ticks.slice(1).map((tick, i) => (fromBf16(tick) + fromBf16(ticks[i])) / 2) : [];
  const [from, to] = [x(master), x(fromBf16(cast))];
  const anchor = (at, margin) => (at < margin ? "start" : at > width - margin ? "end" : "middle");
  const steps = Math.abs(placeOf(cast) - placeOf(bits));
  const landed = moved ? `moved ${steps} tick${steps === 1 ? "" : "s"}` : "snapped back to the old tick";
  const label = `A weight of ${valueText(start)}. Its fp32 master is now ${master}; the cast to bf16 ${landed}.`;
  const of = (name) => (moved ? `${name} moved` : name);
  const drawing = picture(
    width,
    HEIGHT,
    label,
    s("line", { class: "rail", x1: 0, x2: width, y1: RAIL_Y, y2: RAIL_Y }),
    borders.map((value) =>
      s("line", { class: "border", x1: x(value), x2: x(value), y1: RAIL_Y - 10, y2: RAIL_Y + 10 }),
    ),
    marks,
    path.slice(0, -1).map((value) => s("circle", { class: "trail", cx: x(value), cy: MASTER_Y, r: 2.5 })),
    s("path", { class: of("cast"), d: `M ${from} 41 C ${from} 56, ${to} 48, ${to} 60` }),
    s("circle", { class: "master", cx: from, cy: MASTER_Y, r: 6 }),
    s("circle", { class: of("landed"), cx: to, cy: RAIL_Y, r: 7 }),
    s("text", { class: "name", x: from, y: 18, "text-anchor": anchor(from, 90) }, "fp32 master"),
    s(
      "text",
      { class: of("result"), x: to, y: HEIGHT - 4, "text-anchor": anchor(to, 60) },
      moved ? "bf16: a new tick" : "bf16: the old tick",
    ),
    all ? null : s("text", { class: "axis", x: 0, y: HEIGHT - 4 }, "only some ticks"),
  );
  return { picture: drawing, start: valueText(start), unit, cast };
}
