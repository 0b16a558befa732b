/** Which patches a label depends on: attention, rollout and gradient × input, side by side. */

import { h, setAttributes, setChildren } from "../core/dom.js";
import { makeVisible, truncate } from "../core/tokens.js";
import { topK } from "../weights/maths.js";
import { ImageAttention } from "../images/image_attention.js";
import { paintImage, paintPatches } from "../images/image_figure.js";
import { imageHeadLabel, imageLayerLabel } from "../images/image_overview.js";
import { formatPercent, patchLabel } from "../images/image_reading.js";
import { divergingLegend, formatChange, signedColormap } from "./signed_colors.js";

/** Opacity of the colors over the image. */
const OPACITY = 0.8;

export class ImageContributions {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state }) {
    this.host = host;
    this.attentions = attentions;
    this.state = state;
    this.image = host.scene.image;
    this.imageAttention = new ImageAttention(attentions);
    /** @type {import("../images/image_figure.js").ImagePixels | null} */
    this.pixels = null;
    const labels = this.image.labels.filter((/** @type {any} */ one) => one.attribution);
    this.number = labels[0]?.number;
    this.choice = h(
      "select",
      { "aria-label": "Label to explain", onchange: () => this.choose(Number(this.choice.value)) },
      labels.map((/** @type {any} */ one) => h("option", { value: one.number }, truncate(makeVisible(one.name), 30))),
    );
    this.figures = h("div", { class: "patch-explanations" });
    this.legend = h("div", {});
    this.element = h(
      "section",
      { class: "contributions", "aria-label": "Which patches mattered" },
      h("h2", {}, "Which patches mattered for ", this.choice),
      h("p", { class: "secondary" }, "Attention shows where a head reads; the gradient shows what the label depends on. They often disagree."),
      this.figures,
      this.legend,
    );
    this.element.hidden = !labels.length;
  }

  /** @param {number} number */
  choose(number) {
    this.number = number;
    this.update();
  }

  /** @param {{at: number}} blob @returns {Promise<Float32Array>} */
  async read(blob) {
    return new Float32Array(await this.host.blob(blob.at));
  }

  async update() {
    if (this.element.hidden) return;
    const { number, image } = this;
    const { selected } = this.state.view;
    const label = image.labels.find((/** @type {any} */ one) => one.number === number);
    const [pixels, rollout, gradient] = await Promise.all([this.host.blob(image.pixels.at), this.read(label.rollout), this.read(label.attribution), this.attentions.load(selected.attention)]);
    if (number !== this.number) return;
    const [height, width, channels] = image.pixels.shape;
    this.pixels = { pixels: new Uint8Array(pixels), height, width, channels, rows: image.grid[0], columns: image.grid[1] };
    const attention = this.imageAttention.overPatches(selected.attention, this.imageAttention.weights(selected, null));
    const one = this.attentions.byName.get(selected.attention);
    const maximum = gradient.reduce((largest, x) => Math.max(largest, Math.abs(x)), 1e-12);
    setChildren(
      this.figures,
      this.figure("Attention", `${imageLayerLabel(one)}, ${imageHeadLabel(one, selected.head)}`, attention, formatPercent, (canvas) => this.paintWeights(canvas, attention)),
      this.figure("Rollout", "weighted by the gradients of the label", rollout, formatPercent, (canvas) => this.paintWeights(canvas, rollout)),
      this.figure("Gradient × input", "blue: makes the label more likely", gradient, formatChange, (canvas) => this.paintSigned(canvas, gradient, maximum)),
    );
    setChildren(this.legend, h("p", { class: "secondary" }, "Gradient × input, summed over all patches: ", formatChange(gradient.reduce((sum, x) => sum + x, 0)), "."), divergingLegend(signedColormap(true), maximum, "less likely", "more likely"));
  }

  /** @param {HTMLCanvasElement} canvas @param {ArrayLike<number>} weights */
  paintWeights(canvas, weights) {
    paintPatches(canvas, this.pixels.rows, this.pixels.columns, weights, "blue", "linear", OPACITY);
  }

  /** @param {HTMLCanvasElement} canvas @param {Float32Array} values @param {number} maximum */
  paintSigned(canvas, values, maximum) {
    const { rows, columns } = this.pixels;
    [canvas.width, canvas.height] = [columns, rows];
    const context = canvas.getContext("2d");
    const colormap = signedColormap(true);
    values.forEach((value, i) => {
      context.globalAlpha = OPACITY * (0.25 + (0.75 * Math.abs(value)) / maximum);
      context.fillStyle = colormap.css(value / maximum);
      context.fillRect(i % columns, Math.floor(i / columns), 1, 1);
    });
  }

  /** @param {string} name @param {string} note @param {ArrayLike<number>} values @param {(x: number) => string} format @param {(canvas: HTMLCanvasElement) => void} paint */
  figure(name, note, values, format, paint) {
    const [base, overlay] = [h("canvas", {}), h("canvas", { class: "over" })];
    paintImage(base, this.pixels, true);
    paint(overlay);
    const best = topK(Float64Array.from(values, Math.abs), 3).map((patch) => `${patchLabel(patch, this.pixels.columns)} ${format(values[patch])}`);
    const frame = h("div", { class: "patch-frame" }, base, overlay);
    setAttributes(frame, { role: "img", "aria-label": `${name}, largest: ${best.join(", ")}` });
    return h("figure", { class: "explanation" }, h("h3", {}, name, h("span", { class: "secondary" }, note)), frame, h("figcaption", { class: "secondary" }, best.join(", ")));
  }
}
