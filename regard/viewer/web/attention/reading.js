/** Details next to the figures: the weights of a token, measures of a head, and a caution. */

import { alignmentError, entropyOf, greatestIn, greatestOf } from "../weights/maths.js";
import { agreementOf, meanEntropy } from "../weights/maps.js";
import { fill, h, tokenText } from "../core/dom.js";
import { exactly, withSign } from "../core/tokens.js";

/** @typedef {import("./heatmap.js").Shot} Shot */
/** @typedef {import("./heatmap.js").Cell} Cell */

/** Number of listed weights. */
const NAMED_WEIGHTS = 6;

/** The largest weights of one token. */
export class Reading {
  constructor() {
    this.element = h("section", { class: "reading", "aria-label": "Reading" });
  }

  /**
   * @param {{shot: Shot, cell: Cell | null, mark: string}[]} readings one per figure @param {boolean} pinned
   * @param {number | null} [apart] difference of the two figures at the cell
   */
  show(readings, pinned, apart = null) {
    const several = readings.length > 1;
    const rounded = readings.some(({ shot }) => shot.rounded);
    fill(
      this.element,
      readings.map((one) => (one.cell ? this.one(one, pinned, several) : this.none(one, several))),
      apart === null
        ? null
        : h("p", { class: "exact apart" }, "A − B ", h("output", { "aria-live": "off" }, withSign(apart, rounded))),
    );
  }

  /**
   * Without a selected token: the largest weights of the map.
   * @param {{shot: Shot, mark: string}} reading @param {boolean} several
   */
  none({ shot, mark }, several) {
    const { rows, columns, map } = shot;
    const best = map.whole ? greatestOf(map.all(), NAMED_WEIGHTS) : [];
    return h(
      "div",
      { class: "one", "data-mark": several ? mark : null },
      h("h2", { class: "quiet" }, badge(mark, several), map.whole ? "Largest weights" : "Point at the map"),
      h(
        "ol",
        { class: "ranks pairs" },
        best.map((i) => {
          const [row, column] = [Math.floor(i / map.columns), i % map.columns];
          return h(
            "li",
            {},
            h(
              "span",
              { class: "name" },
              tokenText(rows.labels[row], rows.rtl),
              h("span", { class: "to" }, "→"),
              tokenText(columns.labels[column], columns.rtl),
            ),
            h("span", { class: "weight" }, map.exact(row)[column].toFixed(shot.rounded ? 3 : 4)),
          );
        }),
      ),
      h("p", { class: "rest" }, "Point at a token to see what it attends to; click to pin it. Arrow keys work too."),
    );
  }

  /** @param {{shot: Shot, cell: Cell, mark: string}} reading @param {boolean} pinned @param {boolean} several */
  one({ shot, cell, mark }, pinned, several) {
    const { rows, columns, map } = shot;
    const incoming = cell.row === null;
    // A column of a large map is as expensive as the map.
    const numbers = incoming ? (map.whole ? columnOf(map, cell.column) : null) : map.exact(cell.row);
    const [own, others] = incoming ? [columns, rows] : [rows, columns];
    const place = incoming ? cell.column : cell.row;
    const best = numbers ? greatestOf(numbers, NAMED_WEIGHTS).filter((i) => numbers[i] >= 0.00005) : [];
    const told = incoming ? cell.row : cell.column;
    const top = best.length ? numbers[best[0]] : 1;
    const rest = numbers
      ? numbers.reduce((sum, weight) => sum + weight, 0) - best.reduce((sum, i) => sum + numbers[i], 0)
      : 0;
    return h(
      "div",
      { class: "one", "data-mark": several ? mark : null },
      h(
        "h2",
        {},
        badge(mark, several),
        incoming
          ? [h("span", { class: "verb" }, "What attends to "), tokenText(own.labels[place], own.rtl, { class: "subject" })]
          : [tokenText(own.labels[place], own.rtl, { class: "subject" }), h("span", { class: "verb" }, " attends to")],
        pinned ? h("span", { class: "pinned" }, "pinned") : null,
      ),
      told !== null && numbers
        ? h(
            "p",
            { class: "exact" },
            tokenText(others.labels[told], others.rtl),
            " ",
            h("output", { "aria-live": "off" }, exactly(numbers[told], shot.rounded)),
          )
        : null,
      h(
        "ol",
        { class: "ranks" },
        best.map((i) => {
          const bar = h("span", { class: "bar" });
          bar.style.width = `${(100 * numbers[i]) / top}%`;
          return h(
            "li",
            { class: i === told ? "on" : "" },
            h("span", { class: "name" }, tokenText(others.labels[i], others.rtl)),
            h("span", { class: "track" }, bar),
            h("span", { class: "weight" }, numbers[i].toFixed(shot.rounded ? 3 : 4)),
          );
        }),
      ),
      numbers && !incoming ? h("p", { class: "rest" }, this.sums(numbers, best.length, rest)) : null,
      shot.rounded
        ? h(
            "p",
            { class: "rest" },
            "To keep this page small, q and k are quantized to 16 bits: weights are accurate to about three digits.",
          )
        : null,
    );
  }

  /** @param {Float64Array} numbers @param {number} named @param {number} rest */
  sums(numbers, named, rest) {
    const bits = entropyOf(numbers);
    const others = numbers.length - named;
    const evenly = 2 ** bits;
    return (
      (others > 0 && rest > 0.00005 ? `Other ${others}: ${Math.max(0, rest).toFixed(4)} in total. ` : "") +
      `Entropy ${bits.toFixed(2)} bits, as for a uniform distribution over ${evenly.toFixed(1)} tokens.`
    );
  }
}

/** The letter of a figure, if there are two. @param {string} mark @param {boolean} several */
function badge(mark, several) {
  return several ? h("span", { class: "mark" }, mark === "first" ? "A" : "B") : null;
}

/** @param {import("../weights/maps.js").Weights} map @param {number} column */
function columnOf(map, column) {
  const cells = map.all();
  return Float64Array.from({ length: map.rows }, (_, row) => cells[row * map.columns + column]);
}

/** Measures of a head: entropy, agreement with the other heads of its layer, alignment error; and a caution. */
export class Measures {
  /** @param {import("../weights/maps.js").Attentions} attentions @param {import("../core/scheduler.js").Work} work */
  constructor(attentions, work) {
    this.attentions = attentions;
    this.work = work;
    this.values = h("div", { class: "values" });
    this.element = h(
      "section",
      { class: "measures", "aria-label": "Measures" },
      this.values,
      h(
        "details",
        { class: "note", open: true },
        h("summary", {}, "Attention is not explanation"),
        h(
          "p",
          {},
          "Weights show how value vectors were mixed in one layer. The values themselves, the other layers and the residual " +
            "connections matter as much, and different weights can produce the same output. Treat a map as a question, not as " +
            "an explanation.",
        ),
      ),
    );
  }

  /**
   * @param {{shot: Shot, shown: import("../core/state.js").Shown, mark: string, attentions?: import("../weights/maps.js").Attentions}[]} panels
   * of these attentions, or of others @param {number[][] | null} gold links of the first panel
   */
  show(panels, gold) {
    /** @type {Map<string, string>[]} */
    const found = panels.map(() => new Map());
    const draw = () => this.draw(panels, found);
    draw();
    /** @type {(() => void)[]} */
    const steps = [];
    panels.forEach(({ shot, shown, attentions = this.attentions }, i) => {
      const { map } = shot;
      const links = i ? attentions.scene.links : gold;
      steps.push(() => found[i].set("entropy", meanEntropy(map).toFixed(2)));
      if (links && shot.rows.joined) {
        steps.push(() => found[i].set("error", this.error(shot, links).toFixed(2)));
      }
      const { heads } = attentions.byName.get(shown.attention);
      if (heads > 1 && shown.head !== "mean") {
        let [sum, others] = [0, 0];
        for (let head = 0; head < heads; head++) {
          if (head === shown.head) continue;
          steps.push(() => {
            sum += agreementOf(map, attentions.map({ attention: shown.attention, head }, shot.rows.joined));
            others += 1;
            if (others === heads - 1) found[i].set("agreement", (sum / others).toFixed(2));
          });
        }
      }
    });
    const [a, b] = panels;
    if (b && a.shot.map.rows === b.shot.map.rows && a.shot.map.columns === b.shot.map.columns) {
      steps.push(() => found[0].set("both", agreementOf(a.shot.map, b.shot.map).toFixed(2)));
    }
    this.work.add("measures", 3, () => {
      steps.shift()?.();
      if (steps.length === 0) draw();
      return steps.length > 0;
    });
  }

  /**
   * The alignment error rate of a map of words: each query word is linked to the key word with the largest weight.
   * @param {Shot} shot @param {number[][]} gold
   */
  error(shot, gold) {
    /** @type {[number, number][]} */
    const links = [];
    for (let row = 0; row < shot.map.rows; row++) {
      const target = shot.rows.wordAt(row);
      if (target === null || target < 0) continue;
      const weights = shot.map.exact(row);
      // Special tokens such as <eos> are not words and get no links.
      const words = Array.from(weights, (weight, c) => ((shot.columns.wordAt(c) ?? -1) < 0 ? -1 : weight));
      links.push([target, shot.columns.wordAt(greatestIn(Float64Array.from(words)))]);
    }
    return alignmentError(links, /** @type {[number, number][]} */ (gold));
  }

  /** @param {{shot: Shot, mark: string}[]} panels @param {Map<string, string>[]} found */
  draw(panels, found) {
    const { map } = panels[0].shot;
    const sampled = map.whole ? "" : `. Estimated from ${map.sample().length} of ${map.rows} rows.`;
    const most = Math.log2(Math.max(1, map.columns)).toFixed(2);
    /** @param {string} key @param {string} name @param {string} says */
    const measure = (key, name, says) => {
      if (!found.some((one) => one.has(key)) && key !== "entropy") return null;
      return h(
        "div",
        { class: "measure" },
        h("dt", {}, name),
        h(
          "dd",
          {},
          h(
            "span",
            { class: "figures" },
            panels.map(({ mark }, i) =>
              found[i].has(key) || key === "entropy"
                ? h(
                    "span",
                    { class: "value", "data-mark": panels.length > 1 && key !== "both" ? mark : null },
                    found[i].get(key) ?? "…",
                  )
                : null,
            ),
          ),
          h("span", { class: "says" }, says + sampled),
        ),
      );
    };
    fill(
      this.values,
      h(
        "dl",
        {},
        measure("entropy", "Entropy", `Mean entropy per row (bits); 0 = one token, ${most} = uniform`),
        measure("agreement", "Agreement", "Mean weight shared with the layer's other heads; 1 = identical"),
        measure("both", "Overlap", "Weight shared by the two maps; 1 = identical"),
        measure("error", "Alignment error", "Alignment error rate against the gold links; 0 = none"),
      ),
    );
  }
}
