/** The derivation of a number, as text. */

import { h, setChildren } from "../core/dom.js";
import { formatNumber } from "./operations.js";

/** @typedef {import("./displayed_row.js").Row} Row */
/** @typedef {import("./trace.js").Step} Step */

/** Number of terms that are visible before "more" is pressed. */
const INITIAL_TERMS = 4;

/** The symbol on the left-hand side of a formula. @param {Step} step */
export const leftSymbol = (step) => step.formula.split(/ [=←] /)[0].replace(/[ₜₛₕ₀₁₂₃ᵢ]+.*$/u, "") || "y";

/**
 * The derivation of one number from the inputs of its step, or null if it is a copy.
 * @param {import("./trace.js").Trace} trace @param {number} n index of the step @param {Row} row @param {number} i
 */
export function derivationElement(trace, n, { indices, names }, i) {
  const at = indices[i];
  const sum = trace.derivation(n, at);
  if (!sum) return null;
  const { pieces, sign, before, after } = sum;
  const left = `${leftSymbol(trace.steps[n])}[${names ? names[i] : i}]`;
  const terms = h("span", { class: "terms" });
  /** @param {boolean} all */
  const write = (all) => {
    const visibleTerms = all ? pieces : pieces.slice(0, INITIAL_TERMS);
    const rest = pieces.length - visibleTerms.length;
    setChildren(
      terms,
      before,
      visibleTerms.flatMap((piece, k) => [k ? sign : null, h("span", { class: "term" }, piece)]),
      rest > 0 ? [sign, h("button", { type: "button", class: "more", onclick: () => write(true) }, `… ${rest} more`)] : null,
      after,
    );
  };
  write(pieces.length <= INITIAL_TERMS + 2);
  return h("p", { class: "derivation" }, h("bdi", { class: "left" }, left), " = ", terms, " = ", h("strong", {}, formatNumber(trace.value(n).data[at])));
}
