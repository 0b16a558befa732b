/** Keyboard in a grid of buttons: one of them is in the tab order, arrow keys move between them. */

import { setAttributes } from "../core/dom.js";

/** Puts a button into the tab order, in place of the others. @param {Iterable<HTMLElement>} all @param {HTMLElement} button */
export function markFocusable(all, button) {
  for (const one of all) setAttributes(one, { tabindex: one === button ? 0 : -1 });
}

/** Moves the focus by an arrow key. @param {HTMLElement[][]} rows @param {HTMLElement} button @param {KeyboardEvent} event */
export function moveFocus(rows, button, event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const y = rows.findIndex((row) => row.includes(button));
  const x = rows[y].indexOf(button);
  const moves = { ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1], Home: [y, 0], End: [y, Infinity] };
  if (!(event.key in moves)) return;
  event.preventDefault();
  event.stopPropagation();
  const row = rows[Math.max(0, Math.min(rows.length - 1, moves[event.key][0]))];
  row[Math.max(0, Math.min(row.length - 1, moves[event.key][1]))].focus();
}
