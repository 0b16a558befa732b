/** The step-by-step view of a new input: the steps of the page's own trace, with other sizes (regard/viewer/trace). */

import { resolveSizes } from "./expressions.js";
import { topIndices } from "./search.js";
import { mutualInformation, rowEntropy } from "../weights/maths.js";

/**
 * @typedef {import("./page_engine.js").PageEngine} PageEngine
 * @typedef {import("./page_engine.js").Look} Look
 */

/** Tokens up to which a scene has a trace; named output tokens per position. */
const [MAX_TOKENS, TOP_TOKENS] = [64, 10];

/** @param {PageEngine} engine @param {Look} look @returns {any} the header of a trace, or null */
export function buildTrace(engine, look) {
  const template = engine.header.trace;
  if (!template || look.ids.some((ids) => ids.length > MAX_TOKENS)) return null;
  const names = engine.graphs.forward.runner.json.inputs.map(({ name }) => name);
  /** @type {Record<string, number[]>} */
  const inputs = Object.fromEntries(names.map((name, i) => [name, look.ids[i] ?? look.ids[0].map(() => 0)]));
  const sizes = Object.fromEntries(Object.entries(inputs).map(([name, ids]) => [name, ids.length]));
  const { steps, sections } = new Unrolling(template, sizes).run();
  const sides = Object.fromEntries(Object.keys(sizes).filter((name) => look.axes[name]).map((name) => [name, { tokens: look.axes[name].tokens, words: look.axes[name].words }]));
  return { sides, focus: sharpestHead(engine, look), names: outputNames(engine, look), note: template.note, sections, steps, inputs, params: null, outputs: null };
}

/** The steps of a template for inputs of some sizes, with a copy of the steps of a loop per token (regard/viewer/trace/steps.py). */
class Unrolling {
  /** @param {any} template @param {Record<string, number>} sizes by name of the sequence */
  constructor(template, sizes) {
    this.template = template;
    this.sizes = sizes;
    /** @type {any[]} */
    this.steps = [];
    /** @type {any[]} */
    this.sections = [];
    /** Indices of the unrolled steps, by index of the template: one per position of a loop. @type {number[][]} */
    this.indices = template.steps.map(() => []);
  }

  run() {
    const { steps, loops } = this.template;
    const sections = new Map();
    for (let n = 0; n < steps.length; ) {
      const { loop } = steps[n];
      let end = n + 1;
      while (loop !== undefined && steps[end].loop === loop) end++;
      const count = loop === undefined ? 1 : this.sizes[loops[loop].side];
      for (let position = 0; position < count; position++) {
        const token = loop === undefined ? null : loops[loop].backward ? count - 1 - position : position;
        const own = token === null ? sections : new Map();
        for (let i = n; i < end; i++) this.append(i, position, token, own);
      }
      n = end;
    }
    return { steps: this.steps, sections: this.sections };
  }

  /** @param {number} n index in the template @param {number} position @param {number | null} token of a loop @param {Map<number, number>} sections by index in the template */
  append(n, position, token, sections) {
    const { loop, ...step } = this.template.steps[n];
    if (step.output && !sections.has(step.section)) {
      sections.set(step.section, this.sections.length);
      const section = this.template.sections[step.section];
      this.sections.push(token === null ? section : { ...section, token });
    }
    this.indices[n].push(this.steps.length);
    this.steps.push({
      ...step,
      id: token === null ? step.id : step.id.replace("{token}", token),
      section: step.output ? sections.get(step.section) : step.section,
      options: resolveSizes(step.options, { ...this.sizes, position }),
      inputs: step.inputs.flatMap((/** @type {any} */ input) => this.resolveInput(input, position)),
      output: step.output && { ...step.output, shape: step.output.shape.map((/** @type {number} */ size, /** @type {number} */ i) => this.sizes[step.output.axes[i]] ?? size) },
    });
  }

  /** @param {any} input of a step of the template @param {number} position @returns {any} one or several inputs */
  resolveInput(input, position) {
    if (typeof input === "number") return this.indices[input].at(-1);
    if (input?.each !== undefined) return this.indices[input.each];
    if (input?.carried !== undefined) {
      const { initial, state } = this.template.loops[input.carried];
      return position ? this.indices[state][position - 1] : this.resolveInput(initial, 0);
    }
    return input?.input ? { ...input, shape: [1, this.sizes[input.input]] } : input;
  }
}

/** Names of the columns of the last step: the most likely ones per row. @param {PageEngine} engine @param {Look} look @returns {Record<number, string>} */
function outputNames(engine, { pass: { logits } }) {
  const { head, labels } = engine.header;
  if (head === "none" || head === "answer") return {};
  if (head === "classify") return Object.fromEntries(labels.map((/** @type {string} */ label, /** @type {number} */ i) => [i, label]));
  const columns = new Set(logits.flatMap((row) => topIndices(row, TOP_TOKENS)));
  return Object.fromEntries(engine.targetTokenizer.distinctNames([...columns].sort((a, b) => a - b), true));
}

/** The initial selection: the sharpest attention and head, and the token with the sharpest weights. @param {PageEngine} engine @param {Look} look */
function sharpestHead(engine, look) {
  const attentions = engine.header.attentions;
  if (!attentions.length) return { attention: null, head: 0 };
  const heads = attentions
    .filter((/** @type {any} */ one, /** @type {number} */ _, /** @type {any[]} */ all) => one.kind === "cross" || !all.some(({ kind }) => kind === "cross"))
    .map((/** @type {any} */ header) => {
      const { data, shape } = engine.weightsOf(look.pass, header.name);
      const [, count, rows, columns] = shape;
      const size = rows * columns;
      const mean = new Float32Array(size).map((_, i) => Array.from({ length: count }, (_, h) => data[h * size + i]).reduce((sum, x) => sum + x, 0) / count);
      return { header, data, count, rows, columns, sharpness: mutualInformation(mean, rows, columns) };
    });
  const best = heads.reduce((/** @type {any} */ a, /** @type {any} */ b) => (b.sharpness > a.sharpness ? b : a));
  const { header, data, count, rows, columns } = best;
  const map = (/** @type {number} */ h) => data.subarray(h * rows * columns, (h + 1) * rows * columns);
  const measures = Array.from({ length: count }, (_, h) => mutualInformation(map(h), rows, columns));
  const head = measures.indexOf(Math.max(...measures));
  const { words } = look.axes[header.rows];
  const rowAt = (/** @type {number} */ t) => map(head).subarray(t * columns, (t + 1) * columns);
  const sharpness = words.map((word, t) => {
    if (word < 0 && words.some((one) => one >= 0)) return -1;
    return Math.log2(Math.max(rowAt(t).filter((/** @type {number} */ x) => x > 0).length, 1)) - rowEntropy(rowAt(t));
  });
  const row = sharpness.indexOf(Math.max(...sharpness));
  const focus = { attention: header.name, head };
  if (header.kind !== "cross") return { ...focus, [header.rows]: row };
  return { ...focus, target: row, [header.columns]: rowAt(row).indexOf(Math.max(...rowAt(row))) };
}
