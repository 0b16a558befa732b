/**
 * What a tape does for pictures besides what it does for texts: pixels, convolutions, labels of pixels. The operations are
 * those of regard/viewer/image_tape.py. No DOM: runs under node.
 */

import { inBrackets, inDigits } from "./tape.js";

/** @typedef {import("./tape.js").Numbers} Numbers */

/** @param {[number, number][]} pairs @param {string} [after] */
const sumOfProducts = (pairs, after = "") => ({ pieces: pairs.map(([a, b]) => `${inBrackets(a)}·${inBrackets(b)}`), sign: " + ", before: "", after });

/**
 * The cells around a cell of a convolution's output that lie in the picture: each with its place in the filter.
 * @param {number} cell @param {{size: number[], stride: number, padding: number}} options @param {number} side of the filter
 * @returns {{from: number, k: number}[]}
 */
function cellsAround(cell, { size: [height, width], stride, padding }, side) {
  const across = outputSide(width, stride, padding, side);
  const [top, left] = [Math.floor(cell / across) * stride - padding, (cell % across) * stride - padding];
  const found = [];
  for (let i = 0; i < side; i++) {
    for (let j = 0; j < side; j++) {
      const [y, x] = [top + i, left + j];
      if (y >= 0 && x >= 0 && y < height && x < width) found.push({ from: y * width + x, k: i * side + j });
    }
  }
  return found;
}

/** @param {number} length @param {number} stride @param {number} padding @param {number} side */
const outputSide = (length, stride, padding, side) => Math.floor((length + 2 * padding - side) / stride) + 1;

/** Mean and variance of all numbers. @param {Numbers} x */
function momentsOf({ data }) {
  const mean = data.reduce((sum, value) => sum + value, 0) / data.length;
  return { mean, variance: data.reduce((sum, value) => sum + (value - mean) ** 2, 0) / data.length };
}

/** @type {Record<string, import("./tape.js").Operation>} */
export const PICTURE_OPERATIONS = {
  standardise: {
    does: ([x], [mean, deviation]) => {
      const width = mean.data.length;
      return { shape: x.shape, data: Float64Array.from(x.data, (value, at) => (value - mean.data[at % width]) / deviation.data[at % width]) };
    },
    made: ([x], [mean, deviation], _, at) => {
      const i = at % mean.data.length;
      return { pieces: [`(${inDigits(x.data[at])} − ${inBrackets(mean.data[i])}) / ${inBrackets(deviation.data[i])}`], sign: "", before: "", after: "" };
    },
  },
  convolve: {
    does: ([x], [weight, bias], options) => {
      const [outputs, channels, side] = weight.shape;
      const { size, stride, padding } = options;
      const cells = size.map((/** @type {number} */ length) => outputSide(length, stride, padding, side)).reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b);
      const y = { shape: [cells, outputs], data: new Float64Array(cells * outputs) };
      for (let cell = 0; cell < cells; cell++) {
        const around = cellsAround(cell, options, side);
        for (let out = 0; out < outputs; out++) {
          let sum = bias.data[out];
          for (const { from, k } of around) {
            for (let c = 0; c < channels; c++) sum += x.data[from * channels + c] * weight.data[(out * channels + c) * side * side + k];
          }
          y.data[cell * outputs + out] = sum;
        }
      }
      return y;
    },
    made: ([x], [weight, bias], options, at) => {
      const [outputs, channels, side] = weight.shape;
      const [cell, out] = [Math.floor(at / outputs), at % outputs];
      /** @type {[number, number][]} */
      const pairs = cellsAround(cell, options, side).flatMap(({ from, k }) =>
        Array.from({ length: channels }, (_, c) => /** @type {[number, number]} */ ([x.data[from * channels + c], weight.data[(out * channels + c) * side * side + k]])),
      );
      return sumOfProducts(pairs, ` + ${inBrackets(bias.data[out])}`);
    },
  },
  norm_all: {
    does: ([x], [gain, bias], { eps }) => {
      const { mean, variance } = momentsOf(x);
      const [root, width] = [Math.sqrt(variance + eps), gain.data.length];
      return { shape: x.shape, data: Float64Array.from(x.data, (value, at) => ((value - mean) / root) * gain.data[at % width] + bias.data[at % width]) };
    },
    made: ([x], [gain, bias], { eps }, at) => {
      const { mean, variance } = momentsOf(x);
      const i = at % gain.data.length;
      const norm = `(${inDigits(x.data[at])} − ${inBrackets(mean)}) / √(${inDigits(variance)} + ${eps.toExponential(0)})`;
      return { pieces: [norm], sign: "", before: "", after: ` · ${inBrackets(gain.data[i])} + ${inBrackets(bias.data[i])}` };
    },
  },
  blend: {
    does: ([x], _, { rows, shares }) => {
      const width = x.shape[1];
      const y = { shape: [rows.length, width], data: new Float64Array(rows.length * width) };
      rows.forEach((/** @type {number[]} */ some, /** @type {number} */ t) =>
        some.forEach((row, n) => {
          for (let c = 0; c < width; c++) y.data[t * width + c] += shares[t][n] * x.data[row * width + c];
        }),
      );
      return y;
    },
    made: ([x], _, { rows, shares }, at) => {
      const width = x.shape[1];
      const [t, c] = [Math.floor(at / width), at % width];
      return sumOfProducts(rows[t].map((/** @type {number} */ row, /** @type {number} */ n) => [shares[t][n], x.data[row * width + c]]));
    },
  },
  match: {
    does: ([a, b]) => {
      const [rows, width] = a.shape;
      const columns = b.shape[0];
      const y = { shape: [rows, columns], data: new Float64Array(rows * columns) };
      for (let at = 0; at < y.data.length; at++) {
        const [from, to] = [Math.floor(at / columns) * width, (at % columns) * width];
        for (let i = 0; i < width; i++) y.data[at] += a.data[from + i] * b.data[to + i];
      }
      return y;
    },
    made: ([a, b], _, __, at) => {
      const width = a.shape[1];
      const [from, to] = [Math.floor(at / b.shape[0]) * width, (at % b.shape[0]) * width];
      return sumOfProducts(Array.from({ length: width }, (___, i) => [a.data[from + i], b.data[to + i]]));
    },
  },
};
