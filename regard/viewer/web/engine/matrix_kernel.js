/**
 * Matrix products in WebAssembly SIMD, with the dot products of the attention kernel: four rows by eight columns at a
 * time. The reference implementation, for browsers without SIMD and for small matrices, is a loop.
 */

import { instantiateKernel } from "../weights/kernel.js";

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
   * @param {number} across distance of adjacent columns @param {number} down distance of adjacent rows @param {number} at
   */
  interleave(b, from, inside, columns, across, down, at) {
    const { numbers } = this;
    for (let first = 0; first < columns; first += 8, at += 8 * inside) {
      const lanes = Math.min(8, columns - first);
      for (let lane = 0; lane < lanes; lane++) {
        let read = from + (first + lane) * across;
        for (let i = 0, write = at + lane; i < inside; i++, write += 8, read += down) numbers[write] = b[read];
      }
      for (let lane = lanes; lane < 8; lane++) for (let i = 0, write = at + lane; i < inside; i++, write += 8) numbers[write] = 0;
    }
  }

  /** Products of rows with packed columns. @param {Float32Array | Float64Array} a @param {number} from @param {number} rows @param {number} inside @param {number} columns @param {number} packed @param {Float32Array} out @param {number} to @param {number} at scratch for 4 · (inside + columns rounded up) numbers */
  products(a, from, rows, inside, columns, packed, out, to, at) {
    const groups = (columns + 7) >> 3;
    const stride = 8 * groups;
    const { numbers, run } = this;
    const results = at + 4 * inside;
    for (let row = 0; row < rows; row += 4) {
      const count = Math.min(4, rows - row);
      if (count < 4) numbers.fill(0, at, results);
      for (let j = 0; j < count; j++) {
        for (let i = 0, read = from + (row + j) * inside, write = at + j; i < inside; i++, write += 4) numbers[write] = a[read + i];
      }
      run.dots(4 * at, 4 * packed, 4 * results, groups, inside, 4 * stride);
      for (let j = 0; j < count; j++) {
        const read = results + j * stride;
        out.set(numbers.subarray(read, read + columns), to + (row + j) * columns);
      }
    }
  }

  /** x Wᵀ + b. @param {Float32Array} x @param {Float32Array} weight (outputs, width) @param {Float32Array | null} bias @param {number} rows @param {number} width @param {number} outputs */
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

  /** Adds one matrix product to `out`. @param {Float32Array} a @param {number} from @param {Float32Array} b @param {number} second @param {number} rows @param {number} inside @param {number} columns @param {Float32Array} out @param {number} to */
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
