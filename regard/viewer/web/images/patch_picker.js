/** Selection of a token of an image: patches lie over the image, other tokens next to it. */

import { paintImage, paintPatches } from "./image_figure.js";
import { h, setAttributes } from "../core/dom.js";
import IMAGES_STYLE from "./images.css";

/** A small image with the right aspect ratio. @param {any} scene @param {...any} children */
function smallImage(scene, ...children) {
  const { pixels, grid } = scene.image;
  const [height, width] = pixels.shape;
  const element = h("div", { class: "small-image" }, children);
  for (const [name, value] of Object.entries({ aspect: width / height, rows: grid[0], columns: grid[1] })) element.style.setProperty(`--${name}`, String(value));
  element.toggleAttribute("data-coarse", Math.max(height, width) < 160);
  return element;
}

/** A canvas with the image in color or gray, painted when its pixels are loaded. @param {import("../core/host.js").Host} host @param {boolean} gray */
function imageCanvas(host, gray) {
  const { pixels, grid } = host.scene.image;
  const [height, width, channels] = pixels.shape;
  const canvas = h("canvas", { "aria-hidden": "true" });
  host.blob(pixels.at).then((buffer) => paintImage(canvas, { pixels: new Uint8Array(buffer), height, width, channels, rows: grid[0], columns: grid[1] }, gray));
  return canvas;
}

/** The image in color. @param {import("../core/host.js").Host} host */
export function imageThumbnail(host) {
  return smallImage(host.scene, imageCanvas(host, false));
}

/** Weights over patches as an overlay of the image. @param {import("../core/host.js").Host} host @param {string} side of the weights @param {Float64Array} weights */
export function patchOverlay(host, side, weights) {
  const [rows, columns] = host.scene.image.grid;
  const start = host.scene.image.first[side];
  const overlay = h("canvas", { class: "overlay", "aria-hidden": "true" });
  paintPatches(overlay, rows, columns, weights.subarray(start, start + rows * columns), "iris", "linear", 0.65);
  return smallImage(host.scene, imageCanvas(host, true), overlay);
}

/**
 * Moves the buttons of patches onto a small image. Those of other tokens stay in their row.
 * @param {import("../core/host.js").Host} host @param {string} side of the tokens @param {HTMLElement} group of all buttons, which handles
 * left and right @param {HTMLElement[]} buttons
 */
export function placePatchButtons(host, side, group, buttons) {
  const { grid, first } = host.scene.image;
  const columns = grid[1];
  const start = first[side] ?? 0;
  const patches = h("div", { class: "patch-buttons" }, buttons.slice(start));
  const image = smallImage(host.scene, imageCanvas(host, false), patches);
  for (const button of buttons.slice(start)) {
    // The label becomes a tooltip.
    const name = button.textContent;
    button.replaceChildren();
    setAttributes(button, { "aria-label": name, title: name });
  }
  patches.addEventListener("keydown", (event) => {
    const now = buttons.indexOf(/** @type {any} */ (event.target));
    const by = { ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (by === undefined || now < start) return;
    event.preventDefault();
    event.stopPropagation();
    const next = buttons[now + by];
    if (!next || now + by < start) return;
    next.focus();
    next.click();
  });
  group.classList.add("with-image");
  group.replaceChildren(...buttons.slice(0, start), image);
  return h("div", {}, h("style", {}, IMAGES_STYLE), group);
}
