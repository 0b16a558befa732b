/** Tokenizers: normalization, splitting, vocabulary models and decoding, with the span of each token in the text. */

/* Text whose characters (code points) keep the range of the original text that they come from. */

/** A sequence of characters with the range of the original text of each, in code points. */
class AlignedText {
  /** @param {string[]} chars @param {number[]} starts @param {number[]} ends */
  constructor(chars, starts, ends) {
    this.chars = chars;
    this.starts = starts;
    this.ends = ends;
  }

  /** @param {string} text */
  static from(text) {
    const chars = [...text];
    return new AlignedText(
      chars,
      chars.map((_, i) => i),
      chars.map((_, i) => i + 1),
    );
  }

  get text() {
    return this.chars.join("");
  }

  get length() {
    return this.chars.length;
  }

  /** @param {number} from @param {number} [to] */
  slice(from, to) {
    return new AlignedText(this.chars.slice(from, to), this.starts.slice(from, to), this.ends.slice(from, to));
  }

  /** Replaces each character by some characters with its range. @param {(char: string) => Iterable<string>} f */
  flatMap(f) {
    return build((add) =>
      this.chars.forEach((char, i) => [...f(char)].forEach((one) => add(one, this.starts[i], this.ends[i]))),
    );
  }

  /**
   * Replaces every match by a text, which has the range of the last character of the match. @param {RegExp} pattern
   * @param {string} content
   */
  replace(pattern, content) {
    return build((add) => {
      let at = 0;
      for (const [from, to] of this.matches(pattern)) {
        if (from === to) continue;
        for (; at < from; at++) add(this.chars[at], this.starts[at], this.ends[at]);
        for (const char of content) add(char, to ? this.starts[to - 1] : 0, to ? this.ends[to - 1] : 0);
        at = to;
      }
      for (; at < this.length; at++) add(this.chars[at], this.starts[at], this.ends[at]);
    });
  }

  /** Inserts a text before the first character, with its range. @param {string} content */
  prepend(content) {
    if (!this.length) return this;
    const added = [...content];
    return new AlignedText(
      [...added, ...this.chars],
      [...added.map(() => this.starts[0]), ...this.starts],
      [...added.map(() => this.ends[0]), ...this.ends],
    );
  }

  /**
   * Replaces all characters. Each new one has a change of the number of characters: 0 replaces one, 1 inserts one (with
   * the range of the character before it), −n replaces one and removes the n after it.
   * @param {[char: string, change: number][]} changes
   */
  transform(changes) {
    let at = 0;
    return build((add) => {
      for (const [char, change] of changes) {
        const from = Math.min(change > 0 ? at - 1 : at, this.length - 1);
        add(char, from < 0 ? 0 : this.starts[from], from < 0 ? 0 : this.ends[from]);
        if (change <= 0) at += 1 - change;
      }
    });
  }

  /** Ranges of the matches of a pattern, in characters. @param {RegExp} pattern @returns {[number, number][]} */
  matches(pattern) {
    const { text } = this;
    const isPlain = text.length === this.length;
    /** Index of the character at each UTF-16 index. @type {number[] | null} */
    const positions = isPlain ? null : [];
    if (positions) {
      this.chars.forEach((char, i) => {
        for (let unit = 0; unit < char.length; unit++) positions.push(i);
      });
      positions.push(this.length);
    }
    const found = [];
    for (const match of text.matchAll(pattern)) {
      const [from, to] = [match.index, match.index + match[0].length];
      found.push(/** @type {[number, number]} */ (positions ? [positions[from], positions[to]] : [from, to]));
    }
    return found;
  }

  /** Unicode normalization. @param {string} form */
  normalize(form) {
    if (this.text.normalize(form) === this.text) return this;
    return build((add) => {
      // A character that combines with none before it starts a new segment; segments are normalized separately.
      for (let from = 0; from < this.length; ) {
        let to = from + 1;
        while (to < this.length && combines(this.chars.slice(from, to).join(""), this.chars[to], form)) to++;
        const source = this.chars.slice(from, to);
        // A result has the range of the first original character among its parts, in order; if it is a further part of
        // a decomposed character, that of the result before it.
        const decomposition = form.replace("C", "D");
        const parts = source.flatMap((char) =>
          [...char.normalize(decomposition)].map((part, i) => ({ part, isFirst: i === 0, isUsed: false })),
        );
        let next = from;
        for (const char of source.join("").normalize(form)) {
          let count = 0;
          for (const part of char.normalize(decomposition)) {
            const found = parts.find((one) => !one.isUsed && one.part === part);
            if (!found) continue;
            found.isUsed = true;
            if (found.isFirst) count++;
          }
          const at = Math.min(count ? next : Math.max(next - 1, from), to - 1);
          add(char, this.starts[at], this.ends[at]);
          next += count;
        }
        from = to;
      }
    });
  }
}

/**
 * Whether the next character may change together with those before it. @param {string} before @param {string} next
 * @param {string} form
 */
function combines(before, next, form) {
  if (/\p{M}/u.test(next)) return true;
  const composed = form.replace("D", "C");
  return (before + next).normalize(composed) !== before.normalize(composed) + next.normalize(composed);
}

/** @param {(add: (char: string, start: number, end: number) => void) => void} fill */
function build(fill) {
  /** @type {string[]} */
  const chars = [];
  /** @type {number[]} */
  const starts = [];
  /** @type {number[]} */
  const ends = [];
  fill((char, start, end) => {
    chars.push(char);
    starts.push(start);
    ends.push(end);
  });
  return new AlignedText(chars, starts, ends);
}

/* Regular expressions of tokenizer files (Oniguruma) as JavaScript's. */

/** The pattern of a tokenizer file. @param {{Regex?: string, String?: string}} pattern */
function compilePattern({ Regex, String: literal }) {
  if (Regex === undefined)
    return new RegExp(
      literal.replace(/[.*+?^${}()|[\]\\/-]/g, (char) => (char === "-" ? "\\x2d" : `\\${char}`)),
      "gu",
    );
  return new RegExp(translatePattern(Regex), "gu");
}

/** @param {string} pattern @returns {string} */
function translatePattern(pattern) {
  // (?m): a dot matches newlines too. Lines end at \n only; ^ and $ match at every line.
  const matchesNewlines = pattern.startsWith("(?m)");
  const text = (matchesNewlines ? pattern.slice(4) : pattern).replace(
    /\(\?i:([^)]*)\)/g,
    (_, inside) =>
      `(?:${inside.replace(/[a-z]/gi, (/** @type {string} */ letter) => `[${letter.toLowerCase()}${letter.toUpperCase()}]`)})`,
  );
  const outside = { "^": "(?<![^\\n])", $: "(?![^\\n])", ".": matchesNewlines ? "[\\s\\S]" : "[^\\n]" };
  const escapes = {
    s: "\\p{White_Space}",
    S: "\\P{White_Space}",
    d: "\\p{Nd}",
    z: "(?![\\s\\S])",
    A: "(?<![\\s\\S])",
    h: "[0-9a-fA-F]",
  };
  let out = "";
  let isClass = false;
  for (let i = 0; i < text.length; i++) {
    const char = text[i];
    if (char === "\\") {
      const next = text[++i];
      out +=
        escapes[next] ??
        (/[\p{L}\p{N}^$\\.*+?()[\]{}|/]/u.test(next) ? `\\${next}` : isClass && next === "-" ? "\\-" : next);
    } else if (isClass) {
      out += char;
      if (char === "]") isClass = false;
    } else {
      out += outside[char] ?? char;
      if (char === "[") {
        isClass = true;
        if (text[i + 1] === "^") out += text[++i];
      }
    }
  }
  return out;
}

/*
 * * Character maps of SentencePiece (normalizer `Precompiled`): the size of a double-array trie in bytes, the trie,
 * and the
 * texts that its leaves point to, each ending with a zero byte.
 */

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
        return new TextDecoder("utf-8", { ignoreBOM: true }).decode(
          this.texts.subarray(from, this.texts.indexOf(0, from)),
        );
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

/**
 * Appends characters that replace others. @param {[string, number][]} changes
 * @param {number} count of characters that are replaced @param {string[]} chars
 */
function replaceCharacters(changes, count, chars) {
  const added = chars.length - count;
  chars.forEach((char, i) => changes.push([char, i >= count ? 1 : 0]));
  if (added < 0 && changes.length) changes[changes.length - 1][1] += added;
}

/** Maps are large: each is read once. @type {Map<string, CharacterMap>} */
const MAPS = new Map();

/** @param {AlignedText} text @param {string} base64 @returns {AlignedText} */
function applyCharacterMap(text, base64) {
  if (!MAPS.has(base64)) MAPS.set(base64, new CharacterMap(base64));
  return MAPS.get(base64).normalize(text);
}

/* Normalizers of tokenizer files. */

const CJK =
  /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/u;
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
function normalizeText(text, normalizer) {
  return normalizer ? NORMALIZERS[normalizer.type](text, normalizer) : text;
}

/* Tokens of single bytes, named `<0x41>`: the fallback for characters that are not in the vocabulary. */

/**
 * The ids of the UTF-8 bytes of a text; null if one has no token. @param {string} text @param {Map<string, number>} ids
 * @returns {number[] | null}
 */
function byteIds(text, ids) {
  const found = Array.from(new TextEncoder().encode(text), (byte) =>
    ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`),
  );
  return found.includes(undefined) ? null : found;
}

/* Pre-tokenizers of tokenizer files: split a text into pieces, within which tokens are found. */

const GPT2_WORDS = new RegExp(
  translatePattern("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"),
  "gu",
);
const WORDS =
  /(?:[\p{L}\p{M}\p{Nd}\p{Pc}]|\u200c|\u200d)+|(?:(?!\u200c|\u200d)[^\p{L}\p{M}\p{Nd}\p{Pc}\p{White_Space}])+/gu;
const PUNCTUATION = /[\p{P}$+<=>^`|~]/gu;

/** The printable character that stands for each byte in byte-level vocabularies. */
const BYTE_CHARS = (() => {
  const isPrintable = (/** @type {number} */ byte) =>
    (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(isPrintable(byte) ? byte : next++));
})();
const ENCODER = new TextEncoder();

/**
 * Splits a piece at the matches of a pattern. @param {AlignedText} piece @param {RegExp} pattern
 * @param {string} behavior @param {boolean} [invert] @returns {AlignedText[]}
 */
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
  Split: (pieces, { pattern, behavior, invert }) =>
    pieces.flatMap((piece) => splitPiece(piece, compilePattern(pattern), behavior, invert)),
  ByteLevel: (pieces, { add_prefix_space: addsSpace, use_regex: splits = true }) =>
    pieces
      .map((piece) => (addsSpace && piece.length && piece.chars[0] !== " " ? piece.prepend(" ") : piece))
      .flatMap((piece) => (splits ? splitPiece(piece, GPT2_WORDS, "Isolated") : [piece]))
      .map((piece) => piece.flatMap((char) => Array.from(ENCODER.encode(char), (byte) => BYTE_CHARS[byte]))),
  BertPreTokenizer: (pieces) =>
    pieces
      .flatMap((piece) => splitPiece(piece, /\p{White_Space}/gu, "Removed"))
      .flatMap((piece) => splitPiece(piece, PUNCTUATION, "Isolated")),
  Whitespace: (pieces) => pieces.flatMap((piece) => splitPiece(piece, WORDS, "Removed", true)),
  WhitespaceSplit: (pieces) => pieces.flatMap((piece) => splitPiece(piece, /\p{White_Space}/gu, "Removed")),
  Punctuation: (pieces, { behavior }) => pieces.flatMap((piece) => splitPiece(piece, PUNCTUATION, behavior)),
  Digits: (pieces, { individual_digits: single }) =>
    pieces.flatMap((piece) => splitPiece(piece, /\p{N}/gu, single ? "Isolated" : "Contiguous")),
};

/** @param {AlignedText[]} pieces @param {any} preTokenizer of a tokenizer file @returns {AlignedText[]} */
function preTokenize(pieces, preTokenizer) {
  return preTokenizer ? PRE_TOKENIZERS[preTokenizer.type](pieces, preTokenizer) : pieces;
}

/* Unigram language model of SentencePiece (Kudo 2018): the segmentation with the largest sum of log-probabilities. */

/** Difference of the score of an unknown character from the lowest score of the vocabulary. */
const UNKNOWN_PENALTY = 10;

export class Unigram {
  /** @param {any} model */
  constructor({ vocab, unk_id: unknown, byte_fallback: usesBytes }) {
    this.ids = new Map(vocab.map((/** @type {[string, number]} */ [token], /** @type {number} */ id) => [token, id]));
    this.scores = Float64Array.from(vocab, (/** @type {[string, number]} */ [, score]) => score);
    this.unknown = unknown ?? undefined;
    this.usesBytes = usesBytes;
    this.unknownScore = this.scores.reduce((a, b) => Math.min(a, b), Infinity) - UNKNOWN_PENALTY;
    this.longest = vocab.reduce(
      (/** @type {number} */ longest, /** @type {[string, number]} */ [token]) => Math.max(longest, [...token].length),
      0,
    );
  }

  /** @param {string[]} chars @returns {Token[]} */
  tokenize(chars) {
    const path = this.bestPath(chars);
    /** @type {Token[]} */
    const tokens = [];
    for (const [from, to] of path) {
      const text = chars.slice(from, to).join("");
      const id = this.ids.get(text);
      const bytes = id === undefined && this.usesBytes ? byteIds(text, this.ids) : null;
      if (bytes) for (const byte of bytes) tokens.push([byte, from, to]);
      else if (id === undefined && this.unknown === undefined)
        throw new Error(`The tokenizer has no token for “${text}”. Enter another text.`);
      else tokens.push([id ?? this.unknown, from, to]);
    }
    return tokens;
  }

  /**
   * Viterbi search: the ranges of the tokens. Consecutive unknown characters are one range. @param {string[]} chars
   * @returns {[number, number][]}
   */
  bestPath(chars) {
    const count = chars.length;
    const scores = new Float64Array(count + 1).fill(-Infinity);
    const starts = new Int32Array(count + 1);
    const isUnknown = new Uint8Array(count + 1);
    scores[0] = 0;
    for (let from = 0; from < count; from++) {
      let text = "";
      let hasCharacter = false;
      for (let to = from + 1; to <= Math.min(count, from + this.longest); to++) {
        text += chars[to - 1];
        const id = this.ids.get(text);
        if (id === undefined) continue;
        hasCharacter ||= to === from + 1;
        if (scores[from] + this.scores[id] > scores[to])
          [scores[to], starts[to], isUnknown[to]] = [scores[from] + this.scores[id], from, Number(id === this.unknown)];
      }
      if (!hasCharacter && scores[from] + this.unknownScore > scores[from + 1])
        [scores[from + 1], starts[from + 1], isUnknown[from + 1]] = [scores[from] + this.unknownScore, from, 1];
    }
    /** @type {[number, number][]} */
    const path = [];
    let wasUnknown = 0;
    for (let to = count; to > 0; to = starts[to]) {
      if (isUnknown[to] && wasUnknown) path[0][0] = starts[to];
      else path.unshift([starts[to], to]);
      wasUnknown = isUnknown[to];
    }
    return path;
  }
}

/* Models of tokenizer files: the tokens of a piece of text. A token is an id and a range of characters. */

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
    this.unknown =
      model.unk_token === null || model.unk_token === undefined ? undefined : this.ids.get(model.unk_token);
    this.options = model;
    const prefix = [...(model.continuing_subword_prefix ?? "")].length;
    /** Rank and merged id by the ids of a pair. @type {Map<string, [number, number]>} */
    this.merges = new Map();
    model.merges.forEach((/** @type {string | [string, string]} */ merge, /** @type {number} */ rank) => {
      const [left, right] = typeof merge === "string" ? merge.split(" ") : merge;
      this.merges.set(`${this.ids.get(left)} ${this.ids.get(right)}`, [
        rank,
        this.ids.get(left + [...right].slice(prefix).join("")),
      ]);
    });
  }

  /** @param {string[]} chars @returns {Token[]} */
  tokenize(chars) {
    const {
      ignore_merges: ignoresMerges,
      continuing_subword_prefix: prefix,
      end_of_word_suffix: suffix,
    } = this.options;
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
    const find = (/** @type {number} */ i) =>
      i + 1 < tokens.length ? this.merges.get(`${tokens[i][0]} ${tokens[i + 1][0]}`) : undefined;
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
const makeVocabularyModel = (model) => new MODELS[model.type ?? "BPE"](model);

/* Decoders of tokenizer files: from tokens to text. */

const BYTES = new Map(BYTE_CHARS.map((char, byte) => [char, byte]));
const CLEANUP = [
  [" .", "."],
  [" ?", "?"],
  [" !", "!"],
  [" ,", ","],
  [" ' ", "'"],
  [" n't", "n't"],
  [" 'm", "'m"],
  [" do not", " don't"],
  [" 's", "'s"],
  [" 've", "'ve"],
  [" 're", "'re"],
];

/** @type {Record<string, (tokens: string[], options: any) => string[]>} */
const DECODERS = {
  Sequence: (tokens, { decoders }) => decoders.reduce(decodeTokens, tokens),
  Metaspace: (tokens, { replacement, prepend_scheme: scheme = "always" }) =>
    tokens.map((token, i) => token.replaceAll(replacement, i === 0 && scheme !== "never" ? "" : " ")),
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
  Replace: (tokens, { pattern, content }) =>
    tokens.map((token) => token.replaceAll(compilePattern(pattern), () => content)),
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
function decodeTokens(tokens, decoder) {
  return decoder ? DECODERS[decoder.type](tokens, decoder) : [tokens.join(" ")];
}

/* Tokenizers of the `tokenizers` library, with the same ids, offsets and texts as regard/data/text/tokenizer.py. */

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
    this.special = new Set(
      json.added_tokens.filter((/** @type {any} */ one) => one.special).map((/** @type {any} */ one) => one.id),
    );
    /** @type {string[]} */
    this.labels = [];
  }

  /**
   * Ids of a text and their ranges in it, without special tokens. @param {string} text
   * @returns {{ids: number[], spans: [number, number][]}}
   */
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
    const texts = new Map(
      ids.map((id) => [id, (strips ? this.decode([id]).trim() : this.decode([id])) || this.label(id)]),
    );
    const counts = new Map();
    for (const text of texts.values()) counts.set(text, (counts.get(text) ?? 0) + 1);
    return new Map([...texts].map(([id, text]) => [id, counts.get(text) === 1 ? text : this.names[id]]));
  }

  /** The piece of the text of each id. @param {string} text @returns {Piece[]} */
  encodePieces(text) {
    const chars = [...text];
    const { ids, spans } = this.encode(text);
    // The piece of a token that is only the space before a word is empty.
    const isEmpty = (/** @type {number} */ i) =>
      this.names[ids[i]] === "▁" && chars.slice(...spans[i]).join("") !== " ";
    return spans.map(([start, end], i) =>
      isEmpty(i) ? { text: "", start, end: start } : stripLeadingSpace(chars, start, end),
    );
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
