/** The candidates of a search: their texts, their order and their outcomes. */

import { makeVisible, truncate, withMinus } from "../core/tokens.js";

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
  suppressed: "it would repeat an n-gram, or is suppressed",
  forbidden: "it would complete a forbidden phrase",
  required: "a required phrase is still missing",
};

/** Adds texts, labels and links to the scene's candidates. @param {{nodes: CandidateData[], results: {node: number | null}[]}} search @returns {Candidate[]} */
export function buildCandidates(search) {
  /** @type {Candidate[]} */
  const nodes = [];
  search.nodes.forEach((candidate, index) => {
    const before = candidate.parent === null || candidate.whole ? "" : nodes[candidate.parent].text;
    nodes.push({ ...candidate, index, text: before + candidate.piece, label: truncate(makeVisible(candidate.token), MAX_NODE_LABEL), children: [], isInResult: false });
  });
  for (const { node } of search.results) for (let at = node; at !== null; at = nodes[at].parent) nodes[at].isInResult = true;
  for (const candidate of nodes) if (candidate.parent !== null) nodes[candidate.parent].children.push(candidate.index);
  // Candidates of results first, then those that were kept, each from the best down.
  for (const candidate of nodes) candidate.children.sort((a, b) => importance(nodes[b]) - importance(nodes[a]) || a - b);
  return nodes;
}

/**
 * The finished hypotheses: the results, then those that finished with a lower score.
 * @param {{results: {text: string, score: number, node: number | null}[]}} search @param {Candidate[]} nodes
 * @returns {{text: string, score: number, node: number | null, isResult: boolean}[]}
 */
export function finishedHypotheses(search, nodes) {
  const listed = new Set(search.results.map(({ node }) => node));
  const others = nodes.filter((candidate) => candidate.ends && !isDiscarded(candidate) && !listed.has(candidate.index));
  others.sort((a, b) => b.score - a.score);
  return [
    ...search.results.map((result) => ({ ...result, isResult: true })),
    ...others.map(({ index, text, score }) => ({ text, score, node: index, isResult: false })),
  ];
}

/** @param {Candidate} candidate */
export function isDiscarded(candidate) {
  return candidate.state === "pruned" || candidate.state === "refused";
}

/** Whether a candidate was kept, but is not part of a result. @param {Candidate} candidate */
export function isDeadEnd(candidate) {
  return candidate.state === "kept" && !candidate.isInResult;
}

/** Importance of a candidate. @param {Candidate} candidate */
export function importance(candidate) {
  return { best: 4, finished: 2, kept: 2, pruned: 1, refused: 0 }[candidate.state] + (candidate.isInResult ? 1 : 0);
}

/** Width of an edge, which grows with the probability. @param {Candidate} candidate */
export function edgeWidth(candidate) {
  return isDiscarded(candidate) ? 1.2 : 1.4 + 3.2 * Math.exp(candidate.logprob);
}

/** Describes the outcome of a candidate. @param {Candidate} candidate */
export function outcomeOf(candidate) {
  if (isDiscarded(candidate)) return `${STATES[candidate.state]}: ${REASONS[candidate.reason] ?? candidate.reason}`;
  if (candidate.ends) return candidate.state === "best" ? "Finished: the best hypothesis" : candidate.isInResult ? "Finished: one of the results" : "Finished: ranked below the results";
  if (candidate.state === "best") return "Kept: part of the best hypothesis";
  return candidate.isInResult ? "Kept: part of a result" : "Kept: leads to no result";
}

/** Formats a score; small ones with two significant digits, because a log-probability is 0 only for certain tokens. @param {number} value @param {number} [digits] after the point */
export function formatScore(value, digits) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  const text = size < 0.001 ? size.toExponential(1) : size.toFixed(digits ?? (size < 0.1 ? 4 : 2));
  return (value < 0 ? "−" : "") + withMinus(text);
}

/** The candidates from the first step to this one. @param {Candidate[]} nodes @param {Candidate} candidate @returns {Candidate[]} */
export function pathOf(nodes, candidate) {
  const path = [];
  for (let at = candidate; at; at = nodes[at.parent]) path.unshift(at);
  return path;
}

/** The last token of the best continuation. @param {Candidate[]} nodes @param {Candidate} candidate @param {Set<number>} visibleIndices */
export function lastOf(nodes, candidate, visibleIndices) {
  let at = candidate;
  for (let next = at; next; next = nodes[at.children.find((number) => visibleIndices.has(number))]) at = next;
  return at.index;
}
