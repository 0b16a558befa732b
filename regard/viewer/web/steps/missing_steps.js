/** The step-by-step view of a page without the numbers of the computation: says why, and how to include them. */

import { h } from "../core/dom.js";

export class MissingSteps {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, scheduler }) {
    this.scheduler = scheduler;
    const command = host.scene.image ? "regard look MODEL IMAGE --trace" : "regard look MODEL TEXT --trace";
    this.element = h(
      "div",
      { class: "missing-steps" },
      h("p", {}, "This page does not contain the numbers of the computation."),
      h("p", { class: "secondary" }, "By default, a page contains them if the model has up to 8 MB of parameters without the vocabulary, and the text up to 64 tokens (an image up to 256 patches). To include them anyway, of a large model those of one layer, run:"),
      h("p", {}, h("code", {}, command)),
    );
    this.figureElement = this.element;
    this.fileName = "regard-steps";
  }

  update() {
    this.scheduler.add("steps", 5, () => false); // an empty job clears the page's busy state
  }

  layout() {}
}
