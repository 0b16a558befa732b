/** Scenes of images that the reader opens: regard/viewer/page/image_scene.py, without the rollouts of labels. */

import { labelScores } from "./experiments.js";
import { topIndices } from "./search.js";
import { rowEntropy } from "../weights/maths.js";

/**
 * @typedef {import("./page_engine.js").PageEngine} PageEngine
 * @typedef {import("./page_engine.js").Look} Look
 */

/** Number of labels that a scene lists. */
const MAX_LABELS = 5;

/**
 * Runs the model on the pixels of an image.
 * @param {PageEngine} engine @param {{image: string, pixels: Uint8Array}} request name of the image, and its pixels (H, W, C) at the size of the
 * page's own image @param {any} template header of the page's own scene
 * @returns {{body: any, blobs: ArrayBuffer[]}}
 */
export function lookAtPixels(engine, { image: name, pixels }, template) {
  const [, channels, height, width] = engine.image.shape;
  if (pixels?.length !== height * width * channels) throw new Error(`The image must have ${height} × ${width} pixels with ${channels} channels.`);
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
    answer: labels.length && "probability" in labels[0] ? `${labels[0].name}, ${(100 * labels[0].probability).toFixed(1)} %` : "",
    labels,
    mask: mask && { ...addBytes(labelsOfPixels(engine, look), [height, width], mask.type), colors: mask.colors },
  };
  const title = image.answer ? `${name}: ${labels[0].name}, ${(100 * labels[0].probability).toFixed(0)} %` : name;
  const initial = { ...template.initial, ...(mask ? {} : sharpestImageHead(engine, look, template)), token: null, label: null };
  const explained = template.explained && {
    ...template.explained,
    ...Object.fromEntries(template.explained.measures.map((/** @type {string} */ measure) => [measure, null])),
    steps: [[0, 0, labels[0].number]],
    tokens: [labels[0].name],
  };
  return { body: { scene: { ...scene, title, initial, image, explained, images: [] } }, blobs };
}

/** The most likely labels; of a segmenter, all labels. @param {PageEngine} engine @param {Look} look @returns {any[]} */
function readLabels(engine, { pass: { logits } }) {
  const { head, labels } = engine.header;
  if (head !== "classify") return labels.map((/** @type {string} */ name, /** @type {number} */ number) => ({ number, name }));
  const scores = labelScores(engine, logits[0]);
  return labels.length ? topIndices(scores, MAX_LABELS).map((number) => ({ number, name: labels[number], probability: scores[number] })) : [];
}

/** The most likely label of each pixel. @param {PageEngine} engine @param {Look} look */
function labelsOfPixels(engine, { pass: { output } }) {
  const count = output.shape[1];
  const size = output.data.length / count;
  const best = new (count <= 256 ? Uint8Array : Uint16Array)(size);
  for (let label = 1; label < count; label++) {
    for (let i = 0; i < size; i++) if (output.data[label * size + i] > output.data[best[i] * size + i]) best[i] = label;
  }
  return best;
}

/** The head whose query of the image (or, without one, mean query) attends to the fewest patches. @param {PageEngine} engine @param {Look} look @param {any} template */
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
      for (const t of averaged) for (let s = 0; s < patches; s++) weights[s] += data[(head * rows + t) * keys + keys - patches + s];
      const total = weights.reduce((sum, x) => sum + x, 0);
      const entropy = rowEntropy(weights.map((x) => x / total));
      if (entropy < best.entropy) best = { attention, head, entropy };
    }
  }
  return { attention: best.attention, head: best.head };
}
