/** The color scale below a figure. */

import { colorRamp, legendTicks, scaleToUnit } from "../core/colors.js";
import { h, setChildren } from "../core/dom.js";

/**
 * Draws the color scale of weights.
 * @param {HTMLElement} element @param {string} colors @param {string} scale @param {boolean} dark @param {boolean} hasGold whether gold links are marked
 */
export function drawColorScale(element, colors, scale, dark, hasGold) {
  const ramp = colorRamp(colors, dark);
  const canvas = h("canvas", { width: 256, height: 1 });
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  for (let i = 0; i < 256; i++) image.data.set([...ramp.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  context.putImageData(image, 0, 0);
  const ticks = legendTicks(scale).map((weight) => {
    const tick = h("span", { class: "tick" }, String(weight));
    tick.style.left = `${100 * scaleToUnit(scale, weight)}%`;
    return tick;
  });
  setChildren(
    element,
    h("span", { class: "name" }, "Weight"),
    h("div", { class: "scale" }, canvas, h("div", { class: "ticks" }, ticks)),
    hasGold ? h("span", { class: "gold-key" }, h("i", { "aria-hidden": "true" }), "gold link") : null,
  );
}
