/** Experiments: the output of the model with and without interventions (regard/viewer/experiments.py). */

import { logSoftmax, topIndices } from "./search.js";

/**
 * @typedef {import("./page_engine.js").PageEngine} PageEngine
 * @typedef {import("./page_engine.js").Look} Look
 * @typedef {import("./interventions.js").Intervention} Intervention
 * @typedef {import("./tokenizer/page_tokenizer.js").PageTokenizer} PageTokenizer
 * @typedef {{token: string, probability: number | null, likeliest: [string, number][]}} PredictionStep
 * @typedef {{text: string, logprob: number | null, steps: PredictionStep[], map: any}} Outcome
 */

/** Alternatives listed per prediction; tokens that a language model generates. */
const [TOP_COUNT, CONTINUATION_TOKENS] = [5, 12];

/** @param {PageEngine} engine @param {any} request @param {any} scene header of the page's own scene @returns {{before: Outcome, after: Outcome}} */
export function runExperiment(engine, { source, target = null, prefix = null, instead = null, changes = [], shown = null }, scene) {
  checkInterventions(engine, changes);
  const before = runOutcome(engine, source, { target, prefix: "", changes: [], shown, scene });
  if (instead === null) checkRows(engine, changes, before.look);
  const after = runOutcome(engine, instead ?? source, { target, prefix: prefix ?? "", changes, shown, scene });
  return { before: before.outcome, after: after.outcome };
}

/**
 * @param {PageEngine} engine @param {string} source
 * @param {{target: string | null, prefix: string, changes: Intervention[], shown: any, scene: any}} request
 * @returns {{outcome: Outcome, look: Look}}
 */
function runOutcome(engine, source, { target, prefix, changes, shown, scene }) {
  if (engine.image) {
    const look = { ...engine.lookAtImage(changes), axes: scene.sides };
    return { outcome: { ...readImageOutcome(engine, look), map: shownMap(engine, look, shown) }, look };
  }
  const look = engine.isGenerator ? engine.look(source + prefix, { changes }) : engine.look(source, { target, prefix, changes });
  return { outcome: { ...readOutcome(engine, look, changes), map: shownMap(engine, look, shown) }, look };
}

/** @param {PageEngine} engine @param {Look} look @param {Intervention[]} changes @returns {Omit<Outcome, "map">} */
function readOutcome(engine, look, changes) {
  const logprobs = look.pass.logits.map(logSoftmax);
  const tokenizer = engine.targetTokenizer;
  if (engine.isTranslator) {
    const targets = [...look.ids[1].slice(1), engine.special.eos];
    return { text: look.target, logprob: totalOf(logprobs, targets), steps: predictions(tokenizer, logprobs, targets) };
  }
  const [ids] = look.ids;
  if (engine.isGenerator) {
    return { text: continuation(engine, ids, changes), logprob: totalOf(logprobs, ids.slice(1)), steps: predictions(tokenizer, logprobs, ids.slice(1)) };
  }
  const { head } = engine.header;
  if (head === "classify") return readLabel(engine, logprobs[0]);
  return { text: "", logprob: null, steps: head === "mask" ? predictions(tokenizer, logprobs, ids) : [] };
}

/** The most likely labels. @param {PageEngine} engine @param {Float32Array} logprobs @returns {Omit<Outcome, "map">} */
function readLabel({ header: { labels } }, logprobs) {
  const likeliest = topIndices(logprobs, TOP_COUNT).map((i) => /** @type {[string, number]} */ ([labels[i], Math.exp(logprobs[i])]));
  const [[text, probability]] = likeliest;
  return { text, logprob: null, steps: [{ token: text, probability, likeliest }] };
}

/** The label of an image; of a segmenter, the fraction of pixels per label. @param {PageEngine} engine @param {Look} look @returns {Omit<Outcome, "map">} */
function readImageOutcome(engine, { pass: { output, logits } }) {
  const { head, labels } = engine.header;
  if (head === "classify" && labels.length) return readLabel(engine, logSoftmax(logits[0]));
  if (head !== "segment") return { text: "", logprob: null, steps: [] };
  const count = output.shape[1];
  const pixels = output.data.length / count;
  const areas = new Float32Array(count);
  for (let pixel = 0; pixel < pixels; pixel++) {
    let best = 0;
    for (let label = 1; label < count; label++) if (output.data[label * pixels + pixel] > output.data[best * pixels + pixel]) best = label;
    areas[best] += 1 / pixels;
  }
  const likeliest = topIndices(areas, TOP_COUNT).map((i) => /** @type {[string, number]} */ ([labels[i], areas[i]]));
  return { text: "", logprob: null, steps: [{ token: "pixels", probability: null, likeliest }] };
}

/** The text that a language model generates greedily. @param {PageEngine} engine @param {number[]} ids @param {Intervention[]} changes */
function continuation(engine, ids, changes) {
  const options = { ...engine.header.search, method: "greedy", max_len: CONTINUATION_TOKENS, max_ratio: 0, max_extra: CONTINUATION_TOKENS, unknown: engine.targetTokenizer.kind !== "word" };
  const [best] = engine.search(ids, changes, options, []).results;
  // The last tokens of the prompt determine how the next token is decoded.
  const context = ids.slice(engine.addSpecialTokens([]).length).slice(-8);
  return engine.targetTokenizer.decode([...context, ...best.ids]).slice(engine.targetTokenizer.decode(context).length);
}

/** @param {Float32Array[]} logprobs @param {number[]} targets */
const totalOf = (logprobs, targets) => targets.reduce((sum, id, i) => sum + logprobs[i][id], 0);

/** One step per row; rows beyond the last target have no token. @param {PageTokenizer} tokenizer @param {Float32Array[]} logprobs @param {number[]} targets @returns {PredictionStep[]} */
function predictions(tokenizer, logprobs, targets) {
  const textOf = (/** @type {number} */ id) => tokenizer.decode([id]) || tokenizer.label(id);
  return logprobs.map((row, i) => {
    /** @type {Map<string, number>} */
    const likeliest = new Map();
    for (const id of topIndices(row, TOP_COUNT)) {
      // Two tokens may decode to the same text, with and without a space before it.
      const text = textOf(id);
      likeliest.set(likeliest.has(text) ? tokenizer.label(id) : text, Math.exp(row[id]));
    }
    const token = i < targets.length ? textOf(targets[i]) : "";
    return { token, probability: i < targets.length ? Math.exp(row[targets[i]]) : null, likeliest: [...likeliest] };
  });
}

/** The weights of the attention that is shown. @param {PageEngine} engine @param {Look} look @param {{attention: string, head: number | "mean"} | null} shown */
function shownMap(engine, look, shown) {
  const header = shown && engine.header.attentions.find((/** @type {any} */ one) => one.name === shown.attention);
  if (!header) return null;
  const { data, shape } = engine.weightsOf(look.pass, header.name);
  const [, heads, queries, keys] = shape;
  const selected = typeof shown.head === "number" && shown.head < heads ? [shown.head] : Array.from({ length: heads }, (_, h) => h);
  const weights = Array.from({ length: queries }, (_, t) =>
    Array.from({ length: keys }, (_, s) => selected.reduce((sum, h) => sum + data[(h * queries + t) * keys + s], 0) / selected.length),
  );
  return { rows: look.axes[header.rows].tokens, columns: look.axes[header.columns].tokens, weights };
}

/** @param {PageEngine} engine @param {Intervention[]} changes */
function checkInterventions(engine, changes) {
  const { attentions, layers, positions } = engine.header.programs.forward;
  for (const { change, attention, head, layer, weights } of changes) {
    if (change === "positions" && !positions.length) throw new Error("This model has no positional encodings to remove.");
    if (change === "layer" && !Object.keys(layers).some((path) => path === layer || path.startsWith(`${layer}.`))) throw new Error(`The model has no layer ${layer}.`);
    if (change === "head" || change === "row") {
      const one = engine.maps.get(attention) ?? attentions.find((/** @type {any} */ part) => part.attention === attention);
      if (!one) throw new Error(`The model has no attention ${attention}.`);
      if (!(head >= 0 && head < one.heads)) throw new Error(`${attention} has no head ${head}. Choose a head from 0 to ${one.heads - 1}.`);
    }
    if (change === "row") {
      const total = weights.reduce((sum, x) => sum + x, 0);
      if (weights.some((x) => !(x >= 0)) || !(Math.abs(total - 1) < 1e-4)) throw new Error(`The weights of the row sum to ${total.toPrecision(6)}. Pass non-negative weights that sum to 1.`);
    }
  }
}

/** @param {PageEngine} engine @param {Intervention[]} changes @param {Look} look */
function checkRows(engine, changes, look) {
  for (const { attention, row, weights } of changes.filter(({ change }) => change === "row")) {
    if (!engine.maps.has(attention)) continue;
    const [, , queries, keys] = engine.weightsOf(look.pass, attention).shape;
    if (!(row >= 0 && row < queries)) throw new Error(`${attention} has no row ${row}. Choose a row from 0 to ${queries - 1}.`);
    if (weights.length !== keys) throw new Error(`Row ${row} of ${attention} has ${keys} keys, but ${weights.length} weights were given. Pass one weight per key.`);
  }
}
