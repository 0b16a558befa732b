/** Table of the weights, which screen readers can read and which can be copied. */

import { change, fill, h, tokenText } from "../core/dom.js";
import { around } from "./lines.js";
import { exactly, withSign } from "../core/tokens.js";

/** @typedef {import("./heatmap.js").Shot} Shot */
/** @typedef {import("./heatmap.js").Cell} Cell */

/** Number of visible rows and columns. */
const ROWS = 40;
const COLUMNS = 24;

export class Table {
  /** @param {import("./heatmap.js").Told} told */
  constructor(told) {
    this.told = told;
    this.element = h("div", { class: "figure table" });
    this.from = { rows: 0, columns: 0 };
    this.cursor = null;
    this.pin = null;
  }

  /** @param {Shot} shot */
  show(shot) {
    const same = this.shot?.map === shot.map;
    this.shot = shot;
    if (!same) {
      const at = this.cursor ?? this.pin;
      this.from = { rows: at?.row ?? 0, columns: at?.column ?? 0 };
    }
    this.lay();
  }

  lay() {
    if (!this.shot) return;
    const { map, rows, columns, name } = this.shot;
    const seen = {
      rows: around([0, map.rows], this.from.rows, ROWS),
      columns: around([0, map.columns], this.from.columns, COLUMNS),
    };
    const places = Array.from({ length: seen.columns[1] - seen.columns[0] }, (_, i) => seen.columns[0] + i);
    const number = map.signed ? withSign : exactly;
    const body = [];
    for (let t = seen.rows[0]; t < seen.rows[1]; t++) {
      const row = map.exact(t);
      body.push(
        h(
          "tr",
          {},
          h("th", { scope: "row" }, tokenText(rows.labels[t], rows.rtl)),
          places.map((c) => h("td", { "data-row": t, "data-column": c }, number(row[c], this.shot.rounded))),
        ),
      );
    }
    const head = h(
      "tr",
      {},
      h("td", { class: "corner" }),
      places.map((c) => h("th", { scope: "col" }, tokenText(columns.labels[c], columns.rtl))),
    );
    const table = h(
      "table",
      {
        onpointerover: (event) => this.told.point(this.cellAt(event)),
        onpointerleave: () => this.told.point(null),
        onclick: (event) => {
          const cell = this.cellAt(event);
          if (cell) this.told.pin(cell);
        },
      },
      h("caption", { class: "unseen" }, `Weights of ${name}: queries in rows, keys in columns.`),
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
    fill(
      this.element,
      this.turner("rows", seen.rows, map.rows, ROWS),
      this.turner("columns", seen.columns, map.columns, COLUMNS),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table of ${name}` }, table),
    );
    // Keep the focus, so that keys continue to work.
    if (focused) /** @type {HTMLElement} */ (this.element.querySelector(".scroll")).focus({ preventScroll: true });
    if (columns.rtl) change(table, { dir: "rtl" });
    this.mark(this.cursor, this.pin);
  }

  /**
   * Buttons that page through rows or columns, if there are more.
   * @param {"rows" | "columns"} axis @param {[number, number]} seen @param {number} all @param {number} step
   */
  turner(axis, seen, all, step) {
    if (all <= step) return null;
    const turn = (/** @type {number} */ by) => () => {
      this.from[axis] = Math.max(0, Math.min(all - 1, Math.round((seen[0] + seen[1]) / 2) + by));
      this.lay();
    };
    return h(
      "p",
      { class: "turner" },
      h("button", { type: "button", class: "small", disabled: seen[0] === 0, onclick: turn(-step) }, `Previous ${axis}`),
      ` ${axis} ${seen[0]} to ${seen[1] - 1} of ${all} `,
      h("button", { type: "button", class: "small", disabled: seen[1] === all, onclick: turn(step) }, `Next ${axis}`),
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

/** All weights of a map as tab-separated values. @param {Shot} shot @returns {string} */
export function numbersOf(shot) {
  const { map, rows, columns } = shot;
  const digits = shot.rounded ? 4 : 9;
  // Labels contain no tabs or line breaks, unlike tokens.
  const lines = [["", ...columns.labels].join("\t")];
  for (let t = 0; t < map.rows; t++) {
    lines.push(
      [rows.labels[t], ...Array.from(map.exact(t), (weight) => Number(weight.toPrecision(digits)))].join("\t"),
    );
  }
  return `${lines.join("\n")}\n`;
}
