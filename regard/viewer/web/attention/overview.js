/** Overview of all layers and heads, with a thumbnail of each map. */

import { Picture, wholeOf } from "../weights/maps.js";
import { change, h, uniqueId } from "../core/dom.js";
import { keyOf, thumbByKey, thumbOf } from "./thumbnails.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {{values: Float32Array, width: number, height: number}} Small */

/** Maximum width of a thumbnail in pixels. */
const POINTS = 80;
/** Priority of drawing thumbnails, after the main figure. */
const LATER = 10;

/**
 * The label of a kind of attention, given the kinds of the same model.
 * @param {string} kind @param {Set<string>} kinds
 */
export function kindCalled(kind, kinds) {
  if (kind === "cross") return "Cross-attention";
  if (kind === "masked") return kinds.size > 1 ? "Decoder self-attention" : "Masked self-attention";
  return kinds.size > 1 ? "Encoder self-attention" : "Self-attention";
}

/** @param {any[]} attentions @returns {Set<string>} */
export function kindsOf(attentions) {
  return new Set(attentions.map((one) => one.kind));
}

/** The full label of a head. @param {any[]} attentions @param {Shown} shown */
export function headCalled(attentions, shown) {
  const attention = attentions.find((one) => one.name === shown.attention);
  const alike = attentions.filter((one) => one.kind === attention.kind && one.layer === attention.layer).length > 1;
  const layer = attention.layer === null || alike ? attention.name : `layer ${attention.layer}`;
  const head =
    shown.head === "mean" ? "mean of all heads" : attention.heads > 1 ? `head ${shown.head}` : "single head";
  return `${kindCalled(attention.kind, kindsOf(attentions))}, ${layer}, ${head}`;
}

export class Overview {
  /**
   * @param {import("../weights/maps.js").Attentions} attentions @param {import("../core/scheduler.js").Work} work
   * @param {(shown: Shown, second: boolean) => void} chosen
   */
  constructor(attentions, work, chosen) {
    this.attentions = attentions;
    this.work = work;
    this.job = uniqueId("overview");
    /** Incremented when drawing starts, to discard drawing that was started before. */
    this.turn = 0;
    this.chosen = chosen;
    /** @type {Map<string, {shown: Shown, element: HTMLElement, canvas: HTMLCanvasElement, picture: Small | null}>} */
    this.cells = new Map();
    /** @type {any[]} */
    this.ready = [];
    /** Called after some thumbnails were painted. */
    this.painted = () => {};
    const list = attentions.scene.attentions;
    this.element = h(
      "nav",
      { class: "overview", "aria-label": "All layers and heads" },
      [...kindsOf(list)].map((kind) => this.group(kind, list)),
    );
  }

  /** @param {string} kind @param {any[]} list */
  group(kind, list) {
    const some = list.filter((one) => one.kind === kind);
    const heads = Math.max(...some.map((one) => one.heads));
    const name = kindCalled(kind, kindsOf(list));
    /** @type {(number | "mean")[]} */
    const columns = heads > 1 ? ["mean", ...Array(heads).keys()] : [0];
    const grid = h(
      "div",
      {
        class: "grid",
        role: "grid",
        "aria-label": `${name}: one row per layer, one column per head`,
        onkeydown: (event) => this.key(event),
      },
      h(
        "div",
        { role: "row", class: "line heads" },
        h("span", { role: "columnheader", class: "corner" }, h("span", { class: "unseen" }, "layer")),
        columns.map((head) =>
          h(
            "span",
            { role: "columnheader", class: head === "mean" ? "mean" : "" },
            heads > 1 ? String(head) : h("span", { class: "unseen" }, "head 0"),
          ),
        ),
      ),
      some.map((one) =>
        h(
          "div",
          { role: "row", class: "line" },
          h("span", { role: "rowheader", class: "layer", title: one.name }, this.rowCalled(one, some)),
          columns
            .filter((head) => (head === "mean" ? one.heads > 1 : head < one.heads))
            .map((head) => this.cell(one, head)),
        ),
      ),
    );
    grid.style.setProperty("--heads", String(heads > 1 ? heads + 1 : 1));
    const size =
      heads > 1 || some.length > 1
        ? `${some.length} ${some.length > 1 ? "layers" : "layer"} × ${heads} ${heads > 1 ? "heads" : "head"}`
        : null;
    return h("section", { class: "group" }, h("h2", {}, name, size ? h("span", { class: "size" }, size) : null), grid);
  }

  /** @param {any} one @param {any[]} some */
  rowCalled(one, some) {
    const alike = some.filter((other) => other.layer === one.layer).length > 1;
    return one.layer === null || alike ? one.name : String(one.layer);
  }

  /** @param {any} attention @param {number | "mean"} head */
  cell(attention, head) {
    const shown = { attention: attention.name, head };
    const name = headCalled(this.attentions.scene.attentions, shown);
    const thumb = thumbOf(shown, name, (event) => this.chosen(shown, event.shiftKey));
    this.cells.set(keyOf(shown), { ...thumb, picture: null });
    return thumb.element;
  }

  /** Arrow keys move between thumbnails and select them. @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const shown = this.cells.get(target.dataset.shown)?.shown;
    if (!shown || event.altKey || event.metaKey || event.ctrlKey) return;
    const next = thumbByKey(this.element, event);
    const second = event.shiftKey && (event.key === "Enter" || event.key === " ");
    if (next) this.chosen(this.cells.get(next.dataset.shown).shown, second);
  }

  /** Highlights the selected heads. @param {Shown | null} first @param {Shown | null} second */
  mark(first, second) {
    for (const [key, cell] of this.cells) {
      const [one, two] = [first, second].map((shown) => shown !== null && key === keyOf(shown));
      change(cell.element, {
        "aria-selected": String(one || two),
        tabindex: one || (first === null && two) ? 0 : -1,
        "data-mark": one && two ? "both" : one ? "first" : two ? "second" : null,
      });
    }
  }

  /**
   * Draws all thumbnails in slices, those of the selected attention first.
   * @param {any} painter @param {Shown} first
   */
  draw(painter, first) {
    this.painter = painter;
    const waiting = [];
    for (const cell of this.cells.values()) {
      if (cell.picture) this.paint(cell);
      else waiting.push(cell);
    }
    waiting.sort(
      (a, b) => Number(b.shown.attention === first.attention) - Number(a.shown.attention === first.attention),
    );
    this.waiting = waiting;
    if (waiting.length && !this.drawing) {
      const side = waiting[0].element.clientWidth || 40;
      this.dots = Math.min(POINTS, Math.round(side * (window.devicePixelRatio || 1)));
      this.drawing = true;
      this.turn += 1;
      this.next();
    }
  }

  /** Stops drawing. */
  rest() {
    this.work.drop(this.job);
    this.drawing = false;
    this.turn += 1;
  }

  async next() {
    const { turn } = this;
    const cell = this.waiting.shift();
    if (!cell) {
      this.drawing = false;
      return;
    }
    await this.attentions.load(cell.shown.attention);
    if (turn !== this.turn) return;
    /** @type {Picture | null} */
    let picture = null;
    this.work.add(this.job, LATER, () => {
      if (!picture) {
        const map = this.attentions.map(cell.shown, false);
        picture = new Picture(map, wholeOf(map), this.dots, this.dots);
      }
      // For a thumbnail of a large map, one row per pixel is enough.
      const more = picture.step() && (picture.map.whole || !picture.begun);
      if (!more) {
        // Keep the values only: the raster would keep its map in memory.
        cell.picture = { values: picture.values, width: picture.width, height: picture.height };
        this.paintSoon(cell);
        this.next();
      }
      return more;
    });
  }

  /** Paints finished thumbnails at most every 120 ms, because each change costs a frame. @param {any} cell */
  paintSoon(cell) {
    this.ready.push(cell);
    if (this.ready.length > 1) return;
    setTimeout(() => {
      for (const one of this.ready) this.paint(one);
      this.ready = [];
      this.painted();
    }, 120);
  }

  /** @param {{canvas: HTMLCanvasElement, picture: Small, element: HTMLElement, shown: Shown}} cell */
  paint({ canvas, element, shown }) {
    this.paintInto(canvas, shown);
    element.dataset.drawn = "";
  }

  /** Paints the thumbnail of a head, if it is computed. @param {HTMLCanvasElement} canvas @param {Shown} shown */
  paintInto(canvas, shown) {
    const picture = this.cells.get(keyOf(shown))?.picture;
    if (!picture) return;
    canvas.width = picture.width;
    canvas.height = picture.height;
    const context = canvas.getContext("2d");
    const image = context.createImageData(picture.width, picture.height);
    this.painter.fill(picture.values, image.data);
    context.putImageData(image, 0, 0);
    const { rtl } = this.attentions.axesOf(shown.attention, false).columns;
    canvas.style.transform = rtl ? "scaleX(-1)" : "none";
  }
}
