/**
 * Attention maps: the weights of heads, computed from q and k on demand, and labels of heads by what they attend to.
 */

import { Axis } from "../core/tokens.js";
import { Kernel } from "./kernel.js";
import {
  addMergedRow,
  argmax,
  argmaxAbs,
  computeWeights,
  evenness,
  extractHead,
  mutualInformation,
  readBlob,
} from "./maths.js";

/* Labels of heads: what a head mostly attends to, measured on its map. Definitions: docs/translating.md. */

/**
 * @typedef {{label: string, share: number, information: number}} HeadLabel `information`: mutual information of rows
 * and columns in bits
 */

/**
 * The share of the weight from which a pattern describes a head before alignment and entropy do, and the minimum ratio
 * of any share to that of uniform attention.
 */
const MIN_SHARE = 0.5;
const MIN_RATIO = 1.5;
/** Entropy, as a fraction of that of uniform attention, from which a head is diffuse. */
export const MIN_DIFFUSE = 0.85;
/** Mutual information, as a fraction of its maximum, from which a cross-attention head is an alignment. */
const MIN_ALIGNMENT = 0.5;

/** The labels in the order of the legend: name, short name, and the description of a head with a percentage. */
export const HEAD_LABELS = {
  alignment: { short: "align", text: "aligns each output token with one source token" },
  previous: { name: "previous token", short: "prev", text: "attends to the previous token" },
  next: { name: "next token", short: "next", text: "attends to the next token" },
  same: { name: "same token", short: "same", text: "attends to the token itself, or to the same token elsewhere" },
  first: {
    name: "first token",
    short: "first",
    text: "attends to the first token, which often means “nothing to add”",
  },
  punctuation: { short: "punct", text: "attends to punctuation and special tokens" },
  diffuse: { short: "diffuse", text: "spreads its weight almost evenly over all tokens" },
  none: { name: "no pattern", short: "", text: "follows none of the patterns that are measured" },
};

/**
 * Whether attention of this label follows from positions alone, not from the content of a sentence.
 * @param {HeadLabel} label
 */
export const isPositional = ({ label, share }) =>
  ["previous", "next", "same", "first", "diffuse"].includes(label) && share >= MIN_SHARE;

/** @param {string} label */
export const labelName = (label) => HEAD_LABELS[label].name ?? label;

/** The name of a label with the measured share, such as "previous token 38%". @param {HeadLabel} label */
export const describeLabel = ({ label, share }) =>
  label === "none" ? labelName(label) : `${labelName(label)} ${Math.round(100 * share)}%`;

/** Whether a token is punctuation or special. @param {string} token */
export function isPunctuation(token) {
  return /^[\p{P}\p{S}\s]+$/u.test(token) || /^(<.*>|\[[A-Z]+\]|<\|.*\|>)$/.test(token);
}

/**
 * Labels a head from its map, or from a sample of the rows of a long one.
 * @param {AttentionMap} map @param {string[]} rowTokens @param {string[]} columnTokens
 * @param {string} kind of the attention
 * @returns {HeadLabel}
 */
function labelHead(map, rowTokens, columnTokens, kind) {
  const { columns } = map;
  const rows = map.sampleRows();
  const cells = new Float32Array(rows.length * columns);
  map.readRows(rows, 0, columns, cells);
  const information = mutualInformation(cells, rows.length, columns);
  const isSelf = kind !== "cross";
  const punctuation = columnTokens.map((token, s) => s > 0 && isPunctuation(token));
  const patterns = isSelf ? ["previous", "next", "same", "first", "punctuation"] : ["first", "punctuation"];
  /** Weight and weight under uniform attention of each pattern, and the number of rows in which it is possible. */
  const sums = Object.fromEntries(patterns.map((name) => [name, { weight: 0, uniform: 0, rows: 0 }]));
  let attendingRows = 0;
  rows.forEach((t, i) => {
    const row = cells.subarray(i * columns, (i + 1) * columns);
    const count = row.reduce((sum, weight) => sum + Number(weight > 0), 0);
    // A row with a single key shows nothing.
    if (count < 2) return;
    attendingRows += 1;
    const here = t + columns - map.rows;
    /** @param {string} name @param {(s: number) => boolean} matches */
    const add = (name, matches) => {
      let [weight, possible] = [0, 0];
      for (let s = 0; s < columns; s++) {
        if (row[s] > 0 && matches(s)) [weight, possible] = [weight + row[s], possible + 1];
      }
      if (!possible) return;
      const sum = sums[name];
      [sum.weight, sum.uniform, sum.rows] = [sum.weight + weight, sum.uniform + possible / count, sum.rows + 1];
    };
    if (isSelf) {
      add("previous", (s) => s === here - 1);
      add("next", (s) => s === here + 1);
      add("same", (s) => s === here || columnTokens[s] === rowTokens[t]);
    }
    if (!isSelf || here > 0) add("first", (s) => s === 0);
    add("punctuation", (s) => punctuation[s]);
  });
  const best = patterns
    .map((name) => ({
      name,
      share: sums[name].weight / Math.max(1, sums[name].rows),
      uniform: sums[name].uniform / Math.max(1, sums[name].rows),
      rows: sums[name].rows,
    }))
    .filter(
      ({ share, uniform, rows: found }) => found >= attendingRows / 2 && found > 0 && share >= MIN_RATIO * uniform,
    )
    .sort((a, b) => b.share - a.share)[0];
  if (best?.share >= MIN_SHARE) return { label: best.name, share: best.share, information };
  const aligned = information / Math.log2(Math.max(2, Math.min(rows.length, columns)));
  if (!isSelf && aligned >= MIN_ALIGNMENT) return { label: "alignment", share: aligned, information };
  const spread = evenness(rows.map((_, i) => cells.subarray(i * columns, (i + 1) * columns)));
  if (spread >= MIN_DIFFUSE) return { label: "diffuse", share: spread, information };
  return { label: best?.name ?? "none", share: best?.share ?? 0, information };
}

/* Attention maps of heads, of the mean over heads and of words, for any length. */

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("../core/state.js").Zoom} Zoom */
/** @typedef {import("./maths.js").Head} Head */

/** Maps of up to this number of cells are computed at once and kept; larger ones are computed row by row. */
const MAX_MATERIALIZED_CELLS = 2 ** 20;
/** Total number of cells of maps that are kept. */
const MAX_CACHED_CELLS = 24 * 2 ** 20;
/** Number of rows from which the measures of a large map are estimated. */
const SAMPLED_ROWS = 96;

/** An attention map. Rows are computed on demand. */
export class AttentionMap {
  /** @param {number} rows @param {number} columns */
  constructor(rows, columns) {
    this.rows = rows;
    this.columns = columns;
    /** @type {Map<number, Float64Array>} */
    this.exactRows = new Map();
    /** @type {Float32Array | null} */
    this.cells = null;
    /** Whether there are negative values, as in differences: then values are compared by magnitude. */
    this.signed = false;
  }

  /** Whether all cells of the map are kept in memory. */
  get isMaterialized() {
    return this.rows * this.columns <= MAX_MATERIALIZED_CELLS;
  }

  /**
   * Writes the weights of some rows for the columns from..to, in single precision.
   * @param {number[]} rows @param {number} from @param {number} to @param {Float32Array} out
   */
  readRows(rows, from, to, out) {
    const cells = this.allCells();
    const { columns } = this;
    rows.forEach((row, i) => out.set(cells.subarray(row * columns + from, row * columns + to), i * (to - from)));
  }

  /** All cells of a map that is kept in memory. @returns {Float32Array} */
  allCells() {
    if (!this.cells) {
      this.cells = new Float32Array(this.rows * this.columns);
      this.computeRows(
        Array.from({ length: this.rows }, (_, i) => i),
        0,
        this.columns,
        this.cells,
      );
    }
    return this.cells;
  }

  /** A row in double precision. @param {number} row @returns {Float64Array} */
  exactRow(row) {
    if (!this.exactRows.has(row)) {
      if (this.exactRows.size >= 64) this.exactRows.clear();
      this.exactRows.set(row, this.computeExactRow(row));
    }
    return this.exactRows.get(row);
  }

  /**
   * Row and column of the largest weight in a block.
   * @param {[number, number]} rows @param {[number, number]} columns @returns {[number, number]}
   */
  argmaxIn(rows, columns) {
    const width = columns[1] - columns[0];
    const list = Array.from({ length: rows[1] - rows[0] }, (_, i) => rows[0] + i);
    const out = new Float32Array(list.length * width);
    this.readRows(list, columns[0], columns[1], out);
    const best = this.signed ? argmaxAbs(out) : argmax(out);
    return [rows[0] + Math.floor(best / width), columns[0] + (best % width)];
  }

  /** The rows from which measures are computed: all, or an evenly spaced sample. @returns {number[]} */
  sampleRows() {
    const count = this.isMaterialized ? this.rows : Math.min(this.rows, SAMPLED_ROWS);
    return Array.from({ length: count }, (_, i) => Math.floor(((i + 0.5) * this.rows) / count));
  }

  /** @param {number[]} _rows @param {number} _from @param {number} _to @param {Float32Array} _out */
  computeRows(_rows, _from, _to, _out) {
    throw new Error("AttentionMap.computeRows is abstract.");
  }

  /** @param {number} _row @returns {Float64Array} */
  computeExactRow(_row) {
    throw new Error("AttentionMap.computeExactRow is abstract.");
  }
}

/** The map of one head. */
class HeadMap extends AttentionMap {
  /** @param {Head} head @param {Kernel} kernel */
  constructor(head, kernel) {
    super(head.T, head.S);
    this.head = head;
    this.kernel = kernel;
  }

  readRows(rows, from, to, out) {
    if (this.isMaterialized) super.readRows(rows, from, to, out);
    else this.computeRows(rows, from, to, out);
  }

  computeRows(rows, from, to, out) {
    this.kernel.computeRows(this.head, rows, from, to, out);
  }

  computeExactRow(row) {
    return computeWeights(this.head, row, new Float64Array(this.columns));
  }
}

/** The mean of several maps. */
class MeanMap extends AttentionMap {
  /** @param {AttentionMap[]} parts */
  constructor(parts) {
    super(parts[0].rows, parts[0].columns);
    this.parts = parts;
  }

  readRows(rows, from, to, out) {
    if (this.isMaterialized) super.readRows(rows, from, to, out);
    else this.computeRows(rows, from, to, out);
  }

  computeRows(rows, from, to, out) {
    const part = new Float32Array(rows.length * (to - from));
    out.fill(0, 0, part.length);
    for (const one of this.parts) {
      one.readRows(rows, from, to, part);
      for (let i = 0; i < part.length; i++) out[i] += part[i] / this.parts.length;
    }
  }

  computeExactRow(row) {
    const mean = new Float64Array(this.columns);
    for (const one of this.parts) one.exactRow(row).forEach((weight, s) => (mean[s] += weight / this.parts.length));
    return mean;
  }
}

/** A map of tokens merged to words: columns of a word are summed, rows of a word averaged. */
class WordMap extends AttentionMap {
  /** @param {AttentionMap} tokens @param {Axis} rows @param {Axis} columns */
  constructor(tokens, rows, columns) {
    super(rows.length, columns.length);
    this.tokens = tokens;
    this.rowStarts = rows.starts;
    this.columnStarts = columns.starts;
  }

  get isMaterialized() {
    return this.tokens.isMaterialized;
  }

  readRows(rows, from, to, out) {
    if (this.isMaterialized) super.readRows(rows, from, to, out);
    else this.computeRows(rows, from, to, out);
  }

  computeRows(rows, from, to, out) {
    const [first, end] = [this.columnStarts[from], this.columnStarts[to]];
    const [wide, width] = [end - first, to - from];
    out.fill(0, 0, rows.length * width);
    /** @type {number[]} */
    const tokens = [];
    /** For each token, the index of its row and its share in it. @type {[number, number][]} */
    const parts = [];
    rows.forEach((word, i) => {
      const [begin, stop] = [this.rowStarts[word], this.rowStarts[word + 1]];
      for (let t = begin; t < stop; t++) {
        tokens.push(t);
        parts.push([i, 1 / (stop - begin)]);
      }
    });
    const block = new Float32Array(16 * wide);
    for (let at = 0; at < tokens.length; at += 16) {
      const some = tokens.slice(at, at + 16);
      this.tokens.readRows(some, first, end, block);
      some.forEach((_, j) => {
        const [row, share] = parts[at + j];
        const into = out.subarray(row * width, (row + 1) * width);
        addMergedRow(block.subarray(j * wide, (j + 1) * wide), first, this.columnStarts, from, to, share, into);
      });
    }
  }

  computeExactRow(word) {
    const out = new Float64Array(this.columns);
    const [begin, stop] = [this.rowStarts[word], this.rowStarts[word + 1]];
    for (let t = begin; t < stop; t++) {
      addMergedRow(this.tokens.exactRow(t), 0, this.columnStarts, 0, this.columns, 1 / (stop - begin), out);
    }
    return out;
  }
}

/** The attentions of a scene: their axes and maps. */
export class Attentions {
  /** @param {import("../core/host.js").Host} host @param {Kernel} [kernel] */
  constructor(host, kernel = new Kernel()) {
    this.host = host;
    this.scene = host.scene;
    this.kernel = kernel;
    /** @type {Map<string, any>} */
    this.byName = new Map(this.scene.attentions.map((one) => [one.name, one]));
    /** @type {Map<string, any>} */
    this.arrays = new Map();
    /** @type {Map<string, AttentionMap>} */
    this.maps = new Map();
    /** @type {Map<string, Axis>} */
    this.axes = new Map();
    /** Whether labels are entries of the vocabulary, such as ##ing. */
    this.showsEntries = false;
    /** @type {Map<string, HeadLabel>} */
    this.labels = new Map();
  }

  /** Whether there is such a head. @param {HeadRef} ref */
  has(ref) {
    const attention = this.byName.get(ref?.attention);
    return attention !== undefined && (ref.head === "mean" ? attention.heads > 1 : ref.head < attention.heads);
  }

  /** @param {string} side @param {boolean} merged */
  axis(side, merged) {
    const key = `${side} ${merged} ${this.showsEntries}`;
    if (!this.axes.has(key)) this.axes.set(key, new Axis(side, this.scene.sides[side], merged, this.showsEntries));
    return this.axes.get(key);
  }

  /** The two axes of an attention. @param {string} name @param {boolean} merged */
  axesOf(name, merged) {
    const { rows, columns } = this.byName.get(name);
    return { rows: this.axis(rows, merged), columns: this.axis(columns, merged) };
  }

  /** Whether the arrays of an attention are loaded. @param {string} name */
  isLoaded(name) {
    return this.arrays.has(name);
  }

  /** Loads the arrays of an attention. @param {string} name */
  async load(name) {
    if (this.arrays.has(name)) return;
    const attention = this.byName.get(name);
    /** @type {any} */
    const array = {};
    await Promise.all(
      ["q", "k", "w", "bias"].map(async (part) => {
        const blob = attention[part];
        array[part] = blob ? readBlob(await this.host.blob(blob.at), blob) : null;
      }),
    );
    this.arrays.set(name, array);
  }

  /** The label of a head whose attention is loaded; null for the mean of heads. @param {HeadRef} ref */
  labelOf(ref) {
    if (ref.head === "mean") return null;
    const key = `${ref.attention}:${ref.head}`;
    if (!this.labels.has(key)) {
      const { rows, columns, kind } = this.byName.get(ref.attention);
      const { sides } = this.scene;
      this.labels.set(key, labelHead(this.map(ref, false), sides[rows].tokens, sides[columns].tokens, kind));
    }
    return this.labels.get(key);
  }

  /**
   * The map of a head whose attention is loaded. @param {HeadRef} ref @param {boolean} merged @returns {AttentionMap}
   */
  map(ref, merged) {
    const key = `${ref.attention}:${ref.head}:${merged}`;
    let map = this.maps.get(key);
    // Least recently used maps come first and are evicted first.
    if (map) this.maps.delete(key);
    else map = this.createMap(ref, merged);
    this.maps.set(key, map);
    let cells = 0;
    for (const [other, one] of [...this.maps].reverse()) {
      cells += one.cells?.length ?? 0;
      if (cells > MAX_CACHED_CELLS && one !== map) this.maps.delete(other);
    }
    return map;
  }

  /** @param {HeadRef} ref @param {boolean} merged @returns {AttentionMap} */
  createMap({ attention: name, head }, merged) {
    if (merged) {
      const { rows, columns } = this.axesOf(name, true);
      return new WordMap(this.map({ attention: name, head }, false), rows, columns);
    }
    const attention = this.byName.get(name);
    if (head !== "mean") return new HeadMap(extractHead(attention, this.arrays.get(name), head), this.kernel);
    return new MeanMap(
      Array.from({ length: attention.heads }, (_, h) => this.map({ attention: name, head: h }, false)),
    );
  }
}

/** The range of an entire map. @param {{rows: number, columns: number}} map @returns {Zoom} */
export function fullRange(map) {
  return { rows: [0, map.rows], columns: [0, map.columns] };
}
