/** The step-by-step view: from the input to the output of the model, with the numbers of one token. */

import { Trace } from "./trace.js";
import { displayedRow } from "./displayed_row.js";
import { ideaFigure, ideaOf } from "./stage_ideas.js";
import { StepCards, TOLERANCE, formatGap } from "./step_cards.js";
import { placePatchButtons } from "../images/patch_picker.js";
import { h, picker, setAttributes, setChildren, tokenText, uniqueId } from "../core/dom.js";
import { tabList } from "../core/shell.js";
import { DEPTHS, storeDepth } from "../core/state.js";
import { bidiIsolate, makeVisible, truncate } from "../core/tokens.js";
import STEPS_STYLE from "./steps.css";

/** @typedef {import("./trace.js").Step} Step */
/** @typedef {{title: string, part: string, side?: string, token?: number, layer?: number, attention?: string, heads?: number, keys?: string}} Section */

/** Number of steps that are computed before the page responds again. */
const STEPS_PER_SLICE = 8;

export class StepsView {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state, scheduler, announcer }) {
    this.host = host;
    this.attentions = attentions;
    this.state = state;
    this.scheduler = scheduler;
    this.announcer = announcer;
    this.traceHeader = host.scene.trace;
    /** @type {Section[]} */
    this.sections = this.traceHeader.sections;
    /** @type {number[][]} the steps of each section */
    this.stepsOf = this.sections.map(() => []);
    // Steps without a section are computed, but not shown.
    this.traceHeader.steps.forEach((/** @type {Step} */ step, /** @type {number} */ n) => this.stepsOf[step.section]?.push(n));
    const { focus, sides } = this.traceHeader;
    /** The selected token of each side. @type {Record<string, number>} */
    this.tokens = Object.fromEntries(Object.keys(sides).map((name) => [name, focus[name] ?? 0]));
    /** Indices of the open sections. @type {Set<number>} */
    this.openSections = new Set();
    this.cards = new StepCards(this);
    /** @type {Trace | null} */
    this.trace = null;
    this.checkedCount = 0;
    this.verdict = h("p", { class: "verdict" });
    this.substitute = h("p", { class: "note", role: "note", hidden: true });
    this.chips = h("div", { class: "sides" });
    this.choice = h("div", { class: "choice" });
    this.list = h("ol", { class: "sections" });
    this.panel = h("div", { role: "tabpanel", id: uniqueId("depth") }, this.list);
    this.depths = tabList("Depth", DEPTHS, this.panel.id, (depth) => this.setDepth(depth));
    this.element = h(
      "div",
      { class: "steps-view", onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) },
      h("style", {}, STEPS_STYLE),
      h("section", { class: "selection-bar", "aria-label": "Selected tokens and heads", "data-export": "no" }, this.chips, this.choice),
      h("div", { class: "bar depth-bar", "data-export": "no" }, this.depths.element, this.verdict),
      this.substitute,
      this.traceHeader.note ? h("p", { class: "note" }, this.traceHeader.note) : null,
      this.panel,
    );
    this.createSelection();
    this.createSections();
  }

  get figureElement() {
    return this.sectionElements.find((one, n) => one && this.openSections.has(n))?.details ?? this.list;
  }

  get fileName() {
    return "regard-steps";
  }

  /** The numbers of the open sections as tab-separated values. */
  get tsv() {
    if (!this.trace) return "";
    const lines = [["step", "formula", "of", "numbers"].join("\t")];
    for (const n of this.openSections) {
      for (const step of this.stepsOf[n]) {
        const row = displayedRow(this, step);
        const { data } = this.trace.value(step);
        lines.push([this.traceHeader.steps[step].id, this.traceHeader.steps[step].formula, row.subject, ...row.indices.map((at) => data[at])].join("\t"));
      }
    }
    return lines.join("\n");
  }

  layout() {}

  /** @param {string} depth */
  setDepth(depth) {
    storeDepth(depth);
    this.state.set({ depth });
  }

  // Selection of tokens and heads

  createSelection() {
    const titles = this.sections.filter((one) => one.attention);
    const named = Object.fromEntries(titles.map((one) => [one.attention, one.title.replace(": one step", "")]));
    this.attention = picker("Attention", named, (attention) => this.goTo(attention));
    this.head = picker("Head", {}, (head) => this.state.set({ selected: { ...this.state.view.selected, head: Number(head) } }));
    this.headLabel = h("label", {}, "Head ", this.head);
    const several = Object.keys(named).length > 1;
    setChildren(this.choice, several ? h("label", {}, "Attention ", this.attention) : null, this.headLabel);
    // Sides that are derived from another one have no selection.
    const selectable = Object.entries(this.traceHeader.sides).filter(([, side]) => !side.of);
    setChildren(
      this.chips,
      selectable.map(([name, side]) => {
        const known = this.host.scene.sides[name];
        const title = (known?.title ?? name.charAt(0).toUpperCase() + name.slice(1)) + (name === "target" && this.host.scene.sides.predicted ? " (input → prediction)" : "");
        const buttons = side.tokens.map((/** @type {string} */ token, /** @type {number} */ t) =>
          h(
            "button",
            { type: "button", role: "radio", class: "chip-token", "data-side": name, "data-token": t, onclick: () => this.selectToken(name, t) },
            tokenText(truncate(this.tokenName(name, t), 40), known?.direction === "rtl"),
          ),
        );
        const group = h(
          "div",
          {
            class: "token-list",
            role: "radiogroup",
            "aria-label": `${title}: selected token`,
            dir: known?.direction ?? "auto",
            onkeydown: (/** @type {KeyboardEvent} */ event) => this.moveFocus(event, buttons),
          },
          buttons,
        );
        const choice = this.host.scene.image ? placePatchButtons(this.host, name, group, buttons) : group;
        return h("div", { class: "token-side" }, h("p", { class: "side-name", "aria-hidden": "true" }, title), choice);
      }),
    );
  }

  /**
   * The name of a token. A row of the decoder is named by its input and by the token that it predicts, which is its name in
   * the cross-attention.
   * @param {string} side @param {number} token
   */
  tokenName(side, token) {
    const name = makeVisible(this.traceHeader.sides[side].tokens[token]);
    const predicted = this.host.scene.sides.predicted?.tokens[token];
    return side === "target" && predicted !== undefined ? `${name} → ${makeVisible(predicted)}` : name;
  }

  /** The selected token of a side: of a derived side, the one that corresponds to the other's. @param {string} side */
  selectedToken(side) {
    const { of: base, rows } = this.traceHeader.sides[side];
    return base ? (rows[this.tokens[base]] ?? 0) : this.tokens[side];
  }

  /** Arrow keys move between the buttons of a group and select them. @param {KeyboardEvent} event @param {HTMLElement[]} buttons */
  moveFocus(event, buttons) {
    const now = buttons.indexOf(/** @type {any} */ (event.target));
    const moves = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: buttons.length - 1 };
    if (now < 0 || !(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const next = buttons[(moves[event.key] + buttons.length) % buttons.length];
    next.focus();
    next.click();
  }

  /** Selects a token of a side. @param {string} side @param {number} token */
  selectToken(side, token) {
    this.tokens[side] = token;
    const { rows, columns } = this.axesOf(this.selected.attention);
    if (rows === columns && rows === side) this.state.set({ pin: [token, token] });
    else if (rows === side || columns === side) this.state.set({ pin: [this.tokens[rows], this.tokens[columns]] });
    this.redraw();
    this.announcer.announce(`Selected ${bidiIsolate(this.tokenName(side, token))}.`);
  }

  /** The sides of an attention. @param {string} name @returns {{rows: string, columns: string}} */
  axesOf(name) {
    const section = this.sections.find((one) => one.attention === name);
    // A learned query is not a token that can be selected.
    const known = (/** @type {string | undefined} */ side) => side !== undefined && side in this.traceHeader.sides;
    const rows = known(section?.side) ? section.side : Object.keys(this.traceHeader.sides)[0];
    return { rows, columns: known(section?.keys) ? section.keys : rows };
  }

  /** The selected attention and head, shared with the other views. */
  get selected() {
    const { selected } = this.state.view;
    const known = this.sections.some((one) => one.attention === selected.attention);
    const attention = known ? selected.attention : this.traceHeader.focus.attention;
    const heads = this.sections.find((one) => one.attention === attention)?.heads ?? 1;
    const head = selected.head === "mean" ? this.traceHeader.focus.head : selected.head;
    return { attention, head: Math.min(head, heads - 1), heads };
  }

  /** Opens the section of an attention. @param {string} attention */
  goTo(attention) {
    this.state.set({ selected: { attention, head: this.selected.head } });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const { attention, head, heads } = this.selected;
    if (event.key === "[" || event.key === "]") {
      const next = (head + (event.key === "]" ? 1 : heads - 1)) % heads;
      this.state.set({ selected: { attention, head: next } });
      this.announcer.announce(`Head ${next}.`);
    } else if (event.key === "{" || event.key === "}") {
      const names = [...new Set(this.sections.filter((one) => one.attention).map((one) => one.attention))];
      const next = names[(names.indexOf(attention) + (event.key === "}" ? 1 : names.length - 1)) % names.length];
      this.goTo(next);
      this.announcer.announce(this.sections.find((one) => one.attention === next).title);
    } else return;
    event.preventDefault();
  }

  // Sections

  createSections() {
    /** @type {{item: HTMLElement, details: HTMLDetailsElement, mark: HTMLElement, body: HTMLElement, drawn: boolean}[]} */
    this.sectionElements = this.sections.map((section, n) => {
      const mark = h("span", { class: "section-mark" });
      const body = h("div", { class: "cards" });
      const count = this.stepsOf[n].length;
      const details = h(
        "details",
        { ontoggle: () => this.toggled(n) },
        h("summary", {}, h("h2", {}, section.title), h("span", { class: "count" }, count === 1 ? "1 step" : `${count} steps`), mark, h("p", { class: "idea" }, ideaOf(this, n))),
        body,
      );
      const item = h("li", { "data-part": section.part }, details);
      return { item, details, mark, body, drawn: false };
    });
    setChildren(this.list, this.sectionElements.map((one) => one.item));
  }

  /** @param {number} n */
  toggled(n) {
    const { details } = this.sectionElements[n];
    if (details.open) this.openSections.add(n);
    else this.openSections.delete(n);
    if (details.open) this.draw(n);
  }

  /** Whether a section is about the selected tokens. @param {Section} section */
  isRelevant(section) {
    return section.token === undefined || this.tokens[section.side] === section.token;
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    if (!this.trace) {
      const { params, outputs } = this.traceHeader;
      const numbers = await Promise.all([params, outputs].map(async (one) => new Float32Array(one ? await this.host.blob(one.at) : new ArrayBuffer(0))));
      this.trace = new Trace(this.traceHeader, numbers[0], numbers[1], this.host.modelTensor);
      this.scheduler.add("steps", 5, () => this.checkSome());
    }
    const { attention } = this.selected;
    const { pointed } = this.state;
    const wasPointed = changed === null && pointed?.attention === attention ? pointed.cell : null;
    const pin = this.state.view.pin ?? wasPointed;
    if (pin && (changed === null || changed.has("pin"))) {
      const { rows, columns } = this.axesOf(attention);
      const fits = (/** @type {string} */ side, /** @type {number | null} */ token) => token !== null && token < this.traceHeader.sides[side].tokens.length;
      if (fits(columns, pin[1]) && columns !== rows) this.tokens[columns] = pin[1];
      if (fits(rows, pin[0])) this.tokens[rows] = pin[0];
    }
    const { section } = this.state.view;
    const opensSection = section !== null && (changed === null || changed.has("section"));
    if (changed === null || changed.has("selected") || changed.has("pin") || changed.has("depth")) this.redraw(!opensSection && (changed === null || changed.has("selected")));
    if (opensSection) {
      this.showSection(Math.min(section, this.sections.length - 1));
      this.state.set({ section: null });
    }
    this.showSubstitute();
  }

  /** Says so if the page has no numbers of the attention that the other views show. */
  showSubstitute() {
    const shown = this.state.view.selected.attention;
    const has = shown === null || this.sections.some((one) => one.attention === shown);
    this.substitute.hidden = has;
    if (!has) setChildren(this.substitute, `This page has no numbers of ${shown}, which the attention view shows: below is ${this.selected.attention}.`);
  }

  /** Redraws after a change of the selection. @param {boolean} [opensSection] whether to open the section of the selected attention */
  redraw(opensSection = false) {
    const { attention, head, heads } = this.selected;
    const { depth } = this.state.view;
    this.element.dataset.depth = depth;
    setAttributes(this.panel, { "aria-labelledby": this.depths.mark(depth) });
    this.attention.value = attention;
    setChildren(this.head, Array.from({ length: heads }, (_, i) => h("option", { value: i }, String(i))));
    this.head.value = String(head);
    this.headLabel.hidden = heads === 1;
    for (const button of this.chips.querySelectorAll("button")) {
      const on = this.tokens[button.dataset.side] === Number(button.dataset.token);
      setAttributes(button, { "aria-checked": String(on), tabindex: on ? 0 : -1 });
    }
    this.sections.forEach((section, n) => {
      const { item, details } = this.sectionElements[n];
      const isRelevant = this.isRelevant(section);
      item.hidden = !isRelevant;
      if (opensSection && isRelevant && section.attention === attention) details.open = true;
      if (details.open && isRelevant) {
        this.openSections.add(n);
        this.draw(n);
      }
    });
    if (opensSection) {
      const position = this.sections.findIndex((section) => this.isRelevant(section) && section.attention === attention);
      if (position >= 0) this.showSection(position);
    }
    this.showVerdict();
  }

  /** Opens a section and scrolls to it, unless its title is visible. @param {number} n */
  showSection(n) {
    const { details, item } = this.sectionElements[n];
    details.open = true;
    const { top } = item.getBoundingClientRect();
    if (top < 0 || top > 0.7 * window.innerHeight) item.scrollIntoView({ block: "start" });
  }

  /** Draws the steps of a section. @param {number} n */
  draw(n) {
    if (!this.trace) return;
    const { depth } = this.state.view;
    const steps = this.stepsOf[n];
    const cards = depth === "formula" ? h("div", { class: "formulas" }, steps.map((step) => this.cards.formula(step))) : steps.map((step) => this.cards.card(step));
    setChildren(this.sectionElements[n].body, depth === "idea" ? ideaFigure(this, n) : cards);
  }

  // Comparison with recorded values

  checkSome() {
    const { steps } = this.traceHeader;
    for (let i = 0; i < STEPS_PER_SLICE && this.checkedCount < steps.length; i++, this.checkedCount++) this.trace.check(this.checkedCount);
    if (this.checkedCount < steps.length) return true;
    if (this.traceHeader.outputs) this.sections.forEach((_, n) => {
      const worst = Math.max(0, ...this.stepsOf[n].map((step) => this.trace.check(step)));
      setAttributes(this.sectionElements[n].mark, { "data-agrees": worst <= TOLERANCE ? "yes" : "no" });
      setChildren(this.sectionElements[n].mark, worst <= TOLERANCE ? "✓" : "≠", h("span", { class: "visually-hidden" }, worst <= TOLERANCE ? " agrees" : " does not agree"));
    });
    this.showVerdict();
    return false;
  }

  /** Shows the result of the comparison over all steps. */
  showVerdict() {
    const { steps } = this.traceHeader;
    if (this.checkedCount < steps.length) {
      setChildren(this.verdict, "Recomputing every step …");
      return;
    }
    const worst = Math.max(...steps.map((_, n) => this.trace.check(n)));
    const modelGap = Math.max(...steps.map((/** @type {Step} */ step) => step.differs ?? 0));
    const computed = steps.filter((/** @type {Step} */ step) => step.title && step.op !== "given").length;
    setAttributes(this.verdict, { "data-agrees": worst <= TOLERANCE ? "yes" : "no" });
    if (!this.traceHeader.outputs) {
      setChildren(this.verdict, h("strong", {}, `All ${computed} steps are computed in this page`), " with the weights of the model that it contains.");
      return;
    }
    setChildren(
      this.verdict,
      h("strong", {}, worst <= TOLERANCE ? `✓ All ${computed} steps, recomputed in this page, agree` : "≠ Some steps do not agree"),
      ` with the recorded values to within ${formatGap(worst)}; the recorded values agree with the model's to within ${formatGap(modelGap)}.`,
    );
  }
}
