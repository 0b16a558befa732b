/** Runs a graph of the model: sizes, operations, matrix products in WebAssembly. */

import {
  axisOf,
  broadcastIndex,
  broadcastShape,
  elementwiseOf,
  erf,
  execute,
  sizeOf,
  stridesOf,
} from "../trace/operations.js";
import { instantiateKernel } from "../weights/kernel.js";

/* Dynamic sizes of a graph: a number, a name, or a list of an operator and its operands. */

/** @typedef {number | string | any[]} Expression */

/** @type {Record<string, (a: number, b: number) => number>} */
const OPERATORS = {
  "+": (a, b) => a + b,
  "*": (a, b) => a * b,
  "//": (a, b) => Math.floor(a / b),
  "%": (a, b) => a - b * Math.floor(a / b),
  max: Math.max,
  min: Math.min,
};

/** @param {Expression} expression @param {Record<string, number>} sizes @returns {number} */
function evaluateSize(expression, sizes) {
  if (typeof expression === "number") return expression;
  if (typeof expression === "string") return sizes[expression];
  const [operator, ...operands] = expression;
  return operands.map((one) => evaluateSize(one, sizes)).reduce(OPERATORS[operator]);
}

/** Whether an option contains a dynamic size. @param {any} option @returns {boolean} */
function isDynamic(option) {
  if (Array.isArray(option)) return option.some(isDynamic);
  return option !== null && typeof option === "object" && ("size" in option || Object.values(option).some(isDynamic));
}

/** Replaces dynamic sizes by numbers. @param {any} option @param {Record<string, number>} sizes @returns {any} */
export function resolveSizes(option, sizes) {
  if (Array.isArray(option)) return option.map((one) => resolveSizes(one, sizes));
  if (option === null || typeof option !== "object") return option;
  if ("size" in option) return evaluateSize(option.size, sizes);
  return Object.fromEntries(Object.entries(option).map(([name, one]) => [name, resolveSizes(one, sizes)]));
}

/*
 * * Operations of graphs on typed arrays. Every operation is defined in steps/operations.js, the reference implementation, which also
 * computes the operations that have no faster form here.
 */

/**
 * @typedef {{data: any, shape: number[]}} Tensor contiguous numbers: a Float32Array, or a Float64Array of kind "double"
 */

/** @param {number} size @param {string | undefined} kind */
const allocate = (size, kind) => (kind === "double" ? new Float64Array(size) : new Float32Array(size));

/**
 * Executes an operation. @param {string} op @param {(Tensor | null)[]} inputs @param {any} options
 * @param {MatrixKernel} kernel @param {string} [kind] @returns {Tensor}
 */
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

/**
 * @param {{f: (...x: number[]) => number, numbers: number[]}} one @param {Tensor[]} inputs
 * @param {string | undefined} kind @returns {Tensor}
 */
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

/**
 * Copies the elements at an offset with strides. @param {any} data @param {number[]} shape @param {number[]} strides
 * @param {number} offset @returns {Tensor}
 */
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

/**
 * Copies rows of a tensor whose axes before `axis` are outer and after it inner. @param {Tensor} x @param {number} axis
 * @param {ArrayLike<number>} rows @returns {any}
 */
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

/**
 * The normal distribution function at multiples of 1 ⁄ CDF_STEPS, and its derivatives: cubic interpolation is exact to
 * 2e-9.
 */
const [CDF_LIMIT, CDF_STEPS] = [8, 32];
const CDF_AT = Float64Array.from({ length: 2 * CDF_LIMIT * CDF_STEPS + 2 }, (_, i) => i / CDF_STEPS - CDF_LIMIT);
const CDF = CDF_AT.map((x) => 0.5 * (1 + erf(x / Math.SQRT2)));
const CDF_SLOPES = CDF_AT.map((x) => Math.exp(-0.5 * x * x) / Math.sqrt(2 * Math.PI) / CDF_STEPS);

/** @param {number} x */
function normalCdf(x) {
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
    return {
      data: kernel.linear(x.data, weight.data, bias?.data ?? null, rows, width, outputs),
      shape: [...x.shape.slice(0, -1), outputs],
    };
  },
  matmul: ([a, b], _, kernel) => {
    if (a.shape.length < 2 || b.shape.length < 2) return null;
    const [rows, inside] = a.shape.slice(-2);
    const columns = b.shape[b.shape.length - 1];
    const batch = broadcastShape([a.shape.slice(0, -2), b.shape.slice(0, -2)]);
    const [left, right] = [a, b].map((x) => broadcastIndex(x.shape.slice(0, -2), batch));
    const out = new Float32Array(sizeOf(batch) * rows * columns);
    for (let i = 0; i < sizeOf(batch); i++) {
      kernel.multiply(
        a.data,
        left(i) * rows * inside,
        b.data,
        right(i) * inside * columns,
        rows,
        inside,
        columns,
        out,
        i * rows * columns,
      );
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
  layer_norm: ([x, weight, bias], { eps = 1e-5, normalized_shape }) =>
    normalizeRows(x, weight, bias, sizeOf(normalized_shape), eps, true),
  rms_norm: ([x, weight], { eps, normalized_shape }) =>
    normalizeRows(x, weight, null, sizeOf(normalized_shape), eps ?? 2 ** -23, false),
  add: ([x, y], { alpha = 1, other }) => {
    const shape = y ? broadcastShape([x.shape, y.shape]) : x.shape;
    const size = sizeOf(shape);
    if (alpha !== 1 || x.data instanceof Float64Array || x.data.length !== size || (y && y.data.length !== size))
      return null;
    const out = new Float32Array(size);
    if (y) for (let i = 0; i < out.length; i++) out[i] = x.data[i] + y.data[i];
    else for (let i = 0; i < out.length; i++) out[i] = x.data[i] + other;
    return { data: out, shape };
  },
  mul: ([x, y], { other }) => {
    if (
      x.data instanceof Float64Array ||
      (y && !(y.data.length === x.data.length && String(y.shape) === String(x.shape)))
    )
      return null;
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
    return copyStrided(
      x.data,
      axes.map((/** @type {number} */ axis) => x.shape[axis]),
      axes.map((/** @type {number} */ axis) => strides[axis]),
      0,
    );
  },
  expand: ([x], { shape }) => {
    const ahead = shape.length - x.shape.length;
    const strides = stridesOf(x.shape);
    return copyStrided(
      x.data,
      shape,
      shape.map((/** @type {number} */ n, /** @type {number} */ axis) =>
        axis < ahead || x.shape[axis - ahead] !== n ? 0 : strides[axis - ahead],
      ),
      0,
    );
  },
  slice: ([x], { dim, start, end, step = 1 }) => {
    const axis = axisOf(dim, x.shape);
    const strides = stridesOf(x.shape);
    const count = Math.max(0, Math.ceil((Math.min(end, x.shape[axis]) - start) / step));
    const shape = x.shape.map((n, i) => (i === axis ? count : n));
    return copyStrided(
      x.data,
      shape,
      strides.map((n, i) => (i === axis ? n * step : n)),
      start * strides[axis],
    );
  },
  select: ([x], { dim, index }) => {
    const axis = axisOf(dim, x.shape);
    const strides = stridesOf(x.shape);
    const from = (index < 0 ? index + x.shape[axis] : index) * strides[axis];
    return copyStrided(
      x.data,
      x.shape.filter((_, i) => i !== axis),
      strides.filter((_, i) => i !== axis),
      from,
    );
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

/**
 * @param {Tensor} x @param {Tensor | null | undefined} weight @param {Tensor | null | undefined} bias
 * @param {number} width @param {number} eps @param {boolean} isCentered @returns {Tensor}
 */
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
    for (let i = 0; i < width; i++)
      out[from + i] = (data[from + i] - mean) * factor * (gain ? gain[i] : 1) + (shift ? shift[i] : 0);
  }
  return { data: out, shape };
}

/*
 * * Matrix products in WebAssembly SIMD, with the dot products of the attention kernel: four rows by eight columns at a
 * time. The reference implementation, for browsers without SIMD and for small matrices, is a loop.
 */

/** Products with fewer multiplications are computed by the loop. */
const MIN_PRODUCTS = 2048;

export class MatrixKernel {
  /** @param {boolean} [fast] whether to use WebAssembly */
  constructor(fast = true) {
    /** Addresses of packed weights, in numbers. @type {WeakMap<object, number>} */
    this.packed = new WeakMap();
    this.used = 0;
    this.scratchAt = 0;
    this.scratchSize = 0;
    const kernel = fast ? instantiateKernel() : null;
    this.run = kernel?.run ?? null;
    if (kernel === null) return;
    this.memory = kernel.memory;
    this.numbers = new Float32Array(this.memory.buffer);
  }

  /** Reserves memory; returns its address in numbers. @param {number} size */
  reserve(size) {
    const at = this.used;
    this.used += Math.ceil(size / 4) * 4;
    const missing = 4 * this.used - this.memory.buffer.byteLength;
    if (missing > 0) {
      this.memory.grow(Math.max(Math.ceil(missing / 65536), this.memory.buffer.byteLength >> 18));
      this.numbers = new Float32Array(this.memory.buffer);
    }
    return at;
  }

  /** Scratch memory, valid until the next call. @param {number} size */
  scratch(size) {
    if (size > this.scratchSize) {
      this.scratchSize = 2 * size;
      this.scratchAt = this.reserve(this.scratchSize);
    }
    return this.scratchAt;
  }

  /**
   * Interleaves the columns of a matrix by eight.
   * @param {Float32Array} b @param {number} from @param {number} inside @param {number} columns
   * @param {number} across distance of adjacent columns @param {number} down distance of adjacent rows
   * @param {number} at
   */
  interleave(b, from, inside, columns, across, down, at) {
    const { numbers } = this;
    for (let first = 0; first < columns; first += 8, at += 8 * inside) {
      const lanes = Math.min(8, columns - first);
      for (let lane = 0; lane < lanes; lane++) {
        let read = from + (first + lane) * across;
        for (let i = 0, write = at + lane; i < inside; i++, write += 8, read += down) numbers[write] = b[read];
      }
      for (let lane = lanes; lane < 8; lane++)
        for (let i = 0, write = at + lane; i < inside; i++, write += 8) numbers[write] = 0;
    }
  }

  /**
   * Products of rows with packed columns. @param {Float32Array | Float64Array} a @param {number} from
   * @param {number} rows @param {number} inside @param {number} columns @param {number} packed
   * @param {Float32Array} out @param {number} to
   * @param {number} at scratch for 4 · (inside + columns rounded up) numbers
   */
  products(a, from, rows, inside, columns, packed, out, to, at) {
    const groups = (columns + 7) >> 3;
    const stride = 8 * groups;
    const { numbers, run } = this;
    const results = at + 4 * inside;
    for (let row = 0; row < rows; row += 4) {
      const count = Math.min(4, rows - row);
      if (count < 4) numbers.fill(0, at, results);
      for (let j = 0; j < count; j++) {
        for (let i = 0, read = from + (row + j) * inside, write = at + j; i < inside; i++, write += 4)
          numbers[write] = a[read + i];
      }
      run.dots(4 * at, 4 * packed, 4 * results, groups, inside, 4 * stride);
      for (let j = 0; j < count; j++) {
        const read = results + j * stride;
        out.set(numbers.subarray(read, read + columns), to + (row + j) * columns);
      }
    }
  }

  /**
   * x Wᵀ + b. @param {Float32Array} x @param {Float32Array} weight (outputs, width) @param {Float32Array | null} bias
   * @param {number} rows @param {number} width @param {number} outputs
   */
  linear(x, weight, bias, rows, width, outputs) {
    const out = new Float32Array(rows * outputs);
    if (this.run && width * outputs >= MIN_PRODUCTS) {
      let packed = this.packed.get(weight);
      if (packed === undefined) {
        packed = this.reserve(width * 8 * ((outputs + 7) >> 3));
        this.interleave(weight, 0, width, outputs, width, 1, packed);
        this.packed.set(weight, packed);
      }
      const at = this.scratch(4 * (width + outputs + 8));
      this.products(x, 0, rows, width, outputs, packed, out, 0, at);
      if (bias) for (let row = 0, at = 0; row < rows; row++) for (let i = 0; i < outputs; i++) out[at++] += bias[i];
      return out;
    }
    for (let row = 0, at = 0; row < rows; row++) {
      for (let o = 0; o < outputs; o++) {
        let sum = bias ? bias[o] : 0;
        for (let i = 0, a = row * width, b = o * width; i < width; i++) sum += x[a + i] * weight[b + i];
        out[at++] = sum;
      }
    }
    return out;
  }

  /**
   * Adds one matrix product to `out`. @param {Float32Array} a @param {number} from @param {Float32Array} b
   * @param {number} second @param {number} rows @param {number} inside @param {number} columns
   * @param {Float32Array} out @param {number} to
   */
  multiply(a, from, b, second, rows, inside, columns, out, to) {
    if (this.run && rows >= 4 && rows * inside * columns >= MIN_PRODUCTS) {
      const size = inside * 8 * ((columns + 7) >> 3);
      const at = this.scratch(size + 4 * (inside + columns + 8));
      this.interleave(b, second, inside, columns, 1, columns, at);
      this.products(a, from, rows, inside, columns, at, out, to, at + size);
      return;
    }
    for (let row = 0; row < rows; row++) {
      const write = to + row * columns;
      for (let i = 0; i < inside; i++) {
        const factor = a[from + row * inside + i];
        for (let j = 0, read = second + i * columns; j < columns; j++) out[write + j] += factor * b[read + j];
      }
    }
  }
}

/* Runs a graph (regard/graph/writer.py) on new inputs. No DOM: this runs in a worker, and under node. */

/**
 * @typedef {{op: string, in: (number | null)[], out: number, options?: any, kind?: string, body?: Body, isDynamic?:
 * boolean,
 *   frees?: number[]}} Step
 * @typedef {{inputs: number[], steps: Step[], outputs: number[]}} Body
 * @typedef {{inputs: {name: string, slot: number, shape: any[]}[], tensors: [number, number][], steps: Step[],
 *   outputs: Record<string, number>, slots: number, positions?: [number, number][], layers?: Record<string, number[]>,
 *   attentions?: import("./experiments.js").AttentionPart[]}} GraphJson
 * @typedef {{replaced: Map<number, (value: Tensor, iteration: number) => Tensor>, bypassed: Map<number, number>}} Edits
 * changes of a run, by slot: functions of a step's value, and slots whose value replaces that of a step
 */

export class GraphRunner {
  /** @param {GraphJson} json @param {Tensor[]} tensors parameters and constants @param {MatrixKernel} kernel */
  constructor(json, tensors, kernel) {
    this.json = json;
    this.kernel = kernel;
    /** @type {(Tensor | undefined)[]} */
    this.constants = new Array(json.slots);
    for (const [slot, tensor] of json.tensors) this.constants[slot] = tensors[tensor];
    /** Steps that an edit may change are never computed in advance. */
    const parts = (json.attentions ?? []).flatMap(({ scale, masks, weights, context }) => [
      scale,
      ...masks,
      weights,
      context,
    ]);
    this.variable = new Set([
      ...(json.positions ?? []).map(([slot]) => slot),
      ...parts,
      ...Object.values(json.layers ?? {}).flat(),
    ]);
    this.steps = this.prepare(json.steps);
    const lastUse = new Map();
    this.steps.forEach((step, n) => {
      lastUse.set(step.out, n);
      for (const slot of usedSlots(step)) lastUse.set(slot, n);
    });
    const kept = new Set(Object.values(json.outputs));
    this.steps.forEach((step) => (step.frees = []));
    for (const [slot, n] of lastUse) if (!kept.has(slot)) this.steps[n].frees.push(slot);
  }

  /** Computes steps without inputs in advance. @param {Step[]} steps @returns {Step[]} the others */
  prepare(steps) {
    return steps.filter((step) => {
      step.isDynamic = isDynamic(step.options ?? {});
      if (step.body) {
        step.body.steps = this.prepare(step.body.steps);
        return true;
      }
      const isConstant =
        !step.isDynamic &&
        !this.variable.has(step.out) &&
        step.in.every((slot) => slot === null || this.constants[slot]);
      if (isConstant) this.constants[step.out] = this.computeStep(step, this.constants, {});
      return !isConstant;
    });
  }

  /** @param {Step} step @param {(Tensor | undefined)[]} values @param {Record<string, number>} sizes */
  computeStep(step, values, sizes) {
    const options = step.isDynamic ? resolveSizes(step.options, sizes) : (step.options ?? {});
    return compute(
      step.op,
      step.in.map((slot) => (slot === null ? null : values[slot])),
      options,
      this.kernel,
      step.kind,
    );
  }

  /**
   * @param {Record<string, Tensor>} inputs by name
   * @param {Set<number>} [recorded] slots whose values are returned too, one per iteration of a loop
   * @param {Edits} [edits]
   * @returns {{outputs: Record<string, Tensor>, values: Map<number, Tensor[]>}}
   */
  run(inputs, recorded = new Set(), edits = undefined) {
    const values = this.constants.slice();
    /** @type {Record<string, number>} */
    const sizes = {};
    for (const { name, slot, shape } of this.json.inputs) {
      values[slot] = inputs[name];
      shape.forEach((size, axis) => {
        if (typeof size === "string") sizes[size] = inputs[name].shape[axis];
      });
    }
    /** @type {Map<number, Tensor[]>} */
    const collected = new Map([...recorded].map((slot) => [slot, this.constants[slot] ? [this.constants[slot]] : []]));
    this.runSteps(this.steps, values, sizes, collected, edits, 0);
    const outputs = Object.fromEntries(Object.entries(this.json.outputs).map(([name, slot]) => [name, values[slot]]));
    return { outputs, values: collected };
  }

  /**
   * @param {Step[]} steps @param {(Tensor | undefined)[]} values @param {Record<string, number>} sizes
   * @param {Map<number, Tensor[]>} collected @param {Edits | undefined} edits @param {number} iteration
   */
  runSteps(steps, values, sizes, collected, edits, iteration) {
    for (const step of steps) {
      const other = edits?.bypassed.get(step.out);
      let value =
        other !== undefined
          ? values[other]
          : step.body
            ? this.scan(step, values, sizes, collected, edits)
            : this.computeStep(step, values, sizes);
      const replace = edits?.replaced.get(step.out);
      if (replace) value = replace(value, iteration);
      values[step.out] = value;
      collected.get(step.out)?.push(value);
      // Without edits, values that no other step reads are released.
      if (!edits && step.frees) for (const slot of step.frees) values[slot] = undefined;
    }
  }

  /**
   * @param {Step} step @param {(Tensor | undefined)[]} values @param {Record<string, number>} sizes
   * @param {Map<number, Tensor[]>} collected @param {Edits | undefined} edits @returns {Tensor}
   */
  scan(step, values, sizes, collected, edits) {
    const { inputs, steps, outputs } = step.body;
    let state = values[step.in[0]];
    const elements = values[step.in[1]];
    const [count, ...shape] = elements.shape;
    const size = elements.data.length / count;
    let stacked = null;
    for (let i = 0; i < count; i++) {
      values[inputs[0]] = state;
      values[inputs[1]] = { data: elements.data.subarray(i * size, (i + 1) * size), shape };
      this.runSteps(steps, values, sizes, collected, edits, i);
      state = values[outputs[0]];
      const { data, shape: each } = values[outputs[1]];
      stacked ??= { data: new Float32Array(count * data.length), shape: [count, ...each] };
      stacked.data.set(data, i * data.length);
    }
    return stacked;
  }
}

/** Slots that a step, or the body of a loop, reads. @param {Step} step @returns {number[]} */
function usedSlots(step) {
  const own = step.in.filter((slot) => slot !== null);
  return step.body ? [...own, ...step.body.outputs, ...step.body.steps.flatMap(usedSlots)] : own;
}
