/** The image view: attention of each head over the patches of an image, rollout through all layers, segmentation. */

import { greatestIn } from "../weights/maths.js";
import { change, fill, h } from "../core/dom.js";
import { exactly, isolated, shortened } from "../core/tokens.js";
import { PictureLooks } from "./image_attention.js";
import { PictureAsking } from "./image_requests.js";
import { PictureControls } from "./image_controls.js";
import { PatchFigure } from "./image_figure.js";
import { PictureOverview, QueryMaps, headOfPicture, layerOfPicture } from "./image_overview.js";
import { LabelList, greatestLaid, legendOf, patchCalled, readingOf, sharesOfLabels } from "./image_reading.js";
import IMAGES_STYLE from "./images.css";
import { Measures } from "../attention/reading.js";
import { Table, numbersOf } from "../attention/table.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {import("./image_reading.js").Laid} Laid */

/** Keys of the overlays. */
const OVER_KEYS = { p: "picture", a: "attention", r: "rollout", m: "mask" };

/** The initial view of an image, if the address has none. @param {any} scene @returns {any} */
export function openingOfPicture(scene) {
  if (!scene.picture) return {};
  const { over, token, label } = scene.opens;
  return { view: "images", over, label, pin: token === null ? null : [token, token], colours: "iris" };
}

export class Images {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state, work, voice }) {
    this.host = host;
    this.attentions = attentions;
    this.scene = attentions.scene;
    this.picture = this.scene.picture;
    this.state = state;
    this.work = work;
    this.voice = voice;
    this.looks = new PictureLooks(attentions);
    this.asking = new PictureAsking(this.looks, state);
    /** The pixel under the pointer. @type {number | null} */
    this.pixel = null;
    /** @type {Laid | null} */
    this.laid = null;
    /** @type {import("./image_figure.js").PixelLabels | null} */
    this.pixels = null;
    /** @type {number[]} labels, most pixels first */
    this.common = [];
    this.ready = false;
    const told = {
      point: (/** @type {number | null} */ patch, /** @type {number | null} */ pixel) => this.point(patch, pixel),
      pin: (/** @type {number} */ patch) => this.pin(patch),
    };
    this.figure = new PatchFigure(told);
    this.table = new Table({
      point: (cell) => this.point(cell ? this.patchAt(cell) : null, null),
      pin: (cell) => this.pin(this.patchAt(cell)),
      zoom: () => {},
    });
    this.overview = new PictureOverview(this.looks, work, (shown) => this.choose(shown));
    this.measures = new Measures(attentions, work);
    this.makeStage();
    this.reading = h("section", { class: "reading", "aria-label": "Reading" });
    this.labels = h("div", { class: "of-labels" });
    this.element = h(
      "div",
      { class: "images" },
      h("style", {}, IMAGES_STYLE),
      h(
        "div",
        { class: this.scene.opens?.all ? "columns all-first" : "columns" },
        this.overview.element,
        this.stage,
        h("aside", { class: "side", "aria-label": "Details" }, this.labels, this.reading, this.measures.element),
      ),
    );
    new ResizeObserver(() => this.figure.lay()).observe(this.figure.element);
  }

  makeStage() {
    this.controls = new PictureControls(this.asking, {
      choose: (shown) => this.choose(shown),
      step: (by) => this.step(0, by),
      ask: (who) => this.ask(who),
    });
    this.place = h("div", { class: "place" });
    this.waits = h("p", { class: "waits" });
    const { panel, bar, pickers } = this.controls;
    panel.append(this.place, this.waits);
    panel.addEventListener("keydown", (event) => this.key(event));
    this.legend = h("div", { class: "legend" });
    this.foot = h("div", { class: "foot" }, this.legend, pickers);
    this.queries = new QueryMaps(this.asking, (label) => this.ask(label === null ? "pointer" : String(label)));
    this.sheet = h("div", { class: "sheet-of-paper" }, panel, this.foot, this.queries.element);
    this.stage = h("section", { class: "stage", "aria-label": "Image" }, bar, this.sheet);
  }

  // Drawing

  get isTable() {
    return this.state.view.form === "table" && ["attention", "rollout"].includes(this.asking.over);
  }

  /** @param {Set<string> | null} changed null: all */
  async update(changed) {
    const begun = performance.now();
    const { view } = this.state;
    if (!this.ready) await this.fetch();
    const rolls = this.asking.over === "rollout" && this.looks.canRoll;
    const through = rolls ? [...new Set([null, this.asking.rolledFor()].flatMap((asker) => this.looks.throughOf(asker)))] : [];
    await Promise.all([view.shown.attention, ...through].map((name) => this.attentions.load(name)));
    if (this.state.view !== view) return;
    if (changed?.has("shown") && this.asking.over === "attention") this.voice.say(this.named());
    this.rollSoon(through);
    this.controls.show(this.isTable);
    this.overview.mark(this.asking.over === "attention" ? view.shown : null);
    this.list?.mark(["rollout", "mask"].includes(this.asking.over) ? this.asking.chosenLabel : null);
    this.draw();
    this.queries.show(this.common);
    if (!changed || changed.has("shown") || changed.has("over")) this.measure();
    performance.clearMeasures("regard-show");
    performance.measure("regard-show", { start: begun });
  }

  /** Loads the pixels, rollouts of labels and the segmentation. */
  async fetch() {
    const { pixels, grid, labels, mask } = this.picture;
    const [height, width, channels] = pixels.shape;
    this.figure.setPhoto({ pixels: new Uint8Array(await this.host.blob(pixels.at)), height, width, channels, rows: grid[0], columns: grid[1] });
    for (const { number, rollout } of labels) {
      if (rollout) this.asking.given.set(number, Float64Array.from(new Float32Array(await this.host.blob(rollout.at))));
    }
    if (mask) {
      const buffer = await this.host.blob(mask.at);
      this.pixels = { numbers: mask.type === "uint8" ? new Uint8Array(buffer) : new Uint16Array(buffer), colours: mask.colours };
    }
    if (!this.ready) this.makeLabels();
    this.ready = true;
  }

  makeLabels() {
    const { labels, mask } = this.picture;
    if (this.pixels) {
      const shares = sharesOfLabels(this.pixels.numbers, labels.length);
      this.common = shares.map(({ number }) => number);
      this.list = new LabelList(
        "Pixel labels",
        "Select a label to highlight it.",
        shares.filter(({ share }) => share > 0).map(({ number, share }) => ({ number, share, name: labels[number].name, colour: mask.colours[number] })),
        "pixel-labels",
        (label) => this.state.set({ label, over: this.asking.over === "rollout" && this.looks.segmenter.length ? "rollout" : "mask" }),
      );
    } else if (labels.some((/** @type {any} */ one) => one.rollout)) {
      this.list = new LabelList(
        "Predictions",
        "Select a label to see the evidence for it.",
        labels.map((/** @type {any} */ one) => ({ number: one.number, name: one.name, share: one.probability })),
        "says-labels",
        (label) => this.state.set({ label, over: "rollout" }),
      );
    }
    fill(this.labels, this.list?.element ?? null);
  }

  /** Computes the mean maps of a rollout, in slices. @param {string[]} names */
  rollSoon(names) {
    const { looks } = this;
    fill(this.waits);
    if (this.asking.over !== "rollout" || this.asking.given.has(this.asking.chosenLabel)) return;
    if (!looks.canRoll) {
      fill(this.waits, `A rollout over ${looks.tokens} tokens is too large for this page. Run: regard look MODEL IMAGE --rollout --out map.png`);
      return;
    }
    if (names.every((name) => looks.means.has(name))) return;
    const steps = looks.prepare(names);
    this.work.add("rollout", 2, () => {
      const { done, value } = steps.next();
      if (done) {
        fill(this.waits);
        this.draw();
      } else fill(this.waits, `Computing rollout: ${Math.round(100 * Number(value))}%`);
      return !done;
    });
  }

  /** Draws the overlay and its details. */
  draw() {
    const { view } = this.state;
    const colours = view.colours;
    const scale = view.scale ?? "linear";
    if (!this.ready || (this.asking.over === "attention" && !this.attentions.isLoaded(view.shown.attention))) return;
    this.laid = this.asking.layNow();
    const shown = this.isTable && this.laid ? this.table : this.figure;
    if (this.place.firstChild !== shown.element) fill(this.place, shown.element);
    if (shown === this.table) this.table.show(/** @type {any} */ (this.shot));
    else if (this.asking.over === "mask") this.figure.showLabels(this.pixels, this.asking.chosenLabel);
    else if (this.laid) this.figure.showWeights(this.laid.patches, colours, scale);
    else this.figure.showPhoto();
    change(this.figure.element, { "aria-label": `${this.named()}. Arrow keys move between patches, Enter pins or unpins the query patch.` });
    if (this.asking.over === "attention") {
      const some = this.asking.asker === null && this.looks.isSampled(view.shown);
      fill(this.waits, some ? `Mean over a sample of ${this.attentions.map(view.shown, false).sample().length} patches.` : null);
    }
    this.mark();
    this.foot.hidden = !this.laid || this.isTable;
    if (this.laid) fill(this.legend, legendOf(this.laid, colours, scale));
    this.overview.show((name) => this.asking.askerIn(name), colours, scale, view.shown.attention);
  }

  /** Outlines patches and shows details of the one under the pointer. */
  mark() {
    const { asker, cursor } = this.asking;
    const asking = asker && "patch" in asker ? asker.patch : null;
    this.figure.mark({ asker: asking, cursor, pinned: this.asking.pinned !== null });
    const at = (/** @type {number | null} */ patch) => (patch === null ? null : { row: Math.floor(patch / this.looks.columns), column: patch % this.looks.columns });
    if (this.isTable && this.laid) this.table.mark(at(cursor), at(asking));
    fill(this.reading, this.asking.over === "mask" || this.asking.over === "picture" ? this.ofPixel() : readingOf(this.laid, this.asking.read, this.asking.pinned !== null && this.asking.askable, this.looks.columns));
  }

  /** Details of the pixel under the pointer. */
  ofPixel() {
    const pixel = this.pixel ?? (this.asking.cursor === null ? null : this.figure.middleOf(this.asking.cursor));
    if (pixel === null) return h("p", { class: "hint" }, "Point at the image to inspect a pixel; arrow keys work too.");
    const { width, channels, pixels } = this.figure.photo;
    const numbers = Array.from(pixels.subarray(pixel * channels, (pixel + 1) * channels));
    return h(
      "div",
      { class: "one" },
      h("h2", {}, h("span", { class: "subject" }, patchCalled(this.asking.cursor, this.looks.columns))),
      h("p", { class: "rest" }, `Pixel ${Math.floor(pixel / width)},${pixel % width}: ${channels === 3 ? `red ${numbers[0]}, green ${numbers[1]}, blue ${numbers[2]}` : `gray ${numbers[0]}`}.`),
      this.asking.over === "mask" ? h("p", { class: "exact" }, h("bdi", {}, this.asking.labelCalled(this.pixels.numbers[pixel]))) : null,
    );
  }

  measure() {
    const { shown } = this.state.view;
    const attention = this.asking.over === "attention";
    this.measures.values.hidden = !attention;
    if (attention) this.measures.show([{ shot: /** @type {any} */ ({ map: this.attentions.map(shown, false), rows: { joined: false } }), shown, mark: "first" }], null);
  }

  // Pointer and keys

  /** @param {number | null} patch @param {number | null} pixel */
  point(patch, pixel) {
    if (patch === this.asking.cursor && (pixel === this.pixel || !["mask", "picture"].includes(this.asking.over))) return;
    const same = patch === this.asking.cursor;
    [this.asking.cursor, this.pixel] = [patch, pixel];
    if (this.asking.follows && !same) this.draw();
    else this.mark();
    if (patch !== null && !same) this.voice.say(this.says(), 200);
  }

  /** Describes the patch under the pointer for screen readers. */
  says() {
    const { columns } = this.looks;
    if (this.asking.cursor === null) return this.named();
    const called = patchCalled(this.asking.cursor, columns);
    const place = `Row ${Math.floor(this.asking.cursor / columns) + 1} of ${this.looks.rows}, column ${(this.asking.cursor % columns) + 1} of ${columns}.`;
    if (this.asking.over === "mask") return `${called}: ${isolated(this.asking.labelCalled(this.pixels.numbers[this.pixel ?? this.figure.middleOf(this.asking.cursor)]))}. ${place}`;
    if (!this.laid) return `${called}. ${place}`;
    const { subject, verb, patches, rounded } = this.laid;
    if (this.asking.read !== null) return `${isolated(subject)} ${verb} ${called}: ${exactly(patches[this.asking.cursor], rounded)}. ${place}`;
    const [best] = greatestLaid(this.laid, columns);
    return `${isolated(subject)} ${verb} ${best ? `${best.name} most: ${exactly(best.weight, rounded)}` : "nothing"}. ${place}`;
  }

  /** Pins a patch as the query, or unpins it. @param {number} patch */
  pin(patch) {
    if (!this.asking.askable) return;
    const { shown } = this.state.view;
    const name = this.asking.over === "rollout" && this.looks.firstOf(shown.attention, "rows") === null ? this.looks.blocks.at(-1) : shown.attention;
    const token = this.looks.tokenOf(name, patch);
    const same = this.asking.pinned === token && name === shown.attention;
    this.asking.cursor = patch;
    this.state.set({ pin: same ? null : [token, this.looks.firstOf(name, "columns") + patch], ...(name === shown.attention ? {} : { shown: { attention: name, head: "mean" } }) });
    this.voice.say(same ? `Unpinned: ${patchCalled(patch, this.looks.columns)}.` : `Pinned: ${patchCalled(patch, this.looks.columns)} is the query.`);
  }

  /** Selects a query. @param {string} who value of an option */
  ask(who) {
    if (who === "pointer") this.state.set({ pin: null, follow: true });
    else if (who === "whole") this.state.set({ pin: null, follow: false });
    else if (who !== "patch") {
      const { shown } = this.state.view;
      const token = Number(who);
      this.state.set({ pin: [token, greatestIn(this.attentions.map(shown, false).exact(token))] });
    }
    this.voice.say(`Query: ${this.asking.askerCalled(this.asking.asker, this.asking.over === "rollout" ? "entire image" : this.asking.speakerOf(this.state.view.shown.attention))}.`);
  }

  /** Selects another head; a pinned query patch stays pinned. @param {Shown} shown */
  choose(shown) {
    const { heads, rows, columns } = this.attentions.byName.get(shown.attention);
    const head = shown.head === "mean" ? (heads > 1 ? "mean" : 0) : Math.min(shown.head, heads - 1);
    const { pin, shown: before } = this.state.view;
    const patch = this.asking.pinned === null ? null : this.looks.patchOf(before.attention, this.asking.pinned);
    const token = patch === null ? null : this.looks.tokenOf(shown.attention, patch);
    const alike = rows === this.attentions.byName.get(before.attention).rows;
    /** @type {[number, number] | null} */
    const next = alike ? pin : token === null ? null : [token, this.picture.first[columns] + patch];
    this.state.set({ shown: { attention: shown.attention, head }, pin: next, over: "attention" });
  }

  /** Moves to another layer or head. @param {number} layers @param {number} by */
  step(layers, by) {
    const { attention, head } = this.state.view.shown;
    const names = [...this.attentions.byName.keys()];
    const name = names[(names.indexOf(attention) + layers + names.length) % names.length];
    const { heads } = this.attentions.byName.get(name);
    const next = head === "mean" ? (by > 0 ? 0 : by < 0 ? heads - 1 : "mean") : (Math.min(head, heads - 1) + by + heads) % heads;
    this.choose({ attention: name, head: next });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.altKey || event.metaKey || event.ctrlKey || target.closest("select, button")) return;
    // A table keeps its scrolling keys.
    if (target.closest(".scroll") && (event.key.length > 1 || event.key === " ")) return;
    if (this.keyed(event)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }

  /** Handles a key; returns false if the key has no function. @param {KeyboardEvent} event @returns {boolean} */
  keyed(event) {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const { columns, rows } = this.looks;
    const far = event.shiftKey ? 10 : 1;
    const moves = { ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far], Home: [0, -columns], End: [0, columns], PageUp: [-rows, 0], PageDown: [rows, 0] };
    if (key in moves) this.move(moves[key][0], moves[key][1]);
    else if (key in OVER_KEYS && this.asking.overs.includes(OVER_KEYS[key])) this.state.set({ over: OVER_KEYS[key] });
    else if (key === "g" && this.laid) this.goTo(greatestIn(this.laid.patches));
    else if (key === "n") this.state.set({ form: this.isTable ? "map" : "table" });
    else if (key === "f") this.ask(this.asking.follows ? "whole" : "pointer");
    else if ((key === "Enter" || key === " ") && this.asking.cursor !== null) this.pin(this.asking.cursor);
    else if (key === "[" || key === "]") this.step(0, key === "]" ? 1 : -1);
    else if (key === "{" || key === "}") this.step(key === "}" ? 1 : -1, 0);
    else if (key === "Escape") return this.escape();
    else return false;
    return true;
  }

  escape() {
    if (this.state.view.pin === null && this.asking.cursor === null) return false;
    [this.asking.cursor, this.pixel] = [null, null];
    if (this.state.view.pin) this.state.set({ pin: null });
    else this.draw();
    return true;
  }

  /** @param {number} rows @param {number} columns */
  move(rows, columns) {
    const { asker } = this.asking;
    // The first key press only shows the current position: the query patch, or the center.
    if (this.asking.cursor === null) {
      const middle = Math.floor(this.looks.rows / 2) * this.looks.columns + Math.floor(this.looks.columns / 2);
      this.goTo(asker && "patch" in asker ? asker.patch : middle);
      return;
    }
    const within = (/** @type {number} */ place, /** @type {number} */ count) => Math.max(0, Math.min(count - 1, place));
    const row = within(Math.floor(this.asking.cursor / this.looks.columns) + rows, this.looks.rows);
    this.goTo(row * this.looks.columns + within((this.asking.cursor % this.looks.columns) + columns, this.looks.columns));
  }

  /** @param {number} patch */
  goTo(patch) {
    this.point(patch, null);
    this.voice.say(this.says());
  }

  // Export

  lay() {
    this.figure.lay();
  }

  /** @param {import("../attention/heatmap.js").Cell} cell of the table */
  patchAt(cell) {
    return cell.row * this.looks.columns + cell.column;
  }

  /** The label of what is shown. */
  named() {
    const { shown } = this.state.view;
    const attention = this.attentions.byName.get(shown.attention);
    if (this.asking.over === "attention") return `${layerOfPicture(attention)}, ${headOfPicture(attention, shown.head)}`;
    if (this.asking.over !== "rollout") return this.asking.over === "mask" ? "Segmentation mask" : "Image";
    return this.asking.forLabel ? `Rollout for ${isolated(this.asking.labelCalled(this.asking.chosenLabel))}` : "Rollout";
  }

  /** The overlay as a table of the patches' rows and columns. */
  get shot() {
    const { rows, columns } = this.looks;
    const axis = (/** @type {string} */ called, /** @type {number} */ count) => ({ rtl: false, labels: Array.from({ length: count }, (_, i) => `${called} ${i}`) });
    const { patches, rounded } = this.laid;
    const map = { rows, columns, exact: (/** @type {number} */ row) => patches.subarray(row * columns, (row + 1) * columns) };
    return { map, rows: axis("row", rows), columns: axis("column", columns), name: this.named(), rounded };
  }

  get fileName() {
    const { shown } = this.state.view;
    const what = this.asking.over === "attention" ? `${shown.attention}.${shown.head}` : this.asking.over;
    return `regard-${shortened(this.scene.texts.source, 60)}-${what}`.replace(/[^\w.-]+/g, "_");
  }

  get numbers() {
    return this.laid ? numbersOf(/** @type {any} */ (this.shot)) : undefined;
  }
}
