/** Small maps of all heads, from which figures are chosen. */

import { html, setAttributes, setChildren, uniqueId } from "../core/dom.js";
import { describeLabel, fullRange, HEAD_LABELS, labelName } from "../weights/maps.js";
import { Raster } from "../weights/raster.js";

/* Thumbnails in rows and columns, shared by the overviews of texts and images. */

/** @typedef {import("../core/state.js").HeadRef} HeadRef */

/** @param {HeadRef} ref */
export const headKey = (ref) => `${ref.attention}:${ref.head}`;

/**
 * Creates a thumbnail that is not painted yet.
 * @param {HeadRef} ref @param {string} name full label @param {(event: MouseEvent) => void} onclick
 */
export function createThumbnail(ref, name, onclick) {
  const canvas = html("canvas", { width: 1, height: 1 });
  const element = html(
    "div",
    {
      role: "gridcell",
      class: ref.head === "mean" ? "thumb mean" : "thumb",
      tabindex: -1,
      "aria-label": name,
      "aria-selected": "false",
      title: name,
      "data-head": headKey(ref),
      onclick: (/** @type {MouseEvent} */ event) => {
        onclick(event);
        element.focus({ preventScroll: true });
      },
    },
    canvas,
    html("span", { class: "frame" }),
  );
  return { ref, element, canvas };
}

/**
 * Moves the focus from a thumbnail by a key; returns the new one, or null if the key has no function or there is none.
 * @param {HTMLElement} overview @param {KeyboardEvent} event @returns {HTMLElement | null}
 */
export function thumbnailByKey(overview, event) {
  const lines = [...overview.querySelectorAll(".line:not(.head-row)")].map((line) => [
    ...line.querySelectorAll(".thumb"),
  ]);
  const target = /** @type {HTMLElement} */ (event.target);
  const row = lines.findIndex((line) => line.includes(target));
  const column = lines[row].indexOf(target);
  const moves = {
    ArrowLeft: [row, column - 1],
    ArrowRight: [row, column + 1],
    ArrowUp: [row - 1, column],
    ArrowDown: [row + 1, column],
    Home: [row, 0],
    End: [row, lines[row].length - 1],
    Enter: [row, column],
    " ": [row, column],
  };
  const move = moves[event.key];
  if (!move) return null;
  event.preventDefault();
  const line = lines[move[0]];
  const next = /** @type {HTMLElement | undefined} */ (line?.[Math.min(move[1], line.length - 1)]);
  next?.focus();
  return next ?? null;
}

/* Overview of all layers and heads, with a thumbnail of each map. */

/** @typedef {{values: Float32Array, width: number, height: number}} RasterData */

/** Maximum width of a thumbnail in pixels. */
const MAX_THUMBNAIL_SIZE = 80;
/** Priority of drawing thumbnails, after the main figure. */
const THUMBNAIL_PRIORITY = 10;

/**
 * The label of a kind of attention, given the kinds of the same model.
 * @param {string} kind @param {Set<string>} kinds
 */
export function kindLabel(kind, kinds) {
  if (kind === "cross") return "Cross-attention";
  if (kind === "masked") return kinds.size > 1 ? "Decoder self-attention" : "Masked self-attention";
  return kinds.size > 1 ? "Encoder self-attention" : "Self-attention";
}

/** @param {any[]} attentions @returns {Set<string>} */
export function kindsOf(attentions) {
  return new Set(attentions.map((one) => one.kind));
}

/** The label of an attention, given all attentions of the model. @param {any[]} attentions @param {any} attention */
export function attentionLabel(attentions, attention) {
  const isAmbiguous =
    attentions.filter((one) => one.kind === attention.kind && one.layer === attention.layer).length > 1;
  const layer = attention.layer === null || isAmbiguous ? attention.name : `layer ${attention.layer + 1}`;
  return `${kindLabel(attention.kind, kindsOf(attentions))}, ${layer}`;
}

/** The full label of a head. @param {any[]} attentions @param {HeadRef} ref */
export function headLabel(attentions, ref) {
  const attention = attentions.find((one) => one.name === ref.attention);
  const head = ref.head === "mean" ? "mean of all heads" : attention.heads > 1 ? `head ${ref.head + 1}` : "single head";
  return `${attentionLabel(attentions, attention)}, ${head}`;
}

export class Overview {
  /**
   * @param {import("../weights/maps.js").Attentions} attentions
   * @param {import("../core/scheduler.js").Scheduler} scheduler
   * @param {(ref: HeadRef, adds: boolean) => void} onSelect called when a head is selected, or added to the selected
   * ones
   */
  constructor(attentions, scheduler, onSelect) {
    this.attentions = attentions;
    this.scheduler = scheduler;
    this.job = uniqueId("overview");
    /** Incremented when drawing starts, to discard drawing that was started before. */
    this.generation = 0;
    this.onSelect = onSelect;
    /** Number of heads in the first figure, if there are several. */
    this.selectedCount = 0;
    /**
     * @type {Map<string, {ref: HeadRef, element: HTMLElement, canvas: HTMLCanvasElement, raster: RasterData | null}>}
     */
    this.cells = new Map();
    /** @type {any[]} */
    this.finished = [];
    /** Called after some thumbnails were painted. */
    this.onPainted = () => {};
    const list = attentions.scene.attentions;
    this.element = html(
      "nav",
      { class: "overview", "aria-label": "All layers and heads" },
      [...kindsOf(list)].map((kind) => this.group(kind, list)),
      (this.legend = html("ul", { class: "head-legend", "aria-label": "What the heads do" })),
    );
  }

  /** Lists the labels of the heads with their numbers. */
  drawLegend() {
    const counts = new Map();
    for (const { element } of this.cells.values())
      counts.set(element.dataset.label, (counts.get(element.dataset.label) ?? 0) + 1);
    setChildren(
      this.legend,
      Object.keys(HEAD_LABELS)
        .filter((label) => counts.has(label))
        .map((label) =>
          html(
            "li",
            { title: HEAD_LABELS[label].text },
            html("i", { "data-label": label, "aria-hidden": "true" }),
            `${labelName(label)} × ${counts.get(label)}`,
          ),
        ),
    );
  }

  /** Labels the thumbnail of a head by what the head does. @param {{ref: HeadRef, element: HTMLElement}} cell */
  labelCell({ ref, element }) {
    const found = this.attentions.labelOf(ref);
    if (!found || element.dataset.label) return;
    const name = `${headLabel(this.attentions.scene.attentions, ref)}: ${describeLabel(found)}`;
    setAttributes(element, { "data-label": found.label, "aria-label": name, title: name });
    element.append(
      html("span", { class: "head-label", "aria-hidden": "true", "data-text": HEAD_LABELS[found.label].short }),
    );
  }

  /** @param {string} kind @param {any[]} list */
  group(kind, list) {
    const layers = list.filter((one) => one.kind === kind);
    const heads = Math.max(...layers.map((one) => one.heads));
    const name = kindLabel(kind, kindsOf(list));
    /** @type {(number | "mean")[]} */
    const columns = heads > 1 ? ["mean", ...Array(heads).keys()] : [0];
    const grid = html(
      "div",
      {
        class: "grid",
        role: "grid",
        "aria-multiselectable": "true",
        "aria-label": `${name}: one row per layer, one column per head`,
        onkeydown: (event) => this.key(event),
      },
      html(
        "div",
        { role: "row", class: "line head-row" },
        html("span", { role: "columnheader", class: "corner" }, html("span", { class: "visually-hidden" }, "layer")),
        columns.map((head) =>
          html(
            "span",
            { role: "columnheader", class: head === "mean" ? "mean" : "" },
            head === "mean"
              ? head
              : heads > 1
                ? String(head + 1)
                : html("span", { class: "visually-hidden" }, "head 1"),
          ),
        ),
      ),
      layers.map((one) =>
        html(
          "div",
          { role: "row", class: "line" },
          html("span", { role: "rowheader", class: "layer", title: one.name }, this.rowLabel(one, layers)),
          columns
            .filter((head) => (head === "mean" ? one.heads > 1 : head < one.heads))
            .map((head) => this.cell(one, head)),
        ),
      ),
    );
    grid.style.setProperty("--heads", String(heads > 1 ? heads + 1 : 1));
    grid.toggleAttribute("data-dense", heads > 8);
    const size =
      heads > 1 || layers.length > 1
        ? `${layers.length} ${layers.length > 1 ? "layers" : "layer"} × ${heads} ${heads > 1 ? "heads" : "head"}`
        : null;
    return html(
      "section",
      { class: "group" },
      html("h2", {}, name, size ? html("span", { class: "size" }, size) : null),
      grid,
    );
  }

  /** @param {any} one @param {any[]} layers */
  rowLabel(one, layers) {
    const isAmbiguous = layers.filter((other) => other.layer === one.layer).length > 1;
    return one.layer === null || isAmbiguous ? one.name : String(one.layer + 1);
  }

  /** @param {any} attention @param {number | "mean"} head */
  cell(attention, head) {
    const ref = { attention: attention.name, head };
    const name = headLabel(this.attentions.scene.attentions, ref);
    const thumbnail = createThumbnail(ref, name, (event) =>
      this.onSelect(ref, event.shiftKey || event.ctrlKey || event.metaKey),
    );
    this.cells.set(headKey(ref), { ...thumbnail, raster: null });
    return thumbnail.element;
  }

  /**
   * Arrow keys move between thumbnails and select them; Space adds the focused one to the selection.
   * @param {KeyboardEvent} event
   */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const ref = this.cells.get(target.dataset.head)?.ref;
    if (!ref || event.altKey || event.metaKey) return;
    const next = thumbnailByKey(this.element, event);
    const adds = event.key === " " || (event.key === "Enter" && (event.shiftKey || event.ctrlKey));
    // With Ctrl, and while several heads are selected, arrow keys move the focus alone.
    if (!next || (!adds && event.key !== "Enter" && (event.ctrlKey || this.selectedCount > 1))) return;
    this.onSelect(this.cells.get(next.dataset.head).ref, adds);
  }

  /**
   * Highlights the selected heads.
   * @param {HeadRef | null} first @param {HeadRef | null} second of the second figure
   * @param {HeadRef[]} [heads] of the first figure, if there are several
   */
  mark(first, second, heads = []) {
    const colors = heads.map(headKey);
    this.selectedCount = colors.length;
    const focused = this.element.contains(document.activeElement) ? document.activeElement : null;
    for (const [key, cell] of this.cells) {
      const [one, two] = [first, second].map((ref) => ref !== null && key === headKey(ref));
      const color = colors.indexOf(key);
      setAttributes(cell.element, {
        "aria-selected": String(one || two || color >= 0),
        "data-color": color >= 0 ? color : null,
        tabindex: (focused ? cell.element === focused : one || (first === null && two)) ? 0 : -1,
        "data-mark": one && two ? "both" : one ? "first" : two ? "second" : null,
      });
    }
  }

  /**
   * Draws all thumbnails in slices, those of the selected attention first.
   * @param {any} colormap @param {HeadRef} first
   */
  draw(colormap, first) {
    this.colormap = colormap;
    const waiting = [];
    for (const cell of this.cells.values()) {
      if (cell.raster) this.paint(cell);
      else waiting.push(cell);
    }
    waiting.sort((a, b) => Number(b.ref.attention === first.attention) - Number(a.ref.attention === first.attention));
    this.waiting = waiting;
    if (waiting.length && !this.drawing) {
      const side = waiting[0].element.clientWidth || 40;
      this.resolution = Math.min(MAX_THUMBNAIL_SIZE, Math.round(side * (window.devicePixelRatio || 1)));
      this.drawing = true;
      this.generation += 1;
      this.next();
    }
  }

  /** Stops drawing. */
  pause() {
    this.scheduler.cancel(this.job);
    this.drawing = false;
    this.generation += 1;
  }

  async next() {
    const { generation } = this;
    const cell = this.waiting.shift();
    if (!cell) {
      this.drawing = false;
      return;
    }
    await this.attentions.load(cell.ref.attention);
    if (generation !== this.generation) return;
    /** @type {Raster | null} */
    let raster = null;
    this.scheduler.add(this.job, THUMBNAIL_PRIORITY, () => {
      if (!raster) {
        const map = this.attentions.map(cell.ref, false);
        raster = new Raster(map, fullRange(map), this.resolution, this.resolution);
      }
      // For a thumbnail of a large map, one row per pixel is enough.
      const more = raster.step() && (raster.map.isMaterialized || !raster.isCovered);
      if (!more) {
        // Keep the values only: the raster would keep its map in memory.
        cell.raster = { values: raster.values, width: raster.width, height: raster.height };
        this.labelCell(cell);
        this.paintSoon(cell);
        this.next();
      }
      return more;
    });
  }

  /** Paints finished thumbnails at most every 120 ms, because each change costs a frame. @param {any} cell */
  paintSoon(cell) {
    this.finished.push(cell);
    if (this.finished.length > 1) return;
    setTimeout(() => {
      for (const one of this.finished) this.paint(one);
      this.finished = [];
      this.drawLegend();
      this.onPainted();
    }, 120);
  }

  /** @param {{canvas: HTMLCanvasElement, raster: RasterData, element: HTMLElement, ref: HeadRef}} cell */
  paint({ canvas, element, ref }) {
    this.paintInto(canvas, ref);
    element.dataset.drawn = "";
  }

  /** Paints the thumbnail of a head, if it is computed. @param {HTMLCanvasElement} canvas @param {HeadRef} ref */
  paintInto(canvas, ref) {
    const raster = this.cells.get(headKey(ref))?.raster;
    if (!raster) return;
    canvas.width = raster.width;
    canvas.height = raster.height;
    const context = canvas.getContext("2d");
    const image = context.createImageData(raster.width, raster.height);
    this.colormap.paint(raster.values, image.data);
    context.putImageData(image, 0, 0);
    const { rtl } = this.attentions.axesOf(ref.attention, false).columns;
    canvas.style.transform = rtl ? "scaleX(-1)" : "none";
  }
}

/* Several heads in one figure, each in a color of its own, with a legend. */

/** Number of heads in one figure; page.css defines as many colors (`data-color`). */
const MAX_HEADS = 6;
/** Forms of a figure that can show several heads. */
const FORMS_WITH_COLORS = ["lines", "text"];

/**
 * The label of a head without its kind of attention, which all heads of a figure share. @param {any[]} attentions
 * @param {HeadRef} ref
 */
const shortHeadLabel = (attentions, ref) => headLabel(attentions, ref).split(", ").slice(1).join(", ");

export class HeadSet {
  /** @param {import("./view.js").AttentionView} view */
  constructor(view) {
    this.view = view;
    this.element = html("ul", { class: "head-chips", "aria-label": "Heads in this figure" });
    this.addButton = html(
      "button",
      {
        type: "button",
        class: "small add-head",
        title:
          "Draws another head in its own color. Or Shift-click heads in the grid; in the grid, Space adds the focused head.",
        onclick: () => this.addNext(),
      },
      "+ Add a head",
    );
  }

  /** The heads in the first figure, in the order of their colors. @returns {HeadRef[]} */
  get heads() {
    const { selected, added } = this.view.state.view;
    const fitting = added.filter(
      (ref) => this.fits(ref) && (headKey(ref) !== headKey(selected) || ref.look !== selected.look),
    );
    return [selected, ...fitting.slice(0, MAX_HEADS - 1)];
  }

  /** Whether the figure on display can show several heads. */
  get isAvailable() {
    const { form, other } = this.view.state.view;
    return other === null && FORMS_WITH_COLORS.includes(form);
  }

  /** @param {HeadRef} ref */
  has(ref) {
    return this.heads.some((one) => headKey(one) === headKey(ref) && (one.look ?? 0) === (ref.look ?? 0));
  }

  /** Whether a head can be drawn with the selected one: its map needs the same tokens. @param {HeadRef} ref */
  fits(ref) {
    return this.isAvailable && this.view.looks.haveSameAxes(this.view.state.view.selected, ref);
  }

  /** Adds a head, or removes it. @param {HeadRef} ref */
  toggle(ref) {
    if (this.has(ref)) return this.remove(ref);
    const { added } = this.view.state.view;
    if (added.length + 1 >= MAX_HEADS)
      return this.view.announcer.announce(`A figure shows up to ${MAX_HEADS} heads. Remove one first.`);
    this.view.state.set({ added: [...added, ref] });
    this.view.announcer.announce(`Added ${this.label(ref)}. ${this.heads.length} heads.`);
  }

  /** @param {HeadRef} ref */
  remove(ref) {
    const rest = this.heads.filter((one) => headKey(one) !== headKey(ref) || (one.look ?? 0) !== (ref.look ?? 0));
    if (!rest.length) return;
    this.view.state.set({ selected: rest[0], added: rest.slice(1) });
    this.view.announcer.announce(`Removed ${this.label(ref)}.`);
  }

  /**
   * The next head that is not in the figure: of the same attention, then of others with the same tokens.
   * @returns {HeadRef | null}
   */
  nextHead() {
    const { selected } = this.view.state.view;
    const attentions = this.view.looks.attentionsOf(selected);
    const start = attentions.byName.get(selected.attention);
    const { kind } = start;
    const list = attentions.scene.attentions.filter((/** @type {any} */ one) => one.kind === kind);
    for (const { name, heads } of [start, ...list.filter((/** @type {any} */ one) => one !== start)]) {
      for (let i = 1; i <= heads; i++) {
        const from = name === selected.attention && selected.head !== "mean" ? selected.head : -1;
        const ref = { ...selected, attention: name, head: (from + i) % heads };
        if (!this.has(ref) && this.fits(ref)) return ref;
      }
    }
    return null;
  }

  addNext() {
    const next = this.nextHead();
    if (next) this.toggle(next);
  }

  /** @param {HeadRef} ref */
  label(ref) {
    const look = this.view.looks.labelOf(ref);
    return (look ? `${look}: ` : "") + shortHeadLabel(this.view.looks.attentionsOf(ref).scene.attentions, ref);
  }

  /** The maps of the figure with the indices of their colors; null if there is only one. @param {boolean} words */
  layers(words) {
    const { heads } = this;
    if (heads.length < 2) return null;
    return heads.map((ref, color) => ({
      map: this.view.looks.attentionsOf(ref).map(ref, words),
      color,
      name: this.label(ref),
    }));
  }

  /** Draws the legend. */
  draw() {
    const { heads } = this;
    const several = heads.length > 1;
    const next = this.isAvailable && heads.length < MAX_HEADS ? this.nextHead() : null;
    this.element.hidden = !several;
    this.addButton.hidden = !next;
    this.view.element.toggleAttribute("data-several", several);
    const focused = this.element.contains(document.activeElement);
    setChildren(
      this.element,
      (several ? heads : []).map((ref, color) =>
        html(
          "li",
          {
            class: "head-chip",
            "data-color": color,
            onpointerenter: () => this.emphasize(color),
            onpointerleave: () => this.emphasize(null),
            onfocusin: () => this.emphasize(color),
            onfocusout: () => this.emphasize(null),
          },
          html("i", { "aria-hidden": "true" }),
          this.label(ref),
          html(
            "button",
            {
              type: "button",
              "aria-label": `Remove ${this.label(ref)}`,
              "data-export": "no",
              onclick: () => this.remove(ref),
            },
            "×",
          ),
        ),
      ),
    );
    if (focused)
      /** @type {HTMLElement | null} */ (this.element.querySelector("button:not([hidden])"))?.focus({
        preventScroll: true,
      });
  }

  /** Dims the lines of the other heads while one is pointed at. @param {number | null} color */
  emphasize(color) {
    setAttributes(this.view.panels[0].container, { "data-only": color });
  }
}
