/** Keys of the figures of the attention view: they move between cells, heads, layers and forms. */

import { argmax } from "../weights/maths.js";
import { shiftZoom } from "./figure_data.js";

/** @typedef {import("./panel.js").Panel} Panel */

export class FigureKeys {
  /** @param {import("./attention_view.js").AttentionView} view */
  constructor(view) {
    this.view = view;
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.altKey || event.metaKey || event.ctrlKey) return;
    const target = /** @type {HTMLElement} */ (event.target);
    const panel =
      this.view.visiblePanels.find((one) => one.element.contains(target)) ??
      (this.view.difference.element.contains(target) ? this.view.panels[0] : null);
    if (!panel || !panel.figureData || target.closest("select, button, input")) return;
    // A table keeps its scrolling keys.
    if (target.closest(".scroll") && (event.key.length > 1 || event.key === " ")) return;
    if (this.handleKey(event, panel)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }

  /**
   * Handles a key; returns false if the key has no function.
   * @param {KeyboardEvent} event @param {Panel} panel @returns {boolean}
   */
  handleKey(event, panel) {
    const distance = event.shiftKey ? 10 : 1;
    const direction = panel.figureData.columns.rtl && this.view.state.view.form === "map" ? -1 : 1;
    const letters = { l: "lines", m: "map", t: "text", n: "table" };
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (key in letters) this.view.state.set({ form: letters[key] });
    else if (key === "ArrowUp") this.move(panel, -distance, 0);
    else if (key === "ArrowDown") this.move(panel, distance, 0);
    else if (key === "ArrowLeft") this.move(panel, 0, -distance * direction);
    else if (key === "ArrowRight") this.move(panel, 0, distance * direction);
    else if (key === "Home") this.move(panel, 0, -Infinity);
    else if (key === "End") this.move(panel, 0, Infinity);
    else if (key === "PageUp") this.move(panel, -20, 0);
    else if (key === "PageDown") this.move(panel, 20, 0);
    else if (key === "g") this.moveTo(panel, this.currentCell(panel).row, argmax(panel.figureData.map.exactRow(this.currentCell(panel).row)));
    else if (key === "Enter" || key === " ") this.view.pin(panel.index, this.currentCell(panel));
    else if (key === "Escape") return this.escape();
    else if (key === "+" || key === "=") this.view.zoomBy(0.5);
    else if (key === "-") this.view.zoomBy(2);
    else if (key === "0") this.view.zoom(0, null);
    else if (key === "[") this.view.step(panel.index, 0, -1);
    else if (key === "]") this.view.step(panel.index, 0, 1);
    else if (key === "{") this.view.step(panel.index, -1, 0);
    else if (key === "}") this.view.step(panel.index, 1, 0);
    else if (key === "w" && !this.view.words.hidden) this.view.state.set({ words: !this.view.state.view.words, zoom: null });
    else if (key === "c" && !this.view.compare.hidden) this.view.setComparison(this.view.figureCount === 1);
    else if (key === "d" && !this.view.minus.hidden) this.view.state.set({ minus: !this.view.state.view.minus });
    else if (key === "," || key === ".") return this.stepLook(panel, key === "," ? -1 : 1);
    else return false;
    return true;
  }

  /** Moves to another look. @param {Panel} panel @param {number} by */
  stepLook(panel, by) {
    const { length } = this.view.looks;
    if (length > 1) panel.selectLook(((panel.selected.look ?? 0) + by + length) % length);
    return length > 1;
  }

  escape() {
    if (this.view.state.view.pin || this.view.cursor) {
      this.view.cursor = null;
      this.view.state.set({ pin: null });
      this.view.read();
    } else if (this.view.state.view.zoom) this.view.zoom(0, null);
    else return false;
    return true;
  }

  /** The cell that the keys start from. @param {Panel} panel @returns {{row: number, column: number}} */
  currentCell(panel) {
    const { cursor, pin } = this.view.highlightsOf(panel.index);
    const { map, zoom } = panel.figureData;
    const cell = cursor ?? pin;
    const row = Math.min(map.rows - 1, cell?.row ?? zoom?.rows[0] ?? 0);
    return { row, column: Math.min(map.columns - 1, cell?.column ?? argmax(map.exactRow(row))) };
  }

  /** @param {Panel} panel @param {number} rows @param {number} columns */
  move(panel, rows, columns) {
    const { cursor, pin } = this.view.highlightsOf(panel.index);
    const at = this.currentCell(panel);
    // The first key press only shows the current position.
    if (!cursor && !pin) this.moveTo(panel, at.row, at.column);
    else this.moveTo(panel, at.row + rows, at.column + columns);
  }

  /** @param {Panel} panel @param {number} row @param {number} column */
  moveTo(panel, row, column) {
    const { map, zoom } = panel.figureData;
    const cell = {
      row: Math.max(0, Math.min(map.rows - 1, row)),
      column: Math.max(0, Math.min(map.columns - 1, column)),
    };
    this.view.cursor = { panel: panel.index, cell };
    this.view.rememberCell(panel.index, cell);
    if (zoom) {
      /** How far a range has to move to contain a position. @param {[number, number]} range @param {number} position */
      const by = ([from, to], position) => (position < from ? position - from : position >= to ? position - to + 1 : 0);
      this.view.zoom(panel.index, shiftZoom(panel.figureData, by(zoom.rows, cell.row), by(zoom.columns, cell.column)));
    }
    this.view.read(0);
  }
}
