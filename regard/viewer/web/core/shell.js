/** Page layout around the views: header, tabs, theme, keyboard help, announcements to screen readers. */

import { html, setAttributes, svgElement, uniqueId } from "./dom.js";

/**
 * The arguments of a view.
 * @typedef {{host: import("./host.js").Host, attentions: import("../weights/maps.js").Attentions,
 *   looks: import("../attention/comparison.js").ComparedLooks, state: import("./state.js").State, scheduler:
 * import("./scheduler.js").Scheduler, announcer: Announcer, opening: import("./state.js").HeadRef | null}} Context
 * `opening`: the head that the page opened with, unless its address chose one
 * A view: `element` is all of it, `figureElement` the figure that can be saved on its own; `update` receives the state
 * keys that
 * changed (null: all, the view has just been opened); `layout` is called when the window is resized. `tsv`, if defined,
 * is a table of tab-separated values.
 * @typedef {{element: HTMLElement, figureElement: HTMLElement, fileName: string, tsv?: string,
 *   update: (changed: Set<string> | null) => Promise<void> | void, layout: () => void}} ViewComponent
 */

/** An icon of 24 by 24 units. @param {...string} paths */
export function icon(...paths) {
  return svgElement(
    "svg",
    { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" },
    paths.map((d) => svgElement("path", { d })),
  );
}

/**
 * A tab list; arrow keys move between tabs.
 * @param {string} name @param {Record<string, string>} options @param {string} controls the panel's id
 * @param {(value: string) => void} onSelect
 */
export function tabList(name, options, controls, onSelect) {
  const values = Object.keys(options);
  const tabs = values.map((value) =>
    html(
      "button",
      {
        type: "button",
        role: "tab",
        id: uniqueId("tab"),
        "aria-controls": controls,
        "data-value": value,
        onclick: () => onSelect(value),
      },
      options[value],
    ),
  );
  const element = html(
    "div",
    {
      role: "tablist",
      class: "tabs",
      "aria-label": name,
      onkeydown: (event) => {
        const visible = tabs.filter((tab) => !tab.hidden);
        const now = visible.indexOf(/** @type {any} */ (event.target));
        const moves = {
          ArrowRight: now + 1,
          ArrowDown: now + 1,
          ArrowLeft: now - 1,
          ArrowUp: now - 1,
          Home: 0,
          End: -1,
        };
        if (!(event.key in moves)) return;
        event.preventDefault();
        event.stopPropagation();
        const next = visible.at(moves[event.key] % visible.length);
        next.focus();
        onSelect(next.dataset.value);
      },
    },
    tabs,
  );
  return {
    element,
    /** @param {string} value */
    mark(value) {
      for (const tab of tabs) {
        const on = tab.dataset.value === value;
        setAttributes(tab, { "aria-selected": String(on), tabindex: on ? 0 : -1 });
      }
      return tabs[values.indexOf(value)].id;
    },
  };
}

/** An on/off button. @param {string} name @param {(on: boolean) => void} onSelect */
export function toggle(name, onSelect) {
  const button = html(
    "button",
    {
      type: "button",
      class: "toggle",
      "aria-pressed": "false",
      onclick: () => onSelect(button.getAttribute("aria-pressed") !== "true"),
    },
    html("span", { class: "knob", "aria-hidden": "true" }),
    name,
  );
  return button;
}

/**
 * A button that opens a panel; Escape, or leaving it, closes the panel. @param {any} name @param {any} iconElement
 * @param {string} kind class of the panel @param {...any} children
 */
export function dropDown(name, iconElement, kind, ...children) {
  const details = html(
    "details",
    {
      class: "menu",
      "data-export": "no",
      onkeydown: (event) => {
        if (event.key !== "Escape" || !details.open) return;
        event.stopPropagation();
        details.open = false;
        details.querySelector("summary").focus();
      },
      onfocusout: (event) => {
        if (event.relatedTarget && !details.contains(event.relatedTarget)) details.open = false;
      },
    },
    html("summary", {}, iconElement, name),
    html("div", { class: kind }, children),
  );
  const closeOutside = (/** @type {Event} */ event) => {
    if (!details.isConnected) document.removeEventListener("pointerdown", closeOutside);
    else if (!details.contains(/** @type {Node} */ (event.target))) details.open = false;
  };
  details.addEventListener("toggle", () => details.open && document.addEventListener("pointerdown", closeOutside));
  return details;
}

/** A drop-down menu. @param {string} name @param {any} iconElement @param {[string, () => void][]} actions */
export function menu(name, iconElement, actions) {
  const buttons = actions.map(([text, action]) =>
    html(
      "button",
      {
        type: "button",
        onclick: () => {
          details.open = false;
          action();
        },
      },
      text,
    ),
  );
  const details = dropDown(name, iconElement, "menu-items", buttons);
  return details;
}

const KEYS = [
  ["Tab", "next part of the page"],
  ["↑ ↓", "previous or next query token"],
  ["← →", "previous or next key token"],
  ["Shift ↑ ↓ ← →", "ten tokens at a time"],
  ["Home End", "first or last token of the row"],
  ["G", "largest weight of the row"],
  ["Enter", "pin or unpin the cell"],
  ["Esc", "unpin; then reset the zoom"],
  ["+ − 0", "zoom in, zoom out, show all"],
  ["[ ]", "previous or next head"],
  ["{ }", "previous or next layer"],
  ["L M T N", "lines, map, text, table"],
  ["W", "merge word pieces"],
  ["C", "compare with another head"],
  ["D", "difference of two heads"],
  [", .", "previous or next item, where several are compared"],
  ["?", "this list"],
];

/** The list of keyboard shortcuts. */
export function helpDialog() {
  const id = uniqueId("help");
  return html(
    "dialog",
    { class: "help", "aria-labelledby": id },
    html("h2", { id }, "Keyboard shortcuts"),
    html(
      "dl",
      {},
      KEYS.map(([keys, description]) =>
        html(
          "div",
          {},
          html(
            "dt",
            {},
            keys.split(" ").map((key) => html("kbd", {}, key)),
          ),
          html("dd", {}, description),
        ),
      ),
    ),
    html(
      "p",
      {},
      "Letter keys work while a figure has the focus. On a map, drag over an area to zoom into it; double-click or pinch also " +
        "zooms. Shift-click on a thumbnail of a head, or Space, adds the head to the lines in its own color; Ctrl with arrow keys moves " +
        "between thumbnails without selecting them. In a search tree, arrow keys follow the edges, Home and End go to the " +
        "first and last token, B to the best hypothesis, N to the table. On an image, arrow keys move between patches, Enter pins " +
        "the query patch, F follows the pointer; P, A, R and M show the pixels, attention, rollout and segmentation mask.",
    ),
    html(
      "button",
      { type: "button", class: "small", onclick: (event) => event.target.closest("dialog").close() },
      "Close",
    ),
  );
}

/** Announces messages to screen readers. */
export class Announcer {
  constructor() {
    this.element = html("div", {
      class: "visually-hidden live",
      role: "status",
      "aria-live": "polite",
      "aria-atomic": "true",
    });
    this.timer = 0;
  }

  /** @param {string} text @param {number} [wait] delay in milliseconds; a later message replaces a waiting one */
  announce(text, wait = 0) {
    clearTimeout(this.timer);
    const show = () => (this.element.textContent = text);
    if (wait) this.timer = window.setTimeout(show, wait);
    else show();
  }
}

/**
 * The top bar.
 * @param {any} scene @param {any} tabs of the views, if there are several @param {any[]} tools
 */
export function topBar(scene, tabs, tools) {
  const model = [scene.model?.name, scene.model?.family].filter(Boolean);
  return html(
    "header",
    { class: "top" },
    html(
      "div",
      { class: "brand" },
      svgElement(
        "svg",
        { class: "eye", viewBox: "0 0 32 20", "aria-hidden": "true" },
        svgElement("path", { d: "M1 10C6 3 11 1 16 1s10 2 15 9c-5 7-10 9-15 9S6 17 1 10Z" }),
        svgElement("circle", { cx: 16, cy: 10, r: 4.5 }),
      ),
      html("span", { class: "name" }, "Regard"),
    ),
    html("p", { class: "model" }, [...new Set(model)].join(" · ")),
    tabs,
    html("div", { class: "tools", "data-export": "no" }, tools),
  );
}

/** Whether the page is in dark mode. @param {string} theme */
export function isDark(theme) {
  return theme === "dark" || (theme !== "light" && window.matchMedia("(prefers-color-scheme: dark)").matches);
}
