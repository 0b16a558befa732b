/** What can be chosen of a picture: what lies over it, the layer and the head, who asks, the label, colours. */

import { COLOURS, SCALES } from "../core/colors.js";
import { change, fill, h, picker, uniqueId } from "../core/dom.js";
import { visible } from "../core/tokens.js";
import { headOfPicture, layerOfPicture } from "./image_overview.js";
import { icon, tabList, toggle } from "../core/shell.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {import("./image_requests.js").Asking} Asking */

/** What may lie over a picture. */
const OVERS = { picture: "Picture", attention: "Attention", rollout: "Rollout", mask: "Labels" };

export class PictureControls {
  /**
   * @param {import("./image_requests.js").PictureAsking} asking
   * @param {{choose: (shown: Shown) => void, step: (by: number) => void, ask: (who: string) => void}} told hears what is chosen
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
    this.steps = h("span", { class: "steps", "data-saved": "no" }, step("Head before", "M14 6l-6 6 6 6", -1), step("Next head", "M10 6l6 6-6 6", 1));
    this.who = h("select", { "aria-label": "Who asks", onchange: () => told.ask(this.who.value) });
    this.label = h("select", { "aria-label": "Label", onchange: () => asking.state.set({ label: this.label.value === "" ? null : Number(this.label.value) }) });
    this.overName = h("span", { class: "over-name" });
    this.whoAsks = h("span", {});
    this.whoLabel = h("label", {}, this.whoAsks, this.who);
    this.about = h("span", {});
    this.panel = h(
      "div",
      { class: "panel", role: "tabpanel", id: uniqueId("panel") },
      // All of it stays where it is, so that whatever has the focus keeps it.
      h("header", {}, h("h2", {}, this.overName, this.attention, this.head, this.label), this.steps),
      h("p", { class: "asks" }, this.whoLabel, this.about),
    );
    const overs = Object.fromEntries(asking.overs.map((over) => [over, OVERS[over]]));
    this.tabs = tabList("Over the picture", overs, this.panel.id, (over) => asking.state.set({ over }));
    this.asTable = toggle("Table", (on) => asking.state.set({ form: on ? "table" : "map" }));
    this.follow = toggle("Follow the pointer", (on) => asking.state.set({ follow: on, ...(on ? { pin: null } : {}) }));
    this.scale = picker("Scale", SCALES, (scale) => asking.state.set({ scale }));
    this.colours = picker("Colours", COLOURS, (colours) => asking.state.set({ colours }));
    this.pickers = h("div", { class: "pickers", "data-saved": "no" }, h("label", {}, "Scale ", this.scale), h("label", {}, "Colours ", this.colours));
    this.bar = h("div", { class: "bar", "data-saved": "no" }, this.tabs.element, h("div", { class: "toggles" }, this.follow, this.asTable));
  }

  /** Shows what is chosen. @param {boolean} isTable whether the numbers are a table */
  show(isTable) {
    const { view } = this.asking.state;
    const { over, asker } = this.asking;
    const attention = this.asking.attentions.byName.get(view.shown.attention);
    change(this.panel, { "aria-labelledby": this.tabs.mark(over) });
    this.attention.value = view.shown.attention;
    const heads = [...(attention.heads > 1 ? ["mean"] : []), ...Array(attention.heads).keys()];
    fill(this.head, heads.map((head) => h("option", { value: head }, headOfPicture(attention, /** @type {any} */ (head)))));
    this.head.value = String(view.shown.head);
    fill(this.label, h("option", { value: "" }, "no label in particular"), this.asking.picture.labels.map((/** @type {any} */ one) => h("option", { value: one.number }, visible(one.name))));
    this.label.value = this.asking.chosenLabel === null ? "" : String(this.asking.chosenLabel);
    this.overName.textContent = { picture: "The picture", rollout: "Through all layers", mask: "Which pixel is what" }[over] ?? "";
    this.overName.hidden = over === "attention";
    this.attention.hidden = this.head.hidden = over !== "attention";
    this.label.hidden = over !== "rollout" || !(this.asking.given.size || this.asking.looks.segmenter.length);
    this.steps.hidden = over !== "attention" || attention.heads === 1;
    this.fillWho(attention, asker);
    this.whoLabel.hidden = !this.asking.askable;
    this.whoAsks.textContent = over === "rollout" ? "Traced back: " : "Who asks: ";
    this.about.textContent = this.aboutNow();
    change(this.follow, { "aria-pressed": String(this.asking.follows), hidden: !this.asking.askable || isTable });
    change(this.asTable, { "aria-pressed": String(isTable), hidden: !["attention", "rollout"].includes(over) });
    this.scale.value = view.scale ?? "linear";
    this.colours.value = view.colours;
    this.pickers.hidden = !["attention", "rollout"].includes(over);
  }

  /** What is said of what is laid over the picture, where nobody can choose who asks. */
  aboutNow() {
    const { over } = this.asking;
    const { rows, columns } = this.asking.looks;
    if (over === "picture") return `${rows} × ${columns} patches of ${this.asking.picture.patch} × ${this.asking.picture.patch} pixels.`;
    if (over === "mask") return "Each pixel has the colour of its likeliest label.";
    if (this.asking.askable) return "";
    if (over === "attention") return "The question by which the patches are pooled asks.";
    return this.asking.given.has(this.asking.chosenLabel) ? "Weighted by gradients: what speaks for the label." : "What the label’s query comes from.";
  }

  /** @param {any} attention @param {Asking} asker */
  fillWho(attention, asker) {
    const rolls = this.asking.over === "rollout";
    const first = this.asking.picture.first[attention.rows] ?? 0;
    const tokens = this.asking.scene.sides[attention.rows].tokens.slice(0, first);
    const group = attention.rows === "labels" ? "Queries of labels" : "Other tokens";
    const speaks = this.asking.picture.speaks[attention.name];
    fill(
      this.who,
      h("option", { value: "pointer" }, "the patch under the pointer"),
      h("option", { value: "whole" }, rolls ? "the picture" : speaks === null ? "patches, on average" : `the picture: ${this.asking.speakerOf(attention.name)}`),
      tokens.length
        ? h("optgroup", { label: group }, tokens.map((/** @type {string} */ name, /** @type {number} */ i) => h("option", { value: i }, visible(name))))
        : null,
      this.asking.pinned !== null && asker && "patch" in asker ? h("option", { value: "patch" }, this.asking.askerCalled(asker, "")) : null,
    );
    this.who.value = this.asking.pinned === null ? (this.asking.state.view.follow ? "pointer" : "whole") : asker && "patch" in asker ? "patch" : String(this.asking.pinned);
  }
}
