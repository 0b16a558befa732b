/** The effect of every head on the output: a grid per kind of attention, layers × heads, in diverging colors. */

import { h, setAttributes, setChildren } from "../core/dom.js";
import { makeVisible, truncate } from "../core/tokens.js";
import { headLabel, kindLabel, kindsOf } from "../attention/overview.js";
import { isDark } from "../core/shell.js";
import { ExplanationSource } from "./explanations_source.js";
import { markFocusable, moveFocus } from "./grid_keys.js";
import { divergingLegend, formatChange, signedColormap } from "./signed_colors.js";
import WHY_STYLE from "./why.css";

/** Above this number of heads, cells show no numbers. */
const MAX_NUMBERED_HEADS = 8;

export class EffectGrid {
  /** @param {Pick<import("../core/shell.js").Context, "host" | "attentions" | "state">} context */
  constructor({ host, attentions, state }) {
    this.scene = attentions.scene;
    this.state = state;
    this.source = ExplanationSource.of(host);
    /** @type {import("./explanations_source.js").Effects | null} */
    this.effects = null;
    this.step = -1;
    /** Buttons by "attention:head". @type {Map<string, HTMLButtonElement>} */
    this.cells = new Map();
    this.status = h("p", { class: "secondary", role: "status" });
    this.reading = h("p", { class: "effect-reading" });
    this.legend = h("div", {});
    this.body = h("div", { class: "effect-groups" });
    const { tokens = [] } = this.scene.explained ?? {};
    this.choice = h(
      "select",
      { "aria-label": "Output", onchange: () => this.choose(Number(this.choice.value)) },
      h("option", { value: -1 }, "the entire output"),
      tokens.map((/** @type {string} */ token, /** @type {number} */ i) => h("option", { value: i }, `${i + 1}: ${truncate(makeVisible(token), 24)}`)),
    );
    this.element = h(
      "section",
      { class: "why-sheet effects", "aria-label": "Effect of every head" },
      h("style", {}, WHY_STYLE),
      h("h2", {}, "Effect of every head on ", tokens.length > 1 ? this.choice : "the output"),
      h("p", { class: "secondary" }, "Change of the log-probability if one head is turned off. Orange: the head makes the output more likely. Heads that can replace each other all seem unimportant."),
      this.status,
      this.body,
      this.reading,
      this.legend,
    );
    this.element.hidden = !this.source.supports("effects");
  }

  /** Computes the effects, once, and draws them. */
  async update() {
    if (this.element.hidden) return;
    if (!this.source.has("effects")) {
      setChildren(this.status, "This page contains neither the effects nor the model. Save it with ", h("code", {}, "--explain"), " or ", h("code", {}, "--with-model"), ".");
      return;
    }
    if (!this.effects) {
      try {
        this.effects = await this.source.effects((done) => setChildren(this.status, `Turning off one head after the other: ${Math.round(100 * done)}%`));
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
        const grid = h(
          "div",
          { role: "grid", class: "effect-grid", "aria-label": `${label}: one row per layer, one column per head` },
          h(
            "div",
            { role: "row", class: "effect-row" },
            h("span", { role: "columnheader", class: "layer" }, h("span", { class: "visually-hidden" }, "layer")),
            Array.from({ length: heads }, (_, head) => h("span", { role: "columnheader", class: "head" }, String(head))),
          ),
          layers.map((/** @type {any} */ one, /** @type {number} */ row) =>
            h("div", { role: "row", class: "effect-row" }, h("span", { role: "rowheader", class: "layer", title: one.name }, String(one.layer ?? row)), Array.from({ length: one.heads }, (_, head) => this.cell(one.name, head, heads))),
          ),
        );
        grid.style.setProperty("--heads", String(heads));
        return h("div", { class: "effect-group" }, h("h3", {}, label), grid);
      }),
    );
  }

  /** @param {string} attention @param {number} head @param {number} heads */
  cell(attention, head, heads) {
    const read = () => this.read(attention, head);
    const button = h("button", {
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
    return [...this.body.querySelectorAll(".effect-row:has(.effect)")].map((row) => /** @type {HTMLElement[]} */ ([...row.querySelectorAll(".effect")]));
  }

  /** Writes the effect of a head in words. @param {string} attention @param {number} head */
  read(attention, head) {
    const value = this.valueOf(attention, head);
    const what = this.step < 0 ? "the output" : `“${makeVisible(this.scene.explained.tokens[this.step])}”`;
    const factor = Math.exp(-Math.abs(value));
    const times = factor > 0.995 ? "about as likely" : `${(1 / factor).toPrecision(2)} times ${value < 0 ? "less" : "more"} likely`;
    setChildren(this.reading, h("strong", {}, headLabel(this.scene.attentions, { attention, head })), `: ${formatChange(value)}. Without this head, ${what} is ${times}. Select it to see its attention.`);
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
      setChildren(button, button.classList.contains("dense") ? null : h("span", { "aria-hidden": "true" }, formatChange(value)));
    }
    setChildren(this.legend, divergingLegend(colormap, maximum, "less likely", "more likely"));
    const best = entries.reduce((a, b) => (Math.abs(b.value) > Math.abs(a.value) ? b : a));
    this.read(best.attention, best.head);
    performance.mark("regard-effects");
  }
}
