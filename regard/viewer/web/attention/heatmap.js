/**
 * Heat map of one head, or of a part of it: one row per query token, one column per key token.
 */

import { Raster } from "../weights/raster.js";
import { h, s, setAttributes, setChildren } from "../core/dom.js";
import { truncate } from "../core/tokens.js";
import { HeatMapPointer } from "./heatmap_pointer.js";
import { MAX_LABEL_LENGTH, computeGeometry, niceStep } from "./heatmap_layout.js";
import { label, textWidth } from "./svg_text.js";

/** @typedef {import("../core/tokens.js").Axis} Axis */
/** @typedef {import("./figure_data.js").Cell} Cell */
/** @typedef {import("./figure_data.js").FigureData} FigureData */
/** @typedef {import("./figure_data.js").FigureHandlers} FigureHandlers */

/** Minimum size of a cell with a number in it. */
const MIN_NUMBERED_CELL = 32;
const MIN_NUMBERED_HEIGHT = 15;
/** Maximum number of cells drawn as SVG rectangles; larger maps are drawn as pixels. */
const MAX_SQUARES = 2500;
export class HeatMap {
  /** @param {import("../core/scheduler.js").Scheduler} scheduler @param {string} key @param {FigureHandlers} handlers */
  constructor(scheduler, key, handlers) {
    this.scheduler = scheduler;
    this.key = key;
    this.handlers = handlers;
    const pointer = new HeatMapPointer(this);
    this.canvas = h("canvas", { class: "cells", "aria-hidden": "true" });
    this.svg = s("svg", { "aria-hidden": "true" });
    this.progress = h("p", { class: "progress", "data-export": "no" });
    this.element = h(
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
    this.cellsGroup = s("g", { class: "squares" });
    this.marks = s("g", { class: "marks" });
    setChildren(this.svg, this.cellsGroup, this.drawAxes(g, rows, columns), this.marks);
    this.drawCells();
    this.mark(this.cursor, this.pin);
    if (!map.isMaterialized) this.showProgress();
  }

  /** @param {any} g */
  drawAxes(g, rows, columns) {
    const { zoom } = g;
    const group = s("g", { class: "axes" });
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
    const edge = s("rect", {
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
        s("path", { class: "tick", d: `M${g.left - 6} ${y}h5` }),
        label(shortened(rows.labels[t], g.left - 14), rows.rtl, "right", { x: g.left - 11, y, dy: "0.35em", class: "count", "font-size": "11.5px" }),
      );
    }
    for (let c = Math.ceil(zoom.columns[0] / columnStep) * columnStep; c < zoom.columns[1]; c += columnStep) {
      const x = this.x(c) + g.cellWidth / 2;
      group.append(
        s("path", { class: "tick", d: `M${x} ${g.top - 6}v5` }),
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
      previous && JSON.stringify(previous.zoom) === JSON.stringify(g.zoom) && previous.height <= maxHeight && previous.width <= maxWidth;
    if (!reuse) {
      if (!map.isMaterialized && zoomed && this.fullRaster) this.raster = new Raster(map, g.zoom, maxHeight, maxWidth, this.fullRaster);
      else
        this.raster = !zoomed && this.fullRaster ? this.fullRaster : new Raster(map, g.zoom, maxHeight, maxWidth, map.isMaterialized ? null : previous);
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
    if (fullRaster && fullRaster !== raster && !fullRaster.isComplete) this.scheduler.add(`${this.key} full`, 5, () => fullRaster.step());
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
          s("rect", {
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
        this.marks.append(s("circle", { class: "gold", cx: this.x(c) + inset, cy: this.y(t) + inset, r: size / 1.6 }));
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
        s("rect", { class: `band ${kind}`, x: g.left, y: this.y(cell.row), width: g.width, height: t, rx: 4 }),
      );
    } else if (inRow) {
      const y = this.y(cell.row) + t / 2;
      this.marks.append(s("path", { class: `hair ${kind}`, d: `M${g.left} ${y}h${g.width}` }));
    }
    if (inColumn && w >= 6) {
      this.marks.append(
        s("rect", { class: `band ${kind}`, x: this.x(cell.column), y: g.top, width: w, height: g.height, rx: 4 }),
      );
    } else if (inColumn) {
      const x = this.x(cell.column) + w / 2;
      this.marks.append(s("path", { class: `hair ${kind}`, d: `M${x} ${g.top}v${g.height}` }));
    }
    if (inRow && inColumn) {
      const [width, height] = [Math.max(w, 7), Math.max(t, 7)];
      this.marks.append(
        s("rect", {
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
        s("rect", { class: "chip", x: right - width, y: y - 12, width, height: 24, rx: 12 }),
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
