// Numbers for people. Every one has its unit.

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(bytes) < 1000) return `${unit === "B" ? Math.round(bytes) : trimmed(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${trimmed(bytes)} TB`;
}

function trimmed(value) {
  return value.toPrecision(3).includes("e") ? value.toFixed(0) : value.toPrecision(3);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  if (value === 0) return "0 %";
  return `${value >= 10 ? value.toFixed(1) : value >= 0.01 ? value.toPrecision(3) : "< 0.01"} %`;
}

export function ofFull(ratio) {
  if (!ratio) return "–";
  return ratio >= 0.1 ? percent(ratio) : `1/${Math.round(1 / ratio)}`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 100) return `${count(Math.round(seconds))} s`;
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(1)} ms`;
}

export function short(value) {
  return Math.abs(value) >= 1000 ? count(Math.round(value)) : String(Number(value.toPrecision(3)));
}

// Since the start of a run.
export function elapsed(seconds) {
  const [hours, rest] = [Math.floor(seconds / 3600), Math.floor(seconds % 3600)];
  return `${hours}:${String(Math.floor(rest / 60)).padStart(2, "0")}:${String(rest % 60).padStart(2, "0")}`;
}

export function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.max(Math.floor(seconds), 0)} s`;
}

export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}
