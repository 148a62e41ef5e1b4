// The recorded data: embedded in the single file, beside the page otherwise. benchmarks/explain_data.py makes it.

export async function load() {
  const embedded = document.getElementById("recorded");
  return embedded ? JSON.parse(embedded.textContent) : (await fetch("recorded.json")).json();
}

/** Little-endian 16-bit numbers, as base64. */
export function numbers(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return Uint16Array.from({ length: bytes.length / 2 }, (_, i) => bytes[2 * i] | (bytes[2 * i + 1] << 8));
}

/** A tensor's first weights before a step (from 1) and after it, as recorded. */
export function recordedStep(recording, tensor, step) {
  const old = numbers(recording.field.base[tensor]);
  for (const done of recording.field.steps.slice(0, step - 1)) write(old, done[tensor]);
  const now = Uint16Array.from(old);
  write(now, recording.field.steps[step - 1][tensor]);
  return { old, now };
}

function write(weights, change) {
  const bits = numbers(change.bits);
  numbers(change.at).forEach((at, i) => {
    weights[at] = bits[i];
  });
}

/** How many weights a recording changed in a step, on average, and how many it has. */
export function meanChange(recording) {
  const changed = recording.sizes.reduce((sum, row) => sum + row.changed, 0) / recording.sizes.length;
  return changed / recording.sizes[0].weights;
}
