// What a sync takes: measured times, scaled to the reader's numbers. Pure: data and inputs in, phases out.
//
// A phase is { name, seconds, where, formula, source }; `where` is trainer, line, replica or pause.

import { bytesText, percentText, secondsText, trim, weightsText } from "explain/dom";

/** A column of a table at any density: straight lines over the logarithm of the density. */
export function atDensity(rows, column, density) {
  const above = rows.findIndex((row) => row.density >= density);
  if (above === 0) return rows[0][column];
  if (above < 0) return rows.at(-1)[column];
  const [low, high] = [rows[above - 1], rows[above]];
  const part = Math.log(density / low.density) / Math.log(high.density / low.density);
  return low[column] + part * (high[column] - low[column]);
}

/** What the measurements say, in the units that the formulas need. */
export function rates({ chain, vllm, gpu, density, split, runs }) {
  const { loopback } = chain;
  const oneWay = loopback.delta_bytes / 2;
  const bytesPerSecond = loopback.full_bytes / loopback.full_seconds;
  const { apply, ...before } = loopback.phases;
  const sum = Object.values(before).reduce((total, seconds) => total + seconds, 0);
  const [small, large] = gpu.models;
  const slope = (of) => (of(large) - of(small)) / (large.weights - small.weights);
  const line = (of, more = 0) => ({ slope: slope(of), start: of(small) - slope(of) * small.weights, more });
  const requestUp = loopback.phases.upload - oneWay / bytesPerSecond;
  const requestDown = loopback.phases.fetch - oneWay / bytesPerSecond;
  const requests = requestUp + requestDown + loopback.phases.commit;
  const stage = split.split + split.save;
  return {
    bytesPerSecond,
    requestUp,
    requestDown,
    pauseRequests: vllm.pause - vllm.write,
    stage,
    // What is left of the time from publish to served, when all that was measured apart is taken away.
    rest: vllm.served - vllm.pause - (sum * vllm.weights) / loopback.weights - stage * vllm.weights * vllm.density,
    gpuRest: line((each) =>
      Math.max(each.served - each.blocked - each.encode - each.stage - each.pause - requests, 0),
    ),
    gpuDiff: line((each) => each.blocked),
    gpuEncode: line((each) => each.encode, gpu.per_change.encode),
    gpuStage: line((each) => each.stage, gpu.per_change.stage),
    gpuPause: line((each) => each.pause, gpu.per_change.pause),
    density,
    // Whole runs say more about bytes than weights that were made up for density.csv.
    sizes: [...density, ...runs].sort((a, b) => a.density - b.density),
  };
}

const times = (seconds, by, of) => `${secondsText(seconds)} × ${by} / ${of}`;

/** All phases of both ways, and the totals that the figures show. */
export function costs(measured, input) {
  const { weights, density, gbits, machine, full } = input;
  const { chain, vllm, gpu } = measured;
  const rate = rates(measured);
  const onCpu = machine === "cpu";
  const line = (gbits * 1e9) / 8;
  const size = weightsText(weights);
  const perChange = atDensity(rate.sizes, "bytes_per_change", density);
  const deltaBytes = weights * density * perChange;
  const fullBytes = 2 * weights;

  const transfer = (name, bytes, request) => {
    const slowest = onCpu ? Math.min(line, rate.bytesPerSecond) : line;
    const limit = slowest < line ? `${bytesText(slowest)}/s, what two cores manage` : `${trim(gbits)} Gbit/s`;
    return {
      name,
      where: "line",
      seconds: request + bytes / slowest,
      source: "chain.csv",
      formula: `${secondsText(request)} for requests + ${bytesText(bytes)} / (${limit})`,
    };
  };
  const scaled = (name, where, seconds, column) => {
    const factor = atDensity(rate.density, column, density) / atDensity(rate.density, column, chain.density);
    const of = chain.loopback.weights;
    return {
      name,
      where,
      seconds: ((seconds * weights) / of) * factor,
      source: "chain.csv, density.csv",
      formula: `${times(seconds, size, weightsText(of))} × ${trim(factor)} for a density of ${percentText(density)}`,
    };
  };
  // By two models that were measured at one density; what further changes add, by one of them at two more densities.
  // A model that is larger than both is on as many devices as it needs.
  const onDevice = weights / Math.ceil(weights / gpu.models[1].weights);
  const onGpu = (name, where, { slope, start, more }) => ({
    name,
    where,
    seconds: Math.max(start + (slope + more * (density - gpu.density)) * onDevice, 0),
    source: "vllm_gpu.csv",
    formula:
      `${secondsText(start)} + ${secondsText(slope * 1e9)} × ${trim(onDevice / 1e9)} B, by two models` +
      (more ? `, ${trim(more * 1e9)} ns for each change more than ${percentText(gpu.density)}` : ""),
  });
  const plain = (name, where, seconds, by, of, source) => ({
    name,
    where,
    seconds: (seconds * by) / of,
    source,
    formula: times(seconds, weightsText(by), weightsText(of)),
  });

  const phases = chain.loopback.phases;
  const diff = onCpu
    ? plain("diff", "trainer", phases.diff, weights, chain.loopback.weights, "chain.csv")
    : onGpu("diff", "trainer", rate.gpuDiff);
  const encode = onCpu
    ? scaled("encode", "trainer", phases.encode, "encode_ratio")
    : onGpu("encode", "trainer", rate.gpuEncode);
  const upload = transfer("upload", deltaBytes, rate.requestUp);
  const commit = {
    name: "commit",
    where: "line",
    seconds: phases.commit,
    formula: "one small object, as measured",
    source: "chain.csv",
  };
  const fetch = transfer("fetch", deltaBytes, rate.requestDown);
  const decode = onCpu
    ? scaled("verify and decode", "replica", phases.decode, "decode_ratio")
    : onGpu("verify, decode and stage", "replica", rate.gpuStage);
  const changes = weightsText(weights * density);
  const stage = onCpu && {
    name: "stage",
    where: "replica",
    seconds: rate.stage * weights * density,
    formula: `${trim(rate.stage * 1e9)} ns × ${changes} changes`,
    source: "engine_split.csv",
  };
  const rest = {
    ...(onCpu
      ? plain("polls and the rest", "replica", rate.rest, weights, vllm.weights, "vllm.csv")
      : onGpu("polls and the rest", "replica", rate.gpuRest)),
    rest: true,
  };
  const write = (vllm.write * weights * density) / (vllm.weights * vllm.density);
  const pause = onCpu
    ? {
        name: "pause and write",
        where: "pause",
        seconds: rate.pauseRequests + write,
        source: "vllm.csv",
        formula:
          `${secondsText(rate.pauseRequests)} for the requests + ${secondsText(write)} to write ` +
          `${changes} changes`,
      }
    : onGpu("pause and write", "pause", rate.gpuPause);
  const delta = [diff, encode, upload, commit, rest, fetch, decode, stage, pause].filter(Boolean);

  const { reload } = gpu;
  const stop = {
    name: "pause",
    where: "pause",
    seconds: onCpu ? rate.pauseRequests : reload.stop,
    formula: "the requests, as measured",
    source: onCpu ? "vllm.csv" : "vllm_gpu.csv",
  };
  const whole =
    full === "broadcast"
      ? [
          stop,
          {
            name: "broadcast",
            where: "pause",
            seconds: fullBytes / line,
            source: "computed",
            formula: `${bytesText(fullBytes)} / ${trim(gbits)} Gbit/s, to all at the same time`,
          },
        ]
      : [
          stop,
          { ...transfer("upload", fullBytes, rate.requestUp), where: "pause" },
          { ...transfer("fetch", fullBytes, rate.requestDown), where: "pause" },
          onCpu
            ? plain("reload", "pause", vllm.reload, weights, vllm.weights, "vllm.csv")
            : plain("reload", "pause", reload.seconds - reload.stop, onDevice, reload.weights, "vllm_gpu.csv"),
        ];
  const total = (list) => list.reduce((sum, phase) => sum + phase.seconds, 0);
  return {
    delta,
    full: whole,
    deltaBytes,
    fullBytes,
    perChange,
    deltaSeconds: total(delta),
    fullSeconds: total(whole),
    pause: pause.seconds,
    publish: encode.seconds + upload.seconds + commit.seconds,
    diff: diff.seconds,
    pull: total(delta) - diff.seconds - encode.seconds - upload.seconds - commit.seconds - pause.seconds,
  };
}

/** How much of the time engines stand still, in the long run: [with all weights, with deltas]. */
export function idleShares(cost, { stepSeconds }) {
  return [cost.fullSeconds / (stepSeconds + cost.fullSeconds), cost.pause / deltaPeriod(cost, { stepSeconds })];
}

/** The time between two versions in an engine: a step, or whatever takes longer; versions in between are left out. */
export const deltaPeriod = (cost, { stepSeconds }) =>
  Math.max(stepSeconds + cost.diff, cost.publish, cost.pull + cost.pause);

/** The formulas at the conditions of the recorded runs, next to what was measured there. */
export function checks(measured) {
  const { loopback, slow } = measured.chain;
  const at = (line, gbits, full) =>
    costs(measured, {
      weights: line.weights,
      density: measured.chain.density,
      gbits,
      machine: "cpu",
      full,
    });
  const apart = ["polls and the rest", "stage", "pause and write"];
  const reached = (cost) =>
    cost.delta.reduce((sum, phase) => sum + (apart.includes(phase.name) ? 0 : phase.seconds), 0);
  const served = (weights, density, machine) =>
    costs(measured, { weights, density, gbits: 1e3, machine, full: "broadcast" }).deltaSeconds;
  const { gpu, vllm } = measured;
  const moved = (cost) => cost.full[1].seconds + cost.full[2].seconds;
  return [
    ["delta, loopback", reached(at(loopback, 1e3, "checkpoint")), loopback.delta_seconds - loopback.phases.apply],
    ["delta, 100 Mbit/s", reached(at(slow, 0.1, "checkpoint")), slow.delta_seconds - slow.phases.apply],
    ["all weights, loopback", moved(at(loopback, 1e3, "checkpoint")), loopback.full_seconds],
    ["all weights, 100 Mbit/s", moved(at(slow, 0.1, "checkpoint")), slow.full_seconds],
    ["served, vLLM on two cores", served(vllm.weights, vllm.density, "cpu"), vllm.served],
    ["served, vLLM on an H200", served(gpu.models[1].weights, gpu.density, "h200"), gpu.models[1].served],
  ];
}
