/** The text itself: the key tokens of the selected query token are shaded by weight. Suits long texts. */

import { argmax } from "../weights/maths.js";
import { h, setAttributes, setChildren } from "../core/dom.js";
import { windowAround } from "./lines.js";

/** @typedef {import("./figure_data.js").FigureData} FigureData */
/** @typedef {import("./figure_data.js").Cell} Cell */

/** Maximum number of tokens per text. */
const MAX_TEXT_TOKENS = 1500;

export class ShadedText {
  /** @param {import("./figure_data.js").FigureHandlers} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    this.element = h("div", {
      class: "figure shaded-text",
      tabindex: 0,
      role: "application",
      "aria-roledescription": "text",
      onpointerover: (event) => {
        const cell = this.cellAt(event);
        if (cell) handlers.point(cell);
      },
      onpointerleave: () => handlers.point(null),
      onclick: (event) => {
        const cell = this.cellAt(event);
        if (cell) handlers.pin(cell);
      },
    });
    this.cursor = null;
    this.pin = null;
  }

  /** @param {FigureData} figureData */
  show(figureData) {
    this.figureData = figureData;
    this.layout();
  }

  layout() {
    if (!this.figureData) return;
    const { rows, columns, map, zoom, name } = this.figureData;
    const all = zoom ?? { rows: [0, map.rows], columns: [0, map.columns] };
    const at = this.cursor ?? this.pin;
    this.range = {
      rows: windowAround(all.rows, at?.row ?? 0, MAX_TEXT_TOKENS),
      columns: windowAround(all.columns, at?.column ?? 0, MAX_TEXT_TOKENS),
    };
    this.rowSpans = this.spans("row", rows, this.range.rows);
    this.columnSpans = this.spans("column", columns, this.range.columns);
    const long = map.rows + map.columns > 80;
    setAttributes(this.element, {
      "aria-label": `Text of ${name}. Up and down move between query tokens, left and right between key tokens, Enter pins.`,
      class: long ? "figure shaded-text long" : "figure shaded-text",
    });
    setChildren(
      this.element,
      this.block(rows.title, "(queries)", rows, this.rowSpans),
      this.block(columns.title, "(keys)", columns, this.columnSpans),
    );
    this.mark(this.cursor, this.pin);
  }

  /** @param {string} title @param {string} role @param {any} axis @param {Map<number, HTMLElement>} spans */
  block(title, role, axis, spans) {
    /** @type {any[]} */
    const children = [];
    let last = null;
    for (const [position, span] of spans) {
      const word = axis.wordAt(position);
      if (children.length && (axis.merged || word === null || word < 0 || word !== last)) children.push(" ");
      children.push(span);
      last = word;
    }
    return h(
      "div",
      { class: "passage" },
      h("p", { class: "heading" }, title, h("span", { class: "role" }, ` ${role}`)),
      h("p", { class: "words", dir: axis.rtl ? "rtl" : "ltr" }, children),
    );
  }

  /** @param {string} axis @param {any} labels @param {[number, number]} range */
  spans(axis, labels, range) {
    const spans = new Map();
    for (let i = range[0]; i < range[1]; i++) {
      spans.set(i, h("bdi", { class: "token", [`data-${axis}`]: i }, labels.labels[i]));
    }
    return spans;
  }

  /** @param {Event} event @returns {Cell | null} */
  cellAt(event) {
    const { row, column } = /** @type {HTMLElement} */ (event.target).dataset ?? {};
    if (row !== undefined) return { row: Number(row), column: null };
    if (column !== undefined) return { row: null, column: Number(column) };
    return null;
  }

  /** @param {Cell | null} cursor @param {Cell | null} pin */
  mark(cursor, pin) {
    [this.cursor, this.pin] = [cursor, pin];
    if (!this.range) return;
    const at = cursor ?? pin;
    const { map } = this.figureData;
    if (at && at.row !== null && !this.rowSpans.has(at.row) && at.row < map.rows) {
      this.layout();
      return;
    }
    for (const [position, span] of this.rowSpans) span.classList.toggle("on", at?.row === position);
    for (const [position, span] of this.columnSpans) span.classList.toggle("on", at?.column === position);
    let [rowWeights, columnWeights] = [null, null];
    if (at && at.row !== null) columnWeights = map.exactRow(at.row);
    else if (at && at.column !== null) {
      rowWeights = new Float32Array(this.range.rows[1] - this.range.rows[0]);
      map.readRows([...this.rowSpans.keys()], at.column, at.column + 1, rowWeights);
    }
    if (columnWeights) this.scrollTo(this.columnSpans.get(at.column ?? argmax(columnWeights)));
    if (rowWeights) this.scrollTo(this.rowSpans.get(this.range.rows[0] + argmax(rowWeights)));
    if (at) this.scrollTo(this.rowSpans.get(at.row) ?? this.columnSpans.get(at.column));
    const { layers } = this.figureData;
    if (layers) return this.drawStripes(at, layers);
    for (const [position, span] of this.columnSpans) this.shade(span, columnWeights ? columnWeights[position] : null);
    for (const [position, span] of this.rowSpans) this.shade(span, rowWeights ? rowWeights[position - this.range.rows[0]] : null);
  }

  /**
   * Underlines the tokens once per head, in its color, as strong as its weight.
   * @param {Cell | null} at @param {NonNullable<FigureData["layers"]>} layers
   */
  drawStripes(at, layers) {
    for (const stripe of this.element.querySelectorAll(".stripe")) stripe.remove();
    if (!at) return;
    layers.forEach(({ map, color }) => {
      const isRow = at.row !== null;
      const spans = isRow ? this.columnSpans : this.rowSpans;
      const weights = isRow ? map.exactRow(at.row) : new Float32Array(spans.size);
      const first = isRow ? 0 : this.range.rows[0];
      if (!isRow) map.readRows([...spans.keys()], at.column, at.column + 1, /** @type {Float32Array} */ (weights));
      for (const [position, span] of spans) {
        const weight = weights[position - first];
        if (weight < 0.02) continue;
        const stripe = h("i", { class: "stripe", "data-color": color, "aria-hidden": "true" });
        stripe.style.cssText = `bottom: ${-4 * color}px; width: ${Math.round(100 * weight)}%`;
        span.append(stripe);
      }
    });
  }

  /** Scrolls a long text, but not the page, to a token. @param {HTMLElement | undefined} span */
  scrollTo(span) {
    const words = span?.parentElement;
    if (!words || words.scrollHeight <= words.clientHeight) return;
    const [token, box] = [span.getBoundingClientRect(), words.getBoundingClientRect()];
    if (token.top < box.top) words.scrollTop += token.top - box.top - box.height / 3;
    else if (token.bottom > box.bottom) words.scrollTop += token.bottom - box.bottom + box.height / 3;
  }

  /** @param {HTMLElement} span @param {number | null} weight */
  shade(span, weight) {
    const { colormap } = this.figureData;
    span.style.background = weight === null ? "" : colormap.css(weight);
    span.classList.toggle("light", weight !== null && colormap.needsLightText(weight));
    span.classList.toggle("dark", weight !== null && !colormap.needsLightText(weight));
  }
}
