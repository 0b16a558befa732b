/** The tab of steps: every number between the input and the output. */

import { html, picker, setAttributes, setChildren, tokenText, uniqueId } from "../core/dom.js";
import { tabList } from "../core/shell.js";
import { DEPTHS, storeDepth } from "../core/state.js";
import { bidiIsolate, formatProbability, formatWeight, makeVisible, truncate, withMinus } from "../core/tokens.js";
import { patchOverlay, placePatchButtons } from "../images/figure.js";
import { readAttention } from "../trace/attention_steps.js";
import { formatNumber } from "../trace/operations.js";
import { Trace } from "../trace/trace.js";
import { isPunctuation } from "../weights/maps.js";
import { typeset, Walk } from "./walk.js";

/* The step-by-step view of a page without the numbers of the computation: says why, and how to include them. */

export class MissingSteps {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, scheduler }) {
    this.scheduler = scheduler;
    const command = host.scene.image ? "regard look MODEL IMAGE --trace" : "regard look MODEL TEXT --trace";
    this.element = html(
      "div",
      { class: "missing-steps" },
      html("p", {}, "This page does not contain the numbers of the computation."),
      html(
        "p",
        { class: "secondary" },
        "By default, a page contains them if the model has up to 8 MB of parameters without the vocabulary, and the text up to 64 tokens (an image up to 256 patches). To include them anyway, of a large model those of one layer, run:",
      ),
      html("p", {}, html("code", {}, command)),
    );
    this.figureElement = this.element;
    this.fileName = "regard-steps";
  }

  update() {
    this.scheduler.add("steps", 5, () => false); // an empty job clears the page's busy state
  }

  layout() {}
}

/* The numbers of a step that are displayed. */

/**
 * A row of displayed numbers: their indices in the step's output, their names, and how they are displayed.
 * @typedef {{subject: string, indices: number[], names: string[] | null, display: "cells" | "bars", total: number,
 * first: number}} Row
 */

/** Maximum number of bars for the tokens of an image. */
const MAX_BARS = 10;

/**
 * The displayed numbers of a step: the row of the selected token in the selected head.
 * @param {StepsView} view @param {number} n index of the step @returns {Row}
 */
function displayedRow(view, n) {
  const step = view.traceHeader.steps[n];
  const { shape, axes } = step.output;
  const { head, heads } = view.selected;
  // The row runs along the last axis; for an image, whose spatial axes come last, along the channels.
  const rowAxis = axes[0] === "channels" && axes.length > 1 ? 0 : axes.length - 1;
  let [start, stride, token, which, tokenSide] = [0, 1, "", "", ""];
  for (let axis = axes.length - 1, size = 1; axis >= 0; size *= shape[axis--]) {
    if (axis === rowAxis) {
      stride = size;
      continue;
    }
    const side = axes[axis];
    let at = 0;
    if (side in view.traceHeader.sides) {
      at = Math.min(view.selectedToken(side), shape[axis] - 1);
      token = bidiIsolate(view.tokenName(side, at));
      tokenSide = side;
    } else if (side === "heads") {
      // Grouped-query attention: several query heads share a key and value head.
      at = shape[axis] >= heads ? Math.min(head, shape[axis] - 1) : Math.floor((head * shape[axis]) / heads);
      if (shape[axis] > 1) which = `head ${at + 1}`;
    }
    start += at * size;
  }
  let width = shape[rowAxis];
  // Of the concatenated queries of all heads, those of the selected one.
  if (
    /\.q$/.test(step.id) &&
    view.sections[step.section].part === "attention" &&
    heads > 1 &&
    !axes.includes("heads")
  ) {
    width /= heads;
    start += head * width;
    which = `head ${head + 1}`;
  }
  let subject = [token, which].filter(Boolean).join(", ");
  let columns = Array.from({ length: width }, (_, i) => i);
  const last = axes[rowAxis];
  let names = last in view.traceHeader.sides ? view.traceHeader.sides[last].tokens.map(makeVisible) : null;
  const { data } = view.trace.value(n);
  const descending = (/** @type {number} */ a, /** @type {number} */ b) =>
    data[start + b * stride] - data[start + a * stride];
  if (last === "vocabulary") {
    // The ten most probable tokens.
    columns = columns.sort(descending).slice(0, 10);
    names = columns.map((i) => makeVisible(view.traceHeader.names[i] ?? `token ${i}`));
    if (subject && tokenSide && !view.host.scene.image) subject = `after ${subject}`;
  }
  const display = step.op === "softmax" ? "bars" : "cells";
  if (display === "bars" && view.host.scene.image && names && columns.length > MAX_BARS) {
    // Of many patches, list only the largest; all of them are painted.
    const all = names;
    columns = columns.sort(descending).slice(0, MAX_BARS);
    names = columns.map((i) => all[i]);
  }
  const indices = columns.map((i) => start + i * stride);
  const largest = indices.reduce((best, at, i) => (data[at] > data[indices[best]] ? i : best), 0);
  return { subject, indices, names, display, total: width, first: names ? largest : 0 };
}

/* The derivation of a number, as text. */

/** @typedef {import("../trace/trace.js").Step} Step */

/** Number of terms that are visible before "more" is pressed. */
const INITIAL_TERMS = 4;

/** The symbol on the left-hand side of a formula. @param {Step} step */
const leftSymbol = (step) => step.formula.split(/ [=←] /)[0].replace(/[ₜₛₕ₀₁₂₃ᵢ]+.*$/u, "") || "y";

/**
 * The derivation of one number from the inputs of its step, or null if it is a copy.
 * @param {import("../trace/trace.js").Trace} trace @param {number} n index of the step @param {Row} row
 * @param {number} i
 */
function derivationElement(trace, n, { indices, names }, i) {
  const at = indices[i];
  const sum = trace.derivation(n, at);
  if (!sum) return null;
  const { pieces, sign, before, after } = sum;
  const left = `${leftSymbol(trace.steps[n])}[${names ? names[i] : i}]`;
  const terms = html("span", { class: "terms" });
  /** @param {boolean} all */
  const write = (all) => {
    const visibleTerms = all ? pieces : pieces.slice(0, INITIAL_TERMS);
    const rest = pieces.length - visibleTerms.length;
    setChildren(
      terms,
      before,
      visibleTerms.flatMap((piece, k) => [k ? sign : null, html("span", { class: "term" }, piece)]),
      rest > 0
        ? [sign, html("button", { type: "button", class: "more", onclick: () => write(true) }, `… ${rest} more`)]
        : null,
      after,
    );
  };
  write(pieces.length <= INITIAL_TERMS + 2);
  return html(
    "p",
    { class: "derivation" },
    html("bdi", { class: "left" }, left),
    " = ",
    terms,
    " = ",
    html("strong", {}, formatNumber(trace.value(n).data[at])),
  );
}

/* The idea of a stage of the model: one plain sentence, and a small figure from the numbers of the selected token. */

/** Number of bars, and of cells of a vector in a figure. */
const MAX_FIGURE_BARS = 4;
const MAX_FIGURE_CELLS = 24;

const ATTENTION_IDEAS = {
  self: "Every token collects information from the tokens that matter to it, weighted by attention.",
  masked: "Every token collects information from itself and the tokens before it; later tokens are masked.",
  cross: "The decoder collects from the source what it needs to predict the next token.",
};
const PART_IDEAS = {
  feedforward: "Every token is processed on its own by a small network, the same one for all tokens.",
  norm: "The numbers of every token are rescaled, so that the next stage receives them at a steady size.",
  recurrent: "The state is updated with one more token, so that it sums up everything read so far.",
  layer: "The numbers of every token pass through this part of the model.",
};

/** The sentence of a stage. @param {StepsView} view @param {number} n index of the section @returns {string} */
function ideaOf(view, n) {
  const section = view.sections[n];
  if (section.part === "attention") {
    const kind =
      view.host.scene.attentions.find((/** @type {any} */ one) => one.name === section.attention)?.kind ??
      (section.keys && section.keys !== section.side ? "cross" : "self");
    return view.host.scene.image
      ? "Every patch collects information from the patches that matter to it, weighted by attention."
      : ATTENTION_IDEAS[kind];
  }
  const steps = view.stepsOf[n].map((step) => view.traceHeader.steps[step]);
  const { image, output } = view.host.scene;
  if (section.part === "output") {
    if (!steps.some((step) => step.op === "softmax"))
      return "The final vector is turned into the result, without softmax: the embedding itself, or scores.";
    return ["translation", "continuation", "mask"].includes(output?.kind)
      ? "The final vector is compared with every entry of the vocabulary; softmax turns the scores into probabilities."
      : "The final vector is turned into scores, one per possible answer; softmax turns them into probabilities.";
  }
  if (section.part === "embedding") {
    const position = steps.some((step) => /position/.test(step.id)) ? "; a vector of its position is added" : "";
    return image
      ? `Every patch becomes a vector: its pixels times learned weights${position}.`
      : `Every token becomes a vector: its row in a table of learned vectors${position}.`;
  }
  if (section.part === "layer" && section.title === "Initial state of the decoder")
    return "The source is summed up in one vector, the bottleneck through which everything about it passes.";
  return PART_IDEAS[section.part] ?? PART_IDEAS.layer;
}

/**
 * The figure of a stage: probabilities as bars, or the vector of the selected token.
 * @param {StepsView} view @param {number} n
 */
function ideaFigure(view, n) {
  const steps = view.stepsOf[n];
  const softmax = steps.findLast((step) => view.traceHeader.steps[step].op === "softmax");
  if (softmax === undefined) return steps.length ? vectorFigure(view, /** @type {number} */ (steps.at(-1))) : null;
  const row = displayedRow(view, softmax);
  const { data } = view.trace.value(softmax);
  const weights = row.indices.map((at) => data[at]);
  const overlay = view.cards.overlay(softmax);
  if (overlay) return overlay;
  const isOutput = view.traceHeader.steps[softmax].output.axes.at(-1) === "vocabulary";
  return isOutput || !row.names ? barFigure(row, weights) : null;
}

/** @param {Row} row @param {number[]} weights */
function barFigure({ subject, names }, weights) {
  return html(
    "div",
    { class: "idea-figure" },
    subject ? html("p", { class: "value-subject" }, subject) : null,
    html(
      "ol",
      { class: "ranks" },
      weights
        .slice(0, MAX_FIGURE_BARS)
        .map((weight, i) =>
          html(
            "li",
            {},
            html("span", { class: "name" }, html("bdi", {}, names?.[i] ?? String(i))),
            html(
              "span",
              { class: "track" },
              html("span", { class: "bar", style: `width: ${(100 * weight).toFixed(2)}%` }),
            ),
            html("span", { class: "weight" }, formatProbability(weight)),
          ),
        ),
    ),
  );
}

/** The vector of the selected token, as a row of colored cells. @param {StepsView} view @param {number} step */
function vectorFigure(view, step) {
  const { subject, indices } = displayedRow(view, step);
  const { data } = view.trace.value(step);
  const values = indices.slice(0, MAX_FIGURE_CELLS).map((at) => data[at]);
  const maximum = Math.max(1e-12, ...values.filter(Number.isFinite).map(Math.abs));
  return html(
    "div",
    { class: "idea-figure vector" },
    subject ? html("span", { class: "value-subject" }, tokenText(subject, false)) : null,
    html(
      "span",
      { class: "vector-cells", role: "img", "aria-label": `${indices.length} numbers` },
      values.map((value) =>
        html("i", {
          "data-sign": value < 0 ? "minus" : "plus",
          style: `--share: ${Number.isFinite(value) ? Math.round((90 * Math.abs(value)) / maximum) : 0}%`,
        }),
      ),
    ),
    html("span", { class: "secondary" }, `${indices.length} numbers`),
  );
}

/* The cards of the steps: title, formula, numbers of one token, and the derivation of the selected number. */

/** Number of values that are visible before "more" is pressed. */
const INITIAL_CELLS = 8;
/** Tolerance of the comparison with recorded values. */
export const TOLERANCE = 1e-5;

/** Formats a difference. @param {number} x */
const formatGap = (x) => (x === 0 ? "0" : withMinus(x.toExponential(0)));

class StepCards {
  /** @param {StepsView} view */
  constructor(view) {
    this.view = view;
    /** Indices of the steps that show all numbers. @type {Set<number>} */
    this.expandedSteps = new Set();
    /** For each step, the number whose derivation is shown. @type {Map<number, number>} */
    this.selectedNumber = new Map();
  }

  /**
   * A step without its numbers: the equation, the shape of the result and those of the parameters.
   * @param {number} n index of the step
   */
  formula(n) {
    const step = this.view.traceHeader.steps[n];
    const { shape, axes } = step.output;
    return html(
      "article",
      { class: "formula-row", "data-op": step.op },
      html("h3", {}, step.title),
      html("p", { class: "formula" }, typeset(step.formula)),
      html(
        "p",
        { class: "shapes" },
        html(
          "span",
          { class: "shape" },
          html("i", {}, leftSymbol(step)),
          ` ${shape.join(" × ")}`,
          html("span", { class: "secondary" }, ` (${axes.join(" × ")})`),
        ),
        this.view.trace
          .paramsOf(n)
          .map(({ sign, shape: own, full_shape: full }) =>
            html("span", { class: "shape" }, html("i", {}, sign), ` ${(full ?? own).join(" × ")}`),
          ),
      ),
    );
  }

  /** The card of a step. @param {number} n index of the step */
  card(n) {
    const step = this.view.traceHeader.steps[n];
    const row = displayedRow(this.view, n);
    const body = html("div", { class: "values-panel" });
    const show = () => {
      const { indices, display } = row;
      const selectedNumber = Math.min(this.selectedNumber.get(n) ?? row.first, indices.length - 1);
      setChildren(
        body,
        this.overlay(n),
        display === "bars" ? this.bars(n, row, selectedNumber, show) : this.cells(n, row, selectedNumber, show),
        derivationElement(this.view.trace, n, row, selectedNumber),
      );
    };
    show();
    const gap = this.view.trace.check(n);
    const given = step.op === "given";
    const check = !this.view.traceHeader.outputs
      ? ""
      : given
        ? html("span", { class: "check", "data-agrees": "given" }, "input")
        : html(
            "span",
            {
              class: "check",
              "data-agrees": gap <= TOLERANCE ? "yes" : "no",
              title: "Largest difference between the value computed in this page and the recorded one",
            },
            gap <= TOLERANCE ? "✓ " : "≠ ",
            html(
              "span",
              { class: "visually-hidden" },
              gap <= TOLERANCE ? "agrees, largest difference " : "does not agree, largest difference ",
            ),
            formatGap(gap),
          );
    return html(
      "article",
      { class: "step", "data-op": step.op, id: `step-${step.id}` },
      html("header", {}, html("h3", {}, step.title), check),
      html("p", { class: "formula" }, typeset(step.formula)),
      body,
      html(
        "footer",
        {},
        html("code", {}, step.where),
        this.view.trace
          .paramsOf(n)
          .map(({ sign, name, shape, full_shape: full }) =>
            html(
              "span",
              { class: "param" },
              html("i", {}, sign),
              ` ${(full ?? shape).join("×")} `,
              html("code", {}, name),
              full ? ` (${shape[0]} ${shape[0] === 1 ? "row" : "rows"} in this page)` : null,
            ),
          ),
        step.differs === null
          ? null
          : html(
              "span",
              { class: "own" },
              step.differs === 0
                ? "identical to the model's values"
                : `within ${formatGap(step.differs)} of the model's values`,
            ),
      ),
    );
  }

  /** Weights over patches as an overlay, or null if there are none. @param {number} n */
  overlay(n) {
    const { op, output } = this.view.traceHeader.steps[n];
    const side = output.axes[output.axes.length - 1];
    if (op !== "softmax" || !(side in (this.view.host.scene.image?.first ?? {}))) return null;
    const width = output.shape[output.shape.length - 1];
    const start = Math.floor(displayedRow(this.view, n).indices[0] / width) * width;
    return patchOverlay(this.view.host, side, this.view.trace.value(n).data.subarray(start, start + width));
  }

  /**
   * A row of numbers; selecting one shows its derivation. @param {number} n @param {Row} row
   * @param {number} selectedNumber @param {() => void} show
   */
  cells(n, { subject, indices, names, total }, selectedNumber, show) {
    const { data } = this.view.trace.value(n);
    const all = this.expandedSteps.has(n);
    const count = all
      ? indices.length
      : Math.min(indices.length, Math.max(INITIAL_CELLS, names && indices.length <= 16 ? indices.length : 0));
    const maximum = indices.reduce(
      (largest, at) => (Number.isFinite(data[at]) ? Math.max(largest, Math.abs(data[at])) : largest),
      1e-12,
    );
    const hasDerivation = this.view.trace.derivation(n, indices[0]) !== null;
    const cells = indices.slice(0, count).map((at, i) => {
      const value = data[at];
      const on = i === selectedNumber;
      const content = [
        names ? [html("span", { class: "name" }, html("bdi", {}, names[i])), " "] : null,
        html("span", { class: "number" }, formatNumber(value)),
      ];
      const share = Number.isFinite(value) ? Math.round((34 * Math.abs(value)) / maximum) : 0;
      const style = `--share: ${share}%`;
      const sign = value < 0 ? "minus" : "plus";
      if (!hasDerivation) return html("span", { class: "cell", style, "data-sign": sign }, content);
      return html(
        "button",
        {
          type: "button",
          class: "cell",
          style,
          "data-sign": sign,
          "aria-pressed": String(on),
          tabindex: on || (i === 0 && selectedNumber >= count) ? 0 : -1,
          title: names ? null : `channel ${i}`,
          "aria-label": names ? null : `channel ${i}: ${formatNumber(value)}`,
          onclick: () => this.point(n, i, show),
        },
        content,
      );
    });
    const rest = indices.length - count;
    const more =
      rest > 0 || (all && indices.length > INITIAL_CELLS)
        ? html(
            "button",
            {
              type: "button",
              class: "more",
              "aria-expanded": String(all),
              onclick: () => {
                if (all) this.expandedSteps.delete(n);
                else this.expandedSteps.add(n);
                show();
              },
            },
            all ? "show fewer" : `… ${rest} more`,
          )
        : null;
    const width = total > 1 && !names ? html("span", { class: "width" }, ` ${total} channels`) : null;
    return [
      subject ? html("p", { class: "value-subject" }, subject, width) : null,
      html(
        "div",
        {
          class: "value-row",
          role: "group",
          "aria-label": subject ? `Values of ${subject}` : "Values",
          onkeydown: (/** @type {KeyboardEvent} */ event) => this.moveSelection(event, n, count, show),
        },
        cells,
        more,
      ),
    ];
  }

  /**
   * Weights and probabilities as bars. @param {number} n @param {Row} row @param {number} selectedNumber
   * @param {() => void} show
   */
  bars(n, { subject, indices, names }, selectedNumber, show) {
    const { data } = this.view.trace.value(n);
    return [
      subject ? html("p", { class: "value-subject" }, subject) : null,
      html(
        "div",
        {
          class: "bar-list",
          role: "group",
          "aria-label": `Weights of ${subject}`,
          onkeydown: (/** @type {KeyboardEvent} */ event) => this.moveSelection(event, n, indices.length, show),
        },
        indices.map((at, i) =>
          html(
            "button",
            {
              type: "button",
              class: "bar-button",
              "aria-pressed": String(i === selectedNumber),
              tabindex: i === selectedNumber ? 0 : -1,
              title: formatWeight(data[at]),
              onclick: () => this.point(n, i, show),
            },
            html("span", { class: "name" }, html("bdi", {}, names?.[i] ?? String(i))),
            " ",
            html(
              "span",
              { class: "track" },
              html("span", { class: "bar", style: `width: ${(100 * data[at]).toFixed(2)}%` }),
            ),
            html(
              "span",
              { class: "number" },
              data[at] > 0 && data[at] < 0.0005 ? withMinus(data[at].toExponential(0)) : data[at].toFixed(3),
            ),
          ),
        ),
      ),
    ];
  }

  /** @param {number} n @param {number} i @param {() => void} show */
  point(n, i, show) {
    this.selectedNumber.set(n, i);
    const inside = document.activeElement;
    const parent = inside?.closest?.(".values-panel");
    show();
    /** @type {HTMLElement | null | undefined} */ (parent?.querySelector('[aria-pressed="true"]'))?.focus();
  }

  /** @param {KeyboardEvent} event @param {number} n @param {number} count @param {() => void} show */
  moveSelection(event, n, count, show) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const now = Math.min(this.selectedNumber.get(n) ?? displayedRow(this.view, n).first, count - 1);
    this.point(n, (now + moves[event.key] + count) % count, show);
  }
}

/* The step-by-step view: from the input to the output of the model, with the numbers of one token. */

/**
 * @typedef {{title: string, part: string, side?: string, token?: number, layer?: number, attention?: string, heads?:
 * number, keys?: string}} Section
 */

/** Number of steps that are computed before the page responds again. */
const STEPS_PER_SLICE = 8;

export class StepsView {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state, scheduler, announcer, opening }) {
    this.host = host;
    this.attentions = attentions;
    this.state = state;
    this.scheduler = scheduler;
    this.announcer = announcer;
    const isUntouched =
      state.view.selected === opening && !state.view.pin && !state.pointed && state.view.section === null;
    this.traceHeader = host.scene.trace;
    /** @type {Section[]} */
    this.sections = this.traceHeader.sections;
    /** @type {number[][]} the steps of each section */
    this.stepsOf = this.sections.map(() => []);
    // Steps without a section are computed, but not shown.
    this.traceHeader.steps.forEach((/** @type {Step} */ step, /** @type {number} */ n) =>
      this.stepsOf[step.section]?.push(n),
    );
    const { focus, sides } = this.traceHeader;
    /** The selected token of each side. @type {Record<string, number>} */
    this.tokens = Object.fromEntries(Object.keys(sides).map((name) => [name, focus[name] ?? 0]));
    /** Indices of the open sections. @type {Set<number>} */
    this.openSections = new Set();
    this.cards = new StepCards(this);
    /** Whether the head and the token are the initial ones. */
    this.opensByItself = isUntouched;
    /** @type {Trace | null} */
    this.trace = null;
    this.checkedCount = 0;
    this.verdict = html("p", { class: "verdict" });
    this.substitute = html("p", { class: "note", role: "note", hidden: true });
    this.chips = html("div", { class: "sides" });
    this.choice = html("div", { class: "choice" });
    this.list = html("ol", { class: "sections" });
    this.walk = this.sections.some((section) => section.attention) ? new Walk(this) : null;
    this.allSteps = html(
      "details",
      { class: "all-steps", open: !this.walk },
      html("summary", {}, html("h2", {}, "Every step, from the input to the output"), this.verdict),
      this.list,
    );
    this.panel = html("div", { role: "tabpanel", id: uniqueId("depth") }, this.walk?.element ?? null, this.allSteps);
    this.depths = tabList("Depth", DEPTHS, this.panel.id, (depth) => this.setDepth(depth));
    this.element = html(
      "div",
      { class: "steps-view", onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) },
      html(
        "section",
        { class: "selection-bar", "aria-label": "Selected tokens and heads", "data-export": "no" },
        this.chips,
        this.choice,
        this.depths.element,
      ),
      this.substitute,
      this.traceHeader.note ? html("p", { class: "note" }, this.traceHeader.note) : null,
      this.panel,
    );
    this.createSelection();
    this.createSections();
  }

  get figureElement() {
    const open = this.sectionElements.find((one, n) => one && this.openSections.has(n))?.details ?? this.list;
    return this.walk && !this.allSteps.open ? this.walk.stage : open;
  }

  get fileName() {
    return "regard-steps";
  }

  /** The numbers of the open sections as tab-separated values. */
  get tsv() {
    if (!this.trace) return "";
    const lines = [["step", "formula", "of", "numbers"].join("\t")];
    for (const n of this.openSections) {
      for (const step of this.stepsOf[n]) {
        const row = displayedRow(this, step);
        const { data } = this.trace.value(step);
        lines.push(
          [
            this.traceHeader.steps[step].id,
            this.traceHeader.steps[step].formula,
            row.subject,
            ...row.indices.map((at) => data[at]),
          ].join("\t"),
        );
      }
    }
    return lines.join("\n");
  }

  layout() {
    this.walk?.layout();
  }

  /** @param {string} depth */
  setDepth(depth) {
    storeDepth(depth);
    this.state.set({ depth });
  }

  // Selection of tokens and heads

  createSelection() {
    const titles = this.sections.filter((one) => one.attention);
    const named = Object.fromEntries(titles.map((one) => [one.attention, one.title.replace(": one step", "")]));
    this.attention = picker("Attention", named, (attention) => this.goTo(attention));
    this.head = picker("Head", {}, (head) =>
      this.state.set({ selected: { ...this.state.view.selected, head: Number(head) } }),
    );
    this.headLabel = html("label", {}, "Head ", this.head);
    const several = Object.keys(named).length > 1;
    setChildren(this.choice, several ? html("label", {}, "Attention ", this.attention) : null, this.headLabel);
    // Sides that are derived from another one have no selection.
    const selectable = Object.entries(this.traceHeader.sides).filter(([, side]) => !side.of);
    setChildren(
      this.chips,
      selectable.map(([name, side]) => {
        const known = this.host.scene.sides[name];
        const title =
          (known?.title ?? name.charAt(0).toUpperCase() + name.slice(1)) +
          (name === "target" && this.host.scene.sides.predicted ? " (input → prediction)" : "");
        const buttons = side.tokens.map((/** @type {string} */ _token, /** @type {number} */ t) =>
          html(
            "button",
            {
              type: "button",
              role: "radio",
              class: "chip-token",
              "data-side": name,
              "data-token": t,
              onclick: () => this.selectToken(name, t),
            },
            tokenText(truncate(this.tokenName(name, t), 40), known?.direction === "rtl"),
          ),
        );
        const group = html(
          "div",
          {
            class: "token-list",
            role: "radiogroup",
            "aria-label": `${title}: selected token`,
            dir: known?.direction ?? "auto",
            onkeydown: (/** @type {KeyboardEvent} */ event) => this.moveFocus(event, buttons),
          },
          buttons,
        );
        const choice = this.host.scene.image ? placePatchButtons(this.host, name, group, buttons) : group;
        return html(
          "div",
          { class: "token-side", "data-of": name },
          html("p", { class: "side-name", "aria-hidden": "true" }, title),
          choice,
        );
      }),
    );
  }

  /**
   * The name of a token. A row of the decoder is named by its input and by the token that it predicts, which is its
   * name in
   * the cross-attention.
   * @param {string} side @param {number} token
   */
  tokenName(side, token) {
    const name = makeVisible(this.traceHeader.sides[side].tokens[token]);
    const predicted = this.host.scene.sides.predicted?.tokens[token];
    return side === "target" && predicted !== undefined ? `${name} → ${makeVisible(predicted)}` : name;
  }

  /** The selected token of a side: of a derived side, the one that corresponds to the other's. @param {string} side */
  selectedToken(side) {
    const { of: base, rows } = this.traceHeader.sides[side];
    return base ? (rows[this.tokens[base]] ?? 0) : this.tokens[side];
  }

  /**
   * Arrow keys move between the buttons of a group and select them. @param {KeyboardEvent} event
   * @param {HTMLElement[]} buttons
   */
  moveFocus(event, buttons) {
    const now = buttons.indexOf(/** @type {any} */ (event.target));
    const moves = {
      ArrowRight: now + 1,
      ArrowDown: now + 1,
      ArrowLeft: now - 1,
      ArrowUp: now - 1,
      Home: 0,
      End: buttons.length - 1,
    };
    if (now < 0 || !(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const next = buttons[(moves[event.key] + buttons.length) % buttons.length];
    next.focus();
    next.click();
  }

  /** Selects a token of a side. @param {string} side @param {number} token */
  selectToken(side, token) {
    this.tokens[side] = token;
    const { rows, columns } = this.axesOf(this.selected.attention);
    if (rows === columns && rows === side) this.state.set({ pin: [token, token] });
    else if (rows === side || columns === side) this.state.set({ pin: [this.tokens[rows], this.tokens[columns]] });
    this.redraw();
    this.announcer.announce(`Selected ${bidiIsolate(this.tokenName(side, token))}.`);
  }

  /** The sides of an attention. @param {string} name @returns {{rows: string, columns: string}} */
  axesOf(name) {
    const section = this.sections.find((one) => one.attention === name);
    // A learned query is not a token that can be selected.
    const known = (/** @type {string | undefined} */ side) => side !== undefined && side in this.traceHeader.sides;
    const rows = known(section?.side) ? section.side : Object.keys(this.traceHeader.sides)[0];
    return { rows, columns: known(section?.keys) ? section.keys : rows };
  }

  /** The selected attention and head, shared with the other views. */
  get selected() {
    const { selected } = this.state.view;
    const known = this.sections.some((one) => one.attention === selected.attention);
    const attention = known ? selected.attention : this.traceHeader.focus.attention;
    const heads = this.sections.find((one) => one.attention === attention)?.heads ?? 1;
    const head = selected.head === "mean" ? this.traceHeader.focus.head : selected.head;
    return { attention, head: Math.min(head, heads - 1), heads };
  }

  /** Opens the section of an attention. @param {string} attention */
  goTo(attention) {
    this.state.set({ selected: { attention, head: this.selected.head } });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const { attention, head, heads } = this.selected;
    if (event.key === "[" || event.key === "]") {
      const next = (head + (event.key === "]" ? 1 : heads - 1)) % heads;
      this.state.set({ selected: { attention, head: next } });
      this.announcer.announce(`Head ${next + 1}.`);
    } else if (event.key === "{" || event.key === "}") {
      const names = [...new Set(this.sections.filter((one) => one.attention).map((one) => one.attention))];
      const next = names[(names.indexOf(attention) + (event.key === "}" ? 1 : names.length - 1)) % names.length];
      this.goTo(next);
      this.announcer.announce(this.sections.find((one) => one.attention === next).title);
    } else return;
    event.preventDefault();
  }

  // Sections

  createSections() {
    /**
     * @type {{item: HTMLElement, details: HTMLDetailsElement, mark: HTMLElement, body: HTMLElement, drawn: boolean}[]}
     */
    this.sectionElements = this.sections.map((section, n) => {
      const mark = html("span", { class: "section-mark" });
      const body = html("div", { class: "cards" });
      const count = this.stepsOf[n].length;
      const details = html(
        "details",
        { ontoggle: () => this.toggled(n) },
        html(
          "summary",
          {},
          html("h2", {}, section.title),
          html("span", { class: "count" }, count === 1 ? "1 step" : `${count} steps`),
          mark,
          html("p", { class: "idea" }, ideaOf(this, n)),
        ),
        body,
      );
      const item = html("li", { "data-part": section.part }, details);
      return { item, details, mark, body, drawn: false };
    });
    setChildren(
      this.list,
      this.sectionElements.map((one) => one.item),
    );
  }

  /** @param {number} n */
  toggled(n) {
    const { details } = this.sectionElements[n];
    if (details.open) this.openSections.add(n);
    else this.openSections.delete(n);
    if (details.open) this.draw(n);
  }

  /** Whether a section is about the selected tokens. @param {Section} section */
  isRelevant(section) {
    return section.token === undefined || this.tokens[section.side] === section.token;
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    if (!this.trace) {
      const { params, outputs } = this.traceHeader;
      const numbers = await Promise.all(
        [params, outputs].map(async (one) => new Float32Array(one ? await this.host.blob(one.at) : new ArrayBuffer(0))),
      );
      this.trace = new Trace(this.traceHeader, numbers[0], numbers[1], this.host.modelTensor);
      this.scheduler.add("steps", 5, () => this.checkSome());
      if (this.opensByItself) {
        const first = this.sections.find((one) => one.attention)?.attention;
        if (this.attentions.byName.has(first)) await this.attentions.load(first);
        const opening = this.openingSelection();
        if (opening) {
          this.tokens[this.axesOf(opening.attention).rows] = opening.token;
          this.state.set({ selected: { attention: opening.attention, head: opening.head } });
        }
      }
    }
    const { attention } = this.selected;
    const { pointed } = this.state;
    const wasPointed = changed === null && pointed?.attention === attention ? pointed.cell : null;
    const pin = this.state.view.pin ?? wasPointed;
    if (pin && (changed === null || changed.has("pin"))) {
      const { rows, columns } = this.axesOf(attention);
      const fits = (/** @type {string} */ side, /** @type {number | null} */ token) =>
        token !== null && token < this.traceHeader.sides[side].tokens.length;
      if (fits(columns, pin[1]) && columns !== rows) this.tokens[columns] = pin[1];
      if (fits(rows, pin[0])) this.tokens[rows] = pin[0];
    }
    const { section } = this.state.view;
    const opensSection = section !== null && (changed === null || changed.has("section"));
    if (changed === null || changed.has("selected") || changed.has("pin") || changed.has("depth"))
      this.redraw(!opensSection && (changed === null || changed.has("selected")));
    if (opensSection) {
      this.showSection(Math.min(section, this.sections.length - 1));
      this.state.set({ section: null });
    }
    this.showSubstitute();
  }

  /** Says so if the page has no numbers of the attention that the other views show. */
  showSubstitute() {
    const shown = this.state.view.selected.attention;
    const has = shown === null || this.sections.some((one) => one.attention === shown);
    this.substitute.hidden = has;
    if (!has)
      setChildren(
        this.substitute,
        `This page has no numbers of ${shown}, which the attention view shows: below is ${this.selected.attention}.`,
      );
  }

  /**
   * Redraws after a change of the selection.
   * @param {boolean} [opensSection] whether to open the section of the selected attention
   */
  redraw(opensSection = false) {
    const { attention, head, heads } = this.selected;
    const { depth } = this.state.view;
    this.element.dataset.depth = depth;
    setAttributes(this.panel, { "aria-labelledby": this.depths.mark(depth) });
    this.attention.value = attention;
    setChildren(
      this.head,
      Array.from({ length: heads }, (_, i) => html("option", { value: i }, String(i + 1))),
    );
    this.head.value = String(head);
    this.headLabel.hidden = heads === 1;
    for (const button of this.chips.querySelectorAll("button")) {
      const on = this.tokens[button.dataset.side] === Number(button.dataset.token);
      setAttributes(button, { "aria-checked": String(on), tabindex: on ? 0 : -1 });
    }
    this.sections.forEach((section, n) => {
      const { item, details } = this.sectionElements[n];
      const isRelevant = this.isRelevant(section);
      item.hidden = !isRelevant;
      if (opensSection && isRelevant && section.attention === attention) details.open = true;
      if (details.open && isRelevant) {
        this.openSections.add(n);
        this.draw(n);
      }
    });
    this.drawWalk();
    this.showVerdict();
  }

  /** Draws the walk through the selected attention, if the page has its weights. */
  drawWalk() {
    const { attention } = this.selected;
    const n = this.sections.findIndex((one) => this.isRelevant(one) && one.attention === attention);
    const steps = this.stepsOf[n] ?? [];
    const softmax = steps.findLast((step) => this.traceHeader.steps[step].op === "softmax");
    const { rows } = this.axesOf(attention);
    const isOfRows = (/** @type {string} */ name) => !this.walk || softmax === undefined || name === rows;
    for (const side of this.chips.querySelectorAll("[data-of]"))
      setAttributes(side, { hidden: !isOfRows(side.getAttribute("data-of")) });
    if (!this.walk || !this.trace) return;
    this.walk.element.hidden = softmax === undefined;
    if (softmax === undefined) return;
    const start = (/** @type {number} */ step) => {
      const width = this.traceHeader.steps[step].output.shape.at(-1);
      return Math.floor(displayedRow(this, step).indices[0] / width) * width;
    };
    const found = readAttention(this.trace, softmax, start);
    const side = this.traceHeader.steps[softmax].output.axes.at(-1);
    const keys =
      this.traceHeader.sides[side]?.tokens.map(makeVisible) ?? Array.from(found.weights, (_, s) => String(s + 1));
    const isMasked = found.scores.some((score) => score < -1e30);
    const rtl = this.host.scene.sides[side]?.direction === "rtl";
    const next = this.sections[n + 1]?.part === "feedforward" ? this.stepsOf[n + 1] : [];
    this.walk.show(
      found,
      { token: this.tokenName(rows, this.selectedToken(rows)), keys, rtl, isMasked },
      {
        before: steps.filter((step) => step < found.first),
        after: [...steps.filter((step) => step > found.last), ...next],
      },
    );
  }

  /**
   * The head and the token that the view opens with, if nothing was chosen before: in the first attention the longest
   * word, in the head in which it attends most to another word.
   */
  openingSelection() {
    const attention = this.sections.find((one) => one.attention)?.attention;
    const { rows, columns } = this.axesOf(attention);
    if (!attention || this.host.scene.image || rows !== columns || !this.attentions.isLoaded(attention)) return null;
    const names = this.traceHeader.sides[rows].tokens;
    const words = names.map((/** @type {string} */ name) => (isPunctuation(name) ? 0 : name.length));
    const token = words.indexOf(Math.max(...words));
    const { heads } = this.sections.find((one) => one.attention === attention);
    const most = (/** @type {number} */ head) =>
      this.attentions
        .map({ attention, head }, false)
        .exactRow(token)
        .reduce((best, weight, s) => (s === token || !words[s] ? best : Math.max(best, weight)), 0);
    const all = Array.from({ length: heads }, (_, head) => most(head));
    return { attention, head: all.indexOf(Math.max(...all)), token };
  }

  /** Opens a section and scrolls to it, unless its title is visible. @param {number} n */
  showSection(n) {
    const { details, item } = this.sectionElements[n];
    details.open = true;
    this.allSteps.open = true;
    const { top } = item.getBoundingClientRect();
    if (top < 0 || top > 0.7 * window.innerHeight) item.scrollIntoView({ block: "start" });
  }

  /** Draws the steps of a section. @param {number} n */
  draw(n) {
    if (!this.trace) return;
    const { depth } = this.state.view;
    const steps = this.stepsOf[n];
    const cards =
      depth === "formula"
        ? html(
            "div",
            { class: "formulas" },
            steps.map((step) => this.cards.formula(step)),
          )
        : steps.map((step) => this.cards.card(step));
    setChildren(this.sectionElements[n].body, depth === "idea" ? ideaFigure(this, n) : cards);
  }

  // Comparison with recorded values

  checkSome() {
    const { steps } = this.traceHeader;
    for (let i = 0; i < STEPS_PER_SLICE && this.checkedCount < steps.length; i++, this.checkedCount++)
      this.trace.check(this.checkedCount);
    if (this.checkedCount < steps.length) return true;
    if (this.traceHeader.outputs)
      this.sections.forEach((_, n) => {
        const worst = Math.max(0, ...this.stepsOf[n].map((step) => this.trace.check(step)));
        setAttributes(this.sectionElements[n].mark, { "data-agrees": worst <= TOLERANCE ? "yes" : "no" });
        setChildren(
          this.sectionElements[n].mark,
          worst <= TOLERANCE ? "✓" : "≠",
          html("span", { class: "visually-hidden" }, worst <= TOLERANCE ? " agrees" : " does not agree"),
        );
      });
    this.showVerdict();
    return false;
  }

  /** Shows the result of the comparison over all steps. */
  showVerdict() {
    const { steps } = this.traceHeader;
    if (this.checkedCount < steps.length) {
      setChildren(this.verdict, "Recomputing every step …");
      return;
    }
    const worst = Math.max(...steps.map((_, n) => this.trace.check(n)));
    const modelGap = Math.max(...steps.map((/** @type {Step} */ step) => step.differs ?? 0));
    const computed = steps.filter((/** @type {Step} */ step) => step.title && step.op !== "given").length;
    setAttributes(this.verdict, { "data-agrees": worst <= TOLERANCE ? "yes" : "no" });
    if (!this.traceHeader.outputs) {
      setChildren(
        this.verdict,
        html("strong", {}, `All ${computed} steps are computed in this page`),
        " with the weights of the model that it contains",
        steps.some((/** @type {Step} */ step) => step.differs !== null)
          ? `, to within ${formatGap(modelGap)} of the model’s own values.`
          : ".",
      );
      return;
    }
    setChildren(
      this.verdict,
      html(
        "strong",
        {},
        worst <= TOLERANCE ? `✓ All ${computed} steps, recomputed in this page, agree` : "≠ Some steps do not agree",
      ),
      ` with the recorded values to within ${formatGap(worst)}; the recorded values agree with the model's to within ${formatGap(modelGap)}.`,
    );
  }
}
