/** Regular expressions of tokenizer files (Oniguruma) as JavaScript's. */

/** The pattern of a tokenizer file. @param {{Regex?: string, String?: string}} pattern */
export function compilePattern({ Regex, String: literal }) {
  if (Regex === undefined) return new RegExp(literal.replace(/[.*+?^${}()|[\]\\/-]/g, (char) => (char === "-" ? "\\x2d" : `\\${char}`)), "gu");
  return new RegExp(translatePattern(Regex), "gu");
}

/** @param {string} pattern @returns {string} */
export function translatePattern(pattern) {
  // (?m): a dot matches newlines too. Lines end at \n only; ^ and $ match at every line.
  const matchesNewlines = pattern.startsWith("(?m)");
  const text = (matchesNewlines ? pattern.slice(4) : pattern).replace(/\(\?i:([^)]*)\)/g, (_, inside) => `(?:${inside.replace(/[a-z]/gi, (/** @type {string} */ letter) => `[${letter.toLowerCase()}${letter.toUpperCase()}]`)})`);
  const outside = { "^": "(?<![^\\n])", $: "(?![^\\n])", ".": matchesNewlines ? "[\\s\\S]" : "[^\\n]" };
  const escapes = { s: "\\p{White_Space}", S: "\\P{White_Space}", d: "\\p{Nd}", z: "(?![\\s\\S])", A: "(?<![\\s\\S])", h: "[0-9a-fA-F]" };
  let out = "";
  let isClass = false;
  for (let i = 0; i < text.length; i++) {
    const char = text[i];
    if (char === "\\") {
      const next = text[++i];
      out += escapes[next] ?? (/[\p{L}\p{N}^$\\.*+?()[\]{}|/]/u.test(next) ? `\\${next}` : isClass && next === "-" ? "\\-" : next);
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
