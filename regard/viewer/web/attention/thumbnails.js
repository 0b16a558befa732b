/** Thumbnails in rows and columns, shared by the overviews of texts and images. */

import { h } from "../core/dom.js";

/** @typedef {import("../core/state.js").Shown} Shown */

/** @param {Shown} shown */
export const keyOf = (shown) => `${shown.attention}:${shown.head}`;

/**
 * Creates a thumbnail that is not painted yet.
 * @param {Shown} shown @param {string} name full label @param {(event: MouseEvent) => void} onclick
 */
export function thumbOf(shown, name, onclick) {
  const canvas = h("canvas", { width: 1, height: 1 });
  const element = h(
    "div",
    {
      role: "gridcell",
      class: shown.head === "mean" ? "thumb mean" : "thumb",
      tabindex: -1,
      "aria-label": name,
      "aria-selected": "false",
      title: name,
      "data-shown": keyOf(shown),
      onclick,
    },
    canvas,
    h("span", { class: "frame" }),
  );
  return { shown, element, canvas };
}

/**
 * Moves the focus from a thumbnail by a key; returns the new one, or null if the key has no function or there is none.
 * @param {HTMLElement} overview @param {KeyboardEvent} event @returns {HTMLElement | null}
 */
export function thumbByKey(overview, event) {
  const lines = [...overview.querySelectorAll(".line:not(.heads)")].map((line) => [...line.querySelectorAll(".thumb")]);
  const target = /** @type {HTMLElement} */ (event.target);
  const row = lines.findIndex((line) => line.includes(target));
  const column = lines[row].indexOf(target);
  const moves = {
    ArrowLeft: [row, column - 1],
    ArrowRight: [row, column + 1],
    ArrowUp: [row - 1, column],
    ArrowDown: [row + 1, column],
    Home: [row, 0],
    End: [row, lines[row].length - 1],
    Enter: [row, column],
    " ": [row, column],
  };
  const move = moves[event.key];
  if (!move) return null;
  event.preventDefault();
  const line = lines[move[0]];
  const next = /** @type {HTMLElement | undefined} */ (line?.[Math.min(move[1], line.length - 1)]);
  next?.focus();
  return next ?? null;
}
