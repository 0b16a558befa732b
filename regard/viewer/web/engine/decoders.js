/** Decoders of one input: with cached keys and values (graphs of decoding), or without (the graph of `forward`). */

/**
 * @typedef {import("./fast_operations.js").Tensor} Tensor
 * @typedef {import("./graph_runner.js").GraphRunner} GraphRunner
 * @typedef {import("./graph_runner.js").Edits} Edits
 * @typedef {import("./interventions.js").PartsJson} PartsJson
 * @typedef {Record<string, {runner: GraphRunner, parts: PartsJson}>} Graphs
 * @typedef {(name: string) => Edits | undefined} EditsOf the changes of a graph
 */

/** @param {number[]} ids @returns {Tensor} a batch of one sequence */
export const idsTensor = (ids) => ({ data: Float32Array.from(ids), shape: [1, ids.length] });

/** Rows of logits (…, V). @param {Tensor} logits @returns {Float32Array[]} */
export function rowsOf({ data, shape }) {
  const width = shape[shape.length - 1];
  return Array.from({ length: data.length / width }, (_, i) => data.subarray(i * width, (i + 1) * width));
}

/** Mean over heads of weights (1, H, T, S): a row per query. @param {Tensor} weights @returns {Float32Array[]} */
export function meanOverHeads({ data, shape }) {
  const [, heads, queries, keys] = shape;
  return Array.from({ length: queries }, (_, t) => {
    const row = new Float32Array(keys);
    for (let h = 0; h < heads; h++) for (let s = 0, at = (h * queries + t) * keys; s < keys; s++) row[s] += data[at + s] / heads;
    return row;
  });
}

/** Selects rows of the first axis. @param {Tensor} x @param {number[]} rows @returns {Tensor} */
function selectRows({ data, shape }, rows) {
  const size = data.length / shape[0];
  const out = new Float32Array(rows.length * size);
  rows.forEach((row, i) => out.set(data.subarray(row * size, (row + 1) * size), i * size));
  return { data: out, shape: [rows.length, ...shape.slice(1)] };
}

/** Decodes with the graphs `encoder` or `prompt`, and `decoder_step`. */
export class CachedDecoder {
  /** @param {Graphs} graphs @param {number[]} source @param {EditsOf} editsOf */
  constructor(graphs, source, editsOf) {
    const { runner, parts } = graphs.decoder_step;
    this.runner = runner;
    this.edits = editsOf("decoder_step");
    this.attentions = parts.attentions.filter(({ kind }) => kind === "cross");
    this.recorded = new Set(this.attentions.map(({ weights }) => weights));
    const first = graphs.encoder ? "encoder" : "prompt";
    const mask = { data: new Float32Array(source.length).fill(1), shape: [1, source.length] };
    const { outputs } = graphs[first].runner.run({ ids: idsTensor(source), mask }, new Set(), editsOf(first));
    /** Tensors of the source, shared by all hypotheses, and of each hypothesis. @type {Record<string, Tensor>} */
    this.shared = { mask };
    /** @type {Record<string, Tensor>} */
    this.state = {};
    this.promptLogits = outputs.logits ? rowsOf(outputs.logits).slice(-1) : null;
    const updated = new Set(Object.keys(runner.json.outputs).map((name) => name.replace(/^new_/, "")));
    for (const { name, shape } of runner.json.inputs) {
      if (name in outputs) (updated.has(name) ? this.state : this.shared)[name] = outputs[name];
      else if (updated.has(name)) this.state[name] = { data: new Float32Array(0), shape: shape.map((size) => (size === "P" ? 0 : typeof size === "number" ? size : 1)) };
    }
  }

  /** @param {number[]} last */
  step(last) {
    if (this.promptLogits) {
      const logits = this.promptLogits;
      this.promptLogits = null;
      return { logits, attention: new Map() };
    }
    const { outputs, values } = this.runner.run({ ...this.shared, ...this.state, last: idsTensor(last) }, this.recorded, this.edits);
    for (const name of Object.keys(this.state)) this.state[name] = outputs[`new_${name}`];
    const attention = new Map(this.attentions.map(({ attention: name, weights }) => [name, meanOverHeads(values.get(weights)[0])]));
    return { logits: rowsOf(outputs.logits), attention };
  }

  /** @param {number[]} rows */
  reorder(rows) {
    for (const [name, tensor] of Object.entries(this.state)) {
      if (rows.length !== tensor.shape[0] || rows.some((row, i) => row !== i)) this.state[name] = selectRows(tensor, rows);
    }
  }
}

/** Decodes with the graph of `forward`: every step runs the model on all tokens, so that all rows are computed again. */
export class UncachedDecoder {
  /** @param {(ids: number[]) => Float32Array[]} forward logits of the token after each token of an output @param {number[]} prompt */
  constructor(forward, prompt) {
    this.forward = forward;
    this.hasStarted = prompt.length === 0;
    this.ids = [prompt];
  }

  /** @param {number[]} last */
  step(last) {
    if (this.hasStarted) this.ids = this.ids.map((ids, i) => [...ids, last[i]]);
    this.hasStarted = true;
    return { logits: this.ids.map((ids) => this.forward(ids).at(-1)), attention: new Map() };
  }

  /** @param {number[]} rows */
  reorder(rows) {
    this.ids = rows.map((row) => this.ids[row]);
  }
}
