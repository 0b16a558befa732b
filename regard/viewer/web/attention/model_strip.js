/** A strip of the architecture, embedding → layers → output, which selects a layer. */

import { h, setAttributes, setChildren } from "../core/dom.js";

/** Titles of stacks of layers, by the prefix of their attentions' names. */
const STACK_TITLES = { encoder: "Encoder", decoder: "Decoder", blocks: "Layer" };

/** The layers of a model: title and attentions. @param {any[]} list @returns {{title: string, attentions: any[]}[]} */
export function layersOf(list) {
  /** @type {Map<string, {title: string, attentions: any[]}>} */
  const layers = new Map();
  for (const one of list) {
    const found = /^(?:(.*)\.)?(\d+)\.[^.]+(?:\.\d+)?$/.exec(one.name);
    const stack = found?.[1] ?? "";
    const key = found ? `${stack}.${one.layer ?? found[2]}` : one.name;
    const title = found ? `${STACK_TITLES[stack] ?? (stack || "Layer")} ${one.layer ?? found[2]}` : one.name;
    if (!layers.has(key)) layers.set(key, { title, attentions: [] });
    layers.get(key).attentions.push(one);
  }
  return [...layers.values()];
}

export class ModelStrip {
  /**
   * @param {import("../weights/maps.js").Attentions} attentions @param {(attentions: any[]) => void} onLayer
   * @param {(section: number) => void} onSection opens a section of the step-by-step view
   */
  constructor({ scene }, onLayer, onSection) {
    this.layers = layersOf(scene.attentions);
    const button = (/** @type {string} */ text, /** @type {() => void} */ action) => h("button", { type: "button", onclick: action }, text);
    this.buttons = this.layers.map((layer) => button(layer.title, () => onLayer(layer.attentions)));
    const end = (/** @type {string} */ text, /** @type {number} */ section) => (scene.trace ? button(text, () => onSection(section)) : h("span", { class: "end" }, text));
    const parts = [end("Embedding", 0), ...this.buttons, end("Output", (scene.trace?.sections.length ?? 0) - 1)];
    this.element = h("nav", { class: "model-strip", "aria-label": "Layers of the model", "data-export": "no" });
    setChildren(this.element, parts.map((part, i) => [i ? h("span", { class: "to", "aria-hidden": "true" }, "→") : null, part]));
    this.element.hidden = this.layers.length < 2;
  }

  /** @param {string} name of the selected attention */
  mark(name) {
    this.layers.forEach((layer, i) => setAttributes(this.buttons[i], { "aria-current": layer.attentions.some((one) => one.name === name) ? "step" : null }));
  }
}
