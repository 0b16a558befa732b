/** A heat map: what it shows, its layout, its pointer and its drawing. */

import { html, label, setAttributes, setChildren, svgElement, textWidth } from "../core/dom.js";
import { bidiIsolate, truncate } from "../core/tokens.js";
import { fullRange } from "../weights/maps.js";
import { Raster } from "../weights/raster.js";

/* The contents and events of a figure, and the visible part of its map. */

/** @typedef {import("../core/state.js").Zoom} Zoom */
/** @typedef {import("../core/tokens.js").Axis} Axis */
/** @typedef {import("../weights/maps.js").AttentionMap} AttentionMap */
/** @typedef {{row: number | null, column: number | null}} Cell */
/**
 * The contents of a figure. `layers`: the maps of several heads with the indices of their colors; the first one is
 * `map`.
 * @typedef {{map: AttentionMap, rows: Axis, columns: Axis, zoom: Zoom | null, colormap: any, name: string, rounded?:
 * boolean,
 *   gold: ((row: number, column: number) => boolean) | null, isMasked: ((row: number, column: number) => boolean) |
 * null,
 *   layers?: {map: AttentionMap, color: number, name: string}[] | null}} FigureData
 * The event handlers of a figure.
 * @typedef {{point: (cell: Cell | null) => void, pin: (cell: Cell) => void, zoom: (zoom: Zoom | null) => void}}
 * FigureHandlers
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

/* The layout of a heat map. */

/** Minimum and maximum size of a labeled cell, in pixels. */
const MIN_LABELED_CELL = 13;
const MAX_CELL = 68;
/** Maximum ratio of the width of a cell to its height: wide cells fill a wide figure. */
const MAX_CELL_RATIO = 2.4;
/** Up to this number of rows, every row is labeled, even if the page has to scroll. */
const MAX_LABELED_ROWS = 72;
/** Maximum length of a label. */
const MAX_LABEL_LENGTH = 22;

/** Rounds a step of axis ticks up to 1, 2 or 5 times a power of ten. @param {number} minimum */
function niceStep(minimum) {
  const ten = 10 ** Math.floor(Math.log10(Math.max(1, minimum)));
  return [1, 2, 5, 10].map((n) => n * ten).find((step) => step >= minimum) ?? 10 * ten;
}

/**
 * Computes the layout of a heat map from the available space, the number of cells and the widths of their labels.
 * @param {FigureData} figureData @param {HTMLElement} element
 */
function computeGeometry(figureData, element) {
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
    Math.max(
      0,
      ...axis.labels.slice(...range).map((text) => textWidth(truncate(text, MAX_LABEL_LENGTH), fontOf(size))),
    );
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
          figureSize: {
            width: left + columnCount * fitted + (isSloped ? slope : 2),
            height: top + rowCount * high + 2,
          },
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

/* Pointer of a heat map: pointing at cells, pinning, and zooming by dragging, double-click and wheel. */

class HeatMapPointer {
  /** @param {HeatMap} map */
  constructor(map) {
    this.map = map;
    /** @type {{x: number, y: number, moved: boolean} | null} */
    this.drag = null;
    /** The area that is being dragged over. @type {SVGElement | null} */
    this.box = null;
  }

  /** @param {PointerEvent} event */
  onPointerMove(event) {
    if (this.drag) {
      const isDrag = Math.hypot(event.clientX - this.drag.x, event.clientY - this.drag.y) > 8;
      if (isDrag && event.pointerType !== "touch") this.drag.moved = true;
      if (this.drag.moved) this.drawBox(event);
      return;
    }
    this.map.handlers.point(this.map.cellAt(event));
  }

  /** @param {PointerEvent} event */
  onPointerDown(event) {
    if (event.button === 0) this.drag = { x: event.clientX, y: event.clientY, moved: false };
  }

  /** @param {PointerEvent} event */
  onPointerUp(event) {
    const { drag } = this;
    this.endDrag();
    if (!drag) return;
    if (!drag.moved) {
      const cell = this.map.cellAt(event);
      if (cell) this.map.handlers.pin(cell);
      return;
    }
    const box = this.selectedRange(drag, event);
    if (box) this.map.handlers.zoom(box);
  }

  endDrag() {
    this.drag = null;
    this.box?.remove();
    this.box = null;
  }

  /**
   * The range of tokens between two points.
   * @param {{x: number, y: number}} from @param {MouseEvent} to @returns {Zoom | null}
   */
  selectedRange(from, to) {
    const g = this.map.geometry;
    const box = this.map.svg.getBoundingClientRect();
    /** @param {number} at @param {number} begin @param {number} length @param {number} cells */
    const share = (at, begin, length, cells) => Math.max(0, Math.min(cells, ((at - begin) / length) * cells));
    let columns = [from.x, to.clientX]
      .map((x) => share(x, box.left + g.left, g.width, g.columnCount))
      .sort((a, b) => a - b);
    if (this.map.figureData.columns.rtl) columns = [g.columnCount - columns[1], g.columnCount - columns[0]];
    const rows = [from.y, to.clientY].map((y) => share(y, box.top + g.top, g.height, g.rowCount)).sort((a, b) => a - b);
    /** @param {number[]} range @param {number} first @returns {[number, number]} */
    const tokens = (range, first) => [first + Math.floor(range[0]), first + Math.ceil(range[1])];
    const zoom = { rows: tokens(rows, g.zoom.rows[0]), columns: tokens(columns, g.zoom.columns[0]) };
    return zoom.rows[1] > zoom.rows[0] && zoom.columns[1] > zoom.columns[0] ? zoom : null;
  }

  /** @param {PointerEvent} event */
  drawBox(event) {
    const box = this.map.svg.getBoundingClientRect();
    this.box ??= this.map.svg.appendChild(svgElement("rect", { class: "selection", rx: 4 }));
    setAttributes(this.box, {
      x: Math.min(this.drag.x, event.clientX) - box.left,
      y: Math.min(this.drag.y, event.clientY) - box.top,
      width: Math.abs(event.clientX - this.drag.x),
      height: Math.abs(event.clientY - this.drag.y),
    });
  }

  /**
   * Zooms around a point; a factor of 0.5 halves the number of visible tokens. @param {MouseEvent} event
   * @param {number} factor
   */
  zoomAt(event, factor) {
    const cell = this.map.cellAt(event);
    if (cell) this.map.handlers.zoom(zoomAround(this.map.figureData, cell, factor));
  }

  /** @param {WheelEvent} event */
  onWheel(event) {
    const g = this.map.geometry;
    if (!g) return;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoomAt(event, event.deltaY > 0 ? 1.25 : 0.8);
    } else if (this.map.figureData.zoom) {
      const across = this.map.figureData.columns.rtl ? -event.deltaX : event.deltaX;
      const moved = shiftZoom(
        this.map.figureData,
        Math.round(event.deltaY / g.cellHeight),
        Math.round(across / g.cellWidth),
      );
      // At the edge of the map, let the page scroll.
      if (JSON.stringify(moved) === JSON.stringify(this.map.figureData.zoom)) return;
      event.preventDefault();
      this.map.handlers.zoom(moved);
    }
  }
}

/* * Heat map of one head, or of a part of it: one row per query token, one column per key token. */

/** Minimum size of a cell with a number in it. */
const MIN_NUMBERED_CELL = 32;
const MIN_NUMBERED_HEIGHT = 15;
/** Maximum number of cells drawn as SVG rectangles; larger maps are drawn as pixels. */
const MAX_SQUARES = 2500;
export class HeatMap {
  /**
   * @param {import("../core/scheduler.js").Scheduler} scheduler @param {string} key @param {FigureHandlers} handlers
   */
  constructor(scheduler, key, handlers) {
    this.scheduler = scheduler;
    this.key = key;
    this.handlers = handlers;
    const pointer = new HeatMapPointer(this);
    this.canvas = html("canvas", { class: "cells", "aria-hidden": "true" });
    this.svg = svgElement("svg", { "aria-hidden": "true" });
    this.progress = html("p", { class: "progress", "data-export": "no" });
    this.element = html(
      "div",
      {
        class: "figure heat",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "heat map",
        onpointermove: (event) => pointer.onPointerMove(event),
        onpointerleave: () => pointer.drag === null && handlers.point(null),
        onpointerdown: (event) => pointer.onPointerDown(event),
        onpointerup: (event) => pointer.onPointerUp(event),
        onpointercancel: () => pointer.endDrag(),
        ondblclick: (event) => pointer.zoomAt(event, 0.5),
      },
      this.canvas,
      this.svg,
      this.progress,
    );
    this.element.addEventListener("wheel", (event) => pointer.onWheel(event), { passive: false });
    /** @type {FigureData | null} */
    this.figureData = null;
    /** @type {Raster | null} */
    this.raster = null;
    /** The raster of the entire map, which is completed while a part is displayed. @type {Raster | null} */
    this.fullRaster = null;
    this.cursor = null;
    this.pin = null;
  }

  /** @param {FigureData} figureData */
  show(figureData) {
    const same = this.figureData?.map === figureData.map;
    this.figureData = figureData;
    if (!same) [this.raster, this.fullRaster] = [null, null];
    this.layout();
  }

  /** Computes the layout and draws the map. */
  layout() {
    if (!this.figureData || !this.element.isConnected || !this.element.clientWidth) return;
    const { map, rows, columns, name } = this.figureData;
    const g = computeGeometry(this.figureData, this.element);
    this.geometry = g;
    setAttributes(this.element, {
      "aria-label":
        `Heat map of ${name}: ${g.rowCount} rows, ${g.columnCount} columns. ` +
        "Arrow keys move between cells, Enter pins, plus and minus zoom.",
    });
    setAttributes(this.svg, {
      width: g.figureSize.width,
      height: g.figureSize.height,
      viewBox: `0 0 ${g.figureSize.width} ${g.figureSize.height}`,
    });
    Object.assign(this.element.style, { height: `${g.figureSize.height}px` });
    this.cellsGroup = svgElement("g", { class: "squares" });
    this.marks = svgElement("g", { class: "marks" });
    setChildren(this.svg, this.cellsGroup, this.drawAxes(g, rows, columns), this.marks);
    this.drawCells();
    this.mark(this.cursor, this.pin);
    if (!map.isMaterialized) this.showProgress();
  }

  /** @param {any} g */
  drawAxes(g, rows, columns) {
    const { zoom } = g;
    const group = svgElement("g", { class: "axes" });
    const font = `${g.size}px`;
    this.rowLabels = new Map();
    this.columnLabels = new Map();
    if (g.isLabeled) {
      for (let t = zoom.rows[0]; t < zoom.rows[1]; t++) {
        const text = label(truncate(rows.labels[t], MAX_LABEL_LENGTH), rows.rtl, "right", {
          x: g.left - 9,
          y: this.y(t) + g.cellHeight / 2,
          dy: "0.35em",
          "font-size": font,
          class: "label",
        });
        this.rowLabels.set(t, text);
        group.append(text);
      }
      for (let c = zoom.columns[0]; c < zoom.columns[1]; c++) {
        const x = this.x(c) + g.cellWidth / 2;
        const labelText = truncate(columns.labels[c], MAX_LABEL_LENGTH);
        // Labels of right-to-left text lean to the left.
        const lean = columns.rtl ? 45 : -45;
        const text = g.isSloped
          ? label(labelText, columns.rtl, columns.rtl ? "right" : "left", {
              transform: `translate(${x + (columns.rtl ? 3 : -3) + Math.sign(lean) * -4} ${g.top - 8}) rotate(${lean})`,
              "font-size": font,
              class: "label",
              dy: "0.35em",
            })
          : label(labelText, columns.rtl, "middle", { x, y: g.top - 10, "font-size": font, class: "label" });
        this.columnLabels.set(c, text);
        group.append(text);
      }
      return group;
    }
    const edge = svgElement("rect", {
      class: "edge",
      x: g.left - 0.5,
      y: g.top - 0.5,
      width: g.width + 1,
      height: g.height + 1,
    });
    group.append(edge);
    const rowStep = niceStep(16 / g.cellHeight);
    const columnStep = niceStep(18 / g.cellWidth);
    const font12 = `11.5px ${getComputedStyle(this.element).fontFamily}`;
    /** A label of a tick, as wide as the margin allows. @param {string} text @param {number} width */
    const shortened = (text, width) => {
      let count = 14;
      while (count > 2 && textWidth(truncate(text, count), font12) > width) count -= 1;
      return truncate(text, count);
    };
    for (let t = Math.ceil(zoom.rows[0] / rowStep) * rowStep; t < zoom.rows[1]; t += rowStep) {
      const y = this.y(t) + g.cellHeight / 2;
      group.append(
        svgElement("path", { class: "tick", d: `M${g.left - 6} ${y}h5` }),
        label(shortened(rows.labels[t], g.left - 14), rows.rtl, "right", {
          x: g.left - 11,
          y,
          dy: "0.35em",
          class: "count",
          "font-size": "11.5px",
        }),
      );
    }
    for (let c = Math.ceil(zoom.columns[0] / columnStep) * columnStep; c < zoom.columns[1]; c += columnStep) {
      const x = this.x(c) + g.cellWidth / 2;
      group.append(
        svgElement("path", { class: "tick", d: `M${x} ${g.top - 6}v5` }),
        label(shortened(columns.labels[c], 80), columns.rtl, columns.rtl ? "right" : "left", {
          transform: `translate(${x + (columns.rtl ? 3 : -3)} ${g.top - 9}) rotate(${columns.rtl ? 45 : -45})`,
          class: "count",
          "font-size": "11.5px",
        }),
      );
    }
    return group;
  }

  /** Left edge of a column. @param {number} column */
  x(column) {
    const { left, width, cellWidth, zoom } = this.geometry;
    const position = (column - zoom.columns[0]) * cellWidth;
    return this.figureData.columns.rtl ? left + width - position - cellWidth : left + position;
  }

  /** Top edge of a row. @param {number} row */
  y(row) {
    const { top, cellHeight, zoom } = this.geometry;
    return top + (row - zoom.rows[0]) * cellHeight;
  }

  drawCells() {
    const g = this.geometry;
    const { map } = this.figureData;
    const squares = g.isLabeled && g.rowCount * g.columnCount <= MAX_SQUARES;
    this.canvas.hidden = squares;
    this.pause();
    if (squares) {
      this.raster = null;
      return this.drawSquares();
    }
    const pixelRatio = window.devicePixelRatio || 1;
    const [maxHeight, maxWidth] = [Math.round(g.height * pixelRatio), Math.round(g.width * pixelRatio)];
    const zoomed = this.figureData.zoom !== null;
    const previous = this.raster;
    const reuse =
      previous &&
      JSON.stringify(previous.zoom) === JSON.stringify(g.zoom) &&
      previous.height <= maxHeight &&
      previous.width <= maxWidth;
    if (!reuse) {
      if (!map.isMaterialized && zoomed && this.fullRaster)
        this.raster = new Raster(map, g.zoom, maxHeight, maxWidth, this.fullRaster);
      else
        this.raster =
          !zoomed && this.fullRaster
            ? this.fullRaster
            : new Raster(map, g.zoom, maxHeight, maxWidth, map.isMaterialized ? null : previous);
    }
    if (!zoomed && !map.isMaterialized) this.fullRaster = this.raster;
    Object.assign(this.canvas.style, {
      left: `${g.left}px`,
      top: `${g.top}px`,
      width: `${g.width}px`,
      height: `${g.height}px`,
      transform: this.figureData.columns.rtl ? "scaleX(-1)" : "none",
    });
    const raster = this.raster;
    if (map.isMaterialized) {
      while (raster.step(64));
      this.paint();
      return;
    }
    // The first rows immediately, the rest in slices.
    const deadline = performance.now() + 20;
    while (!raster.isComplete && performance.now() < deadline) raster.step();
    this.paint();
    const { fullRaster } = this;
    this.scheduler.add(this.key, 0, () => {
      const more = raster.step();
      this.paintSoon();
      return more;
    });
    if (fullRaster && fullRaster !== raster && !fullRaster.isComplete)
      this.scheduler.add(`${this.key} full`, 5, () => fullRaster.step());
  }

  /** Stops computing. */
  pause() {
    this.scheduler.cancel(this.key);
    this.scheduler.cancel(`${this.key} full`);
  }

  /** Paints at most every 80 ms, because painting competes with computing. */
  paintSoon() {
    if (this.isPaintScheduled) return;
    this.isPaintScheduled = true;
    setTimeout(() => {
      this.isPaintScheduled = false;
      this.paint();
    }, 80);
  }

  /** Paints the raster's values as pixels. */
  paint() {
    const { raster, canvas } = this;
    if (!raster) return;
    if (canvas.width !== raster.width || canvas.height !== raster.height) {
      canvas.width = raster.width;
      canvas.height = raster.height;
    }
    const context = canvas.getContext("2d");
    const image = context.createImageData(raster.width, raster.height);
    this.figureData.colormap.paint(raster.values, image.data);
    context.putImageData(image, 0, 0);
    if (!this.figureData.map.isMaterialized) this.showProgress();
    else this.progress.textContent = this.describeBlocks();
  }

  /** States the number of weights per pixel, if it is more than one. */
  describeBlocks() {
    const { block } = this.raster ?? { block: { rows: 1, columns: 1 } };
    if (block.rows * block.columns === 1) return "";
    return `Each pixel shows the largest of ${block.rows} × ${block.columns} ${this.figureData.map.signed ? "differences" : "weights"}.`;
  }

  showProgress() {
    if (!this.raster) {
      this.progress.textContent = "";
      return;
    }
    const share = Math.floor(100 * this.raster.completedFraction);
    const more = this.raster.isComplete ? "" : ` ${share}% of rows computed.`;
    this.progress.textContent = this.describeBlocks() + more;
  }

  drawSquares() {
    const g = this.geometry;
    const { map, colormap, isMasked } = this.figureData;
    const cell = Math.min(g.cellWidth, g.cellHeight);
    const gap = cell >= 24 ? 2 : 1;
    const rounded = cell >= 24 ? 4 : cell >= 18 ? 2 : 1;
    const row = new Float32Array(g.columnCount);
    for (let t = g.zoom.rows[0]; t < g.zoom.rows[1]; t++) {
      map.readRows([t], g.zoom.columns[0], g.zoom.columns[1], row);
      for (let i = 0; i < g.columnCount; i++) {
        const x = this.x(g.zoom.columns[0] + i);
        // Masked cells are left blank.
        if (isMasked?.(t, g.zoom.columns[0] + i)) continue;
        this.cellsGroup.append(
          svgElement("rect", {
            x: x + gap / 2,
            y: this.y(t) + gap / 2,
            width: g.cellWidth - gap,
            height: g.cellHeight - gap,
            rx: rounded,
            fill: colormap.css(row[i]),
            class: "square",
          }),
        );
        if (g.cellWidth >= MIN_NUMBERED_CELL && g.cellHeight >= MIN_NUMBERED_HEIGHT && Math.abs(row[i]) >= 0.005) {
          const sign = map.signed ? (row[i] < 0 ? "−" : "+") : "";
          this.cellsGroup.append(
            label(sign + Math.abs(row[i]).toFixed(2), false, "middle", {
              x: x + g.cellWidth / 2,
              y: this.y(t) + g.cellHeight / 2,
              dy: "0.35em",
              "font-size": Math.min(g.cellWidth, 2 * g.cellHeight) < 40 ? "10.5px" : "12px",
              class: colormap.needsLightText(row[i]) ? "number light" : "number dark",
            }),
          );
        }
      }
    }
    this.progress.textContent = "";
  }

  /**
   * Highlights the cell under the pointer and the pinned one.
   * @param {Cell | null} cursor @param {Cell | null} pin
   */
  mark(cursor, pin) {
    [this.cursor, this.pin] = [cursor, pin];
    if (!this.geometry || !this.marks) return;
    const g = this.geometry;
    const { rows, columns, gold } = this.figureData;
    setChildren(this.marks);
    if (gold && g.rowCount * g.columnCount <= 40000) this.markGold(g, gold);
    for (const [cell, kind] of /** @type {[Cell | null, string][]} */ ([
      [pin, "pin"],
      [cursor, "cursor"],
    ])) {
      if (cell) this.markCell(g, cell, kind);
    }
    const at = cursor ?? pin;
    for (const [axis, labels] of /** @type {[string, Map<number, SVGElement>][]} */ ([
      ["row", this.rowLabels],
      ["column", this.columnLabels],
    ])) {
      for (const [position, text] of labels) text.classList.toggle("on", at?.[axis] === position);
    }
    if (!g.isLabeled && at) this.markTokens(g, at, rows, columns);
  }

  /** @param {any} g @param {(row: number, column: number) => boolean} gold */
  markGold(g, gold) {
    const size = Math.max(2, Math.min(6, g.cellWidth / 7));
    for (let t = g.zoom.rows[0]; t < g.zoom.rows[1]; t++) {
      for (let c = g.zoom.columns[0]; c < g.zoom.columns[1]; c++) {
        if (!gold(t, c)) continue;
        const inset = Math.min(7, g.cellWidth / 5);
        this.marks.append(
          svgElement("circle", { class: "gold", cx: this.x(c) + inset, cy: this.y(t) + inset, r: size / 1.6 }),
        );
      }
    }
  }

  /** @param {any} g @param {Cell} cell @param {string} kind */
  markCell(g, cell, kind) {
    const inRow = cell.row !== null && cell.row >= g.zoom.rows[0] && cell.row < g.zoom.rows[1];
    const inColumn = cell.column !== null && cell.column >= g.zoom.columns[0] && cell.column < g.zoom.columns[1];
    const [w, t] = [g.cellWidth, g.cellHeight];
    if (inRow && t >= 6) {
      this.marks.append(
        svgElement("rect", { class: `band ${kind}`, x: g.left, y: this.y(cell.row), width: g.width, height: t, rx: 4 }),
      );
    } else if (inRow) {
      const y = this.y(cell.row) + t / 2;
      this.marks.append(svgElement("path", { class: `hair ${kind}`, d: `M${g.left} ${y}h${g.width}` }));
    }
    if (inColumn && w >= 6) {
      this.marks.append(
        svgElement("rect", {
          class: `band ${kind}`,
          x: this.x(cell.column),
          y: g.top,
          width: w,
          height: g.height,
          rx: 4,
        }),
      );
    } else if (inColumn) {
      const x = this.x(cell.column) + w / 2;
      this.marks.append(svgElement("path", { class: `hair ${kind}`, d: `M${x} ${g.top}v${g.height}` }));
    }
    if (inRow && inColumn) {
      const [width, height] = [Math.max(w, 7), Math.max(t, 7)];
      this.marks.append(
        svgElement("rect", {
          class: `ring ${kind}`,
          x: this.x(cell.column) + w / 2 - width / 2,
          y: this.y(cell.row) + t / 2 - height / 2,
          width,
          height,
          rx: Math.min(5, width / 4),
        }),
      );
    }
  }

  /**
   * Shows the tokens of a cell next to numeric axes.
   * @param {any} g @param {Cell} at @param {Axis} rows @param {Axis} columns
   */
  markTokens(g, at, rows, columns) {
    const font = `600 13px ${getComputedStyle(this.element).fontFamily}`;
    /** @param {string} text @param {boolean} rtl @param {number} right @param {number} y */
    const chip = (text, rtl, right, y) => {
      const width = textWidth(text, font) + 14;
      this.marks.append(
        svgElement("rect", { class: "chip", x: right - width, y: y - 12, width, height: 24, rx: 12 }),
        label(text, rtl, "middle", { x: right - width / 2, y, dy: "0.35em", class: "chip-text", "font-size": "13px" }),
      );
    };
    if (at.row !== null && at.row >= g.zoom.rows[0] && at.row < g.zoom.rows[1]) {
      const text = truncate(rows.labels[at.row], 12);
      chip(text, rows.rtl, Math.max(g.left - 6, textWidth(text, font) + 14), this.y(at.row) + g.cellHeight / 2);
    }
    if (at.column !== null && at.column >= g.zoom.columns[0] && at.column < g.zoom.columns[1]) {
      const text = truncate(columns.labels[at.column], 20);
      const width = textWidth(text, font) + 14;
      const middle = this.x(at.column) + g.cellWidth / 2;
      chip(text, columns.rtl, Math.min(g.figureSize.width, Math.max(width, middle + width / 2)), g.top - 17);
    }
  }

  /**
   * The cell under the pointer; if cells are only a few pixels large, the largest nearby.
   * @param {MouseEvent} event @returns {Cell | null}
   */
  cellAt(event) {
    const g = this.geometry;
    if (!g) return null;
    const box = this.svg.getBoundingClientRect();
    let [x, y] = [event.clientX - box.left - g.left, event.clientY - box.top - g.top];
    if (x < 0 || y < 0 || x >= g.width || y >= g.height) return null;
    if (this.figureData.columns.rtl) x = g.width - x;
    const row = Math.min(g.zoom.rows[1] - 1, g.zoom.rows[0] + Math.floor(y / g.cellHeight));
    const column = Math.min(g.zoom.columns[1] - 1, g.zoom.columns[0] + Math.floor(x / g.cellWidth));
    const [rowRadius, columnRadius] = [Math.floor(3 / g.cellHeight), Math.floor(3 / g.cellWidth)];
    if (rowRadius + columnRadius === 0) return { row, column };
    const [bestRow, bestColumn] = this.figureData.map.argmaxIn(
      [Math.max(g.zoom.rows[0], row - rowRadius), Math.min(g.zoom.rows[1], row + rowRadius + 1)],
      [Math.max(g.zoom.columns[0], column - columnRadius), Math.min(g.zoom.columns[1], column + columnRadius + 1)],
    );
    return { row: bestRow, column: bestColumn };
  }
}
