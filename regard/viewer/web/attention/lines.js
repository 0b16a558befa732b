/** Lines between query tokens and key tokens; width and opacity show the weight. */

import { greatestIn } from "../weights/maths.js";
import { change, fill, h, s } from "../core/dom.js";
import { label, textWidth } from "./heatmap.js";
import { roughly, shortened } from "../core/tokens.js";

/** @typedef {import("./heatmap.js").Shot} Shot */
/** @typedef {import("./heatmap.js").Cell} Cell */

/** Maximum number of tokens per side; of a longer text, those around the selected token. */
export const STANDING = 40;
/** Maximum number of lines while no token is selected: the strongest ones. */
const DRAWN = 900;
const LONGEST = 24;

/**
 * Returns at most `most` elements of a range, around a center.
 * @param {[number, number]} range @param {number} centre @param {number} most @returns {[number, number]}
 */
export function around([from, to], centre, most) {
  if (to - from <= most) return [from, to];
  const begin = Math.max(from, Math.min(to - most, Math.round(centre - most / 2)));
  return [begin, begin + most];
}

export class Lines {
  /** @param {import("./heatmap.js").Told} told */
  constructor(told) {
    this.told = told;
    this.svg = s("svg", { "aria-hidden": "true" });
    this.element = h(
      "div",
      {
        class: "figure lines",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "lines between tokens",
        onpointermove: (event) => told.point(this.cellAt(event)),
        onpointerleave: () => told.point(null),
        onclick: (event) => {
          const cell = this.cellAt(event);
          if (cell) told.pin(cell);
        },
      },
      this.svg,
    );
    this.cursor = null;
    this.pin = null;
  }

  /** @param {Shot} shot */
  show(shot) {
    this.shot = shot;
    this.lay();
  }

  /** The visible tokens of both sides. */
  window() {
    const { map, zoom } = this.shot;
    const all = zoom ?? { rows: [0, map.rows], columns: [0, map.columns] };
    const at = this.cursor ?? this.pin;
    const row = at?.row ?? all.rows[0];
    const rows = around(all.rows, row, STANDING);
    // Of a long text, start at the query's largest weight.
    const column = at ? (at.column ?? greatestIn(map.exact(row))) : all.columns[0];
    return { rows, columns: around(all.columns, column, STANDING) };
  }

  lay() {
    if (!this.shot || !this.element.isConnected || !this.element.clientWidth) return;
    const { rows, columns, name } = this.shot;
    const seen = this.window();
    const [tall, other] = [seen.rows[1] - seen.rows[0], seen.columns[1] - seen.columns[0]];
    const room = Math.max(240, this.element.clientWidth);
    const more = Math.max(tall, other);
    const step = Math.max(19, Math.min(42, Math.floor((0.62 * window.innerHeight) / more)));
    const size = Math.max(12, Math.min(17, Math.floor(step * 0.55)));
    const font = `${size}px ${getComputedStyle(this.element).fontFamily}`;
    /** @param {string[]} labels */
    const longest = (labels) => Math.max(...labels.map((text) => textWidth(shortened(text, LONGEST), font)));
    const left = Math.min(0.36 * room, longest(rows.labels.slice(...seen.rows)) + 18);
    const right = Math.min(0.36 * room, longest(columns.labels.slice(...seen.columns)) + 18);
    const numbers = 58;
    const width = Math.min(room, Math.max(left + right + numbers + 180, Math.min(room, 860)));
    const head = 44;
    const height = head + more * step + 34;
    const spreads = [tall, other].map((count) => Math.min(1.5 * step, (more * step) / count));
    this.geometry = {
      seen,
      step,
      size,
      left,
      right: width - right - numbers,
      width,
      height,
      head,
      numbers,
      rowStep: spreads[0],
      columnStep: spreads[1],
      rowTop: head + (more * step - spreads[0] * tall) / 2,
      columnTop: head + (more * step - spreads[1] * other) / 2,
    };
    change(this.element, {
      "aria-label":
        `Lines of ${name}: ${tall} query tokens, ${other} key tokens. ` +
        "Up and down move between query tokens, left and right between key tokens, Enter pins.",
    });
    change(this.svg, { width, height, viewBox: `0 0 ${width} ${height}` });
    this.idle = s("g", { class: "idle" });
    this.focus = s("g", { class: "focus" });
    fill(this.svg, this.headings(), this.idle, this.focus, this.tokens());
    this.drawIdle();
    this.mark(this.cursor, this.pin);
  }

  headings() {
    const { left, right, head } = this.geometry;
    const { rows, columns } = this.shot;
    return s(
      "g",
      { class: "headings" },
      label(rows.called, false, "right", { x: left - 12, y: head - 22, class: "heading", "font-size": "12px" }),
      label(columns.called, false, "left", { x: right + 12, y: head - 22, class: "heading", "font-size": "12px" }),
    );
  }

  tokens() {
    const g = this.geometry;
    const { rows, columns } = this.shot;
    const group = s("g", { class: "tokens" });
    this.rowTexts = new Map();
    this.columnTexts = new Map();
    for (let t = g.seen.rows[0]; t < g.seen.rows[1]; t++) {
      const text = label(shortened(rows.labels[t], LONGEST), rows.rtl, "right", {
        x: g.left - 12,
        y: this.rowY(t),
        dy: "0.35em",
        class: "label",
        "font-size": `${g.size}px`,
      });
      this.rowTexts.set(t, text);
      group.append(text);
    }
    for (let c = g.seen.columns[0]; c < g.seen.columns[1]; c++) {
      const text = label(shortened(columns.labels[c], LONGEST), columns.rtl, "left", {
        x: g.right + 12,
        y: this.columnY(c),
        dy: "0.35em",
        class: "label",
        "font-size": `${g.size}px`,
      });
      this.columnTexts.set(c, text);
      group.append(text);
    }
    return group;
  }

  /** @param {number} row */
  rowY(row) {
    const g = this.geometry;
    return g.rowTop + (row - g.seen.rows[0] + 0.5) * g.rowStep;
  }

  /** @param {number} column */
  columnY(column) {
    const g = this.geometry;
    return g.columnTop + (column - g.seen.columns[0] + 0.5) * g.columnStep;
  }

  /** @param {number} from @param {number} to @param {number} weight @param {string} kind */
  line(from, to, weight, kind) {
    const g = this.geometry;
    const middle = (g.left + g.right) / 2;
    return s("path", {
      class: kind,
      d: `M${g.left} ${from}C${middle} ${from} ${middle} ${to} ${g.right} ${to}`,
      "stroke-width": (0.6 + weight * Math.min(11, g.step * 0.36)).toFixed(2),
      "stroke-opacity": (kind === "thread" ? 0.1 + 0.62 * weight : 0.22 + 0.7 * weight).toFixed(3),
    });
  }

  /** Draws the strongest lines of all tokens. */
  drawIdle() {
    const { seen } = this.geometry;
    const wide = seen.columns[1] - seen.columns[0];
    const list = Array.from({ length: seen.rows[1] - seen.rows[0] }, (_, i) => seen.rows[0] + i);
    const cells = new Float32Array(list.length * wide);
    this.shot.map.rowsInto(list, seen.columns[0], seen.columns[1], cells);
    const least = Math.max(0.03, 1.2 / this.shot.map.columns);
    const drawn = Array.from(cells.keys())
      .filter((i) => cells[i] >= least)
      .sort((a, b) => cells[b] - cells[a])
      .slice(0, DRAWN)
      .reverse();
    for (const i of drawn) {
      const [row, column] = [list[Math.floor(i / wide)], seen.columns[0] + (i % wide)];
      this.idle.append(this.line(this.rowY(row), this.columnY(column), cells[i], "thread"));
    }
  }

  /** @param {Cell | null} cursor @param {Cell | null} pin */
  mark(cursor, pin) {
    [this.cursor, this.pin] = [cursor, pin];
    const g = this.geometry;
    if (!g || !this.focus) return;
    const at = cursor ?? pin;
    if (at && !this.holds(at)) {
      this.lay();
      return;
    }
    this.svg.classList.toggle("chosen", at !== null && at !== undefined);
    fill(this.focus);
    for (const texts of [this.rowTexts, this.columnTexts]) {
      for (const text of texts.values()) text.classList.remove("on", "dim");
    }
    if (!at) return;
    if (at.row !== null) this.markRow(at);
    else if (at.column !== null) this.markColumn(at.column);
  }

  /** Whether the token of a cell is visible. @param {Cell} at */
  holds(at) {
    const { rows } = this.geometry.seen;
    return at.row === null || (at.row >= rows[0] && at.row < rows[1]) || !this.inZoom(at);
  }

  /** Whether a cell is in the visible part of the map. @param {Cell} at */
  inZoom(at) {
    const { zoom, map } = this.shot;
    const [from, to] = zoom?.rows ?? [0, map.rows];
    return at.row >= from && at.row < to;
  }

  /** @param {Cell} at */
  markRow(at) {
    const g = this.geometry;
    if (at.row < g.seen.rows[0] || at.row >= g.seen.rows[1]) return;
    const row = this.shot.map.exact(at.row);
    this.rowTexts.get(at.row).classList.add("on");
    const outside = { before: 0, after: 0 };
    for (let c = 0; c < row.length; c++) {
      if (c < g.seen.columns[0]) outside.before += row[c];
      else if (c >= g.seen.columns[1]) outside.after += row[c];
      else {
        const text = this.columnTexts.get(c);
        text.classList.toggle("dim", row[c] < 0.02 && c !== at.column);
        if (row[c] >= 0.004) this.focus.append(this.line(this.rowY(at.row), this.columnY(c), row[c], "strand"));
        if (row[c] >= 0.02 || c === at.column) this.number(row[c], this.columnY(c), c === at.column);
        if (c === at.column) text.classList.add("on");
      }
    }
    this.markOutside(at.row, outside);
  }

  /** @param {number} weight @param {number} y @param {boolean} on */
  number(weight, y, on) {
    const { width } = this.geometry;
    this.focus.append(
      label(roughly(weight), false, "right", {
        x: width - 2,
        y,
        dy: "0.35em",
        class: on ? "weight on" : "weight",
        "font-size": "13px",
      }),
    );
  }

  /**
   * Lines to tokens outside the visible range end at its edge.
   * @param {number} row @param {{before: number, after: number}} outside
   */
  markOutside(row, outside) {
    const g = this.geometry;
    const edges = { before: g.head - 6, after: g.height - 20 };
    for (const side of ["before", "after"]) {
      if (outside[side] < 0.004) continue;
      this.focus.append(
        this.line(this.rowY(row), edges[side], outside[side], "strand"),
        label(side === "before" ? "… before" : "… after", false, "left", {
          x: g.right + 12,
          y: edges[side],
          dy: "0.35em",
          class: "label outside",
          "font-size": "13px",
        }),
      );
      this.number(outside[side], edges[side], false);
    }
  }

  /** Highlights all tokens that attend to one token. @param {number} column */
  markColumn(column) {
    const g = this.geometry;
    if (column < g.seen.columns[0] || column >= g.seen.columns[1]) return;
    this.columnTexts.get(column).classList.add("on");
    const list = Array.from({ length: g.seen.rows[1] - g.seen.rows[0] }, (_, i) => g.seen.rows[0] + i);
    const weights = new Float32Array(list.length);
    this.shot.map.rowsInto(list, column, column + 1, weights);
    list.forEach((row, i) => {
      this.rowTexts.get(row).classList.toggle("dim", weights[i] < 0.02);
      if (weights[i] >= 0.004) this.focus.append(this.line(this.rowY(row), this.columnY(column), weights[i], "strand"));
    });
  }

  /**
   * The token nearest to the pointer: a query token on the left, a key token on the right.
   * @param {MouseEvent} event @returns {Cell | null}
   */
  cellAt(event) {
    const g = this.geometry;
    if (!g) return null;
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (x < 0 || x > g.width) return null;
    if (x < (g.left + g.right) / 2) {
      const row = g.seen.rows[0] + Math.floor((y - g.rowTop) / g.rowStep);
      return row >= g.seen.rows[0] && row < g.seen.rows[1] ? { row, column: null } : null;
    }
    const column = g.seen.columns[0] + Math.floor((y - g.columnTop) / g.columnStep);
    return column >= g.seen.columns[0] && column < g.seen.columns[1] ? { row: null, column } : null;
  }
}
