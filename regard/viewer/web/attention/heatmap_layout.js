/** The layout of a heat map. */

import { fullRange } from "../weights/maps.js";
import { truncate } from "../core/tokens.js";
import { textWidth } from "./svg_text.js";

/** @typedef {import("./figure_data.js").FigureData} FigureData */
/** @typedef {import("../core/tokens.js").Axis} Axis */

/** Minimum and maximum size of a labeled cell, in pixels. */
const MIN_LABELED_CELL = 13;
const MAX_CELL = 68;
/** Maximum ratio of the width of a cell to its height: wide cells fill a wide figure. */
const MAX_CELL_RATIO = 2.4;
/** Up to this number of rows, every row is labeled, even if the page has to scroll. */
const MAX_LABELED_ROWS = 72;
/** Maximum length of a label. */
export const MAX_LABEL_LENGTH = 22;

/** Rounds a step of axis ticks up to 1, 2 or 5 times a power of ten. @param {number} minimum */
export function niceStep(minimum) {
  const ten = 10 ** Math.floor(Math.log10(Math.max(1, minimum)));
  return [1, 2, 5, 10].map((n) => n * ten).find((step) => step >= minimum) ?? 10 * ten;
}

/**
 * Computes the layout of a heat map from the available space, the number of cells and the widths of their labels.
 * @param {FigureData} figureData @param {HTMLElement} element
 */
export function computeGeometry(figureData, element) {
  const { rows, columns, map } = figureData;
  const zoom = figureData.zoom ?? fullRange(map);
  const [rowCount, columnCount] = [zoom.rows[1] - zoom.rows[0], zoom.columns[1] - zoom.columns[0]];
  const availableWidth = Math.max(220, element.clientWidth);
  // The height below the figure's top edge, within limits.
  const heightBelow = window.innerHeight - element.getBoundingClientRect().top - window.scrollY - 130;
  const maxHeight = Math.max(320, 0.56 * window.innerHeight, Math.min(heightBelow, 0.8 * window.innerHeight));
  const family = getComputedStyle(element).fontFamily;
  const fontOf = (/** @type {number} */ size) => `${size}px ${family}`;
  /** @param {Axis} axis @param {[number, number]} range @param {number} size */
  const widestLabel = (axis, range, size) =>
    Math.max(0, ...axis.labels.slice(...range).map((text) => textWidth(truncate(text, MAX_LABEL_LENGTH), fontOf(size))));
  // Try to label every cell; if the cells become too small, label some of them.
  if (rowCount <= MAX_LABELED_ROWS && columnCount * MIN_LABELED_CELL <= availableWidth) {
    let size = 14;
    for (let tries = 0; tries < 3; tries++) {
      const left = widestLabel(rows, zoom.rows, size) + 14;
      const widestColumnLabel = widestLabel(columns, zoom.columns, size);
      const flat = (/** @type {number} */ cell) => widestColumnLabel <= cell - 6;
      const slope = Math.SQRT1_2 * widestColumnLabel + 6;
      const tall = Math.min(MAX_CELL, Math.max(16, maxHeight / rowCount));
      const wide = Math.min(MAX_CELL_RATIO * tall, (availableWidth - left - 2) / columnCount);
      const isSloped = !flat(wide);
      const fitted = Math.floor(isSloped ? Math.min(wide, (availableWidth - left - slope) / columnCount) : wide);
      const high = Math.floor(Math.min(tall, Math.max(fitted, MIN_LABELED_CELL)));
      if (fitted >= MIN_LABELED_CELL) {
        const fits = Math.max(10, Math.min(14, Math.floor(Math.min(fitted, high) * 0.78)));
        if (fits < size) {
          size = fits;
          continue;
        }
        const top = isSloped ? slope + size : size + 14;
        const rtl = columns.rtl && isSloped ? slope : 0;
        return {
          zoom,
          rowCount,
          columnCount,
          cellWidth: fitted,
          cellHeight: high,
          isLabeled: true,
          isSloped,
          size,
          left: left + rtl,
          top,
          width: columnCount * fitted,
          height: rowCount * high,
          figureSize: { width: left + columnCount * fitted + (isSloped ? slope : 2), height: top + rowCount * high + 2 },
        };
      }
      break;
    }
  }
  const left = Math.min(112, 0.24 * availableWidth);
  const top = 74;
  let width = availableWidth - left - 2;
  let height = Math.max(140, Math.min(maxHeight, (width * rowCount) / columnCount));
  width = Math.min(width, Math.max(140, (height * columnCount) / rowCount));
  if (rowCount * MIN_LABELED_CELL < height) height = Math.max(60, Math.min(height, rowCount * MAX_CELL));
  return {
    zoom,
    rowCount,
    columnCount,
    cellWidth: width / columnCount,
    cellHeight: height / rowCount,
    isLabeled: false,
    isSloped: false,
    size: 12,
    left,
    top,
    width,
    height,
    figureSize: { width: left + width + 2, height: top + height + 2 },
  };
}
