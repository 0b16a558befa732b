/** The text itself: the key tokens of the selected query token are shaded by weight. Suits long texts. */

import { greatestIn } from "../weights/maths.js";
import { change, fill, h } from "../core/dom.js";
import { around } from "./lines.js";

/** @typedef {import("./heatmap.js").Shot} Shot */
/** @typedef {import("./heatmap.js").Cell} Cell */

/** Maximum number of tokens per text. */
const SPELT = 1500;

export class Prose {
  /** @param {import("./heatmap.js").Told} told */
  constructor(told) {
    this.told = told;
    this.element = h("div", {
      class: "figure prose",
      tabindex: 0,
      role: "application",
      "aria-roledescription": "text",
      onpointerover: (event) => {
        const cell = this.cellAt(event);
        if (cell) told.point(cell);
      },
      onpointerleave: () => told.point(null),
      onclick: (event) => {
        const cell = this.cellAt(event);
        if (cell) told.pin(cell);
      },
    });
    this.cursor = null;
    this.pin = null;
  }

  /** @param {Shot} shot */
  show(shot) {
    this.shot = shot;
    this.lay();
  }

  lay() {
    if (!this.shot) return;
    const { rows, columns, map, zoom, name } = this.shot;
    const all = zoom ?? { rows: [0, map.rows], columns: [0, map.columns] };
    const at = this.cursor ?? this.pin;
    this.seen = {
      rows: around(all.rows, at?.row ?? 0, SPELT),
      columns: around(all.columns, at?.column ?? 0, SPELT),
    };
    this.rowSpans = this.spans("row", rows, this.seen.rows);
    this.columnSpans = this.spans("column", columns, this.seen.columns);
    const long = map.rows + map.columns > 80;
    change(this.element, {
      "aria-label": `Text of ${name}. Up and down move between query tokens, left and right between key tokens, Enter pins.`,
      class: long ? "figure prose long" : "figure prose",
    });
    fill(
      this.element,
      this.block(rows.called, "(queries)", rows, this.rowSpans),
      this.block(columns.called, "(keys)", columns, this.columnSpans),
    );
    this.mark(this.cursor, this.pin);
  }

  /** @param {string} called @param {string} does @param {any} axis @param {Map<number, HTMLElement>} spans */
  block(called, does, axis, spans) {
    /** @type {any[]} */
    const children = [];
    let last = null;
    for (const [place, span] of spans) {
      const word = axis.wordAt(place);
      if (children.length && (axis.joined || word === null || word < 0 || word !== last)) children.push(" ");
      children.push(span);
      last = word;
    }
    return h(
      "div",
      { class: "passage" },
      h("p", { class: "heading" }, called, h("span", { class: "does" }, ` ${does}`)),
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
    if (!this.seen) return;
    const at = cursor ?? pin;
    const { map } = this.shot;
    if (at && at.row !== null && !this.rowSpans.has(at.row) && at.row < map.rows) {
      this.lay();
      return;
    }
    for (const [place, span] of this.rowSpans) span.classList.toggle("on", at?.row === place);
    for (const [place, span] of this.columnSpans) span.classList.toggle("on", at?.column === place);
    let [ofRows, ofColumns] = [null, null];
    if (at && at.row !== null) ofColumns = map.exact(at.row);
    else if (at && at.column !== null) {
      ofRows = new Float32Array(this.seen.rows[1] - this.seen.rows[0]);
      map.rowsInto([...this.rowSpans.keys()], at.column, at.column + 1, ofRows);
    }
    if (ofColumns) this.reveal(this.columnSpans.get(at.column ?? greatestIn(ofColumns)));
    if (ofRows) this.reveal(this.rowSpans.get(this.seen.rows[0] + greatestIn(ofRows)));
    if (at) this.reveal(this.rowSpans.get(at.row) ?? this.columnSpans.get(at.column));
    for (const [place, span] of this.columnSpans) this.shade(span, ofColumns ? ofColumns[place] : null);
    for (const [place, span] of this.rowSpans) this.shade(span, ofRows ? ofRows[place - this.seen.rows[0]] : null);
  }

  /** Scrolls a long text, but not the page, to a token. @param {HTMLElement | undefined} span */
  reveal(span) {
    const words = span?.parentElement;
    if (!words || words.scrollHeight <= words.clientHeight) return;
    const [token, box] = [span.getBoundingClientRect(), words.getBoundingClientRect()];
    if (token.top < box.top) words.scrollTop += token.top - box.top - box.height / 3;
    else if (token.bottom > box.bottom) words.scrollTop += token.bottom - box.bottom + box.height / 3;
  }

  /** @param {HTMLElement} span @param {number | null} weight */
  shade(span, weight) {
    const { painter } = this.shot;
    span.style.background = weight === null ? "" : painter.css(weight);
    span.classList.toggle("light", weight !== null && painter.wantsLight(weight));
    span.classList.toggle("dark", weight !== null && !painter.wantsLight(weight));
  }
}
