/** Measures of attention maps. */

import { rowEntropy, rowOverlap } from "./maths.js";

/** @typedef {import("./maps.js").AttentionMap} AttentionMap */

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
