// What steps do to one weight, and nothing else, so that it can be checked against other programs.
//
//   master := float32(weight)                            before step 1: exactly the bf16 weight
//   master := float32(master + float32(lr))              each step: what Adam does at most, |update| = lr
//   weight := bf16(master)

import { fromBf16, toBf16 } from "explain/bf16";

/** The master of one weight after 0, 1, ... steps, away from zero. */
export function masters(bits, lr, steps) {
  const update = bits & 0x8000 ? -Math.fround(lr) : Math.fround(lr);
  const path = [fromBf16(bits)];
  for (let i = 0; i < steps; i++) path.push(Math.fround(path[i] + update));
  return path;
}

/** The first step after which the bf16 weight is another one, or null if none of `most` is. */
export function firstChange(bits, lr, most) {
  const found = masters(bits, lr, most).findIndex((master) => toBf16(master) !== bits);
  return found < 0 ? null : found;
}
