/** The first sentence of the page: what the model output, with its probability, and which tokens were attended to most. */

import { isPunctuation } from "../weights/head_labels.js";
import { argmax, topK } from "../weights/maths.js";
import { h, tokenText } from "../core/dom.js";
import { formatProbability, isMaskToken, makeVisible, truncate, withMinus } from "../core/tokens.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("../weights/maps.js").Attentions} Attentions */

/** Number of tokens that the sentence names. */
const MAX_NAMED = 3;
const MAX_NAME_LENGTH = 24;
/** Weight from which a token is named. */
const MIN_WEIGHT = 0.05;

/** @param {any} axis @param {number} i */
const quoted = (axis, i) => h("q", {}, tokenText(truncate(axis.labels[i], MAX_NAME_LENGTH), axis.rtl));

/** Joins parts by commas and "and". @param {any[]} parts */
const enumerate = (parts) => parts.map((part, i) => [i === 0 ? "" : i === parts.length - 1 ? " and " : ", ", part]);

/** Whether a token of an axis is a word or part of one. @param {any} axis @param {number} i */
const isWord = (axis, i) => (axis.wordAt(i) ?? -1) >= 0 && !isPunctuation(axis.labels[i]);

/** The words with the largest weights. @param {any} axis @param {ArrayLike<number>} weights @returns {number[]} */
function strongestWords(axis, weights) {
  const masked = Float64Array.from(weights, (weight, i) => (isWord(axis, i) ? weight : 0));
  return topK(masked, MAX_NAMED).filter((i) => masked[i] >= MIN_WEIGHT);
}

/** The clearest pairs of an output word and the word it attends to. @param {import("../weights/maps.js").AttentionMap} map @param {any} rows @param {any} columns */
function clearestPairs(map, rows, columns) {
  const pairs = map.sampleRows().map((/** @type {number} */ row) => {
    const weights = map.exactRow(row);
    const column = argmax(weights);
    return { row, column, weight: weights[column] };
  });
  // Of words with about the same weight, long ones carry more of the meaning.
  const rank = (/** @type {{row: number, weight: number}} */ { row, weight }) => Math.round(10 * weight) + Math.min(9, rows.labels[row].length) / 10;
  return pairs
    .filter(({ row, column, weight }) => isWord(rows, row) && isWord(columns, column) && weight >= MIN_WEIGHT)
    .sort((a, b) => rank(b) - rank(a))
    .slice(0, MAX_NAMED)
    .sort((a, b) => a.row - b.row);
}

/** What the model output, as the beginning of the sentence; null if there is nothing to say. @param {any} scene */
function outputClause({ output, similarity, image }) {
  const strong = (/** @type {string} */ text) => h("strong", {}, truncate(makeVisible(text), 60));
  const probability = (/** @type {number} */ share) => ` (${formatProbability(share)})`;
  if (image?.labels[0]?.probability !== undefined) return ["The model’s answer is ", strong(image.labels[0].name), probability(image.labels[0].probability)];
  if (typeof similarity === "number") return ["The two texts have a cosine similarity of ", strong(withMinus(similarity.toFixed(2)))];
  const best = (/** @type {any} */ step) => step.likeliest[0];
  switch (output?.kind) {
    case "translation":
      return output.logprob === null ? null : ["The model translates this with a probability of ", strong(formatProbability(Math.exp(output.logprob)))];
    case "continuation":
      return output.next_token ? ["The most likely next token is ", strong(output.next_token.tokens[0]), probability(Math.exp(output.next_token.logprobs[0] - output.next_token.log_normalizers[output.next_token.temperatures.indexOf(1)]))] : null;
    case "mask": {
      const masked = output.steps.find((/** @type {any} */ { token }) => isMaskToken(token));
      return masked ? ["The most likely word for the mask is ", strong(best(masked)[0]), probability(best(masked)[1])] : null;
    }
    case "labels":
    case "answer":
      return output.steps[0]?.likeliest?.length ? ["The model’s answer is ", strong(output.kind === "answer" ? output.text : best(output.steps[0])[0]), probability(output.kind === "answer" ? (output.steps[0].probability ?? best(output.steps[0])[1]) : best(output.steps[0])[1])] : null;
    case "embedding":
      return ["The model embeds this text"];
    default:
      return null;
  }
}

/** The tokens that were attended to most. @param {any} scene @param {Attentions} attentions @param {HeadRef} selected @returns {any[] | null} */
function attentionClause(scene, attentions, selected) {
  const { rows, columns } = attentions.axesOf(selected.attention, false);
  const map = attentions.map(selected, false);
  const list = (/** @type {number[]} */ found) => (found.length ? enumerate(found.map((i) => quoted(columns, i))) : null);
  const kind = scene.output?.kind;
  if (kind === "translation") {
    const pairs = clearestPairs(map, rows, columns);
    return pairs.length ? ["; attention goes ", enumerate(pairs.map(({ row, column }) => ["from ", quoted(rows, row), " to ", quoted(columns, column)]))] : null;
  }
  if (kind === "continuation" || kind === "mask") {
    const masked = scene.output.steps.findIndex((/** @type {any} */ { token }) => isMaskToken(token));
    const row = kind === "mask" ? masked : map.rows - 1;
    const found = row < 0 || row >= map.rows ? null : list(strongestWords(columns, map.exactRow(row)));
    return found && [kind === "mask" ? "; the mask attends most to " : "; the last token attends most to ", found];
  }
  if (!map.isMaterialized) return null;
  const received = new Float64Array(map.columns);
  for (let row = 0; row < map.rows; row++) map.exactRow(row).forEach((/** @type {number} */ weight, /** @type {number} */ i) => (received[i] += weight / map.rows));
  const found = list(strongestWords(columns, received));
  return found && ["; most attention goes to ", found];
}

/** The patch of an image that is attended to most. @param {any} scene @param {Attentions} attentions @param {HeadRef} selected @returns {any[] | null} */
function patchClause({ image, attentions: list }, attentions, selected) {
  const row = image.single_query[selected.attention];
  if (row === null || selected.head === "mean") return null;
  const { columns } = list.find((/** @type {any} */ one) => one.name === selected.attention);
  const best = argmax(attentions.map(selected, false).exactRow(row).slice(image.first[columns]));
  return ["; most attention goes to ", h("strong", {}, `patch ${Math.floor(best / image.grid[1])},${best % image.grid[1]}`)];
}

/**
 * The sentence, as children of an element; null if the scene has no output.
 * @param {any} scene @param {Attentions} attentions @param {HeadRef} selected the head that the page opens with
 * @returns {Promise<any[] | null>}
 */
export async function summarySentence(scene, attentions, selected) {
  const clause = scene.compared && typeof scene.similarity !== "number" ? null : outputClause(scene);
  if (!clause) return null;
  if (selected.attention === null) return [clause, "."];
  await attentions.load(selected.attention);
  return [clause, scene.image ? patchClause(scene, attentions, selected) : attentionClause(scene, attentions, selected), "."];
}
