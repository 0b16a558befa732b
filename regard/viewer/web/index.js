/** The way in: anywidget's contract, and the call that a saved page makes. */

import { hostOf, pageModel } from "./host.js";
import { Attentions } from "./maps.js";
import { State, readHash, writeHash } from "./state.js";
import { Work } from "./work.js";
import { h } from "./dom.js";
import { STYLE } from "./style.js";
import { ASK_STYLE, askForm, welcome } from "./ask.js";
import { Heads, firstShown } from "./heads.js";
import { Voice, helpDialog, icon, isDark, menu, title, topBar } from "./shell.js";
import { download, drawn, png, svgText } from "./export.js";

/** @typedef {import("./host.js").Host} Host */
/** @typedef {import("./state.js").View} View */

/**
 * Shows a scene in an element. Gives a function that ends it.
 * @param {{model: import("./host.js").Model, el: HTMLElement}} given
 */
async function render({ model, el }) {
  el.append(h("style", {}, STYLE + ASK_STYLE));
  let now = null;
  /** Shows a scene in the place of the one before. @param {() => Host} hosted @param {Record<string, string>} [texts] that were asked for */
  const show = async (hosted, texts) => {
    const earlier = texts && (now?.view ?? {});
    now?.end();
    now = null;
    const root = h("div", { class: "regard", "data-busy": true });
    el.append(root);
    try {
      const host = hosted();
      const form = host.ask ? askForm(host, texts, (next, written) => show(() => next, written)) : null;
      now = host.scene.attentions.length ? await open(host, root, form, earlier) : welcome(host, root, form);
      if (texts) form.elements.source.focus({ preventScroll: true });
    } catch (error) {
      root.append(h("p", { class: "failed", role: "alert" }, String(error?.message ?? error)));
      throw error;
    }
  };
  await show(() => hostOf(model));
  return () => now?.end();
}

/**
 * @param {Host} host @param {HTMLElement} root @param {HTMLElement | null} form to ask for another scene
 * @param {Partial<View>} [earlier] how the scene before this one was looked at
 */
async function open(host, root, form, earlier) {
  const { scene } = host;
  const attentions = new Attentions(host);
  const asked = earlier ?? (host.addressed ? readHash(location.hash) : {});
  /** What the address asks for, as far as this scene has it. @param {Partial<import("./state.js").View>} view */
  const sensible = (view) => ({ ...view, ...(view.other && !attentions.has(view.other) ? { other: null } : {}) });
  const first = attentions.has(asked.shown) ? asked.shown : await firstShown(attentions);
  const begin = { shown: first, other: null, form: "map", words: false, pin: null, zoom: null, scale: null, colours: "blue", theme: "auto" };
  const state = new State(/** @type {any} */ ({ ...begin, ...sensible(asked), shown: first }));
  const work = new Work((busy) => root.toggleAttribute("data-busy", busy));
  const voice = new Voice();
  const heads = new Heads(attentions, state, work, voice, title(host.scene));
  const help = helpDialog();
  root.append(topBar(host.scene, tools(state, heads, help, voice)), form ?? "", heads.element, help, voice.element);

  const paint = () => {
    const { theme } = state.view;
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  };
  paint();
  state.listen((view, changed) => {
    if (changed.has("theme")) paint();
    if (host.addressed) remember(writeHash(view));
  });
  const stop = new AbortController();
  const { signal } = stop;
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => heads.update(new Set(["theme"])), { signal });
  window.addEventListener("resize", () => heads.shownPanels.forEach((panel) => panel.figure?.lay()), { signal });
  root.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.key === "?" && !target.closest("select, dialog, textarea")) help.showModal();
  });
  if (host.addressed) {
    window.addEventListener(
      "hashchange",
      () => {
        const view = sensible(readHash(location.hash));
        state.set(attentions.has(view.shown) ? view : { ...view, shown: state.view.shown });
      },
      { signal },
    );
  }
  await heads.update();
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
    // A frame without an address of its own: the view lives on, without a link.
  }
}

/** The buttons at the top. @param {State} state @param {Heads} heads @param {HTMLDialogElement} help @param {Voice} voice */
function tools(state, heads, help, voice) {
  /** @param {HTMLElement} part @param {string} form */
  const save = async (part, form) => {
    try {
      const picture = drawn(part);
      const blob = form === "png" ? await png(picture) : new Blob([svgText(picture)], { type: "image/svg+xml" });
      download(blob, `${heads.fileName}.${form}`);
      voice.say(`Saved as ${form.toUpperCase()}.`);
    } catch (error) {
      voice.say(`It could not be saved: ${error.message}`);
      throw error;
    }
  };
  const share = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      voice.say("The link was copied.");
    } catch {
      voice.say("The link could not be copied: it is the page's address.");
    }
  };
  return [
    h(
      "button",
      {
        type: "button",
        class: "round",
        "aria-label": "Light or dark",
        title: "Light or dark",
        onclick: () => state.set({ theme: isDark(state.view.theme) ? "light" : "dark" }),
      },
      icon("M12 3a9 9 0 1 0 9 9 7 7 0 0 1-9-9Z"),
    ),
    h("button", { type: "button", class: "round", "aria-label": "Keys", title: "Keys", onclick: () => help.showModal() }, icon("M9 9a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4M12 17.5v.5")),
    menu("Save", icon("M12 4v11M7 11l5 5 5-5M5 20h14"), [
      ["Figure as PNG", () => save(heads.sheet, "png")],
      ["Figure as SVG", () => save(heads.sheet, "svg")],
      ["Whole view as PNG", () => save(heads.element, "png")],
      ["Whole view as SVG", () => save(heads.element, "svg")],
      ["Numbers as TSV", () => download(new Blob([heads.numbers], { type: "text/tab-separated-values" }), `${heads.fileName}.tsv`)],
      ["Copy link to this view", share],
    ]),
  ];
}

/** What a saved page calls: shows the scene that stands in the document. */
export function openPage() {
  const el = document.getElementById("regard");
  return pageModel().then(
    (model) => render({ model, el }),
    (error) => el.append(h("p", { role: "alert" }, error.message)),
  );
}

export default { render };
