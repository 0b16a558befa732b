/** What explains the output: contributions of the input, effects of heads, the logit lens. */

import { headLabel, kindLabel, kindsOf } from "../attention/overview.js";
import { createColormap, divergingLegend, formatChange, signedColormap } from "../core/colors.js";
import { html, picker, setAttributes, setChildren } from "../core/dom.js";
import { isDark } from "../core/shell.js";
import { formatProbability, formatShort, makeVisible, tokenLabel, truncate, withMinus } from "../core/tokens.js";
import { ImageAttention } from "../images/attention.js";
import { formatPercent, paintImage, paintPatches, patchLabel } from "../images/figure.js";
import { imageHeadLabel, imageLayerLabel } from "../images/overview.js";
import { topK } from "../weights/maths.js";
import { textRollout } from "../weights/rollout.js";

/*
 * Explanations of a scene's output: from the scene, or requested from the model in parts, so that other requests are
 * served too.
 */

/**
 * @typedef {import("../core/host.js").Host} Host
 * @typedef {Record<string, number[][]>} Effects by attention, a row per head, a column per step
 * @typedef {{layers: number, tokens: string[], targets: number[], own: number[][], columns: number[][][],
 * probabilities: number[][][],
 *   names: Record<string, string>}} Lens by layer and position
 * @typedef {Record<string, number[][]>} Attributions by side, a row per step, a column per input token
 * @typedef {(done: number) => void} Progress receives the completed fraction
 */

/** Input tokens per request to the model in the page. */
const TOKENS_PER_REQUEST = 4;

/** Methods of attribution. */
const ATTRIBUTIONS = {
  gradient: "Gradient × input",
  integrated_gradients: "Integrated gradients",
  occlusion: "Occlusion",
};

/** @type {WeakMap<any, ExplanationSource>} */
const sources = new WeakMap();

class ExplanationSource {
  /** The source of a host's scene. @param {Host} host @returns {ExplanationSource} */
  static of(host) {
    if (!sources.has(host.scene)) sources.set(host.scene, new ExplanationSource(host));
    return sources.get(host.scene);
  }

  /** @param {Host} host */
  constructor(host) {
    this.host = host;
    this.explained = host.scene.explained;
    /** @type {Map<string, Promise<any>>} */
    this.found = new Map();
  }

  /** Whether a measure is in the scene or can be requested. @param {string} measure */
  has(measure) {
    return Boolean(this.explained?.measures.includes(measure) && (this.explained[measure] || this.host.request));
  }

  /** The methods of attribution that this page has: without a model those in the scene. */
  get methods() {
    return Object.keys(ATTRIBUTIONS).filter((method) => method === "gradient" || this.host.request);
  }

  /** Whether the model has a measure. @param {string} measure */
  supports(measure) {
    return Boolean(this.explained?.measures.includes(measure));
  }

  /** Whether attributions are computed by central differences, in the page. */
  get usesDifferences() {
    return !this.explained.attribution && this.host.modelTensor !== undefined;
  }

  /** @param {string} measure @param {(progress: Progress) => Promise<any>} compute @param {Progress} progress */
  once(measure, compute, progress) {
    if (this.explained[measure]) return Promise.resolve(this.explained[measure]);
    if (!this.found.has(measure)) {
      const result = compute(progress);
      this.found.set(measure, result);
      // A failed request may be repeated.
      result.catch(() => this.found.delete(measure));
    }
    return this.found.get(measure);
  }

  /** @param {Record<string, any>} request @returns {Promise<any>} */
  async request(request) {
    const { inputs, steps } = this.explained;
    const { body } = await this.host.request({
      explain: { inputs, steps, source: this.host.scene.texts.source, ...request },
    });
    return body[request.measure];
  }

  /** @param {Progress} progress @returns {Promise<Effects>} */
  effects(progress) {
    return this.once(
      "effects",
      async (progress) => {
        const { attentions } = this.host.scene;
        const effects = {};
        for (const [i, { name }] of attentions.entries()) {
          Object.assign(effects, await this.request({ measure: "effects", attention: name }));
          progress((i + 1) / attentions.length);
        }
        return effects;
      },
      progress,
    );
  }

  /** @returns {Promise<Lens>} */
  lens() {
    return this.once(
      "lens",
      () => this.request({ measure: "lens" }),
      () => {},
    );
  }

  /** @param {string} method @param {Progress} progress @returns {Promise<Attributions>} */
  attribution(method, progress) {
    return this.once(
      method === "gradient" ? "attribution" : method,
      async (progress) => {
        if (!this.host.modelTensor) return this.request({ measure: "attribution", method });
        const { inputs, steps } = this.explained;
        const sides = inputs[0].length === 2 ? ["source", "target"] : ["text"];
        const lengths = sides.map((_, side) =>
          Math.max(...inputs.map((/** @type {number[][]} */ ids) => ids[side].length)),
        );
        const total = lengths.reduce((sum, length) => sum + length, 0);
        /** @type {Attributions} */
        const found = Object.fromEntries(sides.map((side) => [side, steps.map(() => [])]));
        let done = 0;
        for (const [i, side] of sides.entries()) {
          for (let from = 0; from < lengths[i]; from += TOKENS_PER_REQUEST) {
            const to = Math.min(lengths[i], from + TOKENS_PER_REQUEST);
            const part = await this.request({ measure: "attribution", method, side, tokens: [from, to] });
            part[side].forEach((/** @type {number[]} */ row, /** @type {number} */ step) =>
              found[side][step].push(...row),
            );
            done += to - from;
            progress(done / total);
          }
        }
        return found;
      },
      progress,
    );
  }
}

/* Keyboard in a grid of buttons: one of them is in the tab order, arrow keys move between them. */

/**
 * Puts a button into the tab order, in place of the others. @param {Iterable<HTMLElement>} all
 * @param {HTMLElement} button
 */
function markFocusable(all, button) {
  for (const one of all) setAttributes(one, { tabindex: one === button ? 0 : -1 });
}

/**
 * Moves the focus by an arrow key. @param {HTMLElement[][]} rows @param {HTMLElement} button
 * @param {KeyboardEvent} event
 */
function moveFocus(rows, button, event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const y = rows.findIndex((row) => row.includes(button));
  const x = rows[y].indexOf(button);
  const moves = {
    ArrowUp: [y - 1, x],
    ArrowDown: [y + 1, x],
    ArrowLeft: [y, x - 1],
    ArrowRight: [y, x + 1],
    Home: [y, 0],
    End: [y, Infinity],
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  event.stopPropagation();
  const row = rows[Math.max(0, Math.min(rows.length - 1, moves[event.key][0]))];
  row[Math.max(0, Math.min(row.length - 1, moves[event.key][1]))].focus();
}

/* Which input tokens an output token depends on: attention, rollout and attribution, one below the other. */

/** Maximum number of input tokens, and of cells of the maps of a rollout. */
const [MAX_SHOWN_TOKENS, MAX_ROLLOUT_TOKENS] = [256, 256];
/** Probability above which the gradient of a token is nearly zero. */
const CERTAIN = 0.99;

/**
 * @typedef {{name: string, note: string, values: Record<string, ArrayLike<number>> | null, signed: boolean, missing?:
 * string}} Measure
 */

class Contributions {
  /** @param {ExplanationSource} source @param {import("../core/shell.js").Context} context */
  constructor(source, { attentions, state }) {
    this.source = source;
    this.attentions = attentions;
    this.scene = attentions.scene;
    this.state = state;
    this.explained = this.scene.explained;
    this.step = this.initialStep();
    /** By method. @type {Record<string, Attributions>} */
    this.attributions = {};
    this.method = picker(
      "Method",
      Object.fromEntries(source.methods.map((method) => [method, ATTRIBUTIONS[method]])),
      () => this.update(),
    );
    /** @type {Record<string, Float64Array[]> | null | undefined} */
    this.rollout = undefined;
    this.status = html("p", { class: "secondary", role: "status" });
    this.body = html("div", { class: "explanation-list" });
    const { tokens } = this.explained;
    this.choice = html(
      "select",
      { "aria-label": "Output token", onchange: () => this.choose(Number(this.choice.value)) },
      tokens.map((/** @type {string} */ token, /** @type {number} */ i) =>
        html("option", { value: i }, `${tokens.length > 1 ? `${i + 1}: ` : ""}${truncate(makeVisible(token), 24)}`),
      ),
    );
    this.choice.value = String(this.step);
    this.element = html(
      "section",
      { class: "contributions", "aria-label": "Which input tokens mattered" },
      html(
        "h2",
        {},
        "Which input tokens mattered for ",
        this.choice,
        this.source.methods.length > 1 ? [" by ", this.method] : "",
      ),
      html(
        "p",
        { class: "secondary" },
        "Attention shows where a head reads; attribution shows what the output depends on. They often disagree.",
      ),
      this.status,
      this.body,
    );
  }

  /**
   * The least certain word of a translation, because the gradient of a certain one is nearly zero; the next token of a
   * text.
   */
  initialStep() {
    const { output, sides } = this.scene;
    if (output?.kind === "continuation") return 0;
    const words = (sides.predicted ?? sides.text)?.words ?? [];
    const probabilities = (output?.steps ?? [])
      .slice(0, this.explained.steps.length)
      .map((/** @type {any} */ one, /** @type {number} */ i) => (words[i] < 0 ? 1 : (one.probability ?? 1)));
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
    if (this.rollout === undefined)
      this.rollout = needed === names ? textRollout(this.scene.attentions, (name) => this.meanWeights(name)) : null;
    this.draw();
    const method = this.method.value;
    if (this.attributions[method] || !this.source.has("attribution")) return;
    try {
      this.attributions[method] = await this.source.attribution(method, (done) =>
        setChildren(this.status, `Computing ${ATTRIBUTIONS[method].toLowerCase()}: ${Math.round(100 * done)}%`),
      );
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
    const measure = {
      name: "Attention",
      note: headLabel(this.scene.attentions, selected),
      values: null,
      signed: false,
    };
    const row = this.explained.steps[this.step][1];
    if (this.scene.sides.source && one.columns === "source" && one.rows === "source")
      return { ...measure, missing: "An encoder head has no row for an output token: select a head of the decoder." };
    const map = this.attentions.map(selected, false);
    if (row >= map.rows)
      return { ...measure, missing: "This token is not part of the text: the page has no map of it." };
    return { ...measure, values: { [one.columns]: map.exactRow(row) } };
  }

  /** @returns {Measure} */
  rolloutMeasure() {
    const measure = { name: "Rollout", note: "attention through all layers", values: null, signed: false };
    const row = this.explained.steps[this.step][1];
    if (!this.rollout) return { ...measure, missing: "It needs all layers of a Transformer, and at most 256 tokens." };
    const sides = Object.entries(this.rollout);
    if (row >= sides[0][1].length)
      return { ...measure, missing: "This token is not part of the text: the page has no map of it." };
    return { ...measure, values: Object.fromEntries(sides.map(([side, rows]) => [side, rows[row]])) };
  }

  /** @returns {Measure} */
  attributionMeasure() {
    const probability = this.scene.output?.steps[this.step]?.probability ?? 0;
    const method = this.method.value;
    const notes = [
      "blue: makes the token more likely",
      method !== "occlusion" && this.source.usesDifferences && "by differences",
      method === "gradient" && probability > CERTAIN && "the token is certain, so small changes have nearly no effect",
    ];
    const note = notes.filter(Boolean).join("; ");
    const measure = { name: ATTRIBUTIONS[method], note, values: null, signed: true };
    if (!this.source.has("attribution"))
      return {
        ...measure,
        missing: "This page contains neither the attributions nor the model: save it with --explain or --with-model.",
      };
    const found = this.attributions[method];
    if (!found) return { ...measure, missing: "…" };
    return {
      ...measure,
      values: Object.fromEntries(Object.entries(found).map(([side, rows]) => [side, rows[this.step]])),
    };
  }

  /** Input tokens on which the output token can depend, by side. @returns {Record<string, string[]>} */
  inputTokens() {
    const [sequence, row] = this.explained.steps[this.step];
    const label = (/** @type {string} */ name) => {
      const side = this.scene.sides[name];
      return side
        ? side.tokens.map((/** @type {string} */ token, /** @type {number} */ i) =>
            tokenLabel(token, side.entries?.[i], false),
          )
        : this.explained.inputs[sequence][0].map(String);
    };
    if (this.scene.sides.predicted || this.scene.sides.target)
      return {
        source: label("source"),
        target: (this.scene.sides.target
          ? label("target")
          : ["<sos>", ...this.explained.tokens.slice(0, -1).map(makeVisible)]
        ).slice(0, row + 1),
      };
    const isContinuation = this.scene.output?.kind === "continuation";
    const text = isContinuation
      ? [...label("text"), ...this.explained.tokens.map(makeVisible)].slice(0, row + 1)
      : label("text");
    if (this.explained.inputs.length > 1) text[row] = `${text[row]} (masked)`;
    return { text };
  }

  draw() {
    const tokens = this.inputTokens();
    const dark = isDark(this.state.view.theme);
    setChildren(
      this.body,
      [this.attentionMeasure(), this.rolloutMeasure(), this.attributionMeasure()].map((measure) =>
        this.block(measure, tokens, dark),
      ),
    );
    performance.mark("regard-contributions");
  }

  /** @param {Measure} measure @param {Record<string, string[]>} tokens @param {boolean} dark */
  block({ name, note, values, signed, missing }, tokens, dark) {
    const head = html("h3", {}, name, html("span", { class: "secondary" }, note));
    if (!values) return html("div", { class: "explanation" }, head, html("p", { class: "secondary" }, missing));
    const all = Object.entries(tokens).flatMap(([side, list]) => list.map((_, i) => Math.abs(values[side]?.[i] ?? 0)));
    const maximum = Math.max(...all, 1e-12);
    const colormap = signed ? signedColormap(dark) : createColormap("blue", "linear", dark);
    const spans = Object.entries(tokens).map(([side, list], n) => {
      const shown = list.slice(-MAX_SHOWN_TOKENS);
      const first = list.length - shown.length;
      const passage = shown.map((token, i) => this.token(token, values[side]?.[first + i], maximum, colormap, signed));
      return [n ? html("span", { class: "between", "aria-hidden": "true" }, "│") : null, first ? "… " : null, passage];
    });
    const best = Object.entries(tokens)
      .flatMap(([side, list]) => list.map((token, i) => ({ token, value: values[side]?.[i] ?? 0 })))
      .sort((a, b) => Math.abs(b.value) - Math.abs(a.value))
      .slice(0, 3);
    const summary = best.map(({ token, value }) => `${token} ${this.format(value, signed)}`).join(", ");
    return html(
      "div",
      { class: "explanation" },
      head,
      html("p", { class: "passage", role: "img", "aria-label": `${name}, largest: ${summary}` }, spans),
    );
  }

  /** @param {number} value @param {boolean} signed */
  format(value, signed) {
    return signed ? `${value < 0 ? "−" : "+"}${withMinus(formatShort(Math.abs(value)))}` : formatShort(value);
  }

  /**
   * @param {string} token @param {number | undefined} value @param {number} maximum @param {any} colormap
   * @param {boolean} signed
   */
  token(token, value, maximum, colormap, signed) {
    const text = value === undefined ? "" : this.format(value, signed);
    const label = html("bdi", { class: "token" }, truncate(token, 24));
    if (value !== undefined) {
      label.style.background = colormap.css(value / maximum);
      label.classList.add(colormap.needsLightText(value / maximum) ? "light" : "dark");
    }
    return html("span", { class: "valued", title: text }, label, html("span", { class: "value" }, text));
  }
}

/* Which patches a label depends on: attention, rollout and gradient × input, side by side. */

/** Opacity of the colors over the image. */
const OPACITY = 0.8;

class ImageContributions {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state }) {
    this.host = host;
    this.attentions = attentions;
    this.state = state;
    this.image = host.scene.image;
    this.imageAttention = new ImageAttention(attentions);
    /** @type {import("../images/figure.js").ImagePixels | null} */
    this.pixels = null;
    const labels = this.image.labels.filter((/** @type {any} */ one) => one.attribution);
    this.number = labels[0]?.number;
    this.choice = html(
      "select",
      { "aria-label": "Label to explain", onchange: () => this.choose(Number(this.choice.value)) },
      labels.map((/** @type {any} */ one) =>
        html("option", { value: one.number }, truncate(makeVisible(one.name), 30)),
      ),
    );
    this.figures = html("div", { class: "patch-explanations" });
    this.legend = html("div", {});
    this.element = html(
      "section",
      { class: "contributions", "aria-label": "Which patches mattered" },
      html("h2", {}, "Which patches mattered for ", this.choice),
      html(
        "p",
        { class: "secondary" },
        "Attention shows where a head reads; the gradient shows what the label depends on. They often disagree.",
      ),
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
    const [pixels, rollout, gradient] = await Promise.all([
      this.host.blob(image.pixels.at),
      this.read(label.rollout),
      this.read(label.attribution),
      this.attentions.load(selected.attention),
    ]);
    if (number !== this.number) return;
    const [height, width, channels] = image.pixels.shape;
    this.pixels = {
      pixels: new Uint8Array(pixels),
      height,
      width,
      channels,
      rows: image.grid[0],
      columns: image.grid[1],
    };
    const attention = this.imageAttention.overPatches(selected.attention, this.imageAttention.weights(selected, null));
    const one = this.attentions.byName.get(selected.attention);
    const maximum = gradient.reduce((largest, x) => Math.max(largest, Math.abs(x)), 1e-12);
    setChildren(
      this.figures,
      this.figure(
        "Attention",
        `${imageLayerLabel(one)}, ${imageHeadLabel(one, selected.head)}`,
        attention,
        formatPercent,
        (canvas) => this.paintWeights(canvas, attention),
      ),
      this.figure("Rollout", "weighted by the gradients of the label", rollout, formatPercent, (canvas) =>
        this.paintWeights(canvas, rollout),
      ),
      this.figure("Gradient × input", "blue: makes the label more likely", gradient, formatChange, (canvas) =>
        this.paintSigned(canvas, gradient, maximum),
      ),
    );
    setChildren(
      this.legend,
      html(
        "p",
        { class: "secondary" },
        "Gradient × input, summed over all patches: ",
        formatChange(gradient.reduce((sum, x) => sum + x, 0)),
        ".",
      ),
      divergingLegend(signedColormap(true), maximum, "less likely", "more likely"),
    );
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

  /**
   * @param {string} name @param {string} note @param {ArrayLike<number>} values @param {(x: number) => string} format
   * @param {(canvas: HTMLCanvasElement) => void} paint
   */
  figure(name, note, values, format, paint) {
    const [base, overlay] = [html("canvas", {}), html("canvas", { class: "over" })];
    paintImage(base, this.pixels, true);
    paint(overlay);
    const best = topK(Float64Array.from(values, Math.abs), 3).map(
      (patch) => `${patchLabel(patch, this.pixels.columns)} ${format(values[patch])}`,
    );
    const frame = html("div", { class: "patch-frame" }, base, overlay);
    setAttributes(frame, { role: "img", "aria-label": `${name}, largest: ${best.join(", ")}` });
    return html(
      "figure",
      { class: "explanation" },
      html("h3", {}, name, html("span", { class: "secondary" }, note)),
      frame,
      html("figcaption", { class: "secondary" }, best.join(", ")),
    );
  }
}

/* The effect of every head on the output: a grid per kind of attention, layers × heads, in diverging colors. */

/** Above this number of heads, cells show no numbers. */
const MAX_NUMBERED_HEADS = 8;

export class EffectGrid {
  /** @param {Pick<import("../core/shell.js").Context, "host" | "attentions" | "state">} context */
  constructor({ host, attentions, state }) {
    this.scene = attentions.scene;
    this.state = state;
    this.source = ExplanationSource.of(host);
    /** @type {Effects | null} */
    this.effects = null;
    this.step = -1;
    /** Buttons by "attention:head". @type {Map<string, HTMLButtonElement>} */
    this.cells = new Map();
    this.status = html("p", { class: "secondary", role: "status" });
    this.details = html("p", { class: "effect-reading" });
    this.legend = html("div", {});
    this.body = html("div", { class: "effect-groups" });
    const { tokens = [] } = this.scene.explained ?? {};
    this.choice = html(
      "select",
      { "aria-label": "Output", onchange: () => this.choose(Number(this.choice.value)) },
      html("option", { value: -1 }, "the entire output"),
      tokens.map((/** @type {string} */ token, /** @type {number} */ i) =>
        html("option", { value: i }, `${i + 1}: ${truncate(makeVisible(token), 24)}`),
      ),
    );
    this.element = html(
      "section",
      { class: "why-sheet effects", "aria-label": "Effect of every head" },
      html("h2", {}, "Effect of every head on ", tokens.length > 1 ? this.choice : "the output"),
      html(
        "p",
        { class: "secondary" },
        "Change of the log-probability if one head is turned off. Orange: the head makes the output more likely. Heads that can replace each other all seem unimportant.",
      ),
      this.status,
      this.body,
      this.details,
      this.legend,
    );
    this.element.hidden = !this.source.supports("effects");
  }

  /** Computes the effects, once, and draws them. */
  async update() {
    if (this.element.hidden) return;
    if (!this.source.has("effects")) {
      setChildren(
        this.status,
        "This page contains neither the effects nor the model. Save it with ",
        html("code", {}, "--explain"),
        " or ",
        html("code", {}, "--with-model"),
        ".",
      );
      return;
    }
    if (!this.effects) {
      try {
        this.effects = await this.source.effects((done) =>
          setChildren(this.status, `Turning off one head after the other: ${Math.round(100 * done)}%`),
        );
      } catch (error) {
        setChildren(this.status, String(error?.message ?? error));
        return;
      }
      setChildren(this.status);
      this.createGroups();
    }
    this.draw();
  }

  /** @param {number} step -1: all */
  choose(step) {
    this.step = step;
    this.draw();
  }

  /** @param {string} attention @param {number} head */
  valueOf(attention, head) {
    const steps = this.effects[attention][head];
    return this.step < 0 ? steps.reduce((sum, x) => sum + x, 0) : steps[this.step];
  }

  createGroups() {
    const list = this.scene.attentions.filter((/** @type {any} */ one) => one.name in this.effects);
    const kinds = kindsOf(list);
    setChildren(
      this.body,
      [...kinds].map((kind) => {
        const layers = list.filter((/** @type {any} */ one) => one.kind === kind);
        const heads = Math.max(...layers.map((/** @type {any} */ one) => one.heads));
        const label = kindLabel(kind, kinds);
        const grid = html(
          "div",
          { role: "grid", class: "effect-grid", "aria-label": `${label}: one row per layer, one column per head` },
          html(
            "div",
            { role: "row", class: "effect-row" },
            html("span", { role: "columnheader", class: "layer" }, html("span", { class: "visually-hidden" }, "layer")),
            Array.from({ length: heads }, (_, head) =>
              html("span", { role: "columnheader", class: "head" }, String(head)),
            ),
          ),
          layers.map((/** @type {any} */ one, /** @type {number} */ row) =>
            html(
              "div",
              { role: "row", class: "effect-row" },
              html("span", { role: "rowheader", class: "layer", title: one.name }, String((one.layer ?? row) + 1)),
              Array.from({ length: one.heads }, (_, head) => this.cell(one.name, head, heads)),
            ),
          ),
        );
        grid.style.setProperty("--heads", String(heads));
        return html("div", { class: "effect-group" }, html("h3", {}, label), grid);
      }),
    );
  }

  /** @param {string} attention @param {number} head @param {number} heads */
  cell(attention, head, heads) {
    const read = () => this.read(attention, head);
    const button = html("button", {
      type: "button",
      role: "gridcell",
      class: heads > MAX_NUMBERED_HEADS ? "effect dense" : "effect",
      tabindex: this.cells.size ? -1 : 0,
      onpointerenter: read,
      onfocus: () => {
        markFocusable(this.cells.values(), button);
        read();
      },
      onclick: () => this.state.set({ selected: { attention, head }, other: null, view: "attention" }),
      onkeydown: (event) => moveFocus(this.rows, button, event),
    });
    this.cells.set(`${attention}:${head}`, button);
    return button;
  }

  /** The cells, by row. @returns {HTMLElement[][]} */
  get rows() {
    return [...this.body.querySelectorAll(".effect-row:has(.effect)")].map(
      (row) => /** @type {HTMLElement[]} */ ([...row.querySelectorAll(".effect")]),
    );
  }

  /** Writes the effect of a head in words. @param {string} attention @param {number} head */
  read(attention, head) {
    const value = this.valueOf(attention, head);
    const what = this.step < 0 ? "the output" : `“${makeVisible(this.scene.explained.tokens[this.step])}”`;
    const factor = Math.exp(-Math.abs(value));
    const times =
      factor > 0.995 ? "about as likely" : `${(1 / factor).toPrecision(2)} times ${value < 0 ? "less" : "more"} likely`;
    setChildren(
      this.details,
      html("strong", {}, headLabel(this.scene.attentions, { attention, head })),
      `: ${formatChange(value)}. Without this head, ${what} is ${times}. Select it to see its attention.`,
    );
  }

  draw() {
    if (!this.effects) return;
    const colormap = signedColormap(isDark(this.state.view.theme));
    const entries = [...this.cells].map(([key, button]) => {
      const at = key.lastIndexOf(":");
      const [attention, head] = [key.slice(0, at), Number(key.slice(at + 1))];
      return { attention, head, button, value: this.valueOf(attention, head) };
    });
    const maximum = Math.max(...entries.map(({ value }) => Math.abs(value)), 1e-9);
    for (const { attention, head, button, value } of entries) {
      const share = value / maximum;
      button.style.background = colormap.css(share);
      button.classList.toggle("light", colormap.needsLightText(share));
      const label = `${headLabel(this.scene.attentions, { attention, head })}: ${formatChange(value)}`;
      setAttributes(button, { "aria-label": label, title: label });
      setChildren(
        button,
        button.classList.contains("dense") ? null : html("span", { "aria-hidden": "true" }, formatChange(value)),
      );
    }
    setChildren(this.legend, divergingLegend(colormap, maximum, "less likely", "more likely"));
    const best = entries.reduce((a, b) => (Math.abs(b.value) > Math.abs(a.value) ? b : a));
    this.read(best.attention, best.head);
    performance.mark("regard-effects");
  }
}

/* The logit lens: what the model would predict after each layer. */

/** Maximum length of a token in a cell. */
const MAX_LABEL = 14;

class LensTable {
  /** @param {ExplanationSource} source @param {import("../core/state.js").State} state */
  constructor(source, state) {
    this.source = source;
    this.state = state;
    /** @type {Lens | null} */
    this.lens = null;
    /** @type {HTMLElement[][]} */
    this.rows = [];
    this.status = html("p", { class: "secondary", role: "status" });
    this.body = html("div", { class: "lens-scroll", tabindex: 0, role: "region", "aria-label": "Logit lens" });
    this.details = html("p", { class: "effect-reading" });
    this.element = html(
      "section",
      { class: "lens", "aria-label": "What each layer would predict" },
      html("h2", {}, "What each layer would predict"),
      html(
        "p",
        { class: "secondary" },
        "Logit lens: the output layer applied to the tokens as they are after each layer. Early layers were not trained to be read this way, so their guesses may mean nothing.",
      ),
      this.status,
      this.body,
      this.details,
    );
    this.element.hidden = !source.supports("lens");
  }

  async update() {
    if (this.element.hidden) return;
    if (!this.source.has("lens")) {
      setChildren(
        this.status,
        "This page contains neither the lens nor the model. Save it with ",
        html("code", {}, "--explain"),
        " or ",
        html("code", {}, "--with-model"),
        ".",
      );
      return;
    }
    if (!this.lens) {
      setChildren(this.status, "Applying the output layer to every layer …");
      try {
        this.lens = await this.source.lens();
      } catch (error) {
        setChildren(this.status, String(error?.message ?? error));
        return;
      }
      setChildren(this.status);
    }
    this.draw();
  }

  draw() {
    const { tokens, layers } = this.lens;
    const colormap = createColormap("blue", "linear", isDark(this.state.view.theme));
    const isSingle = tokens.length === 1;
    const columns = isSingle
      ? this.lens.columns[0][0].map((_, i) => `${i + 1}.`)
      : tokens.map((token) => truncate(makeVisible(token), MAX_LABEL));
    const order = Array.from({ length: layers }, (_, i) => layers - 1 - i);
    this.rows = order.map((layer) =>
      columns.map((_, i) => this.cell(layer, isSingle ? 0 : i, isSingle ? i : 0, colormap)),
    );
    setAttributes(this.rows[0][0], { tabindex: 0 });
    setChildren(
      this.body,
      html(
        "table",
        { role: "grid", "aria-label": "Most likely prediction after each layer" },
        html(
          "thead",
          {},
          html(
            "tr",
            {},
            html("th", { scope: "col" }, isSingle ? "rank" : "output"),
            columns.map((label) => html("th", { scope: "col" }, html("bdi", {}, label))),
          ),
        ),
        html(
          "tbody",
          {},
          order.map((layer, y) =>
            html(
              "tr",
              {},
              html("th", { scope: "row" }, layer ? `after layer ${layer}` : "embedding"),
              this.rows[y].map((button) => html("td", {}, button)),
            ),
          ),
        ),
      ),
    );
    this.read(layers - 1, 0);
  }

  /** @param {number} layer @param {number} position @param {number} rank @param {any} colormap */
  cell(layer, position, rank, colormap) {
    const { columns, probabilities, names, targets } = this.lens;
    const column = columns[layer][position][rank];
    const name = names[column];
    const share = probabilities[layer][position][rank];
    const isOwn = column === targets[position];
    const text = makeVisible(name);
    /** @type {HTMLButtonElement} */
    const button = html(
      "button",
      {
        type: "button",
        tabindex: -1,
        class: isOwn ? "candidate own" : "candidate",
        onpointerenter: () => this.read(layer, position),
        onfocus: () => {
          markFocusable(this.rows.flat(), button);
          this.read(layer, position);
        },
        onkeydown: (event) => moveFocus(this.rows, button, event),
      },
      html("bdi", {}, truncate(text, MAX_LABEL)),
      html(
        "span",
        { class: "share" },
        formatProbability(share),
        isOwn ? html("span", { class: "visually-hidden" }, ", as in the output") : null,
      ),
    );
    button.style.background = colormap.css(share);
    button.classList.toggle("light", colormap.needsLightText(share));
    return button;
  }

  /** Lists the candidates of a cell. @param {number} layer @param {number} position */
  read(layer, position) {
    const { columns, probabilities, names, tokens, own } = this.lens;
    const candidates = columns[layer][position].map((column, i) => [
      i ? ", " : " ",
      html("bdi", {}, makeVisible(names[column])),
      ` ${formatProbability(probabilities[layer][position][i])}`,
    ]);
    setChildren(
      this.details,
      html(
        "strong",
        {},
        layer ? `After layer ${layer}` : "Embedding",
        tokens.length > 1 ? [", for ", html("bdi", {}, makeVisible(tokens[position]))] : null,
        ":",
      ),
      candidates,
      `. The output itself has ${formatProbability(own[layer][position])}.`,
    );
  }
}

/* "Why this output?": which input tokens mattered, and what each layer would predict. Computed when it is opened. */

export class WhySection {
  /**
   * The section of a scene, or null if it has nothing to explain. @param {import("../core/shell.js").Context} context
   * @returns {WhySection | null}
   */
  static of(context) {
    const { scene } = context.host;
    return scene.explained && scene.attentions.length && !scene.compared ? new WhySection(context) : null;
  }

  /** @param {import("../core/shell.js").Context} context */
  constructor(context) {
    const source = ExplanationSource.of(context.host);
    const isImage = Boolean(context.host.scene.image);
    /** @type {Contributions | ImageContributions} */
    this.contributions = isImage ? new ImageContributions(context) : new Contributions(source, context);
    this.lens = new LensTable(source, context.state);
    this.element = html(
      "details",
      { class: "why", ontoggle: () => this.update(null) },
      html(
        "summary",
        {},
        html("h2", {}, "Why this output?"),
        html(
          "span",
          { class: "secondary" },
          `the ${isImage ? "patches" : "input tokens"} that mattered${source.supports("lens") ? ", and what each layer would predict" : ""}`,
        ),
      ),
      html("div", { class: "why-sheet" }, this.contributions.element, this.lens.element),
    );
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    if (!this.element.open) return;
    if (changed && !["selected", "theme", "view"].some((key) => changed.has(key))) return;
    await Promise.all([
      this.contributions.update(),
      changed === null || changed.has("theme") ? this.lens.update() : null,
    ]);
  }

  /** Selects an output token. @param {number | null} step */
  point(step) {
    if (this.element.open && step !== null && this.contributions instanceof Contributions)
      this.contributions.choose(step);
  }
}
