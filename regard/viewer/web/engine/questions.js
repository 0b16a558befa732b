/** Questions about a context: the input of a question-answering model, and its answer (regard/data/text/examples/questions.py). */

import { surround, textAxis } from "./token_axes.js";
import { logSoftmax } from "./search.js";
import { mutualInformation } from "../weights/maths.js";

/**
 * @typedef {import("./page_engine.js").PageEngine} PageEngine
 * @typedef {import("./page_engine.js").Look} Look
 * @typedef {import("./interventions.js").Intervention} Intervention
 * @typedef {{context: string, rows: [number, number], columns: [number, number]}} Question the context, and the positions of the
 * question and of the context in the input
 */

/** Maximum number of tokens of an answer. */
const MAX_ANSWER_TOKENS = 48;

/** @param {PageEngine} engine @param {string} source the question @param {string} context @param {Intervention[]} changes @returns {Look} */
export function lookAtQuestion(engine, source, context, changes) {
  if (!source.trim()) throw new Error("The question is empty. Enter a question.");
  const { sourceTokenizer: tokenizer, special } = engine;
  const [question, answers] = [source, context].map((text) => tokenizer.encode(text).ids);
  const between = special.between === null ? [] : [special.between];
  const end = special.end === null ? [] : [special.end];
  const before = engine.addSpecialTokens(question);
  const ids = [...before, ...between, ...answers, ...end];
  const { length_limit: limit } = engine.header;
  if (limit !== null && ids.length > limit) throw new Error(`The question with its context has ${ids.length} tokens; the model supports at most ${limit}. Shorten the context.`);
  const head = special.begin === null ? 0 : 1;
  const first = before.length + between.length;
  const segments = ids.map((_, i) => (i < before.length ? 0 : 1));
  const pass = engine.forward([ids, segments], engine.recordedSlots, changes);
  const labels = (/** @type {number[]} */ list) => list.map((id) => tokenizer.label(id));
  const left = textAxis(tokenizer, source, question);
  const right = textAxis(tokenizer, context, answers);
  const shift = Math.max(-1, ...left.words) + 1;
  const start = surround(left, labels(ids.slice(0, head)), labels(ids.slice(head + question.length, first)));
  const moved = surround({ ...right, words: right.words.map((word) => (word < 0 ? word : word + shift)) }, start.tokens, labels(end));
  const axis = { ...moved, words: [...start.words, ...moved.words.slice(start.words.length)], entries: { ...start.entries, ...moved.entries } };
  const columns = /** @type {[number, number]} */ ([first, first + answers.length]);
  const target = extractAnswer(engine, context, pass.logits, columns);
  const rows = /** @type {[number, number]} */ ([head, head + question.length]);
  return { source, target, ids: [ids, segments], axes: { text: axis }, pass, search: null, options: engine.header.search, question: { context, rows, columns } };
}

/** The span of the context with the largest probabilities of start and end. @param {PageEngine} engine @param {string} context @param {Float32Array[]} logits start and end score of each token @param {[number, number]} columns */
function extractAnswer(engine, context, logits, [from, to]) {
  const [starts, ends] = [0, 1].map((i) => logSoftmax(Float32Array.from(logits, (row) => row[i])));
  const pieces = engine.sourceTokenizer.encodePieces(context);
  let best = { score: -Infinity, first: 0, last: -1 };
  for (let first = from; first < to; first++) {
    for (let last = first; last < Math.min(to, first + MAX_ANSWER_TOKENS); last++) {
      if (starts[first] + ends[last] > best.score) best = { score: starts[first] + ends[last], first: first - from, last: last - from };
    }
  }
  return best.last < 0 ? "" : [...context].slice(pieces[best.first].start, pieces[best.last].end).join("");
}

/** The initial view: the attention, and its head, with the largest mutual information of question and context. @param {PageEngine} engine @param {Look} look */
export function sharpestQuestionHead(engine, { pass, question }) {
  const [firstRow, lastRow] = question.rows;
  const [firstColumn, lastColumn] = question.columns;
  const [rows, columns] = [lastRow - firstRow, lastColumn - firstColumn];
  /** @param {import("./fast_operations.js").Tensor} weights @param {number[]} heads */
  const measure = ({ data, shape: [, , queries, keys] }, heads) => {
    const block = new Float32Array(rows * columns);
    for (let i = 0; i < block.length; i++) {
      const [t, s] = [firstRow + Math.floor(i / columns), firstColumn + (i % columns)];
      for (const h of heads) block[i] += data[(h * queries + t) * keys + s] / heads.length;
    }
    return mutualInformation(block, rows, columns);
  };
  const all = [...engine.maps.keys()].map((name) => ({ name, weights: engine.weightsOf(pass, name) }));
  const indices = (/** @type {number} */ count) => Array.from({ length: count }, (_, h) => h);
  const measures = all.map(({ weights }) => measure(weights, indices(weights.shape[1])));
  const { name, weights } = all[measures.indexOf(Math.max(...measures))];
  const heads = indices(weights.shape[1]).map((h) => measure(weights, [h]));
  return { attention: name, head: heads.indexOf(Math.max(...heads)), all: false };
}
