/** The contents and events of a figure, and the visible part of its map. */

import { fullRange } from "../weights/maps.js";
import { bidiIsolate } from "../core/tokens.js";

/** @typedef {import("../core/state.js").Zoom} Zoom */
/** @typedef {import("../core/tokens.js").Axis} Axis */
/** @typedef {import("../weights/maps.js").AttentionMap} AttentionMap */
/** @typedef {{row: number | null, column: number | null}} Cell */
/**
 * The contents of a figure. `layers`: the maps of several heads with the indices of their colors; the first one is `map`.
 * @typedef {{map: AttentionMap, rows: Axis, columns: Axis, zoom: Zoom | null, colormap: any, name: string, rounded?: boolean,
 *   gold: ((row: number, column: number) => boolean) | null, isMasked: ((row: number, column: number) => boolean) | null,
 *   layers?: {map: AttentionMap, color: number, name: string}[] | null}} FigureData
 * The event handlers of a figure.
 * @typedef {{point: (cell: Cell | null) => void, pin: (cell: Cell) => void, zoom: (zoom: Zoom | null) => void}} FigureHandlers
 */

/**
 * The visible part after zooming around a cell, or null for the entire map.
 * @param {FigureData} figureData @param {Cell} cell @param {number} factor @returns {Zoom | null}
 */
export function zoomAround(figureData, cell, factor) {
  const now = figureData.zoom ?? fullRange(figureData.map);
  /** @param {[number, number]} range @param {number | null} at @param {number} all @returns {[number, number]} */
  const scaled = ([from, to], at, all) => {
    const length = Math.min(all, Math.max(Math.min(all, 6), Math.round((to - from) * factor)));
    const center = at === null ? (from + to) / 2 : at + 0.5;
    const start = Math.round(center - ((center - from) / (to - from)) * length);
    const begin = Math.max(0, Math.min(all - length, start));
    return [begin, begin + length];
  };
  const zoom = {
    rows: scaled(now.rows, cell.row, figureData.map.rows),
    columns: scaled(now.columns, cell.column, figureData.map.columns),
  };
  return JSON.stringify(zoom) === JSON.stringify(fullRange(figureData.map)) ? null : zoom;
}

/**
 * The visible part after moving by some rows and columns.
 * @param {FigureData} figureData @param {number} rows @param {number} columns @returns {Zoom | null}
 */
export function shiftZoom(figureData, rows, columns) {
  if (!figureData.zoom) return null;
  /** @param {[number, number]} range @param {number} by @param {number} all @returns {[number, number]} */
  const shifted = ([from, to], by, all) => {
    const begin = Math.max(0, Math.min(all - (to - from), from + by));
    return [begin, begin + to - from];
  };
  return {
    rows: shifted(figureData.zoom.rows, rows, figureData.map.rows),
    columns: shifted(figureData.zoom.columns, columns, figureData.map.columns),
  };
}

/** Describes a cell for screen readers. @param {FigureData} figureData @param {Cell} cell @param {string} weight */
export function describeCell(figureData, cell, weight) {
  const [row, column] = [figureData.rows.labels[cell.row], figureData.columns.labels[cell.column]];
  return (
    `${bidiIsolate(row)} attends to ${bidiIsolate(column)}: ${weight}. ` +
    `Row ${cell.row + 1} of ${figureData.rows.length}, column ${cell.column + 1} of ${figureData.columns.length}.`
  );
}
