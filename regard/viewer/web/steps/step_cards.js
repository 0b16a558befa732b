/** The cards of the steps: title, formula, numbers of one token, and the derivation of the selected number. */

import { derivationElement, leftSymbol } from "./derivation.js";
import { displayedRow } from "./displayed_row.js";
import { formatNumber } from "./operations.js";
import { patchOverlay } from "../images/patch_picker.js";
import { h, setChildren } from "../core/dom.js";
import { formatWeight, withMinus } from "../core/tokens.js";

/** @typedef {import("./displayed_row.js").Row} Row */

/** Number of values that are visible before "more" is pressed. */
const INITIAL_CELLS = 8;
/** Tolerance of the comparison with recorded values. */
export const TOLERANCE = 1e-5;

/** Formats a difference. @param {number} x */
export const formatGap = (x) => (x === 0 ? "0" : withMinus(x.toExponential(0)));

export class StepCards {
  /** @param {import("./steps_view.js").StepsView} view */
  constructor(view) {
    this.view = view;
    /** Indices of the steps that show all numbers. @type {Set<number>} */
    this.expandedSteps = new Set();
    /** For each step, the number whose derivation is shown. @type {Map<number, number>} */
    this.selectedNumber = new Map();
  }

  /** A step without its numbers: the equation, the shape of the result and those of the parameters. @param {number} n index of the step */
  formula(n) {
    const step = this.view.traceHeader.steps[n];
    const { shape, axes } = step.output;
    return h(
      "article",
      { class: "formula-row", "data-op": step.op },
      h("h3", {}, step.title),
      h("p", { class: "formula" }, step.formula),
      h(
        "p",
        { class: "shapes" },
        h("span", { class: "shape" }, h("i", {}, leftSymbol(step)), ` ${shape.join(" × ")}`, h("span", { class: "secondary" }, ` (${axes.join(" × ")})`)),
        this.view.trace.paramsOf(n).map(({ sign, shape: own, full_shape: full }) => h("span", { class: "shape" }, h("i", {}, sign), ` ${(full ?? own).join(" × ")}`)),
      ),
    );
  }

  /** The card of a step. @param {number} n index of the step */
  card(n) {
    const step = this.view.traceHeader.steps[n];
    const row = displayedRow(this.view, n);
    const body = h("div", { class: "values-panel" });
    const show = () => {
      const { indices, display } = row;
      const selectedNumber = Math.min(this.selectedNumber.get(n) ?? row.first, indices.length - 1);
      setChildren(body, this.overlay(n), display === "bars" ? this.bars(n, row, selectedNumber, show) : this.cells(n, row, selectedNumber, show), derivationElement(this.view.trace, n, row, selectedNumber));
    };
    show();
    const gap = this.view.trace.check(n);
    const given = step.op === "given";
    const check = !this.view.traceHeader.outputs
      ? ""
      : given
      ? h("span", { class: "check", "data-agrees": "given" }, "input")
      : h(
          "span",
          { class: "check", "data-agrees": gap <= TOLERANCE ? "yes" : "no", title: "Largest difference between the value computed in this page and the recorded one" },
          gap <= TOLERANCE ? "✓ " : "≠ ",
          h("span", { class: "visually-hidden" }, gap <= TOLERANCE ? "agrees, largest difference " : "does not agree, largest difference "),
          formatGap(gap),
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
        this.view.trace.paramsOf(n).map(({ sign, name, shape, full_shape: full }) => h("span", { class: "param" }, h("i", {}, sign), ` ${(full ?? shape).join("×")} `, h("code", {}, name), full ? ` (${shape[0]} ${shape[0] === 1 ? "row" : "rows"} in this page)` : null)),
        step.differs === null ? null : h("span", { class: "own" }, step.differs === 0 ? "identical to the model's values" : `within ${formatGap(step.differs)} of the model's values`),
      ),
    );
  }

  /** Weights over patches as an overlay, or null if there are none. @param {number} n */
  overlay(n) {
    const { op, output } = this.view.traceHeader.steps[n];
    const side = output.axes[output.axes.length - 1];
    if (op !== "softmax" || !(side in (this.view.host.scene.image?.first ?? {}))) return null;
    const width = output.shape[output.shape.length - 1];
    const start = Math.floor(displayedRow(this.view, n).indices[0] / width) * width;
    return patchOverlay(this.view.host, side, this.view.trace.value(n).data.subarray(start, start + width));
  }

  /** A row of numbers; selecting one shows its derivation. @param {number} n @param {Row} row @param {number} selectedNumber @param {() => void} show */
  cells(n, { subject, indices, names, total }, selectedNumber, show) {
    const { data } = this.view.trace.value(n);
    const all = this.expandedSteps.has(n);
    const count = all ? indices.length : Math.min(indices.length, Math.max(INITIAL_CELLS, names && indices.length <= 16 ? indices.length : 0));
    const maximum = indices.reduce((largest, at) => (Number.isFinite(data[at]) ? Math.max(largest, Math.abs(data[at])) : largest), 1e-12);
    const hasDerivation = this.view.trace.derivation(n, indices[0]) !== null;
    const cells = indices.slice(0, count).map((at, i) => {
      const value = data[at];
      const on = i === selectedNumber;
      const content = [names ? [h("span", { class: "name" }, h("bdi", {}, names[i])), " "] : null, h("span", { class: "number" }, formatNumber(value))];
      const share = Number.isFinite(value) ? Math.round((34 * Math.abs(value)) / maximum) : 0;
      const style = `--share: ${share}%`;
      const sign = value < 0 ? "minus" : "plus";
      if (!hasDerivation) return h("span", { class: "cell", style, "data-sign": sign }, content);
      return h(
        "button",
        {
          type: "button",
          class: "cell",
          style,
          "data-sign": sign,
          "aria-pressed": String(on),
          tabindex: on || (i === 0 && selectedNumber >= count) ? 0 : -1,
          title: names ? null : `channel ${i}`,
          "aria-label": names ? null : `channel ${i}: ${formatNumber(value)}`,
          onclick: () => this.point(n, i, show),
        },
        content,
      );
    });
    const rest = indices.length - count;
    const more =
      rest > 0 || (all && indices.length > INITIAL_CELLS)
        ? h(
            "button",
            {
              type: "button",
              class: "more",
              "aria-expanded": String(all),
              onclick: () => {
                if (all) this.expandedSteps.delete(n);
                else this.expandedSteps.add(n);
                show();
              },
            },
            all ? "show fewer" : `… ${rest} more`,
          )
        : null;
    const width = total > 1 && !names ? h("span", { class: "width" }, ` ${total} channels`) : null;
    return [
      subject ? h("p", { class: "value-subject" }, subject, width) : null,
      h(
        "div",
        { class: "value-row", role: "group", "aria-label": subject ? `Values of ${subject}` : "Values", onkeydown: (/** @type {KeyboardEvent} */ event) => this.moveSelection(event, n, count, show) },
        cells,
        more,
      ),
    ];
  }

  /** Weights and probabilities as bars. @param {number} n @param {Row} row @param {number} selectedNumber @param {() => void} show */
  bars(n, { subject, indices, names }, selectedNumber, show) {
    const { data } = this.view.trace.value(n);
    return [
      subject ? h("p", { class: "value-subject" }, subject) : null,
      h(
        "div",
        { class: "bar-list", role: "group", "aria-label": `Weights of ${subject}`, onkeydown: (/** @type {KeyboardEvent} */ event) => this.moveSelection(event, n, indices.length, show) },
        indices.map((at, i) =>
          h(
            "button",
            {
              type: "button",
              class: "bar-button",
              "aria-pressed": String(i === selectedNumber),
              tabindex: i === selectedNumber ? 0 : -1,
              title: formatWeight(data[at]),
              onclick: () => this.point(n, i, show),
            },
            h("span", { class: "name" }, h("bdi", {}, names?.[i] ?? String(i))),
            " ",
            h("span", { class: "track" }, h("span", { class: "bar", style: `width: ${(100 * data[at]).toFixed(2)}%` })),
            h("span", { class: "number" }, data[at] > 0 && data[at] < 0.0005 ? withMinus(data[at].toExponential(0)) : data[at].toFixed(3)),
          ),
        ),
      ),
    ];
  }

  /** @param {number} n @param {number} i @param {() => void} show */
  point(n, i, show) {
    this.selectedNumber.set(n, i);
    const inside = document.activeElement;
    const parent = inside?.closest?.(".values-panel");
    show();
    /** @type {HTMLElement | null | undefined} */ (parent?.querySelector('[aria-pressed="true"]'))?.focus();
  }

  /** @param {KeyboardEvent} event @param {number} n @param {number} count @param {() => void} show */
  moveSelection(event, n, count, show) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const now = Math.min(this.selectedNumber.get(n) ?? displayedRow(this.view, n).first, count - 1);
    this.point(n, (now + moves[event.key] + count) % count, show);
  }
}
