/**
 * Operations of graphs on typed arrays. Every operation is defined in steps/operations.js, the reference
 * implementation, which also computes the operations that have no faster form here.
 */

import { axisOf, broadcastIndex, broadcastShape, elementwiseOf, erf, execute, sizeOf, stridesOf } from "../steps/operations.js";

/**
 * @typedef {{data: any, shape: number[]}} Tensor contiguous numbers: a Float32Array, or a Float64Array of kind "double"
 * @typedef {import("./matrix_kernel.js").MatrixKernel} MatrixKernel
 */

/** @param {number} size @param {string | undefined} kind */
const allocate = (size, kind) => (kind === "double" ? new Float64Array(size) : new Float32Array(size));

/** Executes an operation. @param {string} op @param {(Tensor | null)[]} inputs @param {any} options @param {MatrixKernel} kernel @param {string} [kind] @returns {Tensor} */
export function compute(op, inputs, options, kernel, kind) {
  if (op === "reshape") return { data: inputs[0].data, shape: options.shape };
  if (op in FAST_OPS) {
    const fast = FAST_OPS[op](inputs, options, kernel, kind);
    if (fast) return fast;
  }
  const one = elementwiseOf(op, options, inputs.length);
  if (one !== null) return computeElementwise(one, inputs, kind);
  const { data, shape } = execute(op, /** @type {any} */ (inputs), options);
  return { data: kind === "double" ? data : Float32Array.from(data), shape };
}

/** @param {{f: (...x: number[]) => number, numbers: number[]}} one @param {Tensor[]} inputs @param {string | undefined} kind @returns {Tensor} */
function computeElementwise({ f, numbers }, inputs, kind) {
  if (inputs.length === 1) {
    const [{ data, shape }] = inputs;
    const out = allocate(data.length, kind);
    const [a, b] = numbers;
    // Functions such as Math.max depend on the number of arguments.
    if (!numbers.length) for (let i = 0; i < out.length; i++) out[i] = f(data[i]);
    else if (numbers.length === 1) for (let i = 0; i < out.length; i++) out[i] = f(data[i], a);
    else for (let i = 0; i < out.length; i++) out[i] = f(data[i], a, b);
    return { data: out, shape };
  }
  const shape = broadcastShape(inputs.map((x) => x.shape));
  const out = allocate(sizeOf(shape), kind);
  const run = shape.length ? shape[shape.length - 1] : 1;
  // Along the last axis, an input advances by one, or is repeated.
  const steps = inputs.map((x) => (x.shape.length && x.shape[x.shape.length - 1] === run && run > 1 ? 1 : 0));
  const starts = inputs.map((x) => broadcastIndex(x.shape, shape));
  const [x, y, z] = inputs.map((one) => one.data);
  const [dx, dy, dz] = steps;
  const number = numbers[0];
  for (let at = 0; at < out.length; at += run) {
    let i = starts[0](at);
    let j = starts[1](at);
    if (z) {
      let k = starts[2](at);
      for (let n = at; n < at + run; n++, i += dx, j += dy, k += dz) out[n] = f(x[i], y[j], z[k]);
    } else if (numbers.length) for (let n = at; n < at + run; n++, i += dx, j += dy) out[n] = f(x[i], y[j], number);
    else for (let n = at; n < at + run; n++, i += dx, j += dy) out[n] = f(x[i], y[j]);
  }
  return { data: out, shape };
}

/** Copies the elements at an offset with strides. @param {any} data @param {number[]} shape @param {number[]} strides @param {number} offset @returns {Tensor} */
function copyStrided(data, shape, strides, offset) {
  const out = new data.constructor(sizeOf(shape));
  const rank = shape.length;
  const last = rank - 1;
  const run = rank ? shape[last] : 1;
  const step = rank ? strides[last] : 1;
  const index = new Array(rank).fill(0);
  for (let at = 0, from = offset; at < out.length; ) {
    if (step === 1 && run > 16) {
      out.set(data.subarray(from, from + run), at);
      at += run;
    } else for (let i = 0, read = from; i < run; i++, read += step) out[at++] = data[read];
    let axis = last - 1;
    for (; axis >= 0; axis--) {
      from += strides[axis];
      if (++index[axis] < shape[axis]) break;
      from -= strides[axis] * shape[axis];
      index[axis] = 0;
    }
    if (axis < 0) break;
  }
  return { data: out, shape };
}

/** Copies rows of a tensor whose axes before `axis` are outer and after it inner. @param {Tensor} x @param {number} axis @param {ArrayLike<number>} rows @returns {any} */
function takeRows({ data, shape }, axis, rows) {
  const inner = sizeOf(shape.slice(axis + 1));
  const outer = sizeOf(shape.slice(0, axis));
  const out = new data.constructor(outer * rows.length * inner);
  for (let o = 0, at = 0; o < outer; o++) {
    for (let i = 0; i < rows.length; i++, at += inner) {
      const from = (o * shape[axis] + rows[i]) * inner;
      out.set(data.subarray(from, from + inner), at);
    }
  }
  return out;
}

/** The normal distribution function at multiples of 1 ⁄ CDF_STEPS, and its derivatives: cubic interpolation is exact to 2e-9. */
const [CDF_LIMIT, CDF_STEPS] = [8, 32];
const CDF_AT = Float64Array.from({ length: 2 * CDF_LIMIT * CDF_STEPS + 2 }, (_, i) => i / CDF_STEPS - CDF_LIMIT);
const CDF = CDF_AT.map((x) => 0.5 * (1 + erf(x / Math.SQRT2)));
const CDF_SLOPES = CDF_AT.map((x) => Math.exp(-0.5 * x * x) / Math.sqrt(2 * Math.PI) / CDF_STEPS);

/** @param {number} x */
export function normalCdf(x) {
  if (!(Math.abs(x) < CDF_LIMIT)) return x > 0 ? 1 : x < 0 ? 0 : NaN;
  const at = (x + CDF_LIMIT) * CDF_STEPS;
  const i = Math.floor(at);
  const t = at - i;
  const rise = CDF[i + 1] - CDF[i];
  const [a, b] = [CDF_SLOPES[i], CDF_SLOPES[i + 1]];
  return CDF[i] + t * (a + t * (3 * rise - 2 * a - b + t * (a + b - 2 * rise)));
}

/** @type {Record<string, (inputs: Tensor[], options: any, kernel: MatrixKernel, kind?: string) => Tensor | null>} */
const FAST_OPS = {
  linear: ([x, weight, bias], _, kernel) => {
    const [outputs, width] = weight.shape;
    const rows = x.data.length / width;
    return { data: kernel.linear(x.data, weight.data, bias?.data ?? null, rows, width, outputs), shape: [...x.shape.slice(0, -1), outputs] };
  },
  matmul: ([a, b], _, kernel) => {
    if (a.shape.length < 2 || b.shape.length < 2) return null;
    const [rows, inside] = a.shape.slice(-2);
    const columns = b.shape[b.shape.length - 1];
    const batch = broadcastShape([a.shape.slice(0, -2), b.shape.slice(0, -2)]);
    const [left, right] = [a, b].map((x) => broadcastIndex(x.shape.slice(0, -2), batch));
    const out = new Float32Array(sizeOf(batch) * rows * columns);
    for (let i = 0; i < sizeOf(batch); i++) {
      kernel.multiply(a.data, left(i) * rows * inside, b.data, right(i) * inside * columns, rows, inside, columns, out, i * rows * columns);
    }
    return { data: out, shape: [...batch, rows, columns] };
  },
  softmax: ([x], { dim }) => {
    if (axisOf(dim, x.shape) !== x.shape.length - 1) return null;
    const width = x.shape[x.shape.length - 1];
    const out = new Float32Array(x.data.length);
    for (let from = 0; from < out.length; from += width) {
      let [maximum, total] = [-Infinity, 0];
      for (let i = from; i < from + width; i++) if (x.data[i] > maximum) maximum = x.data[i];
      for (let i = from; i < from + width; i++) total += out[i] = Math.exp(x.data[i] - maximum);
      for (let i = from; i < from + width; i++) out[i] /= total;
    }
    return { data: out, shape: x.shape };
  },
  layer_norm: ([x, weight, bias], { eps = 1e-5, normalized_shape }) => normalizeRows(x, weight, bias, sizeOf(normalized_shape), eps, true),
  rms_norm: ([x, weight], { eps, normalized_shape }) => normalizeRows(x, weight, null, sizeOf(normalized_shape), eps ?? 2 ** -23, false),
  add: ([x, y], { alpha = 1, other }) => {
    const shape = y ? broadcastShape([x.shape, y.shape]) : x.shape;
    const size = sizeOf(shape);
    if (alpha !== 1 || x.data instanceof Float64Array || x.data.length !== size || (y && y.data.length !== size)) return null;
    const out = new Float32Array(size);
    if (y) for (let i = 0; i < out.length; i++) out[i] = x.data[i] + y.data[i];
    else for (let i = 0; i < out.length; i++) out[i] = x.data[i] + other;
    return { data: out, shape };
  },
  mul: ([x, y], { other }) => {
    if (x.data instanceof Float64Array || (y && !(y.data.length === x.data.length && String(y.shape) === String(x.shape)))) return null;
    const out = new Float32Array(x.data.length);
    if (y) for (let i = 0; i < out.length; i++) out[i] = x.data[i] * y.data[i];
    else for (let i = 0; i < out.length; i++) out[i] = x.data[i] * other;
    return { data: out, shape: x.shape };
  },
  silu: ([x], _, __, kind) => {
    if (kind === "double") return null;
    const out = new Float32Array(x.data.length);
    for (let i = 0; i < out.length; i++) out[i] = x.data[i] / (1 + Math.exp(-x.data[i]));
    return { data: out, shape: x.shape };
  },
  gelu: ([x], { approximate }, _, kind) => {
    if (approximate === "tanh" || kind === "double") return null;
    const out = new Float32Array(x.data.length);
    for (let i = 0; i < out.length; i++) out[i] = x.data[i] * normalCdf(x.data[i]);
    return { data: out, shape: x.shape };
  },
  permute: ([x], { dims }) => {
    const axes = dims.map((/** @type {number} */ dim) => axisOf(dim, x.shape));
    const strides = stridesOf(x.shape);
    return copyStrided(x.data, axes.map((/** @type {number} */ axis) => x.shape[axis]), axes.map((/** @type {number} */ axis) => strides[axis]), 0);
  },
  expand: ([x], { shape }) => {
    const ahead = shape.length - x.shape.length;
    const strides = stridesOf(x.shape);
    return copyStrided(x.data, shape, shape.map((/** @type {number} */ n, /** @type {number} */ axis) => (axis < ahead || x.shape[axis - ahead] !== n ? 0 : strides[axis - ahead])), 0);
  },
  slice: ([x], { dim, start, end, step = 1 }) => {
    const axis = axisOf(dim, x.shape);
    const strides = stridesOf(x.shape);
    const count = Math.max(0, Math.ceil((Math.min(end, x.shape[axis]) - start) / step));
    const shape = x.shape.map((n, i) => (i === axis ? count : n));
    return copyStrided(x.data, shape, strides.map((n, i) => (i === axis ? n * step : n)), start * strides[axis]);
  },
  select: ([x], { dim, index }) => {
    const axis = axisOf(dim, x.shape);
    const strides = stridesOf(x.shape);
    const from = (index < 0 ? index + x.shape[axis] : index) * strides[axis];
    return copyStrided(x.data, x.shape.filter((_, i) => i !== axis), strides.filter((_, i) => i !== axis), from);
  },
  cat: (inputs, { dim = 0 }) => {
    const axis = axisOf(dim, inputs[0].shape);
    const shape = [...inputs[0].shape];
    shape[axis] = inputs.reduce((sum, x) => sum + x.shape[axis], 0);
    const outer = sizeOf(shape.slice(0, axis));
    const out = new inputs[0].data.constructor(sizeOf(shape));
    const blocks = inputs.map((x) => x.data.length / outer);
    for (let o = 0, at = 0; o < outer; o++) {
      inputs.forEach((x, i) => {
        out.set(x.data.subarray(o * blocks[i], (o + 1) * blocks[i]), at);
        at += blocks[i];
      });
    }
    return { data: out, shape };
  },
  embedding: ([table, rows]) => ({ data: takeRows(table, 0, rows.data), shape: [...rows.shape, table.shape[1]] }),
  gather_rows: ([x, rows], { dim }) => {
    const axis = axisOf(dim, x.shape);
    return { data: takeRows(x, axis, rows.data), shape: x.shape.map((n, i) => (i === axis ? rows.data.length : n)) };
  },
  repeat_interleave: ([x], { repeats, dim }) => {
    const axis = axisOf(dim, x.shape);
    const rows = Array.from({ length: x.shape[axis] * repeats }, (_, i) => Math.floor(i / repeats));
    return { data: takeRows(x, axis, rows), shape: x.shape.map((n, i) => (i === axis ? rows.length : n)) };
  },
};

/** @param {Tensor} x @param {Tensor | null | undefined} weight @param {Tensor | null | undefined} bias @param {number} width @param {number} eps @param {boolean} isCentered @returns {Tensor} */
function normalizeRows({ data, shape }, weight, bias, width, eps, isCentered) {
  const out = new Float32Array(data.length);
  const gain = weight?.data;
  const shift = bias?.data;
  for (let from = 0; from < data.length; from += width) {
    let [mean, variance] = [0, 0];
    if (isCentered) {
      for (let i = 0; i < width; i++) mean += data[from + i];
      mean /= width;
    }
    for (let i = 0; i < width; i++) variance += (data[from + i] - mean) ** 2;
    const factor = 1 / Math.sqrt(variance / width + eps);
    for (let i = 0; i < width; i++) out[from + i] = (data[from + i] - mean) * factor * (gain ? gain[i] : 1) + (shift ? shift[i] : 0);
  }
  return { data: out, shape };
}
