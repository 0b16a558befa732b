/** Weights of a page's model: float32, float16, or int8 with a scale per row. */

/** @typedef {import("./fast_operations.js").Tensor} Tensor */

/** @param {{shape: number[], type: string, at: number}[]} headers @param {ArrayBuffer} buffer @returns {Tensor[]} */
export function readTensors(headers, buffer) {
  return headers.map(({ shape, type, at }) => {
    const size = shape.reduce((product, n) => product * n, 1);
    if (type === "float32") return { data: new Float32Array(buffer, at, size), shape };
    if (type === "float16") return { data: decodeFloat16(new Uint16Array(buffer, at, size)), shape };
    const scales = new Float32Array(buffer, at, shape[0]);
    const numbers = new Int8Array(buffer, at + 4 * shape[0], size);
    const width = size / shape[0];
    const data = new Float32Array(size);
    for (let row = 0, i = 0; row < shape[0]; row++) for (const end = i + width; i < end; i++) data[i] = numbers[i] * scales[row];
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
