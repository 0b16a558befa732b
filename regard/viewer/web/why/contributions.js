/** Which input tokens an output token depends on: attention, rollout and attribution, one below the other. */

import { createColormap } from "../core/colors.js";
import { h, picker, setChildren } from "../core/dom.js";
import { formatShort, makeVisible, tokenLabel, truncate, withMinus } from "../core/tokens.js";
import { headLabel } from "../attention/overview.js";
import { isDark } from "../core/shell.js";
import { signedColormap } from "./signed_colors.js";
import { ATTRIBUTIONS } from "./explanations_source.js";
import { rollout } from "./text_rollout.js";

/** Maximum number of input tokens, and of cells of the maps of a rollout. */
const [MAX_SHOWN_TOKENS, MAX_ROLLOUT_TOKENS] = [256, 256];
/** Probability above which the gradient of a token is nearly zero. */
const CERTAIN = 0.99;

/** @typedef {{name: string, note: string, values: Record<string, ArrayLike<number>> | null, signed: boolean, missing?: string}} Measure */

export class Contributions {
  /** @param {import("./explanations_source.js").ExplanationSource} source @param {import("../core/shell.js").Context} context */
  constructor(source, { attentions, state }) {
    this.source = source;
    this.attentions = attentions;
    this.scene = attentions.scene;
    this.state = state;
    this.explained = this.scene.explained;
    this.step = this.initialStep();
    /** By method. @type {Record<string, import("./explanations_source.js").Attributions>} */
    this.attributions = {};
    this.method = picker("Method", Object.fromEntries(source.methods.map((method) => [method, ATTRIBUTIONS[method]])), () => this.update());
    /** @type {Record<string, Float64Array[]> | null | undefined} */
    this.rollout = undefined;
    this.status = h("p", { class: "secondary", role: "status" });
    this.body = h("div", { class: "explanation-list" });
    const { tokens } = this.explained;
    this.choice = h(
      "select",
      { "aria-label": "Output token", onchange: () => this.choose(Number(this.choice.value)) },
      tokens.map((/** @type {string} */ token, /** @type {number} */ i) => h("option", { value: i }, `${tokens.length > 1 ? `${i + 1}: ` : ""}${truncate(makeVisible(token), 24)}`)),
    );
    this.choice.value = String(this.step);
    this.element = h(
      "section",
      { class: "contributions", "aria-label": "Which input tokens mattered" },
      h("h2", {}, "Which input tokens mattered for ", this.choice, this.source.methods.length > 1 ? [" by ", this.method] : ""),
      h("p", { class: "secondary" }, "Attention shows where a head reads; attribution shows what the output depends on. They often disagree."),
      this.status,
      this.body,
    );
  }

  /** The least certain word of a translation, because the gradient of a certain one is nearly zero; the next token of a text. */
  initialStep() {
    const { output, sides } = this.scene;
    if (output?.kind === "continuation") return 0;
    const words = (sides.predicted ?? sides.text)?.words ?? [];
    const probabilities = (output?.steps ?? []).slice(0, this.explained.steps.length).map((/** @type {any} */ one, /** @type {number} */ i) => (words[i] < 0 ? 1 : (one.probability ?? 1)));
    return probabilities.length ? probabilities.indexOf(Math.min(...probabilities)) : 0;
  }

  /** @param {number} step */
  choose(step) {
    if (step < 0 || step >= this.explained.steps.length) return;
    this.step = step;
    this.choice.value = String(step);
    this.draw();
  }

  async update() {
    const { attention } = this.state.view.selected;
    const names = this.scene.attentions.map((/** @type {any} */ one) => one.name);
    const longest = Math.max(...this.scene.attentions.map((/** @type {any} */ one) => one.k.shape[0]));
    const needed = this.rollout === undefined && longest <= MAX_ROLLOUT_TOKENS ? names : [attention];
    await Promise.all(needed.map((/** @type {string} */ name) => this.attentions.load(name)));
    if (this.rollout === undefined) this.rollout = needed === names ? rollout(this.scene.attentions, (name) => this.meanWeights(name)) : null;
    this.draw();
    const method = this.method.value;
    if (this.attributions[method] || !this.source.has("attribution")) return;
    try {
      this.attributions[method] = await this.source.attribution(method, (done) => setChildren(this.status, `Computing ${ATTRIBUTIONS[method].toLowerCase()}: ${Math.round(100 * done)}%`));
      setChildren(this.status);
    } catch (error) {
      setChildren(this.status, String(error?.message ?? error));
    }
    this.draw();
  }

  /** @param {string} name */
  meanWeights(name) {
    const { heads } = this.attentions.byName.get(name);
    const map = this.attentions.map({ attention: name, head: heads > 1 ? "mean" : 0 }, false);
    return { rows: map.rows, columns: map.columns, cells: map.allCells() };
  }

  /** The row of the selected head that predicts the output token. @returns {Measure} */
  attentionMeasure() {
    const { selected } = this.state.view;
    const one = this.attentions.byName.get(selected.attention);
    const measure = { name: "Attention", note: headLabel(this.scene.attentions, selected), values: null, signed: false };
    const row = this.explained.steps[this.step][1];
    if (this.scene.sides.source && one.columns === "source" && one.rows === "source") return { ...measure, missing: "An encoder head has no row for an output token: select a head of the decoder." };
    const map = this.attentions.map(selected, false);
    if (row >= map.rows) return { ...measure, missing: "This token is not part of the text: the page has no map of it." };
    return { ...measure, values: { [one.columns]: map.exactRow(row) } };
  }

  /** @returns {Measure} */
  rolloutMeasure() {
    const measure = { name: "Rollout", note: "attention through all layers", values: null, signed: false };
    const row = this.explained.steps[this.step][1];
    if (!this.rollout) return { ...measure, missing: "It needs all layers of a Transformer, and at most 256 tokens." };
    const sides = Object.entries(this.rollout);
    if (row >= sides[0][1].length) return { ...measure, missing: "This token is not part of the text: the page has no map of it." };
    return { ...measure, values: Object.fromEntries(sides.map(([side, rows]) => [side, rows[row]])) };
  }

  /** @returns {Measure} */
  attributionMeasure() {
    const probability = this.scene.output?.steps[this.step]?.probability ?? 0;
    const method = this.method.value;
    const isGradient = method === "gradient";
    const notes = ["blue: makes the token more likely", isGradient && this.source.usesDifferences && "by differences", isGradient && probability > CERTAIN && "the token is certain, so small changes have nearly no effect"];
    const note = notes.filter(Boolean).join("; ");
    const measure = { name: ATTRIBUTIONS[method], note, values: null, signed: true };
    if (!this.source.has("attribution")) return { ...measure, missing: "This page contains neither the attributions nor the model: save it with --explain or --with-model." };
    const found = this.attributions[method];
    if (!found) return { ...measure, missing: "…" };
    return { ...measure, values: Object.fromEntries(Object.entries(found).map(([side, rows]) => [side, rows[this.step]])) };
  }

  /** Input tokens on which the output token can depend, by side. @returns {Record<string, string[]>} */
  inputTokens() {
    const [sequence, row] = this.explained.steps[this.step];
    const label = (/** @type {string} */ name) => {
      const side = this.scene.sides[name];
      return side ? side.tokens.map((/** @type {string} */ token, /** @type {number} */ i) => tokenLabel(token, side.entries?.[i], false)) : this.explained.inputs[sequence][0].map(String);
    };
    if (this.scene.sides.predicted || this.scene.sides.target) return { source: label("source"), target: (this.scene.sides.target ? label("target") : ["<sos>", ...this.explained.tokens.slice(0, -1).map(makeVisible)]).slice(0, row + 1) };
    const isContinuation = this.scene.output?.kind === "continuation";
    const text = isContinuation ? [...label("text"), ...this.explained.tokens.map(makeVisible)].slice(0, row + 1) : label("text");
    if (this.explained.inputs.length > 1) text[row] = `${text[row]} (masked)`;
    return { text };
  }

  draw() {
    const tokens = this.inputTokens();
    const dark = isDark(this.state.view.theme);
    setChildren(this.body, [this.attentionMeasure(), this.rolloutMeasure(), this.attributionMeasure()].map((measure) => this.block(measure, tokens, dark)));
    performance.mark("regard-contributions");
  }

  /** @param {Measure} measure @param {Record<string, string[]>} tokens @param {boolean} dark */
  block({ name, note, values, signed, missing }, tokens, dark) {
    const head = h("h3", {}, name, h("span", { class: "secondary" }, note));
    if (!values) return h("div", { class: "explanation" }, head, h("p", { class: "secondary" }, missing));
    const all = Object.entries(tokens).flatMap(([side, list]) => list.map((_, i) => Math.abs(values[side]?.[i] ?? 0)));
    const maximum = Math.max(...all, 1e-12);
    const colormap = signed ? signedColormap(dark) : createColormap("blue", "linear", dark);
    const spans = Object.entries(tokens).map(([side, list], n) => {
      const shown = list.slice(-MAX_SHOWN_TOKENS);
      const first = list.length - shown.length;
      const passage = shown.map((token, i) => this.token(token, values[side]?.[first + i], maximum, colormap, signed));
      return [n ? h("span", { class: "between", "aria-hidden": "true" }, "│") : null, first ? "… " : null, passage];
    });
    const best = Object.entries(tokens)
      .flatMap(([side, list]) => list.map((token, i) => ({ token, value: values[side]?.[i] ?? 0 })))
      .sort((a, b) => Math.abs(b.value) - Math.abs(a.value))
      .slice(0, 3);
    const summary = best.map(({ token, value }) => `${token} ${this.format(value, signed)}`).join(", ");
    return h("div", { class: "explanation" }, head, h("p", { class: "passage", role: "img", "aria-label": `${name}, largest: ${summary}` }, spans));
  }

  /** @param {number} value @param {boolean} signed */
  format(value, signed) {
    return signed ? `${value < 0 ? "−" : "+"}${withMinus(formatShort(Math.abs(value)))}` : formatShort(value);
  }

  /** @param {string} token @param {number | undefined} value @param {number} maximum @param {any} colormap @param {boolean} signed */
  token(token, value, maximum, colormap, signed) {
    const text = value === undefined ? "" : this.format(value, signed);
    const label = h("bdi", { class: "token" }, truncate(token, 24));
    if (value !== undefined) {
      label.style.background = colormap.css(value / maximum);
      label.classList.add(colormap.needsLightText(value / maximum) ? "light" : "dark");
    }
    return h("span", { class: "valued", title: text }, label, h("span", { class: "value" }, text));
  }
}
