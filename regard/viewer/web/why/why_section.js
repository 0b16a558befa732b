/** "Why this output?": which input tokens mattered, and what each layer would predict. Computed when it is opened. */

import { h } from "../core/dom.js";
import { Contributions } from "./contributions.js";
import { ImageContributions } from "./image_contributions.js";
import { ExplanationSource } from "./explanations_source.js";
import { LensTable } from "./lens_table.js";
import WHY_STYLE from "./why.css";

export class WhySection {
  /** The section of a scene, or null if it has nothing to explain. @param {import("../core/shell.js").Context} context @returns {WhySection | null} */
  static of(context) {
    const { scene } = context.host;
    return scene.explained && scene.attentions.length && !scene.compared ? new WhySection(context) : null;
  }

  /** @param {import("../core/shell.js").Context} context */
  constructor(context) {
    const source = ExplanationSource.of(context.host);
    const isImage = Boolean(context.host.scene.image);
    /** @type {Contributions | ImageContributions} */
    this.contributions = isImage ? new ImageContributions(context) : new Contributions(source, context);
    this.lens = new LensTable(source, context.state);
    this.element = h(
      "details",
      { class: "why", ontoggle: () => this.update(null) },
      h("summary", {}, h("h2", {}, "Why this output?"), h("span", { class: "secondary" }, `the ${isImage ? "patches" : "input tokens"} that mattered${source.supports("lens") ? ", and what each layer would predict" : ""}`)),
      h("style", {}, WHY_STYLE),
      h("div", { class: "why-sheet" }, this.contributions.element, this.lens.element),
    );
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    if (!this.element.open) return;
    if (changed && !["selected", "theme", "view"].some((key) => changed.has(key))) return;
    await Promise.all([this.contributions.update(), changed === null || changed.has("theme") ? this.lens.update() : null]);
  }

  /** Selects an output token. @param {number | null} step */
  point(step) {
    if (this.element.open && step !== null && this.contributions instanceof Contributions) this.contributions.choose(step);
  }
}
