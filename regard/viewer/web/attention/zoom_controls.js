/** Zoom buttons and a minimap of the visible part of a map. */

import { fullRange } from "../weights/maps.js";
import { h, s, setAttributes } from "../core/dom.js";
import { icon } from "../core/shell.js";
import { shiftZoom } from "./figure_data.js";

export class ZoomControls {
  /** @param {import("./attention_view.js").AttentionView} view */
  constructor(view) {
    this.view = view;
    /** @param {string} name @param {string} path @param {() => void} action */
    const button = (name, path, action) =>
      h("button", { type: "button", class: "round", "aria-label": name, title: name, onclick: action }, icon(path));
    this.box = s("rect", { class: "box" });
    this.canvas = h("canvas", { width: 1, height: 1 });
    this.minimap = h(
      "div",
      {
        class: "minimap",
        "aria-hidden": "true",
        onpointerdown: (event) => this.moveTo(event),
        onpointermove: (event) => event.buttons && this.moveTo(event),
      },
      this.canvas,
      s("svg", { viewBox: "0 0 100 100" }, this.box),
    );
    this.element = h(
      "div",
      { class: "zoomer", "data-export": "no" },
      this.minimap,
      button("Zoom in", "M12 5v14M5 12h14", () => view.zoomBy(0.5)),
      button("Zoom out", "M5 12h14", () => view.zoomBy(2)),
      (this.showAll = button("Show all", "M4 9V4h5M20 9V4h-5M4 15v5h5M20 15v5h-5", () => view.zoom(0, null))),
    );
  }

  /** Paints the thumbnail of the selected head into the minimap. */
  paint() {
    const { selected } = this.view.state.view;
    this.view.overviewOf(selected).paintInto(this.canvas, selected);
  }

  /** Draws the position of the visible part in the minimap. */
  draw() {
    const { figureData } = this.view.panels[0];
    this.element.hidden = this.view.state.view.form !== "map" || Math.max(figureData.map.rows, figureData.map.columns) < 16;
    const zoom = figureData.zoom ?? fullRange(figureData.map);
    const [rows, columns] = [
      zoom.rows.map((t) => (100 * t) / figureData.map.rows),
      zoom.columns.map((c) => (100 * c) / figureData.map.columns),
    ];
    const x = figureData.columns.rtl ? 100 - columns[1] : columns[0];
    setAttributes(this.box, {
      x,
      y: rows[0],
      width: Math.max(3, columns[1] - columns[0]),
      height: Math.max(3, rows[1] - rows[0]),
      rx: 2,
    });
    this.minimap.hidden = !figureData.zoom;
    this.paint();
    setAttributes(this.showAll, { disabled: !figureData.zoom });
  }

  /** Moves the visible part to a point of the minimap. @param {PointerEvent} event */
  moveTo(event) {
    const { figureData } = this.view.panels[0];
    if (!figureData.zoom) return;
    const box = this.minimap.getBoundingClientRect();
    let x = (event.clientX - box.left) / box.width;
    if (figureData.columns.rtl) x = 1 - x;
    const y = (event.clientY - box.top) / box.height;
    const middle = (/** @type {[number, number]} */ range) => (range[0] + range[1]) / 2;
    this.view.zoom(
      0,
      shiftZoom(
        figureData,
        Math.round(y * figureData.map.rows - middle(figureData.zoom.rows)),
        Math.round(x * figureData.map.columns - middle(figureData.zoom.columns)),
      ),
    );
  }
}
