/** The model of a page: runs graphs on new input, and answers the requests of a page like regard/viewer/page. */

import { makeEdits, needsForward, runExperiment, sceneOutput } from "./experiments.js";
import { explain } from "./explanations.js";
import { GraphRunner, MatrixKernel } from "./graph_runner.js";
import { readTensors } from "./host.js";
import {
  buildTrace,
  directionOf,
  lookAtPixels,
  lookAtQuestion,
  sharpestQuestionHead,
  surround,
  textAxis,
} from "./scenes.js";
import {
  beamSearch,
  CachedDecoder,
  idsTensor,
  meanOverHeads,
  rowsOf,
  searchHeader,
  seededRandom,
  stepwiseSearch,
  TokenConstraints,
  UncachedDecoder,
} from "./search.js";
import { PageTokenizer } from "./tokenizer.js";
import { mutualInformation } from "../weights/maths.js";

/**
 * @typedef {import("./graph_runner.js").Tensor} Tensor
 * @typedef {import("./experiments.js").Intervention} Intervention
 * @typedef {import("./scenes.js").Question} Question
 * @typedef {import("./search.js").SearchOptions} SearchOptions
 * @typedef {import("./scenes.js").Axis} Axis
 * @typedef {{name: string, kind: string, heads: number, rows: string, columns: string}} AttentionHeader
 * @typedef {{output: Tensor, logits: Float32Array[], values: Map<number, Tensor[]>}} Pass the output of `forward`, its
 * rows, and
 * recorded values by slot
 * @typedef {{source: string, target: string, ids: number[][], axes: Record<string, Axis>, pass: Pass,
 *   search: import("./search.js").SearchResult | null, options: SearchOptions, question?: Question}} Look a run of the
 * model on one
 * input
 */

const MAX_TITLE = 100;
/** Tokens of a text up to which each is masked in turn (masked language models). */
const MAX_MASKED_TOKENS = 32;
const MASK_TOKEN = "<mask>";

export class PageEngine {
  /**
   * @param {any} header of the model (regard/viewer/page/model.py) @param {ArrayBuffer} weights
   * @param {boolean} [fast] whether to use WebAssembly
   */
  constructor(header, weights, fast = true) {
    this.header = header;
    this.special = /** @type {import("./search.js").SpecialTokens} */ (header.special);
    this.tensors = readTensors(header.tensors, weights);
    const kernel = new MatrixKernel(fast);
    /** @type {import("./search.js").Graphs} */
    this.graphs = Object.fromEntries(
      Object.entries(header.graphs).map(([name, graph]) => [
        name,
        { runner: new GraphRunner(graph, this.tensors, kernel), parts: graph },
      ]),
    );
    const tokenizers = header.tokenizers.map((/** @type {any} */ one) => new PageTokenizer(one));
    this.sourceTokenizer = tokenizers[0];
    this.targetTokenizer = tokenizers[tokenizers.length - 1];
    this.isTranslator = header.kind === "Translator";
    this.isGenerator = header.kind === "TextGenerator";
    /**
     * The input of an image model: the image of the page, or the last one that the reader opened. @type {Tensor | null}
     */
    this.image = header.image === undefined ? null : this.tensors[header.image];
    const { attentions } = header.graphs.forward;
    /**
     * Slots of each map: the calls of a module that layers share are separate maps.
     * @type {Map<string, import("./experiments.js").AttentionPart>}
     */
    this.maps = new Map();
    for (const part of attentions) {
      const calls = attentions.filter((/** @type {any} */ one) => one.attention === part.attention);
      this.maps.set(calls.length === 1 ? part.attention : `${part.attention}.${calls.indexOf(part)}`, part);
    }
  }

  // Tokens

  /** Surrounds ids with the special tokens of an input. @param {number[]} ids */
  addSpecialTokens(ids) {
    const [prefix, suffix] = this.surroundings;
    return [...prefix, ...ids, ...suffix];
  }

  /** The special tokens before and after an input. @returns {number[][]} */
  get surroundings() {
    const { begin, end, after_end: afterEnd = null } = this.special;
    return [[begin], [end, afterEnd]].map((ids) => ids.filter((id) => id !== null));
  }

  /** @param {number[]} ids @returns {number[]} */
  decoderInput(ids) {
    return [this.special.sos, ...(this.special.forced === null ? [] : [this.special.forced]), ...ids];
  }

  /**
   * @param {string} text @param {PageTokenizer} tokenizer @param {string} name of the text in an error
   * @param {number} added number of special tokens
   */
  encode(text, tokenizer, name, added) {
    const ids = this.encodeMasks(text, tokenizer);
    const limit = this.header.length_limit === null ? Infinity : this.header.length_limit - added;
    if (ids.length > limit)
      throw new Error(`The ${name} has ${ids.length} tokens; the model supports at most ${limit}. Shorten it.`);
    return ids;
  }

  /**
   * Ids of a text; in that of a masked language model, <mask> is the mask token. @param {string} text
   * @param {PageTokenizer} tokenizer @returns {number[]}
   */
  encodeMasks(text, tokenizer) {
    const { mask } = this.special;
    const parts = this.header.head === "mask" && mask !== null ? text.split(MASK_TOKEN) : [text];
    // The space before a mask belongs to the masked word; it is not a separate token.
    return parts.flatMap((part, i) => [
      ...(i ? [mask] : []),
      ...tokenizer.encode(i < parts.length - 1 ? part.replace(/ +$/, "") : part).ids,
    ]);
  }

  /** Ids of a forced beginning of the output. @param {string} prefix @param {number} added number of special tokens */
  encodePrefix(prefix, added) {
    const ids = this.encode(prefix, this.targetTokenizer, "prefix", added);
    if (ids.includes(this.special.unk))
      throw new Error(
        `The prefix “${prefix}” has words or characters that the vocabulary of the model lacks. Use others, or leave them out.`,
      );
    return ids;
  }

  /** @param {string} source */
  encodeSource(source) {
    if (!source.trim()) throw new Error("The text is empty: there is nothing to look at. Enter a sentence.");
    const added = this.isTranslator
      ? Math.max(this.addSpecialTokens([]).length, this.decoderInput([]).length)
      : this.addSpecialTokens([]).length;
    const ids = this.addSpecialTokens(
      this.encode(source, this.sourceTokenizer, this.isTranslator ? "source" : "text", added),
    );
    if (!ids.length) throw new Error("The text has no tokens. Enter a sentence.");
    return ids;
  }

  // Runs of the model

  /**
   * Runs an image model on its image. @param {string} name @param {Intervention[]} changes @param {any} axes
   * @returns {Look}
   */
  lookAtImage(name, changes, axes) {
    const pass = this.forward([], this.recordedSlots, changes);
    return { source: name, target: "", ids: [], axes, pass, search: null, options: this.header.search };
  }

  /**
   * @param {number[][]} ids inputs of `forward` @param {Set<number>} recorded @param {Intervention[]} changes
   * @param {import("./graph_runner.js").Edits} [edits] other changes of the graph @returns {Pass}
   */
  forward(ids, recorded, changes, edits) {
    const { runner, parts } = this.graphs.forward;
    /** @type {Record<string, Tensor>} */
    const inputs = {};
    if (this.image) inputs.image = this.image;
    // A single text is one segment.
    else runner.json.inputs.forEach(({ name }, i) => (inputs[name] = idsTensor(ids[i] ?? ids[0].map(() => 0))));
    const { outputs, values } = runner.run(inputs, recorded, edits ?? makeEdits(/** @type {any} */ (parts), changes));
    return { output: outputs.output, logits: rowsOf(outputs.output), values };
  }

  /**
   * A text with each token masked in turn; null if it is long or contains masked tokens. @param {number[]} ids
   * @returns {number[][] | null}
   */
  maskedInputs(ids) {
    const { mask } = this.special;
    if (mask === null || mask === undefined || ids.includes(mask) || ids.length > MAX_MASKED_TOKENS) return null;
    return ids.map((_, i) => ids.map((id, j) => (i === j ? mask : id)));
  }

  /**
   * @param {number[]} source ids @param {Intervention[]} changes @param {SearchOptions} options
   * @param {number[]} prefix forced beginning @returns {import("./search.js").SearchResult}
   */
  search(source, changes, options, prefix) {
    const { constraints } = this.searchInput(source, options, prefix);
    const editsOf = (/** @type {string} */ name) => makeEdits(/** @type {any} */ (this.graphs[name].parts), changes);
    const forward = (/** @type {number[]} */ ids) =>
      this.forward(this.isTranslator ? [source, ids] : [ids], new Set(), changes).logits;
    const decoder = needsForward(changes)
      ? new UncachedDecoder(forward, this.isTranslator ? [] : source)
      : new CachedDecoder(this.graphs, source, editsOf);
    if (options.method === "beam") return beamSearch(decoder, options, constraints);
    return stepwiseSearch(decoder, options, constraints, seededRandom(options.seed));
  }

  /** The constraints of a search. @param {number[]} source @param {SearchOptions} options @param {number[]} prefix */
  searchInput(source, options, prefix) {
    const { length_limit: total } = this.header;
    let limit = Math.min(options.max_len, Math.floor(options.max_extra + options.max_ratio * source.length));
    if (this.isTranslator) prefix = [...this.decoderInput([]).slice(1), ...prefix];
    if (total !== null) limit = Math.min(limit, this.isTranslator ? total - 1 : Math.max(0, total - source.length));
    return {
      constraints: new TokenConstraints(options, this.special, limit, prefix, this.isTranslator ? null : source),
      prefix,
    };
  }

  /**
   * Runs the model on an input; a translator translates it, or reads the target.
   * @param {string} source
   * @param {{target?: string | null, prefix?: string, changes?: Intervention[], options?: Partial<SearchOptions>,
   * context?: string | null}} [request]
   * @returns {Look}
   */
  look(source, { target = null, prefix = "", changes = [], options: changed = {}, context = null } = {}) {
    if (context?.trim()) return lookAtQuestion(this, source, context, changes);
    const options = { ...this.header.search, ...changed };
    const ids = this.encodeSource(source);
    const recorded = this.recordedSlots;
    const [head, tail] = this.surroundings.map((ids) => ids.length);
    const last = ids.length - tail;
    const inner = textAxis(this.sourceTokenizer, source, ids.slice(head, last));
    const labels = (/** @type {number[]} */ list, tokenizer = this.sourceTokenizer) =>
      list.map((id) => tokenizer.label(id));
    const axis = surround(inner, labels(ids.slice(0, head)), labels(ids.slice(last)));
    if (!this.isTranslator) {
      const query = { tokens: ["query"], words: [-1], entries: {} };
      return {
        source,
        target: "",
        ids: [ids],
        axes: { text: axis, query },
        pass: this.forward([ids], recorded, changes),
        search: null,
        options,
      };
    }
    const added = Math.max(this.addSpecialTokens([]).length, this.decoderInput([]).length);
    let search = null;
    let targetIds;
    if (target !== null) targetIds = this.encode(target, this.targetTokenizer, "translation", added);
    else {
      search = this.search(ids, changes, options, prefix ? this.encodePrefix(prefix, added) : []);
      targetIds = search.results[0].ids.slice(this.decoderInput([]).length - 1);
      target = this.targetTokenizer.decode(targetIds);
    }
    const forced = labels(this.decoderInput([]), this.targetTokenizer);
    const targetAxis = textAxis(this.targetTokenizer, target, targetIds);
    const axes = {
      source: axis,
      target: surround(targetAxis, forced),
      predicted: surround(targetAxis, forced.slice(1), labels([this.special.eos], this.targetTokenizer)),
    };
    const inputs = [ids, this.decoderInput(targetIds)];
    return { source, target, ids: inputs, axes, pass: this.forward(inputs, recorded, changes), search, options };
  }

  /** Slots of the queries, keys, biases and weights of all attentions. */
  get recordedSlots() {
    return new Set(
      [...this.maps.values()].flatMap(({ q, k, biasValue, weights }) => [
        q,
        k,
        weights,
        ...(biasValue === null ? [] : [biasValue]),
      ]),
    );
  }

  /** The weights of a map (1, H, T, S). @param {Pass} pass @param {string} name @returns {Tensor} */
  weightsOf({ values }, name) {
    const calls = values.get(this.maps.get(name).weights);
    const [, heads, , keys] = calls[0].shape;
    return { data: joinQueries(calls), shape: [1, heads, calls.reduce((sum, { shape }) => sum + shape[2], 0), keys] };
  }

  // Scenes

  /**
   * The scene of a look, and its arrays. @param {Look} look @param {any} template header of the page's own scene
   * @returns {{scene: any, blobs: ArrayBuffer[]}}
   */
  buildScene(look, template) {
    /** @type {ArrayBuffer[]} */
    const blobs = [];
    /** @param {Float32Array | null} data @param {number[]} shape */
    const addBlob = (data, shape) => {
      if (!data) return null;
      blobs.push(
        /** @type {ArrayBuffer} */ (data.byteLength === data.buffer.byteLength ? data.buffer : data.slice().buffer),
      );
      return { at: blobs.length - 1, shape, type: "float32" };
    };
    const attentions = this.header.attentions.map((/** @type {AttentionHeader} */ one) => {
      const { q, k, w, biasValue } = this.maps.get(one.name);
      const { values } = look.pass;
      const queries = values.get(q);
      const [key] = values.get(k);
      const [heads, keys, width] = key.shape.slice(1);
      const count = queries.reduce((sum, { shape }) => sum + shape[2], 0);
      const vector = w === null ? null : expandHeads(this.tensors[w], one.heads);
      const bias = biasValue === null ? null : biasByDistance(values.get(biasValue)[0], one.heads, count, keys);
      return {
        ...one,
        q: addBlob(queriesFirst({ data: joinQueries(queries), shape: [1, one.heads, count, width] }), [
          count,
          one.heads,
          width,
        ]),
        k: addBlob(queriesFirst(key), [keys, heads, width]),
        w: addBlob(vector, [one.heads, width]),
        bias: addBlob(bias, [one.heads, count + keys - 1]),
      };
    });
    const used = new Set(attentions.flatMap((/** @type {AttentionHeader} */ one) => [one.rows, one.columns]));
    const sides = Object.fromEntries(
      Object.entries(look.axes)
        .filter(([name]) => used.has(name))
        .map(([name, axis]) => [
          name,
          { title: template.sides[name]?.title ?? name, ...axis, direction: directionOf(axis) },
        ]),
    );
    const title = [look.source.trim(), look.target.trim()].filter(Boolean).join("  →  ");
    const scene = {
      ...Object.fromEntries(Object.keys(template).map((part) => [part, null])),
      format: template.format,
      title: title.length <= MAX_TITLE ? title : `${title.slice(0, MAX_TITLE - 1)}…`,
      model: template.model,
      texts: { source: look.source, target: look.target, ...(look.question ? { context: look.question.context } : {}) },
      initial: look.question ? sharpestQuestionHead(this, look) : null,
      sides,
      attentions,
      trace: buildTrace(this, look),
      decode: null,
    };
    if (look.search) {
      const { options } = look;
      const { constraints, prefix } = this.searchInput(look.ids[0], options, []);
      const source = look.axes.source.tokens.map((token, i) => token || this.sourceTokenizer.label(look.ids[0][i]));
      const tree = searchHeader(look.search, options, this.targetTokenizer, {
        eos: this.special.eos,
        limit: constraints.limit,
        prefix,
        source,
        attention: this.sharpestCross(look.pass),
      });
      scene.decode = { ...tree.header, weights: tree.weights && addBlob(tree.weights.data, tree.weights.shape) };
    }
    return { scene, blobs };
  }

  /**
   * The cross-attention with the largest mutual information of query and key. @param {Pass} pass
   * @returns {string | null}
   */
  sharpestCross(pass) {
    const names = [...this.maps].filter(([, { kind }]) => kind === "cross").map(([name]) => name);
    const measures = names.map((name) => {
      const rows = meanOverHeads(this.weightsOf(pass, name));
      return mutualInformation(Float32Array.from(rows.flatMap((row) => [...row])), rows.length, rows[0].length);
    });
    return names.length ? names[measures.indexOf(Math.max(...measures))] : null;
  }
}

/** Concatenates values (1, H, T, D) of several calls along T. @param {Tensor[]} calls @returns {Float32Array} */
function joinQueries(calls) {
  if (calls.length === 1) return calls[0].data;
  const [, heads, , width] = calls[0].shape;
  const total = calls.reduce((sum, { shape }) => sum + shape[2], 0);
  const out = new Float32Array(heads * total * width);
  let row = 0;
  for (const { data, shape } of calls) {
    const size = shape[2] * width;
    for (let h = 0; h < heads; h++) out.set(data.subarray(h * size, (h + 1) * size), (h * total + row) * width);
    row += shape[2];
  }
  return out;
}

/** From (1, H, T, D) to (T, H, D). @param {Tensor} x @returns {Float32Array} */
function queriesFirst({ data, shape: [, heads, count, width] }) {
  const out = new Float32Array(heads * count * width);
  for (let h = 0; h < heads; h++)
    for (let t = 0; t < count; t++)
      out.set(data.subarray((h * count + t) * width, (h * count + t + 1) * width), (t * heads + h) * width);
  return out;
}

/**
 * The vector of the score concat for each head. @param {Tensor} w (H, D, 1), or (D, 1) for all heads
 * @param {number} heads @returns {Float32Array}
 */
function expandHeads({ data, shape }, heads) {
  if (shape.length === 3) return Float32Array.from(data);
  const out = new Float32Array(heads * data.length);
  for (let h = 0; h < heads; h++) out.set(data, h * data.length);
  return out;
}

/**
 * A relative bias (H, T, S) as a number per head and distance: index s − t + T − 1. @param {Tensor} bias
 * @param {number} heads @param {number} queries @param {number} keys @returns {Float32Array}
 */
function biasByDistance({ data }, heads, queries, keys) {
  const count = queries + keys - 1;
  const out = new Float32Array(heads * count);
  for (let h = 0; h < heads; h++) {
    for (let i = 0; i < count; i++) {
      const t = Math.max(0, queries - 1 - i);
      out[h * count + i] = data[(h * queries + t) * keys + i - (queries - 1) + t];
    }
  }
  return out;
}

/**
 * Responds to a request of a page, like regard/viewer/page/requests.py.
 * @param {PageEngine} engine @param {any} template header of the page's own scene @param {any} request
 * @returns {{body: any, blobs: ArrayBuffer[]}}
 */
export function respond(engine, template, request) {
  if (request.look && engine.image) return lookAtPixels(engine, request.look, template);
  if (request.look) {
    const { source, target, context, search } = request.look;
    const look = engine.look(source, { target: target?.trim() ? target : null, context, options: search });
    const { scene, blobs } = engine.buildScene(look, template);
    return { body: { scene: { ...scene, ...sceneOutput(engine, look) } }, blobs };
  }
  if (request.experiment) return { body: runExperiment(engine, request.experiment, template), blobs: [] };
  if (request.explain) return { body: explain(engine, request.explain), blobs: [] };
  throw new Error("Unsupported request. Supported: look, experiment, explain.");
}
