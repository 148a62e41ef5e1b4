// Who does what when, in both ways of figure 1: spans of time, from what each phase costs. Pure.

/** Spans of both ways from time 0 on: { lane, kind, from, to, text }. */
export function simulate(cost, input, until) {
  const full = { spans: [], arrivals: [] };
  const cycle = input.stepSeconds + cost.fullSeconds;
  for (let start = 0; start < until; start += cycle) {
    const end = start + input.stepSeconds;
    full.spans.push({ lane: 0, kind: "train", from: start, to: end, text: "train" });
    full.spans.push({ lane: 2, kind: "generate", from: start, to: end, text: "generate" });
    let at = end;
    for (const phase of cost.full) {
      full.spans.push({ lane: 1, kind: "full", from: at, to: at + phase.seconds, text: phase.name });
      at += phase.seconds;
    }
    full.spans.push({ lane: 0, kind: "wait", from: end, to: at, text: "wait" });
    full.spans.push({ lane: 2, kind: "idle", from: end, to: at, text: "stand still" });
    full.arrivals.push(at);
  }
  const delta = { spans: [], arrivals: [] };
  const published = [];
  for (let start = 0, free = 0; start < until;) {
    const end = start + input.stepSeconds;
    delta.spans.push({ lane: 0, kind: "train", from: start, to: end, text: "train" });
    // One publish is under way at a time: where it takes longer than a step, the trainer waits for it.
    const begin = Math.max(end, free);
    if (begin > end) delta.spans.push({ lane: 0, kind: "wait", from: end, to: begin, text: "wait" });
    delta.spans.push({ lane: 0, kind: "diff", from: begin, to: begin + cost.diff, text: "diff" });
    start = begin + cost.diff;
    free = start + cost.publish;
    published.push(free);
    delta.spans.push({ lane: 1, kind: "delta", from: start, to: free, text: "encode, upload" });
  }
  // A replica takes the newest version there is, and goes over those that it came too late for.
  let at = 0;
  let taken = -1;
  while (at < until) {
    const next = published.find((time) => time > at);
    const newest = published.findLast((time) => time <= at);
    const begin = newest !== undefined && newest > taken ? at : next;
    if (begin === undefined || begin >= until) break;
    taken = published.findLast((time) => time <= begin);
    const pulled = begin + cost.pull;
    delta.spans.push({ lane: 1, kind: "pull", from: begin, to: pulled, text: "fetch, decode" });
    delta.spans.push({ lane: 2, kind: "generate", from: at, to: pulled, text: "generate" });
    delta.spans.push({ lane: 2, kind: "idle", from: pulled, to: pulled + cost.pause, text: "" });
    at = pulled + cost.pause;
    delta.arrivals.push(at);
  }
  if (at < until) delta.spans.push({ lane: 2, kind: "generate", from: at, to: until, text: "generate" });
  for (const way of [full, delta]) {
    way.spans = way.spans
      .filter((span) => span.from < until)
      .map((span) => ({ ...span, to: Math.min(span.to, until) }))
      // Red is drawn last, so that nothing covers a short pause.
      .sort((a, b) => (a.kind === "idle") - (b.kind === "idle"));
  }
  return { full, delta };
}

/** Round times for an axis: at most `most` of them. */
export function axisTimes(until, most) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600];
  const step = steps.find((each) => until / each <= most) ?? 7200 * Math.ceil(until / most / 7200);
  return Array.from({ length: Math.floor(until / step) + 1 }, (_, i) => i * step);
}

/** How long engines stood still until a time. */
export const idleUntil = (way, time) =>
  way.spans
    .filter((span) => span.kind === "idle" && span.from < time)
    .reduce((sum, span) => sum + Math.min(span.to, time) - span.from, 0);
