/** Entry point: anywidget's `render`, and `openPage`, which a saved page calls. */

import { createHost, pageModel } from "./core/host.js";
import { DEFAULT_VIEW, State, readHash, writeHash } from "./core/state.js";
import { Scheduler } from "./core/scheduler.js";
import { h, setAttributes, uniqueId } from "./core/dom.js";
import PAGE_STYLE from "./core/page.css";
import REQUEST_FORM_STYLE from "./core/request_form.css";
import { requestForm, welcome } from "./core/request_form.js";
import { imageForm } from "./images/image_form.js";
import COMPARISON_STYLE from "./comparison/comparison.css";
import { LookSet } from "./comparison/comparison.js";
import { AttentionView } from "./attention/attention_view.js";
import { initialSelection } from "./attention/panel.js";
import { SearchView } from "./search/search_view.js";
import { ImageView, initialImageView } from "./images/image_view.js";
import { ExperimentView } from "./experiment/experiment_view.js";
import { StepsView } from "./steps/steps_view.js";
import { Announcer, helpDialog, icon, isDark, menu, tabList, title, topBar } from "./core/shell.js";
import { download, png, renderSvg, serializeSvg } from "./core/export.js";

/** @typedef {import("./core/host.js").Host} Host */
/** @typedef {import("./core/state.js").View} View */
/** @typedef {import("./core/state.js").HeadRef} HeadRef */
/** @typedef {import("./core/shell.js").ViewComponent} ViewComponent */
/** @typedef {import("./core/shell.js").Context} Context */

/**
 * Renders a scene into an element. Returns a function that removes it.
 * @param {{model: import("./core/host.js").Model, el: HTMLElement}} widget
 */
async function render({ model, el }) {
  el.append(h("style", {}, PAGE_STYLE + REQUEST_FORM_STYLE + COMPARISON_STYLE));
  let now = null;
  /** Replaces the rendered scene. @param {() => Host} makeHost @param {Record<string, string>} [texts] of the request, if it is a response */
  const show = async (makeHost, texts) => {
    const previousView = texts && (now?.view ?? {});
    now?.end();
    now = null;
    const root = h("div", { class: "regard", "data-busy": true });
    el.append(root);
    try {
      const host = makeHost();
      const showResponse = (/** @type {Host} */ next, /** @type {Record<string, string>} */ values) => show(() => next, values);
      const form = !host.request ? null : host.scene.picture ? imageForm(host, showResponse) : requestForm(host, texts, showResponse);
      now = host.scene.attentions.length || host.scene.walk ? await open(host, root, form, previousView) : welcome(host, root, form);
      if (texts) /** @type {any} */ (form.elements.namedItem(host.fields[0])).focus({ preventScroll: true });
    } catch (error) {
      root.append(h("p", { class: "failed", role: "alert" }, String(error?.message ?? error)));
      throw error;
    }
  };
  await show(() => createHost(model));
  return () => now?.end();
}

/**
 * The views in the order of their tabs. A view is left out if `fits` is false for the scene.
 * @type {Record<string, {name: string, fits: (scene: any) => boolean, make: (context: Context) => ViewComponent}>}
 */
const VIEWS = {
  images: { name: "Images", fits: (scene) => Boolean(scene.picture), make: (context) => new ImageView(context) },
  attention: { name: "Attention", fits: (scene) => scene.attentions.length > 0, make: (context) => new AttentionView(context) },
  steps: { name: "Step by step", fits: (scene) => Boolean(scene.walk), make: (context) => new StepsView(context) },
  search: { name: "Search", fits: (scene) => scene.decode?.nodes.length > 0, make: (context) => new SearchView(context) },
  experiment: {
    name: "Experiment",
    fits: (scene) => scene.attentions.length > 0 && !scene.compared,
    make: (context) => new ExperimentView(context),
  },
};

/**
 * @param {Host} host @param {HTMLElement} root @param {HTMLElement | null} form that requests another scene
 * @param {Partial<View>} [previousView] the view of the scene before this one
 */
async function open(host, root, form, previousView) {
  const { scene } = host;
  const looks = new LookSet(host);
  const names = Object.keys(VIEWS).filter((name) => VIEWS[name].fits(scene));
  /** Replaces what the scene does not have by defaults. @param {Partial<View>} view @param {HeadRef} selected the default head */
  const withDefaults = (view, selected) => ({
    ...view,
    view: names.includes(view.view) ? view.view : names[0],
    selected: looks.has(view.selected) ? view.selected : selected,
    other: looks.has(view.other) ? view.other : null,
  });
  const requested = previousView ?? (host.ownsAddress && location.hash.length > 1 ? readHash(location.hash) : initialImageView(scene));
  const noHead = { selected: { attention: null, head: 0 } };
  const opening = looks.has(requested.selected) ? { selected: requested.selected } : scene.attentions.length ? await initialSelection(looks) : noHead;
  const state = new State(/** @type {View} */ ({ ...DEFAULT_VIEW, ...withDefaults({ ...opening, ...requested }, opening.selected) }));
  const scheduler = new Scheduler((busy) => root.toggleAttribute("data-busy", busy));
  const announcer = new Announcer();
  const context = { host, looks, attentions: looks.all[0], state, scheduler, announcer };
  /** Views are created when their tab is first opened. @type {Record<string, ViewComponent>} */
  const views = {};
  const current = () => views[state.view.view];
  const page = h("div", { class: "page", id: uniqueId("page") }, title(scene));
  const tabs =
    names.length > 1
      ? tabList("View", Object.fromEntries(names.map((name) => [name, VIEWS[name].name])), page.id, (view) =>
          state.set({ view }),
        )
      : null;
  if (tabs) setAttributes(page, { role: "tabpanel" });
  const help = helpDialog();
  root.append(
    topBar(scene, tabs?.element ?? null, tools(state, page, current, help, announcer)),
    form ?? "",
    page,
    help,
    announcer.element,
  );

  /** @param {Set<string> | null} changed */
  const show = async (changed) => {
    const { theme, view } = state.view;
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    if (tabs) setAttributes(page, { "aria-labelledby": tabs.mark(view) });
    const isFirst = !views[view];
    if (isFirst) page.append((views[view] = VIEWS[view].make(context)).element);
    for (const [name, one] of Object.entries(views)) one.element.hidden = name !== view;
    await current().update(isFirst || changed?.has("view") ? null : changed);
  };
  state.listen((view, changed) => {
    show(changed);
    if (host.ownsAddress) replaceHash(writeHash(view));
  });
  const stop = new AbortController();
  const { signal } = stop;
  window
    .matchMedia("(prefers-color-scheme: dark)")
    .addEventListener("change", () => show(new Set(["theme"])), { signal });
  window.addEventListener("resize", () => current().layout(), { signal });
  root.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.key === "?" && !target.closest("select, dialog, input, textarea")) help.showModal();
  });
  if (host.ownsAddress) {
    window.addEventListener("hashchange", () => state.set(withDefaults(readHash(location.hash), state.view.selected)), {
      signal,
    });
  }
  await show(null);
  if (previousView) {
    announcer.announce(scene.title);
    if (host.ownsAddress) {
      document.title = scene.title;
      replaceHash(writeHash(state.view));
    }
  }
  return {
    get view() {
      return { ...state.view, pin: null, zoom: null };
    },
    end() {
      stop.abort();
      scheduler.close();
      root.remove();
    },
  };
}

/** @param {string} hash */
function replaceHash(hash) {
  try {
    history.replaceState(null, "", `#${hash}`);
  } catch {
    // A frame without an address: the view works, but has no link.
  }
}

/**
 * The buttons of the top bar.
 * @param {State} state @param {HTMLElement} page @param {() => ViewComponent} current @param {HTMLDialogElement} help @param {Announcer} announcer
 */
function tools(state, page, current, help, announcer) {
  /** @param {HTMLElement} part @param {string} format */
  const save = async (part, format) => {
    try {
      const svg = renderSvg(part);
      const blob = format === "png" ? await png(svg) : new Blob([serializeSvg(svg)], { type: "image/svg+xml" });
      download(blob, `${current().fileName}.${format}`);
      announcer.announce(`Saved as ${format.toUpperCase()}.`);
    } catch (error) {
      announcer.announce(`Saving failed: ${error.message}`);
      throw error;
    }
  };
  const saveNumbers = () => {
    const { fileName, tsv } = current();
    if (tsv) download(new Blob([tsv], { type: "text/tab-separated-values" }), `${fileName}.tsv`);
    announcer.announce(tsv ? "Saved as TSV." : "This view has no numbers to save.");
  };
  const share = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      announcer.announce("Link copied.");
    } catch {
      announcer.announce("The link could not be copied. Copy it from the address bar.");
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
      ["Figure as PNG", () => save(current().figureElement, "png")],
      ["Figure as SVG", () => save(current().figureElement, "svg")],
      ["Entire view as PNG", () => save(page, "png")],
      ["Entire view as SVG", () => save(page, "svg")],
      ["Numbers as TSV", () => saveNumbers()],
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
