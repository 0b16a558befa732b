/** Max-pooled rasters of attention maps of any length. */

import { maxAbsPool, maxPool } from "./maths.js";

/** @typedef {import("../core/state.js").Zoom} Zoom */
/** @typedef {import("./maps.js").AttentionMap} AttentionMap */

/**
 * A raster of a part of a map, max-pooled in blocks. Rows of a large map are computed step by step in an interleaved
 * order,
 * so that a coarse raster is available at once and becomes exact: its values can only grow.
 */
export class Raster {
  /**
   * @param {AttentionMap} map @param {Zoom} zoom @param {number} maxHeight maximum height in blocks
   * @param {number} wide maximum width
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
        if (at >= 0 && at < previous.width)
          this.values[y * this.width + x] = previous.values[from * previous.width + at];
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
