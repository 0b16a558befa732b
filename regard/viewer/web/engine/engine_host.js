/** The model in a saved page: sends the page's requests to a worker. */

import { readTensors } from "./weights_reader.js";

/** @typedef {import("../core/host.js").ModelResponse} ModelResponse */

/**
 * What the model of a page adds to its values: the names of its inputs, and a function that sends requests. Empty if the
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
    const address = URL.createObjectURL(new Blob([read("model-engine")], { type: "text/javascript" }));
    worker = new Worker(address);
    worker.onmessage = ({ data: { id, body, blobs, error } }) => {
      const { resolve, reject } = waiting.get(id);
      waiting.delete(id);
      if (error) reject(new Error(error));
      else resolve({ body, blob: async (/** @type {number} */ n) => blobs[n] });
    };
    worker.onerror = () => {
      for (const { reject } of waiting.values()) reject(new Error("The model in this page could not be started. Open the page in a current browser."));
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
  const modelTensor = (/** @type {number} */ index) => (all ??= readTensors(tensors, decode(read("model-weights"))))[index];
  return { fields, request, model_note: describeRounding(precision, change, head), model_tensor: modelTensor };
}

/** @param {string} precision @param {number | null} change of the page's own output @param {string} head of the model */
function describeRounding(precision, change, head) {
  const outputs = head === "none" ? "numbers of the embedding" : "log-probabilities";
  const effect = change === null ? "" : ` Rounding them changed the ${outputs} on the original input by at most ${change.toPrecision(2)}.`;
  return `The model runs in this page, with ${precision} weights.${effect}`;
}
