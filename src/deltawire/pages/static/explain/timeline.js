// Figure 1: the same weights, shipped in two ways, over the same time. Red is time in which no tokens are generated.

import { checks, costs } from "explain/cost";
import { countText, bytesText, h, onWidth, percentText, picture, s, secondsText, table, trim } from "explain/dom";
import { Player } from "explain/player";
import { axisTimes, idleUntil, simulate } from "explain/schedule";

const LANE = 24;
const GAP = 6;
const LANES = 3 * (LANE + GAP);
const LENS = 58;
// A pause of milliseconds would vanish among seconds: marks are drawn at least so wide, in pixels.
const LEAST = { idle: 3, delta: 2, pull: 0.5, diff: 0.5 };
const MOST_VERSIONS = 48;

export function timeline(section, { measured }, inputs) {
  const stage = section.querySelector("[data-stage]");
  const ways = ["full", "delta"].map((key) => {
    const head = h("div", { class: "way-head" });
    const body = h("div", { class: "way-body" });
    stage.append(h("div", { class: "way", "data-way": key }, head, body));
    return { key, head, body };
  });
  section
    .querySelector("[data-controls]")
    .append(...inputs.panel(["weights", "density", "gbits", "replicas", "stepSeconds", "machine", "full"]));
  let width = 0;
  let cost, times, until;

  function draw(position, playing) {
    if (!width) return;
    const now = position * until;
    const lanes = width < 600 ? ["train", "send", "serve"] : ["trainer", "on the way", "engines"];
    const left = width < 600 ? 46 : 92;
    const x = (time) => left + (time / until) * (width - left - 4);
    for (const { key, head, body } of ways) {
      const way = times[key];
      const idle = idleUntil(way, now);
      const versions = way.arrivals.filter((time) => time <= now + 1e-9).length;
      const title =
        key === "delta"
          ? "Deltas through a bucket"
          : inputs.values.full === "broadcast"
            ? "Full broadcast"
            : "Full checkpoint through the bucket";
      const each = key === "delta" ? cost.pause : cost.fullSeconds;
      const bytes = key === "delta" ? cost.deltaBytes : cost.fullBytes;
      head.replaceChildren(
        h("h3", null, title),
        h(
          "p",
          { class: "big" },
          h("output", { class: "idle-number", "data-pause": each }, secondsText(each)),
          " without tokens, per update",
        ),
        h(
          "p",
          { class: "soft" },
          h("output", { "data-idle": now ? idle / now : 0 }, percentText(now ? idle / now : 0)),
          " of the time until the marker stood still, ",
          h("output", { "data-versions": versions }, versions),
          ` new version${versions === 1 ? "" : "s"} served, `,
          bytesText(bytes),
          " each",
        ),
      );
      const magnified = key === "delta";
      const height = LANES + 20 + (magnified ? LENS : 0);
      const rects = way.spans.map((span) => {
        const [from, to] = [x(span.from), x(span.to)];
        const wide = Math.max(to - from, LEAST[span.kind] ?? 0.25);
        const y = span.lane * (LANE + GAP);
        const over = span.kind === "idle" && to - from < LEAST.idle ? 4 : 0;
        return s(
          "g",
          null,
          s("rect", { class: span.kind, x: from, y: y - over, width: wide, height: LANE + 2 * over }),
          to - from > 8 * span.text.length + 6
            ? s("text", { class: `in ${span.kind}-text`, x: (from + to) / 2, y: y + LANE / 2 + 4 }, span.text)
            : null,
        );
      });
      const marks = axisTimes(until, width < 600 ? 4 : 8).map((time) =>
        s(
          "text",
          {
            class: "axis",
            x: x(time),
            y: LANES + 12,
            "text-anchor": time === 0 ? "start" : x(time) > width - 24 ? "end" : "middle",
          },
          secondsText(time),
        ),
      );
      const label =
        `${title}: ${percentText(now ? idle / now : 0)} of ${secondsText(now)} without tokens, ` +
        `${versions} versions served.`;
      body.replaceChildren(
        picture(
          width,
          height,
          label,
          magnified ? lens(x, left) : null,
          lanes.map((text, i) => s("text", { class: "lane", x: 0, y: i * (LANE + GAP) + LANE / 2 + 4 }, text)),
          rects,
          s("rect", { class: "later", x: x(now), y: 0, width: Math.max(0, width - x(now)), height: LANES }),
          s("line", { class: "marker", x1: x(now), x2: x(now), y1: 0, y2: LANES - GAP }),
          marks,
        ),
      );
    }
    const lost = (share) => share * 3600 * inputs.values.replicas;
    const shares = [
      cost.fullSeconds / (inputs.values.stepSeconds + cost.fullSeconds),
      idleUntil(times.delta, until) / until,
    ];
    const replicas = `${inputs.values.replicas} replica${inputs.values.replicas === 1 ? "" : "s"}`;
    section.querySelector("[data-status]").textContent =
      `At ${secondsText(now)} of ${secondsText(until)}. In an hour ${replicas} would stand still for ` +
      `${secondsText(lost(shares[0]))} in all with full weights and ${secondsText(lost(shares[1]))} with deltas. ` +
      (cost.deltaSeconds > cost.fullSeconds
        ? `But new weights are served sooner in full here: after ${secondsText(cost.fullSeconds)}, not ` +
          `${secondsText(cost.deltaSeconds)}.`
        : `New weights are served ${trim(cost.fullSeconds / cost.deltaSeconds, 2)} times sooner by delta.`);
    section.dataset.fullSeconds = cost.fullSeconds;
    section.dataset.pauseSeconds = cost.pause;
    section.dataset.deltaBytes = cost.deltaBytes;
    if (!playing) tables();
  }

  /** The first delta, from the end of its step until it is served, drawn over the whole width. */
  function lens(x, left) {
    const begin = times.delta.spans.find((span) => span.kind === "diff").from;
    const wide = width - left - 4;
    const [bottom, top] = [LANES - GAP, LANES + 24];
    let at = left;
    const bars = cost.delta.map((phase) => {
      const size = (phase.seconds / cost.deltaSeconds) * wide;
      const middle = at + size / 2;
      const name = phase.where === "pause" ? "pause" : phase.name;
      at += size;
      return s(
        "g",
        null,
        s("rect", { class: `lens ${phase.where}`, x: at - size, y: top, width: size, height: LANE }),
        size > 7.5 * name.length ? s("text", { class: "in lens-text", x: middle, y: top + LANE / 2 + 4 }, name) : null,
      );
    });
    const factor = wide / (x(cost.deltaSeconds) - x(0));
    return s(
      "g",
      null,
      s("path", {
        class: "beam",
        d: `M ${x(begin)} ${bottom} L ${left} ${top} H ${width - 4} L ${x(begin + cost.deltaSeconds)} ${bottom} Z`,
      }),
      bars,
      s(
        "text",
        { class: "axis", x: width < 600 ? 0 : left, y: top + LANE + 14 },
        `one update: ${secondsText(cost.deltaSeconds)}, drawn ${countText(Math.round(factor))} times as long`,
      ),
    );
  }

  function tables() {
    const row = (phase) => [phase.name, secondsText(phase.seconds), phase.formula, phase.source];
    section
      .querySelector("[data-formulas]")
      .replaceChildren(
        table(
          "Delta: bytes = weights × density × bytes per change = " +
            `${countText(inputs.values.weights)} × ${percentText(inputs.values.density)} × ${trim(cost.perChange)} = ` +
            `${bytesText(cost.deltaBytes)} (bytes per change at this density: density.csv)`,
          ["Phase", "Time", "Formula", "From"],
          cost.delta.map(row),
        ),
        table(
          `Full: bytes = 2 × weights = ${bytesText(cost.fullBytes)}; engines stand still for all of it`,
          ["Phase", "Time", "Formula", "From"],
          cost.full.map(row),
        ),
      );
    section.querySelector("[data-numbers]").replaceChildren(
      table(
        "Both ways, with the numbers above",
        ["", "Full", "Delta"],
        [
          ["Bytes per update", bytesText(cost.fullBytes), bytesText(cost.deltaBytes)],
          ["From the end of the step until served", secondsText(cost.fullSeconds), secondsText(cost.deltaSeconds)],
          ["No tokens, per update", secondsText(cost.fullSeconds), secondsText(cost.pause)],
          [
            "Trainer waits, per update",
            secondsText(cost.fullSeconds),
            secondsText(cost.diff + Math.max(0, cost.publish - inputs.values.stepSeconds)),
          ],
        ],
      ),
      table(
        "The formulas at the conditions that were measured",
        ["Run", "Formula", "Measured"],
        checks(measured).map(([name, computed, seconds]) => [name, secondsText(computed), secondsText(seconds)]),
      ),
    );
  }

  function compute() {
    cost = costs(measured, inputs.values);
    const cycle = inputs.values.stepSeconds + cost.fullSeconds;
    const quick = Math.max(inputs.values.stepSeconds + cost.diff, cost.publish);
    until = Math.min(3 * cycle, MOST_VERSIONS * quick);
    times = simulate(cost, inputs.values, until);
  }

  const player = new Player(section, {
    seconds: 12,
    start: 1,
    draw,
    stops: () =>
      [...new Set([0, ...times.full.spans.filter((span) => span.lane === 2).map((span) => span.to / until), 1])].sort(
        (a, b) => a - b,
      ),
  });
  const update = () => {
    compute();
    player.show();
  };
  inputs.listeners.push(update);
  compute();
  onWidth(stage, (now) => {
    width = now;
    player.show();
  });
  player.show();
}
