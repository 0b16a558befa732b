/** Interventions on a graph: regard/viewer/interventions.py. */

/**
 * @typedef {import("./fast_operations.js").Tensor} Tensor
 * @typedef {import("./graph_runner.js").GraphJson} GraphJson
 * @typedef {import("./graph_runner.js").Edits} Edits
 * @typedef {{attention: string, kind: string, heads: number, q: number, k: number, w: number | null, scale: number | null,
 *   isScaledDot: boolean, bias: number | null, biasValue: number | null, masks: number[], weights: number, context: number}} AttentionPart
 * @typedef {{attentions: AttentionPart[], layers: Record<string, number[]>, positions: [number, number][]}} PartsJson
 * the slots of attentions, of the outputs of layers, and of positional encodings (regard/graph/parts.py)
 * @typedef {{change: string, attention?: string, head?: number, layer?: string, row?: number, weights?: number[]}} Intervention
 */

/** Interventions that change earlier rows, so that cached keys and values cannot be used. */
const NEEDS_FORWARD = new Set(["row", "mask"]);

/** @param {Intervention[]} changes */
export const needsForward = (changes) => changes.some(({ change }) => NEEDS_FORWARD.has(change));

/** The name of an attention's module: calls of a shared module are recorded as name.0, name.1, … @param {string} name @param {{attention: string}[]} attentions */
const moduleOf = (name, attentions) => (attentions.some((one) => one.attention === name) ? name : name.replace(/\.\d+$/, ""));

/** The changes of a graph. @param {GraphJson & PartsJson} graph @param {Intervention[]} changes @returns {Edits | undefined} */
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
    else if (change === "row") for (const one of selected) replace(one.weights, (value, iteration) => withRow(value, head, row - iteration, weights, one.kind === "masked"));
    else if (change === "layer") {
      for (const [path, slots] of Object.entries(layers)) {
        if (path === layer || path.startsWith(`${layer}.`)) for (const slot of slots) replace(slot, zeros);
      }
    } else if (change === "mask") for (const one of selected.filter(({ kind }) => kind === "masked")) for (const slot of one.masks) edits.bypassed.set(slot, inputs.get(slot));
    else if (change === "scale") for (const one of selected.filter(({ isScaledDot }) => isScaledDot)) edits.bypassed.set(one.scale, inputs.get(one.scale));
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

/** @param {Tensor} value (1, H, T, S) @param {number} head @param {number} row @param {number[]} weights @param {boolean} isGrowing @returns {Tensor} */
function withRow({ data, shape }, head, row, weights, isGrowing) {
  const [, , queries, keys] = shape;
  const fitted = row >= 0 && row < queries ? fitWeights(weights, keys, isGrowing) : null;
  if (!fitted) return { data, shape };
  const out = Float32Array.from(data);
  out.set(fitted, (head * queries + row) * keys);
  return { data: out, shape };
}

/** The weights for a number of keys, which grows during decoding. @param {number[]} weights @param {number} keys @param {boolean} isGrowing @returns {number[] | null} */
function fitWeights(weights, keys, isGrowing) {
  if (weights.length === keys) return weights;
  if (!isGrowing) throw new Error(`The row has ${keys} keys, but ${weights.length} weights were given. Pass one weight per key.`);
  const fitted = Array.from({ length: keys }, (_, i) => weights[i] ?? 0);
  const total = fitted.reduce((sum, x) => sum + x, 0);
  return total > 0 ? fitted.map((x) => x / total) : null;
}
