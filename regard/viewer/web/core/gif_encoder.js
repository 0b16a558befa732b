/** Encoder of animated GIF files (GIF89a): one palette of up to 256 colors for all frames, LZW compression. No DOM. */

/** @typedef {{data: Uint8ClampedArray, duration: number}} Frame RGBA pixels, and the duration in milliseconds */

/** Colors are grouped by their leading five bits per channel. @param {Uint8ClampedArray} data @param {number} at */
const groupOf = (data, at) => ((data[at] >> 3) << 10) | ((data[at + 1] >> 3) << 5) | (data[at + 2] >> 3);

/**
 * The palette of the most frequent groups of colors, each with the mean of its colors, and the index of each group.
 * @param {Frame[]} frames @returns {{colors: number[][], index: Uint8Array}}
 */
export function choosePalette(frames) {
  const sums = new Float64Array(4 * 32768);
  for (const { data } of frames) {
    for (let at = 0; at < data.length; at += 4) {
      const group = 4 * groupOf(data, at);
      for (let channel = 0; channel < 3; channel++) sums[group + channel] += data[at + channel];
      sums[group + 3] += 1;
    }
  }
  const used = Array.from({ length: 32768 }, (_, group) => group).filter((group) => sums[4 * group + 3] > 0);
  used.sort((a, b) => sums[4 * b + 3] - sums[4 * a + 3]);
  const mean = (/** @type {number} */ group) => [0, 1, 2].map((channel) => Math.round(sums[4 * group + channel] / sums[4 * group + 3]));
  const colors = used.slice(0, 256).map(mean);
  const index = new Uint8Array(32768);
  used.forEach((group, i) => {
    if (i < colors.length) return (index[group] = i);
    const [r, g, b] = mean(group);
    let best = Infinity;
    colors.forEach((color, k) => {
      const distance = (color[0] - r) ** 2 + (color[1] - g) ** 2 + (color[2] - b) ** 2;
      if (distance < best) [best, index[group]] = [distance, k];
    });
  });
  return { colors, index };
}

/** LZW codes of palette indices, as bytes with variable code sizes from 9 bits. @param {Uint8Array} pixels @returns {number[]} */
function compress(pixels) {
  const [clear, end] = [256, 257];
  const bytes = [];
  let [buffer, bits, size] = [0, 0, 9];
  const write = (/** @type {number} */ code) => {
    buffer |= code << bits;
    bits += size;
    while (bits >= 8) {
      bytes.push(buffer & 255);
      buffer >>>= 8;
      bits -= 8;
    }
  };
  /** Codes of known sequences, by the code of their beginning and their last pixel. @type {Map<number, number>} */
  let codes = new Map();
  let next = end + 1;
  write(clear);
  let prefix = pixels[0];
  for (let i = 1; i < pixels.length; i++) {
    const key = (prefix << 8) | pixels[i];
    const known = codes.get(key);
    if (known !== undefined) {
      prefix = known;
      continue;
    }
    write(prefix);
    if (next < 4096) {
      if (next === 1 << size) size += 1;
      codes.set(key, next++);
    } else {
      write(clear);
      [codes, next, size] = [new Map(), end + 1, 9];
    }
    prefix = pixels[i];
  }
  write(prefix);
  if (next === 1 << size && size < 12) size += 1;
  write(end);
  if (bits) bytes.push(buffer & 255);
  return bytes;
}

/** Encodes frames as an endless animation. @param {Frame[]} frames @param {number} width @param {number} height @returns {Uint8Array} */
export function encodeGif(frames, width, height) {
  const { colors, index } = choosePalette(frames);
  const short = (/** @type {number} */ n) => [n & 255, n >> 8];
  const text = (/** @type {string} */ characters) => [...characters].map((character) => character.charCodeAt(0));
  const palette = Array.from({ length: 256 }, (_, i) => colors[i] ?? [0, 0, 0]).flat();
  /** @type {number[][]} */
  const parts = [[...text("GIF89a"), ...short(width), ...short(height), 0xf7, 0, 0, ...palette], [0x21, 0xff, 11, ...text("NETSCAPE2.0"), 3, 1, 0, 0, 0]];
  for (const { data, duration } of frames) {
    const pixels = Uint8Array.from({ length: width * height }, (_, i) => index[groupOf(data, 4 * i)]);
    parts.push([0x21, 0xf9, 4, 4, ...short(Math.round(duration / 10)), 0, 0], [0x2c, 0, 0, 0, 0, ...short(width), ...short(height), 0, 8]);
    const bytes = compress(pixels);
    for (let i = 0; i < bytes.length; i += 255) parts.push([Math.min(255, bytes.length - i), ...bytes.slice(i, i + 255)]);
    parts.push([0]);
  }
  parts.push([0x3b]);
  const file = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    file.set(part, at);
    at += part.length;
  }
  return file;
}
