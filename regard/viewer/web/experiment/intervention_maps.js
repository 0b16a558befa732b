/** Attention maps after interventions. */

import { computeWeights } from "../weights/maths.js";
import { AttentionMap } from "../weights/maps.js";

/** @typedef {{attention: string, head: number, row: number, weights: number[]}} EditedRow a row with edited weights */

/** The map of a modified head, optionally with an edited row. */
export class InterventionMap extends AttentionMap {
  /** @param {import("../weights/maths.js").Head} head @param {any} kernel @param {EditedRow | null} editedRow */
  constructor(head, kernel, editedRow) {
    super(head.T, head.S);
    this.head = head;
    this.kernel = kernel;
    this.editedRow = editedRow;
  }

  readRows(rows, from, to, out) {
    if (this.isMaterialized) super.readRows(rows, from, to, out);
    else this.computeRows(rows, from, to, out);
  }

  computeRows(rows, from, to, out) {
    this.kernel.computeRows(this.head, rows, from, to, out);
    const at = this.editedRow ? rows.indexOf(this.editedRow.row) : -1;
    if (at >= 0) out.set(this.editedRow.weights.slice(from, to), at * (to - from));
  }

  computeExactRow(row) {
    if (this.editedRow?.row === row) return Float64Array.from(this.editedRow.weights);
    return computeWeights(this.head, row, new Float64Array(this.columns));
  }
}

/** A map of fixed numbers. */
export class FixedMap extends AttentionMap {
  /** @param {number[][]} values */
  constructor(values) {
    super(values.length, values[0]?.length ?? 0);
    this.values = values;
  }

  computeRows(rows, from, to, out) {
    rows.forEach((row, i) => out.set(this.values[row].slice(from, to), i * (to - from)));
  }

  computeExactRow(row) {
    return Float64Array.from(this.values[row]);
  }
}
