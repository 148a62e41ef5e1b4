// What a sync takes: measured times, scaled to the reader's numbers. Pure: data and inputs in, phases out.
//
// A phase is { name, seconds, where, formula, source }; `where` is trainer, line, replica or pause.

import { bytesText, percentText, secondsText, trim, weightsText } from "explain/dom";

/** A column of density.csv at any density: straight lines over the logarithm of the density. */
export function atDensity(rows, column, density) {
  const above = rows.findIndex((row) => row.density >= density);
  if (above === 0) return rows[0][column];
  if (above < 0) return rows.at(-1)[column];
  const [low, high] = [rows[above - 1], rows[above]];
  const part = Math.log(density / low.density) / Math.log(high.density / low.density);
  return low[column] + part * (high[column] - low[column]);
}

/** What the measurements say, in the units that the formulas need. */
export function rates({ chain, vllm, gpu, density }) {
  const { loopback } = chain;
  const oneWay = loopback.delta_bytes / 2;
  const bytesPerSecond = loopback.full_bytes / loopback.full_seconds;
  const { apply, ...before } = loopback.phases;
  const sum = Object.values(before).reduce((total, seconds) => total + seconds, 0);
  const [small, large] = gpu.models;
  const slope = (of) => (of(large) - of(small)) / (large.weights - small.weights);
  const line = (of) => ({ slope: slope(of), start: of(small) - slope(of) * small.weights });
  return {
    bytesPerSecond,
    requestUp: loopback.phases.upload - oneWay / bytesPerSecond,
    requestDown: loopback.phases.fetch - oneWay / bytesPerSecond,
    pauseRequests: vllm.pause - vllm.write,
    // What is left of the time from publish to served, when all that was measured apart is taken away.
    stage: vllm.served - vllm.pause - (sum * vllm.weights) / loopback.weights,
    gpuDiff: line((each) => each.blocked),
    gpuEncode: line((each) => each.encode),
    gpuDecode: line((each) => each.apply - each.pause),
    gpuPause: line((each) => each.pause),
    density,
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
  const perChange = atDensity(rate.density, "bytes_per_change", density);
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
  // By two models that were measured at one density: what depends on changes is like that of a larger or smaller model.
  const onGpu = (name, where, { slope, start }, as = weights) => ({
    name,
    where,
    seconds: Math.max(start + slope * as, 0),
    source: "vllm_gpu.csv",
    formula: `${secondsText(start)} + ${secondsText(slope * 1e9)} × ${trim(as / 1e9)} B, by two models`,
  });
  const byChanges = (weights * density) / gpu.density;
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
    : onGpu("encode", "trainer", rate.gpuEncode, byChanges);
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
    : onGpu("verify and decode", "replica", rate.gpuDecode, byChanges);
  const stage = onCpu
    ? { ...plain("stage", "replica", rate.stage, weights, vllm.weights, "vllm.csv"), rest: true }
    : {
        name: "stage",
        where: "replica",
        seconds: 0,
        formula: "decoded where the weights are: a part of decoding",
        source: "vllm_gpu.csv",
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
          `${weightsText(weights * density)} changes`,
      }
    : onGpu("pause and write", "pause", rate.gpuPause, byChanges);
  const delta = [diff, encode, upload, commit, fetch, decode, stage, pause];

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
            : plain("reload", "pause", reload.seconds - reload.stop, weights, reload.weights, "vllm_gpu.csv"),
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
    pull: fetch.seconds + decode.seconds + stage.seconds,
  };
}

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
  const reached = (cost) => cost.delta.slice(0, 6).reduce((sum, phase) => sum + phase.seconds, 0);
  const moved = (cost) => cost.full[1].seconds + cost.full[2].seconds;
  return [
    ["delta, loopback", reached(at(loopback, 1e3, "checkpoint")), loopback.delta_seconds - loopback.phases.apply],
    ["delta, 100 Mbit/s", reached(at(slow, 0.1, "checkpoint")), slow.delta_seconds - slow.phases.apply],
    ["all weights, loopback", moved(at(loopback, 1e3, "checkpoint")), loopback.full_seconds],
    ["all weights, 100 Mbit/s", moved(at(slow, 0.1, "checkpoint")), slow.full_seconds],
  ];
}
