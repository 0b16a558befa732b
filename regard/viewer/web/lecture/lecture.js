/** Lecture mode: one thing at a time in large type, for a projector. Arrow keys move between slides. */

import { h, setAttributes, setChildren, uniqueId } from "../core/dom.js";
import { icon } from "../core/shell.js";
import { makeSlides } from "./slides.js";
import LECTURE_STYLE from "./lecture.css";

/** Keys by which slides are changed; presenter remotes send PageUp and PageDown. */
const KEY_MOVES = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1, Home: -Infinity, End: Infinity };

export class Lecture {
  /** @param {import("../core/shell.js").Context} context @param {HTMLElement} root of the page, which receives the dialog when it is opened */
  constructor(context, root) {
    this.context = context;
    this.root = root;
    /** @type {import("./slides.js").Slide[]} */
    this.slides = [];
    const titleId = uniqueId("slide");
    this.title = h("h2", { id: titleId });
    this.body = h("div", { class: "slide-body" });
    this.count = h("span", { class: "slide-count", "aria-live": "polite" });
    this.previous = h("button", { type: "button", class: "round", "aria-label": "Previous slide", onclick: () => this.move(-1) }, icon("M14 6l-6 6 6 6"));
    this.next = h("button", { type: "button", class: "round", "aria-label": "Next slide", onclick: () => this.move(1) }, icon("M10 6l6 6-6 6"));
    this.element = h(
      "dialog",
      { class: "lecture", "aria-labelledby": titleId, "data-export": "no", onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event), oncancel: (/** @type {Event} */ event) => this.leave(event), onclose: () => this.leave() },
      h("style", {}, LECTURE_STYLE),
      this.title,
      this.body,
      h("footer", {}, this.previous, this.count, this.next, h("button", { type: "button", class: "small", onclick: () => this.leave() }, "Leave lecture mode (Esc)")),
    );
    new ResizeObserver(() => this.layoutSlide?.()).observe(this.body);
  }

  /** Follows the state: opens, closes, or changes the slide. */
  async update() {
    const { slide, selected } = this.context.state.view;
    if (slide === null) {
      if (this.element.open) this.element.close();
      this.layoutSlide = null;
      this.element.remove();
      return;
    }
    if (!this.element.open) {
      if (selected.attention !== null) await this.context.looks.attentionsOf(selected).load(selected.attention);
      this.slides = makeSlides(this.context, selected);
      this.root.append(this.element);
      this.element.showModal();
      this.next.focus();
    }
    this.show(Math.min(slide, this.slides.length - 1));
  }

  /** @param {number} n */
  show(n) {
    const { title, make } = this.slides[n];
    const { element, layout } = make();
    this.title.textContent = title;
    this.count.textContent = `${n + 1} / ${this.slides.length}`;
    setChildren(this.body, element);
    this.layoutSlide = layout ?? null;
    layout?.();
    setAttributes(this.previous, { disabled: n === 0 });
    setAttributes(this.next, { disabled: n === this.slides.length - 1 });
    // A disabled button cannot keep the focus.
    if (!this.element.contains(document.activeElement) || /** @type {any} */ (document.activeElement).disabled) (n === 0 ? this.next : this.previous).focus();
  }

  /** Leaves lecture mode. @param {Event} [event] whose default action is to close the dialog */
  leave(event) {
    event?.preventDefault();
    this.context.state.set({ slide: null });
  }

  /** @param {number} by */
  move(by) {
    const { slide } = this.context.state.view;
    this.context.state.set({ slide: Math.max(0, Math.min(this.slides.length - 1, Math.min(slide, this.slides.length - 1) + by)) });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    // The space key presses a focused button.
    const isPress = event.key === " " && /** @type {HTMLElement} */ (event.target).closest("button");
    if (event.key in KEY_MOVES && !isPress) {
      event.preventDefault();
      this.move(KEY_MOVES[event.key]);
    } else if (event.key.toLowerCase() === "s") this.leave();
    event.stopPropagation();
  }
}
