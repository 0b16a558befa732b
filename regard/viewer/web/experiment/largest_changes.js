/** The largest changes of weights by an intervention. */

import { h, tokenText } from "../core/dom.js";
import { formatShort } from "../core/tokens.js";

/** @typedef {import("../core/tokens.js").Axis} Axis */
/** @typedef {import("../attention/figure_data.js").FigureData} FigureData */

/** Number of listed changes. */
const MAX_LISTED_CHANGES = 6;

/** Lists the largest changes of weights. @param {FigureData} beforeData @param {FigureData} afterData */
export function largestChanges(beforeData, afterData) {
  const same = (/** @type {Axis} */ a, /** @type {Axis} */ b) => a === b || a.labels.join("\n") === b.labels.join("\n");
  const isComparable = same(beforeData.rows, afterData.rows) && same(beforeData.columns, afterData.columns) && beforeData.map.isMaterialized;
  /** @type {{row: number, column: number, by: number}[]} */
  const largest = [];
  if (isComparable && beforeData.map !== afterData.map) {
    const [a, b] = [beforeData.map.allCells(), afterData.map.allCells()];
    for (let i = 0; i < a.length; i++) {
      const by = Math.abs(b[i] - a[i]);
      if (by < 5e-4 || (largest.length === MAX_LISTED_CHANGES && by <= largest[MAX_LISTED_CHANGES - 1].by)) continue;
      largest.push({ row: Math.floor(i / beforeData.map.columns), column: i % beforeData.map.columns, by });
      largest.sort((one, other) => other.by - one.by).splice(MAX_LISTED_CHANGES);
    }
  }
  let message = "Too many weights to compare.";
  if (beforeData.map === afterData.map) message = "No changes yet. Disable a component or edit an attention row.";
  else if (isComparable) message = "No weight of this head changed.";
  else if (beforeData.map.isMaterialized) message = "The tokens differ, so weights cannot be compared one by one.";
  return [
    h("h2", { class: "quiet" }, largest.length ? "Largest changes" : "Weights"),
    largest.length
      ? h(
          "ol",
          { class: "ranks pairs" },
          largest.map(({ row, column }) =>
            h(
              "li",
              {},
              h("span", { class: "name" }, tokenText(beforeData.rows.labels[row], beforeData.rows.rtl), h("span", { class: "to" }, " → "), tokenText(beforeData.columns.labels[column], beforeData.columns.rtl)),
              h("span", { class: "weight" }, `${formatShort(beforeData.map.exactRow(row)[column])} → ${formatShort(afterData.map.exactRow(row)[column])}`),
            ),
          ),
        )
      : h("p", { class: "secondary" }, message),
  ];
}
