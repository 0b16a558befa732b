/** Scenes of new input, as regard/viewer/page builds them: axes of texts, questions, images, traces. */

import { labelScores } from "./experiments.js";
import { resolveSizes } from "./graph_runner.js";
import { logSoftmax, topIndices } from "./search.js";
import { isSpace } from "./tokenizer.js";
import { mutualInformation, rowEntropy } from "../weights/maths.js";

/* Axes of attention maps: the tokens of a text and the word that each belongs to (regard/viewer/text_look.py). */

/**
 * @typedef {import("./tokenizer.js").PageTokenizer} PageTokenizer
 * @typedef {{tokens: string[], words: number[], entries: Record<string, string>}} Axis −1: the token belongs to no
 * word; `entries`: by
 * index, the entry of the vocabulary where it differs from the token
 */

const RIGHT_TO_LEFT =
  /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Samaritan}\p{Script=Mandaic}\p{Script=Adlam}]/u;

/** @param {PageTokenizer} tokenizer @param {string} text @param {number[]} ids @returns {Axis} */
export function textAxis(tokenizer, text, ids) {
  const all = tokenizer.encode(text).ids;
  let tokens;
  let pieces;
  const start = [0, all.length - ids.length].find((from) => from >= 0 && ids.every((id, i) => all[from + i] === id));
  if (start !== undefined) {
    pieces = tokenizer.encodePieces(text).slice(start, start + ids.length);
    tokens = pieces.map((piece, i) => piece.text || tokenizer.names[ids[i]]);
  } else {
    // The model's own tokens, which differ from those of the text.
    text = tokenizer.decode(ids);
    pieces = tokenizer.decodePieces(ids);
    tokens = ids.map((id) => tokenizer.label(id));
  }
  const entries = Object.fromEntries(
    ids.map((id, i) => [i, tokenizer.names[id]]).filter(([i, entry]) => entry !== tokens[i]),
  );
  return { tokens, words: wordIndices(pieces, wordSpans(text)), entries };
}

/** Adds special tokens. @param {Axis} axis @param {string[]} before @param {string[]} [after] @returns {Axis} */
export function surround({ tokens, words, entries }, before, after = []) {
  const moved = Object.fromEntries(Object.entries(entries).map(([i, entry]) => [Number(i) + before.length, entry]));
  return {
    tokens: [...before, ...tokens, ...after],
    words: [...before.map(() => -1), ...words, ...after.map(() => -1)],
    entries: moved,
  };
}

/** Ranges of the words of a text, in code points. @param {string} text @returns {[number, number][]} */
function wordSpans(text) {
  /** @type {[number, number][]} */
  const spans = [];
  let wasSpace = true;
  [...text].forEach((char, i) => {
    const space = isSpace(char);
    if (!space && wasSpace) spans.push([i, i + 1]);
    else if (!space) spans[spans.length - 1][1] = i + 1;
    wasSpace = space;
  });
  return spans;
}

/** @param {{start: number, end: number}[]} pieces @param {[number, number][]} words */
function wordIndices(pieces, words) {
  return pieces.map(({ start, end }) => {
    const word = words.findIndex(([, stop]) => stop > start);
    return word >= 0 && words[word][0] < end ? word : -1;
  });
}

/** Writing direction, by the first letter. @param {Axis} axis */
export function directionOf({ tokens, words }) {
  const text = tokens.filter((_, i) => words[i] >= 0).join("");
  const [letter] = /\p{L}/u.exec(text) ?? [""];
  return RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}

/*
 * Questions about a context: the input of a question-answering model, and its answer
 * (regard/data/text/examples/questions.py).
 */

/**
 * @typedef {import("./model.js").PageEngine} PageEngine
 * @typedef {import("./model.js").Look} Look
 * @typedef {import("./experiments.js").Intervention} Intervention
 * @typedef {{context: string, rows: [number, number], columns: [number, number]}} Question the context, and the
 * positions of the
 * question and of the context in the input
 */

/** Maximum number of tokens of an answer. */
const MAX_ANSWER_TOKENS = 48;

/**
 * @param {PageEngine} engine @param {string} source the question @param {string} context
 * @param {Intervention[]} changes @returns {Look}
 */
export function lookAtQuestion(engine, source, context, changes) {
  if (!source.trim()) throw new Error("The question is empty. Enter a question.");
  const { sourceTokenizer: tokenizer, special } = engine;
  const [question, answers] = [source, context].map((text) => tokenizer.encode(text).ids);
  const between = special.between === null ? [] : [special.between];
  const end = special.end === null ? [] : [special.end];
  const before = engine.addSpecialTokens(question);
  const ids = [...before, ...between, ...answers, ...end];
  const { length_limit: limit } = engine.header;
  if (limit !== null && ids.length > limit)
    throw new Error(
      `The question with its context has ${ids.length} tokens; the model supports at most ${limit}. Shorten the context.`,
    );
  const head = special.begin === null ? 0 : 1;
  const first = before.length + between.length;
  const segments = ids.map((_, i) => (i < before.length ? 0 : 1));
  const pass = engine.forward([ids, segments], engine.recordedSlots, changes);
  const labels = (/** @type {number[]} */ list) => list.map((id) => tokenizer.label(id));
  const left = textAxis(tokenizer, source, question);
  const right = textAxis(tokenizer, context, answers);
  const shift = Math.max(-1, ...left.words) + 1;
  const start = surround(left, labels(ids.slice(0, head)), labels(ids.slice(head + question.length, first)));
  const moved = surround(
    { ...right, words: right.words.map((word) => (word < 0 ? word : word + shift)) },
    start.tokens,
    labels(end),
  );
  const axis = {
    ...moved,
    words: [...start.words, ...moved.words.slice(start.words.length)],
    entries: { ...start.entries, ...moved.entries },
  };
  const columns = /** @type {[number, number]} */ ([first, first + answers.length]);
  const target = extractAnswer(engine, context, pass.logits, columns);
  const rows = /** @type {[number, number]} */ ([head, head + question.length]);
  return {
    source,
    target,
    ids: [ids, segments],
    axes: { text: axis },
    pass,
    search: null,
    options: engine.header.search,
    question: { context, rows, columns },
  };
}

/**
 * The span of the context with the largest probabilities of start and end. @param {PageEngine} engine
 * @param {string} context @param {Float32Array[]} logits start and end score of each token
 * @param {[number, number]} columns
 */
function extractAnswer(engine, context, logits, [from, to]) {
  const [starts, ends] = [0, 1].map((i) => logSoftmax(Float32Array.from(logits, (row) => row[i])));
  const pieces = engine.sourceTokenizer.encodePieces(context);
  let best = { score: -Infinity, first: 0, last: -1 };
  for (let first = from; first < to; first++) {
    for (let last = first; last < Math.min(to, first + MAX_ANSWER_TOKENS); last++) {
      if (starts[first] + ends[last] > best.score)
        best = { score: starts[first] + ends[last], first: first - from, last: last - from };
    }
  }
  return best.last < 0 ? "" : [...context].slice(pieces[best.first].start, pieces[best.last].end).join("");
}

/**
 * The initial view: the attention, and its head, with the largest mutual information of question and context.
 * @param {PageEngine} engine @param {Look} look
 */
export function sharpestQuestionHead(engine, { pass, question }) {
  const [firstRow, lastRow] = question.rows;
  const [firstColumn, lastColumn] = question.columns;
  const [rows, columns] = [lastRow - firstRow, lastColumn - firstColumn];
  /** @param {import("./graph_runner.js").Tensor} weights @param {number[]} heads */
  const measure = ({ data, shape: [, , queries, keys] }, heads) => {
    const block = new Float32Array(rows * columns);
    for (let i = 0; i < block.length; i++) {
      const [t, s] = [firstRow + Math.floor(i / columns), firstColumn + (i % columns)];
      for (const h of heads) block[i] += data[(h * queries + t) * keys + s] / heads.length;
    }
    return mutualInformation(block, rows, columns);
  };
  const all = [...engine.maps.keys()].map((name) => ({ name, weights: engine.weightsOf(pass, name) }));
  const indices = (/** @type {number} */ count) => Array.from({ length: count }, (_, h) => h);
  const measures = all.map(({ weights }) => measure(weights, indices(weights.shape[1])));
  const { name, weights } = all[measures.indexOf(Math.max(...measures))];
  const heads = indices(weights.shape[1]).map((h) => measure(weights, [h]));
  return { attention: name, head: heads.indexOf(Math.max(...heads)), all: false };
}

/* Scenes of images that the reader opens: regard/viewer/page/image_scene.py, without the rollouts of labels. */

/** Number of labels that a scene lists. */
const MAX_LABELS = 5;

/**
 * Runs the model on the pixels of an image.
 * @param {PageEngine} engine
 * @param {{image: string, pixels: Uint8Array}} request name of the image, and its pixels (H, W, C) at the size of the
 * page's own image @param {any} template header of the page's own scene
 * @returns {{body: any, blobs: ArrayBuffer[]}}
 */
export function lookAtPixels(engine, { image: name, pixels }, template) {
  const [, channels, height, width] = engine.image.shape;
  if (pixels?.length !== height * width * channels)
    throw new Error(`The image must have ${height} × ${width} pixels with ${channels} channels.`);
  const data = new Float32Array(pixels.length);
  const size = height * width;
  for (let i = 0; i < size; i++) for (let c = 0; c < channels; c++) data[c * size + i] = pixels[i * channels + c] / 255;
  engine.image = { data, shape: engine.image.shape };
  const look = engine.lookAtImage(name, [], template.sides);
  const { scene, blobs } = engine.buildScene(look, template);
  /** @param {Uint8Array | Uint16Array} numbers @param {number[]} shape @param {string} type */
  const addBytes = (numbers, shape, type) => {
    blobs.push(/** @type {ArrayBuffer} */ (numbers.slice().buffer));
    return { at: blobs.length - 1, shape, type };
  };
  const { grid, patch, first, single_query: queries, read, mask } = template.image;
  const labels = readLabels(engine, look);
  const image = {
    ...{ grid, patch, first, single_query: queries, read },
    pixels: addBytes(pixels, [height, width, channels], "uint8"),
    answer:
      labels.length && "probability" in labels[0]
        ? `${labels[0].name}, ${(100 * labels[0].probability).toFixed(1)} %`
        : "",
    labels,
    mask: mask && { ...addBytes(labelsOfPixels(look), [height, width], mask.type), colors: mask.colors },
  };
  const title = image.answer ? `${name}: ${labels[0].name}, ${(100 * labels[0].probability).toFixed(0)} %` : name;
  const initial = {
    ...template.initial,
    ...(mask ? {} : sharpestImageHead(engine, look, template)),
    token: null,
    label: null,
  };
  const explained = template.explained && {
    ...template.explained,
    ...Object.fromEntries(template.explained.measures.map((/** @type {string} */ measure) => [measure, null])),
    steps: [[0, 0, labels[0].number]],
    tokens: [labels[0].name],
  };
  return { body: { scene: { ...scene, title, initial, image, explained, images: [] } }, blobs };
}

/**
 * The most likely labels; of a segmenter, all labels. @param {PageEngine} engine @param {Look} look @returns {any[]}
 */
function readLabels(engine, { pass: { logits } }) {
  const { head, labels } = engine.header;
  if (head !== "classify")
    return labels.map((/** @type {string} */ name, /** @type {number} */ number) => ({ number, name }));
  const scores = labelScores(engine, logits[0]);
  return labels.length
    ? topIndices(scores, MAX_LABELS).map((number) => ({ number, name: labels[number], probability: scores[number] }))
    : [];
}

/** The most likely label of each pixel. @param {Look} look */
function labelsOfPixels({ pass: { output } }) {
  const count = output.shape[1];
  const size = output.data.length / count;
  const best = new (count <= 256 ? Uint8Array : Uint16Array)(size);
  for (let label = 1; label < count; label++) {
    for (let i = 0; i < size; i++) if (output.data[label * size + i] > output.data[best[i] * size + i]) best[i] = label;
  }
  return best;
}

/**
 * The head whose query of the image (or, without one, mean query) attends to the fewest patches.
 * @param {PageEngine} engine @param {Look} look @param {any} template
 */
function sharpestImageHead(engine, { pass }, { image: { grid, single_query: queries }, initial }) {
  const single = Object.keys(queries).filter((name) => queries[name] !== null);
  const patches = grid[0] * grid[1];
  let best = { attention: initial.attention, head: initial.head, entropy: Infinity };
  for (const attention of single.length ? single : [initial.attention]) {
    const { data, shape } = engine.weightsOf(pass, attention);
    const [, heads, rows, keys] = shape;
    const averaged = single.length ? [0] : Array.from({ length: patches }, (_, i) => rows - patches + i);
    for (let head = 0; head < heads; head++) {
      const weights = new Float64Array(patches);
      for (const t of averaged)
        for (let s = 0; s < patches; s++) weights[s] += data[(head * rows + t) * keys + keys - patches + s];
      const total = weights.reduce((sum, x) => sum + x, 0);
      const entropy = rowEntropy(weights.map((x) => x / total));
      if (entropy < best.entropy) best = { attention, head, entropy };
    }
  }
  return { attention: best.attention, head: best.head };
}

/* The step-by-step view of a new input: the steps of the page's own trace, with other sizes (regard/viewer/trace). */

/** Tokens up to which a scene has a trace; named output tokens per position. */
const [MAX_TOKENS, TOP_TOKENS] = [64, 10];

/** @param {PageEngine} engine @param {Look} look @returns {any} the header of a trace, or null */
export function buildTrace(engine, look) {
  const template = engine.header.trace;
  if (!template || look.ids.some((ids) => ids.length > MAX_TOKENS)) return null;
  const names = engine.graphs.forward.runner.json.inputs.map(({ name }) => name);
  /** @type {Record<string, number[]>} */
  const inputs = Object.fromEntries(names.map((name, i) => [name, look.ids[i] ?? look.ids[0].map(() => 0)]));
  const sizes = Object.fromEntries(Object.entries(inputs).map(([name, ids]) => [name, ids.length]));
  const { steps, sections } = new Unrolling(template, sizes).run();
  const sides = Object.fromEntries(
    Object.keys(sizes)
      .filter((name) => look.axes[name])
      .map((name) => [name, { tokens: look.axes[name].tokens, words: look.axes[name].words }]),
  );
  return {
    sides,
    focus: sharpestHead(engine, look),
    names: outputNames(engine, look),
    note: template.note,
    sections,
    steps,
    inputs,
    params: null,
    outputs: null,
  };
}

/**
 * The steps of a template for inputs of some sizes, with a copy of the steps of a loop per token
 * (regard/viewer/trace/steps.py).
 */
class Unrolling {
  /** @param {any} template @param {Record<string, number>} sizes by name of the sequence */
  constructor(template, sizes) {
    this.template = template;
    this.sizes = sizes;
    /** @type {any[]} */
    this.steps = [];
    /** @type {any[]} */
    this.sections = [];
    /** Indices of the unrolled steps, by index of the template: one per position of a loop. @type {number[][]} */
    this.indices = template.steps.map(() => []);
  }

  run() {
    const { steps, loops } = this.template;
    const sections = new Map();
    for (let n = 0; n < steps.length; ) {
      const { loop } = steps[n];
      let end = n + 1;
      while (loop !== undefined && steps[end].loop === loop) end++;
      const count = loop === undefined ? 1 : this.sizes[loops[loop].side];
      for (let position = 0; position < count; position++) {
        const token = loop === undefined ? null : loops[loop].backward ? count - 1 - position : position;
        const own = token === null ? sections : new Map();
        for (let i = n; i < end; i++) this.append(i, position, token, own);
      }
      n = end;
    }
    return { steps: this.steps, sections: this.sections };
  }

  /**
   * @param {number} n index in the template @param {number} position @param {number | null} token of a loop
   * @param {Map<number, number>} sections by index in the template
   */
  append(n, position, token, sections) {
    const { loop, ...step } = this.template.steps[n];
    if (step.output && !sections.has(step.section)) {
      sections.set(step.section, this.sections.length);
      const section = this.template.sections[step.section];
      this.sections.push(token === null ? section : { ...section, token });
    }
    this.indices[n].push(this.steps.length);
    this.steps.push({
      ...step,
      id: token === null ? step.id : step.id.replace("{token}", token),
      section: step.output ? sections.get(step.section) : step.section,
      options: resolveSizes(step.options, { ...this.sizes, position }),
      inputs: step.inputs.flatMap((/** @type {any} */ input) => this.resolveInput(input, position)),
      output: step.output && {
        ...step.output,
        shape: step.output.shape.map(
          (/** @type {number} */ size, /** @type {number} */ i) => this.sizes[step.output.axes[i]] ?? size,
        ),
      },
    });
  }

  /** @param {any} input of a step of the template @param {number} position @returns {any} one or several inputs */
  resolveInput(input, position) {
    if (typeof input === "number") return this.indices[input].at(-1);
    if (input?.each !== undefined) return this.indices[input.each];
    if (input?.carried !== undefined) {
      const { initial, state } = this.template.loops[input.carried];
      return position ? this.indices[state][position - 1] : this.resolveInput(initial, 0);
    }
    return input?.input ? { ...input, shape: [1, this.sizes[input.input]] } : input;
  }
}

/**
 * Names of the columns of the last step: the most likely ones per row. @param {PageEngine} engine @param {Look} look
 * @returns {Record<number, string>}
 */
function outputNames(engine, { pass: { logits } }) {
  const { head, labels } = engine.header;
  if (head === "none" || head === "answer") return {};
  if (head === "classify")
    return Object.fromEntries(labels.map((/** @type {string} */ label, /** @type {number} */ i) => [i, label]));
  const columns = new Set(logits.flatMap((row) => topIndices(row, TOP_TOKENS)));
  return Object.fromEntries(
    engine.targetTokenizer.distinctNames(
      [...columns].sort((a, b) => a - b),
      true,
    ),
  );
}

/**
 * The initial selection: the sharpest attention and head, and the token with the sharpest weights.
 * @param {PageEngine} engine @param {Look} look
 */
function sharpestHead(engine, look) {
  const attentions = engine.header.attentions;
  if (!attentions.length) return { attention: null, head: 0 };
  const heads = attentions
    .filter(
      (/** @type {any} */ one, /** @type {number} */ _, /** @type {any[]} */ all) =>
        one.kind === "cross" || !all.some(({ kind }) => kind === "cross"),
    )
    .map((/** @type {any} */ header) => {
      const { data, shape } = engine.weightsOf(look.pass, header.name);
      const [, count, rows, columns] = shape;
      const size = rows * columns;
      const mean = new Float32Array(size).map(
        (_, i) => Array.from({ length: count }, (_, h) => data[h * size + i]).reduce((sum, x) => sum + x, 0) / count,
      );
      return { header, data, count, rows, columns, sharpness: mutualInformation(mean, rows, columns) };
    });
  const best = heads.reduce((/** @type {any} */ a, /** @type {any} */ b) => (b.sharpness > a.sharpness ? b : a));
  const { header, data, count, rows, columns } = best;
  const map = (/** @type {number} */ h) => data.subarray(h * rows * columns, (h + 1) * rows * columns);
  const measures = Array.from({ length: count }, (_, h) => mutualInformation(map(h), rows, columns));
  const head = measures.indexOf(Math.max(...measures));
  const { words } = look.axes[header.rows];
  const rowAt = (/** @type {number} */ t) => map(head).subarray(t * columns, (t + 1) * columns);
  const sharpness = words.map((word, t) => {
    if (word < 0 && words.some((one) => one >= 0)) return -1;
    return Math.log2(Math.max(rowAt(t).filter((/** @type {number} */ x) => x > 0).length, 1)) - rowEntropy(rowAt(t));
  });
  const row = sharpness.indexOf(Math.max(...sharpness));
  const focus = { attention: header.name, head };
  if (header.kind !== "cross") return { ...focus, [header.rows]: row };
  return { ...focus, target: row, [header.columns]: rowAt(row).indexOf(Math.max(...rowAt(row))) };
}
