/**
 * The steps of a graph, computed on demand, and the derivation of single numbers from the inputs of their step. No DOM:
 * this also runs under node.
 */

import {
  axesOf,
  axisOf,
  bilinearCells,
  broadcastIndex,
  CONSTANT_OPS,
  convolutionPairs,
  elementwiseOf,
  execute,
  formatNumber,
  formatTerm,
  gainAt,
  LAYOUT_OPS,
  matmulParts,
  normParts,
  reduction,
  sizeOf,
  stridesOf,
} from "./operations.js";

/**
 * @typedef {import("./operations.js").Tensor} Tensor
 * @typedef {{sign: string, name: string, offset?: number, tensor?: number, input?: string, shape: number[],
 * full_shape?: number[]}} Param a
 * parameter: an offset in the numbers of the trace, or an index of the tensors of the page's model; or an input of the
 * model.
 * `full_shape`: of a table of which the page has only the rows that are used
 * @typedef {number | Param | null} Input index of a step, or a parameter
 * @typedef {{
 *   id: string, section: number, title: string, formula?: string, where?: string, op: string, inputs: Input[],
 *   options: Record<string, any>, output?: {offset?: number, every?: number, shape: number[], axes: string[]},
 * differs: number | null
 * }} Step a step without a title is computed, but not shown
 * @typedef {{pieces: string[], sign: string, before: string, after: string}} Derivation the derivation of one number
 * from others
 */

/** Whether an expression has spaces outside of parentheses, as a sum does. @param {string} text */
function isSum(text) {
  let depth = 0;
  for (const one of text) {
    depth += one === "(" ? 1 : one === ")" ? -1 : 0;
    if (one === " " && !depth) return true;
  }
  return false;
}

/** The steps of a graph, computed on demand. */
export class Trace {
  /**
   * @param {{steps: Step[], inputs?: Record<string, number[]> | null}} header @param {Float32Array} params
   * @param {Float32Array} outputs samples of recorded outputs
   * @param {(index: number) => Tensor} [modelTensor] of the page's model
   */
  constructor(header, params, outputs, modelTensor = undefined) {
    this.steps = header.steps;
    this.inputs = header.inputs ?? {};
    this.modelTensor = modelTensor;
    // Float32Arrays, treated like the Float64Arrays of computed tensors.
    this.params = /** @type {any} */ (params);
    this.outputs = /** @type {any} */ (outputs);
    /** @type {(Tensor | undefined)[]} */
    this.values = new Array(header.steps.length);
    this.checks = new Array(header.steps.length);
  }

  /** The recorded output of a step: every n-th number. @param {number} n */
  recorded(n) {
    const { offset, every = 1, shape } = this.steps[n].output;
    return this.outputs.subarray(offset, offset + Math.ceil(sizeOf(shape) / every));
  }

  /** @param {Input} input @returns {Tensor | null} */
  tensor(input) {
    if (input === null) return null;
    if (typeof input === "number") return this.value(input);
    if (input.tensor !== undefined) return this.modelTensor(input.tensor);
    if (input.input !== undefined)
      return { data: Float64Array.from(this.inputs[input.input]), shape: [1, this.inputs[input.input].length] };
    return { data: this.params.subarray(input.offset, input.offset + sizeOf(input.shape)), shape: input.shape };
  }

  /** The output of a step, computed from its inputs. @param {number} n @returns {Tensor} */
  value(n) {
    const waiting = [n];
    while (waiting.length) {
      const next = waiting[waiting.length - 1];
      const missing = this.steps[next].inputs.filter((i) => typeof i === "number" && !this.values[i]);
      if (missing.length) waiting.push(.../** @type {number[]} */ (missing));
      else {
        waiting.pop();
        this.values[next] ??= this.compute(next);
      }
    }
    return this.values[n];
  }

  /** @param {number} n @returns {Tensor} */
  compute(n) {
    const { op, inputs, options, output } = this.steps[n];
    if (op === "given") return { data: Float64Array.from(this.recorded(n)), shape: options.shape ?? output.shape };
    return execute(
      op,
      inputs.map((one) => (typeof one === "number" ? this.values[one] : this.tensor(one))),
      options,
    );
  }

  /**
   * Largest difference between computed and recorded output, relative to the largest number if that is above 1.
   * @param {number} n @returns {number}
   */
  check(n) {
    if (this.steps[n].output?.offset === undefined) return 0;
    if (this.checks[n] === undefined) {
      const { every = 1 } = this.steps[n].output;
      const [all, recorded] = [this.value(n).data, this.recorded(n)];
      const computed = every === 1 ? all : Float64Array.from(recorded, (_, i) => all[i * every]);
      let [gap, maximum] = [Math.ceil(all.length / every) === recorded.length ? 0 : Infinity, 1];
      for (let i = 0; i < recorded.length; i++) {
        if (computed[i] === recorded[i]) continue;
        const difference = Math.abs(computed[i] - recorded[i]);
        // Masked scores are the smallest float32 number.
        if (computed[i] < -1e38 && recorded[i] < -1e38) continue;
        gap = Number.isNaN(difference) ? Infinity : Math.max(gap, difference);
        if (Number.isFinite(recorded[i])) maximum = Math.max(maximum, Math.abs(recorded[i]));
      }
      this.checks[n] = gap / maximum;
    }
    return this.checks[n];
  }

  /** The parameters of a step and of the hidden steps before it. @param {number} n @returns {Param[]} */
  paramsOf(n) {
    return this.steps[n].inputs.flatMap((one) => {
      if (one === null) return [];
      if (typeof one === "number") return this.steps[one].title ? [] : this.paramsOf(one);
      return one.name ? [one] : [];
    });
  }

  /**
   * A number of an input as text; of a hidden elementwise step, its expression. @param {Input} input @param {number} at
   * @param {number} [depth] @returns {string}
   */
  text(input, at, depth = 0) {
    if (typeof input === "number" && !this.steps[input].title && depth < 6) {
      const origin = this.origin(input, at);
      if (origin) return this.text(origin[0], origin[1], depth);
      const written = this.expression(input, at, depth + 1);
      if (written !== null) return isSum(written) ? `(${written})` : written;
    }
    return formatTerm(this.tensor(input).data[at]);
  }

  /** The origin of a number of a layout step. @param {number} n @param {number} at @returns {[Input, number] | null} */
  origin(n, at) {
    const { op, inputs, options } = this.steps[n];
    if (!(op in LAYOUT_OPS)) return null;
    const found = LAYOUT_OPS[op](/** @type {Tensor[]} */ (inputs.map((one) => this.tensor(one))), options).from(at);
    return found && [inputs[found[0]], found[1]];
  }

  /**
   * The expression of a number of an elementwise step. @param {number} n @param {number} at @param {number} depth
   * @returns {string | null}
   */
  expression(n, at, depth) {
    const { op, inputs, options } = this.steps[n];
    const one = elementwiseOf(op, options, inputs.length);
    if (one === null) return null;
    const { shape } = this.value(n);
    const texts = inputs.map((input, i) => {
      const tensor = this.tensor(input);
      const position = broadcastIndex(tensor.shape, shape)(at);
      // Of a conditional, only the selected number is written.
      const isCondition = (op === "where" && i === 0) || (op === "masked_fill" && i === 1);
      return isCondition ? String(tensor.data[position]) : this.text(input, position, depth);
    });
    return one.text(...texts, ...one.numbers.map(formatTerm));
  }

  /**
   * The derivation of one number of a step's output; null if it is a copy. @param {number} n
   * @param {number} at its index in the output @returns {Derivation | null}
   */
  derivation(n, at) {
    const { op, inputs, options } = this.steps[n];
    /**
     * @param {string[]} pieces @param {string} [sign] @param {string} [before] @param {string} [after]
     * @returns {Derivation}
     */
    const sum = (pieces, sign = " + ", before = "", after = "") => ({ pieces, sign, before, after });
    if (op === "given" || op in CONSTANT_OPS) return null;
    if (op in LAYOUT_OPS) {
      const origin = this.origin(n, at);
      return origin && typeof origin[0] === "number" && !this.steps[origin[0]].title
        ? this.derivation(origin[0], origin[1])
        : null;
    }
    const written = this.expression(n, at, 0);
    if (written !== null) {
      if ((op !== "add" && op !== "mul") || inputs.length < 2) return sum([written], "");
      const { shape } = this.value(n);
      const texts = inputs.map((input) => this.text(input, broadcastIndex(this.tensor(input).shape, shape)(at)));
      return sum(texts, op === "add" ? " + " : " · ");
    }
    const [x, weight, bias] = inputs.map((one) => this.tensor(one));
    /** @param {[number, number][]} positions @returns {string[]} */
    const products = (positions) => positions.map(([i, k]) => `${this.text(inputs[0], i)}·${this.text(inputs[1], k)}`);
    if (op === "linear") {
      const [outputs, width] = weight.shape;
      const [from, to] = [Math.floor(at / outputs) * width, (at % outputs) * width];
      const positions = Array.from({ length: width }, (_, i) => /** @type {[number, number]} */ ([from + i, to + i]));
      return sum(products(positions), " + ", "", bias ? ` + ${formatTerm(bias.data[at % outputs])}` : "");
    }
    if (op === "matmul") {
      const { inside, factors } = matmulParts(x, weight);
      const { from, to, step } = factors(at);
      return sum(products(Array.from({ length: inside }, (_, i) => [from + i, to + i * step])));
    }
    if (op === "conv2d") {
      const { shape } = this.value(n);
      const out = Math.floor(at / shape[2] / shape[3]) % shape[1];
      return sum(
        products(convolutionPairs(x, weight, options, at)),
        " + ",
        "",
        bias ? ` + ${formatTerm(bias.data[out])}` : "",
      );
    }
    if (op === "softmax") {
      const axis = axisOf(options.dim, x.shape);
      const [size, inner] = [x.shape[axis], stridesOf(x.shape)[axis]];
      const from = Math.floor(at / inner / size) * inner * size + (at % inner);
      const pieces = Array.from({ length: size }, (_, i) => `exp(${formatNumber(x.data[from + i * inner])})`);
      return sum(pieces, " + ", `exp(${formatNumber(x.data[at])}) / (`, ")");
    }
    if (op === "layer_norm" || op === "rms_norm" || op === "group_norm") {
      const { mean, variance, eps } = normParts(op, x, options, at);
      const above =
        op === "rms_norm" ? formatNumber(x.data[at]) : `(${formatNumber(x.data[at])} − ${formatTerm(mean)})`;
      const i = gainAt(op, x, at, weight ?? bias);
      const after = [weight && ` · ${formatTerm(weight.data[i])}`, bias && ` + ${formatTerm(bias.data[i])}`];
      return sum(
        [`${above} / √(${formatNumber(variance)} + ${eps.toExponential(0).replace("-", "−")})`],
        "",
        "",
        after.filter(Boolean).join(""),
      );
    }
    if (op === "upsample_bilinear2d") {
      return sum(
        bilinearCells(x, options.output_size[0], options.output_size[1], at).map(
          ([i, share]) => `${formatNumber(share)}·${this.text(inputs[0], i)}`,
        ),
      );
    }
    const { offsets, start } = reduction(x, axesOf(x, options.dim), true);
    const from = start(at);
    const pieces = offsets.map((i) => this.text(inputs[0], from + i));
    if (op === "linalg_vector_norm")
      return sum(
        pieces.map((piece) => `${piece}²`),
        " + ",
        "√(",
        ")",
      );
    return op === "mean" ? sum(pieces, " + ", "(", `) / ${pieces.length}`) : sum(pieces);
  }
}
