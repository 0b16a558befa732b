/** What stands around the views: the header, tabs, the theme, help with the keys, the voice. */

import { change, h, s, uniqueId } from "./dom.js";

/**
 * What a view is given.
 * @typedef {{host: import("./host.js").Host, attentions: import("../weights/maps.js").Attentions,
 *   members: import("../comparison/comparison.js").Members, state: import("./state.js").State, work: import("./scheduler.js").Work, voice: Voice}} Context
 * What a view is: `element` is all of it, `sheet` the figure that is saved alone; `update` is told what has changed in the
 * state (null: everything, the view has just been opened), `lay` that the window has another size. `numbers`, where there
 * are any, is a table of tab-separated values.
 * @typedef {{element: HTMLElement, sheet: HTMLElement, fileName: string, numbers?: string,
 *   update: (changed: Set<string> | null) => Promise<void> | void, lay: () => void}} Shows
 */

/** A drawing of 24 by 24. @param {...string} paths */
export function icon(...paths) {
  return s(
    "svg",
    { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" },
    paths.map((d) => s("path", { d })),
  );
}

/**
 * Tabs, one of which is open: arrow keys go from one to the next.
 * @param {string} name @param {Record<string, string>} options @param {string} controls the panel's id @param {(value: string) => void} chosen
 */
export function tabList(name, options, controls, chosen) {
  const values = Object.keys(options);
  const tabs = values.map((value) =>
    h(
      "button",
      {
        type: "button",
        role: "tab",
        id: uniqueId("tab"),
        "aria-controls": controls,
        "data-value": value,
        onclick: () => chosen(value),
      },
      options[value],
    ),
  );
  const element = h(
    "div",
    {
      role: "tablist",
      class: "tabs",
      "aria-label": name,
      onkeydown: (event) => {
        const now = tabs.indexOf(/** @type {any} */ (event.target));
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
        const next = tabs.at(moves[event.key] % tabs.length);
        next.focus();
        chosen(next.dataset.value);
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
        change(tab, { "aria-selected": String(on), tabindex: on ? 0 : -1 });
      }
      return tabs[values.indexOf(value)].id;
    },
  };
}

/** A switch that is on or off. @param {string} name @param {(on: boolean) => void} chosen */
export function toggle(name, chosen) {
  const button = h(
    "button",
    {
      type: "button",
      class: "toggle",
      "aria-pressed": "false",
      onclick: () => chosen(button.getAttribute("aria-pressed") !== "true"),
    },
    h("span", { class: "knob", "aria-hidden": "true" }),
    name,
  );
  return button;
}

/** A button that opens a few others. @param {string} name @param {any} sign @param {[string, () => void][]} actions */
export function menu(name, sign, actions) {
  const details = h(
    "details",
    {
      class: "menu",
      onkeydown: (event) => {
        if (event.key !== "Escape" || !details.open) return;
        event.stopPropagation();
        details.open = false;
        details.querySelector("summary").focus();
      },
      onfocusout: (event) => {
        if (!details.contains(event.relatedTarget)) details.open = false;
      },
    },
    h("summary", {}, sign, name),
    h(
      "div",
      { class: "sheet" },
      actions.map(([text, action]) =>
        h(
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
      ),
    ),
  );
  return details;
}

const KEYS = [
  ["Tab", "from one part of the page to the next"],
  ["↑ ↓", "another token that looks"],
  ["← →", "another token that is looked at"],
  ["Shift ↑ ↓ ← →", "ten at a time"],
  ["Home End", "the first, the last token of the row"],
  ["G", "the greatest weight of the row"],
  ["Enter", "pin the cell, or let it go"],
  ["Esc", "let the pin go; then leave the zoom"],
  ["+ − 0", "zoom in, out, all"],
  ["[ ]", "the head before, the next head"],
  ["{ }", "the layer before, the next layer"],
  ["L M T N", "lines, map, text, table of numbers"],
  ["W", "join words from their pieces"],
  ["C", "compare with another head"],
  ["D", "what one of two has more than the other"],
  [", .", "the look before, the next look, where several are compared"],
  ["?", "this list"],
];

/** The list of keys. */
export function helpDialog() {
  const id = uniqueId("help");
  return h(
    "dialog",
    { class: "help", "aria-labelledby": id },
    h("h2", { id }, "Keys"),
    h(
      "dl",
      {},
      KEYS.map(([keys, says]) =>
        h(
          "div",
          {},
          h(
            "dt",
            {},
            keys.split(" ").map((key) => h("kbd", {}, key)),
          ),
          h("dd", {}, says),
        ),
      ),
    ),
    h(
      "p",
      {},
      "Keys with a letter work while a figure has the focus. On a map, drag over an area to zoom into it; a double click " +
        "or a pinch zooms too, and Shift with a click on a small map compares. In the tree of a search, arrows go along it, " +
        "Home and End to the first and last token, B to the best output, N to the table. On a picture, arrows go from patch " +
        "to patch, Enter lets one ask for good, F lets the pointer choose; P A R M show the picture, attention, rollout, labels.",
    ),
    h(
      "button",
      { type: "button", class: "small", onclick: (event) => event.target.closest("dialog").close() },
      "Close",
    ),
  );
}

/** A voice for screen readers: what it is told is read. */
export class Voice {
  constructor() {
    this.element = h("div", { class: "unseen live", role: "status", "aria-live": "polite", "aria-atomic": "true" });
    this.later = 0;
  }

  /** @param {string} text @param {number} [wait] milliseconds; what comes sooner takes its place */
  say(text, wait = 0) {
    clearTimeout(this.later);
    const speak = () => (this.element.textContent = text);
    if (wait) this.later = window.setTimeout(speak, wait);
    else speak();
  }
}

/** The title: what was read, and what was written. @param {any} scene */
export function title(scene) {
  const { source } = scene.texts;
  const target = scene.texts.target || scene.picture?.answer;
  const sides = scene.sides;
  const long = Math.max(source.length, target?.length ?? 0) > 150;
  /** @param {string} text @param {string} kind @param {string | undefined} direction */
  const line = (text, kind, direction) =>
    text
      ? h(
          "span",
          { class: `line ${kind}`, dir: direction ?? "auto", title: long ? text.slice(0, 2000) : null },
          text.slice(0, 600),
        )
      : null;
  const mixed = target && sides.source?.direction !== sides.target?.direction;
  return h(
    "div",
    {
      class: [
        "texts",
        long && "long",
        Math.max(source.length, target?.length ?? 0) > 400 && "endless",
        mixed && "mixed",
      ]
        .filter(Boolean)
        .join(" "),
    },
    h(
      "h1",
      {},
      line(source, "source", sides.source?.direction) ?? scene.title,
      line(target, "target", sides.target?.direction),
    ),
  );
}

/**
 * The bar at the top.
 * @param {any} scene @param {any} tabs of the views, where there are several @param {any[]} tools
 */
export function topBar(scene, tabs, tools) {
  const model = [scene.model?.name, scene.model?.family].filter(Boolean);
  return h(
    "header",
    { class: "top" },
    h(
      "div",
      { class: "brand" },
      s(
        "svg",
        { class: "eye", viewBox: "0 0 32 20", "aria-hidden": "true" },
        s("path", { d: "M1 10C6 3 11 1 16 1s10 2 15 9c-5 7-10 9-15 9S6 17 1 10Z" }),
        s("circle", { cx: 16, cy: 10, r: 4.5 }),
      ),
      h("span", { class: "name" }, "Regard"),
    ),
    h("p", { class: "model" }, [...new Set(model)].join(" · ")),
    tabs,
    h("div", { class: "tools", "data-saved": "no" }, tools),
  );
}

/** Whether the page is dark. @param {string} theme */
export function isDark(theme) {
  return theme === "dark" || (theme !== "light" && window.matchMedia("(prefers-color-scheme: dark)").matches);
}
