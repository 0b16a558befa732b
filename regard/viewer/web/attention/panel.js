/** One figure of the attention view with its selection of a head, and the head that is selected at first. */

import { informationOf, mayLook } from "../weights/maths.js";
import { fill, h } from "../core/dom.js";
import { HeatMap } from "./heatmap.js";
import { Lines } from "./lines.js";
import { Prose } from "./shaded_text.js";
import { Table } from "./table.js";
import { headCalled, kindCalled, kindsOf } from "./overview.js";
import { Chooser } from "../comparison/comparison.js";
import { icon } from "../core/shell.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {import("../core/state.js").View} View */
/** @typedef {import("./heatmap.js").Cell} Cell */
/** @typedef {import("./heatmap.js").Shot} Shot */

/** Up to this number of cells, all heads are evaluated to find the most informative one. */
const TRIED = 3 * 2 ** 20;

/**
 * Selects the initial head: the one whose rows are most informative about their positions, of cross-attention if there is
 * any. For long texts, where this would take too long, a head of a later layer.
 * @param {import("../weights/maps.js").Attentions} attentions @returns {Promise<Shown>}
 */
async function firstShown(attentions) {
  const list = attentions.scene.attentions;
  const { opens } = attentions.scene;
  if (opens?.attention) {
    const asked = { attention: opens.attention, head: opens.head ?? "mean" };
    return attentions.has(asked) ? asked : { ...asked, head: 0 };
  }
  const cross = list.filter((one) => one.kind === "cross");
  const some = cross.length ? cross : list;
  const cells = some.reduce((sum, { q, k, heads }) => sum + heads * q.shape[0] * k.shape[0], 0);
  if (cells > TRIED) return { attention: some[Math.floor((2 * some.length) / 3)].name, head: 0 };
  let best = { information: -1, shown: { attention: some[0].name, head: 0 } };
  for (const { name, heads } of some) {
    await attentions.load(name);
    for (let head = 0; head < heads; head++) {
      const map = attentions.map({ attention: name, head }, false);
      const information = informationOf(map.all(), map.rows, map.columns);
      if (information > best.information) best = { information, shown: { attention: name, head } };
    }
  }
  return best.shown;
}

/**
 * Selects the initial head of the last look; with two looks, of both.
 * @param {import("../comparison/comparison.js").Members} members @returns {Promise<{shown: Shown, other?: Shown}>}
 */
export async function openingOf(members) {
  const last = members.length - 1;
  const shown = await firstShown(members.all[last]);
  if (last === 0) return { shown };
  const there = { ...shown, of: last };
  return last === 1 ? { shown: members.fitting(there, 0), other: there } : { shown: there };
}

/** One of the two figures with its selection of attention and head. */
export class Panel {
  /** @param {import("./attention_view.js").Heads} heads @param {number} number */
  constructor(heads, number) {
    this.heads = heads;
    this.number = number;
    const { members } = heads;
    /** The look whose attentions are listed. @type {import("../weights/maps.js").Attentions | null} */
    this.offered = null;
    this.attention = h("select", {
      class: "attention",
      "aria-label": "Attention",
      onchange: () => this.choose({ attention: this.attention.value }),
    });
    this.chooser = members.length > 1 ? new Chooser(members.labels, "Compared item", (of) => this.turnTo(of)) : null;
    this.wrote = h("p", { class: "wrote" });
    this.head = h("select", {
      class: "head",
      "aria-label": "Head",
      onchange: () => this.choose({ head: this.head.value === "mean" ? "mean" : Number(this.head.value) }),
    });
    this.previous = h(
      "button",
      { type: "button", class: "round", "aria-label": "Previous head", onclick: () => heads.step(number, 0, -1) },
      icon("M14 6l-6 6 6 6"),
    );
    this.next = h(
      "button",
      { type: "button", class: "round", "aria-label": "Next head", onclick: () => heads.step(number, 0, 1) },
      icon("M10 6l6 6-6 6"),
    );
    this.place = h("div", { class: "place" });
    this.says = h("p", { class: "says" });
    this.element = h(
      "article",
      {
        class: "panel",
        "data-mark": number ? "second" : "first",
        onfocusin: () => heads.activate(number),
        onpointerdown: () => heads.activate(number),
      },
      h(
        "header",
        {},
        h("span", { class: "mark", "aria-hidden": "true" }, "AB"[number]),
        h("h2", {}, this.attention, this.head),
        h("span", { class: "steps", "data-saved": "no" }, this.previous, this.next),
      ),
      this.chooser?.element,
      this.wrote,
      this.says,
      this.place,
    );
    /** @type {Record<string, any>} */
    this.figures = {};
    /** @type {Shot | null} */
    this.shot = null;
    new ResizeObserver(() => this.figure?.lay()).observe(this.place);
  }

  /** @param {any} one @param {any[]} list @param {Set<string>} kinds */
  layerCalled(one, list, kinds) {
    const alike = list.filter((other) => other.kind === one.kind && other.layer === one.layer).length > 1;
    const name = kindCalled(one.kind, kinds);
    return one.layer === null || alike ? `${name}, ${one.name}` : `${name}, layer ${one.layer}`;
  }

  /** The attentions of the look on display. */
  get attentions() {
    return this.heads.members.of(this.shown);
  }

  /** Lists the attentions of the look, if it has changed. */
  offer() {
    const { attentions } = this;
    if (this.offered === attentions) return;
    this.offered = attentions;
    const list = attentions.scene.attentions;
    const kinds = kindsOf(list);
    fill(
      this.attention,
      [...kinds].map((kind) =>
        h(
          "optgroup",
          { label: kindCalled(kind, kinds) },
          list
            .filter((one) => one.kind === kind)
            .map((one) => h("option", { value: one.name }, this.layerCalled(one, list, kinds))),
        ),
      ),
    );
    // Texts of this look that the page's title does not show.
    const { texts } = attentions.scene;
    const common = this.heads.scene.texts;
    const own = ["source", "target"].filter((side) => texts[side] !== common[side]).map((side) => texts[side].trim());
    const label = this.heads.members.labelOf(this.shown);
    this.wrote.textContent = own.filter((text) => text && text !== label).join("  →  ");
  }

  /** Shows the same head of another look. @param {number} of index of the look */
  turnTo(of) {
    const next = this.heads.members.fitting(this.shown, of);
    this.heads.state.set(this.number ? { other: next } : { shown: next });
  }

  /** @param {Partial<Shown>} part */
  choose(part) {
    const now = this.shown;
    const { heads } = this.attentions.byName.get(part.attention ?? now.attention);
    const next = { ...now, ...part };
    if (next.head === "mean" ? heads === 1 : next.head >= heads) next.head = heads - 1;
    this.heads.state.set(this.number ? { other: next } : { shown: next });
  }

  /** @returns {Shown} */
  get shown() {
    return this.number ? this.heads.state.view.other : this.heads.state.view.shown;
  }

  get figure() {
    return this.figures[this.heads.state.view.form];
  }

  /** Event handlers of the figures. */
  get told() {
    const { heads, number } = this;
    return {
      point: (/** @type {Cell | null} */ cell) => heads.point(number, cell),
      pin: (/** @type {Cell} */ cell) => heads.pin(number, cell),
      zoom: (/** @type {any} */ zoom) => heads.zoom(number, zoom),
    };
  }

  /** @param {string} form */
  make(form) {
    const { heads, number, told } = this;
    if (form === "map") return new HeatMap(heads.work, `map ${number}`, told);
    if (form === "lines") return new Lines(told);
    return form === "text" ? new Prose(told) : new Table(told);
  }

  /** Pauses drawing while the figure is not visible. */
  rest() {
    this.figures.map?.rest();
  }

  /** Draws the figure of a loaded attention. @param {View} view */
  show(view) {
    const { attentions, shown } = this;
    const attention = attentions.byName.get(shown.attention);
    this.offer();
    this.chooser?.mark(shown.of ?? 0);
    this.attention.value = shown.attention;
    fill(
      this.head,
      attention.heads > 1 ? h("option", { value: "mean" }, `mean of ${attention.heads} heads`) : null,
      Array.from({ length: attention.heads }, (_, i) =>
        h("option", { value: i }, attention.heads > 1 ? `head ${i}` : "single head"),
      ),
    );
    this.head.value = String(shown.head);
    this.previous.hidden = this.next.hidden = attention.heads === 1;
    fill(this.says, this.heads.says(attentions, attention));
    const { rows, columns } = attentions.axesOf(shown.attention, view.words);
    const map = attentions.map(shown, view.words);
    const [T, S] = [attention.q.shape[0], attention.k.shape[0]];
    const gold = this.heads.goldOf(attentions, attention, rows, columns);
    const label = this.heads.members.labelOf(shown);
    const shut =
      view.words || !attention.mask
        ? null
        : (/** @type {number} */ t, /** @type {number} */ c) => !mayLook(attention.mask, t + S - T, c);
    this.shot = {
      map,
      rows,
      columns,
      zoom: this.heads.zoomOf(this.number, map),
      painter: this.heads.painter(),
      name: (label ? `${label}: ` : "") + headCalled(attentions.scene.attentions, shown),
      gold,
      shut,
      rounded: attention.q.type !== "float32",
    };
    if (view.form !== "map") this.rest();
    const figure = (this.figures[view.form] ??= this.make(view.form));
    if (this.place.firstChild !== figure.element) fill(this.place, figure.element);
    const { cursor, pin } = this.heads.marksOf(this.number);
    [figure.cursor, figure.pin] = [cursor, pin];
    figure.show(this.shot);
  }
}
