/** The view of attention: one or several figures, the controls around them, and the details of the selection. */

import { Difference } from "./comparison.js";
import { Measures, TokenDetails } from "./details.js";
import { toTsv } from "./forms.js";
import { describeCell, shiftZoom, zoomAround } from "./heatmap.js";
import { HeadSet, Overview } from "./overview.js";
import { mostInformativeHead, Panel } from "./panel.js";
import { COLORS, createColormap, createDivergingColormap, drawColorScale, SCALES } from "../core/colors.js";
import { html, picker, setAttributes, setChildren, svgElement, uniqueId } from "../core/dom.js";
import { dropDown, icon, isDark, tabList, toggle } from "../core/shell.js";
import { FORMS } from "../core/state.js";
import { formatSigned, formatWeight, truncate } from "../core/tokens.js";
import { fullRange } from "../weights/maps.js";
import { argmax } from "../weights/maths.js";

/* A strip of the architecture, embedding → layers → output, which selects a layer. */

/** Titles of stacks of layers, by the prefix of their attentions' names. */
const STACK_TITLES = { encoder: "Encoder", decoder: "Decoder", blocks: "Layer" };

/** The layers of a model: title and attentions. @param {any[]} list @returns {{title: string, attentions: any[]}[]} */
function layersOf(list) {
  /** @type {Map<string, {title: string, attentions: any[]}>} */
  const layers = new Map();
  for (const one of list) {
    const found = /^(?:(.*)\.)?(\d+)\.[^.]+(?:\.\d+)?$/.exec(one.name);
    const stack = found?.[1] ?? "";
    const key = found ? `${stack}.${(one.layer ?? Number(found[2])) + 1}` : one.name;
    const title = found
      ? `${STACK_TITLES[stack] ?? (stack || "Layer")} ${(one.layer ?? Number(found[2])) + 1}`
      : one.name;
    if (!layers.has(key)) layers.set(key, { title, attentions: [] });
    layers.get(key).attentions.push(one);
  }
  return [...layers.values()];
}

class ModelStrip {
  /**
   * @param {import("../weights/maps.js").Attentions} attentions @param {(attentions: any[]) => void} onLayer
   * @param {(section: number) => void} onSection opens a section of the step-by-step view
   */
  constructor({ scene }, onLayer, onSection) {
    this.layers = layersOf(scene.attentions);
    const button = (/** @type {string} */ text, /** @type {() => void} */ action) =>
      html("button", { type: "button", onclick: action }, text);
    this.buttons = this.layers.map((layer) => button(layer.title, () => onLayer(layer.attentions)));
    const end = (/** @type {string} */ text, /** @type {number} */ section) =>
      scene.trace ? button(text, () => onSection(section)) : html("span", { class: "end" }, text);
    const parts = [end("Embedding", 0), ...this.buttons, end("Output", (scene.trace?.sections.length ?? 0) - 1)];
    this.element = html("nav", { class: "model-strip", "aria-label": "Layers of the model", "data-export": "no" });
    setChildren(
      this.element,
      parts.map((part, i) => [i ? html("span", { class: "to", "aria-hidden": "true" }, "→") : null, part]),
    );
    this.element.hidden = this.layers.length < 2;
  }

  /** @param {string} name of the selected attention */
  mark(name) {
    this.layers.forEach((layer, i) =>
      setAttributes(this.buttons[i], {
        "aria-current": layer.attentions.some((one) => one.name === name) ? "step" : null,
      }),
    );
  }
}

/* Zoom buttons and a minimap of the visible part of a map. */

class ZoomControls {
  /** @param {AttentionView} view */
  constructor(view) {
    this.view = view;
    /** @param {string} name @param {string} path @param {() => void} action */
    const button = (name, path, action) =>
      html("button", { type: "button", class: "round", "aria-label": name, title: name, onclick: action }, icon(path));
    this.box = svgElement("rect", { class: "box" });
    this.canvas = html("canvas", { width: 1, height: 1 });
    this.minimap = html(
      "div",
      {
        class: "minimap",
        "aria-hidden": "true",
        onpointerdown: (event) => this.moveTo(event),
        onpointermove: (event) => event.buttons && this.moveTo(event),
      },
      this.canvas,
      svgElement("svg", { viewBox: "0 0 100 100" }, this.box),
    );
    this.element = html(
      "div",
      { class: "zoomer", "data-export": "no" },
      this.minimap,
      button("Zoom in", "M12 5v14M5 12h14", () => view.zoomBy(0.5)),
      button("Zoom out", "M5 12h14", () => view.zoomBy(2)),
      (this.showAll = button("Show all", "M4 9V4h5M20 9V4h-5M4 15v5h5M20 15v5h-5", () => view.zoom(0, null))),
    );
  }

  /** Paints the thumbnail of the selected head into the minimap. */
  paint() {
    const { selected } = this.view.state.view;
    this.view.overviewOf(selected).paintInto(this.canvas, selected);
  }

  /** Draws the position of the visible part in the minimap. */
  draw() {
    const { figureData } = this.view.panels[0];
    this.element.hidden =
      this.view.state.view.form !== "map" || Math.max(figureData.map.rows, figureData.map.columns) < 16;
    const zoom = figureData.zoom ?? fullRange(figureData.map);
    const [rows, columns] = [
      zoom.rows.map((t) => (100 * t) / figureData.map.rows),
      zoom.columns.map((c) => (100 * c) / figureData.map.columns),
    ];
    const x = figureData.columns.rtl ? 100 - columns[1] : columns[0];
    setAttributes(this.box, {
      x,
      y: rows[0],
      width: Math.max(3, columns[1] - columns[0]),
      height: Math.max(3, rows[1] - rows[0]),
      rx: 2,
    });
    this.minimap.hidden = !figureData.zoom;
    this.paint();
    setAttributes(this.showAll, { disabled: !figureData.zoom });
  }

  /** Moves the visible part to a point of the minimap. @param {PointerEvent} event */
  moveTo(event) {
    const { figureData } = this.view.panels[0];
    if (!figureData.zoom) return;
    const box = this.minimap.getBoundingClientRect();
    let x = (event.clientX - box.left) / box.width;
    if (figureData.columns.rtl) x = 1 - x;
    const y = (event.clientY - box.top) / box.height;
    const middle = (/** @type {[number, number]} */ range) => (range[0] + range[1]) / 2;
    this.view.zoom(
      0,
      shiftZoom(
        figureData,
        Math.round(y * figureData.map.rows - middle(figureData.zoom.rows)),
        Math.round(x * figureData.map.columns - middle(figureData.zoom.columns)),
      ),
    );
  }
}

/* Keys of the figures of the attention view: they move between cells, heads, layers and forms. */

class FigureKeys {
  /** @param {AttentionView} view */
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
    if (!panel?.figureData || target.closest("select, button, input")) return;
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
    else if (key === "g")
      this.moveTo(
        panel,
        this.currentCell(panel).row,
        argmax(panel.figureData.map.exactRow(this.currentCell(panel).row)),
      );
    else if (key === "Enter" || key === " ") this.view.pin(panel.index, this.currentCell(panel));
    else if (key === "Escape") return this.escape();
    else if (key === "+" || key === "=") this.view.zoomBy(0.5);
    else if (key === "-") this.view.zoomBy(2);
    else if (key === "0") this.view.zoom(0, null);
    else if (key === "[") this.view.step(panel.index, 0, -1);
    else if (key === "]") this.view.step(panel.index, 0, 1);
    else if (key === "{") this.view.step(panel.index, -1, 0);
    else if (key === "}") this.view.step(panel.index, 1, 0);
    else if (key === "w" && !this.view.words.hidden)
      this.view.state.set({ words: !this.view.state.view.words, zoom: null });
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

/* The attention view: the weights of each head of each layer, as lines, heat map, shaded text or table. */

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("../core/state.js").View} View */
/** @typedef {import("./heatmap.js").Cell} Cell */
/** @typedef {import("./heatmap.js").FigureData} FigureData */

/** Above this number of columns, weights are too small to be visible on a linear scale. */
const MAX_LINEAR_COLUMNS = 128;

export class AttentionView {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, looks, state, scheduler, announcer }) {
    this.looks = looks;
    this.scene = host.scene;
    this.state = state;
    this.scheduler = scheduler;
    this.announcer = announcer;
    /** The cell under the pointer, and the index of its figure. @type {{panel: number, cell: Cell} | null} */
    this.cursor = null;
    this.active = 0;
    /** Overviews by index of the look, created on demand. @type {Map<number, Overview>} */
    this.overviews = new Map();
    this.overview = this.overviewOf(state.view.selected);
    this.keys = new FigureKeys(this);
    this.headSet = new HeadSet(this);
    this.details = new TokenDetails();
    this.measures = new Measures(looks.all[0], scheduler);
    this.panels = [new Panel(this, 0), new Panel(this, 1)];
    this.difference = new Difference(scheduler, this.panels[0].handlers);
    this.panelsElement = html(
      "div",
      { class: "panels", role: "tabpanel", id: uniqueId("panel"), onkeydown: (event) => this.keys.onKey(event) },
      this.panels.map((panel) => panel.element),
      this.difference.element,
    );
    this.forms = tabList("Show as", FORMS, this.panelsElement.id, (form) => this.state.set({ form }));
    this.entries = toggle("The model’s own tokens", (entries) => this.state.set({ entries }));
    this.words = toggle("Merge word pieces", (words) => this.state.set({ words, zoom: null }));
    this.compare = toggle("Compare", (on) => this.setComparison(on));
    this.minus = toggle("Difference", (minus) => this.state.set({ minus }));
    this.legend = html("div", { class: "legend" });
    this.scale = picker("Scale", SCALES, (scale) => this.state.set({ scale }));
    this.colors = picker("Colors", COLORS, (colors) => this.state.set({ colors }));
    this.settings = dropDown(
      "Settings",
      icon("M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4"),
      "settings-panel",
      html(
        "div",
        { class: "pickers" },
        html("label", {}, "Scale ", this.scale),
        html("label", {}, "Colors ", this.colors),
      ),
      html("div", { class: "switches" }, this.words, this.entries),
      this.measures.element,
    );
    this.strip = new ModelStrip(
      looks.all[0],
      (attentions) => this.openLayer(attentions),
      (section) => state.set({ view: "steps", section }),
    );
    this.zoomControls = new ZoomControls(this);
    this.figureElement = html(
      "div",
      { class: "card" },
      this.panelsElement,
      html("div", { class: "foot" }, this.legend, this.zoomControls.element),
    );
    this.stage = html(
      "section",
      { class: "stage", "aria-label": "Head" },
      html(
        "div",
        { class: "bar", "data-export": "no" },
        this.forms.element,
        html("div", { class: "toggles" }, this.compare, this.minus),
        this.strip.element,
        this.settings,
      ),
      this.figureElement,
    );
    this.element = html(
      "div",
      { class: this.scene.initial?.all ? "attention-view all-first" : "attention-view" },
      this.stage,
      html(
        "div",
        { class: "columns" },
        this.overview.element,
        html("aside", { class: "side", "aria-label": "Details" }, this.details.element, this.measures.note),
      ),
    );
    this.entries.hidden = !looks.all.some(({ scene }) =>
      Object.values(scene.sides).some((side) => Object.keys(side.entries ?? {}).length),
    );
    this.words.hidden = !looks.all.some((attentions) =>
      attentions.scene.attentions.some((one) => {
        const { rows, columns } = attentions.axesOf(one.name, true);
        return (
          rows.length < attentions.axis(one.rows, false).length ||
          columns.length < attentions.axis(one.columns, false).length
        );
      }),
    );
    this.compare.hidden = this.overview.cells.size < 2 && looks.length < 2;
  }

  /** Opens the experiment without a head. @param {HeadRef} selected */
  turnOff(selected) {
    this.state.set({ view: "experiment", selected, off: `${selected.attention}:${selected.head}` });
  }

  /** Opens the step-by-step view at the head and the token of a figure. @param {Panel} panel */
  showArithmetic(panel) {
    const { cursor, pin } = this.highlightsOf(panel.index);
    const at = cursor ?? pin ?? this.clearestCell(panel);
    const { figureData, selected } = panel;
    const row = at.row ?? 0;
    const column = at.column ?? argmax(figureData.map.exactRow(row));
    this.state.set({
      view: "steps",
      depth: "numbers",
      selected: { ...selected, head: selected.head === "mean" ? 0 : selected.head },
      pin: [figureData.rows.tokenAt(row), figureData.columns.tokenAt(column)],
    });
  }

  /** The largest weight of the rows that are words. @param {Panel} panel @returns {Cell} */
  clearestCell(panel) {
    const { map, rows } = panel.figureData;
    let best = { row: 0, column: 0, weight: -1 };
    for (const row of map.sampleRows()) {
      const weights = map.exactRow(row);
      const column = argmax(weights);
      if ((rows.wordAt(row) ?? -1) >= 0 && weights[column] > best.weight)
        best = { row, column, weight: weights[column] };
    }
    return best;
  }

  /** Selects the most informative head of some attentions. @param {any[]} candidates */
  async openLayer(candidates) {
    const selected = await mostInformativeHead(this.looks.all[0], candidates);
    this.state.set({ selected });
  }

  /** Highlights the row of an output token. @param {number | null} step */
  pointOutput(step) {
    const panel = this.panels[0];
    if (panel.figureData?.rows.name !== "predicted") return;
    this.point(
      0,
      step === null || step >= panel.figureData.rows.length
        ? null
        : { row: panel.figureData.rows.positionOf(step), column: null },
    );
  }

  /** Returns the overview of the look that a head belongs to. @param {HeadRef} selected */
  overviewOf(selected) {
    const look = selected.look ?? 0;
    if (!this.overviews.has(look)) {
      const one = new Overview(this.looks.all[look], this.scheduler, (head, adds) => this.choose(head, adds));
      one.onPainted = () => this.zoomControls.paint();
      one.element.hidden = one.cells.size < 2;
      this.overviews.set(look, one);
    }
    return this.overviews.get(look);
  }

  /** Shows the overview of the look in the active figure. */
  showOverview() {
    const { view } = this.state;
    const active = this.panels[this.active].selected;
    const next = this.overviewOf(active);
    if (next !== this.overview) {
      this.overview.pause();
      this.overview.element.replaceWith(next.element);
      this.overview = next;
      next.draw(this.colormap(), active);
    }
    const here = (/** @type {HeadRef | null} */ selected) =>
      selected && (selected.look ?? 0) === (active.look ?? 0) ? selected : null;
    const { heads } = this.headSet;
    next.mark(here(view.selected), here(view.other), heads.length > 1 ? heads.filter((one) => here(one)) : []);
  }

  /** The number of figures. */
  get figureCount() {
    return this.state.view.other ? 2 : 1;
  }

  get visiblePanels() {
    return this.panels.slice(0, this.figureCount);
  }

  get defaultScale() {
    const columns = this.looks.all.flatMap((one) => one.scene.attentions.map(({ k }) => k.shape[0]));
    return Math.max(...columns) > MAX_LINEAR_COLUMNS ? "root" : "linear";
  }

  colormap() {
    const { colors, scale, theme } = this.state.view;
    return createColormap(colors, scale ?? this.defaultScale, isDark(theme));
  }

  /** Whether both figures have the same axes, so that their cells correspond. */
  get hasSameAxes() {
    const { selected, other } = this.state.view;
    return other !== null && this.looks.haveSameAxes(selected, other);
  }

  /** Whether the difference of both figures is shown. */
  get showsDifference() {
    return this.state.view.minus && this.hasSameAxes && this.difference.supports(this.state.view.form);
  }

  /**
   * The visible part of a map, or null if all of it is visible.
   * @param {number} panel @param {import("../weights/maps.js").AttentionMap} map
   */
  zoomOf(panel, map) {
    const { zoom } = this.state.view;
    if (!zoom || (panel === 1 && !this.hasSameAxes)) return null;
    if (zoom.rows[1] > map.rows || zoom.columns[1] > map.columns) return null;
    return zoom;
  }

  /** The highlighted cells of a figure. @param {number} panel @returns {{cursor: Cell | null, pin: Cell | null}} */
  highlightsOf(panel) {
    const { pin, words } = this.state.view;
    const { cursor } = this;
    const { rows, columns } = this.panels[panel].attentions.axesOf(this.panels[panel].selected.attention, words);
    const isPinnable = panel === 0 || this.hasSameAxes;
    const pinned = pin && isPinnable ? { row: rows.positionOf(pin[0]), column: columns.positionOf(pin[1]) } : null;
    return { cursor: cursor && (cursor.panel === panel || this.hasSameAxes) ? cursor.cell : null, pin: pinned };
  }

  /**
   * Draws the current state, after loading the arrays that it needs.
   * @param {Set<string> | null} changed null: all
   */
  async update(changed) {
    const startTime = performance.now();
    const { view } = this.state;
    const headRefs = [view.selected, view.other, ...view.added].filter((one) => one !== null);
    const missing = headRefs.filter((one) => !this.looks.attentionsOf(one).isLoaded(one.attention));
    if (missing.length) {
      await Promise.all(missing.map((one) => this.looks.attentionsOf(one).load(one.attention)));
      if (this.state.view !== view) return;
    }
    for (const one of this.looks.all) one.showsEntries = view.entries;
    setAttributes(this.entries, { "aria-pressed": String(view.entries) });
    if (!view.other) this.active = 0;
    this.strip.mark(view.selected.attention);
    if (changed?.has("selected") || changed?.has("other") || changed?.has("words")) this.cursor = null;
    this.panels[1].element.hidden = !view.other;
    if (!view.other) this.panels[1].pause();
    this.element.dataset.form = view.form;
    this.element.toggleAttribute("data-two", view.other !== null);
    setAttributes(this.panelsElement, { "aria-labelledby": this.forms.mark(view.form) });
    // The table is opened by the Save menu or the key N.
    /** @type {HTMLElement} */ (this.forms.element.querySelector('[data-value="table"]')).hidden =
      view.form !== "table";
    setAttributes(this.words, { "aria-pressed": String(view.words) });
    setAttributes(this.compare, { "aria-pressed": String(view.other !== null) });
    this.scale.value = view.scale ?? this.defaultScale;
    this.colors.value = view.colors;
    for (const panel of this.visiblePanels) panel.show(view);
    this.headSet.draw();
    this.updateDifference();
    this.drawLegend();
    this.zoomControls.draw();
    this.activate(this.active);
    this.read();
    performance.clearMeasures("regard-show");
    performance.measure("regard-show", { start: startTime });
    if (!changed || ["selected", "other", "words", "added"].some((key) => changed.has(key))) {
      this.measures.show(
        this.visiblePanels.map((panel) => ({
          figureData: panel.figureData,
          selected: panel.selected,
          attentions: panel.attentions,
          mark: panel.index ? "second" : "first",
        })),
        this.panels[0].attentions.scene.links,
      );
      if (changed && !changed.has("added"))
        this.announcer.announce(this.visiblePanels.map((panel) => panel.figureData.name).join("; compared with "));
    }
    if (!changed || ["selected", "colors", "scale", "theme"].some((key) => changed.has(key)))
      this.overview.draw(this.colormap(), this.panels[this.active].selected);
  }

  /** Shows or hides the difference of the two figures. */
  updateDifference() {
    const { view } = this.state;
    this.minus.hidden = !this.hasSameAxes || !this.difference.supports(view.form);
    setAttributes(this.minus, { "aria-pressed": String(view.minus) });
    if (!this.showsDifference) return this.difference.hide();
    const [one, other] = this.panels.map((panel) => panel.figureData);
    const scale = view.scale ?? this.defaultScale;
    this.difference.show(view.form, one, other, createDivergingColormap(scale, isDark(view.theme)), scale);
  }

  /** Draws the color scale. */
  drawLegend() {
    const { view } = this.state;
    drawColorScale(
      this.legend,
      view.colors,
      view.scale ?? this.defaultScale,
      isDark(view.theme),
      this.visiblePanels.some((panel) => panel.figureData.gold),
    );
  }

  /** Highlights cells and reads them out. @param {number} [wait] delay of the announcement */
  read(wait = -1) {
    const details = [];
    for (const panel of this.visiblePanels) {
      const { cursor, pin } = this.highlightsOf(panel.index);
      panel.figure?.mark(cursor, pin);
      const cell = cursor ?? pin;
      const { layers } = panel.figureData;
      if (!layers) details.push({ figureData: panel.figureData, cell, mark: panel.index ? "second" : "first" });
      else
        for (const { map, color, name } of layers)
          details.push({ figureData: { ...panel.figureData, map }, cell, mark: "first", color, name });
    }
    const { cursor, pin } = this.highlightsOf(0);
    const cell = cursor ?? pin;
    const cellDifference =
      this.showsDifference && typeof cell?.row === "number" && typeof cell.column === "number"
        ? this.difference.at(cell)
        : null;
    if (this.showsDifference) this.difference.figure.mark(cursor, pin);
    this.details.show(details, this.cursor === null && this.state.view.pin !== null, cellDifference);
    if (wait < 0) return;
    const announcements = details
      .filter(({ cell }) => (cell?.row ?? null) !== null)
      .map(({ figureData, cell }) => {
        const row = figureData.map.exactRow(cell.row);
        const full = { row: cell.row, column: cell.column ?? argmax(row) };
        return describeCell(figureData, full, formatWeight(row[full.column], figureData.rounded));
      });
    const more = cellDifference === null ? "" : ` A minus B: ${formatSigned(cellDifference)}.`;
    if (details[0].name)
      this.announcer.announce(announcements.map((text, i) => `${details[i].name}: ${text}`).join(" "), wait);
    else if (announcements.length)
      this.announcer.announce(
        announcements.length > 1 ? `A: ${announcements[0]} B: ${announcements[1]}${more}` : announcements[0],
        wait,
      );
  }

  /** @param {number} panel @param {Cell | null} cell */
  point(panel, cell) {
    const now = this.cursor?.cell;
    if (
      (cell === null && !this.cursor) ||
      (cell && now && cell.row === now.row && cell.column === now.column && this.cursor.panel === panel)
    )
      return;
    this.cursor = cell ? { panel, cell } : null;
    this.rememberCell(panel, cell);
    this.read(200);
  }

  /**
   * Remembers the token that was pointed at last, where the step-by-step view opens. @param {number} panel
   * @param {Cell | null} cell
   */
  rememberCell(panel, cell) {
    if (!cell || cell.row === null) return;
    const { figureData, selected } = this.panels[panel];
    this.state.pointed = {
      attention: selected.attention,
      cell: [figureData.rows.tokenAt(cell.row), cell.column === null ? null : figureData.columns.tokenAt(cell.column)],
    };
  }

  /** Pins a cell, or unpins it if it is pinned. @param {number} panel @param {Cell} cell */
  pin(panel, cell) {
    if (panel === 1 && !this.hasSameAxes) return;
    const { figureData } = this.panels[panel];
    // The maximum over a column of a long map would take too long: only the first rows are searched.
    const maxRows = figureData.map.isMaterialized ? figureData.map.rows : 256;
    const row =
      cell.row ??
      figureData.map.argmaxIn([0, Math.min(figureData.map.rows, maxRows)], [cell.column, cell.column + 1])[0];
    const column = cell.column ?? argmax(figureData.map.exactRow(row));
    const pin = /** @type {[number, number]} */ ([figureData.rows.tokenAt(row), figureData.columns.tokenAt(column)]);
    const same = JSON.stringify(this.state.view.pin) === JSON.stringify(pin);
    this.state.set({ pin: same ? null : pin });
    const name = `${figureData.rows.labels[row]}, ${figureData.columns.labels[column]}`;
    this.announcer.announce(
      same
        ? `Unpinned: ${name}.`
        : `Pinned: ${name}, ${formatWeight(figureData.map.exactRow(row)[column], figureData.rounded)}.`,
    );
  }

  /** @param {number} panel @param {import("../core/state.js").Zoom | null} zoom */
  zoom(panel, zoom) {
    if (panel === 1 && !this.hasSameAxes) return;
    this.state.set({ zoom });
  }

  /** @param {number} factor */
  zoomBy(factor) {
    const { figureData } = this.panels[0];
    const { cursor, pin } = this.highlightsOf(0);
    const zoom = figureData.zoom ?? fullRange(figureData.map);
    const middle = {
      row: Math.floor((zoom.rows[0] + zoom.rows[1]) / 2),
      column: Math.floor((zoom.columns[0] + zoom.columns[1]) / 2),
    };
    this.zoom(0, zoomAround(figureData, cursor ?? pin ?? middle, factor));
  }

  /** Makes a figure the one that the overview and the keys control. @param {number} panel */
  activate(panel) {
    this.active = Math.min(panel, this.figureCount - 1);
    this.panels.forEach(({ element, index }) =>
      element.toggleAttribute("data-active", this.figureCount > 1 && index === this.active),
    );
    this.showOverview();
  }

  /**
   * Selects a head, or adds it to the selected ones: in the same figure if possible, otherwise in a second one.
   * @param {HeadRef} selected @param {boolean} adds
   */
  choose(selected, adds) {
    const { look } = this.panels[this.active].selected;
    const next = look === undefined ? selected : { ...selected, look };
    if (adds && this.headSet.fits(next)) this.headSet.toggle(next);
    else if (adds || (this.figureCount > 1 && this.active === 1)) {
      this.state.set({ other: next });
      this.activate(1);
    } else this.state.set({ selected: next, added: [] });
  }

  /** @param {boolean} on */
  setComparison(on) {
    if (!on) this.state.set({ other: null });
    else {
      this.state.set({ other: this.defaultComparison(this.state.view.selected) });
      this.activate(1);
    }
  }

  /**
   * The default head to compare with: the same head of another look, or the next head. @param {HeadRef} selected
   * @returns {HeadRef}
   */
  defaultComparison(selected) {
    const { length } = this.looks;
    if (length > 1) return this.looks.correspondingHead(selected, (selected.look ?? 0) > 0 ? 0 : length - 1);
    const { byName } = this.looks.attentionsOf(selected);
    const { heads } = byName.get(selected.attention);
    const names = [...byName.keys()];
    return heads > 1
      ? { ...selected, head: selected.head === "mean" ? 0 : (selected.head + 1) % heads }
      : { attention: names[(names.indexOf(selected.attention) + 1) % names.length], head: 0 };
  }

  /** Moves to another layer or head. @param {number} panel @param {number} layers @param {number} heads */
  step(panel, layers, heads) {
    const { selected, attentions } = this.panels[panel];
    const names = attentions.scene.attentions
      .filter((one) => one.kind === attentions.byName.get(selected.attention).kind)
      .map((one) => one.name);
    const name = names[(names.indexOf(selected.attention) + layers + names.length) % names.length];
    const headCount = attentions.byName.get(name).heads;
    const head =
      selected.head === "mean"
        ? heads > 0
          ? 0
          : heads < 0
            ? headCount - 1
            : "mean"
        : (Math.min(selected.head, headCount - 1) + heads + headCount) % headCount;
    const next = /** @type {HeadRef} */ ({ ...selected, attention: name, head });
    this.state.set(panel ? { other: next } : { selected: next });
  }

  /** Recomputes the layout after the window was resized. */
  layout() {
    for (const panel of this.visiblePanels) panel.figure?.layout();
    if (this.showsDifference) this.difference.figure.layout();
  }

  /** Name of saved files, without extension. */
  get fileName() {
    const { selected, other } = this.state.view;
    return [
      "regard",
      ...[selected, other]
        .filter((one) => one !== null)
        .map((one) =>
          [truncate(this.looks.labelOf(one), 30), `${truncate(one.attention, 60)}.${one.head}`]
            .filter(Boolean)
            .join("-"),
        ),
    ]
      .join("-")
      .replace(/[^\w.-]+/g, "_");
  }

  /** All weights of the first figure as TSV. */
  get tsv() {
    return toTsv(this.panels[0].figureData);
  }
}
