/** The search tree: its candidates, its layout and its view. */

import { createColormap } from "../core/colors.js";
import { html, setAttributes, setChildren, svgElement, tokenText, uniqueId } from "../core/dom.js";
import { isDark, tabList, toggle } from "../core/shell.js";
import { bidiIsolate, formatShort, formatWeight, makeVisible, truncate, withMinus } from "../core/tokens.js";

/* The candidates of a search: their texts, their order and their outcomes. */

/**
 * @typedef {{step: number, parent: number | null, token: string, piece: string, whole: boolean, logprob: number,
 * total: number,
 *   score: number | null, state: string, ends: boolean, reason: string, row: number | null}} CandidateData a candidate
 * in the scene
 * @typedef {CandidateData & {index: number, text: string, label: string, children: number[], isInResult: boolean}}
 * Candidate
 * `isInResult`: whether it is part of a result
 */

/** Maximum length of a label. */
const MAX_NODE_LABEL = 18;
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
  suppressed: "it would repeat an n-gram, or is suppressed",
  forbidden: "it would complete a forbidden phrase",
  required: "a required phrase is still missing",
};

/**
 * Adds texts, labels and links to the scene's candidates.
 * @param {{nodes: CandidateData[], results: {node: number | null}[]}} search @returns {Candidate[]}
 */
function buildCandidates(search) {
  /** @type {Candidate[]} */
  const nodes = [];
  search.nodes.forEach((candidate, index) => {
    const before = candidate.parent === null || candidate.whole ? "" : nodes[candidate.parent].text;
    nodes.push({
      ...candidate,
      index,
      text: before + candidate.piece,
      label: truncate(makeVisible(candidate.token), MAX_NODE_LABEL),
      children: [],
      isInResult: false,
    });
  });
  for (const { node } of search.results)
    for (let at = node; at !== null; at = nodes[at].parent) nodes[at].isInResult = true;
  for (const candidate of nodes) if (candidate.parent !== null) nodes[candidate.parent].children.push(candidate.index);
  // Candidates of results first, then those that were kept, each from the best down.
  for (const candidate of nodes)
    candidate.children.sort((a, b) => importance(nodes[b]) - importance(nodes[a]) || a - b);
  return nodes;
}

/**
 * The finished hypotheses: the results, then those that finished with a lower score.
 * @param {{results: {text: string, score: number, node: number | null}[]}} search @param {Candidate[]} nodes
 * @returns {{text: string, score: number, node: number | null, isResult: boolean}[]}
 */
function finishedHypotheses(search, nodes) {
  const listed = new Set(search.results.map(({ node }) => node));
  const others = nodes.filter((candidate) => candidate.ends && !isDiscarded(candidate) && !listed.has(candidate.index));
  others.sort((a, b) => b.score - a.score);
  return [
    ...search.results.map((result) => ({ ...result, isResult: true })),
    ...others.map(({ index, text, score }) => ({ text, score, node: index, isResult: false })),
  ];
}

/** @param {Candidate} candidate */
function isDiscarded(candidate) {
  return candidate.state === "pruned" || candidate.state === "refused";
}

/** Whether a candidate was kept, but is not part of a result. @param {Candidate} candidate */
function isDeadEnd(candidate) {
  return candidate.state === "kept" && !candidate.isInResult;
}

/** Importance of a candidate. @param {Candidate} candidate */
function importance(candidate) {
  return { best: 4, finished: 2, kept: 2, pruned: 1, refused: 0 }[candidate.state] + (candidate.isInResult ? 1 : 0);
}

/** Width of an edge, which grows with the probability. @param {Candidate} candidate */
function edgeWidth(candidate) {
  return isDiscarded(candidate) ? 1.2 : 1.4 + 3.2 * Math.exp(candidate.logprob);
}

/** Describes the outcome of a candidate. @param {Candidate} candidate */
function outcomeOf(candidate) {
  if (isDiscarded(candidate)) return `${STATES[candidate.state]}: ${REASONS[candidate.reason] ?? candidate.reason}`;
  if (candidate.ends)
    return candidate.state === "best"
      ? "Finished: the best hypothesis"
      : candidate.isInResult
        ? "Finished: one of the results"
        : "Finished: ranked below the results";
  if (candidate.state === "best") return "Kept: part of the best hypothesis";
  return candidate.isInResult ? "Kept: part of a result" : "Kept: leads to no result";
}

/**
 * Formats a score; small ones with two significant digits, because a log-probability is 0 only for certain tokens.
 * @param {number} value @param {number} [digits] after the point
 */
export function formatScore(value, digits) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  const text = size < 0.001 ? size.toExponential(1) : size.toFixed(digits ?? (size < 0.1 ? 4 : 2));
  return (value < 0 ? "−" : "") + withMinus(text);
}

/**
 * The candidates from the first step to this one. @param {Candidate[]} nodes @param {Candidate} candidate
 * @returns {Candidate[]}
 */
function pathTo(nodes, candidate) {
  const path = [];
  for (let at = candidate; at; at = nodes[at.parent]) path.unshift(at);
  return path;
}

/**
 * The last token of the best continuation. @param {Candidate[]} nodes @param {Candidate} candidate
 * @param {Set<number>} visibleIndices
 */
function lastOf(nodes, candidate, visibleIndices) {
  let at = candidate;
  for (let next = at; next; next = nodes[at.children.find((number) => visibleIndices.has(number))]) at = next;
  return at.index;
}

/* The layout of a search tree. */

/** Sizes of the drawing in pixels. */
const LANE = 40;
const DISCARDED_LANE = 27;
const TOP = 30;
const GAP = 38;
const MIN_GAP = 14;
const FONT = 15;
const DISCARDED_FONT = 13.5;

let labelContext = null;
/** Width of a label in pixels. @param {string} label @param {number} size */
function nodeLabelWidth(label, size) {
  labelContext ??= document.createElement("canvas").getContext("2d");
  labelContext.font = `600 ${size}px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif`;
  return labelContext.measureText(label).width;
}

/** Width of the score next to a finished candidate. @param {Candidate} candidate */
const scoreWidth = (candidate) =>
  candidate.ends && candidate.score !== null ? 11 + nodeLabelWidth(formatScore(candidate.score), 13) : 0;

/**
 * Computes the layout of a tree. Each step is a column. Hypotheses that are kept stay in one lane as long as possible,
 * the
 * best one in the first; discarded candidates are placed below.
 * Columns move together if the tree is wider than the available width.
 * @param {Candidate[]} nodes @param {number} steps @param {number} [available]
 */
function layoutTree(nodes, steps, available = Infinity) {
  const natural = layoutWithGap(nodes, steps, GAP);
  if (natural.width <= available) return natural;
  return layoutWithGap(nodes, steps, Math.max(MIN_GAP, GAP - (natural.width - available) / Math.max(1, steps - 1)));
}

/** @param {Candidate[]} nodes @param {number} steps @param {number} gap between columns */
function layoutWithGap(nodes, steps, gap) {
  const byStep = Array.from({ length: steps }, (_, step) => nodes.filter((candidate) => candidate.step === step));
  /** @type {Map<number, number>} */
  const lanes = new Map();
  let lastLane = 0;
  for (const column of byStep) {
    const taken = new Set();
    const inOrder = column
      .filter((candidate) => !isDiscarded(candidate))
      .sort((a, b) => importance(b) - importance(a) || a.index - b.index);
    for (const candidate of inOrder) {
      const preferred = candidate.state === "best" ? 0 : Math.max(1, lanes.get(candidate.parent) ?? 1);
      let lane = preferred;
      // The free lane nearest to the parent's, below it if two are equally near; the first is reserved for the best
      // hypothesis.
      for (let away = 1; taken.has(lane); away++) {
        lane = !taken.has(preferred + away) || preferred - away < 1 ? preferred + away : preferred - away;
      }
      taken.add(lane);
      lanes.set(candidate.index, lane);
      lastLane = Math.max(lastLane, lane);
    }
  }
  /** @type {Map<number, {x: number, y: number, width: number, height: number}>} */
  const boxes = new Map();
  const columns = [];
  const discardedTop = TOP + (lastLane + 1) * LANE + 14;
  let x = 34;
  let rows = 0;
  /** The right edge of the boxes and scores. */
  let right = x;
  for (const column of byStep) {
    const sizes = new Map(
      column.map((candidate) => [
        candidate.index,
        Math.max(
          34,
          nodeLabelWidth(candidate.label, isDiscarded(candidate) ? DISCARDED_FONT : FONT) +
            (isDiscarded(candidate) ? 14 : 26),
        ),
      ]),
    );
    const widest = Math.max(...sizes.values(), 34);
    const ends = Math.max(0, ...column.map(scoreWidth));
    columns.push(x);
    const left = column.filter(isDiscarded);
    rows = Math.max(rows, left.length);
    for (const candidate of column) {
      const discarded = isDiscarded(candidate);
      const height = discarded ? 22 : 30;
      const y = discarded
        ? discardedTop + left.indexOf(candidate) * DISCARDED_LANE
        : TOP + lanes.get(candidate.index) * LANE + (LANE - height) / 2;
      boxes.set(candidate.index, { x, y, width: sizes.get(candidate.index), height });
      right = Math.max(right, x + sizes.get(candidate.index) + scoreWidth(candidate));
    }
    x += widest + Math.max(gap, ends + 12);
  }
  const height = rows ? discardedTop + rows * DISCARDED_LANE + 4 : discardedTop - 10;
  return {
    boxes,
    columns,
    width: right + 8,
    height,
    separatorY: rows ? discardedTop - 8 : 0,
    /** Path of the edge from the parent to a candidate. @param {Candidate} candidate */
    edge(candidate) {
      const to = boxes.get(candidate.index);
      const from = candidate.parent === null ? { x: 0, y: TOP, width: 11, height: LANE } : boxes.get(candidate.parent);
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

/* The search view: the search tree of the output, and the attention at each step. */

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
    this.panel = html("div", { role: "tabpanel", id: uniqueId("search") });
    this.forms = tabList("Show as", SEARCH_FORMS, this.panel.id, (form) => this.setForm(form));
    this.pruned = toggle("Pruned", (on) => {
      this.showsPruned = on;
      this.draw();
    });
    this.attentionPanel = html("section", { class: "step-attention", "aria-label": "Attention at this step" });
    this.legend = this.createLegend();
    this.figureElement = html("div", { class: "card" }, this.panel, this.legend, this.attentionPanel);
    this.details = html("section", { class: "node", "aria-label": "Selected candidate" });
    this.resultList = html("section", { class: "result-list", "aria-label": "Results" });
    this.element = html(
      "div",
      { class: "search-view" },
      html(
        "div",
        { class: "bar", "data-export": "no" },
        this.forms.element,
        html("div", { class: "toggles" }, this.pruned),
      ),
      html("p", { class: "summary" }, this.summary()),
      html(
        "div",
        { class: "search-columns" },
        this.figureElement,
        html(
          "aside",
          { class: "side", "aria-label": "Details of the search" },
          this.details,
          this.resultList,
          this.constraints(),
        ),
      ),
    );
    this.pruned.hidden = !this.nodes.some(isDiscarded);
  }

  /** Describes the search in a few sentences. */
  summary() {
    const { method, beam, length_penalty: length, coverage_penalty: coverage, omitted: left, stopped } = this.search;
    const widths = { beam: `, beam width ${beam}`, sample: beam > 1 ? `, ${beam} samples` : "", greedy: "" };
    const missing = left.reduce((/** @type {number} */ sum, /** @type {number} */ count) => sum + count, 0);
    const ranked =
      length === 1
        ? "mean log-probability per token"
        : length === 0
          ? "log-probability"
          : `log-probability divided by length^${length}`;
    return [
      html("strong", {}, `${METHODS[method]}${widths[method]}. `),
      `${this.steps} ${this.steps === 1 ? "step" : "steps"}, ${this.nodes.length + missing} candidates`,
      missing ? `, of which the best ${this.nodes.length} are shown` : "",
      `. Hypotheses are ranked by ${ranked}${coverage ? " plus a coverage penalty" : ""}. `,
      method === "beam" ? (STOPPED[stopped] ?? "") : "",
    ];
  }

  /** Constraints of the output, or null if there are none. */
  constraints() {
    const { prefix, min_len: minimum, limit } = this.search;
    const reasons = new Set(
      this.nodes.filter((candidate) => candidate.state === "refused").map((candidate) => candidate.reason),
    );
    const list = [
      prefix.length ? ["Prefix: ", prefix.map((token) => [tokenText(makeVisible(token), this.rtl), " "])] : null,
      minimum ? [`Minimum length: ${minimum} tokens`] : null,
      reasons.has("limit") ? [`Maximum length: ${limit} tokens`] : null,
    ].filter((constraint) => constraint !== null);
    if (!list.length) return null;
    return html(
      "section",
      { class: "constraints", "aria-label": "Constraints" },
      html("h2", {}, "Constraints"),
      html(
        "ul",
        {},
        list.map((constraint) => html("li", {}, constraint)),
      ),
    );
  }

  /** Legend of the candidates' states. */
  createLegend() {
    const there = new Set(this.nodes.map((candidate) => candidate.state));
    return html(
      "p",
      { class: "keys" },
      Object.keys(STATES)
        .filter((state) => there.has(state))
        .map((state) =>
          html("span", {}, html("i", { "data-state": state, "aria-hidden": "true" }), STATES[state].toLowerCase()),
        ),
    );
  }

  /**
   * The candidate on display: under the pointer, selected, or the first of the best hypothesis. @returns {Candidate}
   */
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
    if (hadFocus)
      /** @type {HTMLElement | null} */ (this.panel.querySelector("[tabindex]"))?.focus({ preventScroll: true });
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
      return svgElement(
        "text",
        {
          class: step < forced ? "step-number forced" : "step-number",
          x: this.treeLayout.columns[step],
          y: 12,
          "font-size": 12.5,
        },
        text,
      );
    });
    // The most important edges are drawn last, on top of the others.
    const order = [...nodes].sort((a, b) => importance(a) - importance(b));
    const edges = order.map((candidate) => {
      const edge = svgElement("path", {
        class: "tree-edge",
        d: this.treeLayout.edge(candidate),
        "data-state": candidate.state,
        "data-dead-end": isDeadEnd(candidate),
        "stroke-width": edgeWidth(candidate),
      });
      this.edges.set(candidate.index, edge);
      return edge;
    });
    const items = nodes.map((candidate) => this.item(candidate));
    const svg = svgElement(
      "svg",
      { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "presentation" },
      svgElement(
        "g",
        { "aria-hidden": "true" },
        headings,
        separatorY ? svgElement("path", { class: "separator", d: `M0 ${separatorY}H${width}` }) : null,
        edges,
        svgElement("circle", { class: "begin", cx: 6, cy: TOP + LANE / 2, r: 5 }),
      ),
      items,
    );
    this.scroller = html(
      "div",
      {
        class: "scroll-tree",
        tabindex: 0,
        role: "tree",
        "aria-label": "Search tree",
        onkeydown: (event) => this.key(event),
        onpointerleave: () => this.point(null, 0),
      },
      svg,
    );
    return this.scroller;
  }

  /** Draws one candidate. @param {Candidate} candidate */
  item(candidate) {
    const { x, y, width, height } = this.treeLayout.boxes.get(candidate.index);
    const discarded = isDiscarded(candidate);
    const element = svgElement(
      "g",
      {
        class: "item",
        id: uniqueId("node"),
        role: "treeitem",
        "aria-level": candidate.step + 1,
        "aria-label": this.describe(candidate),
        "data-node": candidate.index,
        "data-state": candidate.state,
        "data-dead-end": isDeadEnd(candidate),
        onpointerenter: () => this.point(candidate.index, 200),
        onclick: () => this.choose(candidate.index),
      },
      svgElement("rect", { x, y, width, height, rx: height / 2 }),
      svgElement(
        "text",
        {
          x: discarded ? x + 7 : x + width / 2,
          y: y + height / 2 + (discarded ? 4.6 : 5.2),
          "text-anchor": !discarded ? "middle" : this.rtl ? "end" : "start",
          "font-size": discarded ? DISCARDED_FONT : FONT,
          direction: this.rtl ? "rtl" : null,
        },
        candidate.label,
      ),
      candidate.ends
        ? svgElement("rect", { class: "flag", x: x + width - 5, y: y + height / 2 - 5, width: 10, height: 10, rx: 2 })
        : null,
    );
    this.items.set(candidate.index, element);
    return candidate.ends
      ? svgElement(
          "g",
          { role: "none" },
          element,
          svgElement(
            "text",
            {
              class: "result",
              "aria-hidden": "true",
              "data-state": candidate.state,
              x: x + width + 11,
              y: y + height / 2 + 4.5,
              "font-size": 13,
            },
            formatScore(candidate.score),
          ),
        )
      : element;
  }

  table() {
    const body = this.nodes.map((candidate) =>
      html(
        "tr",
        { "data-state": candidate.state, "data-node": candidate.index, onclick: () => this.choose(candidate.index) },
        html("td", { class: "numeric" }, candidate.step + 1),
        html("th", { scope: "row" }, tokenText(candidate.label, this.rtl)),
        html("td", {}, tokenText(truncate(candidate.text, 60), this.rtl)),
        [
          formatShort(Math.exp(candidate.logprob)),
          formatScore(candidate.logprob),
          formatScore(candidate.total),
          candidate.score === null ? "" : formatScore(candidate.score),
        ].map((text) => html("td", { class: "numeric" }, text)),
        html(
          "td",
          {},
          candidate.reason
            ? `${STATES[candidate.state]}: ${REASONS[candidate.reason] ?? candidate.reason}`
            : candidate.ends && candidate.state === "best"
              ? "Best, finished"
              : STATES[candidate.state],
        ),
        html("td", {}, this.strongestAttention(candidate)?.token ?? ""),
      ),
    );
    const headings = [
      "Step",
      "Token",
      "Hypothesis",
      "Probability",
      "Log-probability",
      "Cumulative log-probability",
      "Score",
      "Outcome",
      "Largest attention",
    ];
    return html(
      "div",
      { class: "search-table" },
      html(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the search" },
        html(
          "table",
          {},
          html("caption", { class: "visually-hidden" }, "All candidates of all steps."),
          html(
            "thead",
            {},
            html(
              "tr",
              {},
              headings.map((text) => html("th", { scope: "col" }, text)),
            ),
          ),
          html("tbody", {}, body),
        ),
      ),
    );
  }

  /**
   * The attention weights of the step that proposed a candidate. @param {Candidate} candidate
   * @returns {{token: string, weight: number, own: boolean}[]}
   */
  attentionOf(candidate) {
    if (!this.rows || candidate.row === null) return [];
    const width = this.search.weights.shape[1];
    const own = pathTo(this.nodes, candidate)
      .slice(0, -1)
      .map((other) => other.label);
    const tokens = [...this.search.source.map(makeVisible), ...(width > this.search.source.length ? own : [])];
    return tokens.map((token, i) => ({
      token,
      weight: this.rows[candidate.row * width + i],
      own: i >= this.search.source.length,
    }));
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
    const path = new Set(pathTo(this.nodes, candidate).map((other) => other.index));
    this.items?.forEach((item, number) => {
      item.classList.toggle("on", number === candidate.index);
      item.classList.toggle("along", path.has(number));
      setAttributes(item, { "aria-selected": String(number === candidate.index) });
    });
    this.edges?.forEach((edge, number) => edge.classList.toggle("on", path.has(number)));
    if (this.scroller) setAttributes(this.scroller, { "aria-activedescendant": this.items.get(candidate.index)?.id });
    for (const row of this.panel.querySelectorAll("tr[data-node]"))
      row.classList.toggle("on", /** @type {HTMLElement} */ (row).dataset.node === String(candidate.index));
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
      html(
        "p",
        { class: "text", dir: this.rtl ? "rtl" : "ltr" },
        isExtension ? before : "",
        html("span", { class: "new" }, added.trim() ? added : `${before ? " " : ""}${candidate.label}`),
      ),
      html(
        "p",
        { class: "node-outcome" },
        html("strong", {}, `Step ${candidate.step + 1}. `),
        `${outcomeOf(candidate)}.`,
      ),
      html(
        "dl",
        {},
        numbers
          .filter((pair) => pair !== null)
          .map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))),
      ),
    );
    this.listResults(candidate);
    this.shadeSource(candidate);
  }

  /** Lists the finished hypotheses, best first; equal samples are listed once. @param {Candidate} candidate */
  listResults(candidate) {
    const results = finishedHypotheses(this.search, this.nodes);
    const distinct = results.filter((result, i) => results.findIndex((other) => other.node === result.node) === i);
    const times = (/** @type {number | null} */ node) => results.filter((result) => result.node === node).length;
    const item = (
      /** @type {{text: string, score: number, node: number | null, isResult: boolean}} */ {
        text,
        score,
        node,
        isResult,
      },
    ) =>
      html(
        "li",
        { "data-result": isResult },
        html(
          "button",
          { type: "button", "aria-pressed": String(node === candidate.index), onclick: () => this.showNode(node) },
          html(
            "span",
            { class: "words", dir: "auto" },
            text.trim() || "∅",
            times(node) > 1 ? html("span", { class: "times" }, ` ×${times(node)}`) : null,
          ),
          html("span", { class: "score" }, formatScore(score)),
        ),
      );
    setChildren(
      this.resultList,
      html("h2", {}, distinct.length > 1 ? "Finished hypotheses, best first" : "Result"),
      html("ol", {}, distinct.map(item)),
    );
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
      html(
        "h2",
        {},
        "Attention when predicting ",
        html("strong", {}, tokenText(candidate.label, this.rtl)),
        ` at step ${candidate.step + 1}`,
      ),
      html(
        "ol",
        { class: "words", dir: rtl ? "rtl" : "ltr" },
        look.map(({ token, weight, own }) => {
          const item = html(
            "li",
            {
              class: [colormap.needsLightText(weight) ? "light" : "dark", own && "own"].filter(Boolean).join(" "),
              title: formatWeight(weight),
            },
            token,
            html("span", { class: "visually-hidden" }, ` ${formatShort(weight)}`),
          );
          item.style.background = colormap.css(weight);
          return item;
        }),
      ),
      html("p", { class: "secondary" }, `${this.search.attention}, mean of all heads`),
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
    const siblings = this.visibleNodes
      .filter((other) => other.step === candidate.step)
      .sort((a, b) => this.treeLayout.boxes.get(a.index).y - this.treeLayout.boxes.get(b.index).y);
    const at = siblings.indexOf(candidate);
    const children = candidate.children.filter((number) => visibleIndices.has(number));
    const moves = {
      ArrowLeft: () => candidate.parent,
      ArrowRight: () => children[0],
      ArrowUp: () => siblings[at - 1]?.index,
      ArrowDown: () => siblings[at + 1]?.index,
      Home: () => pathTo(this.nodes, candidate)[0].index,
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

  /** Selects the last candidate of a hypothesis, if the tree contains it. @param {number | null} node */
  showNode(node) {
    if (node === null) return;
    this.choose(node);
    this.scrollTo(node);
  }

  /** Scrolls to a candidate. @param {number} number */
  scrollTo(number) {
    const box = this.treeLayout?.boxes.get(number);
    if (!box || !this.scroller.isConnected) return;
    const { scrollLeft, clientWidth } = this.scroller;
    if (box.x - 60 < scrollLeft) this.scroller.scrollLeft = box.x - 60;
    else if (box.x + box.width + 80 > scrollLeft + clientWidth)
      this.scroller.scrollLeft = box.x + box.width + 80 - clientWidth;
  }

  /** Name of saved files, without extension. */
  get fileName() {
    return "regard-search";
  }

  /** All candidates as tab-separated values. */
  get tsv() {
    const lines = this.nodes.map((candidate) =>
      [
        candidate.step + 1,
        candidate.parent ?? "",
        candidate.index,
        candidate.label,
        candidate.logprob,
        candidate.total,
        candidate.score ?? "",
        candidate.state,
        candidate.reason,
        makeVisible(candidate.text),
      ].join("\t"),
    );
    return `${["step\tparent\tnumber\ttoken\tlogprob\tsum\tscore\tstate\treason\ttext", ...lines].join("\n")}\n`;
  }
}
