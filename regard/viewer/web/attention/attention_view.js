/** The attention view: the weights of each head of each layer, as lines, heat map, shaded text or table. */

import { argmax } from "../weights/maths.js";
import { fullRange } from "../weights/maps.js";
import { COLORS, SCALES, createColormap, createDivergingColormap } from "../core/colors.js";
import { FORMS } from "../core/state.js";
import { h, picker, setAttributes, uniqueId } from "../core/dom.js";
import { formatSigned, formatWeight, truncate } from "../core/tokens.js";
import { describeCell, zoomAround } from "./figure_data.js";
import { FigureKeys } from "./figure_keys.js";
import { drawColorScale } from "./color_scale.js";
import { toTsv } from "./table.js";
import { HeadSet } from "./head_set.js";
import { Overview } from "./overview.js";
import { Measures, Reading } from "./reading.js";
import { Difference } from "../comparison/comparison.js";
import { ModelStrip } from "./model_strip.js";
import { Panel, mostInformativeHead } from "./panel.js";
import { ZoomControls } from "./zoom_controls.js";
import { dropDown, icon, isDark, tabList, toggle } from "../core/shell.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("../core/state.js").View} View */
/** @typedef {import("./figure_data.js").Cell} Cell */
/** @typedef {import("./figure_data.js").FigureData} FigureData */

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
    this.reading = new Reading();
    this.measures = new Measures(looks.all[0], scheduler);
    this.panels = [new Panel(this, 0), new Panel(this, 1)];
    this.difference = new Difference(scheduler, this.panels[0].handlers);
    this.panelsElement = h(
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
    this.legend = h("div", { class: "legend" });
    this.scale = picker("Scale", SCALES, (scale) => this.state.set({ scale }));
    this.colors = picker("Colors", COLORS, (colors) => this.state.set({ colors }));
    this.settings = dropDown(
      "Settings",
      icon("M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4"),
      "settings-panel",
      h("div", { class: "pickers" }, h("label", {}, "Scale ", this.scale), h("label", {}, "Colors ", this.colors)),
      h("div", { class: "switches" }, this.words, this.entries),
      this.measures.element,
    );
    this.strip = new ModelStrip(looks.all[0], (attentions) => this.openLayer(attentions), (section) => state.set({ view: "steps", section }));
    this.zoomControls = new ZoomControls(this);
    this.figureElement = h(
      "div",
      { class: "card" },
      this.panelsElement,
      h("div", { class: "foot" }, this.legend, this.zoomControls.element),
    );
    this.stage = h(
      "section",
      { class: "stage", "aria-label": "Head" },
      h(
        "div",
        { class: "bar", "data-export": "no" },
        this.forms.element,
        h("div", { class: "toggles" }, this.compare, this.minus),
        this.strip.element,
        this.settings,
      ),
      this.figureElement,
    );
    this.element = h(
      "div",
      { class: this.scene.initial?.all ? "attention-view all-first" : "attention-view" },
      this.stage,
      h("div", { class: "columns" }, this.overview.element, h("aside", { class: "side", "aria-label": "Details" }, this.reading.element, this.measures.note)),
    );
    this.entries.hidden = !looks.all.some(({ scene }) => Object.values(scene.sides).some((side) => Object.keys(side.entries ?? {}).length));
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
    this.state.set({ view: "steps", depth: "numbers", selected: { ...selected, head: selected.head === "mean" ? 0 : selected.head }, pin: [figureData.rows.tokenAt(row), figureData.columns.tokenAt(column)] });
  }

  /** The largest weight of the rows that are words. @param {Panel} panel @returns {Cell} */
  clearestCell(panel) {
    const { map, rows } = panel.figureData;
    let best = { row: 0, column: 0, weight: -1 };
    for (const row of map.sampleRows()) {
      const weights = map.exactRow(row);
      const column = argmax(weights);
      if ((rows.wordAt(row) ?? -1) >= 0 && weights[column] > best.weight) best = { row, column, weight: weights[column] };
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
    if (!panel.figureData || panel.figureData.rows.name !== "predicted") return;
    this.point(0, step === null || step >= panel.figureData.rows.length ? null : { row: panel.figureData.rows.positionOf(step), column: null });
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
    const here = (/** @type {HeadRef | null} */ selected) => (selected && (selected.look ?? 0) === (active.look ?? 0) ? selected : null);
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
    /** @type {HTMLElement} */ (this.forms.element.querySelector('[data-value="table"]')).hidden = view.form !== "table";
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
      if (changed && !changed.has("added")) this.announcer.announce(this.visiblePanels.map((panel) => panel.figureData.name).join("; compared with "));
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
    drawColorScale(this.legend, view.colors, view.scale ?? this.defaultScale, isDark(view.theme), this.visiblePanels.some((panel) => panel.figureData.gold));
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
      else for (const { map, color, name } of layers) details.push({ figureData: { ...panel.figureData, map }, cell, mark: "first", color, name });
    }
    const { cursor, pin } = this.highlightsOf(0);
    const cell = cursor ?? pin;
    const cellDifference =
      this.showsDifference && typeof cell?.row === "number" && typeof cell.column === "number"
        ? this.difference.at(cell)
        : null;
    if (this.showsDifference) this.difference.figure.mark(cursor, pin);
    this.reading.show(details, this.cursor === null && this.state.view.pin !== null, cellDifference);
    if (wait < 0) return;
    const announcements = details
      .filter(({ cell }) => (cell?.row ?? null) !== null)
      .map(({ figureData, cell }) => {
        const row = figureData.map.exactRow(cell.row);
        const full = { row: cell.row, column: cell.column ?? argmax(row) };
        return describeCell(figureData, full, formatWeight(row[full.column], figureData.rounded));
      });
    const more = cellDifference === null ? "" : ` A minus B: ${formatSigned(cellDifference)}.`;
    if (details[0].name) this.announcer.announce(announcements.map((text, i) => `${details[i].name}: ${text}`).join(" "), wait);
    else if (announcements.length) this.announcer.announce(announcements.length > 1 ? `A: ${announcements[0]} B: ${announcements[1]}${more}` : announcements[0], wait);
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

  /** Remembers the token that was pointed at last, where the step-by-step view opens. @param {number} panel @param {Cell | null} cell */
  rememberCell(panel, cell) {
    if (!cell || cell.row === null) return;
    const { figureData, selected } = this.panels[panel];
    this.state.pointed = { attention: selected.attention, cell: [figureData.rows.tokenAt(cell.row), cell.column === null ? null : figureData.columns.tokenAt(cell.column)] };
  }

  /** Pins a cell, or unpins it if it is pinned. @param {number} panel @param {Cell} cell */
  pin(panel, cell) {
    if (panel === 1 && !this.hasSameAxes) return;
    const { figureData } = this.panels[panel];
    // The maximum over a column of a long map would take too long: only the first rows are searched.
    const maxRows = figureData.map.isMaterialized ? figureData.map.rows : 256;
    const row = cell.row ?? figureData.map.argmaxIn([0, Math.min(figureData.map.rows, maxRows)], [cell.column, cell.column + 1])[0];
    const column = cell.column ?? argmax(figureData.map.exactRow(row));
    const pin = /** @type {[number, number]} */ ([figureData.rows.tokenAt(row), figureData.columns.tokenAt(column)]);
    const same = JSON.stringify(this.state.view.pin) === JSON.stringify(pin);
    this.state.set({ pin: same ? null : pin });
    const name = `${figureData.rows.labels[row]}, ${figureData.columns.labels[column]}`;
    this.announcer.announce(
      same ? `Unpinned: ${name}.` : `Pinned: ${name}, ${formatWeight(figureData.map.exactRow(row)[column], figureData.rounded)}.`,
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

  /** Selects a head, or adds it to the selected ones: in the same figure if possible, otherwise in a second one. @param {HeadRef} selected @param {boolean} adds */
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

  /** The default head to compare with: the same head of another look, or the next head. @param {HeadRef} selected @returns {HeadRef} */
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
