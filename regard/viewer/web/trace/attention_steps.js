/**
 * The numbers of one query in one head of an attention, found in the steps of a graph: query, keys, scores, weights,
 * values and their weighted sum. No DOM: this also runs under node.
 */

import { broadcastIndex, elementwiseOf, LAYOUT_OPS, matmulParts, stridesOf } from "./operations.js";

/**
 * @typedef {import("./trace.js").Trace} Trace
 * @typedef {[import("./trace.js").Input, number]} Place an input of a step, and an index in it
 * @typedef {{x: Float64Array, places: Place[]}} Vector its numbers, and where each is computed
 * @typedef {{
 *   query: Vector | null, keys: Vector[], products: Float64Array, scale: number | null, scaled: Float64Array, scores: Float64Array,
 *   weights: Float64Array, values: Vector[], output: Vector | null, softmax: number, first: number, last: number
 * }} AttentionSteps of each key: the product of query and key, that product times the scale, the score that softmax
 * reads (with mask and bias), the weight and the value. `query` is null if the score is no product of query and key,
 * `output` if no step multiplies the weights with values. `first` and `last` are the steps of products and output
 */

/** Where a number comes from, through steps that only rearrange numbers. @param {Trace} trace @param {Place} place */
function originOf(trace, [input, at]) {
  while (typeof input === "number" && trace.steps[input].op in LAYOUT_OPS) {
    const origin = trace.origin(input, at);
    if (!origin) break;
    [input, at] = origin;
  }
  return /** @type {Place} */ ([input, at]);
}

/**
 * The matrix product that a number is computed from by elementwise steps, and these steps; null if there is none.
 * @param {Trace} trace @param {Place} place @returns {[number, number][] | null}
 */
function pathToProduct(trace, place) {
  const [input, at] = originOf(trace, place);
  if (typeof input !== "number") return null;
  const { op, inputs, options } = trace.steps[input];
  if (op === "matmul") return [[input, at]];
  if (elementwiseOf(op, options, inputs.length) === null) return null;
  const { shape } = trace.value(input);
  for (const one of inputs) {
    const path = pathToProduct(trace, [one, broadcastIndex(trace.tensor(one).shape, shape)(at)]);
    if (path) return [...path, [input, at]];
  }
  return null;
}

/** @param {Trace} trace @param {Place[]} places @returns {Vector} */
const vectorOf = (trace, places) => ({
  x: Float64Array.from(places, ([input, at]) => trace.tensor(input).data[at]),
  places: places.map((place) => originOf(trace, place)),
});

/** The two factors of a number of a matrix product. @param {Trace} trace @param {number} n @param {number} at */
function factorsOf(trace, n, at) {
  const { inputs } = trace.steps[n];
  const { inside, factors } = matmulParts(trace.tensor(inputs[0]), trace.tensor(inputs[1]));
  const { from, to, step } = factors(at);
  const range = Array.from({ length: inside }, (_, i) => i);
  return {
    from,
    left: range.map((i) => /** @type {Place} */ ([inputs[0], from + i])),
    right: range.map((i) => /** @type {Place} */ ([inputs[1], to + i * step])),
  };
}

/** The index of the factor with which a step multiplies its only input, or null. @param {any} step */
function factorOf({ op, options, inputs }) {
  const number = inputs.length === 1 ? Object.values(options).find((x) => typeof x === "number") : undefined;
  if (number === undefined) return null;
  return op === "mul" ? number : op === "div" ? 1 / number : null;
}

/**
 * The numbers of one query in one head.
 * @param {Trace} trace @param {number} softmax the step of the weights @param {(n: number) => number} startOf the index
 * of the first number of this query and head in the output of a step
 * @returns {AttentionSteps}
 */
export function readAttention(trace, softmax, startOf) {
  const { data, shape } = trace.value(softmax);
  const count = shape[shape.length - 1];
  const start = startOf(softmax);
  const range = Array.from({ length: count }, (_, s) => s);
  const input = trace.steps[softmax].inputs[0];
  const scores = trace.tensor(input).data.slice(start, start + count);
  const weights = data.slice(start, start + count);
  const paths = range.map((s) => pathToProduct(trace, [input, start + s]));
  const found = {
    ...{ query: null, keys: [], products: scores, scale: null, scaled: scores, scores, weights },
    ...{ values: [], output: null, softmax, first: softmax, last: softmax },
  };
  const pairs = paths.every(Boolean) ? paths.map((path) => factorsOf(trace, ...path[0])) : [];
  // Of a product of query and key, all keys share the query.
  if (pairs.length && pairs.every(({ from }) => from === pairs[0].from)) {
    const products = Float64Array.from(paths, ([[n, at]]) => trace.value(n).data[at]);
    const next = paths[0][1];
    const scale = next ? factorOf(trace.steps[next[0]]) : null;
    Object.assign(found, {
      query: vectorOf(trace, pairs[0].left),
      keys: pairs.map(({ right }) => vectorOf(trace, right)),
      products,
      scale,
      scaled: scale === null ? products : products.map((x) => x * scale),
      first: paths[0][0][0],
    });
  }
  const isWeights = (/** @type {import("./trace.js").Input} */ one) => {
    while (typeof one === "number" && one !== softmax) {
      const { op, inputs } = trace.steps[one];
      if (!(op in LAYOUT_OPS) && op !== "masked_fill" && op !== "where" && op !== "cast") return false;
      one = inputs.find((x) => typeof x === "number" && x >= softmax) ?? null;
    }
    return one === softmax;
  };
  const sum = trace.steps.findIndex((step, n) => n > softmax && step.op === "matmul" && isWeights(step.inputs[0]));
  if (sum < 0) return found;
  const total = trace.value(sum);
  const width = total.shape[total.shape.length - 1];
  // Rows of the sum are in the order of the rows of the weights.
  const row = Math.floor(start / count) * width;
  const strides = stridesOf(total.shape);
  const rows = Array.from({ length: width }, (_, i) => row + i * strides[strides.length - 1]);
  const columns = rows.map((at) => factorsOf(trace, sum, at).right);
  return {
    ...found,
    values: range.map((s) =>
      vectorOf(
        trace,
        columns.map((right) => right[s]),
      ),
    ),
    output: { x: Float64Array.from(rows, (at) => total.data[at]), places: rows.map((at) => [sum, at]) },
    last: sum,
  };
}
