/** Colors and formats of signed numbers: changes of log-probabilities. */

import { createDivergingColormap } from "../core/colors.js";
import { h } from "../core/dom.js";
import { withMinus } from "../core/tokens.js";

/** The part of the color range that is used: the ends of both hues look alike. */
const USED_RANGE = 0.75;

/** The diverging color map of fractions from −1 to 1. @param {boolean} dark */
export function signedColormap(dark) {
  const whole = createDivergingColormap("linear", dark);
  return {
    /** @param {number} fraction */
    css: (fraction) => whole.css(USED_RANGE * fraction),
    /** @param {number} fraction */
    needsLightText: (fraction) => whole.needsLightText(USED_RANGE * fraction),
  };
}

/** Formats a change of a log-probability with its sign. @param {number} x */
export function formatChange(x) {
  if (Math.abs(x) < 5e-4) return Math.abs(x) < 5e-7 ? "0" : `${x < 0 ? "−" : "+"}${withMinus(Math.abs(x).toExponential(0))}`;
  return `${x < 0 ? "−" : "+"}${Math.abs(x) >= 10 ? Math.abs(x).toFixed(0) : Math.abs(x).toPrecision(2)}`;
}

/** A legend of a diverging color scale from −maximum to maximum. @param {any} colormap @param {number} maximum @param {string} low @param {string} high */
export function divergingLegend(colormap, maximum, low, high) {
  const stops = Array.from({ length: 21 }, (_, i) => colormap.css((i - 10) / 10));
  const bar = h("span", { class: "diverging", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  return h("p", { class: "diverging-legend" }, h("span", {}, `${formatChange(-maximum)} ${low}`), bar, h("span", {}, `${formatChange(maximum)} ${high}`));
}
