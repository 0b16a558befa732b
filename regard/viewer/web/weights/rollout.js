/**
 * Attention rollout (Abnar and Zuidema 2020): regard/viewer/rollout.py. No DOM: this also runs under node.
 *
 * A row is a distribution over tokens; it is carried from the last layer back to the input.
 */

/** @typedef {{rows: number, columns: number, cells: Float32Array}} Weights the mean of an attention's heads */

/**
 * A row times the weights of an attention. @param {Float64Array} row @param {Float32Array} cells
 * @param {number} columns
 */
function multiplyRow(row, cells, columns) {
  const out = new Float64Array(columns);
  row.forEach((share, t) => {
    if (share === 0) return;
    for (let s = 0; s < columns; s++) out[s] += share * cells[t * columns + s];
  });
  return out;
}

/**
 * A row before a layer: its attention and its residual connection count in equal parts.
 * @param {Float64Array} row @param {Float32Array} cells of self-attention
 */
export function throughLayer(row, cells) {
  return multiplyRow(row, cells, row.length).map((share, s) => (share + row[s]) / 2);
}

/**
 * Rollout of every row of the last layer over the input tokens, by side; null if the scene does not have all layers.
 * @param {any[]} attentions headers of a scene @param {(name: string) => Weights} weightsOf
 * @returns {Record<string, Float64Array[]> | null}
 */
export function textRollout(attentions, weightsOf) {
  const of = (/** @type {string} */ kind) =>
    attentions
      .filter((one) => one.kind === kind)
      .map((one) => weightsOf(one.name))
      .reverse();
  const isTranslator = attentions.some((one) => one.kind === "cross" && one.rows === "predicted");
  const [encoder, masked, cross] = [of("self"), of("masked"), isTranslator ? of("cross") : []];
  if (isTranslator ? !encoder.length || masked.length !== cross.length : !encoder.length === !masked.length)
    return null;
  const back = (/** @type {Float64Array} */ row, /** @type {Weights[]} */ layers) =>
    layers.reduce((at, { cells }) => throughLayer(at, cells), row);
  const { rows: count } = masked[0] ?? encoder[0];
  const rows = Array.from({ length: count }, (_, t) => new Float64Array(count).fill(1, t, t + 1));
  if (!isTranslator) return { text: rows.map((row) => back(row, encoder.length ? encoder : masked)) };
  const found = rows.map((row) => {
    // What the cross-attentions read from the encoder, layer by layer.
    const read = new Float64Array(encoder[0].rows);
    masked.forEach(({ cells }, layer) => {
      multiplyRow(row, cross[layer].cells, read.length).forEach((share, s) => (read[s] += share / 2));
      row = throughLayer(
        row.map((share) => share / 2),
        cells,
      );
    });
    return { source: back(read, encoder), target: row };
  });
  return { source: found.map(({ source }) => source), target: found.map(({ target }) => target) };
}
