/**
 * Attention from q and k to weights, and measures of weights. No DOM: this also runs under node, where it is compared
 * with
 * NumPy.
 *
 * Axes: T queries (rows), S keys (columns), H heads, G key heads, D head width. Query t has position p = t + S − T.
 */

/** @typedef {{op: string, size?: number, length?: number, parts?: Mask[], part?: Mask}} Mask */
/** @typedef {{name: string, form: string, scale?: number, cap?: number, relative?: number[]}} Score */
/**
 * @typedef {{numbers: Float32Array | Uint16Array, low: Float32Array | null, step: Float32Array | null}} Raw encoded
 * numbers
 */
/**
 * One head of one attention: the inputs of a row of weights.
 * @typedef {{T: number, S: number, D: number, q: Float32Array, k: Float32Array, scale: number, cap?: number,
 *   relative?: number[], w: Float32Array | null, bias: Float32Array | null, mask: Mask | null}} Head
 */
/** @typedef {Float32Array | Float64Array} Row */

/**
 * Reads the numbers of a blob without decoding them. Large blobs are quantized to 16 bits: for each channel a minimum
 * and a
 * step, then multiples of the step.
 * @param {ArrayBuffer} buffer @param {{type: string, shape: number[]}} blob @returns {Raw}
 */
export function readBlob(buffer, { type, shape }) {
  if (type === "float32") return { numbers: new Float32Array(buffer), low: null, step: null };
  if (type !== "uint16") throw new Error(`Unknown number type: ${type}.`);
  const channels = shape.slice(1).reduce((product, n) => product * n, 1);
  return {
    low: new Float32Array(buffer, 0, channels),
    step: new Float32Array(buffer, 4 * channels, channels),
    numbers: new Uint16Array(buffer, 8 * channels),
  };
}

/**
 * Decodes one head of numbers of shape (rows, heads, width).
 * @param {Raw} raw @param {number} rows @param {number} heads @param {number} width @param {number} head
 */
export function decodeHead({ numbers, low, step }, rows, heads, width, head) {
  const out = new Float32Array(rows * width);
  const channel = head * width;
  for (let row = 0; row < rows; row++) {
    const from = row * heads * width + channel;
    for (let d = 0; d < width; d++) {
      const number = numbers[from + d];
      out[row * width + d] = step ? low[channel + d] + step[channel + d] * number : number;
    }
  }
  return out;
}

/**
 * Decodes head h of an attention. With grouped-query attention, adjacent heads share a key head.
 * @param {{heads: number, score: Score, mask: Mask | null, q: {shape: number[]}, k: {shape: number[]}}} attention
 * @param {{q: Raw, k: Raw, w: Raw | null, bias: Raw | null}} raw
 * @param {number} h
 * @returns {Head}
 */
export function extractHead(attention, raw, h) {
  const [T, H, D] = attention.q.shape;
  const [S, G] = attention.k.shape;
  return {
    T,
    S,
    D,
    q: decodeHead(raw.q, T, H, D, h),
    k: decodeHead(raw.k, S, G, D, Math.floor(h / (H / G))),
    scale: attention.score.scale ?? 1,
    cap: attention.score.cap,
    relative: attention.score.relative,
    w: raw.w ? decodeHead(raw.w, 1, H, D, h) : null,
    bias: raw.bias ? decodeHead(raw.bias, 1, H, T + S - 1, h) : null,
    mask: attention.mask,
  };
}

/**
 * Whether a query at position p may attend to key s.
 * @param {Mask | null} mask @param {number} p @param {number} s @returns {boolean}
 */
export function mayAttend(mask, p, s) {
  if (!mask) return true;
  switch (mask.op) {
    case "causal":
      return s <= p;
    case "window":
      return s <= p && s > p - mask.size;
    case "local":
      return Math.abs(p - s) <= mask.size;
    case "lengths":
      return s < mask.length;
    case "and":
      return mask.parts.every((part) => mayAttend(part, p, s));
    case "or":
      return mask.parts.some((part) => mayAttend(part, p, s));
    case "not":
      return !mayAttend(mask.part, p, s);
  }
  throw new Error(`Unknown mask operation: ${mask.op}.`);
}

/**
 * The range from..to that contains all keys a query at position p may attend to; `isOpen` tests keys of the range, if
 * some
 * of them are masked.
 * @param {Mask | null} mask @param {number} p @param {number} S
 * @returns {{from: number, to: number, isOpen: ((s: number) => boolean) | null}}
 */
export function keyRange(mask, p, S) {
  const allKeys = { from: 0, to: S, isOpen: null };
  if (!mask) return allKeys;
  const to = Math.max(0, Math.min(S, p + 1));
  if (mask.op === "causal") return { ...allKeys, to };
  if (mask.op === "window") return { ...allKeys, from: Math.max(0, p - mask.size + 1), to };
  if (mask.op === "local") {
    return { ...allKeys, from: Math.max(0, p - mask.size), to: Math.max(0, Math.min(S, p + mask.size + 1)) };
  }
  if (mask.op === "lengths") return { ...allKeys, to: Math.min(S, mask.length) };
  if (mask.op !== "and") return { ...allKeys, isOpen: (s) => mayAttend(mask, p, s) };
  const parts = mask.parts.map((part) => keyRange(part, p, S));
  const tests = parts.map((part) => part.isOpen).filter((isOpen) => isOpen !== null);
  return {
    from: Math.max(0, ...parts.map((part) => part.from)),
    to: Math.min(S, ...parts.map((part) => part.to)),
    isOpen: tests.length ? (s) => tests.every((isOpen) => isOpen(s)) : null,
  };
}

/** Caches e^2x of a concat head, so that tanh(q + k) = 1 − 2 / (e^2q e^2k + 1) needs no exponential per pair. */
const exponentials = new WeakMap();

/**
 * Null if a number is so large that its exponential overflows.
 * @param {Float32Array} numbers @returns {Float64Array | null}
 */
function exponentialsOf(numbers) {
  if (!exponentials.has(numbers)) {
    const small = numbers.every((x) => Math.abs(x) < 170);
    exponentials.set(numbers, small ? Float64Array.from(numbers, (x) => Math.exp(2 * x)) : null);
  }
  return exponentials.get(numbers);
}

/**
 * Computes the scores of query t with the keys from..to, before mask and softmax, in double precision.
 * @param {Head} head @param {number} t @param {number} from @param {number} to @param {Row} out
 */
function computeScores(head, t, from, to, out) {
  const { D, T, bias, cap, relative, scale, w } = head;
  // Disentangled attention: the channels from this one on are products with relative positions, of which each pair has
  // one.
  const width = relative ? Math.min(...relative) : D;
  if (w) {
    const [q, k] = [exponentialsOf(head.q), exponentialsOf(head.k)];
    let all = 0;
    for (let d = 0; d < D; d++) all += w[d];
    for (let s = from; s < to; s++) {
      const [i, j] = [t * D, s * D];
      let sum = 0;
      if (q && k) {
        for (let d = 0; d < D; d++) sum += w[d] / (q[i + d] * k[j + d] + 1);
        out[s] = scale * (all - 2 * sum);
      } else {
        for (let d = 0; d < D; d++) sum += w[d] * Math.tanh(head.q[i + d] + head.k[j + d]);
        out[s] = scale * sum;
      }
    }
  } else {
    const { q, k } = head;
    for (let s = from; s < to; s++) {
      // Two independent sums for instruction-level parallelism.
      let even = 0;
      let odd = 0;
      let d = 0;
      const i = t * D;
      const j = s * D;
      for (; d + 1 < width; d += 2) {
        even += q[i + d] * k[j + d];
        odd += q[i + d + 1] * k[j + d + 1];
      }
      if (d < width) even += q[i + d] * k[j + d];
      if (relative) odd += q[i + relative[s - t + T - 1]] + k[j + relative[s - t + T - 1]];
      out[s] = scale * (even + odd);
    }
  }
  if (cap) for (let s = from; s < to; s++) out[s] = cap * Math.tanh(out[s] / cap);
  if (bias) for (let s = from; s < to; s++) out[s] += bias[s - t + T - 1];
}

/**
 * Computes the weights of query t: the softmax of its scores over unmasked keys, or zeros if all are masked.
 * @template {Row} R @param {Head} head @param {number} t @param {R} out @returns {R}
 */
export function computeWeights(head, t, out) {
  const { from, to, isOpen } = keyRange(head.mask, t + head.S - head.T, head.S);
  out.fill(0);
  if (from >= to) return out;
  computeScores(head, t, from, to, out);
  let maximum = -Infinity;
  for (let s = from; s < to; s++) {
    if (isOpen && !isOpen(s)) out[s] = -Infinity;
    if (out[s] > maximum) maximum = out[s];
  }
  let sum = 0;
  for (let s = from; s < to; s++) {
    out[s] = maximum === -Infinity ? 0 : Math.exp(out[s] - maximum);
    sum += out[s];
  }
  if (sum > 0) for (let s = from; s < to; s++) out[s] /= sum;
  return out;
}

/**
 * The entropy of a row in bits: 0 for one key, log2 n for a uniform distribution over n keys. @param {Row} row
 * @returns {number}
 */
export function rowEntropy(row) {
  let sum = 0;
  for (let s = 0; s < row.length; s++) if (row[s] > 0) sum -= row[s] * Math.log2(row[s]);
  return sum;
}

/**
 * The entropy of rows as a fraction of that of uniform attention over the keys that each attends to; rows with a single
 * key do not count. @param {Row[]} rows
 */
export function evenness(rows) {
  let [entropy, uniform] = [0, 0];
  for (const row of rows) {
    entropy += rowEntropy(row);
    let count = 0;
    for (let s = 0; s < row.length; s++) count += Number(row[s] > 0);
    uniform += Math.log2(Math.max(1, count));
  }
  return uniform > 0 ? entropy / uniform : 0;
}

/**
 * The overlap of two rows, Σ min(a, b): 1 if they are equal, 0 if they share no key.
 * @param {Row} a @param {Row} b
 */
function rowOverlap(a, b) {
  let sum = 0;
  for (let s = 0; s < a.length; s++) sum += Math.min(a[s], b[s]);
  return sum;
}

/**
 * Mutual information of row and column in bits: the entropy of the mean row minus the mean entropy of the rows.
 * @param {Row} map @param {number} rows @param {number} columns
 */
export function mutualInformation(map, rows, columns) {
  const mean = new Float64Array(columns);
  let entropy = 0;
  for (let i = 0; i < rows; i++) {
    const row = map.subarray(i * columns, (i + 1) * columns);
    entropy += rowEntropy(row) / rows;
    for (let s = 0; s < columns; s++) mean[s] += row[s] / rows;
  }
  return rowEntropy(mean) - entropy;
}

/**
 * Start index of each word, and the number of tokens. Tokens of a word are contiguous; a token without a word (null or
 * negative) is a word of its own.
 * @param {(number | null)[]} words @returns {Int32Array}
 */
export function wordStarts(words) {
  const starts = [];
  words.forEach((word, i) => {
    if (i === 0 || word === null || word < 0 || word !== words[i - 1]) starts.push(i);
  });
  return Int32Array.from([...starts, words.length]);
}

/**
 * Adds a row over tokens, which starts at token `first`, to a row over words: the weights of a word's tokens are
 * summed and
 * multiplied by `share`, because rows of a word are averaged.
 * @param {Row} row @param {number} first @param {Int32Array} starts @param {number} from @param {number} to
 * @param {number} share @param {Row} out
 */
export function addMergedRow(row, first, starts, from, to, share, out) {
  for (let word = from; word < to; word++) {
    let sum = 0;
    for (let s = starts[word]; s < starts[word + 1]; s++) sum += row[s - first];
    out[word - from] += share * sum;
  }
}

/**
 * Max pooling: raises each element of `out` to the maximum of its block, row[b·size … (b + 1)·size).
 * @param {Row} row @param {number} size @param {Row} out
 */
export function maxPool(row, size, out) {
  for (let b = 0; b < out.length; b++) {
    const end = Math.min(row.length, (b + 1) * size);
    let maximum = out[b];
    for (let s = b * size; s < end; s++) if (row[s] > maximum) maximum = row[s];
    out[b] = maximum;
  }
}

/**
 * The same for signed numbers, by magnitude.
 * @param {Row} row @param {number} size @param {Float32Array} out
 */
export function maxAbsPool(row, size, out) {
  for (let b = 0; b < out.length; b++) {
    const end = Math.min(row.length, (b + 1) * size);
    for (let s = b * size; s < end; s++) if (Math.abs(row[s]) > Math.abs(out[b])) out[b] = row[s];
  }
}

/** Index of the number with the largest magnitude. @param {Row} row */
export function argmaxAbs(row) {
  let best = 0;
  for (let s = 1; s < row.length; s++) if (Math.abs(row[s]) > Math.abs(row[best])) best = s;
  return best;
}

/** Index of the maximum of a row in from..to. @param {Row} row @param {number} [from] @param {number} [to] */
export function argmax(row, from = 0, to = row.length) {
  let best = from;
  for (let s = from + 1; s < to; s++) if (row[s] > row[best]) best = s;
  return best;
}

/** Indices of the largest numbers of a row, in descending order. @param {Row} row @param {number} count */
export function topK(row, count) {
  /** @type {number[]} */
  const best = [];
  for (let s = 0; s < row.length; s++) {
    if (best.length === count && row[s] <= row[best[count - 1]]) continue;
    let position = best.length;
    while (position > 0 && row[best[position - 1]] < row[s]) position--;
    best.splice(position, 0, s);
    if (best.length > count) best.pop();
  }
  return best;
}

/**
 * Alignment error rate, 1 − 2 |A ∩ S| / (|A| + |S|) (Och and Ney 2003), where all gold links are sure.
 * @param {[number, number][]} predicted @param {[number, number][]} gold
 */
export function alignmentErrorRate(predicted, gold) {
  const predictedLinks = new Set(predicted.map(String));
  const goldLinks = new Set(gold.map(String));
  const both = [...predictedLinks].filter((link) => goldLinks.has(link)).length;
  return predictedLinks.size + goldLinks.size ? 1 - (2 * both) / (predictedLinks.size + goldLinks.size) : 0;
}

/* Measures of attention maps. */

/** @typedef {import("./maps.js").AttentionMap} AttentionMap */

/**
 * Iterates over the sampled rows of maps of equal size, eight at a time, which the kernel computes together.
 * @param {AttentionMap[]} maps @param {(rows: Float32Array[]) => void} visitRows called with one row of each map
 */
function forSampledRows(maps, visitRows) {
  const { columns } = maps[0];
  const rows = maps[0].sampleRows();
  const blocks = maps.map(() => new Float32Array(8 * columns));
  for (let i = 0; i < rows.length; i += 8) {
    const some = rows.slice(i, i + 8);
    maps.forEach((map, m) => map.readRows(some, 0, columns, blocks[m]));
    some.forEach((_, j) => visitRows(blocks.map((block) => block.subarray(j * columns, (j + 1) * columns))));
  }
}

/** The mean entropy of a map's rows in bits, without rows that attend to nothing. @param {AttentionMap} map */
export function meanEntropy(map) {
  let [sum, attendingRows] = [0, 0];
  forSampledRows([map], ([row]) => {
    sum += rowEntropy(row);
    attendingRows += Number(row.some((weight) => weight > 0));
  });
  return sum / Math.max(1, attendingRows);
}

/**
 * The weight that two maps put on the same keys, averaged over rows.
 * @param {AttentionMap} a @param {AttentionMap} b
 */
export function meanOverlap(a, b) {
  let [sum, attendingRows] = [0, 0];
  forSampledRows([a, b], ([rowA, rowB]) => {
    sum += rowOverlap(rowA, rowB);
    attendingRows += Number(rowA.some((weight) => weight > 0) || rowB.some((weight) => weight > 0));
  });
  return sum / Math.max(1, attendingRows);
}
