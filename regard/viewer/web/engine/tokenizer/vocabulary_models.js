/** Models of tokenizer files: the tokens of a piece of text. A token is an id and a range of characters. */

import { byteIds } from "./byte_tokens.js";
import { Unigram } from "./unigram.js";

/** @typedef {[id: number, from: number, to: number]} Token */

/** Words, each with an id. */
class WordLevel {
  /** @param {any} model */
  constructor({ vocab, unk_token: unknown }) {
    this.ids = new Map(Object.entries(vocab));
    this.unknown = this.ids.get(unknown);
  }

  /** @param {string[]} chars @returns {Token[]} */
  tokenize(chars) {
    return [[this.ids.get(chars.join("")) ?? this.unknown, 0, chars.length]];
  }
}

/** Greedy longest match (BERT). */
class WordPiece {
  /** @param {any} model */
  constructor({ vocab, unk_token: unknown, continuing_subword_prefix: prefix, max_input_chars_per_word: limit }) {
    this.ids = new Map(Object.entries(vocab));
    this.unknown = this.ids.get(unknown);
    this.prefix = prefix;
    this.limit = limit;
  }

  /** @param {string[]} chars @returns {Token[]} */
  tokenize(chars) {
    /** @type {Token[]} */
    const tokens = [];
    if (chars.length > this.limit) return [[this.unknown, 0, chars.length]];
    for (let from = 0; from < chars.length; ) {
      let to = chars.length;
      let id;
      for (; to > from; to--) {
        id = this.ids.get((from ? this.prefix : "") + chars.slice(from, to).join(""));
        if (id !== undefined) break;
      }
      if (id === undefined) return [[this.unknown, 0, chars.length]];
      tokens.push([id, from, to]);
      from = to;
    }
    return tokens;
  }
}

/** Byte-pair encoding: merges adjacent pairs, the first learned first. */
class BytePairs {
  /** @param {any} model */
  constructor(model) {
    this.ids = new Map(Object.entries(model.vocab));
    this.unknown = model.unk_token === null || model.unk_token === undefined ? undefined : this.ids.get(model.unk_token);
    this.options = model;
    const prefix = [...(model.continuing_subword_prefix ?? "")].length;
    /** Rank and merged id by the ids of a pair. @type {Map<string, [number, number]>} */
    this.merges = new Map();
    model.merges.forEach((/** @type {string | [string, string]} */ merge, /** @type {number} */ rank) => {
      const [left, right] = typeof merge === "string" ? merge.split(" ") : merge;
      this.merges.set(`${this.ids.get(left)} ${this.ids.get(right)}`, [rank, this.ids.get(left + [...right].slice(prefix).join(""))]);
    });
  }

  /** @param {string[]} chars @returns {Token[]} */
  tokenize(chars) {
    const { ignore_merges: ignoresMerges, continuing_subword_prefix: prefix, end_of_word_suffix: suffix } = this.options;
    const whole = ignoresMerges ? this.ids.get(chars.join("")) : undefined;
    if (whole !== undefined) return [[whole, 0, chars.length]];
    /** @type {Token[]} */
    const tokens = [];
    let wasUnknown = false;
    chars.forEach((char, i) => {
      const name = (i && prefix ? prefix : "") + char + (i === chars.length - 1 && suffix ? suffix : "");
      const id = this.ids.get(name);
      const bytes = id === undefined && this.options.byte_fallback ? byteIds(char, this.ids) : null;
      if (id !== undefined) tokens.push([id, i, i + 1]);
      else if (bytes) for (const byte of bytes) tokens.push([byte, i, i + 1]);
      else if (this.unknown !== undefined) {
        if (wasUnknown && this.options.fuse_unk) tokens[tokens.length - 1][2] = i + 1;
        else tokens.push([this.unknown, i, i + 1]);
      }
      wasUnknown = id === undefined && !bytes;
    });
    return this.merge(tokens);
  }

  /** @param {Token[]} tokens @returns {Token[]} */
  merge(tokens) {
    const find = (/** @type {number} */ i) => (i + 1 < tokens.length ? this.merges.get(`${tokens[i][0]} ${tokens[i + 1][0]}`) : undefined);
    const pairs = tokens.map((_, i) => find(i));
    for (;;) {
      let best = -1;
      for (let i = 0; i < pairs.length; i++) if (pairs[i] && (best < 0 || pairs[i][0] < pairs[best][0])) best = i;
      if (best < 0) return tokens;
      tokens.splice(best, 2, [pairs[best][1], tokens[best][1], tokens[best + 1][2]]);
      pairs.splice(best, 1);
      for (const i of [best - 1, best]) if (i >= 0 && i < pairs.length) pairs[i] = find(i);
    }
  }
}

/** @type {Record<string, new (model: any) => {ids: Map<string, number>, tokenize: (chars: string[]) => Token[]}>} */
const MODELS = { WordLevel, WordPiece, Unigram, BPE: BytePairs };

/** @param {any} model of a tokenizer file */
export const makeVocabularyModel = (model) => new MODELS[model.type ?? "BPE"](model);
