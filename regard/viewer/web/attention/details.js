/** Details next to the figures: the weights of a token, measures of a head, and a caution. */

import { html, setChildren, tokenText } from "../core/dom.js";
import { formatSigned, formatWeight, withMinus } from "../core/tokens.js";
import { alignmentErrorRate, argmax, meanEntropy, meanOverlap, rowEntropy, topK } from "../weights/maths.js";

/** @typedef {import("./heatmap.js").FigureData} FigureData */
/** @typedef {import("./heatmap.js").Cell} Cell */

/** Number of listed weights of a map, and of one token. */
const MAX_LISTED_WEIGHTS = 6;
const MAX_TOKEN_WEIGHTS = 32;

/** The largest weights of one token. */
export class TokenDetails {
  constructor() {
    this.element = html("section", { class: "reading", "aria-label": "Reading" });
  }

  /**
   * @param {{figureData: FigureData, cell: Cell | null, mark: string, color?: number, name?: string}[]} readings one
   * per figure, or one per head with its color and name
   * @param {boolean} isPinned
   * @param {number | null} [difference] difference of the two figures at the cell
   */
  show(readings, isPinned, difference = null) {
    const isCompared = readings.length > 1;
    const rounded = readings.some(({ figureData }) => figureData.rounded);
    setChildren(
      this.element,
      readings.map((one) =>
        one.cell ? this.tokenWeights(one, isPinned, isCompared) : this.largestWeights(one, isCompared),
      ),
      difference === null
        ? null
        : html(
            "p",
            { class: "exact difference-value" },
            "A − B ",
            html("output", { "aria-live": "off" }, formatSigned(difference, rounded)),
          ),
    );
  }

  /**
   * Without a selected token: the largest weights of the map.
   * @param {{figureData: FigureData, mark: string, color?: number, name?: string}} reading @param {boolean} isCompared
   */
  largestWeights({ figureData, mark, color, name }, isCompared) {
    const { rows, columns, map } = figureData;
    const best = map.isMaterialized ? topK(map.allCells(), MAX_LISTED_WEIGHTS) : [];
    return html(
      "div",
      { class: "one", "data-mark": isCompared && !name ? mark : null, "data-color": color },
      name ? html("p", { class: "head-name" }, html("i", { "aria-hidden": "true" }), name) : null,
      html(
        "h2",
        { class: "quiet" },
        badge(mark, isCompared && !name),
        map.isMaterialized ? "Largest weights" : "Point at the map",
      ),
      html(
        "ol",
        { class: "ranks pairs" },
        best.map((i) => {
          const [row, column] = [Math.floor(i / map.columns), i % map.columns];
          return html(
            "li",
            {},
            html(
              "span",
              { class: "name" },
              tokenText(rows.labels[row], rows.rtl),
              html("span", { class: "to" }, "→"),
              tokenText(columns.labels[column], columns.rtl),
            ),
            html("span", { class: "weight" }, map.exactRow(row)[column].toFixed(figureData.rounded ? 3 : 4)),
          );
        }),
      ),
      html(
        "p",
        { class: "secondary" },
        "Point at a token to see what it attends to; click to pin it. Arrow keys work too.",
      ),
    );
  }

  /**
   * @param {{figureData: FigureData, cell: Cell, mark: string, color?: number, name?: string}} reading
   * @param {boolean} isPinned @param {boolean} isCompared
   */
  tokenWeights({ figureData, cell, mark, color, name }, isPinned, isCompared) {
    const { rows, columns, map } = figureData;
    const isColumn = cell.row === null;
    // A column of a large map is as expensive as the map.
    const numbers = isColumn ? (map.isMaterialized ? readColumn(map, cell.column) : null) : map.exactRow(cell.row);
    const [own, others] = isColumn ? [columns, rows] : [rows, columns];
    const position = isColumn ? cell.column : cell.row;
    const best = numbers ? topK(numbers, MAX_TOKEN_WEIGHTS).filter((i) => numbers[i] > 0) : [];
    const marked = isColumn ? cell.row : cell.column;
    const top = best.length ? numbers[best[0]] : 1;
    const rest = numbers
      ? numbers.reduce((sum, weight) => sum + weight, 0) - best.reduce((sum, i) => sum + numbers[i], 0)
      : 0;
    return html(
      "div",
      { class: "one", "data-mark": isCompared && !name ? mark : null, "data-color": color },
      name ? html("p", { class: "head-name" }, html("i", { "aria-hidden": "true" }), name) : null,
      html(
        "h2",
        {},
        badge(mark, isCompared && !name),
        isColumn
          ? [
              html("span", { class: "verb" }, "What attends to "),
              tokenText(own.labels[position], own.rtl, { class: "subject" }),
            ]
          : [
              tokenText(own.labels[position], own.rtl, { class: "subject" }),
              html("span", { class: "verb" }, " attends to"),
            ],
        isPinned ? html("span", { class: "pinned" }, "pinned") : null,
      ),
      marked !== null && numbers
        ? html(
            "p",
            { class: "exact" },
            tokenText(others.labels[marked], others.rtl),
            " ",
            html("output", { "aria-live": "off" }, formatWeight(numbers[marked], figureData.rounded)),
          )
        : null,
      html(
        "ol",
        { class: "ranks" },
        best.map((i) => {
          const bar = html("span", { class: "bar" });
          bar.style.width = `${(100 * numbers[i]) / top}%`;
          return html(
            "li",
            { class: i === marked ? "on" : "" },
            html("span", { class: "name" }, tokenText(others.labels[i], others.rtl)),
            html("span", { class: "track" }, bar),
            html("span", { class: "weight" }, formatListed(numbers[i], figureData.rounded)),
          );
        }),
      ),
      numbers && !isColumn
        ? html("p", { class: "secondary" }, this.describeDistribution(numbers, best.length, rest))
        : null,
      figureData.rounded
        ? html(
            "p",
            { class: "secondary" },
            "To keep this page small, q and k are quantized to 16 bits: weights are accurate to about three digits.",
          )
        : null,
    );
  }

  /** @param {Float64Array} numbers @param {number} named @param {number} rest */
  describeDistribution(numbers, named, rest) {
    const bits = rowEntropy(numbers);
    const others = numbers.length - named;
    const perplexity = 2 ** bits;
    return (
      (others > 0 && rest > 0.00005 ? `${others} others: ${Math.max(0, rest).toFixed(4)} in total. ` : "") +
      `Entropy ${bits.toFixed(2)} bits, as for a uniform distribution over ${perplexity.toFixed(1)} tokens.`
    );
  }
}

/** A weight of a list. @param {number} weight @param {boolean} rounded */
const formatListed = (weight, rounded) =>
  weight < 0.0001 && !rounded ? withMinus(weight.toExponential(0)) : weight.toFixed(rounded ? 3 : 4);

/** The letter of a figure, if there are two. @param {string} mark @param {boolean} isCompared */
function badge(mark, isCompared) {
  return isCompared ? html("span", { class: "mark" }, mark === "first" ? "A" : "B") : null;
}

/** @param {import("../weights/maps.js").AttentionMap} map @param {number} column */
function readColumn(map, column) {
  const cells = map.allCells();
  return Float64Array.from({ length: map.rows }, (_, row) => cells[row * map.columns + column]);
}

/** Measures of a head: entropy, agreement with the other heads of its layer, alignment error; and a note of caution. */
export class Measures {
  /**
   * @param {import("../weights/maps.js").Attentions} attentions
   * @param {import("../core/scheduler.js").Scheduler} scheduler
   */
  constructor(attentions, scheduler) {
    this.attentions = attentions;
    this.scheduler = scheduler;
    this.values = html("div", { class: "values" });
    this.element = html("section", { class: "measures", "aria-label": "Measures" }, this.values);
    this.note = html(
      "details",
      { class: "note" },
      html("summary", {}, "Attention is not explanation"),
      html(
        "p",
        {},
        "Weights show how value vectors were mixed in one layer. The values themselves, the other layers and the residual " +
          "connections matter as much, and different weights can produce the same output. Treat a map as a question, not as " +
          "an explanation.",
      ),
    );
  }

  /**
   * @param {{figureData: FigureData, selected: import("../core/state.js").HeadRef, mark: string, attentions?:
   * import("../weights/maps.js").Attentions}[]} panels
   * of these attentions, or of others @param {number[][] | null} gold links of the first panel
   */
  show(panels, gold) {
    /** @type {Map<string, string>[]} */
    const values = panels.map(() => new Map());
    const draw = () => this.draw(panels, values);
    draw();
    /** @type {(() => void)[]} */
    const steps = [];
    panels.forEach(({ figureData, selected, attentions = this.attentions }, i) => {
      const { map } = figureData;
      const links = i ? attentions.scene.links : gold;
      steps.push(() => values[i].set("entropy", meanEntropy(map).toFixed(2)));
      if (links && figureData.rows.merged) {
        steps.push(() => values[i].set("error", this.error(figureData, links).toFixed(2)));
      }
      const { heads } = attentions.byName.get(selected.attention);
      if (heads > 1 && selected.head !== "mean") {
        let [sum, others] = [0, 0];
        for (let head = 0; head < heads; head++) {
          if (head === selected.head) continue;
          steps.push(() => {
            sum += meanOverlap(map, attentions.map({ attention: selected.attention, head }, figureData.rows.merged));
            others += 1;
            if (others === heads - 1) values[i].set("agreement", (sum / others).toFixed(2));
          });
        }
      }
    });
    const [a, b] = panels;
    if (b && a.figureData.map.rows === b.figureData.map.rows && a.figureData.map.columns === b.figureData.map.columns) {
      steps.push(() => values[0].set("both", meanOverlap(a.figureData.map, b.figureData.map).toFixed(2)));
    }
    this.scheduler.add("measures", 3, () => {
      steps.shift()?.();
      if (steps.length === 0) draw();
      return steps.length > 0;
    });
  }

  /**
   * The alignment error rate of a map of words: each query word is linked to the key word with the largest weight.
   * @param {FigureData} figureData @param {number[][]} gold
   */
  error(figureData, gold) {
    /** @type {[number, number][]} */
    const links = [];
    for (let row = 0; row < figureData.map.rows; row++) {
      const target = figureData.rows.wordAt(row);
      if (target === null || target < 0) continue;
      const weights = figureData.map.exactRow(row);
      // Special tokens such as <eos> are not words and get no links.
      const words = Array.from(weights, (weight, c) => ((figureData.columns.wordAt(c) ?? -1) < 0 ? -1 : weight));
      links.push([target, figureData.columns.wordAt(argmax(Float64Array.from(words)))]);
    }
    return alignmentErrorRate(links, /** @type {[number, number][]} */ (gold));
  }

  /** @param {{figureData: FigureData, mark: string}[]} panels @param {Map<string, string>[]} values */
  draw(panels, values) {
    const { map } = panels[0].figureData;
    const sampleNote = map.isMaterialized ? "" : `. Estimated from ${map.sampleRows().length} of ${map.rows} rows.`;
    const maxEntropy = Math.log2(Math.max(1, map.columns)).toFixed(2);
    /** @param {string} key @param {string} name @param {string} description */
    const measure = (key, name, description) => {
      if (!values.some((one) => one.has(key)) && key !== "entropy") return null;
      return html(
        "div",
        { class: "measure" },
        html("dt", {}, name),
        html(
          "dd",
          {},
          html(
            "span",
            { class: "figures" },
            panels.map(({ mark }, i) =>
              values[i].has(key) || key === "entropy"
                ? html(
                    "span",
                    { class: "value", "data-mark": panels.length > 1 && key !== "both" ? mark : null },
                    values[i].get(key) ?? "…",
                  )
                : null,
            ),
          ),
          html("span", { class: "description" }, description + sampleNote),
        ),
      );
    };
    setChildren(
      this.values,
      html(
        "dl",
        {},
        measure("entropy", "Entropy", `Mean entropy per row (bits); 0 = one token, ${maxEntropy} = uniform`),
        measure("agreement", "Agreement", "Mean weight shared with the layer's other heads; 1 = identical"),
        measure("both", "Overlap", "Weight shared by the two maps; 1 = identical"),
        measure("error", "Alignment error", "Alignment error rate against the gold links; 0 = none"),
      ),
    );
  }
}
