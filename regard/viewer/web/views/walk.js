/** The walk through one attention on one screen: query, keys, scores, softmax, values and their sum, for one token. */

import { html, setAttributes, setChildren, svgElement, tokenText } from "../core/dom.js";
import { truncate, withMinus } from "../core/tokens.js";
import { argmax, topK } from "../weights/maths.js";

/** @typedef {import("../trace/attention_steps.js").AttentionSteps} AttentionSteps */
/** @typedef {{row: number | null, kind: string}} Cell `row` is the key; null: the query or the sum */
/** @typedef {{a: number, b: number, kinds: [string, string]}} Product */

/** Up to this number of keys each has a row; of more, those with the largest weights. */
const MAX_KEYS = 64;
const MAX_LISTED_KEYS = 12;
/** Number of summands that are visible before "more" is pressed, and of keys that a sentence names. */
const MAX_PRODUCTS = 16;
const MAX_NAMED_KEYS = 3;
/** Duration of playing all phases, in milliseconds. */
const DURATION = 12000;

const PHASES = ["query", "keys", "scores", "scale", "softmax", "values", "sum"];
/** The phase from which cells of a kind are visible. */
const PHASE_OF = { q: 0, k: 1, e: 2, d: 3, m: 3, a: 4, v: 5, av: 5, z: 6 };

/** Widths of columns. */
const TRACKS = { k: "minmax(36px, 1fr)", a: "minmax(72px, 1.2fr)", v: "minmax(36px, 1fr)", av: "minmax(36px, 1fr)" };

/** @param {string[]} kinds */
const tracks = (kinds) => kinds.map((kind) => TRACKS[kind] ?? "max-content").join(" ");

/** @param {number} x @param {number} [digits] */
const decimal = (x, digits = 2) =>
  Math.abs(x) > 1e30 ? `${x < 0 ? "−" : ""}∞` : withMinus(x.toFixed(digits)).replace(/^−(0(?:\.0*)?)$/, "$1");
/** @param {number} x */
const weightText = (x) => (x === 0 ? "0" : x < 0.0005 ? withMinus(x.toExponential(0)) : x.toFixed(3));

/** A symbol of a formula: its letter, its index below, and the kind of cells that it stands for. */
const symbol = (/** @type {string} */ letter, /** @type {string} */ index, /** @type {string} */ kind) =>
  html("span", { class: "symbol", tabindex: 0, "data-kind": kind }, letter, index ? html("sub", {}, index) : null);

/** Sets indices after "_" below the line: W_Q. @param {string} formula */
export const typeset = (formula) =>
  formula.split(/_([\p{L}\d]+)/u).map((part, i) => (i % 2 ? html("sub", {}, part) : part));

/** A vector as a stripe of colors, one per number; negative numbers are gray. @param {Float64Array} x @param {number} maximum */
function stripe(x, maximum) {
  const stops = Array.from(x, (value, i) => {
    const share = Math.round(100 * Math.min(1, Math.abs(value) / maximum));
    const color = `color-mix(in srgb, var(${value < 0 ? "--minus" : "--own"}) ${share}%, var(--sheet))`;
    return `${color} ${((100 * i) / x.length).toFixed(2)}% ${((100 * (i + 1)) / x.length).toFixed(2)}%`;
  });
  return html("span", {
    class: "stripe",
    style: `background: linear-gradient(to right, ${stops.join(", ")}); --count: ${x.length}`,
  });
}

/** @param {Float64Array[]} vectors */
const largest = (vectors) =>
  Math.max(1e-9, ...vectors.map((x) => x.reduce((most, one) => Math.max(most, Math.abs(one)), 0)));

export class Walk {
  /** @param {import("./steps.js").StepsView} view */
  constructor(view) {
    this.view = view;
    /** @type {Cell | null} the cell whose sum of products is shown */
    this.cell = null;
    /** The number of a vector that is pointed at, in both factors. */
    this.channel = -1;
    this.phase = PHASES.length - 1;
    this.speed = 1;
    this.timer = 0;
    this.table = html("div", { class: "walk-table", role: "grid", onkeydown: (event) => this.key(event) });
    this.detail = html("section", { class: "walk-detail card", "aria-label": "The chosen number" });
    this.caption = html("p", { class: "walk-caption", "aria-live": "polite" });
    this.slider = html("input", {
      type: "range",
      min: 0,
      max: PHASES.length - 1,
      step: 1,
      "aria-label": "Phase of the walk",
      oninput: () => this.stop(Number(this.slider.value)),
    });
    this.playButton = html("button", { type: "button", class: "small play", onclick: () => this.play() });
    this.speedButton = html(
      "button",
      { type: "button", class: "small", onclick: () => this.changeSpeed() },
      "1× speed",
    );
    this.arrows = svgElement("svg", { class: "walk-arrows", "aria-hidden": "true" });
    this.rails = ["before", "after"].map((name) => html("details", { class: `rail ${name} card` }));
    this.stage = html("div", { class: "walk-stage card" }, this.table, this.arrows);
    const light = (/** @type {Event} */ event) => {
      const kind = /** @type {HTMLElement} */ (event.target).closest?.("[data-kind].symbol")?.getAttribute("data-kind");
      setAttributes(this.element, { "data-lit": kind ?? null });
    };
    this.element = html(
      "section",
      { class: "walk", "aria-label": "One token in one head", onfocusin: light, onpointerover: light },
      html("div", { class: "walk-row" }, this.rails[0], this.stage, this.rails[1]),
      html(
        "div",
        { class: "walk-row below" },
        this.detail,
        html(
          "section",
          { class: "walk-player card", "aria-label": "Play the walk" },
          html("div", { class: "walk-controls", "data-export": "no" }, this.playButton, this.slider, this.speedButton),
          this.caption,
        ),
      ),
    );
    new ResizeObserver(() => this.drawArrows()).observe(this.stage);
  }

  /**
   * @param {AttentionSteps} steps @param {{token: string, keys: string[], rtl: boolean, isMasked: boolean}} names
   * @param {{before: number[], after: number[]}} rails steps before the scores and after the sum
   */
  show(steps, names, rails) {
    this.steps = steps;
    this.names = names;
    const { weights } = steps;
    const best = argmax(weights);
    const other = argmax(weights.map((weight, s) => (names.keys[s] === names.token ? -1 : weight)));
    this.best = weights[other] > 0 && names.keys[other] !== undefined ? other : best;
    this.rows =
      weights.length <= MAX_KEYS ? Array.from(weights.keys()) : topK(weights, MAX_LISTED_KEYS).sort((a, b) => a - b);
    if (!this.rows.includes(this.best)) this.best = best;
    const row = this.cell?.row;
    if (!this.cell || (row !== null && !this.rows.includes(row)))
      this.cell = { row: this.best, kind: steps.query ? "e" : "a" };
    this.drawTable();
    this.drawRails(rails);
    this.choose(this.cell, false);
    this.stop(this.phase);
  }

  /** The columns: symbol, heading and the content of a row. */
  columns() {
    const { query, keys, products, scale, scaled, scores, weights, values, output } = this.steps;
    const most = Math.max(...weights);
    const [ofKeys, ofValues] = [largest(keys.map(({ x }) => x)), largest(values.map(({ x }) => x))];
    const isFinal = scores.every((x, s) => Math.abs(x - scaled[s]) < 1e-6 * Math.max(1, Math.abs(x)));
    const width = query?.x.length ?? 0;
    const isRoot = scale !== null && Math.abs(scale - width ** -0.5) < 1e-6;
    /** @type {{kind: string, heading: any, content: (s: number) => any}[]} */
    const columns = [];
    if (query) {
      columns.push({ kind: "k", heading: ["key ", symbol("k", "", "k")], content: (s) => stripe(keys[s].x, ofKeys) });
      columns.push({
        kind: "e",
        heading: ["score ", symbol("q", "", "q"), "·", symbol("k", "", "k")],
        content: (s) => decimal(products[s]),
      });
      if (scale !== null)
        columns.push({
          kind: "d",
          heading: isRoot ? ["÷ √", symbol("d", "k", "d"), ` = √${width}`] : [`× ${Number(scale.toPrecision(3))}`],
          content: (s) => decimal(scaled[s]),
        });
    }
    if (!query || !isFinal)
      columns.push({
        kind: "m",
        heading: [symbol("e", "", "m"), this.names.isMasked ? " masked" : ""],
        content: (s) => (scores[s] < -1e30 ? "−∞" : decimal(scores[s])),
      });
    columns.push({
      kind: "a",
      heading: ["softmax: weight ", symbol("a", "", "a")],
      content: (s) => [
        html("span", { class: "weight-bar", style: `width: ${((58 * weights[s]) / most).toFixed(2)}%` }),
        weightText(weights[s]),
      ],
    });
    if (output) {
      columns.push({
        kind: "v",
        heading: ["value ", symbol("v", "", "v")],
        content: (s) => stripe(values[s].x, ofValues),
      });
      columns.push({
        kind: "av",
        heading: [symbol("a", "", "a"), "·", symbol("v", "", "v")],
        content: (s) =>
          stripe(
            values[s].x.map((x) => x * weights[s]),
            ofValues * Math.max(...weights),
          ),
      });
    }
    return columns;
  }

  drawTable() {
    const { query, output, weights } = this.steps;
    const { token, keys, rtl } = this.names;
    const name = truncate(token, 16);
    const columns = this.columns();
    this.kinds = columns.map(({ kind }) => kind);
    const cell = (/** @type {Cell} */ at, /** @type {any} */ content, /** @type {string} */ label) =>
      html(
        "button",
        {
          type: "button",
          role: "gridcell",
          class: "walk-cell",
          tabindex: -1,
          "data-kind": at.kind,
          "data-row": at.row,
          "aria-label": label,
          onclick: () => this.choose(at),
          onpointermove: (/** @type {PointerEvent} */ event) => this.pointChannel(event),
        },
        content,
      );
    const line = (/** @type {any[]} */ ...children) => html("div", { role: "row", class: "walk-line" }, ...children);
    const named = (/** @type {Cell} */ at, /** @type {number | null} */ s) =>
      s === null ? `${NAMES[at.kind]} of ${name}` : `${NAMES[at.kind]} of ${keys[s]}: ${this.textOf(at)}`;
    setAttributes(this.table, {
      "aria-label": `Scores and weights of ${name}`,
      style: `--columns: ${tracks(this.kinds)}; --narrow: ${tracks(this.kinds.filter((kind) => kind !== "v"))}`,
    });
    const rest = 1 - this.rows.reduce((sum, s) => sum + weights[s], 0);
    setChildren(
      this.table,
      query
        ? line(
            html("span", { class: "walk-token query", role: "rowheader" }, symbol("q", name, "q")),
            cell({ row: null, kind: "q" }, stripe(query.x, largest([query.x])), named({ row: null, kind: "q" }, null)),
            html(
              "span",
              { class: "secondary wide", role: "gridcell" },
              `what “${name}” looks for: ${query.x.length} numbers`,
            ),
          )
        : null,
      line(
        html(
          "span",
          { role: "columnheader", class: "walk-token" },
          html("span", { class: "visually-hidden" }, "token"),
        ),
        columns.map(({ kind, heading }) =>
          html("span", { role: "columnheader", class: "heading", "data-kind": kind }, heading),
        ),
      ),
      this.rows.map((s) =>
        line(
          html(
            "span",
            { class: "walk-token", role: "rowheader", "data-row": s },
            tokenText(truncate(keys[s], 14), rtl),
          ),
          columns.map(({ kind, content }) => cell({ row: s, kind }, content(s), named({ row: s, kind }, s))),
        ),
      ),
      this.rows.length < weights.length
        ? line(
            html(
              "span",
              { class: "secondary wide", role: "gridcell" },
              `and ${weights.length - this.rows.length} others: weight ${weightText(Math.max(0, rest))} in total`,
            ),
          )
        : null,
      output
        ? line(
            html(
              "span",
              { class: "walk-token sum", role: "rowheader" },
              "Σ ",
              symbol("a", "", "a"),
              "·",
              symbol("v", "", "v"),
              " =",
            ),
            cell(
              { row: null, kind: "z" },
              stripe(output.x, largest([output.x])),
              named({ row: null, kind: "z" }, null),
            ),
            html("span", { class: "secondary wide", role: "gridcell" }, `what this head gives to “${name}”`),
          )
        : null,
    );
    for (const row of this.table.querySelectorAll(".walk-line"))
      row.classList.toggle("sum", Boolean(row.querySelector(".sum")));
  }

  /** The steps before the scores and after the sum, as titles; open, with all their numbers. */
  drawRails(/** @type {{before: number[], after: number[]}} */ rails) {
    const { traceHeader, cards } = this.view;
    ["before", "after"].forEach((name, i) => {
      const rail = this.rails[i];
      const list = rails[name];
      rail.hidden = list.length === 0;
      const body = html("div", { class: "rail-steps" });
      const fill = () =>
        rail.open &&
        setChildren(
          body,
          list.map((/** @type {number} */ n) => cards.card(n)),
        );
      rail.ontoggle = () => {
        fill();
        this.drawArrows();
      };
      setChildren(
        rail,
        html(
          "summary",
          {},
          html("h2", {}, name === "before" ? "Before" : "After"),
          html(
            "ol",
            {},
            list.map((/** @type {number} */ n) => html("li", {}, typeset(shortTitle(traceHeader.steps[n])))),
          ),
          html("span", { class: "open-hint" }, "numbers"),
        ),
        body,
      );
      fill();
    });
  }

  // The chosen cell

  /** The number or numbers of a cell as text. @param {Cell} cell */
  textOf({ row, kind }) {
    const { products, scaled, scores, weights, keys, values } = this.steps;
    if (row === null) return "";
    const numbers = { e: products, d: scaled, m: scores };
    if (kind in numbers) return decimal(numbers[kind][row]);
    if (kind === "a") return weightText(weights[row]);
    const vector = kind === "k" ? keys[row].x : values[row].x.map((x) => (kind === "av" ? x * weights[row] : x));
    return `${vector.length} numbers`;
  }

  /** The vector of a cell, or null. @param {Cell} cell */
  vectorOf({ row, kind }) {
    const { query, keys, values, output } = this.steps;
    return { q: query, z: output, k: keys[row], v: values[row] }[kind] ?? null;
  }

  /** Chooses a cell: marks it and its sources, and shows its sum of products. @param {Cell} cell @param {boolean} [focus] */
  choose(cell, focus = true) {
    this.cell = cell;
    if (!["k", "v", "q", "z"].includes(cell.kind)) this.channel = -1;
    const sources = this.sourcesOf(cell);
    for (const element of this.table.querySelectorAll(".walk-cell")) {
      const own = this.isCell(element, cell);
      setAttributes(element, { "aria-selected": String(own), tabindex: own ? 0 : -1 });
      element.classList.toggle(
        "source",
        sources.some((one) => this.isCell(element, one)),
      );
      if (own && focus) /** @type {HTMLElement} */ (element).focus({ preventScroll: true });
    }
    for (const element of this.table.querySelectorAll(".walk-line"))
      element.classList.toggle("on", cell.row !== null && Boolean(element.querySelector(`[data-row="${cell.row}"]`)));
    this.drawDetail();
    this.drawArrows();
  }

  /** @param {Element} element @param {Cell} cell */
  isCell(element, { row, kind }) {
    return (
      element.getAttribute("data-kind") === kind &&
      element.getAttribute("data-row") === (row === null ? null : String(row))
    );
  }

  /** The cells that a cell is computed from. @param {Cell} cell @returns {Cell[]} */
  sourcesOf({ row, kind }) {
    const scores = this.kinds.filter((one) => ["e", "d", "m"].includes(one));
    const all = (/** @type {string} */ one) => this.rows.map((s) => ({ row: s, kind: one }));
    if (kind === "a") return all(scores.at(-1));
    if (kind === "av")
      return [
        { row, kind: "a" },
        { row, kind: "v" },
      ];
    if (kind === "z") return all("av");
    if (kind === "e")
      return [
        { row: null, kind: "q" },
        { row, kind: "k" },
      ];
    const before = scores.indexOf(kind) - 1;
    return before >= 0 ? [{ row, kind: scores[before] }] : [];
  }

  /** The equation of the chosen cell, and its sum of products. */
  drawDetail() {
    const { row, kind } = this.cell;
    const { query, keys, products, scale, scaled, scores, weights, values, output } = this.steps;
    const { token, keys: names } = this.names;
    const key = row === null ? "" : truncate(names[row], 16);
    const quoted = (/** @type {string} */ name) => html("q", {}, html("bdi", {}, truncate(name, 16)));
    const { depth } = this.view.state.view;
    const number = (/** @type {string} */ text, /** @type {string} */ of) => html("b", { "data-kind": of }, text);
    const width = query?.x.length ?? 0;
    const shown = scale === null || Math.abs(scale - width ** -0.5) < 1e-6;
    const chain = () => [
      symbol("q", truncate(token, 16), "q"),
      " · ",
      symbol("k", key, "k"),
      " = ",
      number(decimal(products[row]), "e"),
      scale === null
        ? null
        : [
            shown
              ? [" ÷ √", symbol("d", "k", "d"), ` = √${width} = ${Number((width ** 0.5).toPrecision(4))} → `]
              : [` × ${Number(scale.toPrecision(3))} → `],
            number(decimal(scaled[row]), "d"),
          ],
      Math.abs(scores[row] - scaled[row]) > 1e-6 * Math.max(1, Math.abs(scores[row]))
        ? [" → ", number(decimal(scores[row]), "m")]
        : null,
      " → softmax → ",
      number(weightText(weights[row]), "a"),
    ];
    const score = this.sourcesOf({ row, kind: "a" })[0]?.kind;
    const ofScore = { e: products, d: scaled, m: scores }[score] ?? scores;
    /** @type {[any, Product[], number, string] | null} title, products, result and its kind */
    let sum = null;
    let note = null;
    /** @type {string[] | null} */
    let pieces = null;
    if (kind === "e" || (kind === "d" && scale !== null) || (kind === "a" && query)) {
      const list = Array.from(query.x, (a, i) => ({
        a,
        b: keys[row].x[i],
        kinds: /** @type {[string, string]} */ (["q", "k"]),
      }));
      sum = [[chain(), " of ", quoted(token), " comes from ", quoted(key)], list, products[row], "e"];
      if (kind === "a") {
        const total = ofScore.reduce((all, x) => all + Math.exp(x), 0);
        note = [
          "softmax: exp(",
          number(decimal(ofScore[row]), score),
          `) ÷ Σ exp(all scores) = ${decimal(Math.exp(ofScore[row]), 3)} ÷ ${decimal(total, 3)} = `,
          number(weightText(weights[row]), "a"),
        ];
        if (total === 0 || !Number.isFinite(total)) note = null;
      } else if (kind === "d")
        note = shown
          ? `1 ⁄ √d = 1 ⁄ √${width} = ${Number(scale.toPrecision(4))}: ${decimal(products[row])} × ${Number(scale.toPrecision(4))} = ${decimal(scaled[row])}`
          : null;
    } else if (kind === "av") {
      const list = Array.from(values[row].x, (b) => ({
        a: weights[row],
        b,
        kinds: /** @type {[string, string]} */ (["a", "v"]),
      }));
      sum = [
        [
          symbol("a", key, "a"),
          " · ",
          symbol("v", key, "v"),
          ": the weight ",
          number(weightText(weights[row]), "a"),
          " times every number of the value of ",
          quoted(key),
        ],
        list,
        NaN,
        "v",
      ];
    } else if (kind === "z" && this.channel < 0) {
      this.channel = argmax(output.x.map(Math.abs));
      return this.drawDetail();
    } else if (kind === "z") {
      const i = this.channel;
      const list = Array.from(weights, (a, s) => ({
        a,
        b: values[s].x[i],
        kinds: /** @type {[string, string]} */ (["a", "v"]),
      }));
      sum = [
        [
          "Number ",
          String(i + 1),
          " of Σ ",
          symbol("a", "", "a"),
          "·",
          symbol("v", "", "v"),
          " = ",
          number(decimal(output.x[i], 3), "z"),
          ", which this head gives to ",
          quoted(token),
        ],
        list,
        output.x[i],
        "z",
      ];
    } else {
      const vector = this.vectorOf(this.cell);
      const at = Math.max(0, this.channel < 0 ? argmax((vector?.x ?? [0]).map(Math.abs)) : this.channel);
      this.channel = vector ? at : -1;
      const [input, index] = vector ? vector.places[at] : [this.steps.softmax, 0];
      const derived = vector && typeof input === "number" ? this.view.trace.derivation(input, index) : null;
      const owner = kind === "q" ? token : key;
      pieces = derived ? derived.pieces : [];
      sum = [
        vector
          ? [
              "Number ",
              String(at + 1),
              " of ",
              symbol(kind, truncate(owner, 16), kind),
              " = ",
              number(decimal(vector.x[at], 3), kind),
              derived
                ? ` = ${derived.before}${pieces.slice(0, 4).join(derived.sign)}${pieces.length > 4 ? ` + … ${pieces.length - 4} more` : ""}${derived.after}`
                : "",
            ]
          : [
              "The score of ",
              quoted(key),
              " is ",
              number(decimal(scores[row] ?? 0), "m"),
              "; softmax turns it into the weight ",
              number(weightText(weights[row]), "a"),
            ],
        [],
        NaN,
        kind,
      ];
    }
    const [title, list, result, of] = sum;
    const ideas = {
      e: [
        "The query of ",
        quoted(token),
        " and the key of ",
        quoted(key),
        " agree in some numbers and disagree in others; the sum of the products is their score.",
      ],
      d: [
        "The score is divided by the root of the number of summands, so that softmax is not driven to 0 and 1 by long vectors.",
      ],
      a: [
        "Softmax turns all scores into shares that sum to 1: ",
        number(`${(100 * weights[row]).toFixed(1)}%`, "a"),
        " for ",
        quoted(key),
        ".",
      ],
    };
    setChildren(
      this.detail,
      html("p", { class: "equation" }, title),
      depth === "idea" && ideas[kind] ? html("p", {}, ideas[kind]) : null,
      note && depth !== "idea" ? html("p", { class: "secondary" }, note) : null,
      depth === "formula"
        ? this.formulas()
        : depth === "numbers" && list.length
          ? this.productList(list, result, of)
          : null,
    );
  }

  /** The equations of the walk, with the shapes of their symbols. */
  formulas() {
    const { query, keys, output, scale } = this.steps;
    const width = query?.x.length;
    const { traceHeader } = this.view;
    const places = [query?.places[0][0], keys[0]?.places[0][0], this.steps.values[0]?.places[0][0]];
    const of = /** @type {number[]} */ (places.filter((n) => typeof n === "number" && traceHeader.steps[n]?.formula));
    return html(
      "div",
      { class: "formulas" },
      of.map((n) => html("p", { class: "formula" }, typeset(traceHeader.steps[n].formula))),
      query
        ? html(
            "p",
            { class: "formula" },
            symbol("e", "ts", "e"),
            " = ",
            symbol("q", "t", "q"),
            " · ",
            symbol("k", "s", "k"),
            scale === null ? null : [" / √", symbol("d", "k", "d")],
            html("span", { class: "secondary" }, ` d = ${width}, ${keys.length} keys`),
          )
        : null,
      html(
        "p",
        { class: "formula" },
        symbol("a", "ts", "a"),
        " = exp(",
        symbol("e", "ts", "e"),
        ") / Σ exp(",
        symbol("e", "ti", "e"),
        ")",
      ),
      output
        ? html(
            "p",
            { class: "formula" },
            symbol("z", "t", "z"),
            " = Σ ",
            symbol("a", "ts", "a"),
            " ",
            symbol("v", "s", "v"),
          )
        : null,
    );
  }

  /** @param {Product[]} list @param {number} result @param {string} of */
  productList(list, result, of) {
    const draw = (/** @type {boolean} */ all) => {
      const shown = all ? list : list.slice(0, MAX_PRODUCTS);
      setChildren(
        grid,
        shown.map(({ a, b, kinds }, i) =>
          html(
            "span",
            { class: "product", "data-channel": i, onpointerenter: () => this.lightChannel(of === "z" ? -1 : i) },
            html("b", { "data-kind": kinds[0] }, decimal(a)),
            " × ",
            html("b", { "data-kind": kinds[1] }, decimal(b)),
            " = ",
            html("b", { "data-kind": of }, decimal(a * b)),
          ),
        ),
        list.length > shown.length
          ? html(
              "button",
              { type: "button", class: "more", onclick: () => draw(true) },
              `… ${list.length - shown.length} more`,
            )
          : null,
        Number.isNaN(result)
          ? null
          : html("span", { class: "product total" }, "sum = ", html("b", { "data-kind": of }, decimal(result))),
      );
    };
    const grid = html("div", { class: "products", onpointerleave: () => this.lightChannel(-1) });
    draw(false);
    return grid;
  }

  /** Marks a number of all vectors. @param {number} channel */
  lightChannel(channel) {
    this.table.style.setProperty("--channel", String(channel));
    this.table.classList.toggle("lit", channel >= 0);
  }

  /** Chooses the number of a vector under the pointer. @param {PointerEvent} event */
  pointChannel(event) {
    const cell = /** @type {HTMLElement} */ (event.currentTarget);
    const kind = cell.getAttribute("data-kind");
    const band = /** @type {HTMLElement | null} */ (cell.querySelector(".stripe"));
    if (!band || !["q", "k", "v", "z"].includes(kind)) return;
    const { left, width } = band.getBoundingClientRect();
    const count = Number(band.style.getPropertyValue("--count"));
    const channel = Math.max(0, Math.min(count - 1, Math.floor(((event.clientX - left) / width) * count)));
    this.lightChannel(channel);
    if (channel !== this.channel && cell.getAttribute("aria-selected") === "true") {
      this.channel = channel;
      this.drawDetail();
    } else if (cell.getAttribute("aria-selected") !== "true") this.channel = channel;
  }

  /** Draws arrows from the sources of the chosen cell. */
  drawArrows() {
    setChildren(this.arrows);
    if (!this.cell || !this.stage.isConnected) return;
    const frame = this.stage.getBoundingClientRect();
    const boxes = [...this.table.querySelectorAll(".walk-cell")];
    const boxOf = (/** @type {Cell} */ cell) => boxes.find((one) => this.isCell(one, cell))?.getBoundingClientRect();
    const end = boxOf(this.cell);
    if (!end) return;
    setAttributes(this.arrows, { viewBox: `0 0 ${frame.width} ${frame.height}` });
    for (const source of this.sourcesOf(this.cell)) {
      const box = boxOf(source);
      if (!box) continue;
      const [x, y] = [box.right - frame.left - 6, box.top + box.height / 2 - frame.top];
      const [u, v] = [end.left - frame.left + 4, end.top + end.height / 2 - frame.top];
      const d =
        u > x
          ? `M${x} ${y}C${(x + u) / 2} ${y} ${(x + u) / 2} ${v} ${u} ${v}`
          : `M${box.left - frame.left + 20} ${box.bottom - frame.top}L${u} ${v}`;
      this.arrows.append(svgElement("path", { d, "data-kind": source.kind }));
    }
  }

  /** Arrow keys move between cells; Enter opens one. @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (
      !target.classList.contains("walk-cell") ||
      !(event.key in moves) ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey
    )
      return;
    event.preventDefault();
    event.stopPropagation();
    const lines = [...this.table.querySelectorAll(".walk-line")]
      .map((line) => [...line.querySelectorAll(".walk-cell")])
      .filter((line) => line.length);
    const at = lines.findIndex((line) => line.includes(target));
    const [down, right] = moves[event.key];
    const line = lines[Math.max(0, Math.min(lines.length - 1, at + down))];
    const column = Math.max(0, Math.min(line.length - 1, lines[at].indexOf(target) + right));
    /** @type {HTMLElement} */ (line[column]).focus();
  }

  // Playing

  get reducesMotion() {
    return window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  }

  changeSpeed() {
    this.speed = this.speed === 4 ? 0.5 : 2 * this.speed;
    this.speedButton.textContent = `${this.speed}× speed`;
  }

  /** Plays all phases from the first one; with reduced motion, shows the next one. */
  play() {
    if (this.reducesMotion) return this.stop((this.phase + 1) % PHASES.length);
    if (this.timer) return this.stop(this.phase);
    const step = () => {
      if (this.phase === PHASES.length - 1) return this.stop(this.phase);
      this.setPhase(this.phase + 1);
      this.timer = window.setTimeout(step, DURATION / PHASES.length / this.speed);
    };
    this.setPhase(this.phase === PHASES.length - 1 ? 0 : this.phase);
    this.timer = window.setTimeout(step, DURATION / PHASES.length / this.speed);
    this.drawControls();
  }

  /** Stops at a phase. @param {number} phase */
  stop(phase) {
    clearTimeout(this.timer);
    this.timer = 0;
    this.setPhase(phase);
    this.drawControls();
  }

  drawControls() {
    setChildren(this.playButton, this.reducesMotion ? "Next phase" : this.timer ? "❚❚ Pause" : "▶ Play");
  }

  /** @param {number} phase */
  setPhase(phase) {
    this.phase = phase;
    this.slider.value = String(phase);
    setAttributes(this.slider, { "aria-valuetext": PHASES[phase] });
    for (const element of this.table.querySelectorAll("[data-kind]:not(.symbol)"))
      element.classList.toggle("later", PHASE_OF[element.getAttribute("data-kind")] > phase);
    for (const element of this.table.querySelectorAll(".walk-line.sum"))
      element.classList.toggle("later", phase < PHASE_OF.z);
    this.arrows.classList.toggle("later", phase < PHASES.length - 1);
    setChildren(this.caption, this.sentence(PHASES[phase]));
  }

  /** What a phase does, with the numbers of this token. @param {string} phase */
  sentence(phase) {
    if (!this.steps) return null;
    const { query, products, scale, scaled, weights, output } = this.steps;
    const { token, keys } = this.names;
    const quoted = (/** @type {string} */ name) => html("q", {}, html("bdi", {}, truncate(name, 16)));
    const top = argmax(products);
    const named = topK(weights, MAX_NAMED_KEYS).filter((s) => weights[s] > 0);
    const list = named.map((s, i) => [
      i ? (i === named.length - 1 ? " and " : ", ") : "",
      html("strong", {}, html("bdi", {}, truncate(keys[s], 16))),
      ` (${weightText(weights[s])})`,
    ]);
    if (phase === "sum" || !query)
      return [
        quoted(token),
        query
          ? " compares its query with the key of every token. Softmax turns the scores into weights that sum to 1; the largest go to "
          : " gives its largest weights to ",
        list,
        ". ",
        output ? "The values, each times its weight, are summed." : "",
      ];
    return {
      query: [quoted(token), ` asks with its query, ${query.x.length} numbers: one number per cell, gray if negative.`],
      keys: [`Each of the ${keys.length} tokens answers with its key, ${query.x.length} numbers too.`],
      scores: [
        "Number by number, the query is multiplied with a key, and the products are summed: the score. The largest, ",
        decimal(products[top]),
        ", is that of ",
        quoted(keys[top]),
        ".",
      ],
      scale:
        scale === null
          ? "These scores are not scaled."
          : [
              `All scores are multiplied with ${Number(scale.toPrecision(4))}: `,
              decimal(products[top]),
              " becomes ",
              decimal(scaled[top]),
              ".",
            ],
      softmax: [
        "Softmax makes every score positive (exp) and divides by the sum: the weights. The largest go to ",
        list,
        ".",
      ],
      values: output ? "Each token also offers a value; it is multiplied with the token’s weight." : "",
    }[phase];
  }

  layout() {
    this.drawArrows();
  }
}

/** Names of cells by kind, for screen readers. */
const NAMES = {
  q: "query",
  k: "key",
  e: "score",
  d: "scaled score",
  m: "score",
  a: "weight",
  v: "value",
  av: "weighted value",
  z: "output",
};

/** A title that fits into a rail: the symbols of its formula, or the title. @param {any} step */
const shortTitle = (step) => {
  const parts = step.formula.split(/ [=←] /);
  return parts.length > 1 && step.formula.length < 24 ? step.formula : step.title;
};
