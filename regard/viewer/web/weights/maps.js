/** Attention maps of heads, of the mean over heads and of words; rasters of their parts, for maps of any length. */

import {
  addMergedRow,
  rowEntropy,
  argmaxAbs,
  argmax,
  extractHead,
  rowOverlap,
  maxAbsPool,
  maxPool,
  readBlob,
  computeWeights,
} from "./maths.js";
import { Kernel } from "./kernel.js";
import { Axis } from "../core/tokens.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("../core/state.js").Zoom} Zoom */
/** @typedef {import("./maths.js").Head} Head */

/** Maps of up to this number of cells are computed at once and kept; larger ones are computed row by row. */
export const MAX_MATERIALIZED_CELLS = 2 ** 20;
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

  /** @param {number[]} rows @param {number} from @param {number} to @param {Float32Array} out */
  computeRows(rows, from, to, out) {
    throw new Error("Weights.compute is abstract.");
  }

  /** @param {number} row @returns {Float64Array} */
  computeExactRow(row) {
    throw new Error("Weights.computeExactly is abstract.");
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
  }

  /** Whether there is such a head. @param {HeadRef} ref */
  has(ref) {
    const attention = this.byName.get(ref?.attention);
    return attention !== undefined && (ref.head === "mean" ? attention.heads > 1 : ref.head < attention.heads);
  }

  /** @param {string} side @param {boolean} merged */
  axis(side, merged) {
    const key = `${side} ${merged}`;
    if (!this.axes.has(key)) this.axes.set(key, new Axis(side, this.scene.sides[side], merged));
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

  /** The map of a head whose attention is loaded. @param {HeadRef} ref @param {boolean} merged @returns {AttentionMap} */
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

/**
 * A raster of a part of a map, max-pooled in blocks. Rows of a large map are computed step by step in an interleaved order,
 * so that a coarse raster is available at once and becomes exact: its values can only grow.
 */
export class Raster {
  /**
   * @param {AttentionMap} map @param {Zoom} zoom @param {number} maxHeight maximum height in blocks @param {number} wide maximum width
   * @param {Raster | null} [previous] another raster of the map, whose values are shown until the new ones are computed
   */
  constructor(map, zoom, maxHeight, wide, previous = null) {
    this.map = map;
    this.zoom = zoom;
    const [rows, columns] = [zoom.rows[1] - zoom.rows[0], zoom.columns[1] - zoom.columns[0]];
    /** Rows and columns per block. */
    this.block = { rows: Math.ceil(rows / Math.max(1, maxHeight)), columns: Math.ceil(columns / Math.max(1, wide)) };
    this.height = Math.ceil(rows / this.block.rows);
    this.width = Math.ceil(columns / this.block.columns);
    this.values = new Float32Array(this.height * this.width);
    /** The number of computed rows of each row of blocks. */
    this.computedRows = new Uint16Array(this.height);
    this.computedRowCount = 0;
    this.isSeeded = previous !== null;
    if (previous) this.copyFrom(previous);
    this.order = this.rasterOrder();
    this.visit = this.order.next();
  }

  get isComplete() {
    return this.visit.done === true;
  }

  /** Whether every block has at least one computed row. */
  get isCovered() {
    return this.computedRowCount >= this.height;
  }

  /** The computed fraction of the rows. */
  get completedFraction() {
    return this.computedRowCount / (this.zoom.rows[1] - this.zoom.rows[0]);
  }

  /** @param {Raster} previous */
  copyFrom(previous) {
    for (let y = 0; y < this.height; y++) {
      const row = this.zoom.rows[0] + (y + 0.5) * this.block.rows;
      const from = Math.floor((row - previous.zoom.rows[0]) / previous.block.rows);
      if (from < 0 || from >= previous.height) continue;
      for (let x = 0; x < this.width; x++) {
        const column = this.zoom.columns[0] + (x + 0.5) * this.block.columns;
        const at = Math.floor((column - previous.zoom.columns[0]) / previous.block.columns);
        if (at >= 0 && at < previous.width) this.values[y * this.width + x] = previous.values[from * previous.width + at];
      }
    }
  }

  /**
   * The order in which rows of blocks are computed: every eighth, fourth, second, the rest; then the next row of each.
   */
  *rasterOrder() {
    for (let step = 8, first = true; step >= 1; step /= 2, first = false) {
      for (let y = 0; y < this.height; y += step) if (first || y % (2 * step) !== 0) yield y;
    }
    for (let round = 1; round < this.block.rows; round++) {
      for (let y = 0; y < this.height; y++) if (this.computedRows[y] < this.rowsOf(y)) yield y;
    }
  }

  /** The number of rows in a row of blocks. @param {number} y */
  rowsOf(y) {
    return Math.min(this.block.rows, this.zoom.rows[1] - this.zoom.rows[0] - y * this.block.rows);
  }

  /** Computes some more rows. Returns whether there are more to compute. @param {number} [count] @returns {boolean} */
  step(count = 16) {
    const { columns } = this.zoom;
    /** @type {number[]} */
    const ys = [];
    /** @type {number[]} */
    const rows = [];
    for (; ys.length < count && !this.visit.done; this.visit = this.order.next()) {
      const y = /** @type {number} */ (this.visit.value);
      const all = this.rowsOf(y);
      // Bit-reversed order, so that the first rows of a block are far apart.
      const nth = this.computedRows[y];
      const index = all === this.block.rows ? bitReversedIndex(nth, all) : nth;
      this.computedRows[y] += 1;
      ys.push(y);
      rows.push(this.zoom.rows[0] + y * this.block.rows + index);
    }
    const length = columns[1] - columns[0];
    const out = new Float32Array(rows.length * length);
    this.map.readRows(rows, columns[0], columns[1], out);
    ys.forEach((y, i) => {
      const into = this.values.subarray(y * this.width, (y + 1) * this.width);
      if (this.computedRows[y] === 1) into.fill(0);
      (this.map.signed ? maxAbsPool : maxPool)(out.subarray(i * length, (i + 1) * length), this.block.columns, into);
      // Until they are computed, the rows below show the values of this one.
      if (!this.isSeeded && !this.isCovered) {
        for (let below = y + 1; below < Math.min(y + 8, this.height) && this.computedRows[below] === 0; below++) {
          this.values.set(into, below * this.width);
        }
      }
    });
    this.computedRowCount += rows.length;
    return !this.isComplete;
  }

  /** Rows and columns of a block. @param {number} y @param {number} x @returns {Zoom} */
  blockAt(y, x) {
    const row = this.zoom.rows[0] + y * this.block.rows;
    const column = this.zoom.columns[0] + x * this.block.columns;
    return {
      rows: [row, Math.min(row + this.block.rows, this.zoom.rows[1])],
      columns: [column, Math.min(column + this.block.columns, this.zoom.columns[1])],
    };
  }
}

/**
 * The n-th of `count` indices in bit-reversed order, in which each is far from the ones before.
 * @param {number} n @param {number} count
 */
function bitReversedIndex(n, count) {
  let bits = 1;
  while (1 << bits < count) bits++;
  // Skip bit-reversed numbers that are out of range.
  let found = -1;
  for (let i = 0; found < n; i++) {
    let reversed = 0;
    for (let bit = 0; bit < bits; bit++) if (i & (1 << bit)) reversed |= 1 << (bits - 1 - bit);
    if (reversed < count) {
      found++;
      if (found === n) return reversed;
    }
  }
  return 0;
}

/**
 * Iterates over the sampled rows of maps of equal size, eight at a time, which the kernel computes together.
 * @param {AttentionMap[]} maps @param {(rows: Float32Array[]) => void} visitRows called with one row of each map
 */
function forSampledRows(maps, visitRows) {
  const { columns } = maps[0];
  const rows = maps[0].sampleRows();
  const blocks = maps.map(() => new Float32Array(8 * columns));
  for (let i = 0; i < rows.length; i += 8) {
    const some = rows.slice(i, i + 8);
    maps.forEach((map, m) => map.readRows(some, 0, columns, blocks[m]));
    some.forEach((_, j) => visitRows(blocks.map((block) => block.subarray(j * columns, (j + 1) * columns))));
  }
}

/** The mean entropy of a map's rows in bits, without rows that attend to nothing. @param {AttentionMap} map */
export function meanEntropy(map) {
  let [sum, attendingRows] = [0, 0];
  forSampledRows([map], ([row]) => {
    sum += rowEntropy(row);
    attendingRows += Number(row.some((weight) => weight > 0));
  });
  return sum / Math.max(1, attendingRows);
}

/**
 * The weight that two maps put on the same keys, averaged over rows.
 * @param {AttentionMap} a @param {AttentionMap} b
 */
export function meanOverlap(a, b) {
  let [sum, attendingRows] = [0, 0];
  forSampledRows([a, b], ([rowA, rowB]) => {
    sum += rowOverlap(rowA, rowB);
    attendingRows += Number(rowA.some((weight) => weight > 0) || rowB.some((weight) => weight > 0));
  });
  return sum / Math.max(1, attendingRows);
}
