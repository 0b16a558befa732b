/** Details next to an image: the largest weights, the predictions, the colors of labels. */

import { entropyOf, greatestOf } from "../weights/maths.js";
import { shareOf } from "../core/colors.js";
import { change, h } from "../core/dom.js";
import { paintLegend } from "./image_figure.js";
import { exactly, visible } from "../core/tokens.js";

/**
 * An overlay: one number per patch, the numbers of tokens that are not patches, and what they describe.
 * @typedef {{patches: Float64Array, others: {name: string, weight: number}[], subject: string, verb: string, rounded: boolean}} Laid
 */

/** Number of listed patches. */
const NAMED_PATCHES = 6;

/** The label of a patch. @param {number} patch @param {number} columns */
export function patchCalled(patch, columns) {
  return `patch ${Math.floor(patch / columns)},${patch % columns}`;
}

/** Formats a fraction as a percentage. @param {number} share */
export function inPercent(share) {
  const percent = 100 * share;
  if (percent === 0 || percent >= 99.95) return `${percent.toFixed(0)}%`;
  if (percent < 0.01) return "< 0.01%";
  return `${percent < 1 ? Number(percent.toPrecision(2)) : percent.toFixed(1)}%`;
}

/** The largest numbers of an overlay, of patches and other tokens. @param {Laid} laid @param {number} columns */
export function greatestLaid(laid, columns) {
  const numbers = [...laid.others.map(({ weight }) => weight), ...laid.patches];
  return greatestOf(Float64Array.from(numbers), NAMED_PATCHES)
    .filter((i) => numbers[i] >= 0.00005)
    .map((i) => {
      const patch = i - laid.others.length;
      return { patch: patch < 0 ? null : patch, name: patch < 0 ? laid.others[i].name : patchCalled(patch, columns), weight: numbers[i] };
    });
}

/** The numbers of an overlay. @param {Laid | null} laid @param {number | null} cursor @param {boolean} pinned @param {number} columns */
export function readingOf(laid, cursor, pinned, columns) {
  if (!laid) return [h("p", { class: "hint" }, "Point at a patch to see its weight; arrow keys work too.")];
  const best = greatestLaid(laid, columns);
  const top = best[0]?.weight ?? 1;
  const all = laid.patches.reduce((sum, weight) => sum + weight, 0) + laid.others.reduce((sum, { weight }) => sum + weight, 0);
  const rest = all - best.reduce((sum, { weight }) => sum + weight, 0);
  const others = laid.patches.length + laid.others.length - best.length;
  const bits = entropyOf(Float64Array.from([...laid.others.map(({ weight }) => weight), ...laid.patches]));
  return h(
    "div",
    { class: "one" },
    h(
      "h2",
      {},
      h("bdi", { class: "subject" }, laid.subject),
      h("span", { class: "verb" }, ` ${laid.verb}`),
      pinned ? h("span", { class: "pinned" }, "pinned") : null,
    ),
    cursor === null
      ? null
      : h("p", { class: "exact" }, patchCalled(cursor, columns), " ", h("output", { "aria-live": "off" }, exactly(laid.patches[cursor], laid.rounded))),
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
          h("span", { class: "weight" }, weight.toFixed(laid.rounded ? 3 : 4)),
        );
      }),
    ),
    h(
      "p",
      { class: "rest" },
      all > 0
        ? `${others > 0 ? `Other ${others}: ${Math.max(0, rest).toFixed(4)} in total. ` : ""}Entropy ${bits.toFixed(2)} bits, as for a uniform distribution over ${(2 ** bits).toFixed(1)} tokens.`
        : "All weights are 0.",
    ),
    laid.rounded ? h("p", { class: "rest" }, "To keep this page small, q and k are quantized to 16 bits: weights are accurate to about three digits.") : null,
  );
}

/** A list of labels, one of which can be selected. */
export class LabelList {
  /**
   * @param {string} called @param {string} about @param {{number: number, name: string, share: number, colour?: number[]}[]} labels
   * @param {string} kind the class of the section @param {(number: number | null) => void} chosen
   */
  constructor(called, about, labels, kind, chosen) {
    this.buttons = labels.map(({ number, name, share, colour }) => {
      const sign = h("span", { class: colour ? "swatch" : "track", "aria-hidden": "true" });
      if (colour) sign.style.background = `rgb(${colour.join(", ")})`;
      else {
        const bar = h("span", { class: "bar" });
        bar.style.width = `${100 * share}%`;
        sign.append(bar);
      }
      const words = h("span", { class: "name" }, h("bdi", {}, visible(name)));
      return h(
        "button",
        {
          type: "button",
          "data-label": number,
          "aria-pressed": "false",
          title: visible(name),
          onclick: (/** @type {Event} */ event) =>
            chosen(/** @type {HTMLElement} */ (event.currentTarget).getAttribute("aria-pressed") === "true" ? null : number),
        },
        colour ? [sign, words] : [words, sign],
        h("span", { class: "share" }, inPercent(share)),
      );
    });
    this.list = h("ul", { class: "label-list" }, this.buttons.map((button) => h("li", {}, button)));
    this.element = h("section", { class: kind, "aria-label": called }, h("h2", {}, called), this.list, h("p", { class: "about" }, about));
  }

  /** @param {number | null} number */
  mark(number) {
    for (const button of this.buttons) change(button, { "aria-pressed": String(Number(button.dataset.label) === number) });
  }
}

/** The fraction of pixels of each label, in descending order. @param {Uint8Array | Uint16Array} numbers @param {number} count */
export function sharesOfLabels(numbers, count) {
  const shares = new Float64Array(count);
  for (const number of numbers) shares[number] += 1 / numbers.length;
  return Array.from(shares, (share, number) => ({ number, share })).sort((a, b) => b.share - a.share);
}

/** The color scale. @param {Laid} laid @param {string} colours @param {string} scale */
export function legendOf(laid, colours, scale) {
  const most = laid.patches.reduce((greatest, weight) => Math.max(greatest, weight), 0);
  const sum = laid.patches.reduce((total, weight) => total + weight, 0);
  const canvas = h("canvas", {});
  paintLegend(canvas, colours);
  const ticks = (scale === "log" ? [0.001, 0.01, 0.1, 1] : [0, 0.5, 1]).map((share) => {
    const tick = h("span", { class: "tick" }, inPercent(share * most));
    tick.style.left = `${100 * shareOf(scale, share)}%`;
    return tick;
  });
  return [
    h("span", { class: "name" }, laid.verb === "attends to" ? "Weight" : "Fraction"),
    h("div", { class: "scale" }, canvas, h("div", { class: "ticks" }, ticks)),
    h("span", { class: "together" }, `all patches ${inPercent(sum)}`),
  ];
}
