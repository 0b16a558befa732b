/** Entry point: anywidget's `render`, and `openPage`, which a saved page calls. */

import { hostOf, pageModel } from "./core/host.js";
import { BEGINNING, State, readHash, writeHash } from "./core/state.js";
import { Work } from "./core/scheduler.js";
import { change, h, uniqueId } from "./core/dom.js";
import PAGE_STYLE from "./core/page.css";
import REQUEST_FORM_STYLE from "./core/request_form.css";
import { askForm, welcome } from "./core/request_form.js";
import { pictureForm } from "./images/image_form.js";
import COMPARISON_STYLE from "./comparison/comparison.css";
import { Members } from "./comparison/comparison.js";
import { Heads } from "./attention/attention_view.js";
import { openingOf } from "./attention/panel.js";
import { Decoding } from "./search/search_view.js";
import { Images, openingOfPicture } from "./images/image_view.js";
import { Trying } from "./experiment/experiment_view.js";
import { Walk } from "./steps/steps_view.js";
import { Voice, helpDialog, icon, isDark, menu, tabList, title, topBar } from "./core/shell.js";
import { download, drawn, png, svgText } from "./core/export.js";

/** @typedef {import("./core/host.js").Host} Host */
/** @typedef {import("./core/state.js").View} View */
/** @typedef {import("./core/state.js").Shown} Shown */
/** @typedef {import("./core/shell.js").Shows} Shows */
/** @typedef {import("./core/shell.js").Context} Context */

/**
 * Renders a scene into an element. Returns a function that removes it.
 * @param {{model: import("./core/host.js").Model, el: HTMLElement}} given
 */
async function render({ model, el }) {
  el.append(h("style", {}, PAGE_STYLE + REQUEST_FORM_STYLE + COMPARISON_STYLE));
  let now = null;
  /** Replaces the rendered scene. @param {() => Host} hosted @param {Record<string, string>} [texts] of the request, if it is a response */
  const show = async (hosted, texts) => {
    const earlier = texts && (now?.view ?? {});
    now?.end();
    now = null;
    const root = h("div", { class: "regard", "data-busy": true });
    el.append(root);
    try {
      const host = hosted();
      const again = (/** @type {Host} */ next, /** @type {Record<string, string>} */ written) => show(() => next, written);
      const form = !host.ask ? null : host.scene.picture ? pictureForm(host, again) : askForm(host, texts, again);
      now = host.scene.attentions.length || host.scene.walk ? await open(host, root, form, earlier) : welcome(host, root, form);
      if (texts) /** @type {any} */ (form.elements.namedItem(host.asks[0])).focus({ preventScroll: true });
    } catch (error) {
      root.append(h("p", { class: "failed", role: "alert" }, String(error?.message ?? error)));
      throw error;
    }
  };
  await show(() => hostOf(model));
  return () => now?.end();
}

/**
 * The views in the order of their tabs. A view is left out if `fits` is false for the scene.
 * @type {Record<string, {name: string, fits: (scene: any) => boolean, make: (context: Context) => Shows}>}
 */
const VIEWS = {
  images: { name: "Images", fits: (scene) => Boolean(scene.picture), make: (context) => new Images(context) },
  attention: { name: "Attention", fits: (scene) => scene.attentions.length > 0, make: (context) => new Heads(context) },
  steps: { name: "Step by step", fits: (scene) => Boolean(scene.walk), make: (context) => new Walk(context) },
  search: { name: "Search", fits: (scene) => scene.decode?.nodes.length > 0, make: (context) => new Decoding(context) },
  experiment: {
    name: "Experiment",
    fits: (scene) => scene.attentions.length > 0 && !scene.compared,
    make: (context) => new Trying(context),
  },
};

/**
 * @param {Host} host @param {HTMLElement} root @param {HTMLElement | null} form that requests another scene
 * @param {Partial<View>} [earlier] the view of the scene before this one
 */
async function open(host, root, form, earlier) {
  const { scene } = host;
  const members = new Members(host);
  const names = Object.keys(VIEWS).filter((name) => VIEWS[name].fits(scene));
  /** Replaces what the scene does not have by defaults. @param {Partial<View>} view @param {Shown} shown the default head */
  const sensible = (view, shown) => ({
    ...view,
    view: names.includes(view.view) ? view.view : names[0],
    shown: members.has(view.shown) ? view.shown : shown,
    other: members.has(view.other) ? view.other : null,
  });
  const asked = earlier ?? (host.addressed && location.hash.length > 1 ? readHash(location.hash) : openingOfPicture(scene));
  const nothing = { shown: { attention: null, head: 0 } };
  const opening = members.has(asked.shown) ? { shown: asked.shown } : scene.attentions.length ? await openingOf(members) : nothing;
  const state = new State(/** @type {View} */ ({ ...BEGINNING, ...sensible({ ...opening, ...asked }, opening.shown) }));
  const work = new Work((busy) => root.toggleAttribute("data-busy", busy));
  const voice = new Voice();
  const context = { host, members, attentions: members.all[0], state, work, voice };
  /** Views are created when their tab is first opened. @type {Record<string, Shows>} */
  const made = {};
  const current = () => made[state.view.view];
  const page = h("div", { class: "page", id: uniqueId("page") }, title(scene));
  const tabs =
    names.length > 1
      ? tabList("View", Object.fromEntries(names.map((name) => [name, VIEWS[name].name])), page.id, (view) =>
          state.set({ view }),
        )
      : null;
  if (tabs) change(page, { role: "tabpanel" });
  const help = helpDialog();
  root.append(
    topBar(scene, tabs?.element ?? null, tools(state, page, current, help, voice)),
    form ?? "",
    page,
    help,
    voice.element,
  );

  /** @param {Set<string> | null} changed */
  const show = async (changed) => {
    const { theme, view } = state.view;
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    if (tabs) change(page, { "aria-labelledby": tabs.mark(view) });
    const isNew = !made[view];
    if (isNew) page.append((made[view] = VIEWS[view].make(context)).element);
    for (const [name, one] of Object.entries(made)) one.element.hidden = name !== view;
    await current().update(isNew || changed?.has("view") ? null : changed);
  };
  state.listen((view, changed) => {
    show(changed);
    if (host.addressed) remember(writeHash(view));
  });
  const stop = new AbortController();
  const { signal } = stop;
  window
    .matchMedia("(prefers-color-scheme: dark)")
    .addEventListener("change", () => show(new Set(["theme"])), { signal });
  window.addEventListener("resize", () => current().lay(), { signal });
  root.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.key === "?" && !target.closest("select, dialog, input, textarea")) help.showModal();
  });
  if (host.addressed) {
    window.addEventListener("hashchange", () => state.set(sensible(readHash(location.hash), state.view.shown)), {
      signal,
    });
  }
  await show(null);
  if (earlier) {
    voice.say(scene.title);
    if (host.addressed) {
      document.title = scene.title;
      remember(writeHash(state.view));
    }
  }
  return {
    get view() {
      return { ...state.view, pin: null, zoom: null };
    },
    end() {
      stop.abort();
      work.close();
      root.remove();
    },
  };
}

/** @param {string} hash */
function remember(hash) {
  try {
    history.replaceState(null, "", `#${hash}`);
  } catch {
    // A frame without an address: the view works, but has no link.
  }
}

/**
 * The buttons of the top bar.
 * @param {State} state @param {HTMLElement} page @param {() => Shows} current @param {HTMLDialogElement} help @param {Voice} voice
 */
function tools(state, page, current, help, voice) {
  /** @param {HTMLElement} part @param {string} form */
  const save = async (part, form) => {
    try {
      const picture = drawn(part);
      const blob = form === "png" ? await png(picture) : new Blob([svgText(picture)], { type: "image/svg+xml" });
      download(blob, `${current().fileName}.${form}`);
      voice.say(`Saved as ${form.toUpperCase()}.`);
    } catch (error) {
      voice.say(`Saving failed: ${error.message}`);
      throw error;
    }
  };
  const numbers = () => {
    const { fileName, numbers: text } = current();
    if (text) download(new Blob([text], { type: "text/tab-separated-values" }), `${fileName}.tsv`);
    voice.say(text ? "Saved as TSV." : "This view has no numbers to save.");
  };
  const share = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      voice.say("Link copied.");
    } catch {
      voice.say("The link could not be copied. Copy it from the address bar.");
    }
  };
  return [
    h(
      "button",
      {
        type: "button",
        class: "round",
        "aria-label": "Toggle dark mode",
        title: "Toggle dark mode",
        onclick: () => state.set({ theme: isDark(state.view.theme) ? "light" : "dark" }),
      },
      icon("M12 3a9 9 0 1 0 9 9 7 7 0 0 1-9-9Z"),
    ),
    h(
      "button",
      { type: "button", class: "round", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts", onclick: () => help.showModal() },
      icon("M9 9a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4M12 17.5v.5"),
    ),
    menu("Save", icon("M12 4v11M7 11l5 5 5-5M5 20h14"), [
      ["Figure as PNG", () => save(current().sheet, "png")],
      ["Figure as SVG", () => save(current().sheet, "svg")],
      ["Entire view as PNG", () => save(page, "png")],
      ["Entire view as SVG", () => save(page, "svg")],
      ["Numbers as TSV", () => numbers()],
      ["Copy link to this view", share],
    ]),
  ];
}

/** Called by a saved page: renders the scene that is stored in the document. */
export function openPage() {
  const el = document.getElementById("regard");
  return pageModel().then(
    (model) => render({ model, el }),
    (error) => el.append(h("p", { role: "alert" }, error.message)),
  );
}

export default { render };
