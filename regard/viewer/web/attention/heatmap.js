/**
 * Heat map of one head, or of a part of it: one row per query token, one column per key token.
 */

import { Picture, wholeOf } from "../weights/maps.js";
import { change, fill, h, s } from "../core/dom.js";
import { isolated, shortened } from "../core/tokens.js";

/** @typedef {import("../core/state.js").Zoom} Zoom */
/** @typedef {import("../core/tokens.js").Axis} Axis */
/** @typedef {import("../weights/maps.js").Weights} Weights */
/** @typedef {{row: number | null, column: number | null}} Cell */
/**
 * The contents of a figure.
 * @typedef {{map: Weights, rows: Axis, columns: Axis, zoom: Zoom | null, painter: any, name: string, rounded?: boolean,
 *   gold: ((row: number, column: number) => boolean) | null, shut: ((row: number, column: number) => boolean) | null}} Shot
 * The event handlers of a figure.
 * @typedef {{point: (cell: Cell | null) => void, pin: (cell: Cell) => void, zoom: (zoom: Zoom | null) => void}} Told
 */

/** Minimum and maximum size of a labeled cell, in pixels. */
const LABELLED = 13;
const LARGEST = 68;
/** Up to this number of rows, every row is labeled, even if the page has to scroll. */
const ALL_LABELLED = 72;
/** Minimum size of a cell with a number in it. */
const NUMBERED = 32;
/** Maximum number of cells drawn as SVG rectangles; larger maps are drawn as pixels. */
const SQUARES = 2500;
const LETTERS = 22;

/** @type {CanvasRenderingContext2D | null} */
let ruler = null;

/** Width of a text in pixels. @param {string} text @param {string} font */
export function textWidth(text, font) {
  ruler ??= document.createElement("canvas").getContext("2d");
  ruler.font = font;
  return ruler.measureText(text).width;
}

/** A text of an SVG drawing with its own direction; `side` is the side of its anchor: left, middle or right. */
export function label(text, rtl, side, attributes) {
  const anchors = rtl
    ? { left: "end", middle: "middle", right: "start" }
    : { left: "start", middle: "middle", right: "end" };
  return s(
    "text",
    { "text-anchor": anchors[side], direction: rtl ? "rtl" : "ltr", "unicode-bidi": "isolate", ...attributes },
    text,
  );
}

/** Rounds a step of axis ticks up to 1, 2 or 5 times a power of ten. @param {number} least */
function niceStep(least) {
  const ten = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((n) => n * ten).find((step) => step >= least) ?? 10 * ten;
}

export class HeatMap {
  /** @param {import("../core/scheduler.js").Work} work @param {string} key @param {Told} told */
  constructor(work, key, told) {
    this.work = work;
    this.key = key;
    this.told = told;
    this.canvas = h("canvas", { class: "cells", "aria-hidden": "true" });
    this.svg = s("svg", { "aria-hidden": "true" });
    this.progress = h("p", { class: "progress", "data-saved": "no" });
    this.element = h(
      "div",
      {
        class: "figure heat",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "heat map",
        onpointermove: (event) => this.moved(event),
        onpointerleave: () => this.drag === null && told.point(null),
        onpointerdown: (event) => this.pressed(event),
        onpointerup: (event) => this.released(event),
        onpointercancel: () => this.dropDrag(),
        ondblclick: (event) => this.zoomAt(event, 0.5),
      },
      this.canvas,
      this.svg,
      this.progress,
    );
    this.element.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    /** @type {{x: number, y: number, moved: boolean} | null} */
    this.drag = null;
    /** @type {Shot | null} */
    this.shot = null;
    /** @type {Picture | null} */
    this.picture = null;
    /** The raster of the entire map, which is completed while a part is displayed. @type {Picture | null} */
    this.far = null;
    this.cursor = null;
    this.pin = null;
  }

  /** @param {Shot} shot */
  show(shot) {
    const same = this.shot?.map === shot.map;
    this.shot = shot;
    if (!same) [this.picture, this.far] = [null, null];
    this.lay();
  }

  /** Computes the layout from the available space, the number of cells and the widths of their labels. */
  place() {
    const { rows, columns, map } = this.shot;
    const zoom = this.shot.zoom ?? wholeOf(map);
    const [tall, wide] = [zoom.rows[1] - zoom.rows[0], zoom.columns[1] - zoom.columns[0]];
    const room = Math.max(220, this.element.clientWidth);
    // The height below the figure's top edge, within limits.
    const below = window.innerHeight - this.element.getBoundingClientRect().top - window.scrollY - 130;
    const most = Math.max(320, 0.56 * window.innerHeight, Math.min(below, 0.8 * window.innerHeight));
    const family = getComputedStyle(this.element).fontFamily;
    const fontOf = (/** @type {number} */ size) => `${size}px ${family}`;
    /** @param {Axis} axis @param {[number, number]} range @param {number} size */
    const longest = (axis, range, size) =>
      Math.max(0, ...axis.labels.slice(...range).map((text) => textWidth(shortened(text, LETTERS), fontOf(size))));
    // Try to label every cell; if the cells become too small, use numeric ticks.
    if (tall <= ALL_LABELLED && wide * LABELLED <= room) {
      let size = 14;
      for (let tries = 0; tries < 3; tries++) {
        const left = longest(rows, zoom.rows, size) + 14;
        const above = longest(columns, zoom.columns, size);
        const flat = (/** @type {number} */ cell) => above <= cell - 6;
        const slope = Math.SQRT1_2 * above + 6;
        const cell = Math.min(LARGEST, (room - left - 2) / wide, Math.max(16, most / tall));
        const sloped = !flat(cell);
        const fitted = Math.floor(sloped ? Math.min(cell, (room - left - slope) / wide) : cell);
        if (fitted >= LABELLED) {
          const fits = Math.max(10, Math.min(14, Math.floor(fitted * 0.78)));
          if (fits < size) {
            size = fits;
            continue;
          }
          const top = sloped ? slope + size : size + 14;
          const rtl = columns.rtl && sloped ? slope : 0;
          return {
            zoom,
            tall,
            wide,
            cellWidth: fitted,
            cellHeight: fitted,
            labelled: true,
            sloped,
            size,
            left: left + rtl,
            top,
            width: wide * fitted,
            height: tall * fitted,
            whole: { width: left + wide * fitted + (sloped ? slope : 2), height: top + tall * fitted + 2 },
          };
        }
        break;
      }
    }
    const left = Math.min(112, 0.24 * room);
    const top = 46;
    let width = room - left - 2;
    let height = Math.max(140, Math.min(most, (width * tall) / wide));
    width = Math.min(width, Math.max(140, (height * wide) / tall));
    if (tall * LABELLED < height) height = Math.max(60, Math.min(height, tall * LARGEST));
    return {
      zoom,
      tall,
      wide,
      cellWidth: width / wide,
      cellHeight: height / tall,
      labelled: false,
      sloped: false,
      size: 12,
      left,
      top,
      width,
      height,
      whole: { width: left + width + 2, height: top + height + 2 },
    };
  }

  /** Computes the layout and draws the map. */
  lay() {
    if (!this.shot || !this.element.isConnected || !this.element.clientWidth) return;
    const { map, rows, columns, name } = this.shot;
    const g = this.place();
    this.geometry = g;
    change(this.element, {
      "aria-label":
        `Heat map of ${name}: ${g.tall} rows, ${g.wide} columns. ` +
        "Arrow keys move between cells, Enter pins, plus and minus zoom.",
    });
    change(this.svg, {
      width: g.whole.width,
      height: g.whole.height,
      viewBox: `0 0 ${g.whole.width} ${g.whole.height}`,
    });
    Object.assign(this.element.style, { height: `${g.whole.height}px` });
    this.cellsGroup = s("g", { class: "squares" });
    this.marks = s("g", { class: "marks" });
    fill(this.svg, this.cellsGroup, this.axesOf(g, rows, columns), this.marks);
    this.drawCells();
    this.mark(this.cursor, this.pin);
    if (!map.whole) this.announceProgress();
  }

  /** @param {any} g */
  axesOf(g, rows, columns) {
    const { zoom } = g;
    const group = s("g", { class: "axes" });
    const font = `${g.size}px`;
    this.rowLabels = new Map();
    this.columnLabels = new Map();
    if (g.labelled) {
      for (let t = zoom.rows[0]; t < zoom.rows[1]; t++) {
        const text = label(shortened(rows.labels[t], LETTERS), rows.rtl, "right", {
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
        const shown = shortened(columns.labels[c], LETTERS);
        // Labels of right-to-left text lean to the left.
        const lean = columns.rtl ? 45 : -45;
        const text = g.sloped
          ? label(shown, columns.rtl, columns.rtl ? "right" : "left", {
              transform: `translate(${x + (columns.rtl ? 3 : -3) + Math.sign(lean) * -4} ${g.top - 8}) rotate(${lean})`,
              "font-size": font,
              class: "label",
              dy: "0.35em",
            })
          : label(shown, columns.rtl, "middle", { x, y: g.top - 10, "font-size": font, class: "label" });
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
    const rowStep = niceStep(44 / g.cellHeight);
    const columnStep = niceStep(56 / g.cellWidth);
    for (let t = Math.ceil(zoom.rows[0] / rowStep) * rowStep; t < zoom.rows[1]; t += rowStep) {
      const y = this.y(t) + g.cellHeight / 2;
      group.append(
        s("path", { class: "tick", d: `M${g.left - 6} ${y}h5` }),
        label(String(t), false, "right", { x: g.left - 11, y, dy: "0.35em", class: "count", "font-size": "11.5px" }),
      );
    }
    for (let c = Math.ceil(zoom.columns[0] / columnStep) * columnStep; c < zoom.columns[1]; c += columnStep) {
      const x = this.x(c) + g.cellWidth / 2;
      group.append(
        s("path", { class: "tick", d: `M${x} ${g.top - 6}v5` }),
        label(String(c), false, "middle", { x, y: g.top - 12, class: "count", "font-size": "11.5px" }),
      );
    }
    return group;
  }

  /** Left edge of a column. @param {number} column */
  x(column) {
    const { left, width, cellWidth, zoom } = this.geometry;
    const place = (column - zoom.columns[0]) * cellWidth;
    return this.shot.columns.rtl ? left + width - place - cellWidth : left + place;
  }

  /** Top edge of a row. @param {number} row */
  y(row) {
    const { top, cellHeight, zoom } = this.geometry;
    return top + (row - zoom.rows[0]) * cellHeight;
  }

  drawCells() {
    const g = this.geometry;
    const { map } = this.shot;
    const squares = g.labelled && g.tall * g.wide <= SQUARES;
    this.canvas.hidden = squares;
    this.rest();
    if (squares) {
      this.picture = null;
      return this.drawSquares();
    }
    const dots = window.devicePixelRatio || 1;
    const [tall, wide] = [Math.round(g.height * dots), Math.round(g.width * dots)];
    const zoomed = this.shot.zoom !== null;
    const before = this.picture;
    const reuse =
      before && JSON.stringify(before.zoom) === JSON.stringify(g.zoom) && before.height <= tall && before.width <= wide;
    if (!reuse) {
      if (!map.whole && zoomed && this.far) this.picture = new Picture(map, g.zoom, tall, wide, this.far);
      else
        this.picture = !zoomed && this.far ? this.far : new Picture(map, g.zoom, tall, wide, map.whole ? null : before);
    }
    if (!zoomed && !map.whole) this.far = this.picture;
    Object.assign(this.canvas.style, {
      left: `${g.left}px`,
      top: `${g.top}px`,
      width: `${g.width}px`,
      height: `${g.height}px`,
      transform: this.shot.columns.rtl ? "scaleX(-1)" : "none",
    });
    const picture = this.picture;
    if (map.whole) {
      while (picture.step(64));
      this.paint();
      return;
    }
    // The first rows immediately, the rest in slices.
    const soon = performance.now() + 20;
    while (!picture.complete && performance.now() < soon) picture.step();
    this.paint();
    const { far } = this;
    this.work.add(this.key, 0, () => {
      const more = picture.step();
      this.paintSoon();
      return more;
    });
    if (far && far !== picture && !far.complete) this.work.add(`${this.key} far`, 5, () => far.step());
  }

  /** Stops computing. */
  rest() {
    this.work.drop(this.key);
    this.work.drop(`${this.key} far`);
  }

  /** Paints at most every 80 ms, because painting competes with computing. */
  paintSoon() {
    if (this.waiting) return;
    this.waiting = true;
    setTimeout(() => {
      this.waiting = false;
      this.paint();
    }, 80);
  }

  /** Paints the raster's values as pixels. */
  paint() {
    const { picture, canvas } = this;
    if (!picture) return;
    if (canvas.width !== picture.width || canvas.height !== picture.height) {
      canvas.width = picture.width;
      canvas.height = picture.height;
    }
    const context = canvas.getContext("2d");
    const image = context.createImageData(picture.width, picture.height);
    this.shot.painter.fill(picture.values, image.data);
    context.putImageData(image, 0, 0);
    if (!this.shot.map.whole) this.announceProgress();
    else this.progress.textContent = this.blockSays();
  }

  /** States the number of weights per pixel, if it is more than one. */
  blockSays() {
    const { block } = this.picture ?? { block: { rows: 1, columns: 1 } };
    if (block.rows * block.columns === 1) return "";
    return `Each pixel shows the largest of ${block.rows} × ${block.columns} ${this.shot.map.signed ? "differences" : "weights"}.`;
  }

  announceProgress() {
    if (!this.picture) {
      this.progress.textContent = "";
      return;
    }
    const share = Math.floor(100 * this.picture.share);
    const more = this.picture.complete ? "" : ` ${share}% of rows computed.`;
    this.progress.textContent = this.blockSays() + more;
  }

  drawSquares() {
    const g = this.geometry;
    const { map, painter, shut } = this.shot;
    const gap = g.cellWidth >= 24 ? 2 : 1;
    const rounded = g.cellWidth >= 24 ? 4 : g.cellWidth >= 18 ? 2 : 1;
    const row = new Float32Array(g.wide);
    for (let t = g.zoom.rows[0]; t < g.zoom.rows[1]; t++) {
      map.rowsInto([t], g.zoom.columns[0], g.zoom.columns[1], row);
      for (let i = 0; i < g.wide; i++) {
        const x = this.x(g.zoom.columns[0] + i);
        // Masked cells are left blank.
        if (shut?.(t, g.zoom.columns[0] + i)) continue;
        this.cellsGroup.append(
          s("rect", {
            x: x + gap / 2,
            y: this.y(t) + gap / 2,
            width: g.cellWidth - gap,
            height: g.cellHeight - gap,
            rx: rounded,
            fill: painter.css(row[i]),
            class: "square",
          }),
        );
        if (g.cellWidth >= NUMBERED && Math.abs(row[i]) >= 0.005) {
          const sign = map.signed ? (row[i] < 0 ? "−" : "+") : "";
          this.cellsGroup.append(
            label(sign + Math.abs(row[i]).toFixed(2), false, "middle", {
              x: x + g.cellWidth / 2,
              y: this.y(t) + g.cellHeight / 2,
              dy: "0.35em",
              "font-size": g.cellWidth < 40 ? "10.5px" : "12px",
              class: painter.wantsLight(row[i]) ? "number light" : "number dark",
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
    const { rows, columns, gold } = this.shot;
    fill(this.marks);
    if (gold && g.tall * g.wide <= 40000) this.markGold(g, gold);
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
      for (const [place, text] of labels) text.classList.toggle("on", at?.[axis] === place);
    }
    if (!g.labelled && at) this.markCounts(g, at, rows, columns);
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
  markCounts(g, at, rows, columns) {
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
      const text = shortened(rows.labels[at.row], 12);
      chip(text, rows.rtl, Math.max(g.left - 6, textWidth(text, font) + 14), this.y(at.row) + g.cellHeight / 2);
    }
    if (at.column !== null && at.column >= g.zoom.columns[0] && at.column < g.zoom.columns[1]) {
      const text = shortened(columns.labels[at.column], 20);
      const width = textWidth(text, font) + 14;
      const middle = this.x(at.column) + g.cellWidth / 2;
      chip(text, columns.rtl, Math.min(g.whole.width, Math.max(width, middle + width / 2)), g.top - 17);
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
    if (this.shot.columns.rtl) x = g.width - x;
    const row = Math.min(g.zoom.rows[1] - 1, g.zoom.rows[0] + Math.floor(y / g.cellHeight));
    const column = Math.min(g.zoom.columns[1] - 1, g.zoom.columns[0] + Math.floor(x / g.cellWidth));
    const [tall, wide] = [Math.floor(3 / g.cellHeight), Math.floor(3 / g.cellWidth)];
    if (tall + wide === 0) return { row, column };
    const [bestRow, bestColumn] = this.shot.map.greatest(
      [Math.max(g.zoom.rows[0], row - tall), Math.min(g.zoom.rows[1], row + tall + 1)],
      [Math.max(g.zoom.columns[0], column - wide), Math.min(g.zoom.columns[1], column + wide + 1)],
    );
    return { row: bestRow, column: bestColumn };
  }

  /** @param {PointerEvent} event */
  moved(event) {
    if (this.drag) {
      const far = Math.hypot(event.clientX - this.drag.x, event.clientY - this.drag.y) > 8;
      if (far && event.pointerType !== "touch") this.drag.moved = true;
      if (this.drag.moved) this.drawBox(event);
      return;
    }
    this.told.point(this.cellAt(event));
  }

  /** @param {PointerEvent} event */
  pressed(event) {
    if (event.button === 0) this.drag = { x: event.clientX, y: event.clientY, moved: false };
  }

  /** @param {PointerEvent} event */
  released(event) {
    const { drag } = this;
    this.dropDrag();
    if (!drag) return;
    if (!drag.moved) {
      const cell = this.cellAt(event);
      if (cell) this.told.pin(cell);
      return;
    }
    const box = this.boxOf(drag, event);
    if (box) this.told.zoom(box);
  }

  dropDrag() {
    this.drag = null;
    this.box?.remove();
    this.box = null;
  }

  /**
   * The range of tokens between two points.
   * @param {{x: number, y: number}} from @param {MouseEvent} to @returns {Zoom | null}
   */
  boxOf(from, to) {
    const g = this.geometry;
    const box = this.svg.getBoundingClientRect();
    /** @param {number} at @param {number} begin @param {number} length @param {number} cells */
    const share = (at, begin, length, cells) => Math.max(0, Math.min(cells, ((at - begin) / length) * cells));
    let columns = [from.x, to.clientX].map((x) => share(x, box.left + g.left, g.width, g.wide)).sort((a, b) => a - b);
    if (this.shot.columns.rtl) columns = [g.wide - columns[1], g.wide - columns[0]];
    const rows = [from.y, to.clientY].map((y) => share(y, box.top + g.top, g.height, g.tall)).sort((a, b) => a - b);
    /** @param {number[]} range @param {number} first @returns {[number, number]} */
    const tokens = (range, first) => [first + Math.floor(range[0]), first + Math.ceil(range[1])];
    const zoom = { rows: tokens(rows, g.zoom.rows[0]), columns: tokens(columns, g.zoom.columns[0]) };
    return zoom.rows[1] > zoom.rows[0] && zoom.columns[1] > zoom.columns[0] ? zoom : null;
  }

  /** @param {PointerEvent} event */
  drawBox(event) {
    const box = this.svg.getBoundingClientRect();
    this.box ??= this.svg.appendChild(s("rect", { class: "selection", rx: 4 }));
    change(this.box, {
      x: Math.min(this.drag.x, event.clientX) - box.left,
      y: Math.min(this.drag.y, event.clientY) - box.top,
      width: Math.abs(event.clientX - this.drag.x),
      height: Math.abs(event.clientY - this.drag.y),
    });
  }

  /** Zooms around a point; a factor of 0.5 halves the number of visible tokens. @param {MouseEvent} event @param {number} factor */
  zoomAt(event, factor) {
    const cell = this.cellAt(event);
    if (cell) this.told.zoom(zoomedBy(this.shot, cell, factor));
  }

  /** @param {WheelEvent} event */
  wheeled(event) {
    const g = this.geometry;
    if (!g) return;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoomAt(event, event.deltaY > 0 ? 1.25 : 0.8);
    } else if (this.shot.zoom) {
      const across = this.shot.columns.rtl ? -event.deltaX : event.deltaX;
      const moved = shiftedBy(this.shot, Math.round(event.deltaY / g.cellHeight), Math.round(across / g.cellWidth));
      // At the edge of the map, let the page scroll.
      if (JSON.stringify(moved) === JSON.stringify(this.shot.zoom)) return;
      event.preventDefault();
      this.told.zoom(moved);
    }
  }
}

/**
 * The visible part after zooming around a cell, or null for the entire map.
 * @param {Shot} shot @param {Cell} cell @param {number} factor @returns {Zoom | null}
 */
export function zoomedBy(shot, cell, factor) {
  const now = shot.zoom ?? wholeOf(shot.map);
  /** @param {[number, number]} range @param {number | null} at @param {number} all @returns {[number, number]} */
  const scaled = ([from, to], at, all) => {
    const length = Math.min(all, Math.max(Math.min(all, 6), Math.round((to - from) * factor)));
    const centre = at === null ? (from + to) / 2 : at + 0.5;
    const start = Math.round(centre - ((centre - from) / (to - from)) * length);
    const begin = Math.max(0, Math.min(all - length, start));
    return [begin, begin + length];
  };
  const zoom = {
    rows: scaled(now.rows, cell.row, shot.map.rows),
    columns: scaled(now.columns, cell.column, shot.map.columns),
  };
  return JSON.stringify(zoom) === JSON.stringify(wholeOf(shot.map)) ? null : zoom;
}

/**
 * The visible part after moving by some rows and columns.
 * @param {Shot} shot @param {number} rows @param {number} columns @returns {Zoom | null}
 */
export function shiftedBy(shot, rows, columns) {
  if (!shot.zoom) return null;
  /** @param {[number, number]} range @param {number} by @param {number} all @returns {[number, number]} */
  const shifted = ([from, to], by, all) => {
    const begin = Math.max(0, Math.min(all - (to - from), from + by));
    return [begin, begin + to - from];
  };
  return {
    rows: shifted(shot.zoom.rows, rows, shot.map.rows),
    columns: shifted(shot.zoom.columns, columns, shot.map.columns),
  };
}

/** Describes a cell for screen readers. @param {Shot} shot @param {Cell} cell @param {string} weight */
export function cellSays(shot, cell, weight) {
  const [row, column] = [shot.rows.labels[cell.row], shot.columns.labels[cell.column]];
  return (
    `${isolated(row)} attends to ${isolated(column)}: ${weight}. ` +
    `Row ${cell.row + 1} of ${shot.rows.length}, column ${cell.column + 1} of ${shot.columns.length}.`
  );
}
