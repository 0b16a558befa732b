/** Table of the weights, which screen readers can read and which can be copied. */

import { h, setAttributes, setChildren, tokenText } from "../core/dom.js";
import { windowAround } from "./lines.js";
import { formatSigned, formatWeight } from "../core/tokens.js";

/** @typedef {import("./figure_data.js").FigureData} FigureData */
/** @typedef {import("./figure_data.js").Cell} Cell */

/** Number of visible rows and columns. */
const VISIBLE_ROWS = 40;
const VISIBLE_COLUMNS = 24;

export class Table {
  /** @param {import("./figure_data.js").FigureHandlers} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    this.element = h("div", { class: "figure table" });
    this.from = { rows: 0, columns: 0 };
    this.cursor = null;
    this.pin = null;
  }

  /** @param {FigureData} figureData */
  show(figureData) {
    const same = this.figureData?.map === figureData.map;
    this.figureData = figureData;
    if (!same) {
      const at = this.cursor ?? this.pin;
      this.from = { rows: at?.row ?? 0, columns: at?.column ?? 0 };
    }
    this.layout();
  }

  layout() {
    if (!this.figureData) return;
    const { map, rows, columns, name } = this.figureData;
    const range = {
      rows: windowAround([0, map.rows], this.from.rows, VISIBLE_ROWS),
      columns: windowAround([0, map.columns], this.from.columns, VISIBLE_COLUMNS),
    };
    const columnIndices = Array.from({ length: range.columns[1] - range.columns[0] }, (_, i) => range.columns[0] + i);
    const format = map.signed ? formatSigned : formatWeight;
    const body = [];
    for (let t = range.rows[0]; t < range.rows[1]; t++) {
      const row = map.exactRow(t);
      body.push(
        h(
          "tr",
          {},
          h("th", { scope: "row" }, tokenText(rows.labels[t], rows.rtl)),
          columnIndices.map((c) => h("td", { "data-row": t, "data-column": c }, format(row[c], this.figureData.rounded))),
        ),
      );
    }
    const head = h(
      "tr",
      {},
      h("td", { class: "corner" }),
      columnIndices.map((c) => h("th", { scope: "col" }, tokenText(columns.labels[c], columns.rtl))),
    );
    const table = h(
      "table",
      {
        onpointerover: (event) => this.handlers.point(this.cellAt(event)),
        onpointerleave: () => this.handlers.point(null),
        onclick: (event) => {
          const cell = this.cellAt(event);
          if (cell) this.handlers.pin(cell);
        },
      },
      h("caption", { class: "visually-hidden" }, `Weights of ${name}: queries in rows, keys in columns.`),
      h("thead", {}, head),
      h("tbody", {}, body),
    );
    this.cells = new Map(
      [...table.querySelectorAll("td[data-row]")].map((td) => [
        `${/** @type {HTMLElement} */ (td).dataset.row} ${/** @type {HTMLElement} */ (td).dataset.column}`,
        td,
      ]),
    );
    const focused = this.cells && this.element.querySelector(".scroll") === document.activeElement;
    setChildren(
      this.element,
      this.pager("rows", range.rows, map.rows, VISIBLE_ROWS),
      this.pager("columns", range.columns, map.columns, VISIBLE_COLUMNS),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table of ${name}` }, table),
    );
    // Keep the focus, so that keys continue to work.
    if (focused) /** @type {HTMLElement} */ (this.element.querySelector(".scroll")).focus({ preventScroll: true });
    if (columns.rtl) setAttributes(table, { dir: "rtl" });
    this.mark(this.cursor, this.pin);
  }

  /**
   * Buttons that page through rows or columns, if there are more.
   * @param {"rows" | "columns"} axis @param {[number, number]} range @param {number} all @param {number} step
   */
  pager(axis, range, all, step) {
    if (all <= step) return null;
    const movePage = (/** @type {number} */ by) => () => {
      this.from[axis] = Math.max(0, Math.min(all - 1, Math.round((range[0] + range[1]) / 2) + by));
      this.layout();
    };
    return h(
      "p",
      { class: "pager" },
      h("button", { type: "button", class: "small", disabled: range[0] === 0, onclick: movePage(-step) }, `Previous ${axis}`),
      ` ${axis} ${range[0]} to ${range[1] - 1} of ${all} `,
      h("button", { type: "button", class: "small", disabled: range[1] === all, onclick: movePage(step) }, `Next ${axis}`),
    );
  }

  /** @param {Event} event @returns {Cell | null} */
  cellAt(event) {
    const { row, column } = /** @type {HTMLElement} */ (event.target).dataset;
    return row === undefined ? null : { row: Number(row), column: Number(column) };
  }

  /** @param {Cell | null} cursor @param {Cell | null} pin */
  mark(cursor, pin) {
    [this.cursor, this.pin] = [cursor, pin];
    for (const [kind, cell] of /** @type {[string, Cell | null][]} */ ([
      ["cursor", cursor],
      ["pin", pin],
    ])) {
      this.element.querySelector(`td.${kind}`)?.classList.remove(kind);
      if (cell) this.cells?.get(`${cell.row} ${cell.column}`)?.classList.add(kind);
    }
  }
}

/** All weights of a map as tab-separated values. @param {FigureData} figureData @returns {string} */
export function toTsv(figureData) {
  const { map, rows, columns } = figureData;
  const digits = figureData.rounded ? 4 : 9;
  // Labels contain no tabs or line breaks, unlike tokens.
  const lines = [["", ...columns.labels].join("\t")];
  for (let t = 0; t < map.rows; t++) {
    lines.push(
      [rows.labels[t], ...Array.from(map.exactRow(t), (weight) => Number(weight.toPrecision(digits)))].join("\t"),
    );
  }
  return `${lines.join("\n")}\n`;
}
