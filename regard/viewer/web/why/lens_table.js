/** The logit lens: what the model would predict after each layer. */

import { createColormap } from "../core/colors.js";
import { h, setAttributes, setChildren } from "../core/dom.js";
import { formatProbability, makeVisible, truncate } from "../core/tokens.js";
import { isDark } from "../core/shell.js";
import { markFocusable, moveFocus } from "./grid_keys.js";

/** Maximum length of a token in a cell. */
const MAX_LABEL = 14;

export class LensTable {
  /** @param {import("./explanations_source.js").ExplanationSource} source @param {import("../core/state.js").State} state */
  constructor(source, state) {
    this.source = source;
    this.state = state;
    /** @type {import("./explanations_source.js").Lens | null} */
    this.lens = null;
    /** @type {HTMLElement[][]} */
    this.rows = [];
    this.status = h("p", { class: "secondary", role: "status" });
    this.body = h("div", { class: "lens-scroll", tabindex: 0, role: "region", "aria-label": "Logit lens" });
    this.reading = h("p", { class: "effect-reading" });
    this.element = h(
      "section",
      { class: "lens", "aria-label": "What each layer would predict" },
      h("h2", {}, "What each layer would predict"),
      h("p", { class: "secondary" }, "Logit lens: the output layer applied to the tokens as they are after each layer. Early layers were not trained to be read this way, so their guesses may mean nothing."),
      this.status,
      this.body,
      this.reading,
    );
    this.element.hidden = !source.supports("lens");
  }

  async update() {
    if (this.element.hidden) return;
    if (!this.source.has("lens")) {
      setChildren(this.status, "This page contains neither the lens nor the model. Save it with ", h("code", {}, "--explain"), " or ", h("code", {}, "--with-model"), ".");
      return;
    }
    if (!this.lens) {
      setChildren(this.status, "Applying the output layer to every layer …");
      try {
        this.lens = await this.source.lens();
      } catch (error) {
        setChildren(this.status, String(error?.message ?? error));
        return;
      }
      setChildren(this.status);
    }
    this.draw();
  }

  draw() {
    const { tokens, layers } = this.lens;
    const colormap = createColormap("blue", "linear", isDark(this.state.view.theme));
    const isSingle = tokens.length === 1;
    const columns = isSingle ? this.lens.columns[0][0].map((_, i) => `${i + 1}.`) : tokens.map((token) => truncate(makeVisible(token), MAX_LABEL));
    const order = Array.from({ length: layers }, (_, i) => layers - 1 - i);
    this.rows = order.map((layer) => columns.map((_, i) => this.cell(layer, isSingle ? 0 : i, isSingle ? i : 0, colormap)));
    setAttributes(this.rows[0][0], { tabindex: 0 });
    setChildren(
      this.body,
      h(
        "table",
        { role: "grid", "aria-label": "Most likely prediction after each layer" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, isSingle ? "rank" : "output"), columns.map((label) => h("th", { scope: "col" }, h("bdi", {}, label))))),
        h("tbody", {}, order.map((layer, y) => h("tr", {}, h("th", { scope: "row" }, layer ? `after layer ${layer}` : "embedding"), this.rows[y].map((button) => h("td", {}, button))))),
      ),
    );
    this.read(layers - 1, 0);
  }

  /** @param {number} layer @param {number} position @param {number} rank @param {any} colormap */
  cell(layer, position, rank, colormap) {
    const { columns, probabilities, names, targets } = this.lens;
    const column = columns[layer][position][rank];
    const name = names[column];
    const share = probabilities[layer][position][rank];
    const isOwn = column === targets[position];
    const text = makeVisible(name);
    /** @type {HTMLButtonElement} */
    const button = h(
      "button",
      {
        type: "button",
        tabindex: -1,
        class: isOwn ? "candidate own" : "candidate",
        onpointerenter: () => this.read(layer, position),
        onfocus: () => {
          markFocusable(this.rows.flat(), button);
          this.read(layer, position);
        },
        onkeydown: (event) => moveFocus(this.rows, button, event),
      },
      h("bdi", {}, truncate(text, MAX_LABEL)),
      h("span", { class: "share" }, formatProbability(share), isOwn ? h("span", { class: "visually-hidden" }, ", as in the output") : null),
    );
    button.style.background = colormap.css(share);
    button.classList.toggle("light", colormap.needsLightText(share));
    return button;
  }

  /** Lists the candidates of a cell. @param {number} layer @param {number} position */
  read(layer, position) {
    const { columns, probabilities, names, tokens, own } = this.lens;
    const candidates = columns[layer][position].map((column, i) => [i ? ", " : " ", h("bdi", {}, makeVisible(names[column])), ` ${formatProbability(probabilities[layer][position][i])}`]);
    setChildren(
      this.reading,
      h("strong", {}, layer ? `After layer ${layer}` : "Embedding", tokens.length > 1 ? [", for ", h("bdi", {}, makeVisible(tokens[position]))] : null, ":"),
      candidates,
      `. The output itself has ${formatProbability(own[layer][position])}.`,
    );
  }
}
