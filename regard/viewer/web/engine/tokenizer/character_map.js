/**
 * Character maps of SentencePiece (normalizer `Precompiled`): the size of a double-array trie in bytes, the trie, and the
 * texts that its leaves point to, each ending with a zero byte.
 */

import { AlignedText } from "./aligned_text.js";

const GRAPHEMES = new Intl.Segmenter("en", { granularity: "grapheme" });
/** Graphemes of fewer bytes are looked up as a whole, as by the `tokenizers` library; of others, each character. */
const MAX_GRAPHEME_BYTES = 6;

class CharacterMap {
  /** @param {string} base64 */
  constructor(base64) {
    const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const size = view.getUint32(0, true);
    this.units = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
    this.texts = bytes.subarray(4 + size);
  }

  /** The text that replaces a key: that of its shortest prefix in the map, or null. @param {Uint8Array} key */
  lookUp(key) {
    const { units } = this;
    const offsetOf = (/** @type {number} */ unit) => (unit >>> 10) << ((unit & 512) >>> 6);
    let at = offsetOf(units[0]);
    for (const byte of key) {
      if (byte === 0) return null;
      at ^= byte;
      const unit = units[at];
      if ((unit & 0x800000ff) >>> 0 !== byte) return null;
      at ^= offsetOf(unit);
      if ((unit >>> 8) & 1) {
        const from = units[at] & 0x7fffffff;
        return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.texts.subarray(from, this.texts.indexOf(0, from)));
      }
    }
    return null;
  }

  /** @param {AlignedText} text @returns {AlignedText} */
  normalize(text) {
    const encoder = new TextEncoder();
    /** Characters, each with the change of their number (see AlignedText.transform). @type {[string, number][]} */
    const changes = [];
    for (const { segment } of GRAPHEMES.segment(text.text)) {
      const bytes = encoder.encode(segment);
      const whole = bytes.length < MAX_GRAPHEME_BYTES ? this.lookUp(bytes) : null;
      for (const part of whole === null ? segment : [segment]) {
        const other = whole ?? this.lookUp(encoder.encode(part));
        if (other === null) changes.push([part, 0]);
        else replaceCharacters(changes, [...part].length, [...other]);
      }
    }
    return text.transform(changes);
  }
}

/** Appends characters that replace others. @param {[string, number][]} changes @param {number} count of characters that are replaced @param {string[]} chars */
function replaceCharacters(changes, count, chars) {
  const added = chars.length - count;
  chars.forEach((char, i) => changes.push([char, i >= count ? 1 : 0]));
  if (added < 0 && changes.length) changes[changes.length - 1][1] += added;
}

/** Maps are large: each is read once. @type {Map<string, CharacterMap>} */
const MAPS = new Map();

/** @param {AlignedText} text @param {string} base64 @returns {AlignedText} */
export function applyCharacterMap(text, base64) {
  if (!MAPS.has(base64)) MAPS.set(base64, new CharacterMap(base64));
  return MAPS.get(base64).normalize(text);
}
