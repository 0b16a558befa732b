/** Pre-tokenizers of tokenizer files: split a text into pieces, within which tokens are found. */

import { AlignedText } from "./aligned_text.js";
import { compilePattern, translatePattern } from "./patterns.js";

const GPT2_WORDS = new RegExp(translatePattern("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"), "gu");
const WORDS = /[\p{L}\p{M}\p{Nd}\p{Pc}\u200c\u200d]+|[^\p{L}\p{M}\p{Nd}\p{Pc}\u200c\u200d\p{White_Space}]+/gu;
const PUNCTUATION = /[\p{P}$+<=>^`|~]/gu;

/** The printable character that stands for each byte in byte-level vocabularies. */
export const BYTE_CHARS = (() => {
  const isPrintable = (/** @type {number} */ byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : next++));
})();
const ENCODER = new TextEncoder();

/** Splits a piece at the matches of a pattern. @param {AlignedText} piece @param {RegExp} pattern @param {string} behavior @param {boolean} [invert] @returns {AlignedText[]} */
function splitPiece(piece, pattern, behavior, invert = false) {
  /** Consecutive ranges, and whether each is a match. @type {[number, number, boolean][]} */
  const ranges = [];
  let at = 0;
  for (const [from, to] of piece.matches(pattern)) {
    if (from > at) ranges.push([at, from, invert]);
    ranges.push([from, to, !invert]);
    at = to;
  }
  if (at < piece.length) ranges.push([at, piece.length, invert]);
  /** @type {[number, number][]} */
  const parts = [];
  let [wasMatch, isWaiting] = [false, false];
  for (const [from, to, isMatch] of ranges) {
    const last = parts[parts.length - 1];
    if (behavior === "Removed") {
      if (!isMatch) parts.push([from, to]);
    } else if (behavior === "MergedWithPrevious" && isMatch && !wasMatch && last) last[1] = to;
    else if (behavior === "MergedWithNext" && isWaiting && !isMatch) last[1] = to;
    else if (behavior === "Contiguous" && last && isMatch === wasMatch) last[1] = to;
    else parts.push([from, to]);
    wasMatch = isMatch;
    isWaiting = isMatch;
  }
  // A pattern may match between two characters.
  return parts.filter(([from, to]) => from < to).map(([from, to]) => piece.slice(from, to));
}

/** @type {Record<string, (pieces: AlignedText[], options: any) => AlignedText[]>} */
const PRE_TOKENIZERS = {
  Sequence: (pieces, { pretokenizers }) => pretokenizers.reduce(preTokenize, pieces),
  Metaspace: (pieces, { replacement, prepend_scheme: scheme = "always", split = true }) =>
    pieces.flatMap((piece, n) => {
      piece = piece.flatMap((char) => (char === " " ? replacement : char));
      const isPrepended = scheme === "always" || (scheme === "first" && n === 0 && piece.starts[0] === 0);
      if (isPrepended && piece.chars[0] !== replacement) piece = piece.prepend(replacement);
      return split ? splitPiece(piece, compilePattern({ String: replacement }), "MergedWithNext") : [piece];
    }),
  Split: (pieces, { pattern, behavior, invert }) => pieces.flatMap((piece) => splitPiece(piece, compilePattern(pattern), behavior, invert)),
  ByteLevel: (pieces, { add_prefix_space: addsSpace, use_regex: splits = true }) =>
    pieces
      .map((piece) => (addsSpace && piece.length && piece.chars[0] !== " " ? piece.prepend(" ") : piece))
      .flatMap((piece) => (splits ? splitPiece(piece, GPT2_WORDS, "Isolated") : [piece]))
      .map((piece) => piece.flatMap((char) => Array.from(ENCODER.encode(char), (byte) => BYTE_CHARS[byte]))),
  BertPreTokenizer: (pieces) =>
    pieces.flatMap((piece) => splitPiece(piece, /\p{White_Space}/gu, "Removed")).flatMap((piece) => splitPiece(piece, PUNCTUATION, "Isolated")),
  Whitespace: (pieces) => pieces.flatMap((piece) => splitPiece(piece, WORDS, "Removed", true)),
  WhitespaceSplit: (pieces) => pieces.flatMap((piece) => splitPiece(piece, /\p{White_Space}/gu, "Removed")),
  Punctuation: (pieces, { behavior }) => pieces.flatMap((piece) => splitPiece(piece, PUNCTUATION, behavior)),
  Digits: (pieces, { individual_digits: single }) => pieces.flatMap((piece) => splitPiece(piece, /\p{N}/gu, single ? "Isolated" : "Contiguous")),
};

/** @param {AlignedText[]} pieces @param {any} preTokenizer of a tokenizer file @returns {AlignedText[]} */
export function preTokenize(pieces, preTokenizer) {
  return preTokenizer ? PRE_TOKENIZERS[preTokenizer.type](pieces, preTokenizer) : pieces;
}
