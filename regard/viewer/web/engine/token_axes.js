/** Axes of attention maps: the tokens of a text and the word that each belongs to (regard/viewer/text_look.py). */

import { isSpace } from "./tokenizer/page_tokenizer.js";

/**
 * @typedef {import("./tokenizer/page_tokenizer.js").PageTokenizer} PageTokenizer
 * @typedef {{tokens: string[], words: number[], entries: Record<string, string>}} Axis −1: the token belongs to no word; `entries`: by
 * index, the entry of the vocabulary where it differs from the token
 */

const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Samaritan}\p{Script=Mandaic}\p{Script=Adlam}]/u;

/** @param {PageTokenizer} tokenizer @param {string} text @param {number[]} ids @returns {Axis} */
export function textAxis(tokenizer, text, ids) {
  const all = tokenizer.encode(text).ids;
  let tokens;
  let pieces;
  const start = [0, all.length - ids.length].find((from) => from >= 0 && ids.every((id, i) => all[from + i] === id));
  if (start !== undefined) {
    pieces = tokenizer.encodePieces(text).slice(start, start + ids.length);
    tokens = pieces.map((piece, i) => piece.text || tokenizer.names[ids[i]]);
  } else {
    // The model's own tokens, which differ from those of the text.
    text = tokenizer.decode(ids);
    pieces = tokenizer.decodePieces(ids);
    tokens = ids.map((id) => tokenizer.label(id));
  }
  const entries = Object.fromEntries(ids.map((id, i) => [i, tokenizer.names[id]]).filter(([i, entry]) => entry !== tokens[i]));
  return { tokens, words: wordIndices(pieces, wordSpans(text)), entries };
}

/** Adds special tokens. @param {Axis} axis @param {string[]} before @param {string[]} [after] @returns {Axis} */
export function surround({ tokens, words, entries }, before, after = []) {
  const moved = Object.fromEntries(Object.entries(entries).map(([i, entry]) => [Number(i) + before.length, entry]));
  return { tokens: [...before, ...tokens, ...after], words: [...before.map(() => -1), ...words, ...after.map(() => -1)], entries: moved };
}

/** Ranges of the words of a text, in code points. @param {string} text @returns {[number, number][]} */
function wordSpans(text) {
  /** @type {[number, number][]} */
  const spans = [];
  let wasSpace = true;
  [...text].forEach((char, i) => {
    const space = isSpace(char);
    if (!space && wasSpace) spans.push([i, i + 1]);
    else if (!space) spans[spans.length - 1][1] = i + 1;
    wasSpace = space;
  });
  return spans;
}

/** @param {{start: number, end: number}[]} pieces @param {[number, number][]} words */
function wordIndices(pieces, words) {
  return pieces.map(({ start, end }) => {
    const word = words.findIndex(([, stop]) => stop > start);
    return word >= 0 && words[word][0] < end ? word : -1;
  });
}

/** Writing direction, by the first letter. @param {Axis} axis */
export function directionOf({ tokens, words }) {
  const text = tokens.filter((_, i) => words[i] >= 0).join("");
  const [letter] = /\p{L}/u.exec(text) ?? [""];
  return RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}
