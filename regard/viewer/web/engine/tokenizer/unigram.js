/** Unigram language model of SentencePiece (Kudo 2018): the segmentation with the largest sum of log-probabilities. */

import { byteIds } from "./byte_tokens.js";

/** Difference of the score of an unknown character from the lowest score of the vocabulary. */
const UNKNOWN_PENALTY = 10;

export class Unigram {
  /** @param {any} model */
  constructor({ vocab, unk_id: unknown, byte_fallback: usesBytes }) {
    this.ids = new Map(vocab.map((/** @type {[string, number]} */ [token], /** @type {number} */ id) => [token, id]));
    this.scores = Float64Array.from(vocab, (/** @type {[string, number]} */ [, score]) => score);
    this.unknown = unknown ?? undefined;
    this.usesBytes = usesBytes;
    this.unknownScore = this.scores.reduce((a, b) => Math.min(a, b), Infinity) - UNKNOWN_PENALTY;
    this.longest = vocab.reduce((/** @type {number} */ longest, /** @type {[string, number]} */ [token]) => Math.max(longest, [...token].length), 0);
  }

  /** @param {string[]} chars @returns {import("./vocabulary_models.js").Token[]} */
  tokenize(chars) {
    const path = this.bestPath(chars);
    /** @type {import("./vocabulary_models.js").Token[]} */
    const tokens = [];
    for (const [from, to] of path) {
      const text = chars.slice(from, to).join("");
      const id = this.ids.get(text);
      const bytes = id === undefined && this.usesBytes ? byteIds(text, this.ids) : null;
      if (bytes) for (const byte of bytes) tokens.push([byte, from, to]);
      else if (id === undefined && this.unknown === undefined) throw new Error(`The tokenizer has no token for “${text}”. Enter another text.`);
      else tokens.push([id ?? this.unknown, from, to]);
    }
    return tokens;
  }

  /** Viterbi search: the ranges of the tokens. Consecutive unknown characters are one range. @param {string[]} chars @returns {[number, number][]} */
  bestPath(chars) {
    const count = chars.length;
    const scores = new Float64Array(count + 1).fill(-Infinity);
    const starts = new Int32Array(count + 1);
    const isUnknown = new Uint8Array(count + 1);
    scores[0] = 0;
    for (let from = 0; from < count; from++) {
      let text = "";
      let hasCharacter = false;
      for (let to = from + 1; to <= Math.min(count, from + this.longest); to++) {
        text += chars[to - 1];
        const id = this.ids.get(text);
        if (id === undefined) continue;
        hasCharacter ||= to === from + 1;
        if (scores[from] + this.scores[id] > scores[to]) [scores[to], starts[to], isUnknown[to]] = [scores[from] + this.scores[id], from, Number(id === this.unknown)];
      }
      if (!hasCharacter && scores[from] + this.unknownScore > scores[from + 1]) [scores[from + 1], starts[from + 1], isUnknown[from + 1]] = [scores[from] + this.unknownScore, from, 1];
    }
    /** @type {[number, number][]} */
    const path = [];
    let wasUnknown = 0;
    for (let to = count; to > 0; to = starts[to]) {
      if (isUnknown[to] && wasUnknown) path[0][0] = starts[to];
      else path.unshift([starts[to], to]);
      wasUnknown = isUnknown[to];
    }
    return path;
  }
}
