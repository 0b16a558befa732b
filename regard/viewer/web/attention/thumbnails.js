/** Thumbnails in rows and columns, shared by the overviews of texts and images. */

import { h } from "../core/dom.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */

/** @param {HeadRef} ref */
export const headKey = (ref) => `${ref.attention}:${ref.head}`;

/**
 * Creates a thumbnail that is not painted yet.
 * @param {HeadRef} ref @param {string} name full label @param {(event: MouseEvent) => void} onclick
 */
export function createThumbnail(ref, name, onclick) {
  const canvas = h("canvas", { width: 1, height: 1 });
  const element = h(
    "div",
    {
      role: "gridcell",
      class: ref.head === "mean" ? "thumb mean" : "thumb",
      tabindex: -1,
      "aria-label": name,
      "aria-selected": "false",
      title: name,
      "data-head": headKey(ref),
      onclick: (/** @type {MouseEvent} */ event) => {
        onclick(event);
        element.focus({ preventScroll: true });
      },
    },
    canvas,
    h("span", { class: "frame" }),
  );
  return { ref, element, canvas };
}

/**
 * Moves the focus from a thumbnail by a key; returns the new one, or null if the key has no function or there is none.
 * @param {HTMLElement} overview @param {KeyboardEvent} event @returns {HTMLElement | null}
 */
export function thumbnailByKey(overview, event) {
  const lines = [...overview.querySelectorAll(".line:not(.head-row)")].map((line) => [...line.querySelectorAll(".thumb")]);
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
