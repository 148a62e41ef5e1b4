// The update rule of figure 2, and nothing else, so that it can be checked against other programs.
//
//   master := float32(weight)                            before step 1: exactly the bf16 weight
//   master := float32(master + sign * float32(lr))       each step: what Adam does at most, |update| = lr
//   weight := bf16(master)
//
// A weight keeps its sign of the update. It comes from a hash of its number, as gradients were not recorded.

import { fromBf16, toBf16 } from "explain/bf16";

export function signOf(number) {
  let x = Math.imul(number ^ (number >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) & 1 ? 1 : -1;
}

/** The master of one weight after 0, 1, ... steps. */
export function masters(bits, sign, lr, steps) {
  const update = Math.fround(lr) * sign;
  const path = [fromBf16(bits)];
  for (let i = 0; i < steps; i++) path.push(Math.fround(path[i] + update));
  return path;
}

/**
 * All weights after some steps. `now` and `before` are their bf16 bits after the last step and before it; `start` is
 * where they began. `first` is the number of the first weight.
 */
export function run(start, lr, steps, first = 0) {
  const update = Math.fround(lr);
  const now = Uint16Array.from(start);
  const before = Uint16Array.from(start);
  for (let i = 0; i < start.length; i++) {
    const step = update * signOf(first + i);
    let master = fromBf16(start[i]);
    for (let k = 0; k < steps; k++) {
      before[i] = now[i];
      master = Math.fround(master + step);
      now[i] = toBf16(master);
    }
  }
  return { start, before, now };
}

export function countDifferent(a, b) {
  let count = 0;
  for (let i = 0; i < a.length; i++) count += a[i] !== b[i];
  return count;
}
