// Scene 3: engines that stream tokens while weights are on their way, and stop in red.

import { checks, costs, deltaPeriod, idleShares } from "explain/cost";
import { bytesText, countText, h, onWidth, percentText, secondsText, table, trim } from "explain/dom";
import { colours, darkMode } from "explain/field";
import { Player } from "explain/player";

const CYCLES = 3;
const MOST_ENGINES = 4;
const ROW = 34;
const TOKENS = 110;
// A pause of milliseconds would vanish among seconds: it is drawn at least so wide, in pixels.
const LEAST = 3;
const MOST_PAUSES = 60;

/** When engines stand still until some time: pairs of from and to. */
export function idleSpans(cost, input, way, until) {
  const [first, length, period] =
    way === "full"
      ? [input.stepSeconds, cost.fullSeconds, input.stepSeconds + cost.fullSeconds]
      : [input.stepSeconds + cost.deltaSeconds - cost.pause, cost.pause, deltaPeriod(cost, input)];
  const spans = [];
  for (let at = first; at < until && spans.length < 10_000; at += period) spans.push([at, at + length]);
  return spans;
}

/** How much time the scene shows. */
const untilOf = (cost, input) =>
  Math.min(CYCLES * (input.stepSeconds + cost.fullSeconds), MOST_PAUSES * deltaPeriod(cost, input));

export const idleUntil = (spans, time) =>
  spans.reduce((sum, [from, to]) => sum + Math.max(0, Math.min(to, time) - from), 0);

export function tokens(section, { measured }, settings) {
  const stage = section.querySelector("[data-stage]");
  const ways = ["full", "delta"].map((way) => {
    const [head, canvas, foot] = [h("h3"), h("canvas", { role: "img" }), h("p", { class: "soft" })];
    const box = h("div", { class: "way", "data-way": way }, head, canvas, foot);
    stage.append(box);
    return { way, head, canvas, foot, box };
  });
  let width = 0;

  function drawTape(canvas, wide, spans, now, until, count) {
    const c = colours();
    const height = count * ROW + 4;
    const scale = Math.max(1, Math.round(devicePixelRatio || 1));
    Object.assign(canvas, { width: wide * scale, height: height * scale });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${height}px` });
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const left = 84;
    const x = (time) => left + ((now - time) / until) * (wide - left);
    const stopped = spans.some(([from, to]) => from <= now && now < to);
    pen.font = "600 12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let row = 0; row < count; row++) {
      const top = row * ROW + 4;
      pen.fillStyle = stopped ? c.bad : c.good;
      pen.beginPath();
      pen.roundRect(0, top, left - 10, ROW - 8, 5);
      pen.fill();
      pen.fillStyle = c.ground;
      pen.fillText(stopped ? "stopped" : `engine ${row + 1}`, 8, top + (ROW - 8) / 2);
      for (const [from, to] of spans) {
        if (from > now) break;
        const [begin, end] = [x(Math.min(to, now)), x(from)];
        pen.fillStyle = c.bad;
        pen.fillRect(begin, top, Math.max(end - begin, LEAST), ROW - 8);
        if (end - begin < 78) continue;
        pen.fillStyle = c.ground;
        pen.fillText("no tokens", begin + 8, top + (ROW - 8) / 2);
      }
      pen.fillStyle = c.good;
      for (let i = 0; i < TOKENS; i++) {
        const time = ((i + ((row * 0.37) % 1)) / TOKENS) * until;
        if (time > now) break;
        if (spans.some(([from, to]) => from <= time && time < to)) continue;
        // Words are long and short.
        const word = 0.35 + 0.45 * (((i * 7 + row * 3) % 5) / 4);
        pen.fillRect(x(time), top + 7, Math.max(((wide - left) / TOKENS) * word, 1.5), ROW - 22);
      }
    }
    return stopped;
  }

  function draw(position, playing) {
    if (!width) return;
    const input = settings.values;
    const cost = costs(measured, input);
    const until = untilOf(cost, input);
    const now = position * until;
    const wide = width < 700 ? width : Math.floor((width - 28) / 2);
    const count = Math.min(input.replicas, MOST_ENGINES);
    for (const { way, head, canvas, foot, box } of ways) {
      const spans = idleSpans(cost, input, way, until);
      const idle = idleUntil(spans, now);
      const versions = spans.filter(([, to]) => to <= now + 1e-9).length;
      const each = way === "full" ? cost.fullSeconds : cost.pause;
      const stopped = drawTape(canvas, wide, spans, now, until, count);
      box.classList.toggle("stopped", stopped);
      const sent = input.full === "broadcast" ? "broadcast" : "as a checkpoint";
      const title = way === "delta" ? "Deltas" : `All weights, ${sent}`;
      head.replaceChildren(
        `${title}: `,
        h("output", { class: "red", "data-pause": each }, secondsText(each)),
        h("span", { class: "soft" }, " without tokens, per update"),
      );
      const words =
        `Stopped for ${secondsText(idle)} of ${secondsText(now)}; ` +
        `${versions} new version${versions === 1 ? "" : "s"} of ${bytesText(way === "full" ? cost.fullBytes : cost.deltaBytes)}`;
      foot.textContent = words;
      const doing = stopped ? "are stopped" : "stream tokens";
      canvas.setAttribute("aria-label", `${title}. ${words}. ${count} engines ${doing}.`);
      Object.assign(box.dataset, { idle, versions });
    }
    const [full, delta] = idleShares(cost, input).map((share) => 3600 * share * input.replicas);
    const replicas = `${input.replicas} replica${input.replicas === 1 ? "" : "s"}`;
    section.querySelector("[data-status]").textContent =
      `In an hour, ${replicas} would be stopped for ${secondsText(full)} in total with full weights and ` +
      `${secondsText(delta)} with deltas. ` +
      (cost.deltaSeconds > cost.fullSeconds
        ? `But here new weights are served sooner in full: after ${secondsText(cost.fullSeconds)}, not ` +
          `${secondsText(cost.deltaSeconds)}.`
        : `New weights are served ${trim(cost.fullSeconds / cost.deltaSeconds, 2)} times sooner.`);
    Object.assign(section.dataset, {
      fullSeconds: cost.fullSeconds,
      pauseSeconds: cost.pause,
      hourFull: full,
      hourDelta: delta,
    });
    if (!playing) lens(cost, input);
  }

  /** One update, phase by phase, to scale. */
  function lens(cost, input) {
    const list = (phases, total) => {
      let start = 0;
      return phases.map((phase) => {
        const bar = h("span", { class: `span ${phase.where}` });
        bar.style.marginLeft = `${(99 * start) / total}%`;
        bar.style.width = `max(2px, ${(99 * phase.seconds) / total}%)`;
        start += phase.seconds;
        return h(
          "li",
          null,
          h("span", { class: "phase-name" }, phase.name),
          h("span", { class: "track" }, bar),
          h(
            "span",
            { class: "number", "data-phase": phase.name, "data-seconds": phase.seconds },
            secondsText(phase.seconds),
          ),
        );
      });
    };
    section
      .querySelector("[data-phases]")
      .replaceChildren(
        h("h3", null, `A delta, served after ${secondsText(cost.deltaSeconds)}`),
        h("ol", { class: "phases" }, list(cost.delta, cost.deltaSeconds)),
        h("h3", null, `All weights, served after ${secondsText(cost.fullSeconds)}`),
        h("ol", { class: "phases" }, list(cost.full, cost.fullSeconds)),
      );
    const rows = (phases) => phases.map((each) => [each.name, secondsText(each.seconds), each.formula, each.source]);
    const head = ["Phase", "Time", "Formula", "Source"];
    const waits = cost.diff + Math.max(0, cost.publish - input.stepSeconds);
    const toAll = (bytes) => bytesText(bytes * input.replicas);
    section.querySelector("[data-numbers]").replaceChildren(
      table("A delta", head, rows(cost.delta)),
      table("All weights: engines are stopped throughout", head, rows(cost.full)),
      table(
        "Both methods",
        ["", "All weights", "Delta"],
        [
          ["No tokens, per update", secondsText(cost.fullSeconds), secondsText(cost.pause)],
          ["No tokens, share of the time", ...idleShares(cost, input).map(percentText)],
          ["Trainer waits", secondsText(cost.fullSeconds), secondsText(waits)],
          [`To ${countText(input.replicas)} replicas`, ...[cost.fullBytes, cost.deltaBytes].map(toAll)],
        ],
      ),
      table(
        "The formulas under the measured conditions",
        ["Run", "Formula", "Measured"],
        checks(measured).map(([name, computed, seconds]) => [name, secondsText(computed), secondsText(seconds)]),
      ),
    );
  }

  const player = new Player(section, {
    seconds: 13,
    draw,
    stops: () => {
      const cost = costs(measured, settings.values);
      const until = untilOf(cost, settings.values);
      const spans = idleSpans(cost, settings.values, "full", until);
      return [0, ...spans.flatMap(([from, to]) => [(from + to) / 2 / until, to / until])].filter((at) => at <= 1);
    },
  });
  settings.panel(section, ["weights", "density", "gbits", "replicas", "stepSeconds", "machine", "full"]);
  settings.listeners.push(() => player.show());
  darkMode.addEventListener("change", () => player.show());
  player.once(stage);
  onWidth(stage, (now) => {
    width = now;
    player.show();
  });
}
