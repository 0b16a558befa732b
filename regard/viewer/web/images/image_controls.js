/** Controls of the image view: overlay, layer and head, query, label, colors. */

import { COLORS, SCALES } from "../core/colors.js";
import { h, picker, setAttributes, setChildren, uniqueId } from "../core/dom.js";
import { makeVisible } from "../core/tokens.js";
import { imageHeadLabel, imageLayerLabel } from "./image_overview.js";
import { dropDown, icon, tabList, toggle } from "../core/shell.js";
import { patchLabel } from "./image_reading.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("./image_query.js").QueryRef} QueryRef */

/** Kinds of overlays. */
const OVERLAY_LABELS = { image: "Image", attention: "Attention", rollout: "Rollout", mask: "Mask" };

export class ImageControls {
  /**
   * @param {import("./image_query.js").ImageQuery} imageQuery
   * @param {{choose: (selected: HeadRef) => void, step: (by: number) => void, selectQuery: (value: string) => void}} handlers
   */
  constructor(imageQuery, handlers) {
    this.imageQuery = imageQuery;
    const list = imageQuery.scene.attentions;
    this.attention = picker("Layer", Object.fromEntries(list.map((one) => [one.name, imageLayerLabel(one)])), (attention) =>
      handlers.choose({ attention, head: imageQuery.state.view.selected.head }),
    );
    this.head = picker("Head", {}, (head) => handlers.choose({ ...imageQuery.state.view.selected, head: head === "mean" ? "mean" : Number(head) }));
    /** @param {string} name @param {string} path @param {number} by */
    const step = (name, path, by) =>
      h("button", { type: "button", class: "round", "aria-label": name, onclick: () => handlers.step(by) }, icon(path));
    this.steps = h("span", { class: "steps", "data-export": "no" }, step("Previous head", "M14 6l-6 6 6 6", -1), step("Next head", "M10 6l6 6-6 6", 1));
    this.querySelect = h("select", { "aria-label": "Query", onchange: () => handlers.selectQuery(this.querySelect.value) });
    this.label = h("select", { "aria-label": "Label", onchange: () => imageQuery.state.set({ label: this.label.value === "" ? null : Number(this.label.value) }) });
    this.overlayTitle = h("span", { class: "overlay-title" });
    this.queryPrefix = h("span", {});
    this.querySelection = h("label", {}, this.queryPrefix, this.querySelect);
    this.about = h("span", {});
    this.panel = h(
      "div",
      { class: "panel", role: "tabpanel", id: uniqueId("panel") },
      // Elements stay in the document, so that they keep the focus.
      h("header", {}, h("h2", {}, this.overlayTitle, this.attention, this.head, this.label), this.steps),
      h("p", { class: "query-choice" }, this.querySelection, this.about),
    );
    const overlayKinds = Object.fromEntries(imageQuery.overlayKinds.map((overlayKind) => [overlayKind, OVERLAY_LABELS[overlayKind]]));
    this.tabs = tabList("Overlay", overlayKinds, this.panel.id, (overlayKind) => imageQuery.state.set({ overlayKind }));
    this.asTable = toggle("Table", (on) => imageQuery.state.set({ form: on ? "table" : "map" }));
    this.follow = toggle("Follow the pointer", (on) => imageQuery.state.set({ follow: on, ...(on ? { pin: null } : {}) }));
    this.scale = picker("Scale", SCALES, (scale) => imageQuery.state.set({ scale }));
    this.colors = picker("Colors", COLORS, (colors) => imageQuery.state.set({ colors }));
    /** The measures of the head are added by the view. */
    this.settings = dropDown(
      "Settings",
      icon("M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4"),
      "settings-panel",
      h("div", { class: "pickers" }, h("label", {}, "Scale ", this.scale), h("label", {}, "Colors ", this.colors)),
    );
    this.bar = h("div", { class: "bar", "data-export": "no" }, this.tabs.element, h("div", { class: "toggles" }, this.follow, this.asTable), this.settings);
  }

  /** Shows the current selection. @param {boolean} isTable whether the overlay is shown as a table */
  show(isTable) {
    const { view } = this.imageQuery.state;
    const { overlayKind, query } = this.imageQuery;
    const attention = this.imageQuery.attentions.byName.get(view.selected.attention);
    setAttributes(this.panel, { "aria-labelledby": this.tabs.mark(overlayKind) });
    this.attention.value = view.selected.attention;
    const heads = [...(attention.heads > 1 ? ["mean"] : []), ...Array(attention.heads).keys()];
    setChildren(this.head, heads.map((head) => h("option", { value: head }, imageHeadLabel(attention, /** @type {any} */ (head)))));
    this.head.value = String(view.selected.head);
    setChildren(this.label, h("option", { value: "" }, "any label"), this.imageQuery.image.labels.map((/** @type {any} */ one) => h("option", { value: one.number }, makeVisible(one.name))));
    this.label.value = this.imageQuery.selectedLabel === null ? "" : String(this.imageQuery.selectedLabel);
    this.overlayTitle.textContent = { image: "Image", rollout: "Attention rollout", mask: "Segmentation mask" }[overlayKind] ?? "";
    this.overlayTitle.hidden = overlayKind === "attention";
    this.attention.hidden = this.head.hidden = overlayKind !== "attention";
    this.label.hidden = overlayKind !== "rollout" || !(this.imageQuery.labelRollouts.size || this.imageQuery.imageAttention.segmenter.length);
    this.steps.hidden = overlayKind !== "attention" || attention.heads === 1;
    this.fillQueryOptions(attention, query);
    this.querySelection.hidden = !this.imageQuery.canSelectQuery;
    this.queryPrefix.textContent = overlayKind === "rollout" ? "Rollout of: " : "Query: ";
    this.about.textContent = this.describe();
    setAttributes(this.follow, { "aria-pressed": String(this.imageQuery.followsPointer), hidden: !this.imageQuery.canSelectQuery || isTable });
    setAttributes(this.asTable, { "aria-pressed": String(isTable), hidden: !["attention", "rollout"].includes(overlayKind) });
    this.scale.value = view.scale ?? "linear";
    this.colors.value = view.colors;
  }

  /** Describes the overlay, where the query cannot be selected. */
  describe() {
    const { overlayKind } = this.imageQuery;
    const { rows, columns } = this.imageQuery.imageAttention;
    if (overlayKind === "image") return `${rows} × ${columns} patches of ${this.imageQuery.image.patch} × ${this.imageQuery.image.patch} pixels.`;
    if (overlayKind === "mask") return "Each pixel has the color of its most probable label.";
    if (this.imageQuery.canSelectQuery) return "";
    if (overlayKind === "attention") return "The pooling query attends to all patches.";
    return this.imageQuery.labelRollouts.has(this.imageQuery.selectedLabel) ? "Gradient-weighted rollout: evidence for the label." : "Rollout of the label’s query.";
  }

  /** Names the query that the pointer selects: the patch under it, or the entire image while it is elsewhere. */
  showPointer() {
    const { cursor, overlayKind, imageAttention, state, followsPointer } = this.imageQuery;
    const whole = overlayKind === "rollout" ? "entire image" : this.imageQuery.imageRowLabel(state.view.selected.attention);
    const text = cursor !== null && followsPointer ? patchLabel(cursor, imageAttention.columns) : `${whole} (point at a patch to change it)`;
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
      (this.pointerOption = h("option", { value: "pointer" })),
      h("option", { value: "whole" }, isRollout ? "entire image" : singleQuery === null ? "mean over patches" : `entire image (${this.imageQuery.imageRowLabel(attention.name)})`),
      tokens.length
        ? h("optgroup", { label: group }, tokens.map((/** @type {string} */ name, /** @type {number} */ i) => h("option", { value: i }, makeVisible(name))))
        : null,
      this.imageQuery.pinned !== null && query && "patch" in query ? h("option", { value: "patch" }, this.imageQuery.queryLabel(query, "")) : null,
    );
    this.showPointer();
    this.querySelect.value = this.imageQuery.pinned === null ? (this.imageQuery.state.view.follow ? "pointer" : "whole") : query && "patch" in query ? "patch" : String(this.imageQuery.pinned);
  }
}
