/** Explanations of an output: regard/viewer/explanations and page/explanations.py. */

import { topIndices } from "./search.js";

/**
 * @typedef {import("./model.js").PageEngine} PageEngine
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./graph_runner.js").Tensor} Tensor
 * @typedef {import("./graph_runner.js").Edits} Edits
 * @typedef {[number, number, number]} ExplainedStep index of the input, row of the logits, id of the token or label
 * @typedef {{inputs: number[][][], steps: ExplainedStep[]}} ExplainedOutput
 */

/** Candidates per layer and position of the logit lens, and its positions. */
const [LENS_TOP_COUNT, MAX_LENS_POSITIONS] = [5, 64];
/** The step of central differences: their error is of order ε², that of rounding of order 1 ⁄ ε. */
const EPSILON = 0.01;
/** Scales α = u³ of integrated gradients, as in attribution.py, each with dα ⁄ α. */
const INTEGRATION_POINTS = Array.from({ length: 32 }, (_, i) => {
  const u = (i + 0.5) / 32;
  return { scale: u ** 3, weight: 3 / (32 * u) };
});
const SIDES = { 1: ["text"], 2: ["source", "target"] };

/**
 * The explained output of a look, or null if there is none.
 * @param {PageEngine} engine @param {Look} look @param {{text: string, steps: {token: string}[]}} output
 * @param {number[]} generated ids of a continuation
 */
export function explainOutput(engine, look, output, generated) {
  const { head, labels } = engine.header;
  const { streams } = engine.header.graphs.forward;
  const tokens = output.steps.map(({ token }) => token);
  /** @param {number[][][]} inputs @param {ExplainedStep[]} steps @param {string[]} tokens */
  const explained = (inputs, steps, tokens) => {
    const measures = ["effects", ...(streams.length ? ["lens"] : []), "attribution"];
    return { inputs, steps, tokens, measures, ...Object.fromEntries(measures.map((measure) => [measure, null])) };
  };
  /** @param {number} first @param {number[]} columns @returns {ExplainedStep[]} */
  const stepsFrom = (first, columns) => columns.map((column, i) => [0, first + i, column]);
  const best = (/** @type {number} */ row) => topIndices(look.pass.logits[row], 1)[0];
  const textOf = (/** @type {number} */ id) => engine.targetTokenizer.decode([id]) || engine.targetTokenizer.label(id);
  if (engine.isTranslator)
    return explained([look.ids], stepsFrom(0, [...look.ids[1].slice(1), engine.special.eos]), tokens);
  const [ids] = look.ids;
  if (engine.isGenerator) {
    const last = ids.length - 1;
    if (generated.length) return explained([[[...ids, ...generated.slice(0, -1)]]], stepsFrom(last, generated), tokens);
    return explained([[ids]], stepsFrom(last, [best(last)]), [textOf(best(last))]);
  }
  if (head === "classify") return explained([[ids]], [[0, 0, labels.indexOf(output.text)]], [output.text]);
  if (head !== "mask") return null;
  const texts = engine.maskedInputs(ids);
  if (texts)
    return explained(
      texts.map((text) => [text]),
      ids.map((id, i) => [i, i, id]),
      tokens,
    );
  const all = ids.map((_, i) => i);
  const masked = all.filter((i) => ids[i] === engine.special.mask);
  const steps = (masked.length ? masked : all).map((i) => /** @type {ExplainedStep} */ ([0, i, best(i)]));
  return explained(
    [[ids]],
    steps,
    steps.map(([, , column]) => textOf(column)),
  );
}

/** Responds to a request for a measure. @param {PageEngine} engine @param {any} request */
export function explain(engine, request) {
  const { measure } = request;
  if (measure === "effects")
    return { effects: { [request.attention]: headEffects(engine, request, request.attention) } };
  if (measure === "lens") return { lens: logitLens(engine, request) };
  if (measure === "attribution") return { attribution: attribution(engine, request) };
  throw new Error(`Unknown measure ${measure}. Choose one of effects, lens, attribution.`);
}

/**
 * Log-probability of each step; of a regression, its value. @param {string} problem kind of labels
 * @param {ExplainedStep[]} steps @param {(Float32Array[] | null)[]} logits of each input
 * @returns {number[]} NaN for steps of inputs without logits
 */
function stepLogprobs(problem, steps, logits) {
  return steps.map(([sequence, row, column]) => {
    const scores = logits[sequence]?.[row];
    if (!scores) return NaN;
    if (problem === "regression") return scores[column];
    if (problem === "multi_label") return -Math.log1p(Math.exp(-scores[column]));
    return scores[column] - logSum(scores);
  });
}

/** @param {Float32Array} logits */
function logSum(logits) {
  let maximum = -Infinity;
  for (const x of logits) if (x > maximum) maximum = x;
  let total = 0;
  for (const x of logits) total += Math.exp(x - maximum);
  return maximum + Math.log(total);
}

/**
 * Effects of the heads of an attention on each step. @param {PageEngine} engine @param {ExplainedOutput} output
 * @param {string} attention @returns {number[][]}
 */
function headEffects(engine, { inputs, steps }, attention) {
  const { attentions } = engine.header.graphs.forward;
  const one = engine.maps.get(attention) ?? attentions.find((/** @type {any} */ part) => part.attention === attention);
  if (!one) throw new Error(`The model has no attention ${attention}.`);
  const run = (/** @type {import("./experiments.js").Intervention[]} */ changes) => {
    const logits = inputs.map((ids) => engine.forward(ids, new Set(), changes).logits);
    return stepLogprobs(engine.header.problem_type, steps, logits);
  };
  const before = run([]);
  return Array.from({ length: one.heads }, (_, head) =>
    run([{ change: "head", attention, head }]).map((after, i) => after - before[i]),
  );
}

/** @param {PageEngine} engine @param {ExplainedOutput} output */
function logitLens(engine, { inputs, steps }) {
  const { streams } = engine.header.graphs.forward;
  if (!streams.length) throw new Error("The logit lens needs a model with a residual stream.");
  if (engine.isGenerator) {
    const [[ids]] = inputs;
    steps = [
      ...Array.from({ length: steps[0][1] }, (_, row) => /** @type {ExplainedStep} */ ([0, row, ids[row + 1]])),
      ...steps,
    ];
  }
  steps = steps.slice(-MAX_LENS_POSITIONS);
  const { head, labels } = engine.header;
  const isLabel = engine.image || head === "classify";
  const tokenizer = engine.targetTokenizer;
  const nameOf = (/** @type {number} */ column) =>
    isLabel ? labels[column] : tokenizer.decode([column]) || tokenizer.label(column);
  const used = new Set(steps.map(([sequence]) => sequence));
  // The output layer reads the last stream only: an earlier one in its place gives the lens.
  /** By layer and input, the logits. @type {Float32Array[][][]} */
  const logits = streams.map(() => []);
  for (const sequence of used) {
    const { values } = engine.forward(inputs[sequence], new Set(streams), []);
    streams.forEach((/** @type {number} */ slot, /** @type {number} */ layer) => {
      const [stream] = values.get(slot);
      const edits = { replaced: new Map([[streams.at(-1), () => stream]]), bypassed: new Map() };
      logits[layer][sequence] = engine.forward(inputs[sequence], new Set(), [], edits).logits;
    });
  }
  const own = logits.map((of) => stepLogprobs("single_label", steps, of).map(Math.exp));
  const columns = logits.map((of) => steps.map(([sequence, row]) => topIndices(of[sequence][row], LENS_TOP_COUNT)));
  const probabilities = columns.map((rows, layer) =>
    rows.map((best, i) => {
      const [sequence, row] = steps[i];
      return stepLogprobs(
        "single_label",
        best.map((column) => /** @type {ExplainedStep} */ ([sequence, row, column])),
        logits[layer],
      ).map(Math.exp);
    }),
  );
  const shown = [...new Set(columns.flat(2))].sort((a, b) => a - b);
  const names = Object.fromEntries(
    isLabel ? shown.map((column) => [column, labels[column]]) : tokenizer.distinctNames(shown),
  );
  return {
    layers: streams.length,
    tokens: steps.map(([, , column]) => nameOf(column)),
    targets: steps.map(([, , column]) => column),
    own,
    columns,
    probabilities,
    names,
  };
}

/**
 * Gradient × input by central differences: the derivative of a log-probability with respect to a factor of the
 * embedding of
 * token i, at 1, is the product of gradient and embedding. Or integrated gradients: its mean over scales of all
 * embeddings. Or occlusion: the difference between factors 1 and 0.
 * @param {PageEngine} engine
 * @param {ExplainedOutput & {side?: string, tokens?: [number, number], method?: string}} request optionally of one
 * side and a range of tokens
 * @returns {Record<string, number[][]>} by side, a row per step; a column per token of the range
 */
function attribution(engine, { inputs, steps, side: onlySide, tokens: range, method }) {
  const factors = method === "occlusion" ? [1, 0] : [1 + EPSILON, 1 - EPSILON];
  const { embeddings } = engine.header.graphs.forward;
  const names = SIDES[embeddings.length];
  /** The change of embeddings: all are scaled, one token of one side has a factor more. */
  const scaled = (/** @type {number} */ scale, side = -1, token = 0, factor = 1) =>
    embeddings.map((/** @type {number} */ slot, /** @type {number} */ i) => [
      slot,
      (/** @type {Tensor} */ value) => scaleRow(value, scale, token, i === side ? factor : 1),
    ]);
  const points = method === "integrated_gradients" ? INTEGRATION_POINTS : [{ scale: 1, weight: 1 }];
  const gates = points.map(({ scale }) =>
    inputs.map((ids) =>
      method === "occlusion" ? { replaced: new Map(), bypassed: new Map() } : reluGates(engine, ids, scaled(scale)),
    ),
  );
  /** @type {Record<string, number[][]>} */
  const found = {};
  names.forEach((name, side) => {
    if (onlySide && name !== onlySide) return;
    const [from, to] = range ?? [0, Math.max(...inputs.map((ids) => ids[side].length))];
    found[name] = steps.map(() => Array(to - from).fill(0));
    for (const [point, { scale, weight }] of points.entries())
      for (let token = from; token < to; token++) {
        const [up, down] = factors.map((factor) => {
          const logits = inputs.map((ids, sequence) => {
            if (token >= ids[side].length) return null;
            const { replaced, bypassed } = gates[point][sequence];
            return engine.forward(ids, new Set(), [], {
              replaced: new Map([...replaced, ...scaled(scale, side, token, factor)]),
              bypassed,
            }).logits;
          });
          return stepLogprobs(engine.header.problem_type, steps, logits);
        });
        found[name].forEach((row, i) => {
          if (!Number.isNaN(up[i])) row[token - from] += (weight * (up[i] - down[i])) / (factors[0] - factors[1]);
        });
      }
  });
  return found;
}

/**
 * Changes of the graph by which every ReLU keeps the units of the input with changed embeddings, so that differences do
 * not cross its kink.
 * @param {PageEngine} engine @param {number[][]} ids @param {[number, (value: Tensor) => Tensor][]} embeddings
 * @returns {Edits}
 */
function reluGates(engine, ids, embeddings) {
  const steps = engine.graphs.forward.runner.json.steps.filter(({ op }) => op === "relu");
  const edits = { replaced: new Map(embeddings), bypassed: new Map() };
  const { values } = engine.forward(ids, new Set(steps.map(({ out }) => out)), [], edits);
  /** @type {Edits} */
  const gates = { replaced: new Map(), bypassed: new Map(steps.map((step) => [step.out, step.in[0]])) };
  for (const { out } of steps) {
    const [{ data: open }] = values.get(out);
    gates.replaced.set(out, ({ data, shape }) => ({
      data: data.map((/** @type {number} */ x, /** @type {number} */ i) => (open[i] > 0 ? x : 0)),
      shape,
    }));
  }
  return gates;
}

/**
 * Multiplies (1, T, E) by a scale, and a row by a factor more.
 * @param {Tensor} value @param {number} scale @param {number} row @param {number} factor @returns {Tensor}
 */
function scaleRow({ data, shape }, scale, row, factor) {
  const width = shape[shape.length - 1];
  const out = scale === 1 ? data.slice() : data.map((/** @type {number} */ x) => x * scale);
  for (let i = row * width; i < (row + 1) * width; i++) out[i] *= factor;
  return { data: out, shape };
}
