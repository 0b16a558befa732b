/** Comparison of looks: their attentions, the selection of one of them, and the difference of two maps. */

import { change, fill, h } from "../core/dom.js";
import { Attentions, Weights } from "../weights/maps.js";
import { Kernel } from "../weights/kernel.js";
import { HeatMap } from "../attention/heatmap.js";
import { Table } from "../attention/table.js";
import { icon } from "../core/shell.js";
import { shareOf } from "../core/colors.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {import("../attention/heatmap.js").Shot} Shot */

/** Duration of each look in the animation, in milliseconds. */
const PACE = 700;

/** The looks of a scene: those that are compared, or the only one. */
export class Members {
  /** @param {import("../core/host.js").Host} host */
  constructor(host) {
    const { scene } = host;
    const parts = scene.compared ?? [{ label: "" }];
    const kernel = new Kernel();
    /** @type {string[]} */
    this.labels = parts.map((part) => part.label);
    // Keys that a part lacks are those of the scene.
    this.all = parts.map((part) => new Attentions({ ...host, scene: { ...scene, ...part } }, kernel));
    /** @type {Map<string, boolean>} */
    this.sameTokens = new Map();
  }

  get length() {
    return this.all.length;
  }

  /** The attentions of the look that a head belongs to. @param {Shown} shown @returns {Attentions} */
  of(shown) {
    return this.all[shown.of ?? 0];
  }

  /** Whether there is such a head. @param {Shown | null | undefined} shown */
  has(shown) {
    return Boolean(shown && this.of(shown)?.has(shown));
  }

  /** The label of a head's look, if there are several. @param {Shown} shown */
  labelOf(shown) {
    return this.length > 1 ? this.labels[shown.of ?? 0] : "";
  }

  /**
   * The same head of another look or, in a different model, one of the same kind with a similar layer and head index.
   * @param {Shown} shown @param {number} of @returns {Shown}
   */
  fitting(shown, of) {
    const same = { ...shown, of };
    if (this.has(same)) return same;
    const mine = this.of(shown).byName.get(shown.attention);
    const theirs = this.all[of].scene.attentions;
    const kin = theirs.filter((one) => one.kind === mine.kind);
    const some = kin.length ? kin : theirs;
    const like = some[Math.min(some.length - 1, mine.layer ?? 0)];
    const head = shown.head === "mean" ? (like.heads > 1 ? "mean" : 0) : Math.min(shown.head, like.heads - 1);
    return { attention: like.name, head, of };
  }

  /** Whether two heads have the same tokens, so that their cells correspond. @param {Shown} a @param {Shown} b */
  alike(a, b) {
    const [mine, theirs] = [a, b].map((one) => this.of(one).byName.get(one.attention));
    if ((a.of ?? 0) === (b.of ?? 0)) return mine.rows === theirs.rows && mine.columns === theirs.columns;
    const key = [a.of, mine.rows, mine.columns, b.of, theirs.rows, theirs.columns].join(" ");
    if (!this.sameTokens.has(key)) {
      const [one, other] = [a, b].map((head) => this.of(head).axesOf(head.attention, false));
      const same = ["rows", "columns"].every(
        (axis) => JSON.stringify(one[axis].labels) === JSON.stringify(other[axis].labels),
      );
      this.sameTokens.set(key, same);
    }
    return this.sameTokens.get(key);
  }
}

/** Selection of a look: a list for two, a slider with an animation for more. */
export class Chooser {
  /** @param {string[]} labels @param {string} name @param {(of: number) => void} chosen */
  constructor(labels, name, chosen) {
    this.labels = labels;
    this.chosen = chosen;
    this.at = 0;
    this.playing = 0;
    this.element = labels.length > 2 ? this.slider(name) : this.list(name);
  }

  /** @param {string} name */
  list(name) {
    this.input = h(
      "select",
      { class: "member", "aria-label": name, onchange: () => this.chosen(Number(this.input.value)) },
      this.labels.map((label, of) => h("option", { value: of }, label)),
    );
    return h("p", { class: "chooser" }, this.input);
  }

  /** @param {string} name */
  slider(name) {
    const most = this.labels.length - 1;
    this.input = h("input", {
      type: "range",
      min: 0,
      max: most,
      step: 1,
      "aria-label": name,
      oninput: () => {
        this.pause();
        this.chosen(Number(this.input.value));
      },
    });
    this.label = h("output", { "aria-hidden": "true" });
    this.play = h(
      "button",
      {
        type: "button",
        class: "round",
        "data-saved": "no",
        "aria-label": "Play",
        "aria-pressed": "false",
        onclick: () => (this.playing ? this.pause() : this.start()),
      },
      icon("M8 5l11 7-11 7Z"),
    );
    return h("p", { class: "chooser" }, this.play, this.input, this.label);
  }

  start() {
    const last = this.labels.length - 1;
    change(this.play, { "aria-pressed": "true" });
    if (this.at === last) this.chosen(0);
    this.playing = window.setInterval(() => {
      if (this.at >= last || !this.element.isConnected) this.pause();
      else this.chosen(this.at + 1);
    }, PACE);
  }

  pause() {
    window.clearInterval(this.playing);
    this.playing = 0;
    change(this.play, { "aria-pressed": "false" });
  }

  /** Shows which look is selected. @param {number} of */
  mark(of) {
    this.at = of;
    this.input.value = String(of);
    if (!this.label) return;
    change(this.input, { "aria-valuetext": this.labels[of] });
    this.label.textContent = this.labels[of];
  }
}

/** The difference of two maps of the same tokens. */
class DifferenceWeights extends Weights {
  /** @param {Weights} one @param {Weights} other */
  constructor(one, other) {
    super(one.rows, one.columns);
    this.one = one;
    this.other = other;
    this.signed = true;
  }

  get whole() {
    return this.one.whole && this.other.whole;
  }

  rowsInto(rows, from, to, out) {
    if (this.whole) super.rowsInto(rows, from, to, out);
    else this.compute(rows, from, to, out);
  }

  compute(rows, from, to, out) {
    const less = new Float32Array(rows.length * (to - from));
    this.one.rowsInto(rows, from, to, out);
    this.other.rowsInto(rows, from, to, less);
    for (let i = 0; i < less.length; i++) out[i] -= less[i];
  }

  computeExactly(row) {
    const less = this.other.exact(row);
    return this.one.exact(row).map((weight, s) => weight - less[s]);
  }
}

/** The third figure: the difference of the first two, as a map or a table. */
export class Difference {
  /** @param {import("../core/scheduler.js").Work} work @param {import("../attention/heatmap.js").Told} told */
  constructor(work, told) {
    this.figures = { map: new HeatMap(work, "map difference", told), table: new Table(told) };
    this.figure = this.figures.map;
    this.place = h("div", { class: "place" });
    this.legend = h("div", { class: "legend" });
    this.element = h(
      "article",
      { class: "panel difference", "aria-label": "Difference", hidden: true },
      h("header", {}, h("h2", {}, "A − B")),
      h("p", { class: "says" }, "Blue (+): A attends more. Orange (−): B attends more."),
      this.place,
      this.legend,
    );
    new ResizeObserver(() => this.element.hidden || this.figure.lay()).observe(this.place);
  }

  /** Whether differences can be shown in this form. @param {string} form */
  fits(form) {
    return form in this.figures;
  }

  /** @param {string} form @param {Shot} one @param {Shot} other @param {any} painter @param {string} scale */
  show(form, one, other, painter, scale) {
    if (this.map?.one !== one.map || this.map?.other !== other.map)
      this.map = new DifferenceWeights(one.map, other.map);
    this.element.hidden = false;
    this.figure = this.figures[form];
    if (form !== "map") this.figures.map.rest();
    if (this.place.firstChild !== this.figure.element) fill(this.place, this.figure.element);
    const name = `the difference between ${one.name} and ${other.name}`;
    const rounded = one.rounded || other.rounded;
    this.legend.hidden = form !== "map";
    this.drawLegend(painter, scale);
    this.figure.show({ ...one, map: this.map, painter, name, rounded, gold: null });
  }

  hide() {
    this.element.hidden = true;
    this.figures.map.rest();
  }

  /** The difference at a cell. @param {{row: number, column: number}} cell */
  at(cell) {
    return this.map.exact(cell.row)[cell.column];
  }

  /** @param {any} painter @param {string} scale */
  drawLegend(painter, scale) {
    const canvas = h("canvas", { width: 255, height: 1 });
    const context = canvas.getContext("2d");
    const image = context.createImageData(255, 1);
    painter.fillShares(
      Float32Array.from({ length: 255 }, (_, i) => (i - 127) / 127),
      image.data,
    );
    context.putImageData(image, 0, 0);
    const ticks = [-1, -0.5, 0, 0.5, 1].map((weight) => {
      const tick = h("span", { class: "tick" }, weight < 0 ? `−${-weight}` : weight > 0 ? `+${weight}` : "0");
      tick.style.left = `${50 + 50 * Math.sign(weight) * shareOf(scale, Math.abs(weight))}%`;
      return tick;
    });
    fill(
      this.legend,
      h("span", { class: "name" }, "Difference"),
      h("div", { class: "scale" }, canvas, h("div", { class: "ticks" }, ticks)),
    );
  }
}
