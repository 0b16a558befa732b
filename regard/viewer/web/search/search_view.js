/** The search view: the search tree of the output, and the attention at each step. */

import { createColormap } from "../core/colors.js";
import { setAttributes, setChildren, h, s, tokenText, uniqueId } from "../core/dom.js";
import { formatWeight, bidiIsolate, formatShort, truncate, makeVisible } from "../core/tokens.js";
import { isDark, tabList, toggle } from "../core/shell.js";
import SEARCH_STYLE from "./search.css";

/**
 * @typedef {{step: number, parent: number | null, token: string, piece: string, whole: boolean, logprob: number, total: number,
 *   score: number | null, state: string, ends: boolean, reason: string, row: number | null}} CandidateData a candidate in the scene
 * @typedef {CandidateData & {index: number, text: string, label: string, children: number[], isInResult: boolean}} Candidate
 * `isInResult`: whether it is part of a result
 */

const SEARCH_FORMS = { tree: "Tree", table: "Table" };
const METHODS = { beam: "Beam search", greedy: "Greedy search", sample: "Sampling" };
const STATES = { best: "Best", finished: "Finished", kept: "Kept", pruned: "Pruned", refused: "Excluded" };
const REASONS = {
  beam: "better candidates fill the beam",
  end: "it finishes with too low a score to be kept",
  greedy: "another token is more probable",
  top_k: "it is not among the top-k tokens",
  top_p: "it is outside the nucleus (top-p)",
  "not drawn": "it could have been sampled, but was not",
  prefix: "the prefix is given",
  limit: "the maximum length is reached",
  min_len: "the minimum length is not reached",
  special: "this special token is never generated",
};
const STOPPED = {
  enough: "Stopped when enough hypotheses had finished.",
  bound: "Stopped when no unfinished hypothesis could exceed the finished ones.",
  ended: "Stopped when no hypothesis was left to extend.",
};
/** Sizes of the drawing in pixels. */
const LANE = 40;
const DISCARDED_LANE = 27;
const TOP = 30;
const GAP = 38;
const FONT = 15;
const DISCARDED_FONT = 13.5;
const MAX_NODE_LABEL = 18;

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
    this.steps = this.search.left_out.length;
    /** @type {number | null} */
    this.cursor = null;
    this.showsPruned = true;
    /** Attention weights of each step, row after row. @type {Float32Array | null} */
    this.rows = null;
    this.panel = h("div", { role: "tabpanel", id: uniqueId("search") });
    this.forms = tabList("Show as", SEARCH_FORMS, this.panel.id, (form) => this.state.set({ form: form === "table" ? "table" : "map" }));
    this.pruned = toggle("Pruned", (on) => {
      this.showsPruned = on;
      this.draw();
    });
    this.attentionPanel = h("section", { class: "looked", "aria-label": "Attention at this step" });
    this.legend = this.createLegend();
    this.figureElement = h("div", { class: "sheet-of-paper" }, this.panel, this.legend, this.attentionPanel);
    this.details = h("section", { class: "node", "aria-label": "Selected candidate" });
    this.resultList = h("section", { class: "outputs", "aria-label": "Results" });
    this.element = h(
      "div",
      { class: "decode" },
      h("style", {}, SEARCH_STYLE),
      h("div", { class: "bar", "data-saved": "no" }, this.forms.element, h("div", { class: "toggles" }, this.pruned)),
      h("p", { class: "summary" }, this.summary()),
      h("div", { class: "decode-columns" }, this.figureElement, h("aside", { class: "side", "aria-label": "Details" }, this.details, this.resultList, this.constraints())),
    );
    this.pruned.hidden = !this.nodes.some(isDiscarded);
  }

  /** Describes the search in a few sentences. */
  summary() {
    const { method, beam, length_penalty: length, coverage_penalty: coverage, left_out: left, stopped } = this.search;
    const widths = { beam: `, beam size ${beam}`, sample: beam > 1 ? `, ${beam} samples` : "", greedy: "" };
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
    const reasons = new Set(this.nodes.filter((one) => one.state === "refused").map((one) => one.reason));
    const list = [
      prefix.length ? ["Prefix: ", prefix.map((token) => [tokenText(makeVisible(token), this.rtl), " "])] : null,
      minimum ? [`Minimum length: ${minimum} tokens`] : null,
      reasons.has("limit") ? [`Maximum length: ${limit} tokens`] : null,
    ].filter((one) => one !== null);
    if (!list.length) return null;
    return h("section", { class: "constraints", "aria-label": "Constraints" }, h("h2", {}, "Constraints"), h("ul", {}, list.map((one) => h("li", {}, one))));
  }

  /** Legend of the candidates' states. */
  createLegend() {
    const there = new Set(this.nodes.map((one) => one.state));
    return h("p", { class: "keys" }, Object.keys(STATES).filter((state) => there.has(state)).map((state) => h("span", {}, h("i", { "data-state": state, "aria-hidden": "true" }), STATES[state].toLowerCase())));
  }

  /** The candidate on display: under the pointer, selected, or the first of the best hypothesis. @returns {Candidate} */
  get current() {
    const chosen = this.cursor ?? this.state.view.node;
    return this.nodes[chosen] ?? this.nodes.find((one) => one.state === "best") ?? this.nodes[0];
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    const { looked } = this.search;
    if (looked && !this.rows) this.rows = new Float32Array(await this.host.blob(looked.at));
    if (!changed || ["form", "theme"].some((key) => changed.has(key))) this.draw();
    else this.mark();
    this.scheduler.add("search", 0, () => false); // an empty job clears the page's busy state
  }

  layout() {}

  draw() {
    const form = this.state.view.form === "table" ? "table" : "tree";
    setAttributes(this.panel, { "aria-labelledby": this.forms.mark(form) });
    setAttributes(this.pruned, { "aria-pressed": String(this.showsPruned) });
    this.legend.hidden = form === "table";
    setChildren(this.panel, form === "table" ? this.table() : this.tree());
    this.mark();
  }

  /** The visible candidates. */
  get visibleNodes() {
    return this.showsPruned ? this.nodes : this.nodes.filter((one) => !isDiscarded(one));
  }

  tree() {
    const nodes = this.visibleNodes;
    this.treeLayout = layoutTree(nodes, this.steps);
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
    const edges = order.map((one) => {
      const edge = s("path", { class: "edge-of", d: this.treeLayout.edge(one), "data-state": one.state, "data-lost": isDeadEnd(one), "stroke-width": edgeWidth(one) });
      this.edges.set(one.index, edge);
      return edge;
    });
    const items = nodes.map((one) => this.item(one));
    const svg = s(
      "svg",
      { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "presentation" },
      s("g", { "aria-hidden": "true" }, headings, separatorY ? s("path", { class: "parting", d: `M0 ${separatorY}H${width}` }) : null, edges, s("circle", { class: "begin", cx: 6, cy: TOP + LANE / 2, r: 5 })),
      items,
    );
    this.scroller = h(
      "div",
      { class: "scroll-tree", tabindex: 0, role: "tree", "aria-label": "Search tree", onkeydown: (event) => this.key(event), onpointerleave: () => this.point(null, 0) },
      svg,
    );
    return this.scroller;
  }

  /** Draws one candidate. @param {Candidate} one */
  item(one) {
    const { x, y, width, height } = this.treeLayout.boxes.get(one.index);
    const discarded = isDiscarded(one);
    const element = s(
      "g",
      {
        class: "item", id: uniqueId("node"), role: "treeitem", "aria-level": one.step + 1, "aria-label": this.describe(one), "data-node": one.index, "data-state": one.state, "data-lost": isDeadEnd(one),
        onpointerenter: () => this.point(one.index, 200),
        onclick: () => this.choose(one.index),
      },
      s("rect", { x, y, width, height, rx: height / 2 }),
      s("text", { x: discarded ? x + 7 : x + width / 2, y: y + height / 2 + (discarded ? 4.6 : 5.2), "text-anchor": !discarded ? "middle" : this.rtl ? "end" : "start", "font-size": discarded ? DISCARDED_FONT : FONT, direction: this.rtl ? "rtl" : null }, one.label),
      one.ends ? s("rect", { class: "flag", x: x + width - 5, y: y + height / 2 - 5, width: 10, height: 10, rx: 2 }) : null,
    );
    this.items.set(one.index, element);
    return one.ends ? s("g", { role: "none" }, element, s("text", { class: "result", "aria-hidden": "true", "data-state": one.state, x: x + width + 11, y: y + height / 2 + 4.5, "font-size": 13 }, formatScore(one.score))) : element;
  }

  table() {
    const body = this.nodes.map((one) =>
      h(
        "tr",
        { "data-state": one.state, "data-node": one.index, onclick: () => this.choose(one.index) },
        h("td", { class: "figure-of" }, one.step + 1),
        h("th", { scope: "row" }, tokenText(one.label, this.rtl)),
        h("td", {}, tokenText(truncate(one.text, 60), this.rtl)),
        [formatShort(Math.exp(one.logprob)), formatScore(one.logprob), formatScore(one.total), one.score === null ? "" : formatScore(one.score)].map((text) => h("td", { class: "figure-of" }, text)),
        h("td", {}, one.reason ? `${STATES[one.state]}: ${REASONS[one.reason] ?? one.reason}` : one.ends && one.state === "best" ? "Best, finished" : STATES[one.state]),
        h("td", {}, this.strongestAttention(one)?.token ?? ""),
      ),
    );
    const headings = ["Step", "Token", "Hypothesis", "Probability", "Log-probability", "Cumulative log-probability", "Score", "Outcome", "Largest attention"];
    return h(
      "div",
      { class: "decode-table" },
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the search" },
        h("table", {}, h("caption", { class: "unseen" }, "All candidates of all steps."), h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, body)),
      ),
    );
  }

  /** The attention weights of the step that proposed a candidate. @param {Candidate} one @returns {{token: string, weight: number, own: boolean}[]} */
  attentionOf(one) {
    if (!this.rows || one.row === null) return [];
    const width = this.search.looked.shape[1];
    const own = pathOf(this.nodes, one).slice(0, -1).map((other) => other.label);
    const tokens = [...this.search.source.map(makeVisible), ...(width > this.search.source.length ? own : [])];
    return tokens.map((token, i) => ({ token, weight: this.rows[one.row * width + i], own: i >= this.search.source.length }));
  }

  /** @param {Candidate} one */
  strongestAttention(one) {
    return this.attentionOf(one).reduce((most, look) => (most && most.weight >= look.weight ? most : look), null);
  }

  /** Describes a candidate for screen readers. @param {Candidate} one */
  describe(one) {
    const most = this.strongestAttention(one);
    const parts = [
      `Step ${one.step + 1} of ${this.steps}: ${bidiIsolate(one.label)}`,
      one.text.trim() ? `“${bidiIsolate(truncate(one.text.trim(), 80))}”` : null,
      `Probability ${formatShort(Math.exp(one.logprob))}, cumulative log-probability ${formatScore(one.total)}${one.score === null ? "" : `, score ${formatScore(one.score)}`}`,
      outcomeOf(one),
      most ? `Attends most to ${bidiIsolate(most.token)}, ${formatShort(most.weight)}` : null,
    ];
    return `${parts.filter((part) => part !== null).join(". ")}.`;
  }

  /** Highlights the candidate on display and shows its details. */
  mark() {
    const one = this.current;
    if (!one) return;
    const path = new Set(pathOf(this.nodes, one).map((other) => other.index));
    this.items?.forEach((item, number) => {
      item.classList.toggle("on", number === one.index);
      item.classList.toggle("along", path.has(number));
      setAttributes(item, { "aria-selected": String(number === one.index) });
    });
    this.edges?.forEach((edge, number) => edge.classList.toggle("on", path.has(number)));
    if (this.scroller) setAttributes(this.scroller, { "aria-activedescendant": this.items.get(one.index)?.id });
    for (const row of this.panel.querySelectorAll("tr[data-node]")) row.classList.toggle("on", /** @type {HTMLElement} */ (row).dataset.node === String(one.index));
    this.showDetails(one);
  }

  /** @param {Candidate} one */
  showDetails(one) {
    const before = one.parent === null ? "" : this.nodes[one.parent].text;
    const isExtension = one.text.startsWith(before);
    const added = isExtension ? one.text.slice(before.length) : one.text;
    const numbers = [
      ["Probability", formatWeight(Math.exp(one.logprob))],
      ["Log-probability", formatScore(one.logprob, 4)],
      ["Cumulative log-probability", formatScore(one.total, 4)],
      one.score === null ? null : ["Score if finished here", formatScore(one.score, 4)],
    ];
    if (one.ends) numbers[3] = ["Score", formatScore(one.score, 4)];
    setChildren(
      this.details,
      h("p", { class: "text", dir: this.rtl ? "rtl" : "ltr" }, isExtension ? before : "", h("span", { class: "new" }, added.trim() ? added : `${before ? " " : ""}${one.label}`)),
      h("p", { class: "fate" }, h("strong", {}, `Step ${one.step + 1}. `), `${outcomeOf(one)}.`),
      h("dl", {}, numbers.filter((pair) => pair !== null).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    );
    this.listResults(one);
    this.shadeSource(one);
  }

  /** Lists the results, best first; equal samples are listed once. @param {Candidate} one */
  listResults(one) {
    const { results } = this.search;
    const distinct = results.filter((result, i) => results.findIndex((other) => other.node === result.node) === i);
    const times = (/** @type {number | null} */ node) => results.filter((result) => result.node === node).length;
    const item = (/** @type {{text: string, score: number, node: number | null}} */ { text, score, node }) =>
      h(
        "li",
        {},
        h(
          "button",
          { type: "button", "aria-pressed": String(node === one.index), onclick: () => node !== null && (this.choose(node), this.scrollTo(node)) },
          h("span", { class: "words", dir: "auto" }, text.trim() || "∅", times(node) > 1 ? h("span", { class: "times" }, ` ×${times(node)}`) : null),
          h("span", { class: "score" }, formatScore(score)),
        ),
      );
    setChildren(this.resultList, h("h2", {}, distinct.length > 1 ? "Results, best first" : "Results"), h("ol", {}, distinct.map(item)));
  }

  /** Shades the source tokens by the attention weights of a candidate's step. @param {Candidate} one */
  shadeSource(one) {
    const look = this.attentionOf(one);
    this.attentionPanel.hidden = look.length === 0;
    if (!look.length) return;
    const { colors, theme } = this.state.view;
    const colormap = createColormap(colors, look.length > 128 ? "root" : "linear", isDark(theme));
    const rtl = this.scene.sides.source?.direction === "rtl";
    setChildren(
      this.attentionPanel,
      h("h2", {}, "Attention when predicting ", h("strong", {}, tokenText(one.label, this.rtl)), ` at step ${one.step + 1}`),
      h(
        "ol",
        { class: "words", dir: rtl ? "rtl" : "ltr" },
        look.map(({ token, weight, own }) => {
          const item = h("li", { class: [colormap.needsLightText(weight) ? "light" : "dark", own && "own"].filter(Boolean).join(" "), title: formatWeight(weight) }, token, h("span", { class: "unseen" }, ` ${formatShort(weight)}`));
          item.style.background = colormap.css(weight);
          return item;
        }),
      ),
      h("p", { class: "rest" }, `${this.search.attention}, mean of all heads`),
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
    const one = this.current;
    const visibleIndices = new Set(this.visibleNodes.map((other) => other.index));
    const siblings = this.visibleNodes.filter((other) => other.step === one.step).sort((a, b) => this.treeLayout.boxes.get(a.index).y - this.treeLayout.boxes.get(b.index).y);
    const at = siblings.indexOf(one);
    const children = one.children.filter((number) => visibleIndices.has(number));
    const moves = {
      ArrowLeft: () => one.parent,
      ArrowRight: () => children[0],
      ArrowUp: () => siblings[at - 1]?.index,
      ArrowDown: () => siblings[at + 1]?.index,
      Home: () => pathOf(this.nodes, one)[0].index,
      End: () => lastOf(this.nodes, one, visibleIndices),
      b: () => this.search.results[0]?.node,
    };
    const move = moves[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (event.key.toLowerCase() === "n") this.state.set({ form: "table" });
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
    const lines = this.nodes.map((one) => [one.step + 1, one.parent ?? "", one.index, one.label, one.logprob, one.total, one.score ?? "", one.state, one.reason, makeVisible(one.text)].join("\t"));
    return `${["step\tparent\tnumber\ttoken\tlogprob\tsum\tscore\tstate\treason\ttext", ...lines].join("\n")}\n`;
  }
}

/** Adds texts, labels and links to the scene's candidates. @param {{nodes: CandidateData[], results: {node: number | null}[]}} given @returns {Candidate[]} */
export function buildCandidates(given) {
  /** @type {Candidate[]} */
  const nodes = [];
  given.nodes.forEach((one, index) => {
    const before = one.parent === null || one.whole ? "" : nodes[one.parent].text;
    nodes.push({ ...one, index, text: before + one.piece, label: truncate(makeVisible(one.token), MAX_NODE_LABEL), children: [], isInResult: false });
  });
  for (const { node } of given.results) for (let at = node; at !== null; at = nodes[at].parent) nodes[at].isInResult = true;
  for (const one of nodes) if (one.parent !== null) nodes[one.parent].children.push(one.index);
  // Candidates of results first, then those that were kept, each from the best down.
  for (const one of nodes) one.children.sort((a, b) => importance(nodes[b]) - importance(nodes[a]) || a - b);
  return nodes;
}

/** @param {Candidate} one */
function isDiscarded(one) {
  return one.state === "pruned" || one.state === "refused";
}

/** Whether a candidate was kept, but is not part of a result. @param {Candidate} one */
function isDeadEnd(one) {
  return one.state === "kept" && !one.isInResult;
}

/** Importance of a candidate. @param {Candidate} one */
function importance(one) {
  return { best: 4, finished: 2, kept: 2, pruned: 1, refused: 0 }[one.state] + (one.isInResult ? 1 : 0);
}

/** Width of an edge, which grows with the probability. @param {Candidate} one */
function edgeWidth(one) {
  return isDiscarded(one) ? 1.2 : 1.4 + 3.2 * Math.exp(one.logprob);
}

/** Describes the outcome of a candidate. @param {Candidate} one */
function outcomeOf(one) {
  if (isDiscarded(one)) return `${STATES[one.state]}: ${REASONS[one.reason] ?? one.reason}`;
  if (one.ends) return one.state === "best" ? "Finished: the best hypothesis" : one.isInResult ? "Finished: one of the results" : "Finished: ranked below the results";
  if (one.state === "best") return "Kept: part of the best hypothesis";
  return one.isInResult ? "Kept: part of a result" : "Kept: leads to no result";
}

/** Formats a score, with more digits if it is small. @param {number} value @param {number} [digits] */
function formatScore(value, digits = Math.abs(value) < 0.1 ? 4 : 2) {
  return Number(value.toFixed(digits)) === 0 ? "0" : value.toFixed(digits).replace("-", "−");
}

/** The candidates from the first step to this one. @param {Candidate[]} nodes @param {Candidate} one @returns {Candidate[]} */
function pathOf(nodes, one) {
  const path = [];
  for (let at = one; at; at = nodes[at.parent]) path.unshift(at);
  return path;
}

/** The last token of the best continuation. @param {Candidate[]} nodes @param {Candidate} one @param {Set<number>} visibleIndices */
function lastOf(nodes, one, visibleIndices) {
  let at = one;
  for (let next = at; next; next = nodes[at.children.find((number) => visibleIndices.has(number))]) at = next;
  return at.index;
}

let labelContext = null;
/** Width of a label in pixels. @param {string} label @param {number} size */
function nodeLabelWidth(label, size) {
  labelContext ??= document.createElement("canvas").getContext("2d");
  labelContext.font = `600 ${size}px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif`;
  return labelContext.measureText(label).width;
}

/**
 * Computes the layout of a tree. Each step is a column. Hypotheses that are kept stay in one lane as long as possible, the
 * best one in the first; discarded candidates are placed below.
 * @param {Candidate[]} nodes @param {number} steps
 */
export function layoutTree(nodes, steps) {
  const byStep = Array.from({ length: steps }, (_, step) => nodes.filter((one) => one.step === step));
  /** @type {Map<number, number>} */
  const lanes = new Map();
  let lastLane = 0;
  for (const column of byStep) {
    const taken = new Set();
    const inOrder = column.filter((one) => !isDiscarded(one)).sort((a, b) => importance(b) - importance(a) || a.index - b.index);
    for (const one of inOrder) {
      const preferred = one.state === "best" ? 0 : Math.max(1, lanes.get(one.parent) ?? 1);
      let lane = preferred;
      // The free lane nearest to the parent's, below it if two are equally near; the first is reserved for the best hypothesis.
      for (let away = 1; taken.has(lane); away++) {
        lane = !taken.has(preferred + away) || preferred - away < 1 ? preferred + away : preferred - away;
      }
      taken.add(lane);
      lanes.set(one.index, lane);
      lastLane = Math.max(lastLane, lane);
    }
  }
  /** @type {Map<number, {x: number, y: number, width: number, height: number}>} */
  const boxes = new Map();
  const columns = [];
  const discardedTop = TOP + (lastLane + 1) * LANE + 14;
  let x = 34;
  let rows = 0;
  for (const column of byStep) {
    const sizes = new Map(column.map((one) => [one.index, Math.max(34, nodeLabelWidth(one.label, isDiscarded(one) ? DISCARDED_FONT : FONT) + (isDiscarded(one) ? 14 : 26))]));
    const widest = Math.max(...sizes.values(), 34);
    const ends = column.some((one) => one.ends) ? 40 : 0;
    columns.push(x);
    const left = column.filter(isDiscarded);
    rows = Math.max(rows, left.length);
    for (const one of column) {
      const discarded = isDiscarded(one);
      const height = discarded ? 22 : 30;
      const y = discarded ? discardedTop + left.indexOf(one) * DISCARDED_LANE : TOP + lanes.get(one.index) * LANE + (LANE - height) / 2;
      boxes.set(one.index, { x, y, width: sizes.get(one.index), height });
    }
    x += widest + Math.max(GAP, ends + 12);
  }
  const height = rows ? discardedTop + rows * DISCARDED_LANE + 4 : discardedTop - 10;
  return {
    boxes, columns, width: x - GAP + 44, height, separatorY: rows ? discardedTop - 8 : 0,
    /** Path of the edge from the parent to a candidate. @param {Candidate} one */
    edge(one) {
      const to = boxes.get(one.index);
      const from = one.parent === null ? { x: 0, y: TOP, width: 11, height: LANE } : boxes.get(one.parent);
      const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x, to.y + to.height / 2];
      const bend = Math.min(60, (x2 - x1) * 0.55);
      return `M${roundToTenth(x1)} ${roundToTenth(y1)}C${roundToTenth(x1 + bend)} ${roundToTenth(y1)} ${roundToTenth(x2 - bend)} ${roundToTenth(y2)} ${roundToTenth(x2)} ${roundToTenth(y2)}`;
    },
  };
}

/** @param {number} value */
function roundToTenth(value) {
  return Math.round(value * 10) / 10;
}
