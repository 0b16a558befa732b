/** Normalizers of tokenizer files. */

import { AlignedText } from "./aligned_text.js";
import { applyCharacterMap } from "./character_map.js";
import { compilePattern } from "./patterns.js";

const CJK = /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/u;
/** Control characters that the normalizer of SentencePiece's rule "nmt" removes, and characters that become spaces. */
const NMT_REMOVED = /[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]/;
const NMT_SPACE = /[\t\n\f\r\u1680\u200b-\u200f\u2028\u2029\u2581\ufeff\ufffd]/;

/** @param {AlignedText} text */
const lowercase = (text) => text.flatMap((char) => char.toLowerCase());
/** @param {AlignedText} text */
const stripAccents = (text) => text.flatMap((char) => (/\p{Mn}/u.test(char) ? "" : char));

/** @type {Record<string, (text: AlignedText, options: any) => AlignedText>} */
const NORMALIZERS = {
  Sequence: (text, { normalizers }) => normalizers.reduce(normalizeText, text),
  NFC: (text) => text.normalize("NFC"),
  NFD: (text) => text.normalize("NFD"),
  NFKC: (text) => text.normalize("NFKC"),
  NFKD: (text) => text.normalize("NFKD"),
  Lowercase: lowercase,
  StripAccents: stripAccents,
  Nmt: (text) => text.flatMap((char) => (NMT_REMOVED.test(char) ? "" : NMT_SPACE.test(char) ? " " : char)),
  Precompiled: (text, { precompiled_charsmap: map }) => applyCharacterMap(text, map),
  Replace: (text, { pattern, content }) => text.replace(compilePattern(pattern), content),
  Prepend: (text, { prepend }) => text.prepend(prepend),
  Strip: (text, { strip_left: left, strip_right: right }) => {
    const isSpace = (/** @type {string} */ char) => /\p{White_Space}/u.test(char);
    let [from, to] = [0, text.length];
    if (left) while (from < to && isSpace(text.chars[from])) from++;
    if (right) while (to > from && isSpace(text.chars[to - 1])) to--;
    return text.slice(from, to);
  },
  BertNormalizer: (text, options) => {
    if (options.clean_text) {
      text = text.flatMap((char) => {
        if (char === "\u{fffd}" || /[^\P{C}\t\n\r]/u.test(char)) return "";
        return /\p{White_Space}/u.test(char) ? " " : char;
      });
    }
    if (options.handle_chinese_chars) text = text.flatMap((char) => (CJK.test(char) ? ` ${char} ` : char));
    if (options.strip_accents ?? options.lowercase) text = stripAccents(text.normalize("NFD"));
    return options.lowercase ? lowercase(text) : text;
  },
};

/** @param {AlignedText} text @param {any} normalizer of a tokenizer file @returns {AlignedText} */
export function normalizeText(text, normalizer) {
  return normalizer ? NORMALIZERS[normalizer.type](text, normalizer) : text;
}
