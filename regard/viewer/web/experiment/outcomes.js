/** Outputs of the model before and after an intervention. */

import { h } from "../core/dom.js";
import { formatShort } from "../core/tokens.js";

/** @typedef {{token: string, probability: number | null, likeliest: [string, number][]}} Step */
/** @typedef {{text: string, logprob: number | null, steps: Step[], map: {rows: string[], columns: string[], weights: number[][]} | null}} Outcome */

/**
 * The output of the model before or after an intervention. Tokens that changed are highlighted.
 * @param {Outcome} outcome @param {Outcome | null} before null for the output before
 */
export function outcomeElements(outcome, before) {
  const name = before ? "after" : "before";
  return [
    h("h2", {}, before ? "After" : "Before"),
    h("p", { class: "output-text", dir: "auto" }, outcome.text || (outcome.steps.length ? "" : "no output")),
    outcome.logprob === null ? null : h("p", { class: "score" }, `log-probability ${outcome.logprob.toFixed(3)}`),
    h(
      "ol",
      { class: "steps", tabindex: 0, "aria-label": `Tokens and probabilities, ${name}` },
      outcome.steps.map((step, n) => stepElement(step, before !== null && before.steps[n]?.token !== step.token)),
    ),
  ];
}

/** A predicted token. @param {Step} step @param {boolean} differs */
function stepElement({ token, probability, likeliest }, differs) {
  const others = likeliest.filter(([name]) => name !== token).slice(0, 3);
  return h(
    "li",
    { class: differs ? "differs" : null },
    h("bdi", { class: "name" }, token || "next token", differs ? h("span", { class: "visually-hidden" }, ", changed") : null),
    probability === null ? h("span", { class: "weight" }) : h("span", { class: "weight" }, formatShort(probability)),
    h("span", { class: "secondary" }, others.map(([name, share]) => [h("bdi", {}, name), ` ${formatShort(share)}  `])),
  );
}
