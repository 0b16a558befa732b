/** The model of a page on the side of the page: starts the worker that runs it, and reads its tensors. */

/* Weights of a page's model: float32, float16, or int8 with a float16 scale per 32 numbers of a row. */

/** @typedef {import("./graph_runner.js").Tensor} Tensor */

/** Numbers of a row that share a scale. */
const GROUP_SIZE = 32;

/** @param {{shape: number[], type: string, at: number}[]} headers @param {ArrayBuffer} buffer @returns {Tensor[]} */
export function readTensors(headers, buffer) {
  return headers.map(({ shape, type, at }) => {
    const size = shape.reduce((product, n) => product * n, 1);
    if (type === "float32") return { data: new Float32Array(buffer, at, size), shape };
    if (type === "float16") return { data: decodeFloat16(new Uint16Array(buffer, at, size)), shape };
    const width = size / shape[0];
    const groups = shape[0] * Math.ceil(width / GROUP_SIZE);
    const scales = decodeFloat16(new Uint16Array(buffer, at, groups));
    const numbers = new Int8Array(buffer, at + 2 * groups, size);
    const data = new Float32Array(size);
    for (let row = 0, i = 0, group = 0; row < shape[0]; row++) {
      for (const end = i + width; i < end; group++)
        for (const stop = Math.min(end, i + GROUP_SIZE); i < stop; i++) data[i] = numbers[i] * scales[group];
    }
    return { data, shape };
  });
}

/** @param {Uint16Array} halves @returns {Float32Array} */
function decodeFloat16(halves) {
  const data = new Float32Array(halves.length);
  const bits = new Uint32Array(data.buffer);
  for (let i = 0; i < halves.length; i++) {
    const exponent = (halves[i] >> 10) & 31;
    const fraction = halves[i] & 1023;
    const sign = halves[i] >> 15;
    if (exponent === 0) data[i] = (sign ? -1 : 1) * fraction * 2 ** -24;
    else bits[i] = ((sign << 31) | ((exponent === 31 ? 255 : exponent + 112) << 23) | (fraction << 13)) >>> 0;
  }
  return data;
}

/* The model in a saved page: sends the page's requests to a worker. */

/** @typedef {import("../core/host.js").ModelResponse} ModelResponse */

/**
 * What the model of a page adds to its values: the names of its inputs, and a function that sends requests. Empty if
 * the
 * page has no model.
 * @param {any} scene header of the page's own scene @param {(base64: string) => ArrayBuffer} decode
 * @returns {Record<string, any>}
 */
export function readPageModel(scene, decode) {
  const element = document.getElementById("model");
  if (!element) return {};
  const { fields, precision, change, head, tensors } = JSON.parse(element.textContent);
  const read = (/** @type {string} */ id) => document.getElementById(id).textContent.trim();
  /** @type {Map<number, {resolve: (response: ModelResponse) => void, reject: (error: Error) => void}>} */
  const waiting = new Map();
  let count = 0;
  /** @type {Worker | undefined} */
  let worker;
  const start = () => {
    if (worker) return worker;
    // The script of the page, as a classic script: browsers load no module from the address of a local file.
    const script = document.querySelector('script[type="module"]').textContent.replace(/^export default/m, "");
    const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    worker = new Worker(address);
    worker.onmessage = ({ data: { id, body, blobs, error } }) => {
      const { resolve, reject } = waiting.get(id);
      waiting.delete(id);
      if (error) reject(new Error(error));
      else resolve({ body, blob: async (/** @type {number} */ n) => blobs[n] });
    };
    worker.onerror = () => {
      for (const { reject } of waiting.values())
        reject(new Error("The model in this page could not be started. Open the page in a current browser."));
      waiting.clear();
    };
    worker.postMessage({ model: read("model-header"), weights: read("model-weights"), template: scene });
    return worker;
  };
  setTimeout(start, 200); // after the first drawing
  /** @param {any} request @returns {Promise<ModelResponse>} */
  const request = (request) =>
    new Promise((resolve, reject) => {
      waiting.set((count += 1), { resolve, reject });
      start().postMessage({ id: count, request });
    });
  /** @type {ReturnType<typeof readTensors>} */
  let all;
  const modelTensor = (/** @type {number} */ index) =>
    (all ??= readTensors(tensors, decode(read("model-weights"))))[index];
  return { fields, request, model_note: describeRounding(precision, change, head), model_tensor: modelTensor };
}

/**
 * @param {string} precision @param {number | null} change of the page's own output @param {string} head of the model
 */
function describeRounding(precision, change, head) {
  const outputs = head === "none" ? "numbers of the embedding" : "log-probabilities";
  const effect =
    change === null
      ? ""
      : ` Rounding them changed the ${outputs} on the original input by at most ${change.toPrecision(2)}.`;
  return `The model runs in this page, with ${precision} weights.${effect}`;
}
