/** Tokens as people see them. They come from anywhere, so whatever could hide or turn a text is made visible. */

import { wordStarts } from "../weights/maths.js";

/** @typedef {{tokens: string[], words: (number | null)[], direction: "ltr" | "rtl", called?: string}} Side */

const NAMED = { "\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣", "\u00a0": "␣", "": "∅" };
// Control characters, those that have no width or change the direction of what follows, and halves of characters.
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/gu;

/** A token that can be seen whole. @param {string} token @returns {string} */
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

/** A text cut to so many characters. @param {string} text @param {number} count */
export function shortened(text, count) {
  const letters = [...text];
  return letters.length <= count ? text : `${letters.slice(0, count - 1).join("")}…`;
}

/** A text whose direction does not reach beyond it, for use inside a sentence. @param {string} text */
export function isolated(text) {
  return `\u2068${text}\u2069`;
}

/**
 * A weight in six digits; in three where it was computed from rounded numbers, and has no more.
 * @param {number} weight @param {boolean} [rounded]
 */
export function exactly(weight, rounded = false) {
  if (weight === 0 || weight === 1) return String(weight);
  if (rounded) return weight < 0.001 ? "under 0.001" : weight.toFixed(3);
  return weight < 1e-4 ? weight.toExponential(4) : weight.toPrecision(6);
}

/** How much more one weight is than another: with its sign. @param {number} difference @param {boolean} [rounded] */
export function withSign(difference, rounded = false) {
  return `${difference < 0 ? "−" : "+"}${exactly(Math.abs(difference), rounded)}`;
}

/** A weight in two or three. @param {number} weight */
export function roughly(weight) {
  if (weight > 0 && weight < 0.001) return weight.toExponential(0);
  return weight.toFixed(weight < 0.1 ? 3 : 2);
}

/** What stands along one axis: the labels of a side's tokens, or of its words. */
export class Axis {
  /** @param {string} name @param {Side} side @param {boolean} joined */
  constructor(name, side, joined) {
    this.name = name;
    this.called = side.called ?? name;
    this.rtl = side.direction === "rtl";
    this.joined = joined;
    /** Where each word begins among the tokens. */
    this.starts = joined ? wordStarts(side.words) : null;
    /** The number of each word, as gold links count. */
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

  /** The number of the word at a place, or null. @param {number} place */
  wordAt(place) {
    return this.words[this.starts ? this.starts[place] : place] ?? null;
  }

  /** The first token of a place, so that it is found again when words are joined or parted. @param {number} place */
  tokenAt(place) {
    return this.starts ? this.starts[place] : place;
  }

  /** The place of a token. @param {number} token */
  placeOf(token) {
    if (!this.starts) return Math.min(token, this.length - 1);
    let place = 0;
    while (place + 1 < this.length && this.starts[place + 1] <= token) place++;
    return place;
  }
}
