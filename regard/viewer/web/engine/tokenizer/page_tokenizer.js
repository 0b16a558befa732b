/** Tokenizers of the `tokenizers` library, with the same ids, offsets and texts as regard/data/text/tokenizer.py. */

import { AlignedText } from "./aligned_text.js";
import { normalizeText } from "./normalizers.js";
import { preTokenize } from "./pre_tokenizers.js";
import { decodeTokens } from "./token_decoders.js";
import { makeVocabularyModel } from "./vocabulary_models.js";

/** @typedef {{text: string, start: number, end: number}} Piece a token's piece of a text, by code points */

export class PageTokenizer {
  /** @param {{kind: string, exact: boolean, json: any}} file */
  constructor({ kind, exact, json }) {
    this.kind = kind;
    this.isExact = exact;
    this.json = json;
    this.model = makeVocabularyModel(json.model);
    /** @type {string[]} */
    this.names = [];
    for (const [token, id] of this.model.ids) this.names[id] = token;
    for (const { id, content } of json.added_tokens) this.names[id] = content;
    this.special = new Set(json.added_tokens.filter((/** @type {any} */ one) => one.special).map((/** @type {any} */ one) => one.id));
    /** @type {string[]} */
    this.labels = [];
  }

  /** Ids of a text and their ranges in it, without special tokens. @param {string} text @returns {{ids: number[], spans: [number, number][]}} */
  encode(text) {
    const normalized = normalizeText(AlignedText.from(text), this.json.normalizer);
    /** @type {number[]} */
    const ids = [];
    /** @type {[number, number][]} */
    const spans = [];
    for (const piece of preTokenize(normalized.length ? [normalized] : [], this.json.pre_tokenizer)) {
      for (const [id, from, to] of this.model.tokenize(piece.chars)) {
        ids.push(id);
        spans.push([piece.starts[from], piece.ends[to - 1]]);
      }
    }
    return { ids, spans };
  }

  /** @param {number[]} ids @returns {string} */
  decode(ids) {
    const tokens = ids.filter((id) => !this.special.has(id)).map((id) => this.names[id]);
    const text = tokens.length ? decodeTokens(tokens, this.json.decoder).join("") : "";
    return this.kind === "char" && !this.isExact ? text.normalize("NFC") : text;
  }

  /** The text of an id, as plots are labeled. @param {number} id @returns {string} */
  label(id) {
    return (this.labels[id] ??= this.special.has(id) ? this.names[id] : this.decode([id]));
  }

  /**
   * A name of each id: its text or, if several of the ids have the same text, its entry of the vocabulary.
   * @param {number[]} ids @param {boolean} [strips] whether to remove spaces @returns {Map<number, string>}
   */
  distinctNames(ids, strips = false) {
    const texts = new Map(ids.map((id) => [id, (strips ? this.decode([id]).trim() : this.decode([id])) || this.label(id)]));
    const counts = new Map();
    for (const text of texts.values()) counts.set(text, (counts.get(text) ?? 0) + 1);
    return new Map([...texts].map(([id, text]) => [id, counts.get(text) === 1 ? text : this.names[id]]));
  }

  /** The piece of the text of each id. @param {string} text @returns {Piece[]} */
  encodePieces(text) {
    const chars = [...text];
    const { ids, spans } = this.encode(text);
    // The piece of a token that is only the space before a word is empty.
    const isEmpty = (/** @type {number} */ i) => this.names[ids[i]] === "▁" && chars.slice(...spans[i]).join("") !== " ";
    return spans.map(([start, end], i) => (isEmpty(i) ? { text: "", start, end: start } : stripLeadingSpace(chars, start, end)));
  }

  /** For each id, its piece of the decoded text. @param {number[]} ids @returns {Piece[]} */
  decodePieces(ids) {
    const chars = [...this.decode(ids)];
    const ends = [0, ...ids.map((_, i) => [...this.decode(ids.slice(0, i + 1))].length)];
    return ids.map((_, i) => stripLeadingSpace(chars, ends[i], ends[i + 1]));
  }
}

const SPACE_CHARACTER = /^[\s\x1c-\x1f\x85]$/u;

/** @param {string[]} chars @param {number} start @param {number} end @returns {Piece} */
function stripLeadingSpace(chars, start, end) {
  const piece = chars.slice(start, end);
  const first = piece.findIndex((char) => !isSpace(char));
  if (first > 0) start += first;
  return { text: chars.slice(start, end).join(""), start, end };
}

/** White space by Python's definition. @param {string} char */
export const isSpace = (char) => SPACE_CHARACTER.test(char) && char !== "\ufeff";
