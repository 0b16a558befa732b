/** The search view: the search tree of the output, and the attention at each step. */

import { createColormap } from "../core/colors.js";
import { h, s, setAttributes, setChildren, tokenText, uniqueId } from "../core/dom.js";
import { bidiIsolate, formatShort, formatWeight, makeVisible, truncate } from "../core/tokens.js";
import { isDark, tabList, toggle } from "../core/shell.js";
import {
  REASONS,
  STATES,
  buildCandidates,
  edgeWidth,
  finishedHypotheses,
  formatScore,
  importance,
  isDeadEnd,
  isDiscarded,
  lastOf,
  outcomeOf,
  pathOf,
} from "./candidates.js";
import { DISCARDED_FONT, FONT, LANE, TOP, layoutTree } from "./tree_layout.js";
import SEARCH_STYLE from "./search.css";

/** @typedef {import("./candidates.js").Candidate} Candidate */

const SEARCH_FORMS = { tree: "Tree", table: "Table" };
const METHODS = { beam: "Beam search", greedy: "Greedy search", sample: "Sampling" };
const STOPPED = {
  enough: "Stopped when enough hypotheses had finished.",
  bound: "Stopped when no unfinished hypothesis could exceed the finished ones.",
  ended: "Stopped when no hypothesis was left to extend.",
};
export class SearchView {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, state, scheduler, announcer }) {
    this.host = host;
    this.scheduler = scheduler;
    this.state = state;
    this.announcer = announcer;
    this.scene = host.scene;
    this.search = this.scene.decode;
    this.rtl = this.scene.sides.predicted?.direction === "rtl";
    this.nodes = buildCandidates(this.search);
    this.steps = this.search.omitted.length;
    /** @type {number | null} */
    this.cursor = null;
    this.showsPruned = true;
    this.form = "tree";
    /** Attention weights of each step, row after row. @type {Float32Array | null} */
    this.rows = null;
    this.panel = h("div", { role: "tabpanel", id: uniqueId("search") });
    this.forms = tabList("Show as", SEARCH_FORMS, this.panel.id, (form) => this.setForm(form));
    this.pruned = toggle("Pruned", (on) => {
      this.showsPruned = on;
      this.draw();
    });
    this.attentionPanel = h("section", { class: "step-attention", "aria-label": "Attention at this step" });
    this.legend = this.createLegend();
    this.figureElement = h("div", { class: "card" }, this.panel, this.legend, this.attentionPanel);
    this.details = h("section", { class: "node", "aria-label": "Selected candidate" });
    this.resultList = h("section", { class: "result-list", "aria-label": "Results" });
    this.element = h(
      "div",
      { class: "search-view" },
      h("style", {}, SEARCH_STYLE),
      h("div", { class: "bar", "data-export": "no" }, this.forms.element, h("div", { class: "toggles" }, this.pruned)),
      h("p", { class: "summary" }, this.summary()),
      h("div", { class: "search-columns" }, this.figureElement, h("aside", { class: "side", "aria-label": "Details of the search" }, this.details, this.resultList, this.constraints())),
    );
    this.pruned.hidden = !this.nodes.some(isDiscarded);
  }

  /** Describes the search in a few sentences. */
  summary() {
    const { method, beam, length_penalty: length, coverage_penalty: coverage, omitted: left, stopped } = this.search;
    const widths = { beam: `, beam width ${beam}`, sample: beam > 1 ? `, ${beam} samples` : "", greedy: "" };
    const missing = left.reduce((/** @type {number} */ sum, /** @type {number} */ count) => sum + count, 0);
    const ranked = length === 1 ? "mean log-probability per token" : length === 0 ? "log-probability" : `log-probability divided by length^${length}`;
    return [
      h("strong", {}, `${METHODS[method]}${widths[method]}. `),
      `${this.steps} ${this.steps === 1 ? "step" : "steps"}, ${this.nodes.length + missing} candidates`,
      missing ? `, of which the best ${this.nodes.length} are shown` : "",
      `. Hypotheses are ranked by ${ranked}${coverage ? " plus a coverage penalty" : ""}. `,
      method === "beam" ? STOPPED[stopped] ?? "" : "",
    ];
  }

  /** Constraints of the output, or null if there are none. */
  constraints() {
    const { prefix, min_len: minimum, limit } = this.search;
    const reasons = new Set(this.nodes.filter((candidate) => candidate.state === "refused").map((candidate) => candidate.reason));
    const list = [
      prefix.length ? ["Prefix: ", prefix.map((token) => [tokenText(makeVisible(token), this.rtl), " "])] : null,
      minimum ? [`Minimum length: ${minimum} tokens`] : null,
      reasons.has("limit") ? [`Maximum length: ${limit} tokens`] : null,
    ].filter((constraint) => constraint !== null);
    if (!list.length) return null;
    return h("section", { class: "constraints", "aria-label": "Constraints" }, h("h2", {}, "Constraints"), h("ul", {}, list.map((constraint) => h("li", {}, constraint))));
  }

  /** Legend of the candidates' states. */
  createLegend() {
    const there = new Set(this.nodes.map((candidate) => candidate.state));
    return h("p", { class: "keys" }, Object.keys(STATES).filter((state) => there.has(state)).map((state) => h("span", {}, h("i", { "data-state": state, "aria-hidden": "true" }), STATES[state].toLowerCase())));
  }

  /** The candidate on display: under the pointer, selected, or the first of the best hypothesis. @returns {Candidate} */
  get current() {
    const chosen = this.cursor ?? this.state.view.node;
    return this.nodes[chosen] ?? this.nodes.find((candidate) => candidate.state === "best") ?? this.nodes[0];
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    const { weights } = this.search;
    if (weights && !this.rows) this.rows = new Float32Array(await this.host.blob(weights.at));
    if (!changed || changed.has("theme")) this.draw();
    else this.mark();
    this.scheduler.add("search", 0, () => false); // an empty job clears the page's busy state
  }

  layout() {}

  /** @param {string} form tree or table */
  setForm(form) {
    const hadFocus = this.panel.contains(document.activeElement);
    this.form = form;
    this.draw();
    if (hadFocus) /** @type {HTMLElement | null} */ (this.panel.querySelector("[tabindex]"))?.focus({ preventScroll: true });
  }

  draw() {
    const { form } = this;
    setAttributes(this.panel, { "aria-labelledby": this.forms.mark(form) });
    setAttributes(this.pruned, { "aria-pressed": String(this.showsPruned) });
    this.legend.hidden = form === "table";
    setChildren(this.panel, form === "table" ? this.table() : this.tree());
    this.mark();
  }

  /** The visible candidates. */
  get visibleNodes() {
    return this.showsPruned ? this.nodes : this.nodes.filter((candidate) => !isDiscarded(candidate));
  }

  tree() {
    const nodes = this.visibleNodes;
    this.treeLayout = layoutTree(nodes, this.steps, this.panel.clientWidth || Infinity);
    const { width, height, separatorY } = this.treeLayout;
    /** @type {Map<number, SVGElement>} */
    this.items = new Map();
    this.edges = new Map();
    const forced = this.search.prefix.length;
    const headings = Array.from({ length: this.steps }, (_, step) => {
      const text = `${step + 1}${step < forced ? " prefix" : ""}`;
      return s("text", { class: step < forced ? "step-number forced" : "step-number", x: this.treeLayout.columns[step], y: 12, "font-size": 12.5 }, text);
    });
    // The most important edges are drawn last, on top of the others.
    const order = [...nodes].sort((a, b) => importance(a) - importance(b));
    const edges = order.map((candidate) => {
      const edge = s("path", { class: "tree-edge", d: this.treeLayout.edge(candidate), "data-state": candidate.state, "data-dead-end": isDeadEnd(candidate), "stroke-width": edgeWidth(candidate) });
      this.edges.set(candidate.index, edge);
      return edge;
    });
    const items = nodes.map((candidate) => this.item(candidate));
    const svg = s(
      "svg",
      { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "presentation" },
      s("g", { "aria-hidden": "true" }, headings, separatorY ? s("path", { class: "separator", d: `M0 ${separatorY}H${width}` }) : null, edges, s("circle", { class: "begin", cx: 6, cy: TOP + LANE / 2, r: 5 })),
      items,
    );
    this.scroller = h(
      "div",
      { class: "scroll-tree", tabindex: 0, role: "tree", "aria-label": "Search tree", onkeydown: (event) => this.key(event), onpointerleave: () => this.point(null, 0) },
      svg,
    );
    return this.scroller;
  }

  /** Draws one candidate. @param {Candidate} candidate */
  item(candidate) {
    const { x, y, width, height } = this.treeLayout.boxes.get(candidate.index);
    const discarded = isDiscarded(candidate);
    const element = s(
      "g",
      {
        class: "item", id: uniqueId("node"), role: "treeitem", "aria-level": candidate.step + 1, "aria-label": this.describe(candidate), "data-node": candidate.index, "data-state": candidate.state, "data-dead-end": isDeadEnd(candidate),
        onpointerenter: () => this.point(candidate.index, 200),
        onclick: () => this.choose(candidate.index),
      },
      s("rect", { x, y, width, height, rx: height / 2 }),
      s("text", { x: discarded ? x + 7 : x + width / 2, y: y + height / 2 + (discarded ? 4.6 : 5.2), "text-anchor": !discarded ? "middle" : this.rtl ? "end" : "start", "font-size": discarded ? DISCARDED_FONT : FONT, direction: this.rtl ? "rtl" : null }, candidate.label),
      candidate.ends ? s("rect", { class: "flag", x: x + width - 5, y: y + height / 2 - 5, width: 10, height: 10, rx: 2 }) : null,
    );
    this.items.set(candidate.index, element);
    return candidate.ends ? s("g", { role: "none" }, element, s("text", { class: "result", "aria-hidden": "true", "data-state": candidate.state, x: x + width + 11, y: y + height / 2 + 4.5, "font-size": 13 }, formatScore(candidate.score))) : element;
  }

  table() {
    const body = this.nodes.map((candidate) =>
      h(
        "tr",
        { "data-state": candidate.state, "data-node": candidate.index, onclick: () => this.choose(candidate.index) },
        h("td", { class: "numeric" }, candidate.step + 1),
        h("th", { scope: "row" }, tokenText(candidate.label, this.rtl)),
        h("td", {}, tokenText(truncate(candidate.text, 60), this.rtl)),
        [formatShort(Math.exp(candidate.logprob)), formatScore(candidate.logprob), formatScore(candidate.total), candidate.score === null ? "" : formatScore(candidate.score)].map((text) => h("td", { class: "numeric" }, text)),
        h("td", {}, candidate.reason ? `${STATES[candidate.state]}: ${REASONS[candidate.reason] ?? candidate.reason}` : candidate.ends && candidate.state === "best" ? "Best, finished" : STATES[candidate.state]),
        h("td", {}, this.strongestAttention(candidate)?.token ?? ""),
      ),
    );
    const headings = ["Step", "Token", "Hypothesis", "Probability", "Log-probability", "Cumulative log-probability", "Score", "Outcome", "Largest attention"];
    return h(
      "div",
      { class: "search-table" },
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the search" },
        h("table", {}, h("caption", { class: "visually-hidden" }, "All candidates of all steps."), h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, body)),
      ),
    );
  }

  /** The attention weights of the step that proposed a candidate. @param {Candidate} candidate @returns {{token: string, weight: number, own: boolean}[]} */
  attentionOf(candidate) {
    if (!this.rows || candidate.row === null) return [];
    const width = this.search.weights.shape[1];
    const own = pathOf(this.nodes, candidate).slice(0, -1).map((other) => other.label);
    const tokens = [...this.search.source.map(makeVisible), ...(width > this.search.source.length ? own : [])];
    return tokens.map((token, i) => ({ token, weight: this.rows[candidate.row * width + i], own: i >= this.search.source.length }));
  }

  /** @param {Candidate} candidate */
  strongestAttention(candidate) {
    return this.attentionOf(candidate).reduce((most, look) => (most && most.weight >= look.weight ? most : look), null);
  }

  /** Describes a candidate for screen readers. @param {Candidate} candidate */
  describe(candidate) {
    const most = this.strongestAttention(candidate);
    const parts = [
      `Step ${candidate.step + 1} of ${this.steps}: ${bidiIsolate(candidate.label)}`,
      candidate.text.trim() ? `“${bidiIsolate(truncate(candidate.text.trim(), 80))}”` : null,
      `Probability ${formatShort(Math.exp(candidate.logprob))}, cumulative log-probability ${formatScore(candidate.total)}${candidate.score === null ? "" : `, score ${formatScore(candidate.score)}`}`,
      outcomeOf(candidate),
      most ? `Attends most to ${bidiIsolate(most.token)}, ${formatShort(most.weight)}` : null,
    ];
    return `${parts.filter((part) => part !== null).join(". ")}.`;
  }

  /** Highlights the candidate on display and shows its details. */
  mark() {
    const candidate = this.current;
    if (!candidate) return;
    const path = new Set(pathOf(this.nodes, candidate).map((other) => other.index));
    this.items?.forEach((item, number) => {
      item.classList.toggle("on", number === candidate.index);
      item.classList.toggle("along", path.has(number));
      setAttributes(item, { "aria-selected": String(number === candidate.index) });
    });
    this.edges?.forEach((edge, number) => edge.classList.toggle("on", path.has(number)));
    if (this.scroller) setAttributes(this.scroller, { "aria-activedescendant": this.items.get(candidate.index)?.id });
    for (const row of this.panel.querySelectorAll("tr[data-node]")) row.classList.toggle("on", /** @type {HTMLElement} */ (row).dataset.node === String(candidate.index));
    this.showDetails(candidate);
  }

  /** @param {Candidate} candidate */
  showDetails(candidate) {
    const before = candidate.parent === null ? "" : this.nodes[candidate.parent].text;
    const isExtension = candidate.text.startsWith(before);
    const added = isExtension ? candidate.text.slice(before.length) : candidate.text;
    const numbers = [
      ["Probability", formatWeight(Math.exp(candidate.logprob))],
      ["Log-probability", formatScore(candidate.logprob, 4)],
      ["Cumulative log-probability", formatScore(candidate.total, 4)],
      candidate.score === null ? null : ["Score if finished here", formatScore(candidate.score, 4)],
    ];
    if (candidate.ends) numbers[3] = ["Score", formatScore(candidate.score, 4)];
    setChildren(
      this.details,
      h("p", { class: "text", dir: this.rtl ? "rtl" : "ltr" }, isExtension ? before : "", h("span", { class: "new" }, added.trim() ? added : `${before ? " " : ""}${candidate.label}`)),
      h("p", { class: "node-outcome" }, h("strong", {}, `Step ${candidate.step + 1}. `), `${outcomeOf(candidate)}.`),
      h("dl", {}, numbers.filter((pair) => pair !== null).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    );
    this.listResults(candidate);
    this.shadeSource(candidate);
  }

  /** Lists the finished hypotheses, best first; equal samples are listed once. @param {Candidate} candidate */
  listResults(candidate) {
    const results = finishedHypotheses(this.search, this.nodes);
    const distinct = results.filter((result, i) => results.findIndex((other) => other.node === result.node) === i);
    const times = (/** @type {number | null} */ node) => results.filter((result) => result.node === node).length;
    const item = (/** @type {{text: string, score: number, node: number | null, isResult: boolean}} */ { text, score, node, isResult }) =>
      h(
        "li",
        { "data-result": isResult },
        h(
          "button",
          { type: "button", "aria-pressed": String(node === candidate.index), onclick: () => node !== null && (this.choose(node), this.scrollTo(node)) },
          h("span", { class: "words", dir: "auto" }, text.trim() || "∅", times(node) > 1 ? h("span", { class: "times" }, ` ×${times(node)}`) : null),
          h("span", { class: "score" }, formatScore(score)),
        ),
      );
    setChildren(this.resultList, h("h2", {}, distinct.length > 1 ? "Finished hypotheses, best first" : "Result"), h("ol", {}, distinct.map(item)));
  }

  /** Shades the source tokens by the attention weights of a candidate's step. @param {Candidate} candidate */
  shadeSource(candidate) {
    const look = this.attentionOf(candidate);
    this.attentionPanel.hidden = look.length === 0;
    if (!look.length) return;
    const { colors, theme } = this.state.view;
    const colormap = createColormap(colors, look.length > 128 ? "root" : "linear", isDark(theme));
    const rtl = this.scene.sides.source?.direction === "rtl";
    setChildren(
      this.attentionPanel,
      h("h2", {}, "Attention when predicting ", h("strong", {}, tokenText(candidate.label, this.rtl)), ` at step ${candidate.step + 1}`),
      h(
        "ol",
        { class: "words", dir: rtl ? "rtl" : "ltr" },
        look.map(({ token, weight, own }) => {
          const item = h("li", { class: [colormap.needsLightText(weight) ? "light" : "dark", own && "own"].filter(Boolean).join(" "), title: formatWeight(weight) }, token, h("span", { class: "visually-hidden" }, ` ${formatShort(weight)}`));
          item.style.background = colormap.css(weight);
          return item;
        }),
      ),
      h("p", { class: "secondary" }, `${this.search.attention}, mean of all heads`),
    );
  }

  /** @param {number | null} number @param {number} wait */
  point(number, wait) {
    if (this.cursor === number) return;
    this.cursor = number;
    this.mark();
    if (number !== null) this.announcer.announce(this.describe(this.current), wait);
  }

  /** @param {number} number */
  choose(number) {
    this.cursor = null;
    this.state.set({ node: number });
    this.mark();
    this.announcer.announce(this.describe(this.current));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.altKey || event.metaKey || event.ctrlKey) return;
    const candidate = this.current;
    const visibleIndices = new Set(this.visibleNodes.map((other) => other.index));
    const siblings = this.visibleNodes.filter((other) => other.step === candidate.step).sort((a, b) => this.treeLayout.boxes.get(a.index).y - this.treeLayout.boxes.get(b.index).y);
    const at = siblings.indexOf(candidate);
    const children = candidate.children.filter((number) => visibleIndices.has(number));
    const moves = {
      ArrowLeft: () => candidate.parent,
      ArrowRight: () => children[0],
      ArrowUp: () => siblings[at - 1]?.index,
      ArrowDown: () => siblings[at + 1]?.index,
      Home: () => pathOf(this.nodes, candidate)[0].index,
      End: () => lastOf(this.nodes, candidate, visibleIndices),
      b: () => this.search.results[0]?.node,
    };
    const move = moves[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (event.key.toLowerCase() === "n") this.setForm("table");
    else if (!move) return;
    else {
      const next = move() ?? null;
      if (next !== null) {
        this.choose(next);
        this.scrollTo(next);
      }
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** Scrolls to a candidate. @param {number} number */
  scrollTo(number) {
    const box = this.treeLayout?.boxes.get(number);
    if (!box || !this.scroller.isConnected) return;
    const { scrollLeft, clientWidth } = this.scroller;
    if (box.x - 60 < scrollLeft) this.scroller.scrollLeft = box.x - 60;
    else if (box.x + box.width + 80 > scrollLeft + clientWidth) this.scroller.scrollLeft = box.x + box.width + 80 - clientWidth;
  }

  /** Name of saved files, without extension. */
  get fileName() {
    return "regard-search";
  }

  /** All candidates as tab-separated values. */
  get tsv() {
    const lines = this.nodes.map((candidate) => [candidate.step + 1, candidate.parent ?? "", candidate.index, candidate.label, candidate.logprob, candidate.total, candidate.score ?? "", candidate.state, candidate.reason, makeVisible(candidate.text)].join("\t"));
    return `${["step\tparent\tnumber\ttoken\tlogprob\tsum\tscore\tstate\treason\ttext", ...lines].join("\n")}\n`;
  }
}
