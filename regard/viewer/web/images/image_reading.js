/** Details next to an image: the largest weights, the predictions, the colors of labels. */

import { rowEntropy, topK } from "../weights/maths.js";
import { scaleToUnit } from "../core/colors.js";
import { h, setAttributes } from "../core/dom.js";
import { paintLegend } from "./image_figure.js";
import { formatWeight, makeVisible } from "../core/tokens.js";

/**
 * An overlay: one number per patch, the numbers of tokens that are not patches, and what they describe.
 * @typedef {{patches: Float64Array, others: {name: string, weight: number}[], subject: string, verb: string, rounded: boolean}} Overlay
 */

/** Number of listed patches. */
const MAX_LISTED_PATCHES = 6;

/** The label of a patch. @param {number} patch @param {number} columns */
export function patchLabel(patch, columns) {
  return `patch ${Math.floor(patch / columns)},${patch % columns}`;
}

/** Formats a fraction as a percentage. @param {number} share */
export function formatPercent(share) {
  const percent = 100 * share;
  if (percent === 0 || percent >= 99.95) return `${percent.toFixed(0)}%`;
  if (percent < 0.01) return "< 0.01%";
  return `${percent < 1 ? Number(percent.toPrecision(2)) : percent.toFixed(1)}%`;
}

/** The largest numbers of an overlay, of patches and other tokens. @param {Overlay} overlay @param {number} columns */
export function largestWeights(overlay, columns) {
  const numbers = [...overlay.others.map(({ weight }) => weight), ...overlay.patches];
  return topK(Float64Array.from(numbers), MAX_LISTED_PATCHES)
    .filter((i) => numbers[i] >= 0.00005)
    .map((i) => {
      const patch = i - overlay.others.length;
      return { patch: patch < 0 ? null : patch, name: patch < 0 ? overlay.others[i].name : patchLabel(patch, columns), weight: numbers[i] };
    });
}

/** The numbers of an overlay. @param {Overlay | null} overlay @param {number | null} cursor @param {boolean} pinned @param {number} columns */
export function overlayDetails(overlay, cursor, pinned, columns) {
  if (!overlay) return [h("p", { class: "hint" }, "Point at a patch to see its weight; arrow keys work too.")];
  const best = largestWeights(overlay, columns);
  const top = best[0]?.weight ?? 1;
  const all = overlay.patches.reduce((sum, weight) => sum + weight, 0) + overlay.others.reduce((sum, { weight }) => sum + weight, 0);
  const rest = all - best.reduce((sum, { weight }) => sum + weight, 0);
  const others = overlay.patches.length + overlay.others.length - best.length;
  const bits = rowEntropy(Float64Array.from([...overlay.others.map(({ weight }) => weight), ...overlay.patches]));
  return h(
    "div",
    { class: "one" },
    h(
      "h2",
      {},
      h("bdi", { class: "subject" }, overlay.subject),
      h("span", { class: "verb" }, ` ${overlay.verb}`),
      pinned ? h("span", { class: "pinned" }, "pinned") : null,
    ),
    cursor === null
      ? null
      : h("p", { class: "exact" }, patchLabel(cursor, columns), " ", h("output", { "aria-live": "off" }, formatWeight(overlay.patches[cursor], overlay.rounded))),
    h(
      "ol",
      { class: "ranks" },
      best.map(({ patch, name, weight }) => {
        const bar = h("span", { class: "bar" });
        bar.style.width = `${(100 * weight) / top}%`;
        return h(
          "li",
          { class: patch !== null && patch === cursor ? "on" : "" },
          h("span", { class: "name" }, h("bdi", {}, name)),
          h("span", { class: "track" }, bar),
          h("span", { class: "weight" }, weight.toFixed(overlay.rounded ? 3 : 4)),
        );
      }),
    ),
    h(
      "p",
      { class: "secondary" },
      all > 0
        ? `${others > 0 ? `${others} others: ${Math.max(0, rest).toFixed(4)} in total. ` : ""}Entropy ${bits.toFixed(2)} bits, as for a uniform distribution over ${(2 ** bits).toFixed(1)} tokens.`
        : "All weights are 0.",
    ),
    overlay.rounded ? h("p", { class: "secondary" }, "To keep this page small, q and k are quantized to 16 bits: weights are accurate to about three digits.") : null,
  );
}

/** A list of labels, one of which can be selected. */
export class LabelList {
  /**
   * @param {string} title @param {string} about @param {{number: number, name: string, share: number, color?: number[]}[]} labels
   * @param {string} kind the class of the section @param {(number: number | null) => void} onSelect
   */
  constructor(title, about, labels, kind, onSelect) {
    this.buttons = labels.map(({ number, name, share, color }) => {
      const marker = h("span", { class: color ? "swatch" : "track", "aria-hidden": "true" });
      if (color) marker.style.background = `rgb(${color.join(", ")})`;
      else {
        const bar = h("span", { class: "bar" });
        bar.style.width = `${100 * share}%`;
        marker.append(bar);
      }
      const words = h("span", { class: "name" }, h("bdi", {}, makeVisible(name)));
      return h(
        "button",
        {
          type: "button",
          "data-label": number,
          "aria-pressed": "false",
          title: makeVisible(name),
          onclick: (/** @type {Event} */ event) =>
            onSelect(/** @type {HTMLElement} */ (event.currentTarget).getAttribute("aria-pressed") === "true" ? null : number),
        },
        color ? [marker, words] : [words, marker],
        h("span", { class: "share" }, formatPercent(share)),
      );
    });
    this.list = h("ul", { class: "label-list" }, this.buttons.map((button) => h("li", {}, button)));
    this.element = h("section", { class: kind, "aria-label": title }, h("h2", {}, title), this.list, h("p", { class: "about" }, about));
  }

  /** @param {number | null} number */
  mark(number) {
    for (const button of this.buttons) setAttributes(button, { "aria-pressed": String(Number(button.dataset.label) === number) });
  }
}

/** The fraction of pixels of each label, in descending order. @param {Uint8Array | Uint16Array} numbers @param {number} count */
export function labelFractions(numbers, count) {
  const shares = new Float64Array(count);
  for (const number of numbers) shares[number] += 1 / numbers.length;
  return Array.from(shares, (share, number) => ({ number, share })).sort((a, b) => b.share - a.share);
}

/** The color scale. @param {Overlay} overlay @param {string} colors @param {string} scale */
export function overlayLegend(overlay, colors, scale) {
  const maximum = overlay.patches.reduce((largest, weight) => Math.max(largest, weight), 0);
  const sum = overlay.patches.reduce((total, weight) => total + weight, 0);
  const canvas = h("canvas", {});
  paintLegend(canvas, colors);
  const ticks = (scale === "log" ? [0.001, 0.01, 0.1, 1] : [0, 0.5, 1]).map((share) => {
    const tick = h("span", { class: "tick" }, formatPercent(share * maximum));
    tick.style.left = `${100 * scaleToUnit(scale, share)}%`;
    return tick;
  });
  return [
    h("span", { class: "name" }, overlay.verb === "attends to" ? "Weight" : "Fraction"),
    h("div", { class: "scale" }, canvas, h("div", { class: "ticks" }, ticks)),
    h("span", { class: "together" }, `all patches ${formatPercent(sum)}`),
  ];
}
