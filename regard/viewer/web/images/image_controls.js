/** Controls of the image view: overlay, layer and head, query, label, colors. */

import { COLOURS, SCALES } from "../core/colors.js";
import { change, fill, h, picker, uniqueId } from "../core/dom.js";
import { visible } from "../core/tokens.js";
import { headOfPicture, layerOfPicture } from "./image_overview.js";
import { icon, tabList, toggle } from "../core/shell.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {import("./image_requests.js").Asking} Asking */

/** Kinds of overlays. */
const OVERS = { picture: "Image", attention: "Attention", rollout: "Rollout", mask: "Mask" };

export class PictureControls {
  /**
   * @param {import("./image_requests.js").PictureAsking} asking
   * @param {{choose: (shown: Shown) => void, step: (by: number) => void, ask: (who: string) => void}} told handlers of the controls
   */
  constructor(asking, told) {
    this.asking = asking;
    const list = asking.scene.attentions;
    this.attention = picker("Layer", Object.fromEntries(list.map((one) => [one.name, layerOfPicture(one)])), (attention) =>
      told.choose({ attention, head: asking.state.view.shown.head }),
    );
    this.head = picker("Head", {}, (head) => told.choose({ ...asking.state.view.shown, head: head === "mean" ? "mean" : Number(head) }));
    /** @param {string} name @param {string} sign @param {number} by */
    const step = (name, sign, by) =>
      h("button", { type: "button", class: "round", "aria-label": name, onclick: () => told.step(by) }, icon(sign));
    this.steps = h("span", { class: "steps", "data-saved": "no" }, step("Previous head", "M14 6l-6 6 6 6", -1), step("Next head", "M10 6l6 6-6 6", 1));
    this.who = h("select", { "aria-label": "Query", onchange: () => told.ask(this.who.value) });
    this.label = h("select", { "aria-label": "Label", onchange: () => asking.state.set({ label: this.label.value === "" ? null : Number(this.label.value) }) });
    this.overName = h("span", { class: "over-name" });
    this.whoAsks = h("span", {});
    this.whoLabel = h("label", {}, this.whoAsks, this.who);
    this.about = h("span", {});
    this.panel = h(
      "div",
      { class: "panel", role: "tabpanel", id: uniqueId("panel") },
      // Elements stay in the document, so that they keep the focus.
      h("header", {}, h("h2", {}, this.overName, this.attention, this.head, this.label), this.steps),
      h("p", { class: "asks" }, this.whoLabel, this.about),
    );
    const overs = Object.fromEntries(asking.overs.map((over) => [over, OVERS[over]]));
    this.tabs = tabList("Overlay", overs, this.panel.id, (over) => asking.state.set({ over }));
    this.asTable = toggle("Table", (on) => asking.state.set({ form: on ? "table" : "map" }));
    this.follow = toggle("Follow the pointer", (on) => asking.state.set({ follow: on, ...(on ? { pin: null } : {}) }));
    this.scale = picker("Scale", SCALES, (scale) => asking.state.set({ scale }));
    this.colours = picker("Colors", COLOURS, (colours) => asking.state.set({ colours }));
    this.pickers = h("div", { class: "pickers", "data-saved": "no" }, h("label", {}, "Scale ", this.scale), h("label", {}, "Colors ", this.colours));
    this.bar = h("div", { class: "bar", "data-saved": "no" }, this.tabs.element, h("div", { class: "toggles" }, this.follow, this.asTable));
  }

  /** Shows the current selection. @param {boolean} isTable whether the overlay is shown as a table */
  show(isTable) {
    const { view } = this.asking.state;
    const { over, asker } = this.asking;
    const attention = this.asking.attentions.byName.get(view.shown.attention);
    change(this.panel, { "aria-labelledby": this.tabs.mark(over) });
    this.attention.value = view.shown.attention;
    const heads = [...(attention.heads > 1 ? ["mean"] : []), ...Array(attention.heads).keys()];
    fill(this.head, heads.map((head) => h("option", { value: head }, headOfPicture(attention, /** @type {any} */ (head)))));
    this.head.value = String(view.shown.head);
    fill(this.label, h("option", { value: "" }, "any label"), this.asking.picture.labels.map((/** @type {any} */ one) => h("option", { value: one.number }, visible(one.name))));
    this.label.value = this.asking.chosenLabel === null ? "" : String(this.asking.chosenLabel);
    this.overName.textContent = { picture: "Image", rollout: "Attention rollout", mask: "Segmentation mask" }[over] ?? "";
    this.overName.hidden = over === "attention";
    this.attention.hidden = this.head.hidden = over !== "attention";
    this.label.hidden = over !== "rollout" || !(this.asking.given.size || this.asking.looks.segmenter.length);
    this.steps.hidden = over !== "attention" || attention.heads === 1;
    this.fillWho(attention, asker);
    this.whoLabel.hidden = !this.asking.askable;
    this.whoAsks.textContent = over === "rollout" ? "Rollout of: " : "Query: ";
    this.about.textContent = this.aboutNow();
    change(this.follow, { "aria-pressed": String(this.asking.follows), hidden: !this.asking.askable || isTable });
    change(this.asTable, { "aria-pressed": String(isTable), hidden: !["attention", "rollout"].includes(over) });
    this.scale.value = view.scale ?? "linear";
    this.colours.value = view.colours;
    this.pickers.hidden = !["attention", "rollout"].includes(over);
  }

  /** Describes the overlay, where the query cannot be selected. */
  aboutNow() {
    const { over } = this.asking;
    const { rows, columns } = this.asking.looks;
    if (over === "picture") return `${rows} × ${columns} patches of ${this.asking.picture.patch} × ${this.asking.picture.patch} pixels.`;
    if (over === "mask") return "Each pixel has the color of its most probable label.";
    if (this.asking.askable) return "";
    if (over === "attention") return "The pooling query attends to all patches.";
    return this.asking.given.has(this.asking.chosenLabel) ? "Gradient-weighted rollout: evidence for the label." : "Rollout of the label’s query.";
  }

  /** @param {any} attention @param {Asking} asker */
  fillWho(attention, asker) {
    const rolls = this.asking.over === "rollout";
    const first = this.asking.picture.first[attention.rows] ?? 0;
    const tokens = this.asking.scene.sides[attention.rows].tokens.slice(0, first);
    const group = attention.rows === "labels" ? "Label queries" : "Other tokens";
    const speaks = this.asking.picture.speaks[attention.name];
    fill(
      this.who,
      h("option", { value: "pointer" }, "patch under the pointer"),
      h("option", { value: "whole" }, rolls ? "entire image" : speaks === null ? "mean over patches" : `entire image (${this.asking.speakerOf(attention.name)})`),
      tokens.length
        ? h("optgroup", { label: group }, tokens.map((/** @type {string} */ name, /** @type {number} */ i) => h("option", { value: i }, visible(name))))
        : null,
      this.asking.pinned !== null && asker && "patch" in asker ? h("option", { value: "patch" }, this.asking.askerCalled(asker, "")) : null,
    );
    this.who.value = this.asking.pinned === null ? (this.asking.state.view.follow ? "pointer" : "whole") : asker && "patch" in asker ? "patch" : String(this.asking.pinned);
  }
}
