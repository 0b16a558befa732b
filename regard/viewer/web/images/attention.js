/**
 * Attention over the patches of an image, and rollout through all layers. No DOM: this also runs under node.
 *
 * Tokens are the rows and columns of an attention: first tokens that are not patches, then the patches in row-major
 * order.
 */

import { throughLayer } from "../weights/rollout.js";

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/**
 * @typedef {{token: number} | {label: number} | null} RolloutQuery a token of the rows, the query of a label, or the
 * entire image (null)
 */

/** Names of the attentions of the encoder, the pooling and the segmenter. */
const BLOCK = /^blocks\./;
const POOLING = "pooler.attention";
const SEGMENTER = /^segmenter\./;
/** Maximum number of cells of a map in a rollout; larger ones would take too much memory. */
const MAX_ROLLOUT_CELLS = 2 ** 21;
/** Number of rows that are computed before the page responds again. */
const ROWS_PER_STEP = 16;

export class ImageAttention {
  /** @param {import("../weights/maps.js").Attentions} attentions */
  constructor(attentions) {
    this.attentions = attentions;
    this.image = attentions.scene.image;
    const [rows, columns] = this.image.grid;
    this.rows = rows;
    this.columns = columns;
    this.count = this.rows * this.columns;
    const names = attentions.scene.attentions.map((one) => one.name);
    /** @type {string[]} */
    this.blocks = names.filter((name) => BLOCK.test(name));
    /** @type {string[]} */
    this.segmenter = names.filter((name) => SEGMENTER.test(name));
    this.pooler = names.includes(POOLING) ? POOLING : null;
    /** The mean map of each attention over its heads, (T, T). @type {Map<string, Float32Array>} */
    this.means = new Map();
    /** Means over the rows of the patches. @type {Map<string, Float64Array>} */
    this.averages = new Map();
  }

  /**
   * The index of the first patch among the rows (or columns) of an attention, or null if it has no patches.
   * @param {string} name @param {"rows" | "columns"} axis
   */
  firstPatch(name, axis) {
    return this.image.first[this.attentions.byName.get(name)[axis]] ?? null;
  }

  /** The patch of a row, or null. @param {string} name @param {number} token */
  patchOfRow(name, token) {
    const first = this.firstPatch(name, "rows");
    return first === null || token < first ? null : token - first;
  }

  /** The row of a patch, or null. @param {string} name @param {number} patch */
  rowOfPatch(name, patch) {
    const first = this.firstPatch(name, "rows");
    return first === null ? null : first + patch;
  }

  /** Whether the maps of the encoder fit into memory. */
  get fitsRollout() {
    return this.tokens ** 2 <= MAX_ROLLOUT_CELLS;
  }

  /** Number of tokens of the encoder. */
  get tokens() {
    return this.attentions.byName.get(this.blocks[0]).q.shape[0];
  }

  /** Whether the mean over patches is estimated from a sample, as for large maps. @param {HeadRef} ref */
  isSampled(ref) {
    return this.image.single_query[ref.attention] === null && !this.attentions.map(ref, false).isMaterialized;
  }

  /**
   * The attention weights of a head over all columns. Without a token, the query is the one that represents the image
   * (class
   * token, pooling query) or, if there is none, the mean over all patches.
   * @param {HeadRef} ref @param {number | null} token @returns {Float64Array}
   */
  weights(ref, token) {
    const map = this.attentions.map(ref, false);
    const row = token ?? this.image.single_query[ref.attention];
    if (row !== null) return map.exactRow(row);
    const key = `${ref.attention}:${ref.head}`;
    if (!this.averages.has(key)) this.averages.set(key, this.average(map, this.firstPatch(ref.attention, "rows")));
    return this.averages.get(key);
  }

  /** @param {import("../weights/maps.js").AttentionMap} map @param {number} first */
  average(map, first) {
    const rows = map.sampleRows().filter((row) => row >= first);
    const mean = new Float64Array(map.columns);
    const some = new Float32Array(ROWS_PER_STEP * map.columns);
    for (let at = 0; at < rows.length; at += ROWS_PER_STEP) {
      const part = rows.slice(at, at + ROWS_PER_STEP);
      map.readRows(part, 0, map.columns, some);
      for (let i = 0; i < part.length * map.columns; i++) mean[i % map.columns] += some[i] / rows.length;
    }
    return mean;
  }

  /** The weights over patches. @param {string} name @param {Float64Array} weights */
  overPatches(name, weights) {
    const first = this.firstPatch(name, "columns");
    return weights.subarray(first, first + this.count);
  }

  /** The attentions of a rollout, first layer first. @param {RolloutQuery} query */
  rolloutLayers(query) {
    const last = query && "label" in query ? this.segmenter : query === null && this.pooler ? [this.pooler] : [];
    return [...this.blocks, ...last];
  }

  /**
   * Computes the mean maps that rollouts need, a few rows per step. @param {string[]} names of loaded attentions
   * @returns {Generator<number, void>} the completed fraction
   */
  *prepare(names) {
    const missing = names.filter((name) => !this.means.has(name));
    for (const [done, name] of missing.entries()) {
      const { heads } = this.attentions.byName.get(name);
      const map = this.attentions.map({ attention: name, head: heads > 1 ? "mean" : 0 }, false);
      const mean = new Float32Array(map.rows * map.columns);
      for (let at = 0; at < map.rows; at += ROWS_PER_STEP) {
        const rows = Array.from({ length: Math.min(ROWS_PER_STEP, map.rows - at) }, (_, i) => at + i);
        map.readRows(rows, 0, map.columns, mean.subarray(at * map.columns));
        yield (done + at / map.rows) / missing.length;
      }
      this.means.set(name, mean);
    }
  }

  /**
   * Attention rollout (Abnar and Zuidema 2020) of a token of the last layer, or of the entire image: one number per
   * input
   * token, with a sum of 1. `prepare` must be complete.
   * @param {RolloutQuery} query a token of the encoder, or the query of a label @returns {Float64Array}
   */
  rollout(query) {
    let row = this.initialRow(query);
    for (const name of [...this.blocks].reverse()) row = throughLayer(row, this.means.get(name));
    return row;
  }

  /** The query as a distribution over the encoder's output tokens. @param {RolloutQuery} query */
  initialRow(query) {
    const row = new Float64Array(this.tokens);
    const first = this.image.first.image;
    if (query && "token" in query) row[query.token] = 1;
    else if (query && "label" in query) row.set(this.labelQueryRow(query.label), first);
    else if (this.image.read) for (const token of this.image.read) row[token] = 1 / this.image.read.length;
    else if (this.pooler) row.set(this.means.get(this.pooler).subarray(0, this.count), first);
    else row.fill(1 / this.count, first);
    return row;
  }

  /** The distribution over patches of a label's query, through the segmenter's layers. @param {number} label */
  labelQueryRow(label) {
    const first = this.image.first.labels;
    /** @type {Float64Array} */
    let row = new Float64Array(first + this.count);
    row[label] = 1;
    for (const name of [...this.segmenter].reverse()) row = throughLayer(row, this.means.get(name));
    // Keep the patches only, not the label queries.
    const drawn = row.subarray(first);
    const sum = drawn.reduce((total, share) => total + share, 0);
    return drawn.map((share) => share / sum);
  }
}
