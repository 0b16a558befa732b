/** The tab of experiments: interventions, and the output with and without them. */

import { toTsv } from "../attention/forms.js";
import { describeCell, HeatMap } from "../attention/heatmap.js";
import { attentionLabel, headLabel, kindLabel, kindsOf } from "../attention/overview.js";
import { createColormap } from "../core/colors.js";
import { html, setAttributes, setChildren, tokenText, uniqueId } from "../core/dom.js";
import { isDark, toggle } from "../core/shell.js";
import { Axis, formatProbability, formatShort, formatWeight, makeVisible, withMinus } from "../core/tokens.js";
import { EffectGrid } from "./why.js";
import { AttentionMap } from "../weights/maps.js";
import { argmax, computeWeights, mayAttend, meanEntropy } from "../weights/maths.js";

/* Attention maps after interventions. */

/** @typedef {{attention: string, head: number, row: number, weights: number[]}} EditedRow a row with edited weights */

/** The map of a modified head, optionally with an edited row. */
class InterventionMap extends AttentionMap {
  /** @param {import("../weights/maths.js").Head} head @param {any} kernel @param {EditedRow | null} editedRow */
  constructor(head, kernel, editedRow) {
    super(head.T, head.S);
    this.head = head;
    this.kernel = kernel;
    this.editedRow = editedRow;
  }

  readRows(rows, from, to, out) {
    if (this.isMaterialized) super.readRows(rows, from, to, out);
    else this.computeRows(rows, from, to, out);
  }

  computeRows(rows, from, to, out) {
    this.kernel.computeRows(this.head, rows, from, to, out);
    const at = this.editedRow ? rows.indexOf(this.editedRow.row) : -1;
    if (at >= 0) out.set(this.editedRow.weights.slice(from, to), at * (to - from));
  }

  computeExactRow(row) {
    if (this.editedRow?.row === row) return Float64Array.from(this.editedRow.weights);
    return computeWeights(this.head, row, new Float64Array(this.columns));
  }
}

/** A map of fixed numbers. */
class FixedMap extends AttentionMap {
  /** @param {number[][]} values */
  constructor(values) {
    super(values.length, values[0]?.length ?? 0);
    this.values = values;
  }

  computeRows(rows, from, to, out) {
    rows.forEach((row, i) => out.set(this.values[row].slice(from, to), i * (to - from)));
  }

  computeExactRow(row) {
    return Float64Array.from(this.values[row]);
  }
}

/* The largest changes of weights by an intervention. */

/** @typedef {import("../attention/heatmap.js").FigureData} FigureData */

/** Number of listed changes. */
const MAX_LISTED_CHANGES = 6;

/** Lists the largest changes of weights. @param {FigureData} beforeData @param {FigureData} afterData */
function largestChanges(beforeData, afterData) {
  const same = (/** @type {Axis} */ a, /** @type {Axis} */ b) => a === b || a.labels.join("\n") === b.labels.join("\n");
  const isComparable =
    same(beforeData.rows, afterData.rows) &&
    same(beforeData.columns, afterData.columns) &&
    beforeData.map.isMaterialized;
  /** @type {{row: number, column: number, by: number}[]} */
  const largest = [];
  if (isComparable && beforeData.map !== afterData.map) {
    const [a, b] = [beforeData.map.allCells(), afterData.map.allCells()];
    for (let i = 0; i < a.length; i++) {
      const by = Math.abs(b[i] - a[i]);
      if (by < 5e-4 || (largest.length === MAX_LISTED_CHANGES && by <= largest[MAX_LISTED_CHANGES - 1].by)) continue;
      largest.push({ row: Math.floor(i / beforeData.map.columns), column: i % beforeData.map.columns, by });
      largest.sort((one, other) => other.by - one.by).splice(MAX_LISTED_CHANGES);
    }
  }
  let message = "Too many weights to compare.";
  if (beforeData.map === afterData.map) message = "No changes yet. Disable a component or edit an attention row.";
  else if (isComparable) message = "No weight of this head changed.";
  else if (beforeData.map.isMaterialized) message = "The tokens differ, so weights cannot be compared one by one.";
  return [
    html("h2", { class: "quiet" }, largest.length ? "Largest changes" : "Weights"),
    largest.length
      ? html(
          "ol",
          { class: "ranks pairs" },
          largest.map(({ row, column }) =>
            html(
              "li",
              {},
              html(
                "span",
                { class: "name" },
                tokenText(beforeData.rows.labels[row], beforeData.rows.rtl),
                html("span", { class: "to" }, " → "),
                tokenText(beforeData.columns.labels[column], beforeData.columns.rtl),
              ),
              html(
                "span",
                { class: "weight" },
                `${formatShort(beforeData.map.exactRow(row)[column])} → ${formatShort(afterData.map.exactRow(row)[column])}`,
              ),
            ),
          ),
        )
      : html("p", { class: "secondary" }, message),
  ];
}

/* Outputs of the model before and after an intervention. */

/** @typedef {{token: string, name: string, probability: number | null, likeliest: [string, number][]}} Step */
/**
 * @typedef {{text: string, logprob: number | null, steps: Step[], input_steps?: Step[],
 *   map: {rows: string[], columns: string[], weights: number[][]} | null}} Outcome
 */

/**
 * The output of the model before or after an intervention. Tokens that changed are highlighted.
 * @param {Outcome} outcome @param {Outcome | null} before null for the output before
 */
function outcomeElements(outcome, before) {
  const name = before ? "after" : "before";
  /** @param {"steps" | "input_steps"} key @param {string} label */
  const list = (key, label) =>
    html(
      "ol",
      { class: "steps", tabindex: 0, "aria-label": label },
      outcome[key].map((step, n) => stepElement(step, before !== null && before[key]?.[n]?.token !== step.token)),
    );
  return [
    html("h2", {}, before ? "After" : "Before"),
    html("p", { class: "output-text", dir: "auto" }, outcome.text || (outcome.steps.length ? "" : "no output")),
    outcome.logprob === null
      ? null
      : html("p", { class: "score" }, `log-probability ${withMinus(outcome.logprob.toFixed(3))}`),
    list("steps", `Tokens and probabilities, ${name}`),
    outcome.input_steps?.length
      ? html(
          "details",
          {},
          html("summary", {}, "Probabilities of the tokens of the text"),
          list("input_steps", `Tokens of the text and probabilities, ${name}`),
        )
      : null,
  ];
}

/** A predicted token. @param {Step} step @param {boolean} differs */
function stepElement({ token, name: own, probability, likeliest }, differs) {
  const others = likeliest.filter(([name]) => name !== own).slice(0, 3);
  return html(
    "li",
    { class: differs ? "differs" : null },
    html(
      "bdi",
      { class: "name" },
      token ? makeVisible(token) : "next token",
      differs ? html("span", { class: "visually-hidden" }, ", changed") : null,
    ),
    probability === null
      ? html("span", { class: "weight" })
      : html("span", { class: "weight" }, formatShort(probability)),
    html(
      "span",
      { class: "secondary" },
      others.map(([name, share], i) => [i ? ", " : null, html("bdi", {}, makeVisible(name)), ` ${formatShort(share)}`]),
    ),
  );
}

/*
 * * The experiment view: interventions on the model, with maps and output before and after.
 *
 * Weights without the mask, without the scale or with an edited row are computed in the page from q and k. The output,
 * and
 * all other interventions, need a model to send requests to.
 */

/** @typedef {import("../attention/heatmap.js").Cell} Cell */

/** Maximum number of tokens with a slider each. */
const MAX_SLIDERS = 48;
/** Maximum number of cells of a map in a request. */
const MAX_REQUESTED_CELLS = 65536;
/** Maximum number of tokens in a select element. */
const MAX_LISTED_TOKENS = 1000;
/** Delay in milliseconds between the last movement of a slider and the request. */
const SLIDER_DELAY = 250;
/** Above this number of columns, weights are too small to be visible on a linear scale. */
const MAX_LINEAR_SCALE_COLUMNS = 128;

/**
 * Lists the tokens of an axis as options; -1 selects none. @param {HTMLSelectElement} select @param {Axis} axis
 * @param {number} selected
 */
function listTokens(select, axis, selected) {
  const indices = Array.from({ length: Math.min(MAX_LISTED_TOKENS, axis.length) }, (_, i) => i);
  if (selected >= MAX_LISTED_TOKENS) indices.push(selected);
  const key = `${axis.name} ${indices.at(-1)}`;
  if (select.dataset.of !== key)
    setChildren(
      select,
      html("option", { value: -1, hidden: true }, "…"),
      indices.map((i) => html("option", { value: i }, axis.labels[i])),
    );
  select.dataset.of = key;
  select.value = String(selected);
}

export class ExperimentView {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state, scheduler, announcer }) {
    this.host = host;
    this.attentions = attentions;
    this.scene = attentions.scene;
    this.state = state;
    this.scheduler = scheduler;
    this.announcer = announcer;
    this.hasModel = typeof this.host.request === "function";
    /** Disabled components. */
    this.disabled = { mask: false, scale: false, positions: false, heads: new Set(), layers: new Set() };
    /** @type {EditedRow | null} */
    this.editedRow = null;
    this.row = 0;
    this.texts = { instead: this.scene.texts.source, prefix: "" };
    this.keepsTarget = false;
    /**
     * The response of the model to the latest request.
     * @type {{before: Outcome, after: Outcome, similarity?: number | null} | null}
     */
    this.response = null;
    this.requestId = 0;
    /** @type {Cell | null} */
    this.cursor = null;
    const handlers = (/** @type {number} */ number) => ({
      point: (/** @type {Cell | null} */ cell) => this.point(cell, number),
      pin: (/** @type {Cell} */ cell) => this.chooseRow(cell.row),
      zoom: () => {},
    });
    this.figures = [new HeatMap(scheduler, "before", handlers(0)), new HeatMap(scheduler, "after", handlers(1))];
    /** @type {FigureData[]} */
    this.figureInputs = [];
    this.createControls();
    this.outcomes = ["Before", "After"].map((name) =>
      html("section", { class: "outcome", "aria-label": `Output ${name.toLowerCase()}` }),
    );
    this.output = html("div", { class: "outcomes", hidden: true }, this.outcomes);
    this.sentence = html("p", { class: "headline experiment-sentence" });
    this.entropy = html("p", { class: "secondary" });
    this.errorElement = html("p", { class: "request-error", role: "alert", hidden: true });
    this.titles = [html("h2", {}, "Before"), html("h2", {}, "After")];
    this.offNote = html("p", { class: "off-note" });
    this.panels = this.figures.map((figure, i) =>
      html(
        "article",
        { class: "panel", "data-mark": i ? "second" : "first", onkeydown: (event) => this.key(event, i) },
        this.titles[i],
        i ? this.offNote : null,
        figure.element,
      ),
    );
    this.changesElement = html("div", { class: "largest-changes" });
    this.figureElement = html(
      "div",
      { class: "card" },
      this.sentence,
      this.output,
      this.entropy,
      html("div", { class: "panels two" }, this.panels),
    );
    this.effectGrid = new EffectGrid({ host, attentions, state });
    this.element = html(
      "div",
      { class: "experiment" },
      this.controls,
      html(
        "div",
        { class: "results" },
        this.errorElement,
        this.figureElement,
        this.changesElement,
        this.effectGrid.element,
      ),
    );
    for (const panel of this.panels) new ResizeObserver(() => this.layout()).observe(panel);
  }

  // Controls

  createControls() {
    const list = this.scene.attentions;
    const kinds = kindsOf(list);
    this.attention = html(
      "select",
      { "aria-label": "Attention", onchange: () => this.choose({ attention: this.attention.value, head: 0 }) },
      [...kinds].map((kind) =>
        html(
          "optgroup",
          { label: kindLabel(kind, kinds) },
          list
            .filter((one) => one.kind === kind)
            .map((one) => html("option", { value: one.name }, attentionLabel(list, one))),
        ),
      ),
    );
    this.head = html("select", {
      "aria-label": "Head",
      onchange: () => this.choose({ attention: this.selected.attention, head: Number(this.head.value) }),
    });
    const extent = this.hasModel ? "everywhere" : "in this map";
    this.mask = toggle(`Causal mask, ${extent}`, (on) => this.setDisabled("mask", !on));
    this.scale = toggle(`Scaling by 1 ⁄ √d, ${extent}`, (on) => this.setDisabled("scale", !on));
    this.positions = toggle("Positional encoding, everywhere", (on) => this.setDisabled("positions", !on));
    this.headToggle = toggle("This head", (on) =>
      this.setInSet(this.disabled.heads, `${this.selected.attention}:${this.selected.head}`, !on),
    );
    this.layerToggle = toggle("This attention, all its heads", (on) =>
      this.setInSet(this.disabled.layers, this.selected.attention, !on),
    );
    this.feedForwardToggle = toggle("Feed-forward network after it", (on) =>
      this.setInSet(this.disabled.layers, this.feedForward, !on),
    );
    this.others = html("ul", { class: "others", "aria-label": "Also disabled" });
    this.keepToggle = toggle("Keep the translation (teacher forcing)", (on) => {
      this.keepsTarget = on;
      this.refresh();
    });
    this.rowChoice = html("select", {
      "aria-label": "Query token",
      onchange: () => this.chooseRow(Number(this.rowChoice.value)),
    });
    this.onlyKey = html("select", {
      "aria-label": "Attend only to",
      onchange: () => this.attendOnlyTo(Number(this.onlyKey.value)),
    });
    this.sliders = html("div", { class: "sliders" });
    this.sum = html("p", { class: "sum" });
    /** @param {string} text @param {() => void} action */
    const button = (text, action) => html("button", { type: "button", class: "small", onclick: action }, text);
    this.resetRowButton = button("Reset row", () => this.setRow(null));
    const heading = (/** @type {string} */ text) => {
      const id = uniqueId("group");
      return { id, element: html("h2", { id }, text) };
    };
    /** @param {string} text @param {...any} children */
    const group = (text, ...children) => {
      const { id, element } = heading(text);
      return html("section", { class: "group", "aria-labelledby": id }, element, children);
    };
    const where = html("div", { class: "head-choice" }, this.attention, this.head);
    const parts = [
      this.headToggle,
      this.mask,
      this.scale,
      ...(this.hasModel ? [this.positions, this.layerToggle, this.feedForwardToggle] : []),
    ];
    const row = group(
      "Edit attention row",
      html("p", { class: "which" }, this.rowChoice, html("span", {}, " attends only to "), this.onlyKey),
      this.sliders,
      this.sum,
      html(
        "p",
        { class: "buttons" },
        button("Uniform", () => this.setUniform()),
        this.resetRowButton,
      ),
    );
    this.resetAllButton = button("Reset all", () => this.reset());
    this.controls = html(
      "aside",
      { class: "interventions", "aria-label": "Interventions", "data-export": "no" },
      this.presets(),
      group("Attention head", where),
      group("Components", html("div", { class: "switches" }, parts), this.others),
      row,
      this.hasModel && !this.scene.image
        ? group(
            "Text",
            this.textField("instead", "Sentence"),
            this.generatesText ? this.textField("prefix", "Output prefix") : null,
            this.scene.texts.target ? html("div", { class: "switches" }, this.keepToggle) : null,
          )
        : null,
      html("p", { class: "buttons" }, this.resetAllButton),
      this.hasModel ? null : this.note(),
    );
  }

  /** Experiments to start with, and what to look for. */
  presets() {
    const { attentions: list, image } = this.scene;
    /** @type {[string, string, boolean, () => void][]} */
    const cards = [
      [
        "Without positions",
        "Is the output still that of the same word order?",
        this.hasModel,
        () => (this.disabled.positions = true),
      ],
      [
        "Without ÷ √d",
        "Do the weights become sharper? Compare the entropy.",
        list.some((one) => one.score.name === "scaled_dot"),
        () => (this.disabled.scale = true),
      ],
      [
        "One head off",
        "Which words depend on it? Its layer has other heads.",
        this.hasModel,
        () => this.disabled.heads.add(`${this.selected.attention}:${this.selected.head}`),
      ],
      [
        "Seeing the future",
        "Every token attends to later ones, as it never did in training.",
        list.some((one) => one.mask),
        () => (this.disabled.mask = true),
      ],
    ];
    return html(
      "div",
      { class: "presets", role: "group", "aria-label": "Experiments to start with" },
      cards
        .filter(([, , fits]) => fits)
        .map(([name, question, , apply]) =>
          html(
            "button",
            {
              type: "button",
              class: "preset",
              onclick: () => {
                this.clear();
                apply();
                this.refresh();
                if (!image) this.sentence.scrollIntoView({ block: "nearest" });
              },
            },
            html("strong", {}, name),
            html("span", { class: "secondary" }, question),
          ),
        ),
    );
  }

  /** Whether the model generates text, which can have a prefix. */
  get generatesText() {
    return this.scene.texts.target || this.scene.attentions.some((one) => one.kind === "masked");
  }

  /** @param {"instead" | "prefix"} name @param {string} text */
  textField(name, text) {
    const field = html("textarea", {
      rows: name === "instead" ? 2 : 1,
      onchange: () => this.setText(name, field.value),
    });
    field.value = this.texts[name];
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.setText(name, field.value);
    });
    this[`${name}Field`] = field;
    return html("label", { class: "text" }, html("span", {}, text), field);
  }

  note() {
    return html(
      "p",
      { class: "note", role: "note" },
      html("strong", {}, "This page contains the attention weights, not the model. "),
      "To see the effect on the output, and to disable layers and positions, save the page with ",
      html("code", {}, "--with-model"),
      ", or open the live page: ",
      html("code", {}, this.scene.image ? "regard look MODEL IMAGE --live" : "regard look MODEL --live"),
      ".",
    );
  }

  /** The label of a disabled head, attention or feed-forward network. @param {string} name */
  componentLabel(name) {
    const [attention, head] = name.split(":");
    if (head !== undefined) return headLabel(this.scene.attentions, { attention, head: Number(head) });
    const found = this.attentions.byName.get(attention);
    return found ? attentionLabel(this.scene.attentions, found) : name;
  }

  /** The selected head; the mean of heads cannot be modified. @returns {{attention: string, head: number}} */
  get selected() {
    const { attention, head } = this.state.view.selected;
    return { attention, head: head === "mean" ? 0 : head };
  }

  get one() {
    return this.attentions.byName.get(this.selected.attention);
  }

  /** The name of the feed-forward network after the attention, in numbered blocks; otherwise null. */
  get feedForward() {
    const found = /^(.*\.\d+)\.(?:attention|cross)$/.exec(this.selected.attention);
    return found ? `${found[1]}.feedforward` : null;
  }

  /** @param {{attention: string, head: number}} selected */
  choose(selected) {
    this.state.set({ selected });
  }

  /** @param {"mask" | "scale" | "positions"} what @param {boolean} off */
  setDisabled(what, off) {
    this.disabled[what] = off;
    this.refresh();
  }

  /** @param {Set<string>} set @param {string} name @param {boolean} off */
  setInSet(set, name, off) {
    if (off) set.add(name);
    else set.delete(name);
    this.refresh();
  }

  /** @param {"instead" | "prefix"} name @param {string} text */
  setText(name, text) {
    if (this.texts[name] === text) return;
    this.texts[name] = text;
    // A row belongs to tokens that are now replaced.
    this.editedRow = null;
    this.refresh();
  }

  /** Undoes all changes of the model. */
  clear() {
    this.disabled = { mask: false, scale: false, positions: false, heads: new Set(), layers: new Set() };
    this.editedRow = null;
  }

  reset() {
    this.clear();
    this.texts = { instead: this.scene.texts.source, prefix: "" };
    this.keepsTarget = false;
    for (const name of /** @type {const} */ (["instead", "prefix"]))
      if (this[`${name}Field`]) this[`${name}Field`].value = this.texts[name];
    this.refresh();
    this.announcer.announce("All changes reset.");
  }

  /** @param {number | null} row */
  chooseRow(row) {
    // After an intervention there may be more rows than the scene has.
    if (row === null || row === this.row || row >= this.axes.rows.length) return;
    this.row = row;
    this.editedRow = null;
    this.refresh();
  }

  /** @param {number[] | null} weights not necessarily normalized @param {number} [wait] */
  setRow(weights, wait = 0) {
    const total = weights?.reduce((sum, weight) => sum + weight, 0) ?? 0;
    this.editedRow =
      total > 0 ? { ...this.selected, row: this.row, weights: weights.map((weight) => weight / total) } : null;
    this.refresh(wait);
  }

  /** @param {number} column */
  attendOnlyTo(column) {
    this.setRow(this.axes.columns.labels.map((_, s) => (s === column ? 1 : 0)));
  }

  setUniform() {
    const { mask, q, k } = this.one;
    const at = this.row + k.shape[0] - q.shape[0];
    this.setRow(this.axes.columns.labels.map((_, s) => (this.disabled.mask || mayAttend(mask, at, s) ? 1 : 0)));
  }

  /** The axes of the scene's map. */
  get axes() {
    return this.attentions.axesOf(this.selected.attention, false);
  }

  // Results

  /** The request to the model, or null if nothing is changed. */
  get request() {
    const { mask, scale, positions, heads, layers } = this.disabled;
    const list = this.scene.attentions;
    const changes = [
      mask && list.some((one) => one.mask) ? { change: "mask" } : null,
      scale && list.some((one) => one.score.name === "scaled_dot") ? { change: "scale" } : null,
      positions ? { change: "positions" } : null,
      ...[...heads].map((name) => ({
        change: "head",
        attention: name.slice(0, name.lastIndexOf(":")),
        head: Number(name.slice(name.lastIndexOf(":") + 1)),
      })),
      ...[...layers].map((layer) => ({ change: "layer", layer })),
      this.editedRow ? { change: "row", ...this.editedRow } : null,
    ].filter((one) => one !== null);
    const { source } = this.scene.texts;
    const instead = this.texts.instead.trim() && this.texts.instead !== source ? this.texts.instead : null;
    if (!changes.length && !instead && !this.texts.prefix) return null;
    const { rows, columns } = this.axes;
    const requested = rows.length * columns.length <= MAX_REQUESTED_CELLS ? this.selected : null;
    const target = this.keepsTarget ? this.scene.texts.target : null;
    const { context = null } = this.scene.texts;
    return {
      source,
      target,
      changes,
      instead,
      context,
      prefix: (!this.keepsTarget && this.texts.prefix) || null,
      shown: requested,
    };
  }

  /** Shows what can be computed in the page, and requests the rest. @param {number} [wait] delay in milliseconds */
  async refresh(wait = 0) {
    this.response = null;
    setAttributes(this.errorElement, { hidden: true });
    this.show();
    if (!this.hasModel) return;
    const { request } = this;
    const id = (this.requestId += 1);
    this.element.toggleAttribute("data-requesting", request !== null);
    if (!request) return;
    if (wait) await new Promise((done) => setTimeout(done, wait));
    if (id !== this.requestId) return;
    try {
      const { body } = await this.host.request({ experiment: request });
      if (id !== this.requestId) return;
      this.response = body;
    } catch (error) {
      if (id !== this.requestId) return;
      setChildren(this.errorElement, String(error?.message ?? error));
      setAttributes(this.errorElement, { hidden: false });
    }
    this.element.toggleAttribute("data-requesting", false);
    this.show();
    if (this.response) this.announcer.announce(this.summary(this.response));
  }

  /** What the changes do to the output, as a sentence. @param {NonNullable<ExperimentView["response"]>} response */
  summary({ before, after, similarity }) {
    if (typeof similarity === "number")
      return `The embeddings before and after have a cosine similarity of ${formatShort(similarity)}.`;
    const kind = this.scene.output?.kind === "translation" ? "translation" : "output";
    const probabilityOf = (/** @type {Outcome} */ { logprob, steps }) =>
      logprob === null ? steps.at(-1)?.likeliest[0]?.[1] : Math.exp(logprob);
    const [a, b] = [before, after].map(probabilityOf);
    const change =
      a === undefined || b === undefined ? "" : `; probability ${formatProbability(a)} → ${formatProbability(b)}`;
    const nameOf = (/** @type {Outcome} */ { text, steps }) => text || steps.at(-1)?.likeliest[0]?.[0] || "no output";
    if (nameOf(before) !== nameOf(after))
      return `The ${kind} changes: “${nameOf(before)}” → “${nameOf(after)}”${change}.`;
    return after.text || after.steps.length
      ? `The ${kind} is unchanged${change}.`
      : "This model has no output text, only maps.";
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    const { attention } = this.selected;
    if (changed === null || changed.has("theme")) this.effectGrid.update();
    await this.attentions.load(attention);
    if (attention !== this.selected.attention) return;
    const { off } = this.state.view;
    if (off && (changed === null || changed.has("off"))) {
      const [name, head] = [off.slice(0, off.lastIndexOf(":")), Number(off.slice(off.lastIndexOf(":") + 1))];
      if (this.attentions.has({ attention: name, head })) this.disabled.heads.add(off);
      // It has been applied: pressing the button again starts the experiment anew.
      this.state.set({ off: null });
    }
    if (changed === null || changed.has("selected") || off) {
      this.editedRow = null;
      const { pin } = this.state.view;
      const { rows } = this.attentions.axesOf(attention, false);
      this.row = Math.min(rows.length - 1, changed === null && pin ? pin[0] : this.row);
      this.cursor = null;
      // The page's busy state does not include requests to the model.
      this.scheduler.add("experiment", 1, () => false);
      await this.refresh();
    } else if (["theme", "colors", "scale"].some((key) => changed.has(key))) this.show();
  }

  layout() {
    for (const figure of this.figures) figure.layout();
  }

  /** @param {any} given @param {string} name @returns {Axis} */
  axisOf(given, name) {
    const known = this.scene.sides[this.one[name]];
    return new Axis(
      this.one[name],
      { ...known, tokens: given, words: given.map((/** @type {any} */ _, /** @type {number} */ i) => i) },
      false,
    );
  }

  /** Draws the current state. */
  show() {
    const { attention, head } = this.selected;
    const { attentions, one } = this;
    if (!attentions.isLoaded(attention)) return;
    const { colors, scale, theme } = this.state.view;
    const { axes } = this;
    const colormap = createColormap(
      colors,
      scale ?? (this.scene.image ? "log" : axes.columns.length > MAX_LINEAR_SCALE_COLUMNS ? "root" : "linear"),
      isDark(theme),
    );
    const [T, S] = [one.q.shape[0], one.k.shape[0]];
    const plain = attentions.map({ attention, head }, false);
    const name = headLabel(this.scene.attentions, { attention, head });
    const isMasked = one.mask
      ? (/** @type {number} */ t, /** @type {number} */ s) => !mayAttend(one.mask, t + S - T, s)
      : null;
    const common = { ...axes, zoom: null, colormap, gold: null };
    const [beforeData, afterData] = this.response ? [this.response.before.map, this.response.after.map] : [null, null];
    /** @param {any} data */
    const figureDataOf = (data) => ({
      ...common,
      map: new FixedMap(data.weights),
      rows: this.axisOf(data.rows, "rows"),
      columns: this.axisOf(data.columns, "columns"),
    });
    this.figureInputs = [
      { ...(beforeData ? figureDataOf(beforeData) : { ...common, map: plain }), name: `${name}, before`, isMasked },
      {
        ...(afterData ? figureDataOf(afterData) : { ...common, map: this.localMap(plain) }),
        name: `${name}, after`,
        isMasked: this.disabled.mask ? null : isMasked,
      },
    ];
    this.figures.forEach((figure, i) => {
      figure.show(this.figureInputs[i]);
      figure.mark(this.cursor, this.highlightedRow(i));
    });
    setChildren(
      this.offNote,
      this.isOff
        ? `${this.disabled.heads.has(`${attention}:${head}`) ? "This head" : "This attention"} is off: its weights are not used, and it adds nothing to the tokens.`
        : null,
    );
    this.panels[1].toggleAttribute("data-off", this.isOff);
    const entropies = this.figureInputs.map(({ map }) => meanEntropy(map).toFixed(2));
    setChildren(
      this.entropy,
      entropies[0] === entropies[1] || this.isOff
        ? `Mean entropy of this head’s rows: ${entropies[0]} bits${this.isOff ? " without the change" : ""}.`
        : `Mean entropy of this head’s rows: ${entropies[0]} → ${entropies[1]} bits.`,
    );
    this.showControls(axes);
    this.showOutput();
    setChildren(this.changesElement, this.isOff ? null : largestChanges(this.figureInputs[0], this.figureInputs[1]));
    performance.mark("regard-tried");
  }

  /** Whether anything of the model is changed. */
  get isChanged() {
    const { mask, scale, positions, heads, layers } = this.disabled;
    return mask || scale || positions || heads.size > 0 || layers.size > 0;
  }

  /** Whether the selected head adds nothing. */
  get isOff() {
    const { attention, head } = this.selected;
    return this.disabled.heads.has(`${attention}:${head}`) || this.disabled.layers.has(attention);
  }

  /** The map after interventions that need no model. @param {any} plain */
  localMap(plain) {
    const mask = this.disabled.mask && this.one.mask;
    const scale = this.disabled.scale && this.one.score.name === "scaled_dot";
    if (!mask && !scale && !this.editedRow) return plain;
    const head = { ...plain.head, ...(mask ? { mask: null } : {}), ...(scale ? { scale: 1 } : {}) };
    return new InterventionMap(head, this.attentions.kernel, this.editedRow);
  }

  /** The highlighted row. @param {number} number @returns {Cell | null} */
  highlightedRow(number) {
    const { map } = this.figureInputs[number];
    return this.row < map.rows ? { row: this.row, column: null } : null;
  }

  /** @param {{rows: Axis, columns: Axis}} axes */
  showControls({ rows, columns }) {
    const { attention, head } = this.selected;
    const { one } = this;
    this.attention.value = attention;
    setChildren(
      this.head,
      Array.from({ length: one.heads }, (_, i) =>
        html("option", { value: i }, one.heads > 1 ? `head ${i + 1}` : "single head"),
      ),
    );
    this.head.value = String(head);
    /** @param {HTMLButtonElement} button @param {boolean} off @param {boolean} [possible] */
    const set = (button, off, possible = true) =>
      setAttributes(button, { "aria-pressed": String(possible && !off), disabled: !possible });
    set(
      this.mask,
      this.disabled.mask,
      this.hasModel ? this.scene.attentions.some((other) => other.mask) : Boolean(one.mask),
    );
    set(
      this.scale,
      this.disabled.scale,
      this.hasModel
        ? this.scene.attentions.some((other) => other.score.name === "scaled_dot")
        : one.score.name === "scaled_dot",
    );
    set(this.positions, this.disabled.positions);
    set(this.headToggle, this.disabled.heads.has(`${attention}:${head}`));
    set(this.layerToggle, this.disabled.layers.has(attention));
    set(this.feedForwardToggle, this.disabled.layers.has(this.feedForward), this.feedForward !== null);
    const here = new Set([`${attention}:${head}`, attention, this.feedForward]);
    const elsewhere = [...this.disabled.heads, ...this.disabled.layers].filter((name) => !here.has(name));
    setChildren(
      this.others,
      elsewhere.map((name) => {
        const set = this.disabled.heads.has(name) ? this.disabled.heads : this.disabled.layers;
        const label = this.componentLabel(name);
        return html(
          "li",
          {},
          html(
            "button",
            {
              type: "button",
              class: "small",
              onclick: () => this.setInSet(set, name, false),
              "aria-label": `Enable ${label}`,
            },
            `${label} disabled ×`,
          ),
        );
      }),
    );
    setAttributes(this.keepToggle, { "aria-pressed": String(this.keepsTarget) });
    listTokens(this.rowChoice, rows, this.row);
    this.showSliders(columns);
  }

  /** @param {Axis} columns */
  showSliders(columns) {
    const weights = this.currentWeights();
    const only = this.editedRow?.weights.indexOf(1) ?? -1;
    listTokens(this.onlyKey, columns, only);
    setAttributes(this.resetRowButton, { disabled: !this.editedRow });
    this.sum.textContent = this.editedRow
      ? "Edited weights (sum to 1)."
      : `${this.isChanged ? "Weights after the changes above" : "Original weights"}. Move a slider; the others are rescaled to sum to 1.`;
    const isLong = columns.length > MAX_SLIDERS;
    if (isLong) this.sum.textContent = `Too many tokens (${columns.length}) for sliders: select one above.`;
    if (
      !isLong &&
      this.sliders.childElementCount === columns.length &&
      this.sliders.dataset.of === this.selected.attention
    ) {
      // Keep the elements, because one of them is being dragged.
      [...this.sliders.children].forEach((label, s) => this.setSlider(label, weights[s]));
      return;
    }
    this.sliders.dataset.of = this.selected.attention;
    setChildren(
      this.sliders,
      isLong
        ? null
        : columns.labels.map((text, s) => {
            const input = html("input", {
              type: "range",
              min: 0,
              max: 1,
              step: 0.01,
              oninput: () => this.setWeight(s, Number(input.value)),
            });
            const label = html(
              "label",
              {},
              tokenText(text, columns.rtl, { class: "name" }),
              input,
              html("output", { "aria-live": "off" }),
            );
            this.setSlider(label, weights[s]);
            return label;
          }),
    );
  }

  /** The weights of the selected row: edited, after the changes, or those of the model. @returns {number[]} */
  currentWeights() {
    if (this.editedRow) return this.editedRow.weights;
    const after = this.response?.after.map?.weights[this.row];
    if (after?.length === this.axes.columns.length) return after;
    return [...this.localMap(this.attentions.map(this.selected, false)).exactRow(this.row)];
  }

  /** @param {Element} label @param {number} weight */
  setSlider(label, weight) {
    const input = label.querySelector("input");
    if (Math.abs(Number(input.value) - weight) > 0.005) input.value = String(weight);
    setAttributes(input, { "aria-valuetext": formatShort(weight) });
    label.querySelector("output").textContent = formatShort(weight);
  }

  /** Sets one weight and rescales the others. @param {number} column @param {number} weight */
  setWeight(column, weight) {
    const now = this.currentWeights();
    const rest = now.reduce((sum, other, s) => (s === column ? sum : sum + other), 0);
    const share = (/** @type {number} */ other) =>
      rest > 0 ? ((1 - weight) * other) / rest : (1 - weight) / (now.length - 1);
    this.setRow(
      now.map((other, s) => (s === column ? weight : share(other))),
      SLIDER_DELAY,
    );
  }

  showOutput() {
    const { response } = this;
    const seesFuture = this.disabled.mask && this.generatesText && !this.keepsTarget;
    setChildren(
      this.sentence,
      response ? this.summary(response) : null,
      response && seesFuture
        ? html(
            "span",
            { class: "secondary" },
            " The output is found token by token, before later tokens exist; its probability is computed afterwards, with every token seeing the later ones.",
          )
        : null,
    );
    const hasSimilarity = typeof response?.similarity === "number";
    setAttributes(this.output, {
      hidden: !response || (!response.before.text && !response.before.steps.length && !hasSimilarity),
    });
    if (!response) return;
    if (hasSimilarity) {
      setChildren(
        this.outcomes[0],
        html("h2", {}, "Embedding of the text"),
        html(
          "p",
          {},
          "Cosine similarity before and after: ",
          html("strong", {}, response.similarity.toFixed(4)),
          ". 1 means that the change has no effect.",
        ),
      );
      setChildren(this.outcomes[1]);
      return;
    }
    setChildren(this.outcomes[0], outcomeElements(response.before, null));
    setChildren(this.outcomes[1], outcomeElements(response.after, response.before));
  }

  // Pointer and keys

  /** @param {Cell | null} cell @param {number} number */
  point(cell, number) {
    if (JSON.stringify(cell) === JSON.stringify(this.cursor)) return;
    this.cursor = cell;
    this.figures.forEach((figure, i) => {
      const { map } = this.figureInputs[i];
      const there = cell && (cell.row ?? 0) < map.rows && (cell.column ?? 0) < map.columns;
      figure.mark(there ? cell : null, this.highlightedRow(i));
    });
    if (cell && cell.row !== null) this.announcer.announce(this.describe(cell, number), 200);
  }

  /** Describes a cell before and after, for screen readers. @param {Cell} cell @param {number} number */
  describe(cell, number) {
    const figureData = this.figureInputs[number];
    const full = { row: cell.row, column: cell.column ?? argmax(figureData.map.exactRow(cell.row)) };
    const weights = this.figureInputs.map(({ map }) =>
      full.row < map.rows && full.column < map.columns ? formatWeight(map.exactRow(full.row)[full.column]) : "none",
    );
    return describeCell(figureData, full, `${weights[0]} before, ${weights[1]} after`);
  }

  /** @param {KeyboardEvent} event @param {number} number */
  key(event, number) {
    const { map } = this.figureInputs[number];
    const at = { row: this.cursor?.row ?? this.row, column: this.cursor?.column ?? 0 };
    const across = this.figureInputs[number].columns.rtl ? -1 : 1;
    const far = event.shiftKey ? 10 : 1;
    const moves = {
      ArrowUp: [-far, 0],
      ArrowDown: [far, 0],
      ArrowLeft: [0, -far * across],
      ArrowRight: [0, far * across],
      Home: [0, -Infinity],
      End: [0, Infinity],
    };
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in moves) {
      const [rows, columns] = this.cursor ? moves[event.key] : [0, 0];
      const clamp = (/** @type {number} */ index, /** @type {number} */ count) =>
        Math.max(0, Math.min(count - 1, index));
      this.point({ row: clamp(at.row + rows, map.rows), column: clamp(at.column + columns, map.columns) }, number);
    } else if (event.key === "Enter" || event.key === " ") {
      this.chooseRow(at.row);
      this.announcer.announce(`The row of ${this.axes.rows.labels[this.row]} can be edited.`);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  get fileName() {
    return `regard-experiment-${this.selected.attention}.${this.selected.head}`.replace(/[^\w.-]+/g, "_");
  }

  /** All weights after the interventions, as TSV. */
  get tsv() {
    return toTsv(this.figureInputs[1]);
  }
}
