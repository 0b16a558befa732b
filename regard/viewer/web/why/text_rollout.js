/** Attention rollout of texts: regard/viewer/rollout.py. No DOM: this also runs under node. */

/** @typedef {{rows: number, columns: number, cells: Float32Array}} Weights the mean of an attention's heads */

/**
 * Rollout of every row of the last layer over the input tokens, by side; null if the scene does not have all layers.
 * @param {any[]} attentions headers of a scene @param {(name: string) => Weights} weightsOf
 * @returns {Record<string, Float64Array[]> | null}
 */
export function rollout(attentions, weightsOf) {
  const of = (/** @type {string} */ kind) => attentions.filter((one) => one.kind === kind);
  const [encoder, masked, cross] = [of("self"), of("masked"), of("cross")];
  const isTranslator = cross.some((one) => one.rows === "predicted");
  if (isTranslator ? !encoder.length || masked.length !== cross.length : !encoder.length === !masked.length) return null;
  const through = (/** @type {any[]} */ layers) => layers.reduce((matrix, one) => mix(matrix, multiply(weightsOf(one.name), matrix)), identity(weightsOf(layers[0].name).rows));
  if (!isTranslator) return { text: through(encoder.length ? encoder : masked) };
  const memory = through(encoder);
  const count = weightsOf(masked[0].name).rows;
  let target = identity(count);
  let source = target.map(() => new Float64Array(memory.length));
  masked.forEach((one, i) => {
    const weights = weightsOf(one.name);
    [source, target] = [mix(source, multiply(weights, source)), mix(target, multiply(weights, target))];
    source = mix(source, multiply(weightsOf(cross[i].name), memory));
    target = target.map((row) => row.map((x) => x / 2));
  });
  return { source, target };
}

/** @param {number} count @returns {Float64Array[]} */
const identity = (count) => Array.from({ length: count }, (_, i) => new Float64Array(count).fill(1, i, i + 1));

/** The mean of two matrices: attention and residual connection in equal parts. @param {Float64Array[]} a @param {Float64Array[]} b */
const mix = (a, b) => a.map((row, t) => row.map((x, s) => (x + b[t][s]) / 2));

/** @param {Weights} weights @param {Float64Array[]} matrix */
function multiply({ rows, columns, cells }, matrix) {
  return Array.from({ length: rows }, (_, t) => {
    const out = new Float64Array(matrix[0].length);
    for (let s = 0; s < columns; s++) {
      const weight = cells[t * columns + s];
      if (weight) for (let i = 0; i < out.length; i++) out[i] += weight * matrix[s][i];
    }
    return out;
  });
}
