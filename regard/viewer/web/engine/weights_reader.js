/** Weights of a page's model: float32, float16, or int8 with a float16 scale per 32 numbers of a row. */

/** @typedef {import("./fast_operations.js").Tensor} Tensor */

/** Numbers of a row that share a scale. */
const GROUP_SIZE = 32;

/** @param {{shape: number[], type: string, at: number}[]} headers @param {ArrayBuffer} buffer @returns {Tensor[]} */
export function readTensors(headers, buffer) {
  return headers.map(({ shape, type, at }) => {
    const size = shape.reduce((product, n) => product * n, 1);
    if (type === "float32") return { data: new Float32Array(buffer, at, size), shape };
    if (type === "float16") return { data: decodeFloat16(new Uint16Array(buffer, at, size)), shape };
    const width = size / shape[0];
    const groups = shape[0] * Math.ceil(width / GROUP_SIZE);
    const scales = decodeFloat16(new Uint16Array(buffer, at, groups));
    const numbers = new Int8Array(buffer, at + 2 * groups, size);
    const data = new Float32Array(size);
    for (let row = 0, i = 0, group = 0; row < shape[0]; row++) {
      for (const end = i + width; i < end; group++) for (const stop = Math.min(end, i + GROUP_SIZE); i < stop; i++) data[i] = numbers[i] * scales[group];
    }
    return { data, shape };
  });
}

/** @param {Uint16Array} halves @returns {Float32Array} */
export function decodeFloat16(halves) {
  const data = new Float32Array(halves.length);
  const bits = new Uint32Array(data.buffer);
  for (let i = 0; i < halves.length; i++) {
    const exponent = (halves[i] >> 10) & 31;
    const fraction = halves[i] & 1023;
    const sign = halves[i] >> 15;
    if (exponent === 0) data[i] = (sign ? -1 : 1) * fraction * 2 ** -24;
    else bits[i] = ((sign << 31) | ((exponent === 31 ? 255 : exponent + 112) << 23) | (fraction << 13)) >>> 0;
  }
  return data;
}
