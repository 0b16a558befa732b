/** Overview of all layers and heads: thumbnails of the attention of the current query over the patches. */

import { paintPatches } from "./image_figure.js";
import { change, fill, h } from "../core/dom.js";
import { keyOf, thumbByKey, thumbOf } from "../attention/thumbnails.js";

/** @typedef {import("../core/state.js").Shown} Shown */
/** @typedef {{shown: Shown, element: HTMLElement, canvas: HTMLCanvasElement}} Thumb */

/** Priority of painting thumbnails, after the main figure. */
const THUMBS_LATER = 8;
/** Maximum number of maps of label queries; those of the labels with the most pixels. */
const MOST_QUERIES = 12;

/** The attention stacks of an image model, by prefix of their names. */
const STACKS = [
  { begins: "blocks.", called: "Encoder self-attention", one: "Layer" },
  { begins: "pooler.", called: "Pooling", one: "Pooling" },
  { begins: "segmenter.", called: "Segmenter self-attention", one: "Segmenter layer" },
];

/** @param {string} name of an attention */
const stackOf = (name) => STACKS.find(({ begins }) => name.startsWith(begins));

/** The label of an attention. @param {{name: string, layer: number}} attention */
export function layerOfPicture({ name, layer }) {
  const { one, begins } = stackOf(name);
  return begins === "pooler." ? one : `${one} ${layer}`;
}

/** The label of a head. @param {any} attention @param {number | "mean"} head */
export function headOfPicture(attention, head) {
  if (attention.heads === 1) return "single head";
  return head === "mean" ? `mean of ${attention.heads} heads` : `head ${head}`;
}

export class PictureOverview {
  /**
   * @param {import("./image_attention.js").PictureLooks} looks @param {import("../core/scheduler.js").Work} work
   * @param {(shown: Shown) => void} chosen
   */
  constructor(looks, work, chosen) {
    this.looks = looks;
    this.work = work;
    this.chosen = chosen;
    /** @type {Map<string, Thumb>} */
    this.thumbs = new Map();
    /** Incremented when painting starts; earlier painting is then discarded. */
    this.round = 0;
    const list = looks.attentions.scene.attentions;
    this.element = h(
      "nav",
      { class: "overview", "aria-label": "All layers and heads" },
      STACKS.map((stack) => this.group(stack.called, list.filter((one) => stackOf(one.name) === stack))),
    );
    this.element.style.setProperty("--aspect", String(looks.columns / looks.rows));
  }

  /** @param {string} called @param {any[]} some */
  group(called, some) {
    if (!some.length) return null;
    const heads = Math.max(...some.map((one) => one.heads));
    /** @type {(number | "mean")[]} */
    const columns = heads > 1 ? ["mean", ...Array(heads).keys()] : [0];
    const grid = h(
      "div",
      {
        class: "grid",
        role: "grid",
        "aria-label": `${called}: one row per layer, one column per head`,
        onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
      },
      h(
        "div",
        { role: "row", class: "line heads" },
        h("span", { role: "columnheader", class: "corner" }, h("span", { class: "unseen" }, "layer")),
        columns.map((head) => h("span", { role: "columnheader", class: head === "mean" ? "mean" : "" }, String(head))),
      ),
      some.map((one) =>
        h(
          "div",
          { role: "row", class: "line" },
          h("span", { role: "rowheader", class: "layer", title: one.name }, String(one.layer)),
          columns.filter((head) => head === "mean" || head < one.heads).map((head) => this.thumb(one, head)),
        ),
      ),
    );
    grid.style.setProperty("--heads", String(columns.length));
    const layers = some.length > 1 ? `${some.length} layers × ` : "";
    const size = heads > 1 || layers ? h("span", { class: "size" }, `${layers}${heads} ${heads > 1 ? "heads" : "head"}`) : null;
    return h("section", { class: "group" }, h("h2", {}, called, size), grid);
  }

  /** @param {any} attention @param {number | "mean"} head */
  thumb(attention, head) {
    const shown = { attention: attention.name, head };
    const name = `${layerOfPicture(attention)}, ${headOfPicture(attention, head)}`;
    const thumb = thumbOf(shown, name, () => this.chosen(shown));
    this.thumbs.set(keyOf(shown), thumb);
    return thumb.element;
  }

  /** Arrow keys move between thumbnails and select them. @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (!this.thumbs.has(target.dataset.shown) || event.altKey || event.metaKey || event.ctrlKey) return;
    const next = thumbByKey(this.element, event);
    if (next) this.chosen(this.thumbs.get(next.dataset.shown).shown);
  }

  /** Highlights the selected head. @param {Shown | null} shown */
  mark(shown) {
    const key = shown && keyOf(shown);
    const first = this.thumbs.keys().next().value;
    for (const [name, { element }] of this.thumbs) {
      const on = name === key;
      change(element, {
        "aria-selected": String(on),
        tabindex: on || (key === null && name === first) ? 0 : -1,
        "data-mark": on ? "first" : null,
      });
    }
  }

  /**
   * Paints all thumbnails, one attention at a time, the selected one first.
   * @param {(name: string) => number | null | undefined} asks returns the query of an attention: a row; null: the entire image;
   * undefined: it has no such row
   * @param {string} colours @param {string} scale @param {string} first
   */
  show(asks, colours, scale, first) {
    const { attentions } = this.looks;
    const names = [...attentions.byName.keys()];
    names.sort((a, b) => Number(b === first) - Number(a === first));
    const round = (this.round += 1);
    const go = () =>
      this.work.add("small pictures", THUMBS_LATER, () => {
        const name = names[0];
        if (name !== undefined && !attentions.isLoaded(name)) {
          attentions.load(name).then(() => round === this.round && go());
          return false;
        }
        if (name !== undefined) this.paint(name, asks(name), colours, scale);
        names.shift();
        return names.length > 0;
      });
    go();
  }

  /** @param {string} name @param {number | null | undefined} token @param {string} colours @param {string} scale */
  paint(name, token, colours, scale) {
    const { rows, columns } = this.looks;
    for (const { shown, element, canvas } of this.thumbs.values()) {
      if (shown.attention !== name) continue;
      element.toggleAttribute("data-drawn", token !== undefined);
      if (token === undefined) continue;
      const weights = this.looks.overPatches(name, this.looks.weights(shown, token));
      paintPatches(canvas, rows, columns, weights, colours, scale);
    }
  }
}

/** Maps of the label queries of a segmenter. */
export class QueryMaps {
  /** @param {import("./image_requests.js").PictureAsking} asking @param {(label: number | null) => void} chosen */
  constructor(asking, chosen) {
    this.asking = asking;
    this.chosen = chosen;
    this.element = h("section", { class: "queries", "aria-label": "Queries of labels", hidden: true });
    this.element.style.setProperty("--aspect", String(asking.looks.columns / asking.looks.rows));
  }

  /** @param {number[]} common labels, most pixels first */
  show(common) {
    const { looks, state, over } = this.asking;
    const { rows, heads } = looks.attentions.byName.get(state.view.shown.attention);
    this.element.hidden = over !== "attention" || rows !== "labels";
    if (this.element.hidden) return;
    const some = common.slice(0, MOST_QUERIES).sort((a, b) => a - b);
    const focused = /** @type {HTMLElement | null} */ (this.element.querySelector(":focus"))?.dataset.query;
    const buttons = some.map((label) => this.button(label));
    const more = looks.picture.labels.length - some.length;
    fill(
      this.element,
      h("h2", {}, `Attention of each label query, ${headOfPicture({ heads }, state.view.shown.head)}`),
      h("div", { class: "query-list" }, buttons),
      more > 0 ? h("p", { class: "together" }, `${more} labels with fewer pixels are listed under “Query”.`) : null,
    );
    buttons.find((button) => button.dataset.query === focused)?.focus();
  }

  /** @param {number} label */
  button(label) {
    const { looks, state, pinned } = this.asking;
    const { shown, colours, scale } = state.view;
    const canvas = h("canvas", { "aria-hidden": "true" });
    const weights = looks.overPatches(shown.attention, looks.weights(shown, label));
    paintPatches(canvas, looks.rows, looks.columns, weights, colours, scale ?? "linear");
    const name = this.asking.labelCalled(label);
    const on = pinned === label;
    return h(
      "button",
      { type: "button", "aria-pressed": String(on), "data-query": label, title: name, onclick: () => this.chosen(on ? null : label) },
      canvas,
      h("span", { class: "name" }, h("bdi", {}, name)),
    );
  }
}
