/** The idea of a stage of the model: one plain sentence, and a small figure from the numbers of the selected token. */

import { displayedRow } from "./displayed_row.js";
import { h, s, tokenText } from "../core/dom.js";
import { formatProbability, truncate } from "../core/tokens.js";

/** @typedef {import("./steps_view.js").StepsView} StepsView */
/** @typedef {import("./steps_view.js").Section} Section */

/** Number of bars, of tokens, and of cells of a vector in a figure. */
const MAX_FIGURE_BARS = 4;
const MAX_FIGURE_TOKENS = 24;
const MAX_FIGURE_CELLS = 24;

const ATTENTION_IDEAS = {
  self: "Every token collects information from the tokens that matter to it, weighted by attention.",
  masked: "Every token collects information from itself and the tokens before it; later tokens are masked.",
  cross: "The decoder collects from the source what it needs to predict the next token.",
};
const PART_IDEAS = {
  embedding: "Every token becomes a vector: its row in a table of learned vectors, with its position mixed in.",
  feedforward: "Every token is processed on its own by a small network, the same one for all tokens.",
  norm: "The numbers of every token are rescaled, so that the next stage receives them at a steady size.",
  recurrent: "The state is updated with one more token, so that it sums up everything read so far.",
  layer: "The numbers of every token pass through this part of the model.",
};

/** The sentence of a stage. @param {StepsView} view @param {number} n index of the section @returns {string} */
export function ideaOf(view, n) {
  const section = view.sections[n];
  if (section.part === "attention") {
    const kind = view.host.scene.attentions.find((/** @type {any} */ one) => one.name === section.attention)?.kind ?? (section.keys && section.keys !== section.side ? "cross" : "self");
    return view.host.scene.image ? "Every patch collects information from the patches that matter to it, weighted by attention." : ATTENTION_IDEAS[kind];
  }
  if (section.part === "output") {
    const axes = view.stepsOf[n].map((step) => view.traceHeader.steps[step].output.axes.at(-1));
    return axes.includes("vocabulary")
      ? "The final vector is compared with every entry of the vocabulary; softmax turns the scores into probabilities."
      : "The final vector is turned into the result: one score per label, or the embedding itself.";
  }
  return PART_IDEAS[section.part] ?? PART_IDEAS.layer;
}

/** The figure of a stage: weights as lines, probabilities as bars, or the vector of the selected token. @param {StepsView} view @param {number} n */
export function ideaFigure(view, n) {
  const steps = view.stepsOf[n];
  const softmax = steps.findLast((step) => view.traceHeader.steps[step].op === "softmax");
  if (softmax === undefined) return steps.length ? vectorFigure(view, /** @type {number} */ (steps.at(-1))) : null;
  const row = displayedRow(view, softmax);
  const { data } = view.trace.value(softmax);
  const weights = row.indices.map((at) => data[at]);
  const overlay = view.cards.overlay(softmax);
  if (overlay) return overlay;
  const isOutput = view.traceHeader.steps[softmax].output.axes.at(-1) === "vocabulary";
  return isOutput || !row.names ? barFigure(row, weights) : weightFigure(view, softmax, row, weights);
}

/** @param {import("./displayed_row.js").Row} row @param {number[]} weights */
function barFigure({ subject, names }, weights) {
  return h(
    "div",
    { class: "idea-figure" },
    subject ? h("p", { class: "value-subject" }, subject) : null,
    h(
      "ol",
      { class: "ranks" },
      weights.slice(0, MAX_FIGURE_BARS).map((weight, i) =>
        h("li", {}, h("span", { class: "name" }, h("bdi", {}, names?.[i] ?? String(i))), h("span", { class: "track" }, h("span", { class: "bar", style: `width: ${(100 * weight).toFixed(2)}%` })), h("span", { class: "weight" }, formatProbability(weight))),
      ),
    ),
  );
}

/**
 * The selected token, and lines to the tokens that it attends to.
 * @param {StepsView} view @param {number} step @param {import("./displayed_row.js").Row} row @param {number[]} weights
 */
function weightFigure(view, step, { subject, names }, weights) {
  const side = view.traceHeader.steps[step].output.axes.at(-1);
  const rtl = view.host.scene.sides[side]?.direction === "rtl";
  const shown = names.slice(0, MAX_FIGURE_TOKENS).map((name) => truncate(name, 12));
  const widths = shown.map((name) => 9 * Math.max(2, name.length) + 16);
  const width = widths.reduce((sum, one) => sum + one, 0);
  const centers = widths.map((one, i) => widths.slice(0, i).reduce((sum, before) => sum + before, 0) + one / 2).map((x) => (rtl ? width - x : x));
  const strongest = weights.indexOf(Math.max(...weights));
  const svg = s(
    "svg",
    { class: "idea-lines", viewBox: `0 0 ${width} 112`, width, height: 112, role: "img", "aria-label": `${subject} attends most to ${names[strongest]}.` },
    shown.map((_, i) => s("path", { d: `M${width / 2} 84C${width / 2} 54 ${centers[i]} 58 ${centers[i]} 28`, "stroke-width": (0.5 + 9 * weights[i]).toFixed(2), "stroke-opacity": (0.15 + 0.75 * weights[i]).toFixed(2) })),
    shown.map((name, i) => s("text", { x: centers[i], y: 18, "text-anchor": "middle", direction: rtl ? "rtl" : null, class: i === strongest ? "on" : null }, name)),
    s("text", { x: width / 2, y: 104, "text-anchor": "middle", class: "on" }, subject.split(", ")[0]),
  );
  return h("div", { class: "idea-figure" }, svg);
}

/** The vector of the selected token, as a row of colored cells. @param {StepsView} view @param {number} step */
function vectorFigure(view, step) {
  const { subject, indices } = displayedRow(view, step);
  const { data } = view.trace.value(step);
  const values = indices.slice(0, MAX_FIGURE_CELLS).map((at) => data[at]);
  const maximum = Math.max(1e-12, ...values.filter(Number.isFinite).map(Math.abs));
  return h(
    "div",
    { class: "idea-figure vector" },
    subject ? h("span", { class: "value-subject" }, tokenText(subject, false)) : null,
    h(
      "span",
      { class: "vector-cells", role: "img", "aria-label": `${indices.length} numbers` },
      values.map((value) => h("i", { "data-sign": value < 0 ? "minus" : "plus", style: `--share: ${Number.isFinite(value) ? Math.round((90 * Math.abs(value)) / maximum) : 0}%` })),
    ),
    h("span", { class: "secondary" }, `${indices.length} numbers`),
  );
}
