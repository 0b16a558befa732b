/** Several heads in one figure, each in a color of its own, with a legend. */

import { h, setAttributes, setChildren } from "../core/dom.js";
import { headLabel } from "./overview.js";
import { headKey } from "./thumbnails.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */

/** Number of heads in one figure; page.css defines as many colors (`data-color`). */
export const MAX_HEADS = 6;
/** Forms of a figure that can show several heads. */
const FORMS_WITH_COLORS = ["lines", "text"];

/** The label of a head without its kind of attention, which all heads of a figure share. @param {any[]} attentions @param {HeadRef} ref */
const shortHeadLabel = (attentions, ref) => headLabel(attentions, ref).split(", ").slice(1).join(", ");

export class HeadSet {
  /** @param {import("./attention_view.js").AttentionView} view */
  constructor(view) {
    this.view = view;
    this.element = h("ul", { class: "head-chips", "aria-label": "Heads in this figure" });
    this.addButton = h(
      "button",
      { type: "button", class: "small add-head", title: "Draws another head in its own color. Or Shift-click heads in the grid; in the grid, Space adds the focused head.", onclick: () => this.addNext() },
      "+ Add a head",
    );
  }

  /** The heads in the first figure, in the order of their colors. @returns {HeadRef[]} */
  get heads() {
    const { selected, added } = this.view.state.view;
    const fitting = added.filter((ref) => this.fits(ref) && (headKey(ref) !== headKey(selected) || ref.look !== selected.look));
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
    if (added.length + 1 >= MAX_HEADS) return this.view.announcer.announce(`A figure shows up to ${MAX_HEADS} heads. Remove one first.`);
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

  /** The next head that is not in the figure: of the same attention, then of others with the same tokens. @returns {HeadRef | null} */
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
    return heads.map((ref, color) => ({ map: this.view.looks.attentionsOf(ref).map(ref, words), color, name: this.label(ref) }));
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
        h(
          "li",
          {
            class: "head-chip",
            "data-color": color,
            onpointerenter: () => this.emphasize(color),
            onpointerleave: () => this.emphasize(null),
            onfocusin: () => this.emphasize(color),
            onfocusout: () => this.emphasize(null),
          },
          h("i", { "aria-hidden": "true" }),
          this.label(ref),
          h("button", { type: "button", "aria-label": `Remove ${this.label(ref)}`, "data-export": "no", onclick: () => this.remove(ref) }, "×"),
        ),
      ),
    );
    if (focused) /** @type {HTMLElement | null} */ (this.element.querySelector("button:not([hidden])"))?.focus({ preventScroll: true });
  }

  /** Dims the lines of the other heads while one is pointed at. @param {number | null} color */
  emphasize(color) {
    setAttributes(this.view.panels[0].container, { "data-only": color });
  }
}
