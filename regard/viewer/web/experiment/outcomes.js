/** Outputs of the model before and after an intervention. */

import { h } from "../core/dom.js";
import { formatShort, makeVisible, withMinus } from "../core/tokens.js";

/** @typedef {{token: string, name: string, probability: number | null, likeliest: [string, number][]}} Step */
/**
 * @typedef {{text: string, logprob: number | null, steps: Step[], input_steps?: Step[],
 *   map: {rows: string[], columns: string[], weights: number[][]} | null}} Outcome
 */

/**
 * The output of the model before or after an intervention. Tokens that changed are highlighted.
 * @param {Outcome} outcome @param {Outcome | null} before null for the output before
 */
export function outcomeElements(outcome, before) {
  const name = before ? "after" : "before";
  /** @param {"steps" | "input_steps"} key @param {string} label */
  const list = (key, label) =>
    h(
      "ol",
      { class: "steps", tabindex: 0, "aria-label": label },
      outcome[key].map((step, n) => stepElement(step, before !== null && before[key]?.[n]?.token !== step.token)),
    );
  return [
    h("h2", {}, before ? "After" : "Before"),
    h("p", { class: "output-text", dir: "auto" }, outcome.text || (outcome.steps.length ? "" : "no output")),
    outcome.logprob === null ? null : h("p", { class: "score" }, `log-probability ${withMinus(outcome.logprob.toFixed(3))}`),
    list("steps", `Tokens and probabilities, ${name}`),
    outcome.input_steps?.length ? h("details", {}, h("summary", {}, "Probabilities of the tokens of the text"), list("input_steps", `Tokens of the text and probabilities, ${name}`)) : null,
  ];
}

/** A predicted token. @param {Step} step @param {boolean} differs */
function stepElement({ token, name: own, probability, likeliest }, differs) {
  const others = likeliest.filter(([name]) => name !== own).slice(0, 3);
  return h(
    "li",
    { class: differs ? "differs" : null },
    h("bdi", { class: "name" }, token ? makeVisible(token) : "next token", differs ? h("span", { class: "visually-hidden" }, ", changed") : null),
    probability === null ? h("span", { class: "weight" }) : h("span", { class: "weight" }, formatShort(probability)),
    h("span", { class: "secondary" }, others.map(([name, share], i) => [i ? ", " : null, h("bdi", {}, makeVisible(name)), ` ${formatShort(share)}`])),
  );
}
