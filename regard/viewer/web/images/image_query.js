/** The query of the image view, from state and pointer, and the overlay that it produces. */

import { makeVisible } from "../core/tokens.js";
import { patchLabel } from "./image_reading.js";

/** @typedef {import("./image_reading.js").Overlay} Overlay */
/** @typedef {{patch: number} | {token: number} | null} QueryRef a patch, another row of the selected attention, or the entire image (null) */

export class ImageQuery {
  /** @param {import("./image_attention.js").ImageAttention} imageAttention @param {import("../core/state.js").State} state */
  constructor(imageAttention, state) {
    this.imageAttention = imageAttention;
    this.attentions = imageAttention.attentions;
    this.scene = imageAttention.attentions.scene;
    this.image = imageAttention.image;
    this.state = state;
    /** The available kinds of overlays. */
    this.overlayKinds = ["image", "attention", "rollout", ...(this.image.mask ? ["mask"] : [])];
    /** The patch under the pointer. @type {number | null} */
    this.cursor = null;
    /** Gradient-weighted rollouts by label. @type {Map<number, Float64Array>} */
    this.labelRollouts = new Map();
  }

  get overlayKind() {
    const { overlayKind } = this.state.view;
    return this.overlayKinds.includes(overlayKind) ? overlayKind : "attention";
  }

  /** The label that a rollout explains or that is highlighted among the pixels; null if the scene does not have it. */
  get selectedLabel() {
    const { label } = this.state.view;
    return this.image.labels.some((/** @type {any} */ one) => one.number === label) ? label : null;
  }

  /** @param {number} number */
  labelName(number) {
    return makeVisible(this.image.labels.find((/** @type {any} */ one) => one.number === number)?.name ?? String(number));
  }

  /** Whether the overlay is the rollout of a label, by gradients or by the label's query. */
  get isForLabel() {
    return this.overlayKind === "rollout" && this.selectedLabel !== null && (this.labelRollouts.has(this.selectedLabel) || this.imageAttention.segmenter.length > 0);
  }

  /** The pinned row of the selected attention, or null. */
  get pinned() {
    const { pin, selected } = this.state.view;
    return pin && pin[0] < this.attentions.byName.get(selected.attention).q.shape[0] ? pin[0] : null;
  }

  /** Whether the query can be selected. */
  get canSelectQuery() {
    if (this.overlayKind === "rollout") return !this.isForLabel;
    return this.overlayKind === "attention" && this.imageAttention.firstPatch(this.state.view.selected.attention, "rows") !== null;
  }

  /** The current query. @returns {QueryRef} */
  get query() {
    if (!this.canSelectQuery) return null;
    const { selected } = this.state.view;
    if (this.pinned !== null) {
      const patch = this.imageAttention.patchOfRow(selected.attention, this.pinned);
      return patch === null ? { token: this.pinned } : { patch };
    }
    return this.followsPointer && this.cursor !== null ? { patch: this.cursor } : null;
  }

  /** Whether the pointer selects the query. Not in a table, whose cells would change under the pointer. */
  get followsPointer() {
    const { follow, form } = this.state.view;
    return this.canSelectQuery && follow && form !== "table" && this.pinned === null;
  }

  /** The patch whose weight is read, where the pointer does not select the query. */
  get readPatch() {
    return this.followsPointer ? null : this.cursor;
  }

  /**
   * The query row of an attention; null: the row that represents the image; undefined: there is no such row.
   * @param {string} name @returns {number | null | undefined}
   */
  queryIn(name) {
    const { query } = this;
    if (query === null || this.imageAttention.firstPatch(name, "rows") === null) return null;
    if ("patch" in query) return this.imageAttention.rowOfPatch(name, query.patch);
    const selectedAttention = this.attentions.byName.get(this.state.view.selected.attention);
    return selectedAttention.rows === this.attentions.byName.get(name).rows ? query.token : undefined;
  }

  /** The label of a query. @param {QueryRef} query @param {string} whole the label of the entire image */
  queryLabel(query, whole) {
    if (query === null) return whole;
    if ("patch" in query) return patchLabel(query.patch, this.imageAttention.columns);
    const { rows } = this.attentions.axesOf(this.state.view.selected.attention, false);
    return rows.name === "labels" ? `the query of ${rows.labels[query.token]}` : rows.labels[query.token];
  }

  /** The label of the row that represents the image in an attention. @param {string} name */
  imageRowLabel(name) {
    const row = this.image.single_query[name];
    return row === null ? "mean over patches" : this.attentions.axesOf(name, false).rows.labels[row];
  }

  /** Computes the overlay; null if there is none, or if it is not available yet. @returns {Overlay | null} */
  computeOverlay() {
    const { selected } = this.state.view;
    if (this.overlayKind === "attention") {
      const weights = this.imageAttention.weights(selected, this.queryIn(selected.attention));
      const { columns } = this.attentions.axesOf(selected.attention, false);
      const first = this.imageAttention.firstPatch(selected.attention, "columns");
      return {
        patches: this.imageAttention.overPatches(selected.attention, weights),
        others: columns.labels.slice(0, first).map((name, i) => ({ name, weight: weights[i] })),
        subject: this.queryLabel(this.query, this.imageRowLabel(selected.attention)),
        verb: "attends to",
        rounded: this.attentions.byName.get(selected.attention).q.type !== "float32",
      };
    }
    if (this.overlayKind !== "rollout") return null;
    const label = this.isForLabel ? this.selectedLabel : null;
    if (label !== null && this.labelRollouts.has(label)) {
      return { patches: this.labelRollouts.get(label), others: [], subject: this.labelName(label), verb: "is supported by", rounded: false };
    }
    const query = this.rolloutQuery();
    if (!this.imageAttention.rolloutLayers(query).every((name) => this.imageAttention.means.has(name))) return null;
    const row = this.imageAttention.rollout(query);
    const first = this.image.first.image;
    const tokens = this.scene.sides.image.tokens.slice(0, first);
    return {
      patches: row.subarray(first),
      others: tokens.map((/** @type {string} */ name, /** @type {number} */ i) => ({ name: makeVisible(name), weight: row[i] })),
      subject: label === null ? this.queryLabel(this.query, "entire image") : `the query of ${this.labelName(label)}`,
      verb: "draws from",
      rounded: false,
    };
  }

  /** The query of a rollout, in tokens of the encoder. @returns {import("./image_attention.js").RolloutQuery} */
  rolloutQuery() {
    const { query } = this;
    if (this.isForLabel) return { label: this.selectedLabel };
    if (query === null) return null;
    if ("patch" in query) return { token: this.image.first.image + query.patch };
    const { rows } = this.attentions.byName.get(this.state.view.selected.attention);
    return rows === "image" ? { token: query.token } : { label: query.token };
  }
}
