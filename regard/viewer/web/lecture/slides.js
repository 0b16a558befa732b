/** The slides of lecture mode: the input, the output, a head, one token of it, and the arithmetic of that token's row. */

import { Lines } from "../attention/lines.js";
import { describeHead } from "../attention/panel.js";
import { headLabel } from "../attention/overview.js";
import { clearestPairs } from "../output/summary.js";
import { leastCertain, temperedProbabilities } from "../output/output_section.js";
import { imageThumbnail, patchOverlay } from "../images/patch_picker.js";
import { argmax, computeScores, mayAttend, topK } from "../weights/maths.js";
import { h, tokenText } from "../core/dom.js";
import { formatProbability, formatShort, isMaskToken, makeVisible, truncate, withMinus } from "../core/tokens.js";

/** @typedef {import("../core/shell.js").Context} Context */
/** @typedef {{title: string, make: () => {element: HTMLElement, layout?: () => void}}} Slide `layout`: called when the slide is visible */

const MAX_SLIDE_BARS = 5;
/** Number of rows of the table of scores. */
const MAX_SLIDE_ROWS = 7;

/** @param {...any} children */
const paragraph = (...children) => h("p", { class: "slide-text" }, children);

/** @param {{name: string, share: number}[]} entries */
function slideBars(entries) {
  return h(
    "ol",
    { class: "ranks slide-bars" },
    entries.map(({ name, share }) =>
      h("li", {}, h("span", { class: "name" }, h("bdi", {}, truncate(makeVisible(name), 24))), h("span", { class: "track" }, h("span", { class: "bar", style: `width: ${(100 * share).toFixed(2)}%` })), h("span", { class: "weight" }, formatProbability(share))),
    ),
  );
}

/** The slide of the output with its probabilities; null without output. @param {any} scene @returns {Slide | null} */
function outputSlide({ output, texts, image, similarity }) {
  if (image) {
    const labels = image.labels.filter((/** @type {any} */ one) => one.probability !== undefined);
    return labels.length ? { title: "The output", make: () => ({ element: slideBars(labels.map((/** @type {any} */ one) => ({ name: one.name, share: one.probability })).slice(0, MAX_SLIDE_BARS)) }) } : null;
  }
  if (typeof similarity === "number") return { title: "The output", make: () => ({ element: h("div", {}, paragraph("Cosine similarity"), h("p", { class: "slide-number" }, withMinus(similarity.toFixed(2)))) }) };
  if (!output) return null;
  if (output.next_token) {
    const shares = temperedProbabilities(output.next_token, 1);
    return { title: "The most likely next tokens", make: () => ({ element: slideBars(output.next_token.tokens.map((/** @type {string} */ name, /** @type {number} */ i) => ({ name, share: shares[i] })).slice(0, MAX_SLIDE_BARS)) }) };
  }
  if (!output.steps.length) return null;
  const masked = output.steps.findIndex((/** @type {any} */ { token }) => isMaskToken(token));
  const step = output.steps[masked >= 0 ? masked : leastCertain(output.steps)];
  const answer = output.kind === "translation" ? texts.target || output.text : output.kind === "answer" ? output.text : "";
  const probability = output.kind === "translation" && typeof output.logprob === "number" ? h("p", { class: "slide-note" }, `Probability of all tokens together: ${formatProbability(Math.exp(output.logprob))}`) : null;
  const caption = output.kind === "translation" ? h("p", { class: "slide-note" }, "The least certain token: ", h("q", {}, makeVisible(step.token))) : null;
  return {
    title: "The output",
    make: () => ({ element: h("div", {}, answer ? paragraph(answer) : null, probability, caption, slideBars(step.likeliest.slice(0, MAX_SLIDE_BARS).map((/** @type {[string, number]} */ [name, share]) => ({ name, share })))) }),
  };
}

/**
 * The slides of a scene. The attention of the head must be loaded.
 * @param {Context} context @param {import("../core/state.js").HeadRef} ref @returns {Slide[]}
 */
export function makeSlides({ host, looks, state }, ref) {
  const { scene } = host;
  const attentions = ref.attention === null ? null : looks.attentionsOf(ref);
  const texts = attentions?.scene.texts ?? scene.texts;
  const input = { title: scene.image ? "The image" : "The input", make: () => ({ element: scene.image ? imageThumbnail(host) : paragraph(texts.source) }) };
  const slides = [input, outputSlide(scene)].filter((slide) => slide !== null);
  if (!attentions) return slides;
  const selected = ref.head === "mean" ? { ...ref, head: 0 } : ref;
  const map = attentions.map(selected, false);
  const { rows, columns } = attentions.axesOf(selected.attention, false);
  const name = headLabel(attentions.scene.attentions, selected);
  if (scene.image) {
    const row = scene.image.single_query[selected.attention] ?? 0;
    const { columns: side } = attentions.byName.get(selected.attention);
    return [...slides, { title: name, make: () => ({ element: patchOverlay(host, side, Float64Array.from(map.exactRow(row))) }) }];
  }
  const { pin } = state.view;
  const pairs = clearestPairs(map, rows, columns, map.rows).sort((a, b) => b.weight - a.weight);
  // A row with several weights shows more than one with a single weight of 1.
  const example = pairs.find(({ weight }) => weight < 0.95) ?? pairs[0];
  const row = pin && pin[0] < map.rows ? pin[0] : (example?.row ?? map.rows - 1);
  const weights = Float64Array.from(map.exactRow(row));
  const best = argmax(weights);
  /** @param {number | null} marked */
  const lines = (marked) => () => {
    const figure = new Lines({ point: () => {}, pin: () => {}, zoom: () => {} }, true);
    return {
      element: h("div", {}, marked === null ? h("p", { class: "slide-note" }, describeHead(attentions.labelOf(selected))) : h("p", { class: "slide-note" }, "Weight of ", quote(columns, best), `: ${formatShort(weights[best])}`), figure.element),
      layout: () => {
        figure.pin = marked === null ? null : { row: marked, column: null };
        figure.show({ map, rows, columns, zoom: null, colormap: null, name, gold: null, isMasked: null });
      },
    };
  };
  return [
    ...slides,
    { title: name, make: lines(null) },
    { title: `What “${truncate(rows.labels[row], 20)}” attends to`, make: lines(row) },
    { title: "The arithmetic of these weights", make: () => ({ element: scoreTable(attentions.byName.get(selected.attention), /** @type {any} */ (map).head, row, rows, columns, weights) }) },
  ];
}

/** @param {import("../core/tokens.js").Axis} axis @param {number} i */
const quote = (axis, i) => h("q", {}, tokenText(truncate(axis.labels[i], 20), axis.rtl));

/**
 * Scores, their exponentials and the weights of one row.
 * @param {any} attention @param {import("../weights/maths.js").Head} head @param {number} row
 * @param {import("../core/tokens.js").Axis} rows @param {import("../core/tokens.js").Axis} columns @param {Float64Array} weights
 */
function scoreTable(attention, head, row, rows, columns, weights) {
  const scores = new Float64Array(columns.length);
  computeScores(head, row, 0, columns.length, scores);
  const [T, S] = [attention.q.shape[0], attention.k.shape[0]];
  const open = Array.from(scores.keys()).filter((c) => !attention.mask || mayAttend(attention.mask, row + S - T, c));
  const largest = Math.max(...open.map((c) => scores[c]));
  const exponentials = new Map(open.map((c) => [c, Math.exp(scores[c] - largest)]));
  const sum = [...exponentials.values()].reduce((total, one) => total + one, 0);
  const shown = new Set(topK(weights, MAX_SLIDE_ROWS));
  const number = (/** @type {number} */ value, digits = 2) => withMinus(value.toFixed(digits));
  const listed = open.filter((c) => shown.has(c));
  return h(
    "div",
    {},
    h("p", { class: "slide-note" }, "Query ", quote(rows, row), " against every key: ", h("i", {}, "score → exp(score − largest) → divided by the sum = weight")),
    h(
      "table",
      { class: "score-table" },
      h("thead", {}, h("tr", {}, ["Key", "Score", "Exp", "Weight"].map((text) => h("th", { scope: "col" }, text)))),
      h(
        "tbody",
        {},
        listed.map((c) => h("tr", { class: c === argmax(weights) ? "on" : "" }, h("th", { scope: "row" }, tokenText(truncate(columns.labels[c], 20), columns.rtl)), h("td", {}, number(scores[c])), h("td", {}, number(exponentials.get(c), 3)), h("td", {}, number(exponentials.get(c) / sum, 3)))),
        listed.length < open.length ? h("tr", {}, h("th", { scope: "row" }, `${open.length - listed.length} others`), h("td", {}), h("td", {}, number(open.filter((c) => !shown.has(c)).reduce((total, c) => total + exponentials.get(c), 0), 3)), h("td", {}, number(open.filter((c) => !shown.has(c)).reduce((total, c) => total + exponentials.get(c), 0) / sum, 3))) : null,
        h("tr", { class: "sum" }, h("th", { scope: "row" }, "Sum"), h("td", {}), h("td", {}, number(sum, 3)), h("td", {}, "1.000")),
      ),
    ),
  );
}
