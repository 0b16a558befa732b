/** Embeddings of texts: regard/pipelines/sentence_embedding.py, without linear layers. */

/**
 * @typedef {import("./page_engine.js").PageEngine} PageEngine
 * @typedef {import("./page_engine.js").Look} Look
 * @typedef {import("./interventions.js").Intervention} Intervention
 */

/** Poolings of the vectors of tokens. @type {Record<string, (rows: Float32Array[]) => Float64Array>} */
const POOLINGS = {
  cls: (rows) => Float64Array.from(rows[0]),
  lasttoken: (rows) => Float64Array.from(rows.at(-1)),
  max: (rows) => combineRows(rows, Math.max),
  mean: (rows) => weightedSum(rows, () => 1 / rows.length),
  mean_sqrt_len_tokens: (rows) => weightedSum(rows, () => 1 / Math.sqrt(rows.length)),
  weightedmean: (rows) => weightedSum(rows, (i) => (2 * (i + 1)) / (rows.length * (rows.length + 1))),
};

/** @param {Float32Array[]} rows @param {(a: number, b: number) => number} f */
const combineRows = (rows, f) => Float64Array.from(rows[0], (_, i) => rows.reduce((value, row) => f(value, row[i]), rows[0][i]));

/** @param {Float32Array[]} rows @param {(i: number) => number} weight */
const weightedSum = (rows, weight) => Float64Array.from(rows[0], (_, i) => rows.reduce((sum, row, t) => sum + weight(t) * row[i], 0));

/** The embedding of the text of a look. @param {PageEngine} engine @param {Look} look @param {Intervention[]} changes @returns {Float64Array} */
export function embedText(engine, { source, ids: [ids], pass }, changes) {
  const { pooling, layers, max_len: limit, prompt, dimensions } = engine.header.sentence;
  const { begin, end } = engine.special;
  const whole = prompt ? engine.encodeSource(prompt + source) : ids;
  const tail = end === null ? [] : [end];
  const cut = limit && whole.length > limit ? [...whole.slice(0, Math.max(begin === null ? 0 : 1, limit - tail.length)), ...tail] : whole;
  const rows = cut === ids ? pass.logits : engine.forward([cut], new Set(), changes).logits;
  // Attention pooling: the output of the model is the pooled vector.
  let vector = rows.length === 1 ? Float64Array.from(rows[0]) : Float64Array.from(pooling.flatMap((/** @type {string} */ name) => [...POOLINGS[name](rows)]));
  for (const layer of layers) if (layer === "normalize") vector = normalizeVector(vector);
  return dimensions ? vector.slice(0, dimensions) : vector;
}

/** @param {Float64Array} vector */
function normalizeVector(vector) {
  const length = Math.max(Math.hypot(...vector), 1e-12);
  return vector.map((x) => x / length);
}
