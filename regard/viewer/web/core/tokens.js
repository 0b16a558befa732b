/** Formatting of tokens and weights. Tokens are untrusted: characters that hide or reorder text are made visible. */

import { wordStarts } from "../weights/maths.js";

/** @typedef {{tokens: string[], words: (number | null)[], direction: "ltr" | "rtl", called?: string}} Side */

const NAMED = { "\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣", "\u00a0": "␣", "": "∅" };
// Control characters, zero-width and bidirectional formatting characters, and lone surrogates.
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/gu;

/** Makes whitespace and invisible characters of a token visible. @param {string} token @returns {string} */
export function visible(token) {
  if (token in NAMED) return NAMED[token];
  const trimmed = token.trim();
  if (trimmed === "") return "␣".repeat(Math.min(3, [...token].length));
  return trimmed.replace(HIDDEN, (hidden) => NAMED[hidden] ?? codeOf(hidden));
}

/** @param {string} character */
function codeOf(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Truncates a text to a number of characters. @param {string} text @param {number} count */
export function shortened(text, count) {
  const letters = [...text];
  return letters.length <= count ? text : `${letters.slice(0, count - 1).join("")}…`;
}

/** Isolates the direction of a text, for use inside a sentence. @param {string} text */
export function isolated(text) {
  return `\u2068${text}\u2069`;
}

/**
 * Formats a weight with six digits; with three if it was computed from quantized numbers.
 * @param {number} weight @param {boolean} [rounded]
 */
export function exactly(weight, rounded = false) {
  if (weight === 0 || weight === 1) return String(weight);
  if (rounded) return weight < 0.001 ? "under 0.001" : weight.toFixed(3);
  return weight < 1e-4 ? weight.toExponential(4) : weight.toPrecision(6);
}

/** Formats a difference of weights, with its sign. @param {number} difference @param {boolean} [rounded] */
export function withSign(difference, rounded = false) {
  return `${difference < 0 ? "−" : "+"}${exactly(Math.abs(difference), rounded)}`;
}

/** Formats a weight with two or three digits. @param {number} weight */
export function roughly(weight) {
  if (weight > 0 && weight < 0.001) return weight.toExponential(0);
  return weight.toFixed(weight < 0.1 ? 3 : 2);
}

/** An axis of a map: the labels of its tokens, or of its words. */
export class Axis {
  /** @param {string} name @param {Side} side @param {boolean} joined */
  constructor(name, side, joined) {
    this.name = name;
    this.called = side.called ?? name;
    this.rtl = side.direction === "rtl";
    this.joined = joined;
    /** Start index of each word among the tokens. */
    this.starts = joined ? wordStarts(side.words) : null;
    /** Word index of each token, as in gold links. */
    this.words = side.words;
    this.labels = joined
      ? Array.from({ length: this.starts.length - 1 }, (_, i) =>
          visible(side.tokens.slice(this.starts[i], this.starts[i + 1]).join("")),
        )
      : side.tokens.map(visible);
  }

  get length() {
    return this.labels.length;
  }

  /** The word index at a position, or null. @param {number} place */
  wordAt(place) {
    return this.words[this.starts ? this.starts[place] : place] ?? null;
  }

  /** The first token at a position, which is the same whether or not word pieces are merged. @param {number} place */
  tokenAt(place) {
    return this.starts ? this.starts[place] : place;
  }

  /** The position of a token. @param {number} token */
  placeOf(token) {
    if (!this.starts) return Math.min(token, this.length - 1);
    let place = 0;
    while (place + 1 < this.length && this.starts[place + 1] <= token) place++;
    return place;
  }
}
