/** The attention view: the weights of each head of each layer, as lines, heat map, shaded text or table. */

import { greatestIn } from "../weights/maths.js";
import { wholeOf } from "../weights/maps.js";
import { COLOURS, SCALES, differencePainter, painterOf, ramp, shareOf, ticksOf } from "../core/colors.js";
import { FORMS } from "../core/state.js";
import { change, fill, h, picker, s, uniqueId } from "../core/dom.js";
import { exactly, shortened, withSign } from "../core/tokens.js";
import { cellSays, shiftedBy, zoomedBy } from "./heatmap.js";
import { numbersOf } from "./table.js";
import { Overview } from "./overview.js";
import { Measures, Reading } from "./reading.js";
import { Difference } from "../comparison/comparison.js";
import { Panel } from "./panel.js";
import { icon, isDark, tabList, toggle } from "../core/shell.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {import("../core/state.js").View} View */
/** @typedef {import("./heatmap.js").Cell} Cell */
/** @typedef {import("./heatmap.js").Shot} Shot */

/** Above this number of columns, weights are too small to be visible on a linear scale. */
const MANY = 128;

export class Heads {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, members, state, work, voice }) {
    this.members = members;
    this.scene = host.scene;
    this.state = state;
    this.work = work;
    this.voice = voice;
    /** The cell under the pointer, and the index of its figure. @type {{panel: number, cell: Cell} | null} */
    this.cursor = null;
    this.active = 0;
    /** Overviews by index of the look, created on demand. @type {Map<number, Overview>} */
    this.overviews = new Map();
    this.overview = this.overviewOf(state.view.shown);
    this.reading = new Reading();
    this.measures = new Measures(members.all[0], work);
    this.panels = [new Panel(this, 0), new Panel(this, 1)];
    this.difference = new Difference(work, this.panels[0].told);
    this.panelsElement = h(
      "div",
      { class: "panels", role: "tabpanel", id: uniqueId("panel"), onkeydown: (event) => this.key(event) },
      this.panels.map((panel) => panel.element),
      this.difference.element,
    );
    this.forms = tabList("Show as", FORMS, this.panelsElement.id, (form) => this.state.set({ form }));
    this.words = toggle("Merge word pieces", (words) => this.state.set({ words, zoom: null }));
    this.compare = toggle("Compare", (on) => this.setCompare(on));
    this.minus = toggle("Difference", (minus) => this.state.set({ minus }));
    this.legend = h("div", { class: "legend" });
    this.scale = picker("Scale", SCALES, (scale) => this.state.set({ scale }));
    this.colours = picker("Colors", COLOURS, (colours) => this.state.set({ colours }));
    const pickers = h(
      "div",
      { class: "pickers", "data-saved": "no" },
      h("label", {}, "Scale ", this.scale),
      h("label", {}, "Colors ", this.colours),
    );
    this.zoomer = this.zoomButtons();
    this.sheet = h(
      "div",
      { class: "sheet-of-paper" },
      this.panelsElement,
      h("div", { class: "foot" }, this.legend, pickers, this.zoomer),
    );
    this.stage = h(
      "section",
      { class: "stage", "aria-label": "Head" },
      h(
        "div",
        { class: "bar", "data-saved": "no" },
        this.forms.element,
        h("div", { class: "toggles" }, this.words, this.compare, this.minus),
      ),
      this.sheet,
    );
    this.element = h(
      "div",
      { class: "heads" },
      h(
        "div",
        { class: this.scene.opens?.all ? "columns all-first" : "columns" },
        this.overview.element,
        this.stage,
        h("aside", { class: "side", "aria-label": "Details" }, this.reading.element, this.measures.element),
      ),
    );
    this.words.hidden = !members.all.some((attentions) =>
      attentions.scene.attentions.some((one) => {
        const { rows, columns } = attentions.axesOf(one.name, true);
        return (
          rows.length < attentions.axis(one.rows, false).length ||
          columns.length < attentions.axis(one.columns, false).length
        );
      }),
    );
    this.compare.hidden = this.overview.cells.size < 2 && members.length < 2;
  }

  /** Returns the overview of the look that a head belongs to. @param {Shown} shown */
  overviewOf(shown) {
    const of = shown.of ?? 0;
    if (!this.overviews.has(of)) {
      const one = new Overview(this.members.all[of], this.work, (head, second) => this.choose(head, second));
      one.painted = () => this.paintWhere();
      one.element.hidden = one.cells.size < 2;
      this.overviews.set(of, one);
    }
    return this.overviews.get(of);
  }

  /** Shows the overview of the look in the active figure. */
  showOverview() {
    const { view } = this.state;
    const active = this.panels[this.active].shown;
    const next = this.overviewOf(active);
    if (next !== this.overview) {
      this.overview.rest();
      this.overview.element.replaceWith(next.element);
      this.overview = next;
      next.draw(this.painter(), active);
    }
    const here = (/** @type {Shown | null} */ shown) => (shown && (shown.of ?? 0) === (active.of ?? 0) ? shown : null);
    next.mark(here(view.shown), here(view.other));
  }

  paintWhere() {
    this.overviewOf(this.state.view.shown).paintInto(this.whereMap, this.state.view.shown);
  }

  zoomButtons() {
    /** @param {string} name @param {string} sign @param {() => void} action */
    const button = (name, sign, action) =>
      h("button", { type: "button", class: "round", "aria-label": name, title: name, onclick: action }, icon(sign));
    this.whereBox = s("rect", { class: "box" });
    this.whereMap = h("canvas", { width: 1, height: 1 });
    this.where = h(
      "div",
      {
        class: "where",
        "aria-hidden": "true",
        onpointerdown: (event) => this.goTo(event),
        onpointermove: (event) => event.buttons && this.goTo(event),
      },
      this.whereMap,
      s("svg", { viewBox: "0 0 100 100" }, this.whereBox),
    );
    return h(
      "div",
      { class: "zoomer", "data-saved": "no" },
      this.where,
      button("Zoom in", "M12 5v14M5 12h14", () => this.zoomBy(0.5)),
      button("Zoom out", "M5 12h14", () => this.zoomBy(2)),
      (this.showAll = button("Show all", "M4 9V4h5M20 9V4h-5M4 15v5h5M20 15v5h-5", () => this.zoom(0, null))),
    );
  }

  /** The number of figures. */
  get count() {
    return this.state.view.other ? 2 : 1;
  }

  get shownPanels() {
    return this.panels.slice(0, this.count);
  }

  /** Describes an attention in a sentence. @param {import("../weights/maps.js").Attentions} attentions @param {any} attention */
  says(attentions, attention) {
    const [rows, columns] = Object.values(attentions.axesOf(attention.name, false)).map((axis) =>
      axis.called.toLowerCase(),
    );
    if (attention.rows === "query") return `A learned query attends to the ${columns}; the label is predicted from the result.`;
    if (attention.kind === "cross") return `To predict each token of the ${rows}, the decoder attends to the ${columns}.`;
    if (attention.kind === "masked") return `Each token attends to itself and the preceding tokens of the ${columns}.`;
    return `Each token attends to all tokens of the ${columns}.`;
  }

  /**
   * Returns a predicate for cells that are gold links, or null if there are no gold links.
   * @param {import("../weights/maps.js").Attentions} attentions @param {any} attention @param {any} rows @param {any} columns
   */
  goldOf(attentions, attention, rows, columns) {
    if (!attentions.scene.links || attention.kind !== "cross") return null;
    const links = new Set(attentions.scene.links.map(String));
    return (/** @type {number} */ row, /** @type {number} */ column) =>
      links.has(`${rows.wordAt(row)},${columns.wordAt(column)}`);
  }

  get autoScale() {
    const columns = this.members.all.flatMap((one) => one.scene.attentions.map(({ k }) => k.shape[0]));
    // Weights are spread over all patches.
    if (this.scene.picture) return "log";
    return Math.max(...columns) > MANY ? "root" : "linear";
  }

  painter() {
    const { colours, scale, theme } = this.state.view;
    return painterOf(colours, scale ?? this.autoScale, isDark(theme));
  }

  /** Whether both figures have the same axes, so that their cells correspond. */
  get alike() {
    const { shown, other } = this.state.view;
    return other !== null && this.members.alike(shown, other);
  }

  /** Whether the difference of both figures is shown. */
  get subtracted() {
    return this.state.view.minus && this.alike && this.difference.fits(this.state.view.form);
  }

  /**
   * The visible part of a map, or null if all of it is visible.
   * @param {number} panel @param {import("../weights/maps.js").Weights} map
   */
  zoomOf(panel, map) {
    const { zoom } = this.state.view;
    if (!zoom || (panel === 1 && !this.alike)) return null;
    if (zoom.rows[1] > map.rows || zoom.columns[1] > map.columns) return null;
    return zoom;
  }

  /** The highlighted cells of a figure. @param {number} panel @returns {{cursor: Cell | null, pin: Cell | null}} */
  marksOf(panel) {
    const { pin, words } = this.state.view;
    const { cursor } = this;
    const { rows, columns } = this.panels[panel].attentions.axesOf(this.panels[panel].shown.attention, words);
    const mine = panel === 0 || this.alike;
    const pinned = pin && mine ? { row: rows.placeOf(pin[0]), column: columns.placeOf(pin[1]) } : null;
    return { cursor: cursor && (cursor.panel === panel || this.alike) ? cursor.cell : null, pin: pinned };
  }

  /**
   * Draws the current state, after loading the arrays that it needs.
   * @param {Set<string> | null} changed null: all
   */
  async update(changed) {
    const begun = performance.now();
    const { view } = this.state;
    const wanted = [view.shown, view.other].filter((one) => one !== null);
    const missing = wanted.filter((one) => !this.members.of(one).isLoaded(one.attention));
    if (missing.length) {
      await Promise.all(missing.map((one) => this.members.of(one).load(one.attention)));
      if (this.state.view !== view) return;
    }
    if (!view.other) this.active = 0;
    if (changed?.has("shown") || changed?.has("other") || changed?.has("words")) this.cursor = null;
    this.panels[1].element.hidden = !view.other;
    if (!view.other) this.panels[1].rest();
    this.element.dataset.form = view.form;
    this.element.toggleAttribute("data-two", view.other !== null);
    change(this.panelsElement, { "aria-labelledby": this.forms.mark(view.form) });
    change(this.words, { "aria-pressed": String(view.words) });
    change(this.compare, { "aria-pressed": String(view.other !== null) });
    this.scale.value = view.scale ?? this.autoScale;
    this.colours.value = view.colours;
    for (const panel of this.shownPanels) panel.show(view);
    this.showDifference();
    this.drawLegend();
    this.drawWhere();
    this.activate(this.active);
    this.read();
    performance.clearMeasures("regard-show");
    performance.measure("regard-show", { start: begun });
    if (!changed || ["shown", "other", "words"].some((key) => changed.has(key))) {
      this.measures.show(
        this.shownPanels.map((panel) => ({
          shot: panel.shot,
          shown: panel.shown,
          attentions: panel.attentions,
          mark: panel.number ? "second" : "first",
        })),
        this.panels[0].attentions.scene.links,
      );
      if (changed) this.voice.say(this.shownPanels.map((panel) => panel.shot.name).join("; compared with "));
    }
    if (!changed || ["shown", "colours", "scale", "theme"].some((key) => changed.has(key)))
      this.overview.draw(this.painter(), this.panels[this.active].shown);
  }

  /** Shows or hides the difference of the two figures. */
  showDifference() {
    const { view } = this.state;
    this.minus.hidden = !this.alike || !this.difference.fits(view.form);
    change(this.minus, { "aria-pressed": String(view.minus) });
    if (!this.subtracted) return this.difference.hide();
    const [one, other] = this.panels.map((panel) => panel.shot);
    const scale = view.scale ?? this.autoScale;
    this.difference.show(view.form, one, other, differencePainter(scale, isDark(view.theme)), scale);
  }

  /** Draws the color scale. */
  drawLegend() {
    const { view } = this.state;
    const scale = view.scale ?? this.autoScale;
    const colours = ramp(view.colours, isDark(view.theme));
    const canvas = h("canvas", { width: 256, height: 1 });
    const context = canvas.getContext("2d");
    const image = context.createImageData(256, 1);
    for (let i = 0; i < 256; i++) image.data.set([...colours.subarray(3 * i, 3 * i + 3), 255], 4 * i);
    context.putImageData(image, 0, 0);
    const ticks = ticksOf(scale).map((weight) => {
      const tick = h("span", { class: "tick" }, String(weight));
      tick.style.left = `${100 * shareOf(scale, weight)}%`;
      return tick;
    });
    const gold = this.shownPanels.some((panel) => panel.shot.gold)
      ? h("span", { class: "gold-key" }, h("i", { "aria-hidden": "true" }), "gold link")
      : null;
    fill(
      this.legend,
      h("span", { class: "name" }, "Weight"),
      h("div", { class: "scale" }, canvas, h("div", { class: "ticks" }, ticks)),
      gold,
    );
  }

  /** Draws the position of the visible part in the minimap. */
  drawWhere() {
    const { shot } = this.panels[0];
    this.zoomer.hidden = this.state.view.form !== "map" || Math.max(shot.map.rows, shot.map.columns) < 16;
    const zoom = shot.zoom ?? wholeOf(shot.map);
    const [rows, columns] = [
      zoom.rows.map((t) => (100 * t) / shot.map.rows),
      zoom.columns.map((c) => (100 * c) / shot.map.columns),
    ];
    const x = shot.columns.rtl ? 100 - columns[1] : columns[0];
    change(this.whereBox, {
      x,
      y: rows[0],
      width: Math.max(3, columns[1] - columns[0]),
      height: Math.max(3, rows[1] - rows[0]),
      rx: 2,
    });
    this.where.hidden = !shot.zoom;
    this.paintWhere();
    change(this.showAll, { disabled: !shot.zoom });
  }

  /** @param {PointerEvent} event */
  goTo(event) {
    const { shot } = this.panels[0];
    if (!shot.zoom) return;
    const box = this.where.getBoundingClientRect();
    let x = (event.clientX - box.left) / box.width;
    if (shot.columns.rtl) x = 1 - x;
    const y = (event.clientY - box.top) / box.height;
    const middle = (/** @type {[number, number]} */ range) => (range[0] + range[1]) / 2;
    this.zoom(
      0,
      shiftedBy(
        shot,
        Math.round(y * shot.map.rows - middle(shot.zoom.rows)),
        Math.round(x * shot.map.columns - middle(shot.zoom.columns)),
      ),
    );
  }

  /** Highlights cells and reads them out. @param {number} [wait] delay of the announcement */
  read(wait = -1) {
    const readings = [];
    for (const panel of this.shownPanels) {
      const { cursor, pin } = this.marksOf(panel.number);
      panel.figure?.mark(cursor, pin);
      const cell = cursor ?? pin;
      readings.push({ shot: panel.shot, cell, mark: panel.number ? "second" : "first" });
    }
    const { cursor, pin } = this.marksOf(0);
    const cell = cursor ?? pin;
    const apart =
      this.subtracted && typeof cell?.row === "number" && typeof cell.column === "number"
        ? this.difference.at(cell)
        : null;
    if (this.subtracted) this.difference.figure.mark(cursor, pin);
    this.reading.show(readings, this.cursor === null && this.state.view.pin !== null, apart);
    if (wait < 0) return;
    const said = readings
      .filter(({ cell }) => (cell?.row ?? null) !== null)
      .map(({ shot, cell }) => {
        const row = shot.map.exact(cell.row);
        const full = { row: cell.row, column: cell.column ?? greatestIn(row) };
        return cellSays(shot, full, exactly(row[full.column], shot.rounded));
      });
    const more = apart === null ? "" : ` A minus B: ${withSign(apart)}.`;
    if (said.length) this.voice.say(said.length > 1 ? `A: ${said[0]} B: ${said[1]}${more}` : said[0], wait);
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
    this.read(200);
  }

  /** Pins a cell, or unpins it if it is pinned. @param {number} panel @param {Cell} cell */
  pin(panel, cell) {
    if (panel === 1 && !this.alike) return;
    const { shot } = this.panels[panel];
    // The maximum over a column of a long map would take too long: only the first rows are searched.
    const most = shot.map.whole ? shot.map.rows : 256;
    const row = cell.row ?? shot.map.greatest([0, Math.min(shot.map.rows, most)], [cell.column, cell.column + 1])[0];
    const column = cell.column ?? greatestIn(shot.map.exact(row));
    const pin = /** @type {[number, number]} */ ([shot.rows.tokenAt(row), shot.columns.tokenAt(column)]);
    const same = JSON.stringify(this.state.view.pin) === JSON.stringify(pin);
    this.state.set({ pin: same ? null : pin });
    const name = `${shot.rows.labels[row]}, ${shot.columns.labels[column]}`;
    this.voice.say(
      same ? `Unpinned: ${name}.` : `Pinned: ${name}, ${exactly(shot.map.exact(row)[column], shot.rounded)}.`,
    );
  }

  /** @param {number} panel @param {import("../core/state.js").Zoom | null} zoom */
  zoom(panel, zoom) {
    if (panel === 1 && !this.alike) return;
    this.state.set({ zoom });
  }

  /** @param {number} factor */
  zoomBy(factor) {
    const { shot } = this.panels[0];
    const { cursor, pin } = this.marksOf(0);
    const zoom = shot.zoom ?? wholeOf(shot.map);
    const middle = {
      row: Math.floor((zoom.rows[0] + zoom.rows[1]) / 2),
      column: Math.floor((zoom.columns[0] + zoom.columns[1]) / 2),
    };
    this.zoom(0, zoomedBy(shot, cursor ?? pin ?? middle, factor));
  }

  /** Makes a figure the one that the overview and the keys control. @param {number} panel */
  activate(panel) {
    this.active = Math.min(panel, this.count - 1);
    this.panels.forEach(({ element, number }) =>
      element.toggleAttribute("data-active", this.count > 1 && number === this.active),
    );
    this.showOverview();
  }

  /** @param {Shown} shown @param {boolean} second */
  choose(shown, second) {
    const { of } = this.panels[this.active].shown;
    const next = of === undefined ? shown : { ...shown, of };
    if (second || (this.count > 1 && this.active === 1)) {
      this.state.set({ other: next });
      this.activate(1);
    } else this.state.set({ shown: next });
  }

  /** @param {boolean} on */
  setCompare(on) {
    if (!on) this.state.set({ other: null });
    else {
      this.state.set({ other: this.beside(this.state.view.shown) });
      this.activate(1);
    }
  }

  /** The default head to compare with: the same head of another look, or the next head. @param {Shown} shown @returns {Shown} */
  beside(shown) {
    const { length } = this.members;
    if (length > 1) return this.members.fitting(shown, (shown.of ?? 0) > 0 ? 0 : length - 1);
    const { byName } = this.members.of(shown);
    const { heads } = byName.get(shown.attention);
    const names = [...byName.keys()];
    return heads > 1
      ? { ...shown, head: shown.head === "mean" ? 0 : (shown.head + 1) % heads }
      : { attention: names[(names.indexOf(shown.attention) + 1) % names.length], head: 0 };
  }

  /** Moves to another layer or head. @param {number} panel @param {number} layers @param {number} heads */
  step(panel, layers, heads) {
    const { shown, attentions } = this.panels[panel];
    const names = attentions.scene.attentions
      .filter((one) => one.kind === attentions.byName.get(shown.attention).kind)
      .map((one) => one.name);
    const name = names[(names.indexOf(shown.attention) + layers + names.length) % names.length];
    const count = attentions.byName.get(name).heads;
    const head =
      shown.head === "mean"
        ? heads > 0
          ? 0
          : heads < 0
            ? count - 1
            : "mean"
        : (Math.min(shown.head, count - 1) + heads + count) % count;
    const next = /** @type {Shown} */ ({ ...shown, attention: name, head });
    this.state.set(panel ? { other: next } : { shown: next });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.altKey || event.metaKey || event.ctrlKey) return;
    const target = /** @type {HTMLElement} */ (event.target);
    const panel =
      this.shownPanels.find((one) => one.element.contains(target)) ??
      (this.difference.element.contains(target) ? this.panels[0] : null);
    if (!panel || !panel.shot || target.closest("select, button, input")) return;
    // A table keeps its scrolling keys.
    if (target.closest(".scroll") && (event.key.length > 1 || event.key === " ")) return;
    if (this.keyed(event, panel)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }

  /**
   * Handles a key; returns false if the key has no function.
   * @param {KeyboardEvent} event @param {Panel} panel @returns {boolean}
   */
  keyed(event, panel) {
    const far = event.shiftKey ? 10 : 1;
    const across = panel.shot.columns.rtl && this.state.view.form === "map" ? -1 : 1;
    const letters = { l: "lines", m: "map", t: "text", n: "table" };
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (key in letters) this.state.set({ form: letters[key] });
    else if (key === "ArrowUp") this.move(panel, -far, 0);
    else if (key === "ArrowDown") this.move(panel, far, 0);
    else if (key === "ArrowLeft") this.move(panel, 0, -far * across);
    else if (key === "ArrowRight") this.move(panel, 0, far * across);
    else if (key === "Home") this.move(panel, 0, -Infinity);
    else if (key === "End") this.move(panel, 0, Infinity);
    else if (key === "PageUp") this.move(panel, -20, 0);
    else if (key === "PageDown") this.move(panel, 20, 0);
    else if (key === "g") this.moveTo(panel, this.at(panel).row, greatestIn(panel.shot.map.exact(this.at(panel).row)));
    else if (key === "Enter" || key === " ") this.pin(panel.number, this.at(panel));
    else if (key === "Escape") return this.escape();
    else if (key === "+" || key === "=") this.zoomBy(0.5);
    else if (key === "-") this.zoomBy(2);
    else if (key === "0") this.zoom(0, null);
    else if (key === "[") this.step(panel.number, 0, -1);
    else if (key === "]") this.step(panel.number, 0, 1);
    else if (key === "{") this.step(panel.number, -1, 0);
    else if (key === "}") this.step(panel.number, 1, 0);
    else if (key === "w" && !this.words.hidden) this.state.set({ words: !this.state.view.words, zoom: null });
    else if (key === "c" && !this.compare.hidden) this.setCompare(this.count === 1);
    else if (key === "d" && !this.minus.hidden) this.state.set({ minus: !this.state.view.minus });
    else if (key === "," || key === ".") return this.turn(panel, key === "," ? -1 : 1);
    else return false;
    return true;
  }

  /** Moves to another look. @param {Panel} panel @param {number} by */
  turn(panel, by) {
    const { length } = this.members;
    if (length > 1) panel.turnTo(((panel.shown.of ?? 0) + by + length) % length);
    return length > 1;
  }

  escape() {
    if (this.state.view.pin || this.cursor) {
      this.cursor = null;
      this.state.set({ pin: null });
      this.read();
    } else if (this.state.view.zoom) this.zoom(0, null);
    else return false;
    return true;
  }

  /** The cell that the keys start from. @param {Panel} panel @returns {{row: number, column: number}} */
  at(panel) {
    const { cursor, pin } = this.marksOf(panel.number);
    const { map, zoom } = panel.shot;
    const cell = cursor ?? pin;
    const row = Math.min(map.rows - 1, cell?.row ?? zoom?.rows[0] ?? 0);
    return { row, column: Math.min(map.columns - 1, cell?.column ?? greatestIn(map.exact(row))) };
  }

  /** @param {Panel} panel @param {number} rows @param {number} columns */
  move(panel, rows, columns) {
    const { cursor, pin } = this.marksOf(panel.number);
    const at = this.at(panel);
    // The first key press only shows the current position.
    if (!cursor && !pin) this.moveTo(panel, at.row, at.column);
    else this.moveTo(panel, at.row + rows, at.column + columns);
  }

  /** @param {Panel} panel @param {number} row @param {number} column */
  moveTo(panel, row, column) {
    const { map, zoom } = panel.shot;
    const cell = {
      row: Math.max(0, Math.min(map.rows - 1, row)),
      column: Math.max(0, Math.min(map.columns - 1, column)),
    };
    this.cursor = { panel: panel.number, cell };
    if (zoom) {
      /** How far a range has to move to contain a position. @param {[number, number]} range @param {number} place */
      const by = ([from, to], place) => (place < from ? place - from : place >= to ? place - to + 1 : 0);
      this.zoom(panel.number, shiftedBy(panel.shot, by(zoom.rows, cell.row), by(zoom.columns, cell.column)));
    }
    this.read(0);
  }

  /** Recomputes the layout after the window was resized. */
  lay() {
    for (const panel of this.shownPanels) panel.figure?.lay();
    if (this.subtracted) this.difference.figure.lay();
  }

  /** Name of saved files, without extension. */
  get fileName() {
    const { shown, other } = this.state.view;
    return [
      "regard",
      ...[shown, other]
        .filter((one) => one !== null)
        .map((one) =>
          [shortened(this.members.labelOf(one), 30), `${shortened(one.attention, 60)}.${one.head}`]
            .filter(Boolean)
            .join("-"),
        ),
    ]
      .join("-")
      .replace(/[^\w.-]+/g, "_");
  }

  /** All weights of the first figure as TSV. */
  get numbers() {
    return numbersOf(this.panels[0].shot);
  }
}
