/** Experiments: interventions, and the outcome of the model with and without them. */

import { explainOutput } from "./explanations.js";
import { logSoftmax, topIndices } from "./search.js";

/* Interventions on a graph: regard/viewer/interventions.py. */

/**
 * @typedef {import("./graph_runner.js").Tensor} Tensor
 * @typedef {import("./graph_runner.js").GraphJson} GraphJson
 * @typedef {import("./graph_runner.js").Edits} Edits
 * @typedef {{attention: string, kind: string, heads: number, q: number, k: number, w: number | null, scale: number |
 * null,
 *   isScaledDot: boolean, bias: number | null, biasValue: number | null, masks: number[], weights: number, context:
 * number}} AttentionPart
 * @typedef {{attentions: AttentionPart[], layers: Record<string, number[]>, positions: [number, number][]}} PartsJson
 * the slots of attentions, of the outputs of layers, and of positional encodings (regard/graph/parts.py)
 * @typedef {{change: string, attention?: string, head?: number, layer?: string, row?: number, weights?: number[]}}
 * Intervention
 */

/** Interventions that change earlier rows, so that cached keys and values cannot be used. */
const NEEDS_FORWARD = new Set(["row", "mask"]);

/** @param {Intervention[]} changes */
export const needsForward = (changes) => changes.some(({ change }) => NEEDS_FORWARD.has(change));

/**
 * The name of an attention's module: calls of a shared module are recorded as name.0, name.1, … @param {string} name
 * @param {{attention: string}[]} attentions
 */
const moduleOf = (name, attentions) =>
  attentions.some((one) => one.attention === name) ? name : name.replace(/\.\d+$/, "");

/**
 * The changes of a graph. @param {GraphJson & PartsJson} graph @param {Intervention[]} changes
 * @returns {Edits | undefined}
 */
export function makeEdits(graph, changes) {
  if (!changes.length) return undefined;
  const { attentions, layers, positions } = graph;
  /** @type {Edits} */
  const edits = { replaced: new Map(), bypassed: new Map() };
  const inputs = new Map(allSteps(graph.steps).map((step) => [step.out, step.in[0]]));
  /** @param {number} slot @param {(value: Tensor, iteration: number) => Tensor} f */
  const replace = (slot, f) => {
    const before = edits.replaced.get(slot);
    edits.replaced.set(slot, before ? (value, iteration) => f(before(value, iteration), iteration) : f);
  };
  for (const { change, attention, head, layer, row, weights } of changes) {
    const name = attention && moduleOf(attention, attentions);
    const selected = attentions.filter((one) => !name || name === "*" || one.attention === name);
    if (change === "head") for (const one of selected) replace(one.context, (value) => withoutHead(value, head));
    else if (change === "row")
      for (const one of selected)
        replace(one.weights, (value, iteration) =>
          withRow(value, head, row - iteration, weights, one.kind === "masked"),
        );
    else if (change === "layer") {
      for (const [path, slots] of Object.entries(layers)) {
        if (path === layer || path.startsWith(`${layer}.`)) for (const slot of slots) replace(slot, zeros);
      }
    } else if (change === "mask")
      for (const one of selected.filter(({ kind }) => kind === "masked"))
        for (const slot of one.masks) edits.bypassed.set(slot, inputs.get(slot));
    else if (change === "scale")
      for (const one of selected.filter(({ isScaledDot }) => isScaledDot))
        edits.bypassed.set(one.scale, inputs.get(one.scale));
    else if (change === "positions") for (const [slot, other] of positions) edits.bypassed.set(slot, other);
    else throw new Error(`Unknown intervention: ${change}.`);
  }
  return edits;
}

/** @param {import("./graph_runner.js").Step[]} steps @returns {import("./graph_runner.js").Step[]} */
const allSteps = (steps) => steps.flatMap((step) => (step.body ? [step, ...allSteps(step.body.steps)] : [step]));

/** @param {Tensor} value @returns {Tensor} */
const zeros = ({ data, shape }) => ({ data: new Float32Array(data.length), shape });

/** @param {Tensor} value (B, H, T, D) @param {number} head @returns {Tensor} */
function withoutHead({ data, shape }, head) {
  const out = Float32Array.from(data);
  const [batch, heads] = shape;
  const size = data.length / batch / heads;
  for (let b = 0; b < batch; b++) out.fill(0, (b * heads + head) * size, (b * heads + head + 1) * size);
  return { data: out, shape };
}

/**
 * @param {Tensor} value (1, H, T, S) @param {number} head @param {number} row @param {number[]} weights
 * @param {boolean} isGrowing @returns {Tensor}
 */
function withRow({ data, shape }, head, row, weights, isGrowing) {
  const [, , queries, keys] = shape;
  const fitted = row >= 0 && row < queries ? fitWeights(weights, keys, isGrowing) : null;
  if (!fitted) return { data, shape };
  const out = Float32Array.from(data);
  out.set(fitted, (head * queries + row) * keys);
  return { data: out, shape };
}

/**
 * The weights for a number of keys, which grows during decoding. @param {number[]} weights @param {number} keys
 * @param {boolean} isGrowing @returns {number[] | null}
 */
function fitWeights(weights, keys, isGrowing) {
  if (weights.length === keys) return weights;
  if (!isGrowing)
    throw new Error(`The row has ${keys} keys, but ${weights.length} weights were given. Pass one weight per key.`);
  const fitted = Array.from({ length: keys }, (_, i) => weights[i] ?? 0);
  const total = fitted.reduce((sum, x) => sum + x, 0);
  return total > 0 ? fitted.map((x) => x / total) : null;
}

/* Embeddings of texts: regard/pipelines/sentence_embedding.py, without linear layers. */

/**
 * @typedef {import("./model.js").PageEngine} PageEngine
 * @typedef {import("./model.js").Look} Look
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
const combineRows = (rows, f) =>
  Float64Array.from(rows[0], (_, i) => rows.reduce((value, row) => f(value, row[i]), rows[0][i]));

/** @param {Float32Array[]} rows @param {(i: number) => number} weight */
const weightedSum = (rows, weight) =>
  Float64Array.from(rows[0], (_, i) => rows.reduce((sum, row, t) => sum + weight(t) * row[i], 0));

/**
 * The embedding of the text of a look. @param {PageEngine} engine @param {Look} look @param {Intervention[]} changes
 * @returns {Float64Array}
 */
function embedText(engine, { source, ids: [ids], pass }, changes) {
  const { pooling, layers, max_len: limit, prompt, dimensions } = engine.header.sentence;
  const { begin, end } = engine.special;
  const whole = prompt ? engine.encodeSource(prompt + source) : ids;
  const tail = end === null ? [] : [end];
  const cut =
    limit && whole.length > limit
      ? [...whole.slice(0, Math.max(begin === null ? 0 : 1, limit - tail.length)), ...tail]
      : whole;
  const rows = cut === ids ? pass.logits : engine.forward([cut], new Set(), changes).logits;
  // Attention pooling: the output of the model is the pooled vector.
  let vector =
    rows.length === 1
      ? Float64Array.from(rows[0])
      : Float64Array.from(pooling.flatMap((/** @type {string} */ name) => [...POOLINGS[name](rows)]));
  for (const layer of layers) if (layer === "normalize") vector = normalizeVector(vector);
  return dimensions ? vector.slice(0, dimensions) : vector;
}

/** @param {Float64Array} vector */
function normalizeVector(vector) {
  const length = Math.max(Math.hypot(...vector), 1e-12);
  return vector.map((x) => x / length);
}

/* Experiments: the output of the model with and without interventions (regard/viewer/experiments.py). */

/**
 * @typedef {import("./tokenizer.js").PageTokenizer} PageTokenizer
 * @typedef {{token: string, name: string, probability: number | null, likeliest: [string, number][]}} PredictionStep
 * `name`: of the token among the likeliest, where equal texts have different names
 * @typedef {{text: string, logprob: number | null, steps: PredictionStep[], input_steps: PredictionStep[], next_token:
 * any, map: any}} Outcome
 * `input_steps` and `next_token`: of a language model
 * @typedef {Omit<Outcome, "map"> & {vector?: Float64Array, generated?: number[]}} ModelOutput `vector`: the embedding
 * of an encoder
 * without a head; `generated`: the ids of a continuation
 */

/** Alternatives listed per prediction; tokens that a language model generates. */
const [TOP_COUNT, CONTINUATION_TOKENS] = [5, 12];
/** Alternatives for the next token; tokens of a text up to which each has its probability. */
const [NEXT_TOP_COUNT, MAX_INPUT_STEPS] = [7, 256];
/** Temperatures of the next-token distribution. */
const TEMPERATURES = Array.from({ length: 20 }, (_, i) => Number((0.1 * (i + 1)).toFixed(1)));
const NO_STEPS = { input_steps: [], next_token: null };

/**
 * @param {PageEngine} engine @param {any} request @param {any} scene header of the page's own scene
 * @returns {{before: Outcome, after: Outcome, similarity: number | null}}
 */
export function runExperiment(
  engine,
  { source, target = null, prefix = null, instead = null, context = null, changes = [], shown = null },
  scene,
) {
  checkInterventions(engine, changes);
  const before = runOutcome(engine, source, { target, context, prefix: "", changes: [], shown, scene });
  if (instead === null) checkRows(engine, changes, before.look);
  const after = runOutcome(engine, instead ?? source, { target, context, prefix: prefix ?? "", changes, shown, scene });
  const [a, b] = [before.vector, after.vector];
  return {
    before: before.outcome,
    after: after.outcome,
    similarity: a && b ? a.reduce((sum, x, i) => sum + x * b[i], 0) : null,
  };
}

/**
 * The output on the first screen of a scene (regard/viewer/outcomes.py), and what explains it.
 * @param {PageEngine} engine @param {Look} look
 */
export function sceneOutput(engine, look) {
  const { head } = engine.header;
  const kinds = { classify: "labels", answer: "answer", mask: "mask" };
  const kind = engine.isTranslator ? "translation" : engine.isGenerator ? "continuation" : (kinds[head] ?? "embedding");
  const { vector, generated, ...outcome } = readOutcome(engine, look, []);
  return {
    output: { kind, ...outcome, input_steps: [] },
    explained: explainOutput(engine, look, outcome, generated ?? []),
  };
}

/**
 * @param {PageEngine} engine @param {string} source
 * @param {{target: string | null, context: string | null, prefix: string, changes: Intervention[], shown: any, scene:
 * any}} request
 * @returns {{outcome: Outcome, look: Look, vector?: Float64Array}}
 */
function runOutcome(engine, source, { target, context, prefix, changes, shown, scene }) {
  if (engine.image) {
    const look = engine.lookAtImage(source, changes, scene.sides);
    return { outcome: { ...readImageOutcome(engine, look), map: shownMap(engine, look, shown) }, look };
  }
  const look = engine.isGenerator
    ? engine.look(source + prefix, { changes })
    : engine.look(source, { target, context, prefix, changes });
  const { vector, generated, ...outcome } = readOutcome(engine, look, changes);
  return { outcome: { ...outcome, map: shownMap(engine, look, shown) }, look, vector };
}

/** @param {PageEngine} engine @param {Look} look @param {Intervention[]} changes @returns {ModelOutput} */
function readOutcome(engine, look, changes) {
  const tokenizer = engine.targetTokenizer;
  if (engine.isTranslator) {
    const logprobs = look.pass.logits.map(logSoftmax);
    const targets = [...look.ids[1].slice(1), engine.special.eos];
    return {
      text: look.target,
      logprob: totalOf(logprobs, targets),
      steps: predictions(tokenizer, logprobs, targets),
      ...NO_STEPS,
    };
  }
  const [ids] = look.ids;
  if (engine.isGenerator) return readContinuation(engine, ids, changes);
  const { head } = engine.header;
  if (head === "classify") return readLabel(engine, labelScores(engine, look.pass.logits[0]));
  const empty = { text: look.target, logprob: null, steps: [], ...NO_STEPS };
  if (head === "none") return { ...empty, vector: embedText(engine, look, changes) };
  return head === "mask"
    ? { ...empty, steps: predictions(tokenizer, maskedLogits(engine, look, changes).map(logSoftmax), ids) }
    : empty;
}

/**
 * The continuation of a text, with the distribution of its next token. @param {PageEngine} engine @param {number[]} ids
 * @param {Intervention[]} changes @returns {ModelOutput}
 */
function readContinuation(engine, ids, changes) {
  const tokenizer = engine.targetTokenizer;
  const { text, added } = continuation(engine, ids, changes);
  const logprobs = engine.forward([[...ids, ...added]], new Set(), changes).logits.map(logSoftmax);
  const first = ids.length - 1;
  return {
    text,
    logprob: totalOf(logprobs.slice(first), added),
    steps: predictions(tokenizer, logprobs.slice(first, first + Math.max(1, added.length)), added),
    input_steps: first <= MAX_INPUT_STEPS ? predictions(tokenizer, logprobs.slice(0, first), ids.slice(1)) : [],
    next_token: nextToken(tokenizer, ids, logprobs[first]),
    generated: added,
  };
}

/** @param {PageTokenizer} tokenizer @param {number[]} ids @param {Float32Array} logprobs */
function nextToken(tokenizer, ids, logprobs) {
  const best = topIndices(logprobs, NEXT_TOP_COUNT);
  const context = ids.slice(-8);
  const start = tokenizer.decode(context).length;
  const normalizer = (/** @type {number} */ temperature) => {
    const top = logprobs[best[0]] / temperature;
    return top + Math.log(logprobs.reduce((sum, logprob) => sum + Math.exp(logprob / temperature - top), 0));
  };
  return {
    tokens: [...tokenizer.distinctNames(best).values()],
    texts: best.map((id) => tokenizer.decode([...context, id]).slice(start)),
    logprobs: best.map((id) => logprobs[id]),
    log_normalizers: TEMPERATURES.map(normalizer),
    temperatures: TEMPERATURES,
  };
}

/**
 * The logits of a masked language model for every token: of a text without masked tokens, with this token masked.
 * @param {PageEngine} engine @param {Look} look @param {Intervention[]} changes
 */
function maskedLogits(engine, look, changes) {
  const texts = engine.maskedInputs(look.ids[0]);
  return texts ? texts.map((ids, i) => engine.forward([ids], new Set(), changes).logits[i]) : look.pass.logits;
}

/**
 * Probabilities of labels, or the values of a regression model. @param {PageEngine} engine @param {Float32Array} logits
 * @returns {Float32Array}
 */
export function labelScores({ header: { problem_type: problem } }, logits) {
  if (problem === "regression") return logits;
  return problem === "multi_label" ? logits.map((x) => 1 / (1 + Math.exp(-x))) : logSoftmax(logits).map(Math.exp);
}

/**
 * The labels with the largest scores. @param {PageEngine} engine @param {Float32Array} scores @returns {ModelOutput}
 */
function readLabel({ header: { labels } }, scores) {
  const likeliest = topIndices(scores, TOP_COUNT).map((i) => /** @type {[string, number]} */ ([labels[i], scores[i]]));
  const [[text, probability]] = likeliest;
  return { text, logprob: null, steps: [{ token: text, name: text, probability, likeliest }], ...NO_STEPS };
}

/**
 * The label of an image; of a segmenter, the fraction of pixels per label. @param {PageEngine} engine
 * @param {Look} look @returns {ModelOutput}
 */
function readImageOutcome(engine, { pass: { output, logits } }) {
  const { head, labels } = engine.header;
  if (head === "classify" && labels.length) return readLabel(engine, labelScores(engine, logits[0]));
  if (head !== "segment") return { text: "", logprob: null, steps: [], ...NO_STEPS };
  const count = output.shape[1];
  const pixels = output.data.length / count;
  const areas = new Float32Array(count);
  for (let pixel = 0; pixel < pixels; pixel++) {
    let best = 0;
    for (let label = 1; label < count; label++)
      if (output.data[label * pixels + pixel] > output.data[best * pixels + pixel]) best = label;
    areas[best] += 1 / pixels;
  }
  const likeliest = topIndices(areas, TOP_COUNT).map((i) => /** @type {[string, number]} */ ([labels[i], areas[i]]));
  return { text: "", logprob: null, steps: [{ token: "pixels", name: "", probability: null, likeliest }], ...NO_STEPS };
}

/**
 * The text that a language model generates greedily, and its ids. @param {PageEngine} engine @param {number[]} ids
 * @param {Intervention[]} changes
 */
function continuation(engine, ids, changes) {
  const options = {
    ...engine.header.search,
    method: "greedy",
    max_len: CONTINUATION_TOKENS,
    max_ratio: 0,
    max_extra: CONTINUATION_TOKENS,
    min_len: 0,
    suppress_sequences: [],
    begin_suppress_tokens: [],
    unknown: engine.targetTokenizer.kind !== "word",
  };
  const [best] = engine.search(ids, changes, options, []).results;
  // The last tokens of the prompt determine how the next token is decoded.
  const context = ids.slice(engine.addSpecialTokens([]).length).slice(-8);
  const text = engine.targetTokenizer
    .decode([...context, ...best.ids])
    .slice(engine.targetTokenizer.decode(context).length);
  return { text, added: best.ids };
}

/** @param {Float32Array[]} logprobs @param {number[]} targets */
const totalOf = (logprobs, targets) => targets.reduce((sum, id, i) => sum + logprobs[i][id], 0);

/**
 * One step per row; rows beyond the last target have no token. @param {PageTokenizer} tokenizer
 * @param {Float32Array[]} logprobs @param {number[]} targets @returns {PredictionStep[]}
 */
function predictions(tokenizer, logprobs, targets) {
  return logprobs.map((row, i) => {
    const best = topIndices(row, TOP_COUNT);
    const names = tokenizer.distinctNames([...best, ...targets.slice(i, i + 1)]);
    const likeliest = best.map((id) => /** @type {[string, number]} */ ([names.get(id), Math.exp(row[id])]));
    if (i >= targets.length) return { token: "", name: "", probability: null, likeliest };
    const target = targets[i];
    return {
      token: tokenizer.decode([target]) || tokenizer.label(target),
      name: names.get(target),
      probability: Math.exp(row[target]),
      likeliest,
    };
  });
}

/**
 * The weights of the attention that is shown. @param {PageEngine} engine @param {Look} look
 * @param {{attention: string, head: number | "mean"} | null} shown
 */
function shownMap(engine, look, shown) {
  const header = shown && engine.header.attentions.find((/** @type {any} */ one) => one.name === shown.attention);
  if (!header) return null;
  const { data, shape } = engine.weightsOf(look.pass, header.name);
  const [, heads, queries, keys] = shape;
  const selected =
    typeof shown.head === "number" && shown.head < heads ? [shown.head] : Array.from({ length: heads }, (_, h) => h);
  const weights = Array.from({ length: queries }, (_, t) =>
    Array.from(
      { length: keys },
      (_, s) => selected.reduce((sum, h) => sum + data[(h * queries + t) * keys + s], 0) / selected.length,
    ),
  );
  return { rows: look.axes[header.rows].tokens, columns: look.axes[header.columns].tokens, weights };
}

/** @param {PageEngine} engine @param {Intervention[]} changes */
function checkInterventions(engine, changes) {
  const { attentions, layers, positions } = engine.header.graphs.forward;
  for (const { change, attention, head, layer, weights } of changes) {
    if (change === "positions" && !positions.length)
      throw new Error("This model has no positional encodings to remove.");
    if (change === "layer" && !Object.keys(layers).some((path) => path === layer || path.startsWith(`${layer}.`)))
      throw new Error(`The model has no layer ${layer}.`);
    if (change === "head" || change === "row") {
      const one =
        engine.maps.get(attention) ?? attentions.find((/** @type {any} */ part) => part.attention === attention);
      if (!one) throw new Error(`The model has no attention ${attention}.`);
      if (!(head >= 0 && head < one.heads))
        throw new Error(`${attention} has no head ${head}. Choose a head from 0 to ${one.heads - 1}.`);
    }
    if (change === "row") {
      const total = weights.reduce((sum, x) => sum + x, 0);
      if (weights.some((x) => !(x >= 0)) || !(Math.abs(total - 1) < 1e-4))
        throw new Error(
          `The weights of the row sum to ${total.toPrecision(6)}. Pass non-negative weights that sum to 1.`,
        );
    }
  }
}

/** @param {PageEngine} engine @param {Intervention[]} changes @param {Look} look */
function checkRows(engine, changes, look) {
  for (const { attention, row, weights } of changes.filter(({ change }) => change === "row")) {
    if (!engine.maps.has(attention)) continue;
    const [, , queries, keys] = engine.weightsOf(look.pass, attention).shape;
    if (!(row >= 0 && row < queries))
      throw new Error(`${attention} has no row ${row}. Choose a row from 0 to ${queries - 1}.`);
    if (weights.length !== keys)
      throw new Error(
        `Row ${row} of ${attention} has ${keys} keys, but ${weights.length} weights were given. Pass one weight per key.`,
      );
  }
}
