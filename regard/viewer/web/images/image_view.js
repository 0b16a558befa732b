/** The image view: attention of each head over the patches of an image, rollout through all layers, segmentation. */

import { argmax } from "../weights/maths.js";
import { h, setAttributes, setChildren } from "../core/dom.js";
import { bidiIsolate, formatWeight, truncate } from "../core/tokens.js";
import { ImageAttention } from "./image_attention.js";
import { ImageQuery } from "./image_query.js";
import { ImageControls } from "./image_controls.js";
import { PatchFigure } from "./image_figure.js";
import { imageThumbnail } from "./patch_picker.js";
import { ImageOverview, QueryMaps, imageHeadLabel, imageLayerLabel } from "./image_overview.js";
import {
  LabelList,
  labelFractions,
  largestWeights,
  overlayDetails,
  overlayLegend,
  patchLabel,
} from "./image_reading.js";
import IMAGES_STYLE from "./images.css";
import { Measures } from "../attention/reading.js";
import { Table, toTsv } from "../attention/table.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("./image_reading.js").Overlay} Overlay */

/** Keys of the overlays. */
const OVERLAY_KEYS = { p: "image", a: "attention", r: "rollout", m: "mask" };

/** The initial view of an image, if the address has none. @param {any} scene @returns {any} */
export function initialImageView(scene) {
  if (!scene.image) return {};
  const { over: overlayKind, token, label } = scene.initial;
  return { view: "attention", overlayKind, label, pin: token === null ? null : [token, token], colors: "iris" };
}

export class ImageView {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state, scheduler, announcer }) {
    this.host = host;
    this.attentions = attentions;
    this.scene = attentions.scene;
    this.image = this.scene.image;
    this.state = state;
    this.scheduler = scheduler;
    this.announcer = announcer;
    this.imageAttention = new ImageAttention(attentions);
    this.imageQuery = new ImageQuery(this.imageAttention, state);
    /** The pixel under the pointer. @type {number | null} */
    this.pixel = null;
    /** @type {Overlay | null} */
    this.overlay = null;
    /** @type {import("./image_figure.js").PixelLabels | null} */
    this.pixels = null;
    /** @type {number[]} labels, most pixels first */
    this.labelsByFrequency = [];
    this.ready = false;
    const handlers = {
      point: (/** @type {number | null} */ patch, /** @type {number | null} */ pixel) => this.point(patch, pixel),
      pin: (/** @type {number} */ patch) => this.pin(patch),
    };
    this.figure = new PatchFigure(handlers);
    this.table = new Table({
      point: (cell) => this.point(cell ? this.patchAt(cell) : null, null),
      pin: (cell) => this.pin(this.patchAt(cell)),
      zoom: () => {},
    });
    this.overview = new ImageOverview(this.imageAttention, scheduler, (selected) => this.choose(selected));
    this.measures = new Measures(attentions, scheduler);
    this.makeStage();
    this.reading = h("section", { class: "reading", "aria-label": "Reading" });
    this.labels = h("div", { class: "label-lists" });
    /** Shown in the output section of the page. */
    this.outputElement = h("div", { class: "image-output" }, imageThumbnail(host), this.labels);
    this.element = h(
      "div",
      { class: "images" },
      h("style", {}, IMAGES_STYLE),
      h(
        "div",
        { class: this.scene.initial?.all ? "columns all-first" : "columns" },
        this.overview.element,
        this.stage,
        h("aside", { class: "side", "aria-label": "Details" }, this.reading, this.measures.note),
      ),
    );
    new ResizeObserver(() => this.figure.layout()).observe(this.figure.element);
  }

  makeStage() {
    this.controls = new ImageControls(this.imageQuery, {
      choose: (selected) => this.choose(selected),
      step: (by) => this.step(0, by),
      selectQuery: (value) => this.selectQuery(value),
    });
    this.container = h("div", { class: "figure-container" });
    this.statusElement = h("p", { class: "image-status" });
    const { panel, bar, settings } = this.controls;
    settings.lastElementChild.append(this.measures.element);
    this.actions = h(
      "p",
      { class: "actions", "data-export": "no" },
      h("button", { type: "button", class: "small", onclick: () => this.turnOff() }, "Turn this head off"),
      this.scene.trace ? h("button", { type: "button", class: "small", onclick: () => this.state.set({ view: "steps" }) }, "Show the arithmetic") : null,
    );
    panel.append(this.actions, this.container, this.statusElement);
    panel.addEventListener("keydown", (event) => this.key(event));
    this.legend = h("div", { class: "legend" });
    this.foot = h("div", { class: "foot" }, this.legend);
    this.queries = new QueryMaps(this.imageQuery, (label) => this.selectQuery(label === null ? "pointer" : String(label)));
    this.figureElement = h("div", { class: "card" }, panel, this.foot, this.queries.element);
    this.stage = h("section", { class: "stage", "aria-label": "Image" }, bar, this.figureElement);
  }

  /** Opens the experiment without the selected head. */
  turnOff() {
    const { attention, head } = this.state.view.selected;
    this.state.set({ view: "experiment", off: `${attention}:${head}` });
  }

  // Drawing

  get isTable() {
    return this.state.view.form === "table" && ["attention", "rollout"].includes(this.imageQuery.overlayKind);
  }

  /** @param {Set<string> | null} changed null: all */
  async update(changed) {
    const startTime = performance.now();
    const { view } = this.state;
    if (!this.ready) await this.fetch();
    const isRollout = this.imageQuery.overlayKind === "rollout" && this.imageAttention.fitsRollout;
    const layers = isRollout ? [...new Set([null, this.imageQuery.rolloutQuery()].flatMap((query) => this.imageAttention.rolloutLayers(query)))] : [];
    await Promise.all([view.selected.attention, ...layers].map((name) => this.attentions.load(name)));
    if (this.state.view !== view) return;
    if (changed?.has("selected") && this.imageQuery.overlayKind === "attention") this.announcer.announce(this.title());
    this.prepareRollout(layers);
    this.controls.show(this.isTable);
    this.overview.mark(this.imageQuery.overlayKind === "attention" ? view.selected : null);
    this.list?.mark(["rollout", "mask"].includes(this.imageQuery.overlayKind) ? this.imageQuery.selectedLabel : null);
    this.draw();
    this.queries.show(this.labelsByFrequency);
    if (!changed || changed.has("selected") || changed.has("overlayKind")) this.measure();
    performance.clearMeasures("regard-show");
    performance.measure("regard-show", { start: startTime });
  }

  /** Loads the pixels, rollouts of labels and the segmentation. */
  async fetch() {
    const { pixels, grid, labels, mask } = this.image;
    const [height, width, channels] = pixels.shape;
    this.figure.setImage({ pixels: new Uint8Array(await this.host.blob(pixels.at)), height, width, channels, rows: grid[0], columns: grid[1] });
    for (const { number, rollout } of labels) {
      if (rollout) this.imageQuery.labelRollouts.set(number, Float64Array.from(new Float32Array(await this.host.blob(rollout.at))));
    }
    if (mask) {
      const buffer = await this.host.blob(mask.at);
      this.pixels = { numbers: mask.type === "uint8" ? new Uint8Array(buffer) : new Uint16Array(buffer), colors: mask.colors };
    }
    if (!this.ready) this.makeLabels();
    this.ready = true;
  }

  makeLabels() {
    const { labels, mask } = this.image;
    if (this.pixels) {
      const shares = labelFractions(this.pixels.numbers, labels.length);
      this.labelsByFrequency = shares.map(({ number }) => number);
      this.list = new LabelList(
        "Pixel labels",
        "Select a label to highlight it.",
        shares.filter(({ share }) => share > 0).map(({ number, share }) => ({ number, share, name: labels[number].name, color: mask.colors[number] })),
        "pixel-labels",
        (label) => this.state.set({ label, overlayKind: this.imageQuery.overlayKind === "rollout" && this.imageAttention.segmenter.length ? "rollout" : "mask" }),
      );
    } else if (labels.some((/** @type {any} */ one) => one.probability !== undefined)) {
      this.list = new LabelList(
        "Predictions",
        this.imageQuery.labelRollouts.size ? "Select a label to see the evidence for it." : "The evidence for a label needs gradients, which a page computes only for its first image.",
        labels.map((/** @type {any} */ one) => ({ number: one.number, name: one.name, share: one.probability })),
        "predictions",
        (label) => this.state.set({ label, overlayKind: "rollout" }),
      );
    }
    setChildren(this.labels, this.list?.element ?? null);
  }

  /** Computes the mean maps of a rollout, in slices. @param {string[]} names */
  prepareRollout(names) {
    const { imageAttention } = this;
    setChildren(this.statusElement);
    if (this.imageQuery.overlayKind !== "rollout" || this.imageQuery.labelRollouts.has(this.imageQuery.selectedLabel)) return;
    if (!imageAttention.fitsRollout) {
      setChildren(this.statusElement, `A rollout over ${imageAttention.tokens} tokens is too large for this page. Run: regard look MODEL IMAGE --rollout --out map.png`);
      return;
    }
    if (names.every((name) => imageAttention.means.has(name))) return;
    const steps = imageAttention.prepare(names);
    this.scheduler.add("rollout", 2, () => {
      const { done, value } = steps.next();
      if (done) {
        setChildren(this.statusElement);
        this.draw();
      } else setChildren(this.statusElement, `Computing rollout: ${Math.round(100 * Number(value))}%`);
      return !done;
    });
  }

  /** Draws the overlay and its details. */
  draw() {
    const { view } = this.state;
    const colors = view.colors;
    const scale = view.scale ?? "linear";
    if (!this.ready || (this.imageQuery.overlayKind === "attention" && !this.attentions.isLoaded(view.selected.attention))) return;
    this.overlay = this.imageQuery.computeOverlay();
    this.controls.showPointer();
    this.actions.hidden = this.imageQuery.overlayKind !== "attention" || view.selected.head === "mean";
    const figure = this.isTable && this.overlay ? this.table : this.figure;
    if (this.container.firstChild !== figure.element) setChildren(this.container, figure.element);
    if (figure === this.table) this.table.show(/** @type {any} */ (this.figureData));
    else if (this.imageQuery.overlayKind === "mask") this.figure.showLabels(this.pixels, this.imageQuery.selectedLabel);
    else if (this.overlay) this.figure.showWeights(this.overlay.patches, colors, scale);
    else this.figure.showImage();
    setAttributes(this.figure.element, { "aria-label": `${this.title()}. Arrow keys move between patches, Enter pins or unpins the query patch.` });
    if (this.imageQuery.overlayKind === "attention") {
      const some = this.imageQuery.query === null && this.imageAttention.isSampled(view.selected);
      setChildren(this.statusElement, some ? `Mean over a sample of ${this.attentions.map(view.selected, false).sampleRows().length} patches.` : null);
    }
    this.mark();
    this.foot.hidden = !this.overlay || this.isTable;
    if (this.overlay) setChildren(this.legend, overlayLegend(this.overlay, colors, scale));
    this.overview.show((name) => this.imageQuery.queryIn(name), colors, scale, view.selected.attention);
  }

  /** Outlines patches and shows details of the one under the pointer. */
  mark() {
    const { query, cursor } = this.imageQuery;
    const queryPatch = query && "patch" in query ? query.patch : null;
    this.figure.mark({ query: queryPatch, cursor, pinned: this.imageQuery.pinned !== null });
    const at = (/** @type {number | null} */ patch) => (patch === null ? null : { row: Math.floor(patch / this.imageAttention.columns), column: patch % this.imageAttention.columns });
    if (this.isTable && this.overlay) this.table.mark(at(cursor), at(queryPatch));
    setChildren(this.reading, this.imageQuery.overlayKind === "mask" || this.imageQuery.overlayKind === "image" ? this.pixelDetails() : overlayDetails(this.overlay, this.imageQuery.readPatch, this.imageQuery.pinned !== null && this.imageQuery.canSelectQuery, this.imageAttention.columns));
  }

  /** Details of the pixel under the pointer. */
  pixelDetails() {
    const pixel = this.pixel ?? (this.imageQuery.cursor === null ? null : this.figure.centerPixel(this.imageQuery.cursor));
    if (pixel === null) return h("p", { class: "hint" }, "Point at the image to inspect a pixel; arrow keys work too.");
    const { width, channels, pixels } = this.figure.imagePixels;
    const numbers = Array.from(pixels.subarray(pixel * channels, (pixel + 1) * channels));
    return h(
      "div",
      { class: "one" },
      h("h2", {}, h("span", { class: "subject" }, patchLabel(this.imageQuery.cursor, this.imageAttention.columns))),
      h("p", { class: "secondary" }, `Pixel ${Math.floor(pixel / width)},${pixel % width}: ${channels === 3 ? `red ${numbers[0]}, green ${numbers[1]}, blue ${numbers[2]}` : `gray ${numbers[0]}`}.`),
      this.imageQuery.overlayKind === "mask" ? h("p", { class: "exact" }, h("bdi", {}, this.imageQuery.labelName(this.pixels.numbers[pixel]))) : null,
    );
  }

  measure() {
    const { selected } = this.state.view;
    const attention = this.imageQuery.overlayKind === "attention";
    this.measures.values.hidden = !attention;
    if (attention) this.measures.show([{ figureData: /** @type {any} */ ({ map: this.attentions.map(selected, false), rows: { merged: false } }), selected, mark: "first" }], null);
  }

  // Pointer and keys

  /** @param {number | null} patch @param {number | null} pixel */
  point(patch, pixel) {
    if (patch === this.imageQuery.cursor && (pixel === this.pixel || !["mask", "image"].includes(this.imageQuery.overlayKind))) return;
    const same = patch === this.imageQuery.cursor;
    [this.imageQuery.cursor, this.pixel] = [patch, pixel];
    if (this.imageQuery.followsPointer && !same) this.draw();
    else this.mark();
    if (patch !== null && !same) this.announcer.announce(this.describePatch(), 200);
  }

  /** Describes the patch under the pointer for screen readers. */
  describePatch() {
    const { columns } = this.imageAttention;
    if (this.imageQuery.cursor === null) return this.title();
    const label = patchLabel(this.imageQuery.cursor, columns);
    const position = `Row ${Math.floor(this.imageQuery.cursor / columns) + 1} of ${this.imageAttention.rows}, column ${(this.imageQuery.cursor % columns) + 1} of ${columns}.`;
    if (this.imageQuery.overlayKind === "mask") return `${label}: ${bidiIsolate(this.imageQuery.labelName(this.pixels.numbers[this.pixel ?? this.figure.centerPixel(this.imageQuery.cursor)]))}. ${position}`;
    if (!this.overlay) return `${label}. ${position}`;
    const { subject, verb, patches, rounded } = this.overlay;
    if (this.imageQuery.readPatch !== null) return `${bidiIsolate(subject)} ${verb} ${label}: ${formatWeight(patches[this.imageQuery.cursor], rounded)}. ${position}`;
    const [best] = largestWeights(this.overlay, columns);
    return `${bidiIsolate(subject)} ${verb} ${best ? `${best.name} most: ${formatWeight(best.weight, rounded)}` : "nothing"}. ${position}`;
  }

  /** Pins a patch as the query, or unpins it. @param {number} patch */
  pin(patch) {
    if (!this.imageQuery.canSelectQuery) return;
    const { selected } = this.state.view;
    const name = this.imageQuery.overlayKind === "rollout" && this.imageAttention.firstPatch(selected.attention, "rows") === null ? this.imageAttention.blocks.at(-1) : selected.attention;
    const token = this.imageAttention.rowOfPatch(name, patch);
    const same = this.imageQuery.pinned === token && name === selected.attention;
    this.imageQuery.cursor = patch;
    this.state.set({ pin: same ? null : [token, this.imageAttention.firstPatch(name, "columns") + patch], ...(name === selected.attention ? {} : { selected: { attention: name, head: "mean" } }) });
    this.announcer.announce(same ? `Unpinned: ${patchLabel(patch, this.imageAttention.columns)}.` : `Pinned: ${patchLabel(patch, this.imageAttention.columns)} is the query.`);
  }

  /** Selects a query. @param {string} value value of an option */
  selectQuery(value) {
    if (value === "pointer") this.state.set({ pin: null, follow: true });
    else if (value === "whole") this.state.set({ pin: null, follow: false });
    else if (value !== "patch") {
      const { selected } = this.state.view;
      const token = Number(value);
      this.state.set({ pin: [token, argmax(this.attentions.map(selected, false).exactRow(token))] });
    }
    this.announcer.announce(`Query: ${this.imageQuery.queryLabel(this.imageQuery.query, this.imageQuery.overlayKind === "rollout" ? "entire image" : this.imageQuery.imageRowLabel(this.state.view.selected.attention))}.`);
  }

  /** Selects another head; a pinned query patch stays pinned. @param {HeadRef} selected */
  choose(selected) {
    const { heads, rows, columns } = this.attentions.byName.get(selected.attention);
    const head = selected.head === "mean" ? (heads > 1 ? "mean" : 0) : Math.min(selected.head, heads - 1);
    const { pin, selected: before } = this.state.view;
    const patch = this.imageQuery.pinned === null ? null : this.imageAttention.patchOfRow(before.attention, this.imageQuery.pinned);
    const token = patch === null ? null : this.imageAttention.rowOfPatch(selected.attention, patch);
    const hasSameRows = rows === this.attentions.byName.get(before.attention).rows;
    /** @type {[number, number] | null} */
    const next = hasSameRows ? pin : token === null ? null : [token, this.image.first[columns] + patch];
    this.state.set({ selected: { attention: selected.attention, head }, pin: next, overlayKind: "attention" });
  }

  /** Moves to another layer or head. @param {number} layers @param {number} by */
  step(layers, by) {
    const { attention, head } = this.state.view.selected;
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
    if (this.handleKey(event)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }

  /** Handles a key; returns false if the key has no function. @param {KeyboardEvent} event @returns {boolean} */
  handleKey(event) {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const { columns, rows } = this.imageAttention;
    const distance = event.shiftKey ? 10 : 1;
    const moves = { ArrowUp: [-distance, 0], ArrowDown: [distance, 0], ArrowLeft: [0, -distance], ArrowRight: [0, distance], Home: [0, -columns], End: [0, columns], PageUp: [-rows, 0], PageDown: [rows, 0] };
    if (key in moves) this.move(moves[key][0], moves[key][1]);
    else if (key in OVERLAY_KEYS && this.imageQuery.overlayKinds.includes(OVERLAY_KEYS[key])) this.state.set({ overlayKind: OVERLAY_KEYS[key] });
    else if (key === "g" && this.overlay) this.goTo(argmax(this.overlay.patches));
    else if (key === "n") this.state.set({ form: this.isTable ? "map" : "table" });
    else if (key === "f") this.selectQuery(this.imageQuery.followsPointer ? "whole" : "pointer");
    else if ((key === "Enter" || key === " ") && this.imageQuery.cursor !== null) this.pin(this.imageQuery.cursor);
    else if (key === "[" || key === "]") this.step(0, key === "]" ? 1 : -1);
    else if (key === "{" || key === "}") this.step(key === "}" ? 1 : -1, 0);
    else if (key === "Escape") return this.escape();
    else return false;
    return true;
  }

  escape() {
    if (this.state.view.pin === null && this.imageQuery.cursor === null) return false;
    [this.imageQuery.cursor, this.pixel] = [null, null];
    if (this.state.view.pin) this.state.set({ pin: null });
    else this.draw();
    return true;
  }

  /** @param {number} rows @param {number} columns */
  move(rows, columns) {
    const { query } = this.imageQuery;
    // The first key press only shows the current position: the query patch, or the center.
    if (this.imageQuery.cursor === null) {
      const middle = Math.floor(this.imageAttention.rows / 2) * this.imageAttention.columns + Math.floor(this.imageAttention.columns / 2);
      this.goTo(query && "patch" in query ? query.patch : middle);
      return;
    }
    const clamp = (/** @type {number} */ index, /** @type {number} */ count) => Math.max(0, Math.min(count - 1, index));
    const row = clamp(Math.floor(this.imageQuery.cursor / this.imageAttention.columns) + rows, this.imageAttention.rows);
    this.goTo(row * this.imageAttention.columns + clamp((this.imageQuery.cursor % this.imageAttention.columns) + columns, this.imageAttention.columns));
  }

  /** @param {number} patch */
  goTo(patch) {
    this.point(patch, null);
    this.announcer.announce(this.describePatch());
  }

  // Export

  layout() {
    this.figure.layout();
  }

  /** @param {import("../attention/figure_data.js").Cell} cell of the table */
  patchAt(cell) {
    return cell.row * this.imageAttention.columns + cell.column;
  }

  /** The label of what is shown. */
  title() {
    const { selected } = this.state.view;
    const attention = this.attentions.byName.get(selected.attention);
    if (this.imageQuery.overlayKind === "attention") return `${imageLayerLabel(attention)}, ${imageHeadLabel(attention, selected.head)}`;
    if (this.imageQuery.overlayKind !== "rollout") return this.imageQuery.overlayKind === "mask" ? "Segmentation mask" : "Image";
    return this.imageQuery.isForLabel ? `Rollout for ${bidiIsolate(this.imageQuery.labelName(this.imageQuery.selectedLabel))}` : "Rollout";
  }

  /** The overlay as a table of the patches' rows and columns. */
  get figureData() {
    const { rows, columns } = this.imageAttention;
    const axis = (/** @type {string} */ title, /** @type {number} */ count) => ({ rtl: false, labels: Array.from({ length: count }, (_, i) => `${title} ${i}`) });
    const { patches, rounded } = this.overlay;
    const map = { rows, columns, exactRow: (/** @type {number} */ row) => patches.subarray(row * columns, (row + 1) * columns) };
    return { map, rows: axis("row", rows), columns: axis("column", columns), name: this.title(), rounded };
  }

  get fileName() {
    const { selected } = this.state.view;
    const what = this.imageQuery.overlayKind === "attention" ? `${selected.attention}.${selected.head}` : this.imageQuery.overlayKind;
    return `regard-${truncate(this.scene.texts.source, 60)}-${what}`.replace(/[^\w.-]+/g, "_");
  }

  get tsv() {
    return this.overlay ? toTsv(/** @type {any} */ (this.figureData)) : undefined;
  }
}
