/** Who asks what of a picture: the state of the view *Images* and the pointer in, what is laid over the picture out. */

import { visible } from "../core/tokens.js";
import { patchCalled } from "./image_reading.js";

/** @typedef {import("./image_reading.js").Laid} Laid */
/** @typedef {{patch: number} | {token: number} | null} Asking a patch; another token of the shown attention; the picture as a whole */

export class PictureAsking {
  /** @param {import("./image_attention.js").PictureLooks} looks @param {import("../core/state.js").State} state */
  constructor(looks, state) {
    this.looks = looks;
    this.attentions = looks.attentions;
    this.scene = looks.attentions.scene;
    this.picture = looks.picture;
    this.state = state;
    /** What can be laid over the picture. */
    this.overs = ["picture", "attention", "rollout", ...(this.picture.mask ? ["mask"] : [])];
    /** The patch that is pointed at. @type {number | null} */
    this.cursor = null;
    /** What speaks for a label, by its number. @type {Map<number, Float64Array>} */
    this.given = new Map();
  }

  get over() {
    const { over } = this.state.view;
    return this.overs.includes(over) ? over : "attention";
  }

  /** The label that a rollout speaks for, or that stands out among the pixels; null where the scene does not know it. */
  get chosenLabel() {
    const { label } = this.state.view;
    return this.picture.labels.some((/** @type {any} */ one) => one.number === label) ? label : null;
  }

  /** @param {number} number */
  labelCalled(number) {
    return visible(this.picture.labels.find((/** @type {any} */ one) => one.number === number)?.name ?? String(number));
  }

  /** Whether rollout is asked for a label, be it by gradients or by the label's query. */
  get forLabel() {
    return this.over === "rollout" && this.chosenLabel !== null && (this.given.has(this.chosenLabel) || this.looks.segmenter.length > 0);
  }

  /** The token that was pinned, among the rows of the shown attention. */
  get pinned() {
    const { pin, shown } = this.state.view;
    return pin && pin[0] < this.attentions.byName.get(shown.attention).q.shape[0] ? pin[0] : null;
  }

  /** Whether anybody but the picture as a whole can ask now. */
  get askable() {
    if (this.over === "rollout") return !this.forLabel;
    return this.over === "attention" && this.looks.firstOf(this.state.view.shown.attention, "rows") !== null;
  }

  /** Who asks now. @returns {Asking} */
  get asker() {
    if (!this.askable) return null;
    const { shown } = this.state.view;
    if (this.pinned !== null) {
      const patch = this.looks.patchOf(shown.attention, this.pinned);
      return patch === null ? { token: this.pinned } : { patch };
    }
    return this.follows && this.cursor !== null ? { patch: this.cursor } : null;
  }

  /** Whether the pointer chooses who asks. In a table it only reads: cells would change under it. */
  get follows() {
    const { follow, form } = this.state.view;
    return this.askable && follow && form !== "table" && this.pinned === null;
  }

  /** The patch that is read, where the pointer does not choose who asks. */
  get read() {
    return this.follows ? null : this.cursor;
  }

  /**
   * The token of an attention's rows that asks; null: whoever speaks for the picture; undefined: it is not there.
   * @param {string} name @returns {number | null | undefined}
   */
  askerIn(name) {
    const { asker } = this;
    if (asker === null || this.looks.firstOf(name, "rows") === null) return null;
    if ("patch" in asker) return this.looks.tokenOf(name, asker.patch);
    const mine = this.attentions.byName.get(this.state.view.shown.attention);
    return mine.rows === this.attentions.byName.get(name).rows ? asker.token : undefined;
  }

  /** What an asker is called. @param {Asking} asker @param {string} whole what the picture is called as one that asks */
  askerCalled(asker, whole) {
    if (asker === null) return whole;
    if ("patch" in asker) return patchCalled(asker.patch, this.looks.columns);
    const { rows } = this.attentions.axesOf(this.state.view.shown.attention, false);
    return rows.name === "labels" ? `the query of ${rows.labels[asker.token]}` : rows.labels[asker.token];
  }

  /** Who speaks for the picture in an attention. @param {string} name */
  speakerOf(name) {
    const row = this.picture.speaks[name];
    return row === null ? "an average patch" : this.attentions.axesOf(name, false).rows.labels[row];
  }

  /** What is laid over the picture now; null: nothing, or it is not computed yet. @returns {Laid | null} */
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
        verb: "looks at",
        rounded: this.attentions.byName.get(shown.attention).q.type !== "float32",
      };
    }
    if (this.over !== "rollout") return null;
    const label = this.forLabel ? this.chosenLabel : null;
    if (label !== null && this.given.has(label)) {
      return { patches: this.given.get(label), others: [], subject: this.labelCalled(label), verb: "is spoken for by", rounded: false };
    }
    const asker = this.rolledFor();
    if (!this.looks.throughOf(asker).every((name) => this.looks.means.has(name))) return null;
    const row = this.looks.rollout(asker);
    const first = this.picture.first.picture;
    const tokens = this.scene.sides.picture.tokens.slice(0, first);
    return {
      patches: row.subarray(first),
      others: tokens.map((/** @type {string} */ name, /** @type {number} */ i) => ({ name: visible(name), weight: row[i] })),
      subject: label === null ? this.askerCalled(this.asker, "the picture") : `the query of ${this.labelCalled(label)}`,
      verb: "comes from",
      rounded: false,
    };
  }

  /** Who asks for a rollout: tokens are those of the encoder there. @returns {import("./image_attention.js").Asker} */
  rolledFor() {
    const { asker } = this;
    if (this.forLabel) return { label: this.chosenLabel };
    if (asker === null) return null;
    if ("patch" in asker) return { token: this.picture.first.picture + asker.patch };
    const { rows } = this.attentions.byName.get(this.state.view.shown.attention);
    return rows === "picture" ? { token: asker.token } : { label: asker.token };
  }
}
