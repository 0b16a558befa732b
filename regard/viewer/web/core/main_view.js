/** The first view: attention of a text or an image, and below it what explains the output and the search for it. */

import { h } from "./dom.js";
import { AttentionView } from "../attention/attention_view.js";
import { ImageView } from "../images/image_view.js";
import { SearchView } from "../search/search_view.js";
import { WhySection } from "../why/why_section.js";

/** @typedef {import("./shell.js").ViewComponent} ViewComponent */

export class MainView {
  /** @param {import("./shell.js").Context} context */
  constructor(context) {
    const { scene } = context.host;
    this.context = context;
    /** @type {AttentionView | ImageView | null} */
    this.attention = scene.image ? new ImageView(context) : scene.attentions.length ? new AttentionView(context) : null;
    /** @type {SearchView | null} */
    this.search = null;
    this.details = scene.decode?.nodes.length
      ? h(
          "details",
          { class: "search-section", open: !this.attention, ontoggle: () => context.state.set({ search: this.details.open }) },
          h("summary", {}, h("h2", {}, "How the output was found"), h("span", { class: "secondary" }, "the search tree with all candidates")),
        )
      : null;
    this.why = WhySection.of(context);
    this.element = h("div", { class: "main-view" }, this.attention?.element ?? null, this.why?.element ?? null, this.details);
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    await this.attention?.update(changed);
    this.why?.update(changed);
    if (!this.details) return;
    if (this.context.state.view.search || !this.attention) this.details.open = true;
    if (!this.details.open) return;
    const isFirst = !this.search;
    if (isFirst) this.details.append(this.openSearch().element);
    await this.search.update(isFirst ? null : changed);
  }

  openSearch() {
    return (this.search ??= new SearchView(this.context));
  }

  layout() {
    this.attention?.layout();
  }

  /** Highlights what an output token attends to. @param {number | null} step */
  pointOutput(step) {
    if (this.attention instanceof AttentionView) this.attention.pointOutput(step);
    this.why?.point(step);
  }

  /** What the view adds to the output section: the image and its labels. */
  get outputElement() {
    return this.attention instanceof ImageView ? this.attention.outputElement : null;
  }

  get figureElement() {
    return this.attention?.figureElement ?? this.search.figureElement;
  }

  get fileName() {
    return this.attention?.fileName ?? this.search.fileName;
  }

  get tsv() {
    return this.attention ? this.attention.tsv : this.search.tsv;
  }
}
