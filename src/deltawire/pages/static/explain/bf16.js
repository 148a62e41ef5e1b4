// bf16 as the hardware does it, on bit patterns: the upper half of a float32, rounded to nearest, ties to even.

const word = new Uint32Array(1);
const float = new Float32Array(word.buffer);

export function bitsOfFloat(value) {
  float[0] = value;
  return word[0];
}

/** float32 bits to bf16 bits. A NaN stays one, quiet and with its sign: rounding its payload could make it infinite. */
export function roundBits(bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return ((bits >>> 16) & 0x8000) | 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

export const toBf16 = (value) => roundBits(bitsOfFloat(value));

export function fromBf16(bits) {
  word[0] = bits * 65536;
  return float[0];
}

/** All patterns in the order of their values, as the codec counts steps: -0 lies just below +0. */
export const placeOf = (bits) => (bits & 0x8000 ? 0xffff - bits : bits + 0x8000);
export const atPlace = (place) => (place & 0x8000 ? place - 0x8000 : 0xffff - place);

/** The bf16 number that lies some steps above (or, negative, below). */
export const neighbour = (bits, steps) => atPlace(placeOf(bits) + steps);

export const exponentOf = (bits) => (bits >> 7) & 0xff;

/** The distance to the next larger magnitude: one unit in the last place. Subnormal numbers all have the same. */
export const ulpOf = (bits) => 2 ** (Math.max(exponentOf(bits), 1) - 127 - 7);
