/**
 * A tape, done again: every step of a walk is computed here from the steps before it and the model's parameters, and
 * compared with the numbers that came along. The operations are those of regard/viewer/tape.py. No DOM: runs under node.
 */

/**
 * @typedef {{data: Float64Array, shape: number[]}} Numbers
 * @typedef {{sign: string, name: string, offset: number, shape: number[]}} Param
 * @typedef {{
 *   id: string, section: number, title: string, formula: string, where: string, op: string, inputs: number[], params: Param[],
 *   options: Record<string, any>, output: {offset: number, shape: number[], axes: string[]}, differs: number | null
 * }} Step
 * @typedef {{pieces: string[], sign: string, before: string, after: string}} Sum how one number is made of others
 * @typedef {{does: (inputs: Numbers[], params: Numbers[], options: any) => Numbers, made: (inputs: Numbers[], params: Numbers[], options: any, at: number) => Sum}} Operation
 */

/** @param {number[]} shape */
const sizeOf = (shape) => shape.reduce((product, n) => product * n, 1);

/** @param {number[]} shape @returns {Numbers} */
const zerosOf = (shape) => ({ data: new Float64Array(sizeOf(shape)), shape });

/** @param {Numbers} x */
const lastOf = (x) => x.shape[x.shape.length - 1];

/** @param {Numbers} x @param {(value: number, at: number) => number} f @param {number[]} [shape] @returns {Numbers} */
const mapped = (x, f, shape = x.shape) => ({ data: Float64Array.from(x.data, f), shape });

/** The error function, to fifteen digits: its series near 0, a continued fraction farther out. @param {number} x */
export function erf(x) {
  const a = Math.abs(x);
  if (a > 6) return Math.sign(x);
  if (a < 2.5) {
    let [term, sum] = [a, a];
    for (let n = 1; Math.abs(term) > 1e-17; n++) {
      term *= -(a * a) / n;
      sum += term / (2 * n + 1);
    }
    return (Math.sign(x) * 2 * sum) / Math.sqrt(Math.PI);
  }
  let fraction = 0;
  for (let n = 60; n > 0; n--) fraction = n / 2 / (a + fraction);
  return Math.sign(x) * (1 - Math.exp(-a * a) / ((a + fraction) * Math.sqrt(Math.PI)));
}

/** @param {number} x */
const sigmoid = (x) => 0.5 * (1 + Math.tanh(0.5 * x));

/** @type {Record<string, (x: number) => number>} */
export const FUNCTIONS_OF_ONE = {
  relu: (x) => Math.max(x, 0),
  relu2: (x) => Math.max(x, 0) ** 2,
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x * sigmoid(x),
  tanh: Math.tanh,
  sigmoid,
};

/** Which head of x serves a head of the queries. @param {Numbers} x @param {number} head @param {number} heads */
const serves = (x, head, heads) => Math.floor((head * x.shape[1]) / heads);

/** The numbers that a linear map multiplies for an output. @param {Numbers} x @param {Numbers} weight @param {Numbers | undefined} bias @returns {Numbers} */
function linear(x, weight, bias) {
  const width = lastOf(x);
  const [outputs, rows] = [weight.shape[0], x.data.length / width];
  const y = zerosOf([...x.shape.slice(0, -1), outputs]);
  for (let row = 0; row < rows; row++) {
    for (let out = 0; out < outputs; out++) {
      let sum = bias ? bias.data[out] : 0;
      for (let i = 0; i < width; i++) sum += x.data[row * width + i] * weight.data[out * width + i];
      y.data[row * outputs + out] = sum;
    }
  }
  return y;
}

/** @param {Numbers} x @param {Numbers} weight @returns {Numbers} */
function linearHeads(x, weight) {
  const [rows, , width] = x.shape;
  const [own, , outputs] = weight.shape;
  const heads = Math.max(own, x.shape[1]);
  const y = zerosOf([rows, heads, outputs]);
  for (let row = 0; row < rows; row++) {
    for (let head = 0; head < heads; head++) {
      const from = (row * x.shape[1] + serves(x, head, heads)) * width;
      for (let out = 0; out < outputs; out++) {
        let sum = 0;
        for (let i = 0; i < width; i++) sum += x.data[from + i] * weight.data[((head % own) * width + i) * outputs + out];
        y.data[(row * heads + head) * outputs + out] = sum;
      }
    }
  }
  return y;
}

/** A number for each head, query and key. @param {Numbers} q @param {Numbers} k @param {(qAt: number, kAt: number, head: number) => number} pair @returns {Numbers} */
function scoresOf(q, k, pair) {
  const [rows, heads, width] = q.shape;
  const columns = k.shape[0];
  const e = zerosOf([heads, rows, columns]);
  for (let head = 0; head < heads; head++) {
    for (let t = 0; t < rows; t++) {
      for (let s = 0; s < columns; s++) {
        const kAt = (s * k.shape[1] + serves(k, head, heads)) * width;
        e.data[(head * rows + t) * columns + s] = pair((t * heads + head) * width, kAt, head);
      }
    }
  }
  return e;
}

/** @param {Numbers} a @param {Numbers} v @returns {Numbers} */
function weigh(a, v) {
  const [heads, rows, columns] = a.shape;
  const width = lastOf(v);
  const z = zerosOf([rows, heads, width]);
  for (let head = 0; head < heads; head++) {
    for (let t = 0; t < rows; t++) {
      for (let s = 0; s < columns; s++) {
        const weight = a.data[(head * rows + t) * columns + s];
        const from = (s * v.shape[1] + serves(v, head, heads)) * width;
        for (let i = 0; i < width; i++) z.data[(t * heads + head) * width + i] += weight * v.data[from + i];
      }
    }
  }
  return z;
}

/** Changes each row of the last axis. @param {Numbers} x @param {(row: Float64Array, at: number) => ArrayLike<number>} f @returns {Numbers} */
function byRow(x, f) {
  const width = lastOf(x);
  const y = zerosOf(x.shape);
  for (let at = 0; at < x.data.length; at += width) y.data.set(f(x.data.subarray(at, at + width), at / width), at);
  return y;
}

/** @param {Float64Array} row @param {string} kind @param {number} eps */
function normParts(row, kind, eps) {
  const mean = kind === "layer" ? row.reduce((sum, x) => sum + x, 0) / row.length : 0;
  const variance = row.reduce((sum, x) => sum + (x - mean) ** 2, 0) / row.length;
  return { mean, variance, root: Math.sqrt(variance + eps) };
}

/** @param {Float64Array} row @param {number[]} others @returns {{most: number, total: number}} */
function softmaxParts(row, others) {
  const greatest = row.reduce((most, x) => Math.max(most, x), -Infinity);
  const most = Number.isFinite(greatest) ? greatest : 0;
  let total = 0;
  for (const x of row) total += Math.exp(x - most);
  for (const x of others) total += Math.exp(x - most);
  return { most, total };
}

/** How far a pair of channels turns; of a place in a grid, half of them by its row, half by its column. @param {number | number[]} place @param {Float64Array} rates @param {number} pair */
const angleOf = (place, rates, pair) => [place].flat()[Math.floor(pair / rates.length)] * rates[pair % rates.length];

/** @param {Numbers} table @param {number[]} rows @returns {Numbers} */
function rowsTaken(table, rows) {
  const size = table.data.length / table.shape[0];
  const y = zerosOf([rows.length, ...table.shape.slice(1)]);
  rows.forEach((row, i) => y.data.set(table.data.subarray(row * size, (row + 1) * size), i * size));
  return y;
}

/** Elementwise, where what comes after the first may be one row for all. @param {Numbers[]} all @param {(a: number, b: number) => number} f */
const folded = (all, f) => all.slice(1).reduce((x, other) => mapped(x, (value, at) => f(value, other.data[at % other.data.length])), all[0]);

/** @type {Record<string, (inputs: Numbers[], params: Numbers[], options: any) => Numbers>} */
export const OPERATIONS_OF_A_TAPE = {
  take: (inputs, params, { rows }) => rowsTaken([...inputs, ...params][0], rows),
  stack: (inputs) => {
    const y = zerosOf([inputs.reduce((sum, x) => sum + x.shape[0], 0), ...inputs[0].shape.slice(1)]);
    let at = 0;
    for (const x of inputs) {
      y.data.set(x.data, at);
      at += x.data.length;
    }
    return y;
  },
  beside: (inputs) => {
    const width = inputs.reduce((sum, x) => sum + lastOf(x), 0);
    const rows = inputs[0].data.length / lastOf(inputs[0]);
    const y = zerosOf([...inputs[0].shape.slice(0, -1), width]);
    for (let row = 0, at = 0; row < rows; row++) {
      for (const x of inputs) {
        y.data.set(x.data.subarray(row * lastOf(x), (row + 1) * lastOf(x)), at);
        at += lastOf(x);
      }
    }
    return y;
  },
  part: ([x], _, { start, end }) => {
    const width = lastOf(x);
    const y = zerosOf([...x.shape.slice(0, -1), end - start]);
    for (let row = 0; row < x.data.length / width; row++) y.data.set(x.data.subarray(row * width + start, row * width + end), row * (end - start));
    return y;
  },
  add: (inputs, params) => folded([...inputs, ...params], (a, b) => a + b),
  multiply: (inputs, params) => folded([...inputs, ...params], (a, b) => a * b),
  scale: ([x], _, { by }) => mapped(x, (value) => value * by),
  scale_heads: ([x], [logarithms]) => {
    const size = x.data.length / x.shape[0];
    return mapped(x, (value, at) => value * Math.exp(logarithms.data[Math.floor(at / size) % logarithms.data.length]));
  },
  linear: ([x], [weight, bias]) => linear(x, weight, bias),
  linear_heads: ([x], [weight]) => linearHeads(x, weight),
  split: ([x], _, { heads }) => ({ data: x.data, shape: [x.shape[0], heads, x.data.length / x.shape[0] / heads] }),
  join: ([x]) => ({ data: x.data, shape: [x.shape[0], x.data.length / x.shape[0]] }),
  turn: ([x]) => {
    const [rows, columns] = x.shape;
    return mapped(x, (_, at) => x.data[(at % rows) * columns + Math.floor(at / rows)], [columns, rows]);
  },
  rotate: ([x], [rates], { positions }) => {
    const [, heads, width] = x.shape;
    const half = width / 2;
    return mapped(x, (value, at) => {
      const channel = at % width;
      const angle = angleOf(positions[Math.floor(at / width / heads)], rates.data, channel % half);
      return channel < half
        ? value * Math.cos(angle) - x.data[at + half] * Math.sin(angle)
        : value * Math.cos(angle) + x.data[at - half] * Math.sin(angle);
    });
  },
  normalise: ([x], _, { eps }) =>
    byRow(x, (row) => {
      const length = Math.max(Math.sqrt(row.reduce((sum, value) => sum + value * value, 0)), eps);
      return row.map((value) => value / length);
    }),
  norm: ([x], [gain, bias], { kind, eps }) =>
    byRow(x, (row) => {
      const { mean, root } = normParts(row, kind, eps);
      return row.map((value, i) => ((value - mean) / root) * (gain ? gain.data[i] : 1) + (bias ? bias.data[i] : 0));
    }),
  dot: ([q, k]) => {
    const width = lastOf(q);
    return scoresOf(q, k, (qAt, kAt) => {
      let sum = 0;
      for (let i = 0; i < width; i++) sum += q.data[qAt + i] * k.data[kAt + i];
      return sum;
    });
  },
  concat: ([q, k], [w]) => {
    const width = lastOf(q);
    return scoresOf(q, k, (qAt, kAt, head) => {
      let sum = 0;
      for (let i = 0; i < width; i++) sum += w.data[head * width + i] * Math.tanh(q.data[qAt + i] + k.data[kAt + i]);
      return sum;
    });
  },
  relative: (_, [table], { buckets, rows }) => {
    const columns = buckets.length + 1 - rows;
    const heads = table.shape[1];
    return mapped(zerosOf([heads, rows, columns]), (__, at) => {
      const [head, t, s] = [Math.floor(at / columns / rows), Math.floor(at / columns) % rows, at % columns];
      return table.data[buckets[s - t + rows - 1] * heads + head];
    });
  },
  mask: ([x]) => {
    const [, rows, columns] = x.shape;
    return mapped(x, (value, at) => (at % columns <= (Math.floor(at / columns) % rows) + columns - rows ? value : -Infinity));
  },
  softmax: ([x, rest]) =>
    byRow(x, (row, number) => {
      const { most, total } = softmaxParts(row, rest ? [rest.data[number]] : []);
      return row.map((value) => (total > 0 ? Math.exp(value - most) / total : 0));
    }),
  weigh: ([a, v]) => weigh(a, v),
  mean: ([x]) => {
    const width = lastOf(x);
    const y = zerosOf([1, width]);
    x.data.forEach((value, at) => (y.data[at % width] += value / x.shape[0]));
    return y;
  },
  activate: ([x], _, { function: name }) => mapped(x, (value) => FUNCTIONS_OF_ONE[name](value)),
  gate: ([x, h, r], _, { function: name, part, parts, reset }) => {
    const width = lastOf(x) / parts;
    const f = FUNCTIONS_OF_ONE[name];
    return mapped(zerosOf([x.shape[0], width]), (__, at) => {
      const from = Math.floor(at / width) * lastOf(x) + part * width + (at % width);
      return f(x.data[from] + (reset ? r.data[at] : 1) * h.data[from]);
    });
  },
  between: ([n, h, z]) => mapped(n, (value, at) => (1 - z.data[at]) * value + z.data[at] * h.data[at]),
};

/** A number in a few digits. @param {number} x */
export function inDigits(x) {
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-4 ? size.toExponential(2) : size < 1 ? size.toPrecision(3) : size.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  return x < 0 ? `−${text}` : text;
}

/** The same as a factor or a summand, which begins with no minus of its own. @param {number} x */
export const inBrackets = (x) => (x < 0 ? `(${inDigits(x)})` : inDigits(x));

export class Tape {
  /** @param {{steps: Step[]}} walk @param {Float32Array} params @param {Float32Array} outputs @param {Record<string, Operation>} [more] operations that texts do without */
  constructor(walk, params, outputs, more = {}) {
    this.more = more;
    this.steps = walk.steps;
    // Float32Arrays; for types they are rows of numbers like all others here.
    this.params = /** @type {any} */ (params);
    this.outputs = /** @type {any} */ (outputs);
    /** @type {(Numbers | undefined)[]} */
    this.values = new Array(walk.steps.length);
    this.checks = new Array(walk.steps.length);
  }

  /** The numbers that came along. @param {number} n */
  given(n) {
    const { offset, shape } = this.steps[n].output;
    return this.outputs.subarray(offset, offset + sizeOf(shape));
  }

  /** @param {number} n @returns {Numbers[]} */
  paramsOf(n) {
    return this.steps[n].params.map(({ offset, shape }) => ({ data: this.params.subarray(offset, offset + sizeOf(shape)), shape }));
  }

  /** What a step gives, computed from those before it. @param {number} n @returns {Numbers} */
  value(n) {
    const waiting = [n];
    while (waiting.length) {
      const next = waiting[waiting.length - 1];
      const missing = this.steps[next].inputs.filter((i) => !this.values[i]);
      if (missing.length) waiting.push(...missing);
      else {
        waiting.pop();
        this.values[next] ??= this.computed(next);
      }
    }
    return this.values[n];
  }

  /** @param {number} n @returns {Numbers} */
  computed(n) {
    const { op, inputs, options, output } = this.steps[n];
    if (op === "given") return { data: this.given(n), shape: output.shape };
    return (OPERATIONS_OF_A_TAPE[op] ?? this.more[op].does)(inputs.map((i) => this.values[i]), this.paramsOf(n), options);
  }

  /** How far what was computed is from what came along, in parts of the largest number where that is above 1. @param {number} n @returns {number} */
  check(n) {
    if (this.checks[n] === undefined) {
      const [found, given] = [this.value(n).data, this.given(n)];
      let [gap, most] = [found.length === given.length ? 0 : Infinity, 1];
      for (let i = 0; i < given.length; i++) {
        if (found[i] === given[i]) continue;
        const apart = Math.abs(found[i] - given[i]);
        gap = Number.isNaN(apart) ? Infinity : Math.max(gap, apart);
        if (Number.isFinite(given[i])) most = Math.max(most, Math.abs(given[i]));
      }
      this.checks[n] = gap / most;
    }
    return this.checks[n];
  }

  /** How one number of a step's output is made, in numbers. @param {number} n @param {number} at its place in the output @returns {Sum | null} */
  made(n, at) {
    const { op, options, inputs: numbers } = this.steps[n];
    const inputs = numbers.map((i) => this.value(i));
    const params = this.paramsOf(n);
    if (op in this.more) return this.more[op].made(inputs, params, options, at);
    const [x, other] = inputs;
    const y = this.value(n);
    const width = lastOf(y);
    const [row, channel] = [Math.floor(at / width), at % width];
    /** @param {string[]} pieces @param {string} [sign] @param {string} [before] @param {string} [after] @returns {Sum} */
    const sum = (pieces, sign = " + ", before = "", after = "") => ({ pieces, sign, before, after });
    /** @param {number} count @param {(i: number) => [number, number]} factors */
    const products = (count, factors) =>
      Array.from({ length: count }, (_, i) => {
        const [a, b] = factors(i);
        return `${inBrackets(a)}·${inBrackets(b)}`;
      });
    if (op === "linear") {
      const inside = lastOf(x);
      const pieces = products(inside, (i) => [x.data[row * inside + i], params[0].data[channel * inside + i]]);
      return { ...sum(pieces), after: params[1] ? ` + ${inBrackets(params[1].data[channel])}` : "" };
    }
    if (op === "linear_heads") {
      const [, heads] = y.shape;
      const inside = lastOf(x);
      const [t, head] = [Math.floor(row / heads), row % heads];
      const from = (t * x.shape[1] + serves(x, head, heads)) * inside;
      return sum(products(inside, (i) => [x.data[from + i], params[0].data[((head % params[0].shape[0]) * inside + i) * width + channel]]));
    }
    if (op === "dot" || op === "concat") {
      const [rows, heads, inside] = x.shape;
      const [head, t] = [Math.floor(row / rows), row % rows];
      const [qAt, kAt] = [(t * heads + head) * inside, (channel * other.shape[1] + serves(other, head, heads)) * inside];
      if (op === "dot") return sum(products(inside, (i) => [x.data[qAt + i], other.data[kAt + i]]));
      return sum(
        Array.from({ length: inside }, (_, i) => `${inBrackets(params[0].data[head * inside + i])}·tanh(${inDigits(x.data[qAt + i])} + ${inBrackets(other.data[kAt + i])})`),
      );
    }
    if (op === "weigh") {
      const [heads, rows, columns] = x.shape;
      const [t, head] = [Math.floor(row / heads), row % heads];
      const group = serves(other, head, heads);
      return sum(products(columns, (s) => [x.data[(head * rows + t) * columns + s], other.data[(s * other.shape[1] + group) * width + channel]]));
    }
    if (op === "softmax") {
      const { data } = x;
      const own = data.subarray(row * width, (row + 1) * width);
      const pieces = Array.from(own, (value) => `exp(${inDigits(value)})`);
      if (other) pieces.push(`exp(${inDigits(other.data[row])})`);
      return sum(pieces, " + ", `exp(${inDigits(data[at])}) / (`, ")");
    }
    if (op === "add" || op === "multiply") {
      const all = [...inputs, ...params].map(({ data }) => data[at % data.length]);
      return sum(all.map((value, i) => (i ? inBrackets(value) : inDigits(value))), op === "add" ? " + " : " · ");
    }
    if (op === "scale") return sum([inDigits(x.data[at]), inBrackets(options.by)], " · ");
    if (op === "scale_heads") {
      const head = Math.floor(at / (y.data.length / y.shape[0])) % params[0].data.length;
      return sum([inDigits(x.data[at]), `exp(${inDigits(params[0].data[head])})`], " · ");
    }
    if (op === "norm") {
      const own = x.data.subarray(row * width, (row + 1) * width);
      const { mean, variance } = normParts(own, options.kind, options.eps);
      const above = options.kind === "layer" ? `(${inDigits(x.data[at])} − ${inBrackets(mean)})` : inDigits(x.data[at]);
      const after = [params[0] && ` · ${inBrackets(params[0].data[channel])}`, params[1] && ` + ${inBrackets(params[1].data[channel])}`];
      return sum([`${above} / √(${inDigits(variance)} + ${options.eps.toExponential(0)})`], "", "", after.filter(Boolean).join(""));
    }
    if (op === "normalise") {
      const own = x.data.subarray(row * width, (row + 1) * width);
      return sum([`${inDigits(x.data[at])} / √(${inDigits(own.reduce((total, value) => total + value * value, 0))})`]);
    }
    if (op === "activate") return sum([inDigits(x.data[at])], "", `${options.function}(`, ")");
    if (op === "rotate") {
      const half = width / 2;
      const angle = angleOf(options.positions[Math.floor(at / width / y.shape[1])], params[0].data, channel % half);
      const partner = channel < half ? -x.data[at + half] : x.data[at - half];
      return sum([`${inDigits(x.data[at])}·cos(${inDigits(angle)})`, `${inBrackets(partner)}·sin(${inDigits(angle)})`]);
    }
    if (op === "gate") {
      const from = row * lastOf(x) + options.part * width + channel;
      const h = inBrackets(other.data[from]);
      const name = options.function === "sigmoid" ? "σ" : options.function;
      return sum([inDigits(x.data[from]), options.reset ? `${inDigits(inputs[2].data[at])}·${h}` : h], " + ", `${name}(`, ")");
    }
    if (op === "between") {
      const [a, h, z] = inputs.map(({ data }) => data[at]);
      return sum([`(1 − ${inDigits(z)})·${inBrackets(a)}`, `${inDigits(z)}·${inBrackets(h)}`]);
    }
    if (op === "mean") {
      return sum(Array.from({ length: x.shape[0] }, (_, t) => inBrackets(x.data[t * width + channel])), " + ", "(", `) / ${x.shape[0]}`);
    }
    return null;
  }
}
