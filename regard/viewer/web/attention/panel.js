/** One figure of the attention view with its selection of a head, and the head that is selected at first. */

import { LookChooser } from "./comparison.js";
import { Lines, ShadedText, Table } from "./forms.js";
import { HeatMap } from "./heatmap.js";
import { attentionLabel, headLabel, kindLabel, kindsOf } from "./overview.js";
import { html, setChildren } from "../core/dom.js";
import { icon } from "../core/shell.js";
import { HEAD_LABELS, isPositional } from "../weights/maps.js";
import { mayAttend } from "../weights/maths.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("../core/state.js").View} View */
/** @typedef {import("./heatmap.js").Cell} Cell */
/** @typedef {import("./heatmap.js").FigureData} FigureData */

/** Up to this number of cells, all heads are evaluated to find the most informative one. */
const MAX_SEARCHED_CELLS = 3 * 2 ** 20;
/** Bits by which heads that follow positions alone are ranked lower: they are chosen only if there are no others. */
const POSITIONAL_PENALTY = 100;

/**
 * Selects the most informative of some attentions' heads: the one whose rows tell most about their positions, but not
 * one that
 * always attends to the previous, the same or the first token (see head_labels.js).
 * @param {import("../weights/maps.js").Attentions} attentions @param {any[]} candidates @returns {Promise<HeadRef>}
 */
export async function mostInformativeHead(attentions, candidates) {
  const cells = candidates.reduce((sum, { q, k, heads }) => sum + heads * q.shape[0] * k.shape[0], 0);
  // For long texts, where this would take too long, a head of a later layer.
  if (cells > MAX_SEARCHED_CELLS)
    return { attention: candidates[Math.floor((2 * candidates.length) / 3)].name, head: 0 };
  let best = { information: -Infinity, selected: { attention: candidates[0].name, head: 0 } };
  for (const { name, heads } of candidates) {
    await attentions.load(name);
    for (let head = 0; head < heads; head++) {
      const label = attentions.labelOf({ attention: name, head });
      const rank = label.information - (isPositional(label) ? POSITIONAL_PENALTY : 0);
      if (rank > best.information) best = { information: rank, selected: { attention: name, head } };
    }
  }
  return best.selected;
}

/**
 * The head that a page opens with: the one that the scene selects, or the most informative one, of cross-attention if
 * there is any.
 * @param {import("../weights/maps.js").Attentions} attentions @returns {Promise<HeadRef>}
 */
async function openingHead(attentions) {
  const { initial, attentions: list } = attentions.scene;
  if (initial?.attention) {
    const requested = { attention: initial.attention, head: initial.head ?? "mean" };
    return attentions.has(requested) ? requested : { ...requested, head: 0 };
  }
  const cross = list.filter((one) => one.kind === "cross");
  return mostInformativeHead(attentions, cross.length ? cross : list);
}

/**
 * Selects the initial head of the last look; with two looks, of both.
 * @param {import("./comparison.js").ComparedLooks} looks @returns {Promise<{selected: HeadRef, other?: HeadRef}>}
 */
export async function initialSelection(looks) {
  const last = looks.length - 1;
  const selected = await openingHead(looks.all[last]);
  if (last === 0) return { selected };
  const lastRef = { ...selected, look: last };
  return last === 1 ? { selected: looks.correspondingHead(lastRef, 0), other: lastRef } : { selected: lastRef };
}

/**
 * Describes an attention in a sentence. @param {import("../weights/maps.js").Attentions} attentions
 * @param {any} attention
 */
function describeAttention(attentions, attention) {
  const keys = attentions.axesOf(attention.name, false).columns.title.toLowerCase();
  if (attention.rows === "query")
    return `A learned query attends to the ${keys}; the label is predicted from the result.`;
  if (attention.kind === "cross") return `To predict each token, the decoder attends to the ${keys}.`;
  if (attention.kind === "masked") return `Each token attends to itself and the preceding tokens of the ${keys}.`;
  return `Each token attends to all tokens of the ${keys}.`;
}

/**
 * Describes what a head does, with the measured share of its weight.
 * @param {import("../weights/maps.js").HeadLabel | null} label
 */
function describeHead(label) {
  if (!label) return "";
  const percent = `${Math.round(100 * label.share)}%`;
  const measured =
    { alignment: `${percent} of the maximum information`, diffuse: `${percent} of the maximum entropy`, none: "" }[
      label.label
    ] ?? `${percent} of its weight`;
  return ["This head ", html("strong", {}, HEAD_LABELS[label.label].text), measured ? ` (${measured}).` : "."];
}

/**
 * Returns a predicate for cells that are gold links, or null if there are no gold links.
 * @param {import("../weights/maps.js").Attentions} attentions @param {any} attention @param {any} rows
 * @param {any} columns
 */
function goldLinkTest(attentions, attention, rows, columns) {
  if (!attentions.scene.links || attention.kind !== "cross") return null;
  const links = new Set(attentions.scene.links.map(String));
  return (/** @type {number} */ row, /** @type {number} */ column) =>
    links.has(`${rows.wordAt(row)},${columns.wordAt(column)}`);
}

/** One of the two figures with its selection of attention and head. */
export class Panel {
  /** @param {import("./view.js").AttentionView} parent @param {number} index */
  constructor(parent, index) {
    this.parent = parent;
    this.index = index;
    const { looks } = parent;
    /** The look whose attentions are listed. @type {import("../weights/maps.js").Attentions | null} */
    this.listed = null;
    this.attention = html("select", {
      class: "attention",
      "aria-label": "Attention",
      onchange: () => this.choose({ attention: this.attention.value }),
    });
    this.chooser =
      looks.length > 1 ? new LookChooser(looks.labels, "Compared item", (look) => this.selectLook(look)) : null;
    this.ownTexts = html("p", { class: "own-texts" });
    this.head = html("select", {
      class: "head",
      "aria-label": "Head",
      onchange: () => this.choose({ head: this.head.value === "mean" ? "mean" : Number(this.head.value) }),
    });
    this.previous = html(
      "button",
      { type: "button", class: "round", "aria-label": "Previous head", onclick: () => parent.step(index, 0, -1) },
      icon("M14 6l-6 6 6 6"),
    );
    this.next = html(
      "button",
      { type: "button", class: "round", "aria-label": "Next head", onclick: () => parent.step(index, 0, 1) },
      icon("M10 6l6 6-6 6"),
    );
    this.container = html("div", { class: "figure-container" });
    this.description = html("p", { class: "description" });
    this.turnOff = html(
      "button",
      { type: "button", class: "small", onclick: () => parent.turnOff(this.selected) },
      "Turn this head off",
    );
    this.showArithmetic = html(
      "button",
      { type: "button", class: "small", onclick: () => parent.showArithmetic(this) },
      "Show the arithmetic",
    );
    this.actions = html(
      "p",
      { class: "actions", "data-export": "no" },
      index ? null : parent.headSet.addButton,
      this.turnOff,
      this.showArithmetic,
    );
    this.element = html(
      "article",
      {
        class: "panel",
        "data-mark": index ? "second" : "first",
        onfocusin: () => parent.activate(index),
        onpointerdown: () => parent.activate(index),
      },
      html(
        "header",
        {},
        html("span", { class: "mark", "aria-hidden": "true" }, "AB"[index]),
        html("h2", {}, this.attention, this.head),
        html("span", { class: "steps", "data-export": "no" }, this.previous, this.next),
        this.actions,
      ),
      this.chooser?.element,
      this.ownTexts,
      this.description,
      index ? null : parent.headSet.element,
      this.container,
    );
    /** @type {Record<string, any>} */
    this.figures = {};
    /** @type {FigureData | null} */
    this.figureData = null;
    new ResizeObserver(() => this.figure?.layout()).observe(this.container);
  }

  /** The attentions of the look on display. */
  get attentions() {
    return this.parent.looks.attentionsOf(this.selected);
  }

  /** Lists the attentions of the look, if it has changed. */
  listAttentions() {
    const { attentions } = this;
    if (this.listed === attentions) return;
    this.listed = attentions;
    const list = attentions.scene.attentions;
    const kinds = kindsOf(list);
    setChildren(
      this.attention,
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
    // Texts of this look that the page's title does not show.
    const { texts } = attentions.scene;
    const common = this.parent.scene.texts;
    const own = ["source", "target"].filter((side) => texts[side] !== common[side]).map((side) => texts[side].trim());
    const label = this.parent.looks.labelOf(this.selected);
    const output = attentions.scene.own_output;
    const differs = typeof output === "string" && output.trim() !== texts.target.trim();
    this.ownTexts.textContent = [
      ...own.filter((text) => text && text !== label),
      differs ? `${label} itself outputs: ${output.trim() || "nothing"}` : "",
    ]
      .filter(Boolean)
      .join("  →  ");
  }

  /** Shows the same head of another look. @param {number} look index of the look */
  selectLook(look) {
    const next = this.parent.looks.correspondingHead(this.selected, look);
    this.parent.state.set(this.index ? { other: next } : { selected: next });
  }

  /** @param {Partial<HeadRef>} part */
  choose(part) {
    const now = this.selected;
    const { heads } = this.attentions.byName.get(part.attention ?? now.attention);
    const next = { ...now, ...part };
    if (next.head === "mean" ? heads === 1 : next.head >= heads) next.head = heads - 1;
    this.parent.state.set(this.index ? { other: next } : { selected: next });
  }

  /** @returns {HeadRef} */
  get selected() {
    return this.index ? this.parent.state.view.other : this.parent.state.view.selected;
  }

  get figure() {
    return this.figures[this.parent.state.view.form];
  }

  /** Event handlers of the figures. */
  get handlers() {
    const { parent, index } = this;
    return {
      point: (/** @type {Cell | null} */ cell) => parent.point(index, cell),
      pin: (/** @type {Cell} */ cell) => parent.pin(index, cell),
      zoom: (/** @type {any} */ zoom) => parent.zoom(index, zoom),
    };
  }

  /** @param {string} form */
  createFigure(form) {
    const { parent, index, handlers } = this;
    if (form === "map") return new HeatMap(parent.scheduler, `map ${index}`, handlers);
    if (form === "lines") return new Lines(handlers);
    return form === "text" ? new ShadedText(handlers) : new Table(handlers);
  }

  /** Pauses drawing while the figure is not visible. */
  pause() {
    this.figures.map?.pause();
  }

  /** Draws the figure of a loaded attention. @param {View} view */
  show(view) {
    const { attentions, selected } = this;
    const attention = attentions.byName.get(selected.attention);
    this.listAttentions();
    this.chooser?.mark(selected.look ?? 0);
    this.attention.value = selected.attention;
    setChildren(
      this.head,
      attention.heads > 1 ? html("option", { value: "mean" }, `mean of ${attention.heads} heads`) : null,
      Array.from({ length: attention.heads }, (_, i) =>
        html("option", { value: i }, attention.heads > 1 ? `head ${i + 1}` : "single head"),
      ),
    );
    this.head.value = String(selected.head);
    this.previous.hidden = this.next.hidden = attention.heads === 1;
    setChildren(
      this.description,
      describeAttention(attentions, attention),
      " ",
      describeHead(attentions.labelOf(selected)),
    );
    this.turnOff.hidden = selected.head === "mean" || Boolean(attentions.scene.compared);
    this.showArithmetic.hidden = !attentions.scene.trace;
    const { rows, columns } = attentions.axesOf(selected.attention, view.words);
    const map = attentions.map(selected, view.words);
    const [T, S] = [attention.q.shape[0], attention.k.shape[0]];
    const gold = goldLinkTest(attentions, attention, rows, columns);
    const label = this.parent.looks.labelOf(selected);
    const isMasked =
      view.words || !attention.mask
        ? null
        : (/** @type {number} */ t, /** @type {number} */ c) => !mayAttend(attention.mask, t + S - T, c);
    this.figureData = {
      map,
      rows,
      columns,
      zoom: this.parent.zoomOf(this.index, map),
      colormap: this.parent.colormap(),
      name: (label ? `${label}: ` : "") + headLabel(attentions.scene.attentions, selected),
      gold,
      isMasked,
      rounded: attention.q.type !== "float32",
      layers: this.index ? null : this.parent.headSet.layers(view.words),
    };
    if (view.form !== "map") this.pause();
    const figure = (this.figures[view.form] ??= this.createFigure(view.form));
    const hadFocus = this.container.contains(document.activeElement);
    if (this.container.firstChild !== figure.element) setChildren(this.container, figure.element);
    const { cursor, pin } = this.parent.highlightsOf(this.index);
    [figure.cursor, figure.pin] = [cursor, pin];
    figure.show(this.figureData);
    // Another form keeps the focus, so that keys continue to work.
    if (hadFocus && !this.container.contains(document.activeElement)) {
      const target = figure.element.tabIndex >= 0 ? figure.element : figure.element.querySelector("[tabindex]");
      /** @type {HTMLElement | null} */ (target)?.focus({ preventScroll: true });
    }
  }
}
