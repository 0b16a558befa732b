/** The candidates of a search: their texts, their order and their outcomes. */

import { makeVisible, truncate } from "../core/tokens.js";

/**
 * @typedef {{step: number, parent: number | null, token: string, piece: string, whole: boolean, logprob: number, total: number,
 *   score: number | null, state: string, ends: boolean, reason: string, row: number | null}} CandidateData a candidate in the scene
 * @typedef {CandidateData & {index: number, text: string, label: string, children: number[], isInResult: boolean}} Candidate
 * `isInResult`: whether it is part of a result
 */

/** Maximum length of a label. */
const MAX_NODE_LABEL = 18;
export const STATES = { best: "Best", finished: "Finished", kept: "Kept", pruned: "Pruned", refused: "Excluded" };
export const REASONS = {
  beam: "better candidates fill the beam",
  end: "it finishes with too low a score to be kept",
  greedy: "another token is more probable",
  top_k: "it is not among the top-k tokens",
  top_p: "it is outside the nucleus (top-p)",
  "not drawn": "it could have been sampled, but was not",
  prefix: "the prefix is given",
  limit: "the maximum length is reached",
  min_len: "the minimum length is not reached",
  special: "this special token is never generated",
};

/** Adds texts, labels and links to the scene's candidates. @param {{nodes: CandidateData[], results: {node: number | null}[]}} given @returns {Candidate[]} */
export function buildCandidates(given) {
  /** @type {Candidate[]} */
  const nodes = [];
  given.nodes.forEach((one, index) => {
    const before = one.parent === null || one.whole ? "" : nodes[one.parent].text;
    nodes.push({ ...one, index, text: before + one.piece, label: truncate(makeVisible(one.token), MAX_NODE_LABEL), children: [], isInResult: false });
  });
  for (const { node } of given.results) for (let at = node; at !== null; at = nodes[at].parent) nodes[at].isInResult = true;
  for (const one of nodes) if (one.parent !== null) nodes[one.parent].children.push(one.index);
  // Candidates of results first, then those that were kept, each from the best down.
  for (const one of nodes) one.children.sort((a, b) => importance(nodes[b]) - importance(nodes[a]) || a - b);
  return nodes;
}

/** @param {Candidate} one */
export function isDiscarded(one) {
  return one.state === "pruned" || one.state === "refused";
}

/** Whether a candidate was kept, but is not part of a result. @param {Candidate} one */
export function isDeadEnd(one) {
  return one.state === "kept" && !one.isInResult;
}

/** Importance of a candidate. @param {Candidate} one */
export function importance(one) {
  return { best: 4, finished: 2, kept: 2, pruned: 1, refused: 0 }[one.state] + (one.isInResult ? 1 : 0);
}

/** Width of an edge, which grows with the probability. @param {Candidate} one */
export function edgeWidth(one) {
  return isDiscarded(one) ? 1.2 : 1.4 + 3.2 * Math.exp(one.logprob);
}

/** Describes the outcome of a candidate. @param {Candidate} one */
export function outcomeOf(one) {
  if (isDiscarded(one)) return `${STATES[one.state]}: ${REASONS[one.reason] ?? one.reason}`;
  if (one.ends) return one.state === "best" ? "Finished: the best hypothesis" : one.isInResult ? "Finished: one of the results" : "Finished: ranked below the results";
  if (one.state === "best") return "Kept: part of the best hypothesis";
  return one.isInResult ? "Kept: part of a result" : "Kept: leads to no result";
}

/** Formats a score, with more digits if it is small. @param {number} value @param {number} [digits] */
export function formatScore(value, digits = Math.abs(value) < 0.1 ? 4 : 2) {
  return Number(value.toFixed(digits)) === 0 ? "0" : value.toFixed(digits).replace("-", "−");
}

/** The candidates from the first step to this one. @param {Candidate[]} nodes @param {Candidate} one @returns {Candidate[]} */
export function pathOf(nodes, one) {
  const path = [];
  for (let at = one; at; at = nodes[at.parent]) path.unshift(at);
  return path;
}

/** The last token of the best continuation. @param {Candidate[]} nodes @param {Candidate} one @param {Set<number>} visibleIndices */
export function lastOf(nodes, one, visibleIndices) {
  let at = one;
  for (let next = at; next; next = nodes[at.children.find((number) => visibleIndices.has(number))]) at = next;
  return at.index;
}
