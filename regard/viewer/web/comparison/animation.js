/** The compared looks as an animation: the figure of each one is a frame of a GIF file. */

import { encodeGif } from "../core/gif_encoder.js";
import { rasterize, renderSvg } from "../core/export.js";

/** Durations of the frames and of the last one, in milliseconds. */
const ANIMATION_FRAME = 700;
const LAST_FRAME = 2500;

/**
 * Records the head on display in all looks.
 * @param {import("./comparison.js").LookSet} looks @param {import("../core/state.js").State} state
 * @param {() => import("../core/shell.js").ViewComponent} current the view on display @param {string} caption @returns {Promise<Blob>}
 */
export async function recordAnimation(looks, state, current, caption) {
  const before = state.view;
  /** @type {HTMLCanvasElement[]} */
  const canvases = [];
  state.set({ view: "attention", other: null, added: [] });
  for (let look = 0; look < looks.length; look++) {
    state.set({ selected: looks.correspondingHead(before.selected, look) });
    await current().update(null);
    canvases.push(await rasterize(renderSvg(current().figureElement, caption), 1));
  }
  state.set(before);
  const [width, height] = [Math.max(...canvases.map((one) => one.width)), Math.max(...canvases.map((one) => one.height))];
  const frames = canvases.map((canvas, i) => {
    const padded = document.createElement("canvas");
    [padded.width, padded.height] = [width, height];
    const context = padded.getContext("2d");
    context.drawImage(canvas, 0, 0);
    return { data: context.getImageData(0, 0, width, height).data, duration: i === canvases.length - 1 ? LAST_FRAME : ANIMATION_FRAME };
  });
  return new Blob([/** @type {any} */ (encodeGif(frames, width, height))], { type: "image/gif" });
}
