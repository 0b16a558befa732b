/** The numbers of a step that are displayed. */

import { bidiIsolate, makeVisible } from "../core/tokens.js";

/**
 * A row of displayed numbers: their indices in the step's output, their names, and how they are displayed.
 * @typedef {{subject: string, indices: number[], names: string[] | null, display: "cells" | "bars", total: number, first: number}} Row
 */

/** Maximum number of bars for the tokens of an image. */
const MAX_BARS = 10;

/**
 * The displayed numbers of a step: the row of the selected token in the selected head.
 * @param {import("./steps_view.js").StepsView} view @param {number} n index of the step @returns {Row}
 */
export function displayedRow(view, n) {
  const step = view.traceHeader.steps[n];
  const { shape, axes } = step.output;
  const { head, heads } = view.selected;
  // The row runs along the last axis; for an image, whose spatial axes come last, along the channels.
  const rowAxis = axes[0] === "channels" && axes.length > 1 ? 0 : axes.length - 1;
  let [start, stride, token, which, tokenSide] = [0, 1, "", "", ""];
  for (let axis = axes.length - 1, size = 1; axis >= 0; size *= shape[axis--]) {
    if (axis === rowAxis) {
      stride = size;
      continue;
    }
    const side = axes[axis];
    let at = 0;
    if (side in view.traceHeader.sides) {
      at = Math.min(view.selectedToken(side), shape[axis] - 1);
      token = bidiIsolate(view.tokenName(side, at));
      tokenSide = side;
    } else if (side === "heads") {
      // Grouped-query attention: several query heads share a key and value head.
      at = shape[axis] >= heads ? Math.min(head, shape[axis] - 1) : Math.floor((head * shape[axis]) / heads);
      if (shape[axis] > 1) which = `head ${at}`;
    }
    start += at * size;
  }
  let subject = [token, which].filter(Boolean).join(", ");
  const width = shape[rowAxis];
  let columns = Array.from({ length: width }, (_, i) => i);
  const last = axes[rowAxis];
  let names = last in view.traceHeader.sides ? view.traceHeader.sides[last].tokens.map(makeVisible) : null;
  const { data } = view.trace.value(n);
  const descending = (/** @type {number} */ a, /** @type {number} */ b) => data[start + b * stride] - data[start + a * stride];
  if (last === "vocabulary") {
    // The ten most probable tokens.
    columns = columns.sort(descending).slice(0, 10);
    names = columns.map((i) => makeVisible(view.traceHeader.names[i] ?? `token ${i}`));
    if (subject && tokenSide && !view.host.scene.image) subject = `after ${subject}`;
  }
  const display = step.op === "softmax" ? "bars" : "cells";
  if (display === "bars" && view.host.scene.image && names && columns.length > MAX_BARS) {
    // Of many patches, list only the largest; all of them are painted.
    const all = names;
    columns = columns.sort(descending).slice(0, MAX_BARS);
    names = columns.map((i) => all[i]);
  }
  const indices = columns.map((i) => start + i * stride);
  const largest = indices.reduce((best, at, i) => (data[at] > data[indices[best]] ? i : best), 0);
  return { subject, indices, names, display, total: width, first: names ? largest : 0 };
}
