/** Labels of heads: what a head mostly attends to, measured on its map. Definitions: docs/translating.md. */

import { mutualInformation, rowEntropy } from "./maths.js";

/** @typedef {import("./maps.js").AttentionMap} AttentionMap */
/** @typedef {{label: string, share: number, information: number}} HeadLabel `information`: mutual information of rows and columns in bits */

/** The share of the weight from which a pattern gives a head its label, and its minimum ratio to uniform attention. */
const MIN_SHARE = 0.5;
const MIN_RATIO = 1.5;
/** Entropy, as a fraction of that of uniform attention, from which a head is diffuse. */
const MIN_DIFFUSE = 0.85;
/** Mutual information, as a fraction of its maximum, from which a cross-attention head is an alignment. */
const MIN_ALIGNMENT = 0.5;

/** The labels in the order of the legend: name, short name, and the description of a head with a percentage. */
export const HEAD_LABELS = {
  alignment: { short: "align", text: "aligns each output token with one source token" },
  previous: { name: "previous token", short: "prev", text: "attends to the previous token" },
  next: { name: "next token", short: "next", text: "attends to the next token" },
  same: { name: "same token", short: "same", text: "attends to the token itself, or to the same token elsewhere" },
  first: { name: "first token", short: "first", text: "attends to the first token, which often means “nothing to add”" },
  punctuation: { short: "punct", text: "attends to punctuation and special tokens" },
  diffuse: { short: "diffuse", text: "spreads its weight almost evenly over all tokens" },
  mixed: { short: "mixed", text: "follows no simple pattern" },
};

/** Whether attention of this label follows from positions alone, not from the content of a sentence. @param {string} label */
export const isPositional = (label) => ["previous", "next", "same", "first", "diffuse"].includes(label);

/** @param {string} label */
export const labelName = (label) => HEAD_LABELS[label].name ?? label;

/** Whether a token is punctuation or special. @param {string} token */
export function isPunctuation(token) {
  return /^[\p{P}\p{S}\s]+$/u.test(token) || /^(<.*>|\[[A-Z]+\]|<\|.*\|>)$/.test(token);
}

/**
 * Labels a head from its map, or from a sample of the rows of a long one.
 * @param {AttentionMap} map @param {string[]} rowTokens @param {string[]} columnTokens @param {string} kind of the attention
 * @returns {HeadLabel}
 */
export function labelHead(map, rowTokens, columnTokens, kind) {
  const { columns } = map;
  const rows = map.sampleRows();
  const cells = new Float32Array(rows.length * columns);
  map.readRows(rows, 0, columns, cells);
  const information = mutualInformation(cells, rows.length, columns);
  const isSelf = kind !== "cross";
  const punctuation = columnTokens.map((token, s) => s > 0 && isPunctuation(token));
  const patterns = isSelf ? ["previous", "next", "same", "first", "punctuation"] : ["first", "punctuation"];
  /** Weight and weight under uniform attention of each pattern, and the number of rows in which it is possible. */
  const sums = Object.fromEntries(patterns.map((name) => [name, { weight: 0, uniform: 0, rows: 0 }]));
  let [entropy, uniformEntropy, attendingRows] = [0, 0, 0];
  rows.forEach((t, i) => {
    const row = cells.subarray(i * columns, (i + 1) * columns);
    const count = row.reduce((sum, weight) => sum + Number(weight > 0), 0);
    // A row with a single key shows nothing.
    if (count < 2) return;
    attendingRows += 1;
    entropy += rowEntropy(row);
    uniformEntropy += Math.log2(count);
    const here = t + columns - map.rows;
    /** @param {string} name @param {(s: number) => boolean} matches */
    const add = (name, matches) => {
      let [weight, possible] = [0, 0];
      for (let s = 0; s < columns; s++) {
        if (row[s] > 0 && matches(s)) [weight, possible] = [weight + row[s], possible + 1];
      }
      if (!possible) return;
      const sum = sums[name];
      [sum.weight, sum.uniform, sum.rows] = [sum.weight + weight, sum.uniform + possible / count, sum.rows + 1];
    };
    if (isSelf) {
      add("previous", (s) => s === here - 1);
      add("next", (s) => s === here + 1);
      add("same", (s) => s === here || columnTokens[s] === rowTokens[t]);
    }
    if (!isSelf || here > 0) add("first", (s) => s === 0);
    add("punctuation", (s) => punctuation[s]);
  });
  const best = patterns
    .map((name) => ({ name, share: sums[name].weight / Math.max(1, sums[name].rows), uniform: sums[name].uniform / Math.max(1, sums[name].rows), rows: sums[name].rows }))
    .filter(({ share, uniform, rows: found }) => found >= attendingRows / 2 && found > 0 && share >= MIN_SHARE && share >= MIN_RATIO * uniform)
    .sort((a, b) => b.share - a.share)[0];
  if (best) return { label: best.name, share: best.share, information };
  const aligned = information / Math.log2(Math.max(2, Math.min(rows.length, columns)));
  if (!isSelf && aligned >= MIN_ALIGNMENT) return { label: "alignment", share: aligned, information };
  const spread = uniformEntropy > 0 ? entropy / uniformEntropy : 0;
  if (spread >= MIN_DIFFUSE) return { label: "diffuse", share: spread, information };
  return { label: "mixed", share: 1 - spread, information };
}
