/** The query of the image view, from state and pointer, and the overlay that it produces. */

import { visible } from "../core/tokens.js";
import { patchCalled } from "./image_reading.js";

/** @typedef {import("./image_reading.js").Laid} Laid */
/** @typedef {{patch: number} | {token: number} | null} Asking a patch, another row of the selected attention, or the entire image (null) */

export class PictureAsking {
  /** @param {import("./image_attention.js").PictureLooks} looks @param {import("../core/state.js").State} state */
  constructor(looks, state) {
    this.looks = looks;
    this.attentions = looks.attentions;
    this.scene = looks.attentions.scene;
    this.picture = looks.picture;
    this.state = state;
    /** The available kinds of overlays. */
    this.overs = ["picture", "attention", "rollout", ...(this.picture.mask ? ["mask"] : [])];
    /** The patch under the pointer. @type {number | null} */
    this.cursor = null;
    /** Gradient-weighted rollouts by label. @type {Map<number, Float64Array>} */
    this.given = new Map();
  }

  get over() {
    const { over } = this.state.view;
    return this.overs.includes(over) ? over : "attention";
  }

  /** The label that a rollout explains or that is highlighted among the pixels; null if the scene does not have it. */
  get chosenLabel() {
    const { label } = this.state.view;
    return this.picture.labels.some((/** @type {any} */ one) => one.number === label) ? label : null;
  }

  /** @param {number} number */
  labelCalled(number) {
    return visible(this.picture.labels.find((/** @type {any} */ one) => one.number === number)?.name ?? String(number));
  }

  /** Whether the overlay is the rollout of a label, by gradients or by the label's query. */
  get forLabel() {
    return this.over === "rollout" && this.chosenLabel !== null && (this.given.has(this.chosenLabel) || this.looks.segmenter.length > 0);
  }

  /** The pinned row of the selected attention, or null. */
  get pinned() {
    const { pin, shown } = this.state.view;
    return pin && pin[0] < this.attentions.byName.get(shown.attention).q.shape[0] ? pin[0] : null;
  }

  /** Whether the query can be selected. */
  get askable() {
    if (this.over === "rollout") return !this.forLabel;
    return this.over === "attention" && this.looks.firstOf(this.state.view.shown.attention, "rows") !== null;
  }

  /** The current query. @returns {Asking} */
  get asker() {
    if (!this.askable) return null;
    const { shown } = this.state.view;
    if (this.pinned !== null) {
      const patch = this.looks.patchOf(shown.attention, this.pinned);
      return patch === null ? { token: this.pinned } : { patch };
    }
    return this.follows && this.cursor !== null ? { patch: this.cursor } : null;
  }

  /** Whether the pointer selects the query. Not in a table, whose cells would change under the pointer. */
  get follows() {
    const { follow, form } = this.state.view;
    return this.askable && follow && form !== "table" && this.pinned === null;
  }

  /** The patch whose weight is read, where the pointer does not select the query. */
  get read() {
    return this.follows ? null : this.cursor;
  }

  /**
   * The query in an attention: a row; null: the row that represents the image; undefined: there is no such row.
   * @param {string} name @returns {number | null | undefined}
   */
  askerIn(name) {
    const { asker } = this;
    if (asker === null || this.looks.firstOf(name, "rows") === null) return null;
    if ("patch" in asker) return this.looks.tokenOf(name, asker.patch);
    const mine = this.attentions.byName.get(this.state.view.shown.attention);
    return mine.rows === this.attentions.byName.get(name).rows ? asker.token : undefined;
  }

  /** The label of a query. @param {Asking} asker @param {string} whole the label of the entire image */
  askerCalled(asker, whole) {
    if (asker === null) return whole;
    if ("patch" in asker) return patchCalled(asker.patch, this.looks.columns);
    const { rows } = this.attentions.axesOf(this.state.view.shown.attention, false);
    return rows.name === "labels" ? `the query of ${rows.labels[asker.token]}` : rows.labels[asker.token];
  }

  /** The label of the row that represents the image in an attention. @param {string} name */
  speakerOf(name) {
    const row = this.picture.speaks[name];
    return row === null ? "mean over patches" : this.attentions.axesOf(name, false).rows.labels[row];
  }

  /** Computes the overlay; null if there is none, or if it is not available yet. @returns {Laid | null} */
  layNow() {
    const { shown } = this.state.view;
    if (this.over === "attention") {
      const weights = this.looks.weights(shown, this.askerIn(shown.attention));
      const { columns } = this.attentions.axesOf(shown.attention, false);
      const first = this.looks.firstOf(shown.attention, "columns");
      return {
        patches: this.looks.overPatches(shown.attention, weights),
        others: columns.labels.slice(0, first).map((name, i) => ({ name, weight: weights[i] })),
        subject: this.askerCalled(this.asker, this.speakerOf(shown.attention)),
        verb: "attends to",
        rounded: this.attentions.byName.get(shown.attention).q.type !== "float32",
      };
    }
    if (this.over !== "rollout") return null;
    const label = this.forLabel ? this.chosenLabel : null;
    if (label !== null && this.given.has(label)) {
      return { patches: this.given.get(label), others: [], subject: this.labelCalled(label), verb: "is supported by", rounded: false };
    }
    const asker = this.rolledFor();
    if (!this.looks.throughOf(asker).every((name) => this.looks.means.has(name))) return null;
    const row = this.looks.rollout(asker);
    const first = this.picture.first.picture;
    const tokens = this.scene.sides.picture.tokens.slice(0, first);
    return {
      patches: row.subarray(first),
      others: tokens.map((/** @type {string} */ name, /** @type {number} */ i) => ({ name: visible(name), weight: row[i] })),
      subject: label === null ? this.askerCalled(this.asker, "entire image") : `the query of ${this.labelCalled(label)}`,
      verb: "draws from",
      rounded: false,
    };
  }

  /** The query of a rollout, in tokens of the encoder. @returns {import("./image_attention.js").Asker} */
  rolledFor() {
    const { asker } = this;
    if (this.forLabel) return { label: this.chosenLabel };
    if (asker === null) return null;
    if ("patch" in asker) return { token: this.picture.first.picture + asker.patch };
    const { rows } = this.attentions.byName.get(this.state.view.shown.attention);
    return rows === "picture" ? { token: asker.token } : { label: asker.token };
  }
}
