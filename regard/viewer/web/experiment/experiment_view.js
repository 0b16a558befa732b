/**
 * The experiment view: interventions on the model, with maps and output before and after.
 *
 * Weights without the mask, without the scale or with an edited row are computed in the page from q and k. The output, and
 * all other interventions, need a model to send requests to.
 */

import { greatestIn, mayLook, weightsInto } from "../weights/maths.js";
import { Weights } from "../weights/maps.js";
import { painterOf } from "../core/colors.js";
import { change, fill, h, tokenText, uniqueId } from "../core/dom.js";
import { Axis, exactly, roughly } from "../core/tokens.js";
import { HeatMap, cellSays } from "../attention/heatmap.js";
import { headCalled, kindCalled, kindsOf } from "../attention/overview.js";
import { numbersOf } from "../attention/table.js";
import { isDark, toggle } from "../core/shell.js";
import EXPERIMENT_STYLE from "./experiment.css";

/** @typedef {import("../attention/heatmap.js").Shot} Shot */
/** @typedef {import("../attention/heatmap.js").Cell} Cell */
/** @typedef {{attention: string, head: number, row: number, weights: number[]}} OwnRow an edited row */
/** @typedef {{token: string, probability: number | null, likeliest: [string, number][]}} Step */
/** @typedef {{text: string, logprob: number | null, steps: Step[], map: {rows: string[], columns: string[], weights: number[][]} | null}} Outcome */

/** Maximum number of tokens with a slider each. */
const SLIDERS = 48;
/** Maximum number of cells of a map in a request. */
const ASKED = 65536;
/** Number of listed changes. */
const NAMED_CHANGES = 6;
/** Maximum number of tokens in a select element. */
const LISTED = 1000;
/** Delay in milliseconds between the last movement of a slider and the request. */
const REST = 250;
/** Above this number of columns, weights are too small to be visible on a linear scale. */
const NARROW = 128;

/** The map of a modified head, optionally with an edited row. */
class TriedWeights extends Weights {
  /** @param {import("../weights/maths.js").Head} head @param {any} kernel @param {OwnRow | null} own */
  constructor(head, kernel, own) {
    super(head.T, head.S);
    this.head = head;
    this.kernel = kernel;
    this.own = own;
  }

  rowsInto(rows, from, to, out) {
    if (this.whole) super.rowsInto(rows, from, to, out);
    else this.compute(rows, from, to, out);
  }

  compute(rows, from, to, out) {
    this.kernel.rowsInto(this.head, rows, from, to, out);
    const at = this.own ? rows.indexOf(this.own.row) : -1;
    if (at >= 0) out.set(this.own.weights.slice(from, to), at * (to - from));
  }

  computeExactly(row) {
    if (this.own?.row === row) return Float64Array.from(this.own.weights);
    return weightsInto(this.head, row, new Float64Array(this.columns));
  }
}

/** A map of fixed numbers. */
class GivenWeights extends Weights {
  /** @param {number[][]} given */
  constructor(given) {
    super(given.length, given[0]?.length ?? 0);
    this.given = given;
  }

  compute(rows, from, to, out) {
    rows.forEach((row, i) => out.set(this.given[row].slice(from, to), i * (to - from)));
  }

  computeExactly(row) {
    return Float64Array.from(this.given[row]);
  }
}

/** Lists the tokens of an axis as options; -1 selects none. @param {HTMLSelectElement} select @param {Axis} axis @param {number} chosen */
function list(select, axis, chosen) {
  const places = Array.from({ length: Math.min(LISTED, axis.length) }, (_, i) => i);
  if (chosen >= LISTED) places.push(chosen);
  const key = `${axis.name} ${places.at(-1)}`;
  if (select.dataset.of !== key) fill(select, h("option", { value: -1, hidden: true }, "…"), places.map((i) => h("option", { value: i }, axis.labels[i])));
  select.dataset.of = key;
  select.value = String(chosen);
}

export class Trying {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state, work, voice }) {
    this.host = host;
    this.attentions = attentions;
    this.scene = attentions.scene;
    this.state = state;
    this.work = work;
    this.voice = voice;
    this.asks = typeof this.host.ask === "function";
    /** Disabled components. */
    this.off = { mask: false, scale: false, positions: false, heads: new Set(), layers: new Set() };
    /** @type {OwnRow | null} */
    this.own = null;
    this.row = 0;
    this.texts = { instead: this.scene.texts.source, prefix: "" };
    this.keeps = false;
    /** The response of the model to the latest request. @type {{before: Outcome, after: Outcome} | null} */
    this.answer = null;
    this.asked = 0;
    /** @type {Cell | null} */
    this.cursor = null;
    const told = (/** @type {number} */ number) => ({
      point: (/** @type {Cell | null} */ cell) => this.point(cell, number),
      pin: (/** @type {Cell} */ cell) => this.chooseRow(cell.row),
      zoom: () => {},
    });
    this.figures = [new HeatMap(work, "before", told(0)), new HeatMap(work, "after", told(1))];
    /** @type {Shot[]} */
    this.shots = [];
    this.makeControls();
    this.outcomes = ["Before", "After"].map((name) => h("section", { class: "outcome", "aria-label": `Output ${name.toLowerCase()}` }));
    this.output = h("div", { class: "outcomes", hidden: true }, this.outcomes);
    this.failed = h("p", { class: "refused", role: "alert", hidden: true });
    this.names = [h("h2", {}, "Before"), h("h2", {}, "After")];
    this.panels = this.figures.map((figure, i) =>
      h("article", { class: "panel", "data-mark": i ? "second" : "first", onkeydown: (event) => this.key(event, i) }, this.names[i], figure.element),
    );
    this.most = h("div", { class: "most" });
    this.sheet = h("div", { class: "sheet-of-paper" }, this.output, h("div", { class: "panels two" }, this.panels));
    this.element = h("div", { class: "trying" }, h("style", {}, EXPERIMENT_STYLE), this.controls, h("div", { class: "results" }, this.failed, this.sheet, this.most));
    for (const panel of this.panels) new ResizeObserver(() => this.lay()).observe(panel);
  }

  // Controls

  makeControls() {
    const list = this.scene.attentions;
    const kinds = kindsOf(list);
    this.attention = h(
      "select",
      { "aria-label": "Attention", onchange: () => this.choose({ attention: this.attention.value, head: 0 }) },
      [...kinds].map((kind) =>
        h("optgroup", { label: kindCalled(kind, kinds) }, list.filter((one) => one.kind === kind).map((one) => h("option", { value: one.name }, one.name))),
      ),
    );
    this.head = h("select", { "aria-label": "Head", onchange: () => this.choose({ attention: this.shown.attention, head: Number(this.head.value) }) });
    this.mask = toggle("Mask", (on) => this.switchOff("mask", !on));
    this.scale = toggle("Scaling by 1 ⁄ √d", (on) => this.switchOff("scale", !on));
    this.positions = toggle("Positional encoding", (on) => this.switchOff("positions", !on));
    this.headOn = toggle("This head", (on) => this.flip(this.off.heads, `${this.shown.attention}:${this.shown.head}`, !on));
    this.layerOn = toggle("This attention", (on) => this.flip(this.off.layers, this.shown.attention, !on));
    this.feedOn = toggle("Feed-forward network after it", (on) => this.flip(this.off.layers, this.feedForward, !on));
    this.others = h("ul", { class: "others", "aria-label": "Also disabled" });
    this.keep = toggle("Keep the translation (teacher forcing)", (on) => {
      this.keeps = on;
      this.changed();
    });
    this.rowChoice = h("select", { "aria-label": "Query token", onchange: () => this.chooseRow(Number(this.rowChoice.value)) });
    this.only = h("select", { "aria-label": "Attend only to", onchange: () => this.lookOnlyAt(Number(this.only.value)) });
    this.sliders = h("div", { class: "sliders" });
    this.sum = h("p", { class: "sum" });
    /** @param {string} text @param {() => void} action */
    const button = (text, action) => h("button", { type: "button", class: "small", onclick: action }, text);
    this.asItWas = button("Reset row", () => this.setRow(null));
    const heading = (/** @type {string} */ text) => {
      const id = uniqueId("group");
      return { id, element: h("h2", { id }, text) };
    };
    /** @param {string} text @param {...any} children */
    const group = (text, ...children) => {
      const { id, element } = heading(text);
      return h("section", { class: "group", "aria-labelledby": id }, element, children);
    };
    const where = h("div", { class: "where-to" }, this.attention, this.head);
    const parts = [this.mask, this.scale, ...(this.asks ? [this.positions, this.headOn, this.layerOn, this.feedOn] : [])];
    const row = group(
      "Edit attention row",
      h("p", { class: "which" }, this.rowChoice, h("span", {}, " attends only to "), this.only),
      this.sliders,
      this.sum,
      h("p", { class: "buttons" }, button("Uniform", () => this.evenly()), this.asItWas),
    );
    this.start = button("Reset all", () => this.reset());
    this.controls = h(
      "aside",
      { class: "changes", "aria-label": "Interventions", "data-saved": "no" },
      group("Attention head", where),
      group("Components", h("div", { class: "switches" }, parts), this.others),
      row,
      this.asks && !this.scene.picture ? group("Text", this.textField("instead", "Sentence"), this.writes ? this.textField("prefix", "Output prefix") : null, this.scene.texts.target ? h("div", { class: "switches" }, this.keep) : null) : null,
      h("p", { class: "buttons" }, this.start),
      this.asks ? null : this.note(),
    );
  }

  /** Whether the model generates text, which can have a prefix. */
  get writes() {
    return this.scene.texts.target || this.scene.attentions.some((one) => one.kind === "masked");
  }

  /** @param {"instead" | "prefix"} name @param {string} text */
  textField(name, text) {
    const field = h("textarea", { rows: name === "instead" ? 2 : 1, onchange: () => this.setText(name, field.value) });
    field.value = this.texts[name];
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.setText(name, field.value);
    });
    this[`${name}Field`] = field;
    return h("label", { class: "text" }, h("span", {}, text), field);
  }

  note() {
    return h(
      "p",
      { class: "note", role: "note" },
      h("strong", {}, "A saved page contains the attention weights, not the model. "),
      "To see the effect on the output, and to disable heads, layers and positions, open the live page: ",
      h("code", {}, this.scene.picture ? "regard look MODEL IMAGE --live" : "regard look MODEL --live"),
      ".",
    );
  }

  /** The selected head; the mean of heads cannot be modified. @returns {{attention: string, head: number}} */
  get shown() {
    const { attention, head } = this.state.view.shown;
    return { attention, head: head === "mean" ? 0 : head };
  }

  get one() {
    return this.attentions.byName.get(this.shown.attention);
  }

  /** The name of the feed-forward network after the attention, in numbered blocks; otherwise null. */
  get feedForward() {
    const found = /^(.*\.\d+)\.(?:attention|cross)$/.exec(this.shown.attention);
    return found ? `${found[1]}.feedforward` : null;
  }

  /** @param {{attention: string, head: number}} shown */
  choose(shown) {
    this.state.set({ shown });
  }

  /** @param {"mask" | "scale" | "positions"} what @param {boolean} off */
  switchOff(what, off) {
    this.off[what] = off;
    this.changed();
  }

  /** @param {Set<string>} set @param {string} name @param {boolean} off */
  flip(set, name, off) {
    if (off) set.add(name);
    else set.delete(name);
    this.changed();
  }

  /** @param {"instead" | "prefix"} name @param {string} text */
  setText(name, text) {
    if (this.texts[name] === text) return;
    this.texts[name] = text;
    // A row belongs to tokens that are now replaced.
    this.own = null;
    this.changed();
  }

  reset() {
    this.off = { mask: false, scale: false, positions: false, heads: new Set(), layers: new Set() };
    this.own = null;
    this.texts = { instead: this.scene.texts.source, prefix: "" };
    this.keeps = false;
    for (const name of /** @type {const} */ (["instead", "prefix"])) if (this[`${name}Field`]) this[`${name}Field`].value = this.texts[name];
    this.changed();
    this.voice.say("All changes reset.");
  }

  /** @param {number | null} row */
  chooseRow(row) {
    // After an intervention there may be more rows than the scene has.
    if (row === null || row === this.row || row >= this.axes.rows.length) return;
    this.row = row;
    this.own = null;
    this.changed();
  }

  /** @param {number[] | null} weights not necessarily normalized @param {number} [wait] */
  setRow(weights, wait = 0) {
    const total = weights?.reduce((sum, weight) => sum + weight, 0) ?? 0;
    this.own = total > 0 ? { ...this.shown, row: this.row, weights: weights.map((weight) => weight / total) } : null;
    this.changed(wait);
  }

  /** @param {number} column */
  lookOnlyAt(column) {
    this.setRow(this.axes.columns.labels.map((_, s) => (s === column ? 1 : 0)));
  }

  evenly() {
    const { mask, q, k } = this.one;
    const at = this.row + k.shape[0] - q.shape[0];
    this.setRow(this.axes.columns.labels.map((_, s) => (this.off.mask || mayLook(mask, at, s) ? 1 : 0)));
  }

  /** The axes of the scene's map. */
  get axes() {
    return this.attentions.axesOf(this.shown.attention, false);
  }

  // Results

  /** The request to the model, or null if nothing is changed. */
  get request() {
    const { mask, scale, positions, heads, layers } = this.off;
    const list = this.scene.attentions;
    const changes = [
      mask && list.some((one) => one.mask) ? { change: "mask" } : null,
      scale && list.some((one) => one.score.called === "scaled_dot") ? { change: "scale" } : null,
      positions ? { change: "positions" } : null,
      ...[...heads].map((name) => ({ change: "head", attention: name.slice(0, name.lastIndexOf(":")), head: Number(name.slice(name.lastIndexOf(":") + 1)) })),
      ...[...layers].map((layer) => ({ change: "layer", layer })),
      this.own ? { change: "row", ...this.own } : null,
    ].filter((one) => one !== null);
    const { source } = this.scene.texts;
    const instead = this.texts.instead.trim() && this.texts.instead !== source ? this.texts.instead : null;
    if (!changes.length && !instead && !this.texts.prefix) return null;
    const { rows, columns } = this.axes;
    const shown = rows.length * columns.length <= ASKED ? this.shown : null;
    const target = this.keeps ? this.scene.texts.target : null;
    return { source, target, changes, instead, prefix: (!this.keeps && this.texts.prefix) || null, shown };
  }

  /** Shows what can be computed in the page, and requests the rest. @param {number} [wait] delay in milliseconds */
  async changed(wait = 0) {
    this.answer = null;
    change(this.failed, { hidden: true });
    this.show();
    if (!this.asks) return;
    const { request } = this;
    const number = (this.asked += 1);
    this.element.toggleAttribute("data-asking", request !== null);
    if (!request) return;
    if (wait) await new Promise((done) => setTimeout(done, wait));
    if (number !== this.asked) return;
    try {
      const { told } = await this.host.ask({ try: request });
      if (number !== this.asked) return;
      this.answer = told;
    } catch (error) {
      if (number !== this.asked) return;
      fill(this.failed, String(error?.message ?? error));
      change(this.failed, { hidden: false });
    }
    this.element.toggleAttribute("data-asking", false);
    this.show();
    if (this.answer) this.voice.say(this.summary(this.answer));
  }

  /** @param {{before: Outcome, after: Outcome}} answer */
  summary({ before, after }) {
    if (before.text !== after.text) return `Before: ${before.text || "no output"}. After: ${after.text || "no output"}.`;
    return after.text ? `The output is unchanged: ${after.text}.` : "This model has no output text, only maps.";
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    const { attention } = this.shown;
    await this.attentions.load(attention);
    if (attention !== this.shown.attention) return;
    if (changed === null || changed.has("shown")) {
      this.own = null;
      const { pin } = this.state.view;
      const { rows } = this.attentions.axesOf(attention, false);
      this.row = Math.min(rows.length - 1, changed === null && pin ? pin[0] : this.row);
      this.cursor = null;
      // The page's busy state does not include requests to the model.
      this.work.add("try", 1, () => false);
      await this.changed();
    } else if (["theme", "colours", "scale"].some((key) => changed.has(key))) this.show();
  }

  lay() {
    for (const figure of this.figures) figure.lay();
  }

  /** @param {any} given @param {string} name @returns {Axis} */
  axisOf(given, name) {
    const known = this.scene.sides[this.one[name]];
    return new Axis(this.one[name], { ...known, tokens: given, words: given.map((/** @type {any} */ _, /** @type {number} */ i) => i) }, false);
  }

  /** Draws the current state. */
  show() {
    const { attention, head } = this.shown;
    const { attentions, one } = this;
    if (!attentions.isLoaded(attention)) return;
    const { colours, scale, theme } = this.state.view;
    const { axes } = this;
    const painter = painterOf(colours, scale ?? (this.scene.picture ? "log" : axes.columns.length > NARROW ? "root" : "linear"), isDark(theme));
    const [T, S] = [one.q.shape[0], one.k.shape[0]];
    const plain = attentions.map({ attention, head }, false);
    const named = headCalled(this.scene.attentions, { attention, head });
    const shut = one.mask ? (/** @type {number} */ t, /** @type {number} */ s) => !mayLook(one.mask, t + S - T, s) : null;
    const common = { ...axes, zoom: null, painter, gold: null };
    const [was, is] = this.answer ? [this.answer.before.map, this.answer.after.map] : [null, null];
    /** @param {any} given */
    const shotOf = (given) => ({ ...common, map: new GivenWeights(given.weights), rows: this.axisOf(given.rows, "rows"), columns: this.axisOf(given.columns, "columns") });
    this.shots = [
      { ...(was ? shotOf(was) : { ...common, map: plain }), name: `${named}, before`, shut },
      { ...(is ? shotOf(is) : { ...common, map: this.computed(plain) }), name: `${named}, after`, shut: this.off.mask ? null : shut },
    ];
    this.figures.forEach((figure, i) => {
      figure.show(this.shots[i]);
      figure.mark(this.cursor, this.pinOf(i));
    });
    this.showControls(axes);
    this.showOutput();
    this.showMost();
    performance.mark("regard-tried");
  }

  /** The map after interventions that need no model. @param {any} plain */
  computed(plain) {
    const mask = this.off.mask && this.one.mask;
    const scale = this.off.scale && this.one.score.called === "scaled_dot";
    if (!mask && !scale && !this.own) return plain;
    const head = { ...plain.head, ...(mask ? { mask: null } : {}), ...(scale ? { scale: 1 } : {}) };
    return new TriedWeights(head, this.attentions.kernel, this.own);
  }

  /** The highlighted row. @param {number} number @returns {Cell | null} */
  pinOf(number) {
    const { map } = this.shots[number];
    return this.row < map.rows ? { row: this.row, column: null } : null;
  }

  /** @param {{rows: Axis, columns: Axis}} axes */
  showControls({ rows, columns }) {
    const { attention, head } = this.shown;
    const { one } = this;
    this.attention.value = attention;
    fill(this.head, Array.from({ length: one.heads }, (_, i) => h("option", { value: i }, one.heads > 1 ? `head ${i}` : "single head")));
    this.head.value = String(head);
    /** @param {HTMLButtonElement} button @param {boolean} off @param {boolean} [possible] */
    const set = (button, off, possible = true) => change(button, { "aria-pressed": String(possible && !off), disabled: !possible });
    set(this.mask, this.off.mask, this.asks ? this.scene.attentions.some((other) => other.mask) : Boolean(one.mask));
    set(this.scale, this.off.scale, this.asks ? this.scene.attentions.some((other) => other.score.called === "scaled_dot") : one.score.called === "scaled_dot");
    set(this.positions, this.off.positions);
    set(this.headOn, this.off.heads.has(`${attention}:${head}`));
    set(this.layerOn, this.off.layers.has(attention));
    set(this.feedOn, this.off.layers.has(this.feedForward), this.feedForward !== null);
    const here = new Set([`${attention}:${head}`, attention, this.feedForward]);
    const elsewhere = [...this.off.heads, ...this.off.layers].filter((name) => !here.has(name));
    fill(
      this.others,
      elsewhere.map((name) => {
        const set = this.off.heads.has(name) ? this.off.heads : this.off.layers;
        const says = set === this.off.heads ? name.replace(/:(\d+)$/, ", head $1") : name;
        return h("li", {}, h("button", { type: "button", class: "small", onclick: () => this.flip(set, name, false), "aria-label": `Enable ${says}` }, `${says} disabled ×`));
      }),
    );
    change(this.keep, { "aria-pressed": String(this.keeps) });
    list(this.rowChoice, rows, this.row);
    this.showSliders(columns);
  }

  /** @param {Axis} columns */
  showSliders(columns) {
    const weights = this.own?.weights ?? [...this.computed(this.attentions.map(this.shown, false)).exact(this.row)];
    const only = this.own?.weights.findIndex((weight) => weight === 1) ?? -1;
    list(this.only, columns, only);
    change(this.asItWas, { disabled: !this.own });
    this.sum.textContent = this.own ? "Edited weights (sum to 1)." : "Original weights. Move a slider; the others are rescaled to sum to 1.";
    const many = columns.length > SLIDERS;
    if (many) this.sum.textContent = `Too many tokens (${columns.length}) for sliders: select one above.`;
    if (!many && this.sliders.childElementCount === columns.length && this.sliders.dataset.of === this.shown.attention) {
      // Keep the elements, because one of them is being dragged.
      [...this.sliders.children].forEach((label, s) => this.setSlider(label, weights[s]));
      return;
    }
    this.sliders.dataset.of = this.shown.attention;
    fill(
      this.sliders,
      many
        ? null
        : columns.labels.map((text, s) => {
            const input = h("input", { type: "range", min: 0, max: 1, step: 0.01, oninput: () => this.move(s, Number(input.value)) });
            const label = h("label", {}, tokenText(text, columns.rtl, { class: "name" }), input, h("output", { "aria-live": "off" }));
            this.setSlider(label, weights[s]);
            return label;
          }),
    );
  }

  /** @param {Element} label @param {number} weight */
  setSlider(label, weight) {
    const input = label.querySelector("input");
    if (Math.abs(Number(input.value) - weight) > 0.005) input.value = String(weight);
    change(input, { "aria-valuetext": roughly(weight) });
    label.querySelector("output").textContent = roughly(weight);
  }

  /** Sets one weight and rescales the others. @param {number} column @param {number} weight */
  move(column, weight) {
    const now = this.own?.weights ?? [...this.computed(this.attentions.map(this.shown, false)).exact(this.row)];
    const rest = now.reduce((sum, other, s) => (s === column ? sum : sum + other), 0);
    const share = (/** @type {number} */ other) => (rest > 0 ? ((1 - weight) * other) / rest : (1 - weight) / (now.length - 1));
    this.setRow(now.map((other, s) => (s === column ? weight : share(other))), REST);
  }

  showOutput() {
    const { answer } = this;
    change(this.output, { hidden: !answer || (!answer.before.text && !answer.before.steps.length) });
    if (!answer) return;
    [answer.before, answer.after].forEach((outcome, i) => {
      const other = i ? answer.before : answer.after;
      fill(
        this.outcomes[i],
        h("h2", {}, i ? "After" : "Before"),
        h("p", { class: "said", dir: "auto" }, outcome.text || (outcome.steps.length ? "" : "no output")),
        outcome.logprob === null ? null : h("p", { class: "score" }, `log-probability ${outcome.logprob.toFixed(3)}`),
        h("ol", { class: "steps", tabindex: 0, "aria-label": `Tokens and probabilities, ${i ? "after" : "before"}` }, outcome.steps.map((step, n) => this.step(step, i === 1 && other.steps[n]?.token !== step.token))),
      );
    });
  }

  /** A predicted token. @param {Step} step @param {boolean} differs */
  step({ token, probability, likeliest }, differs) {
    const others = likeliest.filter(([name]) => name !== token).slice(0, 3);
    return h(
      "li",
      { class: differs ? "differs" : null },
      h("bdi", { class: "name" }, token || "next token", differs ? h("span", { class: "unseen" }, ", changed") : null),
      probability === null ? h("span", { class: "weight" }) : h("span", { class: "weight" }, roughly(probability)),
      h("span", { class: "rest" }, others.map(([name, share]) => [h("bdi", {}, name), ` ${roughly(share)}  `])),
    );
  }

  /** Lists the largest changes of weights. */
  showMost() {
    const [was, is] = this.shots;
    const same = (/** @type {Axis} */ a, /** @type {Axis} */ b) => a === b || a.labels.join("\n") === b.labels.join("\n");
    const alike = same(was.rows, is.rows) && same(was.columns, is.columns) && was.map.whole;
    /** @type {{row: number, column: number, by: number}[]} */
    const most = [];
    if (alike && was.map !== is.map) {
      const [a, b] = [was.map.all(), is.map.all()];
      for (let i = 0; i < a.length; i++) {
        const by = Math.abs(b[i] - a[i]);
        if (by < 5e-4 || (most.length === NAMED_CHANGES && by <= most[NAMED_CHANGES - 1].by)) continue;
        most.push({ row: Math.floor(i / was.map.columns), column: i % was.map.columns, by });
        most.sort((one, other) => other.by - one.by).splice(NAMED_CHANGES);
      }
    }
    const says = was.map === is.map ? "No changes yet. Disable a component or edit an attention row." : alike ? "No weight of this head changed." : was.map.whole ? "The tokens differ, so weights cannot be compared one by one." : "Too many weights to compare.";
    fill(
      this.most,
      h("h2", { class: "quiet" }, most.length ? "Largest changes" : "Weights"),
      most.length
        ? h(
            "ol",
            { class: "ranks pairs" },
            most.map(({ row, column }) =>
              h(
                "li",
                {},
                h("span", { class: "name" }, tokenText(was.rows.labels[row], was.rows.rtl), h("span", { class: "to" }, " → "), tokenText(was.columns.labels[column], was.columns.rtl)),
                h("span", { class: "weight" }, `${roughly(was.map.exact(row)[column])} → ${roughly(is.map.exact(row)[column])}`),
              ),
            ),
          )
        : h("p", { class: "rest" }, says),
    );
  }

  // Pointer and keys

  /** @param {Cell | null} cell @param {number} number */
  point(cell, number) {
    if (JSON.stringify(cell) === JSON.stringify(this.cursor)) return;
    this.cursor = cell;
    this.figures.forEach((figure, i) => {
      const { map } = this.shots[i];
      const there = cell && (cell.row ?? 0) < map.rows && (cell.column ?? 0) < map.columns;
      figure.mark(there ? cell : null, this.pinOf(i));
    });
    if (cell && cell.row !== null) this.voice.say(this.says(cell, number), 200);
  }

  /** Describes a cell before and after, for screen readers. @param {Cell} cell @param {number} number */
  says(cell, number) {
    const shot = this.shots[number];
    const full = { row: cell.row, column: cell.column ?? greatestIn(shot.map.exact(cell.row)) };
    const weights = this.shots.map(({ map }) => (full.row < map.rows && full.column < map.columns ? exactly(map.exact(full.row)[full.column]) : "none"));
    return cellSays(shot, full, `${weights[0]} before, ${weights[1]} after`);
  }

  /** @param {KeyboardEvent} event @param {number} number */
  key(event, number) {
    const { map } = this.shots[number];
    const at = { row: this.cursor?.row ?? this.row, column: this.cursor?.column ?? 0 };
    const across = this.shots[number].columns.rtl ? -1 : 1;
    const far = event.shiftKey ? 10 : 1;
    const moves = { ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far * across], ArrowRight: [0, far * across], Home: [0, -Infinity], End: [0, Infinity] };
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in moves) {
      const [rows, columns] = this.cursor ? moves[event.key] : [0, 0];
      const within = (/** @type {number} */ place, /** @type {number} */ count) => Math.max(0, Math.min(count - 1, place));
      this.point({ row: within(at.row + rows, map.rows), column: within(at.column + columns, map.columns) }, number);
    } else if (event.key === "Enter" || event.key === " ") {
      this.chooseRow(at.row);
      this.voice.say(`The row of ${this.axes.rows.labels[this.row]} can be edited.`);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  get fileName() {
    return `regard-experiment-${this.shown.attention}.${this.shown.head}`.replace(/[^\w.-]+/g, "_");
  }

  /** All weights after the interventions, as TSV. */
  get numbers() {
    return numbersOf(this.shots[1]);
  }
}
