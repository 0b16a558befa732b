/** Pointer of a heat map: pointing at cells, pinning, and zooming by dragging, double-click and wheel. */

import { s, setAttributes } from "../core/dom.js";
import { shiftZoom, zoomAround } from "./figure_data.js";

/** @typedef {import("../core/state.js").Zoom} Zoom */

export class HeatMapPointer {
  /** @param {import("./heatmap.js").HeatMap} map */
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
    let columns = [from.x, to.clientX].map((x) => share(x, box.left + g.left, g.width, g.columnCount)).sort((a, b) => a - b);
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
    this.box ??= this.map.svg.appendChild(s("rect", { class: "selection", rx: 4 }));
    setAttributes(this.box, {
      x: Math.min(this.drag.x, event.clientX) - box.left,
      y: Math.min(this.drag.y, event.clientY) - box.top,
      width: Math.abs(event.clientX - this.drag.x),
      height: Math.abs(event.clientY - this.drag.y),
    });
  }

  /** Zooms around a point; a factor of 0.5 halves the number of visible tokens. @param {MouseEvent} event @param {number} factor */
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
      const moved = shiftZoom(this.map.figureData, Math.round(event.deltaY / g.cellHeight), Math.round(across / g.cellWidth));
      // At the edge of the map, let the page scroll.
      if (JSON.stringify(moved) === JSON.stringify(this.map.figureData.zoom)) return;
      event.preventDefault();
      this.map.handlers.zoom(moved);
    }
  }
}
