/** The view of an image: overlays of attention, what they are queried with, and their controls. */

import { Measures } from "../attention/details.js";
import { Table, toTsv } from "../attention/forms.js";
import { COLORS, SCALES } from "../core/colors.js";
import { html, picker, setAttributes, setChildren, uniqueId } from "../core/dom.js";
import { dropDown, icon, tabList, toggle } from "../core/shell.js";
import { bidiIsolate, formatWeight, makeVisible, truncate } from "../core/tokens.js";
import { ImageAttention } from "./attention.js";
import {
  imageThumbnail,
  labelFractions,
  LabelList,
  largestWeights,
  overlayDetails,
  overlayLegend,
  PatchFigure,
  patchLabel,
} from "./figure.js";
import { imageHeadLabel, imageLayerLabel, ImageOverview, QueryMaps } from "./overview.js";
import { argmax } from "../weights/maths.js";

/* The query of the image view, from state and pointer, and the overlay that it produces. */

/** @typedef {import("./figure.js").Overlay} Overlay */
/**
 * @typedef {{patch: number} | {token: number} | null} QueryRef a patch, another row of the selected attention, or the
 * entire image (null)
 */

export class ImageQuery {
  /** @param {import("./attention.js").ImageAttention} imageAttention @param {import("../core/state.js").State} state */
  constructor(imageAttention, state) {
    this.imageAttention = imageAttention;
    this.attentions = imageAttention.attentions;
    this.scene = imageAttention.attentions.scene;
    this.image = imageAttention.image;
    this.state = state;
    /** The available kinds of overlays. */
    this.overlayKinds = ["image", "attention", "rollout", ...(this.image.mask ? ["mask"] : [])];
    /** The patch under the pointer. @type {number | null} */
    this.cursor = null;
    /** Gradient-weighted rollouts by label. @type {Map<number, Float64Array>} */
    this.labelRollouts = new Map();
  }

  get overlayKind() {
    const { overlayKind } = this.state.view;
    return this.overlayKinds.includes(overlayKind) ? overlayKind : "attention";
  }

  /** The label that a rollout explains or that is highlighted among the pixels; null if the scene does not have it. */
  get selectedLabel() {
    const { label } = this.state.view;
    return this.image.labels.some((/** @type {any} */ one) => one.number === label) ? label : null;
  }

  /** @param {number} number */
  labelName(number) {
    return makeVisible(
      this.image.labels.find((/** @type {any} */ one) => one.number === number)?.name ?? String(number),
    );
  }

  /** Whether the overlay is the rollout of a label, by gradients or by the label's query. */
  get isForLabel() {
    return (
      this.overlayKind === "rollout" &&
      this.selectedLabel !== null &&
      (this.labelRollouts.has(this.selectedLabel) || this.imageAttention.segmenter.length > 0)
    );
  }

  /** The pinned row of the selected attention, or null. */
  get pinned() {
    const { pin, selected } = this.state.view;
    return pin && pin[0] < this.attentions.byName.get(selected.attention).q.shape[0] ? pin[0] : null;
  }

  /** Whether the query can be selected. */
  get canSelectQuery() {
    if (this.overlayKind === "rollout") return !this.isForLabel;
    return (
      this.overlayKind === "attention" &&
      this.imageAttention.firstPatch(this.state.view.selected.attention, "rows") !== null
    );
  }

  /** The current query. @returns {QueryRef} */
  get query() {
    if (!this.canSelectQuery) return null;
    const { selected } = this.state.view;
    if (this.pinned !== null) {
      const patch = this.imageAttention.patchOfRow(selected.attention, this.pinned);
      return patch === null ? { token: this.pinned } : { patch };
    }
    return this.followsPointer && this.cursor !== null ? { patch: this.cursor } : null;
  }

  /** Whether the pointer selects the query. Not in a table, whose cells would change under the pointer. */
  get followsPointer() {
    const { follow, form } = this.state.view;
    return this.canSelectQuery && follow && form !== "table" && this.pinned === null;
  }

  /** The patch whose weight is read, where the pointer does not select the query. */
  get readPatch() {
    return this.followsPointer ? null : this.cursor;
  }

  /**
   * The query row of an attention; null: the row that represents the image; undefined: there is no such row.
   * @param {string} name @returns {number | null | undefined}
   */
  queryIn(name) {
    const { query } = this;
    if (query === null || this.imageAttention.firstPatch(name, "rows") === null) return null;
    if ("patch" in query) return this.imageAttention.rowOfPatch(name, query.patch);
    const selectedAttention = this.attentions.byName.get(this.state.view.selected.attention);
    return selectedAttention.rows === this.attentions.byName.get(name).rows ? query.token : undefined;
  }

  /** The label of a query. @param {QueryRef} query @param {string} whole the label of the entire image */
  queryLabel(query, whole) {
    if (query === null) return whole;
    if ("patch" in query) return patchLabel(query.patch, this.imageAttention.columns);
    const { rows } = this.attentions.axesOf(this.state.view.selected.attention, false);
    return rows.name === "labels" ? `the query of ${rows.labels[query.token]}` : rows.labels[query.token];
  }

  /** The label of the row that represents the image in an attention. @param {string} name */
  imageRowLabel(name) {
    const row = this.image.single_query[name];
    return row === null ? "mean over patches" : this.attentions.axesOf(name, false).rows.labels[row];
  }

  /** Computes the overlay; null if there is none, or if it is not available yet. @returns {Overlay | null} */
  computeOverlay() {
    const { selected } = this.state.view;
    if (this.overlayKind === "attention") {
      const weights = this.imageAttention.weights(selected, this.queryIn(selected.attention));
      const { columns } = this.attentions.axesOf(selected.attention, false);
      const first = this.imageAttention.firstPatch(selected.attention, "columns");
      return {
        patches: this.imageAttention.overPatches(selected.attention, weights),
        others: columns.labels.slice(0, first).map((name, i) => ({ name, weight: weights[i] })),
        subject: this.queryLabel(this.query, this.imageRowLabel(selected.attention)),
        verb: "attends to",
        rounded: this.attentions.byName.get(selected.attention).q.type !== "float32",
      };
    }
    if (this.overlayKind !== "rollout") return null;
    const label = this.isForLabel ? this.selectedLabel : null;
    if (label !== null && this.labelRollouts.has(label)) {
      return {
        patches: this.labelRollouts.get(label),
        others: [],
        subject: this.labelName(label),
        verb: "is supported by",
        rounded: false,
      };
    }
    const query = this.rolloutQuery();
    if (!this.imageAttention.rolloutLayers(query).every((name) => this.imageAttention.means.has(name))) return null;
    const row = this.imageAttention.rollout(query);
    const first = this.image.first.image;
    const tokens = this.scene.sides.image.tokens.slice(0, first);
    return {
      patches: row.subarray(first),
      others: tokens.map((/** @type {string} */ name, /** @type {number} */ i) => ({
        name: makeVisible(name),
        weight: row[i],
      })),
      subject: label === null ? this.queryLabel(this.query, "entire image") : `the query of ${this.labelName(label)}`,
      verb: "draws from",
      rounded: false,
    };
  }

  /** The query of a rollout, in tokens of the encoder. @returns {import("./attention.js").RolloutQuery} */
  rolloutQuery() {
    const { query } = this;
    if (this.isForLabel) return { label: this.selectedLabel };
    if (query === null) return null;
    if ("patch" in query) return { token: this.image.first.image + query.patch };
    const { rows } = this.attentions.byName.get(this.state.view.selected.attention);
    return rows === "image" ? { token: query.token } : { label: query.token };
  }
}

/* Controls of the image view: overlay, layer and head, query, label, colors. */

/** @typedef {import("../core/state.js").HeadRef} HeadRef */

/** Kinds of overlays. */
const OVERLAY_LABELS = { image: "Image", attention: "Attention", rollout: "Rollout", mask: "Mask" };

class ImageControls {
  /**
   * @param {ImageQuery} imageQuery
   * @param {{choose: (selected: HeadRef) => void, step: (by: number) => void, selectQuery: (value: string) => void}}
   * handlers
   */
  constructor(imageQuery, handlers) {
    this.imageQuery = imageQuery;
    const list = imageQuery.scene.attentions;
    this.attention = picker(
      "Layer",
      Object.fromEntries(list.map((one) => [one.name, imageLayerLabel(one)])),
      (attention) => handlers.choose({ attention, head: imageQuery.state.view.selected.head }),
    );
    this.head = picker("Head", {}, (head) =>
      handlers.choose({ ...imageQuery.state.view.selected, head: head === "mean" ? "mean" : Number(head) }),
    );
    /** @param {string} name @param {string} path @param {number} by */
    const step = (name, path, by) =>
      html(
        "button",
        { type: "button", class: "round", "aria-label": name, onclick: () => handlers.step(by) },
        icon(path),
      );
    this.steps = html(
      "span",
      { class: "steps", "data-export": "no" },
      step("Previous head", "M14 6l-6 6 6 6", -1),
      step("Next head", "M10 6l6 6-6 6", 1),
    );
    this.querySelect = html("select", {
      "aria-label": "Query",
      onchange: () => handlers.selectQuery(this.querySelect.value),
    });
    this.label = html("select", {
      "aria-label": "Label",
      onchange: () => imageQuery.state.set({ label: this.label.value === "" ? null : Number(this.label.value) }),
    });
    this.overlayTitle = html("span", { class: "overlay-title" });
    this.queryPrefix = html("span", {});
    this.querySelection = html("label", {}, this.queryPrefix, this.querySelect);
    this.about = html("span", {});
    this.panel = html(
      "div",
      { class: "panel", role: "tabpanel", id: uniqueId("panel") },
      // Elements stay in the document, so that they keep the focus.
      html("header", {}, html("h2", {}, this.overlayTitle, this.attention, this.head, this.label), this.steps),
      html("p", { class: "query-choice" }, this.querySelection, this.about),
    );
    const overlayKinds = Object.fromEntries(
      imageQuery.overlayKinds.map((overlayKind) => [overlayKind, OVERLAY_LABELS[overlayKind]]),
    );
    this.tabs = tabList("Overlay", overlayKinds, this.panel.id, (overlayKind) => imageQuery.state.set({ overlayKind }));
    this.asTable = toggle("Table", (on) => imageQuery.state.set({ form: on ? "table" : "map" }));
    this.follow = toggle("Follow the pointer", (on) =>
      imageQuery.state.set({ follow: on, ...(on ? { pin: null } : {}) }),
    );
    this.scale = picker("Scale", SCALES, (scale) => imageQuery.state.set({ scale }));
    this.colors = picker("Colors", COLORS, (colors) => imageQuery.state.set({ colors }));
    /** The measures of the head are added by the view. */
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
    );
    this.bar = html(
      "div",
      { class: "bar", "data-export": "no" },
      this.tabs.element,
      html("div", { class: "toggles" }, this.follow, this.asTable),
      this.settings,
    );
  }

  /** Shows the current selection. @param {boolean} isTable whether the overlay is shown as a table */
  show(isTable) {
    const { view } = this.imageQuery.state;
    const { overlayKind, query } = this.imageQuery;
    const attention = this.imageQuery.attentions.byName.get(view.selected.attention);
    setAttributes(this.panel, { "aria-labelledby": this.tabs.mark(overlayKind) });
    this.attention.value = view.selected.attention;
    const heads = [...(attention.heads > 1 ? ["mean"] : []), ...Array(attention.heads).keys()];
    setChildren(
      this.head,
      heads.map((head) => html("option", { value: head }, imageHeadLabel(attention, /** @type {any} */ (head)))),
    );
    this.head.value = String(view.selected.head);
    setChildren(
      this.label,
      html("option", { value: "" }, "any label"),
      this.imageQuery.image.labels.map((/** @type {any} */ one) =>
        html("option", { value: one.number }, makeVisible(one.name)),
      ),
    );
    this.label.value = this.imageQuery.selectedLabel === null ? "" : String(this.imageQuery.selectedLabel);
    this.overlayTitle.textContent =
      { image: "Image", rollout: "Attention rollout", mask: "Segmentation mask" }[overlayKind] ?? "";
    this.overlayTitle.hidden = overlayKind === "attention";
    this.attention.hidden = this.head.hidden = overlayKind !== "attention";
    this.label.hidden =
      overlayKind !== "rollout" ||
      !(this.imageQuery.labelRollouts.size || this.imageQuery.imageAttention.segmenter.length);
    this.steps.hidden = overlayKind !== "attention" || attention.heads === 1;
    this.fillQueryOptions(attention, query);
    this.querySelection.hidden = !this.imageQuery.canSelectQuery;
    this.queryPrefix.textContent = overlayKind === "rollout" ? "Rollout of: " : "Query: ";
    this.about.textContent = this.describe();
    setAttributes(this.follow, {
      "aria-pressed": String(this.imageQuery.followsPointer),
      hidden: !this.imageQuery.canSelectQuery || isTable,
    });
    setAttributes(this.asTable, {
      "aria-pressed": String(isTable),
      hidden: !["attention", "rollout"].includes(overlayKind),
    });
    this.scale.value = view.scale ?? "linear";
    this.colors.value = view.colors;
  }

  /** Describes the overlay, where the query cannot be selected. */
  describe() {
    const { overlayKind } = this.imageQuery;
    const { rows, columns } = this.imageQuery.imageAttention;
    if (overlayKind === "image")
      return `${rows} × ${columns} patches of ${this.imageQuery.image.patch} × ${this.imageQuery.image.patch} pixels.`;
    if (overlayKind === "mask") return "Each pixel has the color of its most probable label.";
    if (this.imageQuery.canSelectQuery) return "";
    if (overlayKind === "attention") return "The pooling query attends to all patches.";
    return this.imageQuery.labelRollouts.has(this.imageQuery.selectedLabel)
      ? "Gradient-weighted rollout: evidence for the label."
      : "Rollout of the label’s query.";
  }

  /** Names the query that the pointer selects: the patch under it, or the entire image while it is elsewhere. */
  showPointer() {
    const { cursor, overlayKind, imageAttention, state, followsPointer } = this.imageQuery;
    const whole =
      overlayKind === "rollout" ? "entire image" : this.imageQuery.imageRowLabel(state.view.selected.attention);
    const text =
      cursor !== null && followsPointer
        ? patchLabel(cursor, imageAttention.columns)
        : `${whole} (point at a patch to change it)`;
    if (this.pointerOption.textContent !== text) this.pointerOption.textContent = text;
  }

  /** @param {any} attention @param {QueryRef} query */
  fillQueryOptions(attention, query) {
    const isRollout = this.imageQuery.overlayKind === "rollout";
    const first = this.imageQuery.image.first[attention.rows] ?? 0;
    const tokens = this.imageQuery.scene.sides[attention.rows].tokens.slice(0, first);
    const group = attention.rows === "labels" ? "Label queries" : "Other tokens";
    const singleQuery = this.imageQuery.image.single_query[attention.name];
    setChildren(
      this.querySelect,
      (this.pointerOption = html("option", { value: "pointer" })),
      html(
        "option",
        { value: "whole" },
        isRollout
          ? "entire image"
          : singleQuery === null
            ? "mean over patches"
            : `entire image (${this.imageQuery.imageRowLabel(attention.name)})`,
      ),
      tokens.length
        ? html(
            "optgroup",
            { label: group },
            tokens.map((/** @type {string} */ name, /** @type {number} */ i) =>
              html("option", { value: i }, makeVisible(name)),
            ),
          )
        : null,
      this.imageQuery.pinned !== null && query && "patch" in query
        ? html("option", { value: "patch" }, this.imageQuery.queryLabel(query, ""))
        : null,
    );
    this.showPointer();
    this.querySelect.value =
      this.imageQuery.pinned === null
        ? this.imageQuery.state.view.follow
          ? "pointer"
          : "whole"
        : query && "patch" in query
          ? "patch"
          : String(this.imageQuery.pinned);
  }
}

/* The image view: attention of each head over the patches of an image, rollout through all layers, segmentation. */

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
    /** @type {import("./figure.js").PixelLabels | null} */
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
    this.details = html("section", { class: "reading", "aria-label": "Reading" });
    this.labels = html("div", { class: "label-lists" });
    /** Shown in the output section of the page. */
    this.outputElement = html("div", { class: "image-output" }, imageThumbnail(host), this.labels);
    this.element = html(
      "div",
      { class: "images" },
      html(
        "div",
        { class: this.scene.initial?.all ? "columns all-first" : "columns" },
        this.overview.element,
        this.stage,
        html("aside", { class: "side", "aria-label": "Details" }, this.details, this.measures.note),
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
    this.container = html("div", { class: "figure-container" });
    this.statusElement = html("p", { class: "image-status" });
    const { panel, bar, settings } = this.controls;
    settings.lastElementChild.append(this.measures.element);
    this.actions = html(
      "p",
      { class: "actions", "data-export": "no" },
      html("button", { type: "button", class: "small", onclick: () => this.turnOff() }, "Turn this head off"),
      this.scene.trace
        ? html(
            "button",
            { type: "button", class: "small", onclick: () => this.state.set({ view: "steps" }) },
            "Show the arithmetic",
          )
        : null,
    );
    panel.append(this.actions, this.container, this.statusElement);
    panel.addEventListener("keydown", (event) => this.key(event));
    this.legend = html("div", { class: "legend" });
    this.foot = html("div", { class: "foot" }, this.legend);
    this.queries = new QueryMaps(this.imageQuery, (label) =>
      this.selectQuery(label === null ? "pointer" : String(label)),
    );
    this.figureElement = html("div", { class: "card" }, panel, this.foot, this.queries.element);
    this.stage = html("section", { class: "stage", "aria-label": "Image" }, bar, this.figureElement);
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
    const layers = isRollout
      ? [
          ...new Set(
            [null, this.imageQuery.rolloutQuery()].flatMap((query) => this.imageAttention.rolloutLayers(query)),
          ),
        ]
      : [];
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
    this.figure.setImage({
      pixels: new Uint8Array(await this.host.blob(pixels.at)),
      height,
      width,
      channels,
      rows: grid[0],
      columns: grid[1],
    });
    for (const { number, rollout } of labels) {
      if (rollout)
        this.imageQuery.labelRollouts.set(
          number,
          Float64Array.from(new Float32Array(await this.host.blob(rollout.at))),
        );
    }
    if (mask) {
      const buffer = await this.host.blob(mask.at);
      this.pixels = {
        numbers: mask.type === "uint8" ? new Uint8Array(buffer) : new Uint16Array(buffer),
        colors: mask.colors,
      };
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
        shares
          .filter(({ share }) => share > 0)
          .map(({ number, share }) => ({ number, share, name: labels[number].name, color: mask.colors[number] })),
        "pixel-labels",
        (label) =>
          this.state.set({
            label,
            overlayKind:
              this.imageQuery.overlayKind === "rollout" && this.imageAttention.segmenter.length ? "rollout" : "mask",
          }),
      );
    } else if (labels.some((/** @type {any} */ one) => one.probability !== undefined)) {
      this.list = new LabelList(
        "Predictions",
        this.imageQuery.labelRollouts.size
          ? "Select a label to see the evidence for it."
          : "The evidence for a label needs gradients, which a page computes only for its first image.",
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
    if (this.imageQuery.overlayKind !== "rollout" || this.imageQuery.labelRollouts.has(this.imageQuery.selectedLabel))
      return;
    if (!imageAttention.fitsRollout) {
      setChildren(
        this.statusElement,
        `A rollout over ${imageAttention.tokens} tokens is too large for this page. Run: regard look MODEL IMAGE --rollout --out map.png`,
      );
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
    if (
      !this.ready ||
      (this.imageQuery.overlayKind === "attention" && !this.attentions.isLoaded(view.selected.attention))
    )
      return;
    this.overlay = this.imageQuery.computeOverlay();
    this.controls.showPointer();
    this.actions.hidden = this.imageQuery.overlayKind !== "attention" || view.selected.head === "mean";
    const figure = this.isTable && this.overlay ? this.table : this.figure;
    if (this.container.firstChild !== figure.element) setChildren(this.container, figure.element);
    if (figure === this.table) this.table.show(/** @type {any} */ (this.figureData));
    else if (this.imageQuery.overlayKind === "mask") this.figure.showLabels(this.pixels, this.imageQuery.selectedLabel);
    else if (this.overlay) this.figure.showWeights(this.overlay.patches, colors, scale);
    else this.figure.showImage();
    setAttributes(this.figure.element, {
      "aria-label": `${this.title()}. Arrow keys move between patches, Enter pins or unpins the query patch.`,
    });
    if (this.imageQuery.overlayKind === "attention") {
      const some = this.imageQuery.query === null && this.imageAttention.isSampled(view.selected);
      setChildren(
        this.statusElement,
        some ? `Mean over a sample of ${this.attentions.map(view.selected, false).sampleRows().length} patches.` : null,
      );
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
    const at = (/** @type {number | null} */ patch) =>
      patch === null
        ? null
        : { row: Math.floor(patch / this.imageAttention.columns), column: patch % this.imageAttention.columns };
    if (this.isTable && this.overlay) this.table.mark(at(cursor), at(queryPatch));
    setChildren(
      this.details,
      this.imageQuery.overlayKind === "mask" || this.imageQuery.overlayKind === "image"
        ? this.pixelDetails()
        : overlayDetails(
            this.overlay,
            this.imageQuery.readPatch,
            this.imageQuery.pinned !== null && this.imageQuery.canSelectQuery,
            this.imageAttention.columns,
          ),
    );
  }

  /** Details of the pixel under the pointer. */
  pixelDetails() {
    const pixel =
      this.pixel ?? (this.imageQuery.cursor === null ? null : this.figure.centerPixel(this.imageQuery.cursor));
    if (pixel === null)
      return html("p", { class: "hint" }, "Point at the image to inspect a pixel; arrow keys work too.");
    const { width, channels, pixels } = this.figure.imagePixels;
    const numbers = Array.from(pixels.subarray(pixel * channels, (pixel + 1) * channels));
    return html(
      "div",
      { class: "one" },
      html(
        "h2",
        {},
        html("span", { class: "subject" }, patchLabel(this.imageQuery.cursor, this.imageAttention.columns)),
      ),
      html(
        "p",
        { class: "secondary" },
        `Pixel ${Math.floor(pixel / width)},${pixel % width}: ${channels === 3 ? `red ${numbers[0]}, green ${numbers[1]}, blue ${numbers[2]}` : `gray ${numbers[0]}`}.`,
      ),
      this.imageQuery.overlayKind === "mask"
        ? html("p", { class: "exact" }, html("bdi", {}, this.imageQuery.labelName(this.pixels.numbers[pixel])))
        : null,
    );
  }

  measure() {
    const { selected } = this.state.view;
    const attention = this.imageQuery.overlayKind === "attention";
    this.measures.values.hidden = !attention;
    if (attention)
      this.measures.show(
        [
          {
            figureData: /** @type {any} */ ({ map: this.attentions.map(selected, false), rows: { merged: false } }),
            selected,
            mark: "first",
          },
        ],
        null,
      );
  }

  // Pointer and keys

  /** @param {number | null} patch @param {number | null} pixel */
  point(patch, pixel) {
    if (
      patch === this.imageQuery.cursor &&
      (pixel === this.pixel || !["mask", "image"].includes(this.imageQuery.overlayKind))
    )
      return;
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
    if (this.imageQuery.overlayKind === "mask")
      return `${label}: ${bidiIsolate(this.imageQuery.labelName(this.pixels.numbers[this.pixel ?? this.figure.centerPixel(this.imageQuery.cursor)]))}. ${position}`;
    if (!this.overlay) return `${label}. ${position}`;
    const { subject, verb, patches, rounded } = this.overlay;
    if (this.imageQuery.readPatch !== null)
      return `${bidiIsolate(subject)} ${verb} ${label}: ${formatWeight(patches[this.imageQuery.cursor], rounded)}. ${position}`;
    const [best] = largestWeights(this.overlay, columns);
    return `${bidiIsolate(subject)} ${verb} ${best ? `${best.name} most: ${formatWeight(best.weight, rounded)}` : "nothing"}. ${position}`;
  }

  /** Pins a patch as the query, or unpins it. @param {number} patch */
  pin(patch) {
    if (!this.imageQuery.canSelectQuery) return;
    const { selected } = this.state.view;
    const name =
      this.imageQuery.overlayKind === "rollout" && this.imageAttention.firstPatch(selected.attention, "rows") === null
        ? this.imageAttention.blocks.at(-1)
        : selected.attention;
    const token = this.imageAttention.rowOfPatch(name, patch);
    const same = this.imageQuery.pinned === token && name === selected.attention;
    this.imageQuery.cursor = patch;
    this.state.set({
      pin: same ? null : [token, this.imageAttention.firstPatch(name, "columns") + patch],
      ...(name === selected.attention ? {} : { selected: { attention: name, head: "mean" } }),
    });
    this.announcer.announce(
      same
        ? `Unpinned: ${patchLabel(patch, this.imageAttention.columns)}.`
        : `Pinned: ${patchLabel(patch, this.imageAttention.columns)} is the query.`,
    );
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
    this.announcer.announce(
      `Query: ${this.imageQuery.queryLabel(this.imageQuery.query, this.imageQuery.overlayKind === "rollout" ? "entire image" : this.imageQuery.imageRowLabel(this.state.view.selected.attention))}.`,
    );
  }

  /** Selects another head; a pinned query patch stays pinned. @param {HeadRef} selected */
  choose(selected) {
    const { heads, rows, columns } = this.attentions.byName.get(selected.attention);
    const head = selected.head === "mean" ? (heads > 1 ? "mean" : 0) : Math.min(selected.head, heads - 1);
    const { pin, selected: before } = this.state.view;
    const patch =
      this.imageQuery.pinned === null ? null : this.imageAttention.patchOfRow(before.attention, this.imageQuery.pinned);
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
    const next =
      head === "mean" ? (by > 0 ? 0 : by < 0 ? heads - 1 : "mean") : (Math.min(head, heads - 1) + by + heads) % heads;
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
    const moves = {
      ArrowUp: [-distance, 0],
      ArrowDown: [distance, 0],
      ArrowLeft: [0, -distance],
      ArrowRight: [0, distance],
      Home: [0, -columns],
      End: [0, columns],
      PageUp: [-rows, 0],
      PageDown: [rows, 0],
    };
    if (key in moves) this.move(moves[key][0], moves[key][1]);
    else if (key in OVERLAY_KEYS && this.imageQuery.overlayKinds.includes(OVERLAY_KEYS[key]))
      this.state.set({ overlayKind: OVERLAY_KEYS[key] });
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
      const middle =
        Math.floor(this.imageAttention.rows / 2) * this.imageAttention.columns +
        Math.floor(this.imageAttention.columns / 2);
      this.goTo(query && "patch" in query ? query.patch : middle);
      return;
    }
    const clamp = (/** @type {number} */ index, /** @type {number} */ count) => Math.max(0, Math.min(count - 1, index));
    const row = clamp(
      Math.floor(this.imageQuery.cursor / this.imageAttention.columns) + rows,
      this.imageAttention.rows,
    );
    this.goTo(
      row * this.imageAttention.columns +
        clamp((this.imageQuery.cursor % this.imageAttention.columns) + columns, this.imageAttention.columns),
    );
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

  /** @param {import("../attention/heatmap.js").Cell} cell of the table */
  patchAt(cell) {
    return cell.row * this.imageAttention.columns + cell.column;
  }

  /** The label of what is shown. */
  title() {
    const { selected } = this.state.view;
    const attention = this.attentions.byName.get(selected.attention);
    if (this.imageQuery.overlayKind === "attention")
      return `${imageLayerLabel(attention)}, ${imageHeadLabel(attention, selected.head)}`;
    if (this.imageQuery.overlayKind !== "rollout")
      return this.imageQuery.overlayKind === "mask" ? "Segmentation mask" : "Image";
    return this.imageQuery.isForLabel
      ? `Rollout for ${bidiIsolate(this.imageQuery.labelName(this.imageQuery.selectedLabel))}`
      : "Rollout";
  }

  /** The overlay as a table of the patches' rows and columns. */
  get figureData() {
    const { rows, columns } = this.imageAttention;
    const axis = (/** @type {string} */ title, /** @type {number} */ count) => ({
      rtl: false,
      labels: Array.from({ length: count }, (_, i) => `${title} ${i}`),
    });
    const { patches, rounded } = this.overlay;
    const map = {
      rows,
      columns,
      exactRow: (/** @type {number} */ row) => patches.subarray(row * columns, (row + 1) * columns),
    };
    return { map, rows: axis("row", rows), columns: axis("column", columns), name: this.title(), rounded };
  }

  get fileName() {
    const { selected } = this.state.view;
    const what =
      this.imageQuery.overlayKind === "attention"
        ? `${selected.attention}.${selected.head}`
        : this.imageQuery.overlayKind;
    return `regard-${truncate(this.scene.texts.source, 60)}-${what}`.replace(/[^\w.-]+/g, "_");
  }

  get tsv() {
    return this.overlay ? toTsv(/** @type {any} */ (this.figureData)) : undefined;
  }
}
