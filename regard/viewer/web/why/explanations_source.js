/** Explanations of a scene's output: from the scene, or requested from the model in parts, so that other requests are served too. */

/**
 * @typedef {import("../core/host.js").Host} Host
 * @typedef {Record<string, number[][]>} Effects by attention, a row per head, a column per step
 * @typedef {{layers: number, tokens: string[], targets: number[], own: number[][], columns: number[][][], probabilities: number[][][],
 *   names: Record<string, string>}} Lens by layer and position
 * @typedef {Record<string, number[][]>} Attributions by side, a row per step, a column per input token
 * @typedef {(done: number) => void} Progress receives the completed fraction
 */

/** Input tokens per request to the model in the page. */
const TOKENS_PER_REQUEST = 4;

/** Methods of attribution. */
export const ATTRIBUTIONS = { gradient: "Gradient × input", integrated_gradients: "Integrated gradients", occlusion: "Occlusion" };

/** @type {WeakMap<any, ExplanationSource>} */
const sources = new WeakMap();

export class ExplanationSource {
  /** The source of a host's scene. @param {Host} host @returns {ExplanationSource} */
  static of(host) {
    if (!sources.has(host.scene)) sources.set(host.scene, new ExplanationSource(host));
    return sources.get(host.scene);
  }

  /** @param {Host} host */
  constructor(host) {
    this.host = host;
    this.explained = host.scene.explained;
    /** @type {Map<string, Promise<any>>} */
    this.found = new Map();
  }

  /** Whether a measure is in the scene or can be requested. @param {string} measure */
  has(measure) {
    return Boolean(this.explained?.measures.includes(measure) && (this.explained[measure] || this.host.request));
  }

  /** The methods of attribution that this page has: a saved page those in the scene, a model in the page no autograd. */
  get methods() {
    return Object.keys(ATTRIBUTIONS).filter((method) => method === "gradient" || (this.host.request && (method === "occlusion" || !this.host.modelTensor)));
  }

  /** Whether the model has a measure. @param {string} measure */
  supports(measure) {
    return Boolean(this.explained?.measures.includes(measure));
  }

  /** Whether attributions are computed by central differences, in the page. */
  get usesDifferences() {
    return !this.explained.attribution && this.host.modelTensor !== undefined;
  }

  /** @param {string} measure @param {(progress: Progress) => Promise<any>} compute @param {Progress} progress */
  once(measure, compute, progress) {
    if (this.explained[measure]) return Promise.resolve(this.explained[measure]);
    if (!this.found.has(measure)) {
      const result = compute(progress);
      this.found.set(measure, result);
      // A failed request may be repeated.
      result.catch(() => this.found.delete(measure));
    }
    return this.found.get(measure);
  }

  /** @param {Record<string, any>} request @returns {Promise<any>} */
  async request(request) {
    const { inputs, steps } = this.explained;
    const { body } = await this.host.request({ explain: { inputs, steps, source: this.host.scene.texts.source, ...request } });
    return body[request.measure];
  }

  /** @param {Progress} progress @returns {Promise<Effects>} */
  effects(progress) {
    return this.once(
      "effects",
      async (progress) => {
        const { attentions } = this.host.scene;
        const effects = {};
        for (const [i, { name }] of attentions.entries()) {
          Object.assign(effects, await this.request({ measure: "effects", attention: name }));
          progress((i + 1) / attentions.length);
        }
        return effects;
      },
      progress,
    );
  }

  /** @returns {Promise<Lens>} */
  lens() {
    return this.once("lens", () => this.request({ measure: "lens" }), () => {});
  }

  /** @param {string} method @param {Progress} progress @returns {Promise<Attributions>} */
  attribution(method, progress) {
    return this.once(
      method === "gradient" ? "attribution" : method,
      async (progress) => {
        if (!this.host.modelTensor) return this.request({ measure: "attribution", method });
        const { inputs, steps } = this.explained;
        const sides = inputs[0].length === 2 ? ["source", "target"] : ["text"];
        const lengths = sides.map((_, side) => Math.max(...inputs.map((/** @type {number[][]} */ ids) => ids[side].length)));
        const total = lengths.reduce((sum, length) => sum + length, 0);
        /** @type {Attributions} */
        const found = Object.fromEntries(sides.map((side) => [side, steps.map(() => [])]));
        let done = 0;
        for (const [i, side] of sides.entries()) {
          for (let from = 0; from < lengths[i]; from += TOKENS_PER_REQUEST) {
            const to = Math.min(lengths[i], from + TOKENS_PER_REQUEST);
            const part = await this.request({ measure: "attribution", method, side, tokens: [from, to] });
            part[side].forEach((/** @type {number[]} */ row, /** @type {number} */ step) => found[side][step].push(...row));
            done += to - from;
            progress(done / total);
          }
        }
        return found;
      },
      progress,
    );
  }
}
