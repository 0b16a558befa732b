/** Decoders of tokenizer files: from tokens to text. */

import { compilePattern } from "./patterns.js";
import { BYTE_CHARS } from "./pre_tokenizers.js";

const BYTES = new Map(BYTE_CHARS.map((char, byte) => [char, byte]));
const CLEANUP = [[" .", "."], [" ?", "?"], [" !", "!"], [" ,", ","], [" ' ", "'"], [" n't", "n't"], [" 'm", "'m"], [" do not", " don't"], [" 's", "'s"], [" 've", "'ve"], [" 're", "'re"]];

/** @type {Record<string, (tokens: string[], options: any) => string[]>} */
const DECODERS = {
  Sequence: (tokens, { decoders }) => decoders.reduce(decodeTokens, tokens),
  Metaspace: (tokens, { replacement, prepend_scheme: scheme = "always" }) => tokens.map((token, i) => token.replaceAll(replacement, i === 0 && scheme !== "never" ? "" : " ")),
  ByteLevel: (tokens) => {
    const bytes = tokens.flatMap((token) => {
      const own = [...token].map((char) => BYTES.get(char));
      return own.includes(undefined) ? [...new TextEncoder().encode(token)] : own;
    });
    return [new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes))];
  },
  WordPiece: (tokens, { prefix, cleanup }) =>
    tokens.map((token, i) => {
      const piece = i === 0 ? token : token.startsWith(prefix) ? token.slice(prefix.length) : ` ${token}`;
      return cleanup ? CLEANUP.reduce((text, [from, to]) => text.replaceAll(from, to), piece) : piece;
    }),
  Fuse: (tokens) => [tokens.join("")],
  Replace: (tokens, { pattern, content }) => tokens.map((token) => token.replaceAll(compilePattern(pattern), () => content)),
  Strip: (tokens, { content, start, stop }) =>
    tokens.map((token) => {
      const chars = [...token];
      let [from, to] = [0, chars.length];
      while (from < Math.min(start, to) && chars[from] === content) from++;
      while (to > Math.max(from, chars.length - stop) && chars[to - 1] === content) to--;
      return chars.slice(from, to).join("");
    }),
  ByteFallback: (tokens) => {
    /** @type {string[]} */
    const texts = [];
    /** @type {number[]} */
    let bytes = [];
    const flush = () => {
      if (!bytes.length) return;
      const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
      texts.push(...(text.includes("\ufffd") ? bytes.map(() => "\ufffd") : [text]));
      bytes = [];
    };
    for (const token of tokens) {
      const match = /^<0x([0-9A-F]{2})>$/i.exec(token);
      if (match) bytes.push(parseInt(match[1], 16));
      else {
        flush();
        texts.push(token);
      }
    }
    flush();
    return texts;
  },
};

/** @param {string[]} tokens @param {any} decoder of a tokenizer file @returns {string[]} */
export function decodeTokens(tokens, decoder) {
  return decoder ? DECODERS[decoder.type](tokens, decoder) : [tokens.join(" ")];
}
