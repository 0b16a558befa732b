/** Tokens of single bytes, named `<0x41>`: the fallback for characters that are not in the vocabulary. */

/** The ids of the UTF-8 bytes of a text; null if one has no token. @param {string} text @param {Map<string, number>} ids @returns {number[] | null} */
export function byteIds(text, ids) {
  const found = Array.from(new TextEncoder().encode(text), (byte) => ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`));
  return found.includes(undefined) ? null : found;
}
