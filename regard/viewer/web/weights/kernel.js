/**
 * Fast computation of attention weights: four queries by eight keys at a time, in 700 bytes of SIMD WebAssembly that are
 * assembled here. The reference implementation (`computeWeights` in maths.js) computes the numbers that are displayed,
 * and replaces this kernel where WebAssembly is not available. This one is for drawing: float32, accurate to about five
 * digits.
 */

import { computeWeights, keyRange } from "./maths.js";

/** @typedef {import("./maths.js").Head} Head */

// The instructions that are needed, by the names of the WebAssembly specification.
const I32 = 0x7f;
const F32 = 0x7d;
const V128 = 0x7b;
/** @param {number} local */
const get = (local) => [0x20, local];
/** @param {number} local */
const set = (local) => [0x21, local];
/** @param {number} local */
const tee = (local) => [0x22, local];
/** @param {number} code */
const simd = (code) => [0xfd, ...unsigned(code)];
/** @param {number} offset */
const v128Load = (offset) => [simd(0), 0, unsigned(offset)];
/** @param {number} offset */
const v128LoadSplat = (offset) => [simd(9), 0, unsigned(offset)];
/** @param {number} offset */
const v128Store = (offset) => [simd(11), 0, unsigned(offset)];
/** @param {number} lane */
const f32x4Lane = (lane) => [simd(0x1f), lane];
const i32x4Splat = simd(0x11);
const f32x4Splat = simd(0x13);
const f32x4Nearest = simd(0x6a);
const i32x4Shl = simd(0xab);
const i32x4Add = simd(0xae);
const f32x4Add = simd(0xe4);
const f32x4Sub = simd(0xe5);
const f32x4Mul = simd(0xe6);
const f32x4Max = simd(0xe9);
const i32x4TruncSat = simd(0xf8);
const i32Add = 0x6a;
const i32Sub = 0x6b;
const f32Add = 0x92;
const f32Max = 0x97;
/** @param {number} n */
const i32Const = (n) => [0x41, signed(n)];
/** @param {number} x */
const f32Const = (x) => [0x43, ...new Uint8Array(new Float32Array([x]).buffer)];
/** Broadcasts a constant to four lanes. @param {number} x */
const splat = (x) => [f32Const(x), f32x4Splat];
/** Advances a pointer. @param {number} local @param {number} bytes */
const advance = (local, bytes) => [get(local), i32Const(bytes), i32Add, set(local)];
/** A loop with the number of iterations in a local. @param {number} local @param {any[]} body */
const repeat = (local, body) => [0x03, 0x40, body, get(local), i32Const(1), i32Sub, tee(local), 0x0d, 0, 0x0b];

/** Unsigned LEB128. @param {number} n @returns {number[]} */
function unsigned(n) {
  return n < 128 ? [n] : [(n & 127) | 128, ...unsigned(n >>> 7)];
}

/** Signed LEB128. @param {number} n @returns {number[]} */
function signed(n) {
  const last = (n >> 6 === 0 && !(n & 64)) || (n >> 6 === -1 && n & 64);
  return last ? [n & 127] : [(n & 127) | 128, ...signed(n >> 7)];
}

/** Score of masked keys: smaller than every other score, but finite. */
const MASKED_SCORE = -3e38;
const LANES = [0, 1, 2, 3];

/**
 * dots(q, k, out, groups, D, stride): dot products of four queries with 8 · groups keys. q is interleaved by four
 * queries,
 * k by the eight keys of a group. A query's row in `out` has `stride` bytes.
 */
function dotsBody() {
  const [q, k, out, groups, width, stride, d, query, slot] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
  /** The accumulator of query j and half h of the keys. @param {number} j @param {number} h */
  const sum = (j, h) => 9 + 2 * j + h;
  const [near, far, number] = [17, 18, 19];
  return repeat(groups, [
    LANES.map((j) => [splat(0), tee(sum(j, 0)), set(sum(j, 1))]),
    [get(q), set(query), get(width), set(d)],
    repeat(d, [
      [get(k), v128Load(0), set(near), get(k), v128Load(16), set(far)],
      LANES.map((j) => [
        [get(query), v128LoadSplat(4 * j), tee(number)],
        [get(near), f32x4Mul, get(sum(j, 0)), f32x4Add, set(sum(j, 0))],
        [get(number), get(far), f32x4Mul, get(sum(j, 1)), f32x4Add, set(sum(j, 1))],
      ]),
      [advance(k, 32), advance(query, 16)],
    ]),
    [get(out), set(slot)],
    LANES.map((j) => [
      [get(slot), get(sum(j, 0)), v128Store(0), get(slot), get(sum(j, 1)), v128Store(16)],
      [get(slot), get(stride), i32Add, set(slot)],
    ]),
    advance(out, 32),
  ]);
}

/** max(x, n): the maximum of 4 n numbers. */
function maxBody() {
  const [x, n, best] = [0, 1, 2];
  return [
    [splat(MASKED_SCORE), set(best)],
    repeat(n, [get(best), get(x), v128Load(0), f32x4Max, set(best), advance(x, 16)]),
    [get(best), f32x4Lane(0), get(best), f32x4Lane(1), f32Max],
    [get(best), f32x4Lane(2), get(best), f32x4Lane(3), f32Max, f32Max],
  ];
}

/**
 * exps(x, n, max): replaces each of 4 n numbers by e^(x − max), and returns their sum.
 * e^x = 2^n e^r, where n is x / ln 2 rounded and r the remainder, with eight terms of the series of e^r.
 */
function expsBody() {
  const [x, n, max, sum, remainder, exponent, power] = [0, 1, 2, 3, 4, 5, 6];
  const coarse = 355 / 512; // ln 2 in two parts, so that the product of n and the first is exact
  const terms = [1];
  for (let i = 1; i < 8; i++) terms.push(terms[i - 1] / i);
  return [
    [splat(0), set(sum)],
    repeat(n, [
      [get(x), get(x), v128Load(0), get(max), f32x4Splat, f32x4Sub, splat(-87), f32x4Max, set(remainder)],
      [get(remainder), splat(Math.LOG2E), f32x4Mul, f32x4Nearest, set(exponent)],
      [get(remainder), get(exponent), splat(coarse), f32x4Mul, f32x4Sub],
      [get(exponent), splat(Math.LN2 - coarse), f32x4Mul, f32x4Sub, set(remainder)],
      splat(terms[7]),
      [6, 5, 4, 3, 2, 1, 0].map((i) => [get(remainder), f32x4Mul, splat(terms[i]), f32x4Add]),
      // 2^n from its bits: the exponent of a float starts at bit 23.
      [get(exponent), i32x4TruncSat, i32Const(127), i32x4Splat, i32x4Add, i32Const(23), i32x4Shl],
      [f32x4Mul, tee(power), v128Store(0)],
      [get(sum), get(power), f32x4Add, set(sum), advance(x, 16)],
    ]),
    [get(sum), f32x4Lane(0), get(sum), f32x4Lane(1), f32Add],
    [get(sum), f32x4Lane(2), get(sum), f32x4Lane(3), f32Add, f32Add],
  ];
}

/**
 * The bytes of the module: types, one imported memory, three functions and their names.
 * @returns {Uint8Array<ArrayBuffer>}
 */
function kernelBytes() {
  /** @param {any[]} parts @returns {number[]} */
  const flat = (parts) => parts.flat(Infinity);
  /** @param {any[]} items */
  const list = (items) => flat([unsigned(items.length), items]);
  /** @param {number} id @param {any[]} items */
  const section = (id, items) => [id, unsigned(list(items).length), list(items)];
  /** @param {string} text */
  const name = (text) => list([...text].map((letter) => letter.charCodeAt(0)));
  /** @param {any[]} locals @param {any[]} body */
  const code = (locals, body) => {
    const all = flat([list(locals), body, 0x0b]);
    return [unsigned(all.length), all];
  };
  return Uint8Array.from(
    flat([
      [0, 0x61, 0x73, 0x6d, 1, 0, 0, 0],
      section(1, [
        [0x60, list([I32, I32, I32, I32, I32, I32]), list([])],
        [0x60, list([I32, I32]), list([F32])],
        [0x60, list([I32, I32, F32]), list([F32])],
      ]),
      section(2, [[name("page"), name("memory"), 2, 0, 1]]),
      section(3, [0, 1, 2]),
      section(7, [
        [name("dots"), 0, 0],
        [name("max"), 0, 1],
        [name("exps"), 0, 2],
      ]),
      section(10, [
        code(
          [
            [3, I32],
            [11, V128],
          ],
          dotsBody(),
        ),
        code([[1, V128]], maxBody()),
        code([[4, V128]], expsBody()),
      ]),
    ]),
  );
}

/**
 * The functions of the kernel and their memory; null without SIMD, or if the page's content security policy forbids it.
 * @returns {{memory: WebAssembly.Memory, run: any} | null}
 */
export function instantiateKernel() {
  try {
    const memory = new WebAssembly.Memory({ initial: 1 });
    const module = new WebAssembly.Module(kernelBytes());
    return { memory, run: new WebAssembly.Instance(module, { page: { memory } }).exports };
  } catch {
    return null;
  }
}

/** Capacity of the kernel's memory for keys of heads, in numbers; when it is full, all of them are evicted. */
const DEFAULT_CAPACITY = 24 * 2 ** 20;

/** Computes rows of weights of any head. */
export class Kernel {
  /** @param {boolean} [fast] whether to use WebAssembly @param {number} [capacity] capacity for keys, in numbers */
  constructor(fast = true, capacity = DEFAULT_CAPACITY) {
    this.capacity = capacity;
    /** By head: the address of its keys, and each row's maximum score and sum of exponentials. */
    this.slots = new WeakMap();
    const kernel = fast ? instantiateKernel() : null;
    this.run = kernel?.run ?? null;
    if (kernel === null) return;
    this.memory = kernel.memory;
    this.memory32 = new Float32Array(this.memory.buffer);
    this.generation = 0;
    this.scratch = 0;
    this.used = 0;
  }

  /**
   * Writes the weights of some rows for the keys from..to, row after row, into `out`.
   * @param {Head} head @param {number[]} rows @param {number} from @param {number} to @param {Float32Array} out
   */
  computeRows(head, rows, from, to, out) {
    const width = to - from;
    if (!this.run || head.w || head.relative) {
      const row = new Float64Array(head.S);
      rows.forEach((t, i) => out.set(computeWeights(head, t, row).subarray(from, to), i * width));
      return;
    }
    for (let i = 0; i < rows.length; i += 4) {
      this.computeFourRows(head, rows.slice(i, i + 4), from, to, out.subarray(i * width));
    }
  }

  /**
   * @param {Head} head @param {number[]} rows at most four @param {number} from @param {number} to
   * @param {Float32Array} out
   */
  computeFourRows(head, rows, from, to, out) {
    const { D, S, T, bias, cap, scale, q } = head;
    const slot = this.allocate(head);
    const ranges = rows.map((t) => keyRange(head.mask, t + S - T, S));
    // If the maximum and the sum of a row are known from an earlier call, only the requested keys are computed.
    const isKnown = rows.every((t) => slot.sums[t] !== 0);
    let first = Math.min(...ranges.map((range) => range.from));
    let end = Math.max(...ranges.map((range) => range.to));
    if (isKnown) [first, end] = [Math.max(first, from), Math.min(end, to)];
    const width = to - from;
    out.fill(0, 0, rows.length * width);
    if (first >= end) return;
    const group = first >> 3;
    const groups = ((end + 7) >> 3) - group;
    const stride = groups * 8;
    const f = this.memory32;
    rows.forEach((t, j) => {
      for (let d = 0; d < D; d++) f[4 * d + j] = q[t * D + d] * scale;
    });
    const results = 4 * D;
    this.run.dots(0, 4 * (slot.at + group * 8 * D), 4 * results, groups, D, 4 * stride);
    rows.forEach((t, j) => {
      const range = ranges[j];
      const begin = results + j * stride;
      const key = group * 8; // index of the first key
      if (cap) for (let i = 0; i < stride; i++) f[begin + i] = cap * Math.tanh(f[begin + i] / cap);
      if (bias) for (let i = 0; i < stride && key + i < S; i++) f[begin + i] += bias[key + i - t + T - 1];
      if (range.from > key) f.fill(MASKED_SCORE, begin, begin + Math.min(stride, range.from - key));
      if (range.to < key + stride) f.fill(MASKED_SCORE, begin + Math.max(0, range.to - key), begin + stride);
      if (range.isOpen) for (let i = 0; i < stride; i++) if (!range.isOpen(key + i)) f[begin + i] = MASKED_SCORE;
      if (!isKnown) slot.maxima[t] = this.run.max(4 * begin, stride / 4);
      const isFullyMasked = slot.maxima[t] < MASKED_SCORE / 2;
      const sum = this.run.exps(4 * begin, stride / 4, slot.maxima[t]);
      if (!isKnown) slot.sums[t] = isFullyMasked ? Infinity : sum;
      const low = Math.max(from, range.from, first);
      const high = Math.min(to, range.to, end);
      for (let s = low; s < high; s++) out[j * width + s - from] = f[begin + s - key] / slot.sums[t];
      if (range.isOpen) for (let s = low; s < high; s++) if (!range.isOpen(s)) out[j * width + s - from] = 0;
    });
  }

  /** Returns the memory slot of a head, after copying its keys there if needed. @param {Head} head */
  allocate(head) {
    const { D, S, T, k } = head;
    let slot = this.slots.get(head);
    if (!slot) {
      slot = { generation: -1, at: 0, maxima: new Float32Array(T), sums: new Float32Array(T) };
      this.slots.set(head, slot);
    }
    if (slot.generation === this.generation) return slot;
    const groups = (S + 7) >> 3;
    const scratch = 4 * D + 4 * groups * 8;
    const size = groups * 8 * D;
    if (scratch > this.scratch || this.used + size > this.capacity) {
      this.generation++;
      this.scratch = Math.max(scratch, this.scratch);
      this.used = this.scratch;
    }
    slot.generation = this.generation;
    slot.at = this.used;
    this.used += size;
    const missingBytes = 4 * this.used - this.memory.buffer.byteLength;
    if (missingBytes > 0) {
      this.memory.grow(Math.ceil(missingBytes / 65536));
      this.memory32 = new Float32Array(this.memory.buffer);
    }
    const f = this.memory32;
    for (let g = 0; g < groups; g++) {
      for (let lane = 0; lane < 8; lane++) {
        const s = 8 * g + lane;
        const to = slot.at + g * 8 * D + lane;
        for (let d = 0; d < D; d++) f[to + 8 * d] = s < S ? k[s * D + d] : 0;
      }
    }
    return slot;
  }
}
