/** Entry point: anywidget's `render`, and `openPage`, which a saved page calls. */

import { AttentionView } from "./attention/view.js";
import { ComparedLooks } from "./attention/comparison.js";
import { initialSelection } from "./attention/panel.js";
import { html, setAttributes, uniqueId } from "./core/dom.js";
import { download, embedCode, embedDialog, png, renderSvg, serializeSvg, shareableAddress } from "./core/export.js";
import { createHost, pageModel } from "./core/host.js";
import { imageForm, requestForm, welcome } from "./core/request_form.js";
import { Scheduler } from "./core/scheduler.js";
import { Announcer, helpDialog, icon, isDark, menu, tabList, topBar } from "./core/shell.js";
import { DEFAULT_VIEW, readHash, State, storedDepth, writeHash } from "./core/state.js";
import { ImageView, initialImageView } from "./images/view.js";
import { ExperimentView } from "./views/experiment.js";
import { OutputSection, summarySentence } from "./views/output.js";
import { SearchView } from "./views/search.js";
import { MissingSteps, StepsView } from "./views/steps.js";
import { WhySection } from "./views/why.js";
import PAGE_STYLE from "./page.css";

/* The first view: attention of a text or an image, and below it what explains the output and the search for it. */

/** @typedef {import("./core/shell.js").ViewComponent} ViewComponent */

class AttentionTab {
  /** @param {import("./core/shell.js").Context} context */
  constructor(context) {
    const { scene } = context.host;
    this.context = context;
    /** @type {AttentionView | ImageView | null} */
    this.attention = scene.image ? new ImageView(context) : scene.attentions.length ? new AttentionView(context) : null;
    /** @type {SearchView | null} */
    this.search = null;
    this.details = scene.decode?.nodes.length
      ? html(
          "details",
          {
            class: "search-section",
            open: !this.attention,
            ontoggle: () => context.state.set({ search: this.details.open }),
          },
          html(
            "summary",
            {},
            html("h2", {}, "How the output was found"),
            html("span", { class: "secondary" }, "the search tree with all candidates"),
          ),
        )
      : null;
    this.why = WhySection.of(context);
    this.element = html(
      "div",
      { class: "main-view" },
      this.attention?.element ?? null,
      this.why?.element ?? null,
      this.details,
    );
  }

  /** @param {Set<string> | null} changed */
  async update(changed) {
    await this.attention?.update(changed);
    this.why?.update(changed);
    if (!this.details) return;
    if (this.context.state.view.search || !this.attention) this.details.open = true;
    if (!this.details.open) return;
    const isFirst = !this.search;
    if (isFirst) this.details.append(this.openSearch().element);
    await this.search.update(isFirst ? null : changed);
  }

  openSearch() {
    return (this.search ??= new SearchView(this.context));
  }

  layout() {
    this.attention?.layout();
  }

  /** Highlights what an output token attends to. @param {number | null} step */
  pointOutput(step) {
    if (this.attention instanceof AttentionView) this.attention.pointOutput(step);
    this.why?.point(step);
  }

  /** What the view adds to the output section: the image and its labels. */
  get outputElement() {
    return this.attention instanceof ImageView ? this.attention.outputElement : null;
  }

  get figureElement() {
    return this.attention?.figureElement ?? this.search.figureElement;
  }

  get fileName() {
    return this.attention?.fileName ?? this.search.fileName;
  }

  get tsv() {
    return this.attention ? this.attention.tsv : this.search.tsv;
  }
}

/** @typedef {import("./core/host.js").Host} Host */
/** @typedef {import("./core/state.js").View} View */
/** @typedef {import("./core/state.js").HeadRef} HeadRef */
/** @typedef {import("./core/shell.js").Context} Context */

/**
 * Renders a scene into an element. Returns a function that removes it.
 * @param {{model: import("./core/host.js").Model, el: HTMLElement}} widget
 */
async function render({ model, el }) {
  el.append(html("style", {}, PAGE_STYLE));
  let now = null;
  /**
   * Replaces the rendered scene. @param {() => Host} makeHost
   * @param {() => Record<string, string>} [contents] of the form, if it is a response
   */
  const show = async (makeHost, contents) => {
    const texts = contents?.();
    const previousView = texts && (now?.view ?? {});
    const focused = /** @type {any} */ (el.contains(document.activeElement) ? document.activeElement : null);
    const root = html("div", { class: "regard", "data-busy": true });
    el.append(root);
    try {
      const host = makeHost();
      if (!host.ownsAddress) keepKeys(root);
      const showResponse = (/** @type {Host} */ next, /** @type {() => Record<string, string>} */ values) =>
        (shown = shown.catch(() => {}).then(() => show(() => next, values)));
      const form = !host.request
        ? null
        : host.scene.image
          ? imageForm(host, showResponse)
          : requestForm(host, texts, showResponse);
      // The new form replaces the old one at once: nothing that is typed is lost.
      root.append(form ?? "");
      if (texts) {
        const field = /** @type {any} */ (
          form.elements.namedItem(focused?.form ? focused.name : "") ?? form.elements.namedItem(host.fields[0])
        );
        field.focus({ preventScroll: true });
        // Files have no selection.
        if (focused?.name === field.name && focused.selectionStart != null)
          field.setSelectionRange(focused.selectionStart, focused.selectionEnd);
      }
      now?.end();
      now = null;
      now =
        host.scene.attentions.length || host.scene.trace
          ? await open(host, root, form, previousView)
          : welcome(host, root);
    } catch (error) {
      root.append(html("p", { class: "failed", role: "alert" }, String(error?.message ?? error)));
      throw error;
    }
  };
  /** Scenes are shown one after the other. */
  let shown = show(() => createHost(model));
  await shown;
  return () => now?.end();
}

/**
 * Keeps the keys of a focused part from the shortcuts of a notebook; a click anywhere gives the root the focus.
 * @param {HTMLElement} root
 */
function keepKeys(root) {
  setAttributes(root, { tabindex: -1, "data-lm-suppress-shortcuts": true });
  for (const type of ["keydown", "keypress", "keyup"]) root.addEventListener(type, (event) => event.stopPropagation());
}

/**
 * The views in the order of their tabs. A view is left out if `fits` is false for the scene.
 * @type {Record<string, {name: string, fits: (scene: any) => boolean, make: (context: Context) => ViewComponent}>}
 */
const VIEWS = {
  attention: {
    name: "Attention",
    fits: (scene) => scene.attentions.length > 0 || scene.decode?.nodes.length > 0,
    make: (context) => new AttentionTab(context),
  },
  steps: {
    name: "Step by step",
    fits: (scene) => !scene.compared,
    make: (context) => (context.host.scene.trace ? new StepsView(context) : new MissingSteps(context)),
  },
  experiment: {
    name: "Experiment",
    fits: (scene) => scene.attentions.length > 0 && !scene.compared,
    make: (context) => new ExperimentView(context),
  },
};

/** Number of tokens up to which a text is shown as lines at first; longer ones as a map. */
const MAX_LINES_TOKENS = 48;

/**
 * The form of the figure in a page whose address does not select one. Differences exist as maps only.
 * @param {any} scene
 */
function defaultForm({ attentions, compared }) {
  return compared || Math.max(0, ...attentions.map((/** @type {any} */ { k }) => k.shape[0])) > MAX_LINES_TOKENS
    ? "map"
    : "lines";
}

/**
 * @param {Host} host @param {HTMLElement} root @param {HTMLElement | null} form that requests another scene
 * @param {Partial<View>} [previousView] the view of the scene before this one
 */
async function open(host, root, form, previousView) {
  const { scene } = host;
  const looks = new ComparedLooks(host);
  const names = Object.keys(VIEWS).filter((name) => VIEWS[name].fits(scene));
  /**
   * Replaces what the scene does not have by defaults. @param {Partial<View>} view
   * @param {HeadRef} selected the default head
   */
  const withDefaults = (view, selected) => ({
    ...view,
    view: names.includes(view.view) ? view.view : names[0],
    selected: looks.has(view.selected) ? view.selected : selected,
    added: (view.added ?? []).filter((ref) => looks.has(ref)),
    other: looks.has(view.other) ? view.other : null,
  });
  const requested =
    previousView ?? (host.ownsAddress && location.hash.length > 1 ? readHash(location.hash) : initialImageView(scene));
  const noHead = { selected: { attention: null, head: 0 } };
  const opening = looks.has(requested.selected)
    ? { selected: requested.selected }
    : scene.attentions.length
      ? await initialSelection(looks)
      : noHead;
  const state = new State(
    /** @type {View} */ ({
      ...DEFAULT_VIEW,
      ...storedDepth(),
      form: defaultForm(scene),
      ...withDefaults({ ...opening, ...requested }, opening.selected),
    }),
  );
  const scheduler = new Scheduler((busy) => root.toggleAttribute("data-busy", busy));
  const announcer = new Announcer();
  const chosen = looks.has(requested.selected) ? null : state.view.selected;
  const context = { host, looks, attentions: looks.all[0], state, scheduler, announcer, opening: chosen };
  /** Views are created when their tab is first opened. @type {Record<string, ViewComponent>} */
  const views = {};
  const current = () => views[state.view.view];
  const output = new OutputSection(host, {
    point: (step) => /** @type {any} */ (views.attention)?.pointOutput(step),
    append:
      host.request && form instanceof HTMLFormElement && scene.output?.kind === "continuation"
        ? (text) => appendToForm(form, text)
        : null,
  });
  const page = html("div", { class: "page", id: uniqueId("page") }, output.element);
  const tabs =
    names.length > 1
      ? tabList("View", Object.fromEntries(names.map((name) => [name, VIEWS[name].name])), page.id, (view) =>
          state.set({ view }),
        )
      : null;
  if (tabs) setAttributes(page, { role: "tabpanel" });
  const help = helpDialog();
  const embed = host.ownsAddress ? embedDialog(announcer, root) : null;
  root.prepend(topBar(scene, tabs?.element ?? null, tools(context, page, current, help, embed)));
  root.append(page, help, announcer.element);

  /** Writes the first sentence, which is about the selected head. */
  const summarize = async () => {
    const head = state.view.selected;
    const sentence = await summarySentence(scene, looks.attentionsOf(head), head);
    if (head === state.view.selected) output.setSummary(sentence);
  };
  /** @param {Set<string> | null} changed */
  const show = async (changed) => {
    const { theme, view } = state.view;
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    if (tabs) setAttributes(page, { "aria-labelledby": tabs.mark(view) });
    output.setView(view);
    const isFirst = !views[view];
    if (isFirst) {
      page.append((views[view] = VIEWS[view].make(context)).element);
      if (views[view] instanceof AttentionTab) output.addPanel(/** @type {any} */ (views[view]).outputElement);
    }
    for (const [name, one] of Object.entries(views)) one.element.hidden = name !== view;
    await current().update(isFirst || changed?.has("view") ? null : changed);
  };
  state.listen((view, changed) => {
    show(changed);
    if (changed.has("selected")) summarize();
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
    if (target.closest("select, dialog, input, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "?") help.showModal();
  });
  if (host.ownsAddress) {
    window.addEventListener("hashchange", () => state.set(withDefaults(readHash(location.hash), state.view.selected)), {
      signal,
    });
  }
  await show(null);
  await summarize();
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

/** Appends text to the sentence of a form and runs the model. @param {HTMLFormElement} form @param {string} text */
function appendToForm(form, text) {
  const field = /** @type {HTMLTextAreaElement} */ (form.elements.namedItem("source"));
  field.value += text;
  form.requestSubmit();
}

/** @param {string} hash */
function replaceHash(hash) {
  try {
    history.replaceState(null, "", `#${hash}`);
  } catch {
    // A frame without an address: the view works, but has no link.
  }
}

/** The caption of saved figures: texts and model. @param {any} scene */
function captionOf(scene) {
  const { name, family } = scene.model ?? {};
  const texts = [scene.texts.source, scene.texts.target || scene.output?.text || scene.image?.answer]
    .filter(Boolean)
    .map((text) => text.trim().replace(/\s+/g, " "));
  return [texts.join(" → ") || scene.title, [...new Set([name, family].filter(Boolean))].join(", ")]
    .filter(Boolean)
    .join("  ·  ");
}

/**
 * The buttons of the top bar.
 * @param {Context} context @param {HTMLElement} page @param {() => ViewComponent} current
 * @param {HTMLDialogElement} help
 * @param {ReturnType<typeof embedDialog> | null} embed null if the page has no address of its own
 */
function tools({ host: { scene }, state, announcer }, page, current, help, embed) {
  /** @param {HTMLElement} part @param {string} format @param {string} fileName */
  const save = async (part, format, fileName) => {
    try {
      const svg = renderSvg(part, captionOf(scene));
      const blob = format === "png" ? await png(svg) : new Blob([serializeSvg(svg)], { type: "image/svg+xml" });
      download(blob, `${fileName}.${format}`);
      announcer.announce(`Saved as ${format.toUpperCase()}.`);
    } catch (error) {
      announcer.announce(`Saving failed: ${error.message}`);
      throw error;
    }
  };
  /** @param {{fileName: string, tsv?: string}} view */
  const saveNumbers = ({ fileName, tsv }) => {
    if (tsv) download(new Blob([tsv], { type: "text/tab-separated-values" }), `${fileName}.tsv`);
    announcer.announce(tsv ? "Saved as TSV." : "This view has no numbers to save.");
  };
  /** The search tree is part of the first view. @returns {[string, () => void][]} */
  const searchActions = () => {
    if (!scene.decode?.nodes.length || !scene.attentions.length) return [];
    /** @param {(search: any) => void} action */
    const withSearch = (action) => async () => {
      state.set({ view: "attention", search: true });
      const main = /** @type {any} */ (current());
      await main.update(null);
      action(main.search);
    };
    return [
      ["Search tree as PNG", withSearch((search) => save(search.figureElement, "png", search.fileName))],
      ["Search tree as SVG", withSearch((search) => save(search.figureElement, "svg", search.fileName))],
      ["Search as TSV", withSearch(saveNumbers)],
    ];
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
    html(
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
    html(
      "button",
      {
        type: "button",
        class: "round",
        "aria-label": "Keyboard shortcuts",
        title: "Keyboard shortcuts",
        onclick: () => help.showModal(),
      },
      icon("M9 9a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4M12 17.5v.5"),
    ),
    menu("Save", icon("M12 4v11M7 11l5 5 5-5M5 20h14"), [
      ["Figure as PNG", () => save(current().figureElement, "png", current().fileName)],
      ["Figure as SVG", () => save(current().figureElement, "svg", current().fileName)],
      ["Entire view as PNG", () => save(page, "png", `${current().fileName}-view`)],
      ["Entire view as SVG", () => save(page, "svg", `${current().fileName}-view`)],
      ["Numbers as TSV", () => saveNumbers(current())],
      ...(scene.attentions.length
        ? [
            /** @type {[string, () => void]} */ ([
              "Show the numbers as a table",
              () => state.set({ view: "attention", form: "table" }),
            ]),
          ]
        : []),
      ...searchActions(),
      ["Copy link to this view", share],
      ...(embed
        ? [
            /** @type {[string, () => void]} */ ([
              "Embed …",
              () => embed.open(embedCode(shareableAddress(), writeHash(state.view), scene.title)),
            ]),
          ]
        : []),
    ]),
  ];
}

/** Called by a saved page: renders the scene that is stored in the document. */
export function openPage() {
  const el = document.getElementById("regard");
  return pageModel().then(
    (model) => render({ model, el }),
    (error) => el.append(html("p", { role: "alert" }, error.message)),
  );
}

export default { render };
