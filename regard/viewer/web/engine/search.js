/** Decoding: steps of the model, greedy and beam search, sampling, and the search tree. */

/* Decoders of one input: with cached keys and values (graphs of decoding), or without (the graph of `forward`). */

/**
 * @typedef {import("./graph_runner.js").Tensor} Tensor
 * @typedef {import("./graph_runner.js").GraphRunner} GraphRunner
 * @typedef {import("./graph_runner.js").Edits} Edits
 * @typedef {import("./experiments.js").PartsJson} PartsJson
 * @typedef {Record<string, {runner: GraphRunner, parts: PartsJson}>} Graphs
 * @typedef {(name: string) => Edits | undefined} EditsOf the changes of a graph
 */

/** @param {number[]} ids @returns {Tensor} a batch of one sequence */
export const idsTensor = (ids) => ({ data: Float32Array.from(ids), shape: [1, ids.length] });

/** Rows of logits (…, V). @param {Tensor} logits @returns {Float32Array[]} */
export function rowsOf({ data, shape }) {
  const width = shape[shape.length - 1];
  return Array.from({ length: data.length / width }, (_, i) => data.subarray(i * width, (i + 1) * width));
}

/** Mean over heads of weights (1, H, T, S): a row per query. @param {Tensor} weights @returns {Float32Array[]} */
export function meanOverHeads({ data, shape }) {
  const [, heads, queries, keys] = shape;
  return Array.from({ length: queries }, (_, t) => {
    const row = new Float32Array(keys);
    for (let h = 0; h < heads; h++)
      for (let s = 0, at = (h * queries + t) * keys; s < keys; s++) row[s] += data[at + s] / heads;
    return row;
  });
}

/** Selects rows of the first axis. @param {Tensor} x @param {number[]} rows @returns {Tensor} */
function selectRows({ data, shape }, rows) {
  const size = data.length / shape[0];
  const out = new Float32Array(rows.length * size);
  rows.forEach((row, i) => out.set(data.subarray(row * size, (row + 1) * size), i * size));
  return { data: out, shape: [rows.length, ...shape.slice(1)] };
}

/** Decodes with the graphs `encoder` or `prompt`, and `decoder_step`. */
export class CachedDecoder {
  /** @param {Graphs} graphs @param {number[]} source @param {EditsOf} editsOf */
  constructor(graphs, source, editsOf) {
    const { runner, parts } = graphs.decoder_step;
    this.runner = runner;
    this.edits = editsOf("decoder_step");
    this.attentions = parts.attentions.filter(({ kind }) => kind === "cross");
    this.recorded = new Set(this.attentions.map(({ weights }) => weights));
    const first = graphs.encoder ? "encoder" : "prompt";
    const mask = { data: new Float32Array(source.length).fill(1), shape: [1, source.length] };
    const { outputs } = graphs[first].runner.run({ ids: idsTensor(source), mask }, new Set(), editsOf(first));
    /** Tensors of the source, shared by all hypotheses, and of each hypothesis. @type {Record<string, Tensor>} */
    this.shared = { mask };
    /** @type {Record<string, Tensor>} */
    this.state = {};
    this.promptLogits = outputs.logits ? rowsOf(outputs.logits).slice(-1) : null;
    const updated = new Set(Object.keys(runner.json.outputs).map((name) => name.replace(/^new_/, "")));
    for (const { name, shape } of runner.json.inputs) {
      if (name in outputs) (updated.has(name) ? this.state : this.shared)[name] = outputs[name];
      else if (updated.has(name))
        this.state[name] = {
          data: new Float32Array(0),
          shape: shape.map((size) => (size === "P" ? 0 : typeof size === "number" ? size : 1)),
        };
    }
  }

  /** @param {number[]} last */
  step(last) {
    if (this.promptLogits) {
      const logits = this.promptLogits;
      this.promptLogits = null;
      return { logits, attention: new Map() };
    }
    const { outputs, values } = this.runner.run(
      { ...this.shared, ...this.state, last: idsTensor(last) },
      this.recorded,
      this.edits,
    );
    for (const name of Object.keys(this.state)) this.state[name] = outputs[`new_${name}`];
    const attention = new Map(
      this.attentions.map(({ attention: name, weights }) => [name, meanOverHeads(values.get(weights)[0])]),
    );
    return { logits: rowsOf(outputs.logits), attention };
  }

  /** @param {number[]} rows */
  reorder(rows) {
    for (const [name, tensor] of Object.entries(this.state)) {
      if (rows.length !== tensor.shape[0] || rows.some((row, i) => row !== i))
        this.state[name] = selectRows(tensor, rows);
    }
  }
}

/**
 * Decodes with the graph of `forward`: every step runs the model on all tokens, so that all rows are computed again.
 */
export class UncachedDecoder {
  /**
   * @param {(ids: number[]) => Float32Array[]} forward logits of the token after each token of an output
   * @param {number[]} prompt
   */
  constructor(forward, prompt) {
    this.forward = forward;
    this.hasStarted = prompt.length === 0;
    this.ids = [prompt];
  }

  /** @param {number[]} last */
  step(last) {
    if (this.hasStarted) this.ids = this.ids.map((ids, i) => [...ids, last[i]]);
    this.hasStarted = true;
    return { logits: this.ids.map((ids) => this.forward(ids).at(-1)), attention: new Map() };
  }

  /** @param {number[]} rows */
  reorder(rows) {
    this.ids = rows.map((row) => this.ids[row]);
  }
}

/* Greedy search, beam search and sampling for one input: regard/decode/beam_search.py and sampling.py. */

/**
 * @typedef {{method: string, beam: number, n_best: number, length_penalty: number, patience: number, max_len: number,
 *   max_ratio: number, max_extra: number, min_len: number, unknown: boolean, temperature: number, top_k: number,
 *   top_p: number, seed: number, suppress_sequences: number[][], begin_suppress_tokens: number[]}} SearchOptions
 * @typedef {{pad: number, unk: number, sos: number, eos: number, mask: number | null, begin: number | null,
 *   end: number | null, forced: number | null, between: number | null, after_end?: number | null, other_eos:
 * number[]}} SpecialTokens
 * @typedef {{ids: number[], logprobs: number[], total: number}} Live
 * @typedef {{ids: number[], score: number, logprob: number, logprobs: number[]}} Hypothesis
 * @typedef {{parent: number, token: number, logprob: number, reason: string}} Refused
 * @typedef {{parent: number, token: number, logprob: number, status: string, score: number, reason: string}} Candidate
 * @typedef {{candidates: Candidate[], refused: Refused[], attention: Map<string, Float32Array[]>}} SearchStep
 * `attention`: by name, the weights of each live hypothesis over the source, averaged over heads
 * @typedef {{results: Hypothesis[], steps: SearchStep[], stopped: string}} SearchResult
 * @typedef {{step: (last: number[]) => {logits: Float32Array[], attention: Map<string, Float32Array[]>},
 *   reorder: (rows: number[]) => void}} Decoder decodes one input: `step` extends each hypothesis by its last token
 */

/** Continuations that are recorded per branch and step of greedy search and sampling, besides the chosen one. */
const RECORDED_CANDIDATES = 5;

/** @param {Float32Array} logits @returns {Float32Array} */
export function logSoftmax(logits) {
  let maximum = -Infinity;
  for (let i = 0; i < logits.length; i++) if (logits[i] > maximum) maximum = logits[i];
  let total = 0;
  for (let i = 0; i < logits.length; i++) total += Math.exp(logits[i] - maximum);
  const shift = maximum + Math.log(total);
  return logits.map((x) => x - shift);
}

/** Indices of the largest numbers, largest first. @param {Float32Array} x @param {number} count */
export function topIndices(x, count) {
  /** @type {number[]} */
  const best = [];
  for (let i = 0; i < x.length; i++) {
    if (Number.isNaN(x[i])) throw new Error("The model’s output is not a number. Its weights are damaged.");
    if (best.length === count && !(x[i] > x[best[count - 1]])) continue;
    let at = best.length;
    while (at > 0 && x[i] > x[best[at - 1]]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}

/** The constraints on the next token: special tokens, suppressed ones, a forced prefix, minimum and maximum length. */
export class TokenConstraints {
  /**
   * @param {SearchOptions} options @param {SpecialTokens} special @param {number} limit @param {number[]} prefix
   * @param {number[] | null} prompt of a language model, whose output ends at the maximum length without `<eos>`
   */
  constructor(options, special, limit, prefix, prompt) {
    this.options = options;
    this.special = special;
    this.limit = Math.max(limit, prefix.length);
    this.prefix = prefix;
    /** The step after which the search ends. */
    this.lastStep = prompt ? Math.max(0, this.limit - 1) : this.limit;
    /** All tokens that end an output; the search treats them as `<eos>`. */
    this.ends = new Set([special.eos, ...special.other_eos]);
    this.banned = new Set([special.pad, special.sos, ...(options.unknown ? [] : [special.unk])]);
    for (const token of this.ends) this.banned.delete(token);
    /**
     * The tokens before the output, the first position that is not forced, and the rules of
     * regard/decode/rules/token_rules.py.
     */
    this.context = prompt ?? [special.sos];
    this.begin = !prompt && special.forced !== null ? 1 : 0;
  }

  /** Suppressed tokens after an output. @param {number[]} ids */
  suppressed(ids) {
    const sequences = this.options.suppress_sequences.filter((sequence) => {
      const start = sequence.slice(0, -1);
      const end = [...this.context.slice(-start.length), ...ids].slice(-start.length);
      return !start.length || (end.length === start.length && start.every((id, i) => id === end[i]));
    });
    return [
      ...sequences.map((sequence) => sequence[sequence.length - 1]),
      ...(ids.length === this.begin ? this.options.begin_suppress_tokens : []),
    ];
  }

  /**
   * Log-probabilities of the token after an output; −∞ for tokens that are not allowed. @param {Float32Array} logits
   * @param {number[]} ids
   */
  apply(logits, ids) {
    const t = ids.length;
    const all = logSoftmax(logits);
    const forced = t < this.prefix.length ? this.prefix[t] : t >= this.limit ? this.special.eos : -1;
    const allowed = all.slice();
    if (forced >= 0) {
      allowed.fill(-Infinity);
      allowed[forced] = all[forced];
    } else {
      for (const token of [...this.banned, ...this.suppressed(ids)])
        if (token < allowed.length) allowed[token] = -Infinity;
      if (t < this.options.min_len) for (const token of this.ends) allowed[token] = -Infinity;
    }
    return { all, allowed };
  }

  /** @param {number} t @param {number} token */
  refusalReason(t, token) {
    if (t < this.prefix.length) return "prefix";
    if (t >= this.limit) return "limit";
    if (this.ends.has(token) && t < this.options.min_len) return "min_len";
    return this.banned.has(token) &&
      !this.options.suppress_sequences.some((one) => one.length === 1 && one[0] === token)
      ? "special"
      : "suppressed";
  }
}

/**
 * The best continuations of all hypotheses. @param {Live[]} live @param {Float32Array[]} logprobs @param {number} count
 */
function bestCandidates(live, logprobs, count) {
  const found = live.flatMap(({ total }, parent) =>
    topIndices(logprobs[parent], count).map((token) => ({
      parent,
      token,
      own: logprobs[parent][token],
      logprob: Math.fround(total + logprobs[parent][token]),
    })),
  );
  return found
    .filter(({ logprob }) => logprob > -Infinity)
    .sort((a, b) => b.logprob - a.logprob)
    .slice(0, count);
}

/**
 * @param {Decoder} decoder @param {SearchOptions} options @param {TokenConstraints} constraints @returns {SearchResult}
 */
export function beamSearch(decoder, options, constraints) {
  const { special, lastStep, ends } = constraints;
  const { beam, n_best: count, length_penalty: penalty } = options;
  // A hypothesis has at most one candidate per end token: the pool contains `beam` others.
  const pool = (1 + ends.size) * beam;
  /** @type {Live[]} */
  let live = [{ ids: [], logprobs: [], total: 0 }];
  /** @type {Hypothesis[]} */
  let finished = [];
  let finishedCount = 0;
  /** @type {SearchStep[]} */
  const steps = [];
  let last = [special.sos];
  const scoreOf = (/** @type {number} */ total, /** @type {number} */ length) => total / Math.max(length, 1) ** penalty;
  /** @param {Hypothesis[]} added */
  const finish = (added) => {
    finishedCount += added.length;
    finished = [...finished, ...added].sort((a, b) => b.score - a.score).slice(0, count);
  };
  for (let t = 0; ; t++) {
    const { logits, attention } = decoder.step(last);
    const rows = logits.map((one, i) => constraints.apply(one, live[i].ids));
    const candidates = bestCandidates(
      live,
      rows.map((one) => one.allowed),
      pool,
    ).map((one) => (ends.has(one.token) ? { ...one, token: special.eos } : one));
    const scores = candidates.map(({ logprob }) => scoreOf(logprob, t + 1));
    /** @param {number} i @returns {Hypothesis} */
    const asHypothesis = (i) => {
      const { parent, token, own, logprob } = candidates[i];
      return {
        ids: [...live[parent].ids, token].filter((id) => id !== special.eos),
        score: scores[i],
        logprob,
        logprobs: [...live[parent].logprobs, own],
      };
    };
    const isEnd = candidates.map(({ token }) => token === special.eos);
    const isLast = t >= lastStep;
    const finishing = candidates.flatMap((_, i) => ((isEnd[i] || isLast) && i < beam ? [i] : []));
    finish(finishing.map(asHypothesis));
    const chosen = candidates.flatMap((_, i) => (isEnd[i] || isLast ? [] : [i])).slice(0, beam);
    if (!chosen.length && !finishedCount) {
      finish(
        live.map(({ ids, logprobs, total }) => ({ ids, score: scoreOf(total, ids.length), logprob: total, logprobs })),
      );
    }
    const refused = bestCandidates(
      live,
      rows.map((one) => one.all),
      pool,
    )
      .filter(({ parent, token }) => rows[parent].allowed[token] === -Infinity)
      .map(({ parent, token, logprob }) => ({ parent, token, logprob, reason: constraints.refusalReason(t, token) }));
    steps.push({
      candidates: candidates.map(({ parent, token, logprob }, i) => {
        const status = chosen.includes(i) ? "live" : finishing.includes(i) ? "finished" : "pruned";
        return {
          parent,
          token,
          logprob,
          status,
          score: scores[i],
          reason: status !== "pruned" ? "" : isEnd[i] ? "end" : "beam",
        };
      }),
      refused,
      attention,
    });
    live = chosen.map((i) => {
      const { parent, token, own, logprob } = candidates[i];
      return { ids: [...live[parent].ids, token], logprobs: [...live[parent].logprobs, own], total: logprob };
    });
    const bound = live.length ? live[0].total / (lastStep + 1) ** penalty : -Infinity;
    const worst = finished.length === count ? finished[count - 1].score : -Infinity;
    const isEnough = finishedCount >= options.patience * beam;
    if (worst >= bound || isEnough || !live.length) {
      return { results: finished, steps, stopped: !live.length ? "ended" : isEnough ? "enough" : "bound" };
    }
    decoder.reorder(chosen.map((i) => candidates[i].parent));
    last = live.map(({ ids }) => ids[ids.length - 1]);
  }
}

/**
 * Chooses one token per hypothesis and step: the most probable one, or `options.n_best` independent samples.
 * @param {Decoder} decoder @param {SearchOptions} options @param {TokenConstraints} constraints
 * @param {() => number} [random] uniform numbers in [0, 1) @returns {SearchResult}
 */
export function stepwiseSearch(decoder, options, constraints, random = Math.random) {
  const { special, lastStep, ends } = constraints;
  const isGreedy = options.method === "greedy";
  const count = isGreedy ? 1 : options.n_best;
  /** Hypotheses; those that have been equal so far share a branch, the index of a live candidate. */
  let open = Array.from({ length: count }, () => ({
    ids: /** @type {number[]} */ ([]),
    logprobs: /** @type {number[]} */ ([]),
    total: 0,
    branch: 0,
  }));
  /** @type {Hypothesis[]} */
  const results = [];
  /** @type {SearchStep[]} */
  const steps = [];
  let totals = [0];
  let last = [special.sos];
  for (let t = 0; t <= lastStep && open.length; t++) {
    const isLast = t >= lastStep;
    const { logits, attention } = decoder.step(last);
    const rows = logits.map((one, i) => constraints.apply(one, open.find(({ branch }) => branch === i).ids));
    const tokens = open.map(({ branch }) =>
      isGreedy ? topIndices(rows[branch].allowed, 1)[0] : drawToken(rows[branch].allowed, random(), options),
    );
    /** @type {SearchStep} */
    const step = { candidates: [], refused: [], attention };
    rows.forEach(({ all, allowed }, branch) => {
      const chosen = new Set(tokens.filter((_, i) => open[i].branch === branch));
      const best = topIndices(allowed, RECORDED_CANDIDATES);
      const reasons = pruningReasons(allowed, best, options);
      for (const token of [...best, ...[...chosen].filter((one) => !best.includes(one)).sort((a, b) => a - b)]) {
        if (allowed[token] === -Infinity) continue;
        const logprob = totals[branch] + allowed[token];
        const reason = chosen.has(token) ? "" : reasons.get(token);
        const status = reason ? "pruned" : isLast || ends.has(token) ? "finished" : "live";
        step.candidates.push({
          parent: branch,
          token: ends.has(token) ? special.eos : token,
          logprob,
          status,
          score: logprob / (t + 1) ** options.length_penalty,
          reason,
        });
      }
      for (const token of topIndices(all, RECORDED_CANDIDATES)) {
        if (allowed[token] === -Infinity)
          step.refused.push({
            parent: branch,
            token,
            logprob: totals[branch] + all[token],
            reason: constraints.refusalReason(t, token),
          });
      }
    });
    step.candidates.sort((a, b) => b.logprob - a.logprob);
    steps.push(step);
    const live = step.candidates.filter(({ status }) => status === "live");
    const next = [];
    open.forEach((one, i) => {
      const token = tokens[i];
      const own = rows[one.branch].allowed[token];
      const isPossible = own > -Infinity;
      const logprobs = isPossible ? [...one.logprobs, own] : one.logprobs;
      const total = isPossible ? Math.fround(one.total + own) : one.total;
      const ids = isPossible && !ends.has(token) ? [...one.ids, token] : one.ids;
      if (ids !== one.ids && !isLast)
        next.push({
          ids,
          logprobs,
          total,
          branch: live.findIndex((other) => other.parent === one.branch && other.token === token),
        });
      else
        results.push({
          ids,
          score: total / Math.max(logprobs.length, 1) ** options.length_penalty,
          logprob: total,
          logprobs,
        });
    });
    open = next;
    totals = live.map(({ logprob }) => logprob);
    if (!open.length) break;
    decoder.reorder(live.map(({ parent }) => parent));
    last = live.map(({ token }) => token);
  }
  return { results: results.sort((a, b) => b.score - a.score), steps, stopped: "ended" };
}

/**
 * Inverse transform sampling with temperature, top-k and top-p. @param {Float32Array} logprobs
 * @param {number} u in [0, 1) @param {SearchOptions} options @returns {number}
 */
export function drawToken(logprobs, u, { temperature, top_k: topK, top_p: topP }) {
  const isRanked = topK > 0 || topP < 1;
  const order = isRanked ? Array.from(logprobs, (_, i) => i).sort((a, b) => logprobs[b] - logprobs[a] || a - b) : null;
  const tokens = order ? order.slice(0, topK > 0 ? topK : order.length) : Array.from(logprobs, (_, i) => i);
  const largest = tokens.reduce((best, token) => Math.max(best, logprobs[token]), -3e38);
  let weights = tokens.map((token) => Math.exp((logprobs[token] - largest) / temperature));
  const sum = (/** @type {number[]} */ numbers) => numbers.reduce((total, x) => total + x, 0);
  if (topP < 1) {
    const bound = topP * sum(weights);
    let before = 0;
    weights = weights.map((weight) => {
      const kept = before < bound ? weight : 0;
      before += weight;
      return kept;
    });
  }
  const threshold = Math.min(u, 1 - 2 ** -22) * sum(weights);
  let total = 0;
  const index = weights.findIndex((weight) => (total += weight) > threshold);
  return tokens[index < 0 ? tokens.length - 1 : index];
}

/**
 * Why each of the best tokens would not be chosen. @param {Float32Array} logprobs @param {number[]} best
 * @param {SearchOptions} options @returns {Map<number, string>}
 */
function pruningReasons(logprobs, best, { method, temperature, top_k: topK, top_p: topP }) {
  if (method === "greedy") return new Map(best.map((token) => [token, "greedy"]));
  const scaled = logSoftmax(logprobs.map((x) => x / temperature));
  const kept = topK > 0 ? topIndices(scaled, Math.min(topK, scaled.length)) : null;
  const total = kept ? kept.reduce((sum, token) => sum + Math.exp(scaled[token]), 0) : 1;
  let before = 0;
  return new Map(
    best.map((token, rank) => {
      const reason = topK > 0 && rank >= topK ? "top_k" : before >= topP ? "top_p" : "not drawn";
      before += Math.exp(scaled[token]) / total;
      return [token, reason];
    }),
  );
}

/** Uniform random numbers from a seed. @param {number} seed */
export function seededRandom(seed) {
  let state = (seed ^ 0x9e3779b9) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

/* The tree of a search, as a scene contains it: regard/viewer/search_tree.py. */

/**
 * @typedef {import("./tokenizer.js").PageTokenizer} PageTokenizer
 * @typedef {{step: number, parent: number | null, id: number, logprob: number, total: number, score: number, state:
 * string,
 *   ends: boolean, reason: string, beam: number}} Node `beam`: index of its parent among the live candidates
 */

const [MAX_CANDIDATES, MAX_NODES, MAX_REFUSED] = [12, 1500, 3];

/** @param {number} x */
const rounded = (x) => Number(x.toPrecision(6));

/**
 * The index of a result among the candidates of each step. @param {SearchResult} search @param {Hypothesis} result
 * @param {number} eos @returns {number[]}
 */
function pathOf({ steps }, { ids, logprobs }, eos) {
  const path = [];
  let beam = 0;
  for (const [t, token] of [...ids, eos].slice(0, logprobs.length).entries()) {
    const isNext = (/** @type {Candidate} */ one) => one.parent === beam && one.token === token;
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
      .map((one, i) => ({
        i,
        key: [needed.has(i) ? 0 : 1, one.status === "pruned" ? 1 : 0, i],
        isKnown: beam[one.parent] !== -1,
      }))
      .filter(({ isKnown }) => isKnown)
      .sort((a, b) => a.key[0] - b.key[0] || a.key[1] - b.key[1] || a.key[2] - b.key[2]);
    const chosen = ranked
      .slice(0, Math.max(width, needed.size))
      .map(({ i }) => i)
      .sort((a, b) => a - b);
    const totalOf = (/** @type {number | null} */ parent) => (parent === null ? 0 : nodes[parent].total);
    for (const i of chosen) {
      const { parent: live, token, logprob: total, status, score, reason } = candidates[i];
      const parent = beam[live];
      indices.set(`${t} ${i}`, nodes.length);
      const state = paths[0]?.[t] === i ? "best" : status === "live" ? "kept" : status;
      nodes.push({
        step: t,
        parent,
        id: token,
        logprob: total - totalOf(parent),
        total,
        score,
        state,
        ends: status === "finished",
        reason,
        beam: live,
      });
    }
    const known = refused.filter((one) => beam[one.parent] !== -1);
    for (const { parent: live, token, logprob: total, reason } of known.slice(0, MAX_REFUSED)) {
      const parent = beam[live];
      nodes.push({
        step: t,
        parent,
        id: token,
        logprob: total - totalOf(parent),
        total,
        score: NaN,
        state: "refused",
        ends: false,
        reason,
        beam: live,
      });
    }
    omitted.push(candidates.length - chosen.length + refused.length - Math.min(known.length, MAX_REFUSED));
    beam = candidates.flatMap((one, i) => (one.status === "live" ? [indices.get(`${t} ${i}`) ?? -1] : []));
  });
  return { nodes, indices, omitted };
}

/**
 * @param {SearchResult} search @param {SearchOptions} options @param {PageTokenizer} tokenizer of the output
 * @param {{eos: number, limit: number, prefix: number[], source: string[], attention: string | null}} input
 * @returns {{header: any, weights: {data: Float32Array, shape: number[]} | null}} the header, without the blob
 * `weights`
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
