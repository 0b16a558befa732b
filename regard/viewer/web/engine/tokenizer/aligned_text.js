/** Text whose characters (code points) keep the range of the original text that they come from. */

/** A sequence of characters with the range of the original text of each, in code points. */
export class AlignedText {
  /** @param {string[]} chars @param {number[]} starts @param {number[]} ends */
  constructor(chars, starts, ends) {
    this.chars = chars;
    this.starts = starts;
    this.ends = ends;
  }

  /** @param {string} text */
  static from(text) {
    const chars = [...text];
    return new AlignedText(chars, chars.map((_, i) => i), chars.map((_, i) => i + 1));
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
    return build((add) => this.chars.forEach((char, i) => [...f(char)].forEach((one) => add(one, this.starts[i], this.ends[i]))));
  }

  /** Replaces every match by a text, which has the range of the last character of the match. @param {RegExp} pattern @param {string} content */
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
    return new AlignedText([...added, ...this.chars], [...added.map(() => this.starts[0]), ...this.starts], [...added.map(() => this.ends[0]), ...this.ends]);
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
        const parts = source.flatMap((char) => [...char.normalize(decomposition)].map((part, i) => ({ part, isFirst: i === 0, isUsed: false })));
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

/** Whether the next character may change together with those before it. @param {string} before @param {string} next @param {string} form */
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
