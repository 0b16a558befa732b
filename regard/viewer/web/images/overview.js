/** Overview of all layers and heads: thumbnails of the attention of the current query over the patches. */

import { createThumbnail, headKey, thumbnailByKey } from "../attention/overview.js";
import { html, setAttributes, setChildren } from "../core/dom.js";
import { paintPatches } from "./figure.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {{ref: HeadRef, element: HTMLElement, canvas: HTMLCanvasElement}} Thumb */

/** Priority of painting thumbnails, after the main figure. */
const IMAGE_THUMBNAIL_PRIORITY = 8;
/** Maximum number of maps of label queries; those of the labels with the most pixels. */
const MAX_QUERY_MAPS = 12;

/** The attention stacks of an image model, by prefix of their names. */
const STACKS = [
  { prefix: "blocks.", title: "Encoder self-attention", one: "Layer" },
  { prefix: "pooler.", title: "Pooling", one: "Pooling" },
  { prefix: "segmenter.", title: "Segmenter self-attention", one: "Segmenter layer" },
];

/** @param {string} name of an attention */
const findStack = (name) => STACKS.find(({ prefix }) => name.startsWith(prefix));

/** The label of an attention. @param {{name: string, layer: number}} attention */
export function imageLayerLabel({ name, layer }) {
  const { one, prefix } = findStack(name);
  return prefix === "pooler." ? one : `${one} ${layer + 1}`;
}

/** The label of a head. @param {any} attention @param {number | "mean"} head */
export function imageHeadLabel(attention, head) {
  if (attention.heads === 1) return "single head";
  return head === "mean" ? `mean of ${attention.heads} heads` : `head ${head + 1}`;
}

export class ImageOverview {
  /**
   * @param {import("./attention.js").ImageAttention} imageAttention
   * @param {import("../core/scheduler.js").Scheduler} scheduler
   * @param {(ref: HeadRef) => void} onSelect
   */
  constructor(imageAttention, scheduler, onSelect) {
    this.imageAttention = imageAttention;
    this.scheduler = scheduler;
    this.onSelect = onSelect;
    /** @type {Map<string, Thumb>} */
    this.thumbnails = new Map();
    /** Incremented when painting starts; earlier painting is then discarded. */
    this.generation = 0;
    const list = imageAttention.attentions.scene.attentions;
    this.element = html(
      "nav",
      { class: "overview", "aria-label": "All layers and heads" },
      STACKS.map((stack) =>
        this.group(
          stack.title,
          list.filter((one) => findStack(one.name) === stack),
        ),
      ),
    );
    this.element.style.setProperty("--aspect", String(imageAttention.columns / imageAttention.rows));
  }

  /** @param {string} title @param {any[]} some */
  group(title, some) {
    if (!some.length) return null;
    const heads = Math.max(...some.map((one) => one.heads));
    /** @type {(number | "mean")[]} */
    const columns = heads > 1 ? ["mean", ...Array(heads).keys()] : [0];
    const grid = html(
      "div",
      {
        class: "grid",
        role: "grid",
        "aria-label": `${title}: one row per layer, one column per head`,
        onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
      },
      html(
        "div",
        { role: "row", class: "line head-row" },
        html("span", { role: "columnheader", class: "corner" }, html("span", { class: "visually-hidden" }, "layer")),
        columns.map((head) =>
          html(
            "span",
            { role: "columnheader", class: head === "mean" ? "mean" : "" },
            head === "mean" ? head : String(head + 1),
          ),
        ),
      ),
      some.map((one) =>
        html(
          "div",
          { role: "row", class: "line" },
          html("span", { role: "rowheader", class: "layer", title: one.name }, String(one.layer + 1)),
          columns.filter((head) => head === "mean" || head < one.heads).map((head) => this.thumbnail(one, head)),
        ),
      ),
    );
    grid.style.setProperty("--heads", String(columns.length));
    const layers = some.length > 1 ? `${some.length} layers × ` : "";
    const size =
      heads > 1 || layers ? html("span", { class: "size" }, `${layers}${heads} ${heads > 1 ? "heads" : "head"}`) : null;
    return html("section", { class: "group" }, html("h2", {}, title, size), grid);
  }

  /** @param {any} attention @param {number | "mean"} head */
  thumbnail(attention, head) {
    const ref = { attention: attention.name, head };
    const name = `${imageLayerLabel(attention)}, ${imageHeadLabel(attention, head)}`;
    const thumbnail = createThumbnail(ref, name, () => this.onSelect(ref));
    this.thumbnails.set(headKey(ref), thumbnail);
    return thumbnail.element;
  }

  /** Arrow keys move between thumbnails and select them. @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (!this.thumbnails.has(target.dataset.head) || event.altKey || event.metaKey || event.ctrlKey) return;
    const next = thumbnailByKey(this.element, event);
    if (next) this.onSelect(this.thumbnails.get(next.dataset.head).ref);
  }

  /** Highlights the selected head. @param {HeadRef | null} ref */
  mark(ref) {
    const key = ref && headKey(ref);
    const first = this.thumbnails.keys().next().value;
    for (const [name, { element }] of this.thumbnails) {
      const on = name === key;
      setAttributes(element, {
        "aria-selected": String(on),
        tabindex: on || (key === null && name === first) ? 0 : -1,
        "data-mark": on ? "first" : null,
      });
    }
  }

  /**
   * Paints all thumbnails, one attention at a time, the selected one first.
   * @param {(name: string) => number | null | undefined} queryRow returns the query row of an attention; null: the
   * entire image;
   * undefined: it has no such row
   * @param {string} colors @param {string} scale @param {string} first
   */
  show(queryRow, colors, scale, first) {
    const { attentions } = this.imageAttention;
    const names = [...attentions.byName.keys()];
    names.sort((a, b) => Number(b === first) - Number(a === first));
    const generation = (this.generation += 1);
    const go = () =>
      this.scheduler.add("image thumbnails", IMAGE_THUMBNAIL_PRIORITY, () => {
        const name = names[0];
        if (name !== undefined && !attentions.isLoaded(name)) {
          attentions.load(name).then(() => generation === this.generation && go());
          return false;
        }
        if (name !== undefined) this.paint(name, queryRow(name), colors, scale);
        names.shift();
        return names.length > 0;
      });
    go();
  }

  /** @param {string} name @param {number | null | undefined} token @param {string} colors @param {string} scale */
  paint(name, token, colors, scale) {
    const { rows, columns } = this.imageAttention;
    for (const { ref, element, canvas } of this.thumbnails.values()) {
      if (ref.attention !== name) continue;
      element.toggleAttribute("data-drawn", token !== undefined);
      if (token === undefined) continue;
      const weights = this.imageAttention.overPatches(name, this.imageAttention.weights(ref, token));
      paintPatches(canvas, rows, columns, weights, colors, scale);
    }
  }
}

/** Maps of the label queries of a segmenter. */
export class QueryMaps {
  /** @param {import("./view.js").ImageQuery} imageQuery @param {(label: number | null) => void} onSelect */
  constructor(imageQuery, onSelect) {
    this.imageQuery = imageQuery;
    this.onSelect = onSelect;
    this.element = html("section", { class: "queries", "aria-label": "Queries of labels", hidden: true });
    this.element.style.setProperty(
      "--aspect",
      String(imageQuery.imageAttention.columns / imageQuery.imageAttention.rows),
    );
  }

  /** @param {number[]} labelsByFrequency labels, most pixels first */
  show(labelsByFrequency) {
    const { imageAttention, state, overlayKind } = this.imageQuery;
    const { rows, heads } = imageAttention.attentions.byName.get(state.view.selected.attention);
    this.element.hidden = overlayKind !== "attention" || rows !== "labels";
    if (this.element.hidden) return;
    const some = labelsByFrequency.slice(0, MAX_QUERY_MAPS).sort((a, b) => a - b);
    const focused = /** @type {HTMLElement | null} */ (this.element.querySelector(":focus"))?.dataset.query;
    const buttons = some.map((label) => this.button(label));
    const more = imageAttention.image.labels.length - some.length;
    setChildren(
      this.element,
      html("h2", {}, `Attention of each label query, ${imageHeadLabel({ heads }, state.view.selected.head)}`),
      html("div", { class: "query-list" }, buttons),
      more > 0 ? html("p", { class: "together" }, `${more} labels with fewer pixels are listed under “Query”.`) : null,
    );
    buttons.find((button) => button.dataset.query === focused)?.focus();
  }

  /** @param {number} label */
  button(label) {
    const { imageAttention, state, pinned } = this.imageQuery;
    const { colors, scale } = state.view;
    const ref = state.view.selected;
    const canvas = html("canvas", { "aria-hidden": "true" });
    const weights = imageAttention.overPatches(ref.attention, imageAttention.weights(ref, label));
    paintPatches(canvas, imageAttention.rows, imageAttention.columns, weights, colors, scale ?? "linear");
    const name = this.imageQuery.labelName(label);
    const on = pinned === label;
    return html(
      "button",
      {
        type: "button",
        "aria-pressed": String(on),
        "data-query": label,
        title: name,
        onclick: () => this.onSelect(on ? null : label),
      },
      canvas,
      html("span", { class: "name" }, html("bdi", {}, name)),
    );
  }
}
