/** Greedy search, beam search and sampling for one input: regard/decode/beam_search.py and sampling.py. */

/**
 * @typedef {{method: string, beam: number, n_best: number, length_penalty: number, patience: number, max_len: number,
 *   max_ratio: number, max_extra: number, min_len: number, unknown: boolean, temperature: number, top_k: number,
 *   top_p: number, seed: number, suppress_sequences: number[][], begin_suppress_tokens: number[]}} SearchOptions
 * @typedef {{pad: number, unk: number, sos: number, eos: number, mask: number | null, begin: number | null,
 *   end: number | null, forced: number | null, between: number | null, after_end?: number | null, other_eos: number[]}} SpecialTokens
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
    /** The tokens before the output, the first position that is not forced, and the rules of regard/decode/rules/token_rules.py. */
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
    return [...sequences.map((sequence) => sequence[sequence.length - 1]), ...(ids.length === this.begin ? this.options.begin_suppress_tokens : [])];
  }

  /** Log-probabilities of the token after an output; −∞ for tokens that are not allowed. @param {Float32Array} logits @param {number[]} ids */
  apply(logits, ids) {
    const t = ids.length;
    const all = logSoftmax(logits);
    const forced = t < this.prefix.length ? this.prefix[t] : t >= this.limit ? this.special.eos : -1;
    const allowed = all.slice();
    if (forced >= 0) {
      allowed.fill(-Infinity);
      allowed[forced] = all[forced];
    } else {
      for (const token of [...this.banned, ...this.suppressed(ids)]) if (token < allowed.length) allowed[token] = -Infinity;
      if (t < this.options.min_len) for (const token of this.ends) allowed[token] = -Infinity;
    }
    return { all, allowed };
  }

  /** @param {number} t @param {number} token */
  refusalReason(t, token) {
    if (t < this.prefix.length) return "prefix";
    if (t >= this.limit) return "limit";
    if (this.ends.has(token) && t < this.options.min_len) return "min_len";
    return this.banned.has(token) && !this.options.suppress_sequences.some((one) => one.length === 1 && one[0] === token) ? "special" : "suppressed";
  }
}

/** The best continuations of all hypotheses. @param {Live[]} live @param {Float32Array[]} logprobs @param {number} count */
function bestCandidates(live, logprobs, count) {
  const found = live.flatMap(({ total }, parent) =>
    topIndices(logprobs[parent], count).map((token) => ({ parent, token, own: logprobs[parent][token], logprob: Math.fround(total + logprobs[parent][token]) })),
  );
  return found.filter(({ logprob }) => logprob > -Infinity).sort((a, b) => b.logprob - a.logprob).slice(0, count);
}

/** @param {Decoder} decoder @param {SearchOptions} options @param {TokenConstraints} constraints @returns {SearchResult} */
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
    const candidates = bestCandidates(live, rows.map((one) => one.allowed), pool).map((one) => (ends.has(one.token) ? { ...one, token: special.eos } : one));
    const scores = candidates.map(({ logprob }) => scoreOf(logprob, t + 1));
    /** @param {number} i @returns {Hypothesis} */
    const asHypothesis = (i) => {
      const { parent, token, own, logprob } = candidates[i];
      return { ids: [...live[parent].ids, token].filter((id) => id !== special.eos), score: scores[i], logprob, logprobs: [...live[parent].logprobs, own] };
    };
    const isEnd = candidates.map(({ token }) => token === special.eos);
    const isLast = t >= lastStep;
    const finishing = candidates.flatMap((_, i) => ((isEnd[i] || isLast) && i < beam ? [i] : []));
    finish(finishing.map(asHypothesis));
    const chosen = candidates.flatMap((_, i) => (isEnd[i] || isLast ? [] : [i])).slice(0, beam);
    if (!chosen.length && !finishedCount) {
      finish(live.map(({ ids, logprobs, total }) => ({ ids, score: scoreOf(total, ids.length), logprob: total, logprobs })));
    }
    const refused = bestCandidates(live, rows.map((one) => one.all), pool)
      .filter(({ parent, token }) => rows[parent].allowed[token] === -Infinity)
      .map(({ parent, token, logprob }) => ({ parent, token, logprob, reason: constraints.refusalReason(t, token) }));
    steps.push({
      candidates: candidates.map(({ parent, token, logprob }, i) => {
        const status = chosen.includes(i) ? "live" : finishing.includes(i) ? "finished" : "pruned";
        return { parent, token, logprob, status, score: scores[i], reason: status !== "pruned" ? "" : isEnd[i] ? "end" : "beam" };
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
  let open = Array.from({ length: count }, () => ({ ids: /** @type {number[]} */ ([]), logprobs: /** @type {number[]} */ ([]), total: 0, branch: 0 }));
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
    const tokens = open.map(({ branch }) => (isGreedy ? topIndices(rows[branch].allowed, 1)[0] : drawToken(rows[branch].allowed, random(), options)));
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
        step.candidates.push({ parent: branch, token: ends.has(token) ? special.eos : token, logprob, status, score: logprob / (t + 1) ** options.length_penalty, reason });
      }
      for (const token of topIndices(all, RECORDED_CANDIDATES)) {
        if (allowed[token] === -Infinity) step.refused.push({ parent: branch, token, logprob: totals[branch] + all[token], reason: constraints.refusalReason(t, token) });
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
      if (ids !== one.ids && !isLast) next.push({ ids, logprobs, total, branch: live.findIndex((other) => other.parent === one.branch && other.token === token) });
      else results.push({ ids, score: total / Math.max(logprobs.length, 1) ** options.length_penalty, logprob: total, logprobs });
    });
    open = next;
    totals = live.map(({ logprob }) => logprob);
    if (!open.length) break;
    decoder.reorder(live.map(({ parent }) => parent));
    last = live.map(({ token }) => token);
  }
  return { results: results.sort((a, b) => b.score - a.score), steps, stopped: "ended" };
}

/** Inverse transform sampling with temperature, top-k and top-p. @param {Float32Array} logprobs @param {number} u in [0, 1) @param {SearchOptions} options @returns {number} */
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

/** Why each of the best tokens would not be chosen. @param {Float32Array} logprobs @param {number[]} best @param {SearchOptions} options @returns {Map<number, string>} */
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
