/** Other forms of a map than the heat map: lines, shaded text, a table. */

import { html, label, setAttributes, setChildren, svgElement, textWidth, tokenText } from "../core/dom.js";
import { formatShort, formatSigned, formatWeight, truncate } from "../core/tokens.js";
import { argmax } from "../weights/maths.js";

/* Lines between query tokens and key tokens; width and opacity show the weight. */

/** @typedef {import("./heatmap.js").FigureData} FigureData */
/** @typedef {import("./heatmap.js").Cell} Cell */

/** Maximum number of tokens per side; of a longer text, those around the selected token. */
const MAX_TOKENS_PER_SIDE = 40;
/** Maximum number of lines while no token is selected: the strongest ones. */
const MAX_LINES = 900;
const MAX_TOKEN_LENGTH = 24;
/** Minimum distance between tokens in a line of text; longer texts are written as two columns. */
const MIN_TOKEN_GAP = 12;
/** Distance between the lines of several heads, and width of the numbers of one. */
const HEAD_GAP = 5;
const NUMBER_WIDTH = 44;

/**
 * Returns at most `maxLength` elements of a range, around a center.
 * @param {[number, number]} range @param {number} center @param {number} maxLength @returns {[number, number]}
 */
function windowAround([from, to], center, maxLength) {
  if (to - from <= maxLength) return [from, to];
  const begin = Math.max(from, Math.min(to - maxLength, Math.round(center - maxLength / 2)));
  return [begin, begin + maxLength];
}

export class Lines {
  /** @param {import("./heatmap.js").FigureHandlers} handlers @param {boolean} [isLarge] for a projector */
  constructor(handlers, isLarge = false) {
    this.handlers = handlers;
    this.isLarge = isLarge;
    this.svg = svgElement("svg", { "aria-hidden": "true" });
    this.element = html(
      "div",
      {
        class: "figure lines",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "lines between tokens",
        onpointermove: (event) => handlers.point(this.cellAt(event)),
        onpointerleave: () => handlers.point(null),
        onclick: (event) => {
          const cell = this.cellAt(event);
          if (cell) handlers.pin(cell);
        },
      },
      this.svg,
    );
    this.cursor = null;
    this.pin = null;
  }

  /** @param {FigureData} figureData */
  show(figureData) {
    this.figureData = figureData;
    this.layout();
  }

  /** The visible tokens of both sides. */
  window() {
    const { map, zoom } = this.figureData;
    const all = zoom ?? { rows: [0, map.rows], columns: [0, map.columns] };
    const at = this.cursor ?? this.pin;
    const row = at?.row ?? all.rows[0];
    const rows = windowAround(all.rows, row, MAX_TOKENS_PER_SIDE);
    // Of a long text, start at the query's largest weight.
    const column = at ? (at.column ?? argmax(map.exactRow(row))) : all.columns[0];
    return { rows, columns: windowAround(all.columns, column, MAX_TOKENS_PER_SIDE) };
  }

  layout() {
    if (!this.figureData || !this.element.isConnected || !this.element.clientWidth) return;
    const { rows, columns, name } = this.figureData;
    const range = this.window();
    const [rowCount, keyCount] = [range.rows[1] - range.rows[0], range.columns[1] - range.columns[0]];
    const availableWidth = Math.max(240, this.element.clientWidth);
    this.geometry = this.horizontalGeometry(range, availableWidth) ?? this.verticalGeometry(range, availableWidth);
    const { width, height } = this.geometry;
    setAttributes(this.element, {
      "aria-label":
        `Lines of ${name}: ${rowCount} query tokens (${rows.title}), ${keyCount} key tokens (${columns.title}). ` +
        "Up and down move between query tokens, left and right between key tokens, Enter pins.",
    });
    setAttributes(this.svg, { width, height, viewBox: `0 0 ${width} ${height}` });
    this.allLines = svgElement("g", { class: "all-lines" });
    this.focus = svgElement("g", { class: "focus" });
    setChildren(this.svg, this.headings(), this.allLines, this.focus, this.tokens());
    this.drawAllLines();
    this.mark(this.cursor, this.pin);
  }

  /**
   * Widths of the labels of an axis. @param {import("../core/tokens.js").Axis} axis @param {[number, number]} range
   * @param {number} size
   */
  labelWidths(axis, range, size) {
    const font = `${size}px ${getComputedStyle(this.element).fontFamily}`;
    return axis.labels.slice(...range).map((text) => textWidth(truncate(text, MAX_TOKEN_LENGTH), font));
  }

  /**
   * Keys above, queries below, as two lines of text; null if they are too long for the width.
   * @param {{rows: [number, number], columns: [number, number]}} range @param {number} width
   */
  horizontalGeometry(range, width) {
    const { rows, columns } = this.figureData;
    const size = this.isLarge ? Math.max(18, Math.min(36, width / 40)) : 17;
    /**
     * Centers of the labels, spread over the width. @param {import("../core/tokens.js").Axis} axis
     * @param {[number, number]} part
     */
    const centers = (axis, part) => {
      const widths = this.labelWidths(axis, part, size);
      const text = widths.reduce((sum, one) => sum + one, 0);
      const gap = Math.min(110, (width - text) / widths.length);
      if (gap < MIN_TOKEN_GAP) return null;
      let x = (width - text - gap * (widths.length - 1)) / 2;
      const found = widths.map((one) => {
        const center = x + one / 2;
        x += one + gap;
        return axis.rtl ? width - center : center;
      });
      return found;
    };
    const [rowCenters, columnCenters] = [centers(rows, range.rows), centers(columns, range.columns)];
    if (!rowCenters || !columnCenters) return null;
    const span = this.isLarge ? 0.36 * window.innerHeight : Math.max(110, Math.min(220, 0.15 * window.innerHeight));
    const top = (this.isLarge ? 84 : 52) + 14 * (this.layers.length - 1);
    const rowY = top + span + (this.isLarge ? 40 : 30);
    return {
      isHorizontal: true,
      range,
      step: 34,
      size,
      width,
      height: rowY + (this.isLarge ? 54 : 34),
      head: 20,
      top,
      span,
      rowY,
      rowCenters,
      columnCenters,
    };
  }

  /**
   * Queries on the left, keys on the right. @param {{rows: [number, number], columns: [number, number]}} range
   * @param {number} availableWidth
   */
  verticalGeometry(range, availableWidth) {
    const { rows, columns } = this.figureData;
    const [rowCount, keyCount] = [range.rows[1] - range.rows[0], range.columns[1] - range.columns[0]];
    const more = Math.max(rowCount, keyCount);
    const step = Math.max(19, Math.min(42, Math.floor((0.62 * window.innerHeight) / more)));
    const size = Math.max(12, Math.min(17, Math.floor(step * 0.55)));
    const numbers = 58 + NUMBER_WIDTH * Math.min(2, this.layers.length - 1);
    const left = Math.min(0.36 * availableWidth, Math.max(...this.labelWidths(rows, range.rows, size)) + 18);
    const right = Math.min(0.36 * availableWidth, Math.max(...this.labelWidths(columns, range.columns, size)) + 18);
    const width = Math.min(availableWidth, Math.max(left + right + numbers + 180, Math.min(availableWidth, 860)));
    const head = 44;
    const spreads = [rowCount, keyCount].map((count) => Math.min(1.5 * step, (more * step) / count));
    return {
      isHorizontal: false,
      range,
      step,
      size,
      left,
      right: width - right - numbers,
      width,
      height: head + more * step + 34,
      head,
      rowStep: spreads[0],
      columnStep: spreads[1],
      rowTop: head + (more * step - spreads[0] * rowCount) / 2,
      columnTop: head + (more * step - spreads[1] * keyCount) / 2,
    };
  }

  headings() {
    const { isHorizontal, left, right, head, rowY } = this.geometry;
    const { rows, columns } = this.figureData;
    const text = { class: "heading", "font-size": this.isLarge ? "16px" : "12px" };
    return svgElement(
      "g",
      { class: "headings" },
      isHorizontal
        ? [
            label(`${columns.title} (keys)`, false, "left", { x: 0, y: 10, ...text }),
            label(`${rows.title} (queries)`, false, "left", { x: 0, y: rowY + (this.isLarge ? 46 : 30), ...text }),
          ]
        : [
            label(rows.title, false, "right", { x: left - 12, y: head - 22, ...text }),
            label(columns.title, false, "left", { x: right + 12, y: head - 22, ...text }),
          ],
    );
  }

  tokens() {
    const g = this.geometry;
    const { rows, columns } = this.figureData;
    const group = svgElement("g", { class: "tokens" });
    /**
     * @param {import("../core/tokens.js").Axis} axis @param {[number, number]} range @param {string} side
     * @param {(i: number) => {x: number, y: number}} at
     */
    const texts = (axis, range, side, at) => {
      const found = new Map();
      for (let i = range[0]; i < range[1]; i++) {
        const text = label(truncate(axis.labels[i], MAX_TOKEN_LENGTH), axis.rtl, side, {
          ...at(i),
          dy: "0.35em",
          class: "label",
          "font-size": `${g.size}px`,
        });
        found.set(i, text);
        group.append(text);
      }
      return found;
    };
    const middle = g.isHorizontal;
    this.rowTexts = texts(rows, g.range.rows, middle ? "middle" : "right", (t) =>
      middle ? { x: this.rowX(t), y: g.rowY } : { x: g.left - 12, y: this.rowY(t) },
    );
    this.columnTexts = texts(columns, g.range.columns, middle ? "middle" : "left", (c) =>
      middle ? { x: this.columnX(c), y: g.top - (this.isLarge ? 24 : 16) } : { x: g.right + 12, y: this.columnY(c) },
    );
    return group;
  }

  /** @param {number} row */
  rowX(row) {
    return this.geometry.rowCenters[row - this.geometry.range.rows[0]];
  }

  /** @param {number} column */
  columnX(column) {
    return this.geometry.columnCenters[column - this.geometry.range.columns[0]];
  }

  /** @param {number} row */
  rowY(row) {
    const g = this.geometry;
    return g.rowTop + (row - g.range.rows[0] + 0.5) * g.rowStep;
  }

  /** @param {number} column */
  columnY(column) {
    const g = this.geometry;
    return g.columnTop + (column - g.range.columns[0] + 0.5) * g.columnStep;
  }

  /** The end of the lines of a query token. @param {number} row @returns {[number, number]} */
  rowEnd(row) {
    const g = this.geometry;
    return g.isHorizontal ? [this.rowX(row), g.top + g.span + 12] : [g.left, this.rowY(row)];
  }

  /** The end of the lines of a key token. @param {number} column @returns {[number, number]} */
  columnEnd(column) {
    const g = this.geometry;
    return g.isHorizontal ? [this.columnX(column), g.top] : [g.right, this.columnY(column)];
  }

  /**
   * @param {[number, number]} from @param {[number, number]} to @param {number} weight @param {string} kind
   * @param {number | null} [color] of the head, if there are several
   */
  line(from, to, weight, kind, color = null) {
    const g = this.geometry;
    // Lines of several heads are drawn next to each other.
    const shift = color === null ? 0 : (color - (this.figureData.layers.length - 1) / 2) * HEAD_GAP;
    [from, to] = [from, to].map(([x, y]) => (g.isHorizontal ? [x + shift, y] : [x, y + shift]));
    const middle = g.isHorizontal ? (from[1] + to[1]) / 2 : (from[0] + to[0]) / 2;
    const [a, b] = g.isHorizontal
      ? [`${from[0]} ${middle}`, `${to[0]} ${middle}`]
      : [`${middle} ${from[1]}`, `${middle} ${to[1]}`];
    return svgElement("path", {
      class: kind,
      "data-color": color,
      d: `M${from[0]} ${from[1]}C${a} ${b} ${to[0]} ${to[1]}`,
      "stroke-width": (0.6 + weight * Math.min(color === null ? 11 : 6, g.step * 0.36)).toFixed(2),
      "stroke-opacity": (kind === "thread" ? 0.1 + 0.62 * weight : 0.22 + 0.7 * weight).toFixed(3),
    });
  }

  /**
   * The maps on display, with the colors of their heads.
   * @returns {{map: import("../weights/maps.js").AttentionMap, color: number | null}[]}
   */
  get layers() {
    return this.figureData.layers ?? [{ map: this.figureData.map, color: null }];
  }

  /** Draws the strongest lines of all tokens. */
  drawAllLines() {
    for (const { map, color } of this.layers) this.drawLinesOf(map, color);
  }

  /** @param {import("../weights/maps.js").AttentionMap} map @param {number | null} color */
  drawLinesOf(map, color) {
    const { range } = this.geometry;
    const columnCount = range.columns[1] - range.columns[0];
    const list = Array.from({ length: range.rows[1] - range.rows[0] }, (_, i) => range.rows[0] + i);
    const cells = new Float32Array(list.length * columnCount);
    map.readRows(list, range.columns[0], range.columns[1], cells);
    const minimum = Math.max(0.03, 1.2 / map.columns);
    const strongest = Array.from(cells.keys())
      .filter((i) => cells[i] >= minimum)
      .sort((a, b) => cells[b] - cells[a])
      .slice(0, MAX_LINES / this.layers.length)
      .reverse();
    for (const i of strongest) {
      const [row, column] = [list[Math.floor(i / columnCount)], range.columns[0] + (i % columnCount)];
      this.allLines.append(this.line(this.rowEnd(row), this.columnEnd(column), cells[i], "thread", color));
    }
  }

  /** @param {Cell | null} cursor @param {Cell | null} pin */
  mark(cursor, pin) {
    [this.cursor, this.pin] = [cursor, pin];
    const g = this.geometry;
    if (!g || !this.focus) return;
    const at = cursor ?? pin;
    if (at && !this.isVisible(at)) {
      this.layout();
      return;
    }
    this.svg.classList.toggle("chosen", at !== null && at !== undefined);
    setChildren(this.focus);
    for (const texts of [this.rowTexts, this.columnTexts]) {
      for (const text of texts.values()) text.classList.remove("on", "dim");
    }
    if (!at) return;
    if (at.row !== null) this.markRow(at);
    else if (at.column !== null) this.markColumn(at.column);
  }

  /** Whether the token of a cell is visible. @param {Cell} at */
  isVisible(at) {
    const { rows } = this.geometry.range;
    return at.row === null || (at.row >= rows[0] && at.row < rows[1]) || !this.inZoom(at);
  }

  /** Whether a cell is in the visible part of the map. @param {Cell} at */
  inZoom(at) {
    const { zoom, map } = this.figureData;
    const [from, to] = zoom?.rows ?? [0, map.rows];
    return at.row >= from && at.row < to;
  }

  /** @param {Cell} at */
  markRow(at) {
    const g = this.geometry;
    if (at.row < g.range.rows[0] || at.row >= g.range.rows[1]) return;
    this.rowTexts.get(at.row).classList.add("on");
    const strongest = new Float32Array(this.figureData.map.columns);
    this.layers.forEach(({ map, color }) => {
      const row = map.exactRow(at.row);
      row.forEach((weight, c) => (strongest[c] = Math.max(strongest[c], weight)));
      this.markWeights(at, row, color);
    });
    for (const [c, text] of this.columnTexts) {
      text.classList.toggle("dim", strongest[c] < 0.02 && c !== at.column);
      text.classList.toggle("on", c === at.column);
    }
  }

  /**
   * Draws the lines of one token in one head. @param {Cell} at @param {ArrayLike<number>} row its weights
   * @param {number | null} color
   */
  markWeights(at, row, color) {
    const g = this.geometry;
    const outside = { before: 0, after: 0 };
    for (let c = 0; c < row.length; c++) {
      if (c < g.range.columns[0]) outside.before += row[c];
      else if (c >= g.range.columns[1]) outside.after += row[c];
      else {
        if (row[c] >= 0.004)
          this.focus.append(this.line(this.rowEnd(at.row), this.columnEnd(c), row[c], "strand", color));
        if (row[c] >= 0.02 || (c === at.column && color === null))
          this.number(row[c], this.columnEnd(c), c === at.column, color);
      }
    }
    this.markOutside(at.row, outside, color);
  }

  /**
   * @param {number} weight @param {[number, number]} end of its line @param {boolean} on @param {number | null} [color]
   */
  number(weight, [x, y], on, color = null) {
    const { isHorizontal, width, top } = this.geometry;
    // The numbers of several heads are stacked above the token, or next to each other.
    const place = color ?? 0;
    const at = isHorizontal
      ? { x, y: top - (this.isLarge ? 56 : 38) - 14 * place }
      : { x: width - 2 - NUMBER_WIDTH * place, y };
    this.focus.append(
      label(formatShort(weight), false, isHorizontal ? "middle" : "right", {
        ...at,
        dy: "0.35em",
        class: on ? "weight on" : "weight",
        "data-color": color,
        "font-size": this.isLarge ? "20px" : "13px",
      }),
    );
  }

  /**
   * Lines to tokens outside the visible range end at its edge.
   * @param {number} row @param {{before: number, after: number}} outside @param {number | null} color
   */
  markOutside(row, outside, color) {
    const g = this.geometry;
    /** @type {Record<string, [number, number]>} */
    const edges = g.isHorizontal
      ? { before: [24, g.top], after: [g.width - 24, g.top] }
      : { before: [g.right, g.head - 6], after: [g.right, g.height - 20] };
    for (const side of ["before", "after"]) {
      if (outside[side] < 0.004) continue;
      const [x, y] = edges[side];
      const text = side === "before" ? "… before" : "… after";
      this.focus.append(
        this.line(this.rowEnd(row), edges[side], outside[side], "strand", color),
        g.isHorizontal
          ? label(text, false, side === "before" ? "left" : "right", {
              x: side === "before" ? 0 : g.width,
              y: y - 16,
              dy: "0.35em",
              class: "label outside",
              "font-size": "13px",
            })
          : label(text, false, "left", { x: x + 12, y, dy: "0.35em", class: "label outside", "font-size": "13px" }),
      );
      this.number(outside[side], edges[side], false, color);
    }
  }

  /** Highlights all tokens that attend to one token. @param {number} column */
  markColumn(column) {
    const g = this.geometry;
    if (column < g.range.columns[0] || column >= g.range.columns[1]) return;
    this.columnTexts.get(column).classList.add("on");
    const list = Array.from({ length: g.range.rows[1] - g.range.rows[0] }, (_, i) => g.range.rows[0] + i);
    const strongest = new Float32Array(list.length);
    for (const { map, color } of this.layers) {
      const weights = new Float32Array(list.length);
      map.readRows(list, column, column + 1, weights);
      list.forEach((row, i) => {
        strongest[i] = Math.max(strongest[i], weights[i]);
        if (weights[i] >= 0.004)
          this.focus.append(this.line(this.rowEnd(row), this.columnEnd(column), weights[i], "strand", color));
      });
    }
    list.forEach((row, i) => this.rowTexts.get(row).classList.toggle("dim", strongest[i] < 0.02));
  }

  /**
   * The token nearest to the pointer: a query token on the left or below, a key token on the right or above.
   * @param {MouseEvent} event @returns {Cell | null}
   */
  cellAt(event) {
    const g = this.geometry;
    if (!g) return null;
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (x < 0 || x > g.width) return null;
    if (g.isHorizontal) {
      const isRow = y > g.top + g.span / 2;
      const centers = isRow ? g.rowCenters : g.columnCenters;
      const nearest = centers.reduce(
        (best, center, i) => (Math.abs(center - x) < Math.abs(centers[best] - x) ? i : best),
        0,
      );
      return isRow
        ? { row: g.range.rows[0] + nearest, column: null }
        : { row: null, column: g.range.columns[0] + nearest };
    }
    if (x < (g.left + g.right) / 2) {
      const row = g.range.rows[0] + Math.floor((y - g.rowTop) / g.rowStep);
      return row >= g.range.rows[0] && row < g.range.rows[1] ? { row, column: null } : null;
    }
    const column = g.range.columns[0] + Math.floor((y - g.columnTop) / g.columnStep);
    return column >= g.range.columns[0] && column < g.range.columns[1] ? { row: null, column } : null;
  }
}

/* The text itself: the key tokens of the selected query token are shaded by weight. Suits long texts. */

/** Maximum number of tokens per text. */
const MAX_TEXT_TOKENS = 1500;

export class ShadedText {
  /** @param {import("./heatmap.js").FigureHandlers} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    this.element = html("div", {
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
    return html(
      "div",
      { class: "passage" },
      html("p", { class: "heading" }, title, html("span", { class: "role" }, ` ${role}`)),
      html("p", { class: "words", dir: axis.rtl ? "rtl" : "ltr" }, children),
    );
  }

  /** @param {string} axis @param {any} labels @param {[number, number]} range */
  spans(axis, labels, range) {
    const spans = new Map();
    for (let i = range[0]; i < range[1]; i++) {
      spans.set(i, html("bdi", { class: "token", [`data-${axis}`]: i }, labels.labels[i]));
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
    for (const [position, span] of this.rowSpans)
      this.shade(span, rowWeights ? rowWeights[position - this.range.rows[0]] : null);
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
        const stripe = html("i", { class: "stripe", "data-color": color, "aria-hidden": "true" });
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

/* Table of the weights, which screen readers can read and which can be copied. */

/** Number of visible rows and columns. */
const VISIBLE_ROWS = 40;
const VISIBLE_COLUMNS = 24;

export class Table {
  /** @param {import("./heatmap.js").FigureHandlers} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    this.element = html("div", { class: "figure table" });
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
        html(
          "tr",
          {},
          html("th", { scope: "row" }, tokenText(rows.labels[t], rows.rtl)),
          columnIndices.map((c) =>
            html("td", { "data-row": t, "data-column": c }, format(row[c], this.figureData.rounded)),
          ),
        ),
      );
    }
    const head = html(
      "tr",
      {},
      html("td", { class: "corner" }),
      columnIndices.map((c) => html("th", { scope: "col" }, tokenText(columns.labels[c], columns.rtl))),
    );
    const table = html(
      "table",
      {
        onpointerover: (event) => this.handlers.point(this.cellAt(event)),
        onpointerleave: () => this.handlers.point(null),
        onclick: (event) => {
          const cell = this.cellAt(event);
          if (cell) this.handlers.pin(cell);
        },
      },
      html("caption", { class: "visually-hidden" }, `Weights of ${name}: queries in rows, keys in columns.`),
      html("thead", {}, head),
      html("tbody", {}, body),
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
      html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table of ${name}` }, table),
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
    return html(
      "p",
      { class: "pager" },
      html(
        "button",
        { type: "button", class: "small", disabled: range[0] === 0, onclick: movePage(-step) },
        `Previous ${axis}`,
      ),
      ` ${axis} ${range[0]} to ${range[1] - 1} of ${all} `,
      html(
        "button",
        { type: "button", class: "small", disabled: range[1] === all, onclick: movePage(step) },
        `Next ${axis}`,
      ),
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
