/** Formatting of tokens and weights. Tokens are untrusted: characters that hide or reorder text are made visible. */

import { wordStarts } from "../weights/maths.js";

/**
 * The tokens of one side of a map. `entries`: by index, the entry of the vocabulary where it differs from the token.
 * @typedef {{tokens: string[], words: (number | null)[], direction: "ltr" | "rtl", title?: string,
 *   entries?: Record<string, string>}} Side
 */

const SYMBOLS = { "\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣", "\u00a0": "␣", "": "∅" };
// Control characters, zero-width and bidirectional formatting characters, and lone surrogates.
const INVISIBLE =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/gu;

/** Entries of unknown tokens. */
const UNKNOWN = /^(<unk>|\[UNK\]|<\|unk\|>)$/;

/** Makes whitespace and invisible characters of a token visible. @param {string} token @returns {string} */
export function makeVisible(token) {
  if (token in SYMBOLS) return SYMBOLS[token];
  const trimmed = token.trim();
  if (trimmed === "") return "␣".repeat(Math.min(3, [...token].length));
  return trimmed.replace(INVISIBLE, (hidden) => SYMBOLS[hidden] ?? codeOf(hidden));
}

/** @param {string} character */
function codeOf(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Whether a token is the mask of a masked language model. @param {string} token */
export const isMaskToken = (token) => /^(<mask>|\[MASK\])$/.test(token);

/** Truncates a text to a number of characters. @param {string} text @param {number} count */
export function truncate(text, count) {
  const characters = [...text];
  return characters.length <= count ? text : `${characters.slice(0, count - 1).join("")}…`;
}

/** Isolates the direction of a text, for use inside a sentence. @param {string} text */
export function bidiIsolate(text) {
  return `\u2068${text}\u2069`;
}

/** Replaces the hyphens of a formatted number by minus signs. @param {string} text */
export const withMinus = (text) => text.replaceAll("-", "−");

/** Formats a probability as a percentage. @param {number} probability */
export function formatProbability(probability) {
  const percent = 100 * probability;
  if (percent === 0 || percent === 100) return `${percent}%`;
  if (percent < 0.001) return `${withMinus(percent.toExponential(0))}%`;
  // Never rounded to 100%.
  if (percent > 99.9) return `${Math.min(99.999, Math.floor(1000 * percent) / 1000)}%`;
  return `${percent < 1 ? Number(percent.toPrecision(1)) : percent.toFixed(1)}%`;
}

/**
 * Formats a weight with six digits; with three if it was computed from quantized numbers.
 * @param {number} weight @param {boolean} [rounded]
 */
export function formatWeight(weight, rounded = false) {
  if (weight === 0 || weight === 1) return String(weight);
  if (rounded) return weight < 0.001 ? "under 0.001" : weight.toFixed(3);
  return weight < 1e-4 ? withMinus(weight.toExponential(4)) : weight.toPrecision(6);
}

/** Formats a difference of weights, with its sign. @param {number} difference @param {boolean} [rounded] */
export function formatSigned(difference, rounded = false) {
  return `${difference < 0 ? "−" : "+"}${formatWeight(Math.abs(difference), rounded)}`;
}

/** Formats a weight with two or three digits. @param {number} weight */
export function formatShort(weight) {
  if (weight > 0 && weight < 0.001) return withMinus(weight.toExponential(0));
  return weight.toFixed(weight < 0.1 ? 3 : 2);
}

/**
 * The label of a token: its text or its entry in the vocabulary. Unknown tokens are always marked.
 * @param {string} token @param {string | undefined} entry @param {boolean} showsEntries
 */
export function tokenLabel(token, entry, showsEntries) {
  if (entry === undefined) return makeVisible(token);
  if (showsEntries) return makeVisible(entry);
  return UNKNOWN.test(entry) ? `${truncate(makeVisible(token), 16)} ${entry}` : makeVisible(token);
}

/** An axis of a map: the labels of its tokens, or of its words. */
export class Axis {
  /**
   * @param {string} name @param {Side} side @param {boolean} merged
   * @param {boolean} [showsEntries] labels are entries of the vocabulary
   */
  constructor(name, side, merged, showsEntries = false) {
    this.name = name;
    this.title = side.title ?? name;
    this.rtl = side.direction === "rtl";
    this.merged = merged;
    /** Start index of each word among the tokens. */
    this.starts = merged ? wordStarts(side.words) : null;
    /** Word index of each token, as in gold links. */
    this.words = side.words;
    this.labels = merged
      ? Array.from({ length: this.starts.length - 1 }, (_, i) =>
          makeVisible(side.tokens.slice(this.starts[i], this.starts[i + 1]).join("")),
        )
      : side.tokens.map((token, i) => tokenLabel(token, side.entries?.[i], showsEntries));
  }

  get length() {
    return this.labels.length;
  }

  /** The word index at a position, or null. @param {number} position */
  wordAt(position) {
    return this.words[this.starts ? this.starts[position] : position] ?? null;
  }

  /**
   * The first token at a position, which is the same whether or not word pieces are merged. @param {number} position
   */
  tokenAt(position) {
    return this.starts ? this.starts[position] : position;
  }

  /** The position of a token. @param {number} token */
  positionOf(token) {
    if (!this.starts) return Math.min(token, this.length - 1);
    let position = 0;
    while (position + 1 < this.length && this.starts[position + 1] <= token) position++;
    return position;
  }
}
