/** Comparison of looks: their attentions, the selection of one of them, and the difference of two maps. */

import { Table } from "./forms.js";
import { HeatMap } from "./heatmap.js";
import { scaleToUnit } from "../core/colors.js";
import { html, setAttributes, setChildren } from "../core/dom.js";
import { icon } from "../core/shell.js";
import { Kernel } from "../weights/kernel.js";
import { AttentionMap, Attentions } from "../weights/maps.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("./heatmap.js").FigureData} FigureData */

/** Duration of each look while the slider plays, in milliseconds. */
const FRAME_DURATION = 700;

/** The looks of a scene: those that are compared, or the only one. */
export class ComparedLooks {
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

  /** The attentions of the look that a head belongs to. @param {HeadRef} ref @returns {Attentions} */
  attentionsOf(ref) {
    return this.all[ref.look ?? 0];
  }

  /** Whether there is such a head. @param {HeadRef | null | undefined} ref */
  has(ref) {
    return Boolean(ref && this.attentionsOf(ref)?.has(ref));
  }

  /** The label of a head's look, if there are several. @param {HeadRef} ref */
  labelOf(ref) {
    return this.length > 1 ? this.labels[ref.look ?? 0] : "";
  }

  /**
   * The same head of another look or, in a different model, one of the same kind with a similar layer and head index.
   * @param {HeadRef} ref @param {number} look @returns {HeadRef}
   */
  correspondingHead(ref, look) {
    const same = { ...ref, look };
    if (this.has(same)) return same;
    const attention = this.attentionsOf(ref).byName.get(ref.attention);
    const attentions = this.all[look].scene.attentions;
    const sameKind = attentions.filter((one) => one.kind === attention.kind);
    const candidates = sameKind.length ? sameKind : attentions;
    const match = candidates[Math.min(candidates.length - 1, attention.layer ?? 0)];
    const head = ref.head === "mean" ? (match.heads > 1 ? "mean" : 0) : Math.min(ref.head, match.heads - 1);
    return { attention: match.name, head, look };
  }

  /** Whether two heads have the same tokens, so that their cells correspond. @param {HeadRef} a @param {HeadRef} b */
  haveSameAxes(a, b) {
    const [attentionA, attentionB] = [a, b].map((one) => this.attentionsOf(one).byName.get(one.attention));
    if ((a.look ?? 0) === (b.look ?? 0))
      return attentionA.rows === attentionB.rows && attentionA.columns === attentionB.columns;
    const key = [a.look, attentionA.rows, attentionA.columns, b.look, attentionB.rows, attentionB.columns].join(" ");
    if (!this.sameTokens.has(key)) {
      const [one, other] = [a, b].map((head) => this.attentionsOf(head).axesOf(head.attention, false));
      const same = ["rows", "columns"].every(
        (axis) => JSON.stringify(one[axis].labels) === JSON.stringify(other[axis].labels),
      );
      this.sameTokens.set(key, same);
    }
    return this.sameTokens.get(key);
  }
}

/** Selection of a look: a list for two, a slider that plays for more. */
export class LookChooser {
  /** @param {string[]} labels @param {string} name @param {(look: number) => void} onSelect */
  constructor(labels, name, onSelect) {
    this.labels = labels;
    this.onSelect = onSelect;
    this.at = 0;
    this.timer = 0;
    this.element = labels.length > 2 ? this.slider(name) : this.list(name);
  }

  /** @param {string} name */
  list(name) {
    this.input = html(
      "select",
      { class: "member", "aria-label": name, onchange: () => this.onSelect(Number(this.input.value)) },
      this.labels.map((label, i) => html("option", { value: i }, label)),
    );
    return html("p", { class: "chooser" }, this.input);
  }

  /** @param {string} name */
  slider(name) {
    const most = this.labels.length - 1;
    this.input = html("input", {
      type: "range",
      min: 0,
      max: most,
      step: 1,
      "aria-label": name,
      oninput: () => {
        this.pause();
        this.onSelect(Number(this.input.value));
      },
    });
    this.label = html("output", { "aria-hidden": "true" });
    this.play = html(
      "button",
      {
        type: "button",
        class: "round",
        "data-export": "no",
        "aria-label": "Play",
        "aria-pressed": "false",
        onclick: () => (this.timer ? this.pause() : this.start()),
      },
      icon("M8 5l11 7-11 7Z"),
    );
    return html("p", { class: "chooser" }, this.play, this.input, this.label);
  }

  start() {
    const last = this.labels.length - 1;
    setAttributes(this.play, { "aria-pressed": "true" });
    if (this.at === last) this.onSelect(0);
    this.timer = window.setInterval(() => {
      if (this.at >= last || !this.element.isConnected) this.pause();
      else this.onSelect(this.at + 1);
    }, FRAME_DURATION);
  }

  pause() {
    window.clearInterval(this.timer);
    this.timer = 0;
    setAttributes(this.play, { "aria-pressed": "false" });
  }

  /** Shows which look is selected. @param {number} look */
  mark(look) {
    this.at = look;
    this.input.value = String(look);
    if (!this.label) return;
    setAttributes(this.input, { "aria-valuetext": this.labels[look] });
    this.label.textContent = this.labels[look];
  }
}

/** The difference of two maps of the same tokens. */
class DifferenceMap extends AttentionMap {
  /** @param {AttentionMap} one @param {AttentionMap} other */
  constructor(one, other) {
    super(one.rows, one.columns);
    this.one = one;
    this.other = other;
    this.signed = true;
  }

  get isMaterialized() {
    return this.one.isMaterialized && this.other.isMaterialized;
  }

  readRows(rows, from, to, out) {
    if (this.isMaterialized) super.readRows(rows, from, to, out);
    else this.computeRows(rows, from, to, out);
  }

  computeRows(rows, from, to, out) {
    const subtrahend = new Float32Array(rows.length * (to - from));
    this.one.readRows(rows, from, to, out);
    this.other.readRows(rows, from, to, subtrahend);
    for (let i = 0; i < subtrahend.length; i++) out[i] -= subtrahend[i];
  }

  computeExactRow(row) {
    const subtrahend = this.other.exactRow(row);
    return this.one.exactRow(row).map((weight, s) => weight - subtrahend[s]);
  }
}

/** The third figure: the difference of the first two, as a map or a table. */
export class Difference {
  /**
   * @param {import("../core/scheduler.js").Scheduler} scheduler @param {import("./heatmap.js").FigureHandlers} handlers
   */
  constructor(scheduler, handlers) {
    this.figures = { map: new HeatMap(scheduler, "map difference", handlers), table: new Table(handlers) };
    this.figure = this.figures.map;
    this.container = html("div", { class: "figure-container" });
    this.legend = html("div", { class: "legend" });
    this.element = html(
      "article",
      { class: "panel difference", "aria-label": "Difference", hidden: true },
      html("header", {}, html("h2", {}, "A − B")),
      html("p", { class: "description" }, "Blue (+): A attends more. Orange (−): B attends more."),
      this.container,
      this.legend,
    );
    new ResizeObserver(() => this.element.hidden || this.figure.layout()).observe(this.container);
  }

  /** Whether differences can be shown in this form. @param {string} form */
  supports(form) {
    return form in this.figures;
  }

  /**
   * @param {string} form @param {FigureData} one @param {FigureData} other @param {any} colormap @param {string} scale
   */
  show(form, one, other, colormap, scale) {
    if (this.map?.one !== one.map || this.map?.other !== other.map) this.map = new DifferenceMap(one.map, other.map);
    this.element.hidden = false;
    this.figure = this.figures[form];
    if (form !== "map") this.figures.map.pause();
    if (this.container.firstChild !== this.figure.element) setChildren(this.container, this.figure.element);
    const name = `the difference between ${one.name} and ${other.name}`;
    const rounded = one.rounded || other.rounded;
    this.legend.hidden = form !== "map";
    this.drawLegend(colormap, scale);
    this.figure.show({ ...one, map: this.map, colormap, name, rounded, gold: null });
  }

  hide() {
    this.element.hidden = true;
    this.figures.map.pause();
  }

  /** The difference at a cell. @param {{row: number, column: number}} cell */
  at(cell) {
    return this.map.exactRow(cell.row)[cell.column];
  }

  /** @param {any} colormap @param {string} scale */
  drawLegend(colormap, scale) {
    const canvas = html("canvas", { width: 255, height: 1 });
    const context = canvas.getContext("2d");
    const image = context.createImageData(255, 1);
    colormap.paintShares(
      Float32Array.from({ length: 255 }, (_, i) => (i - 127) / 127),
      image.data,
    );
    context.putImageData(image, 0, 0);
    const ticks = [-1, -0.5, 0, 0.5, 1].map((weight) => {
      const tick = html("span", { class: "tick" }, weight < 0 ? `−${-weight}` : weight > 0 ? `+${weight}` : "0");
      tick.style.left = `${50 + 50 * Math.sign(weight) * scaleToUnit(scale, Math.abs(weight))}%`;
      return tick;
    });
    setChildren(
      this.legend,
      html("span", { class: "name" }, "Difference"),
      html("div", { class: "scale" }, canvas, html("div", { class: "ticks" }, ticks)),
    );
  }
}
