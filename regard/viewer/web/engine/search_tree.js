/** The tree of a search, as a scene contains it: regard/viewer/search_tree.py. */

/**
 * @typedef {import("./search.js").SearchResult} SearchResult
 * @typedef {import("./search.js").SearchOptions} SearchOptions
 * @typedef {import("./tokenizer/page_tokenizer.js").PageTokenizer} PageTokenizer
 * @typedef {{step: number, parent: number | null, id: number, logprob: number, total: number, score: number, state: string,
 *   ends: boolean, reason: string, beam: number}} Node `beam`: index of its parent among the live candidates
 */

const [MAX_CANDIDATES, MAX_NODES, MAX_REFUSED] = [12, 1500, 3];

/** @param {number} x */
const rounded = (x) => Number(x.toPrecision(6));

/** The index of a result among the candidates of each step. @param {SearchResult} search @param {import("./search.js").Hypothesis} result @param {number} eos @returns {number[]} */
function pathOf({ steps }, { ids, logprobs }, eos) {
  const path = [];
  let beam = 0;
  for (const [t, token] of [...ids, eos].slice(0, logprobs.length).entries()) {
    const isNext = (/** @type {import("./search.js").Candidate} */ one) => one.parent === beam && one.token === token;
    // Several end tokens are one: the first of them that is not pruned.
    const unpruned = steps[t].candidates.findIndex((one) => isNext(one) && one.status !== "pruned");
    const index = unpruned < 0 ? steps[t].candidates.findIndex(isNext) : unpruned;
    path.push(index);
    beam = steps[t].candidates.slice(0, index).filter(({ status }) => status === "live").length;
  }
  return path;
}

/** @param {SearchResult} search @param {number[][]} paths of the results, best first */
function growTree({ steps }, paths) {
  const width = Math.max(2, Math.min(MAX_CANDIDATES, Math.floor(MAX_NODES / Math.max(1, steps.length))));
  /** @type {Node[]} */
  const nodes = [];
  /** Node of each candidate, by step and index. @type {Map<string, number>} */
  const indices = new Map();
  /** @type {number[]} */
  const omitted = [];
  /** Node of each live candidate; −1: omitted. @type {(number | null)[]} */
  let beam = [null];
  steps.forEach(({ candidates, refused }, t) => {
    const needed = new Set(paths.filter((path) => t < path.length).map((path) => path[t]));
    const ranked = candidates
      .map((one, i) => ({ i, key: [needed.has(i) ? 0 : 1, one.status === "pruned" ? 1 : 0, i], isKnown: beam[one.parent] !== -1 }))
      .filter(({ isKnown }) => isKnown)
      .sort((a, b) => a.key[0] - b.key[0] || a.key[1] - b.key[1] || a.key[2] - b.key[2]);
    const chosen = ranked.slice(0, Math.max(width, needed.size)).map(({ i }) => i).sort((a, b) => a - b);
    const totalOf = (/** @type {number | null} */ parent) => (parent === null ? 0 : nodes[parent].total);
    for (const i of chosen) {
      const { parent: live, token, logprob: total, status, score, reason } = candidates[i];
      const parent = beam[live];
      indices.set(`${t} ${i}`, nodes.length);
      const state = paths[0]?.[t] === i ? "best" : status === "live" ? "kept" : status;
      nodes.push({ step: t, parent, id: token, logprob: total - totalOf(parent), total, score, state, ends: status === "finished", reason, beam: live });
    }
    const known = refused.filter((one) => beam[one.parent] !== -1);
    for (const { parent: live, token, logprob: total, reason } of known.slice(0, MAX_REFUSED)) {
      const parent = beam[live];
      nodes.push({ step: t, parent, id: token, logprob: total - totalOf(parent), total, score: NaN, state: "refused", ends: false, reason, beam: live });
    }
    omitted.push(candidates.length - chosen.length + refused.length - Math.min(known.length, MAX_REFUSED));
    beam = candidates.flatMap((one, i) => (one.status === "live" ? [indices.get(`${t} ${i}`) ?? -1] : []));
  });
  return { nodes, indices, omitted };
}

/**
 * @param {SearchResult} search @param {SearchOptions} options @param {PageTokenizer} tokenizer of the output
 * @param {{eos: number, limit: number, prefix: number[], source: string[], attention: string | null}} input
 * @returns {{header: any, weights: {data: Float32Array, shape: number[]} | null}} the header, without the blob `weights`
 */
export function searchHeader(search, options, tokenizer, { eos, limit, prefix, source, attention }) {
  const paths = search.results.map((result) => pathOf(search, result, eos));
  const { nodes, indices, omitted } = growTree(search, paths);
  /** @type {number[][]} */
  const ids = [];
  nodes.forEach((node) => ids.push([...(node.parent === null ? [] : ids[node.parent]), node.id]));
  const texts = ids.map((one) => tokenizer.decode(one));
  /** One row of weights per continued output. @type {Map<number | null, number>} */
  const rows = new Map();
  /** @type {Float32Array[]} */
  const weights = [];
  if (attention !== null) {
    for (const { parent, step, beam } of nodes) {
      if (rows.has(parent)) continue;
      rows.set(parent, rows.size);
      weights.push(search.steps[step].attention.get(attention)[beam]);
    }
  }
  const keys = weights[0]?.length ?? 0;
  const data = new Float32Array(weights.length * keys);
  weights.forEach((row, i) => data.set(row, i * keys));
  const header = {
    method: options.method,
    beam: options.method === "beam" ? options.beam : options.n_best,
    length_penalty: options.length_penalty,
    coverage_penalty: 0,
    min_len: options.min_len,
    limit,
    prefix: prefix.map((id) => tokenizer.label(id)),
    stopped: search.stopped,
    source,
    attention,
    omitted,
    nodes: nodes.map((node, i) => {
      const before = node.parent === null ? "" : texts[node.parent];
      const extendsText = texts[i].startsWith(before);
      return {
        step: node.step,
        parent: node.parent,
        token: tokenizer.label(node.id),
        piece: extendsText ? texts[i].slice(before.length) : texts[i],
        whole: !extendsText,
        logprob: rounded(node.logprob),
        total: rounded(node.total),
        score: node.state === "refused" ? null : rounded(node.score),
        state: node.state,
        ends: node.ends,
        reason: node.reason,
        row: rows.get(node.parent) ?? null,
      };
    }),
    results: search.results.map(({ ids: own, score }, i) => ({
      text: tokenizer.decode(own),
      score: rounded(score),
      node: paths[i].length ? indices.get(`${paths[i].length - 1} ${paths[i].at(-1)}`) : null,
    })),
  };
  return { header, weights: weights.length ? { data, shape: [weights.length, keys] } : null };
}
