/** The step-by-step view: from the input to the output of the model, with the numbers of one token. */

import { Trace, inDigits } from "./program.js";
import { overPatchButtons, rowMap } from "../images/patch_picker.js";
import { change, fill, h, picker, tokenText } from "../core/dom.js";
import { exactly, isolated, visible } from "../core/tokens.js";
import STEPS_STYLE from "./steps.css";

/** @typedef {import("./program.js").Step} Step */
/** @typedef {{title: string, part: string, side?: string, token?: number, layer?: number, attention?: string, heads?: number, keys?: string}} Section */
/**
 * A row of displayed numbers: their indices in the step's output, their names, and how they are displayed.
 * @typedef {{of: string, places: number[], names: string[] | null, way: "cells" | "bars", total: number, first: number}} Row
 */

/** Numbers, and terms of a sum, that are visible before "more" is pressed. */
const FEW_CELLS = 8;
const FEW_TERMS = 4;
/** Maximum number of bars for the tokens of an image. */
const MOST_BARS = 10;
/** Number of steps that are computed before the page responds again. */
const AT_ONCE = 8;
/** Tolerance of the comparison with recorded values. */
const AGREES = 1e-5;

/** Formats a difference. @param {number} x */
const gapSays = (x) => (x === 0 ? "0" : x.toExponential(0));

/** The symbol on the left-hand side of a formula. @param {Step} step */
const leftOf = (step) => step.formula.split(/ [=←] /)[0].replace(/[ₜₛₕ₀₁₂₃ᵢ]+.*$/u, "") || "y";

export class Walk {
  /** @param {import("../core/shell.js").Context} context */
  constructor({ host, attentions, state, work, voice }) {
    this.host = host;
    this.attentions = attentions;
    this.state = state;
    this.work = work;
    this.voice = voice;
    this.walk = host.scene.walk;
    /** @type {Section[]} */
    this.sections = this.walk.sections;
    /** @type {number[][]} the steps of each section */
    this.stepsOf = this.sections.map(() => []);
    // Steps without a section are computed, but not shown.
    this.walk.steps.forEach((/** @type {Step} */ step, /** @type {number} */ n) => this.stepsOf[step.section]?.push(n));
    const { focus, sides } = this.walk;
    /** The selected token of each side. @type {Record<string, number>} */
    this.tokens = Object.fromEntries(Object.keys(sides).map((name) => [name, focus[name] ?? 0]));
    /** Indices of the open sections. @type {Set<number>} */
    this.open = new Set();
    /** Indices of the steps that show all numbers. @type {Set<number>} */
    this.unfolded = new Set();
    /** For each step, the number whose derivation is shown. @type {Map<number, number>} */
    this.pointed = new Map();
    /** @type {Trace | null} */
    this.trace = null;
    this.done = 0;
    this.verdict = h("p", { class: "verdict" });
    this.chips = h("div", { class: "sides" });
    this.choice = h("div", { class: "choice" });
    this.list = h("ol", { class: "stations" });
    this.element = h(
      "div",
      { class: "walk", onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) },
      h("style", {}, STEPS_STYLE),
      h("section", { class: "follow", "aria-label": "Selected tokens and heads", "data-saved": "no" }, this.chips, this.choice),
      this.verdict,
      this.walk.note ? h("p", { class: "note" }, this.walk.note) : null,
      this.list,
    );
    this.makeChoice();
    this.makeStations();
  }

  get sheet() {
    return this.stations.find((one, n) => one && this.open.has(n))?.details ?? this.list;
  }

  get fileName() {
    return "regard-steps";
  }

  /** The numbers of the open sections as tab-separated values. */
  get numbers() {
    if (!this.trace) return "";
    const lines = [["step", "formula", "of", "numbers"].join("\t")];
    for (const n of this.open) {
      for (const step of this.stepsOf[n]) {
        const row = this.rowOf(step);
        const { data } = this.trace.value(step);
        lines.push([this.walk.steps[step].id, this.walk.steps[step].formula, row.of, ...row.places.map((at) => data[at])].join("\t"));
      }
    }
    return lines.join("\n");
  }

  lay() {}

  // Selection of tokens and heads

  makeChoice() {
    const titles = this.sections.filter((one) => one.attention);
    const named = Object.fromEntries(titles.map((one) => [one.attention, one.title.replace(": one step", "")]));
    this.attention = picker("Attention", named, (attention) => this.goTo(attention));
    this.head = picker("Head", {}, (head) => this.state.set({ shown: { ...this.state.view.shown, head: Number(head) } }));
    this.headLabel = h("label", {}, "Head ", this.head);
    const several = Object.keys(named).length > 1;
    fill(this.choice, several ? h("label", {}, "Attention ", this.attention) : null, this.headLabel);
    // Sides that are derived from another one have no selection.
    const own = Object.entries(this.walk.sides).filter(([, side]) => !side.of);
    fill(
      this.chips,
      own.map(([name, side]) => {
        const known = this.host.scene.sides[name];
        const called = known?.called ?? name.charAt(0).toUpperCase() + name.slice(1);
        const buttons = side.tokens.map((/** @type {string} */ token, /** @type {number} */ t) =>
          h(
            "button",
            { type: "button", role: "radio", class: "chip-token", "data-side": name, "data-token": t, onclick: () => this.follow(name, t) },
            tokenText(visible(token), known?.direction === "rtl"),
          ),
        );
        const group = h(
          "div",
          {
            class: "tokens-of",
            role: "radiogroup",
            "aria-label": `${called}: selected token`,
            dir: known?.direction ?? "auto",
            onkeydown: (/** @type {KeyboardEvent} */ event) => this.roam(event, buttons),
          },
          buttons,
        );
        const choice = this.host.scene.picture ? overPatchButtons(this.host, name, group, buttons) : group;
        return h("div", { class: "side-of" }, h("p", { class: "side-name", "aria-hidden": "true" }, called), choice);
      }),
    );
  }

  /** The selected token of a side: of a derived side, the one that corresponds to the other's. @param {string} side */
  tokenOf(side) {
    const { of, rows } = this.walk.sides[side];
    return of ? (rows[this.tokens[of]] ?? 0) : this.tokens[side];
  }

  /** Arrow keys move between the buttons of a group and select them. @param {KeyboardEvent} event @param {HTMLElement[]} buttons */
  roam(event, buttons) {
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
  follow(side, token) {
    this.tokens[side] = token;
    const { rows, columns } = this.axesOf(this.shown.attention);
    if (rows === columns && rows === side) this.state.set({ pin: [token, token] });
    else if (rows === side || columns === side) this.state.set({ pin: [this.tokens[rows], this.tokens[columns]] });
    this.redraw();
    this.voice.say(`Selected ${isolated(visible(this.walk.sides[side].tokens[token]))}.`);
  }

  /** The sides of an attention. @param {string} name @returns {{rows: string, columns: string}} */
  axesOf(name) {
    const section = this.sections.find((one) => one.attention === name);
    // A learned query is not a token that can be selected.
    const known = (/** @type {string | undefined} */ side) => side !== undefined && side in this.walk.sides;
    const rows = known(section?.side) ? section.side : Object.keys(this.walk.sides)[0];
    return { rows, columns: known(section?.keys) ? section.keys : rows };
  }

  /** The selected attention and head, shared with the other views. */
  get shown() {
    const { shown } = this.state.view;
    const known = this.sections.some((one) => one.attention === shown.attention);
    const attention = known ? shown.attention : this.walk.focus.attention;
    const heads = this.sections.find((one) => one.attention === attention)?.heads ?? 1;
    const head = shown.head === "mean" ? this.walk.focus.head : shown.head;
    return { attention, head: Math.min(head, heads - 1), heads };
  }

  /** Opens the section of an attention. @param {string} attention */
  goTo(attention) {
    this.state.set({ shown: { attention, head: this.shown.head } });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const { attention, head, heads } = this.shown;
    if (event.key === "[" || event.key === "]") {
      const next = (head + (event.key === "]" ? 1 : heads - 1)) % heads;
      this.state.set({ shown: { attention, head: next } });
      this.voice.say(`Head ${next}.`);
    } else if (event.key === "{" || event.key === "}") {
      const names = [...new Set(this.sections.filter((one) => one.attention).map((one) => one.attention))];
      const next = names[(names.indexOf(attention) + (event.key === "}" ? 1 : names.length - 1)) % names.length];
      this.goTo(next);
      this.voice.say(this.sections.find((one) => one.attention === next).title);
    } else return;
    event.preventDefault();
  }

  // Sections

  makeStations() {
    /** @type {{item: HTMLElement, details: HTMLDetailsElement, mark: HTMLElement, body: HTMLElement, drawn: boolean}[]} */
    this.stations = this.sections.map((section, n) => {
      const mark = h("span", { class: "mark-of" });
      const body = h("div", { class: "cards" });
      const count = this.stepsOf[n].length;
      const details = h(
        "details",
        { ontoggle: () => this.toggled(n) },
        h("summary", {}, h("h2", {}, section.title), h("span", { class: "count" }, count === 1 ? "1 step" : `${count} steps`), mark),
        body,
      );
      const item = h("li", { "data-part": section.part }, details);
      return { item, details, mark, body, drawn: false };
    });
    fill(this.list, this.stations.map((one) => one.item));
  }

  /** @param {number} n */
  toggled(n) {
    const { details } = this.stations[n];
    if (details.open) this.open.add(n);
    else this.open.delete(n);
    if (details.open) this.draw(n);
  }

  /** Whether a section is about the selected tokens. @param {Section} section */
  applies(section) {
    return section.token === undefined || this.tokens[section.side] === section.token;
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    if (!this.trace) {
      const [params, outputs] = await Promise.all([this.host.blob(this.walk.params.at), this.host.blob(this.walk.outputs.at)]);
      this.trace = new Trace(this.walk, new Float32Array(params), new Float32Array(outputs));
      this.work.add("walk", 5, () => this.checkSome());
    }
    const { pin } = this.state.view;
    const { attention } = this.shown;
    if (pin && (changed === null || changed.has("pin"))) {
      const { rows, columns } = this.axesOf(attention);
      const fits = (/** @type {string} */ side, /** @type {number} */ token) => token < this.walk.sides[side].tokens.length;
      if (fits(columns, pin[1]) && columns !== rows) this.tokens[columns] = pin[1];
      if (fits(rows, pin[0])) this.tokens[rows] = pin[0];
    }
    if (changed === null || changed.has("shown") || changed.has("pin")) this.redraw(changed === null || changed.has("shown"));
  }

  /** Redraws after a change of the selection. @param {boolean} [arrive] whether to open the section of the selected attention */
  redraw(arrive = false) {
    const { attention, head, heads } = this.shown;
    this.attention.value = attention;
    fill(this.head, Array.from({ length: heads }, (_, i) => h("option", { value: i }, String(i))));
    this.head.value = String(head);
    this.headLabel.hidden = heads === 1;
    for (const button of this.chips.querySelectorAll("button")) {
      const on = this.tokens[button.dataset.side] === Number(button.dataset.token);
      change(button, { "aria-checked": String(on), tabindex: on ? 0 : -1 });
    }
    this.sections.forEach((section, n) => {
      const { item, details } = this.stations[n];
      const applies = this.applies(section);
      item.hidden = !applies;
      if (arrive && applies && section.attention === attention) details.open = true;
      if (details.open && applies) {
        this.open.add(n);
        this.draw(n);
      }
    });
    // Initially the first and the last section are open too.
    if (!this.arrived) for (const n of [0, this.sections.length - 1]) this.stations[n].details.open = true;
    if (arrive) {
      const place = this.sections.findIndex((section) => this.applies(section) && section.attention === attention);
      if (place >= 0 && this.arrived) this.stations[place].item.scrollIntoView({ block: "start" });
      this.arrived = true;
    }
    this.say();
  }

  /** Draws the steps of a section. @param {number} n */
  draw(n) {
    if (!this.trace) return;
    fill(this.stations[n].body, this.stepsOf[n].map((step) => this.card(step)));
  }

  // Comparison with recorded values

  checkSome() {
    const { steps } = this.walk;
    for (let i = 0; i < AT_ONCE && this.done < steps.length; i++, this.done++) this.trace.check(this.done);
    if (this.done < steps.length) return true;
    this.sections.forEach((_, n) => {
      const worst = Math.max(0, ...this.stepsOf[n].map((step) => this.trace.check(step)));
      change(this.stations[n].mark, { "data-agrees": worst <= AGREES ? "yes" : "no" });
      fill(this.stations[n].mark, worst <= AGREES ? "✓" : "≠", h("span", { class: "unseen" }, worst <= AGREES ? " agrees" : " does not agree"));
    });
    this.say();
    return false;
  }

  /** Shows the result of the comparison over all steps. */
  say() {
    const { steps } = this.walk;
    if (this.done < steps.length) {
      fill(this.verdict, "Recomputing every step …");
      return;
    }
    const worst = Math.max(...steps.map((_, n) => this.trace.check(n)));
    const own = Math.max(...steps.map((/** @type {Step} */ step) => step.differs ?? 0));
    const computed = steps.filter((/** @type {Step} */ step) => step.title && step.op !== "given").length;
    change(this.verdict, { "data-agrees": worst <= AGREES ? "yes" : "no" });
    fill(
      this.verdict,
      h("strong", {}, worst <= AGREES ? `✓ All ${computed} steps, recomputed in this page, agree` : "≠ Some steps do not agree"),
      ` with the recorded values to within ${gapSays(worst)}; the recorded values agree with the model's to within ${gapSays(own)}.`,
    );
  }

  // Steps

  /** The displayed numbers of a step: the row of the selected token in the selected head. @param {number} n @returns {Row} */
  rowOf(n) {
    const step = this.walk.steps[n];
    const { shape, axes } = step.output;
    const { head, heads } = this.shown;
    // The row runs along the last axis; for an image, whose spatial axes come last, along the channels.
    const along_ = axes[0] === "channels" && axes.length > 1 ? 0 : axes.length - 1;
    let [start, stride, token, which, followed] = [0, 1, "", "", ""];
    for (let axis = axes.length - 1, size = 1; axis >= 0; size *= shape[axis--]) {
      if (axis === along_) {
        stride = size;
        continue;
      }
      const side = axes[axis];
      let at = 0;
      if (side in this.walk.sides) {
        at = Math.min(this.tokenOf(side), shape[axis] - 1);
        token = isolated(visible(this.walk.sides[side].tokens[at]));
        followed = side;
      } else if (side === "heads") {
        // Grouped-query attention: several query heads share a key and value head.
        at = shape[axis] >= heads ? Math.min(head, shape[axis] - 1) : Math.floor((head * shape[axis]) / heads);
        if (shape[axis] > 1) which = `head ${at}`;
      }
      start += at * size;
    }
    let of = [token, which].filter(Boolean).join(", ");
    const width = shape[along_];
    let columns = Array.from({ length: width }, (_, i) => i);
    const last = axes[along_];
    let names = last in this.walk.sides ? this.walk.sides[last].tokens.map(visible) : null;
    const { data } = this.trace.value(n);
    const descending = (/** @type {number} */ a, /** @type {number} */ b) => data[start + b * stride] - data[start + a * stride];
    if (last === "vocabulary") {
      // The ten most probable tokens.
      columns = columns.sort(descending).slice(0, 10);
      names = columns.map((i) => visible(this.walk.names[i] ?? `token ${i}`));
      if (of && followed && !this.host.scene.picture) of = `after ${of}`;
    }
    const way = step.op === "softmax" ? "bars" : "cells";
    if (way === "bars" && this.host.scene.picture && names && columns.length > MOST_BARS) {
      // Of many patches, list only the largest; all of them are painted.
      const all = names;
      columns = columns.sort(descending).slice(0, MOST_BARS);
      names = columns.map((i) => all[i]);
    }
    const places = columns.map((i) => start + i * stride);
    const greatest = places.reduce((best, at, i) => (data[at] > data[places[best]] ? i : best), 0);
    return { of, places, names, way, total: width, first: names ? greatest : 0 };
  }

  /** @param {number} n */
  card(n) {
    const step = this.walk.steps[n];
    const row = this.rowOf(n);
    const body = h("div", { class: "numbers-of" });
    const show = () => {
      const { places, names, way } = row;
      const pointed = Math.min(this.pointed.get(n) ?? row.first, places.length - 1);
      fill(body, this.painted(n), way === "bars" ? this.bars(n, row, pointed, show) : this.cells(n, row, pointed, show), this.making(n, row, pointed, names));
    };
    show();
    const gap = this.trace.check(n);
    const given = step.op === "given";
    const check = given
      ? h("span", { class: "check", "data-agrees": "given" }, "input")
      : h(
          "span",
          { class: "check", "data-agrees": gap <= AGREES ? "yes" : "no", title: "Largest difference between the value computed in this page and the recorded one" },
          gap <= AGREES ? "✓ " : "≠ ",
          h("span", { class: "unseen" }, gap <= AGREES ? "agrees, largest difference " : "does not agree, largest difference "),
          gapSays(gap),
        );
    return h(
      "article",
      { class: "step", "data-op": step.op, id: `step-${step.id}` },
      h("header", {}, h("h3", {}, step.title), check),
      h("p", { class: "formula" }, step.formula),
      body,
      h(
        "footer",
        {},
        h("code", {}, step.where),
        this.trace.paramsOf(n).map(({ sign, name, shape }) => h("span", { class: "param" }, h("i", {}, sign), ` ${shape.join("×")} `, h("code", {}, name))),
        step.differs === null ? null : h("span", { class: "own" }, step.differs === 0 ? "identical to the model's values" : `within ${gapSays(step.differs)} of the model's values`),
      ),
    );
  }

  /** Weights over patches as an overlay, or null if there are none. @param {number} n */
  painted(n) {
    const { op, output } = this.walk.steps[n];
    const side = output.axes[output.axes.length - 1];
    if (op !== "softmax" || !(side in (this.host.scene.picture?.first ?? {}))) return null;
    const width = output.shape[output.shape.length - 1];
    const start = Math.floor(this.rowOf(n).places[0] / width) * width;
    return rowMap(this.host, side, this.trace.value(n).data.subarray(start, start + width));
  }

  /** A row of numbers; selecting one shows its derivation. @param {number} n @param {Row} row @param {number} pointed @param {() => void} show */
  cells(n, { of, places, names, total }, pointed, show) {
    const { data } = this.trace.value(n);
    const all = this.unfolded.has(n);
    const count = all ? places.length : Math.min(places.length, Math.max(FEW_CELLS, names && places.length <= 16 ? places.length : 0));
    const most = places.reduce((greatest, at) => (Number.isFinite(data[at]) ? Math.max(greatest, Math.abs(data[at])) : greatest), 1e-12);
    const able = this.trace.made(n, places[0]) !== null;
    const cells = places.slice(0, count).map((at, i) => {
      const value = data[at];
      const on = i === pointed;
      const says = [names ? [h("span", { class: "name" }, h("bdi", {}, names[i])), " "] : null, h("span", { class: "number" }, inDigits(value))];
      const share = Number.isFinite(value) ? Math.round((34 * Math.abs(value)) / most) : 0;
      const style = `--share: ${share}%`;
      const sign = value < 0 ? "minus" : "plus";
      if (!able) return h("span", { class: "cell", style, "data-sign": sign }, says);
      return h(
        "button",
        {
          type: "button",
          class: "cell",
          style,
          "data-sign": sign,
          "aria-pressed": String(on),
          tabindex: on || (i === 0 && pointed >= count) ? 0 : -1,
          title: names ? null : `channel ${i}`,
          "aria-label": names ? null : `channel ${i}: ${inDigits(value)}`,
          onclick: () => this.point(n, i, show),
        },
        says,
      );
    });
    const rest = places.length - count;
    const more =
      rest > 0 || (all && places.length > FEW_CELLS)
        ? h(
            "button",
            {
              type: "button",
              class: "more",
              "aria-expanded": String(all),
              onclick: () => {
                if (all) this.unfolded.delete(n);
                else this.unfolded.add(n);
                show();
              },
            },
            all ? "show fewer" : `… ${rest} more`,
          )
        : null;
    const width = total > 1 && !names ? h("span", { class: "width" }, ` ${total} channels`) : null;
    return [
      of ? h("p", { class: "of" }, of, width) : null,
      h(
        "div",
        { class: "row-of", role: "group", "aria-label": of ? `Values of ${of}` : "Values", onkeydown: (/** @type {KeyboardEvent} */ event) => this.roamCells(event, n, count, show) },
        cells,
        more,
      ),
    ];
  }

  /** Weights and probabilities as bars. @param {number} n @param {Row} row @param {number} pointed @param {() => void} show */
  bars(n, { of, places, names }, pointed, show) {
    const { data } = this.trace.value(n);
    return [
      of ? h("p", { class: "of" }, of) : null,
      h(
        "div",
        { class: "bars-of", role: "group", "aria-label": `Weights of ${of}`, onkeydown: (/** @type {KeyboardEvent} */ event) => this.roamCells(event, n, places.length, show) },
        places.map((at, i) =>
          h(
            "button",
            {
              type: "button",
              class: "bar-of",
              "aria-pressed": String(i === pointed),
              tabindex: i === pointed ? 0 : -1,
              title: exactly(data[at]),
              onclick: () => this.point(n, i, show),
            },
            h("span", { class: "name" }, h("bdi", {}, names?.[i] ?? String(i))),
            " ",
            h("span", { class: "track" }, h("span", { class: "bar", style: `width: ${(100 * data[at]).toFixed(2)}%` })),
            h("span", { class: "number" }, data[at] > 0 && data[at] < 0.0005 ? data[at].toExponential(0) : data[at].toFixed(3)),
          ),
        ),
      ),
    ];
  }

  /** @param {number} n @param {number} i @param {() => void} show */
  point(n, i, show) {
    this.pointed.set(n, i);
    const inside = document.activeElement;
    const parent = inside?.closest?.(".numbers-of");
    show();
    /** @type {HTMLElement | null | undefined} */ (parent?.querySelector('[aria-pressed="true"]'))?.focus();
  }

  /** @param {KeyboardEvent} event @param {number} n @param {number} count @param {() => void} show */
  roamCells(event, n, count, show) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const now = Math.min(this.pointed.get(n) ?? this.rowOf(n).first, count - 1);
    this.point(n, (now + moves[event.key] + count) % count, show);
  }

  /** The derivation of one number from the inputs of its step. @param {number} n @param {Row} row @param {number} i @param {string[] | null} names */
  making(n, { places }, i, names) {
    const at = places[i];
    const sum = this.trace.made(n, at);
    if (!sum) return null;
    const { pieces, sign, before, after } = sum;
    const left = `${leftOf(this.walk.steps[n])}[${names ? names[i] : i}]`;
    const terms = h("span", { class: "terms" });
    /** @param {boolean} all */
    const write = (all) => {
      const shown = all ? pieces : pieces.slice(0, FEW_TERMS);
      const rest = pieces.length - shown.length;
      fill(
        terms,
        before,
        shown.flatMap((piece, k) => [k ? sign : null, h("span", { class: "term" }, piece)]),
        rest > 0 ? [sign, h("button", { type: "button", class: "more", onclick: () => write(true) }, `… ${rest} more`)] : null,
        after,
      );
    };
    write(pieces.length <= FEW_TERMS + 2);
    return h("p", { class: "making" }, h("bdi", { class: "left" }, left), " = ", terms, " = ", h("strong", {}, inDigits(this.trace.value(n).data[at])));
  }
}
